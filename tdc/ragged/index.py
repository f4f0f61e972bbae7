"""`x[...]` of a ragged batch, packed or padded: rows of the batch, and the way to the other dims.

    x[i]  x[a:b]  x[mask]  x[rows]          examples: one as a tensor, several as a batch
    x[:, k]  x[:, [0, 2]]                   positions that every row has: dense
    x[:, a:b:c]  x[:, :lengths]             a span of each row, with one end for all or one for each
    x[rows, positions]                      one position of each row named: dense
    x[m]                                    positions where a ragged mask is True: rows again
    x[:, p]                                 ragged positions p, of each row its own: as ragged as p
    x[:, lists]                             lists of them, (B, -1, K) or of two levels: as many dims as these have
    x[..., k]  x[..., None]                 static dims, new dims

Rows are picked first, then every entry acts on its own dim, so an index means the same as for each row on its own. The
ragged dims of a padded batch stay a rectangle.

Invariants: the ragged dim stays ragged under slices and masks, and becomes dense where all rows give as many positions;
nothing is read on the host but the sizes of a row that is read out and, in eager calls, the ends of a slice of rows;
padding is never read as if it were real, and holds zeros where it would hold copies of real elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import GAP, NEW_DIM, entries_of, expect, expect_number, shown
from tdc.core.dynamo import ints_of, mark_dynamic, traced_for
from tdc.core.errors import DtypeError, IndexingError, ShapeError, describe, describe_index, message
from tdc.layout.segments import (
    count_rows,
    counts_on_host,
    elements,
    extent_of_rows,
    gather_spans,
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
from tdc.layout.structure import Structure, counted, remember
from tdc.ragged.index_forms import (
    FULL,
    around_batch,
    as_rows,
    at_examples,
    bounds,
    check_vectors,
    cut,
    full_index,
    index_example,
    insert_dims,
    kept,
    step_of,
    takes_all,
)
from tdc.ragged.index_ragged import Each, at_rows, cut_packed, cut_padded, cut_rows, neutral, paired_positions
from tdc.ragged.masked import MaskedBatch, build_masked, crop
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import B, Ragged, axis_of, data_of, fitted, is_ragged, sizes_along, with_static
from tdc.ragged.two_level import TwoLevelTensor

Pick = Callable[[Any], Any]  # of batches of one structure


def same_structure(x: Any, y: Any) -> bool:
    """True if two batches of one kind share a structure."""
    if isinstance(x, NestedTensor):
        return x._structure is y._structure
    return x._lengths is y._lengths and (x.ragged_dims, x.batch_dim) == (y.ragged_dims, y.batch_dim)


def with_structure_of(x: Any, y: Any) -> Ragged:
    """A batch with the equal structure of another one, where the axes of both are alike."""
    if isinstance(x, NestedTensor):
        s, t = x._structure, y._structure
        alike = (s.packed_dim, s.batch_dim, s.ragged_ndim) == (t.packed_dim, t.batch_dim, t.ragged_ndim)
        return build_nested(t, x._values) if alike and s is not t else x
    alike = (x.ragged_dims, x.batch_dim) == (y.ragged_dims, y.batch_dim) and x._lengths is not y._lengths
    return build_masked(x._data, y._lengths, x.ragged_dims, x.batch_dim) if alike else x


def names_rows(x: Any, index: Any) -> bool:
    """True if an index has one entry, for a batch that is dim 0."""
    return not (isinstance(index, (tuple, NEW_DIM, GAP)) or x._batch_dim)


def picker(x: Any, index: Any) -> Pick | None:
    """A function that indexes every batch with the structure of `x`; None for an index of more than rows."""
    return rows_at(x, index) if names_rows(x, index) else None


def index_ragged(x: Any, index: Any) -> Any:
    """`x[index]`."""
    if isinstance(index, type(x)):
        return select_where(x, index)
    entries = entries_of(index)
    if isinstance(index, tuple) and any([is_positions(part) for part in entries]):
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
    y = cut_padded(y, ragged) if isinstance(y, MaskedBatch) else cut_packed(y, ragged, rows if paired else None)
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

    A function of every batch with the structure of `x`; work on the structure alone is done here, once.
    """
    rows, known = as_rows(index, x.batch_size[0], x.device), None
    if isinstance(rows, slice) and (isinstance(x, NestedTensor) or step_of(rows) < 1):
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
        ends: list[int] = on_host(ends_of(offsets_to_read(s), rows))
        sizes: list[int] = [ends[1] - ends[0]] if s.shapes is None else on_host(sizes_to_read(s)[rows])
        begin, size = ends[0], ends[1] - ends[0]
        if len(sizes) == 1:
            return lambda x: x._values.narrow(s.packed_dim, begin, size)
        return lambda x: x._values.narrow(s.packed_dim, begin, size).unflatten(s.packed_dim, sizes)
    begin = at_rows(s.offsets[:-1], rows)
    lengths = s.offsets[1:][rows] - begin  # ends lie in memory beside begins, lengths do not
    offsets, gather = take_spans(begin, lengths, total=elements(known))
    shapes = None if s.shapes is None else counted(s.shapes[rows])
    own = lengths[:, None] if shapes is None else shapes
    extent = extent_of_rows(s, lambda: own if known is None else known)
    part = Structure(offsets, shapes, extent, s.packed_dim, s.batch_dim, s.ragged_ndim).marked()
    remember(sizes_on_host, part, known)
    return lambda x: build_nested(part, gather_spans(x.values, s.packed_dim, gather))


def ends_of(offsets: Tensor, row: int) -> Tensor:
    """Where a row begins and ends, (2,)."""
    return offsets[row : row + 2]


