"""The order in which a recurrent network runs through rows of different lengths: what depends on lengths alone.

    P positions (packed total, or B·L), B rows; N real positions; R rows that have any, for T steps

    Order         step 0 of all rows, step 1 of those that have it, …, longest rows first
    RowByRow      one row after another, as rows come: for a rectangle (T, R), whose cells each position knows

Invariant: everything is on CPU. It is kept on a structure, and of the last few lengths: the backward of a graph has
them again, as have other layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tdc.core.dynamo import readable
from tdc.ragged.segments import lengths_on_host, on_host
from tdc.ragged.structure import Structure, once

RECENT = 2  # lengths of which the order is kept


class lasting:
    """A property that is computed once, and can be saved by autograd, also where inference mode asks for it first.

    Under transforms of `torch.func` and modes of dispatch nothing is kept: tensors belong to these. A `cached_property`
    takes a lock (Python 3.11), which costs what a small operation does.
    """

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn, self.name, self.__doc__ = fn, fn.__name__, fn.__doc__

    def __get__(self, order: Any, owner: Any) -> Any:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                found = self.fn(order)
        else:
            found = self.fn(order)
        if readable():
            order.__dict__[self.name] = found
        return found


def numbers(found: list[int]) -> Tensor:
    return torch.tensor(found, dtype=torch.int64)


class Rows:
    """Rows of different lengths, of which those that have positions run in some order.

    Args:
        starts: where each row begins in the values.
        lengths: how many positions it has.

    Attributes:
        running: the rows that have positions, as they run.
        own: how many each of them has.
        count: R.
        steps: T.
        total: N.
        rows: `running` as a tensor, (R,); None of all rows as they come.
        positions: where what runs lies in the values, (N,); None for the first N as they come.
        flip: the same position of the reversed row, (N,).
    """

    rows: Any
    positions: Any
    flip: Any

    def __init__(self, starts: tuple[int, ...], lengths: tuple[int, ...]) -> None:
        self.starts, self.lengths = starts, lengths
        self.running = self.ordered([i for i, n in enumerate(lengths) if n])
        self.own = [lengths[i] for i in self.running]
        self.count, self.steps, self.total = len(self.running), max(lengths, default=0), sum(lengths)

    def ordered(self, rows: list[int]) -> list[int]:
        """Rows as they run."""
        return rows

    @lasting
    def sizes(self) -> Tensor:
        """`own` as a tensor, (R,)."""
        return numbers(self.own)

    @lasting
    def inverse(self) -> Tensor:
        """Where each position is among those that run, if all of them do, (N,)."""
        return torch.empty_like(self.positions).index_copy_(0, self.positions, torch.arange(self.total))


class Order(Rows):
    """Step 0 of all rows, step 1 of those that have it, …, longest rows first."""

    def ordered(self, rows: list[int]) -> list[int]:
        return sorted(rows, key=lambda i: -self.lengths[i])

    @lasting
    def stretches(self) -> list[tuple[int, int]]:
        """How many rows are alive, and for how many steps the same ones.

        Example:
            >>> order_of(torch.tensor([0, 5, 10]), torch.tensor([5, 5, 3])).stretches
            [(3, 3), (2, 2)]
        """
        found, begin = list[tuple[int, int]](), 0
        for row, end in reversed([*enumerate(self.own)]):
            if end > begin:
                found.append((row + 1, end - begin))
                begin = end
        return found

    @lasting
    def counts(self) -> list[int]:
        """How many rows have each step."""
        return [row for row, steps in self.stretches for _ in range(steps)]

    @lasting
    def alive(self) -> Tensor:
        """The same as a tensor, (T,)."""
        return numbers(self.counts)

    @lasting
    def rows(self) -> Tensor:
        return numbers(self.running)

    @lasting
    def real(self) -> Tensor:
        """Which of them have step 0, 1, …, (T, R)."""
        return torch.arange(self.steps)[:, None] < self.sizes

    @lasting
    def positions(self) -> Tensor:
        begins = numbers([self.starts[i] for i in self.running])
        return (torch.arange(self.steps)[:, None] + begins).masked_select(self.real)

    @lasting
    def at(self) -> Tensor:
        """The position of each row at each step, among all that run, (T, R)."""
        return (self.alive.cumsum(0) - self.alive)[:, None] + torch.arange(self.count)

    @lasting
    def before(self) -> Tensor:
        """Where a buffer of states holds the step before, (N,)."""
        return torch.cat([self.at[:1], self.at[:-1] + self.count]).masked_select(self.real)

    @lasting
    def last(self) -> Tensor:
        """Where it holds each row's last step, (R,)."""
        return self.count + self.at.gather(0, (self.sizes - 1)[None])[0]

    @lasting
    def flip(self) -> Tensor:
        steps = torch.arange(self.steps)[:, None]
        return self.at.gather(0, (self.sizes - 1 - steps).clamp(min=0)).masked_select(self.real)

    @lasting
    def row_by_row(self) -> RowByRow:
        """The same rows, not sorted."""
        return RowByRow(self.starts, self.lengths)


class RowByRow(Rows):
    """One row after another, as they come."""

    @lasting
    def begins(self) -> list[int]:
        """Where each row begins among all that run, if none is left out."""
        return [0, *accumulate(self.own)][:-1]

    @lasting
    def rows(self) -> Tensor | None:
        return None if self.count == len(self.lengths) else numbers(self.running)

    @lasting
    def owners(self) -> Tensor:
        """Which of the rows that run each position belongs to, (N,)."""
        return torch.repeat_interleave(self.sizes, output_size=self.total)

    @lasting
    def local(self) -> Tensor:
        """Its step, (N,)."""
        return torch.arange(self.total) - numbers(self.begins).index_select(0, self.owners)

    @lasting
    def positions(self) -> Tensor | None:
        begins = [self.starts[i] for i in self.running]
        return None if begins == self.begins else numbers(begins).index_select(0, self.owners) + self.local

    @lasting
    def flip(self) -> Tensor:
        ends = [2 * begin + n - 1 for begin, n in zip(self.begins, self.own, strict=True)]
        return numbers(ends).index_select(0, self.owners) - torch.arange(self.total)

    @lasting
    def cells(self) -> Tensor:
        """Where each position lies in a rectangle, (N,) of T·R."""
        return self.local * self.count + self.owners

    @lasting
    def ends(self) -> Tensor:
        """Where each row's last step lies there, (R,)."""
        return numbers([(n - 1) * self.count + row for row, n in enumerate(self.own)])


def order_of(starts: Tensor, lengths: Tensor) -> Order:
    """That of rows which begin so in the values, and are so long. Reads both on the host."""
    return order_of_numbers(tuple(on_host(starts)), tuple(on_host(lengths)))


@lru_cache(maxsize=RECENT)
def order_of_numbers(starts: tuple[int, ...], lengths: tuple[int, ...]) -> Order:
    return Order(starts, lengths)


@once
def order_on(s: Structure) -> Order:
    """That of a structure."""
    lengths = lengths_on_host(s)
    return order_of_numbers(tuple([0, *accumulate(lengths)][:-1]), tuple(lengths))
