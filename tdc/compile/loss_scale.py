"""Losses of float16, multiplied by a number so that small gradients are not lost, and steps that are left out.

float16 has no number below 6e-8. So the loss is multiplied by a scale, and the gradients are divided by it. Where a
gradient overflows, the step is left out and the scale is halved; after 2000 steps without, it is doubled. The numbers
are those of `torch.amp.GradScaler`; the state is part of the step's, and nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.tensordict.tensordict import TensorDict

START, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000


def first_scale(size: Any, device: torch.device | None) -> TensorDict:
    """The scale before the first step, and how many steps went well since it last changed."""
    scale = torch.full(size, START, device=device)
    return TensorDict({"scale": scale, "growth_tracker": torch.zeros(size, dtype=torch.int64, device=device)}, size)


def next_scale(scaler: TensorDict, finite: Tensor) -> TensorDict:
    """The scale after a step whose gradients were finite, or not."""
    scale, tracker = scaler["scale"], scaler["growth_tracker"] + 1
    grown = scale * GROWTH
    due = tracker == INTERVAL
    larger = torch.where(due & grown.isfinite(), grown, scale)
    after = {
        "scale": torch.where(finite, larger, scale * BACKOFF),
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
