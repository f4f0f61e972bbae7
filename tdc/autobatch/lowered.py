"""What a driver calls: masks instead of parts of the batch, and loops that a graph can hold.

Who goes a way is None for all examples, False for none, or a mask (B,). Those who do not go it run it all the same,
with the values of one who does (`enter`): they never compute what nobody asked for, so no NaN, no index out of range
and no division by zero comes from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch import blocks
from tdc.autobatch.source import OP
from tdc.autobatch.values import NUMBERS, Lane, as_lane, flatten, is_lane, map_leaves, merge_forms, unflatten
from tdc.compile._torch.tracing import before_operator, trace_outside
from tdc.compile.upstream import Code, needs_grad
from tdc.core.asserts import require
from tdc.core.errors import ShapeError, StructureError, describe, message

Mask = Any  # None, False, or a tensor
End = tuple[Mask, tuple[Any, ...]]
RESULT = "the result"


class Undefined:
    """Stands for a name without a value."""

    def __repr__(self) -> str:
        return "no value"


UNDEFINED = Undefined()


# -- values


def read(name: str, x: Any) -> Any:
    """The value of a name.

    Raises:
        StructureError: it has none.
    """
    if x is UNDEFINED:
        hint = f"give {name} a value before the statement that may skip it"
        raise StructureError(message(OP, "names that have a value", f"{name!r}, which has none", hint=hint))
    return x


def block(fn: Callable[..., Any], n: int, names: Sequence[str], args: Sequence[Any]) -> Any:
    """What a block writes."""
    for name, x in zip(names, args, strict=True):
        read(name, x)
    return blocks.run(fn, args, n)


def guarded(fn: Callable[..., Any], n: int, names: Sequence[str], args: Sequence[Any], m: Mask, sure: bool) -> Any:
    """`block`, which is not run where nobody comes: then there is no example whose values the others could have."""
    if sure or not isinstance(m, Tensor):
        return block(fn, n, names, args)
    before_operator("cond")
    given, form = flatten(list(args))
    operands = tensors_in(given)
    leaves, spec = flatten(trace_outside(block, fn, n, names, args))
    tensors = tensors_in(leaves)
    if not tensors:
        return unflatten(leaves, spec)
    code = Code(needs_grad(tensors), tensors)
    found = [x for x in leaves if is_lane(x) or isinstance(x, Tensor)]
    likes = [
        (is_lane(x), x.data.shape[1:] if is_lane(x) else x.shape, y.dtype) for x, y in zip(found, tensors, strict=True)
    ]

    def run(mask: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        own = unflatten(with_tensors(given, [dense_gradient(x) for x in flat]), form)
        return tuple(code.encode(tensors_in(flatten(block(fn, mask.shape[0], names, own))[0])))

    def skip(mask: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        shapes = [(mask.shape[0], *shape) if mapped else shape for mapped, shape, _ in likes]
        zeros = [torch.zeros(s, dtype=like[2], device=mask.device) for s, like in zip(shapes, likes, strict=True)]
        return tuple(code.encode(zeros))

    out = code.decode(torch.cond(m.any(), run, skip, (m, *operands)))
    return unflatten(with_tensors(leaves, out), spec)


def with_tensors(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """Leaves with other tensors."""
    rest = iter(tensors)
    return [Lane(next(rest), x.number) if is_lane(x) else next(rest) if isinstance(x, Tensor) else x for x in leaves]


def dense_gradient(x: Tensor) -> Tensor:
    """The same numbers; the gradient has no strides of 0, which the gradient of `torch.cond` does not take."""
    return x * 1 if x.is_floating_point() else x


def tensors_in(leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors among leaves, and those of lanes."""
    return [x.data if is_lane(x) else x for x in leaves if is_lane(x) or isinstance(x, Tensor)]


def decide(found: Any, n: int, line: int) -> Any:
    """A condition: a bool where it is one of Python, else a mask.

    Raises:
        ShapeError: a condition of several elements.
    """
    if not isinstance(found, (Lane, Tensor)):
        return bool(found)
    data = as_lane(found, n).data
    if not isinstance(data, Tensor) or any([size != 1 for size in data.shape[1:]]):
        got = f"{describe(found.data if isinstance(found, Lane) else found)} at line {line}"
        hint = "x.any(), x.all(), or torch.where"
        raise ShapeError(message(OP, "a condition of one element for each example", got, hint=hint))
    return data.reshape(n).bool()


# -- masks


def count(m: Mask, n: Any) -> Any:
    """How many examples there are. Read from the mask inside of an operator, which takes no sizes from outside that
    torch has computed (torch 2.13)."""
    return m.shape[0] if isinstance(m, Tensor) else n


def split(m: Mask, test: Any) -> tuple[Mask, Mask]:
    """Those for whom a test holds, and the others."""
    if isinstance(test, bool) or m is False:
        return (m, False) if test is True else (False, m)
    return (test, ~test) if m is None else (m & test, m & ~test)


def either(a: Mask, b: Mask) -> Mask:
    """Those of two ways."""
    if a is False or b is False:
        return b if a is False else a
    return None if a is None or b is None else a | b


def enter(way: Mask, outer: Mask, values: Any) -> Any:
    """Values in which those who do not go a way have those of the first who does."""
    if way is None or way is False or way is outer:
        return values
    first = way.to(torch.uint8).argmax().reshape(1)

    def fill(x: Any) -> Any:
        if type(x) is not Lane or not isinstance(x.data, Tensor):
            return x
        here = way.reshape(-1, *[1] * (x.data.ndim - 1))
        return Lane(torch.where(here, x.data, x.data.index_select(0, first)), x.number)

    return map_leaves(fill, values)


