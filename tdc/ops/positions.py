"""Storage positions of the elements that an index names, in packed values or in the rectangle of a padded batch.

    x (B, -1, D)               index                            result of gather
    along the ragged dim       (B, -1, D), lengths of its own   (B, -1, D), as long as the index
                               (B, K, D), dense                 (B, K, D), dense
    along a static dim         as ragged as x                   as ragged as x

A position counts within its example: packed, from where the example begins. Padding of an index points to a slot that
is added behind the dim and cut off again. So one call of the dense operation on storage serves all examples.

Invariants: a position that its example does not have is an error, asynchronous on CUDA; nothing is written to padding,
and no gradient passes there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import normal_dim
from tdc.core.asserts import require
from tdc.core.errors import DtypeError, IndexingError, ShapeError, StructureError, UnsupportedError, describe, message
from tdc.core.typing import Op, OpName
from tdc.layout.segments import lengths_of, row_ids, spread
from tdc.layout.structure import Structure, require_same
from tdc.ops.elementwise.pointwise import packed_operand, padded_operand
from tdc.ops.shape.join import as_rows
from tdc.ragged.index_forms import FULL
from tdc.ragged.index_ragged import cut_rows
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import Ragged, axis_of, fitted, is_ragged, ragged_sizes, sizes_along


def beside(op: Op, x: Any, like: Any) -> Any:
    """An operand, ragged or dense, as it broadcasts against the storage of `like`."""
    return packed_operand(x, like, op) if isinstance(like, NestedTensor) else padded_operand(x, like, op)


def along_axis(t: Tensor, axis: int, ndim: int) -> Tensor:
    """A vector as it broadcasts along one of `ndim` dims."""
    return t.view(-1, *[1] * (ndim - axis - 1))


# -- positions


class Found(NamedTuple):
    """An operation of an index on storage.

    Attributes:
        storage: the tensor to read from and to write to; positions count along its `axis`.
        where: the index as positions of storage.
        result: from the shape of `where` to that of the index; `operand` the other way.
        rebuild: the batch of changed storage.
    """

    storage: Tensor
    axis: int
    where: Tensor
    result: Callable[[Tensor], Any]
    operand: Callable[[Any], Any]
    rebuild: Callable[[Tensor], Any]


def inside(there: Tensor, op: Op) -> None:
    """Require that every position is inside its example."""
    hint = "positions count within each example, from 0"
    require(there.all(), message(op, "positions inside each example", "one beyond", hint=hint), IndexingError)


def dim_of(op: Op, x: Ragged, dim: int) -> int:
    """A dim along which positions count, from the front: not the batch, nor one of several packed ragged dims."""
    d = normal_dim(dim, x.ndim, op)
    several = isinstance(x, NestedTensor) and len(x.ragged_dims) > 1 and d in x.ragged_dims
    if several or d == x._batch_dim:
        got = f"one of {len(x.ragged_dims)} ragged dims" if several else "the batch"
        hint = "x[rows] picks whole examples; each ragged dim of x.to_padded() has positions of its own"
        raise UnsupportedError(message(op, "a static dim or the ragged one", got, hint=hint))
    return d


def check_index(op: OpName, index: Any, vector: bool = False) -> None:
    """Refuse what is no tensor or batch of positions: a mask would be read as positions 0 and 1."""
    if getattr(index, "dtype", None) not in (torch.int32, torch.int64):
        hint = "index.long(), or x[mask] where it is a mask" if hasattr(index, "dtype") else "torch.tensor([0, 2])"
        raise DtypeError(message(op, "an index of int32 or int64", describe(index), hint=hint))
    if vector and index.ndim > 1:
        rows = "F.embedding(ids, table) looks rows of a table up; torch.gather takes an index for each element"
        hint = "index.flatten()" if isinstance(index, Tensor) else rows
        raise ShapeError(message(op, "a vector of positions", describe(index), hint=hint))


def find(op: Op, x: Any, dim: int, index: Any) -> Found:
    """Positions of an index with an entry for each element of the result: as ragged as x or, along the only ragged
    dim, dense."""
    check_index(op, index)
    d = dim_of(op, x, dim)
    along_ragged, count = d in x.ragged_dims, x.batch_size[0]
    if isinstance(index, Tensor) and index.ndim == x.ndim and index.shape[x._batch_dim] != count:
        hint = "an entry for each example"
        raise ShapeError(message(op, f"positions for {count} examples", describe(index), hint=hint))
    if isinstance(index, type(x)):
        like: Any = index
        if (like.ragged_dims, like._batch_dim, like.ndim) != (x.ragged_dims, x._batch_dim, x.ndim):
            hint = "an index with as many dims, the batch and the ragged dim in the same positions"
            raise StructureError(message(op, f"an index laid out as {describe(x)}", describe(index), hint=hint))
        if not along_ragged:
            index = like = fitted(op, x, index)
        elif like.batch_size[0] != count:
            got = f"{like.batch_size[0]}"
            raise StructureError(message(op, f"positions for {count} examples", got, hint="an entry for each example"))
        return find_packed(op, x, d, like) if isinstance(x, NestedTensor) else find_padded(op, x, d, like)
    dense = isinstance(index, Tensor) and index.ndim == x.ndim
    if dense and not along_ragged and isinstance(x, MaskedBatch):
        return find_padded(op, x, d, x.with_data(index))
    if not dense or not along_ragged or len(x.ragged_dims) > 1:
        hint = "index[:, None].expand(x.shape), or x.with_values(index)"
        if isinstance(x, MaskedBatch):
            hint = "x.with_data(index)"
        raise StructureError(message(op, f"an index as ragged as {describe(x)}", describe(index), hint=hint))
    size = along_axis(sizes_along(x, d), x._batch_dim, x.ndim)
    inside((index >= 0) & (index < size), op)
    if isinstance(x, MaskedBatch):
        return Found(x.data, d, index, lambda v: v, lambda src: first_positions(op, src, index), x.with_data)
    return find_dense(op, x, index)


def find_packed(op: Op, x: NestedTensor, dim: int, index: NestedTensor) -> Found:
    """Of a packed index: positions of the packed axis, or static ones as they are."""
    s, t, where = x.structure, index.structure, index.values
    axis = axis_of(op, x, dim)
    if axis == s.packed_dim:
        ids = row_ids(t, where.shape[axis])
        inside((where >= 0) & (where < along_axis(lengths_of(s)[ids], axis, where.ndim)), op)
        where = where + along_axis(s.offsets[:-1][ids], axis, where.ndim)

    def operand(src: Any) -> Any:
        if isinstance(src, Tensor) and src.ndim:
            src = cut_to(op, src, index)
        if isinstance(src, NestedTensor):
            require_same(t, src.structure, op)
            return src.values
        return src

    return Found(x.values, axis, where, index.with_values, operand, x.with_values)


def find_dense(op: Op, x: NestedTensor, index: Tensor) -> Found:
    """Of a dense index along the ragged dim: as many positions of each example, one example after another."""
    s, b, e = x.structure, x.structure.batch_dim, x.structure.packed_dim
    where = index.movedim(b, e)
    shape = where.shape[e : e + 2]
    where = (where + along_axis(s.offsets[:-1], e, where.ndim)).flatten(e, e + 1)

    def operand(src: Any) -> Any:
        src = first_positions(op, src, index)
        return src.movedim(b, e).flatten(e, e + 1) if isinstance(src, Tensor) and src.ndim else src

    return Found(x.values, e, where, lambda v: v.unflatten(e, shape).movedim(e, b), operand, x.with_values)


def find_padded(op: Op, x: MaskedBatch, dim: int, index: MaskedBatch) -> Found:
    """Of a padded index: positions of the rectangle, of padding the slot behind the dim."""
    real, given, size = index.mask, index.data, x.data.shape[dim]
    if dim in x.ragged_dims:
        length = along_axis(sizes_along(x, dim), x.batch_dim, x.ndim)
        inside(~real | ((given >= 0) & (given < length)), op)
    storage = F.pad(x.data, [*[0, 0] * (x.ndim - 1 - dim), 0, 1])
    where = torch.where(real, given, size)

    def operand(src: Any) -> Any:
        if isinstance(src, Tensor) and src.ndim:
            return cut_to(op, src, index).data
        if isinstance(src, MaskedBatch):
            src = fitted(op, index, src)
            return src.filled(1) if op is torch.scatter_reduce else src.data  # of products of zeros torch has less
        return src

    return Found(storage, dim, where, index.with_data, operand, lambda data: x.with_data(data.narrow(dim, 0, size)))


def cut_to(op: Op, x: Tensor, like: Any) -> Any:
    """The first positions of each row of a dense tensor, as many as a batch has, as a batch of its structure."""
    rows = whole_rows(op, x, like)
    for r, n in zip(like.ragged_dims, ragged_sizes(like).unbind(1), strict=True):
        inside(n <= x.shape[r], op)
        rows = cut_rows(rows, r, None, n) if isinstance(rows, NestedTensor) else rows
    if isinstance(rows, NestedTensor):
        return build_nested(like.structure, rows.values)
    pad = [n for d in reversed(range(x.ndim)) for n in (0, (like.shape[d] - x.shape[d]) * (d in like.ragged_dims))]
    return build_masked(F.pad(x, pad), like.lengths, like.ragged_dims, like.batch_dim)


def whole_rows(op: Op, x: Tensor, like: Any) -> Any:
    """A dense tensor as a batch laid out as another, whose rows have one length."""
    rows = as_rows(x, like)
    if rows is x or x.shape[like._batch_dim] != like.batch_size[0]:
        expected = f"a tensor with the dims of {describe(like)} and a row for each example"
        raise StructureError(message(op, expected, describe(x), hint="x.unsqueeze(d) and x.expand(sizes), or tdc.pack"))
    return rows


def batch_of(op: Op, x: Any, like: Any, dim: int) -> Any:
    """A dense operand as the batch that a ragged index reads along a dim; a batch as it is."""
    if not isinstance(x, Tensor):
        return x
    ragged = normal_dim(dim, x.ndim, op) in like.ragged_dims
    return whole_rows(op, x, like) if ragged else cut_to(op, x, like)


def first_positions(op: Op, src: Any, index: Tensor) -> Any:
    """The elements of a ragged source that a dense index has partners for: dense. Anything else as it is."""
    if is_ragged(src):
        if src.ndim != index.ndim:
            raise ShapeError(message(op, f"a source of {index.ndim} dims", describe(src), hint="x.unsqueeze(d)"))
        for r in reversed(src.ragged_dims):
            src = src[(FULL,) * r + (torch.arange(index.shape[r], device=index.device),)]
    return src


def common(op: Op, x: Ragged, dim: int, index: Tensor) -> tuple[int, Tensor]:
    """The axis of storage, and positions there, that a vector of positions along a dim means for every example."""
    check_index(op, index, vector=True)
    d = dim_of(op, x, dim)
    axis = axis_of(op, x, d)
    if d in x.ragged_dims:
        inside((index >= 0) & (index < sizes_along(x, d)[:, None]), op)
        if isinstance(x, NestedTensor):
            return axis, (x.offsets[:-1, None] + index).flatten()
    return axis, index


# -- flattened examples


def flat_examples(op: Op, x: Ragged) -> Any:
    """Each example flattened, `(B, -1)`; an UnsupportedError where its elements are apart."""
    apart = x.structure.packed_dim if isinstance(x, NestedTensor) else x.ragged_dims != (1,)
    if apart or x._batch_dim:
        hint = "x.transpose(a, b) brings the ragged dim behind the batch"
        raise UnsupportedError(message(op, "the ragged dim behind the batch", describe(x), hint=hint))
    if isinstance(x, NestedTensor):
        return build_nested(Structure(x.offsets * math.prod(x.values.shape[1:])).marked(), x.values.flatten())
    return build_masked(x.data.flatten(1), x.lengths * math.prod(x.data.shape[2:]), (1,), 0, True)


def flat_bounds(x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The storage of a batch `(B, -1)` as a vector, and where each example begins and ends in it, (B,)."""
    if isinstance(x, NestedTensor):
        return x.values, x.offsets[:-1], x.offsets[1:]
    count, width = x.data.shape
    begin = torch.arange(count, device=x.device) * width
    return x.data.flatten(), begin, begin + x.lengths[:, 0]


def each_entry(index: Any, per_example: Tensor, batch_dim: int = 0) -> Tensor:
    """A number for each example, (B,), as it broadcasts against an index; a dense one has the batch at a dim."""
    if isinstance(index, NestedTensor):
        s = index.structure
        return along_axis(spread(per_example, s, index.values.shape[s.packed_dim]), s.packed_dim, index.values.ndim)
    return along_axis(per_example, index.batch_dim if isinstance(index, MaskedBatch) else batch_dim, index.ndim)
