"""The operators on segments: what torch's dispatcher, autograd, vmap and graphs know of them.

    x (N, *D), offsets (B+1,), begins (N,): where the example of each element of dim 0 begins

    order_rows         (N, *D)       where in dim 0 the sorted elements of each example are
    extreme_rows       (B, *D)       the first position of the largest or smallest, -1 of an empty example
    top_rows           (B, k, *D)    the positions of the first k in order
    cumextreme_rows    (N, *D)       where in dim 0 the largest or smallest one up to each is
    cumsum_rows        (N, *D)       sums up to each, or from each on
    cumprod_rows       (N, *D)       products up to each, and logcumsumexp_rows

Each is one node of a graph that is the same for all lengths. Positions have no derivative: who gathers by them has it.
Sums up to each are linear in x, and their derivative is the sum from each on, as often as anybody asks. Products and
logarithms are for who does not differentiate.

Invariant: `CumulativeSum` differentiates `cumsum_rows`, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.core.dynamo import trace_with_grad
from tdc.core.operators import derive, differentiable, operator, refuse_mapped, unserved
from tdc.ops.segments import cpu


class CumulativeSum(torch.autograd.Function):
    """`cumsum_rows` with its gradient."""

    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(x: Tensor, offsets: Tensor, reverse: bool) -> Tensor:
        return cumsum_rows(x, offsets, reverse)  # type: ignore[no-any-return]  # untyped in torch

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, offsets, ctx.reverse = inputs
        ctx.save_for_backward(offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return derived(grads[0], ctx.saved_tensors[0], not ctx.reverse), None, None


class Directed(CumulativeSum):
    """`CumulativeSum` with a derivative in a direction."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        CumulativeSum.setup_context(ctx, inputs, output)
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Tensor:
        return cumulative_sum(directions[0], ctx.saved_tensors[0], ctx.reverse)


cumulative_sum = differentiable(CumulativeSum, Directed)  # `cumsum_rows` with all derivatives


def derived(*args: Any) -> Tensor:
    """`cumulative_sum` of a derivative."""
    return cumulative_sum(*args)


trace_with_grad(derived, CumulativeSum.forward)


def serves(x: Tensor) -> bool:
    """Whether an operator is called on values: on CPU."""
    return x.device.type == "cpu" and not unserved()


def fake_positions(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.int64)


def fake_extreme(x: Tensor, offsets: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((offsets.shape[0] - 1, *x.shape[1:]), dtype=torch.int64)


def fake_top(x: Tensor, offsets: Tensor, k: int, *rest: Any) -> Tensor:
    return x.new_empty((offsets.shape[0] - 1, k, *x.shape[1:]), dtype=torch.int64)


def fake_sums(x: Tensor, *rest: Any) -> Tensor:
    inexact = x.is_floating_point() or x.is_complex()
    return torch.empty_like(x, dtype=x.dtype if inexact else torch.int64)


def over_members(dim: int, op: Any, info: Any, in_dims: Any, x: Tensor, offsets: Tensor, *rest: Any) -> Any:
    """Under vmap members become a static dim behind the packed one; they share offsets."""
    refuse_mapped("offsets", in_dims[1:])
    return op(x.movedim(in_dims[0], 1), offsets, *rest), dim


def contiguous(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kernel of positions, whose result lies as its fake says, in whatever order x does."""
    return lambda *args: kernel(*args).contiguous()


order_rows, extreme_rows, top_rows, cumextreme_rows, cumsum_rows, cumprod_rows, logcumsumexp_rows = [
    operator(f"{name}(Tensor x, Tensor offsets{how}) -> Tensor", fake, partial(over_members, dim), CPU=kernel)
    for name, how, fake, dim, kernel in (
        ("order_rows", ", Tensor begins, bool descending, bool stable", fake_positions, 1, contiguous(cpu.order)),
        ("extreme_rows", ", bool largest", fake_extreme, 1, contiguous(cpu.extreme)),
        ("top_rows", ", int k, bool largest", fake_top, 2, contiguous(cpu.top)),
        ("cumextreme_rows", ", bool largest", fake_positions, 1, contiguous(cpu.cumextreme)),
        ("cumsum_rows", ", bool reverse", fake_sums, 1, cpu.cumsum),
        ("cumprod_rows", "", fake_sums, 1, cpu.cumprod),
        ("logcumsumexp_rows", "", fake_sums, 1, cpu.logcumsumexp),
    )
]
derive(cumsum_rows, Directed)