def meet(names: Sequence[str], ends: Sequence[End]) -> End:
    """Those who reach one statement, with the values that they have."""
    m, values = ends[0]
    for other, theirs in ends[1:]:
        mine = chosen(m, other)
        values = tuple([where(name, mine, a, b) for name, a, b in zip(names, values, theirs, strict=True)])
        m = either(m, other)
    return m, values


def chosen(a: Tensor, b: Tensor) -> Tensor:
    """Who takes the values of way `a` where `a` and `b` meet: those of `a`, and who went neither, if any went `a`."""
    return ~b & a.any()


def where(name: str, mine: Tensor, a: Any, b: Any) -> Any:
    """The value of each example, from one of two ways."""
    if a is UNDEFINED or b is UNDEFINED:
        return b if a is UNDEFINED else a
    n = mine.shape[0]

    def pick(x: Any, y: Any, dtype: torch.dtype, number: bool) -> Lane:
        x, y = as_lane(x, n).data.to(dtype), as_lane(y, n).data.to(dtype)
        return Lane(torch.where(mine.reshape(-1, *[1] * (x.ndim - 1)), x, y), number)

    return merge_forms(name, a, b, pick)


def check(found: Any, m: Mask, n: int, line: int, text: str) -> None:
    """An assertion for those who come to it."""
    test = decide(found, n, line)
    text = f"{text} (line {line})"
    if isinstance(test, bool):
        assert test or m is False, text
    elif m is not False:
        require((test if m is None else test | ~m).all(), text, AssertionError)


def finished(returns: list[End], ends: list[End]) -> Any:
    """What the examples return.

    Raises:
        StructureError: some get to the end of the function, others return a value.
    """
    if ends and any([values[0] is not None for _, values in returns]):
        got, hint = "some that reach the end of the function", "return a value on each way through it"
        raise StructureError(message(OP, "examples that all return a value", got, hint=hint))
    whole = [*returns, *[(m, (None,)) for m, _ in ends]]
    return meet([RESULT], whole)[1][0]


# -- rounds of a loop

State = tuple[Mask, Mask, Mask, Mask, Any, tuple[Any, ...]]  # active, left, broke, returned, what, carry


def finish(
    names: tuple[str, ...], m: Mask, old: tuple[Any, ...], goes_on: list[End], broke: list[End], returns: list[End],
    going: Mask, left: Mask, walks: bool,
) -> State:  # fmt: skip
    """The state behind a round of those in `m`; whoever is not in it keeps what he has."""
    ends = [*goes_on, *broke]
    carry = old
    if ends:
        moved, new = meet(names, ends)
        pairs = zip(names, new, old, strict=True)
        carry = new if moved is None else tuple([where(name, moved, a, b) for name, a, b in pairs])
    out, value = meet([RESULT], returns) if returns else (False, (UNDEFINED,))
    return (union(goes_on) if walks else going), left, union(broke), out, value[0], carry


def union(ends: Sequence[End]) -> Mask:
    m: Mask = False
    for other, _ in ends:
        m = either(m, other)
    return m


def followed(before: State, now: State) -> State:
    """The state after a round, when others left, broke off or returned in rounds before."""
    value = now[4]
    if before[3] is not False and now[3] is not False:
        value = where(RESULT, now[3], value, before[4])
    elif now[3] is False:
        value = before[4]
    gone = [either(a, b) for a, b in zip(before[1:4], now[1:4], strict=True)]
    return (now[0], gone[0], gone[1], gone[2], value, now[5])


# -- states as tensors


def form_of(tree: Any) -> list[Any]:
    """What a state is but for numbers: of each leaf dtype and shape, or itself."""
    return [(x.data.dtype, x.data.shape[1:], x.number) if type(x) is Lane else x for x in flatten(tree)[0]]


def fitted(names: Sequence[str], before: Sequence[Any], after: Sequence[Any], n: int) -> list[Any]:
    """Values before a round in the form that they have behind it."""

    def pick(x: Any, y: Any, dtype: torch.dtype, number: bool) -> Lane:
        return Lane(as_lane(x, n).data.to(dtype), number)

    return [
        zeros(b, n) if a is UNDEFINED else a if b is UNDEFINED else merge_forms(name, a, b, pick)
        for name, a, b in zip(names, before, after, strict=True)
    ]


def promoted(x: Any, n: int) -> Any:
    """A value of a loop: tensors and numbers as lanes, since examples leave it with their own."""
    return map_leaves(lambda leaf: as_lane(leaf, n) if isinstance(leaf, (Tensor, *NUMBERS)) else leaf, x)


def zeros(like: Any, n: int) -> Any:
    """What stands for no value in a loop: nobody reads it."""

    def zero(x: Any) -> Any:
        return Lane(torch.zeros_like(x.data), x.number) if type(x) is Lane else x

    return map_leaves(zero, promoted(like, n))


def as_mask(m: Mask, n: int, device: Any) -> Tensor:
    """A mask as a tensor."""
    if isinstance(m, Tensor):
        return m
    return torch.full((n,), m is None, dtype=torch.bool, device=device)


class Packing:
    """Values as a list of tensors, and back."""

    def __init__(self, values: Any) -> None:
        self.leaves, self.spec = flatten(values)

    def tensors(self, values: Any) -> list[Tensor]:
        return [x.data for x in flatten(values)[0] if type(x) is Lane]

    def values(self, tensors: Sequence[Tensor]) -> Any:
        rest = iter(tensors)
        leaves = [Lane(next(rest), x.number) if type(x) is Lane else x for x in self.leaves]
        return unflatten(leaves, self.spec)
