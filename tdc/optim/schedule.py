"""Learning rates as functions of the step: tensors in, tensors out, so that no step recompiles.

A schedule gets the number of updates before this one: an int64, or float64 for float64 parameters, whose rates have
full precision. It is elementwise: `schedule(torch.arange(n))` is the whole curve. All compile fullgraph and under vmap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect_at_least, expect_function, expect_number
from tdc.core.errors import DtypeError, StructureError, describe, message
from tdc.optim.checks import check_numbers
from tdc.optim.transform import Schedule


def constant(lr: float) -> Schedule:
    """The same rate at every step.

    Example:
        >>> constant(0.5)(torch.arange(3))
        tensor([0.5000, 0.5000, 0.5000])

    Source:
        `torch.optim.lr_scheduler.ConstantLR` with factor 1.
    """
    check_plain("optim.constant", lr=lr)
    return lambda step: level(step, lr)


def cosine(lr: float, steps: int, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """A linear rise from 0 to `lr` over `warmup` steps, then half a cosine down to `floor`.

    Args:
        lr: the highest rate, at step `warmup`.
        steps: step at which `floor` is reached, the warm-up included; later rates are `floor`.
        warmup: number of steps of the rise. With a warm-up the rate of step 0 is 0.
        floor: the lowest rate.

    Raises:
        StructureError: `steps` not above `warmup`.

    Example:
        >>> cosine(1.0, steps=6, warmup=2)(torch.arange(8))
        tensor([0.0000, 0.5000, 1.0000, 0.8536, 0.5000, 0.1464, 0.0000, 0.0000])

    Source:
        `torch.optim.lr_scheduler.CosineAnnealingLR`; `optax.warmup_cosine_decay_schedule`; Loshchilov and Hutter,
        SGDR: Stochastic Gradient Descent with Warm Restarts, 2017.
    """
    op = "optim.cosine"
    check_plain(op, lr=lr, warmup=warmup, floor=floor)
    expect_number(op, steps, warmup, whole=True)
    if steps <= warmup:
        hint = "steps counts the warm-up, too"
        raise StructureError(message(op, "more steps than warmup", f"steps={steps}, warmup={warmup}", hint=hint))

    def schedule(step: Tensor) -> Tensor:
        done = ((step - warmup) / (steps - warmup)).clamp(0.0, 1.0)
        fall = floor + (lr - floor) * 0.5 * (1 + torch.cos(math.pi * done))
        return torch.where(step < warmup, lr * (step / warmup), fall) if warmup else fall

    return schedule


def linear(lr: float, end: float, steps: int) -> Schedule:
    """A line from `lr` to `end` over `steps` steps, constant from there; up or down.

    Example:
        >>> linear(1.0, 0.0, steps=4)(torch.arange(6))
        tensor([1.0000, 0.7500, 0.5000, 0.2500, 0.0000, 0.0000])

    Source:
        `torch.optim.lr_scheduler.LinearLR`.
    """
    return polynomial_of("optim.linear", lr, end, steps, 1.0)


def polynomial(lr: float, steps: int, power: float = 1.0, end: float = 0.0) -> Schedule:
    """From `lr` to `end` along `(1 - step / steps) ** power`, constant from there.

    Example:
        >>> polynomial(1.0, steps=4, power=2.0)(torch.arange(5))
        tensor([1.0000, 0.5625, 0.2500, 0.0625, 0.0000])

    Source:
        `torch.optim.lr_scheduler.PolynomialLR`.
    """
    return polynomial_of("optim.polynomial", lr, end, steps, power)


def polynomial_of(op: str, lr: float, end: float, steps: int, power: float) -> Schedule:
    """`polynomial` under the name of another function."""
    check_plain(op, lr=lr, end=end, power=power)
    expect_at_least(op, 1, "steps", steps)
    return lambda step: end + (lr - end) * (1 - step / steps).clamp(0.0, 1.0) ** power


def exponential(lr: float, gamma: float, every: int = 1, end: float = 0.0) -> Schedule:
    """`lr * gamma ** (step / every)`, at least `end`.

    Example:
        >>> exponential(1.0, 0.5)(torch.arange(4))
        tensor([1.0000, 0.5000, 0.2500, 0.1250])

    Source:
        `torch.optim.lr_scheduler.ExponentialLR`; `optax.exponential_decay`.
    """
    op = "optim.exponential"
    check_plain(op, lr=lr, gamma=gamma, end=end)
    expect_at_least(op, 1, "every", every)
    return lambda step: (lr * gamma ** (step / every)).clamp(min=end)


def piecewise(lr: float, milestones: Sequence[int], gamma: float | Sequence[float] = 0.1) -> Schedule:
    """`lr` times `gamma` from each milestone on.

    Args:
        milestones: steps, in order.
        gamma: one factor for all milestones, or one for each.

    Raises:
        StructureError: milestones out of order, or not one factor for each.

    Example:
        >>> piecewise(1.0, [2, 4], gamma=0.5)(torch.arange(6))
        tensor([1.0000, 1.0000, 0.5000, 0.5000, 0.2500, 0.2500])

    Source:
        `torch.optim.lr_scheduler.MultiStepLR`; `optax.piecewise_constant_schedule`.
    """
    op = "optim.piecewise"
    check_plain(op, lr=lr)
    steps = bounds_of(op, "milestones", milestones)
    factors = [gamma] * len(steps) if isinstance(gamma, (int, float)) else gamma
    if not isinstance(factors, (tuple, list)):
        raise DtypeError(message(op, "a factor, or one for each milestone", describe(gamma), hint="gamma=0.1"))
    check_plain(op, **{f"gamma[{i}]": x for i, x in enumerate(factors)})
    if len(factors) != len(steps):
        got = f"{len(factors)} for {len(steps)}"
        raise StructureError(message(op, "one factor for each milestone", got, hint="gamma=0.1 is that of all"))
    rates = [float(lr)]
    for factor in factors:
        rates.append(rates[-1] * factor)

    def schedule(step: Tensor) -> Tensor:
        rate = level(step, rates[0])
        for at, new in zip(steps, rates[1:], strict=True):
            rate = torch.where(step < at, rate, new)
        return rate

    return schedule


def inverse_sqrt(lr: float, warmup: int) -> Schedule:
    """A linear rise from 0 to `lr` over `warmup` steps, then proportional to `1 / sqrt(step)`.

    Example:
        >>> inverse_sqrt(1.0, warmup=2)(torch.tensor([0, 1, 2, 8, 18]))
        tensor([0.0000, 0.5000, 1.0000, 0.5000, 0.3333])

    Source:
        Vaswani et al., Attention Is All You Need, 2017, section 5.3.
    """
    op = "optim.inverse_sqrt"
    check_plain(op, lr=lr)
    expect_at_least(op, 1, "warmup", warmup)
    return lambda step: lr * torch.minimum(step / warmup, (step.clamp(min=1) / warmup).rsqrt())


def wsd(lr: float, steps: int, warmup: int, decay: int, floor: float = 0.0) -> Schedule:
    """Warm-up, stable, decay: a linear rise from 0 to `lr`, constant, a linear fall to `floor`.

    Args:
        lr: the highest rate.
        steps: total number of steps; later rates are `floor`.
        warmup, decay: number of steps of the rise and of the fall.
        floor: the last rate.

    Raises:
        StructureError: fewer steps than those of warm-up and decay.

    Example:
        >>> wsd(1.0, steps=6, warmup=2, decay=2)(torch.arange(8))
        tensor([0.0000, 0.5000, 1.0000, 1.0000, 1.0000, 0.5000, 0.0000, 0.0000])

    Source:
        Hu et al., MiniCPM: Unveiling the Potential of Small Language Models, 2024.
    """
    op = "optim.wsd"
    check_plain(op, lr=lr, warmup=warmup, decay=decay, floor=floor)
    expect_number(op, steps, warmup, decay, whole=True)
    if steps < warmup + decay:
        got = f"steps={steps}, warmup={warmup}, decay={decay}"
        raise StructureError(message(op, "at least as many steps as warmup and decay", got, hint="steps counts all"))

    def schedule(step: Tensor) -> Tensor:
        up = (step / warmup).clamp(max=1.0) if warmup else level(step, 1.0)
        left = ((steps - step) / decay).clamp(0.0, 1.0) if decay else torch.where(step < steps, level(step, 1.0), 0.0)
        return torch.where(step < steps - decay, lr * up, floor + (lr - floor) * left)

    return schedule


def one_cycle(
    max_lr: float, total_steps: int, pct_start: float = 0.3, anneal_strategy: str = "cos", div_factor: float = 25.0,
    final_div_factor: float = 1e4, three_phase: bool = False,
) -> Schedule:  # fmt: skip
    """Up to `max_lr` and down to almost 0; settings as in `torch.optim.lr_scheduler.OneCycleLR`, momentum aside.

    Raises:
        StructureError: a part of the rise outside of [0, 1), or another strategy.

    Example:
        >>> one_cycle(1.0, total_steps=5, pct_start=0.6, anneal_strategy="linear")(torch.arange(5))
        tensor([4.0000e-02, 5.2000e-01, 1.0000e+00, 5.0000e-01, 4.0000e-06])

    Source:
        `torch.optim.lr_scheduler.OneCycleLR`; Smith and Topin, Super-Convergence, 2018.
    """
    op = "optim.one_cycle"
    check_plain(op, max_lr=max_lr, div_factor=div_factor, final_div_factor=final_div_factor)
    check_plain(op, below=1.0, pct_start=pct_start)
    expect_at_least(op, 2, "total_steps", total_steps)
    if anneal_strategy not in ("cos", "linear"):
        got = f"{anneal_strategy!r}" if isinstance(anneal_strategy, str) else describe(anneal_strategy)
        raise StructureError(message(op, "'cos' or 'linear'", got, hint="anneal_strategy='cos'"))
    if not (div_factor and final_div_factor):
        got, hint = f"div_factor={div_factor:g}, final_div_factor={final_div_factor:g}", "div_factor=25.0"
        raise StructureError(message(op, "rates divided by more than 0", got, hint=hint))
    first = max_lr / div_factor
    last, top = first / final_div_factor, float(pct_start * total_steps) - 1
    phases = [(top, first, max_lr), (total_steps - 1, max_lr, last)]
    if three_phase:
        phases = [phases[0], (2 * top, max_lr, first), (total_steps - 1, first, last)]

    def schedule(step: Tensor) -> Tensor:
        rate, begin = level(step, first), 0.0
        for end, a, b in phases:
            done = (step - begin) / (end - begin) if end > begin else torch.where(step >= end, level(step, 1.0), 0.0)
            done = done.clamp(0.0, 1.0)
            left = (1 + torch.cos(math.pi * done)) / 2 if anneal_strategy == "cos" else 1 - done
            rate = torch.where((step > begin) | (begin == 0.0), b + (a - b) * left, rate)
            begin = end
        return rate

    return schedule


def join(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Schedules one after another; each counts from its own beginning.

    Args:
        schedules: functions `step -> lr`.
        boundaries: first steps of all schedules but the first.

    Raises:
        DtypeError: not a list of functions, or boundaries that are not ints.
        StructureError: boundaries out of order, or not one less than schedules.

    Example:
        >>> join([linear(0.0, 1.0, 2), exponential(1.0, 0.5)], [2])(torch.arange(5))
        tensor([0.0000, 0.5000, 1.0000, 0.5000, 0.2500])

    Source:
        `torch.optim.lr_scheduler.SequentialLR`; `optax.join_schedules`.
    """
    op, hint = "optim.join", "join([linear(0.0, 1e-3, 100), cosine(1e-3, 900)], [100])"
    if not isinstance(schedules, (tuple, list)) or not schedules:
        raise DtypeError(message(op, "a list of schedules", describe(schedules), hint=hint))
    expect_function(op, *schedules)
    starts = bounds_of(op, "boundaries", boundaries)
    if len(starts) != len(schedules) - 1:
        got = f"{len(schedules)} schedules and {len(starts)} boundaries"
        raise StructureError(message(op, "a boundary between each two schedules", got, hint=hint))

    def schedule(step: Tensor) -> Tensor:
        rate = schedules[0](step)
        for start, later in zip(starts, schedules[1:], strict=True):
            rate = torch.where(step < start, rate, later((step - start).clamp(min=0)))
        return rate

    return schedule


def check_plain(op: str, *, below: float | None = None, **numbers: Any) -> None:
    """`check_numbers` of settings that may not be schedules."""
    check_numbers(op, below=below, **numbers)
    expect_number(op, *numbers.values())


def level(step: Tensor, rate: float) -> Tensor:
    """One rate for all steps, in the dtype of the steps or, if they are ints, the default dtype."""
    dtype = step.dtype if step.is_floating_point() else torch.get_default_dtype()
    return torch.full(step.shape, float(rate), dtype=dtype, device=step.device)


def bounds_of(op: str, name: str, steps: Any) -> list[int]:
    """Check that steps are in order and at least 0."""
    if not isinstance(steps, (tuple, list)):
        raise DtypeError(message(op, f"a list of {name}", describe(steps), hint=f"{name}=[100, 200]"))
    given: list[Any] = list(steps)
    expect_number(op, *given, whole=True)
    if sorted(given) != given or min(given, default=0) < 0:
        raise StructureError(message(op, f"{name} in order, from 0 on", f"{given}", hint=f"{name}=[100, 200]"))
    return given
