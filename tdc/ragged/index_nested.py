"""`x[...]` of ragged batches: rows of the batch, places of each row, static dims.

    x[i]  x[a:b]  x[mask]  x[rows]          examples: one as a tensor, several as a batch
    x[:, k]  x[:, [0, 2]]                   places that every row has: dense
    x[:, a:b:c]  x[:, :lengths]             a span of each row, with one end for all or one for each
    x[rows, places]                         one place of each row named: dense
    x[m]                                    what a ragged mask is True on: rows again
    x[..., k]  x[..., None]                 static dims, new dims

Rows are picked first, then every entry acts on its own dim, so an index means what it means for each row on its own.

Invariants: the ragged dim stays ragged under slices and masks, and becomes dense where all rows give as many places;
nothing is read on the host but the sizes of a row that is read out and, in eager calls, the ends of a slice of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect
from tdc.core.dynamo import eager
from tdc.core.errors import DtypeError, IndexingError, ShapeError, describe, message
from tdc.ragged.index_forms import (
    FULL,
    Span,
    around_batch,
    as_rows,
    at_examples,
    bounds,
    cut,
    full_index,
    kept,
    longest_span,
    spans,
    whole,
)
from tdc.ragged.masked import MaskedBatch, crop, require_same_lengths
from tdc.ragged.masked import like as masked_like
from tdc.ragged.nested import NestedTensor
from tdc.ragged.nested import like as nested_like
from tdc.ragged.structure import (
    Structure,
    extent_of,
    lengths_of,
    mirrored,
    offsets_of,
    require_same,
    row_ids,
    take_spans,
)
from tdc.ragged.truncate import Each, crop_rows, enough

Pick = Callable[[Any], Any]  # of batches of one structure
VECTORS = "one vector at a time: x[rows][..., places]; rows pair only with places of the ragged dim"

# -- both


def cut_rows(x: Any, dim: int, start: Any, stop: Any) -> Any:
    """`x[..., start:stop, ...]` along a ragged dim, with one end for all rows or a tensor with one for each."""
    if isinstance(x, MaskedBatch):
        return slice_masked(x, dim, Span(start, stop))
    if x.structure.ragged_ndim > 1:
        return crop_rows(x, [Span(start, stop) if d == dim else FULL for d in x.ragged_dims])
    return cut_ragged(x, Span(start, stop))


def truncate(x: Any, lengths: Any) -> Any:
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
        >>> from tdc.ragged.nested import pack
        >>> truncate(pack([torch.arange(3), torch.arange(2)]), torch.tensor([1, 5])).tolist()
        [[0], [0, 1]]
    """
    expect("truncate", x, NestedTensor, MaskedBatch)
    return cut_rows(x, x.ragged_dims[0], None, lengths)


# -- NestedTensor


def share_structure(x: NestedTensor, y: NestedTensor) -> bool:
    """Whether two batches have one structure."""
    return x._structure is y._structure


def with_structure(x: NestedTensor, y: NestedTensor) -> NestedTensor:
    """A batch with the equal structure of another one, where that has its axes in the same places."""
    s, t = x._structure, y._structure
    alike = (s.packed_dim, s.batch_dim, s.ragged_ndim) == (t.packed_dim, t.batch_dim, t.ragged_ndim)
    return nested_like(t, x._values) if alike and s is not t else x


def pick_nested(x: NestedTensor, index: Any) -> Pick:
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
        begin, end = s.offsets[rows : rows + 2].tolist()
        sizes = [end - begin] if s.shapes is None else s.shapes[rows].tolist()
        return lambda x: one_row(x, begin, end, sizes)
    try:
        starts = s.offsets[:-1][rows]
    except IndexError:
        raise no_row(count) from None
    offsets, gather = take_spans(starts, lengths_of(s)[rows])
    shapes = None if s.shapes is None else s.shapes[rows]
    part = Structure(offsets, shapes, None, s.packed_dim, s.batch_dim, s.ragged_ndim).marked()
    return lambda x: nested_like(part, x.values.index_select(s.packed_dim, gather))


