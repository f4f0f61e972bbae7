"""LoRA against a layer written by hand: forward, training, compiled, under vmap; what is trained and saved."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import tdc
from tdc import TensorDict, from_module, functional_call
from tdc.compile import train_step
from tdc.nn import lora_init, lora_merge, lora_unmerge
from tdc.optim import adamw, inject, partition


class ByHand(nn.Module):
    """A frozen linear layer and its low-rank correction."""

    def __init__(self, base: nn.Linear, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.base, self.a, self.b, self.scale = base.requires_grad_(False), nn.Parameter(a), nn.Parameter(b), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.a.mT) @ self.b.mT * self.scale


def nets() -> tuple[nn.Sequential, nn.Sequential, TensorDict, TensorDict]:
    """A module, the same with layers by hand, its parameters and adapters."""
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))
    params = from_module(net).apply(torch.clone)
    adapters = lora_init(params, 2, alpha=3, seed=1)
    hand = [
        ByHand(net[i], adapters[f"{i}", "weight", "a"].clone(), adapters[f"{i}", "weight", "b"].clone(), 1.5)
        for i in (0, 3)
    ]
    return net, nn.Sequential(hand[0], net[1], net[2].requires_grad_(False), hand[1]), params, adapters


def test_what_is_adapted():
    _, _, params, adapters = nets()
    assert adapters.keys(True, True) == (
        ("0", "weight", "a"), ("0", "weight", "b"), ("3", "weight", "a"), ("3", "weight", "b"),
        ("0", "weight", "scale"), ("3", "weight", "scale"),
    )  # fmt: skip
    a = adapters["0", "weight", "a"]
    assert (a.shape, adapters["3", "weight", "b"].shape) == ((2, 6), (3, 2))
    assert a.abs().max() <= 6**-0.5
    assert a.std() > 0.1
    assert lora_init(params, 2, seed=1)["0", "weight", "a"].equal(a)
    assert not lora_init(params, 2, seed=2)["0", "weight", "a"].equal(a)
    assert lora_init(params, 2, select="3.*").keys() == ("3",)
    assert lora_init(params, 2, select=lambda key, x: x.shape[0] == 5).keys() == ("0",)


@pytest.mark.cases(1, 0)
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_training_is_that_of_layers_by_hand(backend: str | None):
    net, hand, params, adapters = nets()
    data = [(torch.randn(8, 6), torch.randn(8, 3)) for _ in range(20)]
    theirs = torch.optim.AdamW([p for p in hand.parameters() if p.requires_grad], lr=0.05)

    def loss_fn(adapters: TensorDict, batch: Any) -> Tensor:
        return (functional_call(net, lora_merge(params, adapters), (batch[0],)) - batch[1]).square().mean()

    step = train_step(loss_fn, adamw(0.05), compile=backend is not None, backend=backend)
    state, before = step.init(adapters), params.apply(torch.clone)
    for batch in data:
        theirs.zero_grad()
        loss = (hand(batch[0]) - batch[1]).square().mean()
        loss.backward()
        theirs.step()
        state, metrics = step(state, batch)
        assert_close(metrics["loss"], loss.detach(), rtol=1e-4, atol=1e-5)
    for i in (0, 3):
        assert_close(state["params", f"{i}", "weight", "a"], hand[i].a.detach(), rtol=1e-3, atol=1e-4)
        assert_close(state["params", f"{i}", "weight", "b"], hand[i].b.detach(), rtol=1e-3, atol=1e-4)
    assert_close(params.to_dict(), before.to_dict(), rtol=0, atol=0)
    if backend is not None:
        assert step.counts.compiles == 1
    merged = lora_merge(params, state["params"])
    assert_close(functional_call(net, merged, (data[0][0],)), hand(data[0][0]).detach(), rtol=1e-3, atol=1e-4)
    assert_close(lora_unmerge(merged, state["params"]).to_dict(), params.to_dict())
    assert merged["2", "weight"] is params["2", "weight"]


def test_only_adapters_are_saved():
    _, _, params, adapters = nets()
    file = io.BytesIO()
    torch.save(adapters, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    changed = adapters.apply(lambda x: x + 1)
    assert loaded.keys(True, True) == adapters.keys(True, True)
    assert loaded["0", "weight", "scale"] == 1.5
    assert not lora_merge(params, changed)["0", "weight"].equal(params["0", "weight"])
    assert lora_merge(params, loaded)["0", "weight"].equal(params["0", "weight"])


@pytest.mark.parametrize("compiled", [False, True])
def test_ensembles_of_adapters(compiled: bool):
    """Many adapters of one model, each with a rate of its own; and adapters of stacked models."""
    net, _, params, _ = nets()
    members = torch.stack([lora_init(params, 2, alpha=3, seed=i) for i in range(3)])
    members = members.apply(lambda x: x + torch.randn_like(x))
    x = torch.randn(4, 6)

    def output(own: TensorDict) -> Tensor:
        return functional_call(net, lora_merge(params, own), (x,))

    mapped: Any = torch.vmap(output)
    mapped = torch.compile(mapped, backend="aot_eager", fullgraph=True) if compiled else mapped
    assert_close(mapped(members), torch.stack([output(members[i]) for i in range(3)]))
    stacked = torch.stack([params, params * 2])
    own = lora_init(stacked, 2).apply(torch.randn_like)
    assert own.batch_size == (2,)
    assert_close(lora_merge(stacked, own)[1].to_dict(), lora_merge(stacked[1], own[1]).to_dict())
    opt = inject(adamw, lr=torch.tensor([0.1, 0.0, 0.2]))
    new, _ = opt.update(members, opt.init(members), members)
    assert new[1]["0", "weight", "a"].equal(members[1]["0", "weight", "a"])


def test_convolutions_half_precision_and_groups():
    conv = nn.Conv2d(3, 4, 2)
    params = from_module(conv)
    adapters = lora_init(params, 2).apply(torch.randn_like)
    delta = lora_merge(params, adapters)["weight"] - params["weight"]
    assert_close(delta.flatten(1), adapters["weight", "b"] @ adapters["weight", "a"])
    half = params.bfloat16()
    assert lora_init(half, 2)["weight", "a"].dtype == torch.bfloat16
    assert lora_merge(half, adapters)["weight"].dtype == torch.bfloat16
    opt = partition({"*.b": adamw(0.1), "*.a": None})
    new, _ = opt.update(adapters, opt.init(adapters), adapters)
    assert new["weight", "a"] is adapters["weight", "a"]
    assert new["weight", "scale"] == 1.0


def test_what_is_refused():
    _, _, params, adapters = nets()
    with pytest.raises(
        tdc.KeyPathError, match=r"(?s)weights to adapt, got no leaf of two dims.*'0.weight', '3.weight'"
    ):
        lora_init(params, 2, select="*bias")
    with pytest.raises(tdc.ShapeError, match="rank of 1 or more, got 0"):
        lora_init(params, 0)
    other = from_module(nn.Sequential(nn.Linear(7, 5)))
    with pytest.raises(
        tdc.StructureError, match=r"(?s)2 that do not fit.*at 0.weight: a .*\[2, 6\].*at 3.weight: no weight"
    ):
        lora_merge(other, adapters)
    with pytest.raises(tdc.StructureError, match="without a, b and scale"):
        lora_merge(params, adapters.delete(("0", "weight", "b")))
