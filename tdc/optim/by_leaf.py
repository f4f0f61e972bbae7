"""Optimisers that read whole leaves: LAMB norms, Muon singular values, Adafactor sums of rows and columns.

Leaves `(*k, *features)` of k batch dims; norms and means are over features, so stacked models stay apart.

    Adafactor    squares (m, n)  ~  row (m, 1) * column (1, n) / mean of row
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect_at_least, expect_number
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message, refuse_wrong
from tdc.core.keys import show
from tdc.optim import foreach as c
from tdc.optim.adam import debias, decayed, moved_squares
from tdc.optim.base import optimizer, wide
from tdc.optim.checks import check_numbers, pair_of, trainable
from tdc.optim.combine import by_paths
from tdc.optim.foreach import Column, Scalar
from tdc.optim.transform import Optimizer, Rate, takes_rate
from tdc.tensordict.tensordict import TensorDict

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


@takes_rate
def lamb(
    lr: Rate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.0
) -> Optimizer:
    """AdamW with each leaf's step scaled to the norm of its parameter: for large batches.

    Args:
        betas, eps, weight_decay: as in `adamw`; the decay is part of the scaled step.

    Returns:
        An `Optimizer`; its state is `{"mean": …, "square": …, "step": …}`.

    Raises:
        DtypeError: in `init` and `update`, complex parameters.

    Example:
        >>> opt = lamb(lr=0.1)
        >>> params = TensorDict({"w": torch.full((2,), 3.0)})
        >>> opt.update(params, opt.init(params), params)[0]["w"]
        tensor([2.7000, 2.7000])

    Source:
        You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, 2020, algorithm 2.
    """
    op = "optim.lamb"
    beta1, beta2 = pair_of(op, betas)
    check_numbers(op, lr=lr, eps=eps, weight_decay=weight_decay)

    def many(
        k: int, ps: Column, gs: Column, means: Column, squares: Column, rate: Scalar, first: Scalar, root: Scalar
    ) -> tuple[Column, ...]:
        means, squares = c.lerp(means, gs, 1 - beta1), moved_squares(squares, gs, beta2)
        steps = c.ratio(c.over(means, first), c.plus_number(c.over(c.sqrt(squares), root), eps))
        _, steps = decayed(ps, steps, weight_decay, None)
        scaled = [step * trust(p, step, k) for p, step in zip(ps, steps, strict=True)]
        return c.minus(ps, scaled, rate), means, squares

    def scalars(rate: Any, n: Tensor) -> tuple[Scalar, ...]:
        return rate, debias(beta1, n), debias(beta2, n).sqrt()

    return optimizer(op, lr, ("mean", "square"), many, scalars, features=refuse_complex)


def trust(p: Tensor, step: Tensor, k: int) -> Tensor:
    """Ratio of the norms of a parameter and its step; 1 where one of them is 0."""
    long, short = norm(p, k), norm(step, k)
    return torch.where((long > 0) & (short > 0), long / short.clamp(min=torch.finfo(p.dtype).tiny), 1.0)


def norm(x: Tensor, k: int) -> Tensor:
    """The Euclidean norm of the features, with their dims."""
    rows = x.flatten(k) if x.ndim > k else x.unsqueeze(k)  # not -1: torch 2.11 traces one element to a wrong shape
    return torch.linalg.vector_norm(rows, dim=k).view((*x.shape[:k], *[1] * (x.ndim - k)))


@takes_rate
def muon(
    lr: Rate = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95, nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = NEWTON_SCHULZ, eps: float = 1e-7, ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
) -> Optimizer:  # fmt: skip
    """Momentum with orthogonalised steps: for matrices, such as the weights of hidden layers.

    Args:
        others: as in `torch.optim.Muon`, with its defaults.

    Returns:
        An `Optimizer`; its state is `{"momentum": …, "step": …}`.

    Raises:
        ShapeError: in `init` and `update`, parameters that are not matrices. Give those to another with `partition`.
        DtypeError: complex ones.

    Example:
        >>> opt = muon(lr=0.1, weight_decay=0.0)
        >>> params = TensorDict({"w": torch.eye(2) * 5})
        >>> opt.update(params, opt.init(params), params)[0]["w"].diagonal()
        tensor([4.8875, 4.8875])

    Source:
        `torch.optim.Muon`; Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.
    """
    op = "optim.muon"
    check_numbers(op, lr=lr, weight_decay=weight_decay, momentum=momentum, eps=eps, ns_steps=ns_steps)
    if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
        hint = "adjust_lr_fn='match_rms_adamw' takes rates of AdamW"
        raise StructureError(message(op, "'original' or 'match_rms_adamw'", f"{adjust_lr_fn!r}", hint=hint))
    hint = f"ns_coefficients={NEWTON_SCHULZ}"
    if not isinstance(ns_coefficients, (tuple, list)) or len(ns_coefficients) != 3:
        raise DtypeError(message(op, "three numbers as ns_coefficients", describe(ns_coefficients), hint=hint))
    expect_number(op, *ns_coefficients)
    expect_at_least(op, 0, "ns_steps", ns_steps)
    if any([isinstance(x, float) and not math.isfinite(x) for x in ns_coefficients]):
        raise StructureError(message(op, "finite ns_coefficients", f"{tuple(ns_coefficients)}", hint=hint))

    def many(k: int, ps: Column, gs: Column, ms: Column, keep: Scalar, rate: Scalar) -> tuple[Column, ...]:
        ms = c.lerp(ms, gs, 1 - momentum)
        ps, _ = decayed(ps, gs, weight_decay, keep)
        steps = [orthogonal(x, ns_coefficients, ns_steps, eps) for x in (c.lerp(gs, ms, momentum) if nesterov else ms)]
        steps = [step.to(p.dtype) * length(p) for p, step in zip(ps, steps, strict=True)]
        return c.minus(ps, steps, rate), ms

    def length(p: Tensor) -> float:
        rows, columns = p.shape[-2:]
        if adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / max(columns, 1)))

    def scalars(rate: Any, n: Tensor) -> tuple[Scalar, ...]:
        return 1 - rate * weight_decay, rate

    return optimizer(op, lr, ("momentum",), many, scalars, features=only_matrices)


def orthogonal(g: Tensor, coefficients: tuple[float, float, float], steps: int, eps: Scalar) -> Tensor:
    """Orthogonalise matrices by Newton-Schulz iterations in bfloat16: singular values become about 1."""
    first, second, third = coefficients
    tall = g.shape[-2] > g.shape[-1]
    x = g.bfloat16().mT if tall else g.bfloat16()
    x = x / norm(x, x.ndim - 2).clamp(min=c.each(eps, [x])[0])
    batch, add = x.shape[:-2], torch.addmm if x.ndim == 2 else torch.baddbmm
    x = x if x.ndim == 2 else x.flatten(0, -3)
    for _ in range(steps):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=second, alpha=third), x, beta=first)
    x = x.reshape(*batch, *x.shape[-2:])
    return x.mT if tall else x


@takes_rate
def adafactor(
    lr: Rate = 1e-2, beta2_decay: float = -0.8, eps: tuple[float | None, float] = (None, 1e-3), d: float = 1.0,
    weight_decay: float = 0.0,
) -> Optimizer:  # fmt: skip
    """Adam without momentum, whose mean of squares is stored as one row and one column for each matrix.

    Args:
        lr: a float, a tensor `batch_size`, or a schedule `step -> lr`; an upper bound, relative to the parameters.
        others: as in `torch.optim.Adafactor`, with its defaults.

    Returns:
        An `Optimizer`; its state is `{"factored": {"row": …, "column": …, "step": …}, "whole": {"square": …, …}}`,
        "whole" for leaves of less than two dims.

    Raises:
        DtypeError: in `init` and `update`, complex parameters.

    Example:
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
    """Running means of squares, or of their rows and columns, and the squares estimated from them."""
    if len(moments) == 1:
        means = c.lerp(moments[0], squares, weight)
        return [means], means
    lines = [[x.sum(dim, keepdim=True) / max(x.shape[dim], 1) for x in squares] for dim in (-1, -2)]
    rows, columns = [c.lerp(xs, new, weight) for xs, new in zip(moments, lines, strict=True)]
    pairs = zip(rows, columns, strict=True)
    return [rows, columns], [row * column / row.mean(-2, keepdim=True).clamp(min=tiny) for row, column in pairs]


