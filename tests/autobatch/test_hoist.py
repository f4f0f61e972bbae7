"""What a loop computes of its items alone is computed for all items at once, where that changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import tdc
from tdc.testing import assert_batched_equal

G = torch.Generator().manual_seed(0)


def drawn(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=G)


W, U, B = drawn(3, 3).requires_grad_(), drawn(3, 3).requires_grad_(), drawn(3)
ROWS = [drawn(n, 3) for n in (3, 1, 0, 5, 2)]


@tdc.batch
def chain(xs: Tensor) -> Tensor:
    h = torch.zeros_like(B)
    for x in xs:
        twice = x * 2
        inner = torch.relu(twice @ W)
        small = x - 1
        h = torch.tanh(F.linear(inner, U, B) + h @ U) + small
    return h


@tdc.batch
def pairs(xs: Tensor) -> tuple[Tensor, Tensor]:
    h = g = torch.zeros_like(B)
    for a, b in torch.stack([xs, xs * 2], 1):
        g = a @ W + b @ U
        h = torch.tanh(g + h @ U)
        if h.sum() > 1:
            continue
        h = h + g
    return h, g


@tdc.batch
def breaks(xs: Tensor) -> tuple[Tensor, Tensor]:
    h = x = torch.zeros_like(B)
    for x in reversed(xs):
        h = torch.tanh(x @ W + h @ U)
        if h.sum() > 1:
            break
    return h, x


@tdc.batch
def nested(xs: Tensor) -> Tensor:
    h = torch.zeros_like(B)
    for _ in range(2):
        for x in xs:
            h = torch.tanh(x @ W + h @ U)
    return h


@tdc.batch
def collects(xs: Tensor) -> Any:
    out = [torch.zeros_like(B)]
    for x in xs:
        out.append(torch.tanh(x @ W + out[-1] @ U))
    return torch.stack(out)


@tdc.batch
def of_its_own(xs: Tensor) -> Tensor:
    h, w = torch.zeros_like(B), xs.sum(0)
    for x in xs:
        h = torch.tanh(x @ torch.diag(w) + x @ W + h @ U)
    return h


def gradients(out: Any) -> tuple[Tensor, ...]:
    """Of the weights, with another factor for each number of a result."""
    leaves = [x.values if isinstance(x, tdc.NestedTensor) else x for x in (out if isinstance(out, tuple) else (out,))]
    loss = sum([(x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in leaves])
    return torch.autograd.grad(loss, (W, U))


class Products(TorchDispatchMode):
    """Counts products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
        return func(*args, **(kwargs or {}))


class Cell(torch.nn.Module):
    """A cell with a layer for the item and one for the state."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.state = [torch.nn.Linear(3, 3, dtype=torch.float64) for _ in range(2)]
        self.norm = torch.nn.LayerNorm(3, dtype=torch.float64)

    @tdc.batch
    def forward(self, xs: Tensor) -> Tensor:
        h = torch.zeros_like(B)
        for x in xs:
            h = torch.tanh(self.item(x) + self.state(h)) + self.norm(x)
        return h


def test_linear_layers() -> None:
    """A layer whose calls somebody counts stays where it is."""
    cell = Cell()
    assert_batched_equal(cell, [(x,) for x in ROWS], backends=())
    with Products() as products:
        cell(tdc.pack(ROWS))
    assert products.count == 1 + 5
    cell.item.register_forward_hook(lambda *_: None)
    with Products() as products:
        cell(tdc.pack(ROWS))
    assert products.count == 2 * 5


MOVED = [chain, pairs, nested, collects, of_its_own]


QUICK = (chain,)


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "fn", [pytest.param(f, marks=[pytest.mark.slow] * (f not in QUICK)) for f in MOVED], ids=lambda f: f.__name__
)
def test_moved(fn: Any) -> None:
    assert "ahead" in fn.tree
    assert_batched_equal(fn, [(x,) for x in ROWS], backends=())
    torch.compiler.reset()
    graph, batch = torch.compile(fn, backend="eager", fullgraph=True), tdc.pack(ROWS)
    for found, want in zip(gradients(graph(batch)), gradients(fn(batch)), strict=True):
        assert_close(found, want)


def test_tree() -> None:
    assert_expected_inline(chain.tree, """\
block () -> (h)
    h = torch.zeros_like(B)
for x in xs
    ahead twice = x * 2
    ahead inner = torch.relu(twice @ W)
    ahead __v1 = F.linear(inner, U, B)
    block (x, __v1, h) -> (small, h)
        small = x - 1
        h = torch.tanh(__v1 + h @ U) + small
return h""")  # fmt: skip


@tdc.batch
def changed_weight(xs: Tensor) -> Tensor:
    h, w = torch.zeros_like(B), W
    for x in xs:
        h = torch.tanh(x @ w + h)
        w = w * 0.5
    return h


@tdc.batch
def changed_item(xs: Tensor) -> Tensor:
    h = torch.zeros_like(B)
    for x in xs:
        x = x + h
        h = torch.tanh(x @ W)
    return h


@tdc.batch
def of_the_round_before(xs: Tensor) -> Tensor:
    h = a = torch.zeros_like(B)
    for x in xs:
        h = torch.tanh(a + h @ U)
        a = x * B
    return h + a


@tdc.batch
def behind_a_test(xs: Tensor) -> Tensor:
    h = torch.zeros_like(B)
    for x in xs:
        if x.sum() > 0:
            h = h + x @ W
    return h


@tdc.batch
def in_an_arm(xs: Tensor) -> Tensor:
    h = torch.zeros_like(B)
    for x in xs:
        h = h + torch.log(x @ W) if (x @ W > 0).all() else h
    return h


@tdc.batch
def without_gradient(xs: Tensor) -> Tensor:
    h = torch.zeros_like(B)
    for x in xs:
        with torch.no_grad():
            a = x @ W
        h = torch.tanh(a + h @ U)
    return h


@pytest.mark.parametrize(
    "fn",
    [breaks, changed_weight, changed_item, of_the_round_before, behind_a_test, in_an_arm, without_gradient],
    ids=lambda f: f.__name__,
)
def test_not_moved(fn: Any) -> None:
    assert "ahead" not in fn.tree
    assert_batched_equal(fn, [(x,) for x in ROWS], backends=())


def test_one_product_for_all_rows() -> None:
    with Products() as products:
        nested(tdc.pack(ROWS))
    assert products.count == 2 * (1 + max([len(x) for x in ROWS]))


def test_rows_that_nobody_comes_to() -> None:
    """A row behind `break` may be infinite: the weights have finite gradients all the same."""
    bad = torch.stack(
        [torch.full((3,), float("inf")), torch.linalg.solve(W.detach().T, torch.full((3,), 9.0).double())]
    )
    assert torch.tanh(bad[1] @ W).sum() > 1
    assert_batched_equal(breaks, [(bad,), (ROWS[0],)], backends=())
