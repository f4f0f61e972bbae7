"""What a driver calls: blocks and conditions, and masks of who goes which way.

Who goes a way is None for all examples, False for none, or a mask (B,). Those who do not go it run it all the same,
with the values of one who does (`enter`): they never compute what nobody asked for, so no NaN, no index out of range
and no division by zero comes from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch import blocks
from tdc.autobatch.merging import choose
from tdc.autobatch.values import (
    RESULT,
    UNDEFINED,
    Lane,
    as_lane,
    flatten,
    is_lane,
    is_tree,
    lane_of,
    like,
    map_leaves,
    no_condition,
    no_return,
    no_value,
    unflatten,
)
from tdc.compile._torch.total import traced_for_all
from tdc.compile._torch.tracing import before_operator
from tdc.compile.upstream import Code, copied, even_gradients, needs_grad, own_gradients
from tdc.core.asserts import require
from tdc.layout.segments import row_ids
from tdc.ragged.nested import NestedTensor

Mask = Any  # None, False, or a tensor
End = tuple[Mask, tuple[Any, ...]]


# -- values


def read(name: str, x: Any, line: int) -> Any:
    """The value of a name.

    Raises:
        StructureError: it has none.
    """
    if x is UNDEFINED:
        raise no_value(name, line)
    return x


def block(fn: Callable[..., Any], names: Sequence[str], args: Sequence[Any], line: int, n: int) -> Any:
    """What a block writes."""
    return blocks.run(fn, [read(name, x, line) for name, x in zip(names, args, strict=True)], n)


def guarded(
    fn: Callable[..., Any], names: Sequence[str], args: Sequence[Any], line: int, n: int, m: Mask, sure: bool
) -> Any:
    """`block`, which is not run where nobody comes: then there is no example whose values the others could have.

    Code that may run with any values does.
    """
    if sure or not isinstance(m, Tensor):
        return block(fn, names, args, line, n)
    outside, total = traced_for_all(block, fn, names, args, line, n)
    if total:
        return outside
    before_operator("cond")
    given = Packing([read(name, x, line) for name, x in zip(names, args, strict=True)])
    found = Packing(outside)
    tensors = found.tensors(outside)
    if not tensors:
        return outside
    ref = needs_grad(tensors)
    code = Code(ref, tensors)
    parts = [x for x in found.leaves if is_lane(x) or isinstance(x, Tensor)]
    mapped = [is_lane(x) for x in parts]
    shapes = [x.data.shape[1:] if is_lane(x) else x.shape for x in parts]

    def run(*all_given: Tensor) -> tuple[Tensor, ...]:
        *flat, mask = all_given
        own = given.values(even_gradients(flat))
        return tuple(code.encode(found.tensors(block(fn, names, own, line, mask.shape[0]))))

    def skip(*all_given: Tensor) -> tuple[Tensor, ...]:
        mask = all_given[-1]
        sizes = [(mask.shape[0], *s) if lane else s for lane, s in zip(mapped, shapes, strict=True)]
        zeros = [torch.zeros(s, dtype=x.dtype, device=mask.device) for s, x in zip(sizes, tensors, strict=True)]
        return tuple(code.encode(zeros))

    first, *others = [*given.tensors(list(args)), m]  # no two of which may share memory
    out = code.decode(torch.cond(m.any(), run, skip, (first.contiguous(), *[copied(x) for x in others])))
    return found.values(own_gradients(out, ref))


class Packing:
    """Values as a list of tensors, and back."""

    def __init__(self, values: Any) -> None:
        self.flat = type(values) is list and not any([is_tree(x) for x in values])  # which is faster to trace
        self.leaves, self.spec = (values, None) if self.flat else flatten(values)

    def tensors(self, values: Any) -> list[Tensor]:
        """The tensors of values of this form."""
        out: list[Tensor] = []
        for x in values if self.flat else flatten(values)[0]:
            data = x.data if type(x) is Lane else x
            if isinstance(data, Tensor):
                out.append(data)
        return out

    def values(self, tensors: Sequence[Tensor]) -> Any:
        """The values with other tensors."""
        rest, leaves = iter(tensors), []
        for x in self.leaves:
            if type(x) is Lane and isinstance(x.data, Tensor):
                leaves.append(lane_of(next(rest), x.number))
            else:
                leaves.append(next(rest) if isinstance(x, Tensor) else x)
        return leaves if self.flat else unflatten(leaves, self.spec)


def decide(found: Any, n: int, line: int) -> Any:
    """A condition: a bool where it is one of Python, or of a size, else a mask.

    Raises:
        ShapeError: a condition of several elements.
    """
    if not isinstance(found, (Lane, Tensor)):
        return True if found else False  # noqa: SIM210  # `bool` of a symbol is a symbol
    data = as_lane(found, n).data
    if not isinstance(data, Tensor) or any([size != 1 for size in data.shape[1:]]):
        raise no_condition(data, line)
    if data.ndim == 1 and data.dtype == torch.bool:
        return data
    return data.reshape(n).bool()


def check(found: Any, m: Mask, n: int, line: int, text: str) -> None:
    """An assertion for those who come to it."""
    test = decide(found, n, line)
    text = f"{text} (line {line})"
    if isinstance(test, bool):
        assert test or m is False, text
    elif m is not False:
        require((test if m is None else test | ~m).all(), text, AssertionError)


# -- masks


def count(m: Mask, n: Any) -> Any:
    """How many examples there are. Read from the mask inside of an operator, which takes no sizes from outside that
    torch has computed (torch 2.13)."""
    return m.shape[0] if isinstance(m, Tensor) else n


def split(m: Mask, test: Any) -> tuple[Mask, Mask]:
    """Those for whom a test holds, and the others. A test on sizes may be a symbol, which is no `True`."""
    if m is False:
        return False, False
    if not isinstance(test, Tensor):
        return (m, False) if test else (False, m)
    return (test, ~test) if m is None else (m & test, m & ~test)


def either(a: Mask, b: Mask) -> Mask:
    """Those of two ways."""
    if a is False or b is False:
        return b if a is False else a
    return None if a is None or b is None else a | b


def union(masks: Iterable[Mask]) -> Mask:
    """Those of several ways."""
    found: Mask = False
    for m in masks:
        found = either(found, m)
    return found


def enter(way: Mask, outer: Mask, values: Any, total: bool = False) -> Any:
    """Values in which those who do not go a way have those of the first who does.

    Args:
        total: whether the code there cannot fail, whatever they are: then only gradients could
            tell, which whole numbers have none of.
    """
    if way is None or way is False or way is outer or (total and not torch.is_grad_enabled()):
        return values
    first = first_true(way)

    def fill(x: Any) -> Any:
        if type(x) is not Lane:
            return x
        data = x.data
        if not isinstance(data, Tensor):
            return lane_of(rows_of_those(way, data)) if isinstance(data, NestedTensor) else x
        if total and not (data.is_floating_point() or data.is_complex()):
            return x
        return lane_of(torch.where(like(way, data), data, data.index_select(0, first)), x.number)

    if type(values) is not tuple:
        return map_leaves(fill, values)
    filled: list[Any] = []  # by a loop, which a graph is traced through faster
    for x in values:
        filled.append(fill(x) if type(x) is Lane else map_leaves(fill, x))
    return tuple(filled)


def first_true(mask: Tensor) -> Tensor:
    """The first position where a mask is true, (1,). Of uint8, Inductor's argmax may return one beyond (torch 2.13)."""
    return mask.to(torch.int32).argmax().reshape(1)


