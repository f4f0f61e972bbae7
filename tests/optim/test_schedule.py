"""Schedules: the rates of `torch.optim.lr_scheduler`, and of the papers where it has none; tensors in, tensors out.

And the rates that optimisers tell of a state, and the metric "lr" of a training step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from texts import T
from torch import Tensor, nn
from torch.optim import lr_scheduler as theirs
from torch.testing import assert_close

import tdc
from tdc import StructureError, TensorDict
from tdc.compile import train_step
from tdc.optim import (
    Transform,
    adafactor,
    adamw,
    chain,
    clip_by_global_norm,
    constant,
    cosine,
    ema,
    exponential,
    inject,
    inverse_sqrt,
    join,
    linear,
    masked,
    master_weights,
    multi_steps,
    muon,
    one_cycle,
    partition,
    piecewise,
    polynomial,
    schedule_free_sgd,
    sgd,
    skip_nonfinite,
    wsd,
)
from tdc.optim.transform import Schedule

STEPS = 25
Make = Callable[[torch.optim.Optimizer], Any]


def sequence(opt: torch.optim.Optimizer) -> Any:
    parts = [theirs.LinearLR(opt, 0.1, 1.0, 5), theirs.CosineAnnealingLR(opt, 10), theirs.ExponentialLR(opt, 0.9)]
    return theirs.SequentialLR(opt, parts, [5, 12])


PAIRS: dict[str, tuple[Schedule, Make]] = {
    "constant": (constant(0.3), lambda opt: theirs.ConstantLR(opt, 1.0)),
    "cosine": (cosine(0.3, STEPS, floor=0.01), lambda opt: theirs.CosineAnnealingLR(opt, STEPS, 0.01)),
    "linear": (linear(0.03, 0.3, 7), lambda opt: theirs.LinearLR(opt, 0.1, 1.0, 7)),
    "linear down": (linear(0.3, 0.15, 9), lambda opt: theirs.LinearLR(opt, 1.0, 0.5, 9)),
    "polynomial": (polynomial(0.3, 20, power=2.0), lambda opt: theirs.PolynomialLR(opt, 20, 2.0)),
    "exponential": (exponential(0.3, 0.8), lambda opt: theirs.ExponentialLR(opt, 0.8)),
    "piecewise": (piecewise(0.3, [3, 10, 20], 0.5), lambda opt: theirs.MultiStepLR(opt, [3, 10, 20], 0.5)),
    "one_cycle": (one_cycle(0.3, STEPS + 1), lambda opt: theirs.OneCycleLR(opt, 0.3, STEPS + 1)),
    "one_cycle linear": (
        one_cycle(0.3, 30, 0.4, "linear", 10.0, 100.0),
        lambda opt: theirs.OneCycleLR(opt, 0.3, 30, None, None, 0.4, "linear", div_factor=10.0, final_div_factor=100.0),
    ),
    "one_cycle three": (
        one_cycle(0.3, 30, three_phase=True), lambda opt: theirs.OneCycleLR(opt, 0.3, 30, three_phase=True),
    ),
    "join": (join([linear(0.03, 0.3, 5), cosine(0.3, 10), exponential(0.3, 0.9)], [5, 12]), sequence),
}  # fmt: skip
OTHERS: dict[str, Schedule] = {
    "inverse_sqrt": inverse_sqrt(0.3, 4),
    "wsd": wsd(0.3, 20, 5, 5, 0.1),
    "piecewise by each": piecewise(1.0, [2, 4], [0.5, 3.0]),
    "every": exponential(1.0, 0.5, every=2, end=0.1),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # SequentialLR calls step with an argument that it deprecates
@pytest.mark.parametrize("name", PAIRS)
def test_rates_are_those_of_torch(name: str):
    mine, make = PAIRS[name]
    opt = torch.optim.SGD([nn.Parameter(T(0.0))], lr=0.3)
    plan, rates = make(opt), []
    for _ in range(STEPS + 1):
        rates.append(plan.get_last_lr()[0])
        opt.step()
        plan.step()
    assert_close(mine(torch.arange(STEPS + 1)), T(rates), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", [*PAIRS, *OTHERS])
def test_a_schedule_is_elementwise_arithmetic(name: str):
    """One graph for all steps; the curve at once, under vmap, and step by step."""
    mine = PAIRS[name][0] if name in PAIRS else OTHERS[name]
    steps = torch.arange(40).view(4, 10)
    curve = mine(steps)
    assert (curve.shape, curve.dtype) == (steps.shape, torch.float32)
    assert_close(torch.vmap(mine)(steps), curve)
    compiled = torch.compile(mine, backend="aot_eager", fullgraph=True)
    assert_close(torch.stack([compiled(n) for n in steps.flatten()]).view(4, 10), curve)
    assert curve.isfinite().all()
    assert (curve >= 0).all()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("around", ["alone", "inject"])
@pytest.mark.parametrize("name", PAIRS)
def test_rates_of_float64_parameters_have_their_digits(name: str, around: str):
    mine, make = PAIRS[name]
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    opt = torch.optim.SGD([p], lr=0.3)
    plan, params = make(opt), TensorDict({"p": p.detach().clone(), "other": torch.zeros(1)})
    sgd = tdc.optim.sgd(mine) if around == "alone" else inject(tdc.optim.sgd, lr=mine)
    state = sgd.init(params)
    for _ in range(STEPS):
        p.grad = torch.ones_like(p)
        opt.param_groups[0]["momentum"] = 0.0  # which OneCycleLR changes, too
        opt.step()
        plan.step()
        params, state = sgd.update(params.apply(torch.ones_like), state, params)
    assert_close(params["p"], p.detach(), rtol=1e-12, atol=1e-12)
    assert_close(params["other"], p.detach()[:1].float())


@pytest.mark.parametrize("name", OTHERS)
def test_curves_of_float64_steps(name: str):
    steps = torch.arange(40)
    curve = OTHERS[name](steps.double())
    assert curve.dtype == torch.float64
    assert_close(curve.float(), OTHERS[name](steps))


def test_curves_of_papers():
    assert_close(inverse_sqrt(0.3, 4)(T([0, 2, 4, 16, 100])), T([0.0, 0.15, 0.3, 0.15, 0.06]))
    assert_close(wsd(0.3, 20, 5, 5, 0.1)(T([0, 1, 5, 14, 15, 17, 20, 30])), T([0, 0.06, 0.3, 0.3, 0.3, 0.22, 0.1, 0.1]))
    assert_close(wsd(0.3, 4, 0, 0)(T([0, 3, 4])), T([0.3, 0.3, 0.0]))
    assert_close(piecewise(1.0, [2, 4], [0.5, 3.0])(T([1, 2, 3, 4])), T([1.0, 0.5, 0.5, 1.5]))
    assert_close(exponential(1.0, 0.5, every=2, end=0.1)(T([0, 1, 2, 20])), T([1.0, 0.5**0.5, 0.5, 0.1]))


def test_cosine_stays_where_it_ends():
    assert_close(cosine(0.3, 20, floor=0.01)(T([20, 25, 1000])), T([0.01, 0.01, 0.01]))


def test_warmup_is_a_line():
    curve = cosine(1.0, steps=14, warmup=4, floor=0.1)(torch.arange(15))
    assert_close(curve[:5], T([0.0, 0.25, 0.5, 0.75, 1.0]))
    assert_close(curve[4:], cosine(1.0, steps=10, floor=0.1)(torch.arange(11)))


# -- rates that a state tells


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