def one_row(x: NestedTensor, begin: int, end: int, sizes: list[int]) -> Tensor:
    """A row as a view."""
    e = x.structure.packed_dim
    row = x.values.narrow(e, begin, end - begin)
    return row if len(sizes) == 1 else row.unflatten(e, sizes)


def rows_between(s: Structure, begin: int, end: int) -> Pick:
    """Neighbouring rows. A view of the values, but in a graph, where it must not depend on where rows begin."""
    offsets = s.offsets[begin : end + 1]
    shapes = None if s.shapes is None else s.shapes[begin:end]
    first, last = offsets[0], offsets[-1]  # as scalars: an export cannot tell that a slice has one entry
    part = Structure(offsets - first, shapes, None, s.packed_dim, s.batch_dim, s.ragged_ndim).marked()
    ends: list[Any] = [first.item(), last.item()] if eager() else []
    if ends and isinstance(ends[0], int):
        return lambda x: nested_like(part, x.values.narrow(s.packed_dim, ends[0], ends[1] - ends[0]))
    gather = take_spans(first[None], (last - first)[None])[1]
    return lambda x: nested_like(part, x.values.index_select(s.packed_dim, gather))


def no_row(count: int) -> IndexingError:
    """The error for rows out of range."""
    hint = f"the batch has {count} rows"
    return IndexingError(message("index", f"rows in [{-count}, {count - 1}]", "one beyond", hint=hint))


def index_dims(x: NestedTensor, index: Any) -> Any:
    """An index with one entry for each dim, at most: rows first, then static dims from the last to the first, then
    the ragged dim, then new dims."""
    s = x.structure
    parts, new = full_index(index, x.shape, s.batch_dim, x.device)
    b: int = s.batch_dim
    dims: Any = s.ragged_dims
    rows: Any = as_rows(parts[b], s.batch_size, x.device)
    parts[b] = rows
    if around_batch(parts, b, dims) and not new:
        return at_examples(x, parts)
    check_vectors(parts, b, dims)
    paired = isinstance(rows, Tensor) and len(dims) == 1 and isinstance(parts[dims[0]], Tensor)
    y = x if paired or whole(rows) else index_rows(x, rows)
    if isinstance(y, Tensor):
        for d in range(len(parts) - 1, -1, -1):
            if d != b and not whole(parts[d]):
                y = cut(y, d - (d > b), parts[d])
        return opened(y, parts, new)
    z, ragged = cut_static(y, parts), parts[dims[0]]
    if len(dims) > 1:
        chosen = [parts[d] for d in dims]
        if isinstance(rows, Tensor) and isinstance(ragged, Tensor):
            chosen[0], parts[dims[0]] = Each(paired_places(ragged, rows)), 0
        return opened(z if all([whole(part) for part in chosen]) else crop_rows(z, chosen), parts, new)
    if paired:
        out = at_pairs(z, rows, ragged)
        parts[dims[0]] = 0
        return opened(out, parts, new)
    out = z if whole(ragged) else cut_ragged(z, ragged) if isinstance(ragged, slice) else at_places(z, ragged)
    return opened(out, parts, new)


def check_vectors(parts: list[Any], batch_dim: int, ragged_dims: tuple[int, ...]) -> None:
    """Vectors would pair up as in NumPy; only rows and places of the ragged dim have a meaning together.

    Raises:
        IndexingError: several others.
    """
    found = [d for d, part in enumerate(parts) if isinstance(part, Tensor)]
    if len(found) > 1 and set(found) != {batch_dim, ragged_dims[0]}:
        raise IndexingError(message("index", "at most one vector", f"vectors at dims {found}", hint=VECTORS))


def cut_static(x: NestedTensor, parts: list[Any]) -> NestedTensor:
    """Entries on static dims: the axes behind them move."""
    s, values = x.structure, x.values
    packed_dim, batch_dim, ndim = s.packed_dim, s.batch_dim, x.ndim
    for d in range(ndim - 1, -1, -1):
        axis = s.axis(d, ndim, "index")
        if axis is None or axis == s.packed_dim or whole(parts[d]):
            continue
        values, more = cut(values, axis, parts[d]), kept(parts[d]) - 1
        packed_dim, batch_dim = packed_dim + more * (axis < s.packed_dim), batch_dim + more * (d < s.batch_dim)
    if values is x.values:
        return x
    same = packed_dim == s.packed_dim and batch_dim == s.batch_dim
    return nested_like(s if same else s.moved(packed_dim, batch_dim), values)


