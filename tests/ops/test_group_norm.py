"""Group norm and instance norm over positions: each example alone, all derivatives, one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tdc
from tdc.compile import counted

LENGTHS = (3, 0, 5, 2)
DOUBLE = torch.float64
GROUPS = pytest.mark.parametrize("groups", [1, 2, 8])  # 8: channels of their own
AFFINE = pytest.mark.parametrize("affine", [(True, True), (False, True), (True, False), (False, False)])


@pytest.fixture(params=["channels innermost", "positions innermost", "some of the channels", "some of the positions"])
def x(request: pytest.FixtureRequest) -> Tensor:
    x = torch.randn(10, 16, dtype=DOUBLE) + 3
    return {
        "channels innermost": x[:, :8].contiguous(), "positions innermost": x[:, :8].t().contiguous().t(),
        "some of the channels": x[:, ::2], "some of the positions": x.repeat(2, 1).t().contiguous().t()[5:15, :8],
    }[request.param]  # fmt: skip


def weights(affine: tuple[bool, bool]) -> list[Tensor | None]:
    return [torch.randn(8, dtype=DOUBLE, requires_grad=True) if has else None for has in affine]


def ours(x: Tensor, weight: Any, bias: Any, groups: int) -> Tensor:
    batch = tdc.pack([torch.empty(8, n, dtype=x.dtype) for n in LENGTHS], ragged_dim=2)
    return F.group_norm(batch.with_values(x.t()), groups, weight, bias).values.t()


def each(x: Tensor, weight: Any, bias: Any, groups: int) -> Tensor:
    """Every example alone; torch (2.13) has no gradient of a bias without a weight."""
    weight = torch.ones(8, dtype=x.dtype) if weight is None else weight
    rows = [row for row in x.split(LENGTHS) if len(row)]
    return torch.cat([F.group_norm(row.t()[None], groups, weight, bias)[0].t() for row in rows])


@GROUPS
@AFFINE
def test_numbers_and_gradients(x: Tensor, groups: int, affine: tuple[bool, bool]):
    learned = [x.requires_grad_(), *weights(affine)]
    leaves = [t for t in learned if t is not None]
    found = [fn(*learned, groups) for fn in (ours, each)]
    torch.testing.assert_close(*found)
    grad = torch.randn(10, 8, dtype=DOUBLE)
    torch.testing.assert_close(*[torch.autograd.grad(y, leaves, grad) for y in found])


@pytest.mark.cases(1, 1)
@GROUPS
@AFFINE
def test_higher_derivatives(x: Tensor, groups: int, affine: tuple[bool, bool]):
    learned = [x.requires_grad_(), *weights(affine)]
    leaves = [t for t in learned if t is not None]

    def run(*given: Tensor) -> Tensor:
        left = iter(given)
        return ours(*[None if t is None else next(left) for t in learned], groups)

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_members_of_a_vmap(x: Tensor):
    both = torch.stack([x, x + 1])
    found = torch.func.vmap(ours, (0, None, None, None))(both, None, None, 2)
    torch.testing.assert_close(found, torch.stack([ours(t, None, None, 2) for t in both]))


def images(*sizes: tuple[int, int], dtype: torch.dtype = torch.float32) -> tdc.NestedTensor:
    return tdc.pack([torch.randn(8, *size).to(dtype) for size in sizes], ragged_dim=(2, 3))


MODULES = {
    "group norm": lambda: nn.GroupNorm(2, 8),
    "instance norm": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_by_themselves(name: str, dtype: torch.dtype):
    model, x = MODULES[name]().to(dtype), images((40, 50), (60, 30), dtype=dtype)
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    for got, image in zip(model(x), x.unbind(), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, MODULES[name]().to(dtype)(image[None])[0], **close)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", MODULES)
def test_one_graph_for_all_sizes(name: str):
    model = MODULES[name]()
    step = counted(lambda x: model(x).values, backend="aot_eager", fullgraph=True)
    for sizes in (((3, 4), (5, 2)), ((40, 50), (60, 30), (8, 8)), ((1, 1), (1, 2))):
        x = images(*sizes)
        leaf = x.values.requires_grad_()
        found = [run(x) for run in (step, lambda x: model(x).values)]
        torch.testing.assert_close(*found)
        torch.testing.assert_close(*[torch.autograd.grad(y.pow(3).sum(), leaf) for y in found])
    assert (step.counts.graphs, step.counts.compiles) == (1, 1)


def test_no_images_of_any_size():
    for x in (images((0, 4), (0, 2)), tdc.pack([torch.randn(8, 0)], ragged_dim=2)):
        assert F.group_norm(x, 2).values.shape == (8, 0)
