"""The operators of convolution of packed examples, for torch's dispatcher, autograd, vmap and graphs.

    x (N, C), weight (D, C / groups, *K), sizes (B, n)  ->  out (M, D)

One node of a graph for all sizes. A convolution is linear in x and in its weight, so that the sum of `out * grad` is
linear in three tensors, and each of the three operators is its derivative by the third:

    conv_rows          of x and weight        M positions, D channels
    conv_rows_input    of weight and grad     N positions, C channels
    conv_rows_weight   of x and grad          the weight's shape

The derivative of each is again one of the others, to any order and in forward mode.

Invariant: `Convolve` differentiates the operators, and nothing else does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.core.dynamo import trace_with_grad
from tdc.core.operators import derive, differentiable, in_front, operator, refuse_mapped
from tdc.kernels import convolution_cpu as cpu


def product(
    x: Tensor | None, weight: Tensor | None, grad: Tensor | None, bias: Tensor | None, sizes: Tensor, size: Any,
    *how: Any,
) -> Tensor:  # fmt: skip
    """The operation for the one of the first three that is missing, whose `size` is its positions, or the kernel."""
    if grad is None:
        return rows(x, weight, bias, sizes, size, *how)
    if x is None:
        return rows_input(weight, grad, sizes, size, *how)
    return rows_weight(x, grad, sizes, size, *how)


def of_sum(operands: list[Any], missing: int, sizes: Tensor, how: tuple[Any, ...], run: Any) -> Tensor:
    """The derivative of `sum(out * grad)` by one of x, weight and grad, all of which are given."""
    size = list(operands[1].shape[2:]) if missing == 1 else operands[missing].shape[0]
    return run(*[None if i == missing else t for i, t in enumerate(operands)], None, sizes, size, *how)  # type: ignore[no-any-return]  # untyped in torch


class Convolve(torch.autograd.Function):
    """`product` with its gradients."""

    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(
        x: Tensor | None, weight: Tensor | None, grad: Tensor | None, bias: Tensor | None, sizes: Tensor, size: Any,
        stride: Any, padding: Any, dilation: Any, groups: int,
    ) -> Tensor:  # fmt: skip  # one by one, which Dynamo counts
        return product(x, weight, grad, bias, sizes, size, stride, padding, dilation, groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, _, ctx.stride, ctx.padding, ctx.dilation, ctx.groups = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        *tensors, bias, sizes = ctx.saved_tensors
        how = ctx.stride, ctx.padding, ctx.dilation, ctx.groups
        operands = [grads[0] if t is None else t for t in tensors]
        wanted = [t is not None and ctx.needs_input_grad[i] for i, t in enumerate((*tensors, bias))]
        found = [of_sum(operands, i, sizes, how, derived) if wanted[i] else None for i in range(3)]
        return *found, grads[0].sum(0) if wanted[3] else None, *(None,) * 6


class Directed(Convolve):
    """`Convolve` with a forward-mode derivative."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        Convolve.setup_context(ctx, inputs, output)
        ctx.size = inputs[5]
        ctx.save_for_forward(*inputs[:5])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        *tensors, _, sizes = ctx.saved_tensors
        how = ctx.stride, ctx.padding, ctx.dilation, ctx.groups
        parts = [] if tangents[3] is None else [tangents[3].repeat(ctx.size, 1)]
        for i, tangent in enumerate(tangents[:3]):
            if tangent is not None:
                operands = [tangent if k == i else t for k, t in enumerate(tensors)]
                parts.append(convolve(*operands, None, sizes, ctx.size, *how))
        return functools.reduce(torch.add, parts)


convolve: Callable[..., Tensor] = differentiable(Convolve, Directed)  # `product` with all its derivatives


def derived(*args: Any) -> Tensor:
    """`convolve` of a derivative."""
    return convolve(*args)


trace_with_grad(derived, product)


def inputs_of(op: Any, *args: Any) -> tuple[Any, ...]:
    """Arguments of `Convolve`, from those of one of the operators."""
    *tensors, sizes, size, stride, padding, dilation, groups = args
    given = {rows: (0, 1, 3), rows_input: (1, 2), rows_weight: (0, 2)}[op]
    operands: list[Any] = [None] * 4
    for i, t in zip(given, tensors, strict=True):
        operands[i] = t
    return *operands, sizes, size, stride, padding, dilation, groups


def over_vmap(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
    """Under vmap the batch becomes examples where it shares the weight, else groups; sizes are shared."""
    *tensors, sizes, size, stride, padding, dilation, groups = args
    dims, batch = in_dims[: len(tensors)], info.batch_size
    refuse_mapped("sizes", [in_dims[len(tensors)]])
    first = {rows: (1, 2), rows_input: (0,), rows_weight: ()}[op]  # tensors whose channels are dim 0
    if first and all([dims[i] is None for i in first]):
        flat = [t if i in first else t.movedim(dims[i], 0).flatten(0, 1) for i, t in enumerate(tensors)]
        out = op(*flat, sizes.repeat(batch, 1), size * batch, stride, padding, dilation, groups)
        return out.unflatten(0, (batch, -1)), 0
    flat = []
    for i, t in enumerate(tensors):
        at = 0 if i in first else 1
        if t is not None:
            t = in_front(t, dims[i], batch).movedim(0, at).flatten(at, at + 1)
        flat.append(t)
    out, at = op(*flat, sizes, size, stride, padding, dilation, groups * batch), 0 if op is rows_weight else 1
    return out.unflatten(at, (batch, -1)), at


HOW = "int[] stride, int[] padding, int[] dilation, int groups"
rows: Any = operator(
    f"conv_rows(Tensor x, Tensor weight, Tensor? bias, Tensor sizes, SymInt total, {HOW}) -> Tensor",
    lambda x, weight, bias, sizes, total, *how: x.new_empty(total, weight.shape[0]), over_vmap, CPU=cpu.forward,
)  # fmt: skip
rows_input: Any = operator(
    f"conv_rows_input(Tensor weight, Tensor grad, Tensor sizes, SymInt total, {HOW}) -> Tensor",
    lambda weight, grad, sizes, total, *how: grad.new_empty(total, weight.shape[1] * how[3]), over_vmap,
    CPU=cpu.backward_input,
)  # fmt: skip
rows_weight: Any = operator(
    f"conv_rows_weight(Tensor x, Tensor grad, Tensor sizes, SymInt[] kernel, {HOW}) -> Tensor",
    lambda x, grad, sizes, kernel, *how: x.new_empty(grad.shape[1], x.shape[1] // how[3], *kernel), over_vmap,
    CPU=cpu.backward_weight,
)  # fmt: skip
for _op in (rows, rows_input, rows_weight):
    derive(_op, Directed, partial(inputs_of, _op))
