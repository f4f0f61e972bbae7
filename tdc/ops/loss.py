"""Losses of ragged batches and of TensorDicts.

    cross_entropy ...       one number for each class target, which may lie beside several ragged dims
    mse_loss ...            one number for each element; operands broadcast as in arithmetic
    triplet_margin_loss ... one number for each vector along the last dim, which is static
    ctc_loss                one number for each example

"mean" divides by the number of real targets, elements, vectors or examples, never by padded ones; kl_div's "batchmean"
by the number of examples. The class dim is the one torch names for the batched layout `(B, C, -1)`; where dim 1 is
ragged, `(B, -1, C)`, it is the last dim, as for one example `(L, C)` on its own. Padding holds numbers inside the
domain before, and zeros behind: it gets no gradient.

A loss of two TensorDicts is a TensorDict: with reduction="none" of the same batch size; with "mean", the default, or
"sum" of batch_size [], one number for each leaf. One number for all leaves takes weights, which the caller chooses.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.dtypes import refuse_integers, rounded_once
from tdc.core.errors import ShapeError, StructureError, UnsupportedError, describe, message
from tdc.core.rules import define
from tdc.core.typing import Op
from tdc.ops.batch import lift
from tdc.ops.leafwise import check_broadcast, first_of
from tdc.ops.pairs import widest, widest_masked
from tdc.ops.pointwise import neutral_operand, packed_operand
from tdc.ops.positionwise import at_positions, is_ragged, last_is_static
from tdc.ops.rectangle import cut_padding
from tdc.ragged.convert import to_padded
from tdc.ragged.masked import MaskedBatch, require_same_lengths
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import Ragged
from tdc.ragged.structure import require_same
from tdc.tensordict.nodes import without_extra
from tdc.tensordict.storage import same_size
from tdc.tensordict.tensordict import TensorDict, build_td


def class_dim(x: NestedTensor | MaskedBatch) -> int:
    """The logical dim of the classes."""
    return x.ndim - 1 if 1 in x.ragged_dims else 1


def cross_entropy_nested(
    op: Op, input: NestedTensor, target: NestedTensor, *args: Any, reduction: str = "mean", **kwargs: Any
) -> NestedTensor | Tensor:
    """Logits (B, -1, C) or (B, C, -1), targets (B, -1) of classes -> scalar, or losses (B, -1) for reduction="none"."""
    s = input.structure
    if not isinstance(input, NestedTensor) or not isinstance(target, NestedTensor):
        got = f"{describe(input)} and {describe(target)}"
        hint = "target = logits.with_values(labels)"
        raise StructureError(message(op, "logits and targets that are both NestedTensor", got, hint=hint))
    axis = s.axis(class_dim(input), input.ndim, op)
    logits = input.values.movedim(axis or 0, -1)
    logits = logits.movedim(-1, 1) if logits.ndim > 2 else logits
    require_same(s.moved(target.structure.packed_dim, 0), target.structure, op)
    loss: Any = op(logits, target.values, *args, reduction=reduction, **kwargs)
    return target.with_values(loss) if reduction == "none" else loss


def cross_entropy_masked(
    op: Op, input: MaskedBatch, target: MaskedBatch, weight: Any = None, size_average: Any = None,
    ignore_index: int = -100, *args: Any, reduction: str = "mean", **kwargs: Any,
) -> MaskedBatch | Tensor:  # fmt: skip
    """Padding becomes `ignore_index`, so that it neither counts nor gets a gradient."""
    if not isinstance(input, MaskedBatch) or not isinstance(target, MaskedBatch) or target.dtype.is_floating_point:
        got = f"{describe(input)} and {describe(target)}"
        raise UnsupportedError(message(op, "MaskedBatch logits and class targets", got, hint="to_packed() both"))
    axis = class_dim(input)
    ragged = tuple([d - (d > axis) for d in input.ragged_dims])
    require_same_lengths(MaskedBatch(target.data, input.lengths, ragged_dims=ragged), target, op)
    logits = input.filled(0).movedim(axis, 1)
    labels: Tensor = target.filled(ignore_index)
    loss: Any = op(logits, labels, weight, size_average, ignore_index, *args, reduction=reduction, **kwargs)
    return target.with_data(loss) if reduction == "none" else loss


def loss_tensordict(op: Op, input: TensorDict, target: Any, *args: Any, **kwargs: Any) -> TensorDict:
    """Target is a TensorDict, or a tensor over batch dims that is extended over features."""
    if not isinstance(input, TensorDict):
        got = f"{describe(input)} and {describe(target)}"
        raise StructureError(message(op, "a TensorDict as input", got, hint="td.apply(lambda x: ...) for other calls"))
    given = {k: v for k, v in kwargs.items() if v is not None}
    reduced = given.get("reduction", "mean") != "none"
    size = torch.Size(()) if reduced else input.batch_size
    if isinstance(target, TensorDict):
        same_size(op, input, target)
        return flat_nodes(lift(input, lambda x, y: op(x, y, *args, **given), target, size=size, op=op), reduced)
    check_broadcast(target, input.batch_size, op)

    def one(x: Any) -> Tensor:
        y = target.view(*target.shape, *[1] * (x.ndim - input.ndim)).expand(x.shape)
        return op(x, y, *args, **given)

    return flat_nodes(lift(input, one, size=size, op=op), reduced)


def flat_nodes(x: TensorDict, reduced: bool) -> TensorDict:
    """Inner nodes of leaves without dims have no batch dims of their own."""
    return build_td(x._leaves, without_extra(x._nodes), x.batch_size, x.device) if reduced else x


def elementwise_nested(op: Op, run: Op, *args: Any, reduction: str = "mean", **kwargs: Any) -> Ragged | Tensor:
    like = widest(op, args, kwargs)
    loss = elementwise(run, lambda a: packed_operand(a, like, op), like.values.shape, args, kwargs)
    return reduced(op, like.with_values(loss), reduction)


def elementwise_masked(op: Op, run: Op, *args: Any, reduction: str = "mean", **kwargs: Any) -> Ragged | Tensor:
    like = widest_masked(op, args, kwargs)
    loss = elementwise(run, lambda a: neutral_operand(a, like, op), like.data.shape, args, kwargs)
    return reduced(op, cut_padding(like, loss), reduction)


def elementwise(run: Op, dense: Op, shape: torch.Size, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The loss of each element of operands that `dense` makes tensors; positional ones grow to `shape`."""
    operands = [dense(a) for a in args]
    operands = [a.expand(shape) if isinstance(a, Tensor) and a.ndim else a for a in operands]
    return run(*operands, reduction="none", **{k: dense(a) for k, a in kwargs.items() if a is not None})


