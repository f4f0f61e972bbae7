"""`tdc.compile.scan_blocks`: layers as one loop are the layers, eagerly and in graphs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from versions import refused

import tdc
from tdc import StructureError, TensorDict
from tdc.compile import checkpoint_blocks, scan_blocks, train_step, unscan_blocks
from tdc.optim import sgd

G = torch.Generator().manual_seed(0)
X = torch.randn(16, 8, generator=G)
ROWS = tdc.pack([torch.randn(n, 8, generator=G) for n in (5, 1, 0, 10)])
Layer = nn.TransformerEncoderLayer


class Normed(nn.Module):
    """A block with statistics."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.linear, self.norm, self.scale = nn.Linear(8, 8), nn.BatchNorm1d(8), scale

    def forward(self, x: Any) -> Any:
        return x + torch.tanh(self.norm(self.linear(x))) * self.scale


class Tied(nn.Module):
    """A block with one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.first(x)))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *[Normed() for _ in range(3)], nn.Linear(8, 2))


def tied() -> nn.Module:
    return nn.Sequential(*[Tied() for _ in range(3)])


def encoder() -> nn.Module:
    layer = Layer(8, 2, 16, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


CASES = {"statistics": (normed, Normed, X), "tied": (tied, Tied, X), "ragged": (encoder, Layer, ROWS)}


def made(case: str) -> tuple[nn.Module, nn.Module, Any]:
    """The net of a case, with other weights in each layer, as it is and with its layers as a loop; and what goes in."""
    torch.manual_seed(0)
    net, kind, x = CASES[case][0](), CASES[case][1], CASES[case][2]
    for p in net.parameters():
        p.data.add_(torch.randn(p.shape) * 0.1)
    return net, scan_blocks(net, kind), x


def loss(net: nn.Module, batch: TensorDict) -> Tensor:
    out = net(batch["x"])
    return (out if isinstance(out, Tensor) else out.values).square().mean()


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("run", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_values_gradients_and_buffers_are_those_of_the_layers(case: str, run: str) -> None:
    net, stacked, x = made(case)
    batch = TensorDict({"x": x}, [len(x)])
    call = torch.compile(loss, backend="aot_eager", fullgraph=True) if run == "compiled" else loss
    expected, found = loss(net, batch), call(stacked, batch)
    expected.backward()
    found.backward()
    assert_close(found, expected)
    grads: list[Any] = [p.grad for p in stacked.parameters()]
    with torch.no_grad():
        for p, gradient in zip(stacked.parameters(), grads, strict=True):
            p.copy_(gradient)
    for (name, p), (other, q) in zip(net.named_parameters(), unscan_blocks(stacked).named_parameters(), strict=True):
        assert name == other
        assert_close(q.detach(), p.grad)
        assert q.abs().sum() > 0
    for (name, b), (other, c) in zip(net.named_buffers(), unscan_blocks(stacked).named_buffers(), strict=True):
        assert name == other
        assert_close(c, b)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_a_training_step_has_one_layer_in_its_graph(backend: str) -> None:
    net, stacked, _ = made("statistics")
    batch = TensorDict({"x": X}, [16])
    layers = train_step(net, loss, sgd(0.1), compile=False)
    loop = train_step(stacked, loss, sgd(0.1), backend=backend)
    a, b = layers.init(), loop.init()
    with refused("call_id"):
        for _ in range(3):
            (a, metrics), (b, others) = layers(a, batch), loop(b, batch)
            assert_close(others["loss"], metrics["loss"])
        assert_close(b["buffers", "1", "block", "norm", "running_mean"][2], a["buffers", "3", "norm", "running_mean"])
        assert_close(b["params", "1", "block", "linear", "weight"][1], a["params", "2", "linear", "weight"])
        assert loop.counts.compiles == 1
        assert_close(loop.eval()(b, batch)["loss"], layers.eval()(a, batch)["loss"])


@pytest.mark.sweep
@pytest.mark.slow
def test_what_goes_round_the_loop_is_in_members_micro_batches_and_exports() -> None:
    net = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    stacked, batch = scan_blocks(net, nn.Sequential), TensorDict({"x": X}, [16])
    expected = loss(net, batch).detach()
    step = train_step(stacked, loss, sgd(0.1), backend="aot_eager")
    members: Any = torch.stack([step.init(), step.init()])  # type: ignore[list-item]  # a stack of TensorDicts is one
    _, metrics = step.vmap()(members, batch)
    assert_close(metrics["loss"], torch.stack([expected, expected]))
    parts = train_step(stacked, loss, sgd(0.1), backend="aot_eager", accumulate=4)
    assert_close(parts(parts.init(), batch)[1]["loss"], expected)
    exported = tdc.compile.export(stacked.eval(), (X,))
    assert_close(exported(X + 1), net(X + 1))


@pytest.mark.slow
def test_dropout_draws_a_mask_for_each_layer_and_the_gradient_has_it() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.drop = nn.Parameter(torch.ones(4096)), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(x * self.scale)

    net = scan_blocks(nn.Sequential(*[Dropped() for _ in range(3)]), Dropped)
    step = train_step(net, lambda net, x: net(x).sum(), sgd(1.0), backend="aot_eager")
    state, x = step.init(seed=3), torch.ones(1, 4096)
    with refused("call_id"):
        after, metrics = step(state, x)
        gradient = (state["params"] - after["params"])["0", "block", "scale"]
        assert_close(gradient.sum(1), metrics["loss"].expand(3))
        assert 0.08 < (gradient[0] != 0).float().mean() < 0.17  # an eighth is kept by three masks
        assert torch.equal(step(state, x)[1]["loss"], metrics["loss"])


def test_further_arguments_and_attributes_are_those_of_the_layers() -> None:
    net, stacked, _ = made("ragged")
    x, mask = torch.randn(2, 5, 8), nn.Transformer.generate_square_subsequent_mask(5)
    assert_close(stacked(x, mask=mask, is_causal=True), net(x, mask=mask, is_causal=True))
    layers: Any = stacked.layers
    assert (len(layers), layers[0].self_attn.num_heads) == (1, 2)
    assert_close(copy.deepcopy(stacked)(x), net(x))
    assert_close(pickle.loads(pickle.dumps(stacked))(x), net(x))


@pytest.mark.sweep
@pytest.mark.slow
def test_checkpoints_in_a_loop_keep_everything() -> None:
    net, stacked, _ = made("ragged")
    batch = TensorDict({"x": ROWS}, [4])
    step = train_step(checkpoint_blocks(stacked, Layer), loss, sgd(0.1), backend="aot_eager")
    assert_close(step(step.init(), batch)[1]["loss"], loss(net, batch).detach())


class Shared(nn.Module):
    """Two blocks of which both hold the parameter of a third module."""

    def __init__(self) -> None:
        super().__init__()
        self.head, first = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList([first, nn.Linear(8, 8)])
        self.head.weight = first.weight


LINEAR = nn.Linear(8, 8)
REFUSED = {
    "block 1, scale: 0.5, in block 0 1.0": (lambda: nn.Sequential(Normed(), Normed(0.5)), Normed),
    "block 1, 0.p: 0.5": (lambda: nn.Sequential(*[nn.Sequential(nn.Dropout(p)) for p in (0.1, 0.5)]), nn.Sequential),
    "block 1, in_features: 4, in block 0 8": (lambda: nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)), nn.Linear),
    "weight: of another module, too": (Shared, nn.Linear),
    "bias: of another module, too": (lambda: nn.Sequential(LINEAR, LINEAR), nn.Linear),
    "requires_grad=False": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)), nn.Linear),
    "no such blocks": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear),
    "module 1, itself": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).eval()), nn.Linear),
}


@pytest.mark.parametrize("text", REFUSED)
def test_blocks_that_are_no_loop_are_refused(text: str) -> None:
    make, kind = REFUSED[text]
    with pytest.raises(StructureError) as error:
        scan_blocks(make(), kind)
    assert text in str(error.value)


def test_attributes_on_which_nothing_depends_may_differ() -> None:
    net: Any = nn.Sequential(Normed(), Normed())
    net[0].index, net[1].index = 0, 1
    with pytest.raises(StructureError, match="block 1, index: 1, in block 0 0"):
        scan_blocks(net, Normed)
    assert_close(scan_blocks(net, Normed, ignore=["index"]).eval()(X), net.eval()(X))
