"""Optimisers of elements by their gradients: SGD, Lion, and those that divide by the root of squares."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.errors import StructureError, message
from tdc.kernels import optimizers as kernels
from tdc.optim import foreach as c
from tdc.optim.adam import decayed, moved_squares
from tdc.optim.base import optimizer, wide
from tdc.optim.checks import check_numbers, given, pair_of
from tdc.optim.foreach import Column, Scalar, can_fuse, fused_update
from tdc.optim.transform import Optimizer, Rate, takes_rate


@takes_rate
def sgd(
    lr: Rate = 1e-3, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
) -> Optimizer:
    """Gradient descent, plain or with momentum, a running sum of gradients.

    Args:
        momentum, dampening, weight_decay, nesterov: as in `torch.optim.SGD`. The first step is not dampened.

    Returns:
        An `Optimizer`; its state is `{"momentum": …, "step": …}`, without momentum `{"step": …}`.

    Raises:
        StructureError: nesterov without momentum or with dampening.

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
        if buffers and not given(dampening) and can_fuse([ps, gs, *buffers], rate, n, momentum, weight_decay):
            return fused_update(kernels.sgd, [ps, gs, *buffers], rate, n, momentum, weight_decay, nesterov)
        ps, gs = decayed(ps, gs, weight_decay, None)
        if not buffers:
            return (c.minus(ps, gs, rate),)
        new = c.plus(c.times(buffers[0], momentum), c.times(gs, weight) if given(dampening) else gs)
        return c.minus(ps, c.plus(gs, new, momentum) if nesterov else new, rate), new

    def scalars(rate: Any, n: Tensor) -> tuple[Scalar, ...]:
        return rate, torch.where(n == 1, n, 1.0 - dampening) if given(dampening) else 1.0, n

    return optimizer(op, lr, ("momentum",) if given(momentum) else (), many, scalars)


