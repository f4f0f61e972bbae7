"""Optimisers as pure functions: `(gradients, state, parameters) -> (parameters, state)`.

States are TensorDicts with the keys of the parameters, so an optimiser works on one model or, under `vmap`, on an
ensemble, and a whole training step compiles as one graph. The numbers are those of `torch.optim`, step for step.

Invariant: nothing is changed in place; learning rates and steps are tensors or constants of the graph, never reread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tdc.tensordict import TensorDict


def debias(beta: float, step: torch.Tensor) -> torch.Tensor:
    """`1 - beta**step`, without the cancellation that costs float32 four digits in the first steps."""
    return -torch.expm1(step * math.log(beta))


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Two functions: `init(params) -> state` and `update(grads, state, params) -> (params, state)`."""

    init: Callable[[TensorDict], TensorDict]
    update: Callable[[TensorDict, TensorDict, TensorDict], tuple[TensorDict, TensorDict]]


def adamw(
    lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2
) -> Optimizer:
    """Adam with decoupled weight decay.

    Args:
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`, with its defaults.

    Returns:
        An `Optimizer`; its state is `{"mean": …, "square": …, "step": …}`.

    Compile:
        fullgraph, one graph for all steps (the step count is a tensor); vmap over stacked parameters and states.

    Example:
        >>> opt = adamw(lr=0.1)
        >>> params = TensorDict({"w": torch.ones(2)})
        >>> params, state = opt.update(params, opt.init(params), params)
        >>> params["w"]
        tensor([0.8990, 0.8990])

    Source:
        `torch.optim.AdamW`; Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.
    """
    beta1, beta2 = betas

    def init(params: TensorDict) -> TensorDict:
        zeros = params.apply(torch.zeros_like)
        step = torch.zeros(params.batch_size, device=params.device)
        return TensorDict({"mean": zeros, "square": zeros.apply(torch.clone), "step": step}, params.batch_size)

    def update(grads: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
        step = state["step"] + 1
        mean = state["mean"].apply(lambda m, g: torch.lerp(m, g, 1 - beta1), grads)
        square = state["square"].apply(lambda s, g: beta2 * s + (1 - beta2) * g * g, grads)
        rate, root = lr / debias(beta1, step), debias(beta2, step).sqrt()

        def one(p: torch.Tensor, m: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            return p * (1 - lr * weight_decay) - rate.to(p.dtype) * m / (s.sqrt() / root.to(p.dtype) + eps)

        return params.apply(one, mean, square), TensorDict(
            {"mean": mean, "square": square, "step": step}, params.batch_size
        )

    return Optimizer(init, update)
