"""Losses of float16, multiplied by a number so that small gradients are not lost, and steps that are left out.

float16 has no number below 6e-8. So the loss is multiplied by a scale, and the gradients are divided by it. Where a
gradient overflows, the step is left out and the scale is halved; after 2000 steps without, it is doubled. The numbers
are those of `torch.amp.GradScaler`; the state is part of the step's, and nothing waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.tensordict.tensordict import TensorDict


class Scaling(NamedTuple):
    """The numbers: the first scale, the factors after steps that went well and after one that did not, how many."""

    start: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000


SCALING = Scaling()


def first_scale(size: Any, device: torch.device | str | None, how: Scaling) -> TensorDict:
    """The scale before the first step, and how many steps went well since it last changed."""
    scale = torch.full(size, float(how.start), device=device)
    return TensorDict({"scale": scale, "growth_tracker": torch.zeros(size, dtype=torch.int64, device=device)}, size)


def next_scale(scaler: TensorDict, finite: Tensor, how: Scaling) -> TensorDict:
    """The scale after a step whose gradients were finite, or not."""
    scale, tracker = scaler["scale"], scaler["growth_tracker"] + 1
    grown = scale * how.growth
    due = tracker == how.interval
    larger = torch.where(due & grown.isfinite(), grown, scale)
    after = {
        "scale": torch.where(finite, larger, scale * how.backoff),
        "growth_tracker": torch.where(finite & ~due, tracker, 0),
    }
    return scaler.update(after)


def unscaled(grads: TensorDict, scale: Tensor) -> TensorDict:
    """Gradients of the loss itself."""
    inverse = scale.reciprocal()
    return grads.apply(lambda g: (g * inverse).to(g.dtype))


def chosen(finite: Tensor, after: Any, before: Any) -> Any:
    """What a step made, or where it is left out what was before."""
    if isinstance(after, TensorDict):
        return after.apply(lambda a, b: a if a is b else torch.where(finite, a, b), before)
    return torch.where(finite, after, before)
