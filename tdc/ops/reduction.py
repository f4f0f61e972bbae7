"""Reductions over batch, ragged and static dims.

    NestedTensor (B, -1, D)    dim=None -> scalar    dim=2 -> (B, -1)    dim=1 -> (B, D)    dim=(0, 1) -> (D,)
    MaskedBatch  (B, L, D)     the same; padding counts for nothing; dim=0 -> (L, D)
    TensorDict   [B, T]        over batch dims, leaf by leaf; dim=None -> []

Every reduction carries its identity element, the value that changes nothing: padding is filled with it, and an empty
row gives it. Reducing the batch dim of a NestedTensor is a true reduction over the batch, so it needs the ragged dims
reduced as well: rows of different lengths have no common positions.

Invariants: a reduced ragged dim gives a dense tensor, a kept one the same container, whatever the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc._errors import ShapeError, UnsupportedError, describe, message
from tdc._rules import MODES, Container, Rule, add_rule
from tdc._structure import Structure, lengths_of, normal_dim, reduce_rows
from tdc._typing import Dims, Op
from tdc.masked import MaskedBatch
from tdc.masked import like as masked_like
from tdc.nested import NestedTensor
from tdc.nested import like as nested_like
from tdc.ops.batch import Along, along, along_tensordict

Rows = Callable[[Tensor, Structure], Tensor]


def reduction(op: Op, rows: Rows, *, identity: float, masked: Op | None = None, source: str = "") -> None:
    """Rows for a reduction, for all three containers.

    Args:
        rows: reduces the packed axis row by row, `(N, *D), structure -> (B, *D)`.
        identity: fills padding; infinities become the extreme of an integer dtype.
        masked: `(x, dims, keepdim) -> Tensor` where filling padding with the identity is not enough.
    """
    by_fill = partial(masked_by_fill, op, identity)
    for kind, impl in (
        ("nested", partial(reduce_nested, op, rows)),
        ("masked", partial(reduce_masked, op, masked or by_fill)),
    ):
        add_rule(Rule(op, kind, "reduction", impl, op, identity=identity, source=source))
    along(op, "dim keepdim", "reduction", several=op is not torch.prod, identity=identity)


def reduce_nested(
    op: Op, rows: Rows, x: NestedTensor, dim: Dims | None = None, keepdim: bool = False, **kwargs: Any
) -> Any:
    """Static dims first (they are the short ones), then the packed axis."""
    if dim is None:
        return op(x.values, **kwargs)
    s = x.structure
    axes = [s.axis(d, x.ndim, op) for d in ((dim,) if isinstance(dim, int) else dim)]
    over_batch, over_ragged = None in axes, s.packed_dim in axes
    if over_ragged and s.ragged_ndim > 1:
        raise UnsupportedError(
            message(op, "one ragged dim", f"{s.ragged_ndim}", hint="x.to_padded(), or loop over x.unbind()")
        )
    if over_batch and not over_ragged:
        got = f"dim {dim} of {describe(x)}"
        hint = f"rows differ in length: reduce dim ({s.batch_dim}, {s.ragged_dims[0]}), or x.to_padded() first"
        raise ShapeError(message(op, "the ragged dim reduced together with the batch", got, hint=hint))
    static = [a for a in axes if a is not None and a != s.packed_dim]
    values = x.values
    for axis in static:
        values = op(values, axis, True, **kwargs)
    if not over_ragged:
        return nested_like(s, values) if keepdim else drop_static(values, s, static)
    return reduce_packed(op, rows, values, s, static, over_batch, keepdim, kwargs)


def drop_static(values: Tensor, s: Structure, static: list[int]) -> NestedTensor:
    """Squeeze reduced static axes out of packed values."""
    before = sum([a < s.packed_dim for a in static])
    logical = [a if a < s.packed_dim else a + s.ragged_ndim - 1 for a in static]
    lower = sum([k + (k >= s.batch_dim) < s.batch_dim for k in logical])
    return nested_like(s.moved(s.packed_dim - before, s.batch_dim - lower), values.squeeze(tuple(static)))


def reduce_packed(
    op: Op, rows: Rows, values: Tensor, s: Structure, static: list[int], over_batch: bool, keepdim: bool, kwargs: Any
) -> Tensor:
    """The packed axis, row by row or whole; the result is dense, the batch at its place."""
    e = s.packed_dim
    if over_batch:
        out = op(values, e, True, **kwargs)
        return out.unsqueeze(s.batch_dim) if keepdim else out.squeeze((*static, e))
    dtype = kwargs.get("dtype")
    out = rows((values if dtype is None else values.to(dtype)).movedim(e, 0), s)
    if keepdim:
        return out.unsqueeze(e + 1).movedim(0, s.batch_dim)
    kept = [a - (a > e) for a in static]
    out = out.squeeze(tuple([a + 1 for a in kept]))
    removed = {e, *static}
    at = s.batch_dim - sum([a + (a >= s.batch_dim) < s.batch_dim for a in removed])
    return out.movedim(0, at)


def reduce_masked(
    op: Op, rule: Op, x: MaskedBatch, dim: Dims | None = None, keepdim: bool = False, **kwargs: Any
) -> Any:
    """A result that has all its ragged dims stays a MaskedBatch; one without them, or the batch, is dense."""
    given = tuple(range(x.ndim)) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    dims = tuple([normal_dim(d, x.ndim, op) for d in given])
    ragged = [d for d in x.ragged_dims if d in dims]
    if ragged and len(ragged) < len(x.ragged_dims):
        raise UnsupportedError(
            message(op, "all ragged dims reduced, or none", f"dim {dim}", hint="reduce them together")
        )
    out = rule(x, dims, keepdim, **kwargs)
    if ragged or x.batch_dim in dims:
        return out
    if keepdim:
        return x.with_data(out)
    kept = [d for d in range(x.ndim) if d not in dims]
    return masked_like(out, x.lengths, tuple([kept.index(d) for d in x.ragged_dims]), kept.index(x.batch_dim))


def masked_by_fill(
    op: Op, identity: float, x: MaskedBatch, dims: tuple[int, ...], keepdim: bool, **kwargs: Any
) -> Tensor:
    """Fill padding with the identity and reduce the rectangle, one dim after another where torch takes only one."""
    out = x.filled(finite(identity, x.dtype))
    for d in sorted(dims, reverse=True):
        out = op(out, d, keepdim, **kwargs)
    return out


def masked_mean(x: MaskedBatch, dims: tuple[int, ...], keepdim: bool, **kwargs: Any) -> Tensor:
    """Sum of real elements by their number."""
    count = x.mask.expand(x.data.shape).sum(dims, keepdim)
    return x.filled(0).sum(dims, keepdim, **kwargs) / count


def finite(identity: float, dtype: torch.dtype) -> Any:
    """The identity in a dtype: the extreme integer where there is no infinity."""
    if dtype == torch.bool or not math.isinf(identity) or dtype.is_floating_point:
        return bool(identity) if dtype == torch.bool else identity
    return torch.iinfo(dtype).max if identity > 0 else torch.iinfo(dtype).min


def sum_rows(values: Tensor, s: Structure) -> Tensor:
    wide = values if values.is_floating_point() or values.is_complex() else values.to(torch.int64)
    return reduce_rows(wide, s, "sum", 0)


def mean_rows(values: Tensor, s: Structure) -> Tensor:
    counts = lengths_of(s).view(-1, *[1] * (values.ndim - 1))
    return reduce_rows(values, s, "sum", 0) / counts.to(values.dtype)


def prod_rows(values: Tensor, s: Structure) -> Tensor:
    wide = values if values.is_floating_point() else values.to(torch.int64)
    return reduce_rows(wide, s, "prod", 1)


def extreme_rows(reduce: str, sign: float, values: Tensor, s: Structure) -> Tensor:
    return reduce_rows(values, s, reduce, finite(sign * math.inf, values.dtype))


def any_rows(values: Tensor, s: Structure) -> Tensor:
    return reduce_rows((values != 0).to(torch.uint8), s, "amax", 0).bool()


def all_rows(values: Tensor, s: Structure) -> Tensor:
    return reduce_rows((values != 0).to(torch.uint8), s, "amin", 1).bool()


def values_of(op: Op, x: Tensor, **given: Any) -> Tensor:
    """What torch gives for a whole tensor, where it gives values and indices for a dim."""
    return op(x, **given).values


def extreme_tensordict(op: Op, pointwise: Op, how: Along, *args: Any, **kwargs: Any) -> Any:
    """`torch.max(td, 0)` along a batch dim, `torch.max(td, other)` element by element."""
    if "other" in kwargs or len([a for a in args if isinstance(a, (Tensor, Container))]) > 1:
        return pointwise(*args, **kwargs)
    return along_tensordict(op, how, *args, **kwargs)


reduction(torch.sum, sum_rows, identity=0)
reduction(torch.mean, mean_rows, identity=0, masked=masked_mean)
reduction(torch.prod, prod_rows, identity=1)
reduction(torch.amax, partial(extreme_rows, "amax", -1), identity=-math.inf)
reduction(torch.amin, partial(extreme_rows, "amin", 1), identity=math.inf)
reduction(torch.any, any_rows, identity=0)
reduction(torch.all, all_rows, identity=1)

for _op in (torch.nansum, torch.nanmean, torch.logsumexp):
    along(_op, "dim keepdim", "reduction", several=True)
for _op in (torch.std, torch.var, torch.std_mean, torch.var_mean):
    along(_op, "dim unbiased keepdim", "reduction", several=True)
along(torch.count_nonzero, "dim", "reduction", several=True)
along(torch.norm, "p dim keepdim dtype", "reduction", several=True)
along(torch.linalg.vector_norm, "ord dim keepdim", "reduction", several=True)
for _op in (torch.argmax, torch.argmin):
    along(_op, "dim keepdim", "reduction")
for _op in (torch.quantile, torch.nanquantile):  # torch 2.11 cannot trace them
    _modes = MODES if torch.__version__ >= "2.12" else ("eager", "vmap", "grad")
    along(_op, "q dim keepdim", "reduction", modes=_modes)
along(torch.aminmax, "dim keepdim", "reduction")
for _op in (torch.median, torch.nanmedian):
    along(_op, "dim keepdim", "reduction", whole=partial(values_of, _op))
along(torch.mode, "dim keepdim", "reduction", default=-1)
for _op, _pointwise in ((torch.max, torch.maximum), (torch.min, torch.minimum)):
    _how = Along(("dim", "keepdim"), whole=partial(values_of, _op))
    add_rule(Rule(_op, "tensordict", "reduction", partial(extreme_tensordict, _op, _pointwise, _how), _op))
