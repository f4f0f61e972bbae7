"""Dense queries or keys beside ragged ones, as rows of one length.

    queries (B, H, L, D)    learned ones that look at ragged memories, one set for each example
    keys (B, H, M, D)       a context of one size that ragged rows look at
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from tdc.ops.join import as_rows
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import is_ragged


def alike(query: Any, key: Any, value: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """Queries, keys and values in one container, and the way back: a result for dense queries is dense."""
    parts = [query, key, value]
    ragged = [x for x in parts if is_ragged(x) and len(x.ragged_dims) == 1]
    if not ragged or len(ragged) == len(parts):
        return parts, unchanged
    made = [as_rows(x, ragged[0]) for x in parts]
    if value is key:
        made[2] = made[1]  # one object, as before
    return made, unchanged if made[0] is query else partial(dense_of, query)


def unchanged(out: Any) -> Any:
    return out


def dense_of(query: Tensor, out: Any) -> Tensor:
    """A result for the rows of dense queries."""
    if not isinstance(out, NestedTensor):
        found: Tensor = out.data
        return found
    s, (ragged,) = out.structure, out.ragged_dims
    rows = out.values.movedim(s.packed_dim, 0).unflatten(0, (query.shape[s.batch_dim], query.shape[ragged]))
    return rows.movedim((0, 1), (s.batch_dim, ragged))
