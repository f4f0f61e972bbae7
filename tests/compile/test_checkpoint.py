"""`tdc.compile.checkpoint`: the same numbers, eagerly and in graphs, and less memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.testing import assert_close
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.checkpoint import create_selective_checkpoint_contexts as create
from versions import OLD, refused

import tdc
from tdc import TensorDict, functional_call
from tdc.compile import backend, checkpoint, checkpoint_blocks, train_step
from tdc.compile.gradients import loss_and_gradients
from tdc.core.dynamo import with_own_graphs
from tdc.optim import sgd

pytestmark = pytest.mark.filterwarnings("ignore:.*context_fn is passed")
G = torch.Generator().manual_seed(0)
X = torch.randn(6, 4, generator=G, dtype=torch.float64)
ROWS = [torch.randn(n, 4, generator=G, dtype=torch.float64) for n in (2, 0, 5, 1)]
W, Z = [torch.randn(4, 4, generator=G, dtype=dtype) for dtype in (torch.float64, torch.complex64)]
PARAMS = TensorDict({"w": W, "z": Z})


def closure(wrap: Any, params: TensorDict) -> Tensor:
    return wrap(lambda x: torch.tanh(x @ params["w"]))(X).sum()


def containers(wrap: Any, params: TensorDict) -> Tensor:
    def block(td: TensorDict, pair: tuple[tdc.NestedTensor, Tensor], *, scale: float) -> Any:
        x = (pair[0] @ pair[1]).tanh() * scale
        return td.replace(x=x), {"sum": x.sum(1)}

    td, sums = wrap(block)(TensorDict({"x": tdc.pack(ROWS)}, [4]), (tdc.pack(ROWS), params["w"]), scale=2.0)
    return td["x"].values.square().sum() + sums["sum"].sin().sum()


def complex_numbers(wrap: Any, params: TensorDict) -> Tensor:
    return wrap(lambda z: (z @ z).tanh())(params["z"]).abs().sum()


def nested(wrap: Any, params: TensorDict) -> Tensor:
    inner = wrap(lambda x: torch.sin(x @ params["w"]))
    return wrap(lambda x: inner(inner(x)).exp())(X).mean()


def integers(wrap: Any, params: TensorDict) -> Tensor:
    return wrap(lambda x, i, n: (x[i] * n).square())(params["w"], torch.tensor([2, 0]), 3).sum()


LOSSES = [closure, containers, complex_numbers, nested, integers]


def both(loss: Any, wrap: Any) -> Any:
    """Loss and gradients as a training step takes them."""

    def run(params: TensorDict) -> Any:
        return loss_and_gradients(lambda params: (loss(wrap, params), {}), params)

    return run


HOW: dict[str, dict[str, Any]] = {"all": {}, "products": {"policy": [torch.ops.aten.mm]}, "offload": {"offload": True}}


@pytest.mark.cases(2, 5)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_gradients(loss: Any, how: str) -> None:
    """As without, eagerly, in the graph of a step, and under a transform of torch.func."""

    def wrap(fn: Any) -> Any:
        return checkpoint(fn, **HOW[how])

    with torch.no_grad():
        want = both(loss, lambda fn: fn)(PARAMS)
        runs = [both(loss, wrap)]
        if how != "products":  # policies are made outside of graphs
            runs.append(torch.compile(with_own_graphs(both(loss, wrap)), backend="aot_eager", fullgraph=True))
        for run in runs:
            (value, _), grads = run(PARAMS)
            assert_close((value, grads.to_dict()), (want[0][0], want[1].to_dict()))
    found = tdc.grad(lambda params: loss(wrap, params))(PARAMS)
    assert_close(found.to_dict(), want[1].to_dict())


DROP = 0.5


def dropped(wrap: Any, params: TensorDict) -> Tensor:
    """Linear in each parameter, so that the loss is the product of gradient and parameter, if one mask was drawn."""

    def block(x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x @ params["w"], DROP), DROP, inplace=True)

    return wrap(block)(X).sum()


@pytest.mark.parametrize("by", [None, "aot_eager", pytest.param(backend, marks=pytest.mark.slow)])
def test_one_mask(by: Any) -> None:
    run = both(dropped, checkpoint)
    run = torch.compile(with_own_graphs(run), backend=by, fullgraph=True) if by is not None else run
    with torch.no_grad():
        (value, _), grads = run(PARAMS.select("w"))
    assert value != 0
    assert_close((grads["w"] * PARAMS["w"]).sum(), value)


DRAWS: dict[str, Any] = {
    "dropout": lambda y: F.dropout(F.dropout(y, DROP), DROP),
    "bernoulli": lambda y: y * torch.empty_like(y).bernoulli_(DROP),
    "multinomial": lambda y: y * torch.multinomial(torch.ones_like(y), y.shape[1]),
}
OURS: dict[str, Any] = {
    "tdc": checkpoint,
    "torch": lambda fn: partial(recompute, fn, use_reentrant=False),
    "torch, by policy": lambda fn: partial(recompute, fn, use_reentrant=False, context_fn=partial(create, again)),
}


def again(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.cases(5, 3)
@pytest.mark.parametrize("by", ["aot_eager", pytest.param(backend, marks=pytest.mark.slow)])
@pytest.mark.parametrize("whose", OURS)
@pytest.mark.parametrize("name", DRAWS)
def test_what_draws_is_kept(name: str, whose: str, by: Any) -> None:
    """In the graph of a whole step, whoever says that it is computed again."""

    def loss(wrap: Any, params: TensorDict) -> Tensor:
        return wrap(lambda x: DRAWS[name](x @ params["w"]))(X).sum()

    run = torch.compile(with_own_graphs(both(loss, OURS[whose])), backend=by, fullgraph=True)
    with torch.no_grad(), refused("dynamicLayerStack", when=whose == "torch, by policy"):
        (value, _), grads = run(PARAMS.select("w"))
        assert_close((grads["w"] * PARAMS["w"]).sum(), value)


def test_a_policy_that_would_rather_keep() -> None:
    """What it prefers to keep is kept."""
    counts: list[int] = []

    def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        counts.append(len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)))
        return graph

    def prefers(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_SAVE if op is torch.ops.aten.mm.default else again(ctx, op)

    def loss(wrap: Any, params: TensorDict) -> Tensor:
        return wrap(lambda x: torch.sin(torch.sin(x @ params["w"]) @ params["w"]).exp())(X).sum()

    for policy in (prefers, [torch.ops.aten.mm.default], again):
        run = both(loss, partial(checkpoint, policy=policy))
        with torch.no_grad():
            compiled = torch.compile(with_own_graphs(run), backend=aot_autograd(fw_compiler=note), fullgraph=True)
            compiled(PARAMS.select("w"))
    assert counts[0] == counts[1]
    assert (counts[1] < counts[2]) != OLD  # which keeps everything


class Block(nn.Module):
    """A block that keeps much if it may."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back, self.drop = nn.Linear(8, 128), nn.Linear(128, 8), nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Any) -> Any:
        return x + self.drop(self.back(F.gelu(self.wide(x)).sin())) * self.scale


