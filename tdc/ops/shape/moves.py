"""Shape operations that are others put together: movedim, rot90, tile, hstack, channel_shuffle and their kin.

Each is one or two methods of the batch, so it does for a TensorDict, for packed and for padded rows what those do.

Invariant: no rule here reads values or lengths.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import expect_at_least, normal_dim
from tdc.core.asserts import require
from tdc.core.container import Container, dims_of, shape_of
from tdc.core.errors import ShapeError, StructureError, UnsupportedError, describe, message
from tdc.core.rules import define, unsupported
from tdc.core.typing import Op
from tdc.ops.elementwise.pairs import widest_of
from tdc.ops.elementwise.pointwise import fits, unbroadcast
from tdc.ops.positions import beside
from tdc.ops.shape.dims import ints, normal_dims
from tdc.ops.tensordict.leafwise import check_broadcast, column
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.storage import Ragged, data_of, ragged_sizes, with_data
from tdc.tensordict.tensordict import TensorDict, build_td


def call(x: Any, method: str, *args: Any) -> Any:
    """A method of a tensor or container, which a field of a tensorclass may have the name of."""
    return getattr(TensorDict if isinstance(x, TensorDict) else type(x), method)(x, *args)


def movedim(x: Any, source: Any, destination: Any) -> Container:
    ndim = dims_of(x)
    old, new = normal_dims("movedim", source, ndim), normal_dims("movedim", destination, ndim)
    if len(old) != len(new):
        got = f"{len(new)} for {len(old)} dims"
        raise ShapeError(message("movedim", "one destination for each dim", got, hint="x.movedim((0, 1), (1, 0))"))
    order = [d for d in range(ndim) if d not in old]
    for position, d in sorted(zip(new, old, strict=True)):
        order.insert(position, d)
    return call(x, "permute", order)


def rot90(x: Any, k: int = 1, dims: Any = (0, 1)) -> Container:
    """A quarter turn is a reversal and a transposition; a ShapeError for others than two dims."""
    found = normal_dims("rot90", dims, dims_of(x))
    if len(found) != 2:
        raise ShapeError(message("rot90", "two dims", f"{dims}", hint="x.rot90(1, (1, 2))"))
    a, b = found
    if k % 4 == 2:
        return call(x, "flip", found)
    return x if k % 4 == 0 else call(call(x, "flip", (b if k % 4 == 1 else a,)), "transpose", a, b)


def t(x: Any) -> Container:
    """Two dims swapped, fewer as they are; a ShapeError for more."""
    ndim = dims_of(x)
    if ndim > 2:
        hint = "name them: x.transpose(0, 1)"
        raise ShapeError(message("t", "2 dims at most", f"{ndim} of {describe(x)}", hint=hint))
    return call(x, "permute", tuple(reversed(range(ndim))))


def tile(x: Any, *dims: Any) -> Container:
    times = ints("tile", dims)
    return call(x, "repeat", *[1] * (dims_of(x) - len(times)), *times)


def as_other(method: str, op: Op, x: Any, other: Any) -> Container | Tensor:
    """`expand_as`, `view_as`, `reshape_as`: the sizes of another batch or tensor.

    A dense tensor that is expanded broadcasts against a batch; as a TensorDict it is extended over features.
    """
    both: list[Any] = [x, other]
    if isinstance(x, Tensor) and method != "expand":
        hint = "x.reshape(td.batch_size), batch.with_data(x), or tdc.nested_like(x, batch)"
        raise UnsupportedError(message(op, "a batch to be as another", describe(x), hint=hint))
    if isinstance(x, Tensor) and isinstance(other, TensorDict):
        check_broadcast(x, other._size, op)
        wide = zip(other._leaves.items(), column(x, other, op), strict=True)
        return build_td({p: w.expand_as(v) for (p, v), w in wide}, other._nodes, other._size, other._device)
    if isinstance(x, TensorDict) or isinstance(other, Tensor):
        return call(x, method, *shape_of(other))
    if method == "expand":
        return expanded(op, x, other)
    sizes: list[Any] = [ragged_sizes(b) if type(x) is type(other) else None for b in both]
    if sizes[0] is None or sizes[0].shape != sizes[1].shape:
        got, hint = f"{describe(x)} and {describe(other)}", "convert one of them, or name the sizes"
        raise StructureError(message(op, "batches of one kind with as many ragged dims", got, hint=hint))
    text = message(op, "batches of one ragged structure", "rows of different lengths", hint="x.reshape(sizes)")
    require((sizes[0] == sizes[1]).all(), text, StructureError)
    return getattr(x, method)(*[-1 if d in other.ragged_dims else n for d, n in enumerate(other.shape)])


def expanded(op: Op, x: Any, like: Any) -> Ragged:
    """A dense tensor or a batch that broadcasts against another batch, as one of its structure."""
    data = data_of(like)
    if not fits(x.shape, like.shape):
        raise unbroadcast(op, like, x)
    wide = torch.broadcast_tensors(beside(op, x, like), data)[0]
    if wide.shape != data.shape:
        raise unbroadcast(op, like, x)
    return spread(x, like, wide)


def spread(x: Any, like: Any, wide: Tensor) -> Ragged:
    """An operand as wide as a batch: no gradient of padding passes to one that was spread over it."""
    own = not isinstance(like, MaskedBatch) or (isinstance(x, MaskedBatch) and x.ragged_dims == like.ragged_dims)
    return with_data(like, wide if own else wide.masked_fill(~like.mask, 0))


def broadcast_ragged(*tensors: Any) -> tuple[Any, ...]:
    """All operands in one shape, and as ragged as the first batch among them."""
    op = torch.broadcast_tensors
    xs = tuple(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
    like = widest_of(op, *xs)
    wide = list(op(*[beside(op, x, like) for x in xs], data_of(like)))[:-1]
    if isinstance(like, MaskedBatch) and any(
        [wide[0].shape[d] != like.data.shape[d] for d in (like.batch_dim, *like.ragged_dims)]
    ):
        raise unbroadcast(op, like, next(x for x in xs if isinstance(x, Tensor)))
    return tuple([spread(x, like, v) for x, v in zip(xs, wide, strict=True)])


def atleast(ndim: int, *xs: Any) -> Any:
    """As many dims at least, added where torch adds them: one in front of one dim, one behind two."""
    several = len(xs) == 1 and isinstance(xs[0], (tuple, list))
    out = []
    for x in xs[0] if several else xs:
        dims = dims_of(x)
        if dims >= ndim:
            x = call(x, "expand", [-1] * dims)  # a view, as torch gives
        for at in (0, 0, 2)[dims:ndim]:
            x = call(x, "unsqueeze", at)
        out.append(x)
    return tuple(out) if several or len(out) > 1 else out[0]


def stacked_along(ndim: int, dim: int, tensors: Any) -> Container | Tensor:
    """`hstack`, `vstack`, `dstack`: at least so many dims, joined along `dim`, or along the only one."""
    xs = [atleast(ndim, x) for x in tensors]
    return torch.cat(xs, min(dim, dims_of(xs[0]) - 1))


def column_stack(tensors: Any) -> Container | Tensor:
    """Batches of one dim become columns."""
    return torch.cat([call(x, "reshape", -1, 1) if dims_of(x) < 2 else x for x in tensors], 1)


def channel_shuffle_ragged(input: Any, groups: int) -> Ragged:
    """Channels, dim 1, dealt out over groups."""
    expect_at_least("channel_shuffle", 1, "groups", groups)
    d = normal_dim(1, input.ndim, "channel_shuffle")
    if d in input.ragged_dims or input.shape[d] % groups:
        expected, hint = f"channels at dim 1 in {groups} groups", "rows of (C, H, W), with C divisible by groups"
        raise ShapeError(message("channel_shuffle", expected, describe(input), hint=hint))
    return input.unflatten(d, (groups, input.shape[d] // groups)).transpose(d, d + 1).flatten(d, d + 1)


def view_as_complex(x: Any) -> Ragged:
    """Numbers whose parts are the last dim; a ShapeError where it is ragged, the batch, or of another size."""
    if x.ndim - 1 in (x._batch_dim, *x.ragged_dims) or x.shape[-1] != 2:
        hint = "torch.stack([real, imag], -1)"
        raise ShapeError(message("view_as_complex", "a static last dim of size 2", describe(x), hint=hint))
    return with_data(x, torch.view_as_complex(data_of(x)))


define(torch.movedim, "shape", ragged=movedim, tensordict=movedim, dims="input source** destination**")
for _op, _impl in (
    (torch.rot90, rot90), (torch.flipud, lambda input: call(input, "flip", (0,))),
    (torch.fliplr, lambda input: call(input, "flip", (1,))), (torch.t, t), (torch.tile, tile),
    (torch.broadcast_to, lambda x, *size: call(x, "expand", *ints("broadcast_to", size))),
    (torch.hstack, partial(stacked_along, 1, 1)),
    (torch.vstack, partial(stacked_along, 2, 0)), (torch.dstack, partial(stacked_along, 3, 2)),
    (torch.column_stack, column_stack), (torch.atleast_1d, partial(atleast, 1)),
    (torch.atleast_2d, partial(atleast, 2)), (torch.atleast_3d, partial(atleast, 3)),
    (torch.Tensor.expand_as, partial(as_other, "expand", torch.Tensor.expand_as)),
    (torch.Tensor.view_as, partial(as_other, "view", torch.Tensor.view_as)),
    (torch.Tensor.reshape_as, partial(as_other, "reshape", torch.Tensor.reshape_as)),
):  # fmt: skip
    define(_op, "shape", ragged=_impl, tensordict=_impl)
define(torch.broadcast_tensors, "shape", ragged=broadcast_ragged)
define(F.channel_shuffle, "shape", ragged=channel_shuffle_ragged)
define(torch.view_as_real, "shape", ragged=lambda x: with_data(x, torch.view_as_real(data_of(x))))
define(torch.view_as_complex, "shape", ragged=view_as_complex)
for _op, _reason, _hint in (
    (torch.ravel, "one dim without rows", "x.flatten(1, -1) of static dims, x.values.flatten() of packed elements"),
    (torch.meshgrid, "a grid of two dims for each row, both ragged", "torch.stack of x[:, :, None] and y[:, None]"),
    (torch.cartesian_prod, "as many elements as the lengths of a row multiply to", "tdc.pack of each row's product"),
    (torch.combinations, "as many elements as pairs in a row", "tdc.pack of each row's combinations"),
    (torch.block_diag, "rows would share one matrix", "torch.block_diag(*x.unbind())"),
):  # fmt: skip
    unsupported(_op, ["nested", "masked"], _reason, family="shape", hint=_hint)
