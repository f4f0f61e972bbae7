"""Samples of shape operations on ragged batches: dims added, moved and regrouped, and orders of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from harness import LAYOUTS, Call, Draw, Sample, call
from torch import Tensor

from tdc.core.rules import MODES, Rule
from tdc.testing.batches import Ragged

LIGHT = ("eager", "grad", "vmap")
Rows = Callable[[Tensor], Tensor]
Args = Callable[[int], tuple[Any, ...]]


def sample(
    label: str, layout: str, args: Args, row: Rows, dims: Any = None, batch: int = 0, modes: Any = MODES
) -> Sample:
    """A call `op(x, *args(B))`; `row` is what happens to each example, `dims` and `batch` where those dims end up."""

    def draw(d: Draw) -> Call:
        x = d.ragged(layout)
        return call(x, *args(len(d.lengths)))

    def want(ref: Any, given: Any, kwargs: Any) -> Ragged:
        x = given[0]
        return Ragged([row(r) for r in x.rows], x.dims if dims is None else dims, batch)

    return Sample(label, draw, want, modes)


def unsqueeze(rule: Rule) -> Iterator[Sample]:
    yield sample("features, 1", "features", lambda b: (1,), lambda r: r.unsqueeze(0), (2,))
    yield sample("features, -1", "features", lambda b: (-1,), lambda r: r.unsqueeze(-1), (1,), modes=LIGHT)
    yield sample("second, 2", "second", lambda b: (2,), lambda r: r.unsqueeze(1), (3,), modes=LIGHT)
    yield sample("two, 1", "two", lambda b: (1,), lambda r: r.unsqueeze(0), (2, 3), modes=LIGHT)
    yield sample("flat, 0", "flat", lambda b: (0,), lambda r: r.unsqueeze(0), (2,), 1)


def squeeze(rule: Rule) -> Iterator[Sample]:
    yield sample("none to drop", "features", lambda b: (), lambda r: r)
    yield sample("dim", "second", lambda b: (1,), lambda r: r)


def expand(rule: Rule) -> Iterator[Sample]:
    yield sample("in front", "features", lambda b: (4, -1, -1, -1), lambda r: r.expand(4, *r.shape), (2,), 1)
    yield sample("as it is", "second", lambda b: (b, 2, -1, 3), lambda r: r, modes=LIGHT)


def repeat(rule: Rule) -> Iterator[Sample]:
    yield sample("static", "features", lambda b: (1, 1, 2), lambda r: r.repeat(1, 2))

    def rows(ref: Any, given: Any, kwargs: Any) -> Ragged:
        return given[0].with_rows(given[0].rows * 2)

    yield Sample("rows", lambda d: call(d.ragged(), 2, 1, 1), rows)


def reshape(rule: Rule) -> Iterator[Sample]:
    one = rule.name == "view"
    yield sample("as it is", "features", lambda b: ((b, -1, 3),), lambda r: r, modes=LIGHT)
    yield sample("static behind", "features", lambda b: ((-1, -1, 3, 1),), lambda r: r.unsqueeze(-1))
    yield sample(
        "static in front", "second", lambda b: ((-1, 1, 2, -1, 3),), lambda r: r.unsqueeze(0), (3,), modes=LIGHT
    )
    yield sample("leading", "flat", lambda b: ((1, b, -1),), lambda r: r.unsqueeze(0), (2,), 1, LIGHT)
    if rule.kind == "nested":
        yield sample("positions of several", "two", lambda b: ((-1, -1, 2),), lambda r: r.flatten(0, 1), (1,))
        yield sample(
            "ragged with static", "second", lambda b: ((b, -1, 2),), lambda r: r.reshape(-1, 2), (1,), modes=LIGHT
        )
    if not one:
        yield sample("several ragged", "two", lambda b: ((b, -1, -1, 2, 1),), lambda r: r.unsqueeze(-1), modes=LIGHT)

    def behind(layout: str, sizes: Args) -> Callable[[Draw], Call]:
        return lambda d: call(d.ragged(layout, batch_dim=LAYOUTS[layout].ragged), *sizes(len(d.lengths)))

    def longer(ref: Any, given: Any, kwargs: Any) -> Ragged:
        x = given[0]
        return Ragged([r.unsqueeze(-1) for r in x.rows], x.dims, x.batch_dim)

    yield Sample("batch behind", behind("features", lambda b: ((-1, b, 3, 1),)), longer, LIGHT)
    if not one:
        yield Sample("batch behind several", behind("two", lambda b: ((-1, -1, b, 2, 1),)), longer, LIGHT)


def flatten(rule: Rule) -> Iterator[Sample]:
    yield sample("one dim", "features", lambda b: (2, 2), lambda r: r, modes=LIGHT)
    yield sample("several ragged", "two", lambda b: (1, 2), lambda r: r.flatten(0, 1), (1,))
    yield sample("ragged and static", "two", lambda b: (2, 3), lambda r: r.flatten(1, 2), (1, 2), modes=LIGHT)
    yield sample("static in front", "second", lambda b: (1, 2), lambda r: r.flatten(0, 1), (1,))
    yield sample("whole examples", "second", lambda b: (1, -1), lambda r: r.flatten(), (1,), modes=LIGHT)

    def want(ref: Any, given: Any, kwargs: Any) -> Ragged:
        return given[0].with_rows([r.flatten(1, 2) for r in given[0].rows])

    def parts(ref: Any, given: Any, kwargs: Any) -> Ragged:
        return Ragged([part for r in given[0].rows for part in r.unbind(0)])

    yield Sample("batch and static", lambda d: call(d.ragged("second"), 0, 1), parts)
    yield Sample("two", lambda d: call(Ragged([d.tensor(n, 2, 3) for n in d.lengths]), 2, 3), want)


def unflatten(rule: Rule) -> Iterator[Sample]:
    yield sample("behind", "features", lambda b: (2, (3, 1)), lambda r: r.unflatten(1, (3, 1)))
    yield sample("in front", "second", lambda b: (1, (1, 2)), lambda r: r.unflatten(0, (1, 2)), (3,))

    def even(*sizes: int) -> Callable[[Draw], Call]:
        return lambda d: call(Ragged([d.tensor(2 * n, 3) for n in d.lengths], slack=d.slack), 1, sizes)

    def parts(*dims: int) -> Callable[[Any, Any, Any], Ragged]:
        return lambda ref, given, kwargs: Ragged([r.unflatten(0, pair(r, given[2])) for r in given[0].rows], dims)

    def pair(r: Tensor, sizes: tuple[int, ...]) -> list[int]:
        return [len(r) // 2 if n == -1 else n for n in sizes]  # torch infers no size of a row without elements

    yield Sample("ragged and static", even(-1, 2), parts(1))
    yield Sample("static in front of ragged", even(2, -1), parts(2))

    def positions(d: Draw) -> Call:
        like = d.ragged("two")
        return call(Ragged([d.tensor(r.shape[0] * r.shape[1], 3) for r in like.rows], slack=d.slack), 1, like)

    def several(ref: Any, given: Any, kwargs: Any) -> Ragged:
        x, _, like = given
        return Ragged([r.unflatten(0, o.shape[:2]) for r, o in zip(x.rows, like.rows, strict=True)], (1, 2))

    yield Sample("several ragged", positions, several)


def flip(rule: Rule) -> Iterator[Sample]:
    yield sample("static", "features", lambda b: ((2,),), lambda r: r.flip(1))
    yield sample("ragged", "features", lambda b: ((1,),), lambda r: r.flip(0))
    yield sample("second, ragged and static", "second", lambda b: ((2, 3),), lambda r: r.flip(1, 2), modes=LIGHT)
    yield sample("one of two", "two", lambda b: ((1,),), lambda r: r.flip(0))
    yield sample("one of two and static", "two", lambda b: ((2, 3),), lambda r: r.flip(1, 2), modes=LIGHT)
    yield sample("both of two", "two", lambda b: ((1, 2),), lambda r: r.flip(0, 1), modes=LIGHT)

    def rows(ref: Any, given: Any, kwargs: Any) -> Ragged:
        return given[0].with_rows(given[0].rows[::-1])

    yield Sample("rows", lambda d: call(d.ragged(), (0,)), rows)


def roll(rule: Rule) -> Iterator[Sample]:
    yield sample("static", "features", lambda b: (1, 2), lambda r: r.roll(1, 1))
    yield sample("ragged", "features", lambda b: (-2, 1), lambda r: r.roll(-2, 0))
    yield sample("both", "second", lambda b: ((1, 1), (1, 2)), lambda r: r.roll((1, 1), (0, 1)), modes=LIGHT)
    yield sample("one of two", "two", lambda b: (1, 1), lambda r: r.roll(1, 0), modes=LIGHT)
    yield sample("both of two", "two", lambda b: ((-1, 2), (1, 2)), lambda r: r.roll((-1, 2), (0, 1)), modes=LIGHT)

    def rows(ref: Any, given: Any, kwargs: Any) -> Ragged:
        x = given[0].rows
        return given[0].with_rows([x[(i - 1) % len(x)] for i in range(len(x))])

    yield Sample("rows", lambda d: call(d.ragged(), 1, 0), rows)
    yield Sample("one row", lambda d: call(d.ragged(), 1, 0), rows, ("eager",), ((3,),))


RAGGED = {
    "unsqueeze": unsqueeze, "squeeze": squeeze, "expand": expand, "repeat": repeat, "reshape": reshape, "view": reshape,
    "flatten": flatten, "unflatten": unflatten, "flip": flip, "roll": roll,
}  # fmt: skip