def test_blocks_share_everything() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(*[Block() for _ in range(2)]))
    net.append(net[1][0])  # twice there
    cheap = checkpoint_blocks(net, Block).eval()
    assert {m.training for m in net.modules()} == {True}
    assert {m.training for m in cheap.modules()} == {False}
    assert [*cheap.state_dict()] == [*net.state_dict()]
    assert isinstance(cheap[1][0], Block)
    assert all([a is b for a, b in zip(cheap.parameters(), net.parameters(), strict=True)])
    assert cheap[1][0] is cheap[2] is not net[2]
    x = torch.randn(3, 8)
    assert_close(cheap(x), net.eval()(x))


def step_of(net: nn.Module, **options: Any) -> Any:
    def loss(params: TensorDict, batch: Any) -> Tensor:
        return functional_call(net, params, (batch,)).square().mean()

    return train_step(loss, sgd(0.1), **options)


SLOW = pytest.mark.slow
COMPILED = [  # by each backend; Inductor may not move what is computed again
    (False, "aot_eager"), pytest.param(True, "aot_eager", marks=SLOW),
    pytest.param(False, backend, marks=SLOW), pytest.param(True, backend, marks=SLOW),
]  # fmt: skip


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("ragged", "by"), COMPILED)
def test_less_memory_in_a_step(ragged: bool, by: Any) -> None:
    """One graph, the numbers of the net as it is, and a fraction of what it keeps (with torch 2.11 all of it)."""
    net = nn.Sequential(*[Block() for _ in range(6)]).eval()
    batch = tdc.pack([torch.randn(n, 8) for n in (100, 156)]) if ragged else torch.randn(256, 8)
    peaks, results = [], []
    for net_of in (net, checkpoint_blocks(net, Block)):
        step = step_of(net_of, backend=by)
        state = step.init(net)
        results.append(step(state, batch)[0]["params"].to_dict())
        peaks.append(tdc.compile.peak_bytes(step, state, batch))
        assert (step.counts.graphs, step.counts.breaks) == (1, 0)
    assert_close(results[1], results[0])
    assert (peaks[1] < 0.5 * peaks[0]) != OLD


