"""Lion: steps of one size in every element, by the sign of a running mean of gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tdc.optim import foreach as c
from tdc.optim.adam import decayed
from tdc.optim.base import optimizer
from tdc.optim.foreach import Column, Scalar
from tdc.optim.transform import Optimizer, Rate, check_numbers, pair_of


def lion(lr: Rate = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> Optimizer:
    """Signs of `lerp(mean, gradient, 1 - beta1)`, with decoupled weight decay; beta2 is that of the mean.

    Args:
        lr: a float, a tensor `batch_size`, or a schedule `step -> lr`; 3 to 10 times smaller than for AdamW.
        betas: of the step and of the mean.
        weight_decay: times `lr`, as in AdamW; so 3 to 10 times larger than there.

    Returns:
        An `Optimizer`; its state is `{"mean": …, "step": …}`.

    Raises:
        StructureError: a setting out of its range.

    Example:
        >>> import torch
        >>> from tdc import TensorDict
        >>> opt = lion(lr=0.1)
        >>> params = TensorDict({"w": torch.tensor([2.0, -3.0])})
        >>> params, state = opt.update(params, opt.init(params), params)
        >>> params["w"]
        tensor([ 1.9000, -2.9000])

    Source:
        Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, algorithm 2.
    """
    op = "optim.lion"
    beta1, beta2 = pair_of(op, betas)
    check_numbers(op, lr=lr, weight_decay=weight_decay)

    def many(ps: Column, gs: Column, means: Column, keep: Scalar, rate: Scalar) -> tuple[Column, Column]:
        directions = c.sign(c.lerp(means, gs, 1 - beta1))
        ps, _ = decayed(ps, gs, weight_decay, keep)
        return c.minus(ps, directions, rate), c.lerp(means, gs, 1 - beta2)

    def scalars(rate: Any, n: Tensor) -> tuple[Scalar, ...]:
        return 1 - rate * weight_decay, rate

    return optimizer(op, lr, ("mean",), many, scalars)
