"""The operators on all pairs of a query and a key of each example: what torch's dispatcher, autograd, vmap and graphs
know of them.

    q (N, H, D), k (M, H, D), v (M, H, E), offsets of both (B+1,)

    pair_scores              q, k -> (H, P)
    pair_sums                weights (H, P), v -> (N, H, E)
    pair_softmax             (H, P), over the keys of each query
    pair_softmax_gradient    (H, P), its derivative
    pair_positions           (3, P), row, query and key of each pair

Each is one node of a graph that is the same for all lengths, and so are its derivatives, of any order: those of scores
are sums, those of sums are scores and sums.

Invariant: an autograd function differentiates its operator, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tdc.core.dynamo import trace_with_grad
from tdc.core.operators import derive, differentiable, in_direction_of_each, in_front, operator, refuse_mapped
from tdc.ops.attention import pair_kernels

ROWS = "Tensor q_offsets, Tensor? k_offsets"
Rows = tuple[Tensor, Tensor | None]


class Scores(torch.autograd.Function):
    """`pair_scores` with its gradients."""

    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(q: Tensor, k: Tensor, q_offsets: Tensor, k_offsets: Tensor | None, pairs: int) -> Tensor:
        return pair_scores(q, k, q_offsets, k_offsets, pairs)  # type: ignore[no-any-return]  # untyped in torch

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.pairs = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad,), (q, k, *rows) = grads, ctx.saved_tensors
        of_q = sums_again(grad, k, *rows, False, q.shape[0]) if ctx.needs_input_grad[0] else None
        of_k = sums_again(grad, q, *rows, True, k.shape[0]) if ctx.needs_input_grad[1] else None
        return of_q, of_k, None, None, None


class DirectedScores(Scores):
    """`Scores` with a derivative in a direction."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        Scores.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:4])

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Tensor:
        q, k, *rows = ctx.saved_tensors
        return in_direction_of_each(lambda q, k: scores(q, k, *rows, ctx.pairs), (q, k), directions[:2])


class Sums(torch.autograd.Function):
    """`pair_sums` with its gradients."""

    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(
        w: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor | None, turned: bool, total: int
    ) -> Tensor:  # fmt: skip
        return pair_sums(w, v, q_offsets, k_offsets, turned, total)  # type: ignore[no-any-return]  # untyped in torch

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.turned, ctx.total = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad,), (w, v, *rows) = grads, ctx.saved_tensors
        of_w = of_v = None
        if ctx.needs_input_grad[0]:
            q, k = (v, grad) if ctx.turned else (grad, v)
            of_w = scores_again(q, k, *rows, w.shape[1])
        if ctx.needs_input_grad[1]:
            of_v = sums_again(w, grad, *rows, not ctx.turned, v.shape[0])
        return of_w, of_v, None, None, None, None


class DirectedSums(Sums):
    """`Sums` with a derivative in a direction."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        Sums.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:4])

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Tensor:
        w, v, *rows = ctx.saved_tensors
        how = *rows, ctx.turned, ctx.total
        return in_direction_of_each(lambda w, v: sums(w, v, *how), (w, v), directions[:2])


class Softmax(torch.autograd.Function):
    """`pair_softmax` with its gradient."""

    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(x: Tensor, q_offsets: Tensor, k_offsets: Tensor | None) -> Tensor:
        return pair_softmax(x, q_offsets, k_offsets)  # type: ignore[no-any-return]  # untyped in torch

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return gradient_again(grads[0], *ctx.saved_tensors), None, None


class DirectedSoftmax(Softmax):
    """`Softmax` with a derivative in a direction, which its gradient is too."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        Softmax.setup_context(ctx, inputs, output)
        ctx.save_for_forward(output, *inputs[1:])

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Tensor:
        return softmax_gradient(directions[0], *ctx.saved_tensors)


class Gradient(torch.autograd.Function):
    """`pair_softmax_gradient` with its gradients."""

    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(grad: Tensor, y: Tensor, q_offsets: Tensor, k_offsets: Tensor | None) -> Tensor:
        return pair_softmax_gradient(grad, y, q_offsets, k_offsets)  # type: ignore[no-any-return]  # untyped in torch

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (again,), (grad, y, *rows) = grads, ctx.saved_tensors
        of_grad = gradient_again(again, y, *rows) if ctx.needs_input_grad[0] else None
        of_y = by_softmax(again, grad, y, *rows) if ctx.needs_input_grad[1] else None
        return of_grad, of_y, None, None


