"""Convolution of packed examples on CPU: real positions only, whatever the sizes.

    x (N, C)      positions of all planes, one example after another, each plane row by row; channels innermost
    sizes (B, n)  of each example's plane
                  a last row of -1 says that positions of filling follow, whose results are zeros
    weight (D, C / groups, *K)
    out (M, D)    positions of the results, in the same order

    gathered      one product of the weight with all windows: for kernels of one position, and planes that are small
                  beside the weight, which a convolution rearranges each time it is called
    by example    torch's convolution of one example after another; neighbours of one size are one batch

Planes are views of x; oneDNN reads them as they are.

Invariants: both ways give the numbers and gradients of each example by itself; the choice reads sizes alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.core.dtypes import HALF, sum_dtype, widened
from tdc.core.errors import StructureError, message
from tdc.layout.segments import coordinates, offsets_of, row_ids, structure_of_sizes

MOST = 1 << 22  # numbers that are gathered at a time
WIDE = 2  # positions of a plane for each channel of the result, up to which gathering all windows is faster
WIDE_INPUT = 1 / 8  # the same for the gradient of x, where windows that overlap are added one by one


class Windows(NamedTuple):
    """Windows of a convolution, a number for each dim of a plane."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def of(self, size: Sequence[int]) -> list[int]:
        """The size of a result, of a plane's; 0 where a plane is too small."""
        columns = zip(size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return [max(0, (n + 2 * p - d * (k - 1) - 1) // s + 1) for n, k, s, p, d in columns]

    @property
    def flat(self) -> Windows:
        """Windows of one dim as those of two, the first of one position. A kernel of one position is not dilated, for
        which oneDNN would read elsewhere (torch 2.13)."""
        dilation = tuple([d if k > 1 else 1 for k, d in zip(self.kernel, self.dilation, strict=True)])
        if len(self.kernel) > 1:
            return self._replace(dilation=dilation)
        own = self.kernel, self.stride, self.padding, dilation
        ones = [(one, *numbers) for one, numbers in zip((1, 1, 0, 1), own, strict=True)]
        return Windows(ones[0], ones[1], ones[2], ones[3], self.groups)


class Run(NamedTuple):
    """Neighbouring examples of one size: their positions, those of their results, and the planes (E, *P), (E, *Q)."""

    x: slice
    out: slice
    planes: tuple[int, ...]
    results: tuple[int, ...]


def runs(sizes: Tensor, w: Windows, positions: int, total: int) -> list[Run]:
    """All examples with a result, neighbours of one size together."""
    found, begin, start = [], 0, 0
    for size, same in groupby(sizes.tolist()):
        count, result = len(list(same)), w.of(size)
        end, stop = begin + count * math.prod(size), start + count * math.prod(result)
        flat = [1] if len(size) == 1 else []
        if end > begin and stop > start:
            run = Run(slice(begin, end), slice(start, stop), (count, *flat, *size), (count, *flat, *result))
            found.append(run)
        begin, start = end, stop
    if (begin, start) != (positions, total):
        got, hint = f"{positions} and {total}", f"sizes and windows make {begin} and {start}"
        raise StructureError(message("conv", "as many positions as its sizes have", got, hint=hint))
    return found


def is_filled(sizes: Tensor) -> bool:
    """True if positions of filling follow those of the sizes."""
    return sizes.shape[0] > 0 and int(sizes[-1, 0]) < 0


def real_part(sizes: Tensor, w: Windows) -> tuple[Tensor, int, int]:
    """Sizes of planes alone, with their positions and those of their results."""
    own = sizes[sizes[:, 0] >= 0]
    return own, int(own.prod(1).sum()), sum([math.prod(w.of(size)) for size in own.tolist()])


def before_zeros(x: Tensor, total: int) -> Tensor:
    """Rows, and rows of zeros up to a total."""
    return torch.cat([x, x.new_zeros(total - x.shape[0], x.shape[1])])


def room(like: Tensor, found: list[Run], rows: int, channels: int, back: bool = False) -> Tensor:
    """Memory for results of the runs, or, `back`, for gradients of their inputs; zeros where they leave some out."""
    filled = sum([at.stop - at.start for at in [run.x if back else run.out for run in found]])
    return like.new_empty(rows, channels) if filled == rows else like.new_zeros(rows, channels)


def planes(x: Tensor, at: slice, shape: tuple[int, ...]) -> Tensor:
    """The planes (E, C, *P) of some examples, a view of x (N, C)."""
    count, *plane = shape
    step, strides = x.stride(0), [x.stride(1)]
    for size in reversed(plane):
        strides.insert(1, step)
        step *= size
    return x.as_strided((count, x.shape[1], *plane), (step, *strides), x.storage_offset() + at.start * x.stride(0))


def innermost(x: Tensor) -> Tensor:
    """The same numbers with channels innermost."""
    return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)


def of_weight(grad: Tensor, x: Tensor, w: Windows) -> Tensor:
    """The gradient of the weight (D, C / groups, *K), of dense planes."""
    weight = innermost(grad.new_empty(grad.shape[1], x.shape[1] // w.groups, *w.kernel))  # no numbers of it are read
    given = (grad, x, weight, None, w.stride, w.padding, w.dilation, False, [0] * len(w.kernel), w.groups)
    return torch.ops.aten.convolution_backward(*given, [False, True, False])[1]  # type: ignore[no-any-return]  # untyped in torch


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Tensor, total: int, *how: Any) -> Tensor:
    """x (N, C), weight (D, C / groups, *K), bias (D,) -> (M, D)."""
    if is_filled(sizes):
        sizes, n, m = real_part(sizes, Windows(tuple(weight.shape[2:]), *how))
        return before_zeros(forward(x[:n], weight, bias, sizes, m, *how), total)
    if weight.shape[1] == 1 and x.dtype in HALF:  # of one channel in each group oneDNN may never return (torch 2.13)
        term = None if bias is None else widened(bias)
        return forward(widened(x), widened(weight), term, sizes, total, *how).to(x.dtype)
    w = Windows(tuple(weight.shape[2:]), *how)
    found = runs(sizes, w, x.shape[0], total)
    if gathers(found, total, weight.shape[0], w):
        flat = matrix(weight).t()
        out = x.new_empty(total, weight.shape[0])
        for at, columns in read(x, sizes, total, w):
            torch.mm(columns, flat, out=out[at]) if bias is None else torch.addmm(bias, columns, flat, out=out[at])
        return out
    out = room(x, found, total, weight.shape[0])
    x, weight, w = x.contiguous(), innermost(plain(weight)), w.flat
    for run in found:
        part = torch.convolution(*given(x, weight, run), bias, *w[1:4], False, [0] * len(w[0]), w.groups)
        planes(out, run.out, run.results).copy_(part)
    return out


def given(x: Tensor, weight: Tensor, run: Run) -> tuple[Tensor, Tensor]:
    """Planes of some examples and the weight. Where results are one wide, oneDNN fills them only if a single channel
    is the first dim, not the innermost (torch 2.13)."""
    x, channels = planes(x, run.x, run.planes), x.shape[1]
    if channels > 1 or run.results[-1] > 1:
        return x, weight
    return x.squeeze(1).unsqueeze(1), weight.squeeze(1).unsqueeze(1)


def backward_input(weight: Tensor, grad: Tensor, sizes: Tensor, total: int, *how: Any) -> Tensor:
    """The gradient of x, (M, D) -> (N, C)."""
    w = Windows(tuple(weight.shape[2:]), *how)
    if is_filled(sizes):
        sizes, n, m = real_part(sizes, w)
        return before_zeros(backward_input(weight, grad[:m], sizes, n, *how), total)
    channels = weight.shape[1] * w.groups
    found = runs(sizes, w, total, grad.shape[0])
    if gathers(found, grad.shape[0], weight.shape[0], w, WIDE_INPUT):
        flat = matrix(weight)
        index, summed = windows(sizes, grad.shape[0], total, w), widened(grad.new_zeros(total + 1, channels))
        for at in pieces(grad.shape[0], flat.shape[1]):
            summed.index_add_(0, index[at].flatten(), widened(grad[at] @ flat).view(-1, channels))
        return summed.resize_(total, channels).to(grad.dtype)  # no view, of which forward mode makes demands
    out = room(grad, found, total, channels, True)
    grad, weight, w = grad.contiguous(), innermost(plain(weight)), w.flat
    for run in found:
        columns = zip(run.planes[1:], run.results[1:], *w[:4], strict=True)
        unread = [n + 2 * p - d * (k - 1) - 1 - (q - 1) * s for n, q, k, s, p, d in columns]  # behind the last window
        part = torch.convolution(
            planes(grad, run.out, run.results), weight, None, *w[1:4], True, unread, w.groups
        )  # faster in oneDNN than the derivative of a convolution
        planes(out, run.x, run.planes).copy_(part)
    return out


def backward_weight(x: Tensor, grad: Tensor, sizes: Tensor, kernel: tuple[int, ...], *how: Any) -> Tensor:
    """The gradient of the weight, summed over examples: (N, C), (M, D) -> (D, C / groups, *K)."""
    w = Windows(tuple(kernel), *how)
    if is_filled(sizes):
        sizes, n, m = real_part(sizes, w)
        return backward_weight(x[:n], grad[:m], sizes, kernel, *how)
    shape = (grad.shape[1], x.shape[1] // w.groups, *w.kernel)
    found = runs(sizes, w, x.shape[0], grad.shape[0])
    if gathers(found, grad.shape[0], grad.shape[1], w):
        parts = [grad[at].t() @ columns for at, columns in read(x, sizes, grad.shape[0], w)]
        summed = functools.reduce(torch.Tensor.add_, [widened(part) for part in parts]).to(grad.dtype)
        return summed.view(shape[0], *w.kernel, shape[1]).movedim(-1, 1).clone(memory_format=torch.contiguous_format)
    grad, x, w = grad.contiguous(), x.contiguous(), w.flat
    total = grad.new_zeros(*shape[:2], *w.kernel, dtype=sum_dtype(grad.dtype))
    for run in found:
        total += of_weight(planes(grad, run.out, run.results), planes(x, run.x, run.planes), w)
    return total.view(shape).to(grad.dtype).clone(memory_format=torch.contiguous_format)


def plain(weight: Tensor) -> Tensor:
    """The weight of `flat` windows."""
    return weight.unsqueeze(2) if weight.ndim == 3 else weight


def matrix(weight: Tensor) -> Tensor:
    """(D, C, *K) -> (D, K·C)."""
    return weight.movedim(1, -1).reshape(weight.shape[0], -1)


def gathers(found: list[Run], total: int, channels: int, w: Windows, wide: float = WIDE) -> bool:
    """True if one product of all windows is faster than a convolution for each run."""
    small = total <= wide * channels * len(found) or math.prod(w.kernel) == 1
    return w.groups == 1 and small


def read(x: Tensor, sizes: Tensor, total: int, w: Windows) -> Iterator[tuple[slice, Tensor]]:
    """The inputs of each window, 0 outside of its plane: parts of (M, K·C), of x (N, C)."""
    index = windows(sizes, total, x.shape[0], w)
    framed, width = torch.cat([x, x.new_zeros(1, x.shape[1])]), index.shape[1] * x.shape[1]
    for at in pieces(total, width):
        yield at, framed.index_select(0, index[at].flatten()).view(-1, width)


def pieces(total: int, width: int) -> list[slice]:
    """Pieces of all windows of at most MOST numbers each; one piece of no window."""
    step = max(1, MOST // width)
    return [slice(first, min(first + step, total)) for first in range(0, max(total, 1), step)]


def windows(sizes: Tensor, total: int, outside: int, w: Windows) -> Tensor:
    """The positions that each window reads, `outside` beyond its plane: (M, K)."""
    results = structure_of_sizes(
        torch.tensor([w.of(size) for size in sizes.tolist()], dtype=torch.int64).view_as(sizes)
    )
    rows, at = row_ids(results, total), coordinates(results, total)
    index, inside = torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
    for d, (k, s, p, step) in enumerate(zip(*w[:4], strict=True)):
        first, size = [t.view(total, *[1] * (d + 1)) for t in (at[d] * s - p, sizes[rows, d])]
        position = first + torch.arange(k) * step
        index = index.unsqueeze(-1) * size + position
        inside = inside.unsqueeze(-1) & (position >= 0) & (position < size)
    start = offsets_of(sizes.prod(1))[rows].unsqueeze(1)
    return torch.where(inside.flatten(1), index.flatten(1) + start, outside)
