"""Attention within rows on CPU: one fused SDPA for each example, which computes no padding.

    q (N, H, D), k and v (M, H, D), offsets of both (B+1,)  ->  out (N, H, D), logsumexp (N, H)

A mask is added to the scores: dense (B or 1, H or 1, Lq, Lk), of which each example reads its corner, or packed (P, H),
the pairs of each example behind one another with offsets of their own.

Invariants: exact for every length, zero included; forward and backward read real positions only; lengths are read on
the host, where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.core.dtypes import sum_dtype
from tdc.core.dynamo import fused_cpu_backward, fused_cpu_forward
from tdc.ops.attention.masks import check_mask


class Example(NamedTuple):
    """The queries and keys of one example, and its part of the mask."""

    queries: slice
    keys: slice
    mask: Tensor | None


def forward_rows(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """q (N, H, D), k, v (M, H, D), offsets (B+1,) -> out (N, H, D), logsumexp (N, H)."""
    *rows, causal, scale = args
    q, k, v = [loadable(t) for t in (q, k, v)]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_zeros(q.shape[:2], dtype=sum_dtype(q.dtype))
    for at in examples(*rows):
        parts = [t[i].transpose(0, 1)[None] for t, i in ((q, at.queries), (k, at.keys), (v, at.keys))]
        o, s = fused_cpu_forward(*parts, is_causal=causal, attn_mask=at.mask, scale=scale)
        out[at.queries] = o[0].transpose(0, 1)
        lse[at.queries] = s[0].transpose(0, 1)
    return out, lse


def backward_rows(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, example by example."""
    *rows, causal, scale = args
    grad, q, k, v, out = [loadable(t) for t in (grad, q, k, v, out)]
    grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    for at in examples(*rows):
        g, x, o = (t[at.queries].transpose(0, 1)[None] for t in (grad, q, out))
        y, z = (t[at.keys].transpose(0, 1)[None] for t in (k, v))
        s = lse[at.queries].transpose(0, 1)[None].contiguous()
        parts = fused_cpu_backward(g, x, y, z, o, s, 0.0, causal, attn_mask=at.mask, scale=scale)
        for total, part, i in zip(grads, parts, (at.queries, at.keys, at.keys), strict=True):
            total[i] = part[0].transpose(0, 1)
    return grads[0], grads[1], grads[2]


def loadable(t: Tensor) -> Tensor:
    """A tensor whose features lie one behind the other, as the kernel takes for granted; a copy if they do not."""
    return t if t.stride(-1) == 1 else t.contiguous()


def examples(
    q_offsets: Tensor, k_offsets: Tensor | None, mask: Tensor | None = None, mask_offsets: Tensor | None = None
) -> Iterator[Example]:
    """The examples that have both queries and keys."""
    q = q_offsets.tolist()
    k = q if k_offsets is None else k_offsets.tolist()
    first = None if mask_offsets is None else mask_offsets.tolist()
    for i, ((a, b), (c, d)) in enumerate(zip(pairwise(q), pairwise(k), strict=True)):
        if a < b and c < d:
            one = mask
            if mask is not None and first is not None:
                one = mask[first[i] : first[i + 1]].view(b - a, d - c, -1).permute(2, 0, 1)[None]
            elif mask is not None:
                check_mask(tuple(mask.shape[2:]), (b - a, d - c))
                row = min(i, mask.shape[0] - 1)
                one = mask[row : row + 1, :, : b - a, : d - c].expand(-1, -1, b - a, d - c)
            yield Example(slice(a, b), slice(c, d), one)
