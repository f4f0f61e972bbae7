"""Operators that are linear in packed values, with all their derivatives.

    op(x, structure, size, *how)    x (N, *D), offsets or sizes, the size of dim 0 of the result

The derivative of such an operator is its transpose: another one of the same arguments, with the size of x, whose own
derivative is the first again. The derivative in a direction is the operator of that direction.

    transposes(op, other)                    each is the derivative of the other
    linear(op, x, structure, size, *how)     an operator of such a pair, with all derivatives

Invariant: nothing else differentiates operators of such a pair.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.core.dynamo import trace_as, trace_with_grad
from tdc.core.operators import derive, differentiable

TRANSPOSE: dict[Any, Any] = {}
TRACED: dict[Any, Any] = {}  # operations of torch that stand for an operator in graphs


class Linear(torch.autograd.Function):
    """`op(x, structure, size, *how)` with its gradient."""

    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(op: Any, x: Tensor, structure: Tensor, size: int, how: tuple[Any, ...]) -> Tensor:
        return run(op, x, structure, size, how)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.op, x, structure, _, ctx.how = inputs
        ctx.given = x.shape[0]
        ctx.save_for_backward(structure)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        found = derived(TRANSPOSE[ctx.op], grads[0], ctx.saved_tensors[0], ctx.given, ctx.how)
        return None, found, None, None, None


class Directed(Linear):
    """`Linear` with a derivative in a direction."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        Linear.setup_context(ctx, inputs, output)
        ctx.size = inputs[3]
        ctx.save_for_forward(inputs[2])

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Tensor:
        return by_operator(ctx.op, directions[1], ctx.saved_tensors[0], ctx.size, ctx.how)


by_operator: Callable[..., Tensor] = differentiable(Linear, Directed)


def run(op: Any, x: Tensor, structure: Tensor, size: int, how: tuple[Any, ...]) -> Tensor:
    """The operator, without a derivative."""
    found: Tensor = op(x, structure, size, *how)
    return found


def run_traced(op: Any, x: Tensor, structure: Tensor, size: int, how: tuple[Any, ...]) -> Tensor:
    """What Dynamo traces for `run`."""
    return TRACED.get(op, op)(x, structure, size, *how)


def derived(*args: Any) -> Tensor:
    """`by_operator` of a derivative."""
    return by_operator(*args)


trace_as(run, run_traced)
trace_with_grad(derived, Linear.forward)


def linear(op: Any, x: Tensor, structure: Tensor, size: int, *how: Any) -> Tensor:
    """An operator of a pair, with all derivatives."""
    return by_operator(op, x, structure, size, how)


def transposes(op: Any, other: Any) -> None:
    """Make each of two operators the derivative of the other."""
    TRANSPOSE[op], TRANSPOSE[other] = other, op
    for each in (op, other):
        derive(each, Directed, partial(inputs_of, each))


def inputs_of(op: Any, x: Tensor, structure: Tensor, size: int, *how: Any) -> tuple[Any, ...]:
    """What `Linear` takes, of the arguments of an operator."""
    return op, x, structure, size, how
