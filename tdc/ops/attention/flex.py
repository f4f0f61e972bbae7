"""Attention within rows as flex_attention with a mask of documents: one kernel of the graph that it is traced into.

    q (N, H, D), k (M, G, D), v (M, G, E)  ->  (N, H, E)

All rows lie behind one another in one sequence, of which a query sees the keys of its own row. Rows of queries and rows
of keys both ascend, so a block of queries needs a block of keys only if their first and last rows overlap: the table of
blocks comes from the row of each position, and no (N, M) mask is ever made.

Outside a graph flex_attention makes all scores (H, N, M), and it has no rule for `torch.func`; whoever calls this has
chosen it for a graph.

Invariants: exact for every length but totals of zero; a query without any key to attend to gives 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tdc.core.dynamo import flex_module
from tdc.ragged.segments import local_positions, row_ids
from tdc.ragged.structure import Structure

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
BLOCK = 128  # positions, what flex_attention works on at once


def flex_rows(
    q: Tensor, k: Tensor, v: Tensor, q_rows: Structure, k_rows: Structure, causal: bool, scale: float,
    score_mod: ScoreMod | None,
) -> Tensor:  # fmt: skip
    """q (N, H, D), k (M, G, D), v (M, G, E) -> (N, H, E)."""
    q_row, k_row = row_ids(q_rows, q.shape[0]), row_ids(k_rows, k.shape[0])
    q_at, k_at = local_positions(q_rows, q.shape[0]), local_positions(k_rows, k.shape[0])

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same = q_row[i] == k_row[j]
        return same & (k_at[j] <= q_at[i]) if causal else same

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert score_mod is not None
        return score_mod(s, q_row[i], h, q_at[i], k_at[j])

    q_HND, k_GMD, v_GME = [t.transpose(0, 1)[None] for t in (q, k, v)]
    below = causal and k_rows.offsets is q_rows.offsets
    sizes = q.shape[0], k.shape[0]
    flex = flex_module()
    mask = flex.BlockMask.from_kv_blocks(
        *blocks(q_row, k_row, below), BLOCK_SIZE=BLOCK, mask_mod=allowed, seq_lengths=sizes
    )
    how = None if score_mod is None else score
    shared = q.shape[1] != k.shape[1]
    out: Tensor = flex.flex_attention(q_HND, k_GMD, v_GME, how, mask, scale, shared)
    return out[0].transpose(0, 1)


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
