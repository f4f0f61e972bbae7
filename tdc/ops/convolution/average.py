"""The operators of average pooling of packed examples.

    x (N, C), sizes (B, n)  ->  out (M, C): means

    avg_pool_rows        of windows
    adaptive_avg_rows    of a number of bins for each dim

Means are linear in x: the derivative of such an operator is a second operator, which gives (N, C) of (M, C).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tdc.core.linear_operators import linear, transposes
from tdc.core.operators import operator, refuse_mapped
from tdc.ops.convolution import cpu_pool


def avg_pool(x: Tensor, sizes: Tensor, total: int, *how: Any) -> Tensor:
    """Means of windows, with all derivatives."""
    return linear(rows, x, sizes, total, *how)


def adaptive_avg(x: Tensor, sizes: Tensor, total: int, *how: Any) -> Tensor:
    """Means of adaptive bins, with all derivatives."""
    return linear(adaptive_rows, x, sizes, total, *how)


def fake_rows(x: Tensor, sizes: Tensor, total: int, *how: Any) -> Tensor:
    return x.new_empty(total, x.shape[1])


def over_members(op: Any, info: Any, in_dims: Any, x: Tensor, *rest: Any) -> tuple[Tensor, int]:
    """Under vmap members become channels; they share sizes."""
    refuse_mapped("sizes", in_dims[1:2])
    return op(x.movedim(in_dims[0], 1).flatten(1), *rest).unflatten(1, (info.batch_size, -1)), 1


WINDOWS = "int[] kernel, int[] stride, int[] padding, bool ceil_mode, bool count_include_pad, int? divisor"
rows, rows_backward, adaptive_rows, adaptive_rows_backward = [
    operator(f"{name}(Tensor x, Tensor sizes, SymInt total, {how}) -> Tensor", fake_rows, over_members, CPU=kernel)
    for name, how, kernel in (
        ("avg_pool_rows", WINDOWS, cpu_pool.avg_pool),
        ("avg_pool_rows_backward", WINDOWS, cpu_pool.avg_pool_backward),
        ("adaptive_avg_rows", "int[] counts", cpu_pool.adaptive_avg),
        ("adaptive_avg_rows_backward", "int[] counts", cpu_pool.adaptive_avg_backward),
    )
]
transposes(rows, rows_backward)
transposes(adaptive_rows, adaptive_rows_backward)
