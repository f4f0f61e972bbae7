"""Training steps that know their net: its buffers and modes, metrics, steps left out, averages, float16, evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import tdc
from tdc import TensorDict
from tdc.compile import TrainStep, train_state, train_step
from tdc.optim import adamw, averaged, chain, ema, masked, sgd

BACKENDS = pytest.mark.parametrize("backend", [None, "aot_eager"])
GRAPH_LATER = pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])


def make_net(drop: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(drop), nn.Linear(16, 3)
    )


def make_batch(count: int = 12) -> TensorDict:
    return TensorDict({"x": torch.randn(count, 8), "label": torch.arange(count) % 3}, [count])


def loss(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch["x"]), batch["label"])


def make_step(net: nn.Module, loss: Any, optimizer: Any, backend: Any = None, **options: Any) -> TrainStep:
    return train_step(net, loss, optimizer, compile=backend is not None, backend=backend, **options)


def reference(net: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batches: list[Any]) -> list[float]:
    optimizer, found = torch.optim.AdamW(net.parameters(), lr=0.01), []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(net, batch)
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found


def flat(td: Any) -> dict[str, Tensor]:
    return tdc.interop.to_state_dict(td)


# -- the net


@pytest.mark.cases(1, 1)
@BACKENDS
@pytest.mark.parametrize("donate", [False, True])
def test_numbers_and_buffers_of_torchs_own_loop(backend: str | None, donate: bool):
    net, batches = make_net(), [make_batch() for _ in range(3)]
    first = {name: x.clone() for name, x in net.state_dict().items()}
    step = make_step(net, loss, adamw(0.01), backend, donate=donate)
    state, found = step.init(), []
    for batch in batches:
        state, metrics = step(state, batch)
        found.append(metrics["loss"].item())
    assert_close(net.state_dict(), first, rtol=0, atol=0)
    assert_close(found, reference(net, loss, batches), rtol=1e-5, atol=1e-6)
    assert_close(flat(state["params"]), dict(net.named_parameters()), rtol=1e-4, atol=1e-6)
    assert_close(flat(state["buffers"]), dict(net.named_buffers()), rtol=1e-5, atol=1e-6)
    if backend:
        assert (step.counts.graphs, step.counts.breaks, step.counts.compiles) == (1, 0, 1)


@pytest.mark.cases(1)
@BACKENDS
def test_a_loss_calls_the_net_as_it_likes(backend: str | None):
    """Twice, parts of it, and reads its parameters."""

    def twice(net: Any, batch: Any) -> Tensor:
        apart = net(batch["x"]) - net(-batch["x"])
        return apart.square().mean() + net[4](net[0](batch["x"])).mean() + 0.1 * net[0].weight.square().sum()

    net, batches = make_net(), [make_batch() for _ in range(3)]
    step = make_step(net, twice, adamw(0.01), backend)
    state, found = step.init(), []
    for batch in batches:
        state, metrics = step(state, batch)
        found.append(metrics["loss"].item())
    assert_close(found, reference(net, twice, batches), rtol=1e-4, atol=1e-5)
    assert state["buffers", "1", "num_batches_tracked"] == 6
    assert_close(flat(state["buffers"]), dict(net.named_buffers()), rtol=1e-4, atol=1e-6)


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@BACKENDS
def test_modes(backend: str | None):
    """A net in evaluation mode is trained, as those that are loaded often are; what is frozen in a net that trains is
    left so."""
    net = make_net().eval()
    step = make_step(net, loss, sgd(0.1), backend)
    state, _ = step(step.init(), make_batch())
    assert state["buffers", "1", "num_batches_tracked"] == 1
    assert not any(m.training for m in net.modules())
    net.train()[1].eval()
    step = make_step(net, loss, sgd(0.1), backend)
    state, _ = step(step.init(), make_batch())
    assert state["buffers", "1", "num_batches_tracked"] == 0
    assert net.training
    assert not net[1].training


def test_an_error_leaves_the_net_as_it_was():
    net = make_net().eval()
    before = dict(net.named_parameters())
    step = make_step(net, lambda net, batch: net(batch["x"])[99], sgd(0.1))
    with pytest.raises(IndexError):
        step(step.init(), make_batch())
    assert all(p is before[name] for name, p in net.named_parameters())
    assert not net[1].training


def test_other_parameters_to_begin_with():
    net, other = make_net(), make_net()
    step = make_step(net, loss, sgd(0.1))
    assert_close(flat(step.init(other)["params"]), {name: p.detach() for name, p in other.named_parameters()})
    params, buffers = tdc.from_module(other, buffers=False), tdc.from_module(other, params=False)
    state = step.init(params, buffers=buffers)
    assert_close(state.to_dict(), step.init(other).to_dict())
    assert state["params", "0", "weight"].data_ptr() != other[0].weight.data_ptr()
    assert set(flat(step.init(params)["buffers"])) == {
        f"1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }


@pytest.mark.cases(0, 1)
@BACKENDS
def test_members_have_their_own_buffers(backend: str | None):
    nets, batch = [make_net() for _ in range(3)], make_batch()
    one = make_step(nets[0], loss, sgd(0.1))
    step = make_step(nets[0], loss, sgd(0.1), backend, metrics=("loss", "grad_norm", "rows")).vmap()
    states: Any = [one.init(net) for net in nets]
    stacked: Any = torch.stack(states)
    state, metrics = step(stacked, batch)
    for k, net in enumerate(nets):
        alone, of_one = one(one.init(net), batch)
        assert_close(state["buffers"][k].to_dict(), alone["buffers"].to_dict())
        assert_close(metrics["loss"][k], of_one["loss"])
    assert metrics["grad_norm"].shape == (3,)
    assert metrics["rows"].tolist() == [12, 12, 12]


# -- metrics


@pytest.mark.cases(1, 1)
@BACKENDS
@pytest.mark.parametrize("accumulate", [1, 4])
def test_metrics(backend: str | None, accumulate: int):
    def counted(net: nn.Module, batch: Any) -> Any:
        out = net(batch["x"])
        return (F.cross_entropy(out, batch["label"], reduction="sum"), len(out) * 5), {"mean": {"out": out.mean()}}

    net, batch = make_net(), make_batch()
    names = ("loss", "grad_norm", "tokens", "rows")
    step = make_step(net.requires_grad_(True), counted, sgd(0.1), backend, metrics=names, accumulate=accumulate)
    _, metrics = step(step.init(), batch)
    assert metrics.keys() == ("loss", "mean", "grad_norm", "tokens", "rows")
    assert metrics["tokens"] == 60
    assert metrics["rows"] == 12
    if accumulate == 1:
        value = loss(net, batch) / 5
        value.backward()
        assert_close(metrics["loss"], value.detach())
        assert_close(
            metrics["grad_norm"], nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
        )
    bare = make_step(net, counted, sgd(0.1), metrics=())
    assert bare(bare.init(), batch)[1].keys() == ("mean",)


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@BACKENDS
def test_tokens_of_a_ragged_batch(backend: str | None):
    net = nn.Linear(8, 1)
    step = make_step(net, lambda net, x: net(x).values.mean(), sgd(0.1), backend, metrics=("tokens", "rows"))
    state = step.init()
    for lengths in [(3, 2, 5), (4, 1, 2, 6)]:
        state, metrics = step(state, tdc.pack([torch.randn(n, 8) for n in lengths]))
        assert metrics.to_dict() == {"tokens": sum(lengths), "rows": len(lengths)}
    if backend:
        assert step.counts.compiles == 1


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(("backend", "accumulate"), [(None, 1), (None, 4), ("eager", 1), ("eager", 2), ("eager", 4)])
def test_tokens_of_a_dense_batch_without_a_count(backend: str | None, accumulate: int):
    """In a loop of the graph rows went for tokens."""
    step = make_step(nn.Linear(8, 3), loss, sgd(0.1), backend, metrics=("tokens",), accumulate=accumulate)
    with pytest.raises(Exception, match="tokens to count, for metrics 'tokens', got a dense batch and a loss without"):
        step(step.init(), make_batch())


@pytest.mark.cases(1)
@pytest.mark.parametrize("backend", [None, "eager"])
def test_counts_of_parts_are_summed_as_they_are(backend: str | None):
    """A loop of the graph summed them in float32, in which 2 ** 24 + 1 is 2 ** 24."""

    def counted(net: nn.Module, batch: Any) -> Any:
        return loss(net, batch).double(), batch["label"][0] + 2**23

    step = make_step(nn.Linear(8, 3), counted, sgd(0.1), backend, metrics=("tokens",), accumulate=4)
    _, metrics = step(step.init(), make_batch(4))
    assert metrics["tokens"] == 2**25 + 3


class Holding:
    """SGD with its rates in the state, each a tenth smaller than the last."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def init(self, params: TensorDict) -> TensorDict:
        return TensorDict({name: {"lr": torch.tensor(0.5)} for name in self.names})

    def update(self, grads: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
        after = state * 0.9
        rate = after[self.names[0], "lr"]
        return params.apply(lambda p, g: p - rate * g, grads), after


@pytest.mark.cases(1, 0)
@BACKENDS
def test_rates_that_the_state_of_the_optimiser_holds(backend: str | None):
    step = make_step(nn.Linear(8, 3), loss, Holding("hyper"), backend, metrics=("lr",), donate=True)
    state = step.init()
    for rate in (0.45, 0.405):
        state, metrics = step(state, make_batch())
        assert_close(metrics["lr"], torch.tensor(rate))
    step = make_step(nn.Linear(8, 3), loss, Holding("a", "b"), backend, metrics=("lr",))
    assert step(step.init(), make_batch())[1]["lr"].keys() == ("a.lr", "b.lr")


# -- steps left out


@pytest.mark.cases(0, 1)
@BACKENDS
@pytest.mark.parametrize("donate", [False, True])
def test_steps_without_finite_gradients_are_left_out(backend: str | None, donate: bool):
    net, batch = make_net(), make_batch()
    bad = batch.set("x", batch["x"] * torch.inf)
    options: dict[str, Any] = {"skip_nonfinite": True, "average": ema(0.5), "metrics": ("loss", "skipped")}
    step = make_step(net, loss, adamw(0.01), backend, donate=donate, **options)
    state, _ = step(step.init(seed=0), batch)
    before = state.clone()
    state, metrics = step(state, bad)
    for name in ("params", "optimizer", "buffers", "average"):
        assert_close(state[name].to_dict(), before[name].to_dict(), rtol=0, atol=0)
    assert metrics["skipped"] == state["skipped"] == 1
    assert state["step"] == 2
    assert state["rng"] != before["rng"]
    state, metrics = step(state, batch)
    assert metrics["skipped"] == 1
    assert not torch.equal(state["params", "0", "weight"], before["params", "0", "weight"])
    plain = make_step(net, loss, adamw(0.01))
    assert plain(plain.init(), bad)[0]["params", "0", "weight"].isnan().any()


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_scales_of_float16_are_those_of_gradscaler(backend: str | None, monkeypatch: pytest.MonkeyPatch):
    """With a scale that overflows at first, and then grows every third step."""
    monkeypatch.setattr(train_state, "SCALING", train_state.SCALING._replace(interval=3))
    net, batches = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), [make_batch() for _ in range(9)]

    def large(net: nn.Module, batch: Any) -> Tensor:
        return loss(net, batch) * 30.0

    step = make_step(net, large, sgd(1e-3), backend, dtype=torch.float16, metrics=("loss", "scale", "skipped"))
    state, scales, metrics = step.init(), [], TensorDict({})
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    optimizer, wanted = torch.optim.SGD(net.parameters(), lr=1e-3), []
    for batch in batches:
        state, metrics = step(state, batch)
        scales.append(metrics["scale"].item())
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            value = large(net, batch)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        wanted.append(scaler.get_scale())
    assert scales == wanted
    assert metrics["skipped"] > 0
    assert max(scales[-4:]) > min(scales)
    assert_close(flat(state["params"]), dict(net.named_parameters()), rtol=1e-4, atol=1e-6)
    assert {x.dtype for x in state["params"].values(True, True)} == {torch.float32}


