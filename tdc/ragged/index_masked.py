"""`x[...]` of a MaskedBatch: the same results as of a NestedTensor; what stays ragged stays a rectangle.

Invariant: padding is never read as if it were real; where copies of real elements would lie in padding, zeros do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.ragged.index_forms import (
    FULL,
    Entry,
    Pick,
    Span,
    around_batch,
    as_rows,
    at_examples,
    bounds,
    check_vectors,
    cut,
    enough,
    full_index,
    index_example,
    insert_dims,
    kept,
    no_row,
    paired_positions,
    spans,
    starts_alike,
    takes_all,
)
from tdc.ragged.masked import MaskedBatch, build_masked, crop, require_same_lengths


def same_lengths(x: MaskedBatch, y: MaskedBatch) -> bool:
    """Whether two batches have their lengths from one tensor."""
    return x._lengths is y._lengths and (x.ragged_dims, x.batch_dim) == (y.ragged_dims, y.batch_dim)


def with_lengths_of(x: MaskedBatch, y: MaskedBatch) -> MaskedBatch:
    """As `with_structure_of`."""
    alike = (x.ragged_dims, x.batch_dim) == (y.ragged_dims, y.batch_dim)
    return build_masked(x._data, y._lengths, x.ragged_dims, x.batch_dim) if alike and not same_lengths(x, y) else x


def picker_masked(x: MaskedBatch, index: Any) -> Pick:
    """As `picker_nested`."""
    if isinstance(index, tuple) or index is None or index is Ellipsis or x.batch_dim:
        return lambda y: index_masked(y, index)
    rows = as_rows(index, x.lengths.shape[0], x.device)
    if isinstance(rows, int):
        sizes = x._lengths[rows].tolist()
        return lambda y: crop(y, y.data.select(0, rows), sizes)
    lengths = take(x, rows).lengths
    return lambda y: build_masked(take(y, rows).data, lengths, y.ragged_dims, 0)


def index_masked(x: MaskedBatch, index: Any) -> Any:
    """`x[index]`: as of a NestedTensor, whatever the index is; what stays ragged stays a rectangle."""
    if isinstance(index, MaskedBatch):
        return select_masked(x, index)
    b, shape = x.batch_dim, [-1 if d in x.ragged_dims else n for d, n in enumerate(x.shape)]
    parts, new = full_index(index, shape, b, x.device)
    parts[b] = as_rows(parts[b], x.lengths.shape[0], x.device)
    rows = parts[b]
    if around_batch(parts, b, x.ragged_dims) and not new:
        return at_examples(x, parts)
    check_vectors(parts, b, x.ragged_dims)
    if isinstance(rows, int):
        row = crop(x, x.data.select(b, rows), x._lengths[rows].tolist())
        return index_example(row, parts, b, new)
    y: Any = x if takes_all(rows) else take(x, rows)
    paired = isinstance(rows, Tensor)
    for d in range(len(parts) - 1, -1, -1):
        if paired and d in x.ragged_dims and isinstance(parts[d], Tensor):
            y, parts[d] = at_masked(y, d, paired_positions(parts[d], rows)).squeeze(d), 0
        elif d != b and not takes_all(parts[d]):
            y = cut_masked(y, d, parts[d])
    return insert_dims(y, parts, new, insert_dim)


def cut_masked(x: Any, dim: int, part: Entry) -> Any:
    """One entry on one dim that is not the batch."""
    if isinstance(x, Tensor):
        return cut(x, dim, part)
    if dim in x.ragged_dims:
        if isinstance(part, slice):
            return slice_masked(x, dim, part)
        positions = part if isinstance(part, Tensor) else torch.full((1,), part, dtype=torch.int64, device=x.device)
        found = at_masked(x, dim, positions.reshape(1, -1), part)
        if isinstance(found, Tensor):
            return found.unflatten(dim, positions.shape) if isinstance(part, Tensor) else found.squeeze(dim)  # pyright: ignore[reportUnknownVariableType]  # torch's stub
        return cut_masked(
            found, dim, torch.arange(found.shape[dim]).view(part.shape) if isinstance(part, Tensor) else 0
        )
    more = kept(part) - 1
    ragged = tuple([r + more * (dim < r) for r in x.ragged_dims])
    return build_masked(cut(x.data, dim, part), x.lengths, ragged, x.batch_dim + more * (dim < x.batch_dim))


def slice_masked(x: MaskedBatch, dim: int, part: slice | Span) -> MaskedBatch:
    """A slice of every row; where rows begin at other positions, their elements move."""
    column = x.ragged_dims.index(dim)
    first, lengths, step = spans(part, x.lengths[:, column])
    alike = part.start is None or (isinstance(part.start, int) and part.start >= 0)
    stop = part.stop if isinstance(part.stop, int) and part.stop >= 0 else None
    if alike and step > 0:
        data = cut(x.data, dim, slice(part.start, stop, step))
    else:
        positions = first[:, None] + step * torch.arange(x.data.shape[dim], device=first.device)
        data = at_each(x, dim, positions)
    sizes = [lengths if r == column else size for r, size in enumerate(x.lengths.unbind(1))]
    out = build_masked(data, torch.stack(sizes, 1), x.ragged_dims, x.batch_dim, True)
    return out if alike and step > 0 and (part.stop is None or stop is not None) else neutral(out)


def neutral(x: MaskedBatch) -> MaskedBatch:
    """With zeros in padding, where copies of real elements may lie: no gradient passes to those."""
    return x.with_data(torch.where(x.mask, x.data, 0))


def at_masked(x: MaskedBatch, dim: int, positions: Tensor, part: Any = None) -> Any:
    """Positions that every row has, (B, K) or (1, K): the dim is ragged no more. Dense where no other dim is."""
    column = x.ragged_dims.index(dim)
    lengths = x.lengths[:, column, None]
    enough(((positions < lengths) & (positions >= -lengths)).all(), part)
    where = torch.where(positions < 0, positions + lengths, positions)
    data, rest = at_each(x, dim, where), [r for r in x.ragged_dims if r != dim]
    if not rest:
        return data
    sizes = [size for r, size in zip(x.ragged_dims, x.lengths.unbind(1), strict=True) if r != dim]
    return build_masked(data, torch.stack(sizes, 1), tuple(rest), x.batch_dim, True)


def at_each(x: MaskedBatch, dim: int, positions: Tensor) -> Tensor:
    """Other positions of each row along a dim of the rectangle, (B, K); those outside of it give anything."""
    front = x.data.movedim((x.batch_dim, dim), (0, 1))
    inside = positions.clamp(torch.zeros_like(positions), torch.full_like(positions, front.shape[1] - 1).clamp(min=0))
    if front.shape[1] == 0:
        return x.data
    rows = torch.arange(front.shape[0], device=positions.device)[:, None]
    return front[rows, inside].movedim((0, 1), (x.batch_dim, dim))


def take(x: MaskedBatch, rows: Tensor | slice) -> MaskedBatch:
    """Some rows of the rectangle."""
    if isinstance(rows, slice) and rows.step is not None and rows.step < 0:
        begin, end, step = bounds(rows, x.lengths.shape[0])
        rows = torch.arange(begin, min(begin, end), step, device=x.device)
    try:
        data = x.data[(FULL,) * x.batch_dim + (rows,)]
        return build_masked(data, x.lengths[rows], x.ragged_dims, x.batch_dim, new_lengths=True)
    except IndexError:
        raise no_row(x.lengths.shape[0]) from None


def insert_dim(x: MaskedBatch, dim: int) -> MaskedBatch:
    """With a new static dim of size 1, anywhere but between ragged dims."""
    if x.ragged_dims[0] < dim <= x.ragged_dims[-1]:
        got, hint = f"dim {dim}", "ragged dims stay side by side"
        raise ShapeError(message("index", "a new dim in front of the ragged dims or behind", got, hint=hint))
    ragged = tuple([r + (dim <= r) for r in x.ragged_dims])
    return build_masked(x.data.unsqueeze(dim), x.lengths, ragged, x.batch_dim + (dim <= x.batch_dim))


def select_masked(x: MaskedBatch, mask: MaskedBatch) -> MaskedBatch:
    """What a ragged mask is True on, moved to the front of each row; the rectangle keeps its size."""
    n = mask.ndim
    if mask.dtype != torch.bool:
        raise DtypeError(message("index", "a bool mask", describe(mask), hint="x[mask.bool()]"))
    same = mask.ragged_dims == x.ragged_dims and mask.batch_dim == x.batch_dim == 0
    if not same or n > x.ndim or not starts_alike(mask.shape, x.shape):
        expected = f"a mask with the first dims of {describe(x)}"
        raise ShapeError(message("index", expected, describe(mask), hint="mask.expand(...), or x.transpose(a, b)"))
    require_same_lengths(x, mask, "index")
    chosen = (mask.data & mask.mask).flatten(1)
    order = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)
    rows = torch.arange(x.lengths.shape[0], device=x.device)[:, None]
    return neutral(build_masked(x.data.flatten(1, n - 1)[rows, order], chosen.sum(1)[:, None], (1,), 0, True))
