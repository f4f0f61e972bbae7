"""Checks of ragged batches that a pytree puts together, whose leaves may have been changed one by one.

    tree_map(lambda t: t.double(), x)     offsets are leaves as values are: they would be float64
    tree_map(lambda t: t[1:], x)          values without their first element, offsets without their first entry

Offsets and lengths stay leaves, since graphs need them as inputs. Numbers are read where that takes no sync. A change
after which dtypes and numbers fit by chance is not found.

Invariant: any object may stand for a leaf (int, None, a spec), and for `vmap` data may have one dim more in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.core.dynamo import is_on_host, known
from tdc.core.errors import DtypeError, StructureError, describe, message


def expect_offsets(name: str, offsets: Any, data: Any, axis: int, beyond: int = 0) -> None:
    """Refuse offsets that do not fit the data that came with them, by a DtypeError or StructureError.

    Args:
        axis: the packed axis of the data, which is `beyond` longer than the last offset says.
    """
    if not isinstance(offsets, Tensor):
        return
    if offsets.dtype != torch.int64:
        raise DtypeError(changed(name, "int64 offsets", offsets, "values"))
    if offsets.ndim == 0:
        raise StructureError(changed(name, "offsets (B+1,)", offsets, "values"))
    if offsets.ndim == 1 and isinstance(data, Tensor) and is_on_host(offsets):
        last = int(offsets[-1]) if offsets.shape[0] else -1
        first = int(offsets[0]) if axis > 0 and last >= 0 else 0  # an index of dim 0 leaves such a packed axis as it is
        if first or last + beyond not in data.shape[axis:][:2]:
            raise StructureError(changed(name, "offsets from 0 to the size of the values", offsets, "values"))


def expect_sizes(name: str, sizes: Any, offsets: Any, ragged_ndim: int) -> None:
    """Refuse sizes of several ragged dims that do not fit the offsets, by a DtypeError or StructureError."""
    if not isinstance(sizes, Tensor) or not isinstance(offsets, Tensor):
        return
    if sizes.dtype != torch.int64:
        raise DtypeError(changed(name, "int64 sizes", sizes, "values"))
    rows = sizes.ndim == 2 and offsets.ndim == 1 and known(sizes.shape[0] != offsets.shape[0] - 1)
    if sizes.ndim < 2 or known(sizes.shape[-1] != ragged_ndim) or rows:
        raise StructureError(changed(name, f"sizes (B, {ragged_ndim}) for offsets (B+1,)", sizes, "values"))


def expect_lengths(name: str, lengths: Any, data: Any, batch_dim: int, ragged_dims: Sequence[int]) -> None:
    """Refuse lengths that do not fit the data that came with them, by a DtypeError or StructureError."""
    if not isinstance(lengths, Tensor):
        return
    if lengths.dtype != torch.int64:
        raise DtypeError(changed(name, "int64 lengths", lengths, "data"))
    if lengths.ndim < 2 or known(lengths.shape[-1] != len(ragged_dims)):
        raise StructureError(changed(name, f"lengths (B, {len(ragged_dims)})", lengths, "data"))
    if lengths.ndim == 2 and isinstance(data, Tensor) and is_on_host(lengths):
        rows, sizes = lengths.shape[0], data.shape
        form = rows, int(lengths.max()) if rows else 0, batch_dim, ragged_dims
        negative = rows and int(lengths.min()) < 0
        if negative or not (fits(sizes, *form) or fits(sizes[1:], *form)):
            raise StructureError(changed(name, f"lengths that fit {describe(data)}", lengths, "data"))


def fits(sizes: Sequence[int], rows: int, largest: int, batch_dim: int, ragged_dims: Sequence[int]) -> bool:
    """True if data of these sizes have so many rows, and are as long as the largest of them."""
    if len(sizes) <= max(batch_dim, ragged_dims[-1]) or sizes[batch_dim] != rows:
        return False
    return any([largest <= sizes[d] for d in ragged_dims])


def changed(name: str, expected: str, got: Tensor, data: str) -> str:
    """The text of an error."""
    hint = f"x.with_{data}(fn(x.{data})), or td.apply(fn); in a pytree offsets and lengths are leaves, too"
    return message(name, f"{expected} from a pytree", describe(got), hint=hint)
