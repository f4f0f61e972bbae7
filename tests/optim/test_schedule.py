"""Schedules: the rates of `torch.optim.lr_scheduler`, and of the papers where it has none; tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from texts import T
from torch import nn
from torch.optim import lr_scheduler as theirs
from torch.testing import assert_close

import tdc
from tdc import TensorDict
from tdc.optim import (
    constant,
    cosine,
    exponential,
    inject,
    inverse_sqrt,
    join,
    linear,
    one_cycle,
    piecewise,
    polynomial,
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
