"""Learning rates as functions of the step: tensors in, tensors out, so that no step compiles anew.

A schedule gets the number of updates made before: 0 at the first. It is elementwise, so `schedule(torch.arange(n))` is
the whole curve, and each member of a stacked ensemble has a rate of its own. All compile whole, and go through vmap.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tdc.core.arguments import expect_number
from tdc.core.errors import StructureError, message
from tdc.optim.base import Schedule, check_numbers


def constant(lr: float) -> Schedule:
    """The same rate at every step.

    Raises:
        StructureError: a rate less than 0.

    Example:
        >>> constant(0.5)(torch.arange(3))
        tensor([0.5000, 0.5000, 0.5000])

    Source:
        `torch.optim.lr_scheduler.ConstantLR` with factor 1.
    """
    check_numbers("optim.constant", lr=lr)
    return lambda step: torch.full(step.shape, float(lr), device=step.device)


def cosine(lr: float, steps: int, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """Up from 0 to `lr` in a line over the first `warmup` steps, then down to `floor` in half a cosine.

    Args:
        lr: the highest rate, at step `warmup`.
        steps: where `floor` is reached, the warm-up included; from there on the rate stays.
        warmup: how many steps the rise takes. With a warm-up the rate of step 0 is 0.
        floor: the lowest rate.

    Raises:
        StructureError: a rate less than 0, or `steps` not above `warmup`.

    Example:
        >>> cosine(1.0, steps=6, warmup=2)(torch.arange(8))
        tensor([0.0000, 0.5000, 1.0000, 0.8536, 0.5000, 0.1464, 0.0000, 0.0000])

    Source:
        `torch.optim.lr_scheduler.CosineAnnealingLR`; `optax.warmup_cosine_decay_schedule`; Loshchilov and Hutter,
        SGDR: Stochastic Gradient Descent with Warm Restarts, 2017.
    """
    op = "optim.cosine"
    check_numbers(op, lr=lr, warmup=warmup, floor=floor)
    expect_number(op, steps, warmup, whole=True)
    if steps <= warmup:
        hint = "steps counts the warm-up, too"
        raise StructureError(message(op, "more steps than warmup", f"steps={steps}, warmup={warmup}", hint=hint))

    def schedule(step: Tensor) -> Tensor:
        done = ((step - warmup) / (steps - warmup)).clamp(0.0, 1.0)
        fall = floor + (lr - floor) * 0.5 * (1 + torch.cos(math.pi * done))
        return torch.where(step < warmup, lr * (step / warmup), fall) if warmup else fall

    return schedule
