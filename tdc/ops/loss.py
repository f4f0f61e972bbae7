"""Losses: cross_entropy and nll_loss of ragged batches; losses of a TensorDict, leaf by leaf.

A loss of two TensorDicts is a TensorDict: with reduction="none" of the same batch size; with "mean", the default, or
"sum" of batch_size [], one number for each leaf. One number for all leaves takes weights, which the caller chooses.

"mean" divides by the number of real targets, never by padded ones. The class dim is the one torch names for the batched
layout `(B, C, -1)`; where dim 1 is ragged, `(B, -1, C)`, it is the last dim, as for one example `(L, C)` on its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.errors import StructureError, UnsupportedError, describe, message
from tdc.core.rules import Rule, add_rule
from tdc.core.typing import Op
from tdc.ops.batch import lift
from tdc.ops.leafwise import check_broadcast
from tdc.ragged.masked import MaskedBatch, require_same_lengths
from tdc.ragged.nested import NestedTensor
from tdc.ragged.structure import require_same
from tdc.tensordict.nodes import without_extra
from tdc.tensordict.storage import same_size
from tdc.tensordict.tensordict import TensorDict, make


def class_dim(x: NestedTensor | MaskedBatch) -> int:
    """The logical dim of the classes."""
    return x.ndim - 1 if 1 in x.ragged_dims else 1


def cross_entropy_nested(
    op: Op, input: NestedTensor, target: NestedTensor, *args: Any, reduction: str = "mean", **kwargs: Any
) -> Any:
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
) -> Any:  # fmt: skip
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

    def one(x: Any) -> Any:
        y = target.view(*target.shape, *[1] * (x.ndim - input.ndim)).expand(x.shape)
        return op(x, y, *args, **given)

    return flat_nodes(lift(input, one, size=size, op=op), reduced)


def flat_nodes(x: TensorDict, reduced: bool) -> TensorDict:
    """Inner nodes of leaves without dims have no batch dims of their own."""
    return make(x._leaves, without_extra(x._nodes), x.batch_size, x.device) if reduced else x


for _op, _source in ((F.cross_entropy, "torch.nn.CrossEntropyLoss"), (F.nll_loss, "torch.nn.NLLLoss")):
    for _kind, _impl in (("nested", cross_entropy_nested), ("masked", cross_entropy_masked)):
        add_rule(Rule(_op, _kind, "loss", partial(_impl, _op), _op, source=_source))
for _op in (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.poisson_nll_loss,
):  # fmt: skip
    add_rule(Rule(_op, "tensordict", "loss", partial(loss_tensordict, _op), _op))
