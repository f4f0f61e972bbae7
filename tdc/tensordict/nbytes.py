"""How much memory leaves take: storages, each counted once.

Leaves may be views of one buffer, one and the same tensor, or expanded. So bytes are counted storage by storage: those
of the different views in it, and never more than the storage has.

Invariant: reads no tensor data (no sync).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch.utils._pytree as torch_pytree
from torch import Tensor

from tdc.core.dynamo import trace_as
from tdc.tensordict.leaf import unwrap

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def tensors_of(leaf: Any) -> list[Tensor]:
    """The tensors that a leaf is made of: itself, or values, offsets, lengths; none of what is no tensor."""
    if isinstance(leaf, Tensor):
        return [leaf]
    return [x for x in torch_pytree.tree_leaves(unwrap(leaf)) if isinstance(x, Tensor)]


def bytes_of(leaves: Iterable[Any]) -> int:
    """Bytes of leaves, what they share counted once."""
    views: dict[Any, dict[Any, int]] = {}
    limits: dict[Any, int] = {}
    for x in [t for leaf in leaves for t in tensors_of(leaf)]:
        size = x.numel() * x.element_size()
        try:
            storage = x.untyped_storage()
            key, view = storage._cdata, (x.storage_offset(), x.shape, x.stride(), x.dtype)
            limits[key] = storage.nbytes()
        except (RuntimeError, NotImplementedError):  # no storage of its own: sparse, or wrapped by vmap
            key, view = id(x), None
            limits[key] = size
        views.setdefault(key, {})[view] = size
    return sum([min(sum(sizes.values()), limits[key]) for key, sizes in views.items()])


def bytes_of_traced(leaves: Iterable[Any]) -> int:
    """What Dynamo traces in place of `bytes_of`: a graph knows no storages, so views of one buffer count one by one."""
    found = dict.fromkeys([t for leaf in leaves for t in tensors_of(leaf)])
    return sum([dense_numel(x) * x.element_size() for x in found])


def dense_numel(x: Tensor) -> int:
    """Number of elements, of expanded dims one."""
    return math.prod([n for n, step in zip(x.shape, x.stride(), strict=True) if step != 0])


trace_as(bytes_of, bytes_of_traced)


def bytes_text(count: int) -> str:
    """Bytes as people read them.

    Example:
        >>> bytes_text(512), bytes_text(1536), bytes_text(3 * 2**30)
        ('512 B', '1.5 KiB', '3.0 GiB')
    """
    power = 0
    while power < len(UNITS) - 1 and count >= 1024 ** (power + 1):
        power += 1
    return f"{count / 1024**power:.1f} {UNITS[power]}" if power else f"{count} B"
