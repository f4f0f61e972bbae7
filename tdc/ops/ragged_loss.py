"""Losses of ragged batches, other than of class targets.

    elementwise     mse_loss ...            one number for each element; operands broadcast as in arithmetic
    by vector       triplet_margin_loss ... one number for each vector along the last dim, which is static
    ctc_loss        one number for each row

"mean" divides by the number of real elements, vectors or rows, never by padded ones; kl_div's "batchmean" by the number
of rows. Padding holds numbers inside the domain before, and zeros behind: it gets no gradient.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.dtypes import refuse_integers, rounded_once
from tdc.core.errors import ShapeError, StructureError, describe, message
from tdc.core.rules import MODES, Rule, add_rule
from tdc.core.typing import Op
from tdc.ops.leafwise import first_of
from tdc.ops.pairs import widest, widest_masked
from tdc.ops.pointwise import neutral, packed
from tdc.ops.positionwise import last_is_static
from tdc.ragged.convert import to_padded
from tdc.ragged.masked import MaskedBatch, build_masked, require_same_lengths
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.structure import require_same


def elementwise_nested(op: Op, run: Op, *args: Any, reduction: str = "mean", **kwargs: Any) -> Any:
    like = widest(op, args, kwargs)
    loss = elementwise(run, lambda a: packed(a, like, op), like.values.shape, args, kwargs)
    return reduced(op, like.with_values(loss), reduction)


def elementwise_masked(op: Op, run: Op, *args: Any, reduction: str = "mean", **kwargs: Any) -> Any:
    like = widest_masked(op, args, kwargs)
    loss = elementwise(run, lambda a: neutral(a, like, op), like.data.shape, args, kwargs)
    return reduced(op, like.with_data(loss.masked_fill(~like.mask, 0)), reduction)


def elementwise(run: Op, dense: Op, whole: torch.Size, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The loss of each element of operands that `dense` makes tensors; positional ones grow to the shape `whole`."""
    operands = [dense(a) for a in args]
    operands = [a.expand(whole) if isinstance(a, Tensor) and a.ndim else a for a in operands]
    return run(*operands, reduction="none", **{k: dense(a) for k, a in kwargs.items() if a is not None})


def reduced(op: Op, loss: NestedTensor | MaskedBatch, reduction: str) -> Any:
    """All losses, or their sum or mean over what is real.

    Raises:
        ShapeError: another reduction.
    """
    if reduction == "none":
        return loss
    data = loss.values if isinstance(loss, NestedTensor) else loss.data
    if reduction == "sum":
        return data.sum()
    if reduction == "batchmean" and op is F.kl_div:
        return rounded_once(lambda t: t.sum() / loss.shape[loss._batch_dim], data)
    if reduction != "mean":
        hint = "torch has no others"
        raise ShapeError(message(op, "reduction 'mean', 'sum' or 'none'", repr(reduction), hint=hint))
    refuse_integers(op, loss)
    count = data.numel() if isinstance(loss, NestedTensor) else real_elements(loss)
    return rounded_once(lambda t: t.sum() / count, data)


def real_elements(x: MaskedBatch) -> Tensor:
    """How many there are."""
    static = [n for d, n in enumerate(x.data.shape) if d not in (x.batch_dim, *x.ragged_dims)]
    return x.lengths.prod(1).sum() * math.prod(static)


def by_vector_nested(op: Op, run: Op, *args: Any, reduction: str = "mean", **kwargs: Any) -> Any:
    like = first_of(NestedTensor, op, args, kwargs)
    last_is_static(like, op, 1)
    s, place = like.structure, like.values.shape[:-1]
    operands = []
    for a in args:
        if isinstance(a, NestedTensor):
            require_same(s, a.structure, op)
            a = a.values.reshape(-1, *a.values.shape[len(place) :])
        operands.append(a)
    loss = run(*operands, reduction="none", **{k: a for k, a in kwargs.items() if a is not None})
    return reduced(op, build_nested(s, loss.view(place)), reduction)


