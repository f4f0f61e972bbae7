"""The store at which processes met, for texts beside their exchanges (torch 2.11-2.15)."""

from __future__ import annotations

from typing import Any

from tdc.core.private import find, nothing, optional


@optional("errors told to other ranks", lost="the error of a rank that failed, on other ranks", instead=nothing)
def store_of_processes() -> Any:
    """The store of the default process group; None where torch does not tell it."""
    return find("torch.distributed.distributed_c10d:_get_default_store")()
