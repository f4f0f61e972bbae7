"""Shape operations that are others put together: movedim, rot90, tile, hstack, channel_shuffle and their kin.

Each is one or two methods of the batch, so it does for packed and for padded rows what those do.

Invariant: no rule here reads values or lengths.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import normal_dim
from tdc.core.errors import ShapeError, UnsupportedError, describe, message
from tdc.core.rules import define, unsupported
from tdc.core.typing import Op
from tdc.ops.pairs import widest_of
from tdc.ops.pointwise import fits, packed_operand, padded_operand, unbroadcast
from tdc.ops.positions import beside
from tdc.ops.shape import ints, normal_dims
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import data_of, with_data
from tdc.ragged.structure import require_same


def movedim_ragged(x: Any, source: Any, destination: Any) -> Any:
    old, new = normal_dims("movedim", source, x.ndim), normal_dims("movedim", destination, x.ndim)
    if len(old) != len(new):
        got = f"{len(new)} for {len(old)} dims"
        raise ShapeError(message("movedim", "one destination for each dim", got, hint="x.movedim((0, 1), (1, 0))"))
    order = [d for d in range(x.ndim) if d not in old]
    for position, d in sorted(zip(new, old, strict=True)):
        order.insert(position, d)
    return x.permute(order)


def rot90_ragged(x: Any, k: int = 1, dims: Any = (0, 1)) -> Any:
    """A quarter turn is a reversal and a transposition."""
    a, b = normal_dims("rot90", dims, x.ndim)
    if k % 4 == 2:
        return x.flip((a, b))
    return x if k % 4 == 0 else x.flip((b if k % 4 == 1 else a,)).transpose(a, b)


def flip_along(dim: int, x: Any) -> Any:
    """`flipud` and `fliplr`."""
    return x.flip((dim,))


def t_ragged(x: Any) -> Any:
    """Two dims swapped.

    Raises:
        ShapeError: there are more.
    """
    if x.ndim > 2:
        raise ShapeError(message("t", "2 dims", describe(x), hint="name them: x.transpose(1, 2)"))
    return x.transpose(0, 1)


def tile_ragged(x: Any, *dims: Any) -> Any:
    times = ints(dims)
    return x.repeat(*[1] * (x.ndim - len(times)), *times)


def as_other(method: str, op: Op, x: Any, other: Any) -> Any:
    """`expand_as`, `view_as`, `reshape_as`: the sizes of another batch or tensor.

    Raises:
        StructureError: a batch of other lengths.
        UnsupportedError: `view_as` and `reshape_as` of a dense tensor, which no sizes make ragged.
    """
    if isinstance(x, Tensor):
        if method != "expand":
            hint = "tdc.nested_like(x, batch)" if isinstance(other, NestedTensor) else "batch.with_data(x)"
            raise UnsupportedError(message(op, "a batch to be as another", describe(x), hint=hint))
        return dense_as_batch(x, other)
    if type(x) is type(other):
        padded_operand(x, other, op) if isinstance(x, MaskedBatch) else require_same(x.structure, other.structure, op)
    return getattr(x, method)(*other.shape)


def dense_as_batch(x: Tensor, like: Any) -> Any:
    """A dense tensor that broadcasts against a batch, as one of its structure."""
    op, packs = torch.Tensor.expand_as, isinstance(like, NestedTensor)
    data = like.values if packs else like.data
    if not fits(x.shape, like.shape):
        raise unbroadcast(x, like, op)
    wide = torch.broadcast_tensors(packed_operand(x, like, op) if packs else x, data)[0]
    if wide.shape != data.shape:
        raise unbroadcast(x, like, op)
    return like.with_values(wide) if packs else like.with_data(torch.where(like.mask, wide, 0))


def broadcast_to_ragged(x: Any, *size: Any) -> Any:
    return x.expand(*ints(size))


def broadcast_ragged(*tensors: Any) -> tuple[Any, ...]:
    """All operands in one shape, and as ragged as the first batch among them."""
    op = torch.broadcast_tensors
    xs = tuple(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
    like = widest_of(op, *xs)
    wide = list(op(*[beside(op, x, like) for x in xs], data_of(like)))[:-1]
    if isinstance(like, MaskedBatch):  # no gradient of padding passes to an operand that was spread
        own = [isinstance(x, MaskedBatch) and x.ragged_dims == like.ragged_dims for x in xs]
        wide = [v if same else torch.where(like.mask, v, 0) for v, same in zip(wide, own, strict=True)]
    return tuple([with_data(like, v) for v in wide])


def atleast(ndim: int, *tensors: Any) -> Any:
    """A batch has two dims at least, of which a view comes back; the third is behind them, where torch puts it."""
    xs = tuple(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)) else tensors
    out = tuple([x.unsqueeze(-1) if x.ndim < ndim else x.expand(*[-1] * x.ndim) for x in xs])
    return out[0] if xs is tensors and len(out) == 1 else out


def stacked_along(dim: int, tensors: Any) -> Any:
    """`vstack`, `hstack`, `dstack`: joined along dim 0, 1 or 2."""
    return torch.cat([x.unsqueeze(-1) if x.ndim <= dim else x for x in tensors], dim)


def channel_shuffle_ragged(input: Any, groups: int) -> Any:
    """Channels, dim 1, dealt out over groups."""
    d = normal_dim(1, input.ndim, "channel_shuffle")
    if d in input.ragged_dims or input.shape[d] % groups:
        expected, hint = f"channels at dim 1 in {groups} groups", "rows of (C, H, W), with C divisible by groups"
        raise ShapeError(message("channel_shuffle", expected, describe(input), hint=hint))
    return input.unflatten(d, (groups, input.shape[d] // groups)).transpose(d, d + 1).flatten(d, d + 1)


for _op, _impl in (
    (torch.movedim, movedim_ragged), (torch.rot90, rot90_ragged), (torch.flipud, partial(flip_along, 0)),
    (torch.fliplr, partial(flip_along, 1)), (torch.t, t_ragged), (torch.tile, tile_ragged),
    (torch.broadcast_to, broadcast_to_ragged), (torch.broadcast_tensors, broadcast_ragged),
    (torch.vstack, partial(stacked_along, 0)), (torch.hstack, partial(stacked_along, 1)),
    (torch.column_stack, partial(stacked_along, 1)), (torch.dstack, partial(stacked_along, 2)),
    (F.channel_shuffle, channel_shuffle_ragged),
):  # fmt: skip
    define(_op, "shape", ragged=_impl)
for _name, _op in (("expand", "expand_as"), ("reshape", "view_as"), ("reshape", "reshape_as")):
    _method = getattr(torch.Tensor, _op)
    define(_method, "shape", ragged=partial(as_other, _name, _method))
for _ndim, _op in enumerate((torch.atleast_1d, torch.atleast_2d, torch.atleast_3d), 1):
    define(_op, "shape", ragged=partial(atleast, _ndim))
for _op, _reason, _hint in (
    (torch.ravel, "one dim without rows", "x.flatten(1, -1) of static dims, x.values.flatten() of packed elements"),
    (torch.meshgrid, "a grid of two dims for each row, both ragged", "torch.stack of x[:, :, None] and y[:, None]"),
    (torch.cartesian_prod, "as many elements as the lengths of a row multiply to", "tdc.pack of each row's product"),
    (torch.combinations, "as many elements as pairs in a row", "tdc.pack of each row's combinations"),
    (torch.block_diag, "rows would lie in one matrix", "torch.block_diag(*x.unbind())"),
    (F.fold, "one output size for images of several sizes", "F.fold of each row"),
):  # fmt: skip
    unsupported(_op, ["nested", "masked"], _reason, family="shape", hint=_hint)
