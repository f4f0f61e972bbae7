"""The operation behind attention within rows, and the choice of what runs it.

    q (N, H, D), k and v (M, G, D), offsets of both (B+1,)  ->  out (N, H, D), logsumexp (N, H)

    backend    runs on                  what it is
    rows       CPU                      a fused SDPA for each example                   `varlen_cpu`, in the op
    flash      CUDA, half precision     torch's flash kernel for packed rows            `varlen_flash`, in the op
    flex       CUDA, inside a graph     flex_attention with a mask of documents         `varlen_flex`, in the graph
    padded     everything               SDPA of a rectangle                             `attention`, in the graph

The op is one node of a graph that is the same for all lengths. On CPU there are as many heads of keys as of queries,
and a mask may be added to the scores; it gets no gradient here. With bounds of lengths the op is the flash kernel's.

Invariants: all backends give the same numbers; the choice reads metadata, and neither times nor data.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tdc.core.dtypes import HALF, sum_dtype
from tdc.core.dynamo import below_autograd
from tdc.core.errors import StructureError, UnsupportedError, message
from tdc.ops.attention import cpu, flash

FLEX_HEADS = range(16, 257)  # head sizes of flex_attention's kernels


class Call(NamedTuple):
    """What the choice of a backend depends on.

    Args:
        device: its type.
        sizes: head sizes of queries and of values.
        causal: the i-th query attends to keys up to the i-th.
        same_rows: queries and keys share one structure.
        masked: there is a mask.
        learns: the mask wants a gradient.
        score_mod: there is a function of scores.
        dropout: of attention weights.
        flash_head: the largest head size of the device's flash kernel.
        fuses: traced into a graph, under no transform of `torch.func`, with more than zero queries and keys.
    """

    device: str
    dtype: torch.dtype
    sizes: tuple[int, int]
    causal: bool = False
    same_rows: bool = True
    masked: bool = False
    learns: bool = False
    score_mod: bool = False
    dropout: bool = False
    flash_head: int = 0
    fuses: bool = False


def backend(c: Call) -> Literal["rows", "flash", "flex", "padded"]:
    """What runs a call."""
    size, value_size = c.sizes
    if c.device == "cpu":
        return "padded" if c.dropout or c.score_mod or c.learns or size != value_size else "rows"
    if c.device != "cuda" or c.dropout or c.masked:
        return "padded"
    fits = size == value_size <= c.flash_head and size % flash.ALIGNED == 0
    # The kernel aligns causal masks with the ends of rows: the same as with their beginnings where lengths are equal.
    if c.dtype in HALF and fits and not c.score_mod and (c.same_rows or not c.causal):
        return "flash"
    wide = c.dtype in (*HALF, torch.float32) and size in FLEX_HEADS and value_size in FLEX_HEADS
    return "flex" if c.fuses and wide else "padded"


ROWS = "Tensor q_offsets, Tensor? k_offsets"
MASKED = f"{ROWS}, Tensor? mask, Tensor? mask_offsets"
BOUNDED = f"{ROWS}, SymInt max_q, SymInt max_k"
FORWARD = "(Tensor q, Tensor k, Tensor v, {}, bool causal, float scale) -> (Tensor, Tensor)"
BACKWARD = (
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {}, bool causal, float scale) -> "
    "(Tensor, Tensor, Tensor)"
)
for _name, _schema, _key, _kernel in (
    ("varlen_attention", FORWARD.format(ROWS), "CPU", cpu.forward_rows),
    ("varlen_attention.masked", FORWARD.format(MASKED), "CPU", cpu.forward_rows),
    ("varlen_attention.flash", FORWARD.format(BOUNDED), "CUDA", flash.forward_rows),
    ("varlen_attention_backward", BACKWARD.format(MASKED), "CPU", cpu.backward_rows),
    ("varlen_attention_backward.flash", BACKWARD.format(BOUNDED), "CUDA", flash.backward_rows),
):
    torch.library.define(f"tdc::{_name}", _schema)
    torch.library.impl(f"tdc::{_name}", _key, _kernel)

varlen_rows = torch.ops.tdc.varlen_attention.default
masked_rows = torch.ops.tdc.varlen_attention.masked
flash_rows = torch.ops.tdc.varlen_attention.flash
varlen_rows_backward = torch.ops.tdc.varlen_attention_backward.default
flash_rows_backward = torch.ops.tdc.varlen_attention_backward.flash


def fake_rows(q: Tensor, *rest: Any) -> Any:
    lse = q.new_empty(q.shape[:2], dtype=sum_dtype(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


def fake_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    return tuple([torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)])


for _op in (varlen_rows, masked_rows, flash_rows):
    torch.library.register_fake(_op, fake_rows)
for _op in (varlen_rows_backward, flash_rows_backward):
    torch.library.register_fake(_op, fake_gradients)


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


for _op in (varlen_rows, masked_rows, flash_rows, varlen_rows_backward, flash_rows_backward):
    torch.library.register_vmap(_op, partial(over_members, _op))


class Attend(torch.autograd.Function):
    """The ops as one differentiable function, also under `torch.func` (`register_autograd` is not, in 2.13)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor | None, mask: Tensor | None,
        mask_offsets: Tensor | None, max_q: int | None, max_k: int | None, causal: bool, scale: float,
    ) -> Any:  # fmt: skip
        if max_q is not None:
            return flash_rows(q, k, v, q_offsets, k_offsets, max_q, max_k, causal, scale)
        if mask is None:
            return varlen_rows(q, k, v, q_offsets, k_offsets, causal, scale)
        return masked_rows(q, k, v, q_offsets, k_offsets, mask, mask_offsets, causal, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.max_q, ctx.max_k, ctx.causal, ctx.scale = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        out, lse, q, k, v, *rows = ctx.saved_tensors
        first = grads[0], q, k, v, out, lse
        if ctx.max_q is not None:
            parts = flash_rows_backward(*first, *rows[:2], ctx.max_q, ctx.max_k, ctx.causal, ctx.scale)
        else:
            parts = varlen_rows_backward(*first, *rows, ctx.causal, ctx.scale)
        return *parts, *(None,) * 8


def without_derivative(op: Any, keys: Any, *args: Any) -> Any:
    """The op, where nobody differentiates it: `Attend` does that.

    Raises:
        UnsupportedError: a graph of `torch.func.grad` over `torch.vmap`, where Dynamo leaves the derivative out
            (2.11-2.13) and gradients would be wrong.
    """
    if torch.is_grad_enabled() and any([isinstance(a, Tensor) and a.requires_grad for a in args]):
        got, hint = "torch.func.grad over torch.vmap in a graph", "compile what is differentiated, or call it eagerly"
        raise UnsupportedError(message("varlen_attention", "attention with a derivative", got, hint=hint))
    return below_autograd(op, keys, *args)


LIBRARY = torch.library.Library("tdc", "FRAGMENT")  # what it registers lasts as long as it does
for _op in (varlen_rows, masked_rows, flash_rows):
    LIBRARY.impl(_op, partial(without_derivative, _op), "Autograd", with_keyset=True)
