"""Indices of ragged batches in few forms: rows are an int, a slice or a vector; other dims an int or a slice.

    x[rows, step, ...]      rows pick examples, every step acts on one dim of each

Invariants: an index is refused or means what it means for each row on its own; no vector of rows is read on the host,
except a mask, whose number of rows is data.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from tdc._errors import IndexingError, describe_index, message, show_sizes


def as_rows(index: Any, count: int, device: Any) -> Any:
    """An index of the batch in one of three forms: an int in [0, count), a slice, or a vector of rows.

    Args:
        index: int, slice, mask `(count,)` or vector of rows; as a list, an array or a tensor.

    Raises:
        IndexingError: it has another form, or is an int that is out of range.
    """
    if isinstance(index, slice):
        return index
    if isinstance(index, int) and not isinstance(index, bool):
        if not -count <= index < count:
            hint = f"the batch has {count} rows"
            raise IndexingError(message("index", f"a row in [{-count}, {count - 1}]", f"{index}", hint=hint))
        return index % count
    try:
        empty = isinstance(index, (list, tuple)) and len(index) == 0
        rows = torch.as_tensor(index, dtype=torch.int64 if empty else None, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise not_rows(index, count) from None
    if isinstance(index, bool) or rows.is_floating_point() or rows.is_complex():
        raise not_rows(index, count)
    if rows.dtype == torch.bool:
        if tuple(rows.shape) != (count,):
            raise not_rows(rows, count)
        return rows.nonzero().squeeze(1)
    if rows.ndim == 0:
        return as_rows(int(rows), count, device)
    if rows.ndim > 1:
        raise not_rows(rows, count)
    return rows.to(torch.int64)


def not_rows(index: Any, count: int) -> IndexingError:
    """The error for an index of the batch that has another form."""
    expected = f"an int, a slice, a mask of [{count}] or a vector of rows"
    hint = "rows of different lengths stay in one batch dim: index it with one dim"
    return IndexingError(message("index", expected, describe_index(index), hint=hint))


def full_index(index: tuple[Any, ...], shape: torch.Size) -> list[Any]:
    """One entry for each dim: the rows as they were given, behind them ints and slices.

    Raises:
        IndexingError: more entries than dims, an entry of another form, or an int out of range.
    """
    gaps = [i for i, part in enumerate(index) if part is Ellipsis]
    fill = len(shape) - (len(index) - len(gaps))
    if fill < 0 or len(gaps) > 1:
        got = f"{len(index) - len(gaps)} of them" if fill < 0 else f"{len(gaps)} times `...`"
        hint = f"the logical shape is {show_sizes(shape)}"
        raise IndexingError(message("index", f"at most {len(shape)} indices, `...` once", got, hint=hint))
    at = gaps[0] if gaps else len(index)
    parts = [*index[:at], *[slice(None)] * fill, *index[at + (len(gaps) > 0) :]]
    for d, part in enumerate(parts[1:], 1):
        size = shape[d]
        parts[d] = part = as_step(part, d)
        if not isinstance(part, slice) and size != -1 and not -size <= part < size:
            hint = f"the logical shape is {show_sizes(shape)}"
            raise IndexingError(message("index", f"an index in [{-size}, {size - 1}] at dim {d}", f"{part}", hint=hint))
    return parts


def as_step(part: Any, dim: int) -> Any:
    """An entry of an index behind the batch dim: an int or a slice.

    Raises:
        IndexingError: it is something else.
    """
    if isinstance(part, slice) or (isinstance(part, int) and not isinstance(part, bool)):
        return part
    if not isinstance(part, bool) and not (isinstance(part, Tensor) and (part.ndim or part.dtype == torch.bool)):
        try:
            return operator.index(part)
        except TypeError:
            pass
    got = f"{describe_index(part)} at dim {dim}"
    hint = "x.index_select(dim, rows) on a static dim; None, masks and lists have no meaning for rows that differ"
    raise IndexingError(message("index", "an int or a slice behind the batch dim", got, hint=hint))
