"""Attention within rows: every example attends to itself, or to its partner of another batch, and to nothing else.

    varlen_attention   q (N, H, D), k and v (M, H, D), offsets of both      the one op everything else calls
    F.scaled_dot_product_attention      NestedTensor (B, H, -1, D)

On CPU the op runs one fused SDPA for each example inside a custom op, so that padding is never computed and the graph
holds one node for all lengths. Where that kernel does not apply (attention dropout, other devices) rows are padded,
which needs the longest length and gives the same numbers.

Invariants: exact for every length, zero included; forward and backward read real positions only; one graph for all
lengths.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc._errors import StructureError, UnsupportedError, describe, message
from tdc._rules import Rule, add_rule
from tdc._structure import Structure, longest, pack_rows, pad_rows, sizes_of, valid_mask
from tdc.nested import NestedTensor

forward_one = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
backward_one = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


torch.library.define(
    "tdc::varlen_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor q_offsets, Tensor? k_offsets, bool causal, float scale) -> (Tensor, Tensor)",
)
torch.library.define(
    "tdc::varlen_attention_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor q_offsets, Tensor? k_offsets, "
    "bool causal, float scale) -> (Tensor, Tensor, Tensor)",
)
varlen_rows = torch.ops.tdc.varlen_attention.default
varlen_rows_backward = torch.ops.tdc.varlen_attention_backward.default


@torch.library.impl("tdc::varlen_attention", "CompositeExplicitAutograd")
def forward_rows(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """q (N, H, D), k, v (M, H, D), offsets (B+1,) -> out (N, H, D), logsumexp (N, H). CPU."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_zeros(q.shape[:2], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    for (a, b), (c, d) in spans(q_offsets, k_offsets):
        rows = q[a:b].transpose(0, 1)[None], k[c:d].transpose(0, 1)[None], v[c:d].transpose(0, 1)[None]
        o, s = forward_one(*rows, is_causal=causal, scale=scale)
        out[a:b] = o[0].transpose(0, 1)
        lse[a:b] = s[0].transpose(0, 1)
    return out, lse


@torch.library.impl("tdc::varlen_attention_backward", "CompositeExplicitAutograd")
def backward_rows(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_offsets: Tensor, k_offsets: Tensor,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, example by example."""
    grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    for (a, b), (c, d) in spans(q_offsets, k_offsets):
        g, x, o = (t[a:b].transpose(0, 1)[None] for t in (grad, q, out))
        y, z = (t[c:d].transpose(0, 1)[None] for t in (k, v))
        s = lse[a:b].transpose(0, 1)[None].contiguous()
        parts = backward_one(g, x, y, z, o, s, 0.0, causal, scale=scale)
        for whole, part, (i, j) in zip(grads, parts, ((a, b), (c, d), (c, d)), strict=True):
            whole[i:j] = part[0].transpose(0, 1)
    return grads[0], grads[1], grads[2]


def spans(q_offsets: Tensor, k_offsets: Tensor | None) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Begin and end of the rows that have both queries and keys."""
    q = q_offsets.tolist()
    k = q if k_offsets is None else k_offsets.tolist()
    pairs = zip(pairwise(q), pairwise(k), strict=True)
    return [((a, b), (c, d)) for (a, b), (c, d) in pairs if a < b and c < d]


@torch.library.register_fake("tdc::varlen_attention")
def _(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor | None, causal: bool, scale: float) -> Any:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=wide)


@torch.library.register_fake("tdc::varlen_attention_backward")
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> Any:
    return tuple([torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)])


