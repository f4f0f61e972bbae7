"""Attention within rows on rectangles: the backend that runs everything, and MaskedBatches.

    B examples, L and M longest queries and keys, H heads, D and E features of keys and values

Invariants: padding is finite and meets no real query; a query without any key to attend to gives 0.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.ops.attention.flex import ScoreMod
from tdc.ops.attention.masks import additive, as_dense, causal_mask, check_mask
from tdc.ragged.padding import pack_rows, pad_rows, valid_mask
from tdc.ragged.segments import longest, sizes_of
from tdc.ragged.structure import Structure


class How(NamedTuple):
    """What attention does besides attending."""

    causal: bool
    scale: float
    dropout: float = 0.0
    mask: Any = None
    score_mod: ScoreMod | None = None


def attend_rectangle(q: Tensor, k: Tensor, v: Tensor, q_rows: Structure, k_rows: Structure, how: How) -> Tensor:
    """Packed rows (N, H, D), padded on the way."""
    q_BHLD, k_BHMD, v_BHMD = (
        pad_rows(t, rows, longest(rows)).transpose(1, 2) for t, rows in ((q, q_rows), (k, k_rows), (v, k_rows))
    )
    dense = as_dense(how.mask, q_rows, k_rows, (q_BHLD.shape[2], k_BHMD.shape[2]))
    out = attend_padded(q_BHLD, k_BHMD, v_BHMD, sizes_of(k_rows), how._replace(mask=dense))
    return pack_rows(out.transpose(1, 2), q_rows, q.shape[0])


def attend_padded(q_BHLD: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, k_sizes: Tensor, how: How) -> Tensor:
    """Attention on rectangles whose padding is finite -> (B, H, L, E); padded queries give anything finite."""
    size, keys = q_BHLD.shape[2], k_BHMD.shape[2]
    allowed = valid_mask(k_sizes, (keys,))[:, None, None, :]
    if how.causal:
        allowed = allowed & causal_mask((size, keys), q_BHLD.device)
    mask = allowed
    if how.mask is not None:
        check_mask(tuple(how.mask.shape[-2:]), (size, keys))
        mask = additive(how.mask[..., :size, :keys], q_BHLD.dtype).masked_fill(~allowed, -math.inf)
    if how.score_mod is None:
        dead = ~allowed.any(-1, keepdim=True)
        mask = mask | dead if mask.dtype == torch.bool else mask.masked_fill(dead, 0)
        out = F.scaled_dot_product_attention(
            q_BHLD, k_BHMD, v_BHMD, attn_mask=mask, dropout_p=how.dropout, scale=how.scale
        )
        return out.masked_fill(dead, 0)
    positions = [torch.arange(n, device=q_BHLD.device) for n in (*q_BHLD.shape[:3], keys)]
    grid = [p.view([-1 if i == d else 1 for i in range(4)]) for d, p in enumerate(positions)]
    scores = how.score_mod(q_BHLD @ k_BHMD.transpose(2, 3) * how.scale, *grid)
    scores = scores.masked_fill(~allowed, -math.inf) if how.mask is None else scores + mask
    return F.dropout(weights_of(scores), how.dropout).to(v_BHMD.dtype) @ v_BHMD  # score_mod may have made them wider


def weights_of(scores: Tensor) -> Tensor:
    """Attention weights of scores, -inf where nothing is attended to; 0 of queries without keys."""
    dead = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)
