"""The learning rates that optimisers tell of a state, and the metric "lr" of a training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tdc import StructureError, TensorDict
from tdc.compile import train_step
from tdc.optim import (
    Transform,
    adafactor,
    adamw,
    chain,
    clip_by_global_norm,
    cosine,
    ema,
    inject,
    linear,
    masked,
    master_weights,
    multi_steps,
    muon,
    partition,
    schedule_free_sgd,
    sgd,
    skip_nonfinite,
)

CURVE = cosine(0.1, steps=6, warmup=2)
WANTED = CURVE(torch.arange(4))
FALLING = linear(0.4, 0.0, 4)
TELL: dict[str, tuple[Callable[[], Transform], Tensor | dict[str, Tensor]]] = {
    "float": (lambda: sgd(0.5), torch.full((4,), 0.5)),
    "tensor": (lambda: sgd(torch.tensor(0.5)), torch.full((4,), 0.5)),
    "schedule": (lambda: adamw(CURVE), WANTED),
    "chain": (lambda: chain(clip_by_global_norm(1.0), adamw(CURVE), ema(0.9)), WANTED),
    "wrappers": (lambda: skip_nonfinite(master_weights(adamw(CURVE))), WANTED),
    "by step, not by call": (lambda: multi_steps(sgd(CURVE), 2), CURVE(torch.arange(4) // 2)),
    "masked": (lambda: masked(muon(CURVE), "weight"), WANTED),
    "inject a number": (lambda: inject(adamw, lr=0.5), torch.full((4,), 0.5)),
    "inject a schedule": (lambda: inject(adamw, lr=CURVE), WANTED),
    "inject another number": (lambda: inject(lambda decay: adamw(CURVE, weight_decay=decay), decay=0.1), WANTED),
    "adafactor": (lambda: adafactor(CURVE), WANTED),
    "warm-up of its own": (lambda: schedule_free_sgd(0.9, warmup=3), torch.tensor([0.3, 0.6, 0.9, 0.9])),
    "groups": (
        lambda: partition({"bias": sgd(CURVE), "*": sgd(FALLING)}),
        {"0": WANTED, "1": FALLING(torch.arange(4))},
    ),
    "one group": (lambda: partition({"bias": None, "*": chain(clip_by_global_norm(1.0), sgd(CURVE))}), WANTED),
}


TRACED = ("groups", "inject a schedule", "adafactor")  # the others among the slow tests


def case(name: str, backend: str | None) -> Any:
    late = backend is not None and name not in TRACED
    return pytest.param(name, backend, marks=[pytest.mark.slow] * late)


@pytest.mark.cases(2, 2)
@pytest.mark.parametrize(("name", "backend"), [case(n, b) for b in (None, "aot_eager") for n in TELL])
def test_rate_of_each_step(name: str, backend: str | None):
    make, wanted = TELL[name]
    net = nn.Linear(3, 2)
    how = {"compile": backend is not None, "backend": backend, "metrics": ("lr",), "donate": True}
    step = train_step(net, lambda net, x: net(x).square().mean(), make(), **how)
    state, found = step.init(), []
    for _ in range(4):
        state, metrics = step(state, torch.randn(5, 3))
        found.append(metrics["lr"])
    if isinstance(wanted, dict):
        assert found[0].keys() == tuple(wanted)
        for path, curve in wanted.items():
            assert_close(torch.stack([x[path] for x in found]), curve)
    else:
        assert_close(torch.stack(found), wanted)
    if backend:
        assert step.counts.compiles == 1


def test_rate_of_each_member():
    step = train_step(lambda p, x: (p["w"] * x).sum(), inject(sgd, lr=0.5), compile=False, metrics=("lr",))
    state = step.vmap().init(TensorDict({"w": torch.ones(3, 2)}, [3]))
    rates = torch.tensor([0.1, 0.2, 0.3])
    state, metrics = step.vmap()(state.set(("optimizer", "hyper", "lr"), rates), torch.ones(2))
    assert_close(metrics["lr"], rates)
    assert_close(sgd(rates).rates(sgd(rates).init(state["params"]))[""], rates)


def test_rate_of_a_step_that_is_left_out():
    step = train_step(lambda p, x: (p["w"] * x).sum(), sgd(CURVE), compile=False, metrics=("lr",), skip_nonfinite=True)
    state, _ = step(step.init(TensorDict({"w": torch.ones(2)})), torch.ones(2))
    for x in (torch.full((2,), torch.inf), torch.ones(2)):
        state, metrics = step(state, x)
        assert_close(metrics["lr"], WANTED[1])


def test_an_optimizer_that_tells_no_rate():
    class Plain:
        def init(self, params: TensorDict) -> TensorDict:
            return TensorDict({"n": torch.zeros(())})

        def update(self, grads: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
            return params.apply(lambda p, g: p - g, grads), state

    step = train_step(lambda p, x: (p["w"] * x).sum(), Plain(), compile=False, metrics=("lr",))
    with pytest.raises(StructureError, match=r"tells its rate.*\nhint: one of tdc.optim, or one that keeps 'lr'"):
        step(step.init(TensorDict({"w": torch.ones(2)})), torch.ones(2))
