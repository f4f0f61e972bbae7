"""Operators of Python between containers and with numbers, in graphs: the numbers of eager calls."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

import tdc
from tdc.compile import counted

SQUARES = tdc.pack([torch.rand(n, 2, 2) + 1 for n in (3, 0, 2)])
OTHERS = tdc.pack([torch.rand(n, 2, 2) + 1 for n in (1, 4, 2)])
TD = tdc.TensorDict({"x": torch.rand(3, 2, 2) + 1}, [3, 2, 2])
TWO: Any = tdc.pack([SQUARES, OTHERS])
BATCHES: dict[str, Any] = {"nested": SQUARES, "masked": SQUARES.to_padded(), "two levels": TWO, "tensordict": TD}
SLOW = ("masked", "two levels")  # seconds of tracing
FLOATS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq", "lt", "ge")
INTS = ("and_", "or_", "xor", "lshift", "rshift")
NUMBERS = ("mul", "mod", "pow", "eq", "lt")  # beside a batch: the others go the same way
IN_PLACE = ("iadd", "ipow", "iand")


def all_of(x: Any, y: Any, n: int) -> list[Any]:
    """The results of operators."""
    i, j = x.long(), y.long()
    made = [-x, abs(x), ~i, +x]
    made += [getattr(operator, name)(x, y) for name in FLOATS] + [getattr(operator, name)(i, j) for name in INTS]
    made += [getattr(operator, name)(x, n) for name in NUMBERS] + [n - x, n**x]
    return made + [getattr(operator, name)(i * 1, j) for name in IN_PLACE]


def products(x: Any, y: Any) -> list[Any]:
    """The matrix products of operators."""
    z = x * 1
    z @= y
    return [x @ y, z, x @ x.mT, (x @ y) ** 2]


@pytest.mark.parametrize("kind", ["nested", "tensordict", *[pytest.param(k, marks=pytest.mark.slow) for k in SLOW]])
def test_operators(kind: str):
    x = BATCHES[kind]
    run = counted(all_of, backend="eager")
    tdc.testing.assert_close(run(x, x + 0.5, 2), all_of(x, x + 0.5, 2))
    assert run.counts.graphs == 1


@pytest.mark.parametrize("kind", ["nested", "masked"])
def test_matrix_products(kind: str):
    x = BATCHES[kind]
    run = counted(products, backend="eager")
    for y in (x, x.flip(0)):
        tdc.testing.assert_close(run(y, y + 1), products(y, y + 1))
    assert run.counts.compiles == 1
