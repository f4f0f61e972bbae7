"""Planes of packed examples, as kernels on CPU take them: what windows read, and neighbours of one size as one batch.

    x (N, C)       positions of all planes, one example behind another, each plane row by row
    sizes (B, n)   of each example's plane

Planes are views of x, with channels innermost where they are so in x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from tdc.core.errors import StructureError, message


class Windows(NamedTuple):
    """What each position of a result reads; a number for each dim of a plane."""

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
        """Those of one dim as those of two, the first of which has one position. A kernel of one position is not
        dilated: that says nothing, but oneDNN reads elsewhere for it (torch 2.13)."""
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
    """All examples that leave something, neighbours of one size together."""
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


def room(like: Tensor, found: list[Run], rows: int, channels: int, back: bool = False) -> Tensor:
    """Memory for rows that the runs fill, or, `back`, whose gradients they fill; zeros where they leave some out."""
    filled = sum([at.stop - at.start for at in [run.x if back else run.out for run in found]])
    return like.new_empty(rows, channels) if filled == rows else like.new_zeros(rows, channels)


def planes(x: Tensor, at: slice, shape: tuple[int, ...]) -> Tensor:
    """The planes (E, C, *P) of some examples, a view of x (N, C): in one step, since there is one for each example."""
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
