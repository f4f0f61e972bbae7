"""Reading and writing at places of each row: gather, scatter, index_add, index_put, take, masked_select and their kin.

    x (B, -1, D)                       index                        result of gather
    along the ragged dim               (B, -1, D), rows of its own  (B, -1, D), rows as long as those of index
                                       (B, K, D), dense             (B, K, D), dense
    along a static dim                 as ragged as x               as ragged as index

A place counts within its row. So in packed values it is the place plus where the row begins, and one call of the dense
operation on the packed axis does all rows. `index_add` and the like take one vector of places for all rows, or, along
the batch, rows of the source for rows of x.

Invariants: a place that its row does not have is an error on the device, never the neighbour's element; what is unknown
beforehand is only the number of elements of `masked_select` and `nonzero`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.core.asserts import require
from tdc.core.errors import IndexingError, ShapeError, StructureError, UnsupportedError, describe, message, op_name
from tdc.core.rules import MODES, Rule, add_rule
from tdc.core.typing import Op
from tdc.ops.pointwise import packed
from tdc.ragged.index_nested import select_where
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.segments import lengths_of, local_ids, offsets_of, row_ids, spread
from tdc.ragged.structure import Structure, require_same

Wrap = Callable[[Tensor], Any]
INSIDE = "places count within each row, from 0"


def tall(t: Tensor, axis: int, ndim: int) -> Tensor:
    """A vector as it broadcasts along one axis."""
    return t.view(-1, *[1] * (ndim - axis - 1))


def inside(there: Tensor, op: Op) -> None:
    """Every place lies in its row: an assertion on the device."""
    require(there.all(), message(op, "places inside each row", "one beyond", hint=INSIDE), IndexingError)


def axis_of(op: Op, x: NestedTensor, dim: int) -> int:
    """The axis of values along which places count.

    Raises:
        UnsupportedError: the batch, or one of several ragged dims.
    """
    s = x.structure
    axis = s.axis(dim, x.ndim, op)
    if axis is None or (axis == s.packed_dim and s.ragged_ndim > 1):
        got = "the batch" if axis is None else f"one of {s.ragged_ndim} ragged dims"
        hint = "x[rows] picks whole rows; x.to_padded() has common places"
        raise UnsupportedError(message(op, "a static dim or the ragged one", got, hint=hint))
    return axis


def placed(op: Op, x: NestedTensor, dim: int, index: Any) -> tuple[int, Tensor, Wrap, Wrap]:
    """Places of each row as places of packed values: the axis, the index, how a result that is shaped like the index is
    made, and how an operand that is shaped like the index is packed.

    Raises:
        StructureError: the index is not as ragged as x, which it must be along a static dim.
        UnsupportedError: along the batch.
    """
    s, axis = x.structure, axis_of(op, x, dim)
    if isinstance(index, NestedTensor):
        t, n = index.structure, index.values.ndim
        if (t.packed_dim, t.batch_dim, t.ragged_ndim) != (
            s.packed_dim,
            s.batch_dim,
            s.ragged_ndim,
        ) or index.ndim != x.ndim:
            got, hint = describe(index), "an index with as many dims, the batch and the ragged dim in the same places"
            raise StructureError(message(op, f"an index laid out as {describe(x)}", got, hint=hint))
        own = lambda v: src_values(op, index, v)  # noqa: E731
        if axis != s.packed_dim:
            require_same(s, t, op)
            return axis, index.values, partial(build_nested, t), own
        if t.batch_size != s.batch_size:
            raise StructureError(
                message(op, f"{s.batch_size} rows of places", f"{t.batch_size}", hint="one row for each")
            )
        ids = row_ids(t, index.values.shape[axis])
        inside((index.values >= 0) & (index.values < tall(lengths_of(s)[ids], axis, n)), op)
        return axis, index.values + tall(s.offsets[:-1][ids], axis, n), partial(build_nested, t), own
    if not isinstance(index, Tensor) or axis != s.packed_dim or index.ndim != x.ndim:
        hint = "index[:, None].expand(x.shape), or x.with_values(index)"
        raise StructureError(message(op, f"an index as ragged as {describe(x)}", describe(index), hint=hint))
    b, e = s.batch_dim, s.packed_dim
    move = lambda v: v.movedim(b, e)  # noqa: E731
    places = move(index)
    begin = tall(s.offsets[:-1], e, places.ndim)
    inside((places >= 0) & (places < tall(lengths_of(s), e, places.ndim)), op)
    shape = places.shape[e : e + 2]
    return (
        axis,
        (places + begin).flatten(e, e + 1),
        lambda v: v.unflatten(e, shape).movedim(e, b),
        lambda v: move(v).flatten(e, e + 1) if isinstance(v, Tensor) and v.ndim else v,
    )


def src_values(op: Op, index: NestedTensor, src: Any) -> Any:
    """The values of what is written where a ragged index points to.

    Raises:
        StructureError: it is not as ragged as the index.
    """
    if isinstance(src, NestedTensor):
        require_same(index.structure, src.structure, op)
        return src.values
    if isinstance(src, Tensor) and src.ndim:
        raise StructureError(
            message(op, f"a source as ragged as {describe(index)}", describe(src), hint="tdc.pack(rows)")
        )
    return src


def gather_nested(x: NestedTensor, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    axis, where, result, _ = placed(torch.gather, x, dim, index)
    return result(x.values.gather(axis, where))


def take_along_dim_nested(x: NestedTensor, indices: Any, dim: int | None = None) -> Any:
    """`gather` of an index that is broadcast; without a dim, of places in each row as `take` counts them."""
    op = torch.take_along_dim
    if dim is None:
        return take_nested(x, indices)
    s, axis = x.structure, axis_of(op, x, dim)
    sizes = list(x.values.shape)
    if isinstance(indices, NestedTensor):
        v = indices.values
        wide = [v.shape[a] if a in (axis, s.packed_dim) else n for a, n in enumerate(sizes)]
        return gather_nested(x, dim, indices.with_values(v.expand(wide)))
    logical = [-1 if d in s.ragged_dims else n for d, n in enumerate(x.shape)]
    d = dim % x.ndim
    if axis == s.packed_dim:
        return gather_nested(x, dim, indices.expand([indices.shape[i] if i == d else n for i, n in enumerate(logical)]))
    logical[d] = indices.shape[d]
    template = x.with_values(
        x.values.narrow(axis, 0, 1).expand([logical[d] if a == axis else n for a, n in enumerate(sizes)])
    )
    where = packed(indices, template, op).expand(template.values.shape)
    return gather_nested(x, dim, x.with_values(where))


def scatter_nested(
    x: NestedTensor, dim: int, index: Any, src: Any = None, *, value: Any = None, **options: Any
) -> NestedTensor:
    axis, where, _, pack = placed(torch.scatter, x, dim, index)
    src = pack(value if src is None else src)
    return x.with_values(x.values.scatter(axis, where, src, **options))


def scatter_add_nested(x: NestedTensor, dim: int, index: Any, src: Any) -> NestedTensor:
    axis, where, _, pack = placed(torch.scatter_add, x, dim, index)
    return x.with_values(x.values.scatter_add(axis, where, pack(src)))


def scatter_reduce_nested(
    x: NestedTensor, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> NestedTensor:
    axis, where, _, pack = placed(torch.scatter_reduce, x, dim, index)
    return x.with_values(x.values.scatter_reduce(axis, where, pack(src), reduce, include_self=include_self))


def index_write_nested(
    op: Op, x: NestedTensor, dim: int, index: Tensor, source: Any, *args: Any, **kw: Any
) -> NestedTensor:
    """`index_add`, `index_copy`, `index_reduce`: the same static places or the same places of every row; whole rows."""
    s, run = x.structure, getattr(torch.Tensor, op_name(op))
    axis = s.axis(dim, x.ndim, op)
    if axis is not None and axis != s.packed_dim:
        source = packed(source, x.with_values(x.values.index_select(axis, index)), op)
        return x.with_values(run(x.values, axis, index, source, *args, **kw))
    if axis is None:
        if not isinstance(source, NestedTensor) or source.structure.batch_size != index.shape[0]:
            expected = f"{index.shape[0]} rows for as many places of the batch"
            raise StructureError(
                message(op, expected, describe(source), hint="a NestedTensor with rows of the same lengths")
            )
        t, total = source.structure, source.values.shape[s.packed_dim]
        same = (lengths_of(t) == lengths_of(s)[index]).all()
        require(same, message(op, "rows as long as those they meet", "others", hint="x[index] has their lengths"))
        where = s.offsets[:-1][index][row_ids(t, total)] + local_ids(t, total)
        return x.with_values(run(x.values, s.packed_dim, where, source.values, *args, **kw))
    e, where = axis_of(op, x, dim), same_places(op, x, index)
    if not isinstance(source, Tensor):
        hint = "each row takes as many places, so the source is dense"
        raise StructureError(message(op, f"a source of (B, ..., {index.shape[0]}, ...)", describe(source), hint=hint))
    source = source.movedim(s.batch_dim, e).flatten(e, e + 1)
    return x.with_values(run(x.values, e, where, source, *args, **kw))


def same_places(op: Op, x: NestedTensor, index: Tensor) -> Tensor:
    """The same places of every row, as places of packed values, (B*K,)."""
    s = x.structure
    inside((index >= 0) & (index < lengths_of(s)[:, None]), op)
    return (s.offsets[:-1, None] + index).flatten()


def index_fill_nested(x: NestedTensor, dim: int, index: Tensor, value: Any) -> NestedTensor:
    s = x.structure
    axis = s.axis(dim, x.ndim, "index_fill")
    if axis is None:
        return filled_rows(x, (index,), value)
    if axis == s.packed_dim:
        axis_of(torch.index_fill, x, dim)
        index = same_places(torch.index_fill, x, index)
    return x.with_values(x.values.index_fill(axis, index, value))


def filled_rows(x: NestedTensor, indices: tuple[Tensor, ...], value: Any, accumulate: bool = False) -> NestedTensor:
    """A number, or a tensor over the dims behind the ragged one, put into whole rows, or into static places of them
    in front of the ragged dim."""
    s, e = x.structure, x.structure.packed_dim
    if isinstance(value, NestedTensor) or (isinstance(value, Tensor) and value.ndim > x.values.ndim - e - 1):
        hint = "x.index_copy(0, rows, source) puts rows of other elements"
        raise ShapeError(
            message("index_put", "a value over the dims behind the ragged one", describe(value), hint=hint)
        )
    sizes = (s.batch_size, *x.values.shape[: len(indices) - 1])
    if accumulate:
        hits = x.values.new_zeros(sizes).index_put(indices, x.values.new_ones(()), accumulate=True)
    else:
        hits = x.values.new_zeros(sizes, dtype=torch.bool).index_put(
            indices, torch.ones((), dtype=torch.bool, device=x.device)
        )
    hit = spread(hits, s, x.values.shape[e])
    hit = hit.view(*hit.shape, *[1] * (x.values.ndim - hit.ndim)).movedim(0, e)
    value = torch.as_tensor(value, device=x.device).to(x.dtype)
    return x.with_values(x.values + hit * value if accumulate else torch.where(hit, value, x.values))


def index_put_nested(x: NestedTensor, indices: Any, values: Any, accumulate: bool = False) -> NestedTensor:
    """Indices of dims in order, the batch first: rows, places of the ragged dim, static dims; or one ragged mask."""
    s, e, given = x.structure, x.structure.packed_dim, tuple(indices)
    if len(given) == 1 and isinstance(given[0], NestedTensor):
        if given[0]._structure is not s:
            require_same(s, given[0]._structure, torch.index_put)
        mask = given[0]._values
        mask = mask.view(*mask.shape, *[1] * (x.values.ndim - mask.ndim))
        return x.with_values(torch.where(mask, x.values + values if accumulate else values, x.values).to(x.dtype))
    wrong = [i for i in given if not isinstance(i, Tensor) or i.dtype == torch.bool]
    if s.batch_dim or s.ragged_ndim > 1 or wrong or not 0 < len(given) <= x.ndim:
        expected, hint = "whole numbers for the batch and the dims behind it", "x.index_put((rows, places), values)"
        raise IndexingError(message("index_put", expected, describe(indices), hint=hint))
    rows = torch.where(given[0] < 0, given[0] + s.batch_size, given[0])
    if len(given) <= e + 1:
        return filled_rows(x, (rows, *given[1:]), values, accumulate)
    length, place = lengths_of(s)[rows], given[e + 1]
    inside((place < length) & (place >= -length), torch.index_put)
    where = s.offsets[:-1][rows] + torch.where(place < 0, place + length, place)
    where = torch.broadcast_tensors(where, *given[1 : e + 1], *given[e + 2 :])
    order = (*where[1 : e + 1], where[0], *where[e + 1 :])
    values = (
        values.to(x.dtype) if isinstance(values, Tensor) else torch.as_tensor(values, dtype=x.dtype, device=x.device)
    )
    return x.with_values(x.values.index_put(order, values, accumulate))


def flat_rows(op: Op, x: NestedTensor) -> tuple[Tensor, Structure]:
    """The elements of each row one after another, (N * D,), and where rows begin there.

    Raises:
        UnsupportedError: the ragged dim is not the first of a row, so that its elements lie apart.
    """
    s = x.structure
    if s.packed_dim or s.batch_dim:
        hint = "x.transpose(a, b) brings the ragged dim behind the batch"
        raise UnsupportedError(message(op, "the ragged dim behind the batch", describe(x), hint=hint))
    width = x.values.shape[1:].numel()
    return x.values.flatten(), Structure(s.offsets * width).marked()


def take_nested(x: NestedTensor, index: Any) -> Any:
    """Elements by their place in the flattened row; a dense index serves all rows: `(*K) -> (B, *K)`."""
    flat, s = flat_rows(torch.take, x)
    if isinstance(index, NestedTensor):
        if index.structure.batch_dim or index.structure.batch_size != s.batch_size:
            expected = f"{s.batch_size} rows of places"
            raise StructureError(
                message("take", expected, describe(index), hint="one row for each, the batch as dim 0")
            )
        axis, places = index.structure.packed_dim, index.values
        ids = row_ids(index.structure, places.shape[axis])
        begin, end = [tall(t[ids], axis, places.ndim) for t in (s.offsets[:-1], s.offsets[1:])]
    else:
        places = index.expand(s.batch_size, *index.shape)
        begin, end = [tall(t, 0, places.ndim) for t in (s.offsets[:-1], s.offsets[1:])]
    inside((places < end - begin) & (places >= begin - end), torch.take)
    found = flat[torch.where(places < 0, end, begin) + places]
    return index.with_values(found) if isinstance(index, NestedTensor) else found


def mask_of(op: Op, x: NestedTensor, mask: Any) -> NestedTensor:
    """A mask, ragged or dense, broadcast to x."""
    return x.with_values(packed(mask, x, op).expand(x.values.shape))


def masked_select_nested(x: NestedTensor, mask: Any) -> NestedTensor:
    """The elements of each row on which a mask is True, in order: `(B, -1)`."""
    return select_where(x, mask_of(torch.masked_select, x, mask))


def masked_scatter_nested(x: NestedTensor, mask: Any, source: Any) -> NestedTensor:
    """Elements of the source in order, for each row from the beginning of its row of the source, or of all."""
    op = torch.masked_scatter
    flat, s = flat_rows(op, x)
    chosen = mask_of(op, x, mask).values.flatten()
    total = chosen.cumsum(0) - 1
    ids = row_ids(s, flat.shape[0])
    before = torch.cat([total.new_zeros(1), total + 1])[s.offsets[:-1]]
    rank = total - before[ids]
    if isinstance(source, NestedTensor):
        pool, t = flat_rows(op, source)
        begin, length = t.offsets[:-1][ids], lengths_of(t)[ids]
    else:
        pool, begin, length = source.flatten(), 0, source.numel()
    enough = (~chosen | (rank < length)).all()
    require(
        enough, message(op, "as many elements as the mask is True on", "fewer", hint="one row for each"), ShapeError
    )
    pool = torch.cat([pool, pool.new_zeros(1)])  # so that there is one to read
    found = pool[torch.where(chosen, rank + begin, pool.shape[0] - 1)]
    return x.with_values(torch.where(chosen, found, flat).view(x.values.shape))


def nonzero_nested(x: NestedTensor, *, as_tuple: bool = False) -> NestedTensor:
    """The places within its row of each element that is not zero: `(B, -1, dims of a row)`.

    Raises:
        UnsupportedError: `as_tuple`, or several ragged dims.
    """
    s, e = x.structure, x.structure.packed_dim
    if as_tuple or s.ragged_ndim > 1 or s.batch_dim:
        hint = "x.nonzero().unbind(-1) for one batch of places for each dim"
        raise UnsupportedError(message("nonzero", "places of one ragged dim, as one batch", "others", hint=hint))
    places = x.values.nonzero()
    total = x.values.shape[e]
    rows, local = row_ids(s, total)[places[:, e]], local_ids(s, total)[places[:, e]]
    if e:
        rows, order = rows.sort(stable=True)
        places, local = places[order], local[order]
    counts = torch.zeros_like(s.offsets[1:]).index_add(0, rows, torch.ones_like(rows))
    columns = [local if a == e else column for a, column in enumerate(places.unbind(1))]
    return build_nested(Structure(offsets_of(counts)).marked(), torch.stack(columns, 1))


def lookup_rule(op: Op, impl: Op, modes: tuple[str, ...] = MODES) -> None:
    """The row of an operation for NestedTensor."""
    add_rule(Rule(op, "nested", "indexing", impl, op, modes=modes))


UNKNOWN = ("eager", "compile", "grad", "export")  # how many elements there are is data, which vmap has no place for
lookup_rule(torch.gather, gather_nested)
lookup_rule(torch.take_along_dim, take_along_dim_nested)
lookup_rule(torch.scatter, scatter_nested)
lookup_rule(torch.scatter_add, scatter_add_nested)
lookup_rule(torch.scatter_reduce, scatter_reduce_nested)
for _op in (torch.index_add, torch.index_copy, torch.index_reduce):
    lookup_rule(_op, partial(index_write_nested, _op))
lookup_rule(torch.index_fill, index_fill_nested)
lookup_rule(torch.index_put, index_put_nested)
lookup_rule(torch.take, take_nested)
lookup_rule(torch.masked_select, masked_select_nested, UNKNOWN)
lookup_rule(torch.masked_scatter, masked_scatter_nested)
lookup_rule(torch.nonzero, nonzero_nested, UNKNOWN)
lookup_rule(torch.argwhere, nonzero_nested, UNKNOWN)
