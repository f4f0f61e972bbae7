"""Reductions of packed values whose positions lie innermost in memory, as those of (B, C, -1) do, on CPU.

    x (N, *D), neighbours along N side by side; offsets (B+1,)

    sum_rows       (N, *D) -> (B, *D)      sums of each example
    spread_rows    (B, *D) -> (N, *D)      what belongs to an example, for each of its positions: the adjoint
    amax_rows      (N, *D) -> (B, *D)      the largest or smallest element of each example
    squares_rows   (N, *D) -> (B, *D)      sums of squared differences from the mean of each example, (B, *D)

An example is a stretch of every line then: torch's own reduction of it takes a tenth of the time of adding one position
after another to the result of its example. Short examples are turned, so that features lie innermost, and added so.

Invariants: results are those of torch for each example by itself; which way runs depends on sizes only; sums and
spreads are each other's derivative, as often as anybody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.core.dtypes import rounded_once
from tdc.core.dynamo import known, readable, trace_with_grad
from tdc.core.linear_operators import TRACED, linear, transposes
from tdc.core.operators import derive, differentiable, in_front, only_results, operator, refuse_mapped, unserved

LEAST = 2048  # elements to copy in the time of a call: 5 to 8 us (one thread, 2.13)
FEW = 32  # features, up to which torch takes as long for a position as for its features


def innermost(x: Tensor) -> bool:
    """Whether positions of packed values (N, *D) lie innermost, on CPU, where operators serve."""
    return x.device.type == "cpu" and x.ndim > 1 and known(x.stride(0) == 1) and not unserved()


def by_example(x: Tensor, rows: int) -> bool:
    """Whether packed values (N, *D) of so many examples are reduced here: in eager calls examples worth one each, as
    others share what a structure keeps."""
    return innermost(x) and (not readable() or long(x, rows))


def sums_by_example(x: Tensor, rows: int) -> bool:
    """The same of sums: also where features are so few that torch takes most of its time to go to the next position,
    eagerly and for the result alone."""
    few = x.ndim > 1 and x.device.type == "cpu" and readable() and is_few(x) and only_results(x)
    return by_example(x, rows) or (few and long(x, rows))


def long(x: Tensor, rows: int) -> bool:
    """Whether examples are worth a call each."""
    return x.numel() >= LEAST * rows


def is_few(x: Tensor) -> bool:
    """Whether a position has few features."""
    return x.numel() <= FEW * x.shape[0]


class Extreme(torch.autograd.Function):
    """`amax_rows` with its gradient, which elements that are equal share, as torch has it."""

    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(x: Tensor, offsets: Tensor, rows: int, largest: bool, none: float) -> Tensor:
        return amax_rows(x, offsets, rows, largest, none)  # type: ignore[no-any-return]  # untyped in torch

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, offsets, *_ = inputs
        ctx.save_for_backward(x, offsets, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return to_the_largest(grads[0], *ctx.saved_tensors), None, None, None, None


class DirectedExtreme(Extreme):
    """`Extreme` with a derivative in a direction."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        Extreme.setup_context(ctx, inputs, output)
        ctx.save_for_forward(inputs[0], inputs[1], output)

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Tensor:
        x, offsets, output = ctx.saved_tensors
        return linear(sum_rows, directions[0] * shares(x, offsets, output), offsets, output.shape[0])


extreme: Callable[..., Tensor] = differentiable(Extreme, DirectedExtreme)


def shares(x: Tensor, offsets: Tensor, top: Tensor) -> Tensor:
    """How much of the derivative of the largest elements (B, *D) each element has, (N, *D)."""
    hit = (x == linear(spread_rows, top, offsets, x.shape[0])).to(x.dtype)
    return hit / linear(spread_rows, linear(sum_rows, hit, offsets, top.shape[0]), offsets, x.shape[0])


def to_the_largest(grad: Tensor, x: Tensor, offsets: Tensor, top: Tensor) -> Tensor:
    """The gradient of x, of that of the largest elements."""
    return linear(spread_rows, grad, offsets, x.shape[0]) * shares(x, offsets, top)


trace_with_grad(to_the_largest)


class Squares(torch.autograd.Function):
    """`squares_rows` with the gradient of x. That of a mean is 0: the sum of what elements differ from it."""

    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(x: Tensor, offsets: Tensor, rows: int, mean: Tensor) -> Tensor:
        return squares_rows(x, offsets, rows, mean)  # type: ignore[no-any-return]  # untyped in torch

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, offsets, _, mean = inputs
        ctx.save_for_backward(x, offsets, mean)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return to_elements(grads[0], *ctx.saved_tensors), None, None, None


