"""Methods and properties of a TensorDict that are functions of other modules, and read-only properties of its leaves.

What operations give, the rule table attaches. Everything else is in a class body or in the tables below.

Invariant: properties here read no data. Where leaves may differ, an answer holds for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tdc.core.frozen import read_only
from tdc.tensordict.at import at_of
from tdc.tensordict.mapping import Keyed
from tdc.tensordict.paths import depth as depth_of
from tdc.tensordict.summary import summary
from tdc.tensordict.tensordict import TensorDict


def dtype(td: TensorDict) -> torch.dtype | None:
    """The dtype of all leaves; None where they differ, or where there are none."""
    found = {leaf.dtype for leaf in td._leaves.values()}
    return found.pop() if len(found) == 1 else None


def depth(td: TensorDict) -> int:
    """How many inner nodes the deepest leaf lies in; 0 where nothing is nested."""
    return max([depth_of(path) - 1 for path in [*td._leaves, *[p for p in td._nodes if p != ()]]], default=0)


def all_on(device_type: str) -> Callable[[TensorDict], bool]:
    """A property: whether all leaves are on devices of one type."""

    def get(td: TensorDict) -> bool:
        found = {device.type for device in [leaf.device for leaf in td._leaves.values()] if device is not None}
        return (found or {td._device.type if td._device is not None else ""}) == {device_type}

    get.__doc__ = f"Whether all leaves are on {device_type} devices. Without leaves the TensorDict's own device counts."
    return get


def is_empty(td: TensorDict) -> bool:
    """Whether there is no leaf. Sizes of 0 do not matter: those are `td.numel() == 0`."""
    return not td._leaves


def real(td: TensorDict) -> TensorDict:
    """The real part of all elements."""
    return torch.real(td)  # type: ignore[arg-type, return-value]  # it dispatches


def imag(td: TensorDict) -> TensorDict:
    """The imaginary part of all elements."""
    return torch.imag(td)  # type: ignore[arg-type, return-value]  # it dispatches


def key_completions(td: TensorDict) -> list[Any]:
    """The keys, for IPython to complete `td["` with; those of inner nodes as tuples."""
    return list(Keyed.keys(td, True))


METHODS: dict[str, Callable[..., Any]] = {
    "_ipython_key_completions_": key_completions, "is_empty": is_empty, "summary": summary
}  # fmt: skip
PROPERTIES: dict[str, Callable[[TensorDict], Any]] = {
    "at": at_of, "depth": depth, "dtype": dtype, "imag": imag, "is_cpu": all_on("cpu"), "is_cuda": all_on("cuda"),
    "is_meta": all_on("meta"), "real": real,
}  # fmt: skip

for _name, _member in (METHODS | {n: read_only(n, property(get)) for n, get in PROPERTIES.items()}).items():
    setattr(TensorDict, _name, _member)
