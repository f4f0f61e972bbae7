"""Edges of the training step: memory that is written, statistics of modules, losses with a count, rates of members,
and losses or gradients that are infinite or NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from versions import refused

import tdc
from tdc import NonfiniteError, TensorDict, functional_call
from tdc.compile import counted, report, train_step
from tdc.core.dynamo import recorded_operations
from tdc.optim import Optimizer, Transform, adamw, chain, sgd

LENGTHS = (5, 1, 0, 7, 2, 4, 3, 6)


def remembering(of: Any) -> Optimizer:
    """SGD whose state holds the parameters before the step, as `of` makes them."""
    inner = sgd(0.1)

    def init(params: TensorDict) -> TensorDict:
        return TensorDict({"inner": inner.init(params), "old": params, "again": params}, params.batch_size)

    def update(grads: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
        new, moments = inner.update(grads, state["inner"], params)
        return new, TensorDict({"inner": moments, "old": params.apply(of), "again": new}, params.batch_size)

    return Optimizer(init, update)


VIEWS = {
    "itself": lambda x: x,
    "detached": lambda x: x.detach(),
    "turned": lambda x: x.t().t(),
    "a row, expanded": lambda x: x[:1].expand(2, 2),
}


@pytest.mark.cases(2, 2)
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", VIEWS)
def test_donation_keeps_what_the_optimiser_and_metrics_hold(name: str, backend: str | None):
    """The new state was written into the memory that other leaves of it, and metrics, were views of."""

    def loss_fn(params: TensorDict, x: torch.Tensor) -> Any:
        return (params["w"] * x).sum(), {"w": VIEWS[name](params["w"])}

    x, given = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), TensorDict({"w": torch.ones(2, 2)})
    step = train_step(loss_fn, remembering(VIEWS[name]), donate=True, compile=backend is not None, backend=backend)
    state, before = step.init(given), given["w"]
    for _ in range(3):
        state, metrics = step(state, x)
        assert_close(metrics["w"], VIEWS[name](before))
        assert_close(state["optimizer", "old", "w"], VIEWS[name](before))
        before = before - 0.1 * x
        assert_close(state["params", "w"], before)
        assert_close(state["optimizer", "again", "w"], before)
    assert given["w"].tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_statistics_need_a_loss_with_buffers():
    """They were never updated, and evaluation took mean 0 and variance 1."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    step = train_step(lambda params, x: functional_call(net, params, (x,)).square().mean(), sgd(0.1), compile=False)
    with pytest.raises(tdc.StructureError, match=r"(?s)\(net, loss, optimizer\), or buffers=True.*at 1: BatchNorm1d"):
        step.init(net)
    step.init(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)))
    step.init(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)))
    state, _ = step(step.init(net.eval()), torch.ones(2, 3))
    assert "buffers" not in state.keys()  # noqa: SIM118  # a TensorDict


