"""Rows gathered along a partial bijection: what packing, padding and reordering are made of.

Its gradient is the gather along the inverse, its derivative in a direction the same gather of the direction. So there
is no scatter in any order of differentiation, forward or backward.

Dynamo (torch 2.11-2.13) traces no autograd.Function with a `jvp`. A graph holds one without, and plain operations,
which torch differentiates, where a derivative in a direction is taken in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.dynamo import in_direction, is_zero, trace_as


def exchange(
    x: Tensor, index: Tensor, valid: Tensor | None, fill: float, inverse: Tensor, keep: Tensor | None
) -> Tensor:
    """Rows of `x` at an index; `fill` where `valid` is False.

    Shapes:
        x (P, *D), index (*Q), valid (*Q) -> (*Q, *D); inverse (P) or of several dims, one entry for each row of x.

    Args:
        inverse, keep: index and valid of the way back.
    """
    return Both.apply(x, index, valid, fill, inverse, keep)


def exchange_traced(
    x: Tensor, index: Tensor, valid: Tensor | None, fill: float, inverse: Tensor, keep: Tensor | None
) -> Tensor:
    """What Dynamo traces in place of `exchange`."""
    if in_direction():
        return gathered(x, index, valid, fill)
    return Exchange.apply(x, index, valid, fill, inverse, keep)


trace_as(exchange, exchange_traced)


def gathered(x: Tensor, index: Tensor, valid: Tensor | None, fill: float) -> Tensor:
    """`exchange` in plain operations."""
    features = x.shape[1:]
    if is_zero(x.shape[0]):
        return x.new_full((*index.shape, *features), fill)
    out = x.index_select(0, index.reshape(-1)).view(*index.shape, *features)
    return out if valid is None else torch.where(valid.view(*valid.shape, *[1] * len(features)), out, fill)


class Exchange(torch.autograd.Function):
    """`exchange` with its gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, index: Tensor, valid: Tensor | None, fill: float, inverse: Tensor, keep: Tensor | None
    ) -> Tensor:
        return gathered(x, index, valid, fill)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, index, valid, _, inverse, keep = inputs
        ctx.save_for_backward(index, valid, inverse, keep)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        index, valid, inverse, keep = ctx.saved_tensors
        flat = exchange(grad.flatten(0, index.ndim - 1), inverse, keep, 0.0, index, valid)
        return flat.flatten(0, inverse.ndim - 1), None, None, None, None, None


class Both(Exchange):
    """`exchange` with its gradient, and its derivative in a direction."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        Exchange.setup_context(ctx, inputs, output)
        _, index, valid, _, inverse, keep = inputs
        ctx.save_for_forward(index, valid, inverse, keep)

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Any:
        index, valid, inverse, keep = ctx.saved_tensors
        return exchange(directions[0], index, valid, 0.0, inverse, keep)
