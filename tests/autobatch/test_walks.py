"""What a `for` counts: the numbers of a `range` whose bounds each example has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tdc


GRAPHS = [None, "eager"]


def run(fn: Any, backend: str | None) -> Any:
    torch.compiler.reset()
    return fn if backend is None else torch.compile(lambda *args: fn(*args), backend=backend, fullgraph=True)


def up(n: Tensor) -> Any:
    c = 0
    for _ in range(5, n):
        c += 1
    return c


def down(n: Tensor) -> Any:
    c = 0
    for i in range(n, 0, -1):
        c += i
    return c


def large(n: Tensor) -> Any:
    c = 0
    for i in range(n, 9):
        c += i * 1_000_000_000
    return c


def far(n: Tensor) -> Any:
    c = 0
    for i in reversed(range(-100, n, 25)):
        c += i * 100
    return c


BOUNDS = {
    up: ([0, 3, 7], torch.uint8),
    down: ([0, 3, 7], torch.uint8),
    large: ([0, 3, 7], torch.int32),
    far: ([100, 50], torch.int8),
}


@pytest.mark.parametrize("backend", GRAPHS)
@pytest.mark.parametrize("fn", BOUNDS)
def test_bounds_of_small_dtypes(fn: Any, backend: str | None):
    """Found by hand: numbers of `range` wrapped around."""
    numbers, dtype = BOUNDS[fn]
    n = torch.tensor(numbers, dtype=dtype)
    found = run(tdc.batch(fn).map, backend)(n)
    assert found.dtype == torch.int64
    assert found.tolist() == [fn(k) for k in n]
