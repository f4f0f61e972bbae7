"""Orders, extremes and scans along dim 0 of packed values on CPU, each example for itself.

    x (N, *D), offsets (B+1,), begins (N,)

Long examples run one after another through torch's own kernels. A call costs microseconds, however short the example,
so that short ones run all at once: by `all_rows`, or as a rectangle, which is small then. Where a position has few
elements of up to 32 bits, `numbers` orders those of all examples by one sort.

Invariants: results are those of torch for each example by itself, NaN and infinities included, but for the order of
equal elements where nobody asks for one; which way runs depends on sizes only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tdc.core.errors import ShapeError, message
from tdc.ops.segments import all_rows, numbers
from tdc.ops.subrows import worth_calls
from tdc.ragged.innermost import examples
from tdc.ragged.segments import column
from tdc.ragged.structure import Structure

SORTED, COMPARED = 32, 4  # what sorting an element twice and finding an extreme cost, in elements to copy
A_CALL, A_RECTANGLE, AT_ONCE, TWICE = 200, 2500, 750, 3.2  # what they cost, in elements to sort once

FEW = 8  # elements of a position up to which one sort of all examples is fastest


def order(x: Tensor, offsets: Tensor, begins: Tensor, descending: bool, stable: bool) -> Tensor:
    """Where in dim 0 the sorted elements of each example are, (N, *D); NaN is largest. Equal ones stay in order where
    `stable`, which takes up to three times as long."""
    if not x.numel():
        return torch.zeros_like(x, dtype=torch.int64)
    found = numbers.order(x, offsets, begins, descending) if x.numel() <= FEW * x.shape[0] else None
    return found if found is not None else order_by_calls(x, offsets, begins, descending, stable)


def order_by_calls(x: Tensor, offsets: Tensor, begins: Tensor, descending: bool, stable: bool) -> Tensor:
    """`order` by what takes least: a sort of each example, of a rectangle, or two of all elements."""
    lengths, each = offsets.diff(), x[0].numel()
    rows, longest = lengths.shape[0], int(lengths.max())
    alone, wide = rows * A_CALL + x.numel(), A_RECTANGLE + rows * longest * each
    if min(alone, wide) > AT_ONCE + TWICE * x.numel():
        return all_rows.order(x, Structure(offsets), descending)
    if alone < wide:
        parts = zip(examples(x, offsets), offsets.tolist(), strict=False)
        return torch.cat([row.argsort(dim=0, descending=descending, stable=stable).add_(begin) for row, begin in parts])
    last = last_of(x.dtype, descending)
    keep = stable or bool(((x != x) if last != last else (x == last)).any())  # else the filling may come before them
    found = in_rectangle(x, offsets, longest, last, lambda t: t.argsort(dim=1, descending=descending, stable=keep))
    return found + column(begins, x)


def last_of(dtype: torch.dtype, descending: bool) -> float:
    """What no element is sorted behind, but for its equals that come later."""
    if dtype == torch.bool:
        return not descending
    if dtype.is_floating_point:
        return -math.inf if descending else math.nan
    return torch.iinfo(dtype).min if descending else torch.iinfo(dtype).max


def extreme(x: Tensor, offsets: Tensor, largest: bool) -> Tensor:
    """The first position of the largest or smallest element within each example, (B, *D); -1 of none. NaN is either."""
    rows = offsets.shape[0] - 1
    if not worth_calls(rows, COMPARED * x.numel()):
        return all_rows.extreme(x, Structure(offsets), largest)
    out = torch.full((rows, *x.shape[1:]), -1, device=x.device)
    for b, row in enumerate(examples(x, offsets)):
        if row.shape[0]:
            out[b] = (row.max(0) if largest else row.min(0)).indices
    return out


def top(x: Tensor, offsets: Tensor, k: int, largest: bool) -> Tensor:
    """Positions of the first `k` elements in order within each example, (B, k, *D); of equal ones any.

    Raises:
        ShapeError: an example has fewer.
    """
    rows = offsets.shape[0] - 1
    if rows and int(offsets.diff().min()) < k:
        hint = "x[x.lengths >= k], or x.to_padded().filled(-inf).topk(k)"
        raise ShapeError(message("topk", f"at least {k} elements in each row", "a shorter row", hint=hint))
    if worth_calls(rows, SORTED * x.numel()):
        return torch.stack([row.topk(k, 0, largest).indices for row in examples(x, offsets)])
    return all_rows.top(
        order(x, offsets, begins_of(offsets), largest, False), offsets[:-1].view(-1, 1, *[1] * (x.ndim - 1)), k
    )


def cumsum(x: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Sums of all elements of an example up to each, (N, *D)."""
    return scan(x, offsets, torch.cumsum)


def cumsum_from_each(x: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Sums of all elements of an example from each on, (N, *D)."""
    return scan(x, offsets, lambda t, dim: t.flip(dim).cumsum(dim).flip(dim))


def cumprod(x: Tensor, offsets: Tensor) -> Tensor:
    """Products of all elements of an example up to each, (N, *D)."""
    return scan(x, offsets, torch.cumprod)


def logcumsumexp(x: Tensor, offsets: Tensor) -> Tensor:
    """Logarithms of sums of exponentials up to each, (N, *D)."""
    return scan(x, offsets, torch.logcumsumexp)


def cumextreme(x: Tensor, offsets: Tensor, largest: bool) -> Tensor:
    """Where in dim 0 the largest or smallest element of an example up to each is, (N, *D)."""
    run = torch.cummax if largest else torch.cummin
    found = scan(x, offsets, lambda t, dim: run(t, dim).indices)
    return found + column(begins_of(offsets), x)


def scan(x: Tensor, offsets: Tensor, run: Callable[[Tensor, int], Tensor]) -> Tensor:
    """`run(x, dim)`, which never looks beyond the end of an example, nor at what was put in front of it; it lies in
    memory as x does."""
    if not x.numel():
        return torch.empty_like(x, dtype=run(x, 0).dtype)
    lengths = offsets.diff()
    rows, longest = lengths.shape[0], int(lengths.max())
    out = torch.empty_like(x, dtype=run(x[:1], 0).dtype)
    if worth_calls(rows, rows * longest * x[0].numel()):
        last = x.ndim - 1 if x.stride(0) == 1 else 0  # where torch's kernel reads it fastest
        for row, into in zip(examples(x, offsets), examples(out, offsets), strict=True):
            into.copy_(run(row.movedim(0, last), last).movedim(last, 0))
        return out
    return out.copy_(in_rectangle(x, offsets, longest, 0, lambda t: run(t, 1)))


def in_rectangle(x: Tensor, offsets: Tensor, longest: int, fill: float, run: Callable[[Tensor], Tensor]) -> Tensor:
    """`run` of all examples (B, longest, *D), `fill` behind each."""
    lengths, rows = offsets.diff(), offsets.shape[0] - 1
    index = torch.arange(x.shape[0], device=x.device)
    index += (torch.arange(rows, device=x.device) * longest - offsets[:-1]).repeat_interleave(lengths)
    wide = x.new_full((rows * longest, *x.shape[1:]), fill).index_copy_(0, index, x)
    return run(wide.unflatten(0, (rows, longest))).flatten(0, 1).index_select(0, index)


def begins_of(offsets: Tensor) -> Tensor:
    """Where the example of each element of dim 0 begins, (N,)."""
    return offsets[:-1].repeat_interleave(offsets.diff())
