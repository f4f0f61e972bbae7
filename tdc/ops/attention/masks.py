"""Masks of attention in the forms that the backends take.

A mask is bool (True attends) or added to the scores. It is dense, and then at least as large as the longest rows, or a
batch with two ragged dims, the sizes of queries and of keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tdc.core.asserts import require
from tdc.core.errors import ShapeError, StructureError, describe, message
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.segments import sizes_of
from tdc.ragged.structure import Structure


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores: -inf where a bool mask forbids."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)


def squared(mask: NestedTensor, q_rows: Structure, k_rows: Structure) -> NestedTensor:
    """A ragged mask as (B, H or 1, -1, -1), with the sizes of queries and keys.

    Raises:
        StructureError: other ragged dims or sizes.
    """
    s, hint = mask.structure, "one number for each pair: (B, -1, -1) or (B, H, -1, -1), sizes of queries, then of keys"
    if s.batch_dim or mask.ndim not in (3, 4) or s.ragged_dims != (mask.ndim - 2, mask.ndim - 1):
        raise StructureError(message("attention", "a mask with two ragged dims", describe(mask), hint=hint))
    text = message("attention", "a mask of the sizes of queries and keys", "other sizes", hint=hint)
    if s.batch_size != q_rows.batch_size:
        raise StructureError(text)
    require((mask.sizes == torch.cat([sizes_of(q_rows), sizes_of(k_rows)], 1)).all(), text)
    return mask if mask.ndim == 4 else mask.unsqueeze(1)


def as_dense(
    mask: Tensor | NestedTensor | None, q_rows: Structure, k_rows: Structure, sizes: tuple[int, ...]
) -> Tensor | None:
    """A mask for rectangles of the given sizes."""
    return squared(mask, q_rows, k_rows).to_padded(length=sizes).data if isinstance(mask, NestedTensor) else mask


def operand(
    mask: Tensor | NestedTensor | None, q: Tensor, q_rows: Structure, k_rows: Structure
) -> tuple[Tensor | None, Tensor | None]:
    """A mask as the operator takes it: added to scores, with as many heads as q; and offsets of a packed one."""
    if mask is None:
        return None, None
    if isinstance(mask, NestedTensor):
        packed = additive(squared(mask, q_rows, k_rows).values, q.dtype).transpose(0, 1)
        return packed.expand(-1, q.shape[1]), mask.offsets
    mask = additive(mask, q.dtype)
    mask = mask.view(*[1] * (4 - mask.ndim), *mask.shape)
    return mask.expand(-1, q.shape[1], -1, -1), None


def check_mask(have: tuple[int, ...], need: tuple[int, ...]) -> None:
    """A dense mask covers the longest example.

    Raises:
        ShapeError: it ends before.
    """
    if any([h < n and h != 1 for h, n in zip(have, need, strict=True)]):
        expected = "a mask (..., Lq, Lk) of at least the longest rows"
        got = f"(..., {have[0]}, {have[1]}) for {need[0]} queries and {need[1]} keys"
        raise ShapeError(message("attention", expected, got, hint="build it for x.max_length"))


def padded_mask(mask: Any) -> Any:
    """A mask for rectangles, (B, H or 1, L, M) where it is a MaskedBatch."""
    if not isinstance(mask, MaskedBatch):
        return mask
    data = mask.filled(0)
    return data if data.ndim == 4 else data.unsqueeze(1)


def causal_mask(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """(L, M), True on and below the diagonal."""
    return torch.ones(sizes, dtype=torch.bool, device=device).tril()
