"""Entries of an index on ragged dims: a slice of every row, positions of every row, crops of images.

    images (B, C, -1, -1)     x[:, :, 2:10, -8:]     -> (B, C, -1, -1), each row cropped
                              x[:, :, 0]             -> (B, C, -1), the first line of each
                              x[:, :, :, [0, -1]]    -> (B, C, -1, 2)

`spans` and `positions_of` turn entries into positions of rows of different lengths; `cut_packed` and `cut_padded` apply
them to batches. A crop of packed rows is a single gather.

Invariant: how many positions stay is data, so that eager calls need the sizes on the host, or that number itself where
ends are data; a graph has an unbacked size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import shown
from tdc.core.asserts import require
from tdc.core.dynamo import known, larger, readable, smaller
from tdc.core.errors import IndexingError, ShapeError, describe, message
from tdc.layout.segments import (
    coordinates,
    elements,
    gather_spans,
    lengths_of,
    mirrored,
    on_host_too,
    row_ids,
    sizes_of,
    sizes_on_host,
    strides,
    structure_of_sizes,
    take_spans,
    total_of,
)
from tdc.layout.structure import Structure, extent_of, remember
from tdc.ragged.index_forms import FULL, Span, as_end, cut, kept, step_of, takes_all
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_nested


class Each(NamedTuple):
    """One position of each row, (B, 1)."""

    positions: Tensor


def spans(part: slice | Span, lengths: Tensor) -> tuple[Tensor, Tensor, int]:
    """First position and length of a slice in every row, and its step. Ends may be tensors."""
    step = step_of(part)
    low, high = (0, lengths) if step > 0 else (-1, lengths - 1)

    def end(at: Any) -> Tensor:
        if isinstance(at, Tensor):
            check_ends(at, lengths.shape[0])
            at = torch.where(at < 0, at + lengths, at.to(lengths.device))
            return torch.minimum(at.clamp(min=low), high)
        at = as_end(at)
        return (lengths + at).clamp(min=low) if at < 0 else high.clamp(max=at)

    behind = high if step > 0 else torch.full_like(lengths, low)
    last = behind if part.stop is None else end(part.stop)
    if part.start is None and step > 0:
        first, distance = torch.zeros_like(lengths), last
    else:
        first = high if part.start is None else end(part.start)
        distance = (last - first if step > 0 else first - last).clamp(min=0)
    stride = abs(step)
    return first, distance if stride == 1 else (distance + stride - 1) // stride, step


def check_ends(at: Tensor, rows: int) -> None:
    """Refuse a tensor that is neither an end of a slice nor one for each row."""
    if at.ndim > 1 or (at.ndim == 1 and at.shape[0] != rows) or at.is_floating_point():
        hint = "x[:, :lengths] with whole numbers"
        raise ShapeError(message("index", f"one end for each of {rows} rows", describe(at), hint=hint))


def has_tensors(part: slice | Span) -> bool:
    """True if an end of a slice is data."""
    return isinstance(part.start, Tensor) or isinstance(part.stop, Tensor)


def longest_span(part: slice | Span, size: int) -> int | None:
    """Length of a slice of the longest row, which no other row exceeds; None where that is not known."""
    ends = (part.start, part.stop)
    if any([not (at is None or isinstance(at, int)) for at in ends]) or part.step not in (None, 1):
        return None
    start, stop = 0 if part.start is None else part.start, part.stop
    if start < 0 and stop is not None and stop >= 0:
        return None  # a shorter row may have more of them
    first = larger(size + start, 0) if start < 0 else start
    last = size if stop is None else larger(size + stop, 0) if stop < 0 else smaller(stop, size)
    return larger(last - first, 0)


def positions_of(part: Any, sizes: Tensor, name: str = "x.lengths") -> Tensor:
    """An int, whole numbers for all rows or `Each`, as positions from the front: (B, K), where sizes are (B, 1).

    An IndexingError where a row is shorter: immediate on CPU, asynchronous on CUDA.
    """
    if isinstance(part, Each):
        positions = part.positions
    else:
        positions = part.reshape(1, -1) if isinstance(part, Tensor) else torch.full_like(sizes, part)
    at = f"at {shown(part)}" if isinstance(part, int) else "at each position"
    hint = f"drop short rows first: x = x[{name} > k]"
    text = message("index", f"rows with an element {at}", "a shorter row", hint=hint)
    require(((positions < sizes) & (positions >= -sizes)).all(), text, IndexingError)
    return torch.where(positions < 0, positions + sizes, positions)


def at_rows(entries: Tensor, rows: Any) -> Tensor:
    """The entries of the rows named; IndexingError where one is out of range."""
    try:
        return entries[rows]
    except IndexError:
        count = entries.shape[0]
        hint = f"the batch has {count} rows"
        raise IndexingError(message("index", f"rows in [{-count}, {count - 1}]", "one beyond", hint=hint)) from None


def paired_positions(positions: Tensor, rows: Tensor) -> Tensor:
    """One position for each row named, (K, 1); one position may serve all rows."""
    if positions.ndim > 1 or positions.shape[0] not in (1, rows.shape[0]):
        expected, hint = f"one position for each of {rows.shape[0]} rows", "x[rows][:, positions] for all of them"
        raise IndexingError(message("index", expected, describe(positions), hint=hint))
    return positions[:, None]


def cut_rows(x: Any, dim: int, start: Any, stop: Any) -> Any:
    """`x[..., start:stop, ...]` along a ragged dim, with one end for all rows or a tensor with one for each."""
    parts: list[Any] = [FULL] * len(x.ragged_dims)
    parts[x.ragged_dims.index(dim)] = Span(start, stop)
    return cut_padded(x, parts) if isinstance(x, MaskedBatch) else cut_packed(x, parts)


# -- packed


def cut_packed(x: NestedTensor, parts: list[Any], rows: Tensor | None = None) -> NestedTensor | Tensor:
    """An entry on each ragged dim of a packed batch; with rows one position of each row named."""
    if all([takes_all(part) for part in parts]):
        return x
    if len(parts) > 1:
        return crop_rows(x, parts)
    keeps, part = isinstance(parts[0], (slice, Span)), parts[0]
    return cut_ragged(x, part) if keeps else at_positions(x, part, rows)


def cut_ragged(x: NestedTensor, part: slice | Span) -> NestedTensor:
    """A slice of every row, along one ragged dim."""
    s, e = x.structure, x.structure.packed_dim
    if part.start is None and part.stop is None and part.step == -1:
        return build_nested(s, x.values.index_select(e, mirrored(s, x.values.shape[e])))
    first, lengths, step = spans(part, lengths_of(s))
    known = None if has_tensors(part) else on_host_too(s, lambda sizes: spans(part, sizes[:, 0])[1][:, None])
    offsets, gather = take_spans(s.offsets[:-1] + first, lengths, step, elements(known))
    longest = None if s.extent is None else longest_span(part, s.extent.shape[0])
    extent = None if longest is None else extent_of((longest,), s.offsets.device)
    t = remember(sizes_on_host, Structure(offsets, None, extent, e, s.batch_dim, 1).marked(), known)
    return build_nested(t, gather_spans(x.values, e, gather))


def at_positions(x: NestedTensor, part: Any, rows: Tensor | None = None) -> Tensor:
    """The same positions of every row, an int or whole numbers of any shape P: dense, (B, *D) or (B, *P, *D); with rows
    one position of each row named, (K, *D)."""
    s, e = x.structure, x.structure.packed_dim
    begin, lengths = s.offsets[:-1], lengths_of(s)
    if rows is not None:
        begin, lengths = at_rows(begin, rows), lengths[rows]
    where = begin[:, None] + positions_of(part, lengths[:, None])
    shape = part.shape if isinstance(part, Tensor) else ()
    found = x._values.index_select(e, where.reshape(-1)).unflatten(e, (begin.shape[0], *shape))
    return found.movedim(e, s.batch_dim + (len(shape) - 1) * (s.batch_dim > e))


def crop_rows(x: NestedTensor, parts: list[Any]) -> NestedTensor | Tensor:
    """Apply one entry to each ragged dim; dense where no dim stays ragged.

    A slice keeps the dim ragged, an int or one position of each row drops it, positions of every row make it static.
    """
    s, e = x.structure, x.structure.packed_dim
    along = [r for r, part in enumerate(parts) if isinstance(part, (slice, Span))]
    fixed = [r for r in range(s.ragged_ndim) if r not in along]
    if [r for r in fixed if along and along[0] < r < along[-1] and kept(parts[r])]:
        got, hint = "positions between them", "x.to_padded() first"
        raise ShapeError(message("index", "ragged dims side by side", got, hint=hint))
    t, rows, source = rows_of_spans(s, {r: parts[r] for r in along}, x.device)
    front = sum([kept(parts[r]) for r in fixed if along and r < along[0]])
    shape: list[Any] = [source.shape[0]]
    for r in fixed:
        positions = positions_of(parts[r], sizes_of(s)[:, r, None], f"x.sizes[:, {r}]") * strides(s)[r][:, None]
        source = source.unsqueeze(-1) + positions[rows].view(
            source.shape[0], *[1] * (source.ndim - 1), positions.shape[1]
        )
        shape += parts[r].shape if isinstance(parts[r], Tensor) else ()
    values = x._values.index_select(e, source.reshape(-1)).unflatten(e, shape)
    more = sum([kept(parts[r]) - 1 for r in fixed if s.ragged_dims[r] < s.batch_dim])
    if t is None:
        return values.movedim(e, s.batch_dim + more)
    return build_nested(t.moved(e + front, s.batch_dim + more), values.movedim(e, e + front))


def spans_at(sizes: Tensor, parts: dict[int, Any]) -> tuple[Any, Any, Any]:
    """`spans` of slices of some ragged dims, of examples of ragged sizes (B, R): a tuple of each of the three."""
    each = sizes.unbind(1)
    return tuple(zip(*[spans(part, each[r]) for r, part in parts.items()], strict=True))  # type: ignore[return-value]  # three


def rows_of_spans(s: Structure, parts: dict[int, Any], device: Any) -> tuple[Structure | None, Tensor, Tensor]:
    """Slices of some ragged dims: the structure of the result, and for each of its positions the row and the packed
    position it comes from. Without a slice, one position for each row, where it begins."""
    if not parts:
        return None, torch.arange(s.batch_size, device=device), s.offsets[:-1]
    along, steps = list(parts), strides(s)
    first, lengths, step = spans_at(sizes_of(s), parts)
    bounds = [] if s.extent is None else [longest_span(part, s.extent.shape[r]) for r, part in parts.items()]
    bounds = [n for n in bounds if n is not None]
    bound = tuple(bounds) if len(bounds) == len(parts) else None
    t = structure_of_sizes(torch.stack(lengths, 1), bound, s.packed_dim, s.batch_dim)
    ends = any([has_tensors(part) for part in parts.values()])
    known = None if ends else on_host_too(s, lambda sizes: torch.stack(spans_at(sizes, parts)[1], 1))
    total = total_of(remember(sizes_on_host, t, known))
    rows, source = row_ids(t, total), s.offsets[row_ids(t, total)]
    for i, position in enumerate(coordinates(t, total)):
        r = along[i]
        source = source + (first[i][rows] + step[i] * position) * steps[r][rows]
    return t, rows, source


# -- padded


def cut_padded(x: Any, parts: list[Any]) -> MaskedBatch | Tensor:
    """An entry on each ragged dim of a padded batch."""
    for r in range(len(parts) - 1, -1, -1):
        if not takes_all(parts[r]):
            run = slice_masked if isinstance(parts[r], (slice, Span)) else at_masked
            x = run(x, x.ragged_dims[r], parts[r])
    return x


def slice_masked(x: MaskedBatch, dim: int, part: slice | Span) -> MaskedBatch:
    """A slice of every row; where rows begin at other positions, their elements move."""
    column = x.ragged_dims.index(dim)
    first, lengths, step = spans(part, x.lengths[:, column])
    alike, exact = part.start is None or (isinstance(part.start, int) and part.start >= 0), readable()
    stop = part.stop if isinstance(part.stop, int) and (part.stop >= 0 or exact) else None  # a graph would guard
    if alike and step > 0:
        data = cut(x.data, dim, slice(part.start, stop, step))
    else:
        longest = longest_span(part, x.data.shape[dim]) if exact else None
        count = x.data.shape[dim] if longest is None else longest
        positions = first[:, None] + step * torch.arange(count, device=first.device)
        data = at_each(x, dim, positions)
    sizes = [lengths if r == column else size for r, size in enumerate(x.lengths.unbind(1))]
    out = build_masked(data, torch.stack(sizes, 1), x.ragged_dims, x.batch_dim, True)
    return out if alike and step > 0 and (part.stop is None or (stop is not None and stop >= 0)) else neutral(out)


def at_masked(x: MaskedBatch, dim: int, part: Any) -> MaskedBatch | Tensor:
    """Positions that every row has, or one of each row: the dim becomes static. Dense where no other dim is ragged."""
    column, rest = x.ragged_dims.index(dim), [r for r in x.ragged_dims if r != dim]
    data: Any = at_each(x, dim, positions_of(part, x.lengths[:, column, None]))
    data = data.unflatten(dim, part.shape) if isinstance(part, Tensor) else data.squeeze(dim)
    if not rest:
        return data
    more = kept(part) - 1
    sizes = torch.stack([size for r, size in enumerate(x.lengths.unbind(1)) if r != column], 1)
    ragged = tuple([r + more * (dim < r) for r in rest])
    return build_masked(data, sizes, ragged, x.batch_dim + more * (dim < x.batch_dim), True)


def at_each(x: MaskedBatch, dim: int, positions: Tensor) -> Tensor:
    """Other positions of each row along a dim of the rectangle, (B, K); positions outside of it give anything."""
    front = x.data.movedim((x.batch_dim, dim), (0, 1))
    if not known(front.shape[1] != 0):  # one position, which is outside
        front = F.pad(front, [*[0, 0] * (front.ndim - 2), 0, 1])
    inside = positions.clamp(torch.zeros_like(positions), torch.full_like(positions, front.shape[1] - 1))
    rows = torch.arange(front.shape[0], device=positions.device)[:, None]
    return front[rows, inside].movedim((0, 1), (x.batch_dim, dim))


def neutral(x: MaskedBatch) -> MaskedBatch:
    """A batch with zeros in padding, which may hold copies of real elements: these get no gradient."""
    return x.with_data(x.data.masked_fill(~x.mask, 0))
