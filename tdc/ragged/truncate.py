"""Slices of every row of a ragged batch, packed or padded, with one end for all rows or one for each."""

from __future__ import annotations

from typing import Any

from tdc.core.arguments import expect
from tdc.ragged.crop import crop_rows
from tdc.ragged.index_forms import FULL, Span
from tdc.ragged.index_masked import slice_masked
from tdc.ragged.index_nested import cut_ragged
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor


def cut_rows(x: Any, dim: int, start: Any, stop: Any) -> Any:
    """`x[..., start:stop, ...]` along a ragged dim, with one end for all rows or a tensor with one for each."""
    if isinstance(x, MaskedBatch):
        return slice_masked(x, dim, Span(start, stop))
    if x.structure.ragged_ndim > 1:
        return crop_rows(x, [Span(start, stop) if d == dim else FULL for d in x.ragged_dims])
    return cut_ragged(x, Span(start, stop))


def truncate(x: Any, lengths: Any) -> Any:
    """The first elements of each row: as many as `lengths` says, or all of a shorter row; lines of several ragged dims.

    The same as `x[:, :lengths]`, and in a graph the only spelling: Dynamo reads the ends of a slice on the host.

    Shapes:
        x `(B, *S0, -1, *S1)`, lengths `(B,)` or an int -> `(B, *S0, -1, *S1)`.

    Raises:
        DtypeError: no ragged batch.
        ShapeError: not one length for each row.

    Compile:
        One graph for all lengths.

    Example:
        >>> import torch
        >>> from tdc.ragged.pack import pack
        >>> truncate(pack([torch.arange(3), torch.arange(2)]), torch.tensor([1, 5])).tolist()
        [[0], [0, 1]]
    """
    expect("truncate", x, NestedTensor, MaskedBatch)
    return cut_rows(x, x.ragged_dims[0], None, lengths)
