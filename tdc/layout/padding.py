"""Packing and padding: the index maps between packed and padded positions, and the gather they are made of.

`exchange` moves rows along a partial bijection. Its gradient is the move along the inverse, its forward-mode tangent
the same move of the tangent. So nothing is added up in any order of differentiation.

Dynamo (torch 2.11-2.13) traces no autograd.Function with a `jvp`, and none under several transforms: a graph holds one
without, or plain operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.dynamo import is_zero, known, larger, takes_functions, trace_with_grad, traced_for
from tdc.core.errors import ShapeError, message
from tdc.core.levels import also_below, applied
from tdc.core.operators import only_results
from tdc.core.slow_paths import announce
from tdc.layout.segments import coordinates, row_ids, sizes_of, strides
from tdc.layout.structure import Structure, once

untyped: Any = torch  # whose stubs leave types open; a function uses one of the two names, since each is a guard


def exchange(
    x: Tensor, index: Tensor, valid: Tensor | None, fill: float, inverse: Tensor, keep: Tensor | None
) -> Tensor:
    """Rows of `x` at an index; `fill` where `valid` is False.

    Shapes:
        x (P, *D), index (*Q), valid (*Q) -> (*Q, *D); inverse (P) or of several dims, one entry for each row of x.

    Args:
        inverse, keep: index and valid of the way back.
    """
    if only_results(x):
        return gathered(x, index, valid, fill)
    return applied(Both, x, index, valid, fill, inverse, keep)


@traced_for(exchange)
def exchange_traced(x: Tensor, index: Tensor, valid: Tensor | None, fill: float, *back: Tensor | None) -> Tensor:
    return Exchange.apply(x, index, valid, fill, *back) if takes_functions() else gathered(x, index, valid, fill)


def exchange_back(grad: Tensor, index: Tensor, valid: Tensor | None, inverse: Tensor, keep: Tensor | None) -> Tensor:
    """The gradient of `exchange`: along the way back."""
    flat = exchange(grad.reshape(index.numel(), *grad.shape[index.ndim :]), inverse, keep, 0.0, index, valid)
    return flat.reshape(inverse.numel(), *flat.shape[inverse.ndim :])  # `flatten` has no rule for batched gradients


def gathered_back(grad: Tensor, index: Tensor, valid: Tensor | None, inverse: Tensor, keep: Tensor | None) -> Tensor:
    """`exchange_back` in plain operations."""
    flat = gathered(grad.flatten(0, index.ndim - 1), inverse, keep, 0.0)
    return flat.flatten(0, inverse.ndim - 1)


trace_with_grad(exchange_back, gathered_back)


def gathered(x: Tensor, index: Tensor, valid: Tensor | None, fill: float) -> Tensor:
    """`exchange` in plain operations."""
    features = x.shape[1:]
    if is_zero(x.shape[0]):
        return x.new_full((*index.shape, *features), fill)
    if valid is not None and not known(x.shape[0] != 0):  # there may be no row, and padding reads one
        x = torch.cat([x, x.new_zeros(1, *features)])
    out = x.index_select(0, index.reshape(-1))
    if valid is not None:  # before the view: sizes of what a view is of are guards of a graph that takes it
        out = torch.where(valid.reshape(-1, *[1] * len(features)), out, fill)
    return out.view(*index.shape, *features)


class Exchange(torch.autograd.Function):
    """`exchange` with its gradient."""

    generate_vmap_rule = True
    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(
        x: Tensor, index: Tensor, valid: Tensor | None, fill: float, inverse: Tensor, keep: Tensor | None
    ) -> Tensor:
        return gathered(x, index, valid, fill)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, index, valid, _, inverse, keep = inputs
        ctx.save_for_backward(index, valid, inverse, keep)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return exchange_back(grads[0], *ctx.saved_tensors), None, None, None, None, None


class Both(Exchange):
    """`exchange` with its gradient and its forward-mode derivative."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        Exchange.setup_context(ctx, inputs, output)
        _, index, valid, _, inverse, keep = inputs
        ctx.save_for_forward(index, valid, inverse, keep)

    @staticmethod
    @also_below
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        index, valid, inverse, keep = ctx.saved_tensors
        return exchange(tangents[0], index, valid, 0.0, inverse, keep)


