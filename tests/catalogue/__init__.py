"""Samples for every row of the rule table.

A generator of samples is found by the operation's name, else by its family; one serves NestedTensor and MaskedBatch,
one serves TensorDict. A new row of a known family has samples at once; any other row without them fails a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import catalogue_batch
import catalogue_conv
import catalogue_indexing
import catalogue_linalg
import catalogue_loss
import catalogue_matmul
import catalogue_moving
import catalogue_norm
import catalogue_order
import catalogue_pointwise
import catalogue_ragged_shape
import catalogue_reduction
import catalogue_resample
import catalogue_rnn
import catalogue_statistics
import catalogue_structure
import catalogue_tensordict
import torch
import torch.nn.functional as F
from harness import Sample

from tdc._rules import Rule

Maker = Callable[[Rule], Iterable[Sample]]
RAGGED: dict[str, Maker] = {
    **catalogue_pointwise.RAGGED,
    **catalogue_reduction.RAGGED,
    **catalogue_structure.RAGGED,
    **catalogue_ragged_shape.RAGGED,
    **catalogue_indexing.RAGGED,
    **catalogue_moving.RAGGED,
    **catalogue_norm.RAGGED,
    **catalogue_loss.RAGGED,
    **catalogue_matmul.RAGGED,
    **catalogue_statistics.RAGGED,
    **catalogue_order.RAGGED,
    **catalogue_rnn.RAGGED,
    **catalogue_linalg.RAGGED,
    **catalogue_conv.RAGGED,
    **catalogue_resample.RAGGED,
}
DICTS: dict[str, Maker] = {
    **catalogue_tensordict.DICTS,
    **dict.fromkeys(catalogue_pointwise.BINARY + catalogue_pointwise.NEW_BINARY, catalogue_tensordict.binary),
    **catalogue_reduction.DICTS,
    **catalogue_batch.DICTS,
}
REPRESENTATIVES = {
    "pointwise": ("relu", "gelu", "add", "where", "masked_fill"), "reduction": ("sum", "amax"),
    "shape": ("permute", "reshape"), "norm": ("layer_norm", "softmax"), "join": ("cat", "unbind"),
    "channel": ("group_norm",), "conv": ("conv1d",), "pool": ("max_pool1d",), "resample": ("interpolate",),
    "factory": ("zeros_like",), "scan": ("cumsum",), "sort": ("sort",), "random": ("dropout",), "whole": ("equal",),
    "matmul": ("matmul",), "linalg": ("inv", "solve"),
    "indexing": ("gather", "index_select", "embedding"), "loss": ("cross_entropy", "mse_loss"),
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
