"""Products and softmax of all pairs of a query and a key of each example on CPU, one example after another.

    q (N, H, D), k (M, H, D)      x (H, P): the scores of an example's pairs are a matrix (n, m) for each head

Invariants: nothing but an example's own elements enters its results; a query without a key that may count gives 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tdc.core.dtypes import sum_dtype

LARGE = 4096  # pairs of an example, from which its heads are worth a call each


@torch.no_grad()
def scores(q: Tensor, k: Tensor, q_offsets: Tensor, k_offsets: Tensor | None, pairs: int) -> Tensor:
    """q (N, H, D), k (M, H, D) -> (H, P)."""
    n, m = lengths(q_offsets, k_offsets)
    out = q.new_empty(q.shape[1], pairs)
    parts = zip(q.transpose(0, 1).split(n, 1), k.permute(1, 2, 0).split(m, 2), matrices(out, n, m), strict=True)
    for x, y, into in parts:
        torch.bmm(x, y, out=into)
    return out


@torch.no_grad()
def sums(
    w: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor | None, turned: bool, total: int
) -> Tensor:  # fmt: skip
    """Weights (H, P) times values (M, H, E) -> (N, H, E); turned, times (N, H, E) -> (M, H, E)."""
    n, m = lengths(q_offsets, k_offsets)
    out = v.new_empty(total, *v.shape[1:])
    left = [x.transpose(1, 2) for x in matrices(w, n, m)] if turned else matrices(w, n, m)
    of_v, of_out = (n, m) if turned else (m, n)
    parts = zip(left, v.transpose(0, 1).split(of_v, 1), out.transpose(0, 1).split(of_out, 1), strict=True)
    for x, y, into in parts:
        torch.bmm(x, y, out=into)
    return out


@torch.no_grad()
def softmax(x: Tensor, q_offsets: Tensor, k_offsets: Tensor | None) -> Tensor:
    """Over the keys of each query, (H, P); 0 where all are -inf."""
    n, m = lengths(q_offsets, k_offsets)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    given, found = matrices(x, n, m), matrices(out, n, m)
    for s, into in zip(given, found, strict=True):
        if s.shape[1] * s.shape[2] < LARGE:
            into.copy_(s.softmax(-1))
            continue
        for head, part in zip(s, into, strict=True):  # both lie one behind the other: no copy
            torch.softmax(head, -1, out=part)
    first = [y[:, :, 0] for y in found if y.numel()]
    if first and torch.cat(first, 1).isnan().any():  # NaN is all that softmax makes of -inf
        for s, into in zip(given, found, strict=True):
            into.masked_fill_((s == -math.inf).all(-1, keepdim=True), 0)
    return out


@torch.no_grad()
def softmax_gradient(grad: Tensor, y: Tensor, q_offsets: Tensor, k_offsets: Tensor | None) -> Tensor:
    """What the softmax y makes of the gradient of its result, (H, P): y times what exceeds the mean by y."""
    n, m = lengths(q_offsets, k_offsets)
    out, wide = torch.empty_like(y, memory_format=torch.contiguous_format), sum_dtype(y.dtype)
    for g, w, into in zip(*[matrices(t, n, m) for t in (grad, y, out)], strict=True):
        product = torch.mul(g, w, out=into) if w.dtype == wide else g.to(wide) * w
        product.addcmul_(w.to(wide), product.sum(-1, keepdim=True), value=-1)
        if product is not into:
            into.copy_(product)
    return out


def positions(q_offsets: Tensor, k_offsets: Tensor | None, pairs: int) -> Tensor:
    """The row of each pair, and the positions of its query and key in the row: (3, P), int32, since a graph reads them
    for each head."""
    n, m = lengths(q_offsets, k_offsets)
    out = q_offsets.new_empty(3, pairs, dtype=torch.int32)
    steps = torch.arange(max([0, *n, *m]), dtype=out.dtype)
    for row, (b, i, j) in enumerate(matrices(out, n, m)):
        b.fill_(row)
        i.copy_(steps[: i.shape[0], None])
        j.copy_(steps[: i.shape[1]])
    return out


def lengths(q_offsets: Tensor, k_offsets: Tensor | None) -> tuple[list[int], list[int]]:
    """How many queries and keys each example has."""
    n = [b - a for a, b in pairwise(q_offsets.tolist())]
    return n, n if k_offsets is None else [b - a for a, b in pairwise(k_offsets.tolist())]


def matrices(x: Tensor, n: list[int], m: list[int]) -> Sequence[Tensor]:
    """The matrices (H, n, m) of the examples in (H, P), as views."""
    sizes = [*zip(n, m, strict=True)]
    return [p.view(x.shape[0], *size) for p, size in zip(x.split([a * b for a, b in sizes], 1), sizes, strict=True)]
