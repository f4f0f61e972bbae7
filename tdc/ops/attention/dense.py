"""Dense queries or keys beside ragged ones: an example of them has as many positions as every other.

    queries (B, H, L, D)    learned ones that look at ragged memories, one set for each example
    keys (B, H, M, D)       a context of one size that ragged rows look at

They become rows of one length, in the container of the others; a result for dense queries is dense again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.layout.segments import counts_on_host, sizes_on_host, structure_of_sizes
from tdc.layout.structure import remember
from tdc.ragged.masked import build_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import is_ragged


def alike(query: Any, key: Any, value: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """Queries, keys and values in one container, and what gives a result for the queries as these were."""
    parts = [query, key, value]
    ragged = [x for x in parts if is_ragged(x) and len(x.ragged_dims) == 1]
    if not ragged or len(ragged) == len(parts):
        return parts, unchanged
    made = [rows_of(x, ragged[0]) if beside(x, ragged[0]) else x for x in parts]
    if value is key:
        made[2] = made[1]  # one object, as before
    return made, partial(dense_of, query) if beside(query, ragged[0]) else unchanged


def unchanged(out: Any) -> Any:
    return out


def beside(x: Any, like: Any) -> bool:
    """Whether an operand is a dense tensor of the dims of a ragged one."""
    return type(x) is not type(like) and isinstance(x, Tensor) and x.ndim == like.ndim


def rows_of(x: Tensor, like: Any) -> Any:
    """A dense tensor as a batch whose batch dim and ragged dim are those of another."""
    batch, (ragged,) = like._batch_dim, like.ragged_dims
    rows, length = x.shape[batch], x.shape[ragged]
    sizes = torch.full((rows, 1), length, dtype=torch.int64, device=x.device)
    if not isinstance(like, NestedTensor):
        return build_masked(x, sizes, (ragged,), batch, new_lengths=True)
    e = like.structure.packed_dim
    s = structure_of_sizes(sizes, (length,), e, batch)
    if counts_on_host(s):
        remember(sizes_on_host, s, torch.full((rows, 1), length, dtype=torch.int64, device="cpu"))
    return build_nested(s, x.movedim((batch, ragged), (0, 1)).flatten(0, 1).movedim(0, e))


def dense_of(query: Tensor, out: Any) -> Tensor:
    """A result for the rows of dense queries."""
    if not isinstance(out, NestedTensor):
        found: Tensor = out.data
        return found
    s, (ragged,) = out.structure, out.ragged_dims
    rows = out.values.movedim(s.packed_dim, 0).unflatten(0, (query.shape[s.batch_dim], query.shape[ragged]))
    return rows.movedim((0, 1), (s.batch_dim, ragged))
