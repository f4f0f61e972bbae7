"""Samples of orders and scans along one dim of ragged batches: sort, topk, cumsum, order statistics, differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from harness import Call, Draw, Sample, call

from catalogue.statistics import LIGHT, PLAIN, common, of, parts, unpacked
from tdc.core.rules import MODES, Rule
from tdc.testing.batches import Ragged

LONG = ((3, 2, 5), (4, 4))
COUNTED = ("eager", "grad")  # the number of results is data


def rowwise(ref: Any, args: Any, kwargs: Any) -> Any:
    """The operation on each row, whose results have the dims of the rows."""
    x, dim = args[0], kwargs["dim"] % (args[0].rows[0].ndim + 1)
    inner = {**kwargs, "dim": dim - (dim > x.batch_dim)}
    rows = [parts(ref(r, *args[1:], **inner)) for r in x.rows]
    return unpacked(tuple(x.with_rows(list(column)) for column in zip(*rows, strict=True)))


def each(
    layout: str, dim: int, *rest: Any, modes: tuple[str, ...] = MODES, dom: str = "real", at: int = 0, **options: Any
) -> Sample:
    """A call `op(x, *rest, dim=dim)` that keeps the dims of x."""

    def draw(d: Draw) -> Call:
        return call(d.ragged(layout, dom, batch_dim=at), *rest, dim=dim, **options)

    words = [
        layout, f"dim {dim}", *map(str, rest), *[f"{k} {v}" for k, v in options.items()], *([dom] * (dom != "real")),
    ]  # fmt: skip
    return Sample(", ".join(words) + ", batch second" * at, draw, rowwise, modes)


def sorting(rule: Rule) -> Iterator[Sample]:
    yield each("features", 1, stable=True)
    yield each("features", 2, descending=True, modes=LIGHT)
    yield each("features", 0, descending=True, stable=True, at=1, modes=LIGHT)
    yield each("second", 2, descending=True, stable=True, modes=LIGHT, dom="natural")
    yield each("flat", -1, stable=True, modes=LIGHT)
    yield each("features", 1, stable=True, modes=PLAIN, dom="special")
    yield each("two", 1, stable=True, modes=MODES if rule.name == "sort" else LIGHT)
    yield each("two", 2, descending=True, modes=LIGHT)


def topk(rule: Rule) -> Iterator[Sample]:
    for sample in (
        of(rule, "features", 1, 2, modes=LIGHT), of(rule, "second", 2, 1, largest=False, modes=LIGHT),
        of(rule, "last", 2, 2, modes=LIGHT), of(rule, "two", 1, 2),
    ):  # fmt: skip
        yield replace(sample, batches=LONG, expect=top, modes=PLAIN)
    yield replace(of(rule, "two", 2, 1), expect=top)
    for layout, dim in (("features", 1), ("last", 2), ("two", 1), ("two", 2)):
        yield replace(of(rule, layout, dim, 0), expect=top, modes=LIGHT)
    yield each("features", 2, 2)


def top(ref: Any, args: Any, kwargs: Any) -> Any:
    """k of each row are a dense tensor, in place of the ragged dim; of several ragged dims the others stay."""
    x, dim = args[0], kwargs["dim"]
    rows = [parts(ref(r, *args[1:], **{**kwargs, "dim": dim - 1})) for r in x.rows]
    left = tuple([d for d in x.dims if d != dim])
    return tuple(Ragged(list(c), left) if left else torch.stack(c) for c in zip(*rows, strict=True))


def kth(rule: Rule) -> Iterator[Sample]:
    for sample in (of(rule, "features", 1, 2, modes=PLAIN), of(rule, "second", 2, 1, keepdim=True, modes=PLAIN)):
        yield replace(sample, batches=LONG)
    yield replace(of(rule, "two", 1, 2, keepdim=True, modes=PLAIN), batches=LONG)
    yield of(rule, "two", 2, 1, modes=LIGHT)
    yield of(rule, "features", 2, 2)


def statistics(rule: Rule) -> Iterator[Sample]:
    yield from common(rule, several=False)
    yield of(rule, "features", 1, modes=PLAIN, dom="special")
    yield of(rule, "features", None, modes=PLAIN)


def modal(rule: Rule) -> Iterator[Sample]:
    yield from common(rule, several=False, dom="whole")
    yield of(rule, "second", 2, modes=PLAIN, dom="natural")

    def last(ref: Any, args: Any, kwargs: Any) -> Any:
        rows = [parts(ref(r)) for r in args[0].rows]
        return tuple(args[0].with_rows(list(column)) for column in zip(*rows, strict=True))

    yield Sample("no dim", lambda d: call(d.ragged("features", "natural")), last, PLAIN)


def quantiles(rule: Rule) -> Iterator[Sample]:
    modes = MODES if torch.__version__ >= "2.12" else LIGHT  # torch 2.11 cannot trace its own
    yield of(rule, "features", 1, 0.3)
    yield of(rule, "features", 2, 0.3, modes=modes)
    yield of(rule, "features", 1, torch.tensor([0.2, 0.7]), modes=LIGHT, keepdim=True, lead=1)
    yield of(rule, "second", 1, torch.tensor([0.2, 0.7, 0.5]), modes=PLAIN, lead=1)
    for how in ("lower", "higher", "nearest", "midpoint"):
        yield of(rule, "last", 2, 0.4, modes=PLAIN, interpolation=how)
    yield of(rule, "features", None, 0.5, modes=PLAIN)
    yield of(rule, "features", 1, 0.5, modes=("eager",), dom="special")
    yield of(rule, "two", 1, 0.3, modes=MODES if rule.name == "quantile" else LIGHT)
    yield of(rule, "two", 2, torch.tensor([0.2, 0.7]), modes=LIGHT, keepdim=True, lead=1)


def scan(rule: Rule) -> Iterator[Sample]:
    yield each("features", 1)
    yield each("features", 2, modes=LIGHT)
    yield each("second", 2, modes=LIGHT)
    yield each("two", 1, modes=PLAIN)
    yield each("features", 0, at=1, modes=PLAIN)


def pairs(label: str, dim: int, modes: tuple[str, ...], layout: str = "features", **options: Any) -> Sample:
    return replace(each(layout, dim, modes=modes, **options), label=label)


def differences(rule: Rule) -> Iterator[Sample]:
    yield pairs("ragged", 1, COUNTED)
    yield pairs("twice", 1, COUNTED, n=2)
    yield pairs("static", 2, MODES)
    yield pairs("two, first", 1, COUNTED, "two", n=2)
    yield pairs("two, second", 2, COUNTED, "two")

    def joined(d: Draw) -> Call:
        return call(d.ragged(), dim=1, prepend=d.ragged())

    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        pairs = zip(args[0].rows, kwargs["prepend"].rows, strict=True)
        return args[0].with_rows([ref(r, dim=0, prepend=p) for r, p in pairs])

    if rule.kind == "nested":
        yield Sample("prepend", joined, want, COUNTED)


def points(rule: Rule) -> Iterator[Sample]:
    """Areas between dense points along a static dim: one for all examples, or others for each place beside it."""

    def draw(d: Draw, layout: str, dim: int, *sizes: int) -> Call:
        return call(d.ragged(layout), d.tensor(*sizes), dim=dim)

    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        y, x, dim = args[0], args[1], kwargs["dim"] - 1
        rows = [ref(r, x, dim=dim) for r in y.rows]
        return Ragged(rows, tuple(d - (d > dim + 1 and rule.name == "trapezoid") for d in y.dims), y.batch_dim)

    yield Sample("points", lambda d: draw(d, "features", 2, 3), want, PLAIN)
    yield Sample("points in front", lambda d: draw(d, "second", 1, 2), want, PLAIN)
    yield Sample("points of each place", lambda d: draw(d, "second", 1, 2, 1, 3), want, PLAIN)


def areas(rule: Rule) -> Iterator[Sample]:
    yield replace(of(rule, "features", 1, modes=COUNTED), label="ragged")
    yield replace(of(rule, "features", 1, modes=COUNTED, dx=0.5), label="ragged, dx")
    yield of(rule, "features", 2)
    yield replace(of(rule, "two", 1, modes=COUNTED), label="two, first", batches=LONG)
    yield replace(of(rule, "two", 2, modes=COUNTED, dx=0.5), label="two, second, dx")
    yield from points(rule)


def running_areas(rule: Rule) -> Iterator[Sample]:
    yield pairs("ragged", 1, COUNTED)
    yield pairs("two", 1, COUNTED, "two")
    yield pairs("static", 2, MODES, dx=0.5)
    yield from points(rule)


def searched(rule: Rule) -> Iterator[Sample]:
    bounds = torch.tensor([-1.0, 0.0, 1.0])

    def draw(d: Draw, **options: Any) -> Call:
        return call(bounds, d.ragged(), **options)

    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        return args[1].with_rows([ref(args[0], r, **kwargs) for r in args[1].rows])

    yield Sample("plain", draw, want)
    yield Sample("right", lambda d: draw(d, side="right"), want, PLAIN)


def distinct(rule: Rule) -> Iterator[Sample]:
    """Each row's own distinct elements; torch has no derivative of them."""

    def draw(d: Draw, layout: str, dim: int, dom: str, **options: Any) -> Call:
        x = d.ragged(layout, dom, batch_dim=0)
        return call(replace(x, rows=[r.detach() for r in x.rows]), dim=dim, **options)

    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        x, options = args[0], {**kwargs, "dim": kwargs["dim"] - 1}
        columns = list(zip(*[parts(ref(r, **options)) for r in x.rows], strict=True))
        return unpacked((Ragged(list(columns[0]), x.dims), *[Ragged(list(c)) for c in columns[1:]]))

    every = {"return_inverse": True, "return_counts": True}
    yield Sample("flat", lambda d: draw(d, "flat", 1, "class", **every), want)
    yield Sample("values alone", lambda d: draw(d, "flat", 1, "coin"), want, PLAIN)
    yield Sample("counts", lambda d: draw(d, "flat", 1, "bool", return_counts=True), want, PLAIN)
    yield Sample("slices", lambda d: draw(d, "features", 1, "bit", **every), want, ("eager", "compile"))
    yield Sample("slices of floats", lambda d: draw(d, "second", 2, "coin", return_inverse=True), want, ("eager",))


