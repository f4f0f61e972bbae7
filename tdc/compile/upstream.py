"""Remedies for defects of torch's control flow operators (torch 2.11-2.15).

They are silent: wrong numbers come out. Each has a test in `tests/compile/test_upstream_loops.py` that fails once torch
is mended.

    lost gradients      `while_loop` drops the derivative through a carry that starts without one: `anchored`
    a loop not run      its backward runs the body once even so: `ends_if_ran` gives the start back, gradient and all
    memory reused       Inductor overwrites arguments of a loop body, since the subgraphs of a backward graph read the
                        list of donated inputs of the whole graph: `before_operator` compiles without donation
    operands returned   Inductor turns `x + 0` into `x`, so a body returns its operand, whose memory it uses again while
                        the result is alive: `memory_apart`, by `before_operator` as well
    integer results     their gradient is missing, an assertion fails; the same in cond: `Code` passes them as float64
    complex carries     a differentiated `while_loop` fails an assertion: `Planes` passes them as real ones
    views as results    of a differentiated loop, at offsets that the next cannot take: `ends_if_ran` copies
    one gradient twice  of two ends of scan or cond fails: `own_gradients`
    zeros as results    torch 2.11 fails where the gradient of a step in scan is zeros that it saved: `tied`

A body is traced once more outside the operator, to learn its form and what needs gradients. `trace_outside` drops the
assertions of that trace; the rest is dead code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def traced() -> bool:
    """True where torch's operators are to be in a graph; else plain Python runs."""
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


def needs_grad(*groups: Sequence[Tensor]) -> Tensor | None:
    """First tensor that requires grad, if autograd is on; else None."""
    if torch.is_grad_enabled():
        for group in groups:
            for x in group:
                if x.requires_grad:
                    return x
    return None


class Anchor(torch.autograd.Function):
    """Copy a tensor so that it requires grad because `ref` does. No gradient goes to `ref`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, ref: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        return grads[0], None


def anchored(x: Tensor, ref: Tensor | None) -> Tensor:
    """Start of a loop: contiguous, in its own memory, and in autograd where any part of the loop is."""
    if ref is None or x.requires_grad or not (x.is_floating_point() or x.is_complex()):
        return copied(x)
    return Anchor.apply(x, ref)  # type: ignore[no-any-return]  # untyped in torch


def copied(x: Tensor) -> Tensor:
    """Contiguous copy: operators take neither views of their inputs as results, nor one result twice."""
    return x.clone(memory_format=torch.contiguous_format)


def own_gradients(tensors: Sequence[Tensor], ref: Tensor | None) -> Sequence[Tensor]:
    """Give each tensor a gradient of its own, without strides of 0, which the backward of an operator needs."""
    if ref is None:
        return tensors
    return [computed(x) if x.is_floating_point() or x.is_complex() else x for x in tensors]


def computed(x: Tensor) -> Tensor:
    """Same numbers as the result of an operation. Inductor of torch 2.14 drops `x * 1` as it does a clone."""
    return x.neg().neg()


def even_gradients(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Same numbers, contiguous, with contiguous gradients: both branches of `cond` must give strides of one order."""
    return [computed(x.reshape(-1)).reshape(x.shape) if x.requires_grad else x for x in tensors]


def ends_if_ran(first: Any, ends: Sequence[Tensor], starts: Sequence[Tensor]) -> list[Tensor]:
    """Carry after a loop if it ran, else before it; `first` is the first condition."""
    return [torch.where(first, end, start) for end, start in zip(ends, starts, strict=True)]


class Code:
    """Integers and bools as float64 on their way through a differentiated operator; exactly, and back.

    Without `ref` nothing is differentiated, and tensors pass as they are. `like` has the dtypes.
    """

    __slots__ = ("dtypes",)

    def __init__(self, ref: Tensor | None, like: Sequence[Tensor]) -> None:
        exact = [ref is not None and not (x.is_floating_point() or x.is_complex()) for x in like]
        self.dtypes = [x.dtype if is_exact else None for x, is_exact in zip(like, exact, strict=True)]

    def encode(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        """Copies to pass; int64 as two halves, at `dim`."""
        return [copied(x) if d is None else halves(x, dim).double() for x, d in zip(tensors, self.dtypes, strict=True)]

    def decode(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        """Decode; `dim` is where the halves are now."""
        return [x if d is None else from_halves(x, d, dim) for x, d in zip(tensors, self.dtypes, strict=True)]


class Planes:
    """Complex tensors as real ones on their way through a differentiated `while_loop`, and back; as `Code`."""

    __slots__ = ("split",)

    def __init__(self, ref: Tensor | None, like: Sequence[Tensor]) -> None:
        self.split = [ref is not None and x.is_complex() for x in like]

    def encode(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Encode, with a dim of two at the end for complex tensors."""
        return [torch.view_as_real(x.resolve_conj()) if s else x for x, s in zip(tensors, self.split, strict=True)]

    def decode(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Decode."""
        return [torch.view_as_complex(x) if s else x for x, s in zip(tensors, self.split, strict=True)]


def halves(x: Tensor, dim: int = 0) -> Tensor:
    """int64 as two numbers that float64 holds exactly; other dtypes as they are."""
    return torch.stack([x >> 32, x & 0xFFFFFFFF], dim) if x.dtype == torch.int64 else x


def tied(x: Tensor, slices: Sequence[Tensor]) -> Tensor:
    """Same numbers with a derivative of zero in each slice, so that no slice is without a gradient."""
    for other in slices:
        x = x - other.reshape(-1)[:0].sum().abs().to(x.dtype)
    return x


def from_halves(x: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
    """The inverse of `halves`, from float64."""
    if dtype != torch.int64:
        return x.detach().to(dtype)
    high, low = x.detach().long().unbind(dim)
    return (high << 32) | low
