"""Segments along one dim of a ragged batch, for orders and extremes within each of them.

    NestedTensor, ragged dim     values (N, *D), one segment for each example and feature
    MaskedBatch, any dim         values (L, *D), one segment for each position beside it; a mask tells its real elements

Plain tensor code gives the length of each segment, the element at a position, and the order of its elements, without
reading data on the host. Along a static dim torch's own function runs on packed or padded data.

    D the other dims      K segments side by side along dim 0: one for each example (B), or 1
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.core.arguments import normal_dim, shown
from tdc.core.dynamo import certain
from tdc.core.errors import ShapeError, describe, message, op_name
from tdc.core.typing import Op
from tdc.layout.segments import begins, column, lengths_of, local_positions, reduce_rows, row_ids
from tdc.layout.structure import Structure
from tdc.ops.reduce.partial_ragged import by_lines, over_lines
from tdc.ops.reduce.reduction import settle
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import Ragged, axis_of, data_of, map_results, without_dims


class Segments(NamedTuple):
    """Elements along dim 0 and their segments, given by `structure` or by `real`.

    Attributes:
        values: (M, *D).
        structure: its examples are the segments.
        real: for a single segment, (M, *D), where its elements are.
        back: `(out, keepdim)`: a result `(K, *D)` as a dense tensor of logical dims.
    """

    values: Tensor
    structure: Structure | None
    real: Tensor | None
    back: Callable[[Tensor, bool], Tensor]

    def column(self, x: Tensor) -> Tensor:
        """One entry for each segment, or element, to broadcast against values."""
        return column(x, self.values)

    @property
    def starts(self) -> Any:
        """Starts of segments along dim 0, (K, 1, ...)."""
        return 0 if self.structure is None else self.column(self.structure.offsets[:-1])

    @property
    def lengths(self) -> Tensor:
        """Real elements of each segment, (K, 1, ...) or (1, *D)."""
        if self.structure is not None:
            return self.column(lengths_of(self.structure))
        assert self.real is not None
        return self.real.sum(0, True)

    def number_of(self, flags: Tensor) -> Tensor:
        """Number of elements of each segment that have a flag, (M, *D) -> (K, *D)."""
        if self.structure is not None:
            return reduce_rows(flags.to(torch.int64), self.structure, "sum", 0)
        assert self.real is not None
        return (flags & self.real).sum(0, True)

    @property
    def positions(self) -> Tensor:
        """Position of each element within its segment, (M, 1, ...)."""
        s, total = self.structure, self.values.shape[0]
        return self.column(torch.arange(total, device=self.values.device) if s is None else local_positions(s, total))

    @property
    def owner(self) -> Tensor:
        """Last sort key of elements, (M, *D): their example, or 1 in padding."""
        if self.structure is None:
            assert self.real is not None
            return (~self.real).to(torch.uint8)
        return self.column(row_ids(self.structure, self.values.shape[0])).expand(self.values.shape)


def segments_of(op: Op, x: Any, dim: Any) -> Segments:
    """Segments along the ragged dim of a NestedTensor, or along any dim of a MaskedBatch; a single one for None.

    One of several ragged dims has segments in the batch of its lines, see `partial_ragged`.
    """
    d = dim if dim is None else normal_dim(dim, x.ndim, op)
    if isinstance(x, NestedTensor):
        s = x.structure
        back = partial(lambda dims, out, keepdim: settle(out, s, dims, keepdim), s.ragged_dims)
        return Segments(x.values.movedim(s.packed_dim, 0) if s.packed_dim else x.values, s, None, back)
    mask = x.mask.expand(x.data.shape)
    back = partial(put_back, x.ndim, d)
    if d is None:
        return Segments(x.data.flatten(), None, mask.flatten(), back)
    return Segments(x.data.movedim(d, 0), None, mask.movedim(d, 0), back)


def put_back(ndim: int, dim: int | None, out: Tensor, keepdim: bool) -> Tensor:
    """The result of a single segment. With `keepdim` it has `dim` again, as size 1; all dims where `dim` is None."""
    if not keepdim:
        return out.squeeze(0)
    return out.view([1] * ndim) if dim is None else out.movedim(0, dim)


def at(segments: Segments, position: Tensor, none: float) -> Tensor:
    """The elements at positions of segments, (K, *D) -> (K, *D); `none` where a position is negative."""
    return taken(segments, segments.values, position).masked_fill(position < 0, none)


def position_at(segments: Segments, order: Tensor, rank: Tensor) -> Tensor:
    """The position within its segment of what is at a rank of its order, (K, *D) -> (K, *D); -1 for a negative rank."""
    return (taken(segments, order, rank) - segments.starts).masked_fill(rank < 0, -1)


def taken(segments: Segments, values: Tensor, position: Tensor) -> Tensor:
    """Elements at positions of segments, (K, *D); any element for an empty segment, whose start may be the end."""
    values = not_empty(values)
    index = segments.starts + position.clamp(min=0)
    return values.gather(0, index.clamp(max=values.shape[0] - 1))


def not_empty(t: Tensor) -> Tensor:
    """A tensor with one more element of dim 0, a zero, where it is not known that there are any."""
    return t if certain(t.shape[0] != 0) else torch.cat([t, t.new_zeros(1, *t.shape[1:])])


def order_of(segments: Segments, descending: bool = False) -> tuple[Tensor, Any]:
    """Index into dim 0 that sorts each segment, (M, *D), and the first index of each, (M, 1, ...) or 0.

    The sort is stable; NaN is largest.
    """
    values, s = segments.values.detach(), segments.structure
    begin = 0 if s is None else segments.column(begins(s, values.shape[0]))
    return order_by_owner(values, segments.owner, descending), begin


def order_by_owner(x: Tensor, owner: Tensor, descending: bool) -> Tensor:
    """Index into dim 0 that sorts elements by owner, and by value among those of one owner.

    Two stable sorts are exact for NaN, infinities and equal elements, and need no value for padding.
    """
    by_value = x.argsort(dim=0, descending=descending, stable=True)
    return by_value.gather(0, owner.gather(0, by_value).argsort(dim=0, stable=True))


def reduce_along(op: Op, run: Op, x: Any, dim: int | None, keepdim: bool, dense: Op | None) -> Any:
    """`run(x, dim=, keepdim=)` along a ragged dim, or of the lines along one of several; along a static dim
    `dense(values, axis)`, by default `op`, which keeps the dim."""
    dense = kept_axis(op) if dense is None else dense  # Dynamo of torch 2.11 knows no truth of functions
    if by_lines(op, x, dim):
        return over_lines(op, run, x, dim, keepdim)
    if dim is not None and is_static(op, x, dim):
        return along_static(op, x, dim, dense, keepdim)
    return run(x, dim=dim, keepdim=keepdim)


def kept_axis(op: Op) -> Op:
    """An operation along a dim that stays with size 1."""
    return lambda values, axis: op(values, axis, True)


def named_result(op: Op, *results: Any) -> tuple[Any, ...]:
    """Results in the named tuple that torch returns."""
    return getattr(torch.return_types, op_name(op))(results)


def picked(op: Op, segments: Segments, position: Tensor, none: float, keepdim: bool) -> tuple[Any, ...]:
    """Values and indices at a position of each segment, as torch returns them; `none` where it is negative."""
    found = at(segments, position, none)
    return named_result(op, segments.back(found, keepdim), segments.back(position, keepdim))


def is_static(op: Op, x: Any, dim: int) -> bool:
    """True if torch can work along a dim on packed or padded data; a ShapeError for the batch of a NestedTensor."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise ShapeError(message(op, "one dim", f"{dim}", hint="name one dim, e.g. dim=-1"))
    d = normal_dim(dim, x.ndim, op)
    if isinstance(x, NestedTensor) and d == x.structure.batch_dim:
        got = f"dim {dim} of {describe(x)}"
        hint = "rows of different lengths have no common positions: x.to_padded() first"
        raise ShapeError(message(op, "a ragged or static dim", got, hint=hint))
    return d not in x.ragged_dims and not (isinstance(x, MaskedBatch) and d == x.batch_dim)