def binned(rule: Rule) -> Iterator[Sample]:
    """Counts up to the largest number of all rows, as each row has with that `minlength`."""

    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        x, w = args[0], kwargs.get("weights")
        weights = w.rows if w is not None else [None] * len(x.rows)
        size = max([kwargs.get("minlength", 0), *[int(r.max()) + 1 for r in x.rows if len(r)]])
        return torch.stack([ref(r, w, size) for r, w in zip(x.rows, weights, strict=True)])

    def weighted(d: Draw) -> Call:
        x = d.ragged("flat", "natural")
        return call(x, weights=d.ragged("flat", "constant", like=x), minlength=9)

    yield Sample("natural", lambda d: call(d.ragged("flat", "natural")), want)
    yield Sample("minlength", lambda d: call(d.ragged("flat", "class"), minlength=2), want, PLAIN)
    yield Sample("weights", weighted, want, ("eager", "grad", "compile"))


def refused(rule: Rule) -> Iterator[Sample]:
    yield Sample("a batch", lambda d: call(d.ragged()), lambda ref, args, kwargs: None)


RAGGED: dict[str, Callable[[Rule], Iterator[Sample]]] = {
    "sort": sorting, "argsort": sorting, "topk": topk, "kthvalue": kth, "median": statistics, "nanmedian": statistics,
    "mode": modal, "quantile": quantiles, "nanquantile": quantiles, "diff": differences, "trapezoid": areas,
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"), scan),
    "cumulative_trapezoid": running_areas, "searchsorted": searched,
    **dict.fromkeys(("unique", "unique_consecutive"), distinct), "bincount": binned, "msort": refused,
}  # fmt: skip
