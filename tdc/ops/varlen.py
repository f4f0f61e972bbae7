"""The operation behind attention on CPU: one fused SDPA for each example, inside one node of the graph.

    q (N, H, D), k and v (M, H, D), offsets of both (B+1,)  ->  out (N, H, D), logsumexp (N, H)

No padding is computed, and the graph is the same for all lengths. A mask is added to the scores: dense
(B or 1, H or 1, Lq, Lk), of which each example reads its corner, or packed (P, H), the pairs of each example behind one
another with offsets of their own. It gets no gradient here.

Invariants: exact for every length, zero included; forward and backward read real positions only.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc._errors import ShapeError, StructureError, message

forward_one = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
backward_one = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

ROWS = "Tensor q_offsets, Tensor? k_offsets"
MASKED = f"{ROWS}, Tensor? mask, Tensor? mask_offsets"

torch.library.define(
    "tdc::varlen_attention", f"(Tensor q, Tensor k, Tensor v, {ROWS}, bool causal, float scale) -> (Tensor, Tensor)"
)
torch.library.define(
    "tdc::varlen_attention.masked",
    f"(Tensor q, Tensor k, Tensor v, {MASKED}, bool causal, float scale) -> (Tensor, Tensor)",
)
torch.library.define(
    "tdc::varlen_attention_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{MASKED}, bool causal, float scale) -> (Tensor, Tensor, Tensor)",
)
varlen_rows = torch.ops.tdc.varlen_attention.default
masked_rows = torch.ops.tdc.varlen_attention.masked
varlen_rows_backward = torch.ops.tdc.varlen_attention_backward.default


class Example(NamedTuple):
    """Where the queries and keys of one example lie, and its part of the mask."""

    queries: slice
    keys: slice
    mask: Tensor | None


def forward_rows(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """q (N, H, D), k, v (M, H, D), offsets (B+1,) -> out (N, H, D), logsumexp (N, H). CPU."""
    *rows, causal, scale = args
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_zeros(q.shape[:2], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    for at in examples(*rows):
        parts = [t[i].transpose(0, 1)[None] for t, i in ((q, at.queries), (k, at.keys), (v, at.keys))]
        o, s = forward_one(*parts, is_causal=causal, attn_mask=at.mask, scale=scale)
        out[at.queries] = o[0].transpose(0, 1)
        lse[at.queries] = s[0].transpose(0, 1)
    return out, lse


for _name in ("tdc::varlen_attention", "tdc::varlen_attention.masked"):
    torch.library.impl(_name, "CompositeExplicitAutograd", forward_rows)


@torch.library.impl("tdc::varlen_attention_backward", "CompositeExplicitAutograd")
def backward_rows(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, example by example."""
    *rows, causal, scale = args
    grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    for at in examples(*rows):
        g, x, o = (t[at.queries].transpose(0, 1)[None] for t in (grad, q, out))
        y, z = (t[at.keys].transpose(0, 1)[None] for t in (k, v))
        s = lse[at.queries].transpose(0, 1)[None].contiguous()
        parts = backward_one(g, x, y, z, o, s, 0.0, causal, attn_mask=at.mask, scale=scale)
        for whole, part, i in zip(grads, parts, (at.queries, at.keys, at.keys), strict=True):
            whole[i] = part[0].transpose(0, 1)
    return grads[0], grads[1], grads[2]


def examples(
    q_offsets: Tensor, k_offsets: Tensor | None, mask: Tensor | None = None, mask_offsets: Tensor | None = None
) -> Iterator[Example]:
    """The examples that have both queries and keys."""
    q = q_offsets.tolist()
    k = q if k_offsets is None else k_offsets.tolist()
    first = None if mask_offsets is None else mask_offsets.tolist()
    for i, ((a, b), (c, d)) in enumerate(zip(pairwise(q), pairwise(k), strict=True)):
        if a < b and c < d:
            one = mask
            if mask is not None and first is not None:
                one = mask[first[i] : first[i + 1]].view(b - a, d - c, -1).permute(2, 0, 1)[None]
            elif mask is not None:
                check_mask(tuple(mask.shape[2:]), (b - a, d - c))
                row = min(i, mask.shape[0] - 1)
                one = mask[row : row + 1, :, : b - a, : d - c].expand(-1, -1, b - a, d - c)
            yield Example(slice(a, b), slice(c, d), one)


def check_mask(have: tuple[int, ...], need: tuple[int, ...]) -> None:
    """A dense mask covers the longest example.

    Raises:
        ShapeError: it ends before.
    """
    if any([h < n and h != 1 for h, n in zip(have, need, strict=True)]):
        expected = "a mask (..., Lq, Lk) of at least the longest rows"
        got = f"(..., {have[0]}, {have[1]}) for {need[0]} queries and {need[1]} keys"
        raise ShapeError(message("attention", expected, got, hint="build it for x.max_length"))


def fake_rows(q: Tensor, *rest: Any) -> Any:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=wide)


for _name in ("tdc::varlen_attention", "tdc::varlen_attention.masked"):
    torch.library.register_fake(_name, fake_rows)


@torch.library.register_fake("tdc::varlen_attention_backward")
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    return tuple([torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)])


def over_members(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """vmap: members become heads, (K, N, H, D) -> (N, K·H, D), those of a mask as well; offsets stay common."""
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


for _op in (varlen_rows, masked_rows, varlen_rows_backward):
    torch.library.register_vmap(_op, partial(over_members, _op))


class Attend(torch.autograd.Function):
    """The two ops as one differentiable function, also under `torch.func` (`register_autograd` is not, in 2.13)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor | None, mask: Tensor | None,
        mask_offsets: Tensor | None, causal: bool, scale: float,
    ) -> Any:  # fmt: skip
        if mask is None:
            return varlen_rows(q, k, v, q_offsets, k_offsets, causal, scale)
        return masked_rows(q, k, v, q_offsets, k_offsets, mask, mask_offsets, causal, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.causal, ctx.scale = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        out, lse, q, k, v, *rows = ctx.saved_tensors
        parts = varlen_rows_backward(grads[0], q, k, v, out, lse, *rows, ctx.causal, ctx.scale)
        return *parts, None, None, None, None, None, None
