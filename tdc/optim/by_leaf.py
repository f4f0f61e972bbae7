"""Optimisers that look at a whole leaf: LAMB at its norm, Muon at its singular values; see `adafactor`, too.

Leaves `(*k, *features)` of k batch dims; norms and means are over features, so members of an ensemble stay apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect_at_least, expect_number
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message, refuse_wrong
from tdc.core.keys import show
from tdc.optim import foreach as c
from tdc.optim.adam import debias, decayed
from tdc.optim.base import optimizer
from tdc.optim.foreach import Column, Scalar
from tdc.optim.transform import Optimizer, Rate, check_numbers, pair_of, trainable

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def lamb(
    lr: Rate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.0
) -> Optimizer:
    """Steps of AdamW as long as the parameters they change, leaf by leaf: for large batches.

    Args:
        lr: a float, a tensor `batch_size`, or a schedule `step -> lr`.
        betas, eps, weight_decay: as in `adamw`; the decay is part of the step whose length is scaled.

    Returns:
        An `Optimizer`; its state is `{"mean": …, "square": …, "step": …}`.

    Raises:
        StructureError: a setting out of its range.
        DtypeError: in `init` and `update`, complex parameters.

    Example:
        >>> from tdc import TensorDict
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
        means = c.lerp(means, gs, 1 - beta1)
        squares = c.plus_product(c.times(squares, beta2), gs, gs, 1 - beta2)
        steps = c.ratio(c.over(means, first), c.plus_number(c.over(c.sqrt(squares), root), eps))
        _, steps = decayed(ps, steps, weight_decay, None)
        scaled = [step * trust(p, step, k) for p, step in zip(ps, steps, strict=True)]
        return c.minus(ps, scaled, rate), means, squares

    def scalars(rate: Any, n: Tensor) -> tuple[Scalar, ...]:
        return rate, debias(beta1, n), debias(beta2, n).sqrt()

    return optimizer(op, lr, ("mean", "square"), many, scalars, features=refuse_complex)


def trust(p: Tensor, step: Tensor, k: int) -> Tensor:
    """How much longer a parameter is than its step; 1 where one of them is 0."""
    long, short = norm(p, k), norm(step, k)
    return torch.where((long > 0) & (short > 0), long / short.clamp(min=torch.finfo(p.dtype).tiny), 1.0)


def norm(x: Tensor, k: int) -> Tensor:
    """The Euclidean norm of the features, with their dims."""
    rows = x.flatten(k) if x.ndim > k else x.unsqueeze(k)  # not -1: torch 2.11 traces one element to a wrong shape
    return torch.linalg.vector_norm(rows, dim=k).view((*x.shape[:k], *[1] * (x.ndim - k)))


def muon(
    lr: Rate = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95, nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = NEWTON_SCHULZ, eps: float = 1e-7, ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
) -> Optimizer:  # fmt: skip
    """Steps of momentum whose singular values are made about 1: for matrices, such as the weights of hidden layers.

    Args:
        lr: a float, a tensor `batch_size`, or a schedule `step -> lr`.
        others: as in `torch.optim.Muon`, with its defaults.

    Returns:
        An `Optimizer`; its state is `{"momentum": …, "step": …}`.

    Raises:
        StructureError: a setting out of its range.
        ShapeError: in `init` and `update`, parameters that are no matrices. Leave those to another with `partition`.
        DtypeError: complex ones.

    Example:
        >>> from tdc import TensorDict
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
    if not isinstance(ns_coefficients, (tuple, list)) or len(ns_coefficients) != 3:
        got, hint = describe(ns_coefficients), f"ns_coefficients={NEWTON_SCHULZ}"
        raise DtypeError(message(op, "three numbers as ns_coefficients", got, hint=hint))
    expect_number(op, *ns_coefficients)
    expect_at_least(op, 0, "ns_steps", ns_steps)
    if any([isinstance(x, float) and not math.isfinite(x) for x in ns_coefficients]):
        hint = f"ns_coefficients={NEWTON_SCHULZ}"
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
    """Matrices with the singular vectors of these and singular values about 1, by Newton and Schulz, in bfloat16."""
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


# -- parameters that they are for


def refuse_complex(op: str, leaves: Mapping[Any, Any], k: int) -> None:
    """Refuse complex parameters; all are named."""
    wrong = {show(p): describe(x) for p, x in leaves.items() if trainable(x) and x.dtype.is_complex}
    hint = "leave these to adam with tdc.optim.partition"
    refuse_wrong(DtypeError, op, "real parameters", wrong, "complex ones", hint)


def only_matrices(op: str, leaves: Mapping[Any, Any], k: int) -> None:
    """Refuse parameters that are no matrices; all are named."""
    refuse_complex(op, leaves, k)
    wrong = {show(p): describe(x) for p, x in leaves.items() if trainable(x) and x.ndim != k + 2}
    hint = "partition({lambda path, p: p.ndim == 2: muon(), '*': adamw()})"
    refuse_wrong(ShapeError, op, "matrices", wrong, "others", hint)