def rows_of_those(way: Tensor, x: NestedTensor) -> NestedTensor:
    """A ragged batch in which the rows of those who do not go a way are the first row of those who do, or zeros."""
    dim = x.structure.packed_dim
    values = x.values.movedim(dim, 0)
    live = way[row_ids(x.structure, values.shape[0])]
    found = torch.cat([values, values.new_zeros((1, *values.shape[1:]))])
    first = first_true(torch.cat([live, live.new_ones(1)]))
    return x.with_values(torch.where(like(live, values), values, found.index_select(0, first)).movedim(0, dim))


def meet(names: Sequence[str], ends: Sequence[End]) -> End:
    """Those who reach one statement, with the values that they have."""
    m, values = ends[0]
    for other, theirs in ends[1:]:
        mine = chosen(m, other)
        values = tuple([where(name, mine, a, b) for name, a, b in zip(names, values, theirs, strict=True)])
        m = either(m, other)
    return m, values


def joined(names: Sequence[str], m: Mask, test: Any, ends: Sequence[End]) -> tuple[Any, ...]:
    """The values behind a test of those who came to it, all of whom are here."""
    if len(ends) == 1:
        return ends[0][1]
    (a, yes), (b, no) = ends
    mine = test if m is None else chosen(a, b)
    return tuple([where(name, mine, x, y) for name, x, y in zip(names, yes, no, strict=True)])


def chosen(a: Tensor, b: Tensor) -> Tensor:
    """Who takes the values of way `a` where `a` and `b` meet: those of `a`, and who went neither, if any went `a`."""
    return ~b & a.any()


def where(name: str, mine: Tensor, a: Any, b: Any) -> Any:
    """The value of each example, from one of two ways."""
    if a is UNDEFINED or b is UNDEFINED:
        return b if a is UNDEFINED else a
    return choose(name, mine, a, b)


def finished(returns: list[End], ends: list[End]) -> Any:
    """What the examples return.

    Raises:
        StructureError: some get to the end of the function, others return a value.
    """
    if ends and any([values[0] is not None for _, values in returns]):
        raise no_return()
    whole = [*returns, *[(m, (None,)) for m, _ in ends]]
    return meet([RESULT], whole)[1][0]