def by_vector_masked(op: Op, run: Op, *args: Any, reduction: str = "mean", **kwargs: Any) -> Any:
    like = first_of(MaskedBatch, op, args, kwargs)
    last_is_static(like, op, 1)
    place = like.data.shape[:-1]
    shape_of_loss = build_masked(like.data[..., 0], like.lengths, like.ragged_dims, like.batch_dim)
    operands = []
    for a in args:
        if isinstance(a, MaskedBatch):
            require_same_lengths(like if a.ndim == like.ndim else shape_of_loss, a, op)
            a = a.filled(0).reshape(-1, *a.data.shape[len(place) :])
        operands.append(a)
    loss = run(*operands, reduction="none", **{k: a for k, a in kwargs.items() if a is not None}).view(place)
    return reduced(op, shape_of_loss.with_data(loss.masked_fill(~shape_of_loss.mask, 0)), reduction)


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "none"
) -> Tensor:
    """torch's own reads the variance on the host, to refuse a negative one."""
    clamped = torch.as_tensor(var, dtype=input.dtype, device=input.device).clamp(min=eps)
    clamped = var + (clamped - var).detach() if isinstance(var, Tensor) else clamped
    loss = 0.5 * (clamped.log() + (input - target).square() / clamped)
    return loss + 0.5 * math.log(2 * math.pi) if full else loss


def cosine_embedding_loss(x: Tensor, y: Tensor, target: Tensor, margin: float = 0.0, reduction: str = "none") -> Tensor:
    """torch's own takes a target of two numbers for a list of vectors of two."""
    cosine = F.cosine_similarity(x, y, -1)
    apart = (cosine - margin).clamp(min=0)
    return torch.where(target == 1, 1 - cosine, torch.where(target == -1, apart, torch.zeros_like(cosine)))


def ctc_loss(
    log_probs: Any, targets: Any, input_lengths: Any = None, target_lengths: Any = None, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> Any:  # fmt: skip
    """Log probabilities (B, -1, C) and targets (B, -1), which know their lengths: pass None for both.

    Raises:
        StructureError: one of the two is no NestedTensor, or lengths are given.
    """
    if not (isinstance(log_probs, NestedTensor) and isinstance(targets, NestedTensor)):
        got = f"{describe(log_probs)} and {describe(targets)}"
        hint = "tdc.pack both"
        raise StructureError(message("ctc_loss", "log_probs and targets that are both NestedTensor", got, hint=hint))
    if input_lengths is not None or target_lengths is not None:
        hint = "F.ctc_loss(log_probs, targets, None, None): ragged batches know them"
        raise StructureError(message("ctc_loss", "None for both lengths", "lengths", hint=hint))
    frames = to_padded(log_probs).data.transpose(0, 1)
    lengths = log_probs.lengths, targets.lengths
    return F.ctc_loss(frames, targets.values, *lengths, blank, reduction, zero_infinity)


def rule(op: Op, nested: Op, masked: Op | None, modes: tuple[str, ...] = MODES) -> None:
    """Rows for the ragged containers."""
    for kind, impl in (("nested", nested), ("masked", masked)):
        if impl is not None:
            add_rule(Rule(op, kind, "loss", impl, op, modes=modes, source=f"torch.nn.functional.{op.__name__}"))


def losses(ops: tuple[Op, ...], nested: Op, masked: Op, **run: Op) -> None:
    """Rows for a family; `run` computes what is named in it."""
    for op in ops:
        call = run.get(op.__name__, op)
        rule(op, partial(nested, op, call), partial(masked, op, call))


losses(
    (
        F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits, F.kl_div, F.poisson_nll_loss, F.gaussian_nll_loss, F.soft_margin_loss,
        F.hinge_embedding_loss, F.margin_ranking_loss,
    ),
    elementwise_nested, elementwise_masked, gaussian_nll_loss=gaussian_nll_loss,
)  # fmt: skip
losses(
    (
        F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.cosine_embedding_loss,
        F.triplet_margin_loss, F.triplet_margin_with_distance_loss,
    ),
    by_vector_nested, by_vector_masked, cosine_embedding_loss=cosine_embedding_loss,
)  # fmt: skip
rule(F.ctc_loss, ctc_loss, None, ("eager", "grad", "vmap"))  # torch reads the lengths on the host
