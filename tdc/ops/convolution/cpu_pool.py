"""Pooling of packed examples on CPU: torch's kernels on one example after another, neighbours of one size as one batch.

    x (N, C)       positions of all planes, one example behind another, each plane row by row; channels innermost
    sizes (B, n)   of each example's plane
    out (M, C)     positions of the results, in the same order

    avg_pool, adaptive_avg    means, and the gradient of each
    max_pool, adaptive_max    the largest, and where it is in x

Torch reads planes with channels innermost faster, so that others are copied, example by example. Where each example is
one bin, those with channels innermost are summed all at once, and others read as they are.

Invariants: results and gradients are those of each example by itself; among equal numbers the first is the largest, in
the order in which torch sees the dims of a plane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.dtypes import sum_dtype, widened
from tdc.core.errors import StructureError, message
from tdc.core.torch_functions import adaptive_avg_backwards
from tdc.ops.convolution.planes import Reads, Run, Windows, innermost, planes, room, runs
from tdc.ragged.segments import offsets_of

FEW = 1024  # positions that are summed one after another, so that rounding errors do not add up
aten: Any = torch.ops.aten


class Bins(NamedTuple):
    """What each position of an adaptive result reads: how many bins each dim of a plane has, -1 for as many as it has
    positions."""

    counts: tuple[int, ...]
    name: str

    def of(self, size: Sequence[int]) -> list[int]:
        """The size of a result, of a plane's."""
        return [n if count < 0 else count for n, count in zip(size, self.counts, strict=True)]

    @property
    def single(self) -> bool:
        """Whether each example is one bin."""
        return all([count == 1 for count in self.counts])


def avg_pool(x: Tensor, sizes: Tensor, total: int, *how: Any) -> Tensor:
    """Means of windows, (N, C) -> (M, C)."""
    w, given = averages(*how)
    pool = aten.avg_pool3d if len(given[0]) == 3 else aten.avg_pool2d
    found = runs(sizes, w, x.shape[0], total)
    return by_example(x, found, total, lambda x, size: pool(ready(x), *given))


def avg_pool_backward(grad: Tensor, sizes: Tensor, total: int, *how: Any) -> Tensor:
    """The gradient of x, (M, C) -> (N, C)."""
    w, given = averages(*how)
    back = aten.avg_pool3d_backward if len(given[0]) == 3 else aten.avg_pool2d_backward
    found = runs(sizes, w, total, grad.shape[0])
    return gradient_by_example(grad, found, total, lambda grad, like: back(grad, like, *given))


def averages(
    kernel: Any, stride: Any, padding: Any, ceil_mode: bool, count_include_pad: bool, divisor: int | None
) -> tuple[Windows, tuple[Any, ...]]:
    """The windows of means, and what torch's kernels take."""
    how = tuple(kernel), tuple(stride), tuple(padding), (1,) * len(kernel)
    w = Windows(*how, ceil_mode=ceil_mode, name="avg_pool")
    return w, (*w.flat[:3], ceil_mode, count_include_pad, divisor)


def adaptive_avg(x: Tensor, sizes: Tensor, total: int, counts: Any) -> Tensor:
    """Means of adaptive bins, (N, C) -> (M, C)."""
    w = Bins(tuple(counts), "adaptive_avg_pool")
    if w.single:
        lengths = sizes.prod(1)
        check_total(w, lengths, x.shape[0], total)
        return (means if x.is_contiguous() else means_of_channels)(x, lengths).to(x.dtype)
    found = runs(sizes, w, x.shape[0], total)
    pool = aten.adaptive_avg_pool3d if len(counts) == 3 else aten.adaptive_avg_pool2d
    return by_example(x, found, total, lambda x, size: pool(ready(x), size))


def adaptive_avg_backward(grad: Tensor, sizes: Tensor, total: int, counts: Any) -> Tensor:
    """The gradient of x, (M, C) -> (N, C)."""
    w = Bins(tuple(counts), "adaptive_avg_pool")
    if w.single:
        lengths = sizes.prod(1)
        check_total(w, lengths, total, grad.shape[0])
        return (grad / lengths.unsqueeze(1)).index_select(0, torch.repeat_interleave(lengths))
    found = runs(sizes, w, total, grad.shape[0])
    return gradient_by_example(grad, found, total, adaptive_avg_backwards[max(2, len(counts))])


def check_total(w: Bins, lengths: Tensor, positions: int, total: int) -> None:
    """A StructureError for sizes that are not those of the positions, where each example is one bin."""
    if (int(lengths.sum()), lengths.shape[0]) != (positions, total):
        got, hint = f"{positions} and {total}", f"sizes and windows make {int(lengths.sum())} and {lengths.shape[0]}"
        raise StructureError(message(w.name, "as many positions as its sizes have", got, hint=hint))