# -- averages, evaluation


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@BACKENDS
def test_an_average_of_the_parameters(backend: str | None):
    net, average = nn.Linear(8, 3), ema(0.9)
    step = make_step(net, loss, sgd(0.5), backend, average=average, donate=True)
    state = step.init()
    want = state["params"].clone()
    for _ in range(3):
        state, _ = step(state, make_batch())
        want = want.apply(lambda m, p: torch.lerp(m, p, 0.1), state["params"])
    batch = make_batch()
    evaluate = step.eval(averaged=True)
    assert_close(evaluate(state, batch)["loss"], loss_at(net, want, batch))
    assert_close(step.eval()(state, batch)["loss"], loss_at(net, state["params"], batch))
    assert_close(state["average", "average"].to_dict(), want.to_dict())


def loss_at(net: nn.Module, params: TensorDict, batch: Any) -> Tensor:
    return F.cross_entropy(tdc.functional_call(net, params, (batch["x"],)), batch["label"])


@pytest.mark.cases(slow=0)
@GRAPH_LATER
def test_an_average_that_is_a_transform_of_parameters(backend: str | None):
    """Or part of the optimiser, under the name "average"."""

    class Mean:
        takes = "parameters"

        def init(self, params: TensorDict) -> TensorDict:
            return TensorDict({"average": params})

        def update(self, new: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
            return new, TensorDict({"average": (state["average"] + new) / 2})

    class Both:
        def init(self, params: TensorDict) -> TensorDict:
            return TensorDict({"inner": sgd(0.5).init(params), "mean": Mean().init(params)})

        def update(self, grads: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
            new, inner = sgd(0.5).update(grads, state["inner"], params)
            return new, TensorDict({"inner": inner, "mean": Mean().update(new, state["mean"], params)[1]})

    net, batch = nn.Linear(8, 3), make_batch()
    for optimizer, average in ((sgd(0.5), Mean()), (Both(), None)):
        step = make_step(net, loss, optimizer, backend, average=average)
        first = step.init()
        state, _ = step(first, batch)
        want = (first["params"] + state["params"]) / 2
        assert_close(step.eval(averaged=True)(state, batch)["loss"], loss_at(net, want, batch))


@pytest.mark.cases(slow=0)
@GRAPH_LATER
def test_an_average_of_some_parameters_stands_in_for_these(backend: str | None):
    net, batch = nn.Linear(8, 3), make_batch()
    step = make_step(net, loss, chain(sgd(0.5), masked(ema(0.5), "weight")), backend)
    state, _ = step(step.init(), batch)
    want = state["params"].update(averaged(state))
    assert sorted(averaged(state).keys()) == ["weight"]
    assert_close(step.eval(averaged=True)(state, batch)["loss"], loss_at(net, want, batch))


@pytest.mark.cases(slow=0)
@GRAPH_LATER
def test_evaluation_changes_nothing(backend: str | None):
    net = make_net(drop=0.5)
    step = make_step(net, loss, sgd(0.1), backend)
    state, _ = step(step.init(seed=0), make_batch())
    before, evaluate = state.clone(), step.eval(metrics=("loss", "rows"))
    batches = [make_batch(n) for n in (12, 7, 9)]
    found = [evaluate(state, tdc.compile.dynamic(batch)) for batch in batches]
    assert_close(state.to_dict(), before.to_dict(), rtol=0, atol=0)
    assert net.training
    net.load_state_dict({**flat(state["params"]), **flat(state["buffers"])})
    net.eval()
    for batch, metrics in zip(batches, found, strict=True):
        assert_close(metrics["loss"], loss(net, batch).detach())
        assert metrics["rows"] == len(batch)
    if backend:
        assert (evaluate.counts.graphs, evaluate.counts.compiles) == (1, 1)
    predict = step.eval(lambda net, batch: {"out": net(batch["x"])})
    assert_close(predict(state, batches[0])["out"], net(batches[0]["x"]).detach())


def test_evaluation_of_a_function_of_parameters():
    def of(params: TensorDict, buffers: TensorDict, batch: Tensor) -> Any:
        return (params["w"] * batch).sum() + buffers["b"], buffers.update({"b": buffers["b"] + 1})

    step = train_step(of, sgd(0.1), buffers=True, compile=False)
    params, buffers = TensorDict({"w": torch.ones(2)}), TensorDict({"b": torch.tensor(1.0)})
    state = step.init(params, buffers=buffers)
    assert step.eval()(state, torch.ones(2))["loss"] == 3
    state, _ = step(state, torch.ones(2))
    assert state["buffers", "b"] == 2
    assert_close(
        step.eval(lambda p, b, x: {"w": p["w"] * x + b["b"]})(state, torch.ones(2))["w"], torch.full((2,), 2.9)
    )


# -- parts of a batch


@pytest.mark.slow
def test_parts_of_one_size_are_one_loop_of_the_graph():
    """The graph is as large for 16 parts as for 4; buffers go from part to part, and each has its own dropout."""
    net, batch, sizes = make_net(), tdc.compile.dynamic(make_batch(48)), []

    def note(graph: Any, inputs: Any) -> Any:
        sizes.append(sum([len(part.graph.nodes) for part in graph.modules() if hasattr(part, "graph")]))
        assert sum([node.op == "call_function" and "scan" in str(node.target) for node in graph.graph.nodes]) == 1
        return graph

    for count in (4, 16):
        step, eager = [make_step(net, loss, adamw(0.01), how, accumulate=count) for how in (note, None)]
        state, metrics = step(step.init(), batch)
        want, of_eager = eager(eager.init(), batch)
        assert_close(metrics["loss"], of_eager["loss"])
        assert_close(flat(state), flat(want), rtol=1e-4, atol=1e-5)
        assert state["buffers", "1", "num_batches_tracked"] == count
    assert sizes[1] < sizes[0] + 10  # a part by itself is more


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param(tdc.compile.backend, marks=pytest.mark.slow)])
def test_parts_draw_their_own_numbers(backend: Any):
    def masks(params: TensorDict, x: Tensor) -> Any:
        kept = F.dropout(torch.ones(64), 0.5) > 0
        code = (kept[:20] * 2.0 ** torch.arange(20)).sum()  # of another mask another number
        return (params["w"] * x).sum(), {"code": code, "square": code.square()}

    step = train_step(masks, sgd(0.1), accumulate=4, backend=backend)
    _, metrics = step(step.init(TensorDict({"w": torch.ones(2)}), seed=0), torch.ones(4, 2))
    assert metrics["square"] > metrics["code"].square() * 1.001


# -- how it is compiled


@pytest.mark.slow
def test_settings_of_torch_compile():
    net = nn.Linear(8, 3)
    step = make_step(net, loss, sgd(0.1), "eager", dynamic=False)
    state = step.init()
    for count in (4, 5, 6):
        state, _ = step(state, make_batch(count))
    assert step.counts.compiles == 3
    with pytest.raises(tdc.UnsupportedError, match="modes and options of Inductor only"):
        make_step(net, loss, sgd(0.1), "eager", mode="max-autotune")(state, make_batch())
    with pytest.raises(tdc.UnsupportedError, match="a mode of"):
        train_step(net, loss, sgd(0.1), mode="fast")(state, make_batch())