@pytest.mark.sweep
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_and_dropout_are_computed_again(dropout: float) -> None:
    """Inductor draws from seeds, which are all that is kept of dropout; attention without it draws nothing."""
    layer = nn.TransformerEncoderLayer(16, 2, 64, dropout, batch_first=True)
    net = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    batch, peaks, results = torch.randn(4, 32, 16), [], []
    for net_of in (net, checkpoint_blocks(net, nn.TransformerEncoderLayer)):
        step = step_of(net_of)
        state = step.init(net)
        results.append(step(state, batch)[0]["params"].to_dict())
        peaks.append(tdc.compile.peak_bytes(step, state, batch))
    if not dropout:  # else other numbers are drawn
        assert_close(results[1], results[0])
    assert (peaks[1] < 0.4 * peaks[0]) != OLD  # which keeps everything


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_layers_of_ragged_batches(dropout: float) -> None:
    """Derivatives of our own functions are parts of the one backward pass in which things are computed again."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    batch, results = tdc.pack([torch.randn(n, 8) for n in (4, 1, 6)]), []
    for net_of in (net, checkpoint_blocks(net, nn.TransformerEncoderLayer)):
        step = step_of(net_of, backend="aot_eager")
        results.append(step(step.init(net), batch)[0]["params"].to_dict())
        assert (step.counts.graphs, step.counts.breaks) == (1, 0)
    if not dropout:
        assert_close(results[1], results[0])


class Normed(nn.Sequential):
    """A block with statistics and dropout."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5))


def of_net(net: Any, wrap: Any) -> Any:
    """A step of a net, of which one layer is checkpointed in a closure."""
    return train_step(net, lambda net, x: wrap(lambda x: net[1](x))(net[0](x)).square().mean(), sgd(0.5), compile=False)


def of_params(net: nn.Module, wrap: Any) -> Any:
    """A step of a function of parameters and buffers that calls the net."""

    def loss(params: TensorDict, buffers: TensorDict, x: Tensor) -> Any:
        out, buffers = functional_call(net.train(), params.update(buffers), (x,), return_buffers=True)
        return out.square().mean(), buffers

    return train_step(loss, sgd(0.5), buffers=True, compile=False)


@pytest.mark.parametrize("make", [of_net, of_params])
@pytest.mark.parametrize("how", HOW)
def test_what_is_computed_again_has_the_parameters_of_the_state(make: Any, how: str) -> None:
    """Not those of the net, which a step leaves alone, nor its mode; and statistics count each batch once."""
    net, results = nn.Sequential(Normed(), Normed()).double().eval(), []
    options: dict[str, Any] = {"policy": [torch.ops.aten.addmm]} if how == "products" else HOW[how]
    for of, wrap in ((net, lambda fn: fn), (checkpoint_blocks(net, Normed, **options), checkpoint)):
        step = make(of, wrap)
        state = step.init(net, seed=0)
        for i in range(3):
            state, _ = step(state, torch.randn(6, 8, dtype=torch.float64, generator=G.manual_seed(i)))
        results.append(state.to_dict())
    assert_close(results[1], results[0])
    assert results[0]["buffers"]["0"]["1"]["num_batches_tracked"] == 3
    assert not dict(net.named_buffers())["0.1.num_batches_tracked"]


def test_members() -> None:
    """An ensemble trains as without."""
    net = nn.Sequential(Block(), Block()).eval()
    steps = [step_of(n, compile=False) for n in (net, checkpoint_blocks(net, Block))]
    states = [torch.stack([step.init(net), step.init(net)]) for step in steps]
    batch = torch.randn(5, 8)
    one, other = [step.vmap()(state, batch)[0] for step, state in zip(steps, states, strict=True)]
    assert_close(other["params"].to_dict(), one["params"].to_dict())
