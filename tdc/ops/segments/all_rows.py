"""Orders and extremes of the segments of a packed batch in plain operations, all examples at once, on any device.

    x (N, *D)    examples along dim 0

A sort is two stable sorts, by value and then by example: exact for NaN, infinities and equal elements, and without a
padding value that could meet them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tdc.ops.reduction import finite
from tdc.ragged.segments import column, local_positions, reduce_rows, row_ids, spread
from tdc.ragged.structure import Structure

NONE = torch.iinfo(torch.int64).max


def order(x: Tensor, s: Structure, descending: bool) -> Tensor:
    """Where in dim 0 the sorted elements of each example are, (N, *D); equal ones stay in order, NaN is largest."""
    return by_owner(x, column(row_ids(s, x.shape[0]), x).expand(x.shape), descending)


def by_owner(x: Tensor, owner: Tensor, descending: bool) -> Tensor:
    """Where in dim 0 elements are that are sorted by what they belong to, and by value among those that share it."""
    by_value = x.argsort(dim=0, descending=descending, stable=True)
    return by_value.gather(0, owner.gather(0, by_value).argsort(dim=0, stable=True))


def extreme(x: Tensor, s: Structure, largest: bool) -> Tensor:
    """The first position of the largest or smallest element within each example, (B, *D); -1 of none. NaN is either."""
    how, none = ("amax", -math.inf) if largest else ("amin", math.inf)
    total = x.shape[0]
    found = spread(reduce_rows(x, s, how, finite(none, x.dtype)), s, total)
    position = torch.where(is_extreme(x, found), column(local_positions(s, total), x), NONE)
    position = reduce_rows(position, s, "amin", NONE)
    return position.masked_fill(position == NONE, -1)


def is_extreme(x: Tensor, extreme: Tensor) -> Tensor:
    """Where values are their extreme; every NaN is."""
    return (x == extreme) | (x != x)


def top(order: Tensor, begin: Any, k: int) -> Tensor:
    """Positions of the first `k` elements of each example, (B, k, *D).

    Args:
        order: where in dim 0 the sorted elements are, (N, *D).
        begin: where examples begin, (B, 1, ...), or 0 of a single one.
    """
    ranks = begin + torch.arange(k, device=order.device).view(1, k, *[1] * (order.ndim - 1))
    shape = (ranks.shape[0], k, *order.shape[1:])
    return order.gather(0, ranks.expand(shape).flatten(0, 1)).view(shape) - begin
