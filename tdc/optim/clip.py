"""Transforms of gradients: bounds on their size, weight decay, noise. Each model of an ensemble has its own norm."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tdc.compile.train_metrics import norm_of_all
from tdc.core.arguments import expect, expect_number
from tdc.core.dtensor import is_dtensor
from tdc.optim import foreach as c
from tdc.optim.base import DOUBLE, of_columns, wide
from tdc.optim.checks import check_grads, check_keys, check_numbers, trainable
from tdc.optim.transform import Transform, stateless, takes_bound
from tdc.tensordict.tensordict import TensorDict, build_td

BITS, SECOND = 0x7FFFFFFF, 0x5BD1E995  # 31 bits: products fit into int64, whose bounds Inductor computes


def global_norm(td: TensorDict) -> Tensor:
    """The Euclidean norm of all leaves together, one for each entry of the batch.

    Shapes:
        leaves `(*batch_size, *features)` -> `batch_size`.

    Dtypes:
        float32, or float64 if a leaf is; integer leaves do not count.

    Example:
        >>> global_norm(TensorDict({"w": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0)}))
        tensor(5.)

    Source:
        `torch.nn.utils.get_total_norm`.
    """
    expect("optim.global_norm", td, TensorDict)
    leaves = [x for x in td._leaves.values() if trainable(x)]
    if not leaves:
        return torch.zeros(td._size, device=td._device)
    dtype = torch.float64 if any([x.dtype in DOUBLE for x in leaves]) else torch.float32
    k = len(td._size)  # where features begin; not -1: torch 2.11 traces a norm over one element to a wrong shape
    norms = [norm_of(x.to(wide(x.dtype)), k) for x in leaves]
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, dtype) for n in norms], k), dim=k)


def norm_of(x: Tensor, k: int) -> Tensor:
    """The norm of a leaf over all dims from dim k; of a DTensor that of the whole."""
    if is_dtensor(x):  # which torch cannot flatten where parts have different sizes
        found: Any = torch.linalg.vector_norm(x, dim=tuple(range(k, x.ndim))) if x.ndim > k else x.abs()
        return found.full_tensor()  # type: ignore[no-any-return]  # a Tensor
    return torch.linalg.vector_norm(x.flatten(k) if x.ndim > k else x.unsqueeze(k), dim=k)


@takes_bound
def clip_by_global_norm(max_norm: float) -> Transform:
    """Gradients scaled so that their global norm is at most `max_norm`; each entry of the batch by its own norm.

    Args:
        max_norm: the largest norm, a float or a tensor `batch_size`.

    Returns:
        A `Transform` for `chain`; its state is empty.

    Example:
        >>> grads = TensorDict({"w": torch.tensor([3.0, 4.0])})
        >>> clip = clip_by_global_norm(1.0)
        >>> clip.update(grads, clip.init(grads), grads)[0]["w"]
        tensor([0.6000, 0.8000])

    Source:
        `torch.nn.utils.clip_grad_norm_`, with its 1e-6 in the denominator.
    """
    check_numbers("optim.clip_by_global_norm", max_norm=max_norm)

    def over(process_group: Any) -> Transform:
        def clipped(grads: TensorDict, params: TensorDict) -> TensorDict:
            norm = global_norm(grads)
            norm = norm if process_group is None else norm_of_all(norm, process_group)
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            return of_columns(grads, lambda xs: c.times(xs, scale))

        return stateless(clipped, across=over)

    return over(None)


@takes_bound
def clip_by_norm(max_norm: float) -> Transform:
    """Each leaf scaled so that its norm is at most `max_norm`; otherwise as `clip_by_global_norm`.

    Example:
        >>> grads = TensorDict({"w": torch.tensor([3.0, 4.0]), "b": torch.tensor(0.5)})
        >>> clip = clip_by_norm(1.0)
        >>> clip.update(grads, clip.init(grads), grads)[0].to_dict()
        {'w': tensor([0.6000, 0.8000]), 'b': tensor(0.5000)}

    Source:
        `torch.nn.utils.clip_grad_norm_` of one parameter.
    """
    check_numbers("optim.clip_by_norm", max_norm=max_norm)

    def clipped(grads: TensorDict, params: TensorDict) -> TensorDict:
        def scaled(x: Tensor) -> Tensor:
            scale = (max_norm / (global_norm(build_td({"x": x}, {}, grads._size)) + 1e-6)).clamp(max=1.0)
            return c.times([x], scale)[0]

        return of_columns(grads, lambda xs: [scaled(x) for x in xs])

    return stateless(clipped)


@takes_bound
def clip_by_value(limit: float) -> Transform:
    """Each element clipped to `[-limit, limit]`; complex ones by their real and imaginary part.

    Args:
        limit: a float or a tensor `batch_size`.

    Returns:
        A `Transform` for `chain`; its state is empty.

    Example:
        >>> grads = TensorDict({"w": torch.tensor([3.0, -0.5])})
        >>> clip = clip_by_value(1.0)
        >>> clip.update(grads, clip.init(grads), grads)[0]["w"]
        tensor([ 1.0000, -0.5000])

    Source:
        `torch.nn.utils.clip_grad_value_`.
    """
    check_numbers("optim.clip_by_value", limit=limit)

    def clipped(grads: TensorDict, params: TensorDict) -> TensorDict:
        def between(x: Tensor) -> Tensor:
            real = torch.view_as_real(x) if x.is_complex() else x
            (bound,) = c.each(limit, [real])
            new = real.clamp(-bound, bound)
            return torch.view_as_complex(new) if x.is_complex() else new

        return of_columns(grads, lambda xs: [between(x) for x in xs])

    return stateless(clipped, elementwise=True)


def decay(weight: float) -> Transform:
    """Weight decay as a term of the gradient, `gradient + weight * parameter`; with `masked` for some leaves only.

    Decoupled decay, as in AdamW, is a setting of the optimiser.

    Args:
        weight: a float or a tensor `batch_size`.

    Returns:
        A `Transform` for `chain`; its state is empty.

    Example:
        >>> params = TensorDict({"w": torch.tensor([2.0, 4.0])})
        >>> decay(0.5).update(params * 0, TensorDict({}), params)[0]["w"]
        tensor([1., 2.])

    Source:
        `weight_decay` of `torch.optim.SGD`; `optax.add_decayed_weights`.
    """
    op = "optim.decay"
    check_numbers(op, weight=weight)

    def added(grads: TensorDict, params: TensorDict) -> TensorDict:
        check_grads(op, grads, params)
        return of_columns(grads, lambda gs, ps: c.plus(gs, ps, weight), params)

    return stateless(added, elementwise=True)


def noise(eta: float, gamma: float = 0.55, seed: int = 0) -> Transform:
    """Gaussian noise added to gradients, of variance `eta / (1 + step) ** gamma`.

    The noise is a function of the state and uses no generator: a loaded checkpoint continues with the same numbers.

    Args:
        eta: the variance at the first step.
        gamma: exponent of its decay.
        seed: of the first state. Models of an ensemble have noise of their own.

    Returns:
        A `Transform` for `chain`; its state is `{"key": …, "step": …}`.

    Example:
        >>> params = TensorDict({"w": torch.zeros(10_000)})
        >>> add = noise(eta=4.0)
        >>> grads, state = add.update(params, add.init(params), params)
        >>> round(grads["w"].std().item(), 1), state["step"]
        (2.0, tensor(1))

    Source:
        Neelakantan et al., Adding Gradient Noise Improves Learning for Very Deep Networks, 2015.
    """
    op = "optim.noise"
    check_numbers(op, eta=eta, gamma=gamma)
    expect_number(op, seed, whole=True)

    def init(params: TensorDict) -> TensorDict:
        expect("optim.init", params, TensorDict, of=" of parameters")
        models = torch.arange(params.numel(), device=params.device).view(params.batch_size)
        key = scrambled((models + int(seed)) & BITS)
        return TensorDict({"key": key, "step": torch.zeros_like(key)}, params.batch_size)

    def update(grads: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
        check_keys(op, state, ("key", "step"))
        step = state["step"]
        size = (eta / (1 + step) ** gamma) ** 0.5
        leaves, key, used = dict(grads._leaves), scrambled(scrambled((step + 1) & BITS) ^ state["key"]), 0
        for path, g in grads._leaves.items():
            if trainable(g):
                real = torch.view_as_real(g) if g.is_complex() else g
                count = math.prod(real.shape[step.ndim :])
                drawn = normal(key, used, count).view(real.shape)
                new = c.plus([real.to(wide(real.dtype))], c.times([drawn.to(wide(real.dtype))], size))[0].to(real.dtype)
                leaves[path] = torch.view_as_complex(new) if g.is_complex() else new
                used += count
        after = TensorDict({"key": state["key"], "step": step + 1}, params.batch_size)
        return build_td(leaves, grads._nodes, grads._size, grads._device), after

    return Transform(init, update)


def scrambled(x: Tensor) -> Tensor:
    """Hash numbers of 31 bits: products with odd numbers, and shifts."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & BITS
    x = ((x ^ (x >> 15)) * 0x735A2D97) & BITS
    return x ^ (x >> 15)


def normal(key: Tensor, start: int, count: int) -> Tensor:
    """Normal numbers `(*batch, count)` by Box and Muller."""
    at = scrambled(torch.arange(start, start + count, device=key.device) & BITS)
    keys = [key.unsqueeze(-1), scrambled(key ^ SECOND).unsqueeze(-1)]
    a, b = [(scrambled(at ^ k) >> 7).float() * 2.0**-24 for k in keys]
    return (-2 * torch.log1p(-a)).sqrt() * torch.cos(2 * math.pi * b)
