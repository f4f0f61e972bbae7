"""embedding_bag of a ragged batch: each example is a bag, so no offsets are needed.

    F.embedding_bag(rows (B, -1) of indices, weight (V, D))   ->   (B, D)
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import expect_number
from tdc.core.dtypes import rounded_once
from tdc.core.errors import IndexingError, ShapeError, UnsupportedError, describe, message
from tdc.core.rules import define, note_syncs, unsupported
from tdc.layout.segments import lengths_of, reduce_rows
from tdc.layout.structure import Structure
from tdc.ops.elementwise.pointwise import packed_operand
from tdc.ops.layers.positionwise import dense_weights
from tdc.ragged.masked import MaskedBatch

MODES = ("mean", "sum", "max")


def embedding_bag(
    input: Any, weight: Tensor, offsets: Any = None, max_norm: Any = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Any = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """Sum, mean or maximum of the embeddings of each example; zeros for an empty one."""
    dense_weights("embedding_bag", input, weight)
    if offsets is not None:
        got, hint = f"{describe(input)} and offsets", "F.embedding_bag(rows, weight): rows are bags"
        raise ShapeError(message("embedding_bag", "a ragged batch of indices and no offsets", got, hint=hint))
    if mode not in MODES:
        raise ShapeError(message("embedding_bag", f"one of {', '.join(MODES)}", repr(mode), hint="mode='mean'"))
    packed = [a.to_packed() if isinstance(a, MaskedBatch) else a for a in (input, per_sample_weights)]
    input, per_sample_weights = packed
    if input.values.ndim != 1:
        hint = "embed and reduce: F.embedding(rows, weight).sum(1)"
        raise ShapeError(message("embedding_bag", "rows of shape (-1,)", describe(input), hint=hint))
    if per_sample_weights is not None and mode != "sum":
        got = f"per_sample_weights with mode={mode!r}"
        raise UnsupportedError(message("embedding_bag", "weights with mode='sum'", got, hint="mode='sum'"))
    if padding_idx is not None:
        expect_number("embedding_bag", padding_idx, whole=True)
        if not -weight.shape[0] <= padding_idx < weight.shape[0]:
            hint = f"0 to {weight.shape[0] - 1}"
            raise IndexingError(message("embedding_bag", "padding_idx of a row of weight", f"{padding_idx}", hint=hint))
    found = F.embedding(input.values, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if per_sample_weights is not None:
        found = found * packed_operand(per_sample_weights, input, F.embedding_bag).unsqueeze(-1)
    real = None if padding_idx is None else input.values != padding_idx % weight.shape[0]
    return reduced_bags(found, real, input.structure, mode)


def reduced_bags(found: Tensor, real: Tensor | None, s: Structure, mode: str) -> Tensor:
    """Embeddings (N, D) reduced to those of bags (B, D); `real` tells which ones count, (N,), None for all."""
    count = lengths_of(s) if real is None else reduce_rows(real.long(), s, "sum", 0)
    if real is not None:
        found = found.masked_fill(~real.unsqueeze(-1), -math.inf if mode == "max" else 0)
    if mode == "max":
        return reduce_rows(found, s, "amax", -math.inf).masked_fill((count == 0).unsqueeze(-1), 0)
    if mode == "sum":
        return reduce_rows(found, s, "sum", 0)
    number = count.clamp(min=1).unsqueeze(-1)
    return rounded_once(lambda t: reduce_rows(t, s, "sum", 0) / number, found)


define(F.embedding_bag, "embedding_bag", ragged=embedding_bag)
unsupported(
    torch.embedding_bag, ("nested", "masked"), "offsets of bags, which a ragged batch has itself",
    family="embedding_bag", hint="F.embedding_bag(rows, weight)",
)  # fmt: skip
note_syncs("the number of indices", F.embedding_bag, kinds=("masked",))
