"""The loops of a driver: round by round while it is traced, unrolled, or as `while_loop` and `scan`.

A loop whose test is a Python bool, or that walks along a Python iterable, runs round by round while it is traced, as
torch.compile would run it. Any other is one operation of the graph, with all loops inside of it: a round of the outer
loop runs one round of each inner loop. Examples that then still are in an inner loop wait there (`Inside`), while
others come to it or go on behind it. So each piece of code is traced once, and no operator lies in another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch.lists import behind_loop
from tdc.autobatch.lowered import Mask, Packing, chosen, count, either, enter, split, union, where
from tdc.autobatch.rounds import Round, State, apart, as_mask, fitted, followed, kept, stable
from tdc.autobatch.source import OP
from tdc.autobatch.values import RESULT, UNDEFINED, Lane, lane_of
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
STAYS = (0, 2, 3)  # of a state, what rounds of a graph keep: all who came and neither broke off nor returned have left


@dataclass(frozen=True)
class Options:
    """How loops are lowered: "auto", "while" or "unroll", and how many rounds a `while` has at most."""

    lower: str = "auto"
    max_iters: int | None = None

    def unrolls(self) -> bool:
        few = self.max_iters is not None and self.max_iters <= UNROLLED and torch.is_grad_enabled()
        return self.lower == "unroll" or (self.lower == "auto" and few)


OPTIONS = Options()


MADE = [0]  # loops of graphs, counted while they are traced


@constant
def count_loop() -> int:
    MADE[0] += 1
    return MADE[0]


@constant
def loops_made() -> int:
    return MADE[0]


@dataclass
class Inside:
    """Who is in an inner loop of a graph's loop between two of its rounds.

    Attributes:
        masks: by the number of the inner loop.
        values: what names stand for, for those.
        now: the masks behind the round.
        most: how many rounds each inner loop has at most; None where nothing says so.
    """

    masks: dict[int, Tensor]
    values: dict[str, Any]
    now: dict[int, Tensor] = field(default_factory=dict)
    most: dict[int, Any] = field(default_factory=dict)

    def leave(self, number: int, going: Mask, most: Any) -> None:
        """Note who goes on in an inner loop, whose rounds are at most so many."""
        if going is not False:
            self.now[number], self.most[number] = going, most


NOWHERE = Inside({}, {})  # of a loop without loops inside


@dataclass(frozen=True)
class Loop:
    """What is known of a loop before it runs.

    Attributes:
        number: which loop of the function it is.
        round: `round(who, carry, fixed, item, whether somebody is there for sure, inside) -> Round`.
        names: of the carry, the values that rounds change.
        fixed: names of values that they read.
        inner: the numbers of the loops inside.
        even: names of lists to which each round appends as many items for all.
    """

    number: int
    round: Callable[..., Round]
    names: tuple[str, ...]
    fixed: tuple[str, ...]
    inner: tuple[int, ...]
    even: tuple[str, ...] = ()


def resume(
    inside: Inside | None, loops: tuple[int, ...], arrived: Mask, entering: Mask, names: tuple[str, ...], values: Any
) -> tuple[Mask, Any]:
    """Those who enter an inner loop together with those who are in it, and the values of both.

    Args:
        loops: the number of the loop and of those inside of it.
        arrived: those who come to the loop, some of whom may not enter it.
    """
    if inside is None:
        return entering, values
    waiting = union([inside.masks[k] for k in loops if k in inside.masks])
    if waiting is False:
        return entering, values
    mine = None if arrived is False else chosen(arrived, waiting)
    both: list[Any] = []
    for name, now in zip(names, values, strict=True):
        old = inside.values.get(name, now)
        both.append(old if mine is None else where(name, mine, now, old) if name in inside.values else now)
    return either(entering, inside.masks.get(loops[0], False)), tuple(both)


def waiting_in(inside: Inside | None, loops: tuple[int, ...]) -> Mask:
    """Who is in an inner loop, or one inside of it, behind a round."""
    return False if inside is None else union([inside.now[k] for k in loops if k in inside.now])


Out = tuple[Mask, Mask, Mask, Any, tuple[Any, ...]]  # left, broke, returned, what, carry


def repeat(
    loop: Loop, active: Mask, left: Mask, carry: Any, fixed: Any, n: int, options: Options, inside: Inside | None
) -> Out:
    """A `while`: rounds of those for whom the test held."""
    state: State = (active, left, False, False, UNDEFINED, carry)
    if inside is not None:
        return one_round(loop, state, fixed, inside, options.max_iters)
    fixed_test = not isinstance(active, Tensor)
    while fixed_test and state[0] is not False and not isinstance(state[0], Tensor):
        state = followed(loop.names, state, loop.round(state[0], state[5], fixed, None, True, None))
    if state[0] is False:
        return state[1:]
    if options.unrolls():
        return unrolled(loop, state, fixed, options.max_iters)
    return in_graph(loop, state, fixed, n, None, options.max_iters)


def one_round(loop: Loop, state: State, fixed: Any, inside: Inside, most: int | None) -> Out:
    """A round of an inner `while`."""
    if state[0] is False:
        return state[1:]
    now = followed(loop.names, state, loop.round(state[0], state[5], fixed, None, False, inside), False)
    inside.leave(loop.number, now[0], most)
    return now[1:]


def unrolled(loop: Loop, state: State, fixed: Any, most: int | None) -> Out:
    """So many rounds, after which nobody may be left."""
    for _ in range(at_most(most)):
        if state[0] is False:
            return state[1:]
        state = followed(loop.names, state, loop.round(state[0], state[5], fixed, None, False, None))
    nobody_left(state[0], most)
    return state[1:]


def at_most(most: int | None) -> int:
    """
    Raises:
        StructureError: nothing says how many rounds a loop has at most.
    """
    if most is None:
        got, hint = "lower='unroll' without it", "tdc.batch(max_iters=...), how often the loop runs at most"
        raise StructureError(message(OP, "max_iters", got, hint=hint))
    return most


def nobody_left(going: Mask, most: Any) -> None:
    """Assert that a loop has ended for all."""
    if isinstance(going, Tensor):
        expected, got = f"a loop of at most max_iters={most} rounds", "examples that go on"
        require(~going.any(), message(OP, expected, got, hint="raise max_iters"))


def in_graph(loop: Loop, state: State, fixed: Any, n: int, steps: Steps | None = None, most: int | None = None) -> Out:
    """Rounds as one `while_loop`, at most so many where nothing else says so; `steps` gives the items of a `for`."""
    count_loop()
    device, keys = state[0].device, (RESULT, *loop.names)
    fixed = apart(fixed) if fixed else fixed
    masks = [as_mask(state[k], n, device) for k in STAYS]
    zero = torch.zeros((), dtype=torch.long, device=device)

    def step(
        counter: Tensor, masks: Sequence[Tensor], inside: dict[int, Tensor], values: list[Any]
    ) -> tuple[Tensor, list[Tensor], Inside, list[Any]]:
        there = count(masks[0], n)
        before: State = (masks[0], False, masks[1], masks[2], values[0], tuple(values[1:]))
        waiting = inner_loops(loop, keys, values, fixed, inside)
        item = steps.item(counter) if steps is not None else None
        now = loop.round(masks[0], before[5], fixed, item, not inside, waiting)
        if steps is not None:
            counter = counter + (as_mask(now[0], there, device) if inside else 1)
            now = (split(now[0], present(steps, counter, there))[0], *now[1:])
        out = followed(loop.names, before, now, False)
        return counter, [as_mask(out[k], there, device) for k in STAYS], waiting or NOWHERE, [out[4], *out[5]]

    def first(numbers: tuple[int, ...], values: list[Any]) -> tuple[Any, ...]:
        """A state before the first round; the rounds of each example count for themselves where some may wait."""
        counter = zero.repeat(n) if numbers else zero
        return counter, masks, {k: torch.zeros_like(masks[0]) for k in numbers}, values

    def outside(values: list[Any], numbers: tuple[int, ...]) -> tuple[Any, ...]:
        counter, start, waiting, values = first(numbers, values)
        all_there = [start[0] if loop.inner else None, *start[1:]]  # then no values are picked
        counter, masks, waiting, now = step(counter, all_there, waiting, values)
        longest = None if steps is None else steps.longest()
        rounds = [most if longest is None else longest, *[waiting.most[k] for k in waiting.now]]
        bound = None if any([x is None for x in rounds]) else math.prod(rounds)
        return tuple([k for k in loop.inner if k in waiting.now]), bound, counter, masks, waiting.now, now

    values, (numbers, _, *after), own = stable(outside, keys, [state[4], *state[5]], n)
    packing, end_of_masks = Packing(values), 2 + len(numbers)

    def flat(counter: Tensor, masks: Any, inside: dict[int, Tensor], now: list[Any], fits: bool = own) -> list[Tensor]:
        n = masks[0].shape[0]
        there = [as_mask(inside.get(k, False), n, device) for k in numbers]
        now = now if fits else fitted(keys, now, values, n)
        return [counter, masks[0], *there, *masks[1:], *packing.tensors(now)]

    def body(now: Sequence[Tensor]) -> list[Tensor]:
        inside = {k: now[2 + i] for i, k in enumerate(numbers)}
        rest = now[end_of_masks:]
        counter, masks, waiting, found = step(now[0], [now[1], *rest[:2]], inside, packing.values(rest[2:]))
        return flat(counter, masks, waiting.now, found)

    def going(now: Sequence[Tensor]) -> Tensor:
        return torch.stack([*now[1:end_of_masks]]).any() if numbers else now[1].any()

    end = repeat_in_graph(going, body, flat(*first(numbers, values), fits=True), flat(*after))[end_of_masks:]
    found = packing.values(end[2:])
    carry = behind(loop, state[5], found[1:], None if numbers else steps)
    broke, out = [state[k] if x is masks[j] else x for j, k, x in zip((1, 2), STAYS[1:], end[:2], strict=True)]
    left = without(without(either(state[0], state[1]), broke), out)
    return left, broke, out if found[0] is not UNDEFINED else False, found[0], carry


def inner_loops(loop: Loop, keys: Sequence[str], values: Any, fixed: Any, masks: dict[int, Tensor]) -> Inside | None:
    """Who waits in the loops inside of a loop, if there are any."""
    if not loop.inner:
        return None
    return Inside(masks, known(loop, keys, values, fixed))


def known(loop: Loop, keys: Sequence[str], values: Any, fixed: Any) -> dict[str, Any]:
    """What names stand for in a round."""
    return {**dict(zip(keys, values, strict=True)), **dict(zip(loop.fixed, fixed, strict=True))}


def without(m: Mask, others: Mask) -> Mask:
    """Those of a mask that are not among others."""
    return m if others is False else split(m, others)[1]


def present(steps: Steps, k: Any, n: int) -> Any:
    """Who has an item in round `k`."""
    found = steps.has(k)
    return found.expand(n) if isinstance(found, Tensor) else found


def ahead(form: Form, values: list[Any]) -> Steps | None:
    """The steps of an inner loop along rows that no round changes, made once; None for what may be no rows."""
    rows = [type(x) is Lane and (is_ragged(x.data) or x.data.ndim > 1) for x in values]
    return walk(form, apart(values)) if values and all(rows) else None


def begun(
    inside: Inside | None, m: Mask, form: Form, values: list[Any], n: int, changing: tuple[int, ...], inner: bool,
    options: Options | None = None,
) -> tuple[Steps, Any, Any]:  # fmt: skip
    """The steps of a loop, and what is kept of them where examples may wait in it: changing values, and rounds.

    Args:
        inner: whether there are loops in the loop.
        options: given where examples may leave it early, and nobody reads its items: then it may be long.
    """
    if inside is None or m is False:
        return rolled(walk(form, apart(values)), False, options), None, None
    steps = rolled(walk(form, [*values]), inner, options)
    if steps.items is not None:
        return steps, None, None
    return steps, [values[i] for i in changing], lane_of(torch.zeros(n, dtype=torch.long, device=m.device))


def begun_again(
    inside: Inside, form: Form, values: list[Any], way: Mask, loops: tuple[int, ...], options: Options | None = None
) -> Steps:
    """The steps of those who are in an inner loop, or come back to it from loops inside of it: of its values, or their
    names where no round changes them."""
    way = union([way, *[inside.masks[k] for k in loops if k in inside.masks]])
    given = [inside.values[x] if type(x) is str else enter(way, None, x) for x in values]
    return rolled(walk(form, given), bool(loops), options)


def rolled(steps: Steps, waits: bool, options: Options | None) -> Steps:
    """A `range` as rounds of a graph, if it has to be, or is better so.

    Args:
        waits: whether examples may wait in loops inside of it, so that each counts its own rounds.
        options: given where examples may leave it early, and nobody reads its items, such as `for _ in range(100)`
            until they agree: then it may be long.
    """
    numbers = steps.items
    if not isinstance(numbers, range):
        return steps
    if options is not None and options.lower != "unroll" and len(numbers) > FEW:
        return Range(0, len(numbers), 1, False)
    return Range(numbers.start, numbers.stop, numbers.step, False) if waits else steps


def along(
    loop: Loop, steps: Steps, m: Mask, carry: Any, fixed: Any, n: int, options: Options, simple: bool, sure: bool
) -> Out:
    """A `for`: rounds of those who have an item."""
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
    loop: Loop, steps: Steps, rounds: Lane, m: Mask, carry: Any, fixed: Any, inside: Inside
) -> tuple[Lane, Out]:
    """A round of an inner `for`, of each example with the item of its own round. Returns the rounds, too."""
    going, done = split(m, steps.has(rounds.data))
    state: State = (going, done, False, False, UNDEFINED, carry)
    if going is False:
        return rounds, state[1:]
    now = loop.round(going, carry, fixed, steps.item(rounds.data), False, inside)
    after = rounds.data if now[0] is False else rounds.data + now[0]
    end = followed(loop.names, state, (*split(now[0], steps.has(after)), *now[2:]), False)
    inside.leave(loop.number, end[0], steps.longest())
    return lane_of(after), end[1:]


def unrolled_along(loop: Loop, steps: Steps, state: State, fixed: Any, sure: bool, most: int | None) -> Out:
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
        nobody_left(split(state[0], steps.has(most))[0], most)
    return (either(state[1], state[0]), *state[2:])


def scanned(loop: Loop, carry: Any, steps: Steps, fixed: Any, n: int) -> tuple[Any, ...] | None:
    """All rounds as one `scan`, for a body that everybody runs to its end; None where examples may wait in it, or a
    function that it calls has a loop, which torch does not take inside of a scan with gradients."""
    fixed, before = apart(fixed), count_loop()
    table = steps.table()
    items = Packing(table)
    there = steps.has(torch.arange(at_least_one(steps.longest()), device=steps.device)[:, None])
    xs = [there.expand(-1, n), *items.tensors(table)]
    first = [x[0] for x in xs]

    def step(values: Sequence[Any], now: Sequence[Tensor], waiting: Inside | None = None) -> list[Any]:
        end = loop.round(now[0], tuple(values), fixed, items.values(now[1:]), steps.full, waiting)
        return list(kept(loop.names, end[6], end[5], values))

    def outside(values: list[Any], _: Any) -> tuple[Any, ...]:
        waiting = Inside({}, known(loop, loop.names, values, fixed))
        now = step(values, first, waiting)
        return (), steps.longest(), bool(waiting.now), now

    values, (_, _, waits, after), own = stable(outside, loop.names, [*carry], n)
    if waits or loops_made() != before:
        return None
    packing = Packing(values)

    def combine(flat: list[Tensor], now: list[Tensor]) -> tuple[list[Tensor], None]:
        found = step(packing.values(flat), now)
        return packing.tensors(found if own else fitted(loop.names, found, values, now[0].shape[0])), None

    start, form = split_tree("scan", "the carry", packing.tensors(values))
    traced = packing.tensors(after if own else fitted(loop.names, after, values, n)), None
    end, _ = scan_in_graph(combine, traced, Slices("scan", xs, 0), start, form)
    return behind(loop, carry, packing.values(end), steps)


def behind(loop: Loop, before: Sequence[Any], after: Sequence[Any], steps: Steps | None) -> tuple[Any, ...]:
    """The values behind a loop along steps: lists are even if all examples had as many of these."""
    alike = steps is not None and not isinstance(steps.lengths, Tensor)
    parts = zip(loop.names, before, after, strict=True)
    return tuple([behind_loop(old, new, alike and name in loop.even) for name, old, new in parts])
