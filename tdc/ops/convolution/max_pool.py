"""The operator of max pooling of packed examples.

    x (N, C), sizes (B, n)  ->  out (M, C), index (M, C): the positions in x of the largest

A gradient is added at these positions, which is plain torch and has all further derivatives.

Invariant: `MaxPool` differentiates the operator, and nothing else does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.dynamo import trace_with_grad
from tdc.core.operators import derive, operator, refuse_mapped, with_directions
from tdc.ops.convolution import cpu


class MaxPool(torch.autograd.Function):
    """The operator with its gradient, also under `torch.func`."""

    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(
        x: Tensor, sizes: Tensor, total: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
    ) -> tuple[Tensor, Tensor]:  # one by one, which Dynamo counts
        return rows(x, sizes, total, kernel, stride, padding, dilation, ceil_mode)  # type: ignore[no-any-return]  # untyped in torch

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, index = ctx.saved_tensors
        return put(x, index, grads[0]), *(None,) * 7

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        return over_members(Directed.apply, info, in_dims, *args)


class Directed(MaxPool):
    """`MaxPool` with a derivative in a direction."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        MaxPool.setup_context(ctx, inputs, output)
        ctx.save_for_forward(output[1])

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> tuple[Tensor, None]:
        return directions[0].gather(0, ctx.saved_tensors[0]), None


def put(x: Tensor, index: Tensor, grad: Tensor) -> Tensor:
    """The gradient of x."""
    return torch.zeros_like(x).scatter_add(0, index, grad)


trace_with_grad(put)


directed_max_pool = with_directions(MaxPool, Directed)


def pool_rows(*args: Any) -> Tensor:
    """The largest of each window, with all derivatives."""
    return directed_max_pool(*args)[0]  # type: ignore[no-any-return]  # untyped in torch


def fake_rows(x: Tensor, sizes: Tensor, total: int, *how: Any) -> tuple[Tensor, Tensor]:
    out = x.new_empty(total, x.shape[1])
    return out, torch.empty_like(out, dtype=torch.int64)


def over_members(run: Any, info: Any, in_dims: Any, x: Tensor, sizes: Tensor, *rest: Any) -> tuple[Any, Any]:
    """Under vmap members become channels; they share sizes."""
    refuse_mapped("sizes", in_dims[1:2])
    outs = run(x.movedim(in_dims[0], 1).flatten(1), sizes, *rest)
    return tuple([t.unflatten(1, (info.batch_size, -1)) for t in outs]), (1, 1)


rows = operator(
    "max_pool_rows(Tensor x, Tensor sizes, SymInt total, int[] kernel, int[] stride, int[] padding, int[] dilation, "
    "bool ceil_mode) -> (Tensor, Tensor)",
    fake_rows, over_members, CPU=cpu.max_pool,
)  # fmt: skip
derive(rows, MaxPool.apply, "max_pool")
