"""Attention within rows as flex_attention with a mask of documents: one kernel of the graph that it is traced into.

    q (N, H, D), k (M, G, D), v (M, G, E)  ->  (N, H, E)

All rows are one sequence, of which a query sees the keys of its own row. A block of queries needs a block of keys if
their first and last rows overlap, so no (N, M) mask is ever made.

For graphs only: outside one flex_attention makes all scores (H, N, M), and it has no rule for `torch.func`.

Invariants: exact for every length but totals of zero; a query without any key to attend to gives 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tdc.core.asserts import require
from tdc.core.dynamo import eager, flex_module
from tdc.core.errors import ShapeError
from tdc.kernels.attention.rectangle import TOO_SMALL, ScoreMod, too_small
from tdc.layout.segments import local_positions, row_ids, sizes_of
from tdc.layout.structure import Structure
from tdc.ops.attention.masks import operand
from tdc.ragged.nested import NestedTensor

BLOCK = 128  # positions, what flex_attention works on at once


def flex_rows(
    q: Tensor, k: Tensor, v: Tensor, q_rows: Structure, k_rows: Structure, causal: bool, scale: float | None,
    score_mod: ScoreMod | None, mask: Tensor | NestedTensor | None,
) -> Tensor:  # fmt: skip
    """q (N, H, D), k (M, G, D), v (M, G, E) -> (N, H, E)."""
    q_row, k_row = row_ids(q_rows, q.shape[0]), row_ids(k_rows, k.shape[0])
    q_at, k_at = local_positions(q_rows, q.shape[0]), local_positions(k_rows, k.shape[0])
    added = None if mask is None else reader(mask, q, q_rows, k_rows)

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same = q_row[i] == k_row[j]
        return same & (k_at[j] <= q_at[i]) if causal else same

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        at = q_row[i], h, q_at[i], k_at[j]
        s = s if score_mod is None else score_mod(s, *at)
        return s if added is None else s + added(*at)

    q_HND, k_GMD, v_GME = [t.transpose(0, 1)[None] for t in (q, k, v)]
    below = causal and k_rows.offsets is q_rows.offsets
    sizes = q.shape[0], k.shape[0]
    flex = flex_module()
    documents = flex.BlockMask.from_kv_blocks(
        *blocks(q_row, k_row, below), BLOCK_SIZE=BLOCK, mask_mod=allowed, seq_lengths=sizes
    )
    how = None if score_mod is None and added is None else score
    shared = q.shape[1] != k.shape[1]
    out: Tensor = flex.flex_attention(q_HND, k_GMD, v_GME, how, documents, scale, shared)
    return out[0].transpose(0, 1)


def reader(mask: Tensor | NestedTensor, q: Tensor, q_rows: Structure, k_rows: Structure) -> Callable[..., Tensor]:
    """A function of row, head and positions of query and key: what the mask adds to the score of a pair.

    Pairs of other rows, which no query sees, read another number of the mask.
    """
    values, offsets = operand(mask, q, q_rows, k_rows)
    assert values is not None
    sizes = sizes_of(q_rows), sizes_of(k_rows)
    if offsets is not None:
        last, keys = values.shape[0] - 1, sizes[1][:, 0]
        return lambda b, h, i, j: values[(offsets[b] + i * keys[b] + j).clamp(max=last), h]
    have = values.shape[2:]
    for n, lengths in zip(have, sizes, strict=True):
        require((lengths <= n).all() | (n == 1), too_small(have) if eager() else TOO_SMALL, ShapeError)
    steps = [int(n != 1) for n in values.shape]
    ends = [n - 1 for n in have]
    return lambda b, h, i, j: values[
        b * steps[0], h, (i * steps[2]).clamp(max=ends[0]), (j * steps[3]).clamp(max=ends[1])
    ]


def blocks(q_row: Tensor, k_row: Tensor, below: bool) -> tuple[Tensor, Tensor]:
    """For each block of queries how many blocks of keys it needs, and these first: (1, 1, Q), (1, 1, Q, K), int32.

    Args:
        below: no query sees a key behind its own position in the batch.
    """
    (first, last), (k_first, k_last) = ends(q_row), ends(k_row)
    meet = (first[:, None] <= k_last) & (k_first <= last[:, None])
    meet = (meet.tril() if below else meet).to(torch.int32)
    order = meet.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return meet.sum(-1, dtype=torch.int32)[None, None], order[None, None]


def ends(row: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that each block begins and ends in."""
    first = row[::BLOCK]
    last = torch.arange(first.shape[0], device=row.device) * BLOCK + (BLOCK - 1)
    return first, row[last.clamp(max=row.shape[0] - 1)]
