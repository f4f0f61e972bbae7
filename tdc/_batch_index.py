"""An index on the batch dims of a TensorDict, and its leaves at it.

Ragged leaves that share a structure share the one of the result: what depends on the structure alone is done once, and
operands are known to fit by identity afterwards.

Invariant: an index reaches batch dims only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tdc._tree import Leaves, batch_index, is_mask, misfit


def normal_index(td: Any, idx: Any) -> Any:
    """An index as every leaf takes it: it reaches batch dims only.

    Raises:
        IndexingError: it is no index, or has too many dims.
    """
    if type(idx) is list:
        try:
            idx = torch.as_tensor(idx, dtype=None if idx else torch.int64, device=td._device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise misfit(idx, td._size, error) from None
    if type(idx) is tuple or is_mask(idx):
        idx = batch_index(idx if type(idx) is tuple else (idx,), td._size)
    return idx


def indexed(leaves: Leaves, idx: Any) -> Leaves:
    """`x[idx]` of every leaf. Ragged leaves of one structure share the new one: it is made once."""
    of = picker(idx)
    return {p: x[idx] if isinstance(x, Tensor) else of(x) for p, x in leaves.items()}


def picker(idx: Any) -> Callable[[Any], Any]:
    """`x[idx]` of a leaf that is no tensor, which remembers structures that it has seen."""
    known: list[tuple[Any, Callable[[Any], Any], Any]] = []

    def of(x: Any) -> Any:
        if getattr(x, "_pick", None) is None:
            return x[idx]
        for other, pick, first in known:
            if type(x) is type(other) and x._shares(other):
                y = pick(x)
                return y if isinstance(y, Tensor) else y._like(first)
        pick = x._pick(idx)
        y = pick(x)
        known.append((x, pick, y))
        return y

    return of


def reshared(before: Leaves, after: Leaves) -> Leaves:
    """Results in which leaves share a structure again that did before: operations on batch dims treat them alike."""
    known: list[tuple[list[Any], Any]] = []
    out = dict(after)
    for path, y in after.items():
        x = before[path]
        if isinstance(y, Tensor) or type(x) is not type(y) or getattr(x, "_shares", None) is None:
            continue
        twin = twin_of([x], known)
        if twin is None:
            known.append(([x], y))
        else:
            out[path] = y._like(twin)
    return out


def twin_of(xs: list[Any], known: list[tuple[list[Any], Any]]) -> Any:
    """The result of other operands, each of which shares its structure with one of these; None where there is none."""
    for others, y in known:
        if all([type(x) is type(other) and x._shares(other) for x, other in zip(xs, others, strict=True)]):
            return y
    return None
