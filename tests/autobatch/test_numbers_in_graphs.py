"""Floats that vary among the arguments of functions of `tdc.batch`: the values of eager, in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from versions import OLD

import tdc
from tdc.compile import counted

X = tdc.pack([torch.tensor([1.0, 2.0]), torch.tensor([0.5, 1.0, 3.0])])


def scaled(x: Tensor, k: float) -> Tensor:
    return x.sum() * k + k - x[0] / k


def branches(x: Tensor, k: float) -> Tensor:
    return x.sum() - k if x.sum() > k else (x.sum() / k).log()


def rounds(x: Tensor, k: float) -> Tensor:
    s = x.new_zeros(())
    for v in x:
        s = s + (v * k).log() / k
    return s


def grows(x: Tensor, k: float) -> Tensor:
    s, n = x.sum(), 0
    while s < 20 * k:
        s = s * k
        n += 1
        if s > 30:
            break
    return s + n


LOOPS = [pytest.param(fn, marks=pytest.mark.slow) for fn in (rounds, grows)]  # loops take seconds to trace


@pytest.mark.skipif(OLD, reason="Dynamo of torch 2.11 compares no symbol by `is`")
@pytest.mark.parametrize("fn", [scaled, branches, *LOOPS])
def test_a_float_that_varies(fn: Any):
    """torch has no operator for floats that vary (2.11-2.15)."""
    batched = tdc.batch(fn)
    run = counted(batched, backend="eager")
    for k in (2.5, 3.5, 4.5):
        assert_close(run(X, k), torch.stack([fn(row, k) for row in X.unbind()]))
    assert run.counts.compiles <= 2
