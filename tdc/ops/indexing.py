"""Reading and writing at positions: gather, scatter, index_select, index_add, index_put, take, masked_select, nonzero.

This is about ragged batches, `batch_indexing` about TensorDicts. A position counts within its example; `positions` says
where it lies in storage, and the dense operation runs there. `index_add` and the like take one vector of positions for
all examples, or, along the batch, examples of the source for examples of x.

Invariant: what is unknown beforehand is only the number of elements of a packed `masked_select` and `nonzero`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import normal_dim
from tdc.core.asserts import require
from tdc.core.errors import (
    DtypeError,
    IndexingError,
    ShapeError,
    StructureError,
    UnsupportedError,
    describe,
    message,
    op_name,
)
from tdc.core.rules import define
from tdc.core.typing import Op
from tdc.ops.pointwise import mixed
from tdc.ops.positions import (
    beside,
    common,
    data_if_padded,
    dim_of,
    each_entry,
    find,
    flat_bounds,
    flat_examples,
    inside,
)
from tdc.ragged.index_forms import FULL
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.segments import count_rows, local_positions, row_ids, spread, structure_of_sizes
from tdc.ragged.storage import Ragged, axis_of, data_of, ragged_sizes, require_alike, with_data

# -- an index with an entry for each element


def gather_ragged(x: Ragged, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    found = find(torch.gather, x, dim, index)
    return found.result(found.storage.gather(found.axis, found.where))


def take_along_dim_ragged(x: Ragged, indices: Any, dim: int | None = None) -> Any:
    """`gather` of an index that is broadcast; without a dim, of positions in each example as `take` counts them."""
    if dim is None:
        return take_ragged(x, indices)
    op = torch.take_along_dim
    d, sizes = dim_of(op, x, dim), list(data_of(x).shape)
    axis = axis_of(op, x, d)
    if isinstance(indices, type(x)):
        own = data_of(indices)
        ragged = (x.structure.packed_dim,) if isinstance(x, NestedTensor) else x.ragged_dims
        wide = own.expand([own.shape[a] if a == axis or a in ragged else n for a, n in enumerate(sizes)])
        return gather_ragged(x, d, with_data(indices, wide))
    if isinstance(x, MaskedBatch) or d in x.ragged_dims:
        return gather_ragged(x, d, indices.expand([indices.shape[d] if a == d else n for a, n in enumerate(x.shape)]))
    sizes[axis] = indices.shape[d]
    like = x.with_values(x.values.narrow(axis, 0, 1).expand(sizes))
    return gather_ragged(x, d, x.with_values(beside(op, indices, like).expand(sizes)))


def scatter_rule(op: Op) -> Op:
    """`scatter`, `scatter_add`, `scatter_reduce`."""
    run = getattr(torch.Tensor, op_name(op))

    def impl(x: Ragged, dim: int, index: Any, src: Any = None, *args: Any, value: Any = None, **options: Any) -> Any:
        found = find(op, x, dim, index)
        src = found.operand(value if src is None else src)
        return found.rebuild(run(found.storage, found.axis, found.where, src, *args, **options))

    return impl


# -- a vector of positions for all examples


def index_select_ragged(x: Ragged, dim: int, index: Tensor) -> Any:
    """Examples, static positions, or positions that every example has: then the result is dense."""
    d, flat = normal_dim(dim, x.ndim, "index_select"), flat_index(index)
    if d == x._batch_dim or d in x.ragged_dims:
        return x[(FULL,) * d + (flat,) if d else flat]
    return with_data(x, data_of(x).index_select(axis_of(torch.index_select, x, d), flat))


def flat_index(index: Any) -> Tensor:
    """The index of `index_select`, one dim.

    Raises:
        DtypeError: it is no tensor.
    """
    if not isinstance(index, Tensor):
        hint = "torch.tensor([0, 2]), or x[[0, 2]]"
        raise DtypeError(message("index_select", "an index tensor", describe(index), hint=hint))
    return index.reshape(-1)


def index_write_rule(op: Op) -> Op:
    """`index_add`, `index_copy`, `index_reduce`: at the same static or ragged positions of every example, or at whole
    examples."""
    run = getattr(torch.Tensor, op_name(op))

    def impl(x: Ragged, dim: int, index: Tensor, source: Any, *args: Any, **options: Any) -> Any:
        d = normal_dim(dim, x.ndim, op)
        if d == x._batch_dim:
            axis, where, source = whole_examples(op, x, index, source)
        else:
            axis, where = common(op, x, d, index)
            source = source_at(op, x, d, where, source)
        return with_data(x, run(data_of(x), axis, where, source, *args, **options))

    return impl


def source_at(op: Op, x: Ragged, dim: int, where: Tensor, source: Any) -> Any:
    """What is written at positions common to all examples, shaped like storage there.

    Raises:
        StructureError: along the ragged dim of a packed batch no dense source, along a static one of a padded batch no
            padded source.
    """
    if isinstance(x, MaskedBatch):
        if dim not in x.ragged_dims:
            if not isinstance(source, MaskedBatch):
                expected = f"a source as ragged as {describe(x)}"
                raise StructureError(message(op, expected, describe(source), hint="x.with_data(data)"))
            require_alike(op, x, source)
        return data_if_padded(source)
    s, axis = x.structure, axis_of(op, x, dim)
    if axis != s.packed_dim:
        return beside(op, source, x.with_values(x.values.index_select(axis, where)))
    if not isinstance(source, Tensor):
        hint = "each example takes as many positions, so the source is dense"
        raise StructureError(message(op, "a source of (B, ..., K, ...)", describe(source), hint=hint))
    return source.movedim(s.batch_dim, axis).flatten(axis, axis + 1)


def whole_examples(op: Op, x: Ragged, index: Tensor, source: Any) -> tuple[int, Tensor, Tensor]:
    """Where whole examples are written, and the storage of the source.

    Raises:
        StructureError: the source is another container, or its examples have other numbers or lengths.
    """
    count = index.shape[0]
    kind: Any = type(x)
    fits = isinstance(source, kind) and source.batch_size[0] == count and source.ragged_dims == x.ragged_dims
    if fits and isinstance(x, MaskedBatch):
        fits = source.data.shape[1:] == x.data.shape[1:]
    if not fits:
        expected, hint = f"{count} examples like those of {describe(x)}", "x[index] has their lengths"
        raise StructureError(message(op, expected, describe(source), hint=hint))
    text = message(op, "examples as long as those they meet", "others", hint="x[index] has their lengths")
    require((ragged_sizes(source) == ragged_sizes(x)[index]).all(), text)
    if isinstance(x, MaskedBatch):
        return x.batch_dim, index, source.data
    t, axis = source.structure, x.structure.packed_dim
    total = source.values.shape[axis]
    return axis, x.offsets[:-1][index][row_ids(t, total)] + local_positions(t, total), source.values


def index_fill_ragged(x: Ragged, dim: int, index: Tensor, value: Any) -> Any:
    d = normal_dim(dim, x.ndim, "index_fill")
    if d != x._batch_dim:
        axis, where = common(torch.index_fill, x, d, index)
        return with_data(x, data_of(x).index_fill(axis, where, value))
    return (
        filled(x, (index,), value) if isinstance(x, NestedTensor) else x.with_data(x.data.index_fill(d, index, value))
    )


# -- an index for each dim


def index_put_ragged(x: Ragged, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """Indices of dims in order: examples, positions of the ragged dim, static dims; or one ragged mask."""
    data = data_of(x)
    given: list[Tensor] = [*indices]
    if len(given) == 1 and isinstance(given[0], type(x)):
        require_alike(torch.index_put, x, given[0])
        mask = data_of(given[0])
        mask = mask.view(*mask.shape, *[1] * (data.ndim - mask.ndim))
        return with_data(x, torch.where(mask, data + values if accumulate else values, data).to(x.dtype))
    wrong = any([not isinstance(i, Tensor) or i.dtype == torch.bool for i in given])
    several = isinstance(x, NestedTensor) and x.structure.ragged_ndim > 1
    if wrong or several or x._batch_dim or not 0 < len(given) <= x.ndim:
        expected, hint = "whole numbers for the batch and the dims behind it", "x.index_put((rows, positions), values)"
        raise IndexingError(message("index_put", expected, describe(indices), hint=hint))
    rows, *rest = given
    where = [torch.where(rows < 0, rows + x.batch_size[0], rows), *rest]
    for r, sizes in zip(x.ragged_dims, ragged_sizes(x).unbind(1), strict=True):
        if r < len(where):
            size = sizes[where[0]]
            inside((where[r] < size) & (where[r] >= -size), torch.index_put)
            where[r] = torch.where(where[r] < 0, where[r] + size, where[r])
    if isinstance(x, NestedTensor):
        r = x.structure.packed_dim + 1
        if r >= len(where):
            return filled(x, tuple(where), values, accumulate)
        where = [*where[1:r], x.offsets[:-1][where[0]] + where[r], *where[r + 1 :]]
    values = torch.as_tensor(values, device=None if isinstance(values, Tensor) else x.device).to(x.dtype)
    return with_data(x, data.index_put(tuple(where), values, accumulate))


def filled(x: NestedTensor, indices: tuple[Tensor, ...], value: Any, accumulate: bool = False) -> NestedTensor:
    """A number, or a tensor over the dims behind the ragged one, put into whole examples, or into static positions of
    them in front of the ragged dim.

    Raises:
        ShapeError: a value with more dims.
    """
    s, e = x.structure, x.structure.packed_dim
    if isinstance(value, NestedTensor) or (isinstance(value, Tensor) and value.ndim > x.values.ndim - e - 1):
        expected, hint = (
            "a value over the dims behind the ragged one",
            "x.index_copy(0, rows, source) for whole examples",
        )
        raise ShapeError(message("index_put", expected, describe(value), hint=hint))
    sizes = (s.batch_size, *x.values.shape[: len(indices) - 1])
    if accumulate:
        hits = x.values.new_zeros(sizes).index_put(indices, x.values.new_ones(()), accumulate=True)
    else:
        hits = x.values.new_zeros(sizes, dtype=torch.bool)
        hits = hits.index_put(indices, torch.ones((), dtype=torch.bool, device=x.device))
    hit = spread(hits, s, x.values.shape[e])
    hit = hit.view(*hit.shape, *[1] * (x.values.ndim - hit.ndim)).movedim(0, e)
    value = torch.as_tensor(value, device=x.device).to(x.dtype)
    return x.with_values(x.values + hit * value if accumulate else torch.where(hit, value, x.values))


def narrow_ragged(x: Ragged, dim: int, start: Any, length: int) -> Any:
    """Neighbouring examples, part of a static dim, or the same positions of every example: dense.

    Raises:
        ShapeError: they are not there.
    """
    d = normal_dim(dim, x.ndim, "narrow")
    if d in x.ragged_dims:
        return x[(FULL,) * d + (torch.arange(length, device=x.device) + start,)]
    size, begin = x.shape[d], int(start) if isinstance(start, Tensor) else start
    begin = begin + size if begin < 0 else begin
    if begin < 0 or length < 0 or begin + length > size:
        expected, got = f"positions in [0, {size}]", f"{length} from {start} on"
        raise ShapeError(message("narrow", expected, got, hint=f"dim {d} has {size} positions"))
    return x[(FULL,) * d + (slice(begin, begin + length),)]


def select_ragged(x: Ragged, dim: int, index: Any) -> Any:
    """One example, one position of a static dim, or one position of every example: dense."""
    return x[(FULL,) * normal_dim(dim, x.ndim, "select") + (index,)]


# -- flattened examples and masks


def take_ragged(x: Ragged, index: Any) -> Any:
    """Elements by their position in the flattened example; a dense index serves all examples: `(*K) -> (B, *K)`.

    Raises:
        StructureError: a ragged index of another number of examples.
    """
    op, ragged = torch.take, isinstance(index, (NestedTensor, MaskedBatch))
    pool, begin, end = flat_bounds(flat_examples(op, x))
    if ragged and type(index) is not type(x):
        raise mixed(op, x, index)
    if ragged and (index._batch_dim or index.batch_size != x.batch_size):
        hint = "an entry for each example, the batch as dim 0"
        raise StructureError(message(op, f"positions for {x.batch_size[0]} examples", describe(index), hint=hint))
    at: Any = data_of(index) if ragged else index.expand(*x.batch_size, *index.shape)
    begin, end = each_entry(index, begin), each_entry(index, end)
    there, where = (at < end - begin) & (at >= begin - end), torch.where(at < 0, end, begin) + at
    if isinstance(index, MaskedBatch):
        inside(there | ~index.mask, op)
        pool, where = with_slot(pool), torch.where(index.mask, where, pool.shape[0])
    else:
        inside(there, op)
    found = pool.index_select(0, where.flatten()).view(where.shape)
    return with_data(index, found) if ragged else found


def with_slot(pool: Tensor) -> Tensor:
    """A vector with an element that stands for none."""
    return torch.cat([pool, pool.new_zeros(1)])


def mask_of(op: Op, x: Ragged, mask: Any) -> Any:
    """A mask, ragged or dense, broadcast to x."""
    return with_data(x, beside(op, mask, x).expand(data_of(x).shape))


def masked_select_ragged(x: Ragged, mask: Any) -> Any:
    """The elements of each example on which a mask is True, in order: `(B, -1)`."""
    return x[mask_of(torch.masked_select, x, mask)]


def masked_scatter_ragged(x: Ragged, mask: Any, source: Any) -> Any:
    """Elements of the source in order, for each example from the beginning of its example of the source, or of all.

    Raises:
        ShapeError: fewer elements than the mask is True on. Immediate on CPU, asynchronous on CUDA.
    """
    op, chosen = torch.masked_scatter, mask_of(torch.masked_scatter, x, mask)
    if isinstance(x, NestedTensor):
        s = flat_examples(op, x).structure
        begin, ids, chosen = s.offsets[:-1], row_ids(s, x.values.numel()), chosen.values.flatten()
    else:
        flat = (chosen.data & x.mask).flatten(1)
        (count, width), chosen = flat.shape, flat.flatten()
        rows = torch.arange(count, device=x.device)
        begin, ids = rows * width, rows[:, None].expand(count, width).flatten()
    before = torch.cat([ids.new_zeros(1), chosen.cumsum(0)])
    rank = before[1:] - 1 - before[begin][ids]
    if isinstance(source, type(x)):
        pool, first, last = flat_bounds(flat_examples(op, source))
        first, count = first[ids], (last - first)[ids]
    else:
        pool, first, count = source.flatten(), 0, source.numel()
    text = message(op, "as many elements as the mask is True on", "fewer", hint="an element for each")
    require((~chosen | (rank < count)).all(), text, ShapeError)
    found = with_slot(pool)[torch.where(chosen, rank + first, pool.shape[0])]
    data = data_of(x)
    return with_data(x, torch.where(chosen, found, data.flatten()).view(data.shape))


def nonzero_ragged(x: Ragged, *, as_tuple: bool = False) -> Any:
    """The positions within its example of each element that is not zero: `(B, -1, dims of an example)`.

    Packed there are as many as the data says; a rectangle keeps its size, and they are moved to the front.

    Raises:
        UnsupportedError: `as_tuple`, several ragged dims that are packed, or another dim than 0 for the batch.
    """
    if as_tuple or x._batch_dim or (isinstance(x, NestedTensor) and len(x.ragged_dims) > 1):
        hint = "x.nonzero().unbind(-1) for one batch of positions for each dim"
        raise UnsupportedError(message("nonzero", "positions of one ragged dim, as one batch", "others", hint=hint))
    return nonzero_packed(x) if isinstance(x, NestedTensor) else nonzero_padded(x)


def nonzero_packed(x: NestedTensor) -> NestedTensor:
    s, e = x.structure, x.structure.packed_dim
    found, total = x.values.nonzero(), x.values.shape[e]
    rows, local = row_ids(s, total)[found[:, e]], local_positions(s, total)[found[:, e]]
    if e:
        rows, order = rows.sort(stable=True)
        found, local = found[order], local[order]
    columns = [local if a == e else column for a, column in enumerate(found.unbind(1))]
    return build_nested(structure_of_sizes(count_rows(rows, s)[:, None]), torch.stack(columns, 1))


def nonzero_padded(x: MaskedBatch) -> MaskedBatch:
    chosen = ((x.data != 0) & x.mask).flatten(1)
    rest, columns = (~chosen).to(torch.uint8).argsort(dim=1, stable=True), []
    for size in reversed(x.data.shape[1:]):
        columns.append(rest % size)
        rest = rest // size
    return build_masked(torch.stack(columns[::-1], 2), chosen.sum(1)[:, None], (1,), 0, True)


# -- rows

NO_VMAP = ("eager", "compile", "grad", "export")  # vmap cannot hold a number of elements that is data
for _op, _impl in (
    (torch.gather, gather_ragged), (torch.take_along_dim, take_along_dim_ragged), (torch.take, take_ragged),
    (torch.index_select, index_select_ragged), (torch.index_fill, index_fill_ragged),
    (torch.index_put, index_put_ragged), (torch.narrow, narrow_ragged), (torch.select, select_ragged),
    (torch.masked_scatter, masked_scatter_ragged),
):  # fmt: skip
    define(_op, "indexing", ragged=_impl)
for _op in (torch.scatter, torch.scatter_add, torch.scatter_reduce):
    define(_op, "indexing", ragged=scatter_rule(_op))
for _op in (torch.index_add, torch.index_copy, torch.index_reduce):
    define(_op, "indexing", ragged=index_write_rule(_op))
for _op, _impl in (
    (torch.masked_select, masked_select_ragged), (torch.nonzero, nonzero_ragged), (torch.argwhere, nonzero_ragged),
):  # fmt: skip
    define(_op, "indexing", nested=_impl, modes=NO_VMAP)
    define(_op, "indexing", masked=_impl)