def reduced(op: Op, loss: NestedTensor | MaskedBatch, reduction: str) -> Ragged | Tensor:
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


def by_vector(op: Op, run: Op, *args: Any, reduction: str = "mean", **kwargs: Any) -> Ragged | Tensor:
    """The loss of each vector along the last dim."""
    like = first_of((NestedTensor, MaskedBatch), op, args, kwargs)
    last_is_static(like, op, 1)
    shape = (like.values if isinstance(like, NestedTensor) else like.data).shape[:-1]
    named = {k: a for k, a in kwargs.items() if a is not None}

    def vectors(*given: Any) -> Tensor:
        flat = [t.reshape(-1, *t.shape[len(shape) :]) if is_ragged(a) else t for a, t in zip(args, given, strict=True)]
        return run(*flat, reduction="none", **named).view(shape)

    return reduced(op, at_positions(op, vectors, args, {}), reduction)


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
) -> Tensor:  # fmt: skip
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


def losses(ops: tuple[Op, ...], nested: Op, masked: Op, **run: Op) -> None:
    """Rows for a family; `run` computes what is named in it."""
    for op in ops:
        call = run.get(op.__name__, op)
        source = f"torch.nn.functional.{op.__name__}"
        define(op, "loss", nested=partial(nested, op, call), masked=partial(masked, op, call), source=source)


for _op, _source in ((F.cross_entropy, "torch.nn.CrossEntropyLoss"), (F.nll_loss, "torch.nn.NLLLoss")):
    nested, masked = partial(cross_entropy_nested, _op), partial(cross_entropy_masked, _op)
    define(_op, "loss", nested=nested, masked=masked, source=_source)
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
    by_vector, by_vector, cosine_embedding_loss=cosine_embedding_loss,
)  # fmt: skip
define(
    F.ctc_loss, "loss", nested=ctc_loss, source="torch.nn.functional.ctc_loss",
    modes=("eager", "grad", "vmap"),  # torch reads the lengths on the host
)  # fmt: skip
for _op in (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.poisson_nll_loss,
):  # fmt: skip
    define(_op, "loss", tensordict=partial(loss_tensordict, _op))
