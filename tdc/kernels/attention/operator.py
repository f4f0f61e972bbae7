"""The operator of attention within rows, for torch's dispatcher, autograd, vmap and graphs.

    q (N, H, D), k and v (M, G, D), offsets of both (B+1,)  ->  out (N, H, D), logsumexp (N, H)

One node of a graph for all lengths, with a form for each backend of `choice`:

    rows         CPU     a mask may be added to the scores, and gets no gradient
    weights      CPU     dropout by seeds, and a gradient of the mask
    flash        CUDA    bounds of lengths, a window or 0, dropout by the device; keys may have fewer heads
    efficient    CUDA    the same, with as many heads of keys as of queries and no window

Invariant: `Attend` differentiates the operator, and nothing else does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from tdc.core.dtypes import sum_dtype
from tdc.core.dynamo import trace_with_grad, under_mode, under_transform
from tdc.core.errors import UnsupportedError, message, no_second
from tdc.core.levels import applied, moving
from tdc.core.operators import (
    derive,
    differentiable,
    in_front,
    learning,
    one_by_one,
    operator,
    refuse_derivative,
    refuse_mapped,
)
from tdc.core.torch_functions import argument_names
from tdc.kernels.attention import cpu, efficient, flash, weights
from tdc.kernels.attention.rectangle import How, attend_rectangle, shared_heads, within
from tdc.kernels.attention.weights import kept_rectangle
from tdc.layout.padding import pad_rows
from tdc.layout.segments import longest, sizes_of
from tdc.layout.structure import Structure

ROWS = "Tensor q_offsets, Tensor? k_offsets"
MASKED = f"{ROWS}, Tensor? mask, Tensor? mask_offsets"
BOUNDED = "SymInt max_q, SymInt max_k, int window"
SEEDED = f"{MASKED}, Tensor? seeds"
FORWARD = "(Tensor q, Tensor k, Tensor v, {}, bool causal, float scale) -> (Tensor, Tensor)"
BACKWARD = (
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {}, bool causal, float scale) -> "
    "(Tensor, Tensor, Tensor)"
)
WEIGHTS = FORWARD.replace("scale", "scale, float dropout")
WEIGHTS_BACKWARD = BACKWARD.replace("scale", "scale, float dropout")[:-1] + ", Tensor)"
DRAWN = WEIGHTS[:-1] + ", Tensor, Tensor)"
DRAWN_BACKWARD = BACKWARD.replace("scale", "scale, float dropout")
NAMES = (  # of what `Attend` takes
    "backend", "q", "k", "v", "q_offsets", "k_offsets", "mask", "mask_offsets", "seeds", "max_q", "max_k", "window",
    "causal", "scale", "dropout",
)  # fmt: skip


def fake_rows(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:2], dtype=sum_dtype(q.dtype))
    return q.new_empty((*q.shape[:2], v.shape[2])), lse


def fake_flash(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return *fake_rows(q, k, v), q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)


def fake_efficient(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, k_offsets: Any, bound: int, *rest: Any
) -> tuple[Tensor, ...]:
    lse = q.new_empty(offsets.shape[0] - 1, q.shape[1], efficient.in_blocks(bound, q.shape[0]), dtype=torch.float32)
    state = [q.new_empty((), dtype=torch.int64) for _ in range(2)]  # as torch says of its own, which may be on the host
    return q.new_empty((*q.shape[:2], v.shape[2])), lse, *state


def fake_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple([torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)])


def fake_weights_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    mask = rest[4]
    of_mask = q.new_empty((0, q.shape[1])) if mask is None else mask.new_empty(mask.shape)
    return *fake_gradients(grad, q, k, v), of_mask


def over_vmap(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """Under vmap the batch becomes heads, (K, N, H, D) -> (N, K·H, D), also of a mask; offsets are shared.

    Seeds (S,) become (K·S,), which divide the heads as before. Dropout that a device drew for some heads it draws for
    no others: gradients that share one forward run one by one.
    """
    if op in DRAWING and args[-1] and info.randomness != "different":
        got, hint = f"randomness={info.randomness!r}", "vmap(f, randomness='different'), or a dropout of 0"
        raise UnsupportedError(message("attention", "dropout of its own for each example on CUDA", got, hint=hint))
    if op in DRAWN_BEFORE and args[-1] and in_dims[LSE] is None:
        return one_by_one(op, info, in_dims, *args)
    batch, at = info.batch_size, SEEDS.get(op)
    if at is not None and (seeds := args[at]) is not None:
        dim = in_dims[at]
        all_seeds = seeds.repeat(batch) if dim is None else seeds.movedim(dim, 0).flatten()
        args, in_dims = (*args[:at], all_seeds, *args[at + 1 :]), (*in_dims[:at], None, *in_dims[at + 1 :])
    tensors = [(a, d) for a, d in zip(args, in_dims, strict=True) if isinstance(a, Tensor)]
    refuse_mapped("offsets", [d for a, d in tensors if not a.is_floating_point()])
    outs = op(*[
        a if not isinstance(a, Tensor) or not a.is_floating_point() else folded(a, d, batch)
        for a, d in zip(args, in_dims, strict=True)
    ])  # fmt: skip
    of_heads = [o.ndim > 1 for o in outs]  # the state of a generator is not
    return (
        tuple([o.unflatten(1, (batch, -1)) if has else o for o, has in zip(outs, of_heads, strict=True)]),
        tuple([1 if has else None for has in of_heads]),
    )


def folded(x: Tensor, dim: int | None, batch: int, heads: int = 1) -> Tensor:
    """A tensor whose vmapped batch, or copies, are heads; `heads` is the dim of these."""
    return in_front(x, dim, batch).movedim(0, heads).flatten(heads, heads + 1)


class Attend(torch.autograd.Function):
    """The operator as a differentiable function."""

    @staticmethod
    def forward(
        backend: str, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor | None,
        mask: Tensor | None, mask_offsets: Tensor | None, seeds: Tensor | None, max_q: int | None, max_k: int | None,
        window: int, causal: bool, scale: float, dropout: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        rows = q, k, v, q_offsets, k_offsets
        if backend == "weights":
            return weights_rows(*rows, mask, mask_offsets, seeds, causal, scale, dropout)
        if backend != "rows":
            return ON_CUDA[backend][0](*rows, max_q, max_k, window, causal, scale, dropout)
        if mask is None:
            return varlen_rows(*rows, causal, scale)
        return masked_rows(*rows, mask, mask_offsets, causal, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.backend, *tensors, ctx.max_q, ctx.max_k, ctx.window, ctx.causal, ctx.scale, ctx.dropout = inputs
        ctx.mark_non_differentiable(*output[1:])
        state = output[2:] or (None, None)
        ctx.save_for_backward(*output[:2], *state, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        options = ctx.max_q, ctx.max_k, ctx.window, ctx.causal, ctx.scale, ctx.dropout
        q, k, v, *of_mask = gradients(ctx.backend, grads[0], *ctx.saved_tensors, *options)
        mask = of_mask[0] if ctx.needs_input_grad[6] else None
        return None, q, k, v, None, None, mask, *(None,) * 8


attend = differentiable(Attend)


def backward_rows(
    backend: str, grad: Tensor, out: Tensor, lse: Tensor, seed: Tensor | None, offset: Tensor | None, q: Tensor,
    k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor | None, mask: Tensor | None,
    mask_offsets: Tensor | None, seeds: Tensor | None, max_q: int | None, max_k: int | None, window: int,
    causal: bool, scale: float, dropout: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k and v, and of a mask with the weights."""
    first = grad, q, k, v, out, lse, q_offsets, k_offsets
    if backend == "weights":
        return weights_rows_backward(*first, mask, mask_offsets, seeds, causal, scale, dropout)
    if backend != "rows":
        return ON_CUDA[backend][1](*first, seed, offset, max_q, max_k, window, causal, scale, dropout)
    return varlen_rows_backward(*first, mask, mask_offsets, causal, scale)


