"""Exchanges that a graph begins and waits for apart, and the store at which processes met (torch 2.11-2.15)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from tdc.core.private import find, find_or, nothing, optional

BEGUN, LOST = "exchanges under way in graphs", "exchanges while the backward pass of a step goes on"
ALL_REDUCE, WAIT = [
    find_or(None, f"torch:ops._c10d_functional.{name}", feature=BEGUN, lost=LOST) if dist.is_available() else None
    for name in ("all_reduce", "wait_tensor")
]


@optional("errors told to other ranks", lost="the error of a rank that failed, on other ranks", instead=nothing)
def store_of_processes() -> Any:
    """The store of the default process group; None where torch does not tell it."""
    return find("torch.distributed.distributed_c10d:_get_default_store")()


def started(flat: Tensor, group: Any) -> Tensor:
    """Begin to sum a tensor over all ranks; `finished` waits for it."""
    if ALL_REDUCE is None or WAIT is None:
        dist.all_reduce(flat, group=group)
        return flat
    return ALL_REDUCE(flat, "sum", group.group_name)  # type: ignore[no-any-return]  # a Tensor


def finished(flat: Tensor) -> Tensor:
    """The sum that `started` began."""
    return flat if ALL_REDUCE is None or WAIT is None else WAIT(flat)
