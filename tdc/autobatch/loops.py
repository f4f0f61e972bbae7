"""The loops of a driver: round by round while it is traced, unrolled, or as `while_loop` and `scan`.

A loop whose test is a Python bool, or along a Python iterable, runs round by round while it is traced, as
torch.compile would run it. Any other is one operation of the graph, with all loops inside of it: a round of the outer
loop runs one round of each inner loop. Examples that are still in an inner loop wait there (`Inside`), while others
come to it or go on after it. So each piece of code is traced once, and operators are not nested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch.lists import after_loop
from tdc.autobatch.lowered import (
    Mask,
    Round,
    State,
    apart,
    as_mask,
    carried,
    chosen,
    count,
    either,
    enter,
    fitted,
    followed,
    kept,
    of_each,
    picked,
    split,
    stable,
    tensors_of,
    union,
    with_carried,
    with_tensors,
)  # fmt: skip
from tdc.autobatch.source import OP
from tdc.autobatch.values import RESULT, UNDEFINED, Lane, flatten, lane_of, map_leaves, unflatten
from tdc.autobatch.walks import Form, Range, Steps, at_least_one, walk
from tdc.compile.carries import split as split_tree
from tdc.compile.control_flow import repeat_in_graph
from tdc.compile.loops import Steps as Slices
from tdc.compile.loops import scan_in_graph
from tdc.core.asserts import require
from tdc.core.dynamo import constant
from tdc.core.errors import StructureError, message
from tdc.ragged.storage import is_ragged

FEW = 8  # rounds of a range that are unrolled although examples may leave it early
UNROLLED = 32  # rounds that a training step unrolls rather than loops
STAYS = (0, 2, 3)  # masks of a state that a graph carries: the others follow from these
MADE = [0]  # loops of graphs, counted while they are traced


@dataclass(frozen=True)
class Options:
    """The lowering of loops, "auto", "while" or "unroll", and a bound on the rounds of a `while`."""

    lower: str = "auto"
    max_iters: int | None = None

    def unrolls(self) -> bool:
        few = self.max_iters is not None and self.max_iters <= UNROLLED and torch.is_grad_enabled()
        return self.lower == "unroll" or (self.lower == "auto" and few)


OPTIONS = Options()


@constant
def loops_made(more: int) -> int:
    """The number of loops, with one that begins now."""
    MADE[0] += more
    return MADE[0]


@dataclass
class Inside:
    """The examples that wait in inner loops of a graph's loop between two of its rounds.

    Attributes:
        masks: by the number of the inner loop.
        values: the values of names, for those examples.
        now: the masks after the round.
        most: a bound on the rounds of each inner loop, or None.
    """

    masks: dict[int, Tensor]
    values: dict[str, Any]
    now: dict[int, Tensor] = field(default_factory=dict)
    most: dict[int, Any] = field(default_factory=dict)

    def leave(self, number: int, going: Mask, most: Any) -> None:
        """Note the examples that stay in an inner loop, and a bound on its rounds."""
        if going is not False:
            self.now[number], self.most[number] = going, most

    def bound(self, own: Any) -> Any:
        """A bound on the rounds of a loop: its own times those of inner loops; None without one."""
        rounds = [own, *[self.most[k] for k in self.now]]
        return None if any([x is None for x in rounds]) else math.prod(rounds)


NOWHERE = Inside({}, {})  # of a loop without inner loops


@dataclass(frozen=True)
class Rounds:
    """A loop before it runs.

    Attributes:
        number: that of the loop in its function.
        round: `round(active, carry, fixed, item, True if an example is active, inside) -> Round`.
        names: of the carry, the values that rounds change.
        fixed: names of values that they only read.
        inner: the numbers of the inner loops.
        even: names of lists that each round makes longer by as many items for all examples.
        line: of the loop in the file of the function.
    """

    number: int
    round: Callable[..., Round]
    names: tuple[str, ...]
    fixed: tuple[str, ...]
    inner: tuple[int, ...]
    even: tuple[str, ...] = ()
    line: int = 0

    def inside(self, keys: Sequence[str], values: Any, fixed: Any, masks: dict[int, Tensor]) -> Inside:
        """The examples of some masks, which wait in inner loops, with the values of a round."""
        return Inside(masks, dict(zip((*keys, *self.fixed), (*values, *fixed), strict=True)))


def resume(
    inside: Inside | None, loops: tuple[int, ...], arrived: Mask, entering: Mask, names: tuple[str, ...], values: Any
) -> tuple[Mask, Any]:
    """The examples that enter an inner loop, with those that wait in it, and the values of both.

    Args:
        loops: the number of the loop and those of its inner loops.
        arrived: the examples that come to the loop, some of which may not enter it.
    """
    if inside is None:
        return entering, values
    waiting = union([inside.masks[k] for k in loops if k in inside.masks])
    if waiting is False:
        return entering, values
    mine: Any = None if arrived is False else chosen(arrived, waiting)
    both: list[Any] = []
    for name, now in zip(names, values, strict=True):
        old = inside.values.get(name, now)
        if mine is not None and name in inside.values:
            old = picked([name], mine, [now], [old])[0]
        both.append(old)
    return either(entering, inside.masks.get(loops[0], False)), tuple(both)


def waiting_in(inside: Inside | None, loops: tuple[int, ...]) -> Mask:
    """The examples that wait in an inner loop, or in one inside of it, after a round."""
    return False if inside is None else union([inside.now[k] for k in loops if k in inside.now])


Out = tuple[Mask, Mask, Mask, Any, tuple[Any, ...]]  # left, broke, returned, result, carry


def repeat(
    loop: Rounds, active: Mask, left: Mask, carry: Any, fixed: Any, n: int, options: Options, inside: Inside | None
) -> Out:
    """A `while`: rounds of the examples for which the test held."""
    state: State = (active, left, False, False, UNDEFINED, carry)
    if inside is not None:
        if active is not False:
            now = loop.round(active, carry, fixed, None, False, inside)
            state = followed(loop.names, state, now, False)
            inside.leave(loop.number, state[0], options.max_iters)
        return state[1:]
    python = not isinstance(active, Tensor)
    while python and state[0] is not False and not isinstance(state[0], Tensor):
        state = followed(loop.names, state, loop.round(state[0], state[5], fixed, None, True, None))
    if state[0] is False:
        return state[1:]
    if not options.unrolls():
        return in_graph(loop, state, fixed, n, None, options.max_iters)
    for _ in range(at_most(options.max_iters)):
        state = followed(loop.names, state, loop.round(state[0], state[5], fixed, None, False, None))
        if state[0] is False:
            return state[1:]
    require_ended(state[0], options.max_iters)
    return state[1:]


def at_most(most: int | None) -> int:
    """The bound on the rounds of an unrolled loop.

    Raises:
        StructureError: it has none.
    """
    if most is None:
        got, hint = "lower='unroll' without it", "tdc.batch(max_iters=...), how often the loop runs at most"
        raise StructureError(message(OP, "max_iters", got, hint=hint))
    return most


def require_ended(going: Mask, most: Any) -> None:
    """Assert that a loop has ended for all examples."""
    if isinstance(going, Tensor):
        expected, got = f"a loop of at most max_iters={most} rounds", "examples that go on"
        require(~going.any(), message(OP, expected, got, hint="raise max_iters"))


def in_graph(loop: Rounds, state: State, fixed: Any, n: int, steps: Steps | None, most: int | None) -> Out:
    """Rounds as one `while_loop`, of at most `most` rounds; `steps` gives the items of a `for`."""
    loops_made(1)
    device, keys = state[0].device, (RESULT, *loop.names)
    fixed = held(fixed, n, device)
    masks = [as_mask(state[k], n, device) for k in STAYS]
    zero = torch.zeros((), dtype=torch.long, device=device)

    def step(
        counter: Tensor, masks: Sequence[Tensor], inside: dict[int, Tensor], values: list[Any]
    ) -> tuple[Tensor, list[Tensor], Inside, list[Any]]:
        there = count(masks[0], n)
        before: State = (masks[0], False, masks[1], masks[2], values[0], tuple(values[1:]))
        waiting = loop.inside(keys, values, fixed, inside) if loop.inner else None
        item = steps.item(counter) if steps is not None else None
        now = loop.round(masks[0], before[5], fixed, item, not inside, waiting)
        if steps is not None:
            counter = counter + (as_mask(now[0], there, device) if inside else 1)
            now = (split(now[0], present(steps, counter, there))[0], *now[1:])
        out = followed(loop.names, before, now, False)
        return counter, [as_mask(out[k], there, device) for k in STAYS], waiting or NOWHERE, [out[4], *out[5]]

    def first(numbers: tuple[int, ...], values: list[Any]) -> tuple[Any, ...]:
        """A state before the first round, with a counter of each example where some may wait."""
        counter = zero.repeat(n) if numbers else zero
        return counter, masks, {k: torch.zeros_like(masks[0]) for k in numbers}, values

    def outside(values: list[Any], numbers: tuple[int, ...]) -> tuple[Any, ...]:
        counter, start, waiting, values = first(numbers, values)
        all_there = [start[0] if loop.inner else None, *start[1:]]  # then no values are picked
        counter, masks, waiting, now = step(counter, all_there, waiting, values)
        longest = None if steps is None else steps.longest()
        bound = waiting.bound(most if longest is None else longest)
        return tuple([k for k in loop.inner if k in waiting.now]), bound, counter, masks, waiting.now, now

    values, (numbers, _, *after), own = stable(outside, keys, [state[4], *state[5]], n, loop.line)
    (leaves, form), end_of_masks = flatten(values), 2 + len(numbers)

    def flat(counter: Tensor, masks: Any, inside: dict[int, Tensor], now: list[Any], fits: bool = own) -> list[Tensor]:
        n = masks[0].shape[0]
        there = [as_mask(inside.get(k, False), n, device) for k in numbers]
        now = now if fits else fitted(keys, now, values, n)
        return [counter, masks[0], *there, *masks[1:], *carried(flatten(now)[0])]

    def body(now: Sequence[Tensor]) -> list[Tensor]:
        inside = {k: now[2 + i] for i, k in enumerate(numbers)}
        rest = now[end_of_masks:]
        own_values = unflatten(with_carried(leaves, rest[2:]), form)
        counter, masks, waiting, found = step(now[0], [now[1], *rest[:2]], inside, own_values)
        return flat(counter, masks, waiting.now, found)

    def going(now: Sequence[Tensor]) -> Tensor:
        return torch.stack([*now[1:end_of_masks]]).any() if numbers else now[1].any()

    end = repeat_in_graph(going, body, flat(*first(numbers, values), fits=True), flat(*after))[end_of_masks:]
    found = unflatten(with_carried(leaves, end[2:]), form)
    carry = after_loops(loop, state[5], found[1:], None if numbers else steps)
    broke, out = [state[k] if x is masks[j] else x for j, k, x in zip((1, 2), STAYS[1:], end[:2], strict=True)]
    left = without(without(either(state[0], state[1]), broke), out)
    return left, broke, out if found[0] is not UNDEFINED else False, found[0], carry


def held(fixed: Any, n: int, device: Any) -> Any:
    """Values that rounds only read, in the form in which an operator takes them."""
    return map_leaves(lambda x: of_each(apart(x), n, device), fixed) if fixed else fixed


def without(m: Mask, others: Mask) -> Mask:
    """The examples of a mask that are not among others."""
    return m if others is False else split(m, others)[1]


def present(steps: Steps, k: Any, n: int) -> Any:
    """The examples with an item in round `k`."""
    found = steps.has(k)
    return found.expand(n) if isinstance(found, Tensor) else found


def ahead(form: Form, values: list[Any]) -> Steps | None:
    """The steps of an inner loop along rows that no round changes, made once; None for other values."""
    rows = [type(x) is Lane and (is_ragged(x.data) or x.data.ndim > 1) for x in values]
    return walk(form, map_leaves(apart, values)) if values and all(rows) else None


def begun(
    inside: Inside | None, m: Mask, form: Form, values: list[Any], n: int, changing: tuple[int, ...], inner: bool,
    options: Options | None = None,
) -> tuple[Steps, Any, Any]:  # fmt: skip
    """The steps of a loop, and, where examples may wait in it, its changing values and the round of each example.

    Args:
        inner: the loop has inner loops.
        options: as of `rolled`.
    """
    if inside is None or m is False:
        return rolled(walk(form, map_leaves(apart, values)), False, options), None, None
    steps = rolled(walk(form, [*values]), inner, options)
    if steps.items is not None:
        return steps, None, None
    return steps, [values[i] for i in changing], lane_of(torch.zeros(n, dtype=torch.long, device=m.device))


def begun_again(
    inside: Inside, form: Form, values: list[Any], way: Mask, loops: tuple[int, ...], options: Options | None = None
) -> Steps:
    """The steps for examples that wait in an inner loop, or return to it from its inner loops; values that no round
    changes are given by name."""
    way = union([way, *[inside.masks[k] for k in loops if k in inside.masks]])
    given = [inside.values[x] if type(x) is str else enter(way, None, x) for x in values]
    return rolled(walk(form, given), bool(loops), options)


def rolled(steps: Steps, waits: bool, options: Options | None) -> Steps:
    """A `range` as rounds of a graph, where that is needed or better.

    Args:
        waits: examples may wait in inner loops, so that each counts its own rounds.
        options: given of a loop that examples may leave early and whose items are not read, such as
            `for _ in range(100)`: it may be long.
    """
    numbers = steps.items
    if not isinstance(numbers, range):
        return steps
    if options is not None and options.lower != "unroll" and len(numbers) > FEW:
        return Range(0, len(numbers), 1, False)
    return Range(numbers.start, numbers.stop, numbers.step, False) if waits else steps


def along(
    loop: Rounds, steps: Steps, m: Mask, carry: Any, fixed: Any, n: int, options: Options, simple: bool, sure: bool
) -> Out:
    """A `for`: rounds of the examples with an item."""
    if m is False:
        return (m, False, False, UNDEFINED, carry)
    if steps.items is not None or options.lower == "unroll":
        return unrolled_along(loop, steps, (m, False, False, False, UNDEFINED, carry), fixed, sure, options.max_iters)
    if steps.full and steps.longest() == 0:
        return (m, False, False, UNDEFINED, carry)
    if simple and m is None and options.lower == "auto" and steps.scannable():
        found = scanned(loop, carry, steps, fixed, n)
        if found is not None:
            return (None, False, False, UNDEFINED, found)
    going, done = split(m, present(steps, 0, n))
    start: State = (as_mask(going, n, steps.device), done, False, False, UNDEFINED, carry)
    return in_graph(loop, start, fixed, n, steps, options.max_iters)


def along_inner(
    loop: Rounds, steps: Steps, rounds: Lane, m: Mask, carry: Any, fixed: Any, inside: Inside
) -> tuple[Lane, Out]:
    """A round of an inner `for`, in which each example has its own round. Returns the rounds, too."""
    going, done = split(m, steps.has(rounds.data))
    state: State = (going, done, False, False, UNDEFINED, carry)
    if going is False:
        return rounds, state[1:]
    now = loop.round(going, carry, fixed, steps.item(rounds.data), False, inside)
    after = rounds.data if now[0] is False else rounds.data + now[0]
    end = followed(loop.names, state, (*split(now[0], steps.has(after)), *now[2:]), False)
    inside.leave(loop.number, end[0], steps.longest())
    return lane_of(after), end[1:]


def unrolled_along(loop: Rounds, steps: Steps, state: State, fixed: Any, sure: bool, most: int | None) -> Out:
    """Rounds with items that are picked while the driver is traced."""
    python, longest = steps.items is not None, steps.longest()
    for k in range(at_most(most) if longest is None else longest):
        going, done = (state[0], False) if python else split(state[0], steps.has(k))
        if going is False:
            break
        now = loop.round(going, state[5], fixed, steps.item(k), sure, None)
        state = followed(loop.names, (going, either(state[1], done), *state[2:]), now)
        sure = sure and state[0] is going
    if longest is None:
        require_ended(split(state[0], steps.has(most))[0], most)
    return (either(state[1], state[0]), *state[2:])


def scanned(loop: Rounds, carry: Any, steps: Steps, fixed: Any, n: int) -> tuple[Any, ...] | None:
    """All rounds as one `scan`, for a body without early exits; None where examples may wait in it, or a called
    function has a loop, which torch refuses in a scan with gradients."""
    fixed, before = held(fixed, n, steps.device), loops_made(1)
    items, form_of_items = flatten(steps.table())
    there = steps.has(torch.arange(at_least_one(steps.longest()), device=steps.device)[:, None])
    xs = [there.expand(-1, n), *tensors_of(items)]
    first = [x[0] for x in xs]

    def step(values: Sequence[Any], now: Sequence[Tensor], waiting: Inside | None = None) -> list[Any]:
        item = unflatten(with_tensors(items, now[1:]), form_of_items)
        end = loop.round(now[0], tuple(values), fixed, item, steps.full, waiting)
        return list(kept(loop.names, end[6], end[5], values))

    def outside(values: list[Any], _: Any) -> tuple[Any, ...]:
        waiting = loop.inside(loop.names, values, fixed, {})
        now = step(values, first, waiting)
        return (), steps.longest(), bool(waiting.now), now

    values, (_, _, waits, after), own = stable(outside, loop.names, [*carry], n, loop.line)
    if waits or loops_made(0) != before:
        return None
    leaves, form = flatten(values)

    def combine(flat: list[Tensor], now: list[Tensor]) -> tuple[list[Tensor], None]:
        found = step(unflatten(with_carried(leaves, flat), form), now)
        return carried(flatten(found if own else fitted(loop.names, found, values, now[0].shape[0]))[0]), None

    start, split_form = split_tree("scan", "the carry", carried(leaves))
    traced = carried(flatten(after if own else fitted(loop.names, after, values, n))[0]), None
    end, _ = scan_in_graph(combine, traced, Slices("scan", xs, 0), start, split_form)
    return after_loops(loop, carry, unflatten(with_carried(leaves, end), form), steps)


def after_loops(loop: Rounds, before: Sequence[Any], after: Sequence[Any], steps: Steps | None) -> tuple[Any, ...]:
    """The values after a loop along steps: lists are even if all examples had as many of these."""
    alike = steps is not None and not isinstance(steps.lengths, Tensor)
    parts = zip(loop.names, before, after, strict=True)
    return tuple([after_loop(old, new, alike and name in loop.even) for name, old, new in parts])
