"""Ragged batches as rectangles and back, inside a rule: for operations that have no form on packed values.

Planes have more ways, see `planes`; lines along some of several ragged dims are in `partial_ragged`.

Invariants: both ways are differentiable and gather, forward and backward; no size is read from the data where the
batch carries its longest length.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tdc.layout.padding import pack_rows, pad_rows
from tdc.layout.segments import longest
from tdc.ragged.convert import to_packed
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import build_nested
from tdc.ragged.storage import Ragged


def rectangle(x: Any, fill: float, padded: tuple[int, ...] | None = None) -> Tensor:
    """The whole batch as a dense tensor of its logical dims, with `fill` in padding.

    `padded` are sizes of the ragged dims of a NestedTensor, by default the longest ones.
    """
    if isinstance(x, MaskedBatch):
        return x.filled(fill)
    s = x.structure
    data = pad_rows(x.values.movedim(s.packed_dim, 0), s, longest(s) if padded is None else padded, fill)
    ragged = tuple(range(1, 1 + s.ragged_ndim))
    at = tuple(range(s.packed_dim + 1, s.packed_dim + 1 + s.ragged_ndim))
    return data.movedim(ragged, at).movedim(0, s.batch_dim)


def repacked(data: Tensor, x: Any) -> Ragged:
    """The real part of a rectangle of the shape of `rectangle(x)`, with the structure of x."""
    if isinstance(x, MaskedBatch):
        return cut_padding(x, data)
    s: Any = x.structure
    ragged = tuple(range(1, 1 + s.ragged_ndim))
    at = tuple(range(s.packed_dim + 1, s.packed_dim + 1 + s.ragged_ndim))
    rows = data.movedim(s.batch_dim, 0).movedim(at, ragged)
    return x.with_values(pack_rows(rows, s, x.values.shape[s.packed_dim]).movedim(0, s.packed_dim))


def with_sizes(data: Tensor, x: Ragged, sizes: Tensor, dims: tuple[int, ...], total: int | None = None) -> Ragged:
    """The part of a rectangle with other ragged sizes `(B, R)`, along `dims`; the batch dim is that of x.

    A packed total that is not given is read from the sizes: one host read in eager, an unbacked size in a graph.
    """
    out = build_masked(data, sizes, dims, x._batch_dim, new_lengths=True)
    return cut_padding(out, data) if isinstance(x, MaskedBatch) else to_packed(out, total=total)


def as_batch(data: Tensor, x: Ragged) -> Ragged:
    """A result for every position of a batch: packed values as they are, a rectangle with 0 in padding."""
    return cut_padding(x, data) if isinstance(x, MaskedBatch) else build_nested(x._structure, data)


def cut_padding(x: MaskedBatch, data: Tensor) -> MaskedBatch:
    """A result for every position of a rectangle as a batch: 0 in padding, so that no gradient comes from there.

    It may have more or fewer static dims behind the batch and the ragged dims.
    """
    mask = x.mask
    if data.ndim != x.ndim:
        mask = mask.view(*mask.shape[: data.ndim], *[1] * (data.ndim - mask.ndim))
    return x.with_data(data.masked_fill(~mask, 0))
