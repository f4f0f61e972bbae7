"""Products of a matrix of each example by another on CPU.

    a    matrices (m, k), one behind another, row by row; b (k, n) and the result (m, n) likewise

Examples that share two sizes run through torch's own loop over groups where it takes them, others one after another
through its product of two matrices.

Invariants: nothing but an example's own elements enters its product; which way runs depends on sizes only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNED = 16  # bytes, of which `F.grouped_mm` wants multiples from row to row (2.11-2.13)
GROUPED = (torch.float32, torch.bfloat16, torch.float16)  # its dtypes
Sizes = list[int]


def multiply(
    a: Tensor, b: Tensor, m: Tensor, k: Tensor, n: Tensor, a_turned: bool, b_turned: bool, total: int
) -> Tensor:
    """The products, (total,).

    Args:
        m, k, n: the sizes of each example, (B,).
        a_turned, b_turned: its matrices are stored as their transposes.
    """
    a, b = a.contiguous(), b.contiguous()  # a gradient may be one element, expanded
    rows, inner, columns = sizes = m.tolist(), k.tolist(), n.tolist()
    if a.numel() and b.numel() and a.dtype in GROUPED and len({*columns}) == 1:
        if len({*inner}) == 1 and not a_turned and grouped(a, inner[0], columns[0]):
            weights = b.view(len(rows), columns[0], -1).mT if b_turned else b.view(len(rows), inner[0], -1)
            return F.grouped_mm(a.view(-1, inner[0]), weights, offs=ends(m)).flatten()
        if len({*rows}) == 1 and a_turned and not b_turned and grouped(a, rows[0], columns[0]):
            return F.grouped_mm(a.view(-1, rows[0]).t(), b.view(-1, columns[0]), offs=ends(k)).flatten()
    return one_by_one(a, b, sizes, a_turned, b_turned, total)


def grouped(a: Tensor, *sizes: int) -> bool:
    """Whether rows of these sizes lie as `F.grouped_mm` wants them."""
    return all([n * a.itemsize % ALIGNED == 0 for n in sizes])


def ends(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0).to(torch.int32)


def one_by_one(
    a: Tensor, b: Tensor, sizes: tuple[Sizes, Sizes, Sizes], a_turned: bool, b_turned: bool, total: int
) -> Tensor:
    rows, inner, columns = sizes
    out = a.new_empty(total)
    left = matrices(a, inner, rows, True) if a_turned else matrices(a, rows, inner)
    right = matrices(b, columns, inner, True) if b_turned else matrices(b, inner, columns)
    for x, y, into in zip(left, right, matrices(out, rows, columns), strict=True):
        torch.mm(x, y, out=into)
    return out


def matrices(flat: Tensor, rows: Sizes, columns: Sizes, turned: bool = False) -> Sequence[Tensor]:
    """The matrix of each example, or its transpose, as a view."""
    if len({*columns}) == 1 and columns[0]:
        whole = flat.view(-1, columns[0])
        return whole.t().split(rows, 1) if turned else whole.split(rows)
    parts = flat.split([r * c for r, c in zip(rows, columns, strict=True)])
    found = [p.view(r, c) for p, r, c in zip(parts, rows, columns, strict=True)]
    return [p.t() for p in found] if turned else found
