"""The operator of products of a matrix of each example by another: what torch's dispatcher, autograd, vmap and graphs
know of it.

    a, b      all matrices of one operand, one behind another, row by row: flat
    m, k, n   (B,) the sizes of each example: its matrices are (m, k), (k, n) and (m, n)

It is one node of a graph that is the same for all sizes, and so are its derivatives, which are such products again.

Invariant: `Multiply` differentiates `multiply_rows`, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tdc.core.dynamo import trace_with_grad
from tdc.core.operators import derive, differentiable, in_direction_of_each, in_front, operator, refuse_mapped
from tdc.ops.matrices import cpu


class Multiply(torch.autograd.Function):
    """`multiply_rows` with its gradients."""

    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(
        a: Tensor, b: Tensor, m: Tensor, k: Tensor, n: Tensor, a_turned: bool, b_turned: bool, total: int
    ) -> Tensor:
        return multiply_rows(a, b, m, k, n, a_turned, b_turned, total)  # type: ignore[no-any-return]  # untyped in torch

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.a_turned, ctx.b_turned, _ = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad,), (a, b, m, k, n) = grads, ctx.saved_tensors
        of_a = of_b = None
        if ctx.needs_input_grad[0]:
            given = b.conj().resolve_conj()
            if ctx.a_turned:
                of_a = derived(given, grad, k, n, m, ctx.b_turned, True, a.shape[0])
            else:
                of_a = derived(grad, given, m, n, k, False, not ctx.b_turned, a.shape[0])
        if ctx.needs_input_grad[1]:
            given = a.conj().resolve_conj()
            if ctx.b_turned:
                of_b = derived(grad, given, n, m, k, True, ctx.a_turned, b.shape[0])
            else:
                of_b = derived(given, grad, k, m, n, not ctx.a_turned, False, b.shape[0])
        return of_a, of_b, *(None,) * 6


class Directed(Multiply):
    """`Multiply` with a derivative in a direction."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        Multiply.setup_context(ctx, inputs, output)
        ctx.total = inputs[7]
        ctx.save_for_forward(*inputs[:5])

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Tensor:
        a, b, *sizes = ctx.saved_tensors
        how = *sizes, ctx.a_turned, ctx.b_turned, ctx.total
        return in_direction_of_each(lambda a, b: multiply(a, b, *how), (a, b), directions[:2])


multiply: Callable[..., Tensor] = differentiable(Multiply, Directed)  # `multiply_rows` with all its derivatives


def derived(*args: Any) -> Tensor:
    """`multiply` of a derivative."""
    return multiply(*args)


trace_with_grad(derived, Multiply.forward)


def fake(a: Tensor, b: Tensor, m: Tensor, k: Tensor, n: Tensor, a_turned: bool, b_turned: bool, total: int) -> Tensor:
    return a.new_empty(total)


def over_members(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
    """Under vmap the matrices of all members are multiplied one behind another; they share sizes."""
    a, b, m, k, n, a_turned, b_turned, total = args
    refuse_mapped("sizes", in_dims[2:5])
    members = info.batch_size
    flat = [in_front(x, d, members).flatten() for x, d in zip((a, b), in_dims, strict=False)]
    sizes = [s.repeat(members) for s in (m, k, n)]
    return op(*flat, *sizes, a_turned, b_turned, total * members).view(members, -1), 0


multiply_rows = operator(
    "multiply_rows(Tensor a, Tensor b, Tensor m, Tensor k, Tensor n, bool a_turned, bool b_turned, SymInt total) "
    "-> Tensor",
    fake, over_members, CPU=cpu.multiply,
)  # fmt: skip
derive(multiply_rows, Directed)
