"""Whole training steps: the numbers of torch's own loop, one graph, donation, resuming, seeds, ensembles."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from versions import before

import tdc
from tdc import TensorDict, functional_call
from tdc.compile import TrainStep, checkpoint, train_step
from tdc.optim import Optimizer, adamw, chain, clip_by_global_norm, sgd

LENGTHS = [(3, 2, 5, 4), (2, 7, 2, 4, 3, 5), (4, 2, 3, 6, 5, 5, 6, 7)]


def rows(*lengths: int) -> TensorDict:
    """A ragged batch."""
    x = tdc.pack([torch.randn(n, 8) for n in lengths])
    return TensorDict({"x": x, "label": torch.arange(len(lengths)) % 3}, [len(lengths)])


def plain(count: int = 6) -> TensorDict:
    """A batch of plain tensors."""
    return TensorDict({"x": torch.randn(count, 8), "label": torch.arange(count) % 3}, [count])


def make_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def loss_of(net: nn.Module) -> Callable[[TensorDict, TensorDict], torch.Tensor]:
    def loss_fn(params: TensorDict, batch: TensorDict) -> torch.Tensor:
        out = functional_call(net, params, (batch["x"],))
        return F.cross_entropy(out.mean(1) if isinstance(out, tdc.NestedTensor) else out, batch["label"])

    return loss_fn


def losses(step: TrainStep, state: TensorDict, batches: list[Any]) -> tuple[list[float], TensorDict]:
    found = []
    for batch in batches:
        state, metrics = step(state, batch)
        found.append(metrics["loss"].tolist())
    return found, state


def reference(net: nn.Module, batches: list[Any], clip: float | None = None) -> list[float]:
    """The loop of torch: module, autograd, torch.optim."""
    optimizer, found = torch.optim.AdamW(net.parameters(), lr=0.01), []
    for batch in batches:
        optimizer.zero_grad()
        out = net(batch["x"])
        loss = F.cross_entropy(out.mean(1) if isinstance(out, tdc.NestedTensor) else out, batch["label"])
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        found.append(loss.item())
    return found


# -- numbers, graphs


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_numbers_of_torchs_own_loop_in_one_graph(backend: str | None, donate: bool):
    net, batches = make_net(), [rows(*n) for n in LENGTHS]
    optimizer = chain(clip_by_global_norm(0.5), adamw(0.01))
    step = train_step(loss_of(net), optimizer, donate=donate, compile=backend is not None, backend=backend)
    state = step.init(net)
    found, state = losses(step, state, batches)
    before = {name: p.clone() for name, p in net.named_parameters()}
    assert_close(found, reference(net, batches, 0.5), rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(before[name], p) for name, p in net.named_parameters())  # the reference did move
    assert_close(tdc.interop.to_state_dict(state["params"]), dict(net.named_parameters()), rtol=1e-4, atol=1e-6)
    assert state["step"] == 3
    if backend:
        assert (step.counts.graphs, step.counts.breaks, step.counts.compiles) == (1, 0, 1)


def test_the_module_is_not_touched():
    net = make_net()
    before = {name: p.clone() for name, p in net.named_parameters()}
    step = train_step(loss_of(net), sgd(0.1), donate=True, compile=False)
    losses(step, step.init(net), [plain()])
    assert_close(dict(net.named_parameters()), before, rtol=0, atol=0)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("optimizer", [sgd(0.1), sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1), adamw(0.01)])
@pytest.mark.parametrize("donate", [False, True])
def test_inductor_gives_the_numbers_of_eager(optimizer: Optimizer, donate: bool):
    net, batches = make_net(), [plain(33) for _ in range(4)]
    eager = train_step(loss_of(net), optimizer, compile=False)
    for backend in (tdc.compile.backend, "inductor"):
        step = train_step(loss_of(net), optimizer, donate=donate, backend=backend)
        assert_close(losses(step, step.init(net), batches)[0], losses(eager, eager.init(net), batches)[0])


@pytest.mark.sweep
@pytest.mark.slow
def test_inductor_loses_the_alpha_of_a_matrix_product_and_ours_does_not():
    """Mended in torch 2.15: `optim.columns.plus` and `inductor.keep_alpha` may go when 2.14 leaves the range."""

    def f(p: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.add(p, a @ b, alpha=-0.01)

    args = torch.randn(64, 16), torch.randn(64, 32), torch.randn(32, 16)
    want = f(*args)
    assert_close(torch.compile(f, backend=tdc.compile.backend)(*args), want)
    wrong = torch.compile(f, backend="inductor")(*args)
    assert torch.allclose(wrong, want) is not before(2, 15)


@pytest.mark.sweep
@pytest.mark.slow
def test_steps_do_not_share_the_recompile_limit():
    net, batch = make_net(), plain()
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(3):
            step = train_step(loss_of(net), sgd(0.1), backend="eager")
            losses(step, step.init(net), [batch])
            assert step.counts.compiles == 1


@pytest.mark.parametrize("compile", [False, True])
def test_what_else_is_in_a_state_stays(compile: bool):
    net = make_net()
    step = train_step(loss_of(net), sgd(0.1), compile=compile, backend="aot_eager")
    state = step.init(net).set("run", tdc.Static("seven")).set("notes", {})
    after, _ = step(state, plain())
    assert after.keys(True) == state.keys(True)
    assert after["run"] == "seven"
    assert after["step"] == 1
    if not compile:
        with pytest.raises(tdc.StructureError, match="epoch"):
            step(state.set("epoch", torch.tensor(1)), plain())


# -- donation


@pytest.mark.cases(1, 0)
@pytest.mark.parametrize("compile", [False, True])
def test_donated_states_are_written_into(compile: bool):
    net, batch = make_net(), plain()
    step = train_step(loss_of(net), adamw(0.01), donate=True, compile=compile, backend="aot_eager")
    state = step.init(net, seed=0)
    kept, places = state.clone(), [x.data_ptr() for x in state.values(True, True)]
    new, _ = step(state, batch)
    assert new is state
    assert [x.data_ptr() for x in new.values(True, True)] == places
    pure = train_step(loss_of(net), adamw(0.01), compile=compile, backend="aot_eager")
    want, _ = pure(kept, batch)
    assert want is not kept
    assert kept["step"] == 0
    assert_close(want.to_dict(), new.to_dict(), rtol=0, atol=0)


# -- random numbers, resuming


def dropping(params: TensorDict, batch: TensorDict) -> torch.Tensor:
    return (F.dropout(batch["x"], 0.5) @ params["w"]).square().mean()


def saved(state: TensorDict) -> dict[str, torch.Tensor]:
    """Through a file, as checkpoints go."""
    file = io.BytesIO()
    torch.save(tdc.interop.to_state_dict(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(
    "backend", [None, *[pytest.param(b, marks=pytest.mark.slow) for b in ("aot_eager", "inductor")]]
)
def test_seeds_make_runs_equal_and_resumed_runs_go_on(backend: str | None, donate: bool):
    params, batches = TensorDict({"w": torch.randn(8)}), [plain() for _ in range(5)]
    optimizer = chain(clip_by_global_norm(1.0), adamw(0.01))
    step = train_step(dropping, optimizer, donate=donate, compile=backend is not None, backend=backend)
    first, _ = losses(step, step.init(params, seed=1), batches)
    torch.rand(3)
    again, _ = losses(step, step.init(params, seed=1), batches)
    other, _ = losses(step, step.init(params, seed=2), batches)
    assert first == again
    assert first != other
    begun, state = losses(step, step.init(params, seed=1), batches[:2])
    resumed = step.load_state_dict(step.init(params, seed=7), saved(state))
    rest, _ = losses(step, resumed, batches[2:])
    assert begun + rest == first


def test_each_step_draws_other_numbers_and_leaves_those_of_the_process():
    step = train_step(dropping, sgd(0.0), compile=False)
    batch, state = plain(), step.init(TensorDict({"w": torch.randn(8)}), seed=0)
    before = torch.get_rng_state()
    found, _ = losses(step, state, [batch] * 4)
    assert len(set(found)) == 4
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_the_process_decides():
    step = train_step(dropping, sgd(0.1), compile=False)
    params, batch = TensorDict({"w": torch.randn(8)}), plain()
    torch.manual_seed(3)
    first, _ = losses(step, step.init(params), [batch] * 2)
    torch.manual_seed(3)
    assert first == losses(step, step.init(params), [batch] * 2)[0]
    assert "rng" not in step.init(params)


# -- buffers, metrics


@pytest.mark.sweep
@pytest.mark.slow
def test_buffers_are_those_of_a_module_in_training():
    net = nn.Sequential(nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 3))
    batches = [plain() for _ in range(3)]

    def loss_fn(params: TensorDict, buffers: TensorDict, batch: TensorDict) -> tuple[torch.Tensor, TensorDict]:
        named = {**tdc.interop.to_state_dict(params), **tdc.interop.to_state_dict(buffers)}
        out = torch.func.functional_call(net, named, (batch["x"],))
        return F.cross_entropy(out, batch["label"]), buffers

    for compile in (False, True):
        step = train_step(loss_fn, adamw(0.01), buffers=True, compile=compile, backend="aot_eager")
        first = step.init(net)
        copy = first["buffers"].clone()
        _, state = losses(step, first, batches)
        assert_close(first["buffers"].to_dict(), copy.to_dict(), rtol=0, atol=0)
        other = nn.Sequential(nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 3))
        other.load_state_dict(net.state_dict())
        reference(other, batches)
        assert_close(tdc.interop.to_state_dict(state["buffers"]), dict(other.named_buffers()), rtol=1e-5, atol=1e-6)
        assert state["buffers", "1", "num_batches_tracked"] == 3


def test_aux_comes_beside_the_loss():
    net, batch = make_net(), plain()

    def loss_fn(params: TensorDict, batch: TensorDict) -> tuple[torch.Tensor, dict[str, Any]]:
        out = functional_call(net, params, (batch["x"],))
        right = out.argmax(1) == batch["label"]
        return F.cross_entropy(out, batch["label"]), {"accuracy": right.float().mean(), "right": right.sum()}

    one = train_step(loss_fn, sgd(0.1), compile=False)
    three = train_step(loss_fn, sgd(0.1), compile=False, accumulate=3)
    metrics, parts = one(one.init(net), batch)[1], three(three.init(net), batch)[1]
    assert list(metrics.keys()) == ["loss", "accuracy", "right"]
    assert_close(parts.to_dict(), metrics.to_dict())


def test_frozen_and_tied_parameters():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    net[1].weight = net[0].weight
    net[2].weight.requires_grad_(False)
    batches = [plain() for _ in range(3)]
    step = train_step(loss_of(net), adamw(0.01), compile=False)
    state = step.init(net)
    assert set(tdc.interop.to_state_dict(state["params"])) == {"0.weight", "0.bias", "1.bias", "2.bias"}
    found, _ = losses(step, state, batches)
    assert_close(found, reference(net, batches), rtol=1e-5, atol=1e-6)


# -- micro-batches, mixed precision, checkpointing


@pytest.mark.parametrize("batch", [plain(6), rows(3, 2, 5, 4, 2, 6), plain(7)], ids=["plain", "ragged", "uneven"])
def test_micro_batches_give_the_step_of_the_whole_batch(batch: TensorDict):
    net = make_net()
    results = []
    for accumulate in (1, 3):
        step = train_step(loss_of(net), sgd(0.1), compile=False, accumulate=accumulate)
        results.append(step(step.init(net), batch))
    (one, of_one), (three, of_three) = results
    assert_close(three["params"].to_dict(), one["params"].to_dict())
    assert_close(of_three["loss"], of_one["loss"])


def test_micro_batches_of_a_tuple_of_tensors():
    net, batch = make_net(), plain()

    def loss_fn(params: TensorDict, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(functional_call(net, params, (batch[0],)), batch[1])

    one, two = [train_step(loss_fn, sgd(0.1), compile=False, accumulate=n) for n in (1, 2)]
    pair = (batch["x"], batch["label"])
    assert_close(two(two.init(net), pair)[1]["loss"], one(one.init(net), pair)[1]["loss"])


@pytest.mark.slow
def test_ragged_micro_batches_are_one_graph():
    net, batches = make_net(), [rows(*n) for n in [*LENGTHS, (2, 3, 4, 5, 6)]]
    step = train_step(loss_of(net), sgd(0.1), accumulate=2, backend="eager")
    found, _ = losses(step, step.init(net), batches)
    whole = train_step(loss_of(net), sgd(0.1), compile=False)
    assert_close(found, losses(whole, whole.init(net), batches)[0])
    assert (step.counts.graphs, step.counts.compiles) == (1, 1)


def test_mixed_precision_is_autocast():
    net, batch = make_net(), plain()
    step = train_step(loss_of(net), sgd(0.1), dtype=torch.bfloat16, compile=False)
    state, metrics = step(step.init(net), batch)
    with torch.autocast("cpu", torch.bfloat16):
        want = F.cross_entropy(net(batch["x"]), batch["label"])
    assert_close(metrics["loss"], want.detach(), rtol=0, atol=0)
    assert {x.dtype for x in state["params"].values(True, True)} == {torch.float32}
    want.backward()
    assert_close(state["params", "0", "bias"], (net[0].bias - 0.1 * net[0].bias.grad).detach())


def deep(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    for w in weights:
        x = torch.tanh(x @ w)
    return x


@pytest.mark.cases(1, 0)
@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param(tdc.compile.backend, marks=pytest.mark.slow)])
def test_accumulation_autocast_and_checkpointing_in_one_compiled_step(backend: Any):
    params = TensorDict({f"{i}": torch.randn(16, 16) / 4 for i in range(4)})
    x, target = torch.randn(64, 16), torch.randn(64, 16)
    found = []
    for block in (deep, checkpoint(deep)):

        def loss_fn(params: TensorDict, batch: TensorDict, block: Any = block) -> torch.Tensor:
            out = block(batch["x"], params["0"], params["1"])
            return F.mse_loss(block(out, params["2"], params["3"]).float(), batch["target"])

        step = train_step(
            loss_fn, adamw(0.01), accumulate=2, dtype=torch.bfloat16, compile=backend is not None, backend=backend
        )
        batch = TensorDict({"x": x, "target": target}, [64])
        state = step.init(params)
        found.append(losses(step, state, [batch] * 3)[0])
        if backend:
            assert (step.counts.graphs, step.counts.breaks, step.counts.compiles) == (1, 0, 1)
    assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


# -- ensembles


@pytest.mark.cases(1, 0)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_members_train_as_they_would_alone(backend: str | None):
    nets = [make_net() for _ in range(3)]
    batches = [rows(*n) for n in [(3, 2, 5, 4), (2, 7, 2, 4), (6, 2, 3, 4)]]  # torch.vmap compiles each number of rows
    one = train_step(loss_of(nets[0]), adamw(0.01), compile=False)
    step = train_step(loss_of(nets[0]), adamw(0.01), compile=backend is not None, backend=backend).vmap()
    stacked = torch.stack([one.init(net) for net in nets])
    found, state = losses(step, stacked, batches)
    alone = [losses(one, one.init(net), batches)[0] for net in nets]
    assert_close(torch.tensor(found), torch.tensor(alone).T)
    assert state["step"].tolist() == [3, 3, 3]
    if backend:
        assert (step.counts.graphs, step.counts.compiles) == (1, 1)


def test_members_have_their_own_data_and_dropout():
    step = train_step(dropping, sgd(0.1), compile=False)
    params = TensorDict({"w": torch.randn(8).expand(3, 8).clone()}, [3])
    shared, batch = step.vmap(), plain()
    found, _ = losses(shared, shared.init(params, seed=0), [batch])
    assert len(set(found[0])) == 3
    assert found == losses(shared, shared.init(params, seed=0), [batch])[0]
    own = step.vmap(0, randomness="same")
    found, _ = losses(own, own.init(params, seed=0), [torch.stack([batch, batch, batch * 2])])
    assert found[0][0] == found[0][1] != found[0][2]


def test_the_pure_step_has_gradients():
    step = train_step(lambda params, x: (params["w"] - x).square().sum(), sgd(0.25), compile=False)
    state = step.init(TensorDict({"w": torch.zeros(2)}))
    after = torch.func.grad(lambda x: step.update(state, x)[0]["params", "w"].sum())(torch.ones(2))
    assert_close(after, torch.full((2,), 0.5))
