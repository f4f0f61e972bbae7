"""One dim of a ragged batch as lanes: the elements that an order or an extreme along that dim is among.

    NestedTensor, ragged dim     values (N, *D), one lane for each row and feature
    MaskedBatch, any dim         values (L, *D), one lane for each place beside it, real elements where the mask says so

Both answer three questions with plain tensor code and no read of the data: how many elements a lane has, what is at a
place of it, and in which order its elements are. A sort is two stable sorts, by value and then by lane: exact for NaN,
infinities and equal elements, and without a padding value that could meet them. Long rows are sorted one by one on CPU.

    D the other dims      K lanes side by side along dim 0: one for each row (B), or 1
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.core.arguments import normal_dim
from tdc.core.errors import ShapeError, describe, message, op_name
from tdc.core.typing import Op
from tdc.ops import subrows
from tdc.ops.reduction import drop_static, settle
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.segments import lengths_of, local_ids, reduce_rows, row_ids
from tdc.ragged.structure import Structure

SORTED = 32  # what sorting an element twice costs, in elements to copy


class Lanes(NamedTuple):
    """Elements along dim 0 and what they belong to; either `rows` or `real` is there.

    Attributes:
        values: (M, *D).
        rows: the structure whose rows lie along dim 0.
        real: for a single lane, (M, *D), where its elements are.
        back: `(out, keepdim)`: a result `(K, *D)` as a dense tensor of logical dims.
    """

    values: Tensor
    rows: Structure | None
    real: Tensor | None
    back: Callable[[Tensor, bool], Tensor]

    def per_row(self, x: Tensor) -> Tensor:
        """One entry for each row, or position, to broadcast against values."""
        return x.view(-1, *[1] * (self.values.ndim - 1))

    @property
    def start(self) -> Any:
        """Where lanes begin along dim 0, (K, 1, ...)."""
        return 0 if self.rows is None else self.per_row(self.rows.offsets[:-1])

    @property
    def lengths(self) -> Tensor:
        """Real elements of each lane, (K, 1, ...) or (1, *D)."""
        if self.rows is not None:
            return self.per_row(lengths_of(self.rows))
        assert self.real is not None
        return self.real.sum(0, True)

    def number(self, flags: Tensor) -> Tensor:
        """How many elements of each lane have a flag, (M, *D) -> (K, *D)."""
        if self.rows is not None:
            return reduce_rows(flags.to(torch.int64), self.rows, "sum", 0)
        assert self.real is not None
        return (flags & self.real).sum(0, True)

    @property
    def local(self) -> Tensor:
        """Place of each element within its lane, (M, 1, ...)."""
        total = self.values.shape[0]
        here = torch.arange(total, device=self.values.device) if self.rows is None else local_ids(self.rows, total)
        return self.per_row(here)

    @property
    def owner(self) -> Tensor:
        """What elements are sorted by last, (M, *D): the row they are of, or whether they are padding."""
        if self.rows is None:
            assert self.real is not None
            return (~self.real).to(torch.uint8)
        return self.per_row(row_ids(self.rows, self.values.shape[0])).expand(self.values.shape)


def lanes_of(op: Op, x: Any, dim: Any) -> Lanes:
    """The lanes along the ragged dim of a NestedTensor, or along any dim of a MaskedBatch; along all of it for None.

    Of several ragged dims one has lanes in the batch of its lines, see `lines`.
    """
    d = dim if dim is None else normal_dim(dim, x.ndim, op)
    if isinstance(x, NestedTensor):
        s = x.structure
        back = partial(lambda dims, out, keepdim: settle(out, s, dims, keepdim), s.ragged_dims)
        return Lanes(x.values.movedim(s.packed_dim, 0), s, None, back)
    mask = x.mask.expand(x.data.shape)
    if d is None:
        return Lanes(x.data.flatten(), None, mask.flatten(), partial(whole, x.ndim))
    return Lanes(x.data.movedim(d, 0), None, mask.movedim(d, 0), partial(placed, d))


def whole(ndim: int, out: Tensor, keepdim: bool) -> Tensor:
    return out.view([1] * ndim) if keepdim else out.squeeze(0)


def placed(dim: int, out: Tensor, keepdim: bool) -> Tensor:
    return out.movedim(0, dim) if keepdim else out.squeeze(0)


def at(lanes: Lanes, place: Tensor, none: float) -> Tensor:
    """The elements at places of lanes, (K, *D) -> (K, *D); `none` where a place is negative."""
    values = lanes.values
    if values.shape[0] == 0:
        return values.new_full(place.shape, none)
    return values.gather(0, lanes.start + place.clamp(min=0)).masked_fill(place < 0, none)


def place_at(lanes: Lanes, order: Tensor, rank: Tensor) -> Tensor:
    """The place in its lane of what is at a rank of a sorted lane, (K, *D) -> (K, *D); -1 for a negative rank."""
    if order.shape[0] == 0:
        return torch.full_like(rank, -1)
    return (order.gather(0, lanes.start + rank.clamp(min=0)) - lanes.start).masked_fill(rank < 0, -1)


def order_of(lanes: Lanes, descending: bool = False) -> Tensor:
    """Where in dim 0 the elements of each lane are when sorted, (M, *D); equal ones stay in order, NaN is largest."""
    values, s = lanes.values.detach(), lanes.rows
    if s is not None and subrows.pays(values, s.batch_size, SORTED * values.numel()):
        parts = zip(values.split(lengths_of(s).tolist()), s.offsets.tolist(), strict=False)
        return torch.cat([row.argsort(dim=0, descending=descending, stable=True).add_(begin) for row, begin in parts])
    by_value = values.argsort(dim=0, descending=descending, stable=True)
    by_lane = lanes.owner.gather(0, by_value).argsort(dim=0, stable=True)
    return by_value.gather(0, by_lane)


def named(op: Op, *results: Any) -> Any:
    """Results in the named tuple that torch returns."""
    return getattr(torch.return_types, op_name(op))(results)


def one_dim(op: Op, dim: Any) -> None:
    """A dim is one number.

    Raises:
        ShapeError: it is not.
    """
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise ShapeError(message(op, "one dim", f"{dim}", hint="name one dim, e.g. dim=-1"))


def is_static(op: Op, x: Any, dim: int) -> bool:
    """Whether a dim is one that torch can work along on packed or padded data.

    Raises:
        ShapeError: it is the batch of a NestedTensor, out of range or no number.
    """
    one_dim(op, dim)
    d = normal_dim(dim, x.ndim, op)
    if isinstance(x, NestedTensor) and d == x.structure.batch_dim:
        got = f"dim {dim} of {describe(x)}"
        hint = "rows of different lengths have no common positions: x.to_padded() first"
        raise ShapeError(message(op, "a ragged or static dim", got, hint=hint))
    return d not in x.ragged_dims and not (isinstance(x, MaskedBatch) and d == x.batch_dim)


def along_static(op: Op, x: Any, dim: int, run: Callable[[Tensor, int], Any], keepdim: bool = True) -> Any:
    """`run(values, axis)` along a static dim, which it keeps; each of its results as a batch, without the dim if asked.

    Several results come in the named tuple that torch returns.
    """
    d = normal_dim(dim, x.ndim, op)
    axis: Any = x.structure.axis(d, x.ndim, op) if isinstance(x, NestedTensor) else d
    out = run(data_of(x), axis)
    if isinstance(out, Tensor):
        return with_dim(x, out, d, keepdim)
    return type(out)([with_dim(x, t, d, keepdim) for t in out])


def with_dim(x: Any, out: Tensor, d: int, keepdim: bool) -> Any:
    """A result whose static dim `d` has been worked on, as a batch; without that dim if it is not kept."""
    if isinstance(x, NestedTensor):
        s = x.structure
        axis: Any = s.axis(d, x.ndim, "squeeze")
        return build_nested(s, out) if keepdim else drop_static(out, s, [axis])
    if keepdim:
        return x.with_data(out)
    ragged = tuple([r - (r > d) for r in x.ragged_dims])
    return build_masked(out.squeeze(d), x.lengths, ragged, x.batch_dim - (x.batch_dim > d))


def in_front(x: Any) -> Any:
    """The batch with a static dim of size 1 in front of all others."""
    if isinstance(x, NestedTensor):
        opened, axis = x.structure.opened(0, x.ndim, "unsqueeze")
        return build_nested(opened, x.values.unsqueeze(axis))
    return build_masked(x.data.unsqueeze(0), x.lengths, tuple([d + 1 for d in x.ragged_dims]), x.batch_dim + 1)


def like_lanes(x: Any, dim: int, out: Tensor) -> Any:
    """What has been done to the values of the lanes along `dim`, (M, *D), as a batch of the same lengths."""
    if isinstance(x, NestedTensor):
        return x.with_values(out.movedim(0, x.structure.packed_dim))
    return x.with_data(out.movedim(0, dim).masked_fill(~x.mask, 0))


def data_of(x: Any) -> Tensor:
    """The packed values, or the rectangle."""
    return x.values if isinstance(x, NestedTensor) else x.data


def with_data(x: Any, data: Tensor) -> Any:
    """A batch of the same lengths with other values, or another rectangle."""
    return x.with_values(data) if isinstance(x, NestedTensor) else x.with_data(data)
