"""Multi-head attention: the function behind `nn.MultiheadAttention`, `nn.TransformerEncoderLayer` and their stacks.

    packed (NestedTensor)    projections of real positions only, then `varlen_attention`
    padded (MaskedBatch)     the same on rectangles

Attention weights, where asked for, come in the query's container: (B, Lq, Lk) or (B, H, Lq, Lk) with two ragged dims.
`bias_k`, `bias_v` and `add_zero_attn` put one key more behind each row's own keys. `is_causal=True` says, as torch has
it, that `attn_mask` is the causal mask; it is then not read.

    B rows, L and M longest queries and keys, H heads, D features of one head

Invariants: the query's container and structure come back; no position attends outside its row; a query that may attend
to nothing gets 0.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.errors import StructureError, UnsupportedError, describe, message
from tdc.core.rules import define
from tdc.ops.attention.masks import additive, as_dense, causal_mask, padded_mask
from tdc.ops.attention.padded import How, attend_padded, weights_of
from tdc.ops.attention.scaled_dot_product import varlen_attention
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.padding import pad_rows, valid_mask
from tdc.ragged.segments import longest, row_ids, sizes_of
from tdc.ragged.structure import Structure, extent_of

NAME = "multi_head_attention_forward"


class Given(NamedTuple):
    """The arguments of `F.multi_head_attention_forward` behind query, key and value, in its order."""

    embed_dim_to_check: int
    num_heads: int
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    add_zero_attn: bool
    dropout_p: float
    out_proj_weight: Tensor
    out_proj_bias: Tensor | None
    training: bool = True
    key_padding_mask: Any = None
    need_weights: bool = True
    attn_mask: Any = None
    use_separate_proj_weight: bool = False
    q_proj_weight: Tensor | None = None
    k_proj_weight: Tensor | None = None
    v_proj_weight: Tensor | None = None
    static_k: Any = None
    static_v: Any = None
    average_attn_weights: bool = True
    is_causal: bool = False

    @property
    def dropout(self) -> float:
        return self.dropout_p if self.training else 0.0

    def extras(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (H, D) behind those of each row."""
        found = []
        if self.bias_k is not None and self.bias_v is not None:
            found.append((self.bias_k.view(self.num_heads, -1), self.bias_v.view(self.num_heads, -1)))
        if self.add_zero_attn:
            zero = self.out_proj_weight.new_zeros(self.num_heads, self.embed_dim_to_check // self.num_heads)
            found.append((zero, zero))
        return found


def refuse(cls: type, tensors: tuple[Any, ...], a: Given) -> None:
    """Check the operands, and refuse arguments that have no meaning here.

    Raises:
        StructureError: query, key and value of different containers, or with more dims.
        UnsupportedError: an argument that says which positions are real, or replaces keys.
    """
    if any([not isinstance(x, cls) for x in tensors]):
        got = ", ".join([describe(x) for x in tensors])
        raise StructureError(
            message(NAME, f"query, key and value that are all {cls.__name__}", got, hint="convert all three")
        )
    wide = {f"operand {i}": describe(x) for i, x in enumerate(tensors) if x.ndim != 3}
    if wide:
        hint = "x.flatten(0, 1) makes static dims beside the batch part of it"
        raise StructureError(message(NAME, "(B, -1, D) or (-1, B, D)", f"{len(wide)} others", wide, hint))
    wrong = [name for name in ("key_padding_mask", "static_k", "static_v") if getattr(a, name) is not None]
    if wrong:
        hint = "lengths are known, leave key_padding_mask out"
        raise UnsupportedError(message(NAME, "self- or cross-attention of whole rows", ", ".join(wrong), hint=hint))


def project(query: Tensor, key: Tensor, value: Tensor, a: Given) -> list[Tensor]:
    """(..., E) -> queries, keys and values (..., H, D)."""
    if not a.use_separate_proj_weight:
        assert a.in_proj_weight is not None
        if query is key and key is value:
            all_three = F.linear(query, a.in_proj_weight, a.in_proj_bias)
            return list(all_three.unflatten(-1, (3, a.num_heads, -1)).unbind(-3))
        weights = a.in_proj_weight.chunk(3)
    else:
        weights = (a.q_proj_weight, a.k_proj_weight, a.v_proj_weight)
    biases = (None,) * 3 if a.in_proj_bias is None else a.in_proj_bias.chunk(3)
    parts = zip((query, key, value), weights, biases, strict=True)
    return [F.linear(x, w, b).unflatten(-1, (a.num_heads, -1)) for x, w, b in parts]  # type: ignore[arg-type]  # set


def mha_nested(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> tuple[NestedTensor, Any]:
    """(B, -1, E) in either order of the first two dims -> the same, and weights or None."""
    a = Given(*args, **kwargs)
    refuse(NestedTensor, (query, key, value), a)
    same, first = query is key and key is value, query.values
    q, k, v = project(first, first if same else key.values, first if same else value.values, a)
    rows, k_rows, causal, mask = query.structure, key.structure, a.is_causal, mask_of(a)
    extras = a.extras()
    if extras and (causal or isinstance(mask, NestedTensor)):
        sizes = (*longest(rows), *longest(k_rows))
        mask = causal_mask(sizes, q.device) if causal else as_dense(mask, rows, k_rows, sizes)
        causal = False
    for more in extras:
        mask = None if mask is None else mask_behind(mask, sizes_of(k_rows))  # type: ignore[arg-type]  # dense
        k, v, k_rows = append_packed((k, v), more, k_rows)
    out = varlen_attention(q, k, v, rows, k_rows, causal=causal, dropout=a.dropout, mask=mask)
    out = query.with_values(F.linear(out.flatten(1), a.out_proj_weight, a.out_proj_bias))
    if not a.need_weights:
        return out, None
    q_BLHD, k_BMHD = pad_rows(q, rows, longest(rows)), pad_rows(k, k_rows, longest(k_rows))
    mask = as_dense(mask, rows, k_rows, (q_BLHD.shape[1], k_BMHD.shape[1]))
    sizes = torch.cat([sizes_of(rows), sizes_of(k_rows)], 1)
    weights = attention_weights(q_BLHD, k_BMHD, sizes, mask, causal, a.average_attn_weights)
    return out, weights.to_packed()


def mha_masked(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> tuple[MaskedBatch, Any]:
    """(L, B, E), as `nn.MultiheadAttention` hands it on -> the same, and weights or None."""
    a = Given(*args, **kwargs)
    refuse(MaskedBatch, (query, key, value), a)
    first = query.filled(0).movedim(query.batch_dim, 0)
    same = query is key and key is value
    others = (first, first) if same else tuple([x.filled(0).movedim(x.batch_dim, 0) for x in (key, value)])
    q, k, v = project(first, others[0], others[1], a)
    causal, mask, k_sizes, extras = a.is_causal, padded_mask(mask_of(a)), key.lengths, a.extras()
    if extras and causal:
        mask, causal = causal_mask((q.shape[1], k.shape[1]), q.device), False
    for more in extras:
        mask = None if mask is None else mask_behind(mask, k_sizes)
        k, v, k_sizes = append_padded((k, v), more, k_sizes)
    how = How(causal, 1 / math.sqrt(q.shape[-1]), a.dropout, mask)
    out = attend_padded(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), k_sizes, how)
    out = F.linear(out.transpose(1, 2).flatten(2), a.out_proj_weight, a.out_proj_bias).movedim(0, query.batch_dim)
    out = query.with_data(out.masked_fill(~query.mask, 0))
    if not a.need_weights:
        return out, None
    sizes = torch.cat([query.lengths, k_sizes], 1)
    return out, attention_weights(q, k, sizes, mask, causal, a.average_attn_weights)


def mask_of(a: Given) -> Any:
    """attn_mask as attention takes it, True or 0 where one attends; (B·H, L, M) becomes (B, H, L, M)."""
    if a.attn_mask is None or a.is_causal:
        return None
    mask = ~a.attn_mask if a.attn_mask.dtype == torch.bool else a.attn_mask  # here True forbids, as torch has it
    return mask.unflatten(0, (-1, a.num_heads)) if isinstance(mask, Tensor) and mask.ndim == 3 else mask


def mask_behind(mask: Tensor, k_sizes: Tensor) -> Tensor:
    """A dense mask (..., L, M) that lets queries attend to one key more, behind those of a row: (B, ., L, M + 1)."""
    free: Any = True if mask.dtype == torch.bool else 0.0
    wide = F.pad(mask, (0, 1), value=free)
    positions = torch.arange(wide.shape[-1], device=mask.device)
    return torch.where((positions < k_sizes)[:, None, None], wide, wide.new_full((), free))


def append_packed(
    parts: tuple[Tensor, Tensor], more: tuple[Tensor, Tensor], rows: Structure
) -> tuple[Tensor, Tensor, Structure]:
    """Keys and values (M, H, D) with one more (H, D) at the end of each row."""
    total, count = parts[0].shape[0], rows.batch_size
    steps = torch.arange(count + 1, device=rows.offsets.device)
    extent = None if rows.extent is None else extent_of((rows.extent.shape[0] + 1,), rows.offsets.device)
    new = Structure(rows.offsets + steps, None, extent).marked()
    ids = row_ids(new, total + count)
    positions = torch.arange(total + count, device=ids.device)
    index = torch.where(positions == new.offsets[ids + 1] - 1, total + ids, positions - ids)
    k, v = (torch.cat([t, m.expand(count, *m.shape)]).index_select(0, index) for t, m in zip(parts, more, strict=True))
    return k, v, new


def append_padded(
    parts: tuple[Tensor, Tensor], more: tuple[Tensor, Tensor], sizes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values (B, M, H, D) with one more (H, D) behind each row's own."""
    here = (torch.arange(parts[0].shape[1] + 1, device=sizes.device) == sizes)[..., None, None]
    k, v = (torch.where(here, m, F.pad(t, (0, 0, 0, 0, 0, 1))) for t, m in zip(parts, more, strict=True))
    return k, v, sizes + 1


def attention_weights(
    q_BLHD: Tensor, k_BMHD: Tensor, sizes: Tensor, mask: Tensor | None, causal: bool, average: bool
) -> MaskedBatch:
    """The weight of each key for each query, with two ragged dims; queries without keys give 0."""
    scores = torch.einsum("blhd,bmhd->bhlm", q_BLHD, k_BMHD) / math.sqrt(q_BLHD.shape[-1])
    size, keys = scores.shape[2:]
    allowed = valid_mask(sizes[:, 1:], (keys,))[:, None, None, :]
    allowed = allowed & causal_mask((size, keys), scores.device) if causal else allowed
    if mask is not None:
        scores = scores + additive(mask[..., :size, :keys], scores.dtype)
    scores = scores.masked_fill(~allowed, -math.inf)
    weights = weights_of(scores).mean(1) if average else weights_of(scores)
    out = MaskedBatch(weights, sizes, ragged_dims=(weights.ndim - 2, weights.ndim - 1))
    return out.with_data(out.filled(0))


define(
    F.multi_head_attention_forward, "attention", nested=mha_nested, masked=mha_masked,
    source="torch.nn.MultiheadAttention",
)  # fmt: skip
