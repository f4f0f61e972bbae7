"""Spans of the packed axis: an example of a result each, as slices, crops and joins take them."""

from __future__ import annotations

import torch
from torch import Tensor

from tdc.core.dynamo import has_gradients_in_graphs, is_zero, trace_as
from tdc.layout.segments import offsets_of


def take_spans(starts: Tensor, lengths: Tensor, step: int = 1, total: int | None = None) -> tuple[Tensor, Tensor]:
    """Offsets and gather index of new rows, each a span of the packed axis: (K,), (K,) -> (K+1,), (M,).

    Args:
        total: M, where it is known; else it is data: one host read in eager, an unbacked size in a graph.
    """
    offsets = offsets_of(lengths)
    rows = torch.repeat_interleave(lengths, output_size=total)
    steps = torch.arange(rows.shape[0], device=rows.device)
    if step == 1:  # no copies of M elements that are times 1
        return offsets, steps + (starts - offsets[:-1]).index_select(0, rows)  # one gather of M instead of two
    return offsets, steps * step + (starts - offsets[:-1] * step).index_select(0, rows)


def gather_spans(values: Tensor, dim: int, index: Tensor) -> Tensor:
    """The values at an index of `take_spans`. A graph may know that there are none, and then Inductor refuses any index
    whose size it does not know (torch 2.13)."""
    return values if is_zero(values.shape[dim]) else values.index_select(dim, index)


def gather_spans_by_index(values: Tensor, dim: int, index: Tensor) -> Tensor:
    """What Dynamo traces for `gather_spans`, if need be."""
    return values if is_zero(values.shape[dim]) else values[(slice(None),) * dim + (index,)]


if not has_gradients_in_graphs():
    trace_as(gather_spans, gather_spans_by_index)
