"""Whole programs on a GPU give what they give on the CPU: training steps, ensembles, packages, images, loops."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tdc
from tdc import TensorDict
from tdc.compile import load, train_step
from tdc.optim import adamw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ("cpu", "cuda")
LENGTHS = [(3, 2, 5, 4), (2, 7, 2, 4, 3, 5), (4, 2, 3, 6, 5, 5, 6, 7)]


def classifier() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    return nn.ModuleDict(
        {"body": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), "head": nn.Linear(16, 3)}
    )


def loss(net: Any, batch: Any) -> Tensor:
    return F.cross_entropy(net["head"](net["body"](batch["x"]).mean(1)), batch["label"])


def batches() -> list[TensorDict]:
    torch.manual_seed(0)
    found = []
    for lengths in LENGTHS * 2:
        x = tdc.pack([torch.randn(n, 16) for n in lengths])
        found.append(TensorDict({"x": x, "label": torch.arange(len(lengths)) % 3}, [len(lengths)]))
    return found


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_training_steps(mode: str | None):
    losses: dict[str, list[float]] = {}
    for device in DEVICES:
        torch.manual_seed(0)
        step = train_step(classifier().to(device), loss, adamw(1e-2), mode=mode if device == "cuda" else None)
        state, losses[device] = step.init(seed=0), []
        for batch in batches():
            state, metrics = step(state, batch.to(device))
            losses[device].append(metrics["loss"].item())
    torch.testing.assert_close(losses["cuda"], losses["cpu"], rtol=1e-3, atol=1e-4)


def mean_square(net: nn.Module, params: TensorDict, x: Any) -> Tensor:
    return tdc.functional_call(net, params, (x,)).square().mean()


def test_an_ensemble():
    found: list[Tensor] = []
    for device in DEVICES:
        torch.manual_seed(0)
        params = torch.stack([tdc.from_module(nn.Linear(16, 3)) for _ in range(3)]).to(device)  # type: ignore[arg-type]  # stubs say tensors
        x = batches()[0]["x"].to(device)
        one = partial(mean_square, nn.Linear(16, 3, device=device))
        grads = torch.compile(tdc.vmap(tdc.grad(one), in_dims=(0, None)), fullgraph=True)(params, x)
        found.append(torch.cat([g.flatten() for g in torch.utils._pytree.tree_leaves(grads)]).cpu())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_package(tmp_path: Path):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32)).cuda(), batches()[0]["x"].cuda()
    dynamic: Any = {"input": {"batch": ("B", 1, 16), "length": ("L", 0, 64)}}
    exported = tdc.compile.export(net, x, dynamic=dynamic)
    exported.save(tmp_path / "net.pt2", format="aoti")
    loaded = load(tmp_path / "net.pt2")
    for batch in batches()[:3]:
        rows = batch["x"].cuda()
        torch.testing.assert_close(loaded(rows).values, net(rows).values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_images(compiled: bool):
    torch.manual_seed(0)
    net: Any = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3),
        nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(1),
    )  # fmt: skip
    images = [torch.randn(3, h, w) for h, w in ((20, 31), (33, 17), (20, 31), (64, 48))]
    found = []
    for device in DEVICES:
        there, x = net.to(device), tdc.pack([i.to(device) for i in images], ragged_dim=(2, 3))
        call: Any = torch.compile(there, fullgraph=True) if compiled and device == "cuda" else there
        out = call(x)
        y = out.values if isinstance(out, tdc.NestedTensor) else out
        grads = torch.autograd.grad(y.square().sum(), list(there.parameters()))
        found.append([t.cpu() for t in (y.flatten(), *grads)])
    torch.testing.assert_close(*found, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("module", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_recurrent_nets(module: Any, compiled: bool):
    torch.manual_seed(0)
    net, x = module(16, 8, num_layers=2, bidirectional=True, batch_first=True), batches()[1]["x"]
    found = []
    for device in DEVICES:
        there, rows = net.to(device), x.to(device)
        with torch._dynamo.config.patch(allow_rnn=True):
            call = torch.compile(there, fullgraph=True) if compiled and device == "cuda" else there
            y = call(rows)[0].values
        grads = torch.autograd.grad(y.square().sum(), list(there.parameters()))
        found.append([t.cpu() for t in (y, *grads)])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def last_large(x: Tensor) -> Tensor:
    state = torch.zeros_like(x[0])
    for row in x:
        if row.sum() > 0:
            state = torch.tanh(state + row)
        else:
            state = state * 0.5
    return state


def test_code_of_one_example():
    found = [tdc.batch(last_large)(batches()[1]["x"].to(device)).cpu() for device in DEVICES]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    compiled = torch.compile(tdc.batch(last_large), fullgraph=True)
    torch.testing.assert_close(compiled(batches()[1]["x"].cuda()).cpu(), found[0], rtol=1e-4, atol=1e-5)
