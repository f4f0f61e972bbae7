"""The loops of a driver: unrolled, or as `while_loop` and `scan`, which a graph holds as one operation.

A loop whose test is a Python bool, or that walks along a Python iterable, runs round by round while it is traced, as
torch.compile would run it. Any other is one operation of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch.lowered import (
    RESULT,
    UNDEFINED,
    Mask,
    Packing,
    State,
    as_mask,
    either,
    fitted,
    followed,
    form_of,
    promoted,
    split,
)
from tdc.autobatch.traced_walks import Walked
from tdc.autobatch.values import Lane, is_lane, map_leaves
from tdc.compile._torch.tracing import before_operator, trace_outside
from tdc.compile.carries import split as split_tree
from tdc.compile.control_flow import repeat_in_graph
from tdc.compile.loops import Steps, scan_in_graph
from tdc.compile.upstream import copied
from tdc.core.asserts import require
from tdc.core.errors import StructureError, message

Round = Callable[[Any, Any, Any, Any, bool], State]  # who, carry, fixed, item, whether somebody is there for sure
ROUNDS = 4  # at most, until the form of a state stays the same
UNROLLED = 32  # rounds that a training step unrolls rather than loops


@dataclass(frozen=True)
class Options:
    """How loops are lowered: "auto", "while" or "unroll", and how many rounds a `while` has at most."""

    lower: str = "auto"
    max_iters: int | None = None

    def unrolls(self) -> bool:
        few = self.max_iters is not None and self.max_iters <= UNROLLED and torch.is_grad_enabled()
        return self.lower == "unroll" or (self.lower == "auto" and few)


OPTIONS = Options()
Out = tuple[Mask, Mask, Mask, Any, tuple[Any, ...]]  # left, broke, returned, what, carry


def repeat(
    round: Round, names: tuple[str, ...], active: Mask, left: Mask, carry: Any, fixed: Any, n: int, options: Options
) -> Out:
    """A `while`: rounds of those for whom the test held."""
    state: State = (active, left, False, False, UNDEFINED, carry)
    fixed_test = not isinstance(active, Tensor)
    while fixed_test and state[0] is not False and not isinstance(state[0], Tensor):
        state = followed(state, round(state[0], state[5], fixed, None, True))
    if state[0] is False:
        return state[1:]
    if options.unrolls():
        return unrolled(round, state, fixed, options.max_iters)
    return in_graph(round, names, state, fixed, n)


def unrolled(round: Round, state: State, fixed: Any, most: int | None) -> Out:
    """So many rounds, after which nobody may be left."""
    if most is None:
        got, hint = "lower='unroll' without it", "tdc.batch(max_iters=...), how often the loop runs at most"
        raise StructureError(message("batch", "max_iters", got, hint=hint))
    for _ in range(most):
        if state[0] is False:
            return state[1:]
        state = followed(state, round(state[0], state[5], fixed, None, False))
    if isinstance(state[0], Tensor):
        expected, got = f"a loop of at most max_iters={most} rounds", "examples that go on"
        require(~state[0].any(), message("batch", expected, got, hint="raise max_iters"))
    return state[1:]


def in_graph(round: Round, names: tuple[str, ...], state: State, fixed: Any, n: int, item: Any = None) -> Out:
    """Rounds as one `while_loop`; `item` gives those of a walk, by the number of the round."""
    device = state[0].device
    fixed = apart(fixed)
    masks = [as_mask(m, n, device) for m in state[:4]]
    keys = (RESULT, *names)
    walks = item is not None

    def step(counter: Tensor, masks: list[Tensor], values: list[Any]) -> tuple[list[Any], list[Any]]:
        n = masks[0].shape[0]
        before: State = (masks[0], masks[1], masks[2], masks[3], values[0], tuple(values[1:]))
        now = round(masks[0], before[5], fixed, item.at(counter) if walks else None, True)
        if walks:
            going, done = split(now[0], item.has(counter + 1, n))
            now = (going, done, *now[2:])
        out = followed(before, now)
        return [as_mask(m, n, device) for m in out[:4]], [out[4], *out[5]]

    counter = torch.zeros((), dtype=torch.long, device=device)
    values, after = stable(lambda v: step(counter, masks, v), keys, [state[4], *state[5]], n)
    packing = Packing(values)

    def body(flat: Sequence[Tensor]) -> list[Tensor]:
        now, found = step(flat[0], list(flat[1:5]), packing.values(flat[5:]))
        return [flat[0] + 1, *now, *packing.tensors(fitted(keys, found, values, flat[1].shape[0]))]

    traced = [counter + 1, *after[0], *packing.tensors(fitted(keys, after[1], values, n))]
    end = repeat_in_graph(lambda flat: flat[1].any(), body, [counter, *masks, *packing.tensors(values)], traced)
    found = packing.values(end[5:])
    return end[2], end[3], end[4] if found[0] is not UNDEFINED else False, found[0], tuple(found[1:])


def apart(values: Any) -> Any:
    """Values in memory of their own: an operator takes no two tensors that share it."""
    return map_leaves(lambda x: Lane(copied(x.data), x.number) if is_lane(x) else x, values)


def stable(step: Callable[[list[Any]], Any], keys: Sequence[str], values: list[Any], n: int) -> tuple[list[Any], Any]:
    """Values in a form that a round keeps, and what it makes of them: numbers as tensors, and zeros for what has no
    value before the first round.

    Raises:
        StructureError: their form changes with each round.
    """
    values = [promoted(x, n) for x in values]
    before_operator("while_loop")
    for _ in range(ROUNDS):
        found = trace_outside(step, values)
        now = fitted(keys, values, found[1], n)
        if all([x is UNDEFINED or form_of(x) == form_of(y) for x, y in zip(values, now, strict=True)]):
            return now, found
        values = now
    got, hint = "one that changes with each round", "keep shapes and dtypes; collect results in a tensor of fixed size"
    raise StructureError(message("batch", "values of one form in a loop", got, hint=hint))


def along(
    round: Round, names: tuple[str, ...], walked: Walked, m: Mask, carry: Any, fixed: Any, n: int, options: Options,
    simple: bool, sure: bool,
) -> Out:  # fmt: skip
    """A `for`: rounds of those who have an item."""
    if walked.steps is not None or options.lower == "unroll":
        state: State = (m, False, False, False, UNDEFINED, carry)
        for k in range(walked.longest if walked.steps is None else len(walked.steps)):
            going, done = (state[0], False) if walked.steps is not None else split(state[0], walked.has(k, n))
            if going is False:
                break
            item = walked.at(k) if walked.steps is None else walked.steps[k]
            state = followed((going, either(state[1], done), *state[2:]), round(going, state[5], fixed, item, sure))
            sure = sure and state[0] is going
        left = either(state[1], state[0])
        return (left, *state[2:])
    if simple and m is None and walked.scannable and options.lower == "auto":
        return (None, False, False, UNDEFINED, scanned(round, names, walked, carry, fixed, n))
    going, done = split(m, walked.has(0, n))
    start: State = (as_mask(going, n, walked.device), done, False, False, UNDEFINED, carry)
    return in_graph(round, names, start, fixed, n, walked)


def scanned(round: Round, names: tuple[str, ...], walked: Walked, carry: Any, fixed: Any, n: int) -> tuple[Any, ...]:
    """All rounds as one `scan`, for a body that everybody runs to its end."""
    fixed = apart(fixed)
    xs = walked.slices(n)
    first = [x[0] for x in xs]

    def step(values: Sequence[Any], now: Sequence[Tensor]) -> list[Any]:
        return list(round(now[0], tuple(values), fixed, walked.item(now[1:]), walked.full)[5])

    values, (_, after) = stable(lambda v: ([], step(v, first)), names, [*carry], n)
    packing = Packing(values)

    def combine(flat: list[Tensor], now: list[Tensor]) -> tuple[list[Tensor], None]:
        return packing.tensors(fitted(names, step(packing.values(flat), now), values, now[0].shape[0])), None

    start, form = split_tree("scan", "the carry", packing.tensors(values))
    traced = packing.tensors(fitted(names, after, values, n)), None
    end, _ = scan_in_graph(combine, traced, Steps("scan", xs, 0), start, form)
    return tuple(packing.values(end))
