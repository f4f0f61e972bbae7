"""What a `for` counts: numbers of `enumerate` and `range` whose bounds each example has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tdc


def enumerated(rows: Any, n: Tensor) -> Any:
    first = last = total = 0
    for i, row in enumerate(rows, n):
        first, last, total = i if last == 0 else first, i, total + row.sum() * i
    return first, last, total


def enumerated_beside(rows: Any, n: Tensor) -> Any:
    total = 0
    for (i, row), j in zip(enumerate(rows, start=n), range(5), strict=False):
        if i > 21:
            break
        total = total + row.sum() * i + j
    return total


def enumerated_alike(rows: Any, n: Tensor) -> Any:
    total = 0
    for i, k in enumerate(range(3), n):
        total = total + i * k
        if total > 60:
            return total + rows.sum()
    return total


ROWS = [torch.arange(1.0, 1 + 3 * k).reshape(k, 3) for k in (1, 2, 3)]
GRAPHS = [None, "eager"]


def run(fn: Any, backend: str | None) -> Any:
    torch.compiler.reset()
    return fn if backend is None else torch.compile(lambda *args: fn(*args), backend=backend, fullgraph=True)


@pytest.mark.cases(1, 0)
@pytest.mark.parametrize("backend", GRAPHS)
@pytest.mark.parametrize("dtype", [torch.long, torch.uint8])
@pytest.mark.parametrize("fn", [enumerated, enumerated_beside, enumerated_alike])
def test_enumerate_from_a_number_of_each_example(fn: Any, dtype: torch.dtype, backend: str | None):
    """Found by hand: the numbers were those of other examples where some had left."""
    f, n = tdc.batch(fn), torch.tensor([10, 20, 30], dtype=dtype)
    for sizes in ((0, 1, 2), (0, 0, 2), (2, 1, 1)):
        rows = [ROWS[k] for k in sizes]
        alone = [fn(x, k) for x, k in zip(rows, n, strict=True)]
        found = run(f.map, backend)(tdc.pack(rows), n)
        found = found if isinstance(found, tuple) else (found,)
        want = zip(*[x if isinstance(x, tuple) else (x,) for x in alone], strict=True)
        assert [x.tolist() for x in found] == [[float(y) for y in column] for column in want]


def test_enumerate_from_a_number_that_all_share():
    f, n = tdc.batch(enumerated), torch.tensor(250, dtype=torch.uint8)
    rows = [ROWS[2]] * 3 + [torch.ones(9, 3)]
    found = f.map(tdc.pack(rows), n, in_dims=(0, None))
    assert [x.tolist() for x in found] == [
        [float(y) for y in c] for c in zip(*[enumerated(x, n) for x in rows], strict=True)
    ]


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


@pytest.mark.cases(1, 2)
@pytest.mark.parametrize("backend", GRAPHS)
@pytest.mark.parametrize("fn", BOUNDS)
def test_bounds_of_small_dtypes(fn: Any, backend: str | None):
    """Found by hand: numbers of `range` wrapped around."""
    numbers, dtype = BOUNDS[fn]
    n = torch.tensor(numbers, dtype=dtype)
    found = run(tdc.batch(fn).map, backend)(n)
    assert found.dtype == torch.int64
    assert found.tolist() == [fn(k) for k in n]
