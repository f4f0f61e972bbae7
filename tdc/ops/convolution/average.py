"""The operators of average pooling of packed examples.

    x (N, C), sizes (B, n)  ->  out (M, C): means

    avg_pool_rows        of windows
    adaptive_avg_rows    of a number of bins for each dim

Means are linear in x, so that the derivative of such an operator is a second operator, which gives (N, C) of (M, C) and
whose own derivative is the first one again; and so is the derivative in a direction.

Invariant: `Average` differentiates the operators, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.core.dynamo import trace_with_grad
from tdc.core.operators import derive, differentiable, operator, refuse_mapped
from tdc.ops.convolution import cpu_pool


class Average(torch.autograd.Function):
    """`op(x, sizes, total, *how)` of one of the operators with its gradient."""

    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(op: Any, x: Tensor, sizes: Tensor, total: int, how: Any) -> Tensor:
        return op(x, sizes, total, *how)  # type: ignore[no-any-return]  # untyped in torch

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.op, x, sizes, _, ctx.how = inputs
        ctx.count = x.shape[0]
        ctx.save_for_backward(sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        found = derived(DERIVATIVE[ctx.op], grads[0], ctx.saved_tensors[0], ctx.count, ctx.how)
        return None, found, None, None, None


class Directed(Average):
    """`Average` with a derivative in a direction."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        Average.setup_context(ctx, inputs, output)
        ctx.total = inputs[3]
        ctx.save_for_forward(inputs[2])

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Tensor:
        return average(ctx.op, directions[1], ctx.saved_tensors[0], ctx.total, ctx.how)


average: Callable[..., Tensor] = differentiable(Average, Directed)


def derived(*args: Any) -> Tensor:
    """`average` of a derivative."""
    return average(*args)


trace_with_grad(derived, Average.forward)


def avg_pool(x: Tensor, sizes: Tensor, total: int, *how: Any) -> Tensor:
    """Means of windows, with all derivatives."""
    return average(rows, x, sizes, total, how)


def adaptive_avg(x: Tensor, sizes: Tensor, total: int, *how: Any) -> Tensor:
    """Means of adaptive bins, with all derivatives."""
    return average(adaptive_rows, x, sizes, total, how)


def inputs_of(op: Any, x: Tensor, sizes: Tensor, total: int, *how: Any) -> tuple[Any, ...]:
    """What `Average` takes, of the arguments of one of the operators."""
    return op, x, sizes, total, how


def fake_rows(x: Tensor, sizes: Tensor, total: int, *how: Any) -> Tensor:
    return x.new_empty(total, x.shape[1])


def over_members(op: Any, info: Any, in_dims: Any, x: Tensor, *rest: Any) -> tuple[Tensor, int]:
    """Under vmap members become channels; they share sizes."""
    refuse_mapped("sizes", in_dims[1:2])
    return op(x.movedim(in_dims[0], 1).flatten(1), *rest).unflatten(1, (info.batch_size, -1)), 1


WINDOWS = "int[] kernel, int[] stride, int[] padding, bool ceil_mode, bool count_include_pad, int? divisor"
rows, rows_backward, adaptive_rows, adaptive_rows_backward = [
    operator(f"{name}(Tensor x, Tensor sizes, SymInt total, {how}) -> Tensor", fake_rows, over_members, CPU=kernel)
    for name, how, kernel in (
        ("avg_pool_rows", WINDOWS, cpu_pool.avg_pool),
        ("avg_pool_rows_backward", WINDOWS, cpu_pool.avg_pool_backward),
        ("adaptive_avg_rows", "int[] counts", cpu_pool.adaptive_avg),
        ("adaptive_avg_rows_backward", "int[] counts", cpu_pool.adaptive_avg_backward),
    )
]
DERIVATIVE = {
    rows: rows_backward, rows_backward: rows,
    adaptive_rows: adaptive_rows_backward, adaptive_rows_backward: adaptive_rows,
}  # fmt: skip
for _op in DERIVATIVE:
    derive(_op, Directed, partial(inputs_of, _op))
