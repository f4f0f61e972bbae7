"""The loss of connectionist temporal classification by torch's kernels, as operators that a graph takes.

torch's own `ctc_loss` has a table whose width is read from the lengths of the targets, so that no graph takes it. Here
the table is as wide as the longest target may be, which a graph knows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.errors import no_second
from tdc.core.operators import derive, differentiable, one_by_one, operator, refuse_derivative
from tdc.core.torch_functions import ctc_backward, ctc_forward

ARGUMENTS = "Tensor log_probs, Tensor targets, Tensor frames, Tensor labels, int blank, bool zero_infinity"


def run(
    log_probs: Tensor, targets: Tensor, frames: Tensor, labels: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """Losses (B,), and a table (B, T, 2 * S + 1) for the gradient.

    Shapes:
        log_probs (T, B, C), targets (B, S); frames (B,) and labels (B,) are their lengths.
    """
    read = frames.tolist(), labels.tolist(), blank, zero_infinity
    losses, table = ctc_forward(log_probs, targets, *read)
    return losses, F.pad(table, (0, 2 * targets.shape[1] + 1 - table.shape[2]))


def run_backward(
    grad: Tensor, losses: Tensor, table: Tensor, log_probs: Tensor, targets: Tensor, frames: Tensor, labels: Tensor,
    blank: int, zero_infinity: bool,
) -> list[Tensor]:  # fmt: skip
    """The gradient of log_probs."""
    lengths = labels.tolist()
    read = losses, table[..., : 2 * max(lengths) + 1].contiguous(), blank, zero_infinity
    return [ctc_backward(grad.contiguous(), log_probs, targets, frames.tolist(), lengths, *read)]


def fake(log_probs: Tensor, targets: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    times, rows, _ = log_probs.shape
    return log_probs.new_empty(rows), log_probs.new_empty((rows, times, 2 * targets.shape[1] + 1))


def fake_backward(grad: Tensor, losses: Tensor, table: Tensor, log_probs: Tensor, *others: Any) -> list[Tensor]:
    return [torch.empty_like(log_probs, memory_format=torch.contiguous_format)]


class CtcLoss(torch.autograd.Function):
    """`run` with the gradient of log_probs."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        losses, table = ctc_op(*args)
        return losses, table

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.blank, ctx.zero_infinity = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = ctc_backward_op(grads[0], *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
        return found[0], *(None,) * 5


ctc_op = operator(f"ctc_loss({ARGUMENTS}) -> (Tensor, Tensor)", fake, one_by_one, CPU=run, CUDA=run)
ctc_backward_op = operator(
    f"ctc_loss_backward(Tensor grad, Tensor losses, Tensor table, {ARGUMENTS}) -> Tensor[]",
    fake_backward, one_by_one, CPU=run_backward, CUDA=run_backward,
)  # fmt: skip
derive(ctc_op, CtcLoss)
refuse_derivative(ctc_backward_op, no_second("ctc_loss"))
ctc_losses: Any = differentiable(CtcLoss)  # `run` with its gradient
