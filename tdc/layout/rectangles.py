"""A packed batch as a few rectangles, each of examples of near sizes: for kernels that take a rectangle alone.

    sizes (60, 64) (224, 200) (64, 50) (210, 224)   ->   rectangles (2, 224, 224) and (2, 64, 64)

The rectangles follow one another in a buffer, a packed batch of the same examples in another order, each as large as
its rectangle. So both ways are an `exchange`.

Invariants: sizes on the host say which examples share a rectangle, and no device is read; every position of the batch
is in one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from tdc.core.slow_paths import announce
from tdc.layout.padding import as_number, exchange
from tdc.layout.segments import coordinates, known_sizes, on_host, row_ids, sizes_of, strides, structure_of_sizes
from tdc.layout.structure import Structure, once

Size = tuple[int, ...]
LAUNCH = 1 << 35  # work that takes as long as one more rectangle: some 90 us of an H100, most of them of the host
CALLS = 1 << 23  # the same on CPU: the calls of one more rectangle take some 150 us
MOST = 4  # rectangles
BLOCKS = 24  # of neighbours by size, which are not separated


@dataclass(frozen=True, eq=False, slots=True)
class Rectangles:
    """Examples that share rectangles: neighbours, sorted by their longest side and then by all.

    Attributes:
        order: the examples, sorted, (B,).
        counts, sizes: the number of examples, and the size of a plane, of each rectangle.
    """

    order: Tensor
    counts: tuple[int, ...]
    sizes: tuple[Size, ...]

    @property
    def positions(self) -> int:
        """Number of positions of all rectangles."""
        return sum(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """Number of positions of each rectangle."""
        return [n * math.prod(size) for n, size in zip(self.counts, self.sizes, strict=True)]

    def of(self, size_of: Callable[[Size], Sequence[int]]) -> Rectangles:
        """The same examples in rectangles of other sizes, each a function of what it was."""
        return replace(self, sizes=tuple([tuple(size_of(size)) for size in self.sizes]))


def near_sizes(work: float, s: Structure, *others: Structure) -> Rectangles | None:
    """The rectangles of the least cost; None where one of all examples is as good, or reading sizes is a sync.

    Args:
        work: for each position, in products times the bytes of an element.
        others: of batches whose sizes follow those of the first, so that positions are pairs.
    """
    if any([known_sizes(t) is None for t in (s, *others)]):
        return None
    launch, known = CALLS if s.offsets.device.type == "cpu" else LAUNCH, sizes_known(s, *others)
    if not s.batch_size or s.batch_size * math.prod(on_host(known.amax(0))) * work <= launch:
        return None  # all in one rectangle take no longer than the calls of another
    best = min(partitions_of(s, *others), key=lambda r: r.positions * work + launch * len(r.counts))
    return best if len(best.counts) > 1 else None


@once
def partitions_of(s: Structure, *others: Structure) -> list[Rectangles]:
    """The best rectangles, 1 of them, up to 2, and so on to MOST."""
    sizes = sorted([tuple(size) for size in on_host(sizes_known(s, *others))], key=lambda size: (max(size), size))
    step = max(1, math.ceil(len(sizes) / BLOCKS))
    blocks = [sizes[at : at + step] for at in range(0, len(sizes), step)]
    order = order_of(torch.cat([sizes_of(t) for t in (s, *others)], 1))
    found: list[Rectangles] = []
    for cuts in best_cuts(costs(blocks), len(blocks)):
        parts = [list(chain.from_iterable(blocks[a:b])) for a, b in pairwise((0, *cuts, len(blocks)))]
        found.append(Rectangles(order, tuple([len(part) for part in parts]), tuple([largest(part) for part in parts])))
    return found


def sizes_known(*structures: Structure) -> Tensor:
    """Sizes of each example on the host, those of all structures side by side; `near_sizes` made sure of them."""
    sizes: Any = [known_sizes(s) for s in structures]
    return torch.cat(sizes, 1)


def order_of(sizes: Tensor) -> Tensor:
    """Examples of sizes (B, R) as `partitions_of` sorts them, found on the device."""
    order = torch.arange(sizes.shape[0], device=sizes.device)
    for key in (*reversed(sizes.unbind(1)), sizes.amax(1)):
        order = order[key[order].argsort(stable=True)]
    return order


def best_cuts(cost: dict[tuple[int, int], int], blocks: int) -> list[Size]:
    """The last blocks of 1 rectangle, of up to 2, and so on to MOST, for the least positions."""
    best: list[tuple[int, Size]] = [(cost.get((0, end), 0), ()) for end in range(blocks + 1)]
    found = [best[-1][1]]
    for _ in range(1, MOST):  # best: the least positions of the blocks up to each end, and the cuts
        best = [
            min([best[end], *[(best[cut][0] + cost[cut, end], (*best[cut][1], cut)) for cut in range(1, end)]])
            for end in range(blocks + 1)
        ]
        found.append(best[-1][1])
    return found


def costs(blocks: Sequence[Sequence[Size]]) -> dict[tuple[int, int], int]:
    """Positions of the rectangle of the blocks from one to another."""
    found: dict[tuple[int, int], int] = {}
    for first in range(len(blocks)):
        count, top = 0, (0,) * len(blocks[0][0])
        for end, block in enumerate(blocks[first:], first + 1):
            count, top = count + len(block), largest([top, *block])
            found[first, end] = count * math.prod(top)
    return found


def largest(sizes: Sequence[Size]) -> Size:
    """The size that holds all of them."""
    return tuple([max(column) for column in zip(*sizes, strict=True)])


def to_rectangles(values: Tensor, s: Structure, r: Rectangles, fill: float = 0) -> list[Tensor]:
    """Packed to rectangles: (N, *D) -> (E, *P, *D) for each, `fill` where there is nothing."""
    if r.positions != values.shape[0]:
        announce("padding", "to_rectangles")
    there, valid, back = positions_of(s, r, values.shape[0])
    buffer = exchange(values, there, valid, as_number(fill, values.dtype), back, None)
    parts = torch.split(buffer, r.lengths)
    return [part.unflatten(0, (n, *size)) for part, n, size in zip(parts, r.counts, r.sizes, strict=True)]


def from_rectangles(parts: Sequence[Tensor], s: Structure, r: Rectangles, total: int) -> Tensor:
    """Rectangles to packed: (E, *P, *D) each -> (N, *D). Padding is never read."""
    buffer = torch.cat([part.flatten(0, s.ragged_ndim) for part in parts])
    there, valid, back = positions_of(s, r, total)
    return exchange(buffer, back, None, 0.0, there, valid)


@once
def sides_of(s: Structure, r: Rectangles) -> tuple[Rectangles, Rectangles]:
    """Rectangles of the batch alone, of those of pairs with another one, and of the other one; of itself the same."""
    n = s.ragged_ndim
    first, second = r.of(lambda size: size[:n]), r.of(lambda size: size[n:])
    return first, first if first.sizes == second.sizes else second


@once
def positions_of(s: Structure, r: Rectangles, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each position of the buffer the packed one, and a mask of real ones; and for each packed one the other."""
    columns = zip(*r.sizes, strict=True)
    rows = [[r.order.new_full((n,), k) for n, k in zip(r.counts, column, strict=True)] for column in columns]
    buffer = structure_of_sizes(torch.stack([torch.cat(column) for column in rows], 1))
    there, valid = read_from(s, buffer, r.order, r.positions)
    return there, valid, read_from(buffer, s, r.order.argsort(), total)[0]


def read_from(source: Structure, target: Structure, rows: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For each position of `target` the one of `source`, and a mask of those that it has; `rows` (B,) are rows of
    `source`."""
    row = rows[row_ids(target, total)]
    index, valid = source.offsets[row], torch.ones_like(row, dtype=torch.bool)
    for r, position in enumerate(coordinates(target, total)):
        index = index + position * strides(source)[r][row]
        valid = valid & (position < sizes_of(source)[row, r])
    return torch.where(valid, index, 0), valid
