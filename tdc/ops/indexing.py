"""Reading and writing at positions: gather, scatter, index_select, index_add, index_put, take.

This is about ragged batches, `batch_dims` about TensorDicts, `masks` about ragged masks. A position counts within
its example; `positions` finds it in storage, where the dense operation runs. `index_add` and the like take one vector
of positions for all examples or, along the batch, examples of the source for examples of x.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import expect_number, normal_dim
from tdc.core.asserts import require
from tdc.core.errors import DtypeError, IndexingError, ShapeError, StructureError, describe, message, op_name, show_size
from tdc.core.rules import define, note_syncs
from tdc.core.typing import Op, OpName
from tdc.layout.segments import local_positions, row_ids, spread
from tdc.ops.elementwise.pointwise import mixed
from tdc.ops.masks import put_where
from tdc.ops.positions import (
    batch_of,
    beside,
    check_index,
    common,
    dim_of,
    each_entry,
    find,
    first_positions,
    flat_bounds,
    flat_examples,
    inside,
    whole_rows,
)
from tdc.ragged.index_forms import FULL
from tdc.ragged.masked import MaskedBatch, in_rectangle
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import (
    Ragged,
    Results,
    axis_of,
    data_of,
    fitted,
    is_ragged,
    ragged_sizes,
    sizes_along,
    with_data,
)

# -- an index with an entry for each element


def gather_ragged(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Ragged | Tensor:
    """Of a dense tensor and a ragged index, too."""
    found = find(torch.gather, batch_of(torch.gather, x, index, dim), dim, index)
    return found.result(found.storage.gather(found.axis, found.where))


def take_along_dim_ragged(x: Any, indices: Any, dim: int | None = None) -> Ragged | Tensor:
    """`gather` of an index that is broadcast, where positions may count from the end; without a dim `take_flat`."""
    op = torch.take_along_dim
    check_index(op, indices)
    if dim is None:
        return take_flat(x, indices)
    if x.ndim != indices.ndim:
        raise ShapeError(message(op, f"an index of {x.ndim} dims", describe(indices), hint="index.unsqueeze(d)"))
    x = whole_rows(op, x, indices) if isinstance(x, Tensor) else x
    d = dim_of(op, x, dim)
    axis, among = axis_of(op, x, d), d in x.ragged_dims
    if isinstance(indices, type(x)):
        skip = {axis, x.structure.packed_dim} if isinstance(x, NestedTensor) else {axis, *x.ragged_dims}
        data, index = data_of(x), data_of(indices)
        pairs = enumerate(zip(data.shape, index.shape, strict=True))
        sizes = [-1 if a in skip else m if n == 1 else n for a, (n, m) in pairs]
        data, index = expanded(op, data, sizes), expanded(op, index, sizes)
        x, indices = with_data(x, data), with_data(indices, index)
        size = each_entry(indices, sizes_along(x, d)) if among else data.shape[axis]
        return gather_ragged(x, d, with_data(indices, torch.where(index < 0, index + size, index)))
    if not isinstance(indices, Tensor):
        raise mixed(op, x, indices)
    fixed, pairs = (d, x._batch_dim, *x.ragged_dims), zip(x.shape, indices.shape, strict=True)
    x = x.expand([m if n == 1 and a not in fixed else -1 for a, (n, m) in enumerate(pairs)])
    size = each_entry(indices, sizes_along(x, d), x._batch_dim) if among else data_of(x).shape[axis]
    indices = torch.where(indices < 0, indices + size, indices)
    sizes = list(data_of(x).shape)
    if isinstance(x, MaskedBatch) or among:
        wide = [indices.shape[a] if a == d else n for a, n in enumerate(x.shape)]
        return gather_ragged(x, d, expanded(op, indices, wide))
    sizes[axis] = indices.shape[d]
    like = x.with_values(x.values.narrow(axis, 0, 1).expand(sizes))
    return gather_ragged(x, d, x.with_values(beside(op, indices, like).expand(sizes)))


def expanded(op: Op, x: Tensor, sizes: list[Any]) -> Tensor:
    """`x.expand(sizes)`, or an error of the library."""
    try:
        return x.expand(sizes)
    except RuntimeError:
        hint = "sizes are 1 or equal but along the dim"
        raise ShapeError(message(op, f"an operand that broadcasts to {sizes}", describe(x), hint=hint)) from None


def scatter_rule(op: Op) -> Op:
    """`scatter`, `scatter_add`, `scatter_reduce`."""
    run = getattr(torch.Tensor, op_name(op))

    def impl(x: Any, dim: int, index: Any, src: Any = None, *args: Any, value: Any = None, **options: Any) -> Results:
        src = value if src is None else src
        if isinstance(x, Tensor) and isinstance(index, Tensor):
            return run(x, dim, index, first_positions(op, src, index), *args, **options)
        found = find(op, batch_of(op, x, index, dim), dim, index)
        src = found.operand(src)
        out = found.rebuild(run(found.storage, found.axis, found.where, src, *args, **options))
        return into(x, out) if isinstance(x, Tensor) else out

    return impl


def into(x: Tensor, rows: Any) -> Tensor:
    """A dense tensor with the elements of a batch in place of its own; it is as wide as the longest row, or wider."""
    sizes = [x.shape[r] for r in rows.ragged_dims]
    wide = in_rectangle(rows.to_padded() if isinstance(rows, NestedTensor) else rows, sizes)
    return torch.where(wide.mask, wide.data, x)


# -- a vector of positions for all examples


def index_select_ragged(x: Ragged, dim: int, index: Tensor) -> Ragged | Tensor:
    """Examples, static positions, or positions that every example has: then the result is dense."""
    d, flat = normal_dim(dim, x.ndim, "index_select"), flat_index("index_select", index)
    if d == x._batch_dim or d in x.ragged_dims:
        return x[(FULL,) * d + (flat,) if d else flat]
    return with_data(x, data_of(x).index_select(axis_of(torch.index_select, x, d), flat))


def flat_index(op: OpName, index: Any) -> Tensor:
    """A vector of positions, of a number one; a DtypeError for what is no tensor of positions."""
    check_index(op, index, vector=True)
    return index.reshape(-1)


def index_write_rule(op: Op) -> Op:
    """`index_add`, `index_copy`, `index_reduce`: at the same static or ragged positions of every example, or at whole
    examples."""
    run = getattr(torch.Tensor, op_name(op))

    def impl(x: Ragged, dim: int, index: Tensor, source: Any, *args: Any, **options: Any) -> Ragged:
        d = normal_dim(dim, x.ndim, op)
        if d == x._batch_dim:
            axis, where, source = whole_examples(op, x, flat_index(op, index), source)
        else:
            axis, where = common(op, x, d, index)
            source = source_at(op, x, d, where, source)
        return with_data(x, run(data_of(x), axis, where, source, *args, **options))

    return impl


def source_at(op: Op, x: Ragged, dim: int, where: Tensor, source: Any) -> Tensor:
    """The source of a write at positions common to all examples, shaped like storage there.

    Along the ragged dim of a packed batch it is dense, along a static one of a padded batch padded.
    """
    if isinstance(x, MaskedBatch):
        if dim not in x.ragged_dims:
            if not isinstance(source, MaskedBatch):
                expected = f"a source as ragged as {describe(x)}"
                raise StructureError(message(op, expected, describe(source), hint="x.with_data(data)"))
            return fitted(op, x, source).data
        return source.data if isinstance(source, MaskedBatch) else source
    s, axis = x.structure, axis_of(op, x, dim)
    if axis != s.packed_dim:
        return beside(op, source, x.with_values(x.values.index_select(axis, where)))
    if not isinstance(source, Tensor):
        hint = "each example takes as many positions, so the source is dense"
        raise StructureError(message(op, "a source of (B, ..., K, ...)", describe(source), hint=hint))
    return source.movedim(s.batch_dim, axis).flatten(axis, axis + 1)


def whole_examples(op: Op, x: Ragged, index: Tensor, source: Any) -> tuple[int, Tensor, Tensor]:
    """Positions of whole examples that are written, and the storage of the source, which has as many."""
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


def index_fill_ragged(x: Ragged, dim: int, index: Tensor, value: Any) -> Ragged:
    check_index("index_fill", index, vector=True)
    d = normal_dim(dim, x.ndim, "index_fill")
    if d == x._batch_dim and isinstance(x, NestedTensor):
        return filled(x, (index,), value)
    axis, where = (d, index) if d == x._batch_dim else common(torch.index_fill, x, d, index)
    return with_data(x, data_of(x).index_fill(axis, where, value))


# -- an index for each dim


def index_put_ragged(x: Ragged, indices: Any, values: Any, accumulate: bool = False) -> Ragged:
    """Indices of dims in order: examples, positions of the ragged dim, static dims; or one ragged mask."""
    data = data_of(x)
    given: list[Tensor] = [*indices]
    if getattr(values, "dtype", x.dtype) != x.dtype:
        raise DtypeError(message("index_put", f"values of {x.dtype}", describe(values), hint="values.to(x.dtype)"))
    if len(given) == 1 and isinstance(given[0], type(x)):
        return put_where(x, given[0], values, accumulate)
    wrong = any([not isinstance(i, Tensor) or i.dtype in (torch.bool, torch.uint8) for i in given])
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
    if is_ragged(values):
        hint = "x.index_put((mask,), values) takes a ragged batch, x.index_copy(0, rows, source) whole examples"
        raise StructureError(message("index_put", "dense values", describe(values), hint=hint))
    values = values.to(x.dtype) if isinstance(values, Tensor) else on_device(values, x)
    return with_data(x, data.index_put(tuple(where), values, accumulate))


def on_device(value: Any, x: Ragged) -> Tensor:
    """A value with the dtype and the device of a batch; a number is no copy from the host."""
    if isinstance(value, (bool, int, float)):
        return torch.full((), value, device=x.device).to(x.dtype)
    return torch.as_tensor(value, device=x.device).to(x.dtype)


def filled(x: NestedTensor, indices: tuple[Tensor, ...], value: Any, accumulate: bool = False) -> NestedTensor:
    """A number, or a tensor over the dims behind the ragged one, put into whole examples or static positions."""
    s, e = x.structure, x.structure.packed_dim
    if isinstance(value, NestedTensor) or (isinstance(value, Tensor) and value.ndim > x.values.ndim - e - 1):
        expected = "a value over the dims behind the ragged one"
        hint = "x.index_copy(0, rows, source) for whole examples"
        raise ShapeError(message("index_put", expected, describe(value), hint=hint))
    sizes = (s.batch_size, *x.values.shape[: len(indices) - 1])
    kind = x.dtype if accumulate else torch.bool
    hits = x.values.new_zeros(sizes, dtype=kind).index_put(indices, x.values.new_ones((), dtype=kind), accumulate)
    hit = spread(hits, s, x.values.shape[e])
    hit = hit.view(*hit.shape, *[1] * (x.values.ndim - hit.ndim)).movedim(0, e)
    value = on_device(value, x)
    return x.with_values(x.values + hit * value if accumulate else torch.where(hit, value, x.values))


# -- flattened examples


def take_ragged(x: Any, index: Any) -> Ragged | Tensor:
    """Elements by their position in the flattened example; a dense index, or a vector, serves all examples."""
    op = torch.take
    if isinstance(x, Tensor):
        if x.ndim != 1:
            hint = "torch.gather, or x.flatten() for a table that all examples share"
            raise ShapeError(message(op, "a batch, or a vector for all examples", describe(x), hint=hint))
        return from_pool(op, x, index, data_of(index), 0, x.numel())
    if not is_ragged(index):
        return at_flat(op, x, index, index.expand(*x.batch_size, *index.shape))
    if type(index) is not type(x):
        raise mixed(op, x, index)
    if index._batch_dim or index.batch_size != x.batch_size:
        hint = "an entry for each example, the batch as dim 0"
        raise StructureError(message(op, f"positions for {x.batch_size[0]} examples", describe(index), hint=hint))
    return at_flat(op, x, index, data_of(index))


def at_flat(op: Op, x: Any, index: Any, at: Tensor) -> Ragged | Tensor:
    """Elements of flattened examples, at the positions of a ragged index or of a dense one (B, *K)."""
    pool, begin, end = flat_bounds(flat_examples(op, x))
    like = index if is_ragged(index) else at
    return from_pool(op, pool, index, at, each_entry(like, begin), each_entry(like, end))


def from_pool(op: Op, pool: Tensor, index: Any, at: Tensor, begin: Any, end: Any) -> Ragged | Tensor:
    """Elements of a vector, where each position of an index counts from `begin`, or back from `end`."""
    check_index(op, index)
    there, where = (at < end - begin) & (at >= begin - end), torch.where(at < 0, end, begin) + at
    if isinstance(index, MaskedBatch):
        inside(there | ~index.mask, op)
        pool, where = F.pad(pool, (0, 1)), torch.where(index.mask, where, pool.shape[0])
    else:
        inside(there, op)
    found = pool.index_select(0, where.flatten()).view(where.shape)
    return with_data(index, found) if is_ragged(index) else found


def take_flat(x: Any, indices: Any) -> Ragged | Tensor:
    """`take_along_dim` without a dim: `take` with a flat result."""
    op = torch.take_along_dim
    if is_ragged(indices):
        return take_ragged(x, flat_examples(op, indices))
    if indices.ndim == 1:
        return take_ragged(x, indices)
    if indices.ndim != x.ndim or indices.shape[0] != x.batch_size[0]:
        expected = f"an index of {x.batch_size[0]} examples, or a vector for all"
        raise ShapeError(message(op, expected, describe(indices), hint="index.flatten()"))
    return at_flat(op, x, indices, indices.flatten(1))


# -- parts


def narrow_ragged(x: Ragged, dim: int, start: Any, length: int) -> Ragged | Tensor:
    """Neighbouring examples, part of a static dim, or the same positions of every example: dense. All must be there."""
    d = normal_dim(dim, x.ndim, "narrow")
    expect_number("narrow", start, length, whole=True)
    if d in x.ragged_dims:
        if not isinstance(start, Tensor) and start < 0 < start + length:
            got = f"{show_size(length)} from {show_size(start)} on"
            hint = "a start below 0 counts from the end of each row"
            raise ShapeError(message("narrow", f"{show_size(-start)} positions at most", got, hint=hint))
        return x[(FULL,) * d + (torch.arange(length, device=x.device) + start,)]
    size, begin = x.shape[d], int(start) if isinstance(start, Tensor) else start
    begin = begin + size if begin < 0 else begin
    if begin < 0 or length < 0 or begin + length > size:
        expected, got = f"positions in [0, {show_size(size)}]", f"{show_size(length)} from {show_size(begin)} on"
        raise ShapeError(message("narrow", expected, got, hint=f"dim {d} has {show_size(size)} positions"))
    return x[(FULL,) * d + (slice(begin, begin + length),)]


# -- rows

for _op, _impl, _dims in (
    (torch.gather, gather_ragged, "input dim* index+"),
    (torch.take_along_dim, take_along_dim_ragged, "input indices+ dim*=None"),
    (torch.scatter, scatter_rule(torch.scatter), "input dim* index+ src+"),
    (torch.scatter_add, scatter_rule(torch.scatter_add), "input dim* index+ src+"),
    (torch.scatter_reduce, scatter_rule(torch.scatter_reduce), "input dim* index+ src+ reduce"),
    (torch.index_select, index_select_ragged, "input dim* index"),
    (torch.index_fill, index_fill_ragged, "input dim* index value"),
    (torch.narrow, narrow_ragged, "input dim* start length"),
    (torch.select, lambda x, dim, index: x[(FULL,) * normal_dim(dim, x.ndim, "select") + (index,)], "input dim* index"),
    (torch.take, take_ragged, ""), (torch.index_put, index_put_ragged, ""),
):  # fmt: skip
    define(_op, "indexing", ragged=_impl, dims=_dims)
for _op in (torch.index_add, torch.index_copy, torch.index_reduce):
    define(_op, "indexing", ragged=index_write_rule(_op))
note_syncs("the number of elements of the rows", torch.index_select, kinds=("nested",))
note_syncs("the sizes of the example", torch.select, kinds=("masked",))
