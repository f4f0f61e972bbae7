"""Packed planes as rows of positions with channels innermost, and back: for kernels that read real positions only.

    values (C, *before, N, *after)    x (N', C), sizes (B, n), one example behind another, each plane row by row

Dims of a plane that are not ragged follow those that are, so `order` says which dim is which. The sizes of a result are
those of `Span`; its packed total follows from that of x or is read from the sizes.

Invariant: nothing is padded; a result with the sizes of its operand shares its structure object.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tdc.core.dynamo import is_zero
from tdc.layout.structure import Structure
from tdc.ops.spatial import Sizes, Span, sizes_after, structure_and_total
from tdc.ragged.nested import NestedTensor, build_nested

T = TypeVar("T")


class PlaneRows(NamedTuple):
    """A batch of planes as rows.

    Attributes:
        x: its positions, (N', C).
        sizes: of each plane, (B, n), in `order`.
        order: the dims of a plane, ragged ones first.
        total: positions of the result, M'.
        done: rows of the result, `(M', D)`, as a batch.
    """

    x: Tensor
    sizes: Tensor
    order: tuple[int, ...]
    total: int
    done: Callable[[Tensor], NestedTensor]

    def ordered(self, given: Sequence[T]) -> list[T]:
        """One thing for each dim of a plane, in `order`."""
        return [given[d] for d in self.order]


def plane_rows(m: Sizes, spans: Sequence[Span]) -> PlaneRows:
    """A packed batch that is `measured`, and where its result goes."""
    x: Any = m.source
    s: Structure = x.structure
    fixed = tuple([d for d in range(len(m.own)) if d not in m.ragged])
    order = (*m.ragged, *fixed)
    sizes = x.sizes if not fixed else torch.stack([m.own[d] for d in order], 1)
    structure, packed = result_structure(m, spans)
    sides = [spans[d].at(m.widest[d]) for d in fixed]
    before, after = [[i for i, d in enumerate(fixed, 1) if (d < m.ragged[0]) == first] for first in (True, False)]

    def done(out: Tensor) -> NestedTensor:
        parts = out.view(packed, *sides, out.shape[1])
        values = parts.permute(-1, *before, 0, *after)
        return x.with_values(values) if structure is s else build_nested(structure, values)

    moved = x.values.movedim(s.packed_dim, 0).movedim(1, -1)
    return PlaneRows(moved.flatten(0, -2), sizes, order, packed * math.prod(sides), done)


def result_structure(m: Sizes, spans: Sequence[Span]) -> tuple[Structure, int]:
    """The structure of a result of these sizes, and its packed positions."""
    x: Any = m.source
    s: Structure = x.structure
    used = [spans[d] for d in m.ragged]
    if all([span.same for span in used]):
        return s, x.values.shape[s.packed_dim]
    none = is_zero(s.batch_size)  # whose planes may be smaller than a kernel
    widest = tuple([0 if none else span.at(m.widest[d]) for d, span in zip(m.ragged, used, strict=True)])
    return structure_and_total(x, tuple(range(len(used))), used, widest, s.packed_dim)


def plane_sizes(m: Sizes, spans: Sequence[Span], order: Sequence[int]) -> Tensor:
    """Sizes of each result's plane, (B, n), in `order`."""
    return sizes_after([m.own[d] for d in order], [spans[d] for d in order])