def opened(y: Any, parts: list[Any], new: list[int]) -> Any:
    """A result with new dims of size 1, each in front of what the entries behind it gave."""
    for done, before in enumerate(new):
        dim = sum([kept(part) for part in parts[:before]]) + done
        if isinstance(y, Tensor):
            y = y.unsqueeze(dim)
        elif isinstance(y, NestedTensor):
            s, axis = y.structure.opened(dim, y.ndim, "index")
            y = nested_like(s, y.values.unsqueeze(axis))
        else:
            y = opened_masked(y, dim)
    return y


def at_places(x: NestedTensor, part: Any) -> Tensor:
    """Places that every row has, an int or whole numbers of any number of dims: dense, (B, *D) or (B, *places, *D)."""
    s, e = x.structure, x.structure.packed_dim
    places = part if isinstance(part, Tensor) else torch.full((), part, dtype=torch.int64, device=s.offsets.device)
    flat, lengths = places.reshape(-1), lengths_of(s)[:, None]
    enough(((flat < lengths) & (flat >= -lengths)).all(), part)
    where = torch.where(flat < 0, s.offsets[1:, None], s.offsets[:-1, None]) + flat
    found = x.values.index_select(e, where.reshape(-1)).unflatten(e, (s.batch_size, *places.shape))
    return found.movedim(e, s.batch_dim + (places.ndim - 1) * (s.batch_dim > e))


def at_pairs(x: NestedTensor, rows: Tensor, places: Tensor) -> Tensor:
    """One place of each row named: dense, (K, *D)."""
    s, e = x.structure, x.structure.packed_dim
    places = paired_places(places, rows)[:, 0]
    try:
        begin, length = s.offsets[:-1][rows], lengths_of(s)[rows]
    except IndexError:
        raise no_row(s.batch_size) from None
    enough(((places < length) & (places >= -length)).all())
    where = begin + torch.where(places < 0, places + length, places)
    return x.values.index_select(e, where).movedim(e, s.batch_dim - (s.batch_dim > e))


def paired_places(places: Tensor, rows: Tensor) -> Tensor:
    """One place for each row named, (K, 1).

    Raises:
        IndexingError: as many places as rows, or one for all, are expected.
    """
    if places.ndim > 1 or places.shape[0] not in (1, rows.shape[0]):
        expected = f"one place for each of {rows.shape[0]} rows"
        raise IndexingError(message("index", expected, describe(places), hint="x[rows][:, places] for all of them"))
    return places[:, None]


def cut_ragged(x: NestedTensor, part: slice | Span) -> NestedTensor:
    """A slice of every row."""
    s, e = x.structure, x.structure.packed_dim
    if part.start is None and part.stop is None and part.step == -1:
        return nested_like(s, x.values.index_select(e, mirrored(s, x.values.shape[e])))
    first, lengths, step = spans(part, lengths_of(s))
    offsets, gather = take_spans(s.offsets[:-1] + first, lengths, step)
    longest = None if s.extent is None else longest_span(part, s.extent.shape[0])
    extent = None if longest is None else extent_of((longest,), s.offsets.device)
    return nested_like(Structure(offsets, None, extent, e, s.batch_dim, 1).marked(), x.values.index_select(e, gather))


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
    places = mask.values.nonzero()
    rows = row_ids(s, x.values.shape[s.packed_dim])[places[:, s.packed_dim]]
    if s.packed_dim:  # row after row, each in the order of its own elements
        rows, order = rows.sort(stable=True)
        places = places[order]
    lengths = torch.zeros_like(s.offsets[1:]).index_add(0, rows, torch.ones_like(rows))
    return nested_like(Structure(offsets_of(lengths)).marked(), x.values[places.unbind(1)])


