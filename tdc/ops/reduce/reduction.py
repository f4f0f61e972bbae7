"""Reductions over batch, ragged and static dims.

    NestedTensor (B, -1, D)    dim=None -> scalar    dim=2 -> (B, -1)    dim=1 -> (B, D)    dim=(0, 1) -> (D,)
    MaskedBatch  (B, L, D)     the same; padding counts for nothing; dim=0 -> (L, D)
    TensorDict   [B, T]        over batch dims, leaf by leaf; dim=None -> []

Every reduction carries its identity element, the value that changes nothing: padding is filled with it, and an empty
example gives it. Reducing the batch dim of a NestedTensor is a true reduction over the batch, so it needs the ragged
dims reduced as well: examples of different lengths have no common positions.

Some of several ragged dims are reduced line by line, see `partial_ragged`.

Invariants: without a ragged dim a result is a dense tensor, with one the same container, whatever the data.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import int_tuple, is_infinite, normal_dim
from tdc.core.dtypes import rounded_once
from tdc.core.dynamo import is_zero
from tdc.core.errors import ShapeError, describe, message
from tdc.core.typing import Op
from tdc.layout.segments import column, lengths_of, own_share, reduce_rows
from tdc.layout.structure import Structure
from tdc.ops.reduce.partial_ragged import by_lines, over_lines
from tdc.ops.tensordict.batch import along
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_result
from tdc.ragged.storage import Ragged, feature_axis, lacking, with_data


def reduction(
    op: Op, rule: Op, *, family: str = "reduction", dense: Op | None = None,
    dims: str = "input dim**=None keepdim", identity: float | None = None,
) -> None:  # fmt: skip
    """Rows for a reduction, for all three containers.

    Args:
        rule: `(x, dims, keepdim, **kwargs) -> Tensor` of a ragged batch, dims with ragged ones or the batch among them.
        dense: what runs on tensors, `(values, dim=dims, keepdim=..., **kwargs)`, where it is not `op`.
        dims: the arguments of `op`, see `core/rules.py`.
        identity: what changes nothing; infinities become the extreme of an integer dtype.
    """
    ragged, whole = partial(reduce_ragged, op, rule, dense or op), op in (torch.any, torch.all)
    along(op, dims, family, ragged=ragged, identity=identity, whole=whole)


def reduced_dims(op: Op, dim: Any, ndim: int) -> tuple[int, ...]:
    """The dims that a reduction is over, counted from the front; all of them for None and for ()."""
    if type(dim) is int:
        return (normal_dim(dim, ndim, op),)
    given = () if dim is None else int_tuple(op, dim)
    dims = tuple([normal_dim(d, ndim, op) for d in given or range(ndim)])
    if len(set(dims)) < len(dims):
        raise ShapeError(message(op, "each dim once", f"dim {dim}", hint=f"the batch has {ndim} dims"))
    return dims


def reduce_ragged(
    op: Op, rule: Op, dense: Op, x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Ragged | Tensor:
    """A reduction by `rule` where lengths or padding matter, by `dense` on packed values or static dims where not."""
    if (axis := feature_axis(x, dim)) is not None:
        return build_result(x._structure, dense(x._values, dim=(axis,), keepdim=keepdim, **kwargs))
    packed = x._kind == "nested"
    if packed and dim is None and not keepdim:
        return dense(x.values, **kwargs)
    dims = reduced_dims(op, dim, x.ndim)
    batch, ragged = x._batch_dim in dims, all([d in dims for d in x.ragged_dims])
    if packed and batch and not ragged:
        got = f"dim {dim} of {describe(x)}"
        hint = f"rows differ in length: reduce dim {(x._batch_dim, *x.ragged_dims)}, or x.to_padded() first"
        raise ShapeError(message(op, "the ragged dim reduced together with the batch", got, hint=hint))
    if by_lines(op, x, dims):
        run = partial(reduce_ragged, op, rule, dense, **kwargs)
        return over_lines(op, run, x, dims, keepdim)
    if packed and (batch or not ragged):
        return reduce_values(op, dense, x, dims, ragged, keepdim, **kwargs)
    if batch or ragged:
        return rule(x, dims, keepdim, **kwargs)
    out = dense(x.data, dim=dims, keepdim=keepdim, **kwargs)
    if keepdim:
        return x.with_data(out)
    kept = [d for d in range(x.ndim) if d not in dims]
    return build_masked(out, x.lengths, tuple([kept.index(d) for d in x.ragged_dims]), kept.index(x.batch_dim))


def reduce_values(
    op: Op, dense: Op, x: NestedTensor, dims: tuple[int, ...], whole: bool, keepdim: bool, **kwargs: Any
) -> Ragged | Tensor:
    """A reduction of the packed values that needs no lengths: over static dims, or over everything of the batch."""
    s, static = x._structure, static_axes(op, x, dims)
    if whole:
        out = dense(x._values, dim=(s.packed_dim, *static), keepdim=True, **kwargs)
        return settle(out.movedim(s.packed_dim, 0), s, dims, keepdim)
    out = dense(x._values, dim=static, keepdim=keepdim, **kwargs)
    return with_data(x, out) if keepdim else lacking(x, out, dims)


def static_axes(op: Op, x: NestedTensor, dims: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of packed values among some dims, without the packed one."""
    s, ndim, others = x._structure, x.ndim, (x._batch_dim, *x.ragged_dims)
    axes: list[Any] = [s.axis(d, ndim, op) for d in dims if d not in others]
    return tuple(axes)


