"""Indices on several ragged dims of a NestedTensor: crops, mirror images, single lines, chosen lines.

    images (B, C, -1, -1)     x[:, :, 2:10, -8:]     -> (B, C, -1, -1), each row cropped
                              x[:, :, 0]             -> (B, C, -1), the first line of each
                              x[:, :, :, [0, -1]]    -> (B, C, -1, 2)

All entries act at once. For each position of the result the packed position it comes from is computed, so that a single
gather makes the crop.

    M positions along the dims that stay ragged, over all rows

Invariant: M is data, so that eager calls need the sizes on the host, or M itself where ends are data; a graph has an
unbacked size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.errors import ShapeError, message
from tdc.layout.segments import (
    coordinates,
    on_host_too,
    row_ids,
    sizes_of,
    sizes_on_host,
    strides,
    structure_of_sizes,
    total_of,
)
from tdc.layout.structure import Structure, remember
from tdc.ragged.index_forms import Span, has_tensors, kept, longest_span, positions_of, spans
from tdc.ragged.nested import NestedTensor, build_nested


def crop_rows(x: NestedTensor, parts: list[Any]) -> NestedTensor | Tensor:
    """Apply one entry to each ragged dim.

    A slice keeps the dim ragged, an int or one position of each row drops it, positions of every row make it static.

    Shapes:
        `(B, *S0, -1, …, -1, *S1)`; dense where no dim stays ragged.

    Raises:
        ShapeError: positions between dims that stay ragged.
        IndexingError: a row has no such position; at once on CPU, asynchronously on CUDA.
    """
    s, e = x.structure, x.structure.packed_dim
    along = [r for r, part in enumerate(parts) if isinstance(part, (slice, Span))]
    fixed = [r for r in range(s.ragged_ndim) if r not in along]
    if [r for r in fixed if along and along[0] < r < along[-1] and kept(parts[r])]:
        got, hint = "positions between them", "x.to_padded() first"
        raise ShapeError(message("index", "ragged dims side by side", got, hint=hint))
    t, rows, source = rows_of_spans(s, {r: parts[r] for r in along}, x.device)
    front = sum([kept(parts[r]) for r in fixed if along and r < along[0]])
    shape: list[Any] = [source.shape[0]]
    for r in fixed:
        positions = positions_of(parts[r], sizes_of(s)[:, r, None], f"x.sizes[:, {r}]") * strides(s)[r][:, None]
        source = source.unsqueeze(-1) + positions[rows].view(
            source.shape[0], *[1] * (source.ndim - 1), positions.shape[1]
        )
        shape += parts[r].shape if isinstance(parts[r], Tensor) else ()
    values = x._values.index_select(e, source.reshape(-1)).unflatten(e, shape)
    more = sum([kept(parts[r]) - 1 for r in fixed if s.ragged_dims[r] < s.batch_dim])
    if t is None:
        return values.movedim(e, s.batch_dim + more)
    return build_nested(t.moved(e + front, s.batch_dim + more), values.movedim(e, e + front))


def spans_of(s: Structure, parts: dict[int, Any]) -> tuple[Any, Any, Any]:
    """Of slices of some ragged dims: where they begin and how many positions they have, (B,) each, and their steps."""
    return spans_at(sizes_of(s), parts)


def spans_at(sizes: Tensor, parts: dict[int, Any]) -> tuple[Any, Any, Any]:
    """The same of examples of ragged sizes (B, R)."""
    each = sizes.unbind(1)
    return tuple(zip(*[spans(part, each[r]) for r, part in parts.items()], strict=True))  # type: ignore[return-value]  # three


def longest_spans(s: Structure, parts: dict[int, Any]) -> tuple[int, ...] | None:
    """The longest that slices of some ragged dims can be; None where that is not known."""
    if s.extent is None:
        return None
    found = [longest_span(part, s.extent.shape[r]) for r, part in parts.items()]
    known = [n for n in found if n is not None]
    return tuple(known) if len(known) == len(found) else None


def rows_of_spans(s: Structure, parts: dict[int, Any], device: Any) -> tuple[Structure | None, Tensor, Tensor]:
    """Slices of some ragged dims: the structure of the result, and for each of its positions the row and the packed
    position it comes from. Without a slice there is one position for each row, where the row begins.
    """
    if not parts:
        return None, torch.arange(s.batch_size, device=device), s.offsets[:-1]
    along, steps = list(parts), strides(s)
    first, lengths, step = spans_of(s, parts)
    t = structure_of_sizes(torch.stack(lengths, 1), longest_spans(s, parts), s.packed_dim, s.batch_dim)
    ends = any([has_tensors(part) for part in parts.values()])
    known = None if ends else on_host_too(s, lambda sizes: torch.stack(spans_at(sizes, parts)[1], 1))
    total = total_of(remember(sizes_on_host, t, known))
    rows, source = row_ids(t, total), s.offsets[row_ids(t, total)]
    for i, position in enumerate(coordinates(t, total)):
        r = along[i]
        source = source + (first[i][rows] + step[i] * position) * steps[r][rows]
    return t, rows, source