def starts_alike(mask: Any, shape: Any) -> bool:
    """Whether the dims of a mask are the first ones of a shape."""
    return all([m == n for m, n in zip(mask, shape, strict=False)])


# -- MaskedBatch


def share_lengths(x: MaskedBatch, y: MaskedBatch) -> bool:
    """Whether two batches have their lengths from one tensor."""
    return x._lengths is y._lengths and (x.ragged_dims, x.batch_dim) == (y.ragged_dims, y.batch_dim)


def with_lengths(x: MaskedBatch, y: MaskedBatch) -> MaskedBatch:
    """As `with_structure`."""
    alike = (x.ragged_dims, x.batch_dim) == (y.ragged_dims, y.batch_dim)
    return masked_like(x._data, y._lengths, x.ragged_dims, x.batch_dim) if alike and not share_lengths(x, y) else x


def pick_masked(x: MaskedBatch, index: Any) -> Pick:
    """As `pick_nested`."""
    if isinstance(index, tuple) or index is None or index is Ellipsis or x.batch_dim:
        return lambda y: index_masked(y, index)
    rows = as_rows(index, x.lengths.shape[0], x.device)
    if isinstance(rows, int):
        sizes = x.lengths[rows].tolist()
        return lambda y: crop(y, y.data.select(0, rows), sizes)
    lengths = take(x, rows).lengths
    return lambda y: masked_like(take(y, rows).data, lengths, y.ragged_dims, 0)


def index_masked(x: MaskedBatch, index: Any) -> Any:
    """`x[index]`: as of a NestedTensor, whatever the index is; what stays ragged stays a rectangle."""
    if isinstance(index, MaskedBatch):
        return select_masked(x, index)
    b, shape = x.batch_dim, [-1 if d in x.ragged_dims else n for d, n in enumerate(x.shape)]
    parts, new = full_index(index, shape, b, x.device)
    rows: Any = as_rows(parts[b], x.lengths.shape[0], x.device)
    parts[b] = rows
    if around_batch(parts, b, x.ragged_dims) and not new:
        return at_examples(x, parts)
    check_vectors(parts, b, x.ragged_dims)
    if isinstance(rows, int):
        row = crop(x, x.data.select(b, rows), x.lengths[rows].tolist())
        for d in range(len(parts) - 1, -1, -1):
            if d != b and not whole(parts[d]):
                row = cut(row, d - (d > b), parts[d])
        return opened(row, parts, new)
    y: Any = x if whole(rows) else take(x, rows)
    paired = isinstance(rows, Tensor)
    for d in range(len(parts) - 1, -1, -1):
        if paired and d in x.ragged_dims and isinstance(parts[d], Tensor):
            y, parts[d] = at_masked(y, d, paired_places(parts[d], rows)).squeeze(d), 0
        elif d != b and not whole(parts[d]):
            y = cut_masked(y, d, parts[d])
    return opened(y, parts, new)


def cut_masked(x: Any, dim: int, part: Any) -> Any:
    """One entry on one dim that is not the batch."""
    if isinstance(x, Tensor):
        return cut(x, dim, part)
    if dim in x.ragged_dims:
        if isinstance(part, slice):
            return slice_masked(x, dim, part)
        places = part if isinstance(part, Tensor) else torch.full((1,), part, dtype=torch.int64, device=x.device)
        found = at_masked(x, dim, places.reshape(1, -1), part)
        if isinstance(found, Tensor):
            return found.unflatten(dim, places.shape) if isinstance(part, Tensor) else found.squeeze(dim)
        return cut_masked(
            found, dim, torch.arange(found.shape[dim]).view(part.shape) if isinstance(part, Tensor) else 0
        )
    more = kept(part) - 1
    ragged = tuple([r + more * (dim < r) for r in x.ragged_dims])
    return masked_like(cut(x.data, dim, part), x.lengths, ragged, x.batch_dim + more * (dim < x.batch_dim))


