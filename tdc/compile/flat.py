"""Flat inputs and outputs of an exported function as data, without tensors: dtypes, and sizes by name.

Sizes that vary have names: `B`, or `B + 1` for the offsets of B rows. `Bounds` are what a name may stand for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tdc.core.errors import dtype_name, show_sizes


class Size(NamedTuple):
    """A size that varies: the name of a dim, how much larger it is, and its word in a container."""

    name: str
    plus: int = 0
    word: str = ""

    def __str__(self) -> str:
        return self.name if not self.plus else f"{self.name} {'+' if self.plus > 0 else '-'} {abs(self.plus)}"


class Bounds(NamedTuple):
    """Values of a dim: a multiple of `step` in a range; `where` lists the dims of this name."""

    low: int = 0
    high: int | None = None
    step: int = 1
    where: tuple[str, ...] = ()

    def __str__(self) -> str:
        return range_text(self.low, self.high) + (f", a multiple of {self.step}" if self.step > 1 else "")

    def allow(self, size: int) -> bool:
        """True for a size within."""
        return size >= self.low and (self.high is None or size <= self.high) and size % self.step == 0


class Input(NamedTuple):
    """One flat argument: a tensor, or a constant, which has no dtype."""

    name: str  # as in `batch.tokens.offsets`
    at: str  # the container it belongs to, `batch.tokens`
    dtype: torch.dtype | None
    device: str = ""
    sizes: tuple[int | Size, ...] = ()
    value: Any = None

    def __str__(self) -> str:
        return f"{self.value!r}" if self.dtype is None else f"{dtype_name(self.dtype)}{show_sizes(self.sizes)}"


class Output(NamedTuple):
    """One flat result: a tensor with sizes as texts, or a constant, which has no dtype."""

    dtype: torch.dtype | None
    sizes: tuple[str, ...] = ()
    value: Any = None

    def __str__(self) -> str:
        return f"{self.value!r}" if self.dtype is None else f"{dtype_name(self.dtype)}{show_sizes(self.sizes)}"


def range_text(low: int, high: int | None) -> str:
    """A range as messages show it: "0 or more", "1 to 8"."""
    return f"{low} or more" if high is None else f"{low} to {high}"


def to_json(x: Any) -> Any:
    """As JSON data: tuples as lists, dtypes by name, the classes above as one-key dicts."""
    if isinstance(x, torch.dtype):
        return {"dtype": dtype_name(x)}
    if type(x) in KINDS.values():
        return {type(x).__name__: [to_json(v) for v in x]}
    return [to_json(v) for v in x] if isinstance(x, (list, tuple)) else x


def from_json(data: Any) -> Any:
    """The inverse of `to_json`; lists become tuples.

    Example:
        >>> e = Input("x", "x", torch.float32, "cpu", (Size("B", 0, "batch"), 3))
        >>> from_json(to_json(e)) == e
        True
    """
    if isinstance(data, dict):
        [(kind, value)] = data.items()
        return getattr(torch, value) if kind == "dtype" else KINDS[kind](*[from_json(v) for v in value])
    return tuple([from_json(v) for v in data]) if isinstance(data, list) else data


KINDS: dict[str, Any] = {c.__name__: c for c in (Size, Bounds, Input, Output)}
