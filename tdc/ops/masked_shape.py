"""Shape operations on a rectangle of padded rows: static dims regrouped, rows and elements in another order.

    m (B, L, H*D)    m.unflatten(2, (H, D)) -> (B, L, H, D)     m.flatten(2, 3) and back     m.view(B, L, H, D)
    m.flip(1)        each row in reverse, its padding still behind it

Sizes are those of the rectangle; -1 stands for the size that a dim has. What regroups the batch or a ragged dim is an
error, as for a NestedTensor, but for static dims beside the batch that become rows of their own.

Invariants: lengths go along with their rows; padding stays behind each row, and no gradient comes from there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import normal_dim
from tdc.core.errors import ShapeError, describe, message
from tdc.core.typing import Dims, Op
from tdc.ops.ragged_shape import filled, moves, no_dims, with_dims
from tdc.ops.shape import ints, shape_rule
from tdc.ragged.index_forms import FULL
from tdc.ragged.index_masked import at_each, insert_dim, neutral
from tdc.ragged.masked import MaskedBatch, build_masked


def static_dim(op: Op, x: MaskedBatch, dim: int) -> int:
    """A static dim, from the front.

    Raises:
        ShapeError: it is the batch or ragged.
    """
    d = normal_dim(dim, x.ndim, op)
    if d == x.batch_dim or d in x.ragged_dims:
        raise regrouped(op, x, f"dim {dim}")
    return d


def regrouped(op: Op, x: MaskedBatch, got: str) -> ShapeError:
    """The error for a shape that the lengths have no place in."""
    hint = "the batch and the ragged dims stay; regroup static dims, or use x.data"
    return ShapeError(message(op, f"static dims of {describe(x)} regrouped", got, hint=hint))


def with_static(x: MaskedBatch, data: Tensor, dim: int, more: int) -> MaskedBatch:
    """Data with so many more static dims at `dim`."""
    ragged = tuple([r + more * (dim < r) for r in x.ragged_dims])
    return build_masked(data, x.lengths, ragged, x.batch_dim + more * (dim < x.batch_dim))


def unsqueeze_masked(x: MaskedBatch, dim: int) -> MaskedBatch:
    """A static dim of size 1 at any place but between ragged dims."""
    return insert_dim(x, normal_dim(dim, x.ndim + 1, "unsqueeze"))


def squeeze_masked(x: MaskedBatch, dim: Dims | None = None) -> MaskedBatch:
    """Without static dims of size 1: all of them, or those given. A ragged dim or the batch stays."""
    given = range(x.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    dims = {normal_dim(d, x.ndim, "squeeze") for d in given} - {x.batch_dim, *x.ragged_dims}
    for d in sorted(dims, reverse=True):
        if x.data.shape[d] == 1:
            x = with_static(x, x.data.squeeze(d), d, -1)
    return x


def unflatten_masked(x: MaskedBatch, dim: int, sizes: Any) -> MaskedBatch:
    d = static_dim(torch.unflatten, x, dim)
    parts = filled(sizes, x.data.shape[d])
    if parts is None:
        raise regrouped(torch.unflatten, x, f"sizes {tuple(sizes)} for dim {dim}")
    return with_static(x, x.data.unflatten(d, parts), d, len(parts) - 1)


def flatten_masked(x: MaskedBatch, start_dim: int = 0, end_dim: int = -1) -> MaskedBatch:
    """Static dims as one; static dims beside the batch become part of it, each place with the lengths of its row."""
    first, last = normal_dim(start_dim, x.ndim, "flatten"), normal_dim(end_dim, x.ndim, "flatten")
    if any([first <= r <= last for r in x.ragged_dims]) and first != last:
        raise regrouped(torch.flatten, x, f"dims {first} to {last}")
    if not first <= x.batch_dim <= last or first == last:
        return with_static(x, x.data.flatten(first, last), first, first - last)
    sizes = x.data.shape[first : last + 1]
    at = [1] * (x.batch_dim - first) + [x.lengths.shape[0]] + [1] * (last - x.batch_dim)
    lengths = x.lengths.view(*at, x.lengths.shape[1]).expand(*sizes, x.lengths.shape[1]).flatten(0, -2)
    ragged = tuple([r - (last - first) * (r > first) for r in x.ragged_dims])
    return build_masked(x.data.flatten(first, last), lengths, ragged, first, True)


def reshape_masked(x: MaskedBatch, *sizes: Any) -> MaskedBatch:
    """Static dims regrouped; the batch and the ragged dims keep their sizes, which may be written as -1."""
    given, old = list(ints(sizes)), x.data.shape
    kept = sorted((x.batch_dim, *x.ragged_dims))
    groups, begin, places = [], 0, []
    for n, d in enumerate(kept):
        before = 0 if n == 0 else kept[n - 1] + 1
        at = place_of(given, begin, math.prod(old[before:d]), old[d])
        if at is None:
            raise regrouped(torch.reshape, x, f"sizes {given}")
        groups.append(filled(given[begin:at], math.prod(old[before:d])))
        places.append(at)
        begin = at + 1
    groups.append(filled(given[begin:], math.prod(old[kept[-1] + 1 :])))
    if any([group is None for group in groups]):
        raise regrouped(torch.reshape, x, f"sizes {given}")
    shape: list[Any] = []
    for group, d in zip(groups, [*kept, None], strict=True):
        shape += [*(group or []), *([] if d is None else [old[d]])]
    moved = dict(zip(kept, places, strict=True))
    return build_masked(x.data.reshape(shape), x.lengths, tuple([moved[r] for r in x.ragged_dims]), moved[x.batch_dim])


def place_of(sizes: list[Any], begin: int, before: int, size: Any) -> int | None:
    """Where a dim that stays is among the sizes from `begin` on: behind those that multiply to what is before it."""
    product = 1
    for d in range(begin, len(sizes)):
        if product == before and (sizes[d] == -1 or sizes[d] == size):
            return d
        product = before if sizes[d] == -1 else product * sizes[d]
    return None


def expand_masked(x: MaskedBatch, *sizes: Any) -> MaskedBatch:
    """Static dims of size 1 grow, and dims come in front of all."""
    x, given = with_dims("expand", x, sizes)
    for d in (x.batch_dim, *x.ragged_dims):
        if given[d] != -1 and given[d] != x.data.shape[d]:
            raise regrouped(torch.Tensor.expand, x, f"size {given[d]} for dim {d}")
    try:
        return x.with_data(x.data.expand(given))
    except RuntimeError:
        raise regrouped(torch.Tensor.expand, x, f"sizes {given}") from None


def repeat_masked(x: MaskedBatch, *sizes: Any) -> MaskedBatch:
    """Copies of the whole batch, one after another, and of static dims."""
    x, given = with_dims("repeat", x, sizes)
    if any([given[r] != 1 for r in x.ragged_dims]):
        raise regrouped(torch.Tensor.repeat, x, "copies along a ragged dim")
    lengths = x.lengths.repeat(given[x.batch_dim], 1)
    return build_masked(x.data.repeat(given), lengths, x.ragged_dims, x.batch_dim, True)


def flip_masked(x: MaskedBatch, *dims: Any) -> MaskedBatch:
    """Static dims, the rows, or each row in reverse."""
    for dim in ints(dims):
        d = normal_dim(dim, x.ndim, "flip")
        x = x[(FULL,) * d + (slice(None, None, -1),)]
    return x


def roll_masked(x: MaskedBatch, shifts: Any, dims: Any = None) -> MaskedBatch:
    """Static dims, the rows, or the elements of each row moved on, the last ones to the front."""
    if dims is None:
        raise no_dims("roll")
    for shift, dim in moves(shifts, dims):
        d = normal_dim(dim, x.ndim, "roll")
        if d in x.ragged_dims:
            length = x.lengths[:, x.ragged_dims.index(d), None]
            places = (torch.arange(x.data.shape[d], device=x.device) - shift) % length.clamp(min=1)
            x = neutral(x.with_data(at_each(x, d, places)))
        elif d == x.batch_dim:
            x = build_masked(x.data.roll(shift, d), x.lengths.roll(shift, 0), x.ragged_dims, d, True)
        else:
            x = x.with_data(x.data.roll(shift, d))
    return x


shape_rule(torch.unsqueeze, masked=unsqueeze_masked)
shape_rule(torch.squeeze, masked=squeeze_masked)
shape_rule(torch.unflatten, masked=unflatten_masked)
shape_rule(torch.flatten, masked=flatten_masked)
shape_rule(torch.reshape, masked=reshape_masked)
shape_rule(torch.Tensor.view, masked=reshape_masked)
shape_rule(torch.Tensor.expand, masked=expand_masked)
shape_rule(torch.Tensor.repeat, masked=repeat_masked)
shape_rule(torch.flip, masked=flip_masked)
shape_rule(torch.roll, masked=roll_masked)
