"""Orders, extremes and softmax of the segments of a packed batch: all examples at once, in plain operations.

    x (N, *D)    examples along dim 0

A sort is two stable sorts, by value and then by example: exact for NaN, infinities and equal elements, and without a
padding value that could equal one of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tdc.layout.segments import column, local_positions, reduce_rows, row_ids, spread
from tdc.layout.structure import Structure
from tdc.ops.reduce.reduction import finite

NONE = torch.iinfo(torch.int64).max


def order(x: Tensor, s: Structure, descending: bool) -> Tensor:
    """Index into dim 0 that sorts each example, (N, *D). The sort is stable; NaN is largest."""
    return order_by_owner(x, column(row_ids(s, x.shape[0]), x).expand(x.shape), descending)


def order_by_owner(x: Tensor, owner: Tensor, descending: bool) -> Tensor:
    """Index into dim 0 that sorts elements by owner, and by value among those of one owner."""
    by_value = x.argsort(dim=0, descending=descending, stable=True)
    return by_value.gather(0, owner.gather(0, by_value).argsort(dim=0, stable=True))


def extreme(x: Tensor, s: Structure, largest: bool) -> Tensor:
    """Position within its example of the first largest or smallest element, (B, *D); -1 if empty. NaN is either."""
    how, none = ("amax", -math.inf) if largest else ("amin", math.inf)
    total = x.shape[0]
    found = spread(reduce_rows(x, s, how, finite(none, x.dtype)), s, total)
    position = torch.where(is_extreme(x, found), column(local_positions(s, total), x), NONE)
    position = reduce_rows(position, s, "amin", NONE)
    return position.masked_fill(position == NONE, -1)


def is_extreme(x: Tensor, extreme: Tensor) -> Tensor:
    """True where a value is the extreme, or NaN."""
    return (x == extreme) | (x != x)


def top(order: Tensor, begin: Any, k: int) -> Tensor:
    """Positions within each example of its first `k` elements in an order (N, *D): (B, k, *D).

    `begin` is the first index of each example, (B, 1, ...), or 0 for a single one.
    """
    ranks = begin + torch.arange(k, device=order.device).view(1, k, *[1] * (order.ndim - 1))
    shape = (ranks.shape[0], k, *order.shape[1:])
    return order.gather(0, ranks.expand(shape).flatten(0, 1)).view(shape) - begin


def softmax(x: Tensor, s: Structure, log: bool) -> Tensor:
    """Softmax or log-softmax of each example, (N, *D) -> (N, *D)."""
    total = x.shape[0]
    shifted = x - spread(reduce_rows(x.detach(), s, "amax", -math.inf), s, total)
    sums = reduce_rows(shifted.exp(), s, "sum", 0)
    below = spread(sums.log() if log else sums, s, total)
    return shifted - below if log else shifted.exp() / below
