"""What code asks of a TensorDict besides its batch size: dtype, depth, where its leaves are, whether there are any.

Invariant: nothing here reads data. Where leaves may differ, an answer holds for all of them.
"""

from __future__ import annotations

from typing import Any

import torch

from tdc.core.frozen import read_only
from tdc.core.keys import depth as depth_of
from tdc.tensordict.tensordict import TensorDict


def batch_dims(td: TensorDict) -> int:
    """Number of batch dims, as `td.ndim`."""
    return len(td._size)


def dtype(td: TensorDict) -> torch.dtype | None:
    """The dtype of all leaves; None where they differ, or where there are none."""
    found = {leaf.dtype for leaf in td._leaves.values()}
    return found.pop() if len(found) == 1 else None


def depth(td: TensorDict) -> int:
    """How many inner nodes the deepest leaf lies in; 0 where nothing is nested."""
    return max([depth_of(path) - 1 for path in [*td._leaves, *[p for p in td._nodes if p != ()]]], default=0)


def all_on(td: TensorDict, kind: str) -> bool:
    """Whether all leaves are on a kind of device. Without leaves the TensorDict's own device counts."""
    found = {place.type for place in [leaf.device for leaf in td._leaves.values()] if place is not None}
    return (found or {td._device.type if td._device is not None else ""}) == {kind}


def is_cpu(td: TensorDict) -> bool:
    """Whether all leaves are in the memory of the host."""
    return all_on(td, "cpu")


def is_cuda(td: TensorDict) -> bool:
    """Whether all leaves are on CUDA devices."""
    return all_on(td, "cuda")


def is_meta(td: TensorDict) -> bool:
    """Whether all leaves are without data, on the meta device."""
    return all_on(td, "meta")


def is_empty(td: TensorDict) -> bool:
    """Whether there is no leaf. Sizes of 0 do not matter: those are `td.numel() == 0`."""
    return not td._leaves


_owner: Any = TensorDict
for _fact in (batch_dims, dtype, depth, is_cpu, is_cuda, is_meta):
    setattr(_owner, _fact.__name__, read_only(_fact.__name__, property(_fact, doc=_fact.__doc__)))
_owner.is_empty = is_empty
