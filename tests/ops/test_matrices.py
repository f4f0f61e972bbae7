"""Products of a matrix of each example by another, eagerly and in one graph for all lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tdc

DOUBLE = torch.float64
LENGTHS = ((3, 0, 5), (2, 7), (1, 1, 4, 6))
Run = Callable[[Any, Any, Any], Any]
PRODUCTS: dict[str, tuple[Run, Run]] = {  # of a batch, weights and pair maps; of one example
    "x @ w": (lambda x, w, p: torch.matmul(x, w), lambda x, w, p: x @ w),
    "x.T @ x": (lambda x, w, p: torch.matmul(x.mT, x), lambda x, w, p: x.T @ x),
    "x @ x.T": (lambda x, w, p: torch.matmul(x, x.mT), lambda x, w, p: x @ x.T),
    "p @ x": (lambda x, w, p: torch.matmul(p, x), lambda x, w, p: p @ x),
    "p.T @ x": (lambda x, w, p: torch.matmul(p.mT, x), lambda x, w, p: p.T @ x),
    "x.T @ p": (lambda x, w, p: torch.matmul(x.mT, p), lambda x, w, p: x.T @ p),
    "p @ p": (lambda x, w, p: torch.matmul(p, p), lambda x, w, p: p @ p),
    "columns first": (lambda x, w, p: torch.einsum("bld,bde->bel", x, w), lambda x, w, p: (x @ w).T),
    "weights first": (lambda x, w, p: torch.einsum("bed,bld->lbe", w, x), lambda x, w, p: x @ w.T),
    "the batch last": (lambda x, w, p: torch.einsum("bld,bmd->mlb", x, x * 2), lambda x, w, p: 2 * x @ x.T),
}


def given(lengths: tuple[int, ...], dtype: torch.dtype = DOUBLE, features: int = 4) -> list[Any]:
    """A batch, weights of each example, and pair maps."""
    g = torch.Generator().manual_seed(sum(lengths))
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=DOUBLE).to(dtype)  # noqa: E731
    x, p = [draw(n, features) for n in lengths], [draw(n, n) for n in lengths]
    return [tdc.pack(x), draw(len(lengths), features, features), tdc.pack(p, ragged_dim=(1, 2))]


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE, torch.complex128, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_each_example_by_itself(name: str, dtype: torch.dtype):
    run, alone = PRODUCTS[name]
    x, w, p = given(LENGTHS[0], dtype)
    y = run(x, w, p)
    want = [alone(*row) for row in zip(x.unbind(), w.unbind(), p.unbind(), strict=True)]
    for one, other in zip(y.unbind(0 if isinstance(y, Tensor) else y.structure.batch_dim), want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["x @ w", "x.T @ x"])
@pytest.mark.parametrize("lengths", [(), (0, 0), (2,) * 1500])
def test_nothing_and_many(name: str, lengths: tuple[int, ...]):
    x = tdc.NestedTensor(torch.randn(sum(lengths), 4), tdc.offsets_of(torch.tensor(lengths, dtype=torch.int64)))
    w = torch.randn(len(lengths), 4, 4)
    run, alone = PRODUCTS[name]
    for learns in (False, True):
        y = run(x.with_values(x.values.clone().requires_grad_(learns)), w, None)
        want = [alone(a, b, None) for a, b in zip(x.unbind(), w, strict=True)]
        assert len(y) == len(want)
        torch.testing.assert_close(y.unbind(), want)


def test_operands_that_do_not_fit():
    x, w, _ = given(LENGTHS[0])
    with pytest.raises(tdc.ShapeError, match="one size for dim"):
        torch.bmm(x, torch.cat((w, w)))
    with pytest.raises(RuntimeError, match="scalar type"):
        torch.bmm(x, w.float())