def ragged_dim(op: Op, x: Any, dim: int, hint: str = "x.filled(value) is the rectangle") -> int | None:
    """A ragged dim counted from the front, None for a static one; a ShapeError for the batch."""
    if is_static(op, x, dim):
        return None
    d = normal_dim(dim, x.ndim, op)
    if d not in x.ragged_dims:
        raise ShapeError(message(op, "a ragged or static dim", f"the batch, dim {dim}", hint=hint))
    return d


def expect_elements(op: Op, least: int, x: Any, dim: int) -> None:
    """Refuse a static dim of fewer elements: a graph gets no error of torch in words."""
    if least > x.shape[dim]:
        expected, got = f"at least {shown(least)} elements", f"dim {dim} of {describe(x)}"
        raise ShapeError(message(op, expected, got, hint="another dim, or a smaller number"))


def along_static(op: Op, x: Any, dim: int, run: Callable[[Tensor, int], Any], keepdim: bool = True) -> Any:
    """`run(values, axis)` along a static dim, which it keeps; its result, or each in torch's named tuple, as a
    batch, without the dim if asked."""
    d = normal_dim(dim, x.ndim, op)
    return map_results(run(data_of(x), axis_of(op, x, d)), lambda t: without_dims(x, t, () if keepdim else (d,)))


def with_elements(x: Any, dim: int, out: Tensor) -> Ragged:
    """A batch of the same lengths whose segments along `dim` have other elements, (M, *D)."""
    if isinstance(x, NestedTensor):
        return x.with_values(out.movedim(0, p) if (p := x.structure.packed_dim) else out)
    return x.with_data(out.movedim(0, dim).masked_fill(~x.mask, 0))