def means(x: Tensor, lengths: Tensor) -> Tensor:
    """The mean of each example, (N, C) -> (B, C): sums of few positions, and sums of these."""
    pieces = (lengths + FEW - 1) // FEW
    rows, offsets = torch.repeat_interleave(pieces), offsets_of(lengths)
    starts = offsets[rows] + FEW * (torch.arange(rows.shape[0]) - offsets_of(pieces)[rows])
    sums = F.embedding_bag(torch.arange(x.shape[0]), widened(x), starts, mode="sum")
    return sums.new_zeros(lengths.shape[0], x.shape[1]).index_add_(0, rows, sums) / lengths.unsqueeze(1)


def means_of_channels(x: Tensor, lengths: Tensor) -> Tensor:
    """The same of channels that do not lie innermost: each is read as it lies, one example after another."""
    out = x.new_empty((lengths.shape[0], x.shape[1]), dtype=sum_dtype(x.dtype))
    for example, mean in zip(x.split(lengths.tolist()), out.unbind(), strict=True):
        torch.sum(example, 0, dtype=out.dtype, out=mean)
    return out / lengths.clamp(min=1).unsqueeze(1)


def by_example(x: Tensor, found: list[Run], total: int, pool: Callable[[Tensor, Any], Tensor]) -> Tensor:
    """What `pool(planes, size of a result)` makes of each run, (N, C) -> (M, C)."""
    out = room(x, found, total, x.shape[1])
    for run in found:
        planes(out, run.out, run.results).copy_(pool(planes(x, run.x, run.planes), run.results[1:]))
    return out


def gradient_by_example(grad: Tensor, found: list[Run], total: int, back: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """What `back(gradients, planes)` makes of each run, (M, C) -> (N, C); it reads the shape of planes only."""
    out, grad = room(grad, found, total, grad.shape[1], True), grad.contiguous()
    for run in found:
        at = planes(out, run.x, run.planes)
        at.copy_(back(planes(grad, run.out, run.results), at))
    return out


def max_pool(
    x: Tensor, sizes: Tensor, total: int, order: list[int], kernel: Any, stride: Any, padding: Any, dilation: Any,
    ceil_mode: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The largest of each window and its position: (N, C) -> (M, C), (M, C)."""
    how = tuple(kernel), tuple(stride), tuple(padding), tuple(dilation)
    w = Windows(*how, ceil_mode=ceil_mode, name="max_pool")
    pool = aten.max_pool3d_with_indices if len(kernel) == 3 else aten.max_pool2d_with_indices
    given = [in_order(numbers, order) for numbers in w.flat[:4]]

    def inside(x: Tensor, size: Any) -> tuple[Tensor, Tensor]:
        """Of a window that dilation leaves nothing but padding, torch names a position that may lie outside."""
        found, where = pool(x, *given, ceil_mode)
        return found, where.clamp_(max=math.prod(x.shape[2:]) - 1) if max(dilation) > 1 else where

    return largest(x, sizes, total, order, w, inside)


def adaptive_max(x: Tensor, sizes: Tensor, total: int, order: list[int], counts: Any) -> tuple[Tensor, Tensor]:
    """The largest of each adaptive bin and its position: (N, C) -> (M, C), (M, C)."""
    pool = aten.adaptive_max_pool3d if len(counts) == 3 else aten.adaptive_max_pool2d
    return largest(x, sizes, total, order, Bins(tuple(counts), "adaptive_max_pool"), pool)


def largest(
    x: Tensor, sizes: Tensor, total: int, order: list[int], w: Reads,
    pool: Callable[[Tensor, Any], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The largest that `pool(planes, size of a result)` finds in each run, and its position in x.

    Args:
        order: which dim of torch's planes each dim of these planes is.
    """
    found = runs(sizes, w, x.shape[0], total)
    out, index = room(x, found, total, x.shape[1]), x.new_zeros(total, x.shape[1], dtype=torch.int64)
    moved = order != sorted(order)
    for run in found:
        given, (count, *plane) = planes(x, run.x, run.planes), run.planes
        if moved:
            given = given.permute(0, 1, *[2 + d for d in in_order(range(len(plane)), order)])
        part, where = pool(ready(given), in_order(run.results[1:], order))
        if moved:
            back = 0, 1, *[2 + d for d in order]
            positions = torch.arange(math.prod(plane)).view(plane).permute(in_order(range(len(plane)), order))
            part, where = part.permute(back), positions.flatten()[where].permute(back)
        start: Any = run.x.start
        if count > 1:
            start = (torch.arange(count) * math.prod(plane) + start).view(-1, *[1] * (where.ndim - 1))
        planes(out, run.out, run.results).copy_(part)
        torch.add(where, start, out=planes(index, run.out, run.results))
    return out, index


def ready(x: Tensor) -> Tensor:
    """Planes as torch's kernels read them fast; those of three dims copy what they need."""
    return innermost(x) if x.ndim == 4 else x


def in_order(given: Sequence[int], order: list[int]) -> list[int]:
    """Numbers for each dim of a plane, which has them in this order, in that of torch; one dim is the last of two."""
    return list(given) if len(order) == 1 else [given[order.index(d)] for d in range(len(order))]
