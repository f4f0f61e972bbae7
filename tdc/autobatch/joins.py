"""`len`, `torch.cat` and `torch.stack` in a block: of lists that grew, and of what differs between examples."""

from __future__ import annotations

import builtins
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch.lists import Grown, refusal
from tdc.autobatch.ragged_example import RaggedExample
from tdc.compile._torch.levels import current_level, mapped, outside, physical
from tdc.compile._torch.tracing import is_batched
from tdc.compile.upstream import traced
from tdc.ragged.masked import MaskedBatch


def length(x: Any) -> Any:
    """`len(x)`; what differs between examples is a 0-d tensor."""
    return x.count if isinstance(x, Grown) else x.size(0) if isinstance(x, RaggedExample) else builtins.len(x)


def stack(tensors: Any, dim: int = 0) -> Any:
    """`torch.stack`, of a list that grew to a ragged example."""
    if not isinstance(tensors, Grown):
        return torch.stack(tensors, dim)
    rows: Any = rows_of(tensors)
    return rows if dim == 0 else torch.movedim(rows, 0, dim)


def cat(tensors: Any, dim: int = 0) -> Any:
    """`torch.cat`. In a graph it runs for all examples at once: torch's own rule fixes their number (torch 2.13)."""
    if isinstance(tensors, Grown):
        rows: Any = rows_of(tensors)
        return torch.flatten(rows, 0, 1)
    parts = [*tensors]
    if not traced() or not all([isinstance(x, Tensor) for x in parts]) or not any([is_batched(x) for x in parts]):
        return torch.cat(tensors, dim)
    level = current_level()
    count = next(physical(x, level).shape[0] for x in parts if is_batched(x))
    found = [physical(x, level) if is_batched(x) else x.expand(count, *x.shape) for x in parts]
    with outside():
        joined = torch.cat(found, dim if dim < 0 else dim + 1)
    return mapped(joined, level)


def rows_of(x: Grown) -> RaggedExample:
    """The items of a list that grew, as rows."""
    if not isinstance(x.items, Tensor):
        raise refusal("items that are no tensors of one shape")
    level = current_level()
    items, count = physical(x.items, level), physical(x.count, level)
    with outside():
        packed = MaskedBatch(items, count).to_packed()
    return RaggedExample(packed, level)
