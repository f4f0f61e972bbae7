"""Multi-head attention: the function behind `nn.MultiheadAttention`, `nn.TransformerEncoderLayer` and their stacks.

Packed, real positions are projected and go to `varlen_attention`. Weights, where asked for, are made in rectangles and
come in the query's container: (B, Lq, Lk) or (B, H, Lq, Lk) with two ragged dims. `bias_k`, `bias_v` and
`add_zero_attn` put one key more behind each row's own keys. With `is_causal=True` `attn_mask` is the causal mask, and
not read.

    B rows, L and M longest queries and keys, H heads, D features of one head

Invariants: the query's container and structure come back; a query that may attend to nothing gets 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.dynamo import known
from tdc.core.errors import StructureError, UnsupportedError, describe, message
from tdc.core.rules import define, note_syncs
from tdc.kernels.attention.rectangle import How, attend_padded, attention_weights, causal_mask
from tdc.layout.padding import pack_rows, pad_rows
from tdc.layout.segments import longest
from tdc.ops.attention.masks import as_dense
from tdc.ops.attention.scaled_dot_product import alike, require_paired, varlen_attention
from tdc.ops.rectangle import cut_padding
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import fitted, is_ragged, ragged_sizes

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


def refuse(parts: tuple[Any, ...], a: Given) -> None:
    """Check the operands, and refuse arguments that have no meaning here."""
    cls = type(parts[0])
    if any([type(x) is not cls for x in parts]):
        got = ", ".join([describe(x) for x in parts])
        cls = next(type(x) for x in parts if is_ragged(x))
        expected = f"query, key and value that are all {cls.__name__}, or dense ones of as many dims"
        raise StructureError(message(NAME, expected, got, hint="x.to_packed() and x.to_padded() convert"))
    wide = {f"operand {i}": describe(x) for i, x in enumerate(parts) if x.ndim != 3}
    if wide:
        hint = "x.flatten(0, 1) makes static dims beside the batch part of it"
        raise StructureError(message(NAME, "(B, -1, D) or (-1, B, D)", f"{len(wide)} others", wide, hint))
    wrong = [name for name in ("key_padding_mask", "static_k", "static_v") if getattr(a, name) is not None]
    if wrong:
        hint = "lengths are known, leave key_padding_mask out"
        raise UnsupportedError(message(NAME, "self- or cross-attention of whole rows", ", ".join(wrong), hint=hint))
    require_paired(NAME, *parts[:2])


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


def mha(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """(B, -1, E) in either order of the first two dims -> the same, and weights or None.

    Rectangles where weights are asked for or keys are added. A result for dense queries is dense, weights are ragged.
    """
    (query, key, value), as_query = alike(query, key, value)
    a = Given(*args, **kwargs)
    a = a._replace(is_causal=known(a.is_causal))  # stacks compare masks by value, whose answer a graph does not know
    refuse((query, key, value), a)
    value = fitted(NAME, key, value)
    first, packed, extras, mask = features(query), isinstance(query, NestedTensor), a.extras(), mask_of(a)
    same = query is key and key is value
    q, k, v = project(first, first if same else features(key), first if same else features(value), a)
    if packed and not extras and not a.need_weights:
        rows = query.structure, key.structure
        out = varlen_attention(q, k, v, *rows, causal=a.is_causal, dropout=a.dropout, mask=mask)
        return as_query(query.with_values(F.linear(out.flatten(1), a.out_proj_weight, a.out_proj_bias))), None
    if packed:
        q, k, v = [pad_rows(t, x.structure, longest(x.structure)) for t, x in ((q, query), (k, key), (v, key))]
    q, k, v = [t.transpose(1, 2) for t in (q, k, v)]
    q_sizes, k_sizes, causal = ragged_sizes(query), ragged_sizes(key), a.is_causal
    if extras:
        shape = (*q.shape[:3], k.shape[2])
        mask = causal_mask(shape[2:], q.device) if causal else mask
        mask, causal = as_dense(mask, q_sizes, k_sizes, shape), False
    for more in extras:
        mask = None if mask is None else mask_behind(mask, k_sizes)
        k, v, k_sizes = append((k, v), more, k_sizes)
    mask = as_dense(mask, q_sizes, k_sizes, (*q.shape[:3], k.shape[2]))
    sizes, how, weights = (q_sizes, k_sizes), How(causal, None, a.dropout, mask), None
    if a.need_weights:
        found = attention_weights(q, k, sizes, how)
        out = found @ v
        found = found.mean(1) if a.average_attn_weights else found
        ragged = found.ndim - 2, found.ndim - 1
        weights = cut_padding(MaskedBatch(found, torch.cat(sizes, 1), ragged_dims=ragged), found)
        weights = weights.to_packed() if packed else weights
    else:
        out = attend_padded(q, k, v, sizes, how)
    out = out.transpose(1, 2).flatten(2)
    out = pack_rows(out, query.structure, first.shape[0]) if packed else out
    out = F.linear(out, a.out_proj_weight, a.out_proj_bias)
    out = query.with_values(out) if packed else cut_padding(query, out.movedim(0, query.batch_dim))
    return as_query(out), weights


def features(x: Any) -> Tensor:
    """Packed values (N, E), or a rectangle (B, L, E)."""
    return x.values if isinstance(x, NestedTensor) else x.filled(0).movedim(x.batch_dim, 0)


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


def append(parts: tuple[Tensor, Tensor], more: tuple[Tensor, Tensor], sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values (B, H, M, D) with one more (H, D) behind each row's own."""
    here = (torch.arange(parts[0].shape[2] + 1, device=sizes.device) == sizes)[:, None, :, None]
    k, v = (torch.where(here, m[:, None], F.pad(t, (0, 0, 0, 1))) for t, m in zip(parts, more, strict=True))
    return k, v, sizes + 1


define(F.multi_head_attention_forward, "attention", ragged=mha)
note_syncs("the number of weights, with need_weights", F.multi_head_attention_forward, kinds=("nested",))
