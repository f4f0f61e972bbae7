"""A packed batch as a few rectangles: which examples share one, and both ways."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor

from tdc.layout import rectangles
from tdc.layout.rectangles import (
    MOST,
    Rectangles,
    from_rectangles,
    near_sizes,
    partitions_of,
    sides_of,
    to_rectangles,
)
from tdc.layout.segments import structure_of_sizes
from tdc.layout.structure import Structure
from tdc.testing import forbid

CASES = {
    "sequences": [[3], [0], [9], [4], [3], [8]], "images": [[7, 5], [2, 2], [7, 5], [3, 9], [6, 6], [9, 3], [2, 1]],
    "equal": [[4, 4], [2, 8], [4, 4]], "one": [[5]], "empty": [[0, 3], [0, 0]], "none": [],
}  # fmt: skip


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rectangle costs next to nothing."""
    monkeypatch.setattr(rectangles, "CALLS", 1)


def structure(sizes: list[list[int]]) -> Structure:
    return structure_of_sizes(torch.tensor(sizes, dtype=torch.int64).view(len(sizes), -1 if sizes else 1))


def ordered(sizes: list[list[int]]) -> list[list[int]]:
    return sorted(sizes, key=lambda size: (max(size), size))


def cost(sizes: list[list[int]], cuts: tuple[int, ...]) -> int:
    """Positions of rectangles of sorted examples, by the definition."""
    ends = [0, *cuts, len(sizes)]
    parts = [sizes[a:b] for a, b in pairwise(ends)]
    return sum(len(part) * math.prod(max(column) for column in zip(*part, strict=True)) for part in parts)


@pytest.mark.parametrize("name", CASES)
def test_partitions_have_the_least_positions(name: str):
    sizes = CASES[name]
    for most, found in enumerate(partitions_of(structure(sizes)), 1):
        assert len(found.counts) == len(found.sizes) <= most
        assert sum(found.counts) == len(sizes)
        assert [sizes[i] for i in found.order.tolist()] == ordered(sizes)
        options = [
            cost(ordered(sizes), cuts) for n in range(most) for cuts in combinations(range(1, len(sizes)), n) if sizes
        ]
        assert found.positions == min(options, default=0)


@pytest.mark.slow
def test_many_examples_stay_in_blocks():
    """Each rectangle holds its examples, and four of them hold few positions besides."""
    torch.manual_seed(0)
    sizes = torch.randint(8, 33, (1000, 2)).tolist()
    found = partitions_of(structure(sizes))
    for r in found:
        rows = [sizes[i] for i in r.order.tolist()]
        for n, size in zip(r.counts, r.sizes, strict=True):
            part, rows = rows[:n], rows[n:]
            assert [max(column) for column in zip(*part, strict=True)] == list(size)
    assert found[-1].positions < 0.75 * found[0].positions
    assert len(found) == MOST


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name]])
def test_both_ways(name: str):
    s = structure(CASES[name])
    total = int(s.offsets[-1])
    values = torch.randn(total, 2, dtype=torch.float64)
    examples = values.split(s.offsets.diff().tolist())
    for r in partitions_of(s):
        parts = to_rectangles(values, s, r, 7.0)
        rows = [row for part in parts for row in part]
        for i, row in zip(r.order.tolist(), rows, strict=True):
            inside = row[tuple(slice(n) for n in CASES[name][i])]
            assert torch.equal(inside.flatten(0, -2), examples[i])
            assert (row == 7).sum() == row.numel() - inside.numel()
        assert torch.equal(from_rectangles(parts, s, r, total), values)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", ["sequences", "images"])
def test_derivatives(name: str):
    s = structure(CASES[name])
    total = int(s.offsets[-1])
    r = partitions_of(s)[2]

    def both(x: Tensor) -> Tensor:
        return from_rectangles([part.sin() for part in to_rectangles(x, s, r)], s, r, total)

    x = torch.randn(total, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(both, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(both, x)
    torch.testing.assert_close(both(x), x.sin())


@pytest.mark.parametrize(("dtype", "fill"), [(torch.bool, True), (torch.int32, 3), (torch.complex64, 2)])
def test_padding_keeps_the_dtype(dtype: torch.dtype, fill: float):
    s = structure(CASES["images"])
    values = torch.zeros(int(s.offsets[-1]), dtype=dtype)
    assert {part.dtype for part in to_rectangles(values, s, partitions_of(s)[1], fill)} == {dtype}


def test_which_is_chosen(free: None):
    s = structure(CASES["images"])
    few, many = near_sizes(1.0, s), near_sizes(1e-9, s)
    assert isinstance(few, Rectangles)
    assert few is near_sizes(1.0, s)
    assert len(few.counts) > 1
    assert many is None
    assert near_sizes(1.0, structure(CASES["none"])) is None
    assert near_sizes(1.0, structure([[4], [4]])) is None


def test_pairs_of_two_batches(free: None):
    """A rectangle has as many positions as the product of its longest rows; each side has rectangles of its own."""
    queries, keys = structure([[3], [9], [0], [4]]), structure([[5], [8], [2], [0]])
    r = near_sizes(1.0, queries, keys)
    assert r is not None
    first, second = sides_of(queries, r)
    assert [(*a, *b) for a, b in zip(first.sizes, second.sizes, strict=True)] == list(r.sizes)
    assert first.order is r.order
    assert sides_of(queries, r)[0] is first


def test_what_is_padded_says_so():
    s = structure([[2], [3], [2]])
    one, two, *_ = partitions_of(s)
    with forbid(padding=True):
        assert [tuple(part.shape) for part in to_rectangles(torch.zeros(7), s, two)] == [(2, 2), (1, 3)]
        with pytest.raises(AssertionError, match="no padding"):
            to_rectangles(torch.zeros(7), s, one)
