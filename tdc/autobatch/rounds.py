"""The rounds of a loop of a driver: the state between two of them, and its values in a form that rounds keep.

A loop in a graph holds tensors of fixed dtypes and shapes. So `stable` runs a round until its values stay in one form:
numbers become tensors, and what has no value before the first round begins as zeros that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch.lists import in_loop
from tdc.autobatch.lowered import End, Mask, either, meet, where
from tdc.autobatch.merging import both_plain, by_leaves, combine
from tdc.autobatch.source import OP
from tdc.autobatch.values import NUMBERS, RESULT, UNDEFINED, Lane, as_lane, flatten, is_lane, lane_of, map_leaves
from tdc.compile._torch.tracing import before_operator, trace_outside
from tdc.compile.upstream import copied
from tdc.core.errors import StructureError, message

ROUNDS = 6  # at most, until the form of a state stays the same
State = tuple[Mask, Mask, Mask, Mask, Any, tuple[Any, ...]]  # active, left, broke, returned, what, carry
Round = tuple[Mask, Mask, Mask, Mask, Any, tuple[Any, ...], Mask]  # the same, and whose values of the carry are new


def finish(
    names: tuple[str, ...], old: tuple[Any, ...], ends: list[End], going: Mask, left: Mask, broke: Mask,
    returns: list[End],
) -> Round:  # fmt: skip
    """What a round makes of a state; `ends` has all who are still in the function."""
    moved, carry = meet(names, ends) if ends else (False, old)
    out, value = meet([RESULT], returns) if returns else (False, (UNDEFINED,))
    return going, left, broke, out, value[0], carry, moved


def followed(names: tuple[str, ...], before: State, now: Round, alone: bool = True) -> State:
    """The state after a round, when others left, broke off or returned in rounds before.

    Args:
        alone: whether all others are known to be among these; else some may wait in inner loops.
    """
    value, moved = now[4], now[6]
    if before[3] is not False and now[3] is not False:
        value = where(RESULT, now[3], value, before[4])
    elif now[3] is False:
        value = before[4]
    nobody_else = alone and before[1] is False and before[2] is False
    carry = now[5] if nobody_else else kept(names, moved, now[5], before[5])
    gone = [either(a, b) for a, b in zip(before[1:4], now[1:4], strict=True)]
    return (now[0], gone[0], gone[1], gone[2], value, carry)


def kept(names: Sequence[str], moved: Mask, new: Sequence[Any], old: Sequence[Any]) -> tuple[Any, ...]:
    """The new values of those whose values are new, and the old ones of the others."""
    if moved is False:
        return tuple(old)
    if moved is None:
        return tuple([b if a is UNDEFINED else a for a, b in zip(new, old, strict=True)])
    return tuple([where(name, moved, a, b) for name, a, b in zip(names, new, old, strict=True)])


# -- values of one form


def stable(step: Callable[..., Any], keys: Sequence[str], values: list[Any], n: int) -> tuple[list[Any], Any, bool]:
    """Values in a form that a round keeps, what it makes of them, and whether it gives all of them this form itself.

    Args:
        step: `(values, inside) -> (inside, most, ..., values)`; `inside` are the loops in it that examples stay in,
            `most` is how many rounds there are at most, None if that is not known.

    Raises:
        StructureError: their form changes with each round.
    """
    values, inside = [x if x is UNDEFINED else begun(x, n) for x in values], ()
    before_operator("while_loop")
    for _ in range(ROUNDS):
        found = trace_outside(step, values, inside)
        pairs = zip(keys, values, found[-1], strict=True)
        values = [in_loop(name, before, after, n, found[1]) for name, before, after in pairs]
        now = fitted(keys, values, found[-1], n)
        kept = [x is UNDEFINED or same_lane(x, y) or form_of(x) == form_of(y) for x, y in zip(values, now, strict=True)]
        if all(kept) and found[0] == inside:
            triples = zip(values, now, found[-1], strict=True)
            own = [y is UNDEFINED or (same_lane(x, y) and new is not UNDEFINED) for x, y, new in triples]
            return now, found, all(own)
        values, inside = now, found[0]
    got, hint = "one that changes with each round", "keep shapes and dtypes; collect results in a tensor of fixed size"
    raise StructureError(message(OP, "values of one form in a loop", got, hint=hint))


def same_lane(x: Any, y: Any) -> bool:
    """Whether two values are one object that each example has for itself; Dynamo does not ask it of trees (2.13)."""
    return type(x) is Lane and x is y


def form_of(tree: Any) -> list[Any]:
    """What a value is but for numbers: of each leaf dtype and shape, or itself."""
    return [(x.data.dtype, x.data.shape[1:], x.number) if is_lane(x) else x for x in flatten(tree)[0]]


def fitted(names: Sequence[str], before: Sequence[Any], after: Sequence[Any], n: int) -> list[Any]:
    """Values before a round in the form that they have behind it."""
    return [fitting(name, a, b, n) for name, a, b in zip(names, before, after, strict=True)]


def fitting(name: str, a: Any, b: Any, n: int) -> Any:
    """One value `a` in the form of `b`."""
    if b is UNDEFINED or both_plain(a, b):
        return a
    if a is UNDEFINED:
        return zeros(b, n)
    return by_leaves(name, [a, b], [n, n], lambda leaves: combine(name, leaves, [n, n], first, one_batch=True))


def first(parts: Sequence[Any], dtype: Any) -> Any:
    return parts[0].to(dtype)


def promoted(x: Any, n: int) -> Any:
    """A value of a loop: tensors and numbers as lanes, since examples leave it with their own. Whole numbers become
    tensors at once, as what is computed of them does."""

    return map_leaves(lambda leaf: promoted_leaf(leaf, n), x)


def promoted_leaf(x: Any, n: int) -> Any:
    """`promoted` of a leaf."""
    if not isinstance(x, (Lane, Tensor, *NUMBERS)):
        return x
    found = as_lane(x, n)
    return lane_of(found.data) if found.number and not found.data.is_floating_point() else found


def begun(x: Any, n: int) -> Any:
    """A value before the first round: promoted, in memory of its own."""
    if is_lane(x) and not x.number:
        return lane_of(copied(x.data))
    return map_leaves(lambda leaf: apart_leaf(promoted_leaf(leaf, n)), x)


def zeros(x: Any, n: int) -> Any:
    """What stands for no value in a loop: nobody reads it."""
    return map_leaves(lambda y: lane_of(torch.zeros_like(y.data), y.number) if is_lane(y) else y, promoted(x, n))


def apart(values: Any) -> Any:
    """Values in memory of their own: an operator takes no two tensors that share it."""

    return map_leaves(apart_leaf, values)


def apart_leaf(x: Any) -> Any:
    """`apart` of a leaf."""
    return lane_of(copied(x.data), x.number) if is_lane(x) else copied(x) if isinstance(x, Tensor) else x


def as_mask(m: Mask, n: int, device: Any) -> Tensor:
    """A mask as a tensor."""
    return m if isinstance(m, Tensor) else torch.full((n,), m is None, dtype=torch.bool, device=device)
