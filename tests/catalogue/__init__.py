"""Samples for every row of the rule table.

A generator of samples is found by the operation's name, else by its family; one serves NestedTensor and MaskedBatch,
one serves TensorDict. A new row of a known family has samples at once; any other row without them fails a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from harness import Sample

import catalogue.batch
import catalogue.conv
import catalogue.indexing
import catalogue.linalg
import catalogue.loss
import catalogue.matmul
import catalogue.moving
import catalogue.norm
import catalogue.order
import catalogue.pointwise
import catalogue.ragged_shape
import catalogue.reduction
import catalogue.resample
import catalogue.rnn
import catalogue.statistics
import catalogue.stft
import catalogue.structure
import catalogue.tensordict
from tdc.core.rules import Rule

Maker = Callable[[Rule], Iterable[Sample]]
RAGGED: dict[str, Maker] = {
    **catalogue.pointwise.RAGGED,
    **catalogue.reduction.RAGGED,
    **catalogue.structure.RAGGED,
    **catalogue.ragged_shape.RAGGED,
    **catalogue.indexing.RAGGED,
    **catalogue.moving.RAGGED,
    **catalogue.norm.RAGGED,
    **catalogue.loss.RAGGED,
    **catalogue.matmul.RAGGED,
    **catalogue.statistics.RAGGED,
    **catalogue.order.RAGGED,
    **catalogue.rnn.RAGGED,
    **catalogue.linalg.RAGGED,
    **catalogue.conv.RAGGED,
    **catalogue.resample.RAGGED,
    **catalogue.stft.RAGGED,
}
DICTS: dict[str, Maker] = {
    **catalogue.tensordict.DICTS,
    **dict.fromkeys(catalogue.pointwise.BINARY + catalogue.pointwise.NEW_BINARY, catalogue.tensordict.binary),
    **catalogue.reduction.DICTS,
    **catalogue.batch.DICTS,
}
REPRESENTATIVES = {
    "pointwise": ("relu", "gelu", "add", "where", "masked_fill"), "reduction": ("sum", "amax"),
    "shape": ("permute", "reshape"), "norm": ("layer_norm", "softmax"), "join": ("cat",), "split": ("unbind",),
    "channel": ("group_norm",), "conv": ("conv1d",), "pool": ("max_pool1d",), "resample": ("interpolate",),
    "factory": ("zeros_like",), "scan": ("cumsum",), "sort": ("sort",), "random": ("dropout",),
    "comparison": ("equal",), "matmul": ("matmul",), "linalg": ("inv", "solve"), "distance": ("cdist",),
    "moments": ("var",), "extremes": ("argmax",), "order_statistics": ("median",), "vector_norm": ("normalize",),
    "indexing": ("gather", "index_select"), "masks": ("masked_select",), "loss": ("cross_entropy", "mse_loss"),
    "positionwise": ("linear", "embedding"), "rnn": ("lstm", "gru"), "counts": ("unique",), "stft": ("stft",),
}  # fmt: skip


def samples(rule: Rule) -> list[Sample]:
    """The samples of a row; none where nobody wrote any."""
    table = DICTS if rule.kind == "tensordict" else RAGGED
    maker = table.get(rule.name) or table.get(rule.family)
    return list(maker(rule)) if maker else []


def is_representative(rule: Rule) -> bool:
    """Whether a row stands for its family where the full product is too long."""
    return rule.name in REPRESENTATIVES.get(rule.family, (rule.name,))


def title(rule: Rule) -> str:
    """`relu`, or `F.relu` where torch has another function of that name."""
    twin = getattr(torch, rule.name, rule.op)
    return f"F.{rule.name}" if twin is not rule.op and getattr(F, rule.name, None) is rule.op else rule.name