@takes_rate
def lion(lr: Rate = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> Optimizer:
    """Steps by the sign of `lerp(mean, gradient, 1 - beta1)`, with decoupled weight decay.

    Args:
        lr: a float, a tensor `batch_size`, or a schedule `step -> lr`; 3 to 10 times smaller than for AdamW.
        betas: beta1 of the step, beta2 of the mean.
        weight_decay: multiplied by `lr` as in AdamW, so 3 to 10 times larger than there.

    Returns:
        An `Optimizer`; its state is `{"mean": …, "step": …}`.

    Example:
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
        signs = c.sign(c.lerp(means, gs, 1 - beta1))
        ps, _ = decayed(ps, gs, weight_decay, keep)
        return c.minus(ps, signs, rate), c.lerp(means, gs, 1 - beta2)

    def scalars(rate: Any, n: Tensor) -> tuple[Scalar, ...]:
        return 1 - rate * weight_decay, rate

    return optimizer(op, lr, ("mean",), many, scalars)


@takes_rate
def adagrad(
    lr: Rate = 1e-2, lr_decay: float = 0.0, weight_decay: float = 0.0, initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
) -> Optimizer:  # fmt: skip
    """Gradients over the root of the sum of all their squares; settings as in `torch.optim.Adagrad`.

    Returns:
        An `Optimizer`; its state is `{"sum": …, "step": …}`.

    Example:
        >>> from tdc import TensorDict
        >>> opt = adagrad(lr=0.1)
        >>> params = TensorDict({"w": torch.ones(2)})
        >>> params, state = opt.update(params, opt.init(params), params)
        >>> params["w"], state["sum", "w"]
        (tensor([0.9000, 0.9000]), tensor([1., 1.]))

    Source:
        `torch.optim.Adagrad`; Duchi et al., Adaptive Subgradient Methods, 2011.
    """
    op = "optim.adagrad"
    check_numbers(op, lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps, initial=initial_accumulator_value)

    def many(ps: Column, gs: Column, sums: Column, rate: Scalar) -> tuple[Column, ...]:
        _, gs = decayed(ps, gs, weight_decay, None)
        sums = c.plus_product(sums, gs, gs, 1.0)
        return c.minus(ps, c.ratio(gs, c.plus_number(c.sqrt(sums), eps)), rate), sums

    def first(p: Tensor) -> Tensor:
        value = initial_accumulator_value
        return torch.full_like(p, complex(value, value) if p.is_complex() else value, dtype=wide(p.dtype))

    def scalars(rate: Any, n: Tensor) -> tuple[Scalar, ...]:
        return (rate / (1 + (n - 1) * lr_decay) if given(lr_decay) else rate,)

    return optimizer(op, lr, ("sum",), many, scalars, start={"sum": first})


@takes_rate
def rmsprop(
    lr: Rate = 1e-2, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0, momentum: float = 0.0,
    centered: bool = False,
) -> Optimizer:  # fmt: skip
    """Gradients over the root of a running mean of their squares; settings as in `torch.optim.RMSprop`.

    Args:
        centered: divide by the deviation, not by the root of the mean square.

    Returns:
        An `Optimizer`; its state is `{"square": …, "step": …}`, with momentum also `"momentum"`, centered `"mean"`.

    Example:
        >>> from tdc import TensorDict
        >>> opt = rmsprop(lr=0.1, alpha=0.75)
        >>> params = TensorDict({"w": torch.ones(2)})
        >>> opt.update(params, opt.init(params), params)[0]["w"]
        tensor([0.8000, 0.8000])

    Source:
        `torch.optim.RMSprop`; Hinton, Neural Networks for Machine Learning, lecture 6, 2012.
    """
    op = "optim.rmsprop"
    check_numbers(op, lr=lr, eps=eps, weight_decay=weight_decay, momentum=momentum)
    check_numbers(op, below=1.0, alpha=alpha)
    moving = given(momentum)

    def many(ps: Column, gs: Column, squares: Column, *rest: Any) -> tuple[Column, ...]:
        *others, rate = rest
        _, gs = decayed(ps, gs, weight_decay, None)
        squares, new = moved_squares(squares, gs, alpha), []
        spread = squares
        if centered:
            means = c.lerp(others[-1], gs, 1 - alpha)
            spread, new = c.plus_product(squares, means, means, -1.0), [means]
        steps = c.ratio(gs, c.plus_number(c.sqrt(spread), eps))
        if moving:
            steps = c.plus(c.times(others[0], momentum), steps)
            new = [steps, *new]
        return c.minus(ps, steps, rate), squares, *new

    names = ("square", *["momentum"] * moving, *["mean"] * centered)
    return optimizer(op, lr, names, many, lambda rate, n: (rate,))


@takes_rate
def adadelta(lr: Rate = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0) -> Optimizer:
    """Steps scaled by a running mean of those before; settings as in `torch.optim.Adadelta`.

    Returns:
        An `Optimizer`; its state is `{"square": …, "delta": …, "step": …}`, running means of squares.

    Example:
        >>> from tdc import TensorDict
        >>> opt = adadelta()
        >>> params = TensorDict({"w": torch.ones(2)})
        >>> opt.update(params, opt.init(params), params)[0]["w"]
        tensor([0.9968, 0.9968])

    Source:
        `torch.optim.Adadelta`; Zeiler, ADADELTA: An Adaptive Learning Rate Method, 2012.
    """
    op = "optim.adadelta"
    check_numbers(op, lr=lr, eps=eps, weight_decay=weight_decay)
    check_numbers(op, below=1.0, rho=rho)

    def many(ps: Column, gs: Column, squares: Column, deltas: Column, rate: Scalar) -> tuple[Column, ...]:
        _, gs = decayed(ps, gs, weight_decay, None)
        squares = moved_squares(squares, gs, rho)
        roots = [c.sqrt(c.plus_number(xs, eps)) for xs in (deltas, squares)]
        steps = c.product(c.ratio(*roots), gs)
        return c.minus(ps, steps, rate), squares, moved_squares(deltas, steps, rho)

    return optimizer(op, lr, ("square", "delta"), many, lambda rate, n: (rate,))
