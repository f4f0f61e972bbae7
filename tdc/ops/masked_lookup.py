"""Reading and writing at places of each row of a rectangle: gather, scatter, index_add, index_put, take and their kin.

The dense operation runs on the rectangle. Padding of an index points to a slot that is added behind the dim and cut off
again, so that nothing is read from there or written to, and no gradient passes.

Invariants: results are those of `ragged_lookup` for the same rows; a place behind the end of its row is an error on the
device.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import normal_dim
from tdc.core.asserts import require
from tdc.core.errors import IndexingError, ShapeError, StructureError, UnsupportedError, describe, message, op_name
from tdc.core.rules import Rule, add_rule
from tdc.core.typing import Op
from tdc.ops.ragged_lookup import inside
from tdc.ragged.index_masked import select_masked
from tdc.ragged.masked import MaskedBatch, build_masked, require_same_lengths


def dim_of(op: Op, x: MaskedBatch, dim: int) -> int:
    """A dim along which places count, from the front.

    Raises:
        UnsupportedError: the batch.
    """
    d = normal_dim(dim, x.ndim, op)
    if d == x.batch_dim:
        hint = "x[rows] picks whole rows; x.data has common places"
        raise UnsupportedError(message(op, "a static dim or a ragged one", "the batch", hint=hint))
    return d


def column(x: MaskedBatch, dim: int, ndim: int) -> Tensor:
    """The length of each row along a ragged dim, to broadcast against tensors of `ndim` dims."""
    return x.lengths[:, x.ragged_dims.index(dim)].view(*[1] * x.batch_dim, -1, *[1] * (ndim - x.batch_dim - 1))


def roomy(data: Tensor, dim: int) -> Tensor:
    """The rectangle with a slot behind one dim."""
    return F.pad(data, [*[0, 0] * (data.ndim - 1 - dim), 0, 1])


def placed(op: Op, x: MaskedBatch, dim: int, index: Any) -> tuple[int, Tensor, Any]:
    """The dim, places whose padding points to the slot, and the batch whose lengths a result has; None for a dense one.

    Raises:
        StructureError: the index is neither as ragged as x nor, along the only ragged dim, dense.
    """
    d = dim_of(op, x, dim)
    ragged = d in x.ragged_dims
    if isinstance(index, MaskedBatch):
        if (index.ragged_dims, index.batch_dim, index.ndim) != (x.ragged_dims, x.batch_dim, x.ndim):
            hint = "an index with as many dims, the batch and the ragged dim in the same places"
            raise StructureError(message(op, f"an index laid out as {describe(x)}", describe(index), hint=hint))
        if not ragged:
            require_same_lengths(x, index, op_name(op))
        elif x.lengths.shape[0] != index.lengths.shape[0]:
            expected = f"{x.lengths.shape[0]} rows of places"
            raise StructureError(message(op, expected, f"{index.lengths.shape[0]}", hint="one row for each"))
        real, like = index.mask, index
        places = torch.where(real, index.data, x.data.shape[d])
        if ragged:
            inside(~real | ((places >= 0) & (places < column(x, d, index.ndim))), op)
        return d, places, like
    if not isinstance(index, Tensor) or index.ndim != x.ndim or (ragged and len(x.ragged_dims) > 1):
        raise StructureError(
            message(op, f"an index as ragged as {describe(x)}", describe(index), hint="x.with_data(index)")
        )
    if not ragged:
        return placed(op, x, dim, x.with_data(index))
    inside((index >= 0) & (index < column(x, d, index.ndim)), op)
    return d, index, None


def gather_masked(x: MaskedBatch, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    d, places, like = placed(torch.gather, x, dim, index)
    found = roomy(x.data, d).gather(d, places)
    return found if like is None else like.with_data(found)


def take_along_dim_masked(x: MaskedBatch, indices: Any, dim: int | None = None) -> Any:
    """`gather` of an index that is broadcast; without a dim, of places in each row as `take` counts them."""
    if dim is None:
        return take_masked(x, indices)
    d = dim_of(torch.take_along_dim, x, dim)
    given = indices.data if isinstance(indices, MaskedBatch) else indices
    wide = given.expand([given.shape[i] if i == d else n for i, n in enumerate(x.data.shape)])
    return gather_masked(x, d, indices.with_data(wide) if isinstance(indices, MaskedBatch) else wide)


def scatter_with(
    op: Op, x: MaskedBatch, dim: int, index: Any, src: Any = None, *args: Any, **options: Any
) -> MaskedBatch:
    """`scatter`, `scatter_add`, `scatter_reduce`."""
    d, places, _ = placed(op, x, dim, index)
    src = options.pop("value", None) if src is None else src
    src = src.data if isinstance(src, MaskedBatch) else src
    run = getattr(torch.Tensor, op_name(op))
    return x.with_data(run(roomy(x.data, d), d, places, src, *args, **options).narrow(d, 0, x.data.shape[d]))


def index_write_masked(
    op: Op, x: MaskedBatch, dim: int, index: Tensor, source: Any, *args: Any, **kw: Any
) -> MaskedBatch:
    """`index_add`, `index_copy`, `index_reduce`: static places, the same places of every row, or whole rows."""
    d = normal_dim(dim, x.ndim, op)
    if d in x.ragged_dims:
        inside((index >= 0) & (index < column(x, d, x.batch_dim + 2)), op)
    elif not isinstance(source, MaskedBatch):
        raise StructureError(
            message(op, f"a source as ragged as {describe(x)}", describe(source), hint="x.with_data(data)")
        )
    elif d != x.batch_dim:
        require_same_lengths(x, source, op_name(op))
    else:
        same = source.lengths.shape[0] == index.shape[0] and source.ragged_dims == x.ragged_dims
        if not same or source.data.shape[1:] != x.data.shape[1:]:
            expected = f"{index.shape[0]} rows in a rectangle like {describe(x)}"
            raise StructureError(message(op, expected, describe(source), hint="pad both to one length"))
        text = message(op, "rows as long as those they meet", "others", hint="x[index] has their lengths")
        require((source.lengths == x.lengths[index]).all(), text)
    data = source.data if isinstance(source, MaskedBatch) else source
    return x.with_data(getattr(torch.Tensor, op_name(op))(x.data, d, index, data, *args, **kw))


def index_fill_masked(x: MaskedBatch, dim: int, index: Tensor, value: Any) -> MaskedBatch:
    d = normal_dim(dim, x.ndim, "index_fill")
    if d in x.ragged_dims:
        inside((index >= 0) & (index < column(x, d, x.batch_dim + 2)), torch.index_fill)
    return x.with_data(x.data.index_fill(d, index, value))


def index_put_masked(x: MaskedBatch, indices: Any, values: Any, accumulate: bool = False) -> MaskedBatch:
    """Indices of dims in order, the batch first; or one ragged mask."""
    given = tuple(indices)
    if len(given) == 1 and isinstance(given[0], MaskedBatch):
        require_same_lengths(x, given[0], "index_put")
        mask = given[0].data.view(*given[0].shape, *[1] * (x.ndim - given[0].ndim))
        return x.with_data(torch.where(mask, x.data + values if accumulate else values, x.data).to(x.dtype))
    if x.batch_dim or not given or any([not isinstance(i, Tensor) or i.dtype == torch.bool for i in given]):
        expected, hint = "whole numbers for the batch and the dims behind it", "x.index_put((rows, places), values)"
        raise IndexingError(message("index_put", expected, describe(indices), hint=hint))
    where = list(given)
    for r, lengths in zip(x.ragged_dims, x.lengths.unbind(1), strict=True):
        if r < len(where):
            length = lengths[given[0]]
            inside((where[r] < length) & (where[r] >= -length), torch.index_put)
            where[r] = torch.where(where[r] < 0, where[r] + length, where[r])
    values = (
        values.to(x.dtype) if isinstance(values, Tensor) else torch.as_tensor(values, dtype=x.dtype, device=x.device)
    )
    return x.with_data(x.data.index_put(tuple(where), values, accumulate))


def flat_rows(op: Op, x: MaskedBatch) -> tuple[Tensor, Tensor]:
    """The elements of each row one after another, (B, P), and how many of them are real, (B,).

    Raises:
        UnsupportedError: the ragged dim is not the first of a row, so that its elements lie apart.
    """
    if x.ragged_dims != (1,) or x.batch_dim:
        hint = "x.transpose(a, b) brings the ragged dim behind the batch"
        raise UnsupportedError(message(op, "one ragged dim behind the batch", describe(x), hint=hint))
    return x.data.flatten(1), x.lengths[:, 0] * x.data.shape[2:].numel()


def take_masked(x: MaskedBatch, index: Any) -> Any:
    """Elements by their place in the flattened row; a dense index serves all rows: `(*K) -> (B, *K)`."""
    flat, count = flat_rows(torch.take, x)
    ragged = isinstance(index, MaskedBatch)
    places = torch.where(index.mask, index.data, 0) if ragged else index.expand(x.lengths.shape[0], *index.shape)
    end = count.view(-1, *[1] * (places.ndim - 1))
    there = (places < end) & (places >= -end)
    inside(there | ~index.mask if ragged else there, torch.take)
    where = torch.where(places < 0, places + end, places)
    where = torch.where(index.mask, where, flat.shape[1]) if ragged else where
    found = roomy(flat, 1).gather(1, where.flatten(1)).view(places.shape)
    return index.with_data(found) if ragged else found


def mask_of(x: MaskedBatch, mask: Any) -> MaskedBatch:
    """A mask, ragged or dense, broadcast to x."""
    if isinstance(mask, MaskedBatch):
        require_same_lengths(x, mask, "masked_select")
        mask = mask.data
    return x.with_data(mask.expand(x.data.shape))


def masked_select_masked(x: MaskedBatch, mask: Any) -> MaskedBatch:
    """The elements of each row on which a mask is True, in order and moved to the front."""
    return select_masked(x, mask_of(x, mask))


def masked_scatter_masked(x: MaskedBatch, mask: Any, source: Any) -> MaskedBatch:
    """Elements of the source in order, for each row from the beginning of its row of the source, or of all."""
    chosen = (mask_of(x, mask).data & x.mask).flatten(1)
    rank = chosen.cumsum(1) - 1
    if isinstance(source, MaskedBatch):
        pool, length = flat_rows(torch.masked_scatter, source)
    else:
        pool = source.flatten().expand(x.lengths.shape[0], source.numel())
        length = torch.full_like(x.lengths[:, 0], source.numel())
    text = message("masked_scatter", "as many elements as the mask is True on", "fewer", hint="one row for each")
    require((~chosen | (rank < length[:, None])).all(), text, ShapeError)
    found = roomy(pool, 1).gather(1, torch.where(chosen, rank, pool.shape[1]))
    return x.with_data(torch.where(chosen, found, x.data.flatten(1)).view(x.data.shape))


def nonzero_masked(x: MaskedBatch, *, as_tuple: bool = False) -> MaskedBatch:
    """The places within its row of each element that is not zero, moved to the front.

    Raises:
        UnsupportedError: `as_tuple`, or another dim than 0 for the batch.
    """
    if as_tuple or x.batch_dim:
        hint = "x.nonzero().unbind(-1) for one batch of places for each dim"
        raise UnsupportedError(message("nonzero", "places as one batch, the batch as dim 0", "others", hint=hint))
    chosen = ((x.data != 0) & x.mask).flatten(1)
    rest = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)
    columns = []
    for size in reversed(x.data.shape[1:]):
        columns.append(rest % size)
        rest = rest // size
    return build_masked(torch.stack(columns[::-1], 2), chosen.sum(1)[:, None], (1,), 0, True)


def lookup_rule(op: Op, impl: Op) -> None:
    """The row of an operation for MaskedBatch."""
    add_rule(Rule(op, "masked", "indexing", impl, op))


lookup_rule(torch.gather, gather_masked)
lookup_rule(torch.take_along_dim, take_along_dim_masked)
for _op in (torch.scatter, torch.scatter_add, torch.scatter_reduce):
    lookup_rule(_op, partial(scatter_with, _op))
for _op in (torch.index_add, torch.index_copy, torch.index_reduce):
    lookup_rule(_op, partial(index_write_masked, _op))
lookup_rule(torch.index_fill, index_fill_masked)
lookup_rule(torch.index_put, index_put_masked)
lookup_rule(torch.take, take_masked)
lookup_rule(torch.masked_select, masked_select_masked)
lookup_rule(torch.masked_scatter, masked_scatter_masked)
lookup_rule(torch.nonzero, nonzero_masked)
lookup_rule(torch.argwhere, nonzero_masked)
