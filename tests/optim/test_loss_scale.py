"""Loss scaling against `torch.amp.GradScaler`: scales over many steps, what is skipped, one for each member."""

from __future__ import annotations

import pytest
import torch
from texts import T
from torch import nn
from torch.testing import assert_close

from tdc import TensorDict
from tdc.compile import counted
from tdc.optim import LossScale, sgd, skip_nonfinite

SETTINGS = {"init_scale": 64.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 3}
BAD = {4, 5, 13}


@pytest.mark.parametrize("compiled", [False, True])
def test_scales_and_steps_are_those_of_torch(compiled: bool):
    w = nn.Parameter(T([1.0, 2.0]))
    theirs, reference = torch.amp.GradScaler("cpu", **SETTINGS), torch.optim.SGD([w], lr=0.1)
    scaler, opt = LossScale(**SETTINGS), skip_nonfinite(sgd(0.1))
    params = TensorDict({"w": w.detach().clone()})

    def step(params: TensorDict, state: TensorDict, moments: TensorDict, x: torch.Tensor) -> tuple[TensorDict, ...]:
        grads = torch.func.grad(lambda p: scaler.scale(state, (p["w"] * x).square().sum()))(params)
        grads, finite = scaler.unscale(state, grads)
        params, moments = opt.update(grads, moments, params)
        return params, scaler.adjust(state, finite), moments

    run = counted(step, backend="aot_eager") if compiled else step
    state, moments = scaler.init(), opt.init(params)
    for n in range(20):
        x = T([0.1, torch.inf if n in BAD else 0.2])
        theirs.scale((w * x).square().sum()).backward()
        theirs.step(reference)
        theirs.update()
        reference.zero_grad()
        params, state, moments = run(params, state, moments, x)
        assert state["scale"] == theirs.get_scale()
        assert_close(params["w"], w.detach())
    assert moments["skipped"] == len(BAD)
    assert not isinstance(run, counted) or run.counts.compiles == 1


def test_small_gradients_of_float16_survive():
    scaler = LossScale(init_scale=2.0**12)
    params, x = TensorDict({"w": torch.ones(2, dtype=torch.float16)}), torch.full((2,), 2.0**-12, dtype=torch.float16)

    def loss_of(p: TensorDict) -> torch.Tensor:
        return (p["w"] * x * x).float().sum()

    grads = torch.func.grad(lambda p: scaler.scale(scaler.init(), loss_of(p)))(params)
    assert torch.func.grad(loss_of)(params)["w"].abs().max() < 2.0**-23  # a subnormal of one bit, or none
    found, finite = scaler.unscale(scaler.init(), grads.float())
    assert finite
    assert_close(found["w"], torch.full((2,), 2.0**-24))


def test_one_scale_for_each_member():
    scaler = LossScale(**SETTINGS)
    state = scaler.init((2,))
    grads = TensorDict({"w": T([[64.0, 128.0], [64.0, torch.nan]]), "n": torch.tensor([1, 2])}, [2])
    found, finite = scaler.unscale(state, grads)
    assert finite.tolist() == [True, False]
    assert found["w"][0].tolist() == [1.0, 2.0]
    assert found["n"].tolist() == [1, 2]
    assert scaler.adjust(state, finite)["scale"].tolist() == [64.0, 16.0]
    mapped = torch.vmap(lambda s, g: scaler.adjust(s, scaler.unscale(s, g)[1]))(state, grads)
    assert mapped["scale"].tolist() == [64.0, 16.0]
    full = LossScale(init_scale=3e38, growth_interval=1)
    assert full.adjust(full.init(), T(True))["scale"] == full.init()["scale"]  # grows to no infinity
