"""The runtime of a driver: blocks, conditions, masks of active examples, and values that loops of a graph carry.

A mask is None for all examples, False for none, or a tensor (B,). Inactive examples run a branch, too, on the values of
the first active one (`enter`), so that they raise no error and make no NaN.

A loop in a graph holds tensors of fixed dtypes and shapes: `stable` runs a round until its values keep one form.
Numbers become tensors there, and names without a value begin as zeros that are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch import blocks
from tdc.autobatch.lists import in_loop
from tdc.autobatch.merging import both_plain, by_leaves, choose, combine, same_lengths
from tdc.autobatch.source import OP
from tdc.autobatch.values import (
    NUMBERS,
    RESULT,
    UNDEFINED,
    Lane,
    as_lane,
    flatten,
    is_lane,
    lane_of,
    like,
    map_leaves,
    no_condition,
    no_return,
    no_value,
    unflatten,
)  # fmt: skip
from tdc.compile._torch.total import traced_for_all
from tdc.compile._torch.tracing import before_operator, trace_outside
from tdc.compile.upstream import Code, copied, even_gradients, needs_grad, own_gradients
from tdc.core.asserts import require
from tdc.core.dynamo import is_symbol, known
from tdc.core.errors import StructureError, message
from tdc.layout.segments import row_ids
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import data_of, is_ragged, with_data

Mask = Any  # None, False, or a tensor
End = tuple[Mask, tuple[Any, ...]]
ROUNDS = 6  # at most, until the form of a state stays the same
State = tuple[Mask, Mask, Mask, Mask, Any, tuple[Any, ...]]  # active, left, broke, returned, result, carry
Round = tuple[Mask, Mask, Mask, Mask, Any, tuple[Any, ...], Mask]  # the same, and whose values of the carry are new


# -- blocks and conditions


def read(name: str, x: Any, line: int) -> Any:
    """The value of a name, or StructureError for UNDEFINED."""
    if x is UNDEFINED:
        raise no_value(name, line)
    return x


def block(fn: Callable[..., Any], names: Sequence[str], args: Sequence[Any], line: int, n: int) -> Any:
    """The values that a block assigns."""
    for name, x in zip(names, args, strict=True):
        if x is UNDEFINED:
            raise no_value(name, line)
    return blocks.run(fn, args, n)


def guarded(
    fn: Callable[..., Any], names: Sequence[str], args: Sequence[Any], line: int, n: int, m: Mask, sure: bool
) -> Any:
    """`block`, in a `cond` that skips it where no example is active; without one for code that cannot fail."""
    if sure or not isinstance(m, Tensor):
        return block(fn, names, args, line, n)
    outside, total = traced_for_all(block, fn, names, args, line, n)
    if total:
        return outside
    before_operator("cond")
    args = [of_each(x, n, m.device) for x in args]
    (given, form), (found, form_out) = flatten([*args]), flatten(outside)
    tensors = tensors_of(found)
    if not tensors:
        return outside
    ref = needs_grad(tensors)
    code = Code(ref, tensors)
    lanes = [type(x) is Lane for x in found if isinstance(content(x), Tensor)]
    kinds = [(lane, t.shape[1:] if lane else t.shape, t.dtype) for lane, t in zip(lanes, tensors, strict=True)]

    def run(*all_given: Tensor) -> tuple[Tensor, ...]:
        *flat, mask = all_given
        own = unflatten(with_tensors(given, even_gradients(flat)), form)
        return tuple(code.encode(tensors_of(flatten(block(fn, names, own, line, mask.shape[0]))[0])))

    def skip(*all_given: Tensor) -> tuple[Tensor, ...]:
        mask = all_given[-1]
        sizes = [((mask.shape[0], *shape) if lane else shape, dtype) for lane, shape, dtype in kinds]
        return tuple(code.encode([torch.zeros(size, dtype=dtype, device=mask.device) for size, dtype in sizes]))

    first, *others = [*tensors_of(given), m]  # in memory of their own
    out = code.decode(torch.cond(m.any(), run, skip, (first.contiguous(), *[copied(x) for x in others])))
    return unflatten(with_tensors(found, own_gradients(out, ref)), form_out)


def content(x: Any) -> Any:
    """The data of a leaf, of all examples."""
    return x.data if type(x) is Lane else x


def of_each(x: Any, n: int, device: Any) -> Any:
    """A float that varies as a number of each example: an operator takes no such float (torch 2.11-2.15)."""
    if not isinstance(x, float) or not is_symbol(x):
        return x
    return lane_of(torch.full((n,), x, dtype=torch.float64, device=device), True)


def tensors_of(leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors among leaves."""
    return [data for data in [content(x) for x in leaves] if isinstance(data, Tensor)]


