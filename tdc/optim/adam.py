"""Adam and AdamW: steps along a running mean of gradients, divided by the root of a running mean of their squares.

Both are one function; they differ in where weight decay goes, into the gradient or past it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect, expect_number
from tdc.optim import foreach as c
from tdc.optim.base import Optimizer, Rate, check_numbers, optimizer, pair_of
from tdc.optim.foreach import Column, Scalar


def adam(
    lr: Rate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
) -> Optimizer:
    """Adam; weight decay is a term of the gradient.

    Args:
        lr: a float, a tensor `batch_size`, or a schedule `step -> lr`.
        betas, eps, weight_decay: as in `torch.optim.Adam`, with its defaults.

    Returns:
        An `Optimizer`; its state is `{"mean": …, "square": …, "step": …}`.

    Raises:
        StructureError: a setting out of its range.

    Example:
        >>> from tdc import TensorDict
        >>> opt = adam(lr=0.1)
        >>> params = TensorDict({"w": torch.ones(2)})
        >>> params, state = opt.update(params, opt.init(params), params)
        >>> params["w"], state["step"]
        (tensor([0.9000, 0.9000]), tensor(1))

    Source:
        `torch.optim.Adam`; Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015.
    """
    return of_kind("optim.adam", lr, betas, eps, weight_decay, False)


def adamw(
    lr: Rate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2
) -> Optimizer:
    """Adam with decoupled weight decay; all but that as `adam`, with the defaults of `torch.optim.AdamW`.

    Example:
        >>> from tdc import TensorDict
        >>> opt = adamw(lr=0.1)
        >>> params = TensorDict({"w": torch.ones(2)})
        >>> params, state = opt.update(params, opt.init(params), params)
        >>> params["w"]
        tensor([0.8990, 0.8990])

    Source:
        `torch.optim.AdamW`; Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.
    """
    return of_kind("optim.adamw", lr, betas, eps, weight_decay, True)


def of_kind(
    op: str, lr: Rate, betas: tuple[float, float], eps: float, weight_decay: float, decoupled: bool
) -> Optimizer:
    """Adam, with weight decay past the gradient where it is decoupled."""
    beta1, beta2 = pair_of(op, betas)
    check_numbers(op, lr=lr, eps=eps, weight_decay=weight_decay)

    def many(
        ps: Column, gs: Column, means: Column, squares: Column, keep: Scalar, rate: Scalar, root: Scalar
    ) -> tuple[Column, Column, Column]:
        if weight_decay and decoupled:
            ps = c.times(ps, keep)
        elif weight_decay:
            gs = c.plus(gs, ps, weight_decay)
        means = c.lerp(means, gs, 1 - beta1)
        squares = c.plus_product(c.times(squares, beta2), gs, gs, 1 - beta2)
        sizes = c.plus_number(c.over(c.sqrt(squares), root), eps)
        return c.minus(ps, c.ratio(means, sizes), rate), means, squares

    def scalars(rate: Any, n: Tensor) -> tuple[Scalar, ...]:
        return 1 - rate * weight_decay, rate / debias(beta1, n), debias(beta2, n).sqrt()

    return optimizer(op, lr, ("mean", "square"), many, scalars)


def debias(beta: float, step: Tensor) -> Tensor:
    """`1 - beta**step`, without the cancellation that costs float32 four digits in the first steps.

    Example:
        >>> debias(0.9, torch.tensor([1, 2]))
        tensor([0.1000, 0.1900])
    """
    expect_number("optim.debias", beta)
    expect("optim.debias", step, Tensor)
    return -torch.expm1(step * (math.log(beta) if beta else -math.inf))
