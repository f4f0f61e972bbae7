"""Steps whose loss or gradients are infinite or NaN: told by a metric, or an error that names the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tdc import NonfiniteError, TensorDict
from tdc.compile import train_step
from tdc.core.dynamo import recorded_operations
from tdc.optim import adamw

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
