"""Graphs without gradients run equal operations once, as torch's own graphs for training do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tdc
from tdc.compile import counted, report


def waves(k: int) -> Any:
    return tdc.pack([torch.randn(3 + i, 2, generator=torch.Generator().manual_seed(k + i)) for i in range(2 + k)])


def spread(x: Any) -> Tensor:
    """Each sum finds the row of every position."""
    return (x - x.mean(1, keepdim=True)).abs().sum(1) + (x * 2).sum(1) + x.amax(1)


def selected(x: Tensor) -> Tensor:
    """Each `nonzero` makes a size of its own."""
    return x[(x > 0).nonzero()[:, 0]].sum() + x[(x > 0).nonzero()[:, 0]].square().sum()


def written(x: Tensor) -> tuple[Tensor, Tensor]:
    """Equal results are tensors of their own."""
    return x.sin(), x.sin().add_(1)


def before_and_after(x: Tensor) -> Tensor:
    """A read behind a write is not the read before it."""
    y = x * 1
    first = y.cumsum(0)
    y.mul_(2)
    return first + y.cumsum(0)


@torch.no_grad()
def test_rows_of_positions_are_found_once():
    found = report(spread, waves(1), waves(3), repeats=0)
    assert found.graphs == 1
    assert [kernel.calls for kernel in found.externs if "repeat_interleave" in kernel.name] == [1]


@pytest.mark.slow  # machine code of three functions
@torch.no_grad()
@pytest.mark.parametrize("fn", [selected, written, before_and_after])
def test_what_is_not_equal_stays(fn: Callable[[Tensor], Any]):
    x = torch.tensor([1.0, -2.0, 3.0])
    run = counted(fn)
    torch.testing.assert_close(run(x), fn(x))
    torch.testing.assert_close(run(x.repeat(2)), fn(x.repeat(2)))
