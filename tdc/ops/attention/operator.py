"""The operator of attention within rows: what torch's dispatcher, autograd, vmap and graphs know of it.

    q (N, H, D), k and v (M, G, D), offsets of both (B+1,)  ->  out (N, H, D), logsumexp (N, H)

It is one node of a graph that is the same for all lengths. On CPU (`cpu`) there are as many heads of keys as of
queries, and a mask may be added to the scores; it gets no gradient here. With bounds of lengths it is `flash`, on CUDA.

Invariant: `Attend` differentiates the operator, and nothing else does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from tdc.core.dtypes import sum_dtype
from tdc.core.dynamo import LIBRARY, below_autograd, refuse_derivative, trace_as, under_transform
from tdc.core.errors import StructureError, UnsupportedError, message, no_second
from tdc.ops.attention import cpu, flash
from tdc.ops.attention.padded import How, attend_rectangle, shared_heads
from tdc.ragged.padding import pad_rows
from tdc.ragged.segments import longest, sizes_of
from tdc.ragged.structure import Structure

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
    LIBRARY.define(f"{_name}{_schema}")
    LIBRARY.impl(_name, _kernel, _key)

varlen_rows = torch.ops.tdc.varlen_attention.default
masked_rows = torch.ops.tdc.varlen_attention.masked
flash_rows = torch.ops.tdc.varlen_attention.flash
varlen_rows_backward = torch.ops.tdc.varlen_attention_backward.default
flash_rows_backward = torch.ops.tdc.varlen_attention_backward.flash


def fake_rows(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:2], dtype=sum_dtype(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


def fake_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple([torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)])


def over_members(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """Under vmap members become heads, (K, N, H, D) -> (N, K·H, D), those of a mask as well; they share offsets."""
    tensors = [(a, d) for a, d in zip(args, in_dims, strict=True) if isinstance(a, Tensor)]
    if any([d is not None and not a.is_floating_point() for a, d in tensors]):
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


class Attend(torch.autograd.Function):
    """The operator as a differentiable function, also under `torch.func` (`register_autograd` is not, in 2.13)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor | None, mask: Tensor | None,
        mask_offsets: Tensor | None, max_q: int | None, max_k: int | None, causal: bool, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
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
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given = grads[0], *ctx.saved_tensors, ctx.max_q, ctx.max_k, ctx.causal, ctx.scale
        return *gradients(*given), *(None,) * 8


def backward_rows(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor,
    k_offsets: Tensor | None, mask: Tensor | None, mask_offsets: Tensor | None, max_q: int | None, max_k: int | None,
    causal: bool, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k and v."""
    first = grad, q, k, v, out, lse, q_offsets, k_offsets
    if max_q is not None:
        return flash_rows_backward(*first, max_q, max_k, causal, scale)
    return varlen_rows_backward(*first, mask, mask_offsets, causal, scale)


class AttendBackward(torch.autograd.Function):
    """The gradients of `Attend` as a differentiable function; their own derivatives go through rectangles."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return backward_rows(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        grad, _, _, *tensors, _, _, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(grad, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *operands, q_offsets, k_offsets, mask, mask_offsets = ctx.saved_tensors
        q_rows = Structure(q_offsets.long())
        k_rows = q_rows if k_offsets is None else Structure(k_offsets.long())
        if mask_offsets is not None:
            sizes = torch.cat([sizes_of(q_rows), sizes_of(k_rows)], 1)
            shape = *longest(q_rows), *longest(k_rows)
            mask = pad_rows(mask, Structure(mask_offsets, sizes, ragged_ndim=2), shape).movedim(3, 1)
        how = How(ctx.causal, ctx.scale, 0.0, mask, plain_scores)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (shared_heads(t, q.shape[1]) for t in (k, v))
            return attend_rectangle(q, k, v, q_rows, k_rows, how)

        def first(grad: Tensor, *tensors: Tensor) -> Any:
            return vjp(attend, *tensors)[1](grad)

        grad, q, k, v = vjp(first, *operands)[1](grads)
        return grad, None, None, q, k, v, *(None,) * 8


def gradients(*args: Any) -> tuple[Tensor, ...]:
    """`backward_rows` with a derivative."""
    return AttendBackward.apply(*args)


def gradients_traced(*args: Any) -> tuple[Tensor, ...]:
    """What Dynamo traces in place of `gradients`: their derivative is refused, which takes a grad mode that is on."""
    with torch.enable_grad():
        return backward_rows(*args)


trace_as(gradients, gradients_traced)


def plain_scores(score: Tensor, *at: Tensor) -> Tensor:
    """Scores as they are: what makes attention on rectangles differentiable more than once."""
    return score


def with_derivative(op: Any, keys: Any, *args: Any) -> tuple[Tensor, ...]:
    """The operator by itself, which has the derivative of `Attend`: in the body of a loop of a graph, say.

    Raises:
        UnsupportedError: a graph of `torch.func.grad` over `torch.vmap`, where Dynamo leaves the derivative out
            (2.11-2.13) and gradients would be wrong.
    """
    if not (torch.is_grad_enabled() and any([isinstance(a, Tensor) and a.requires_grad for a in args])):
        return below_autograd(op, keys, *args)
    if under_transform():
        got, hint = "torch.func.grad over torch.vmap in a graph", "compile what is differentiated, or call it eagerly"
        raise UnsupportedError(message("varlen_attention", "attention with a derivative", got, hint=hint))
    (*tensors, causal, scale), none = args, (None, None)
    own = {varlen_rows: (*tensors, *none, *none), masked_rows: (*tensors, *none)}
    own[flash_rows] = (*tensors[:5], *none, *tensors[5:])
    return Attend.apply(*own[op], causal, scale)  # type: ignore[no-any-return]  # untyped in torch


for _op in (varlen_rows, masked_rows, flash_rows):
    LIBRARY.impl(_op, fake_rows, "Meta")  # `register_fake` looks for its caller in every module
    LIBRARY.impl(_op, partial(with_derivative, _op), "Autograd", with_keyset=True)
    torch.library.register_vmap(_op, partial(over_members, _op))
for _op in (varlen_rows_backward, flash_rows_backward):
    LIBRARY.impl(_op, fake_gradients, "Meta")
    refuse_derivative(_op, no_second("attention"))
    torch.library.register_vmap(_op, partial(over_members, _op))
