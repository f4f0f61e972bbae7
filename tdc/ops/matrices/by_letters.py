"""Which sums of products are those of a matrix of each example by another, and how their operands lie.

    "bld,bde->ble"    "bld,ble->bde"    "bld,bmd->blm"    "blm,bmd->bld"

Invariant: operands are stored row by row, one example behind another, or their transposes are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from tdc.core.dtypes import as_autocast
from tdc.core.dynamo import known
from tdc.ops.letters import Term, ragged_of
from tdc.ops.matrices.operator import multiply
from tdc.ragged.nested import build_nested
from tdc.ragged.storage import Ragged, is_ragged
from tdc.ragged.structure import Structure

Result = Callable[[], tuple[Structure, int]]  # the structure of a result, and its packed size


def matrix_letters(terms: list[Term], out: str, batch: str, kept: str) -> str | None:
    """The letters of rows, sum and columns of a product of a matrix of each example by another; None for no such one.

    Rows are the first of the letters that stay ragged: so the result lies as a packed batch does.
    """
    dims, inner = [t.dims.replace(batch, "") for t in terms], out.replace(batch, "")
    if [len(d) for d in (*dims, inner)] != [2, 2, 2] or any([batch not in t.dims for t in terms]):
        return None
    shared = set(dims[0]).intersection(dims[1])
    if len(shared) != 1 or set(inner) != set(dims[0]) ^ set(dims[1]):
        return None
    (c,) = shared
    sizes = [t.x.shape[t.dims.index(c)] for t in terms]
    first = (kept or inner)[0]
    return first + c + inner.replace(first, "") if known(sizes[0] == sizes[1]) else None  # 1 broadcasts elsewhere


def by_operator(
    terms: list[Term], letters: str, out: str, batch: str, kept: str, sizes: dict[str, Tensor], result: Result
) -> Ragged | Tensor:
    """A matrix of each example times another, without padding."""
    first, last = terms if letters[0] in terms[0].dims else terms[::-1]
    static = {c: n for t in terms for c, n in zip(t.dims, t.x.shape, strict=True) if c not in sizes}
    (a, a_dims), (b, b_dims) = stored(first, batch), stored(last, batch)
    some = next(iter(sizes.values()))
    counts = [sizes[c] if c in sizes else some.new_full(some.shape, static[c]) for c in letters]
    s, number = result() if kept else (None, some.shape[0])
    shape = [number, *[static[c] for c in (letters[0], letters[2]) if c not in kept]]
    a, b = as_autocast(a, b)
    y = multiply(a, b, *counts, a_dims[0] == letters[1], b_dims[0] == letters[2], math.prod(shape)).view(shape)
    if s is None:
        return y.movedim(0, out.index(batch))
    at = out.replace(batch, "").index(kept[0])
    return build_nested(s.moved(at, out.index(batch)), y.movedim(0, at))


def stored(t: Term, batch: str) -> tuple[Tensor, str]:
    """The matrices of an operand, one behind another, with the letters of their rows and columns."""
    if not is_ragged(t.x):
        return t.x.movedim(t.dims.index(batch), 0).flatten(), t.dims.replace(batch, "")
    letters = ragged_of(t)
    rest = "".join([c for c in t.dims if c != batch and c not in letters])
    return t.x._values.movedim(t.x._structure.packed_dim, 0).flatten(), letters + rest
