"""The order in which a recurrent network runs through rows of different lengths.

    P positions (packed total, or B·L), B rows; N real positions; R rows that have any, for T steps

Invariant: everything is on CPU, and kept on a structure and for the last few lengths, for other layers and the backward
of a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tdc.core.dynamo import readable, skipped_in_graphs
from tdc.layout.segments import lengths_on_host, on_host
from tdc.layout.structure import Structure, once

RECENT = 2  # lengths of which the order is kept


class lasting:
    """A property that is computed once, by tensors that autograd can save, also in inference mode; under transforms and
    dispatch modes nothing is kept."""

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


class Order:
    """Step 0 of all rows, step 1 of those that have it, …, longest rows first. Rows without positions are left out.

    Attributes:
        starts, lengths: where each row begins in the values, and its number of positions.
        running, own: rows with positions, in running order, and their lengths.
        count, steps, total: R, T and N.
    """

    def __init__(self, starts: tuple[int, ...], lengths: tuple[int, ...]) -> None:
        self.starts, self.lengths = starts, lengths
        self.running = sorted([i for i, n in enumerate(lengths) if n], key=lambda i: -lengths[i])
        self.own = [lengths[i] for i in self.running]
        self.count, self.steps, self.total = len(self.running), max(lengths, default=0), sum(lengths)

    @lasting
    def counts(self) -> list[int]:
        """Number of rows that have each step.

        Example:
            >>> order_of(torch.tensor([0, 3, 6]), torch.tensor([3, 3, 1])).counts
            [3, 2, 2]
        """
        found, begin = list[int](), 0
        for n, end in zip(range(self.count, 0, -1), reversed(self.own), strict=True):
            found += [n] * (end - begin)
            begin = end
        return found

    @lasting
    def alive(self) -> Tensor:
        """`counts` as a tensor, (T,)."""
        return numbers(self.counts)

    @lasting
    def rows(self) -> Tensor:
        """`running` as a tensor, (R,)."""
        return numbers(self.running)

    @lasting
    def sizes(self) -> Tensor:
        """`own` as a tensor, (R,)."""
        return numbers(self.own)

    @lasting
    def real(self) -> Tensor:
        """True where a row has step 0, 1, …, (T, R)."""
        return torch.arange(self.steps)[:, None] < self.sizes

    @lasting
    def positions(self) -> Tensor:
        """Position of each step in the values, (N,)."""
        begins = numbers([self.starts[i] for i in self.running])
        return (torch.arange(self.steps)[:, None] + begins).masked_select(self.real)

    @lasting
    def at(self) -> Tensor:
        """The position of each row at each step, among all that run, (T, R)."""
        return (self.alive.cumsum(0) - self.alive)[:, None] + torch.arange(self.count)

    @lasting
    def before(self) -> Tensor:
        """Position of the step before in a buffer of states, (N,)."""
        return torch.cat([self.at[:1], self.at[:-1] + self.count]).masked_select(self.real)

    @lasting
    def last(self) -> Tensor:
        """Position of each row's last step in it, (R,)."""
        return self.count + self.at.gather(0, (self.sizes - 1)[None])[0]

    @lasting
    def flip(self) -> Tensor:
        """The same position of the reversed row, (N,)."""
        steps = torch.arange(self.steps)[:, None]
        return self.at.gather(0, (self.sizes - 1 - steps).clamp(min=0)).masked_select(self.real)


def order_of(starts: Tensor, lengths: Tensor) -> Order:
    """The order of rows of these starts and lengths, which are read on the host."""
    return order_of_numbers(tuple(on_host(starts)), tuple(on_host(lengths)))


@lru_cache(maxsize=RECENT)
def order_of_numbers(starts: tuple[int, ...], lengths: tuple[int, ...]) -> Order:
    return Order(starts, lengths)


@skipped_in_graphs
def read_order(starts: Tensor, lengths: Tensor) -> Order | None:
    """`order_of`; None where there are no numbers to read."""
    return order_of(starts, lengths) if readable() else None


@skipped_in_graphs
def order_on(s: Structure) -> Order | None:
    """The order of the rows of a structure; None where there are no numbers to read."""
    return kept_order(s) if readable() else None


@once
def kept_order(s: Structure) -> Order:
    lengths = lengths_on_host(s)
    return order_of_numbers(tuple([0, *accumulate(lengths)][:-1]), tuple(lengths))
