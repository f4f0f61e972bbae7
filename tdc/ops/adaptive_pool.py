"""Adaptive pooling of examples of different sizes: a number of bins for each, whatever its size.

    x (B, C, -1, -1)    F.adaptive_avg_pool2d(x, 7)  -> (B, C, 7, 7), dense: bins depend on each row's own size

Bins overlap and differ in size, so they are gathered from a rectangle: no difference of running sums, which would
spread NaN and inf.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import expect_number
from tdc.core.dtypes import rounded_once
from tdc.core.errors import ShapeError, message
from tdc.core.typing import Op
from tdc.ops.planes import Planes, Span, beside, plane_positions, planes, resized
from tdc.ops.reduction import finite
from tdc.ops.spatial import each, spatial
from tdc.ragged.storage import Ragged, Results

Todo = list[tuple[int, Tensor, Tensor]]  # a dim, and of its bins positions and which of them are inside


def adaptive_avg(op: Op, n: int) -> Op:
    """The rule of adaptive_avg_pool in n dims."""

    def rule(input: Any, output_size: Any) -> Ragged | Tensor:
        p, data, spans, todo = adaptive(op, n, output_size, input, 0.0)
        return resized(p, rounded_once(lambda x: averaged(x, todo), data), spans)

    return rule


def adaptive_max(op: Op, n: int, indexed: bool = False) -> Op:
    """The rule of adaptive_max_pool in n dims: the first of the largest, the last dim first."""

    def rule(input: Any, output_size: Any, return_indices: bool = False) -> Results:
        p, x, spans, todo = adaptive(op, n, output_size, input, -math.inf)
        width = x.shape[2:]
        index = torch.arange(math.prod(width), device=x.device).view(1, 1, *width)
        found = plane_positions(index, p.sizes, width).expand(x.shape)
        for dim, position, inside in todo:
            parts = taken(x, dim, position)
            parts = parts.masked_fill(~inside.view(*inside.shape, *[1] * (x.ndim - 2)), finite(-math.inf, x.dtype))
            out, which = parts.max(2)
            x = out.movedim(1, dim)
            found = taken(found, dim, position).gather(2, which.unsqueeze(2)).squeeze(2).movedim(1, dim)
        out = resized(p, x, spans)
        return (out, beside(out, found)) if indexed or return_indices else out

    return rule


def adaptive(op: Op, n: int, output_size: Any, x: Any, fill: float) -> tuple[Planes, Tensor, list[Span | int], Todo]:
    """A batch, its rectangle, the sizes of its result, and what is to be pooled, the last dim first.

    Sizes stay where `output_size` has None.
    """
    wanted = each(output_size, n, op)
    expect_number(op, *[size for size in wanted if size is not None], whole=True)
    if any([size is not None and size < 0 for size in wanted]):
        raise ShapeError(message(op, "an output_size of 0 or more", f"{wanted}", hint="None keeps a dim as it is"))
    p, data = planes(x, n, op, [Span()] * n, "adaptive bins", fill)
    todo: Todo = []
    for d, size in reversed([*enumerate(wanted)]):
        longest = data.shape[d + 2]
        if size is not None:
            todo.append((d + 2, *bins(p.sizes[d], size, size, longest, -(-longest // max(size, 1)))))
    return p, data, [Span() if size is None else size for size in wanted], todo


def averaged(x: Tensor, todo: Todo) -> Tensor:
    """Means of bins along some dims."""
    for dim, position, inside in todo:
        ones = [1] * (x.ndim - 2)
        parts = taken(x, dim, position).masked_fill(~inside.view(*inside.shape, *ones), 0)
        count = inside.sum(2).clamp(min=1).view(*inside.shape[:2], *ones).to(x.dtype)
        x = (parts.sum(2) / count).movedim(1, dim)
    return x


def bins(size: Tensor, count: Any, out: int, longest: int, widest: int) -> tuple[Tensor, Tensor]:
    """Positions of adaptive bins, and which of them are inside: (B,) -> (B, out, W).

    Args:
        count: bins of each row, a number or (B,); `out` at most.
        widest: the longest row divided by its bins, rounded up.
    """
    index = torch.arange(out, device=size.device)
    length = size.unsqueeze(1)
    total = count.unsqueeze(1) if isinstance(count, Tensor) else max(count, 1)
    start = index * length // total
    end = ((index + 1) * length + total - 1) // total
    position = start.unsqueeze(2) + torch.arange(widest + 1, device=size.device)
    return position.clamp(max=longest - 1), position < end.unsqueeze(2)


def taken(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Elements of each row along a dim: (B, ..., P, ...), (B, *Q) -> (B, *Q, ...), the other dims in order."""
    moved = x.movedim(dim, 1)
    rows = torch.arange(index.shape[0], device=index.device).view(-1, *[1] * (index.ndim - 1)) * moved.shape[1]
    flat = moved.reshape(moved.shape[0] * moved.shape[1], *moved.shape[2:])
    return flat.index_select(0, (rows + index).flatten()).view(*index.shape, *moved.shape[2:])


for _name, _rule in (
    ("adaptive_avg_pool{}d", adaptive_avg),
    ("adaptive_max_pool{}d", adaptive_max),
    ("adaptive_max_pool{}d_with_indices", partial(adaptive_max, indexed=True)),
):
    for _n in (1, 2, 3):
        _op: Any = getattr(F, _name.format(_n))
        spatial(_op, _rule(_op, _n), _n, "pool")