def over_members(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """vmap: members become heads, (K, N, H, D) -> (N, K·H, D); offsets stay common."""
    if any(
        [
            d is not None and not a.is_floating_point()
            for a, d in zip(args, in_dims, strict=True)
            if isinstance(a, Tensor)
        ]
    ):
        hint = "map over values only: in_dims with None for offsets"
        raise StructureError(message("vmap", "one ragged structure for all members", "mapped offsets", hint=hint))
    members = info.batch_size
    folded = [
        a if not isinstance(a, Tensor) or not a.is_floating_point()
        else (a.unsqueeze(1).expand(a.shape[0], members, *a.shape[1:]) if d is None else a.movedim(d, 1)).flatten(1, 2)
        for a, d in zip(args, in_dims, strict=True)
    ]  # fmt: skip
    outs = op(*folded)
    return tuple([o.unflatten(1, (members, -1)) for o in outs]), (1,) * len(outs)


torch.library.register_vmap(varlen_rows, partial(over_members, varlen_rows))
torch.library.register_vmap(varlen_rows_backward, partial(over_members, varlen_rows_backward))


class Attend(torch.autograd.Function):
    """The two ops as one differentiable function, also under `torch.func` (`register_autograd` is not, in 2.13)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor | None, causal: bool, scale: float
    ) -> Any:
        return varlen_rows(q, k, v, q_offsets, k_offsets, causal, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, q_offsets, k_offsets, ctx.causal, ctx.scale = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, *output, q_offsets, k_offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        parts = varlen_rows_backward(grads[0], *ctx.saved_tensors, ctx.causal, ctx.scale)
        return *parts, None, None, None, None


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, q_rows: Structure, k_rows: Structure, *, causal: bool = False,
    scale: float | None = None, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Attention of each row's queries to the same row's keys.

    Shapes:
        q `(N, H, D)`, k and v `(M, H, D)` -> `(N, H, D)`; rows given by two structures with equal batch size.

    Compile:
        One node on CPU. Elsewhere, and with dropout, padded: the structures must carry their longest length.

    Source:
        `torch.nn.functional.scaled_dot_product_attention` on each row.
    """
    if q_rows.batch_size != k_rows.batch_size:
        got = f"{q_rows.batch_size} and {k_rows.batch_size}"
        raise StructureError(
            message("attention", "as many rows of queries as of keys", got, hint="pair the batches row by row")
        )
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if q.device.type == "cpu" and dropout == 0.0:
        # Dynamo wants different tensors in the arguments of an autograd.Function (2.13).
        k, v = (k.view_as(k) if k is q else k), (v.view_as(v) if v is q or v is k else v)
        k_offsets = None if k_rows.offsets is q_rows.offsets else k_rows.offsets
        return Attend.apply(q, k, v, q_rows.offsets, k_offsets, causal, scale)[0]
    q_BHLD, k_BHLD, v_BHLD = (
        pad_rows(t, rows, longest(rows)).transpose(1, 2) for t, rows in ((q, q_rows), (k, k_rows), (v, k_rows))
    )
    mask = valid_mask(sizes_of(k_rows), (k_BHLD.shape[2],))[:, None, None, :]
    if causal:
        mask = mask & torch.ones(q_BHLD.shape[2], k_BHLD.shape[2], dtype=torch.bool, device=q.device).tril()
    mask = mask | ~valid_mask(sizes_of(k_rows), (k_BHLD.shape[2],)).any(1)[:, None, None, None]
    out = F.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, attn_mask=mask, dropout_p=dropout, scale=scale)
    return pack_rows(out.transpose(1, 2), q_rows, q.shape[0])


def sdpa_nested(
    query: NestedTensor, key: NestedTensor, value: NestedTensor, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> NestedTensor:  # fmt: skip
    """(B, H, -1, D) with the ragged dim in third place, as torch's (B, H, L, D)."""
    parts = (query, key, value)
    if any([not isinstance(x, NestedTensor) or x.ndim != 4 or x.ragged_dims != (2,) for x in parts]):
        got = ", ".join([describe(x) for x in parts])
        hint = "NestedTensor(values of (H, N, D), offsets, ragged_dim=2)"
        raise StructureError(message("scaled_dot_product_attention", "NestedTensors (B, H, -1, D)", got, hint=hint))
    if attn_mask is not None or enable_gqa:
        got = "attn_mask" if attn_mask is not None else "enable_gqa=True"
        hint = "is_causal=True for causal attention, or x.to_padded()"
        raise UnsupportedError(
            message("scaled_dot_product_attention", "no mask and as many heads of keys", got, hint=hint)
        )
    q, k, v = (x.values.transpose(0, 1) for x in parts)
    out = varlen_attention(q, k, v, query.structure, key.structure, causal=is_causal, scale=scale, dropout=dropout_p)
    return query.with_values(out.transpose(0, 1))


add_rule(
    Rule(
        F.scaled_dot_product_attention,
        "nested",
        "attention",
        sdpa_nested,
        F.scaled_dot_product_attention,
        source="torch.nn.functional.scaled_dot_product_attention",
    )
)