class DirectedGradient(Gradient):
    """`Gradient` with a derivative in a direction."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        Gradient.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Tensor:
        of_grad, of_y = directions[:2]
        grad, y, *rows = ctx.saved_tensors
        parts = [] if of_grad is None else [softmax_gradient(of_grad, y, *rows)]
        if of_y is not None:
            parts.append(of_y * (grad - spread_sums(grad * y, *rows)) - y * spread_sums(grad * of_y, *rows))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def spread_sums(x: Tensor, q_offsets: Tensor, k_offsets: Tensor | None) -> Tensor:
    """For each pair the sum of x (H, P) over the keys of its query."""
    return x - softmax_gradient(x, torch.ones_like(x), q_offsets, k_offsets)


def by_softmax(again: Tensor, grad: Tensor, y: Tensor, *rows: Any) -> Tensor:
    """The derivative of the gradient of a softmax by its result y."""
    return again * (grad - spread_sums(grad * y, *rows)) - grad * spread_sums(again * y, *rows)


scores: Callable[..., Tensor] = differentiable(Scores, DirectedScores)  # each operator with all its derivatives
sums: Callable[..., Tensor] = differentiable(Sums, DirectedSums)
softmax: Callable[..., Tensor] = differentiable(Softmax, DirectedSoftmax)
softmax_gradient: Callable[..., Tensor] = differentiable(Gradient, DirectedGradient)


def scores_again(*args: Any) -> Tensor:
    """`scores` of a derivative."""
    return scores(*args)


def sums_again(*args: Any) -> Tensor:
    """`sums` of a derivative."""
    return sums(*args)


def gradient_again(*args: Any) -> Tensor:
    """`softmax_gradient` of a derivative."""
    return softmax_gradient(*args)


trace_with_grad(scores_again, Scores.forward)
trace_with_grad(sums_again, Sums.forward)
trace_with_grad(gradient_again, Gradient.forward)
trace_with_grad(by_softmax)


def fake_scores(q: Tensor, k: Tensor, q_offsets: Tensor, k_offsets: Tensor | None, pairs: int) -> Tensor:
    return q.new_empty(q.shape[1], pairs)


def fake_sums(w: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor | None, turned: bool, total: int) -> Tensor:
    return v.new_empty(total, *v.shape[1:])


def fake_softmax(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def fake_gradient(grad: Tensor, y: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def fake_positions(q_offsets: Tensor, k_offsets: Tensor | None, pairs: int) -> Tensor:
    return q_offsets.new_empty(3, pairs, dtype=torch.int32)


def over_members(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
    """Under vmap members become heads, which are dim 1 of queries, keys and values, and dim 0 of pairs; they share
    offsets."""
    members: int = info.batch_size
    refuse_mapped("offsets", [d for a, d in zip(args, in_dims, strict=True) if is_offsets(a)])
    tensors = [
        heads_of_members(a, d, members) if isinstance(a, Tensor) and not is_offsets(a) else a
        for a, d in zip(args, in_dims, strict=True)
    ]
    out: Tensor = op(*tensors)
    heads = out.ndim - 2
    return out.unflatten(heads, (members, -1)), heads


def is_offsets(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_floating_point()


def heads_of_members(x: Tensor, dim: int | None, members: int) -> Tensor:
    """(K, N, H, D) -> (N, K·H, D), and (K, H, P) -> (K·H, P)."""
    heads = x.ndim - 2 - (dim is not None)
    return in_front(x, dim, members).movedim(0, heads).flatten(heads, heads + 1)


pair_scores, pair_sums, pair_softmax, pair_softmax_gradient, pair_positions = [
    operator(f"{name}({tensors}{ROWS}{more}) -> Tensor", fake, over_members, CPU=kernel)
    for name, tensors, more, fake, kernel in (
        ("pair_scores", "Tensor q, Tensor k, ", ", SymInt pairs", fake_scores, pair_kernels.scores),
        ("pair_sums", "Tensor w, Tensor v, ", ", bool turned, SymInt total", fake_sums, pair_kernels.sums),
        ("pair_softmax", "Tensor x, ", "", fake_softmax, pair_kernels.softmax),
        ("pair_softmax_gradient", "Tensor grad, Tensor y, ", "", fake_gradient, pair_kernels.softmax_gradient),
        ("pair_positions", "", ", SymInt pairs", fake_positions, pair_kernels.positions),
    )
]
for _op, _function in (
    (pair_scores, DirectedScores), (pair_sums, DirectedSums), (pair_softmax, DirectedSoftmax),
    (pair_softmax_gradient, DirectedGradient),
):  # fmt: skip
    derive(_op, _function)
