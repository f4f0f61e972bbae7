"""Samples of reductions: static dims, the ragged dim, batch and ragged, everything, with and without keepdim."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from harness import EAGER, Call, Draw, Layout, Sample, call
from torch import Tensor

from tdc.core.rules import MODES, Rule
from tdc.testing.batches import Dict, Ragged

LIGHT = ("eager", "grad", "vmap")
TRUTH = {"any", "all"}
EXTREMES = {"amax", "amin"}
IMAGES = Layout((2,), (), 2)
ONE_DIM = {"prod"}  # torch takes one dim


def reduced(rule: Rule, x: Tensor, dims: Any, keepdim: bool, kwargs: Any) -> Tensor:
    """The reduction of a dense example over several dims; an empty dim gives the identity, an empty mean NaN."""
    dtype = rule.ref(x.new_ones(1), 0, **kwargs).dtype
    for d in sorted([d % x.ndim for d in dims], reverse=True):
        if x.shape[d]:
            x = rule.ref(x, d, keepdim, **kwargs)
        else:
            sizes = [1 if i == d else n for i, n in enumerate(x.shape) if keepdim or i != d]
            full = x.new_full(sizes, empty(rule, x.dtype), dtype=dtype)
            x = full + x.sum() * 0 if full.is_floating_point() else full  # still part of the autograd graph
    return x


def empty(rule: Rule, dtype: torch.dtype) -> Any:
    """What a reduction of nothing gives."""
    assert rule.identity is not None
    if rule.name == "mean":
        return math.nan
    if math.isinf(rule.identity) and not dtype.is_floating_point:
        return torch.iinfo(dtype).max if rule.identity > 0 else torch.iinfo(dtype).min
    return rule.identity


def expected(rule: Rule, ref: Any, args: Any, kwargs: Any) -> Any:
    """The result by examples: rows where the ragged dim stays, else a dense tensor with the batch at its place."""
    x, dim, keep = args[0], args[1] if len(args) > 1 else kwargs.get("dim"), kwargs.get("keepdim", False)
    rest = {k: v for k, v in kwargs.items() if k not in ("dim", "keepdim")}
    ndim = x.rows[0].ndim + 1
    dims = range(ndim) if dim is None else [d % ndim for d in ((dim,) if isinstance(dim, int) else dim)]
    inner = [d - (d > x.batch_dim) for d in dims if d != x.batch_dim]
    ragged = [d for d in x.row_dims() if d in inner]
    if dim is None:
        return reduced(rule, torch.cat([r.flatten() for r in x.rows]), (0,), False, rest)
    if x.batch_dim in dims:
        joined = over_batch(rule, x, rest) if not ragged else torch.cat(x.rows, ragged[0])
        out = reduced(rule, joined, inner, keep, rest)
        return out.unsqueeze(x.batch_dim) if keep else out
    rows = [reduced(rule, r, inner, keep, rest) for r in x.rows]
    if len(ragged) == len(x.dims):
        at = x.batch_dim if keep else x.batch_dim - sum(d < x.batch_dim for d in dims)
        return torch.stack(rows, at)
    kept = [d for d in range(ndim) if keep or d not in dims]
    return Ragged(rows, tuple(kept.index(d) for d in x.dims if d not in dims), kept.index(x.batch_dim))


def over_batch(rule: Rule, x: Ragged, rest: Any) -> Tensor:
    """Position by position over the rows that have it, as a rectangle does."""
    (d,) = x.row_dims()
    longest = max(r.shape[d] for r in x.rows) + x.slack
    columns = [[r.select(d, i) for r in x.rows if r.shape[d] > i] for i in range(longest)]
    none = x.rows[0].new_zeros((0, *x.rows[0].select(d, 0).shape))
    parts = [reduced(rule, torch.stack(c) if c else none, (0,), False, rest) for c in columns]
    return torch.stack(parts, d)


CASES: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("features", 2, MODES), ("features", 1, MODES), ("features", -1, LIGHT), ("features", (0, 1), MODES),
    ("features", (1, 2), LIGHT), ("features", (0, 1, 2), LIGHT), ("features", None, MODES), ("flat", 1, LIGHT),
    ("flat", (0, 1), LIGHT), ("flat", None, LIGHT), ("second", 1, MODES), ("second", 2, MODES), ("second", 3, LIGHT),
    ("second", (1, 3), LIGHT), ("second", (1, 2), LIGHT), ("second", (0, 2), LIGHT), ("second", (0, 1, 2, 3), LIGHT),
    ("last", 1, LIGHT), ("last", 2, LIGHT), ("two", 3, MODES), ("two", None, LIGHT),
    ("two", 1, MODES), ("two", 2, MODES), ("two", (2, 3), LIGHT), ("two", (1, 3), LIGHT), ("images", 3, LIGHT),
    ("images", (1, 2), LIGHT),
)  # fmt: skip
MASKED_CASES: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("features", 0, MODES), ("features", (0, 2), LIGHT), ("two", (1, 2), MODES), ("two", (1, 2, 3), LIGHT),
)  # fmt: skip


def reduction(rule: Rule) -> Iterator[Sample]:
    """Every combination of dims that the container has."""
    dom, want = "bool" if rule.name in TRUTH else "real", partial(expected, rule)

    def of(layout: str, dim: Any, modes: tuple[str, ...], dom: str = dom, at: int = 0, **options: Any) -> Sample:
        def draw(d: Draw) -> Call:
            x = d.ragged(IMAGES if layout == "images" else layout, dom, batch_dim=at)
            return call(x, **options) if dim is None else call(x, dim, **options)

        label = ", ".join([layout, f"dim {dim}", *[f"{k} {v}" for k, v in options.items()], *([dom] * (dom != "real"))])
        return Sample(label if at == 0 else f"{label}, batch at {at}", draw, want, modes)

    for layout, dim, modes in CASES + MASKED_CASES * (rule.kind == "masked"):
        if isinstance(dim, tuple) and rule.name in ONE_DIM:
            continue
        yield of(layout, dim, modes)
        if dim is not None:
            yield of(layout, dim, LIGHT, keepdim=True)
    for dim in (0, 2) if rule.name in ONE_DIM else (0, 2, (0, 1), (0, 2)):
        yield of("features", dim, LIGHT, at=1)
        yield of("features", dim, LIGHT, at=1, keepdim=True)
    for dim in (0, 1):
        yield of("two", dim, LIGHT, at=2)
        yield of("two", dim, LIGHT, at=2, keepdim=True)
    for dim in (1, 2) if rule.name in ONE_DIM else (1, 2, (0, 1)):
        if rule.name != "mean":
            yield of("features", dim, LIGHT, "natural")
        if rule.name not in TRUTH and rule.name != "mean":
            yield of("features", dim, LIGHT, "half")
        if rule.name in ("sum", "prod", "mean"):
            yield of("features", dim, LIGHT, dtype=torch.float64)
    for dim in (1,) if rule.name in ONE_DIM | EXTREMES else (1, (0, 1)):
        draw = of("features", dim, MODES).draw
        yield Sample(f"no elements, dim {dim}", draw, want, ("eager", "grad"), ((0, 0),))


def reduction_tensordict(rule: Rule) -> Iterator[Sample]:
    """Over batch dims, leaf by leaf."""

    def of(dim: Any, modes: tuple[str, ...] = MODES, **options: Any) -> Sample:
        def draw(d: Draw) -> Call:
            size = (len(d.lengths), 2)
            dom = "bool" if rule.name in TRUTH else "real"
            x = Dict({"a": d.tensor(*size, 3, domain=dom), ("b", "c"): d.tensor(*size, domain=dom)}, size)
            return call(x, **options) if dim is None else call(x, dim, **options)

        def want(ref: Any, args: Any, kwargs: Any) -> Any:
            x = args[0]
            if dim is None and rule.name in TRUTH:  # one answer for all leaves
                return ref(torch.cat([leaf.flatten() for leaf in x.leaves.values()]))
            dims = {d % 2 for d in ((0, 1) if dim is None else (dim,) if isinstance(dim, int) else dim)}
            keep = options.get("keepdim", False)
            size = tuple(1 if i in dims else n for i, n in enumerate(x.size) if keep or i not in dims)
            return Dict({k: reduced(rule, v, dims, keep, {}) for k, v in x.leaves.items()}, size)

        return Sample(f"dim {dim} {options or ''}".strip(), draw, want, modes, EAGER)

    yield of(0)
    yield of(1)
    for dim in (-1, None) if rule.name in ONE_DIM else (-1, (0, 1), None):
        yield of(dim, LIGHT)
    yield of(1, keepdim=True)


RAGGED = {"reduction": reduction}
DICTS = {"reduction": reduction_tensordict}
