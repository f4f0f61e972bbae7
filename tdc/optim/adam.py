"""The family of Adam: steps along a running mean of gradients, divided by the root of a running mean of their squares.

adam      weight decay in the gradient          nadam     with Nesterov's momentum
adamw     decoupled weight decay                radam     without the root while its variance is too large
adamax    divided by a running maximum
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect, expect_number
from tdc.kernels import optimizers as kernels
from tdc.optim import foreach as c
from tdc.optim.base import optimizer
from tdc.optim.checks import check_numbers, given, pair_of
from tdc.optim.foreach import Column, Scalar, can_fuse, fused_update
from tdc.optim.transform import Optimizer, Rate, takes_rate


@takes_rate
def adam(
    lr: Rate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
    amsgrad: bool = False,
) -> Optimizer:  # fmt: skip
    """Adam; weight decay is a term of the gradient.

    Args:
        lr: a float, a tensor `batch_size`, or a schedule `step -> lr`.
        betas, eps, weight_decay: as in `torch.optim.Adam`, with its defaults.
        amsgrad: divide by the largest running mean of squares so far.

    Returns:
        An `Optimizer`; its state is `{"mean": …, "square": …, "step": …}`, with amsgrad also `"largest"`.

    Example:
        >>> from tdc import TensorDict
        >>> opt = adam(lr=0.1)
        >>> params = TensorDict({"w": torch.ones(2)})
        >>> params, state = opt.update(params, opt.init(params), params)
        >>> params["w"], state["step"]
        (tensor([0.9000, 0.9000]), tensor(1))

    Source:
        `torch.optim.Adam`; Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015; Reddi et al., On the
        Convergence of Adam and Beyond, 2018.
    """
    return of_adam("optim.adam", lr, betas, eps, weight_decay, amsgrad, False)


@takes_rate
def adamw(
    lr: Rate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2,
    amsgrad: bool = False,
) -> Optimizer:  # fmt: skip
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
    return of_adam("optim.adamw", lr, betas, eps, weight_decay, amsgrad, True)


def of_adam(
    op: str, lr: Rate, betas: tuple[float, float], eps: float, weight_decay: float, amsgrad: bool, decoupled: bool
) -> Optimizer:
    """Adam, with weight decay of the gradient or decoupled from it."""
    beta1, beta2 = pair_of(op, betas)
    check_numbers(op, lr=lr, eps=eps, weight_decay=weight_decay)

    def many(ps: Column, gs: Column, means: Column, squares: Column, *rest: Any) -> tuple[Column, ...]:
        *largest, rate, n = rest
        columns, settings = [ps, gs, means, squares, *largest], (*betas, eps, weight_decay)
        if can_fuse(columns, rate, n, *settings):
            return fused_update(kernels.adam, columns, rate, n, *settings, decoupled)
        ps, gs = decayed(ps, gs, weight_decay, 1 - rate * weight_decay if decoupled else None)
        means, squares = c.lerp(means, gs, 1 - beta1), moved_squares(squares, gs, beta2)
        largest = [c.maximum(xs, squares) for xs in largest]
        root = debias(beta2, n).sqrt()
        sizes = c.plus_number(c.over(c.sqrt(largest[0] if largest else squares), root), eps)
        return c.minus(ps, c.ratio(means, sizes), rate / debias(beta1, n)), means, squares, *largest

    return optimizer(op, lr, ("mean", "square", *["largest"] * amsgrad), many, lambda rate, n: (rate, n))


def decayed(ps: Column, gs: Column, weight_decay: Scalar, keep: Scalar | None) -> tuple[Column, Column]:
    """Weight decay as a term of the gradients, or, with a factor `keep`, of the parameters."""
    if not given(weight_decay):
        return ps, gs
    return (ps, c.plus(gs, ps, weight_decay)) if keep is None else (c.times(ps, keep), gs)


def moved_squares(squares: Column, xs: Column, beta: float) -> Column:
    """Running means of squares after one step."""
    return c.plus_product(c.times(squares, beta), xs, xs, 1 - beta)


@takes_rate
def adamax(
    lr: Rate = 2e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
) -> Optimizer:
    """Adam divided by a decaying maximum of the gradients' sizes; settings as `adam`.

    Returns:
        An `Optimizer`; its state is `{"mean": …, "largest": …, "step": …}`.

    Example:
        >>> from tdc import TensorDict
        >>> opt = adamax(lr=0.1)
        >>> params = TensorDict({"w": torch.ones(2)})
        >>> opt.update(params, opt.init(params), params)[0]["w"]
        tensor([0.9000, 0.9000])

    Source:
        `torch.optim.Adamax`; Kingma and Ba, 2015, section 7.1.
    """
    op = "optim.adamax"
    beta1, beta2 = pair_of(op, betas)
    check_numbers(op, lr=lr, eps=eps, weight_decay=weight_decay)

    def many(ps: Column, gs: Column, means: Column, largest: Column, rate: Scalar) -> tuple[Column, ...]:
        _, gs = decayed(ps, gs, weight_decay, None)
        means = c.lerp(means, gs, 1 - beta1)
        largest = c.maximum(c.times(largest, beta2), c.plus_number(c.absolute(gs), eps))
        return c.minus(ps, c.ratio(means, largest), rate), means, largest

    return optimizer(op, lr, ("mean", "largest"), many, lambda rate, n: (rate / debias(beta1, n),))


@takes_rate
def nadam(
    lr: Rate = 2e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
    momentum_decay: float = 4e-3, decoupled_weight_decay: bool = False,
) -> Optimizer:  # fmt: skip
    """Adam with Nesterov's momentum; settings as in `torch.optim.NAdam`.

    Returns:
        An `Optimizer`; its state is `{"mean": …, "square": …, "product": …, "step": …}`, the product of all momenta.

    Example:
        >>> from tdc import TensorDict
        >>> opt = nadam(lr=0.1)
        >>> params = TensorDict({"w": torch.ones(2)})
        >>> opt.update(params, opt.init(params), params)[0]["w"]
        tensor([0.8944, 0.8944])

    Source:
        `torch.optim.NAdam`; Dozat, Incorporating Nesterov Momentum into Adam, 2016.
    """
    op = "optim.nadam"
    beta1, beta2 = pair_of(op, betas)
    check_numbers(op, lr=lr, eps=eps, weight_decay=weight_decay, momentum_decay=momentum_decay)

    def many(
        ps: Column, gs: Column, means: Column, squares: Column, keep: Scalar, by_grad: Scalar, by_mean: Scalar,
        root: Scalar,
    ) -> tuple[Column, ...]:  # fmt: skip
        ps, gs = decayed(ps, gs, weight_decay, keep if decoupled_weight_decay else None)
        means, squares = c.lerp(means, gs, 1 - beta1), moved_squares(squares, gs, beta2)
        sizes = c.plus_number(c.over(c.sqrt(squares), root), eps)
        return c.minus(c.minus(ps, c.ratio(gs, sizes), by_grad), c.ratio(means, sizes), by_mean), means, squares

    def scalars(rate: Any, n: Tensor, product: Tensor) -> tuple[Scalar, ...]:
        now, then = [beta1 * (1 - 0.5 * 0.96 ** (t * momentum_decay)) for t in (n, n + 1)]
        product = product * now
        by_grad, by_mean = rate * (1 - now) / (1 - product), rate * then / (1 - product * then)
        return product, 1 - rate * weight_decay, by_grad, by_mean, debias(beta2, n).sqrt()

    return optimizer(op, lr, ("mean", "square"), many, scalars, kept={"product": 1.0})


@takes_rate
def radam(
    lr: Rate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
) -> Optimizer:  # fmt: skip
    """Adam with a rectified variance: the first steps are of momentum alone; settings as in `torch.optim.RAdam`.

    Returns:
        An `Optimizer`; its state is `{"mean": …, "square": …, "step": …}`.

    Example:
        >>> from tdc import TensorDict
        >>> opt = radam(lr=0.1)
        >>> params = TensorDict({"w": torch.ones(2)})
        >>> opt.update(params, opt.init(params), params)[0]["w"]
        tensor([0.9000, 0.9000])

    Source:
        `torch.optim.RAdam`; Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, 2020.
    """
    op = "optim.radam"
    beta1, beta2 = pair_of(op, betas)
    check_numbers(op, lr=lr, eps=eps, weight_decay=weight_decay)
    longest = 2 / (1 - beta2) - 1

    def many(
        ps: Column, gs: Column, means: Column, squares: Column, keep: Scalar, plain: Scalar, rate: Scalar
    ) -> tuple[Column, ...]:
        ps, gs = decayed(ps, gs, weight_decay, keep if decoupled_weight_decay else None)
        means, squares = c.lerp(means, gs, 1 - beta1), moved_squares(squares, gs, beta2)
        rectified = c.ratio(means, c.plus_number(c.sqrt(squares), eps))
        return c.minus(c.minus(ps, means, plain), rectified, rate), means, squares

    def scalars(rate: Any, n: Tensor) -> tuple[Scalar, ...]:
        root, first = debias(beta2, n), rate / debias(beta1, n)
        length = longest - 2 * n * (1 - root) / root
        known = length > 5
        safe = torch.where(known, length, 6.0)
        scale = (safe - 4) * (safe - 2) * longest / ((longest - 4) * (longest - 2) * safe) * root
        zero = torch.zeros_like(first)
        plain, rectified = torch.where(known, zero, first), torch.where(known, first * scale.sqrt(), zero)
        return 1 - rate * weight_decay, plain, rectified

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
