"""Numbers that vary among the arguments of functions of `tdc.batch`: the values of eager, in a graph."""

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


def begins(x: Tensor, n: int) -> Tensor:
    return x[:n].sum() + x[n:].mean()


def of_a_row(x: Tensor, n: int) -> Tensor:
    return x[1, :n].sum() + x[0][n:].sum() + x[0][..., :n].sum()


def of_features(x: Tensor, n: int) -> Tensor:
    return x[:, :n].sum()


@pytest.mark.skipif(OLD, reason="Dynamo of torch 2.11 compares no symbol by `is`")
@pytest.mark.parametrize("fn", [begins, of_a_row, of_features])
def test_an_int_that_varies_in_an_index(fn: Any):
    rows = tdc.pack([torch.randn(n, 6) for n in (7, 6, 9)])
    run = counted(tdc.batch(fn), backend="eager")
    for n in (2, 3, 5, 4):
        assert_close(run(rows, n), torch.stack([fn(row, n) for row in rows.unbind()]))
    assert run.counts.compiles <= 2


def times(x: Tensor, n: Any) -> Tensor:
    return x.sum() * n


@pytest.mark.skipif(OLD, reason="Dynamo of torch 2.11 has other words")
def test_an_int_that_varies_beside_a_number_of_each_example():
    run = counted(tdc.batch(times), backend="eager")
    run(X, 2)
    with pytest.raises(tdc.UnsupportedError, match=r"expected ints that stay .*\nhint: pass torch.tensor\(n\)"):
        run(X, 3)
    for k in (torch.tensor(2), torch.tensor(3)):
        assert_close(run(X, k), torch.stack([row.sum() * k for row in X.unbind()]))
