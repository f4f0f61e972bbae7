"""Losses of a training step that autograd takes and `torch.func.grad` in a graph does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from versions import refused

import tdc
from tdc import TensorDict
from tdc.compile import train_step
from tdc.compile.gradients import loss_and_gradients
from tdc.core.dynamo import with_own_graphs

G = torch.Generator().manual_seed(0)
W = torch.randn(4, 4, generator=G, dtype=torch.float64)
X = torch.randn(5, 4, generator=G, dtype=torch.float64)
FROZEN = nn.Linear(4, 4, dtype=torch.float64)


def cond(params: TensorDict, x: Tensor) -> Tensor:
    w = params["w"]
    return tdc.cond(x.sum() > 0, lambda x: torch.tanh(x @ w), lambda x: (x @ w).sin(), (x,)).square().mean()


def loops(params: TensorDict, x: Tensor) -> Tensor:
    w = params["w"]
    n, x = tdc.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, torch.tanh(h @ w)), (torch.tensor(0), x))
    return tdc.scan(lambda h, row: (torch.tanh(h @ w + row), h), x[0], x)[0].sum() * n


def recomputed(params: TensorDict, x: Tensor) -> Tensor:
    w: Any = params["w"]
    for _ in range(2):
        x = checkpoint(lambda x: torch.tanh(x @ w), x, use_reentrant=False)
    return x.square().mean()


def hooked(params: TensorDict, x: Tensor) -> Tensor:
    y = x @ params["w"]
    y.register_hook(lambda g: g * 2)
    return y.sin().sum()


def penalty(params: TensorDict, x: Tensor) -> Tensor:
    slope = tdc.grad(lambda x: (torch.tanh(x @ params["w"])).sum())(x)
    return (slope.square().sum(1) - 1).square().mean()


def closure(params: TensorDict, x: Tensor) -> Tensor:
    return FROZEN(x @ params["w"]).square().sum()


@torch.compiler.nested_compile_region
def region(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def regions(params: TensorDict, x: Tensor) -> Tensor:
    return region(params["w"], region(params["w"], x)).square().mean()


def constant(params: TensorDict, x: Tensor) -> Tensor:
    return x.sum()


LOSSES = [cond, loops, recomputed, hooked, penalty, closure, regions, constant]
UNRECORDED = {  # what `torch.func` has no gradient of, in graphs of torch 2.11
    cond: r"tdc\.cond: expected no transform of torch.func around it",
    loops: r"tdc\.while_loop: expected no transform of torch.func around it",
    regions: "Expected FakeTensor",
}


@pytest.mark.cases(1, 3)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_gradients(loss: Any) -> None:
    """Eagerly and in one graph as autograd gives them; a parameter that is not used has zeros."""
    params = TensorDict({"w": W, "unused": torch.ones(3), "count": torch.tensor(2)})
    w = W.clone().requires_grad_()
    want = loss(TensorDict({"w": w}), X)
    grad = w * 0
    if want.requires_grad:
        (grad,) = torch.autograd.grad(want, [w], allow_unused=True, materialize_grads=True)

    def both(params: TensorDict, x: Tensor) -> Any:
        return loss_and_gradients(lambda params, x: (loss(params, x), {}), params, x)

    compiled = torch.compile(with_own_graphs(both), backend="aot_eager", fullgraph=True)
    for run in (both, compiled):
        with torch.no_grad(), refused(UNRECORDED.get(loss, ""), run is compiled and loss in UNRECORDED):
            (value, _), grads = run(params, X)
            assert (grads.keys(), value.requires_grad) == (("w", "unused"), False)
            assert_close((value, grads["w"], grads["unused"]), (want.detach(), grad.detach(), torch.zeros(3)))


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo reads of every input
@pytest.mark.parametrize("compiled", [False, True])
def test_what_goes_around_the_gradients(compiled: bool) -> None:
    """Batches that somebody else differentiates, metrics and buffers that hang on the loss."""

    def loss(params: TensorDict, buffers: TensorDict, batch: tdc.NestedTensor) -> Any:
        y = (batch @ params["w"]).sum(1)
        return y.square().mean(), buffers.replace(seen=y.sum()), {"largest": y.amax(), "rows": y}

    step = train_step(loss, tdc.optim.sgd(0.1), buffers=True, compile=compiled, backend="aot_eager")
    state = step.init(TensorDict({"w": W}), buffers=TensorDict({"seen": torch.zeros((), dtype=torch.float64)}))
    source = X.clone().requires_grad_()
    batch = tdc.pack([source[:2] * 2, source[2:] * 2])
    new, metrics = step(state, batch)
    w = W.clone().requires_grad_()
    y = (batch @ w).sum(1)
    (grad,) = torch.autograd.grad(y.square().mean(), [w])
    assert_close(new["params", "w"], W - 0.1 * grad)
    assert_close((new["buffers", "seen"], metrics["largest"], metrics["rows"]), (y.sum(), y.amax(), y))
    assert not any([x.requires_grad for td in (new, metrics) for x in td.values(True, True)])
    assert source.grad is None


def test_derivative_of_a_step() -> None:
    """With grad mode on the step itself has a derivative: of the loss after it in what it began with."""
    step = train_step(lambda params, x: F.mse_loss(x @ params["w"], x), tdc.optim.sgd(0.1), compile=False)
    state = step.init(TensorDict({"w": W}))

    def after(w: Tensor) -> Tensor:
        new, _ = step.update(state.set(("params", "w"), w), X)
        return F.mse_loss(X @ new["params", "w"], X)

    w = W.clone().requires_grad_()
    (found,) = torch.autograd.grad(after(w), [w])
    assert_close(found, torch.func.grad(after)(W))
    assert found.abs().sum() > 0
