"""Order statistics along one dim, or of all elements: median, kthvalue, mode, quantile, and those that leave NaN out.

    median(x, 1)         (values, indices) of each example's elements         median(x)      of all real elements
    quantile(x, q, 1)    q a number -> (B, *D); q (Q,) -> (Q, B, *D), as torch puts it

Along a ragged dim the elements of all examples are sorted at once and looked up by rank. An index counts positions
within the example; of equal elements it may be any, as in torch. An example without elements has no position (-1) and
no value: NaN, or 0 for integers. Each NaN is a value of its own and the largest, in `mode`, too; torch on
CPU sorts by `<` there, and what it gives where there are NaN depends on their positions.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import normal_dim, shown
from tdc.core.asserts import require
from tdc.core.calls import checks
from tdc.core.dynamo import is_zero
from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.core.typing import Op
from tdc.ops.reduce.along_dim import (
    Segments,
    at,
    expect_elements,
    is_static,
    order_of,
    picked,
    position_at,
    reduce_along,
    segments_of,
)
from tdc.ops.reduce.extremes import extreme_position
from tdc.ops.reduce.scan import scanned
from tdc.ops.shape.join import stack
from tdc.ops.tensordict.batch import along
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import Ragged, ragged_sizes

ROUNDED = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}


def counts(segments: Segments) -> tuple[Tensor, Tensor]:
    """Elements of each segment, and those that are not NaN, (K, *D)."""
    real = segments.number_of(segments.values == segments.values)
    return segments.lengths.expand(real.shape), real


def median_rank(skip: bool, segments: Segments, order: Tensor) -> Tensor:
    """The lower of two middle elements; NaN, which is sorted last, where there is one and it is not skipped."""
    every, real = counts(segments)
    if skip:
        return torch.where(real > 0, (real - 1) >> 1, every.clamp(max=1) - 1)
    return torch.where(real < every, real, (every - 1) >> 1)


def mode_rank(segments: Segments, order: Tensor) -> Tensor:
    """The last of the longest run of equal elements, the smallest of several such values."""
    if is_zero(order.shape[0]):
        return segments.lengths.expand(-1, *order.shape[1:]) - 1
    values, owner = segments.values.detach().gather(0, order), segments.owner.gather(0, order)
    at = torch.arange(values.shape[0], device=values.device)
    former, here = (at - 1).clamp(min=0), segments.column(at)
    same = (values == values[former]) & (owner == owner[former]) & (here > 0)
    begins = here.masked_fill(same, 0)
    run = here - scanned(torch.cummax, begins, 0, 0)[0]
    real = None if segments.real is None else owner == 0
    return extreme_position(segments._replace(values=run, real=real), -math.inf)


def kth_rank(k: int, segments: Segments, order: Tensor) -> Tensor:
    """None in a line of padding, which is empty."""
    return torch.where(segments.lengths < k, -1, k - 1).expand(-1, *order.shape[1:])


def check_lengths(op: Op, k: int, x: Any, dim: int) -> None:
    """Check that every example has `k` elements along a ragged dim, or every real position along the batch.

    Raises:
        ShapeError: it has not: at once on CPU, asynchronously on CUDA.
    """
    d, packed = normal_dim(dim, x.ndim, op), isinstance(x, NestedTensor)
    if d in x.ragged_dims:
        r = x.ragged_dims.index(d)
        lengths = ragged_sizes(x)[:, r]
        name = "x.lengths" if packed and len(x.ragged_dims) == 1 else f"x.{'sizes' if packed else 'lengths'}[:, {r}]"
        hint = f"drop short rows first: x = x[{name} >= {shown(k)}]"
    else:
        lengths, hint = x.mask.sum(d), "of a dim within each row, or x.filled(value) first"
    text = message(op, f"at least {shown(k)} elements in each row", "a shorter row", hint=hint)
    require((lengths >= k).all(), text, ShapeError)


def ranked(op: Op, rank: Op, x: Any, dim: int | None, keepdim: bool) -> Tensor | tuple[Tensor, ...]:
    """Values and indices at a rank of each segment; values alone without a dim, as torch has it."""
    if dim is None and isinstance(x, NestedTensor):
        return op(x.values)
    segments = segments_of(op, x, dim)
    order, _ = order_of(segments)
    position = position_at(segments, order, rank(segments, order))
    if dim is not None:
        return picked(op, segments, position, nothing(segments.values), keepdim)
    found = at(segments, position, nothing(segments.values))
    return segments.back(shared(segments.values, segments.real, found), keepdim)


def shared(values: Tensor, real: Any, found: Tensor) -> Tensor:
    """An element found along dim 0, (M, *D) -> (1, *D), whose gradient all that are equal to it share."""
    if not values.is_floating_point():
        return found
    hit = (values == found) | (values.isnan() & found.isnan())
    hit = hit if real is None else hit & real
    mean = values.masked_fill(~hit, 0).sum(0, True) / hit.sum(0, True)
    return torch.where(mean.isfinite(), mean + (found - mean).detach(), mean)


def middle_of(op: Op, x: Any, dim: int) -> Ragged | Tensor:
    """The median of all elements of a leaf, values without indices."""
    if not isinstance(x, Tensor):
        return op(x, dim).values
    return shared(x, None, op(x, dim, True).values.detach()).squeeze(dim)


def nothing(values: Tensor) -> float:
    """The value of an example without elements: NaN, 0 for integers."""
    return math.nan if values.is_floating_point() else 0


def median_ragged(op: Op, x: Any, dim: int | None = None, keepdim: bool = False) -> Ragged | Tensor | tuple[Any, ...]:
    """`median` and `nanmedian`."""
    run = partial(ranked, op, partial(median_rank, op is torch.nanmedian))

    def dense(values: Tensor, axis: int) -> Any:
        return op(values.contiguous(), axis, True)  # of an expanded dim torch reads other memory

    return reduce_along(op, run, x, dim, keepdim, dense)


def mode_ragged(x: Any, dim: int = -1, keepdim: bool = False) -> Ragged | Tensor | tuple[Any, ...]:
    return reduce_along(torch.mode, partial(ranked, torch.mode, mode_rank), x, dim, keepdim, None)


def kthvalue_ragged(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Ragged | Tensor | tuple[Any, ...]:
    if k < 1:
        raise ShapeError(message("kthvalue", "k of 1 or more", f"{k}", hint="k = 1 is the smallest element"))
    check = expect_elements if is_static(torch.kthvalue, x, dim) else check_lengths
    check(torch.kthvalue, k, x, dim)
    run = partial(ranked, torch.kthvalue, partial(kth_rank, k))
    return reduce_along(torch.kthvalue, run, x, dim, keepdim, lambda v, axis: torch.kthvalue(v, k, axis, True))


def rank_of(q: Tensor, last: Tensor, how: str) -> tuple[Tensor, Tensor, Tensor]:
    """The two ranks that a quantile lies between, and how far it is on the way; `last` is the highest rank."""
    rank = q * last.to(q.dtype)
    if how in ROUNDED:
        rank = ROUNDED[how](rank)
    low = rank.floor()
    weight = torch.full_like(rank, 0.5) if how == "midpoint" else rank - low
    return low.long(), rank.ceil().long(), weight


def quantile_of(segments: Segments, order: Tensor, last: Tensor, q: Tensor, how: str) -> Tensor:
    """One quantile of each segment, (K, *D); NaN where the last rank is negative."""
    low, high, weight = rank_of(q, last, how)
    ranks = (low,) if how in ROUNDED else (low, high)  # between an infinity and itself there is nothing
    empty = segments.lengths == 0  # so that no gradient of q comes from there
    where = [position_at(segments, order, rank.masked_fill(last < 0, -1)) for rank in ranks]
    below, *above = [at(segments, position, math.nan).masked_fill(empty, 0) for position in where]
    found = torch.lerp(below, above[0], weight) if above else below
    return found.masked_fill(empty, math.nan)


@checks(torch.quantile, torch.nanquantile)
def refuse_probability(op: Op, input: Any, q: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(q, (int, float)) and not 0 <= q <= 1:
        raise ShapeError(message(op, "q in [0, 1]", f"{q}", hint="q = 0.5 is the median"))


def quantile_ragged(
    op: Op, x: Any, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Ragged | Tensor:
    """`quantile` and `nanquantile`."""
    if x.dtype not in (torch.float32, torch.float64):  # of others torch has none, along whatever dim
        raise DtypeError(message(op, "float32 or float64", describe(x), hint="x.float()"))
    refuse_probability(op, x, q)
    if dim is None and isinstance(x, NestedTensor):
        out = op(x.values, q, interpolation=interpolation)
        return out.view(*out.shape, *[1] * x.ndim) if keepdim else out
    at = {"dtype": x.dtype, "device": x.device}
    qs = torch.full((), q, **at) if isinstance(q, (int, float)) else torch.as_tensor(q, **at)  # no copy of a number
    if not qs.numel():
        raise ShapeError(message(op, "at least one quantile", "none", hint="q = 0.5 is the median"))
    each = qs.reshape(-1)

    def dense(values: Tensor, axis: int) -> tuple[Tensor, ...]:
        if is_zero(values.numel()) and not is_zero(values.shape[axis]):  # of no positions, which torch refuses
            return (values.narrow(axis, 0, 1),) * each.shape[0]
        return op(values, each, axis, True, interpolation=interpolation).unbind(0)

    found = reduce_along(op, partial(each_quantile, op, each, interpolation), x, dim, keepdim, dense)
    if qs.ndim == 0:
        return found[0]
    return torch.stack(found) if isinstance(found[0], Tensor) else stack(found)  # Dynamo hands no tuple of batches on


def each_quantile(op: Op, qs: Tensor, how: str, x: Any, dim: int | None, keepdim: bool) -> tuple[Tensor, ...]:
    """Quantiles (Q,) along a ragged dim one by one."""
    segments = segments_of(op, x, dim)
    (order, _), (every, real) = order_of(segments), counts(segments)
    last, each = real - 1, qs.unbind()
    if op is torch.quantile:  # NaN, which is sorted last, is what is found wherever there is one
        last, each = every - 1, [torch.where(real < every, 1, q) for q in each]
    return tuple([segments.back(quantile_of(segments, order, last, q, how), keepdim) for q in each])


for _op in (torch.quantile, torch.nanquantile):
    along(_op, "input q dim*=None keepdim", "order_statistics", ragged=partial(quantile_ragged, _op))
for _op in (torch.median, torch.nanmedian):
    _impl = partial(median_ragged, _op)
    along(_op, "input dim*=None keepdim", "order_statistics", ragged=_impl, over_all=partial(middle_of, _op))
along(torch.mode, "input dim*=-1 keepdim", "order_statistics", ragged=mode_ragged)
along(torch.kthvalue, "input k dim*=-1 keepdim", "order_statistics", ragged=kthvalue_ragged)
