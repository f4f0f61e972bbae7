"""An index on the batch dims of a TensorDict, and its leaves at it.

Ragged leaves that share a structure share the one of the result: what depends on the structure alone is done once, and
operands are known to fit by identity afterwards.

A number in a tensor, such as the position of a replay buffer, stays on its device: torch would read it on the host, for
which a graph has no way. It is looked up as a vector of one place.

Invariant: an index reaches batch dims only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.tensordict.storage import Leaves, batch_index, consumed, is_mask, misfit


class Numbers(NamedTuple):
    """An index with numbers in tensors.

    Attributes:
        dims, places: the dims that these are on, and each as a vector of one place.
        rest: what is left of the index, for the dims that are left.
        given: the index as it was.
    """

    dims: tuple[int, ...]
    places: tuple[Tensor, ...]
    rest: tuple[Any, ...]
    given: Any

    def front(self, x: Tensor) -> Tensor:
        """A view with the dims of the numbers first."""
        first = tuple(range(len(self.dims)))
        return x if self.dims == first else x.movedim(self.dims, first)

    def read(self, x: Tensor) -> Tensor:
        """`x[given]`, a copy."""
        y = self.front(x)[self.places].squeeze(0)
        return y[self.rest] if self.rest else y

    def write(self, x: Tensor, value: Any) -> None:
        """`x[given] = value`."""
        view = self.front(x)
        value = value.to(x.device, x.dtype) if isinstance(value, Tensor) else value
        if any([isinstance(part, Tensor) for part in self.rest]):  # which would pair with the places
            row = view[self.places].squeeze(0)
            row[self.rest] = value
            view[self.places] = row
        else:
            view[(*self.places, *self.rest)] = value


def is_number(part: Any) -> bool:
    """Whether an entry of an index is a whole number in a tensor."""
    return isinstance(part, Tensor) and part.ndim == 0 and not (part.dtype == torch.bool or part.is_floating_point())


def on_device(idx: Any) -> Any:
    """An index without `...`; as `Numbers` where such are in it."""
    parts = idx if type(idx) is tuple else (idx,)
    if not any([is_number(part) for part in parts]):
        return idx
    dims: list[int] = []
    at = 0
    for part in parts:
        if is_number(part):
            dims.append(at)
        at += consumed(part)
    places = tuple([part.to(torch.int64).view(1) for part in parts if is_number(part)])
    return Numbers(tuple(dims), places, tuple([part for part in parts if not is_number(part)]), idx)


def at(x: Tensor, idx: Any) -> Tensor:
    """`x[idx]` of a tensor, for an index as `normal_index` gives it."""
    return idx.read(x) if type(idx) is Numbers else x[idx]


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
    return on_device(idx) if type(idx) is tuple or isinstance(idx, Tensor) else idx


def indexed(leaves: Leaves, idx: Any) -> Leaves:
    """`x[idx]` of every leaf. Ragged leaves of one structure share the new one: it is made once."""
    if type(idx) is Numbers:
        of = picker(idx.given)
        return {p: idx.read(x) if isinstance(x, Tensor) else of(x) for p, x in leaves.items()}
    of = picker(idx)
    return {p: x[idx] if isinstance(x, Tensor) else of(x) for p, x in leaves.items()}


def picker(idx: Any) -> Callable[[Any], Any]:
    """`x[idx]` of a leaf that is no tensor, which remembers structures that it has seen."""
    known: list[tuple[Any, Callable[[Any], Any], Any]] = []

    def of(x: Any) -> Any:
        if getattr(x, "_pick", None) is None:
            return x[idx]
        for other, pick, first in known:
            if type(x) is type(other) and x._same_structure(other):
                y = pick(x)
                return y if isinstance(y, Tensor) else y._with_structure_of(first)
        pick = x._picker(idx)
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
            out[path] = y._with_structure_of(twin)
    return out


def twin_of(xs: list[Any], known: list[tuple[list[Any], Any]]) -> Any:
    """The result of other operands, each of which shares its structure with one of these; None where there is none."""
    for others, y in known:
        if all([type(x) is type(other) and x._same_structure(other) for x, other in zip(xs, others, strict=True)]):
            return y
    return None
