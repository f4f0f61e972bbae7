"""Group norm along dim 0 of packed values on CPU, each example for itself.

    x (N, C), offsets (B+1,), weight (C,), bias (C,)
    mean (B, G), rstd (B, G)    of each example and group of channels; rstd is 1 / sqrt(variance + eps)

The result and its gradients are one operator each, one node of a graph that is the same for all lengths, with kernels
in `norm_kernels`. Elsewhere, and for other derivatives, plain operations run.

Invariants: results and gradients of x lie in memory as x does; `GroupNorm` differentiates `group_norm_rows`, `Gradient`
its gradients, and nothing else does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from tdc.core.dynamo import readable, trace_with_grad, under_transform
from tdc.core.levels import moving
from tdc.core.operators import derive, differentiable, one_by_one, operator
from tdc.ops.segments import norm_kernels as kernels
from tdc.ops.segments.norm_kernels import Three, count_of
from tdc.ops.segments.operator import serves
from tdc.ops.subrows import worth_calls
from tdc.ragged.segments import reduce_rows, spread
from tdc.ragged.structure import Structure


def group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, s: Structure, groups: int, eps: float) -> Three:
    """The result (N, C), mean and rstd (B, G); these have no derivative."""
    weight, bias = (None if t is None else t.to(x.dtype) for t in (weight, bias))
    given = x, weight, bias, s.offsets, groups, eps
    return by_operator(*given) if served(x, s, given) else plain(*given)


def served(x: Tensor, s: Structure, tensors: tuple[Any, ...]) -> bool:
    """Whether the operators are called: for first derivatives, and eagerly where examples are worth a call each."""
    if not serves(x) or under_transform():
        return False
    return not readable() or (worth_calls(s.batch_size, x.numel()) and not moving(tensors))


def plain(x: Tensor, weight: Tensor | None, bias: Tensor | None, offsets: Tensor, groups: int, eps: float) -> Three:
    """`group_norm` in plain operations."""
    s, total = Structure(offsets), x.shape[0]
    grouped = x.unflatten(1, (groups, -1))
    count = count_of(x, offsets, groups)
    mean = reduce_rows(grouped.sum(2), s, "sum", 0) / count
    apart = grouped - spread(mean, s, total).unsqueeze(-1)
    var = reduce_rows(apart.square().sum(2), s, "sum", 0) / count
    rstd = (var + eps).rsqrt()
    out = (apart * spread(rstd, s, total).unsqueeze(-1)).flatten(1)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias, mean.detach(), rstd.detach()


class GroupNorm(torch.autograd.Function):
    """The operator with its gradient."""

    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, offsets: Tensor, groups: int, eps: float
    ) -> Three:  # fmt: skip
        return group_norm_rows(x, weight, bias, offsets, groups, eps)  # type: ignore[no-any-return]  # untyped in torch

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Three) -> None:
        x, weight, bias, offsets, *ctx.options = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, weight, offsets, *output[1:])
        ctx.learns = bias is not None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight, offsets, mean, rstd = ctx.saved_tensors
        to_x, to_weight, to_bias = gradients(grads[0], x, weight, mean, rstd, offsets, *ctx.options)
        return to_x, None if weight is None else to_weight, to_bias if ctx.learns else None, None, None, None


by_operator = differentiable(GroupNorm)


class Gradient(torch.autograd.Function):
    """The gradients as a differentiable function, by the derivatives of `plain`."""

    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(
        grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, offsets: Tensor, groups: int,
        eps: float,
    ) -> Three:  # fmt: skip
        return group_norm_rows_backward(grad, x, weight, mean, rstd, offsets, groups, eps)  # type: ignore[no-any-return]  # untyped in torch

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Three) -> None:
        grad, x, weight, _, _, offsets, *ctx.options = inputs
        ctx.save_for_backward(grad, x, weight, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad, x, weight, offsets = ctx.saved_tensors
        one = x.new_ones(x.shape[1]) if weight is None else weight

        def first(grad: Tensor, x: Tensor, weight: Tensor) -> Any:
            def result(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
                return plain(x, weight, bias, offsets, *ctx.options)[0]

            return vjp(result, x, weight, torch.zeros_like(weight))[1](grad)

        to_grad, to_x, to_weight = vjp(first, grad, x, one)[1](grads)
        return to_grad, to_x, None if weight is None else to_weight, None, None, None, None, None


by_derivable = differentiable(Gradient)


def gradients(*args: Any) -> Three:
    """The gradients of x, weight and bias, of those of the result."""
    return by_derivable(*args)  # type: ignore[no-any-return]  # untyped in torch


trace_with_grad(gradients, Gradient.forward)


def fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, offsets: Tensor, groups: int, eps: float) -> Three:
    own = x.new_empty(offsets.shape[0] - 1, groups)
    return torch.empty_like(x), own, torch.empty_like(own)


def fake_gradients(grad: Tensor, x: Tensor, *rest: Any) -> Three:
    return torch.empty_like(x), x.new_empty(x.shape[1]), x.new_empty(x.shape[1])


_options = "Tensor offsets, int groups, float eps) -> (Tensor, Tensor, Tensor)"
group_norm_rows = operator(
    f"group_norm_rows(Tensor x, Tensor? weight, Tensor? bias, {_options}", fake, one_by_one, CPU=kernels.forward
)
group_norm_rows_backward = operator(
    f"group_norm_rows_backward(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, {_options}",
    fake_gradients, one_by_one, CPU=kernels.backward,
)  # fmt: skip
derive(group_norm_rows, GroupNorm)
derive(group_norm_rows_backward, Gradient)
