"""Samples of operations that move, join, pad, repeat and make ragged batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from harness import Call, Draw, Layout, Sample, call

import catalogue.resample
from catalogue.indexing import longer
from catalogue.ragged_shape import sample
from tdc.core.rules import MODES, Rule
from tdc.testing.batches import Dense, Ragged

LIGHT = ("eager", "grad", "vmap")


def movedim(rule: Rule) -> Iterator[Sample]:
    yield sample("static", "second", lambda b: (1, 3), lambda r: r.movedim(0, 2), (1,))
    pair = lambda b: ((1, 3), (3, 1))  # noqa: E731
    yield sample("two", "second", pair, lambda r: r.transpose(0, 2), modes=LIGHT)
    yield sample("batch", "features", lambda b: (0, 1), lambda r: r, (0,), 1, LIGHT)


def rot90(rule: Rule) -> Iterator[Sample]:
    for k, modes in ((1, LIGHT), (2, LIGHT), (3, MODES)):
        yield sample(f"{k}", "features", lambda b, k=k: (k, (1, 2)), lambda r, k=k: r.rot90(k, (0, 1)),
                     (1,) if k == 2 else (2,), modes=modes)  # fmt: skip


def flipped(rule: Rule) -> Iterator[Sample]:
    if rule.name == "fliplr":
        yield sample("ragged", "features", lambda b: (), lambda r: r.flip(0))
        return

    def rows(ref: Any, args: Any, kwargs: Any) -> Ragged:
        return args[0].with_rows(args[0].rows[::-1])

    yield Sample("rows", lambda d: call(d.ragged()), rows)


def t(rule: Rule) -> Iterator[Sample]:
    yield sample("flat", "flat", lambda b: (), lambda r: r, (0,), 1)


def tile(rule: Rule) -> Iterator[Sample]:
    yield sample("static", "features", lambda b: (2,) if rule.name != "tile" else ((2,),), lambda r: r.tile(2))


def broadcast_to(rule: Rule) -> Iterator[Sample]:
    yield sample("in front", "features", lambda b: ((4, -1, -1, -1),), lambda r: r.expand(4, *r.shape), (2,), 1)
    yield sample("as it is", "second", lambda b: ((b, 2, -1, 3),), lambda r: r, modes=LIGHT)


def as_other(rule: Rule) -> Iterator[Sample]:
    def draw(d: Draw) -> Call:
        x = Ragged([d.tensor(n, 1) for n in d.lengths], slack=d.slack) if rule.name == "expand_as" else d.ragged()
        return call(x, d.ragged())

    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        return args[0].with_rows([ref(r, o) for r, o in zip(args[0].rows, args[1].rows, strict=True)])

    yield Sample("another", draw, want)


def broadcast_tensors(rule: Rule) -> Iterator[Sample]:
    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        x = args[0]
        each = [ref(*[a.rows[i] if isinstance(a, (Ragged, Dense)) else a for a in args]) for i in range(len(x.rows))]
        return tuple(x.with_rows(list(parts)) for parts in zip(*each, strict=True))

    def draw(d: Draw) -> Call:
        wide = Ragged([d.tensor(n, 1) for n in d.lengths], slack=d.slack)
        return call(wide, d.ragged(), d.tensor(3))

    yield Sample("ragged and dense", draw, want)


def atleast(rule: Rule) -> Iterator[Sample]:
    three = rule.name == "atleast_3d"
    yield sample("flat", "flat", lambda b: (), lambda r: r.unsqueeze(-1) if three else r)
    yield sample("features", "features", lambda b: (), lambda r: r, modes=LIGHT)

    def both(ref: Any, args: Any, kwargs: Any) -> Any:
        return tuple(x.with_rows([r.unsqueeze(-1) if three and r.ndim == 1 else r for r in x.rows]) for x in args)

    yield Sample("several", lambda d: call(d.ragged("flat"), d.ragged()), both, LIGHT)


def stacked(rule: Rule) -> Iterator[Sample]:
    dim = {"vstack": 0, "hstack": 1, "column_stack": 1, "dstack": 2}[rule.name]

    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        xs = args[0]
        if dim == 0:
            return xs[0].with_rows([r for x in xs for r in x.rows])
        pairs = zip(*[x.rows for x in xs], strict=True)
        return xs[0].with_rows(
            [torch.cat([p.unsqueeze(-1) if p.ndim < dim else p for p in parts], dim - 1) for parts in pairs]
        )

    if dim == 1 and rule.kind == "masked":  # the ragged dim of a rectangle does not join, a static one does
        wide = Layout((2,), ())
        yield Sample("static", lambda d: call([d.ragged(wide), d.ragged(wide)]), want)
        return
    yield Sample("features", lambda d: call([d.ragged(), d.ragged()]), want)
    yield Sample("flat", lambda d: call([d.ragged("flat"), d.ragged("flat")]), want, LIGHT)


def channel_shuffle(rule: Rule) -> Iterator[Sample]:
    channels = Layout((4,), (3,))

    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        return args[0].with_rows([ref(r[None], args[1])[0] if r.numel() else r for r in args[0].rows])

    yield Sample("ragged height", lambda d: call(d.ragged(channels), 2), want)
    yield Sample("two", lambda d: call(d.ragged(Layout((4,), (), 2)), 2), want, LIGHT)


def pad(rule: Rule) -> Iterator[Sample]:
    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        x, amount, *rest = args
        return x.with_rows([ref(r, amount, *rest, **kwargs) for r in x.rows])

    yield Sample("static", lambda d: call(d.ragged(), (1, 2), value=0.5), want)
    yield Sample("ragged", lambda d: call(d.ragged(), (0, 0, 1, 2), value=0.5), want)
    yield Sample("second", lambda d: call(d.ragged("second"), (1, 0, 2, 1, 0, 1)), want, LIGHT)
    yield Sample("shorter", lambda d: call(longer(d), (0, -1, -1, 0)), want, LIGHT)
    yield Sample("longer and shorter", lambda d: call(longer(d), (0, 0, 2, -1), value=0.5), want, LIGHT)
    yield Sample("two", lambda d: call(d.ragged(Layout((2,), (), 2)), (1, 0, 2, 1)), want, ("eager", "grad"))
    both = (1, 0, 2, 1, 1, 1)
    yield Sample("two, and static", lambda d: call(d.ragged(Layout((2,), (), 2)), both), want, ("eager", "grad"))
    turned = Layout((2,), ())
    for mode in ("reflect", "replicate", "circular"):
        yield Sample(mode, lambda d, m=mode: call(longer(d, turned, 2), (1, 1), m), want)
        yield Sample(f"{mode}, static", lambda d, m=mode: call(longer(d), (1, 1), m), want, ("eager", "grad"))
    yield Sample("circular, cut", lambda d: call(longer(d, turned, 2), (-1, 1), "circular"), want, LIGHT)
    yield Sample("circular, cut, static", lambda d: call(longer(d), (1, -1), "circular"), want, ("eager", "grad"))


def repeat_interleave(rule: Rule) -> Iterator[Sample]:
    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        x, times, *dim = args
        if not dim:
            return Ragged([ref(r, times) for r in x.rows])
        if dim[0] == 0:
            return x.with_rows([r for r, n in zip(x.rows, counts(times, len(x.rows)), strict=True) for _ in range(n)])
        own = times.rows if isinstance(times, Ragged) else [times] * len(x.rows)
        return x.with_rows([ref(r, n, dim[0] - 1) for r, n in zip(x.rows, own, strict=True)])

    yield Sample("static", lambda d: call(d.ragged(), 2, 2), want)
    yield Sample("static, each", lambda d: call(d.ragged(), torch.tensor([1, 0, 2]), 2), want, ("eager", "grad"))
    yield Sample("rows", lambda d: call(d.ragged("second"), 2, 0), want)
    draw = lambda d: call(d.ragged(), torch.arange(len(d.lengths)), 0)  # noqa: E731
    yield Sample("rows, each", draw, want, ("eager", "grad"))
    yield Sample("ragged", lambda d: call(d.ragged("second"), 3, 2), want)
    yield Sample("flattened", lambda d: call(d.ragged(), 2), want, LIGHT)
    if rule.kind == "nested":
        yield Sample(
            "ragged, each", lambda d: call(d.ragged(), d.ragged("flat", "natural"), 1), want, ("eager", "grad")
        )


def counts(times: Any, rows: int) -> list[int]:
    """Numbers of times for each row."""
    return [times] * rows if isinstance(times, int) else times.tolist()


def unfold(rule: Rule) -> Iterator[Sample]:
    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        x, dim, *rest = args
        return x.with_rows([ref(r, dim - 1, *rest) for r in x.rows])

    yield Sample("static", lambda d: call(d.ragged(), 2, 2, 1), want)
    yield Sample("ragged", lambda d: call(longer(d, "second", 2), 2, 2, 1), want)
    yield Sample("steps", lambda d: call(longer(d, by=2), 1, 2, 2), want, LIGHT)


def pixels(rule: Rule) -> Iterator[Sample]:
    channels = 4 if rule.name == "pixel_shuffle" else 1

    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        return args[0].with_rows([ref(*(r, args[1])) for r in args[0].rows])

    def both(d: Draw) -> Call:
        rows = [d.tensor(channels, 2 * n + 2, 2 * (n % 3 + 1)) for n in d.lengths]
        return call(Ragged(rows, (2, 3), slack=d.slack), 2)

    def height(d: Draw) -> Call:
        return call(d.ragged(Layout((channels,), (2,)), lengths=tuple([2 * n + 2 for n in d.lengths])), 2)

    def thirds(d: Draw) -> Call:
        lengths = tuple([3 * n + 3 for n in d.lengths])
        return call(d.ragged(Layout((9 if channels > 1 else 1,), (3,)), lengths=lengths), 3)

    def narrow(d: Draw) -> Call:
        return call(Ragged([d.tensor(channels, 2 * n + 2, 0) for n in d.lengths], (2, 3), slack=d.slack), 2)

    def sizes(ref: Any, args: Any, kwargs: Any) -> Ragged:
        heights = [r.shape[1] * 2 if channels > 1 else r.shape[1] // 2 for r in args[0].rows]
        return args[0].with_rows([r.new_zeros(4 // channels, n, 0) for r, n in zip(args[0].rows, heights, strict=True)])

    yield Sample("height", height, want)
    yield Sample("two", both, want, LIGHT)
    yield Sample("no pixels", narrow, sizes, ("eager", "compile"))  # torch's own keeps the sizes of such (2.13)
    yield Sample("by three", thirds, want, ("eager", "grad"))


def one_hot(rule: Rule) -> Iterator[Sample]:
    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        return args[0].with_rows([ref(r, args[1]) for r in args[0].rows])

    yield Sample("flat", lambda d: call(d.ragged("flat", "class"), 4), want)
    yield Sample("last", lambda d: call(d.ragged("last", "class"), 5), want, ("eager", "vmap"))


def new(rule: Rule) -> Iterator[Sample]:
    """A tensor of given sizes; of packed rows a batch where sizes are -1."""
    more = (2.5,) if rule.name == "new_full" else ()
    start = (0, 3) if rule.name == "new_empty" else (2, 3)

    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        x, size = args[:2]
        if size[0] == start[0] and -1 not in size:
            return ref(x.rows[0], size, *more)
        return x.with_rows([ref(r, (len(r), size[2]), *more) for r in x.rows])

    yield Sample(
        "tensor", lambda d: call(d.ragged(), start, *more), want, ("eager", "compile", "grad", "vmap", "export")
    )
    if rule.kind == "nested" and rule.name != "new_empty":
        yield Sample("rows", lambda d: call(d.ragged(), (len(d.lengths), -1, 2), *more), want, ("eager", "grad"))


def new_tensor(rule: Rule) -> Iterator[Sample]:
    want = lambda ref, args, kwargs: args[0].rows[0].new_tensor(args[1])  # noqa: E731
    yield Sample("list", lambda d: call(d.ragged(domain="int"), [1, 2]), want)


def new_empty_strided(rule: Rule) -> Iterator[Sample]:
    want = lambda ref, args, kwargs: args[0].rows[0].new_empty((0, 2))  # noqa: E731
    yield Sample("empty", lambda d: call(d.ragged(), (0, 2), (2, 1)), want)


def refused(*more: Any, alone: bool = False) -> Callable[[Rule], Iterator[Sample]]:
    """A call that says why not."""

    def make(rule: Rule) -> Iterator[Sample]:
        yield Sample("refused", lambda d: call(d.ragged(), *more), lambda ref, args, kwargs: args[0])

    return make


RAGGED = {
    "movedim": movedim, "rot90": rot90, "flipud": flipped, "fliplr": flipped, "t": t, "tile": tile,
    "broadcast_to": broadcast_to, "expand_as": as_other, "view_as": as_other, "reshape_as": as_other,
    "broadcast_tensors": broadcast_tensors, "atleast_1d": atleast, "atleast_2d": atleast, "atleast_3d": atleast,
    "vstack": stacked, "hstack": stacked, "column_stack": stacked, "dstack": stacked,
    "channel_shuffle": channel_shuffle, "pad": pad, "repeat_interleave": repeat_interleave,
    "pixel_shuffle": pixels, "pixel_unshuffle": pixels, "one_hot": one_hot, "new_zeros": new, "new_ones": new,
    "new_full": new, "new_empty": new, "new_tensor": new_tensor, "new_empty_strided": new_empty_strided,
    "ravel": refused(), "meshgrid": refused(), "cartesian_prod": refused(), "combinations": refused(),
    "block_diag": refused(), "unfold": lambda rule: unfolded(rule),
    **dict.fromkeys(("view_as_real", "view_as_complex"), lambda rule: parts_of_numbers(rule)),
}  # fmt: skip


def parts_of_numbers(rule: Rule) -> Iterator[Sample]:
    """`view_as_real` and `view_as_complex`."""

    def draw(d: Draw) -> Call:
        if rule.name == "view_as_real":
            return call(d.ragged("features", "complex"))
        return call(Ragged([d.tensor(n, 3, 2) for n in d.lengths], slack=d.slack))

    yield Sample("", draw, lambda ref, args, kwargs: args[0].with_rows([ref(r) for r in args[0].rows]))


def unfolded(rule: Rule) -> Iterator[Sample]:
    """`Tensor.unfold` slides along one dim, `F.unfold` over images."""
    return catalogue.resample.unfold(rule) if rule.op is F.unfold else unfold(rule)
