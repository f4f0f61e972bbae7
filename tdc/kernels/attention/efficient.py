"""Attention within rows on CUDA by torch's memory-efficient kernel, which takes packed rows as they are.

    q (N, H, D), k (M, H, D), v (M, H, E), offsets of both (B+1,)  ->  out (N, H, E), logsumexp (B, H, L), seed, offset

It has single precision, every head size, dropout, and causal rows of queries and keys of other lengths, of which the
i-th query attends to keys up to the i-th. L is a bound of the queries' lengths in whole blocks. Backward draws the same
dropout again, from seed and offset. Features are padded with zeros to the size of a load.

Invariants: exact for every length, zero included; a query without keys gives 0, and so do its gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.dynamo import constant
from tdc.core.torch_functions import efficient_backward, efficient_forward
from tdc.kernels.attention.flash import capability, contiguous, gives_zeros, loadable, zeros

LOAD = 16  # bytes that the kernel loads at once
ENDS = 2  # a causal mask that is aligned with the ends of rows
BLOCK = 32  # queries, of which logsumexp has whole blocks


@constant
def runs(device: torch.device, dtype: torch.dtype) -> bool:
    """True if a device has the kernel for a dtype, also where no GPU is at hand."""
    if torch.version.hip is not None or efficient_forward is None or efficient_backward is None:
        return False  # with HIP the logsumexp has another layout (torch 2.11)
    version = capability(device)
    return version is None or version >= ((8, 0) if dtype == torch.bfloat16 else (5, 0))


def in_blocks(bound: int, total: int) -> int:
    """Room of logsumexp for the queries of a row."""
    least: Any = torch.sym_min(bound, total)  # in a graph without a question, where `min` asks
    blocks: int = (least + BLOCK - 1) // BLOCK * BLOCK
    return blocks


def forward_rows(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor | None, max_q: int, max_k: int, window: int,
    causal: bool, scale: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """q (N, H, D), k (M, H, D), v (M, H, E), offsets (B+1,), bounds of lengths -> what the operator gives."""
    n, m = q.shape[0], k.shape[0]
    if gives_zeros(q, k, dropout):
        lse = q.new_zeros((q_offsets.shape[0] - 1, q.shape[1], in_blocks(max_q, n)), dtype=torch.float32)
        state = torch.zeros((), dtype=torch.int64, device="cpu")
        return q.new_zeros((*q.shape[:2], v.shape[2])), lse, state, state.clone()
    x, y, z = [filled(t).unsqueeze(0) for t in (q, k, v)]
    starts = q_offsets, q_offsets if k_offsets is None else k_offsets
    bounds = min(max_q, n), min(max_k, m)
    out, lse, seed, offset, *_ = efficient_forward(
        x, y, z, None, *starts, *bounds, dropout, int(causal), True, scale=scale
    )
    out = cut(out, v)
    return out if k_offsets is None else unmet(out, q_offsets, k_offsets.diff() == 0), lse, seed, offset


def backward_rows(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_offsets: Tensor,
    k_offsets: Tensor | None, seed: Tensor, offset: Tensor, max_q: int, max_k: int, window: int, causal: bool,
    scale: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    n, m = q.shape[0], k.shape[0]
    if gives_zeros(q, k, dropout):
        return zeros(q), zeros(k), zeros(v)
    g, x, y, z, o = [filled(t).unsqueeze(0) for t in (grad, q, k, v, out)]
    starts = q_offsets, q_offsets if k_offsets is None else k_offsets
    bounds, drawn = (min(max_q, n), min(max_k, m)), (dropout, seed, offset)
    options: Any = int(causal), False
    found = efficient_backward(g, x, y, z, None, o, *starts, *bounds, contiguous(lse), *drawn, *options, scale=scale)
    dq, dk, dv = [cut(t, like) for t, like in zip(found[:3], (q, k, v), strict=True)]
    if k_offsets is None:
        return dq, dk, dv
    no_queries, no_keys = q_offsets.diff() == 0, k_offsets.diff() == 0
    return unmet(dq, q_offsets, no_keys), unmet(dk, k_offsets, no_queries), unmet(dv, k_offsets, no_queries)


def used_rows(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, lengths: Tensor, causal: bool, scale: float
) -> Tensor:
    """q (N, H, D), k (B·C, H, D), v (B·C, H, E), of which a row uses its first keys -> (N, H, E); queries are last."""
    n, room = q.shape[0], k.shape[0] // lengths.shape[0]
    x, y, z = [filled(t).unsqueeze(0) for t in (q, k, v)]
    starts = q_offsets.int(), torch.arange(0, k.shape[0] + 1, room, dtype=torch.int32, device=q.device)
    options, used = (0.0, ENDS if causal else 0, False), lengths.int()
    out, *_ = efficient_forward(x, y, z, None, *starts, n, room, *options, scale=scale, seqlen_k=used)
    out = cut(out, v)
    return unmet(out, q_offsets, lengths == 0)


def filled(t: Tensor) -> Tensor:
    """Rows (N, H, D) whose features the kernel can load, zeros behind them."""
    more = -t.shape[2] % (LOAD // t.element_size())
    return F.pad(t, (0, more)) if more else loadable(t)


def cut(t: Tensor, like: Tensor) -> Tensor:
    """Results of the kernel, (1, N, H, ...), as rows with as many features as others have."""
    return contiguous(t.squeeze(0).narrow(2, 0, like.shape[2]))


def unmet(t: Tensor, offsets: Tensor, alone: Tensor) -> Tensor:
    """Packed positions with zeros in rows without a partner, where the kernel writes nothing, or NaN."""
    return t.masked_fill_(torch.repeat_interleave(alone, offsets.diff(), output_size=t.shape[0]).view(-1, 1, 1), 0)
