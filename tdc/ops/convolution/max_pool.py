"""The operators of max pooling of packed examples.

    x (N, C), sizes (B, n)  ->  out (M, C), index (M, C): the positions in x of the largest

    max_pool_rows        of windows
    adaptive_max_rows    of a number of bins for each dim

Rows have the dims of a plane in an `order`, of which the first of equal numbers is independent. A gradient is added at
the positions, which is plain torch and has all further derivatives.

Invariant: `MaxPool` differentiates the operators, and nothing else does.
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


class MaxPool(torch.autograd.Function):
    """`op(x, sizes, total, *how)` of one of the operators with its gradient."""

    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(op: Any, x: Tensor, sizes: Tensor, total: int, how: Any) -> tuple[Tensor, Tensor]:
        return op(x, sizes, total, *how)  # type: ignore[no-any-return]  # untyped in torch

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[1], output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, index = ctx.saved_tensors
        return None, put(x, index, grads[0]), None, None, None


class Directed(MaxPool):
    """`MaxPool` with a derivative in a direction."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        MaxPool.setup_context(ctx, inputs, output)
        ctx.save_for_forward(output[1])

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> tuple[Tensor, None]:
        return directions[1].gather(0, ctx.saved_tensors[0]), None


def put(x: Tensor, index: Tensor, grad: Tensor) -> Tensor:
    """The gradient of x."""
    return torch.zeros_like(x).scatter_add(0, index, grad)


trace_with_grad(put)


pooled: Callable[..., tuple[Tensor, Tensor]] = differentiable(MaxPool, Directed)


def max_pool(*args: Any) -> tuple[Tensor, Tensor]:
    """The largest of each window and its position, with all derivatives."""
    return pooled(rows, *args[:3], args[3:])


def adaptive_max(*args: Any) -> tuple[Tensor, Tensor]:
    """The largest of each adaptive bin and its position, with all derivatives."""
    return pooled(adaptive_rows, *args[:3], args[3:])


def inputs_of(op: Any, *args: Any) -> tuple[Any, ...]:
    """What `MaxPool` takes, of the arguments of one of the operators."""
    return op, *args[:3], args[3:]


def fake_rows(x: Tensor, sizes: Tensor, total: int, *how: Any) -> tuple[Tensor, Tensor]:
    out = x.new_empty(total, x.shape[1])
    return out, torch.empty_like(out, dtype=torch.int64)


def over_members(op: Any, info: Any, in_dims: Any, x: Tensor, sizes: Tensor, *rest: Any) -> tuple[Any, Any]:
    """Under vmap members become channels; they share sizes."""
    refuse_mapped("sizes", in_dims[1:2])
    outs = op(x.movedim(in_dims[0], 1).flatten(1), sizes, *rest)
    return tuple([t.unflatten(1, (info.batch_size, -1)) for t in outs]), (1, 1)


GIVEN = "Tensor x, Tensor sizes, SymInt total, int[] order"
WINDOWS = "int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil_mode"
rows, adaptive_rows = [
    operator(f"{name}({GIVEN}, {how}) -> (Tensor, Tensor)", fake_rows, over_members, CPU=kernel)
    for name, how, kernel in (
        ("max_pool_rows", WINDOWS, cpu_pool.max_pool),
        ("adaptive_max_rows", "int[] counts", cpu_pool.adaptive_max),
    )
]
for _op in (rows, adaptive_rows):
    derive(_op, Directed, partial(inputs_of, _op))
