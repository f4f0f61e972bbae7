"""Methods of a TensorDict that rooms above do the work of, and properties of all leaves together.

A room above registers its function, and the method calls it: `register("map", map)` in `tdc.data.map`.

Invariant: properties here read no data. Where leaves may differ, an answer holds for all of them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from tdc.core.errors import MethodError, message
from tdc.core.progress import Progress
from tdc.tensordict.display import Summary, summary
from tdc.tensordict.mapping import Keyed
from tdc.tensordict.paths import depth
from tdc.tensordict.shared import without_shared

if TYPE_CHECKING:
    from tdc.tensordict.at import At

MODULES = {  # that register a function
    "at": "tdc.tensordict.at", "map": "tdc.data.map", "map_iter": "tdc.data.map", "memmap": "tdc.io.save",
    "reduce": "tdc.io.by_path", "share_memory": "tdc.ops.tensordict.memory",
    "pin_memory": "tdc.ops.tensordict.memory",
}  # fmt: skip


class Work:
    """Registered functions, by the name of their method."""

    def __getattr__(self, name: str) -> Any:
        module = MODULES.get(name, "tdc")
        raise MethodError(message(name, f"{module} to be imported", "no import of it", hint=f"import {module}"))


WORK = Work()


def register(name: str, fn: Callable[..., Any]) -> None:
    """Let the method of a TensorDict of this name call a function, which takes the TensorDict first."""
    setattr(WORK, name, fn)


class Methods(Keyed):
    """Base of TensorDict."""

    __slots__ = ()

    @property
    def at(self) -> At:
        """`td.at[index].set(value)`, and add, mul, min, max, apply: a TensorDict with other values at an index."""
        return WORK.at(self)

    def summary(self) -> Summary:
        """A table of all entries: key, kind, shape, dtype, device, and bytes of each leaf and subtree."""
        return summary(self)

    def map(self, fn: Callable[..., Any], dim: int = 0, **settings: Any) -> Any:
        """`tdc.map(fn, td, dim, ...)`: `fn` of parts along a batch dim, joined."""
        return WORK.map(fn, self, dim, **settings)

    def map_iter(self, fn: Callable[..., Any], dim: int = 0, **settings: Any) -> Iterator[Any]:
        """`tdc.data.map_iter(fn, td, dim, ...)`: results of `fn` for parts along a batch dim, one after another."""
        return WORK.map_iter(fn, self, dim, **settings)

    def memmap(
        self, path: str | os.PathLike[str], *, mode: Literal["r", "r+"] = "r", overwrite: bool = False,
        sync: bool = True, progress: Progress = False,
    ) -> Self:  # fmt: skip
        """The same TensorDict with its leaves on disk: `tdc.io.save`, then `tdc.io.load`. A tensorclass stays one.

        Args:
            path, overwrite, sync, progress: as of `tdc.io.save`.
            mode: as of `tdc.io.load`; "r+" for leaves whose memory is that of the files.

        Raises:
            as `tdc.io.save`.

        Example:
            >>> import tempfile, torch, tdc
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     td = tdc.TensorDict({"x": torch.zeros(3)}, [3]).memmap(f"{folder}/store")
            ...     print(td["x"], tdc.io.load(f"{folder}/store").keys())
            tensor([0., 0., 0.]) ('x',)
        """
        return WORK.memmap(self, path, mode, overwrite, sync, progress)

    def share_memory(self) -> Self:
        """Move the tensors to memory that other processes see, all in one storage; those that are there already stay.

        Sent to another process, through a queue or as an argument, it costs as much as one tensor, and what either
        process writes there with `tdc.copy_` the other one sees. Leaves keep whether they require a gradient.

        Raises:
            UnsupportedError: sparse tensors, and those without content; all are named.

        Example:
            >>> import tdc
            >>> td = tdc.TensorDict({"x": torch.zeros(3), "y": torch.ones(3, 2)}, [3]).share_memory()
            >>> td["x"].is_shared(), td["x"].untyped_storage().data_ptr() == td["y"].untyped_storage().data_ptr()
            (True, True)
        """
        return WORK.share_memory(self)

    def pin_memory(self) -> Self:
        """Move the tensors to page-locked memory, all in one storage, from which a copy to a GPU need not wait.

        Leaves on a device stay. A DataLoader calls this with `pin_memory=True`.

        Raises:
            UnsupportedError: torch finds no accelerator, which is what memory is locked for.
        """
        return WORK.pin_memory(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return WORK.reduce(self, protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        make, args = self.__reduce__()  # leaves in memory of their own, also those of a store
        return make(*copy.deepcopy(args, memo))

    def _ipython_key_completions_(self) -> list[Any]:
        """The keys, for IPython to complete `td["` with; those of inner nodes as tuples."""
        return list(Keyed.keys(self, True))

    # -- properties of all leaves

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of all leaves but Shared ones; None where they differ, or where there are none."""
        found = {leaf.dtype for leaf in without_shared(self._leaves).values()}
        return found.pop() if len(found) == 1 else None

    @property
    def depth(self) -> int:
        """Number of inner nodes around the deepest leaf; 0 where nothing is nested."""
        return max([depth(p) - 1 for p in [*self._leaves, *[p for p in self._nodes if p != ()]]], default=0)

    def is_empty(self) -> bool:
        """True without a leaf. Sizes of 0 do not matter: those are `td.numel() == 0`."""
        return not self._leaves

    @property
    def is_cpu(self) -> bool:
        """True if all leaves are on cpu devices. Without leaves the TensorDict's own device counts."""
        return is_on(self, "cpu")

    @property
    def is_cuda(self) -> bool:
        """True if all leaves are on cuda devices. Without leaves the TensorDict's own device counts."""
        return is_on(self, "cuda")

    @property
    def is_meta(self) -> bool:
        """True if all leaves are on meta devices. Without leaves the TensorDict's own device counts."""
        return is_on(self, "meta")

    @property
    def real(self) -> Self:
        """The real part of all elements."""
        return torch.real(self)  # type: ignore[arg-type, return-value]  # it dispatches

    @property
    def imag(self) -> Self:
        """The imaginary part of all elements."""
        return torch.imag(self)  # type: ignore[arg-type, return-value]  # it dispatches


def is_on(td: Keyed, device_type: str) -> bool:
    """True if all leaves are on devices of one type."""
    found = {device.type for device in [leaf.device for leaf in td._leaves.values()] if device is not None}
    return (found or {td._device.type if td._device is not None else ""}) == {device_type}
