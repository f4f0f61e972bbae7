"""The operators on segments: what torch's dispatcher, autograd, vmap and graphs know of them.

    x (N, *D), offsets (B+1,), begins (N,): where the example of each element of dim 0 begins

    order_rows         (N, *D)       where in dim 0 the sorted elements of each example are
    extreme_rows       (B, *D)       the first position of the largest or smallest, -1 of an empty example
    top_rows           (B, k, *D)    the positions of the first k in order
    cumextreme_rows    (N, *D)       where in dim 0 the largest or smallest one up to each is
    cumsum_rows        (N, *D)       sums up to each, and from each on: cumsum_rows_backward
    cumprod_rows       (N, *D)       products up to each, and logcumsumexp_rows

Each is one node of a graph that is the same for all lengths. Positions have no derivative: who gathers by them has it.
Sums up to each are linear in x, and their derivative is the sum from each on. Products and logarithms are for who does
not differentiate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.core.linear_operators import linear, transposes
from tdc.core.operators import operator, refuse_mapped, unserved
from tdc.ops.segments import cpu


def cumulative_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """`cumsum_rows` with all derivatives."""
    return linear(cumsum_rows, x, offsets, x.shape[0])


def serves(x: Tensor) -> bool:
    """Whether an operator is called on values: on CPU."""
    return x.device.type == "cpu" and not unserved()


def fake_positions(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.int64)


def fake_extreme(x: Tensor, offsets: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((offsets.shape[0] - 1, *x.shape[1:]), dtype=torch.int64)


def fake_top(x: Tensor, offsets: Tensor, k: int, *rest: Any) -> Tensor:
    return x.new_empty((offsets.shape[0] - 1, k, *x.shape[1:]), dtype=torch.int64)


def fake_sums(x: Tensor, *rest: Any) -> Tensor:
    inexact = x.is_floating_point() or x.is_complex()
    return torch.empty_like(x, dtype=x.dtype if inexact else torch.int64)


def over_members(dim: int, op: Any, info: Any, in_dims: Any, x: Tensor, offsets: Tensor, *rest: Any) -> Any:
    """Under vmap members become a static dim behind the packed one; they share offsets."""
    refuse_mapped("offsets", in_dims[1:])
    return op(x.movedim(in_dims[0], 1), offsets, *rest), dim


def contiguous(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kernel of positions, whose result lies as its fake says, in whatever order x does."""
    return lambda *args: kernel(*args).contiguous()


order_rows, extreme_rows, top_rows, cumextreme_rows = [
    operator(f"{name}(Tensor x, Tensor offsets, {how}) -> Tensor", fake, partial(over_members, dim), CPU=kernel)
    for name, how, fake, dim, kernel in (
        ("order_rows", "Tensor begins, bool descending, bool stable", fake_positions, 1, contiguous(cpu.order)),
        ("extreme_rows", "bool largest", fake_extreme, 1, contiguous(cpu.extreme)),
        ("top_rows", "int k, bool largest", fake_top, 2, contiguous(cpu.top)),
        ("cumextreme_rows", "bool largest", fake_positions, 1, contiguous(cpu.cumextreme)),
    )
]
cumsum_rows, cumsum_rows_backward, cumprod_rows, logcumsumexp_rows = [
    operator(f"{name}(Tensor x, Tensor offsets{how}) -> Tensor", fake_sums, partial(over_members, 1), CPU=kernel)
    for name, how, kernel in (
        ("cumsum_rows", ", SymInt total", cpu.cumsum),
        ("cumsum_rows_backward", ", SymInt total", cpu.cumsum_from_each),
        ("cumprod_rows", "", cpu.cumprod),
        ("logcumsumexp_rows", "", cpu.logcumsumexp),
    )
]
transposes(cumsum_rows, cumsum_rows_backward)
