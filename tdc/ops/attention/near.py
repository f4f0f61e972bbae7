"""Attention within rows on a few rectangles, each of examples of near lengths: where no kernel takes packed rows.

    q (N, H, D), k (M, H, D), v (M, H, E)  ->  (N, H, E)

One rectangle of all examples computes most, and several take more launches: see `near_sizes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tdc.kernels.attention.rectangle import How, ScoreMod, attend_padded, attend_rectangle
from tdc.layout.rectangles import Rectangles, from_rectangles, near_sizes, sides_of, to_rectangles
from tdc.layout.segments import longest, sizes_of
from tdc.layout.structure import Structure
from tdc.ops.attention.masks import as_dense, squared
from tdc.ragged.nested import NestedTensor


def attend_rectangles(q: Tensor, k: Tensor, v: Tensor, q_rows: Structure, k_rows: Structure, how: How) -> Tensor:
    """Packed rows (N, H, D), padded on the way: all in one rectangle, or in several where that is less work."""
    r = near_sizes(q.shape[1] * (q.shape[2] + v.shape[2]) * q.dtype.itemsize, q_rows, k_rows)
    if r is None:
        shape = (q_rows.batch_size, q.shape[1], *longest(q_rows), *longest(k_rows))
        mask = as_dense(how.mask, sizes_of(q_rows), sizes_of(k_rows), shape)
        return attend_rectangle(q, k, v, q_rows, k_rows, how._replace(mask=mask))
    masks, examples = masks_of(how.mask, q.shape[1], q_rows, k_rows, r), r.order.split(r.counts)
    of_q, of_k = sides_of(q_rows, r)
    operands = [to_rectangles(t, s, of) for t, s, of in ((q, q_rows, of_q), (k, k_rows, of_k), (v, k_rows, of_k))]
    outs = []
    for i, (rows, mask) in enumerate(zip(examples, masks, strict=True)):
        q_EHLD, k_EHMD, v_EHMD = [parts[i].transpose(1, 2) for parts in operands]
        sizes = sizes_of(q_rows)[rows], sizes_of(k_rows)[rows]
        own = how._replace(mask=mask, score_mod=of_examples(how.score_mod, rows))
        outs.append(attend_padded(q_EHLD, k_EHMD, v_EHMD, sizes, own).transpose(1, 2))
    return from_rectangles(outs, q_rows, of_q, q.shape[0])


def masks_of(mask: Any, heads: int, q_rows: Structure, k_rows: Structure, r: Rectangles) -> Sequence[Tensor | None]:
    """The mask of each rectangle, which is dense."""
    sizes = sizes_of(q_rows), sizes_of(k_rows)
    if isinstance(mask, NestedTensor):
        pairs: Any = squared(mask, *sizes)
        parts = to_rectangles(pairs.values.movedim(0, -1), pairs.structure, r)
        return [part.movedim(-1, 1) for part in parts]
    dense = as_dense(mask, *sizes, (q_rows.batch_size, heads, 0, 0))
    if dense is None or dense.shape[0] == 1:
        return [dense] * len(r.counts)
    return dense.index_select(0, r.order).split(r.counts)


def of_examples(score_mod: ScoreMod | None, rows: Tensor) -> ScoreMod | None:
    """A function of scores for some examples of the batch."""
    if score_mod is None:
        return None
    return lambda s, b, h, i, j: score_mod(s, rows[b], h, i, j)