class AttendBackward(torch.autograd.Function):
    """The gradients of `Attend` as a differentiable function; their own derivatives go through rectangles."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return backward_rows(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.backend, grad, _, _, _, _, *tensors, _, _, ctx.window, ctx.causal, ctx.scale, ctx.dropout = inputs
        ctx.save_for_backward(grad, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, q, k, v, q_offsets, k_offsets, mask, mask_offsets, seeds = ctx.saved_tensors
        if ctx.dropout and ctx.backend in ON_CUDA:
            text = message("attention", "one derivative of dropout on CUDA", "a second one", hint="dropout=0.0")
            raise UnsupportedError(text)
        q_rows = Structure(q_offsets.long())
        k_rows = q_rows if k_offsets is None else Structure(k_offsets.long())
        pairs = torch.cat([sizes_of(q_rows), sizes_of(k_rows)], 1)
        dtype = sum_dtype(q.dtype)
        keep = kept_rectangle(pairs, q.shape[1], seeds, ctx.dropout, dtype) if ctx.dropout else None

        def attended(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
            dense = mask[0] if mask else None
            if dense is not None and mask_offsets is not None:
                shape = *longest(q_rows), *longest(k_rows)
                dense = pad_rows(dense, Structure(mask_offsets, pairs, ragged_ndim=2), shape).movedim(3, 1)
            k, v = (shared_heads(t, q.shape[1]) for t in (k, v))
            how = How(ctx.causal, ctx.scale, 0.0, dense, within(ctx.window), keep)
            return attend_rectangle(q, k, v, q_rows, k_rows, how)

        operands = (q, k, v) if mask is None else (q, k, v, mask)

        def first(grad: Tensor, *tensors: Tensor) -> Any:
            return vjp(attended, *tensors)[1](grad)[: len(grads)]

        wanted = grads[: len(operands)]
        grad, q, k, v, *of_mask = vjp(first, grad, *operands)[1](wanted)
        return None, grad, *(None,) * 4, q, k, v, None, None, of_mask[0] if of_mask else None, *(None,) * 8


def gradients(*args: Any) -> tuple[Tensor, ...]:
    """`backward_rows` with a derivative, which reads lengths: in a graph it has none."""
    if under_mode() or not (under_transform() or learning(args) or moving(args)):
        return backward_rows(*args)
    found: tuple[Tensor, ...] = applied(AttendBackward, *args)
    return found


trace_with_grad(gradients, backward_rows)  # whose derivative is refused


def inputs_of(op: Any, *args: Any) -> tuple[Any, ...]:
    """Arguments of `Attend`, from those of one of the operators."""
    given: dict[str, Any] = dict.fromkeys(NAMES) | {"backend": BACKENDS[op], "window": 0, "dropout": 0.0}
    given |= dict(zip(argument_names(op), args, strict=True))
    return tuple(given.values())


def define(schema: str, fake: Any, **options: Any) -> Any:
    """One of the operators."""
    return operator(f"varlen_attention{schema}", fake, over_vmap, **options)


varlen_rows = define(FORWARD.format(ROWS), fake_rows, CPU=cpu.forward_rows)
masked_rows = define(f".masked{FORWARD.format(MASKED)}", fake_rows, CPU=cpu.forward_rows)
weights_rows = define(f".weights{WEIGHTS.format(SEEDED)}", fake_rows, CPU=weights.forward_rows)
varlen_rows_backward = define(f"_backward{BACKWARD.format(MASKED)}", fake_gradients, CPU=cpu.backward_rows)
weights_rows_backward = define(
    f"_backward.weights{WEIGHTS_BACKWARD.format(SEEDED)}", fake_weights_gradients, CPU=weights.backward_rows
)
KERNELS: dict[str, Any] = {"flash": flash, "efficient": efficient}
ON_CUDA: dict[str, tuple[Any, Any]] = {  # forward and backward
    name: (
        define(f".{name}{DRAWN.format(f'{ROWS}, {BOUNDED}')}", fake, random=True, CUDA=kernels.forward_rows),
        define(
            f"_backward.{name}{DRAWN_BACKWARD.format(f'{ROWS}, Tensor seed, Tensor offset, {BOUNDED}')}",
            fake_gradients, CUDA=kernels.backward_rows,
        ),
    )
    for (name, kernels), fake in zip(KERNELS.items(), (fake_flash, fake_efficient), strict=True)
}  # fmt: skip
BACKENDS = {varlen_rows: "rows", masked_rows: "rows", weights_rows: "weights"}
BACKENDS |= {forward: name for name, (forward, _) in ON_CUDA.items()}
DRAWING, DRAWN_BEFORE = [[pair[i] for pair in ON_CUDA.values()] for i in range(2)]
LSE = 5  # which argument of a backward
SEEDS = {weights_rows: 7, weights_rows_backward: 10}  # which argument
for _op in BACKENDS:
    derive(_op, Attend, partial(inputs_of, _op))
for _op in (varlen_rows_backward, weights_rows_backward, *DRAWN_BEFORE):
    refuse_derivative(_op, no_second("attention"))