def test_statistics_are_no_parameters():
    """They were trained, and decayed."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    loss: Any = lambda params, buffers, x: (params["0", "weight"].sum(), buffers)  # noqa: E731
    step = train_step(loss, sgd(0.1), buffers=True, compile=False)
    with pytest.raises(tdc.StructureError, match=r"(?s)3 statistics of a module.*1\.running_mean.*buffers=False"):
        step.init(tdc.from_module(net))
    step.init(tdc.from_module(net, buffers=False), buffers=tdc.from_module(net, params=False))


def tokens(loss: str) -> Any:
    """Cross-entropy of each token: of a ragged batch its mean, or its sum and count."""

    def loss_fn(params: TensorDict, batch: TensorDict) -> Any:
        x, label = batch["x"], batch["label"]
        found = F.cross_entropy(x.values @ params["w"], label.values, reduction="sum")
        count = x.lengths.sum() if loss == "tensor" else x.values.shape[0]
        return found / count if loss == "mean" else (found, count)

    return loss_fn


def ragged() -> TensorDict:
    generator = torch.Generator().manual_seed(0)
    x = tdc.pack([torch.randn(n, 4, generator=generator) for n in LENGTHS])
    return TensorDict({"x": x, "label": x.with_values(torch.arange(sum(LENGTHS)) % 3)}, [len(LENGTHS)])


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("count", ["tensor", "int"])
@pytest.mark.parametrize(
    ("parts", "backend"),
    [
        (1, None), (3, None), (8, None), (3, "eager"),
        *[pytest.param(n, "eager", marks=pytest.mark.slow) for n in (1, 8)],
    ],
)  # fmt: skip
def test_a_loss_with_a_count_weighs_tokens(parts: int, count: str, backend: str | None):
    """Micro-batches were weighed by their rows, so a mean over tokens was another one. One of them has none here."""
    batch, params = ragged(), TensorDict({"w": torch.eye(4)[:, :3].clone()})
    whole = train_step(tokens("mean"), sgd(0.5), compile=False)
    want, metrics = whole(whole.init(params), batch)
    step = train_step(tokens(count), sgd(0.5), accumulate=parts, compile=backend is not None, backend=backend)
    with refused("Could not guard on data-dependent", backend is not None and parts > 1):
        found, shown = step(step.init(params), batch)
        assert_close(found["params", "w"], want["params", "w"])
        assert_close(shown["loss"], metrics["loss"])


def test_a_loss_in_c():
    """It tells no signature; asking for one raised an error of Python's."""
    step = train_step(torch.dot, sgd(0.5), compile=False)
    assert sorted(step.init(TensorDict({"w": torch.ones(2)})).keys()) == ["optimizer", "params", "step"]


def test_a_count_of_nothing():
    step = train_step(lambda params, x: ((params["w"] * x).sum(), 0), sgd(0.5), compile=False)
    state, metrics = step(step.init(TensorDict({"w": torch.ones(2)})), torch.zeros(2))
    assert metrics["loss"] == 0
    assert state["params", "w"].tolist() == [1.0, 1.0]


ONE = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("result", "error", "text"),
    [
        ((ONE, torch.ones(2)), tdc.ShapeError, "a count of one number"),
        ((ONE, torch.tensor(True)), tdc.DtypeError, "a count that is a real number"),
        ((ONE, "four"), tdc.DtypeError, "a pair of sum and count"),
        ((torch.ones(2), 4), tdc.ShapeError, "a loss of one number"),
        ((ONE, 2, {"x": ONE, "loss": ONE}), tdc.StructureError, "one called 'loss'"),
        ((ONE, 2, 3), tdc.DtypeError, "3 results"),
    ],
)
def test_other_results(result: Any, error: type[Exception], text: str):
    step = train_step(lambda params, x: result, sgd(0.5), compile=False)
    with pytest.raises(error, match=text):
        step(step.init(TensorDict({"w": torch.ones(2)})), torch.zeros(2))


def test_rates_of_members_are_no_rates_of_features():
    """Under vmap a rate for each member lined up with features, where there were as many."""
    rates, x = torch.tensor([0.1, 0.2]), torch.ones(2)
    stacked = TensorDict({"w": torch.ones(2, 2)}, [2])
    alone = train_step(lambda params, x: (params["w"] * x).sum(), sgd(rates), compile=False).vmap()
    with pytest.raises(tdc.ShapeError, match="one number, or one for each model"):
        alone(alone.init(stacked), x)
    step = train_step(lambda params, x: (params["w"] * x).sum(), sgd(rates), compile=False)
    state, _ = step(step.init(stacked), x)
    assert_close(state["params", "w"], torch.tensor([[0.9, 0.9], [0.8, 0.8]]))


@pytest.mark.parametrize("backend", [None, "eager"])
def test_gradients_of_other_shapes(backend: str | None):
    """Gradients that broadcast changed the shapes of parameters."""
    mean = Transform(lambda p: TensorDict({}), lambda g, s, p: (g.apply(lambda x: x.mean(0, keepdim=True)), s))
    step = train_step(
        lambda params, x: (params["w"] * x).sum(), chain(mean, sgd(0.1)), compile=backend is not None, backend=backend
    )
    with pytest.raises(Exception, match="gradients with the shapes of params"):
        step(step.init(TensorDict({"w": torch.ones(2, 3)})), torch.ones(2, 3))


