"""Checks of what a ragged batch holds: offsets, shapes and lengths are read on the host."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TypeVar

from tdc.core.errors import DtypeError, StructureError, describe, message
from tdc.layout.segments import longest, on_host, sizes_of
from tdc.layout.structure import Structure
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import Ragged
from tdc.ragged.two_level import TwoLevelTensor

B = TypeVar("B", NestedTensor, MaskedBatch, TwoLevelTensor, Ragged)


def validate(x: B) -> B:
    """Check the content of offsets, shapes and max_length, or the lengths of a MaskedBatch, and return `x`.

    Reads them on the host.

    Raises:
        DtypeError: no ragged batch.
        StructureError: every violated invariant is named.

    Example:
        >>> import torch
        >>> from tdc.ragged.pack import pack
        >>> validate(pack([torch.ones(2), torch.ones(3)])).shape
        torch.Size([2, -1])
    """
    if not isinstance(x, (NestedTensor, TwoLevelTensor, MaskedBatch)):
        hint = "tdc.interop.check(td, spec) for a TensorDict, tdc.pack(tensors) of a list"
        raise DtypeError(message("validate", "a NestedTensor or a MaskedBatch", describe(x), hint=hint))
    wrong = faults(x)
    if wrong:
        got = f"{len(wrong)} broken rule" + "s" * (len(wrong) > 1)
        hint = "build it with tdc.pack(rows), or from offsets = tdc.offsets_of(lengths)"
        if isinstance(x, TwoLevelTensor):
            hint = "build it with tdc.pack(rows) of NestedTensors, or from offsets = tdc.offsets_of(lengths)"
        elif isinstance(x, MaskedBatch):
            hint = "lengths count the real positions of each row: tdc.from_padded(data, mask=mask)"
        raise StructureError(message("validate", "a valid ragged structure", got, wrong, hint))
    return x


def faults(x: NestedTensor | MaskedBatch | TwoLevelTensor) -> list[str]:
    """Faults of a batch, as ready lines; reads its structure on the host."""
    if isinstance(x, MaskedBatch):
        return lengths_faults(x)
    if isinstance(x, TwoLevelTensor):
        outer, inner = x.structure, x.values.structure
        found = [f"outer {line}" for line in structure_faults(outer, inner.batch_size)]
        return found + [f"inner {line}" for line in structure_faults(inner, x.values.values.shape[inner.packed_dim])]
    return structure_faults(x.structure, x.values.shape[x.structure.packed_dim])


def structure_faults(s: Structure, total: int) -> list[str]:
    """Faults of a structure, as ready lines; reads the data on the host."""
    wrong: list[str] = []
    offsets: list[int] = on_host(s.offsets)
    if offsets[0] != 0:
        wrong.append("offsets: do not begin with 0")
    down = [i for i, (a, b) in enumerate(pairwise(offsets)) if b < a]
    if down:
        wrong.append(f"offsets: decrease after row {down[0]}" + (f" and {len(down) - 1} more" if len(down) > 1 else ""))
    if offsets[-1] != total:
        wrong.append(f"offsets: do not end at N, the {total} packed elements of values")
    if s.shapes is not None and not wrong:
        counts = [math.prod(row) for row in on_host(s.shapes)]
        if counts != [b - a for a, b in pairwise(offsets)]:
            wrong.append("shapes: the product of a row's sizes differs from its span in offsets")
    if s.extent is not None and not wrong and s.batch_size:
        real: list[int] = on_host(sizes_of(s).amax(0))
        if any(n > bound for n, bound in zip(real, longest(s), strict=True)):
            wrong.append("max_length: smaller than the longest row")
    return wrong


def lengths_faults(x: MaskedBatch) -> list[str]:
    """Faults of lengths, as ready lines; reads them on the host."""
    wrong: list[str] = []
    for r, sizes in zip(x.ragged_dims, on_host(x.lengths.t()), strict=True):
        bad = [i for i, n in enumerate(sizes) if not 0 <= n <= x.data.shape[r]]
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            wrong.append(f"lengths: outside [0, {x.data.shape[r]}], the size of dim {r}, in row {bad[0]}{more}")
    return wrong
