"""`x[...]` of a NestedTensor: examples of the batch, positions of each, static dims.

    x[i]  x[a:b]  x[mask]  x[rows]          examples: one as a tensor, several as a batch
    x[:, k]  x[:, [0, 2]]                   positions that every row has: dense
    x[:, a:b:c]  x[:, :lengths]             a span of each row, with one end for all or one for each
    x[rows, positions]                         one position of each row named: dense
    x[m]                                    what a ragged mask is True on: rows again
    x[..., k]  x[..., None]                 static dims, new dims

Rows are picked first, then every entry acts on its own dim, so an index means what it means for each row on its own.

Invariants: the ragged dim stays ragged under slices and masks, and becomes dense where all rows give as many positions;
nothing is read on the host but the sizes of a row that is read out and, in eager calls, the ends of a slice of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.dynamo import eager
from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.ragged.crop import Each, crop_rows
from tdc.ragged.index_forms import (
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
    longest_span,
    no_row,
    paired_positions,
    spans,
    starts_alike,
    takes_all,
)
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.segments import count_rows, lengths_of, mirrored, row_ids, structure_of_sizes, take_spans
from tdc.ragged.structure import Structure, extent_of, require_same


def same_structure(x: NestedTensor, y: NestedTensor) -> bool:
    """Whether two batches have one structure."""
    return x._structure is y._structure


def with_structure_of(x: NestedTensor, y: NestedTensor) -> NestedTensor:
    """A batch with the equal structure of another one, where that has its axes in the same positions."""
    s, t = x._structure, y._structure
    alike = (s.packed_dim, s.batch_dim, s.ragged_ndim) == (t.packed_dim, t.batch_dim, t.ragged_ndim)
    return build_nested(t, x._values) if alike and s is not t else x


def picker_nested(x: NestedTensor, index: Any) -> Pick:
    """`index` of every batch that shares a structure with `x`, whose result they share, too."""
    if isinstance(index, tuple) or index is None or index is Ellipsis or x.structure.batch_dim:
        return lambda y: index_nested(y, index)
    return rows_at(x.structure, index)


def index_nested(x: NestedTensor, index: Any) -> Any:
    """`x[index]`, whatever the index is."""
    if isinstance(index, NestedTensor):
        return select_where(x, index)
    if isinstance(index, tuple) or index is None or index is Ellipsis or x.structure.batch_dim:
        return index_dims(x, index)
    return index_rows(x, index)


def index_rows(x: NestedTensor, index: Any) -> Any:
    """`index` on the batch dim, wherever it is: an int gives a tensor; slices, masks and vectors of rows a batch."""
    return rows_at(x.structure, index)(x)


def rows_at(s: Structure, index: Any) -> Pick:
    """What `index_rows` does to every batch of a structure; all that depends on the structure alone is done here."""
    count, device = s.batch_size, s.offsets.device
    rows = as_rows(index, count, device)
    if isinstance(rows, slice):
        begin, end, step = bounds(rows, count)
        if step == 1:
            return rows_between(s, begin, max(begin, end))
        rows = torch.arange(begin, end if (end - begin) * step > 0 else begin, step, device=device)
    if not isinstance(rows, Tensor):
        ends: list[int] = s.offsets[rows : rows + 2].tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # torch's stub
        sizes: list[int] = [ends[1] - ends[0]] if s.shapes is None else s.shapes[rows].tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # torch's stub
        return lambda x: one_row(x, ends[0], ends[1], sizes)
    try:
        starts = s.offsets[:-1][rows]
    except IndexError:
        raise no_row(count) from None
    offsets, gather = take_spans(starts, lengths_of(s)[rows])
    shapes = None if s.shapes is None else s.shapes[rows]
    part = Structure(offsets, shapes, None, s.packed_dim, s.batch_dim, s.ragged_ndim).marked()
    return lambda x: build_nested(part, x.values.index_select(s.packed_dim, gather))


def one_row(x: NestedTensor, begin: int, end: int, sizes: list[int]) -> Tensor:
    """A row as a view."""
    e = x.structure.packed_dim
    row = x._values.narrow(e, begin, end - begin)
    return row if len(sizes) == 1 else row.unflatten(e, sizes)


def rows_between(s: Structure, begin: int, end: int) -> Pick:
    """Neighbouring rows. A view of the values, but in a graph, where it must not depend on where rows begin."""
    offsets = s.offsets[begin : end + 1]
    shapes = None if s.shapes is None else s.shapes[begin:end]
    first, last = offsets[0], offsets[-1]  # as scalars: an export cannot tell that a slice has one entry
    part = Structure(offsets - first, shapes, None, s.packed_dim, s.batch_dim, s.ragged_ndim).marked()
    ends: list[Any] = [first.item(), last.item()] if eager() else []
    if ends and isinstance(ends[0], int):
        return lambda x: build_nested(part, x.values.narrow(s.packed_dim, ends[0], ends[1] - ends[0]))
    gather = take_spans(first[None], (last - first)[None])[1]
    return lambda x: build_nested(part, x.values.index_select(s.packed_dim, gather))


def index_dims(x: NestedTensor, index: Any) -> Any:
    """An index with one entry for each dim, at most: rows first, then static dims from the last to the first, then
    the ragged dim, then new dims."""
    s = x.structure
    parts, new = full_index(index, x.shape, s.batch_dim, x.device)
    b: int = s.batch_dim
    dims: Any = s.ragged_dims
    parts[b] = as_rows(parts[b], s.batch_size, x.device)
    rows = parts[b]
    if around_batch(parts, b, dims) and not new:
        return at_examples(x, parts)
    check_vectors(parts, b, dims)
    paired = isinstance(rows, Tensor) and len(dims) == 1 and isinstance(parts[dims[0]], Tensor)
    y = x if paired or takes_all(rows) else index_rows(x, rows)
    if isinstance(y, Tensor):
        return index_example(y, parts, b, new)
    z = cut_static(y, parts)
    ragged: Entry = parts[dims[0]]
    if len(dims) > 1:
        chosen = [parts[d] for d in dims]
        if isinstance(rows, Tensor) and isinstance(ragged, Tensor):
            chosen[0], parts[dims[0]] = Each(paired_positions(ragged, rows)), 0
        return insert_dims(
            z if all([takes_all(part) for part in chosen]) else crop_rows(z, chosen), parts, new, insert_dim
        )
    if paired:
        out = at_pairs(z, rows, parts[dims[0]])
        parts[dims[0]] = 0
        return insert_dims(out, parts, new, insert_dim)
    out = z if takes_all(ragged) else cut_ragged(z, ragged) if isinstance(ragged, slice) else at_positions(z, ragged)
    return insert_dims(out, parts, new, insert_dim)


def cut_static(x: NestedTensor, parts: list[Any]) -> NestedTensor:
    """Entries on static dims: the axes behind them move."""
    s, values = x.structure, x.values
    packed_dim, batch_dim, ndim = s.packed_dim, s.batch_dim, x.ndim
    for d in range(ndim - 1, -1, -1):
        axis = s.axis(d, ndim, "index")
        if axis is None or axis == s.packed_dim or takes_all(parts[d]):
            continue
        values, more = cut(values, axis, parts[d]), kept(parts[d]) - 1
        packed_dim, batch_dim = packed_dim + more * (axis < s.packed_dim), batch_dim + more * (d < s.batch_dim)
    if values is x.values:
        return x
    same = packed_dim == s.packed_dim and batch_dim == s.batch_dim
    return build_nested(s if same else s.moved(packed_dim, batch_dim), values)


def insert_dim(x: NestedTensor, dim: int) -> NestedTensor:
    """With a new static dim of size 1, anywhere but between ragged dims."""
    s, axis = x.structure.with_new_dim(dim, x.ndim, "index")
    return build_nested(s, x.values.unsqueeze(axis))


def at_positions(x: NestedTensor, part: Any) -> Tensor:
    """The same positions of every row, an int or whole numbers of any shape P: dense, (B, *D) or (B, *P, *D)."""
    s, e = x.structure, x.structure.packed_dim
    positions = part if isinstance(part, Tensor) else torch.full((), part, dtype=torch.int64, device=s.offsets.device)
    flat, lengths = positions.reshape(-1), lengths_of(s)[:, None]
    enough(((flat < lengths) & (flat >= -lengths)).all(), part)
    where = torch.where(flat < 0, s.offsets[1:, None], s.offsets[:-1, None]) + flat
    found = x._values.index_select(e, where.reshape(-1)).unflatten(e, (s.batch_size, *positions.shape))
    return found.movedim(e, s.batch_dim + (positions.ndim - 1) * (s.batch_dim > e))


def at_pairs(x: NestedTensor, rows: Tensor, positions: Tensor) -> Tensor:
    """One position of each row named: dense, (K, *D)."""
    s, e = x.structure, x.structure.packed_dim
    positions = paired_positions(positions, rows)[:, 0]
    try:
        begin, length = s.offsets[:-1][rows], lengths_of(s)[rows]
    except IndexError:
        raise no_row(s.batch_size) from None
    enough(((positions < length) & (positions >= -length)).all())
    where = begin + torch.where(positions < 0, positions + length, positions)
    return x.values.index_select(e, where).movedim(e, s.batch_dim - (s.batch_dim > e))


def cut_ragged(x: NestedTensor, part: slice | Span) -> NestedTensor:
    """A slice of every row."""
    s, e = x.structure, x.structure.packed_dim
    if part.start is None and part.stop is None and part.step == -1:
        return build_nested(s, x.values.index_select(e, mirrored(s, x.values.shape[e])))
    first, lengths, step = spans(part, lengths_of(s))
    offsets, gather = take_spans(s.offsets[:-1] + first, lengths, step)
    longest = None if s.extent is None else longest_span(part, s.extent.shape[0])
    extent = None if longest is None else extent_of((longest,), s.offsets.device)
    return build_nested(Structure(offsets, None, extent, e, s.batch_dim, 1).marked(), x.values.index_select(e, gather))


def select_where(x: NestedTensor, mask: NestedTensor) -> NestedTensor:
    """What a ragged mask is True on, row by row: its dims become one ragged dim, those behind it stay.

    Shapes:
        x `(B, *S0, -1, *S1)`, mask with the first dims of x, the ragged one among them -> `(B, -1, *rest)`.

    Raises:
        DtypeError: the mask is not bool.
        ShapeError, StructureError: it has not the first dims of x.
    """
    s = x.structure
    if mask.dtype != torch.bool:
        raise DtypeError(message("index", "a bool mask", describe(mask), hint="x[mask.bool()]"))
    n = mask.values.ndim
    if s.batch_dim or mask.ndim > x.ndim or n <= s.packed_dim or not starts_alike(mask.shape, x.shape):
        expected = f"a mask with the first dims of {describe(x)}"
        raise ShapeError(message("index", expected, describe(mask), hint="mask.expand(...), or x.transpose(a, b)"))
    require_same(s, mask.structure, "index")
    positions = mask.values.nonzero()
    rows = row_ids(s, x.values.shape[s.packed_dim])[positions[:, s.packed_dim]]
    if s.packed_dim:  # row after row, each in the order of its own elements
        rows, order = rows.sort(stable=True)
        positions = positions[order]
    return build_nested(structure_of_sizes(count_rows(rows, s)[:, None]), x.values[positions.unbind(1)])