class DirectedSquares(Squares):
    """`Squares` with a derivative in a direction."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        Squares.setup_context(ctx, inputs, output)
        x, offsets, _, mean = inputs
        ctx.save_for_forward(x, offsets, mean)

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Tensor:
        x, offsets, mean = ctx.saved_tensors
        return linear(sum_rows, 2 * from_mean(x, offsets, mean) * directions[0], offsets, mean.shape[0])


squares: Callable[..., Tensor] = differentiable(Squares, DirectedSquares)


def to_elements(grad: Tensor, x: Tensor, offsets: Tensor, mean: Tensor) -> Tensor:
    """The gradient of x, of that of sums of squares."""
    return linear(spread_rows, 2 * grad, offsets, x.shape[0]) * from_mean(x, offsets, mean)


def from_mean(x: Tensor, offsets: Tensor, mean: Tensor) -> Tensor:
    """What elements (N, *D) differ from the mean of their example."""
    return x - linear(spread_rows, mean, offsets, x.shape[0])


trace_with_grad(to_elements)


def sums(x: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """(N, *D) -> (B, *D)."""
    if not long(x, rows):
        index = owners(offsets, x.shape[0])
        return rounded_once(lambda v: v.new_zeros((rows, *v.shape[1:])).index_add_(0, index, v), x.contiguous())
    out = x.new_empty((rows, *x.shape[1:]))
    for row, result in zip(examples(x, offsets), out, strict=True):
        torch.sum(row, 0, dtype=x.dtype, out=result)
    return out


def extremes(x: Tensor, offsets: Tensor, rows: int, largest: bool, none: float) -> Tensor:
    """(N, *D) -> (B, *D), `none` of an empty example."""
    out = x.new_full((rows, *x.shape[1:]), none)
    if not long(x, rows):
        how = "amax" if largest else "amin"
        index = owners(offsets, x.shape[0]).view(-1, *[1] * (x.ndim - 1)).expand_as(x)
        return out.scatter_reduce_(0, index, x.contiguous(), how, include_self=False)
    for row, result in zip(examples(x, offsets), out, strict=True):
        if row.shape[0]:
            (torch.amax if largest else torch.amin)(row, 0, out=result)
    return out


def squared(x: Tensor, offsets: Tensor, rows: int, mean: Tensor) -> Tensor:
    """(N, *D), means (B, *D) -> (B, *D); in memory of one example, which stays in the cache."""
    if not long(x, rows):
        apart = x - mean.index_select(0, owners(offsets, x.shape[0]))
        return sums(apart.square_(), offsets, rows)
    lengths, out = on_host(offsets.diff()), x.new_empty((rows, *x.shape[1:]))
    room = torch.empty_like(x[: max(lengths, default=0)])  # which lies as x does
    for row, center, result in zip(torch.split(x, lengths), mean, out, strict=True):
        apart = torch.sub(row, center, out=room.narrow(0, 0, row.shape[0]))
        torch.sum(apart.square_(), 0, out=result)
    return out


def spreads(x: Tensor, offsets: Tensor, total: int) -> Tensor:
    """(B, *D) -> (N, *D), positions innermost."""
    if total * x[:1].numel() < LEAST * x.shape[0]:
        return gathered_spread(x, offsets, total)
    out = x.new_empty((*x.shape[1:], total)).movedim(-1, 0)
    for row, result in zip(x, examples(out, offsets), strict=True):
        result.copy_(row.expand_as(result))
    return out


def owners(offsets: Tensor, total: int) -> Tensor:
    """The example of each position, (N,)."""
    return torch.repeat_interleave(offsets.diff(), output_size=total)


def examples(x: Tensor, offsets: Tensor) -> Sequence[Tensor]:
    """The examples as views."""
    return torch.split(x, on_host(offsets.diff()))


def on_host(lengths: Any) -> list[int]:
    """Lengths as numbers."""
    return lengths.tolist()  # type: ignore[no-any-return]  # untyped in torch


def gathered_spread(x: Tensor, offsets: Tensor, total: int) -> Tensor:
    """`spreads` in operations of torch."""
    return x.movedim(0, -1).index_select(-1, owners(offsets, total)).movedim(-1, 0)


def fake_rows(x: Tensor, offsets: Tensor, rows: int, *rest: Any) -> Tensor:
    return x.new_empty((rows, *x.shape[1:]))


def fake_spread(x: Tensor, offsets: Tensor, total: int) -> Tensor:
    last = x.movedim(0, -1)  # x itself makes no tensor of a symbolic size before a number (torch 2.13)
    return last.new_empty((*x.shape[1:], total)).movedim(-1, 0)


def over_members(op: Any, info: Any, in_dims: Any, x: Tensor, offsets: Tensor, rows: int, *rest: Any) -> Any:
    """Under vmap members become a static dim; they share offsets."""
    refuse_mapped("offsets", in_dims[1:2])
    x, *others = [
        in_front(t, d, info.batch_size).movedim(0, 1) if isinstance(t, Tensor) else t
        for t, d in zip((x, *rest), (in_dims[0], *in_dims[3:]), strict=True)
    ]
    return op(x, offsets, rows, *others), 1


sum_rows, spread_rows, amax_rows, squares_rows = [
    operator(f"{name}(Tensor x, Tensor offsets, SymInt {how}) -> Tensor", fake, over_members, CPU=kernel)
    for name, how, fake, kernel in (
        ("sum_rows", "rows", fake_rows, sums),
        ("spread_rows", "rows", fake_spread, spreads),
        ("amax_rows", "rows, bool largest, Scalar none", fake_rows, extremes),
        ("squares_rows", "rows, Tensor mean", fake_rows, squared),
    )
]
transposes(sum_rows, spread_rows)
TRACED[spread_rows] = gathered_spread  # an index, which joins the kernel of what reads it
derive(amax_rows, DirectedExtreme)
derive(squares_rows, DirectedSquares)
