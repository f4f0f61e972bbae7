"""Samples of reductions that have no identity alone: moments, norms, extremes with their places, order statistics.

One expectation serves them all: torch's own function, on each example where the ragged dim is reduced or stays, on the
examples joined where the batch is reduced, too. Where torch refuses an example without elements, `NONE` says what a row
without elements gives.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from harness import EAGER, Call, Draw, Sample, call
from torch import Tensor

from tdc.core.rules import MODES, Rule
from tdc.testing.batches import Ragged

LIGHT = ("eager", "grad", "vmap")
PLAIN = ("eager", "grad")
NONE: dict[str, tuple[Any, ...]] = {
    "argmax": (-1,), "argmin": (-1,), "max": (-math.inf, -1), "min": (math.inf, -1), "aminmax": (math.inf, -math.inf),
    "vector_norm": (0,), "norm": (0,), "hash_tensor": (0,), "median": (math.nan, -1), "nanmedian": (math.nan, -1),
    "mode": (math.nan, -1), "quantile": (math.nan,), "nanquantile": (math.nan,),
}  # fmt: skip
LINES = {"logsumexp", "max", "var_mean", "nanmean"}


def parts(x: Any) -> tuple[Tensor, ...]:
    """The results of an operation."""
    return (x,) if isinstance(x, Tensor) else tuple(x)


def of_row(rule: Rule, ref: Any, row: Tensor) -> tuple[Tensor, ...]:
    """The results for one example; `NONE` in place of what torch refuses for lack of elements."""
    try:
        return parts(ref(row))
    except (RuntimeError, IndexError):
        assert row.numel() == 0
    full = parts(ref(row.new_ones([max(n, 1) for n in row.shape])))
    none = [torch.full_like(t, nothing(v, t.dtype)) for t, v in zip(full, NONE[rule.name], strict=True)]
    return tuple(t + row.sum() * 0 if t.is_floating_point() else t for t in none)  # still part of the autograd graph


def nothing(value: float, dtype: torch.dtype) -> float:
    """A value of `NONE` in a dtype that may have no infinity."""
    if dtype.is_floating_point or math.isfinite(value):
        return value
    return 0 if math.isnan(value) else torch.iinfo(dtype).max if value > 0 else torch.iinfo(dtype).min


def expected(rule: Rule, lead: int, ref: Any, args: Any, kwargs: Any) -> Any:
    """What a reduction gives by examples; its results have `lead` dims in front of all others."""
    warnings.filterwarnings("ignore", "(std|var)(_mean)?..: degrees of freedom")
    x, rest = args[0], args[1:]
    dim, keep = kwargs.get("dim"), kwargs.get("keepdim", False)
    options = {k: v for k, v in kwargs.items() if k not in ("dim", "keepdim")}
    if dim is None:
        return unpacked(parts(ref(torch.cat([r.flatten() for r in x.rows]), *rest, **options)))
    dims = [d % (x.rows[0].ndim + 1) for d in ((dim,) if isinstance(dim, int) else dim)]
    inner: Any = tuple(d - (d > x.batch_dim) for d in dims if d != x.batch_dim)
    if rule.name not in ("count_nonzero", "trapezoid"):
        options["keepdim"] = keep
    one = partial(ref, dim=inner[0] if isinstance(dim, int) else inner, **options)
    run = (lambda r: one(r, *rest)) if rest else one
    if x.batch_dim in dims:
        joined = torch.cat(x.rows, x.row_dims()[0])
        return unpacked(tuple(t.unsqueeze(x.batch_dim) if keep else t for t in parts(run(joined))))
    columns = list(zip(*[of_row(rule, run, r) for r in x.rows], strict=True))
    place = x.batch_dim - (0 if keep else sum(d < x.batch_dim for d in dims)) + lead
    if set(x.dims) <= set(dims):
        return unpacked(tuple(torch.stack(c, place) for c in columns))
    kept = [d for d in range(x.rows[0].ndim + 1) if keep or d not in dims]
    moved = tuple(kept.index(d) + lead for d in x.dims if d not in dims)
    left = [r for r, d in zip(x.row_dims(), x.dims, strict=True) if d not in dims]
    cut = [(k - (k > place), r) for k, r in zip(moved, left, strict=True)]
    return unpacked(
        tuple(Ragged([crop(t, r, cut) for t, r in zip(c, x.rows, strict=True)], moved, place) for c in columns)
    )


def crop(t: Tensor, row: Tensor, dims: list[tuple[int, int]]) -> Tensor:
    """A result of a row without elements that torch gives for one element only."""
    for k, d in dims:
        t = t.narrow(k, 0, row.shape[d])
    return t


def unpacked(results: tuple[Any, ...]) -> Any:
    """One result by itself."""
    return results[0] if len(results) == 1 else results


def of(
    rule: Rule, layout: str, dim: Any, *rest: Any, modes: tuple[str, ...] = MODES, dom: str = "real", at: int = 0,
    lead: int = 0, **options: Any,
) -> Sample:  # fmt: skip
    """A call `op(x, *rest, dim=dim, **options)`; without a dim where it is None."""

    def draw(d: Draw) -> Call:
        given = options if dim is None else {"dim": dim, **options}
        return call(d.ragged(layout, dom, batch_dim=at), *rest, **given)

    words = [
        layout, f"dim {dim}", *map(str, rest), *[f"{k} {v}" for k, v in options.items()], *([dom] * (dom != "real")),
    ]  # fmt: skip
    return Sample(", ".join(words) + ", batch second" * at, draw, partial(expected, rule, lead), modes)


def common(rule: Rule, *rest: Any, several: bool = True, dom: str = "real", keep: bool = True) -> Iterator[Sample]:
    """The dims that each of these reductions takes."""
    more = {"keepdim": True} if keep else {}
    yield of(rule, "features", 1, *rest, dom=dom)
    yield of(rule, "features", 0, *rest, dom=dom, modes=LIGHT, at=1, **more)
    yield of(rule, "features", 2, *rest, dom=dom, modes=LIGHT)
    yield of(rule, "second", 1, *rest, dom=dom, modes=LIGHT, **more)
    yield of(rule, "last", -1, *rest, dom=dom, modes=LIGHT)
    if several:
        yield of(rule, "second", (1, 2), *rest, dom=dom, modes=LIGHT)
        yield of(rule, "features", (0, 1), *rest, dom=dom, modes=LIGHT, **more)
        yield of(rule, "two", (1, 2), *rest, dom=dom, modes=LIGHT)
    yield of(rule, "two", 1, *rest, dom=dom, modes=LIGHT, **more)
    yield of(rule, "two", 2, *rest, dom=dom, modes=MODES if rule.name in LINES else LIGHT)


def nans(rule: Rule) -> Iterator[Sample]:
    yield from common(rule)
    yield of(rule, "features", 1, modes=PLAIN, dom="special")
    yield of(rule, "features", None, modes=PLAIN, dom="special")


def counted(rule: Rule) -> Iterator[Sample]:
    yield from common(rule, dom="whole", keep=False)
    yield of(rule, "features", None, dom="whole", modes=LIGHT)


def moments(rule: Rule) -> Iterator[Sample]:
    yield from common(rule)
    yield of(rule, "features", None, modes=LIGHT)
    yield of(rule, "features", 1, modes=LIGHT, correction=0)
    yield of(rule, "features", (1, 2), modes=PLAIN, correction=2, keepdim=True)
    yield of(rule, "features", 1, modes=PLAIN, unbiased=False)
    yield of(rule, "features", 1, modes=PLAIN, dom="half", correction=0)


def norms(rule: Rule) -> Iterator[Sample]:
    yield from common(rule)
    for p in (0, 1, 0.5, 3, math.inf):
        yield of(rule, "features", 1, p, modes=PLAIN if p else ("eager",))
    yield replace(of(rule, "features", 1, -math.inf, modes=PLAIN), batches=EAGER[1:])  # of nothing it is inf
    if rule.name == "vector_norm":
        yield of(rule, "features", (1, 2), math.inf, modes=PLAIN)
    yield of(rule, "features", None, modes=LIGHT)
    yield of(rule, "features", 1, 2, dtype=torch.float64, modes=PLAIN)


def distances(rule: Rule) -> Iterator[Sample]:
    def draw(d: Draw, *p: float) -> Call:
        x = d.ragged()
        return call(x, d.ragged(like=x), *p)

    def want(ref: Any, args: Any, kwargs: Any) -> Tensor:
        return ref(*[torch.cat([r.flatten() for r in x.rows]) for x in args[:2]], *args[2:])

    yield Sample("two", draw, want)
    yield Sample("one", lambda d: draw(d, 1.0), want, LIGHT)


def places(rule: Rule) -> Iterator[Sample]:
    """argmax and argmin, max and min with a dim: among equal elements the first."""
    yield from common(rule, several=False)
    yield of(rule, "features", 1, modes=PLAIN, dom="natural")
    if rule.kind == "nested" or rule.name in ("max", "min"):
        yield of(rule, "features", None, modes=LIGHT)
    yield of(rule, "features", 1, modes=PLAIN, dom="special")


def extremes(rule: Rule) -> Iterator[Sample]:
    yield from places(rule)

    def draw(d: Draw) -> Call:
        x = d.ragged()
        return call(x, d.ragged(like=x))

    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        return args[0].with_rows([ref(a, b) for a, b in zip(args[0].rows, args[1].rows, strict=True)])

    yield Sample("two batches", draw, want)


def both_ends(rule: Rule) -> Iterator[Sample]:
    modes = PLAIN if torch.__version__ >= "2.12" else ("eager",)  # torch 2.11 has no derivative of it
    yield from common(rule, several=False, dom="real" if len(modes) > 1 else "constant")
    yield of(rule, "features", None, modes=modes)


def bins(rule: Rule) -> Iterator[Sample]:
    def want(ref: Any, args: Any, kwargs: Any) -> Tensor:
        return ref(torch.cat([r.flatten() for r in args[0].rows]), *args[1:], **kwargs)

    yield Sample("bins", lambda d: call(d.ragged(domain="constant"), 4), want)
    yield Sample("range", lambda d: call(d.ragged(domain="constant"), bins=3, min=0, max=1), want, PLAIN)


def dtypes(rule: Rule) -> Iterator[Sample]:
    def want(ref: Any, args: Any, kwargs: Any) -> bool:
        return ref(args[0].rows[0])

    for dom in ("real", "natural", "bool"):
        yield Sample(dom, lambda d, dom=dom: call(d.ragged(domain=dom)), want)


RAGGED: dict[str, Callable[[Rule], Iterator[Sample]]] = {
    "nansum": nans, "nanmean": nans, "count_nonzero": counted, "logsumexp": common,
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), moments),
    **dict.fromkeys(("vector_norm", "norm"), norms), "dist": distances, "hash_tensor": common,
    **dict.fromkeys(("argmax", "argmin"), places), **dict.fromkeys(("max", "min"), extremes), "aminmax": both_ends,
    "histc": bins,
    **dict.fromkeys(("is_floating_point", "is_complex", "is_signed"), dtypes),
}  # fmt: skip
