"""The order in which a recurrent network runs through rows of different lengths: what depends on lengths alone.

    P positions (packed total, or B·L), B rows; N real positions; R rows that have any, longest first, for T steps

    positions      step 0 of all rows, step 1 of those that have it, …       (N,)
    a rectangle    (T, R), of which the first rows of each step are real     cells (N,) of T·R

Invariant: everything is on CPU. It is kept on a structure, and of the last few lengths: the backward of a graph has
them again, as have other layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from tdc.ragged.segments import lengths_of
from tdc.ragged.structure import Structure, once

RECENT = 2  # lengths of which the order is kept


def lasting(fn: Callable[[Any], Any]) -> Any:
    """A cached property that autograd can save, also where inference mode asks for it first."""

    def run(self: Any) -> Any:
        with torch.inference_mode(False):
            return fn(self)

    return cached_property(run)


@dataclass(frozen=True)
class Order:
    """The order in which steps run.

    Args:
        positions: of each step of each row in the values, (N,).
        rows: longest first, (R,).
        sizes: their lengths, (R,).
        real: which rows have step 0, 1, …, (T, R).
    """

    positions: Tensor
    rows: Tensor
    sizes: Tensor
    real: Tensor

    @lasting
    def alive(self) -> Tensor:
        """How many rows have each step."""
        return self.real.sum(1)

    @lasting
    def counts(self) -> list[int]:
        """The same as numbers."""
        return self.alive.tolist()

    @lasting
    def stretches(self) -> list[tuple[int, int]]:
        """How many rows are alive, and for how many steps the same ones.

        Example:
            >>> order_of(torch.tensor([0, 5, 10]), torch.tensor([5, 5, 3])).stretches
            [(3, 3), (2, 2)]
        """
        found, begin = list[tuple[int, int]](), 0
        for row, end in reversed([*enumerate(self.sizes.tolist())]):
            if end > begin:
                found.append((row + 1, end - begin))
                begin = end
        return found

    @lasting
    def at(self) -> Tensor:
        """The position of each row at each step, among all that run, (T, R)."""
        return (self.alive.cumsum(0) - self.alive)[:, None] + torch.arange(len(self.rows))

    @lasting
    def before(self) -> Tensor:
        """Where a buffer of states holds the step before, (N,)."""
        return torch.cat([self.at[:1], self.at[:-1] + len(self.rows)]).masked_select(self.real)

    @lasting
    def last(self) -> Tensor:
        """Where it holds each row's last step, (R,)."""
        return len(self.rows) + self.at.gather(0, (self.sizes - 1)[None])[0] if len(self.rows) else self.rows

    @lasting
    def flip(self) -> Tensor:
        """The same position of the reversed row, (N,)."""
        steps = torch.arange(len(self.real))[:, None]
        return self.at.gather(0, (self.sizes - 1 - steps).clamp(min=0)).masked_select(self.real)

    @lasting
    def inverse(self) -> Tensor:
        """Where each position is among those that run, if all of them do, (N,)."""
        return torch.empty_like(self.positions).index_copy_(0, self.positions, torch.arange(len(self.positions)))

    @lasting
    def cells(self) -> Tensor:
        """Where each position lies in a rectangle, (N,)."""
        return self.real.flatten().nonzero()[:, 0]

    @lasting
    def ends(self) -> Tensor:
        """Where each row's last step lies there, (R,)."""
        return (self.sizes - 1) * len(self.rows) + torch.arange(len(self.rows))


def order_of(starts: Tensor, lengths: Tensor) -> Order:
    """Step 0 of all rows, step 1 of those that have it, …, longest rows first. Reads both on the host."""
    return order_of_numbers(tuple(starts.tolist()), tuple(lengths.tolist()))


@lru_cache(maxsize=RECENT)
def order_of_numbers(starts: tuple[int, ...], lengths: tuple[int, ...]) -> Order:
    with torch.inference_mode(False):
        sizes, rows = torch.tensor(lengths, dtype=torch.int64).sort(descending=True, stable=True)
        rows = rows[sizes > 0]
        sizes = sizes[: len(rows)]
        steps = torch.arange(int(sizes[0]) if len(sizes) else 0)[:, None]
        real = steps < sizes
        positions = (torch.tensor(starts, dtype=torch.int64)[rows] + steps).masked_select(real)
        return Order(positions, rows, sizes, real)


@once
def order_on(s: Structure) -> Order:
    """That of a structure."""
    return order_of(s.offsets[:-1], lengths_of(s))
