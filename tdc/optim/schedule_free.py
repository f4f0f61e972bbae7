"""Schedule-free SGD and AdamW: no schedule needs to know where training ends, since parameters are averaged.

y   params            gradients are taken here, between the two below
z   state["fast"]     goes along the gradients
x   state["average"]  a weighted mean of all z: evaluate with `averaged(state)`
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect_number
from tdc.optim import foreach as c
from tdc.optim.adam import debias, decayed
from tdc.optim.base import Start, optimizer, wide
from tdc.optim.foreach import Column, Scalar
from tdc.optim.transform import Optimizer, Rate, check_numbers, pair_of


def copy(p: Tensor) -> Tensor:
    """A moment that begins as the parameter."""
    return p.detach().to(wide(p.dtype), copy=True)


START: dict[str, Start] = {"fast": copy, "average": copy}


def schedule_free_sgd(lr: Rate = 1.0, momentum: float = 0.9, weight_decay: float = 0.0, warmup: int = 0) -> Optimizer:
    """SGD along averages; evaluate with `averaged(state)`.

    Args:
        lr: a float, a tensor `batch_size`, or a schedule `step -> lr`; larger than for SGD with momentum.
        momentum: how near to the average gradients are taken, in [0, 1).
        weight_decay: a term of the gradient.
        warmup: over how many steps the rate rises in a line.

    Returns:
        An `Optimizer`; its state is `{"fast": …, "average": …, "weight": …, "step": …}`, the sum of squared rates.

    Raises:
        StructureError: a setting out of its range.

    Example:
        >>> from tdc import TensorDict
        >>> from tdc.optim import averaged
        >>> opt, params = schedule_free_sgd(lr=0.5), TensorDict({"w": torch.ones(2)})
        >>> params, state = opt.update(params, opt.init(params), params)
        >>> params["w"], averaged(state)["w"]
        (tensor([0.5000, 0.5000]), tensor([0.5000, 0.5000]))

    Source:
        Defazio et al., The Road Less Scheduled, 2024, equations 2 to 4, with weights of squared rates.
    """
    op = "optim.schedule_free_sgd"
    check_numbers(op, lr=lr, weight_decay=weight_decay, warmup=warmup)
    check_numbers(op, below=1.0, momentum=momentum)
    expect_number(op, warmup, whole=True)

    def many(ps: Column, gs: Column, fast: Column, means: Column, rate: Scalar, part: Scalar) -> tuple[Column, ...]:
        _, gs = decayed(ps, gs, weight_decay, None)
        fast = c.minus(fast, gs, rate)
        means = c.lerp(means, fast, part)
        return c.lerp(fast, means, momentum), fast, means

    def scalars(rate: Any, n: Tensor, weight: Tensor) -> tuple[Scalar, ...]:
        rate, weight, part = weighed(rate, n, weight)
        return weight, rate, part

    return optimizer(op, lr, ("fast", "average"), many, scalars, start=START, kept={"weight": 0.0}, warmup=warmup)


def schedule_free_adamw(
    lr: Rate = 2.5e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
    warmup: int = 0,
) -> Optimizer:  # fmt: skip
    """AdamW along averages; evaluate with `averaged(state)`.

    Args:
        lr: a float, a tensor `batch_size`, or a schedule `step -> lr`.
        betas: how near to the average gradients are taken, and of the running mean of squares.
        eps: as in `adamw`.
        weight_decay: times the rate and the parameters where gradients are taken.
        warmup: over how many steps the rate rises in a line.

    Returns:
        An `Optimizer`; its state is that of `schedule_free_sgd` with `"square"`.

    Raises:
        StructureError: a setting out of its range.

    Example:
        >>> from tdc import TensorDict
        >>> opt, params = schedule_free_adamw(lr=0.5), TensorDict({"w": torch.ones(2)})
        >>> opt.update(params, opt.init(params), params)[0]["w"]
        tensor([0.5000, 0.5000])

    Source:
        Defazio et al., The Road Less Scheduled, 2024, algorithm 1.
    """
    op = "optim.schedule_free_adamw"
    beta1, beta2 = pair_of(op, betas)
    check_numbers(op, lr=lr, eps=eps, weight_decay=weight_decay, warmup=warmup)
    expect_number(op, warmup, whole=True)

    def many(
        ps: Column, gs: Column, fast: Column, means: Column, squares: Column, rate: Scalar, part: Scalar, root: Scalar
    ) -> tuple[Column, ...]:
        squares = c.plus_product(c.times(squares, beta2), gs, gs, 1 - beta2)
        steps = c.ratio(gs, c.plus_number(c.over(c.sqrt(squares), root), eps))
        _, steps = decayed(ps, steps, weight_decay, None)
        fast = c.minus(fast, steps, rate)
        means = c.lerp(means, fast, part)
        return c.lerp(fast, means, beta1), fast, means, squares

    def scalars(rate: Any, n: Tensor, weight: Tensor) -> tuple[Scalar, ...]:
        rate, weight, part = weighed(rate, n, weight)
        return weight, rate, part, debias(beta2, n).sqrt()

    return optimizer(
        op, lr, ("fast", "average", "square"), many, scalars, start=START, kept={"weight": 0.0}, warmup=warmup
    )


def weighed(rate: Any, n: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rate, the sum of squared rates, and this step's part in it; 0 where no rate was above 0."""
    rate = torch.ones_like(n) * rate
    after = weight + rate * rate
    return rate, after, torch.where(after > 0, rate * rate / torch.where(after > 0, after, 1.0), 0.0)