def step_of(k: int, p: Tensor, g: Tensor, square: Tensor, tiny: float, least: float, d: Scalar) -> Tensor:
    """The step of a parameter, relative to its size, from estimated squares."""
    found = g * square.clamp(min=tiny * tiny).rsqrt()
    count = math.prod(p.shape[k:]) ** 0.5
    longer = norm(found, k) / count / c.each(d, [found])[0]
    return found * ((norm(p, k) / count).clamp(min=least) / longer.clamp(min=1.0))


def line(dim: int) -> Any:
    """A function that makes zeros of the shape of a parameter summed over a dim."""
    return lambda p: torch.zeros_like(p.sum(dim, keepdim=True), dtype=wide(p.dtype))


def by_rank(params: TensorDict) -> list[list[bool]]:
    """Flags of the leaves of two dims and more, and of those of less."""
    ranks = [p.ndim - len(params._size) if trainable(p) else None for p in params._leaves.values()]
    return [[n is not None and n > 1 for n in ranks], [n is not None and n < 2 for n in ranks]]


# -- checks of parameters


def refuse_complex(op: str, leaves: Mapping[Any, Any], k: int) -> None:
    """Refuse complex parameters; all are named."""
    wrong = {show(p): describe(x) for p, x in leaves.items() if trainable(x) and x.dtype.is_complex}
    hint = "leave these to adam with tdc.optim.partition"
    refuse_wrong(DtypeError, op, "real parameters", wrong, "complex ones", hint)


def only_matrices(op: str, leaves: Mapping[Any, Any], k: int) -> None:
    """Refuse parameters that are not matrices; all are named."""
    refuse_complex(op, leaves, k)
    wrong = {show(p): describe(x) for p, x in leaves.items() if trainable(x) and x.ndim != k + 2}
    hint = "partition({lambda path, p: p.ndim == 2: muon(), '*': adamw()})"
    refuse_wrong(ShapeError, op, "matrices", wrong, "others", hint)