def with_tensors(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """Leaves with other tensors."""
    left = iter(tensors)
    return [renewed(x, next(left)) if isinstance(content(x), Tensor) else x for x in leaves]


def carried(leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors of leaves that a loop carries: of a ragged batch its elements; its structure stays outside."""
    every = [content(x) for x in leaves]
    return [data_of(data) if is_ragged(data) else data for data in every if isinstance(data, Tensor) or is_ragged(data)]


def with_carried(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """Leaves that a loop carries with other tensors."""
    left = iter(tensors)
    every = [(x, content(x)) for x in leaves]
    return [renewed(x, next(left)) if isinstance(data, Tensor) or is_ragged(data) else x for x, data in every]


def renewed(x: Any, tensor: Tensor) -> Any:
    """A leaf with another tensor, of a ragged batch its elements."""
    data = content(x)
    new = tensor if isinstance(data, Tensor) else with_data(data, tensor)
    return lane_of(new, x.number) if type(x) is Lane else new


def decide(found: Any, n: int, line: int) -> Any:
    """A condition: a bool where it is one of Python, or of a size, else a mask.

    Raises:
        ShapeError: a condition of several elements.
    """
    if not isinstance(found, (Lane, Tensor)):
        return True if found else False  # noqa: SIM210  # `bool` of a symbol is a symbol
    data = found.data if type(found) is Lane else as_lane(found, n).data
    if not isinstance(data, Tensor):
        raise no_condition(data, line)
    if data.ndim == 1 and data.dtype == torch.bool:
        return data
    if any([size != 1 for size in data.shape[1:]]):
        raise no_condition(data, line)
    return data.reshape(n).bool()


def check(found: Any, m: Mask, n: int, line: int, text: str) -> None:
    """An assertion for the active examples."""
    test = decide(found, n, line)
    text = f"{text} (line {line})"
    if isinstance(test, bool):
        assert test or m is False, text
    elif m is not False:
        require((test if m is None else test | ~m).all(), text, AssertionError)


# -- masks


def count(m: Mask, n: Any) -> Any:
    """The number of examples; in an operator that of its mask, since no computed size enters one (torch 2.13)."""
    return m.shape[0] if isinstance(m, Tensor) else n


def split(m: Mask, test: Any) -> tuple[Mask, Mask]:
    """The active examples for which a test holds, and the others. A test on sizes may be a symbol."""
    if m is False:
        return False, False
    if not isinstance(test, Tensor):
        return (m, False) if test else (False, m)
    return (test, ~test) if m is None else (m & test, m & ~test)


def either(a: Mask, b: Mask) -> Mask:
    """The union of two masks."""
    if a is False or b is False:
        return b if a is False else a
    return None if a is None or b is None else a | b


def union(masks: Iterable[Mask]) -> Mask:
    """The union of several masks."""
    found: Mask = False
    for m in masks:
        found = either(found, m)
    return found


def as_mask(m: Mask, n: int, device: Any) -> Tensor:
    """A mask as a tensor."""
    return m if isinstance(m, Tensor) else torch.full((n,), m is None, dtype=torch.bool, device=device)


def enter(way: Mask, outer: Mask, values: Any, total: bool = False) -> Any:
    """Values in which inactive examples have those of the first active one.

    Args:
        total: the code there cannot fail for any values; then only gradients need them, and integers have none.
    """
    if way is None or way is False or way is outer or (total and not torch.is_grad_enabled()):
        return values
    leaves, form = flatten(values)
    filled: list[Any] = []
    first: Any = None
    for x in leaves:
        data = x.data if type(x) is Lane else None
        if data is None or (total and isinstance(data, Tensor) and not (data.is_floating_point() or data.is_complex())):
            filled.append(x)
        elif isinstance(data, Tensor):
            first = first_true(way) if first is None else first
            here = way if data.ndim == 1 else way.reshape(-1, *[1] * (data.ndim - 1))
            filled.append(lane_of(torch.where(here, data, data.index_select(0, first)), x.number))
        else:
            filled.append(lane_of(filled_rows(way, data)) if isinstance(data, NestedTensor) else x)
    return unflatten(filled, form)


def first_true(mask: Tensor) -> Tensor:
    """The first position where a mask is true, (1,). Of uint8, Inductor's argmax may return one beyond (torch 2.13)."""
    return mask.to(torch.int32).argmax().reshape(1)


def filled_rows(way: Tensor, x: NestedTensor) -> NestedTensor:
    """A ragged batch in which rows of inactive examples are the first active row, or zeros."""
    dim = x.structure.packed_dim
    values = x.values.movedim(dim, 0)
    live = way[row_ids(x.structure, values.shape[0])]
    found = torch.cat([values, values.new_zeros((1, *values.shape[1:]))])
    first = first_true(torch.cat([live, live.new_ones(1)]))
    return x.with_values(torch.where(like(live, values), values, found.index_select(0, first)).movedim(0, dim))


def meet(names: Sequence[str], ends: Sequence[End]) -> End:
    """The examples that reach one statement, with their values."""
    m, values = ends[0]
    for other, theirs in ends[1:]:
        values = picked(names, chosen(m, other), values, theirs)
        m = either(m, other)
    return m, values


def joined(names: Sequence[str], m: Mask, test: Any, ends: Sequence[End]) -> tuple[Any, ...]:
    """The values after a branch that no example leaves early."""
    if len(ends) == 1:
        return ends[0][1]
    (a, yes), (b, no) = ends
    return picked(names, test if m is None else chosen(a, b), yes, no)


def chosen(a: Tensor, b: Tensor) -> Tensor:
    """A mask of the examples with the values of `a` where masks `a` and `b` meet: also those in neither, if `a` has
    any."""
    return ~b & a.any()


def picked(names: Sequence[str], mine: Tensor, a: Sequence[Any], b: Sequence[Any]) -> tuple[Any, ...]:
    """The values of each example: those of `a` where a mask is true, else those of `b`."""
    pairs = zip(names, a, b, strict=True)
    return tuple([y if x is UNDEFINED else x if y is UNDEFINED else choose(name, mine, x, y) for name, x, y in pairs])


def finished(returns: list[End], ends: list[End]) -> Any:
    """The results of the examples.

    Raises:
        StructureError: some get to the end of the function, others return a value.
    """
    if ends and any([values[0] is not None for _, values in returns]):
        raise no_return()
    whole = [*returns, *[(m, (None,)) for m, _ in ends]]
    return meet([RESULT], whole)[1][0]


# -- rounds of a loop


def finish(
    names: tuple[str, ...], old: tuple[Any, ...], ends: list[End], going: Mask, left: Mask, broke: Mask,
    returns: list[End],
) -> Round:  # fmt: skip
    """The outcome of a round; `ends` has the examples that have not returned."""
    moved, carry = meet(names, ends) if ends else (False, old)
    out, value = meet([RESULT], returns) if returns else (False, (UNDEFINED,))
    return going, left, broke, out, value[0], carry, moved


def followed(names: tuple[str, ...], before: State, now: Round, alone: bool = True) -> State:
    """The state after a round, where other examples left, broke off or returned before it.

    Args:
        alone: all other examples are among these; else some may wait in inner loops.
    """
    value, moved = now[4], now[6]
    if now[3] is False:
        value = before[4]
    elif before[3] is not False:
        value = picked([RESULT], now[3], [value], [before[4]])[0]
    unmixed = alone and before[1] is False and before[2] is False
    carry = now[5] if unmixed else kept(names, moved, now[5], before[5])
    return (now[0], either(before[1], now[1]), either(before[2], now[2]), either(before[3], now[3]), value, carry)


def kept(names: Sequence[str], moved: Mask, new: Sequence[Any], old: Sequence[Any]) -> tuple[Any, ...]:
    """The new values of examples that have some, and the old ones of the others."""
    if moved is False:
        return tuple(old)
    if moved is None:
        return tuple([b if a is UNDEFINED else a for a, b in zip(new, old, strict=True)])
    return picked(names, moved, new, old)


def stable(
    step: Callable[..., Any], keys: Sequence[str], values: list[Any], n: int, line: int
) -> tuple[list[Any], Any, bool]:
    """Values in a form that a round keeps, the outcome of a round, and True if that is of this form as it is.

    Args:
        step: `(values, inside) -> (inside, most, ..., values)`; `inside` are the inner loops that examples wait in,
            `most` is a bound on the number of rounds, or None.

    Raises:
        StructureError: their form changes with each round.
    """
    values, inside = [x if x is UNDEFINED else begun(x, n) for x in values], ()
    changed: list[str] = []
    before_operator("while_loop")
    for _ in range(ROUNDS):
        found = trace_outside(step, values, inside)
        pairs = zip(keys, values, found[-1], strict=True)
        values = [in_loop(name, before, after, n, found[1]) for name, before, after in pairs]
        now = fitted(keys, values, found[-1], n)
        changed, own = [], True
        for name, x, y, new in zip(keys, values, now, found[-1], strict=True):
            alike = type(x) is Lane and x is y  # Dynamo does not compare trees so (torch 2.13)
            if not (x is UNDEFINED or alike or known(same_form(x, new if is_packed(new) else y))):
                changed.append(name)
            own = own and (y is UNDEFINED or (alike and new is not UNDEFINED))
        if found[0] == inside and not changed:
            return now, found, own
        values, inside = now, found[0]
    got = f"{', '.join(changed) or 'a value'}, whose lengths, shape or dtype change with each round at line {line}"
    hint = "tdc.batch(lower='unroll', max_iters=...) runs round by round; or collect results in a tensor of fixed size"
    raise StructureError(message(OP, "values of one form in a loop of a graph", got, hint=hint))


def is_packed(x: Any) -> bool:
    """True of a leaf that is a ragged batch."""
    return type(x) is Lane and is_ragged(x.data)


def same_form(x: Any, y: Any) -> bool:
    """True of values that have one form in a loop: dtype and shape of each tensor, lengths of each ragged batch, and
    other leaves."""
    if is_packed(x) and is_packed(y):
        return x.data.dtype is y.data.dtype and same_lengths(x.data, y.data)
    return form_of(x) == form_of(y)


def form_of(tree: Any) -> list[Any]:
    """The form of a value in a loop: dtype and shape of each tensor, and other leaves."""
    return [(x.data.dtype, x.data.shape[1:], x.number) if is_lane(x) else x for x in flatten(tree)[0]]


def fitted(names: Sequence[str], before: Sequence[Any], after: Sequence[Any], n: int) -> list[Any]:
    """Values before a round in the form that they have after it."""
    out: list[Any] = []
    for name, a, b in zip(names, before, after, strict=True):
        if b is UNDEFINED or both_plain(a, b):
            out.append(a)
        elif a is UNDEFINED:
            out.append(map_leaves(lambda y: zeros(promoted(y, n)), b))
        else:
            out.append(by_leaves(name, [a, b], [n, n], as_first))
    return out


def as_first(name: str, leaves: Sequence[Any], counts: Sequence[Any]) -> Any:
    """The first of two leaves in the form of both."""
    return combine(name, leaves, counts, lambda parts, dtype: parts[0].to(dtype), one_batch=True)


def promoted(x: Any, n: int) -> Any:
    """A leaf that a loop carries: tensors and numbers as lanes, integers without a mark that they are numbers."""
    if not isinstance(x, (Lane, Tensor, *NUMBERS)):
        return x
    found = as_lane(x, n)
    return lane_of(found.data) if found.number and not found.data.is_floating_point() else found


def zeros(x: Any) -> Any:
    """Zeros in place of a missing value, which are never read."""
    return lane_of(torch.zeros_like(x.data), x.number) if type(x) is Lane else x


def begun(x: Any, n: int) -> Any:
    """A value before the first round: promoted, in memory of its own."""
    return map_leaves(lambda leaf: apart(promoted(leaf, n)), x)


def apart(x: Any) -> Any:
    """A leaf in memory of its own: an operator takes no two tensors that share it."""
    if is_packed(x):
        return lane_of(with_data(x.data, copied(data_of(x.data))))
    return lane_of(copied(x.data), x.number) if is_lane(x) else copied(x) if isinstance(x, Tensor) else x
