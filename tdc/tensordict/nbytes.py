"""How large leaves are: bytes and elements, what they share counted once.

Leaves may be views of one buffer, one and the same tensor, or expanded. So bytes are counted storage by storage: those
of the different views in it, and never more than the storage has.

Invariant: reads no tensor data (no sync).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from tdc.core import pytree
from tdc.core.container import Container
from tdc.core.dtensor import local_of
from tdc.core.dynamo import storage_id, traced_for
from tdc.core.errors import DtypeError, describe, message
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.storage import is_tensordict

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def tensors_of(leaf: Any) -> list[torch.Tensor]:
    """The tensors that a leaf is made of: itself, or the values, offsets or lengths of a ragged batch."""
    if isinstance(leaf, torch.Tensor):
        return [local_of(leaf)]
    return [x for x in pytree.tree_leaves(unwrap(leaf)) if isinstance(x, torch.Tensor)]


def bytes_of(leaves: Iterable[Any]) -> int:
    """Bytes of leaves, what they share counted once."""
    views: dict[Any, dict[Any, int]] = {}
    limits: dict[Any, int] = {}
    for x in [t for leaf in leaves for t in tensors_of(leaf)]:
        size = x.numel() * x.element_size()
        try:
            key, view = storage_id(x), (x.storage_offset(), x.shape, x.stride(), x.dtype)
            limits[key] = x.untyped_storage().nbytes()
        except (RuntimeError, NotImplementedError):  # no storage of its own: sparse, or wrapped by vmap
            key, view = id(x), None
            limits[key] = size
        views.setdefault(key, {})[view] = size
    return sum([min(sum(sizes.values()), limits[key]) for key, sizes in views.items()])


@traced_for(bytes_of)
def bytes_of_traced(leaves: Iterable[Any]) -> int:
    """Traced in place of `bytes_of`: a graph knows no storages, so views of one buffer count one by one,
    and an expanded dim as one element."""
    found = dict.fromkeys([t for leaf in leaves for t in tensors_of(leaf)])
    sizes = [[n for n, step in zip(x.shape, x.stride(), strict=True) if step != 0] for x in found]
    return sum([math.prod(own) * x.element_size() for own, x in zip(sizes, found, strict=True)])


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


def nbytes(td: Any) -> int:
    """Memory of all leaves in bytes: tensors, and of ragged leaves values, offsets and lengths.

    Of DTensors the part of this process counts.
    What leaves share is counted once: one and the same tensor, views of one buffer, expanded dims. Objects of
    registered classes that are no pytrees of tensors do not count.

    Args:
        td: a TensorDict, or any pytree of tensors and ragged batches.

    Returns:
        Bytes.

    Compile:
        fullgraph, a number of sizes that may be dynamic; views of one buffer count one by one there: a graph knows no
        storages. Reads no data.

    Example:
        >>> from tdc.tensordict.tensordict import TensorDict
        >>> x = torch.zeros(4, 8)
        >>> nbytes(TensorDict({"x": x, "again": x, "row": torch.zeros(8).expand(4, 8)}, [4]))
        160
    """
    return bytes_of(leaves_of("nbytes", td))


def param_count(td: Any) -> int:
    """Number of elements of all leaves; a tensor that is there twice (tied parameters) counts once.

    Of a NestedTensor its values count, of a MaskedBatch its data, padding included.

    Args:
        td: a TensorDict, e.g. of `tdc.from_module`, or any pytree of tensors.

    Compile:
        fullgraph; in a graph a number of sizes that may be dynamic. Reads no data.

    Example:
        >>> from tdc.interop.pytrees import from_state_dict
        >>> param_count(from_state_dict(torch.nn.Linear(3, 4).state_dict()))
        16
    """
    leaves = [unwrap(x) for x in leaves_of("param_count", td)]
    found = [x if isinstance(x, torch.Tensor) else getattr(x, "_content", None) for x in leaves]
    return sum([x.numel() for x in dict.fromkeys([x for x in found if isinstance(x, torch.Tensor)])])


def leaves_of(op: str, x: Any) -> list[Any]:
    """Leaves of a TensorDict or another pytree, where a ragged batch is one leaf."""
    if is_tensordict(x):
        return list(x._leaves.values())
    leaves = pytree.tree_leaves(x, is_leaf=lambda v: isinstance(v, Container))
    found = [y for leaf in leaves for y in (leaf._leaves.values() if is_tensordict(leaf) else [leaf])]
    if found and not any([tensors_of(leaf) for leaf in found]):
        hint = "tdc.from_module(module) for the parameters of a module"
        raise DtypeError(message(op, "a TensorDict or a tree of tensors", describe(x), hint=hint))
    return found
