"""`buckets=`: values and gradients of operations that write at positions, or join whole batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from filled_batches import poison, ragged
from torch import Tensor, nn

from tdc.compile import Buckets, counted
from tdc.core.errors import UnsupportedError
from tdc.testing import assert_close

BATCHES = ((3, 17, 2), (9, 4, 19), (5, 2, 13))
GIVEN = Buckets(rows=(4,), totals=(24, 40), lengths=(24,))
PLANE, BILINEAR = torch.randn(1, 2, 5, 5).double(), nn.Bilinear(4, 4, 3).double()


def ids(x: Any) -> Tensor:
    """Numbers below 9 by element."""
    return (x.values[:, 0] * 1000).long() % 9


def columns(x: Any) -> Tensor:
    return ids(x)[:, None].expand(-1, 4)


def square(x: Any, near: float = 4.0) -> Tensor:
    """A positive definite matrix whose sides are the packed elements."""
    return x.values @ x.values.T + near * torch.eye(len(x.values), dtype=x.dtype)


def reduced(how: str, include_self: bool) -> Any:
    return lambda x: torch.ones(9, 4).double().index_reduce(0, ids(x), x.values, how, include_self=include_self)


def scattered(how: str, include_self: bool) -> Any:
    def run(x: Any) -> Tensor:
        return torch.ones(9, 4).double().scatter_reduce(0, columns(x), x.values, how, include_self=include_self)

    return run


FUNCTIONS: dict[str, Any] = {
    "index_reduce mean": reduced("mean", False), "index_reduce amax": reduced("amax", True),
    "scatter mean": scattered("mean", True), "scatter mean of new": scattered("mean", False),
    "scatter amin of new": scattered("amin", False), "scatter sum of new": scattered("sum", False),
    "bilinear": lambda x: BILINEAR(x.values, x.values.sin()),
    "bilinear of rows": lambda x: BILINEAR(x, x.sin()).sum(1),
    "logdet": lambda x: torch.logdet(square(x)), "inverse": lambda x: torch.linalg.inv_ex(square(x)).inverse.sum(0),
    "cholesky": lambda x: torch.linalg.cholesky_ex(square(x)).L.square().sum(0),
    "solve": lambda x: torch.linalg.solve_ex(square(x), x.values).result,
    "triangular": lambda x: torch.linalg.solve_triangular(square(x).tril(), x.values, upper=False),
    "matrix_exp": lambda x: torch.linalg.matrix_exp(square(x) / 99).sum(1),
    "sampled": lambda x: F.grid_sample(PLANE, x.values[None, None, :, :2], align_corners=False),
    "median": lambda x: x.values.median(0).values + x.values.median(),
    "third": lambda x: x.values.kthvalue(3, 0).values,
    "products of rows": lambda x: ((x @ x.transpose(1, 2)).softmax(2) @ x).sum(1),
}  # fmt: skip


@pytest.mark.cases(4, 8)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore:index_reduce")
def test_values_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch):
    poison(monkeypatch)

    def loss(x: Any) -> Tensor:
        return FUNCTIONS[name](x).square().sum()

    run = counted(loss, backend="aot_eager", buckets=GIVEN)
    for lengths in BATCHES:
        x = ragged(*lengths).double()
        x.values.requires_grad_()
        want, got = loss(x), run(x)
        assert_close(got, want, rtol=1e-6, atol=1e-9)
        wrt = [x.values, *BILINEAR.parameters()]
        grads = [torch.autograd.grad(y, wrt, materialize_grads=True, allow_unused=True) for y in (got, want)]
        assert_close(*grads, rtol=1e-6, atol=1e-9)
    assert run.counts.compiles == 1


BAGS: dict[str, Any] = {
    "sum": lambda x, w: F.embedding_bag(x, w, mode="sum"), "mean": lambda x, w: F.embedding_bag(x, w, padding_idx=2),
    "max": lambda x, w: F.embedding_bag(x, w, mode="max"),
    "weighted": lambda x, w: F.embedding_bag(x, w, mode="sum", per_sample_weights=(x + 1).to(w.dtype).reciprocal()),
}  # fmt: skip


@pytest.mark.cases(1, 3)
@pytest.mark.parametrize("mode", BAGS)
def test_embedding_bag(mode: str, monkeypatch: pytest.MonkeyPatch):
    """Bags of real indices, some of them empty, and the gradient of the table."""
    poison(monkeypatch)
    table = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)

    def loss(x: Any) -> Tensor:
        return BAGS[mode](x, table).pow(3).mean()

    run = counted(loss, backend="aot_eager", buckets=GIVEN)
    for lengths in ((3, 0, 17, 2), (9, 4, 0, 19), (0, 2, 13, 0)):
        x = ragged(*lengths)
        x = x.with_values(ids(x))
        want, got = loss(x), run(x)
        assert_close(got, want, rtol=1e-6, atol=1e-9)
        assert_close(*[torch.autograd.grad(y, table) for y in (got, want)], rtol=1e-6, atol=1e-9)
    assert run.counts.compiles == 1


def test_bags_by_plain_offsets_are_refused():
    run = counted(lambda x: F.embedding_bag(ids(x), torch.ones(9, 4), x.offsets[:-1]), backend="eager", buckets=GIVEN)
    with pytest.raises(UnsupportedError, match="pass the NestedTensor"):
        run(ragged(3, 17, 2))
