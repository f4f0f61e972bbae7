"""Forms of operations that serve all sizes under vmap: values and derivatives are those of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import hessian
from torch.testing import assert_close

from tdc.compile import any_size

ROWS = torch.tensor([0, 2, 2])
EACH = torch.tensor([[0, 2], [1, 1], [0, 0]])
CALLS: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
    "index_select": lambda t: (t, 1, ROWS), "index_add": lambda t: (t, -1, ROWS, t[:, :3] * 2),
    "gather": lambda t: (t, 1, EACH[:2]), "scatter_add": lambda t: (t, 1, EACH, t[:3, :2] * 2),
    "scatter_reduce": lambda t: (t, 0, EACH, t[:3, 1:3] * 2, "amax"), "layer_norm": lambda t: (t, (5,), t[0], t[1]),
}  # fmt: skip


def forms(name: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    return getattr(any_size, name), getattr(torch, name)


def loss(fn: Callable[..., Tensor], name: str) -> Callable[[Tensor], Tensor]:
    return lambda t: fn(*CALLS[name](t)).pow(3).sum()


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", CALLS)
def test_values_and_derivatives_of_all_members(name: str):
    t = draw(2, 3, 5)
    found, want = [torch.vmap(torch.func.grad_and_value(loss(fn, name)))(t) for fn in forms(name)]
    assert_close(found, want)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "scatter_reduce"])
def test_second_derivatives(name: str):
    """Those of `torch.func` are wrong of torch's own layer_norm (2.13)."""
    form, function = forms(name)
    found, want = torch.func.hessian(loss(form, name))(draw(3, 5)), hessian(loss(function, name), draw(3, 5))
    assert_close(found, want)


def test_indices_of_each_member():
    index, t = torch.randint(3, (4, 6), generator=torch.Generator().manual_seed(0)), draw(4, 3, 5)
    for name in ("index_select", "index_add"):

        def run(fn: Callable[..., Tensor], t: Tensor, i: Tensor, name: str = name) -> Tensor:
            more = (t[torch.tensor([0, 1, 2, 0, 1, 2])],) if name == "index_add" else ()
            return fn(t, 0, i, *more).pow(3).sum()

        found, want = [torch.vmap(torch.func.grad(lambda t, i, fn=fn: run(fn, t, i)))(t, index) for fn in forms(name)]
        assert_close(found, want)


def test_gradients_of_equal_extremes_go_in_equal_parts():
    inf = float("inf")
    src = torch.tensor([[1.0, 2.0], [1.0, -3.0], [inf, 2.0], [4.0, 2.0], [inf, -inf]], requires_grad=True)
    index, start = torch.tensor([0, 0, 1, 1, 1])[:, None].expand(5, 2), torch.full((3, 2), -inf)
    found, want = [fn(start, 0, index, src, "amax") for fn in forms("scatter_reduce")]
    assert_close(found, want)
    assert_close(*[torch.autograd.grad(out, src, draw(3, 2).float())[0] for out in (found, want)])


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("index_add", (torch.zeros(3), 0, torch.tensor([0]), torch.ones(1, dtype=torch.float64))),
        ("index_select", (torch.zeros(3), 1, torch.tensor([0]))),
        ("gather", (torch.zeros(3), 0, torch.tensor([[0]]))),
        ("gather", (torch.zeros(3, 5), 0, torch.tensor([0]))),
        ("scatter_add", (torch.zeros(3, 5), 0, torch.tensor([0]), torch.ones(1))),
        ("layer_norm", (torch.zeros(3, 5), (5,), torch.ones(1))),
        ("layer_norm", (torch.zeros(3, 5), (5,), torch.ones(3, 5))),
        ("layer_norm", (torch.zeros(3, 5), (5,), torch.ones(5, dtype=torch.float64))),
    ],
)
def test_what_torch_refuses_is_refused(name: str, args: tuple[Any, ...]):
    for fn in forms(name):
        with pytest.raises((RuntimeError, IndexError)):
            fn(*args)
