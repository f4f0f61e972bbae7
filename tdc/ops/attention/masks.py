"""Masks of attention in the forms that the backends take.

A mask is bool (True attends) or added to the scores. It is dense, and then at least as large as the longest rows, or a
batch with two ragged dims, the sizes of queries and of keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.asserts import require
from tdc.core.errors import ShapeError, StructureError, describe, message
from tdc.kernels.attention.rectangle import additive
from tdc.layout.segments import sizes_of
from tdc.layout.structure import Structure
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import ragged_sizes


def squared(mask: Any, q_sizes: Tensor, k_sizes: Tensor) -> Any:
    """A ragged mask as (B, H or 1, -1, -1), with the sizes of queries and keys, (B, 1) each."""
    hint = "one number for each pair: (B, -1, -1) or (B, H, -1, -1), sizes of queries, then of keys"
    if mask._batch_dim or mask.ndim not in (3, 4) or mask.ragged_dims != (mask.ndim - 2, mask.ndim - 1):
        raise StructureError(message("attention", "a mask with two ragged dims", describe(mask), hint=hint))
    text = message("attention", "a mask of the sizes of queries and keys", "other sizes", hint=hint)
    if len(mask) != q_sizes.shape[0]:
        raise StructureError(text)
    require((ragged_sizes(mask) == torch.cat([q_sizes, k_sizes], 1)).all(), text, StructureError)
    return mask if mask.ndim == 4 else mask.unsqueeze(1)


def as_dense(mask: Any, q_sizes: Tensor, k_sizes: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """A mask of any form for rectangles of a shape (B, H, L, M), as (B or 1, H or 1, L, M)."""
    if isinstance(mask, MaskedBatch):
        mask = squared(mask, q_sizes, k_sizes).filled(0)
    elif isinstance(mask, NestedTensor):
        mask = squared(mask, q_sizes, k_sizes).to_padded(length=tuple(shape[2:])).data
    if mask is None:
        return None
    have = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if any([h != 1 and h != n for h, n in zip(have[:-2], shape, strict=False)]):
        expected, got = f"a mask for 1 or {shape[0]} examples and 1 or {shape[1]} heads", describe(mask)
        raise ShapeError(message("attention", expected, got, hint="(Lq, Lk), or (B, 1, Lq, Lk) for each example"))
    return mask.view(have)


def operand(mask: Any, q: Tensor, q_rows: Structure, k_rows: Structure) -> tuple[Tensor | None, Tensor | None]:
    """A mask as the operator takes it: added to scores, with as many heads as q; and offsets of a packed one."""
    sizes = sizes_of(q_rows), sizes_of(k_rows)
    if isinstance(mask, NestedTensor):
        packed = additive(squared(mask, *sizes).values, q.dtype).transpose(0, 1)
        return packed.expand(-1, q.shape[1]), mask.offsets
    dense = as_dense(mask, *sizes, (q_rows.batch_size, q.shape[1], 0, 0))
    return None if dense is None else additive(dense, q.dtype).expand(-1, q.shape[1], -1, -1), None
