"""Attention within rows: every example attends to itself, or to its partner of another batch, and to nothing else.

    varlen_attention   q (N, H, D), k and v (M, G, D), structures of both   what everything else calls
    F.scaled_dot_product_attention      NestedTensor (B, H, -1, D), MaskedBatch (B, H, L, D)

Rows stay packed where a kernel takes them so; `choice` has the list. Elsewhere rows are padded, which needs the
longest length and gives the same numbers: all in one rectangle, which computes most, or in a few of examples of near
lengths, which take more launches, see `near_sizes`. A mask has one of the forms in `masks`.

    B rows, L and M longest queries and keys, H heads, G heads of keys, D features

Invariants: exact for every length, zero included; forward and backward read real positions only; one graph for all
lengths; a query without any key to attend to gives 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.dtypes import as_autocast
from tdc.core.dynamo import eager, is_zero, under_transform
from tdc.core.errors import ShapeError, StructureError, describe, message
from tdc.core.operators import directed
from tdc.core.rules import define
from tdc.core.typing import OpName
from tdc.kernels.attention.efficient import runs
from tdc.kernels.attention.flash import largest_head
from tdc.kernels.attention.operator import attend
from tdc.kernels.attention.rectangle import (
    How,
    ScoreMod,
    attend_padded,
    attend_rectangle,
    shared_heads,
    window_mask,
    within,
)
from tdc.layout.rectangles import Rectangles, from_rectangles, near_sizes, sides_of, to_rectangles
from tdc.layout.segments import longest, offsets_int32, sizes_of
from tdc.layout.structure import Structure
from tdc.ops.attention.choice import Call, backend
from tdc.ops.attention.flex import flex_rows
from tdc.ops.attention.masks import as_dense, operand, squared
from tdc.ops.rectangle import cut_padding
from tdc.ops.shape.join import as_rows
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import Ragged, fitted, is_ragged

NAME = "scaled_dot_product_attention"
SEEDS = 2**31 - 1  # how many


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, q_rows: Structure, k_rows: Structure, *, causal: bool = False,
    scale: float | None = None, dropout: float = 0.0, mask: Tensor | NestedTensor | None = None,
    score_mod: ScoreMod | None = None, window: int | None = None,
) -> Tensor:  # fmt: skip
    """Attention of each row's queries to the same row's keys.

    Shapes:
        q `(N, H, D)`, k `(M, G, D)` and v `(M, G, E)` -> `(N, H, E)`; rows given by two structures with equal batch
        size, G heads of keys for H, a multiple of G.

    Args:
        causal: the i-th query of a row attends to the row's keys up to the i-th.
        scale: of scores, `1 / sqrt(D)` by default.
        dropout: probability that an attention weight becomes 0.
        mask: bool, True attends, or added to the scores. Dense, broadcastable to `(B, H, Lq, Lk)` and at least as large
            as the longest rows, or a NestedTensor `(B, -1, -1)` or `(B, H, -1, -1)`.
        score_mod: `score_mod(score, b, h, i, j) -> score`, pointwise in tensors that broadcast: the scaled scores of
            all pairs, and row, head, position of the query and of the key. Index learned tensors: `slopes[h]`.
        window: a query attends to keys that are less than so many positions away.

    Raises:
        StructureError: other numbers of rows, or a ragged mask of other sizes.
        ShapeError: a mask that is too small, heads of queries that are no multiple of those of keys.

    Compile:
        One node on CPU and on CUDA; flex_attention in graphs on CUDA with a mask or score_mod. In the other cases of
        `tdc.ops.attention.choice` padded: the structures must carry their longest length. A window is the flash
        kernel's own, else a mask.

    Source:
        `torch.nn.functional.scaled_dot_product_attention` on each row; `score_mod` as in
        `torch.nn.attention.flex_attention`.

    Example:
        >>> import torch
        >>> from tdc.ragged.pack import pack
        >>> x = pack([torch.ones(2, 1, 4), torch.ones(3, 1, 4)])
        >>> alibi = lambda score, b, h, i, j: score - (i - j).abs()
        >>> varlen_attention(x.values, x.values, x.values, x.structure, x.structure, score_mod=alibi).shape
        torch.Size([5, 1, 4])
    """
    check_call((q_rows, k_rows), (q.shape[1], k.shape[1], v.shape[1]), dropout, window)
    q, k, v = as_autocast(q, k, v)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    how = How(causal, scale, dropout, mask, score_mod)
    chosen = backend(call_of(q, k, v, q_rows, k_rows, how, window))
    if window is not None and chosen != "flash":
        how, window = in_window(window, how, q_rows, k_rows), None
        chosen = backend(call_of(q, k, v, q_rows, k_rows, how))
    return attend_by(chosen, q, k, v, q_rows, k_rows, how, window or 0)


def in_window(window: int, how: How, q_rows: Structure, k_rows: Structure) -> How:
    """The same attention with the window as a mask where a fused kernel takes one, else as a function of scores."""
    device = q_rows.offsets.device
    if device.type == "cpu" and how.mask is None and how.score_mod is None:
        return how._replace(mask=window_mask(window, (*longest(q_rows), *longest(k_rows)), device))
    return how._replace(score_mod=within(window, how.score_mod))


def attend_by(
    chosen: str, q: Tensor, k: Tensor, v: Tensor, q_rows: Structure, k_rows: Structure, how: How, window: int
) -> Tensor:
    """Attention by the backend that was chosen."""
    causal, scale, dropout, mask, score_mod, _ = how
    if chosen == "flex":
        return flex_rows(q, k, v, q_rows, k_rows, causal, scale, score_mod, mask)
    if chosen != "flash":
        k, v = (shared_heads(t, q.shape[1]) for t in (k, v))
    if chosen in ("flash", "efficient"):
        bounds = longest_bound(q_rows, q.shape[0]), longest_bound(k_rows, k.shape[0])
        offsets, none = (offsets_int32(q_rows), offsets_int32(k_rows)), (None, None, None)
        return attend_rows(chosen, q, k, v, *offsets, *none, *bounds, window, causal, scale, dropout)
    if chosen in ("rows", "weights"):
        offsets, masks = (q_rows.offsets, k_rows.offsets), operand(mask, q, q_rows, k_rows)
        seeds = torch.randint(SEEDS, (1,), device="cpu") if dropout else None
        return attend_rows(chosen, q, k, v, *offsets, *masks, seeds, None, None, 0, causal, scale, dropout)
    return attend_rectangles(q, k, v, q_rows, k_rows, how)


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


def check_call(
    rows: tuple[Structure, Structure], heads: tuple[int, int, int], dropout: float, window: int | None
) -> None:
    """As many rows of queries as of keys, heads that can share keys, a probability, and a window."""
    queries, keys = rows[0].batch_size, rows[1].batch_size
    if queries != keys:
        got, hint = f"{queries} and {keys}", "pair the batches row by row"
        raise StructureError(message("attention", "as many rows of queries as of keys", got, hint=hint))
    check_heads(*heads)
    if window is not None and window < 1:
        raise ShapeError(message("attention", "a window of at least 1", f"{window}", hint="window=None for all keys"))
    if not 0 <= dropout <= 1:
        raise ShapeError(message("attention", "a dropout in [0, 1]", f"{dropout}", hint="dropout_p=0.1"))


def call_of(
    q: Tensor, k: Tensor, v: Tensor, q_rows: Structure, k_rows: Structure, how: How, window: int | None = None
) -> Call:
    """The facts of a call that choose its backend."""
    call = Call(
        q.device.type, q.dtype, (q.shape[-1], v.shape[-1]), how.causal, k_rows.offsets is q_rows.offsets,
        how.mask is not None, how.mask is not None and how.mask.requires_grad, how.score_mod is not None,
        how.dropout != 0.0, windowed=window is not None, moves=directed((q, k, v)),
    )  # fmt: skip
    if not q.is_cuda:
        return call
    fuses = becomes_kernel(q, k)
    return call._replace(flash_head=largest_head(q.device), efficient=runs(q.device, q.dtype), fuses=fuses)


def becomes_kernel(q: Tensor, k: Tensor) -> bool:
    """True if flex_attention becomes a kernel: in a graph that differentiates it, with queries and keys."""
    return not (eager() or under_transform() or is_zero(q.shape[0]) or is_zero(k.shape[0]))


def longest_bound(rows: Structure, total: int) -> int:
    """The longest length where the structure carries it, else the packed total, which no length exceeds."""
    return total if rows.extent is None or rows.shapes is not None else rows.extent.shape[0]


def attend_rows(
    backend: str, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, *rest: Any
) -> Tensor:
    """The operator on packed rows (N, H, D)."""
    # Dynamo wants different tensors in the arguments of an autograd.Function (2.13).
    k, v = (k.view_as(k) if k is q else k), (v.view_as(v) if v is q or v is k else v)
    return attend(backend, q, k, v, q_offsets, None if k_offsets is q_offsets else k_offsets, *rest)[0]


def check_heads(heads: int, *groups: int) -> None:
    """A ShapeError unless heads of queries are a multiple of those of keys."""
    for n in groups:
        if heads % n:
            got, hint = f"{heads} and {n}", "check dim 1"
            raise ShapeError(message("attention", "heads of queries, a multiple of those of keys", got, hint=hint))


def check_operands(parts: tuple[Any, ...], mask: Any, causal: bool, gqa: bool, op: OpName = NAME) -> None:
    """Three batches of heads, keys and values of the same lengths, and at most one of a mask and causal."""
    query, key, _ = parts
    cls = type(query)
    if any([type(x) is not cls or x.ndim != 4 or x._batch_dim or x.ragged_dims != (2,) for x in parts]):
        got, hint = ", ".join([describe(x) for x in parts]), "NestedTensor(values of (H, N, D), offsets, ragged_dim=2)"
        expected = "NestedTensors (B, H, -1, D)" if cls is NestedTensor else "MaskedBatches (B, H, L, D), ragged dim 2"
        raise StructureError(message(op, expected, got, hint=hint))
    require_paired(op, query, key)
    if mask is not None and causal:
        hint = "leave one out, or mask & torch.ones(L, L, dtype=torch.bool).tril()"
        raise ShapeError(message(op, "one of attn_mask and is_causal=True", "both", hint=hint))
    heads = [x.size(1) for x in parts]
    if not gqa and len(set(heads)) > 1:
        raise ShapeError(message(op, "as many heads of keys as of queries", str(heads), hint="enable_gqa=True"))
    check_heads(*heads)


def require_paired(op: OpName, query: Any, key: Any) -> None:
    """A StructureError unless there are as many examples of queries as of keys."""
    count, keys = query.shape[query._batch_dim], key.shape[key._batch_dim]
    if count != keys:
        got, hint = f"{count} and {keys}", "pair the batches example by example"
        raise StructureError(message(op, "as many examples of queries as of keys", got, hint=hint))


# -- dense queries or keys beside ragged ones, as rows of one length


def alike(query: Any, key: Any, value: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """Queries, keys and values in one container, and the way back: a result for dense queries is dense."""
    parts = [query, key, value]
    ragged = [x for x in parts if is_ragged(x) and len(x.ragged_dims) == 1]
    if not ragged or len(ragged) == len(parts):
        return parts, unchanged
    made = [as_rows(x, ragged[0]) for x in parts]
    if value is key:
        made[2] = made[1]  # one object, as before
    return made, unchanged if made[0] is query else partial(dense_of, query)


def unchanged(out: Any) -> Any:
    return out


def dense_of(query: Tensor, out: Any) -> Tensor:
    """A result for the rows of dense queries."""
    if not isinstance(out, NestedTensor):
        found: Tensor = out.data
        return found
    s, (ragged,) = out.structure, out.ragged_dims
    rows = out.values.movedim(s.packed_dim, 0).unflatten(0, (query.shape[s.batch_dim], query.shape[ragged]))
    return rows.movedim((0, 1), (s.batch_dim, ragged))


def sdpa(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Ragged | Tensor:  # fmt: skip
    """(B, H, -1, D) with the ragged dim third, as torch's (B, H, L, D); (B, -1, D) is one head. Some may be dense."""
    (query, key, value), as_query = alike(query, key, value)
    if all([is_ragged(x) and x.ragged_dims == (1,) and x.ndim == 3 for x in (query, key, value)]):
        mask = attn_mask.unsqueeze(1) if isinstance(attn_mask, Tensor) and attn_mask.ndim == 3 else attn_mask
        q, k, v = [x.unsqueeze(1) for x in (query, key, value)]
        return as_query(sdpa(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa).squeeze(1))
    check_operands((query, key, value), attn_mask, is_causal, enable_gqa)
    return as_query(attend_batches(query, key, value, How(is_causal, scale, dropout_p, attn_mask)))


def attend_batches(query: Any, key: Any, value: Any, how: How) -> Ragged:
    """Attention of batches (B, H, -1, D) of one container; a mask has one of the forms in `masks`."""
    value = fitted(NAME, key, value)
    if isinstance(query, NestedTensor):
        q, k, v = (x.values.transpose(0, 1) for x in (query, key, value))
        options = {"causal": how.causal, "scale": how.scale, "dropout": how.dropout}
        out = varlen_attention(
            q, k, v, query.structure, key.structure, mask=how.mask, score_mod=how.score_mod, **options
        )
        return query.with_values(out.transpose(0, 1))
    q, k, v = (x.filled(0) for x in (query, key, value))
    k, v = (shared_heads(t, q.shape[1]) for t in (k, v))
    sizes = query.lengths, key.lengths
    how = how._replace(mask=as_dense(how.mask, *sizes, (*q.shape[:3], k.shape[2])))
    return cut_padding(query, attend_padded(q, k, v, sizes, how))


define(F.scaled_dot_product_attention, "attention", ragged=sdpa)