@once
def pack_index(s: Structure, total: int, padded: tuple[int, ...], cut: bool) -> tuple[Tensor, Tensor | None]:
    """For each packed position the one in the flattened padded batch, (N,), 0 where it was cut off; with `cut` also a
    mask of those that were not."""
    index, inside = row_ids(s, total), None
    for size, position in zip(padded, coordinates(s, total), strict=True):
        if cut:
            inside = position < size if inside is None else inside & (position < size)
        index = index * size + position
    return index if inside is None else torch.where(inside, index, 0), inside


@once
def pad_index(s: Structure, padded: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """For each position of the padded batch (B, *padded) the packed one, and a mask of real positions."""
    index = s.offsets[:-1].view(-1, *[1] * len(padded))
    for r, size in enumerate(padded):
        step = torch.arange(size, device=index.device).view(-1, *[1] * (len(padded) - 1 - r))
        index = index + (step if len(padded) == 1 else step * strides(s)[r].view(-1, *[1] * len(padded)))
    valid = valid_mask(sizes_of(s), padded)
    return torch.where(valid, index, 0), valid


def valid_mask(sizes: Tensor, padded: tuple[int, ...]) -> Tensor:
    """True on real positions: sizes (B, R), padded R ints -> (B, *padded) bool."""
    valid = None
    for r, size in enumerate(padded):
        inside = torch.arange(size, device=sizes.device) < sizes[:, r, None]
        inside = inside.view(sizes.shape[0], *[1] * r, size, *[1] * (len(padded) - 1 - r))
        valid = inside if valid is None else valid & inside
    assert valid is not None
    return valid


def pad_rows(values: Tensor, s: Structure, padded: tuple[int, ...], fill: float = 0, cut: bool = False) -> Tensor:
    """Packed to padded: (N, *D) -> (B, *padded, *D), `fill` where there is nothing.

    Args:
        cut: some rows may be longer than `padded`; the rest is left out and gets no gradient.
    """
    announce("padding", "to_padded")
    padded = tuple([0 if is_zero(n) else n for n in padded])  # else torch (2.11-2.13) solves rows * n == 0 for the rows
    index, valid = pad_index(s, padded)
    back, inside = pack_index(s, values.shape[0], padded, cut)
    return exchange(values, index, valid, as_number(fill, values.dtype), back, inside)


def as_number(fill: float, dtype: torch.dtype) -> float:
    """The fill of padding as a number that does not promote the dtype."""
    if dtype.is_floating_point or dtype.is_complex:
        return fill
    return bool(fill) if dtype == torch.bool else int(fill)


def pack_rows(padded: Tensor, s: Structure, total: int) -> Tensor:
    """Padded to packed: (B, *padded, *D) -> (N, *D). Padding is never read."""
    sizes = tuple(padded.shape[1 : 1 + s.ragged_ndim])
    index, valid = pad_index(s, sizes)
    flat = padded.flatten(0, s.ragged_ndim)
    return exchange(flat, pack_index(s, total, sizes, False)[0], None, 0.0, index, valid)


def shift_rows(data: Tensor, lengths: Tensor, side: str, op: str, back: bool = False) -> Tensor:
    """Rows `(B, L, ...)` with padding on a side, moved to the front; `back` moves rows from the front to their side."""
    if side not in ("left", "right"):
        raise ShapeError(message(op, "side='left' or side='right'", repr(side), hint="the side of the padding"))
    if side == "right":
        return data
    rows, longest = data.shape[:2]
    positions = untyped.arange(longest, device=data.device)
    shift, first = longest - lengths[:, None], untyped.arange(rows, device=data.device)[:, None] * longest
    size = larger(longest, 1)  # a remainder by 0 has no meaning, though there is nothing to take it of
    there, here = first + (positions + shift) % size, first + (positions - shift) % size
    index, inverse = (here, there) if back else (there, here)
    return exchange(data.flatten(0, 1), index, None, 0.0, inverse, None)
