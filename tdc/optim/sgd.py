"""Stochastic gradient descent, plain, with momentum, and with Nesterov's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.errors import StructureError, message
from tdc.optim import foreach as c
from tdc.optim import fused
from tdc.optim.adam import decayed
from tdc.optim.base import optimizer
from tdc.optim.foreach import Column, Scalar
from tdc.optim.transform import Optimizer, Rate, check_numbers, given


def sgd(
    lr: Rate = 1e-3, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
) -> Optimizer:
    """Steps against the gradient, or along a running sum of gradients.

    Args:
        lr: a float, a tensor `batch_size`, or a schedule `step -> lr`.
        momentum, dampening, weight_decay, nesterov: as in `torch.optim.SGD`. The first step is not dampened.

    Returns:
        An `Optimizer`; its state is `{"momentum": …, "step": …}`, without momentum `{"step": …}`.

    Raises:
        StructureError: a setting out of its range, nesterov without momentum or with dampening.

    Example:
        >>> from tdc import TensorDict
        >>> opt = sgd(lr=0.1, momentum=0.9)
        >>> params = TensorDict({"w": torch.ones(2)})
        >>> params, state = opt.update(params, opt.init(params), params)
        >>> params["w"], state["momentum", "w"]
        (tensor([0.9000, 0.9000]), tensor([1., 1.]))

    Source:
        `torch.optim.SGD`.
    """
    op = "optim.sgd"
    check_numbers(op, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay)
    if nesterov and (not given(momentum) or given(dampening)):
        got = f"momentum={momentum:g}, dampening={dampening:g}"
        hint = "sgd(lr, momentum=0.9, nesterov=True)"
        raise StructureError(message(op, "momentum and no dampening for nesterov", got, hint=hint))

    def many(ps: Column, gs: Column, *rest: Any) -> tuple[Column, ...]:
        *buffers, rate, weight, n = rest
        if buffers and not given(dampening) and fused.takes([ps, gs, *buffers], rate, n, momentum, weight_decay):
            return fused.sgd.stepped([ps, gs, *buffers], rate, n, momentum, weight_decay, nesterov)
        ps, gs = decayed(ps, gs, weight_decay, None)
        if not buffers:
            return (c.minus(ps, gs, rate),)
        new = c.plus(c.times(buffers[0], momentum), c.times(gs, weight) if given(dampening) else gs)
        return c.minus(ps, c.plus(gs, new, momentum) if nesterov else new, rate), new

    def scalars(rate: Any, n: Tensor) -> tuple[Scalar, ...]:
        return rate, torch.where(n == 1, n, 1.0 - dampening) if given(dampening) else 1.0, n

    return optimizer(op, lr, ("momentum",) if given(momentum) else (), many, scalars)
