"""Adagrad, RMSprop and Adadelta: gradients divided by the root of a sum or mean of their squares."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.optim import foreach as c
from tdc.optim.adam import decayed
from tdc.optim.base import optimizer, wide
from tdc.optim.foreach import Column, Scalar
from tdc.optim.transform import Optimizer, Rate, check_numbers, given


def adagrad(
    lr: Rate = 1e-2, lr_decay: float = 0.0, weight_decay: float = 0.0, initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
) -> Optimizer:  # fmt: skip
    """Gradients over the root of the sum of all their squares; settings as in `torch.optim.Adagrad`.

    Args:
        lr: a float, a tensor `batch_size`, or a schedule `step -> lr`.

    Returns:
        An `Optimizer`; its state is `{"sum": …, "step": …}`.

    Raises:
        StructureError: a setting out of its range.

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


def rmsprop(
    lr: Rate = 1e-2, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0, momentum: float = 0.0,
    centered: bool = False,
) -> Optimizer:  # fmt: skip
    """Gradients over the root of a running mean of their squares; settings as in `torch.optim.RMSprop`.

    Args:
        lr: a float, a tensor `batch_size`, or a schedule `step -> lr`.
        centered: divide by the deviation, not by the root of the mean square.

    Returns:
        An `Optimizer`; its state is `{"square": …, "step": …}`, with momentum also `"momentum"`, centered `"mean"`.

    Raises:
        StructureError: a setting out of its range.

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
        squares, new = c.plus_product(c.times(squares, alpha), gs, gs, 1 - alpha), []
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


def adadelta(lr: Rate = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0) -> Optimizer:
    """Steps as long as a running mean of those before; settings as in `torch.optim.Adadelta`.

    Args:
        lr: a float, a tensor `batch_size`, or a schedule `step -> lr`.

    Returns:
        An `Optimizer`; its state is `{"square": …, "delta": …, "step": …}`, running means of squares.

    Raises:
        StructureError: a setting out of its range.

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
        squares = c.plus_product(c.times(squares, rho), gs, gs, 1 - rho)
        roots = [c.sqrt(c.plus_number(xs, eps)) for xs in (deltas, squares)]
        steps = c.product(c.ratio(*roots), gs)
        deltas = c.plus_product(c.times(deltas, rho), steps, steps, 1 - rho)
        return c.minus(ps, steps, rate), squares, deltas

    return optimizer(op, lr, ("square", "delta"), many, lambda rate, n: (rate,))