def slice_masked(x: MaskedBatch, dim: int, part: slice | Span) -> MaskedBatch:
    """A slice of every row; where rows begin at other places, their elements move."""
    column = x.ragged_dims.index(dim)
    first, lengths, step = spans(part, x.lengths[:, column])
    alike = part.start is None or (isinstance(part.start, int) and part.start >= 0)
    stop = part.stop if isinstance(part.stop, int) and part.stop >= 0 else None
    if alike and step > 0:
        data = cut(x.data, dim, slice(part.start, stop, step))
    else:
        places = first[:, None] + step * torch.arange(x.data.shape[dim], device=first.device)
        data = at_each(x, dim, places)
    sizes = [lengths if r == column else size for r, size in enumerate(x.lengths.unbind(1))]
    out = masked_like(data, torch.stack(sizes, 1), x.ragged_dims, x.batch_dim, True)
    return out if alike and step > 0 and (part.stop is None or stop is not None) else neutral(out)


def neutral(x: MaskedBatch) -> MaskedBatch:
    """With zeros in padding, where copies of real elements may lie: no gradient passes to those."""
    return x.with_data(torch.where(x.mask, x.data, 0))


def at_masked(x: MaskedBatch, dim: int, places: Tensor, part: Any = None) -> Any:
    """Places that every row has, (B, K) or (1, K): the dim is ragged no more. Dense where no other dim is."""
    column = x.ragged_dims.index(dim)
    lengths = x.lengths[:, column, None]
    enough(((places < lengths) & (places >= -lengths)).all(), part)
    where = torch.where(places < 0, places + lengths, places)
    data, rest = at_each(x, dim, where), [r for r in x.ragged_dims if r != dim]
    if not rest:
        return data
    sizes = [size for r, size in zip(x.ragged_dims, x.lengths.unbind(1), strict=True) if r != dim]
    return masked_like(data, torch.stack(sizes, 1), tuple(rest), x.batch_dim, True)


def at_each(x: MaskedBatch, dim: int, places: Tensor) -> Tensor:
    """Other places of each row along a dim of the rectangle, (B, K); those outside of it give anything."""
    front = x.data.movedim((x.batch_dim, dim), (0, 1))
    inside = places.clamp(torch.zeros_like(places), torch.full_like(places, front.shape[1] - 1).clamp(min=0))
    if front.shape[1] == 0:
        return x.data
    rows = torch.arange(front.shape[0], device=places.device)[:, None]
    return front[rows, inside].movedim((0, 1), (x.batch_dim, dim))


def take(x: MaskedBatch, rows: Tensor | slice) -> MaskedBatch:
    """Some rows of the rectangle."""
    if isinstance(rows, slice) and rows.step is not None and rows.step < 0:
        begin, end, step = bounds(rows, x.lengths.shape[0])
        rows = torch.arange(begin, min(begin, end), step, device=x.device)
    try:
        data = x.data[(FULL,) * x.batch_dim + (rows,)]
        return masked_like(data, x.lengths[rows], x.ragged_dims, x.batch_dim, fresh=True)
    except IndexError:
        raise no_row(x.lengths.shape[0]) from None


def opened_masked(x: MaskedBatch, dim: int) -> MaskedBatch:
    """With a new static dim of size 1, anywhere but between ragged dims."""
    if x.ragged_dims[0] < dim <= x.ragged_dims[-1]:
        got, hint = f"dim {dim}", "ragged dims stay side by side"
        raise ShapeError(message("index", "a new dim in front of the ragged dims or behind", got, hint=hint))
    ragged = tuple([r + (dim <= r) for r in x.ragged_dims])
    return masked_like(x.data.unsqueeze(dim), x.lengths, ragged, x.batch_dim + (dim <= x.batch_dim))


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
    return neutral(masked_like(x.data.flatten(1, n - 1)[rows, order], chosen.sum(1)[:, None], (1,), 0, True))


NestedTensor._pick, NestedTensor._shares, NestedTensor._like = pick_nested, share_structure, with_structure
MaskedBatch._pick, MaskedBatch._shares, MaskedBatch._like = pick_masked, share_lengths, with_lengths
NestedTensor.__getitem__ = index_nested  # the class is made below, and no layer calls upwards
MaskedBatch.__getitem__ = index_masked  # as above
