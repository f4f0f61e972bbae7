"""Images moved along one of two ragged dims or both: as each image alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tdc

SIZES = [(3, 4), (0, 2), (5, 1), (2, 0), (4, 4)]


def images(dtype: torch.dtype = torch.float64, sizes: Any = SIZES) -> Any:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(2, h, w, generator=generator, dtype=dtype) for h, w in sizes]
    return tdc.pack(rows, ragged_dim=(2, 3))


def random_slice(draw: random.Random) -> slice:
    step = draw.choice([None, 1, 2, 3, -1, -1, -2, 9, -9, sys.maxsize, -(2**70)])
    begin, end = [draw.choice([None, None, draw.randint(-6, 6)]) for _ in range(2)]
    return slice(begin, end, step)


def random_layout(draw: random.Random, values: Tensor) -> Tensor:
    """The same values elsewhere: behind others, apart from one another, in another order of dims."""
    axes = draw.sample(range(values.ndim), values.ndim)
    other = values.permute(axes).contiguous().permute([axes.index(d) for d in range(values.ndim)])
    axis = draw.randrange(values.ndim)
    apart = torch.stack([values, values], axis + 1).select(axis + 1, 1)
    behind = torch.cat([values.new_zeros(3), values.flatten()])[3:].view(values.shape)
    return draw.choice([values, other, apart, behind])


@pytest.mark.parametrize("seed", range(60))
def test_random_moves(seed: int):
    """Of examples with two or three ragged dims, dims of size 0 and static dims around them, against a loop."""
    draw, count = random.Random(seed), 2 + seed % 2
    front, behind = [[draw.randint(1, 3) for _ in range(draw.randint(0, 2))] for _ in range(2)]
    sizes = [[3] * count, *[[draw.randint(0, 5) for _ in range(count)] for _ in range(draw.randint(0, 4))]]
    rows = [torch.randn(*front, *size, *behind) for size in sizes]
    e, dims = len(front), tuple(range(1 + len(front), 1 + len(front) + count))
    packed: Any = tdc.pack(rows, ragged_dim=dims)
    x = packed.with_values(random_layout(draw, packed.values))
    slices, order = [random_slice(draw) for _ in dims], draw.sample(range(count), count)
    turned, shift, r = draw.sample(range(count), 2), draw.randint(-7, 7), draw.randrange(count)
    axes = [*range(dims[0]), *[dims[k] for k in order], *range(dims[-1] + 1, x.ndim)]
    results = [
        x[(slice(None),) * dims[0] + tuple(slices)],
        x.flip([dims[k] for k in turned]),
        x.roll(shift, dims[r]),
        x.permute(axes),
    ]

    def cropped(row: Tensor) -> Tensor:
        for axis, part in enumerate(slices, e):
            row = row.index_select(axis, torch.tensor([*range(row.shape[axis])[part]], dtype=torch.int64))
        return row

    wanted: list[Callable[[Tensor], Tensor]] = [
        cropped,
        lambda row: row.flip([e + k for k in turned]),
        lambda row: row.roll(shift, e + r),
        lambda row: row.permute([axis - 1 for axis in axes[1:]]),
    ]
    for found, want in zip(results, wanted, strict=True):
        tdc.validate(found)
        for a, row in zip(found.unbind(), rows, strict=True):
            assert torch.equal(a, want(row))


def test_ends_that_are_data():
    x, begin, end = images(), torch.tensor([-2, 1, 4, 0, -9]), torch.tensor([9, -1, 0, 2, 3])
    for step in (1, 2, -1, -2):
        found = x[:, :, begin:end:step, end::step].unbind()
        for row, a, i, j in zip(x.unbind(), found, begin.tolist(), end.tolist(), strict=True):
            lines, columns = range(row.shape[1])[i:j:step], range(row.shape[2])[j::step]
            assert torch.equal(a, row[:, [*lines]][:, :, [*columns]])
    with pytest.raises(tdc.ShapeError, match="one end for each of 5 rows"):
        x[:, :, : begin[1:]]


def test_conjugates_and_negatives():
    """Whose memory does not say what they are."""
    x = images(torch.complex128)
    for values in (x.values.conj(), x.values.conj().imag):
        found = x.with_values(values)[:, :, ::-1].flip(3).unbind()
        for a, row in zip(found, x.with_values(values.clone()).unbind(), strict=True):
            assert torch.equal(a, row.flip(1, 2))


@pytest.mark.parametrize("step", [sys.maxsize, -sys.maxsize, 2**70])
def test_steps_of_any_size(step: int):
    x = images()
    for found, row in zip(x[:, :, ::step].unbind(), x.unbind(), strict=True):
        assert torch.equal(found, row[:, :1] if step > 0 else row[:, -1:])


@pytest.mark.parametrize("step", [1.5, "a"])
def test_steps_that_are_no_whole_numbers(step: Any):
    with pytest.raises(tdc.IndexingError, match="a whole number as step of a slice"):
        images()[:, :, ::step]
