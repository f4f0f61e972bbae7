"""Attention of new tokens to a cache: queries are the last positions of their rows, keys are in memory with room.

    q (N, H, D) packed, k (B, C, G, D), v (B, C, G, E), number of positions of each row (B,)  ->  (N, H, E)

One node of a graph for all lengths: on CPU a fused SDPA for each example, on CUDA torch's flash kernel in half
precision, else its memory-efficient one.

Invariants: exact for every length, zero included; memory behind the positions of a row is never read.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.dtypes import HALF
from tdc.core.errors import ShapeError, StructureError, message
from tdc.core.operators import operator, refuse_derivative
from tdc.core.torch_functions import flash_forward
from tdc.kernels.attention import efficient
from tdc.kernels.attention.flash import ALIGNED, contiguous, largest_head, loadable
from tdc.kernels.attention.operator import folded
from tdc.kernels.attention.rectangle import shared_heads

OP = "KVCache.attend"


def forward_rows(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, lengths: Tensor, causal: bool, window: int, scale: float
) -> list[Tensor]:
    """Row by row: of each the queries and the keys that it has."""
    offsets, counts = q_offsets.tolist(), lengths.tolist()
    short = [b for b, ((i, j), n) in enumerate(zip(pairwise(offsets), counts, strict=True)) if n < j - i]
    if causal and short:
        got = f"{offsets[short[0] + 1] - offsets[short[0]]} queries and {counts[short[0]]} positions in row {short[0]}"
        hint = "cache = cache.append_(k, v) first"
        raise ShapeError(message(OP, "queries that are positions of the cache", got, hint=hint))
    if counts and offsets == [*range(len(offsets))]:
        return [single(q, k, v, counts, window, scale)]
    out = q.new_zeros((*q.shape[:2], v.shape[3]))
    for b, ((i, j), n) in enumerate(zip(pairwise(offsets), counts, strict=True)):
        if i < j and n:
            begin = max(0, n - (j - i) - window + 1) if window else 0
            keys, values = (x[b, begin:n].transpose(0, 1) for x in (k, v))
            out[i:j] = attend(q[i:j], keys, values, causal, window, scale)
    return [out]


def single(q: Tensor, k: Tensor, v: Tensor, counts: list[int], window: int, scale: float) -> Tensor:
    """One query of each row (B, H, D). Heads that share keys are queries of one head."""
    parts = [x.split(1) for x in (q.unflatten(1, (k.shape[2], -1)), k.transpose(1, 2), v.transpose(1, 2))]
    found: list[Tensor] = []
    for x, y, z, n in zip(*parts, counts, strict=True):
        begin = max(0, n - window) if window else 0
        if begin or n < k.shape[1]:
            y, z = y.narrow(2, begin, n - begin), z.narrow(2, begin, n - begin)
        found.append(
            F.scaled_dot_product_attention(x, y, z, scale=scale) if n else z.new_zeros(*x.shape[:3], z.shape[3])
        )
    return torch.cat(found).flatten(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, scale: float) -> Tensor:
    """q (n, H, D), the last n of the positions of k (G, M, D) and v (G, M, E), to (n, H, E)."""
    n, heads, groups, m = q.shape[0], q.shape[1], k.shape[0], k.shape[1]
    own = q.unflatten(1, (groups, -1))
    if n == 1 or not causal:  # nothing is forbidden, so heads that share keys are queries of one head
        found = F.scaled_dot_product_attention(
            own.permute(1, 2, 0, 3).flatten(1, 2)[None], k[None], v[None], scale=scale
        )
        return found[0].unflatten(1, (-1, n)).permute(2, 0, 1, 3).flatten(1, 2)
    k, v = (x.repeat_interleave(heads // groups, 0) if groups < heads else x for x in (k, v))
    mask = None
    if window or n < m:
        back = torch.arange(m - n, m, device=q.device)[:, None] - torch.arange(m, device=q.device)
        mask = (back >= 0) & (back < window) if window else back >= 0
    parts = (x[None] for x in (q.transpose(0, 1), k, v))
    return F.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=mask is None, scale=scale)[0].transpose(
        0, 1
    )


def rows_on_cuda(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, lengths: Tensor, causal: bool, window: int, scale: float
) -> list[Tensor]:
    """A kernel for packed rows, of which each uses only its first keys; else row by row, which syncs."""
    size, whole = q.shape[2], bool(q.shape[0]) and k.is_contiguous() and v.is_contiguous()
    fits = size == v.shape[3] <= largest_head(q.device) and size % ALIGNED == 0 and q.dtype in HALF
    if whole and fits:
        return [flash_rows(q, k, v, q_offsets, lengths, causal, window, scale)]
    if whole and not window and q.dtype in (*HALF, torch.float32) and efficient.runs(q.device, q.dtype):
        k, v = [shared_heads(x.flatten(0, 1), q.shape[1]) for x in (k, v)]
        return [efficient.used_rows(q, k, v, q_offsets, lengths, causal, scale)]
    return forward_rows(q, k, v, q_offsets, lengths, causal, window, scale)


def flash_rows(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, lengths: Tensor, causal: bool, window: int, scale: float
) -> Tensor:
    """The flash kernel."""
    count, room = k.shape[:2]
    starts = torch.arange(0, (count + 1) * room, room, dtype=torch.int32, device=q.device)
    options = {"scale": scale, "seqused_k": lengths.int(), "window_size_left": window - 1 if window else None}
    if window and causal:
        options["window_size_right"] = 0
    rows = q_offsets.int(), starts, q.shape[0], room
    out, *_ = flash_forward(loadable(q), k.flatten(0, 1), v.flatten(0, 1), *rows, 0.0, causal, False, **options)
    return contiguous(out)


def fake_rows(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    return [q.new_empty((*q.shape[:2], v.shape[3]))]


NO_DERIVATIVE = message(
    OP, "no derivative", "one that is asked for", hint="torch.no_grad(); train with F.scaled_dot_product_attention"
)


def over_vmap(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """Under vmap the batch becomes heads, also of the cache; offsets and lengths are shared."""
    if any([d is not None for d in in_dims[3:5]]):
        hint = "map over keys and values only: in_dims with None for lengths"
        raise StructureError(message("vmap", "one length of each row for all examples", "mapped lengths", hint=hint))
    batch: int = info.batch_size
    tensors = [folded(x, d, batch, heads) for x, d, heads in zip(args[:3], in_dims[:3], (1, 2, 2), strict=True)]
    return [op(*tensors, *args[3:])[0].unflatten(1, (batch, -1))], [1]


cached_rows = operator(
    "cached_attention(Tensor q, Tensor k, Tensor v, Tensor q_offsets, Tensor lengths, bool causal, int window, "
    "float scale) -> Tensor[]",
    fake_rows, over_vmap, CPU=forward_rows, CUDA=rows_on_cuda,
)  # fmt: skip
refuse_derivative(cached_rows, NO_DERIVATIVE)
