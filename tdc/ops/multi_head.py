"""Multi-head attention: the function behind `nn.MultiheadAttention`, `nn.TransformerEncoderLayer` and their stacks.

    packed (NestedTensor)    projections on real positions only, then `varlen_attention`
    padded (MaskedBatch)     torch's own function with the mask that the lengths give

Attention weights, where asked for, are a MaskedBatch `(B, Lq, Lk)` or `(B, H, Lq, Lk)` with two ragged dims, for either
container: a rectangle for each example is what they are.

Invariants: the query's container and structure come back; no position attends outside its row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc._errors import StructureError, UnsupportedError, describe, message
from tdc._rules import Rule, add_rule
from tdc._structure import longest, pad_rows, valid_mask
from tdc.masked import MaskedBatch
from tdc.nested import NestedTensor
from tdc.ops.attention import varlen_attention

NAME = "multi_head_attention_forward"


def refuse(cls: type, tensors: tuple[Any, ...], unused: dict[str, Any], attn_mask: Any, is_causal: bool) -> None:
    """Refuse what the rules do not do.

    Raises:
        StructureError: query, key and value of different containers.
        UnsupportedError: an argument that changes the rows, or a free mask.
    """
    if any([not isinstance(x, cls) for x in tensors]):
        got = ", ".join([describe(x) for x in tensors])
        raise StructureError(
            message(NAME, f"query, key and value that are all {cls.__name__}", got, hint="convert all three")
        )
    wrong = [name for name, value in unused.items() if value is not None and value is not False]
    wrong += ["attn_mask"] if attn_mask is not None and not is_causal else []
    if wrong:
        hint = "lengths are known, leave key_padding_mask out; is_causal=True for causal attention"
        raise UnsupportedError(message(NAME, "plain self- or cross-attention", ", ".join(wrong), hint=hint))


def mha_nested(
    query: Any, key: Any, value: Any, embed_dim_to_check: int, num_heads: int,
    in_proj_weight: Tensor | None, in_proj_bias: Tensor | None, bias_k: Any, bias_v: Any, add_zero_attn: bool,
    dropout_p: float, out_proj_weight: Tensor, out_proj_bias: Tensor | None, training: bool = True,
    key_padding_mask: Any = None, need_weights: bool = True, attn_mask: Any = None,
    use_separate_proj_weight: bool = False, q_proj_weight: Any = None, k_proj_weight: Any = None,
    v_proj_weight: Any = None, static_k: Any = None, static_v: Any = None, average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[NestedTensor, Any]:  # fmt: skip
    """(B, -1, E) in either order of the first two dims -> the same, and weights or None."""
    unused = {"bias_k": bias_k, "bias_v": bias_v, "add_zero_attn": add_zero_attn, "key_padding_mask": key_padding_mask}
    refuse(
        NestedTensor, (query, key, value), {**unused, "static_k": static_k, "static_v": static_v}, attn_mask, is_causal
    )
    if use_separate_proj_weight:
        weights = [q_proj_weight, k_proj_weight, v_proj_weight]
    else:
        assert in_proj_weight is not None
        weights = list(in_proj_weight.chunk(3))
    biases = [None] * 3 if in_proj_bias is None else list(in_proj_bias.chunk(3))
    if query is key and key is value and in_proj_weight is not None:
        q, k, v = F.linear(query.values, in_proj_weight, in_proj_bias).unflatten(-1, (3, num_heads, -1)).unbind(1)
    else:
        parts = zip((query, key, value), weights, biases, strict=True)
        q, k, v = (F.linear(x.values, w, b).unflatten(-1, (num_heads, -1)) for x, w, b in parts)
    dropout = dropout_p if training else 0.0
    rows, k_rows = query.structure, key.structure
    attended = varlen_attention(q, k, v, rows, k_rows, causal=is_causal, dropout=dropout)
    out = query.with_values(F.linear(attended.flatten(1), out_proj_weight, out_proj_bias))
    if not need_weights:
        return out, None
    sizes = torch.cat([query.sizes, key.sizes], 1)
    q_BLHD, k_BLHD = pad_rows(q, rows, longest(rows)), pad_rows(k, k_rows, longest(k_rows))
    return out, attention_weights(q_BLHD, k_BLHD, sizes, is_causal, average_attn_weights)


def attention_weights(q_BLHD: Tensor, k_BLHD: Tensor, sizes: Tensor, causal: bool, average: bool) -> MaskedBatch:
    """What each query gave to each key, as two ragged dims; rows without keys give 0."""
    scores = torch.einsum("blhd,bmhd->bhlm", q_BLHD, k_BLHD) / math.sqrt(q_BLHD.shape[-1])
    mask = valid_mask(sizes[:, 1:], (k_BLHD.shape[1],))[:, None, None, :]
    if causal:
        mask = mask & torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1).masked_fill(~mask, 0)
    return as_batch(weights.mean(1) if average else weights, sizes)


def as_batch(weights: Tensor, sizes: Tensor) -> MaskedBatch:
    """Weights (B, Lq, Lk) or (B, H, Lq, Lk) with what is outside of sizes (B, 2) cut off, gradients as well."""
    dims = (weights.ndim - 2, weights.ndim - 1)
    out = MaskedBatch(weights, sizes, ragged_dims=dims)
    return out.with_data(out.filled(0))


def mha_masked(
    query: Any, key: Any, value: Any, embed_dim_to_check: int, num_heads: int, in_proj_weight: Any, in_proj_bias: Any,
    bias_k: Any, bias_v: Any, add_zero_attn: bool, dropout_p: float, out_proj_weight: Tensor, out_proj_bias: Any,
    *args: Any, key_padding_mask: Any = None, need_weights: bool = True, attn_mask: Any = None,
    average_attn_weights: bool = True, is_causal: bool = False, **kwargs: Any,
) -> tuple[MaskedBatch, Any]:  # fmt: skip
    """(L, B, E), as `nn.MultiheadAttention` hands it on -> the same, and weights or None."""
    unused = {"bias_k": bias_k, "bias_v": bias_v, "add_zero_attn": add_zero_attn, "key_padding_mask": key_padding_mask}
    refuse(MaskedBatch, (query, key, value), unused, attn_mask, is_causal)
    valid = valid_mask(key.lengths, (key.data.shape[key.ragged_dims[0]],))
    some = valid.any(1, keepdim=True)
    first = [x.filled(0).movedim(x.batch_dim, 1) for x in (query, key, value)]
    causal = None
    if is_causal:
        shape = (first[0].shape[0], first[1].shape[0])
        causal = torch.ones(shape, dtype=torch.bool, device=query.device).triu(1)
    attend: Any = F.multi_head_attention_forward
    out, weights = attend(
        *first, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, None, None, False, dropout_p,
        out_proj_weight, out_proj_bias, *args, key_padding_mask=~valid & some, need_weights=need_weights,
        attn_mask=causal, average_attn_weights=average_attn_weights, is_causal=False, **kwargs,
    )  # fmt: skip
    nothing = out.new_zeros(()) if out_proj_bias is None else out_proj_bias
    out = torch.where(some, out, nothing).movedim(1, query.batch_dim).masked_fill(~query.mask, 0)
    if weights is None:
        return query.with_data(out), None
    return query.with_data(out), as_batch(weights, torch.cat([query.lengths, key.lengths], 1))


for _kind, _impl in (("nested", mha_nested), ("masked", mha_masked)):
    _op = F.multi_head_attention_forward
    add_rule(Rule(_op, _kind, "multi_head", _impl, _op, source="torch.nn.MultiheadAttention"))