def settle(out: Tensor, s: Structure, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """One result for each example, `(B, *others)` with size 1 at reduced dims, as a dense tensor of logical dims."""
    if not keepdim and s.batch_dim == 0 and dims == s.ragged_dims:  # which `out` lacks already
        return out
    for _ in range(s.ragged_ndim):
        out = out.unsqueeze(s.packed_dim + 1)
    out = out.movedim(0, s.batch_dim)
    return out if keepdim else out.squeeze(dims)


def filled(x: Any, value: float) -> Any:
    """A batch whose padding, if it has any, holds `value`, so that positions may meet."""
    return x.with_data(x.filled(finite(value, x.dtype))) if isinstance(x, MaskedBatch) else x


def count(x: Any, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """Number of real elements that a reduction over dims with a ragged one among them is of."""
    if not isinstance(x, NestedTensor):
        return x.mask.expand(x.data.shape).sum(dims, keepdim)
    s = x.structure
    lengths = lengths_of(s)
    if dims != s.ragged_dims:
        lengths = lengths * math.prod([x.shape[d] for d in dims if d not in s.ragged_dims])
    return settle(column(lengths, x.values), s, dims, keepdim)


def finite(identity: float, dtype: torch.dtype) -> float:
    """The identity in a dtype: the extreme integer or truth value where there is no infinity."""
    if dtype == torch.bool:
        return identity > 0
    if dtype.is_floating_point or dtype.is_complex or not is_infinite(identity):
        return identity
    return torch.iinfo(dtype).max if identity > 0 else torch.iinfo(dtype).min


def reduced(op: Op, how: str, identity: float, x: Any, dims: tuple[int, ...], keepdim: bool, **kwargs: Any) -> Tensor:
    """Fill padding with the identity and reduce the rectangle; or the packed axis, example by example.

    Args:
        how: of `reduce_rows`.
    """
    if not isinstance(x, NestedTensor):
        data = x.filled(finite(identity, x.dtype))
        if op in (torch.amax, torch.amin):  # which torch has none of where no element is
            nothing = [d in dims and d in x.ragged_dims and is_zero(n) for d, n in enumerate(data.shape)]
            wide = [int(k) for at in reversed(nothing) for k in (0, at)]
            data = F.pad(data, wide, value=finite(identity, x.dtype)) if any(nothing) else data
        out = op(data, dims, keepdim=keepdim, **kwargs)
        if op not in (torch.amax, torch.amin):
            return out
        whole = math.prod([data.shape[d] for d in dims])

        def counts() -> tuple[Tensor, Tensor]:
            real = count(x, dims, keepdim)
            return real, whole - real

        return own_share(out, identity, counts)
    s, static = x.structure, static_axes(op, x, dims)
    if static and op in (torch.amax, torch.amin):  # elements that are equally large share the derivative
        rows = extreme_rows(x.values, s, static, how, identity)
        return settle(rows, s, dims, keepdim)
    values = op(x.values, static, keepdim=True) if static else x.values  # these are the short ones
    values = values.movedim(s.packed_dim, 0) if s.packed_dim else values
    if op in (torch.any, torch.all):
        rows = reduce_rows((values != 0).to(torch.uint8), s, how, identity)
        rows = rows if values.dtype == torch.uint8 else rows.bool()
    elif op is torch.sum:
        exact = values.is_floating_point() or values.is_complex()
        rows = reduce_rows(values if exact else values.to(torch.int64), s, how, 0)
    else:
        rows = reduce_rows(values, s, how, finite(identity, values.dtype))
    return settle(rows, s, dims, keepdim)


def extreme_rows(values: Tensor, s: Structure, static: tuple[int, ...], how: str, identity: float) -> Tensor:
    """The extremes over the packed axis and static ones, which stay with size 1: (B, *D)."""
    others = [a for a in range(values.ndim) if a != s.packed_dim and a not in static]
    count = math.prod([values.shape[a] for a in static])
    flat = values.permute(s.packed_dim, *static, *others).flatten(0, len(static))
    longer = Structure(s.offsets * count, None, None, 0, 0, 1)
    rows = reduce_rows(flat, longer, how, finite(identity, values.dtype))
    for a in sorted(static):
        rows = rows.unsqueeze(a + (a < s.packed_dim))
    return rows


def sum_of(x: Any, dims: tuple[int, ...], keepdim: bool, *, dtype: torch.dtype | None = None) -> Tensor:
    return rounded_once(partial(reduced, torch.sum, "sum", 0, dims=dims, keepdim=keepdim), x, dtype)


def mean_of(x: Any, dims: tuple[int, ...], keepdim: bool, *, dtype: torch.dtype | None = None) -> Tensor:
    return rounded_once(lambda x: sum_of(x, dims, keepdim) / count(x, dims, keepdim), x, dtype)


reduction(torch.sum, sum_of, identity=0)
reduction(torch.mean, mean_of, identity=0)
for _op, _how, _identity in (
    (torch.amax, "amax", -math.inf), (torch.amin, "amin", math.inf), (torch.any, "amax", 0), (torch.all, "amin", 1),
):  # fmt: skip
    reduction(_op, partial(reduced, _op, _how, _identity), identity=_identity)
