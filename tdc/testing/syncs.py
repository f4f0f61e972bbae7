"""Which operations of torch let the host wait for a device.

    a number is read          item, tolist, bool(x), equal, allclose, checks of torch.linalg
    a size is data            nonzero, masks as indices, unique, masked_select, repeat_interleave without output_size
    memory is pageable        copies between host and device, unless they are non-blocking and the host's side is pinned

Invariant: an operation counts where one of its tensors is on a device other than the CPU; a fake tensor, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core import pytree

READS = frozenset([
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "_linalg_check_errors", "nonzero", "argwhere",
    "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount",
])  # fmt: skip
INDEXES = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
COPIES = ("_to_copy", "copy_", "copy")


def sync_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The name of an operation for which the host waits; empty for any other.

    Args:
        op: as a dispatch mode sees it.
    """
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if all([on_host(x) for x in tensors]) and not kwargs.get("device"):
        return ""
    _, name, overload = f"{op}.".split(".")[:3]
    if name in INDEXES:
        chosen = [i for i in args[1] if i is not None]
        if any([i.dtype in (torch.bool, torch.uint8) for i in chosen]):
            return f"{name} of a mask"
        return f"{name} of an index on the host" if any([i.device != args[0].device for i in chosen]) else ""
    if name == "repeat_interleave":
        given = len(args) > 1 if overload == "Tensor" else overload == "self_int"
        return "" if given or kwargs.get("output_size") is not None else name
    waits = crosses(args, kwargs) if name in COPIES else name in READS
    return name if waits else ""


def on_host(x: Tensor) -> bool:
    """Whether a tensor has no device to wait for."""
    return x.device.type in ("cpu", "meta")


def crosses(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a copy goes between host and device, and the host waits for it."""
    first, second = args[0], args[1] if len(args) > 1 else None
    there = second.device if isinstance(second, Tensor) else torch.device(kwargs.get("device") or first.device)
    if (first.device.type == "cpu") == (there.type == "cpu"):
        return False
    hosts = [x for x in (first, second) if isinstance(x, Tensor) and x.device.type == "cpu"]
    asynchronous = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
    return not (asynchronous and hosts and hosts[0].is_pinned())
