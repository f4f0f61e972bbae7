"""Less memory of the device: what goes into a block waits on the host, or a budget says how much is kept."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close

import tdc
from tdc import ShapeError, UnsupportedError
from tdc.compile import checkpoint, checkpoint_blocks, counted, inductor, peak_bytes, train_step
from tdc.compile._torch.inductor import apart_in_caches
from tdc.compile._torch.remat import drop_detours
from tdc.core.dynamo import recorded_operations
from tdc.optim import sgd

pytestmark = pytest.mark.filterwarnings("ignore:.*context_fn is passed")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")  # pinned memory is that of CUDA
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


def blocks(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(count)])


def loss(net: nn.Module, x: Any) -> Tensor:
    return net(x).square().mean()


def cheap(net: nn.Sequential, **options: Any) -> nn.Module:
    return nn.Sequential(*[checkpoint_blocks(part, nn.Sequential, **options) for part in net.children()])


def copies(graph: torch.fx.Graph) -> list[str]:
    """The ways to the host and back in a graph, in order."""
    return [n.target.__name__.split(".")[0] for n in graph.nodes if "_host" in str(n.target) and n.op != "placeholder"]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_the_numbers_of_a_step(backend: str | None, device: str):
    net, x, states = blocks().to(device), torch.randn(16, 8, device=device), []
    for of in (net, cheap(net), cheap(net, offload=True)):
        step = train_step(of, loss, sgd(0.1), compile=backend is not None, backend=backend)
        state, _ = step(step.init(), x)
        states.append(step(state, x)[0]["params"].to_dict())
    assert_close(states[1], states[0])
    assert_close(states[2], states[1], rtol=0, atol=0)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kept", [False, True])
def test_the_forward_pass_does_not_wait_for_the_host(kept: bool, monkeypatch: pytest.MonkeyPatch):
    """Each block goes to the host in the forward pass and comes back in the backward pass; where nothing is computed
    again, as in parts of a batch, nothing goes there."""
    seen: list[list[str]] = []

    def note(graph: torch.fx.Graph) -> None:
        drop_detours(graph)
        seen.append(copies(graph))

    monkeypatch.setattr(inductor, "drop_detours", note)
    net, x = blocks(), torch.randn(16, 8)
    step = train_step(cheap(net, offload=True), loss, sgd(0.1), accumulate=2 if kept else 1)
    plain = train_step(net, loss, sgd(0.1), compile=False)
    with apart_in_caches(f"{time.time_ns()}"):
        found = step(step.init(), x)[0]["params"]
    assert_close(found.to_dict(), plain(plain.init(), x)[0]["params"].to_dict())
    assert seen == [[] if kept else ["to_host"] * 3 + ["from_host"] * 3]


def test_eagerly_torch_keeps_the_copies():
    """Of a block that keeps nothing, what went in, and of an accelerator in pinned memory."""
    x = torch.randn(4, 8, requires_grad=True)
    block = checkpoint(lambda x: x.sin().cos(), offload=True)
    with torch.no_grad():
        assert torch.ops.aten.copy_.default not in recorded_operations(lambda: block(x))
    assert torch.ops.aten.copy_.default in recorded_operations(lambda: block(x))


def test_whole_numbers_and_shapes_stay():
    x, i = torch.randn(4, 8).t(), torch.tensor([1, 0])
    block = checkpoint(lambda x, i, n: (x[i] * n).sin(), offload=True)
    graph = torch.compile(lambda x: block(x, i, 3), backend="aot_eager", fullgraph=True)
    leaf = x.clone().requires_grad_()
    want = torch.autograd.grad((leaf[i] * 3).sin().sum(), leaf)[0]
    assert_close(torch.autograd.grad(graph(leaf).sum(), leaf)[0], want)


def test_devices_of_the_operations():
    with FakeTensorMode():
        x = torch.empty(3, 4, device="cuda").t()
        host: Tensor = torch.ops.tdc.to_host(x)
        back: Tensor = torch.ops.tdc.from_host(host, x.device)
    assert (host.device.type, back.device.type) == ("cpu", "cuda")
    assert host.stride() == back.stride() == x.stride()


@pytest.mark.sweep
@pytest.mark.slow
def test_a_stock_encoder_of_ragged_batches():
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    net, results = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), []
    batch = tdc.pack([torch.randn(n, 8) for n in (4, 1, 6)])
    for of in (net, checkpoint_blocks(net, nn.TransformerEncoderLayer, offload=True)):
        step = train_step(of, lambda net, x: net(x).values.square().mean(), sgd(0.1), backend="aot_eager")
        results.append(step(step.init(), batch)[0]["params"].to_dict())
        assert (step.counts.graphs, step.counts.breaks) == (1, 0)
    assert_close(results[1], results[0])


# -- a budget of activations


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", ["inductor", tdc.compile.backend])
def test_a_budget_keeps_less(name: Any):
    """For a backward pass outside of the graph; each budget has kernels of its own."""
    net, x, peaks = blocks(6), torch.randn(256, 8), []
    for budget in (1.0, 0.5):
        run = counted(lambda x: loss(net, x), backend=name, options={"activation_memory_budget": budget})
        run(x).backward()
        peaks.append(peak_bytes(lambda run=run: run(x).backward()))
    assert peaks[1] < 0.8 * peaks[0]


def test_budgets_that_are_none():
    for wrong in (1.5, "half"):
        with pytest.raises(ShapeError, match=r"activation_memory_budget from 0 to 1, got .*\nhint: options="):
            counted(torch.relu, options={"activation_memory_budget": wrong})
    with pytest.raises(UnsupportedError, match=r"one graph of both passes, got activation_memory_budget\nhint: check"):
        train_step(blocks(), loss, sgd(0.1), options={"activation_memory_budget": 0.5})
