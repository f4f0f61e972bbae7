"""Adafactor: a running mean of squares that is kept as one row and one column for each matrix.

squares (m, n)  ~  row (m, 1) * column (1, n) / mean of row
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tdc.core.errors import DtypeError, StructureError, describe, message
from tdc.optim import foreach as c
from tdc.optim.adam import decayed
from tdc.optim.base import optimizer, wide
from tdc.optim.by_leaf import norm, refuse_complex
from tdc.optim.foreach import Column, Scalar
from tdc.optim.groups import by_paths
from tdc.optim.transform import Optimizer, Rate, check_numbers, trainable
from tdc.tensordict.tensordict import TensorDict


def adafactor(
    lr: Rate = 1e-2, beta2_decay: float = -0.8, eps: tuple[float | None, float] = (None, 1e-3), d: float = 1.0,
    weight_decay: float = 0.0,
) -> Optimizer:  # fmt: skip
    """Gradients over the root of a running mean of squares that is kept as one row and one column for each matrix.

    Args:
        lr: a float, a tensor `batch_size`, or a schedule `step -> lr`; at most this, and relative to the parameters.
        others: as in `torch.optim.Adafactor`, with its defaults.

    Returns:
        An `Optimizer`; its state is `{"factored": {"row": …, "column": …, "step": …}, "whole": {"square": …, …}}`,
        "whole" for leaves of less than two dims.

    Raises:
        StructureError: a setting out of its range.
        DtypeError: in `init` and `update`, complex parameters.

    Example:
        >>> from tdc import TensorDict
        >>> opt = adafactor(lr=0.1)
        >>> params = TensorDict({"w": torch.ones(2, 3)})
        >>> params, state = opt.update(params, opt.init(params), params)
        >>> params["w"][0], state["factored", "row", "w"].shape
        (tensor([0.9000, 0.9000, 0.9000]), torch.Size([2, 1]))

    Source:
        `torch.optim.Adafactor`; Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018.
    """
    op = "optim.adafactor"
    if not isinstance(eps, (tuple, list)) or len(eps) != 2:
        raise DtypeError(message(op, "two numbers as eps", describe(eps), hint="eps=(None, 1e-3)"))
    check_numbers(op, lr=lr, weight_decay=weight_decay, d=d, eps1=0.0 if eps[0] is None else eps[0], eps2=eps[1])
    check_numbers(op, minus_beta2_decay=-beta2_decay if isinstance(beta2_decay, (int, float)) else beta2_decay)
    if not isinstance(d, Tensor) and d < 1:
        hint = "d=1.0: steps are clipped where their root mean square is larger"
        raise StructureError(message(op, "d of at least 1", f"d={d:g}", hint=hint))

    def many(k: int, ps: Column, gs: Column, *rest: Any) -> tuple[Column, ...]:
        *moments, keep, weight, rate = rest
        tiny = torch.finfo(ps[0].dtype).eps if eps[0] is None and ps else eps[0] or 0.0
        moments, estimates = averages(moments, [g * g for g in gs], weight, tiny)
        triples = zip(ps, gs, estimates, strict=True)
        steps = [step_of(k, p, g, square, tiny, eps[1], d) for p, g, square in triples]
        ps, _ = decayed(ps, gs, weight_decay, keep)
        return c.minus(ps, steps, rate), *moments

    def scalars(rate: Any, n: Tensor) -> tuple[Scalar, ...]:
        relative = torch.minimum(torch.as_tensor(rate, dtype=n.dtype, device=n.device), n.rsqrt())
        return 1 - rate * weight_decay, n**beta2_decay, relative

    factored = optimizer(
        op, lr, ("row", "column"), many, scalars,
        start={"row": line(-1), "column": line(-2)}, features=refuse_complex, own_shapes=True,
    )  # fmt: skip
    whole = optimizer(op, lr, ("square",), many, scalars, features=refuse_complex)

    both = by_paths(op, {"factored": factored, "whole": whole}, by_rank)
    return replace(both, rates=lambda state: whole.rates(state["whole"]))


def averages(moments: list[Column], squares: Column, weight: Scalar, tiny: float) -> tuple[list[Column], Column]:
    """The running means of squares, or of their rows and columns, and what they estimate the squares to be."""
    if len(moments) == 1:
        means = c.lerp(moments[0], squares, weight)
        return [means], means
    lines = [[x.sum(dim, keepdim=True) / max(x.shape[dim], 1) for x in squares] for dim in (-1, -2)]
    rows, columns = [c.lerp(xs, new, weight) for xs, new in zip(moments, lines, strict=True)]
    pairs = zip(rows, columns, strict=True)
    return [rows, columns], [row * column / row.mean(-2, keepdim=True).clamp(min=tiny) for row, column in pairs]


def step_of(k: int, p: Tensor, g: Tensor, square: Tensor, tiny: float, least: float, d: Scalar) -> Tensor:
    """The step of a parameter, relative to its size, by an estimate of the squares."""
    found = g * square.clamp(min=tiny * tiny).rsqrt()
    count = math.prod(p.shape[k:]) ** 0.5
    longer = norm(found, k) / count / c.each(d, [found])[0]
    return found * ((norm(p, k) / count).clamp(min=least) / longer.clamp(min=1.0))


def line(dim: int) -> Any:
    """What makes zeros of a parameter, of size 1 along a dim."""
    return lambda p: torch.zeros_like(p.sum(dim, keepdim=True), dtype=wide(p.dtype))


def by_rank(params: TensorDict) -> list[list[bool]]:
    """Whether leaves have rows and columns, and whether they have none."""
    ranks = [p.ndim - len(params._size) if trainable(p) else None for p in params._leaves.values()]
    return [[n is not None and n > 1 for n in ranks], [n is not None and n < 2 for n in ranks]]