class Scale(nn.Module):
    def forward(self, x: torch.Tensor, *, by: float = 2.0) -> torch.Tensor:
        return x * by


def doubled(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return x * by


def test_counted_and_report_have_graphs_of_their_own():
    """Each call of `counted` on one function took from the function's limit of graphs."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(3):
            for fn in (doubled, Scale().forward):
                assert counted(fn, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0]
                assert len(report(fn, torch.ones(3), backend="eager", repeats=0).compiles) == 1


# -- losses that are not finite


BACKENDS = pytest.mark.parametrize("backend", [None, "aot_eager"])
READS = torch.ops.aten._local_scalar_dense.default
GOOD = torch.ones(3)


def root(params: TensorDict, x: Tensor) -> Tensor:
    """Finite at x = 0, with a slope that is not."""
    return (params["w"] * x).abs().sqrt().sum() * 0.5


def made(backend: str | None = None, **options: Any) -> tuple[Any, TensorDict]:
    step = train_step(root, adamw(0.01), compile=backend is not None, backend=backend, **options)
    return step, step.init(TensorDict({"w": torch.ones(3)}), seed=0)


@pytest.mark.cases(2, 3)
@BACKENDS
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(("bad", "what"), [(torch.inf, "a loss"), (torch.nan, "a loss"), (0.0, "gradients")])
def test_an_error_names_the_step(backend: str | None, donate: bool, bad: float, what: str):
    step, state = made(backend, donate=donate, error_if_nonfinite=True)
    state, metrics = step(state, GOOD)
    assert metrics["finite"]
    before = state.clone()
    with pytest.raises(NonfiniteError, match=rf"got {what} that \w+ not\nat step 2\nhint: skip_nonfinite=True"):
        step(state, GOOD * bad)
    for name in ("params", "optimizer"):
        assert_close(state[name].to_dict(), before[name].to_dict(), rtol=0, atol=0)
    state, _ = step(state, GOOD)
    assert state["step"] == 2 + donate
    if backend:
        assert step.counts.compiles == 1


@BACKENDS
def test_a_metric_tells_without_an_error(backend: str | None):
    step, state = made(backend, metrics=("finite",))
    found = []
    for bad in (1.0, 0.0):
        state, metrics = step(state, GOOD * bad)
        found.append(metrics.to_dict())
    assert found == [{"finite": torch.tensor(True)}, {"finite": torch.tensor(False)}]
    assert state["params", "w"].isnan().any()


def test_members_are_named():
    step = train_step(root, adamw(0.01), compile=False, error_if_nonfinite=True, metrics=()).vmap(0)
    state = step.init(TensorDict({"w": torch.ones(3, 2)}, [3]))
    x = torch.tensor([[1.0, 1.0], [0.0, 1.0], [torch.nan, 1.0]])
    with pytest.raises(NonfiniteError, match=r"got one that is not\nat step 1 of member 1\nat step 1 of member 2\nh"):
        step(state, x)


def test_a_scale_that_is_too_large_is_no_error():
    step, state = made(dtype=torch.float16, error_if_nonfinite=True, metrics=("loss", "skipped"))
    state = state.set(("scaler", "scale"), torch.tensor(torch.finfo(torch.float32).max))
    state, metrics = step(state, GOOD * 1e-3)
    assert metrics["skipped"] == 1
    with pytest.raises(NonfiniteError):
        step(state, GOOD * torch.inf)


@pytest.mark.parametrize("asked", [False, True])
def test_only_a_step_that_raises_waits_for_the_device(asked: bool):
    step, state = made(error_if_nonfinite=asked, metrics=("loss", "grad_norm", "lr", "rows", "finite"))
    assert (READS in recorded_operations(lambda: step(state, GOOD))) is asked


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in AbsBackward0")
def test_torch_names_the_operation():
    step, state = made(error_if_nonfinite=True)
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="AbsBackward0"):
        step(state, torch.zeros(3))
