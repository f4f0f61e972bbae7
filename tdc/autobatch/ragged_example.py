"""One example of a ragged batch, as a block sees it: its rows, one at a time, and how many there are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.autobatch.source import OP
from tdc.core.errors import UnsupportedError, message


class RaggedExample:
    """An example whose first dim is ragged.

    Attributes:
        lane: the batch that it is an example of.
        values: the rows of all examples.
        begin: where its own begin.
        length: how many it has, a 0-d tensor.
    """

    def __init__(self, lane: Any, values: Tensor, begin: Tensor, length: Tensor) -> None:
        self.lane = lane
        self.values = values
        self.begin = begin
        self.length = length

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def shape(self) -> tuple[Any, ...]:
        return (self.length, *self.values.shape[1:])

    def dim(self) -> int:
        return self.values.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def new_zeros(self, *size: Any, **options: Any) -> Tensor:
        return self.values.new_zeros(*size, **options)

    def new_ones(self, *size: Any, **options: Any) -> Tensor:
        return self.values.new_ones(*size, **options)

    def new_full(self, *size: Any, **options: Any) -> Tensor:
        return self.values.new_full(*size, **options)

    def __getitem__(self, index: Any) -> Tensor:
        """The row at a position, a number or a 0-d tensor; more indices are of the row."""
        first, *rest = index if isinstance(index, tuple) else (index,)
        if not (isinstance(first, int) or (isinstance(first, Tensor) and first.ndim == 0)) or isinstance(first, bool):
            raise self.refusal("x[...] with something else than a position")
        at = torch.as_tensor(first, device=self.values.device)
        own = torch.where(at < 0, at + self.length, at)
        beyond = self.values.shape[0]  # where there is no row: torch says so
        row = torch.where((own >= 0) & (own < self.length), self.begin + own, beyond)
        found = self.values[row.reshape(1)].squeeze(0)
        return found[tuple(rest)] if rest else found

    def __len__(self) -> int:
        raise self.refusal("len(x), which differs between examples: x.size(0)")

    def __getattr__(self, name: str) -> Any:
        raise self.refusal(f"x.{name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise refusal(f"torch.{getattr(func, '__name__', func)}")

    def refusal(self, got: str) -> UnsupportedError:
        return refusal(got)


def refusal(got: str) -> UnsupportedError:
    """What to do instead of computing with all rows at once."""
    hint = "walk along it with for, or compute with the whole batch outside of the function"
    return UnsupportedError(message(OP, "a row of a ragged example, its size or its dtype", got, hint=hint))
