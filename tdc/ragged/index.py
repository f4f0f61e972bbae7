"""`x[...]` of a ragged batch, packed or padded: examples of the batch, positions of each, static dims.

    x[i]  x[a:b]  x[mask]  x[rows]          examples: one as a tensor, several as a batch
    x[:, k]  x[:, [0, 2]]                   positions that every row has: dense
    x[:, a:b:c]  x[:, :lengths]             a span of each row, with one end for all or one for each
    x[rows, positions]                      one position of each row named: dense
    x[m]                                    what a ragged mask is True on: rows again
    x[:, p]                                 ragged positions p, those of each row its own: as ragged as p
    x[..., k]  x[..., None]                 static dims, new dims

Rows are picked first, then every entry acts on its own dim, so an index means what it means for each row on its own.
What stays ragged of a padded batch stays a rectangle.

Invariants: the ragged dim stays ragged under slices and masks, and becomes dense where all rows give as many positions;
nothing is read on the host but the sizes of a row that is read out and, in eager calls, the ends of a slice of rows;
padding is never read as if it were real, and where copies of real elements would lie in padding, zeros do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import expect
from tdc.core.dynamo import eager, known, mark_dynamic, readable
from tdc.core.entries import GAP, NEW_DIM, entries_of
from tdc.core.errors import DtypeError, IndexingError, ShapeError, describe, describe_index, message
from tdc.layout.segments import (
    count_rows,
    counts_on_host,
    elements,
    extent_of_rows,
    gather_spans,
    lengths_of,
    mirrored,
    offsets_on_host,
    offsets_to_read,
    on_host,
    on_host_too,
    row_ids,
    sizes_on_host,
    sizes_to_read,
    structure_of_sizes,
    take_spans,
    tell,
)
from tdc.layout.structure import Structure, counted, extent_of, remember
from tdc.ragged.crop import crop_rows
from tdc.ragged.index_forms import (
    FULL,
    Each,
    Pick,
    Span,
    around_batch,
    as_rows,
    at_examples,
    at_rows,
    bounds,
    check_vectors,
    cut,
    full_index,
    has_tensors,
    index_example,
    insert_dims,
    kept,
    longest_span,
    paired_positions,
    positions_of,
    spans,
    takes_all,
)
from tdc.ragged.masked import MaskedBatch, build_masked, crop
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import B, Ragged, axis_of, data_of, fitted, is_ragged, sizes_along, with_static


def same_structure(x: Any, y: Any) -> bool:
    """Whether two batches of one kind have one structure."""
    if isinstance(x, NestedTensor):
        return x._structure is y._structure
    return x._lengths is y._lengths and (x.ragged_dims, x.batch_dim) == (y.ragged_dims, y.batch_dim)


def with_structure_of(x: Any, y: Any) -> Ragged:
    """A batch with the equal structure of another one, where that has its axes in the same positions."""
    if isinstance(x, NestedTensor):
        s, t = x._structure, y._structure
        alike = (s.packed_dim, s.batch_dim, s.ragged_ndim) == (t.packed_dim, t.batch_dim, t.ragged_ndim)
        return build_nested(t, x._values) if alike and s is not t else x
    alike = (x.ragged_dims, x.batch_dim) == (y.ragged_dims, y.batch_dim) and x._lengths is not y._lengths
    return build_masked(x._data, y._lengths, x.ragged_dims, x.batch_dim) if alike else x


def names_rows(x: Any, index: Any) -> bool:
    """Whether an index has one entry, for a batch that is dim 0."""
    return not (isinstance(index, (tuple, NEW_DIM, GAP)) or x._batch_dim)


def picker(x: Any, index: Any) -> Pick:
    """`index` of every batch that shares a structure with `x`, whose result they share, too."""
    return rows_at(x, index) if names_rows(x, index) else lambda y: index_dims(y, index)


def index_ragged(x: Any, index: Any) -> Any:
    """`x[index]`, whatever the index is."""
    if isinstance(index, type(x)):
        return select_where(x, index)
    entries = entries_of(index)
    if isinstance(index, tuple) and any([is_ragged(part) for part in entries]):
        return at_own(x, entries)
    return rows_at(x, index)(x) if names_rows(x, index) else index_dims(x, index)


def index_dims(x: Any, index: Any) -> Ragged | Tensor:
    """An index with one entry for each dim, at most: rows first, then static dims from the last to the first, then
    ragged dims, then new dims."""
    b, dims = x._batch_dim, x.ragged_dims
    parts, new = full_index(index, [-1 if d in dims else n for d, n in enumerate(x.shape)], b, x.device)
    rows: Any = as_rows(parts[b], x.batch_size[0], x.device)
    parts[b] = rows
    if around_batch(parts, b, dims) and not new:
        return at_examples(x, parts)
    check_vectors(parts, b, dims)
    paired = isinstance(rows, Tensor) and isinstance(parts[dims[0]], Tensor)
    direct = paired and len(dims) == 1 and isinstance(x, NestedTensor)
    y = x if direct or takes_all(rows) else rows_at(x, rows)(x)
    if isinstance(y, Tensor):
        return index_example(y, parts, b, new)
    for d in range(x.ndim - 1, -1, -1):
        if d != b and d not in dims and not takes_all(parts[d]):
            axis = axis_of("index", y, d)
            y = with_static(y, cut(data_of(y), axis, parts[d]), d, kept(parts[d]) - 1)
    ragged: list[Any] = []
    for d in dims:  # no comprehension, which would make constants of numbers in a slice
        ragged.append(parts[d])
    if paired:
        ragged, parts[dims[0]] = [Each(paired_positions(ragged[0], rows)), *ragged[1:]], 0
    if isinstance(y, MaskedBatch):
        y = cut_padded(y, ragged)
    elif len(dims) > 1:
        y = y if all([takes_all(part) for part in ragged]) else crop_rows(y, ragged)
    elif not takes_all(ragged[0]):
        keeps = isinstance(ragged[0], slice)
        y = cut_ragged(y, ragged[0]) if keeps else at_positions(y, ragged[0], rows if paired else None)
    insert: Any = torch.unsqueeze if isinstance(y, Tensor) else insert_dim
    return insert_dims(y, parts, new, insert)


def insert_dim(x: Any, dim: int, op: str = "index") -> Ragged:
    """With a new static dim of size 1, anywhere but between ragged dims."""
    if isinstance(x, NestedTensor):
        s, axis = x.structure.with_new_dim(dim, x.ndim, op)
        return build_nested(s, x.values.unsqueeze(axis))
    if x.ragged_dims[0] < dim <= x.ragged_dims[-1]:
        got, hint = f"dim {dim}", "ragged dims stay side by side"
        raise ShapeError(message(op, "a new dim in front of the ragged dims or behind", got, hint=hint))
    ragged = tuple([r + (dim <= r) for r in x.ragged_dims])
    return build_masked(x.data.unsqueeze(dim), x.lengths, ragged, x.batch_dim + (dim <= x.batch_dim))


def rows_at(x: Any, index: Any) -> Pick:
    """`index` on the batch dim, wherever it is: an int gives a tensor; slices, masks and vectors of rows a batch.

    It is for every batch with the structure of `x`; all that depends on the structure alone is done here.
    """
    rows, known = as_rows(index, x.batch_size[0], x.device), None
    if isinstance(rows, slice) and (isinstance(x, NestedTensor) or (rows.step is not None and rows.step < 1)):
        begin, end, step = bounds(rows, x.batch_size[0])
        if step == 1:
            return rows_between(x, begin, max(begin, end))
        run = begin, end if (end - begin) * step > 0 else begin, step
        rows = torch.arange(*run, device=x.device)
        if isinstance(x, NestedTensor):
            known = on_host_too(x.structure, lambda sizes: sizes[torch.arange(*run)])
    if isinstance(x, MaskedBatch):
        return padded_rows(x, rows)
    s = x.structure
    if isinstance(rows, int):
        ends: list[int] = on_host(offsets_to_read(s)[rows : rows + 2])
        sizes: list[int] = [ends[1] - ends[0]] if s.shapes is None else on_host(sizes_to_read(s)[rows])
        return lambda x: one_row(x, ends[0], ends[1], sizes)
    begin = at_rows(s.offsets[:-1], rows)
    lengths = s.offsets[1:][rows] - begin  # ends lie in memory beside begins, lengths do not
    offsets, gather = take_spans(begin, lengths, total=elements(known))
    shapes = None if s.shapes is None else counted(s.shapes[rows])
    own = lengths[:, None] if shapes is None else shapes
    extent = extent_of_rows(s, lambda: own if known is None else known)
    part = Structure(offsets, shapes, extent, s.packed_dim, s.batch_dim, s.ragged_ndim).marked()
    remember(sizes_on_host, part, known)
    return lambda x: build_nested(part, gather_spans(x.values, s.packed_dim, gather))


def padded_rows(x: MaskedBatch, rows: Any) -> Pick:
    """Some rows of the rectangle, or one without its padding."""
    b = x.batch_dim
    if isinstance(rows, int):
        sizes = x._lengths[rows].tolist()
        return lambda y: crop(y, y.data.select(b, rows), sizes)
    lengths = mark_dynamic(at_rows(x.lengths, rows), 0)
    return lambda y: build_masked(y.data[(FULL,) * b + (rows,)], lengths, y.ragged_dims, b)


def one_row(x: NestedTensor, begin: int, end: int, sizes: list[int]) -> Tensor:
    """A row as a view."""
    e = x.structure.packed_dim
    row = x._values.narrow(e, begin, end - begin)
    return row if len(sizes) == 1 else row.unflatten(e, sizes)


def rows_between(x: Any, begin: Any, end: Any) -> Pick:
    """Neighbouring rows. A view of the data, but of packed values in a graph, which must not depend on where rows
    begin. Ends go into no `slice`, which Dynamo reads on the host where they are tensors (torch 2.11-2.13)."""
    if isinstance(x, MaskedBatch):
        lengths = mark_dynamic(x.lengths.narrow(0, begin, end - begin), 0)
        b = x.batch_dim
        return lambda x: build_masked(x.data.narrow(b, begin, end - begin), lengths, x.ragged_dims, b)
    s = x.structure
    offsets = s.offsets[begin : end + 1]
    shapes = None if s.shapes is None else counted(s.shapes[begin:end])
    first, last = offsets[0], offsets[-1]  # as scalars: an export cannot tell that a slice has one entry
    extent = extent_of_rows(s, lambda: sizes_to_read(s)[begin:end])
    part = Structure(counted(offsets - first), shapes, extent, s.packed_dim, s.batch_dim, s.ragged_ndim).marked()
    if counts_on_host(s):
        first, last = offsets_on_host(s)[begin], offsets_on_host(s)[end]
    ends: list[Any] = [first.item(), last.item()] if eager() else []
    if ends and isinstance(ends[0], int):
        tell(part, [s], lambda known: known[0][begin:end])
        return lambda x: build_nested(part, x.values.narrow(s.packed_dim, ends[0], ends[1] - ends[0]))
    gather = take_spans(first[None], (last - first)[None])[1]
    return lambda x: build_nested(part, gather_spans(x.values, s.packed_dim, gather))


def select_where(x: Any, mask: Any) -> Ragged:
    """What a ragged mask is True on, row by row: its dims become one ragged dim, those behind it stay.

    The rectangle of a padded batch keeps its size; what is chosen moves to the front of each row.

    Shapes:
        x `(B, *S0, -1, *S1)`, mask with the first dims of x, the ragged one among them -> `(B, -1, *rest)`.

    Raises:
        DtypeError: the mask is not bool.
        ShapeError, StructureError: it has not the first dims of x.
    """
    if mask.dtype != torch.bool:
        raise DtypeError(message("index", "a bool mask", describe(mask), hint="x[mask.bool()]"))
    same = mask.ragged_dims == x.ragged_dims and mask._batch_dim == x._batch_dim == 0
    static = [d for d in range(min(mask.ndim, x.ndim)) if d not in x.ragged_dims]
    if not same or mask.ndim > x.ndim or any([mask.shape[d] != x.shape[d] for d in static]):
        expected = f"a mask with the first dims of {describe(x)}"
        raise ShapeError(message("index", expected, describe(mask), hint="mask.expand(...), or x.transpose(a, b)"))
    mask = fitted("index", x, mask)
    if isinstance(x, MaskedBatch):
        chosen = (mask.data & mask.mask).flatten(1)
        order = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)
        rows = torch.arange(x.lengths.shape[0], device=x.device)[:, None]
        data = x.data.flatten(1, mask.ndim - 1)[rows, order]
        return neutral(build_masked(data, chosen.sum(1)[:, None], (1,), 0, True))
    s, positions = x.structure, mask.values.nonzero()
    rows = row_ids(s, x.values.shape[s.packed_dim])[positions[:, s.packed_dim]]
    if s.packed_dim:  # row after row, each in the order of its own elements
        rows, order = rows.sort(stable=True)
        positions = positions[order]
    return build_nested(structure_of_sizes(count_rows(rows, s)[:, None]), x.values[positions.unbind(1)])


def at_own(x: Any, index: tuple[Any, ...]) -> Any:
    """Positions of each example that a ragged batch of them names, on the ragged dim, in the order of that batch.

    Shapes:
        x `(B, *S0, -1, *S1)`, positions `(B, -1)`, as many of each example as it says -> `(B, *S0, -1, *S1)`.

    Raises:
        IndexingError: positions in another form, or that an example does not have; a second batch of them.
    """
    (i, positions), *others = [(i, part) for i, part in enumerate(index) if is_ragged(part)]
    behind = len([part for part in index[i:] if not isinstance(part, NEW_DIM)])
    ahead = [part for part in index[:i] if not isinstance(part, NEW_DIM)]
    d = x.ndim - behind if any([isinstance(part, GAP) for part in ahead]) else len(ahead)
    own = type(positions) is type(x) and positions.ndim == 2 and positions.ragged_dims == (1,)
    whole = own and positions.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    first: Any = index[0] if i else None
    if others or not whole or x.ragged_dims != (d,) or not (isinstance(first, GAP) or takes_all(first)) or x._batch_dim:
        expected = f"x[:, positions] with one {type(x).__name__} of whole numbers (B, -1) at the ragged dim"
        hint = "x[rows] in front of it; x[mask] with a ragged mask; x.gather(d, index) for each column its own"
        raise IndexingError(message("index", expected, describe_index(index), hint=hint))
    positions = torch.where(positions < 0, positions + sizes_along(x, d).unsqueeze(1), positions)
    for k in range(1, x.ndim):
        positions = positions if k == d else positions.unsqueeze(k)
    out, rest = torch.take_along_dim(x, positions, d), (*index[:i], FULL, *index[i + 1 :])
    return out if all([isinstance(part, GAP) or takes_all(part) for part in rest]) else out[rest]


# -- the ragged dim of a NestedTensor


def at_positions(x: NestedTensor, part: Any, rows: Tensor | None = None) -> Tensor:
    """The same positions of every row, an int or whole numbers of any shape P: dense, (B, *D) or (B, *P, *D).

    With rows it is one position of each row named, (K, *D).
    """
    s, e = x.structure, x.structure.packed_dim
    begin, lengths = s.offsets[:-1], lengths_of(s)
    if rows is not None:
        begin, lengths = at_rows(begin, rows), lengths[rows]
    where = begin[:, None] + positions_of(part, lengths[:, None])
    shape = part.shape if isinstance(part, Tensor) else ()
    found = x._values.index_select(e, where.reshape(-1)).unflatten(e, (begin.shape[0], *shape))
    return found.movedim(e, s.batch_dim + (len(shape) - 1) * (s.batch_dim > e))


def cut_ragged(x: NestedTensor, part: slice | Span) -> NestedTensor:
    """A slice of every row."""
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


# -- ragged dims of a MaskedBatch


def cut_padded(x: Any, parts: list[Any]) -> MaskedBatch | Tensor:
    """An entry on each ragged dim of a padded batch."""
    for r in range(len(parts) - 1, -1, -1):
        if not takes_all(parts[r]):
            run = slice_masked if isinstance(parts[r], slice) else at_masked
            x = run(x, x.ragged_dims[r], parts[r])
    return x


def slice_masked(x: MaskedBatch, dim: int, part: slice | Span) -> MaskedBatch:
    """A slice of every row; where rows begin at other positions, their elements move."""
    column = x.ragged_dims.index(dim)
    first, lengths, step = spans(part, x.lengths[:, column])
    alike = part.start is None or (isinstance(part.start, int) and part.start >= 0)
    stop = part.stop if isinstance(part.stop, int) and (part.stop >= 0 or readable()) else None  # a graph would guard
    if alike and step > 0:
        data = cut(x.data, dim, slice(part.start, stop, step))
    else:
        longest = longest_span(part, x.data.shape[dim]) if readable() else None
        count = x.data.shape[dim] if longest is None else longest
        positions = first[:, None] + step * torch.arange(count, device=first.device)
        data = at_each(x, dim, positions)
    sizes = [lengths if r == column else size for r, size in enumerate(x.lengths.unbind(1))]
    out = build_masked(data, torch.stack(sizes, 1), x.ragged_dims, x.batch_dim, True)
    return out if alike and step > 0 and (part.stop is None or (stop is not None and stop >= 0)) else neutral(out)


def at_masked(x: MaskedBatch, dim: int, part: Any) -> MaskedBatch | Tensor:
    """Positions that every row has, or one of each row: the dim is ragged no more. Dense where no other dim is."""
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
    """Other positions of each row along a dim of the rectangle, (B, K); those outside of it give anything."""
    front = x.data.movedim((x.batch_dim, dim), (0, 1))
    if not known(front.shape[1] != 0):  # one position, which is outside
        front = F.pad(front, [*[0, 0] * (front.ndim - 2), 0, 1])
    inside = positions.clamp(torch.zeros_like(positions), torch.full_like(positions, front.shape[1] - 1))
    rows = torch.arange(front.shape[0], device=positions.device)[:, None]
    return front[rows, inside].movedim((0, 1), (x.batch_dim, dim))


def neutral(x: MaskedBatch) -> MaskedBatch:
    """With zeros in padding, where copies of real elements may lie: no gradient passes to those."""
    return x.with_data(x.data.masked_fill(~x.mask, 0))


# -- slices of either


def cut_rows(x: Any, dim: int, start: Any, stop: Any) -> Any:
    """`x[..., start:stop, ...]` along a ragged dim, with one end for all rows or a tensor with one for each."""
    if isinstance(x, MaskedBatch):
        return slice_masked(x, dim, Span(start, stop))
    if x.structure.ragged_ndim > 1:
        return crop_rows(x, [Span(start, stop) if d == dim else FULL for d in x.ragged_dims])
    return cut_ragged(x, Span(start, stop))


def truncate(x: B, lengths: Tensor | int) -> B:
    """The first elements of each row: as many as `lengths` says, or all of a shorter row; lines of several ragged dims.

    The same as `x[:, :lengths]`, and in a graph the only spelling: Dynamo reads the ends of a slice on the host.

    Shapes:
        x `(B, *S0, -1, *S1)`, lengths `(B,)` or an int -> `(B, *S0, -1, *S1)`.

    Raises:
        DtypeError: no ragged batch.
        ShapeError: not one length for each row.

    Compile:
        One graph for all lengths.

    Example:
        >>> from tdc.ragged.pack import pack
        >>> truncate(pack([torch.arange(3), torch.arange(2)]), torch.tensor([1, 5])).tolist()
        [[0], [0, 1]]
    """
    expect("truncate", x, NestedTensor, MaskedBatch)
    return cut_rows(x, x.ragged_dims[0], None, lengths)
