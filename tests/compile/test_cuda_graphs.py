"""What CUDA graphs ask of a step, read off its graph on a device that is not the host.

Tensors of "meta" stand for it, since autograd takes no CUDA tensors without a GPU, not even those without data.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from versions import OLD

from tdc import TensorDict
from tdc.compile import counted, train_step
from tdc.nn import KVCache
from tdc.optim import adamw, chain, clip_by_global_norm, cosine, ema

pytestmark = pytest.mark.skipif(OLD, reason="torch 2.11 has no batch_norm of meta tensors under torch.func.grad")
guards: Any = import_module("torch._guards")
METRICS = ("loss", "grad_norm", "lr", "rows", "skipped", "finite")


class Drawn:
    """In place of the generators of a device that has none."""

    def __init__(self, *args: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: Any) -> None:
        pass


def plain(net: nn.Module, batch: Any) -> Tensor:
    return (net(batch["x"]) - batch["y"]).square().mean()


def of_the_host(net: nn.Module, batch: Any) -> Tensor:
    return plain(net, batch) * torch.ones(())


def graph_of(monkeypatch: pytest.MonkeyPatch, loss: Any = plain, **options: Any) -> tuple[Any, set[int], int]:
    """The graph of a step as it is lowered, the inputs whose addresses stay, and the number of leaves of the state."""
    found: list[Any] = []

    def keep(module: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append((module, set(guards.TracingContext.get().fw_metadata.static_input_indices)))
        return module

    monkeypatch.setattr(import_module("tdc.compile.train_step"), "seeded", Drawn)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = chain(clip_by_global_norm(1.0), adamw(cosine(0.1, 10, 2)))
    asked: Any = {"metrics": METRICS, "skip_nonfinite": True, "average": ema(0.9), "donate": True, **options}
    step = train_step(net.to("meta"), loss, optimizer, backend=aot_autograd(fw_compiler=keep), **asked)
    batch = TensorDict({"x": torch.empty(6, 8), "y": torch.empty(6, 3)}, [6]).to("meta")
    state = step.init(seed=0)
    assert state["rng"].device.type == "cpu"
    for _ in range(2):
        step(state, batch)
    assert step.counts.compiles == 1
    ((module, static),) = found
    return module, static, len(state._leaves) - 1


def on_the_host(module: Any) -> list[str]:
    """The tensors of the CPU in a graph."""
    nodes = [n for n in module.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    return [n.name for n in nodes if n.meta["val"].device.type == "cpu"]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"accumulate": 2}, marks=pytest.mark.slow)], ids=["whole", "parts"]
)
def test_nothing_is_on_the_host(monkeypatch: pytest.MonkeyPatch, options: Any):
    """No tensor of the CPU, among them the seed, no number read, and random numbers of the device."""
    module, _, _ = graph_of(monkeypatch, **options)
    assert len(module.graph.nodes) > 100
    assert on_the_host(module) == []
    targets = [str(n.target) for n in module.graph.nodes]
    assert [t for t in targets if "_local_scalar_dense" in t or "item" in t.split(".") or "nonzero" in t] == []
    assert [t for t in targets if "dropout" in t or "rand" in t or "bernoulli" in t] != []


@pytest.mark.slow
def test_the_state_stays_where_it_is(monkeypatch: pytest.MonkeyPatch):
    """Each leaf is an input whose address is marked; those of the batch are not."""
    module, static, leaves = graph_of(monkeypatch)
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    assert len(static) == leaves == len(inputs) - 2
    written = [n for n in module.graph.nodes if n.target is torch.ops.aten.copy_.default]
    assert {n.args[0].name for n in written} <= {inputs[i].name for i in static}


def test_a_cache_stays_where_it_is():
    """A step of decoding writes only into inputs whose addresses are marked, for each number of rows."""
    found: list[Any] = []

    def keep(module: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append((module, set(guards.TracingContext.get().fw_metadata.static_input_indices)))
        return module

    def decode(cache: Any, x: Tensor) -> Any:
        cache = cache.append_(x, x)
        return cache, cache.attend(x)

    step = counted(decode, backend=aot_autograd(fw_compiler=keep, keep_inference_input_mutations=True))
    for rows in (2, 3, 4):
        cache, x = KVCache.allocate(rows, 8, heads=1, head_dim=4, device="meta"), torch.ones(rows, 1, 1, 4).to("meta")
        with torch.no_grad():
            assert step(cache, x)[0].key is cache.key
    assert step.counts.compiles == 2  # one for the first number of rows, one for all others
    for module, static in found:
        inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
        written = {n.args[0] for n in module.graph.nodes if n.target is torch.ops.aten.copy_.default}
        assert written == {inputs[i] for i in static}
        assert len(written) == 2
        assert on_the_host(module) == []


@pytest.mark.sweep
@pytest.mark.slow
def test_what_is_on_the_host_is_found(monkeypatch: pytest.MonkeyPatch):
    module, _, _ = graph_of(monkeypatch, of_the_host)
    assert len(on_the_host(module)) == 1
