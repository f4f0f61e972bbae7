"""Convolution of packed sequences at stride 1 on CPU: neighbours in one line, with padding between them.

    x (N, C)      a a a a b b c c c
    line (T, C)   0 a a a a 0 b b 0 c c c 0    for a padding of 1

One convolution of a line has the windows of all examples, and some that lie in two of them, which are left out. It
costs less than one for each example, or a product of all that windows read.

Invariant: a line holds so few examples that kernels which copy what windows read copy no more than `MOST` numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.core.dtypes import sum_dtype
from tdc.kernels.convolution.planes import Run, Windows, innermost, of_weight

MOST = 1 << 22
SMALL = 384  # numbers of an example, in the mean, that an index copies in the time of views of it


class Line(NamedTuple):
    """Neighbouring examples: their positions in x and those of their results, how many each of them has, and how many
    positions of padding lie around them."""

    x: slice
    out: slice
    sizes: list[int]
    results: list[int]
    padding: int

    def framed(self, x: Tensor) -> Tensor:
        """The line (1, C, 1, T)."""
        return dense(laid(x[self.x], self.sizes, [self.padding] * len(self.sizes), self.padding))

    def unframed(self, line: Tensor, out: Tensor) -> None:
        """The other way, into `out`."""
        taken(rows(line), self.sizes, [self.padding] * len(self.sizes), self.padding, out[self.x])

    def spread(self, grad: Tensor) -> Tensor:
        """Gradients of all its windows, 0 for those that are left out."""
        return dense(laid(grad[self.out], self.results, self.between, 0))

    def gathered(self, line: Tensor, out: Tensor) -> None:
        """The windows that are not left out, into `out`."""
        taken(rows(line), self.results, self.between, 0, out[self.out])

    @property
    def between(self) -> list[int]:
        """How many windows are left out behind each example's, the last one's excepted."""
        steps = [n + self.padding - m for n, m in zip(self.sizes, self.results, strict=True)]
        return [*steps[:-1], 0]


def laid(x: Tensor, sizes: list[int], gaps: list[int], first: int) -> Tensor:
    """Examples of x (N, C) with `first` zeros before them all and a gap of zeros behind each."""
    if x.numel() < SMALL * len(sizes):
        line = x.new_zeros(first + sum(sizes) + sum(gaps), x.shape[1])
        return line.index_copy_(0, positions(sizes, gaps, first), x)
    zeros = x.new_zeros(max(first, *gaps), x.shape[1])
    between = {n: zeros[:n] for n in {first, *gaps}}
    return torch.cat([between[first], *woven(x.contiguous().split(sizes), [between[n] for n in gaps])])


def taken(line: Tensor, sizes: list[int], gaps: list[int], first: int, out: Tensor) -> None:
    """The other way, into `out`."""
    if out.numel() < SMALL * len(sizes):
        torch.index_select(line, 0, positions(sizes, gaps, first), out=out)
    else:
        torch.cat(line.split([first, *woven(sizes, gaps)])[1::2], out=out)


def positions(sizes: list[int], gaps: list[int], first: int) -> Tensor:
    """Where the examples lie, (N,)."""
    behind = torch.tensor(gaps)
    return torch.arange(sum(sizes)) + torch.repeat_interleave(behind.cumsum(0) - behind + first, torch.tensor(sizes))


def woven(parts: Sequence[Any], gaps: Sequence[Any]) -> list[Any]:
    """Each part and the gap behind it."""
    return [t for both in zip(parts, gaps, strict=True) for t in both]


def serves(w: Windows, found: list[Run], sizes: Tensor, total: int) -> bool:
    """Whether lines serve: for sequences of several sizes that all leave something, most windows of which are real."""
    if len(w.kernel) != 1 or w.kernel[0] == 1 or w.stride[0] != 1 or len(found) < 2:
        return False
    count, padding = sum([run.planes[0] for run in found]), w.padding[0]
    positions = found[-1].x.stop + (count + 1) * padding
    return padding <= beyond(w) and count == len(sizes) and positions <= 2 * total


def beyond(w: Windows) -> int:
    """How far a window reads from where it begins."""
    return w.dilation[0] * (w.kernel[0] - 1)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Tensor, total: int, w: Windows) -> Tensor:
    """(N, C) -> (M, D)."""
    out, weight = x.new_empty(total, weight.shape[0]), innermost(weight.unsqueeze(2))
    for line in lines(sizes, w, x.shape[1]):
        found = torch.convolution(line.framed(x), weight, bias, *inside(w)[1:4], False, (0, 0), w.groups)
        line.gathered(found, out)
    return out


def backward_input(weight: Tensor, grad: Tensor, sizes: Tensor, total: int, w: Windows) -> Tensor:
    """The gradient of x, (M, D) -> (N, C)."""
    channels, weight = weight.shape[1] * w.groups, innermost(weight.unsqueeze(2))
    out = grad.new_empty(total, channels)
    for line in lines(sizes, w, channels):
        found = torch.convolution(line.spread(grad), weight, None, *inside(w)[1:4], True, (0, 0), w.groups)
        line.unframed(found, out)
    return out


def backward_weight(x: Tensor, grad: Tensor, sizes: Tensor, shape: tuple[int, ...], w: Windows) -> Tensor:
    """The gradient of the weight, summed over examples: (N, C), (M, D) -> (D, C / groups, K)."""
    total = grad.new_zeros(*shape[:2], 1, shape[2], dtype=sum_dtype(grad.dtype))
    for line in lines(sizes, w, x.shape[1]):
        total += of_weight(line.spread(grad), line.framed(x), inside(w))
    return total.view(shape).to(grad.dtype)


def inside(w: Windows) -> Windows:
    """The windows of a line, whose padding is in it."""
    return w._replace(padding=(0,)).flat


def dense(x: Tensor) -> Tensor:
    """(T, C) -> (1, C, 1, T), a view with channels innermost, also by the strides of the dims of one position: else
    torch gives the weights of several groups another gradient (torch 2.13)."""
    return x[None, None].permute(0, 3, 1, 2)


def rows(x: Tensor) -> Tensor:
    """(1, C, 1, T) -> (T, C)."""
    return x[0, :, 0].t().contiguous()


def lines(sizes: Tensor, w: Windows, channels: int) -> list[Line]:
    """All examples, as many to a line as `MOST` lets in, one at least."""
    found, p, x, out, begin = list[Line](), w.padding[0], 0, 0, 0
    own = [n for (n,) in sizes.tolist()]
    for count in groups([n + p for n in own], MOST // (channels * w.kernel[0])):
        part = own[begin : begin + count]
        results = [n + 2 * p - beyond(w) for n in part]
        n, m = sum(part), sum(results)
        found.append(Line(slice(x, x + n), slice(out, out + m), part, results, p))
        x, out, begin = x + n, out + m, begin + count
    return found


def groups(sizes: list[int], most: int) -> list[int]:
    """How many neighbours go together, so that the sizes of none add up to more than `most`; one at least."""
    counts, filled = [0], 0
    for size in sizes:
        if counts[-1] and filled + size > most:
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += size
    return counts
