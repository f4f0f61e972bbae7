"""Scans along one dim: cumulative sums, products and extremes, differences, the trapezoidal rule.

    cumsum(x, 1)      each example for itself      diff(x, dim=1)      examples become one shorter, empty ones stay so

A scan along a ragged dim runs on a rectangle: padding comes after the real elements, and a scan never looks ahead, so
that it is exact whatever padding holds. Differences and trapezoids look at neighbours on packed values.

Invariant: the batch size stays, except that `diff` of a TensorDict makes its dim shorter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import expect_number, normal_dim
from tdc.core.dynamo import certain, readable
from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.core.rules import define, note_syncs
from tdc.core.typing import Op
from tdc.layout.segments import elements, gather_spans, lengths_of, on_host_too, sizes_on_host, take_spans
from tdc.layout.structure import Structure, remember
from tdc.ops.rectangle import rectangle, repacked
from tdc.ops.reduce.along_dim import along_static, named_result, ragged_dim
from tdc.ops.reduce.partial_ragged import along_lines, by_lines
from tdc.ops.reduce.product import cumprod
from tdc.ops.tensordict.batch import along
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import Ragged, map_results, sizes_along


def scan_ragged(op: Op, fill: float, x: Any, dim: int, **kwargs: Any) -> Ragged | tuple[Ragged, ...]:
    """A scan of each example, or of each position along a static dim."""
    d = ragged_dim(op, x, dim)
    if d is None:
        beside = x._structure.packed_dim if isinstance(x, NestedTensor) else x.ragged_dims[0]
        return along_static(op, x, dim, lambda v, axis: scanned(op, v, axis, beside, **kwargs))
    data = rectangle(x, fill)
    if op is torch.logcumsumexp and data.dtype.is_complex and data.requires_grad and data.numel() and readable():
        return repacked(row_by_row(op, data, x, d), x)
    return map_results(scanned(op, data, d, d, **kwargs), lambda t: repacked(t, x))


def row_by_row(op: Op, data: Tensor, x: Any, dim: int) -> Tensor:
    """A scan of the rows of a rectangle, each without its padding.

    Where a cotangent is 0, as those of padding are, torch's second derivative of a complex `logcumsumexp` is NaN, for
    all elements in front of it, too.
    """
    longest, batch = data.shape[dim], x._batch_dim - (x._batch_dim > dim)
    rows = data.movedim(dim, -1).unbind(batch)
    found = [op(row[..., :n], -1) for row, n in zip(rows, sizes_along(x, dim).tolist(), strict=True)]
    return torch.stack([F.pad(row, (0, longest - row.shape[-1])) for row in found], batch).movedim(-1, dim)


def scanned(op: Op, values: Tensor, axis: int, beside: int, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
    """A scan of a tensor.

    Scans and their derivatives branch on tensors of at most one element. A graph may not know that there are more: then
    two are added at the end of the dim `beside`, and one at the end of each other dim that may be empty. Empty tensors
    get them, too, since the forward-mode derivative of torch's `logcumsumexp` fails on them (2.13).
    """
    run = EXTREMES.get(op) or FOR_GRAPHS.get(op, op)
    if certain(math.prod(values.shape) > 1):
        return run(values, axis, **kwargs)
    more = [2 if d == beside else int(not certain(n > 0)) for d, n in enumerate(values.shape)]
    padded = F.pad(values, [n for k in reversed(more) for n in (0, k)], value=1)
    out = run(padded, axis, **kwargs)

    def cut(t: Tensor) -> Tensor:
        for d, k in enumerate(more):
            t = t.narrow(d, 0, values.shape[d]) if k else t
        return t

    return map_results(out, cut)


def extremes(op: Op, x: Tensor, dim: int) -> tuple[Any, ...]:
    """`cummax` or `cummin` by gathering, whose gradient torch can vmap."""
    where = op(x.detach(), dim).indices
    return named_result(op, x.gather(dim, where), where)


def of_leaf(op: Op, x: Any, dim: int, **kwargs: Any) -> Any:
    """A scan of a leaf of a TensorDict, which may be ragged."""
    return FOR_GRAPHS[op](x, dim, **kwargs) if isinstance(x, Tensor) else op(x, dim, **kwargs)


def neighbours(op: Op, x: Any, dim: int, fn: Callable[[Tensor, Tensor], Tensor]) -> Ragged:
    """`fn(later, former)` of all neighbours along a dim, which becomes one shorter."""
    d = ragged_dim(op, x, dim)
    if d is None:
        return along_static(op, x, dim, partial(along_axis, fn))
    if by_lines(op, x, d):
        return along_lines(op, partial(neighbours, op, fn=fn), x, d, shorter)
    if isinstance(x, MaskedBatch):  # padding is 0 before and after: no gradient comes out of it
        out = build_masked(along_axis(fn, x.filled(0), d), shorter(x.lengths), x.ragged_dims, x.batch_dim)
        return out.with_data(out.data.masked_fill(~out.mask, 0))
    s = x.structure
    known = on_host_too(s, shorter)
    offsets, first = take_spans(s.offsets[:-1], shorter(lengths_of(s)), total=elements(known))
    spans = Structure(offsets, None, s.extent, s.packed_dim, s.batch_dim, 1).marked()
    remember(sizes_on_host, spans, known)
    former, later = [gather_spans(x.values, s.packed_dim, index) for index in (first, first + 1)]
    return build_nested(spans, fn(later, former))


def shorter(lengths: Tensor) -> Tensor:
    return (lengths - 1).clamp(min=0)


def along_axis(fn: Callable[[Tensor, Tensor], Tensor], values: Tensor, axis: int) -> Tensor:
    size = max(values.shape[axis] - 1, 0)
    return fn(values.narrow(axis, values.shape[axis] - size, size), values.narrow(axis, 0, size))


def less(later: Tensor, former: Tensor) -> Tensor:
    """Their difference; of truth values the exclusive or, as torch has it."""
    return later ^ former if later.dtype == torch.bool else later - former


def diff_ragged(x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Ragged:
    """Differences of neighbours, n times over; `prepend` and `append` are batches of as many examples."""
    expect_number("diff", n, whole=True)
    if n < 0:
        raise ShapeError(message("diff", "n of 0 or more", f"{n}", hint="n = 1 is the difference of neighbours"))
    if n == 0:  # as torch has it, whatever stands before or behind
        return x
    parts = [y for y in (prepend, x, append) if y is not None]
    x = torch.cat(parts, dim) if len(parts) > 1 else x
    for _ in range(n):
        x = neighbours(torch.diff, x, dim, less)
    return x


def strips(op: Op, y: Any, x: Any, dim: int) -> Ragged:
    """Sums of neighbours, times their distances where there are points: a batch like y, or dense along a static dim."""
    if y.dtype == torch.bool:
        raise DtypeError(message(op, "numbers", describe(y), hint="y.float()"))
    heights: Any = neighbours(op, y, dim, torch.add)
    if isinstance(x, Tensor):
        if ragged_dim(op, y, dim) is not None:
            hint = "y.with_values(points), or dx= for equal distances"
            raise ShapeError(message(op, "points x like y, or dense ones along a static dim", describe(x), hint=hint))
        d = normal_dim(dim, y.ndim, op)
        full = [-1 if i == d else 1 for i in range(y.ndim)] if x.ndim == 1 else [*[1] * (y.ndim - x.ndim), *x.shape]
        return heights * x.view(full).diff(dim=d)
    return heights if x is None else heights * diff_ragged(x, dim=dim)


def trapezoid_ragged(y: Any, x: Any = None, *, dx: float = 1, dim: int = -1) -> Ragged | Tensor:
    """A DtypeError for integers of few bits, of which torch lets the ends overflow."""
    if x is None and not (y.dtype.is_floating_point or y.dtype.is_complex) and y.dtype.itemsize < 4:
        raise DtypeError(message("trapezoid", "a dtype in which sums fit", describe(y), hint="y.long() or y.float()"))
    area = strips(torch.trapezoid, y, x, dim).sum(dim)
    return area * (dx / 2) if x is None else area / 2


def cumulative_trapezoid_ragged(y: Any, x: Any = None, *, dx: float = 1, dim: int = -1) -> Ragged:
    areas = strips(torch.cumulative_trapezoid, y, x, dim)
    return (areas * (dx / 2)).cumsum(dim) if x is None else areas.cumsum(dim) / 2


EXTREMES: dict[Op, Op] = {op: partial(extremes, op) for op in (torch.cummax, torch.cummin)}
FOR_GRAPHS: dict[Op, Op] = {torch.cumprod: cumprod}  # of which torch's own makes a graph for each size
for _op in (torch.cumsum, torch.cumprod, torch.logcumsumexp, torch.cummax, torch.cummin):
    _ragged = partial(scan_ragged, _op, 1 if _op is torch.cumprod else 0)
    _run = partial(of_leaf, _op) if _op in FOR_GRAPHS else None
    along(_op, "input dim*", "scan", ragged=_ragged, run=_run)
define(torch.trapezoid, "scan", ragged=trapezoid_ragged, dims="y x+ dim*=-1", aliases=[torch.trapz])
define(torch.cumulative_trapezoid, "scan", ragged=cumulative_trapezoid_ragged, dims="y x+ dim*=-1")
along(torch.diff, "input n dim*=-1 prepend+ append+", "scan", ragged=diff_ragged)
note_syncs(
    "the number of elements, along one of several ragged dims", torch.trapezoid, torch.cumulative_trapezoid, torch.diff,
    kinds=("nested",),
)  # fmt: skip