@traced_for(ends_of)
def ends_of_traced(offsets: Tensor, row: int) -> Tensor:
    """Replace `ends_of` in graphs, which make no slice from a row that is data."""
    return torch.stack([offsets.select(0, row), offsets.select(0, row + 1)])


def padded_rows(x: MaskedBatch, rows: Any) -> Pick:
    """Some rows of the rectangle, or one without its padding."""
    b = x.batch_dim
    if isinstance(rows, int):
        sizes = on_host(x._lengths[rows])
        return lambda y: crop(y, y.data.select(b, rows), sizes)
    part: Any = rows
    lengths = mark_dynamic(cut(x.lengths, 0, part) if isinstance(rows, slice) else at_rows(x.lengths, part), 0)
    return lambda y: build_masked(cut(y.data, b, part), lengths, y.ragged_dims, b)


def rows_between(x: Any, begin: Any, end: Any) -> Pick:
    """Neighbouring rows: a view of the data, except of packed values in a graph, whose strides would depend on where
    rows begin. Ends go into no `slice`, which Dynamo reads on the host where they are tensors (torch 2.11-2.13)."""
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
    ends = ints_of(first, last)
    if ends is not None:
        tell(part, [s], lambda known: known[0][begin:end])
        return lambda x: build_nested(part, x.values.narrow(s.packed_dim, ends[0], ends[1] - ends[0]))
    gather = take_spans(first[None], (last - first)[None])[1]
    return lambda x: build_nested(part, gather_spans(x.values, s.packed_dim, gather))


def select_where(x: Any, mask: Any) -> Ragged:
    """Positions where a ragged mask is True, row by row: its dims become one ragged dim, those behind it stay.

    The rectangle of a padded batch keeps its size; the chosen positions move to the front of each row.

    Shapes:
        x `(B, *S0, -1, *S1)`, mask with the first dims of x, the ragged one among them -> `(B, -1, *rest)`.

    Raises:
        DtypeError: the mask is not bool.
        ShapeError, StructureError: it lacks the first dims of x.
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
    """Positions of each example on the ragged dim, given by a ragged batch of them, in its order.

    Shapes:
        x `(B, *S0, -1, *S1)`, positions `(B, -1, *K)`, or two levels `(B, -1, -1)`, as many of each example as it says
        -> `(B, *S0, -1, *K, *S1)`, or `(B, -1, -1, *S1)`.

    Raises:
        IndexingError: positions in another form, or that an example does not have; a second batch of them.
    """
    (i, given), *others = [(i, part) for i, part in enumerate(index) if is_positions(part)]
    positions: Any = given
    behind = len([part for part in index[i:] if not isinstance(part, NEW_DIM)])
    ahead = [part for part in index[:i] if not isinstance(part, NEW_DIM)]
    d = x.ndim - behind if any([isinstance(part, GAP) for part in ahead]) else len(ahead)
    own = type(positions) is type(x) and positions.ragged_dims == (1,) and not positions._batch_dim
    own = own or (isinstance(positions, TwoLevelTensor) and isinstance(x, NestedTensor) and positions.ndim == 3)
    whole = own and positions.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    first: Any = index[0] if i else None
    if others or not whole or x.ragged_dims != (d,) or not (isinstance(first, GAP) or takes_all(first)) or x._batch_dim:
        expected = f"x[:, positions] with one {type(x).__name__} of whole numbers (B, -1, ...) at the ragged dim"
        hint = "x[rows] in front of it; x[mask] with a ragged mask; x.gather(d, index) for each column its own"
        raise IndexingError(message("index", expected, describe_index(index), hint=hint))
    flat: Any = positions.flatten(1) if positions.ndim > 2 else positions
    flat = torch.where(flat < 0, flat + sizes_along(x, d).unsqueeze(1), flat)
    for k in range(1, x.ndim):
        flat = flat if k == d else flat.unsqueeze(k)
    out: Any = x.take_along_dim(flat, d)
    out = out if positions.ndim == 2 else in_lists(out, d, positions)
    rest = (*index[:i], *[FULL] * (positions.ndim - 1), *index[i + 1 :])
    return out if all([isinstance(part, GAP) or takes_all(part) for part in rest]) else out[rest]


def is_positions(part: Any) -> bool:
    """True for positions of each example its own."""
    return is_ragged(part) or isinstance(part, TwoLevelTensor)


def in_lists(out: Any, dim: int, positions: Any) -> Any:
    """Elements found at flattened positions, with the dims that the positions have behind the batch."""
    if isinstance(positions, TwoLevelTensor):
        return out.unflatten(dim, positions)
    return out.unflatten(dim, (-1, *positions.shape[2:]))


def truncate(x: B, lengths: Tensor | int) -> B:
    """The first elements of each row: as many as `lengths` says, or all of a shorter row; lines of several ragged dims.

    The same as `x[:, :lengths]`, and in a graph the only spelling: Dynamo reads the ends of a slice on the host.

    Shapes:
        x `(B, *S0, -1, *S1)`, lengths `(B,)` or an int -> `(B, *S0, -1, *S1)`.

    Raises:
        DtypeError: no ragged batch; a number that is not whole.
        ShapeError: not one length for each row; a number below 0.

    Compile:
        One graph for all lengths.

    Example:
        >>> from tdc.ragged.pack import pack
        >>> truncate(pack([torch.arange(3), torch.arange(2)]), torch.tensor([1, 5])).tolist()
        [[0], [0, 1]]
    """
    expect("truncate", x, NestedTensor, MaskedBatch)
    if not isinstance(lengths, Tensor):
        expect_number("truncate", lengths, whole=True)
        if lengths < 0:
            hint = "x[:, :-n] leaves out the last n of each row"
            raise ShapeError(message("truncate", "a length of 0 or more", shown(lengths), hint=hint))
    return cut_rows(x, x.ragged_dims[0], None, lengths)
