"""Attention within rows on CPU: one fused SDPA for each example, which computes no padding.

    q (N, H, D), k and v (M, H, D), offsets of both (B+1,)  ->  out (N, H, D), logsumexp (N, H)

A mask is added to the scores: dense (B or 1, H or 1, Lq, Lk), of which each example reads its corner, or packed (P, H),
the pairs of each example one after another with offsets of their own.

Invariants: exact for every length, zero included; forward and backward read real positions only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.core.dtypes import sum_dtype
from tdc.core.torch_functions import fused_cpu_backward, fused_cpu_forward
from tdc.kernels.attention.rectangle import check_mask


class Example(NamedTuple):
    """Positions of the queries and keys of one example, and its part of the mask."""

    at: int
    queries: slice
    keys: slice
    mask: Tensor | None


@torch.no_grad()
def forward_rows(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """q (N, H, D), k, v (M, H, D), offsets (B+1,) -> out (N, H, D), logsumexp (N, H)."""
    *rows, causal, scale = args
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_zeros(q.shape[:2], dtype=sum_dtype(q.dtype))
    of_queries = parts([loadable(q), out, lse], rows[0])
    of_keys = parts([loadable(k), loadable(v)], rows[0] if rows[1] is None else rows[1])
    for at, _, _, mask in examples(*rows):
        (x, o, s), (y, z) = of_queries[at], of_keys[at]
        found = fused_cpu_forward(x, y, z, is_causal=causal, attn_mask=mask, scale=scale)
        o.copy_(found[0])
        s.copy_(found[1])
    return out, lse


@torch.no_grad()
def backward_rows(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, example by example."""
    *rows, causal, scale = args
    grad, q, k, v, out = [loadable(t) for t in (grad, q, k, v, out)]
    of_q, of_k, of_v = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    of_queries = parts([grad, q, out, lse, of_q], rows[0])
    of_keys = parts([k, v, of_k, of_v], rows[0] if rows[1] is None else rows[1])
    for at, _, _, mask in examples(*rows):
        (g, x, o, s, of_x), (y, z, of_y, of_z) = of_queries[at], of_keys[at]
        found = fused_cpu_backward(g, x, y, z, o, s, 0.0, causal, attn_mask=mask, scale=scale)
        of_x.copy_(found[0])
        of_y.copy_(found[1])
        of_z.copy_(found[2])
    return of_q, of_k, of_v


def parts(tensors: list[Tensor], offsets: Tensor) -> list[tuple[Tensor, ...]]:
    """Parts of each example, (1, H, n, ...), as views of (N, H, ...). There may be room behind the last example."""
    ends = offsets.tolist()
    lengths = [b - a for a, b in pairwise(ends)]
    used = [t if t.shape[0] == ends[-1] else t[: ends[-1]] for t in tensors]
    return [*zip(*[t.transpose(0, 1).unsqueeze(0).split(lengths, 2) for t in used], strict=True)]


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
            yield Example(i, slice(a, b), slice(c, d), one)
