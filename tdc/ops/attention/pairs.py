"""Attention within rows with a function of scores on CPU: all pairs of a query and a key of each example, packed.

    q (N, H, D), k (M, H, D), v (M, H, E)  ->  (N, H, E)          P pairs, of one example behind those of another

Scores, weights and what lies between are (H, P): products and softmax go example by example (`pair_operators`), the
function of scores runs once, on all pairs. Row, head and positions come to it as (1, P), (H, 1), (1, P) and (1, P).

Invariants: nothing is computed for padding; a query without any key to attend to gives 0; one graph for all lengths.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.asserts import require
from tdc.core.errors import ShapeError
from tdc.ops.attention.masks import TOO_SMALL, as_dense, squared
from tdc.ops.attention.padded import How
from tdc.ops.attention.pair_operators import pair_positions, scores, softmax, sums
from tdc.ragged.nested import NestedTensor
from tdc.ragged.segments import sizes_of, structure_of_sizes, total_of
from tdc.ragged.spans import gather_spans
from tdc.ragged.structure import Structure


def attend_pairs(q: Tensor, k: Tensor, v: Tensor, q_rows: Structure, k_rows: Structure, how: How) -> Tensor:
    """q (N, H, D), k (M, H, D), v (M, H, E) -> (N, H, E)."""
    heads, scale = q.shape[1], 1 / math.sqrt(q.shape[-1]) if how.scale is None else how.scale
    rows = q_rows.offsets, None if k_rows.offsets is q_rows.offsets else k_rows.offsets
    pairs = total_of(structure_of_sizes(torch.cat([sizes_of(q_rows), sizes_of(k_rows)], 1)))
    b, i, j = pair_positions(*rows, pairs).long().split(1)
    x = scores(q * scale, k, *rows, pairs)
    if how.score_mod is not None:
        h = torch.arange(heads, device=q.device)[:, None]
        x = how.score_mod(x, b, h, i, j).expand(heads, pairs)
    if how.causal:
        x = x.masked_fill(j > i, -math.inf)
    if how.mask is not None:
        mask = mask_of_pairs(how.mask, heads, q_rows, k_rows, (b, i, j))
        x = x.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else x + mask.to(q.dtype)
    weights = softmax(x, *rows)
    if how.dropout:
        weights = F.dropout(weights, how.dropout)
    return sums(weights.to(v.dtype), v, *rows, False, q.shape[0])  # score_mod may have made them wider


def mask_of_pairs(
    mask: Tensor | NestedTensor, heads: int, q_rows: Structure, k_rows: Structure, at: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """A mask for each pair, (H or 1, P).

    Args:
        at: row, and positions of query and key, (1, P) each.

    Raises:
        ShapeError: a dense mask that ends before the longest example.
    """
    sizes = sizes_of(q_rows), sizes_of(k_rows)
    if isinstance(mask, NestedTensor):
        packed: Tensor = squared(mask, *sizes).values
        return packed
    dense = as_dense(mask, *sizes, (q_rows.batch_size, heads, 0, 0))
    assert dense is not None
    flat, have = dense.movedim(1, 0).flatten(1), (dense.shape[0], *dense.shape[2:])
    for n, size in zip(have[1:], sizes, strict=True):
        if n != 1:
            require((size <= n).all(), TOO_SMALL, ShapeError)
    index = None
    for n, position in zip(have, at, strict=True):
        index = None if index is None else index * n
        if n != 1:
            index = position[0] if index is None else index + position[0]
    return flat if index is None else gather_spans(flat, 1, index)
