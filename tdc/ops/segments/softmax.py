"""softmax and log_softmax along dim 0 of packed values, each example for itself.

    softmax_of(x, s, log)             x (N, *D), its structure -> (N, *D)
    softmax_rows(x, offsets, log)     the operator, of offsets (B+1,)

On CPU long examples go one after another through torch's own kernel, as one operator. In a graph so do all whose
positions lie innermost in memory. Elsewhere plain operations: the maximum of each example is subtracted, and the sum of
the exponentials divides. Inductor fuses these.

Invariant: the derivatives are sums and spreads, which have all of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tdc.core.dynamo import trace_with_grad
from tdc.core.operators import derive, differentiable, operator, refuse_mapped
from tdc.ops.subrows import pays, worth_calls
from tdc.ragged.innermost import by_example, examples, is_few
from tdc.ragged.segments import reduce_rows, spread
from tdc.ragged.structure import Structure


def softmax_of(x: Tensor, s: Structure, log: bool) -> Tensor:
    """(N, *D) -> (N, *D), with all derivatives."""
    if pays(x, s.batch_size, x.numel()) or by_example(x, s.batch_size):
        return softmax(x, s.offsets, log)
    return all_at_once(x, s, log)


def all_at_once(x: Tensor, s: Structure, log: bool) -> Tensor:
    """In plain operations."""
    total = x.shape[0]
    shifted = x - spread(reduce_rows(x.detach(), s, "amax", -math.inf), s, total, x)
    sums = reduce_rows(shifted.exp(), s, "sum", 0)
    below = spread(sums.log() if log else sums, s, total, x)
    return shifted - below if log else shifted.exp() / below


class Softmax(torch.autograd.Function):
    """The operator with its gradient."""

    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(x: Tensor, offsets: Tensor, log: bool) -> Tensor:
        return softmax_rows(x, offsets, log)  # type: ignore[no-any-return]  # untyped in torch

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, offsets, ctx.log = inputs
        ctx.save_for_backward(output, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        y, offsets = ctx.saved_tensors
        return gradient(grads[0], y, offsets, ctx.log), None, None


class Directed(Softmax):
    """`Softmax` with a derivative in a direction."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        Softmax.setup_context(ctx, inputs, output)
        ctx.save_for_forward(output, inputs[1])

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Tensor:
        (y, offsets), x = ctx.saved_tensors, directions[0]
        return x - each_sum(y.exp() * x, offsets) if ctx.log else gradient(x, y, offsets, False)


softmax: Callable[..., Tensor] = differentiable(Softmax, Directed)


def gradient(grad: Tensor, y: Tensor, offsets: Tensor, log: bool) -> Tensor:
    """The gradient of x, of that of the result y."""
    if log:
        return grad - y.exp() * each_sum(grad, offsets)
    return y * (grad - each_sum(y * grad, offsets))


trace_with_grad(gradient)


def each_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """For each position the sum of its example, (N, *D) -> (N, *D)."""
    s = Structure(offsets)
    return spread(reduce_rows(x, s, "sum", 0), s, x.shape[0], x)


def kernel(x: Tensor, offsets: Tensor, log: bool) -> Tensor:
    """On CPU; the result lies in memory as x does."""
    if not worth_calls(offsets.shape[0] - 1, x.numel()):
        return torch.empty_like(x).copy_(all_at_once(x, Structure(offsets), log))
    out, run = torch.empty_like(x), torch.log_softmax if log else torch.softmax
    last = x.ndim - 1 if x.stride(0) == 1 or is_few(x) else 0  # where torch's kernel reads it fastest
    for row, result in zip(examples(x, offsets), examples(out, offsets), strict=True):
        result.movedim(0, last).copy_(run(row.movedim(0, last), last))
    return out


def fake(x: Tensor, offsets: Tensor, log: bool) -> Tensor:
    return torch.empty_like(x)


def over_members(op: Any, info: Any, in_dims: Any, x: Tensor, offsets: Tensor, log: bool) -> tuple[Tensor, int]:
    """Under vmap members become a static dim; they share offsets."""
    refuse_mapped("offsets", in_dims[1:2])
    return op(x.movedim(in_dims[0], 1), offsets, log), 1


softmax_rows = operator("softmax_rows(Tensor x, Tensor offsets, bool log) -> Tensor", fake, over_members, CPU=kernel)
derive(softmax_rows, Directed)
