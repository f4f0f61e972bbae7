"""Batches of ragged examples by their lengths: as many as fill a budget of tokens, or examples of near lengths.

`TokenBudgetSampler` with shuffle packs a window at a time. Of the next examples in shuffled order, as many as fill 64
batches, the longest goes first, and each to the emptiest batch. What is left of a batch is filled by swapping one of
its examples for one that is longer by as much, from the examples that did not fit and the next 128, which wait for the
next window. Windows become smaller towards the end, so that something is left to swap with.

`BucketSampler` sorts a window of many batches by length, cuts it into batches and shuffles these. The batches of one
round of ranks are neighbours in length, so that no rank waits for another.

Invariants: every example is in exactly one batch; no batch exceeds the budget.
"""

from __future__ import annotations

import sys
from bisect import bisect_right, insort
from collections.abc import Sequence
from heapq import heapreplace
from itertools import combinations
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect
from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.data.epochs import Batches, EpochSampler, Plan, equal_bounds, plan_of, whole_number
from tdc.layout.segments import lengths_of
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.two_level import TwoLevelTensor


def example_lengths(op: str, given: Any) -> Tensor:
    """Lengths of examples as (B,): those of a ragged leaf, or numbers.

    Raises:
        DtypeError: neither a ragged batch nor whole numbers.
        ShapeError: no vector, or a length below 0.
    """
    if isinstance(given, NestedTensor):
        return lengths_of(given.structure).cpu()
    if isinstance(given, TwoLevelTensor):  # elements, as tokens of a document
        return given.values.offsets[given.offsets].diff().cpu()
    if isinstance(given, MaskedBatch):
        return given.lengths.to(torch.int64).prod(1).cpu()
    hint = "td['tokens'] of ragged tokens, or their lengths as a vector of whole numbers"
    expected = "a ragged batch, or lengths (B,)"
    if isinstance(given, (list, tuple)) or (hasattr(given, "__array__") and not isinstance(given, Tensor)):
        try:
            found = torch.as_tensor(given, dtype=None if len(given) else torch.int64, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            raise DtypeError(message(op, expected, describe(given), hint=hint)) from None
    else:
        found = given
    if not isinstance(found, Tensor) or found.dtype.is_floating_point or found.dtype.is_complex:
        raise DtypeError(message(op, expected, describe(found), hint=hint))
    if found.ndim != 1 or found.dtype == torch.bool:
        raise ShapeError(message(op, expected, describe(found), hint=hint))
    found = found.to("cpu", torch.int64)  # unsigned numbers of 16 bits and more are not compared
    if bool((found < 0).any()):
        at = int((found < 0).nonzero()[0, 0])
        got, hint = f"one below 0 at example {at}", "lengths.clamp(min=0)"
        raise ShapeError(message(op, "lengths of 0 or more", got, hint=hint))
    return found


WINDOW = 64
RESERVE = 128
MOST_PAIRED = 64  # examples whose pairs are looked at
MOST_NAMED = 8  # of a million examples that are too long
Item = tuple[int, int]  # the length and the position of an example


class TokenBudgetSampler(EpochSampler):
    """Batches of examples whose tokens fill a budget, each example once in an epoch.

    It is a `batch_sampler=` for `torch.utils.data.DataLoader` and for `tdc.data.loader`. With shuffle, and with ten
    examples or more to a batch, batches are full to 0.1 % in the mean, and each but the last one to about 2 %.

    Args:
        lengths: a ragged leaf, or the lengths of examples (B,).
        max_tokens: the budget, tokens of a batch.
        shuffle: another order in each epoch. Without it batches are of consecutive examples, and less full.
        consecutive: batches of consecutive examples with shuffle, too, which then shuffles whole batches, such as
            those of `windows`.
        seed: with the epoch, decides the order.
        drop_last: leave out the last batch if it is not full and, with several ranks, batches that not all ranks have.
        rank, world_size: this process and the number of processes: a batch goes to one rank. Where the number of
            batches is no multiple, the first batches are there twice.
        even: False for empty batches in place of those that are there twice.

    Raises:
        ShapeError: examples longer than the budget, named by their positions; no vector of lengths.
        DtypeError: arguments of another kind.

    Compile:
        Eager only. The plan of an epoch is made when it begins, in 1 to 2 us an example.

    Example:
        >>> sampler = TokenBudgetSampler([3, 1, 2, 2, 4], max_tokens=4, shuffle=False)
        >>> list(sampler), len(sampler), sampler.epoch
        ([[0, 1], [2, 3], [4]], 3, 1)

    Source:
        `torch.utils.data.BatchSampler`, `torch.utils.data.DistributedSampler`.
    """

    _op = "data.TokenBudgetSampler"

    def __init__(
        self, lengths: Any, max_tokens: int, *, shuffle: bool = True, consecutive: bool = False, seed: int = 0,
        drop_last: bool = False, rank: int = 0, world_size: int = 1, even: bool = True,
    ) -> None:  # fmt: skip
        expect(self._op, consecutive, bool, of=" for consecutive")
        found = example_lengths(self._op, lengths)
        self._max_tokens = whole_number(self._op, 1, "max_tokens", max_tokens)
        refuse_longer(self._op, found, self._max_tokens)
        super().__init__(len(found), shuffle, seed, drop_last, rank, world_size, even)
        self._lengths, self._consecutive = found, consecutive

    def _batches(self, order: Tensor, generator: torch.Generator) -> Plan:
        lengths: list[int] = self._lengths.tolist()
        if not lengths:
            return plan_of([])
        if self._shuffle and not self._consecutive:
            batches = packed(order.tolist(), lengths, self._max_tokens)
        else:
            batches = consecutive(lengths, self._max_tokens)
        if self._shuffle:
            positions = torch.randperm(len(batches) - 1, generator=generator, device="cpu").tolist()
            batches = [*[batches[i] for i in positions], batches[-1]]
        least = max(1, min(lengths))  # an example without tokens always fits
        if self._drop_last and tokens(batches[-1], lengths) + least <= self._max_tokens:
            batches.pop()
        return plan_of([torch.tensor(batch, device="cpu") for batch in batches])

    def _settings(self) -> dict[str, Any]:
        more = {"max_tokens": self._max_tokens, "tokens": int(self._lengths.sum())}
        return {**super()._settings(), **more, "consecutive": self._consecutive}


def refuse_longer(op: str, lengths: Tensor, budget: int) -> None:
    """Refuse examples that no batch could hold; the first ones are named."""
    longer = (lengths > budget).nonzero()[:, 0]
    if len(longer):
        wrong = {f"example {i}": f"{int(lengths[i])} tokens" for i in longer[:MOST_NAMED].tolist()}
        hint = f"max_tokens={int(lengths.max())} or more, tdc.truncate(x, lengths), or leave them out: td[lengths <= n]"
        got = f"{len(longer)} that are longer"
        raise ShapeError(message(op, f"examples of at most max_tokens={budget} tokens", got, wrong, hint))


def tokens(batch: Sequence[int], lengths: list[int]) -> int:
    """The tokens of a batch of positions."""
    return sum([lengths[i] for i in batch])


def consecutive(lengths: list[int], budget: int) -> list[list[int]]:
    """Batches of examples in their order; a batch ends where the next example would not fit."""
    batches: list[list[int]] = [[]]
    total = 0
    for i, length in enumerate(lengths):
        if total + length > budget:
            batches.append([])
            total = 0
        batches[-1].append(i)
        total += length
    return batches


def packed(order: list[int], lengths: list[int], budget: int) -> list[list[int]]:
    """Batches of examples that fill the budget, from examples in a random order; the last one has what is left."""
    batches: list[list[int]] = []
    waiting: list[int] = []
    at, left = 0, sum(lengths)
    while left > budget:
        count = max(1, min(WINDOW, left // (2 * budget)))
        room = count * budget - tokens(waiting, lengths)
        begin = at
        while at < len(order) and lengths[order[at]] <= room:
            room -= lengths[order[at]]
            at += 1
        taken = order[begin:at]
        if at == len(order):
            waiting, taken = [], waiting + taken
        pool = waiting + sorted(taken, key=lengths.__getitem__, reverse=True)
        bins, spare = spread(pool, lengths, budget, count)
        spare += order[at : at + RESERVE]
        at = min(at + RESERVE, len(order))
        waiting = topped_up(bins, sorted([(lengths[i], i) for i in spare]), lengths, budget)
        left -= sum([tokens(batch, lengths) for batch in bins])
        batches += bins
    last = waiting + order[at:]
    return [*batches, last] if last else batches


def spread(pool: list[int], lengths: list[int], budget: int, count: int) -> tuple[list[list[int]], list[int]]:
    """Examples shared out to batches, each in turn to the emptiest one, and those that did not fit."""
    batches: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, 0, k) for k in range(count)]  # a heap of tokens, number of examples, batch
    spare: list[int] = []
    for i in pool:
        total, examples, k = emptiest[0]
        if total + lengths[i] > budget:
            spare.append(i)
        else:
            batches[k].append(i)
            heapreplace(emptiest, (total + lengths[i], examples + 1, k))
    return batches, spare


def topped_up(batches: list[list[int]], spare: list[Item], lengths: list[int], budget: int) -> list[int]:
    """Fill batches in place from spare examples, sorted pairs of a length and a position; what is spare behind that,
    the longest first."""
    end = len(lengths)
    for batch in sorted(batches, key=lambda batch: tokens(batch, lengths)):
        gap = budget - tokens(batch, lengths)
        while at := bisect_right(spare, (gap, end)):  # the longest that fits
            length, i = spare.pop(at - 1)
            batch.append(i)
            gap -= length
        while gap and (gain := swap_one(batch, spare, lengths, gap)):
            gap -= gain
        if gap > budget // 100 and len(batch) <= MOST_PAIRED:
            swap_two(batch, spare, lengths, gap)
    return [i for _, i in reversed(spare)]


def swap_one(batch: list[int], spare: list[Item], lengths: list[int], gap: int) -> int:
    """Exchange one example of a batch for the spare one that fills most of the gap; the tokens gained."""
    best, where = 0, (0, 0)
    for k, i in enumerate(batch):
        at = bisect_right(spare, (lengths[i] + gap, len(lengths)))
        if at and spare[at - 1][0] - lengths[i] > best:
            best, where = spare[at - 1][0] - lengths[i], (k, at - 1)
            if best == gap:
                break
    if best:
        k, at = where
        _, new = spare.pop(at)
        insort(spare, (lengths[batch[k]], batch[k]))
        batch[k] = new
    return best


def swap_two(batch: list[int], spare: list[Item], lengths: list[int], gap: int) -> None:
    """Swap up to two examples for up to two: for the last batches, where little is spare."""
    some = spare[:: len(spare) // MOST_PAIRED + 1]
    pairs = [(a[0] + b[0], (a[1], b[1])) for a, b in combinations(some, 2)]
    new = sorted(pairs + [(length, (i,)) for length, i in some])
    best, out, into = 0, (), ()
    for old in (*combinations(batch, 1), *combinations(batch, 2)):
        total = tokens(old, lengths)
        at = bisect_right(new, total + gap, key=itemgetter(0))
        if at and new[at - 1][0] - total > best:
            best, out, into = new[at - 1][0] - total, old, new[at - 1][1]
    batch[:] = [i for i in batch if i not in out] + [*into]
    spare[:] = sorted([x for x in spare if x[1] not in into] + [(lengths[i], i) for i in out])


class BucketSampler(EpochSampler):
    """Batches of examples of near lengths, each example once in an epoch.

    It is a `batch_sampler=` for `torch.utils.data.DataLoader` and for `tdc.data.loader`.

    Args:
        lengths: a ragged leaf, or the lengths of examples (B,).
        batch_size: examples of a batch.
        window: how many batches are sorted by length together: more for less padding, fewer for batches that are more
            random. Of 1, batches are random.
        shuffle: another order in each epoch; without it windows are of consecutive examples, and batches in order.
        seed, drop_last, rank, world_size, even: as of `TokenBudgetSampler`.

    Raises:
        ShapeError, DtypeError: no vector of lengths; other arguments that are none.

    Compile:
        Eager only.

    Example:
        >>> sampler = BucketSampler([5, 1, 6, 2, 9, 1], batch_size=2, shuffle=False)
        >>> list(sampler)
        [[4, 2], [0, 3], [1, 5]]

    Source:
        `torch.utils.data.BatchSampler`, `torch.utils.data.DistributedSampler`.
    """

    _op = "data.BucketSampler"

    def __init__(
        self, lengths: Any, batch_size: int, *, window: int = 100, shuffle: bool = True, seed: int = 0,
        drop_last: bool = False, rank: int = 0, world_size: int = 1, even: bool = True,
    ) -> None:  # fmt: skip
        found = example_lengths(self._op, lengths)
        self._batch_size = whole_number(self._op, 1, "batch_size", batch_size)
        self._window = whole_number(self._op, 1, "window", window)
        super().__init__(len(found), shuffle, seed, drop_last, rank, world_size, even)
        self._lengths = found

    def _batches(self, order: Tensor, generator: torch.Generator) -> Plan:
        size, n = self._batch_size, self._examples
        windows = torch.arange(n, device="cpu") // (size * self._window)
        longest_first = self._lengths[order].argsort(descending=True, stable=True)
        order = order[longest_first][windows[longest_first].argsort(stable=True)]
        count = n // size  # of full batches
        if self._shuffle:
            ranks = self._arranged_for
            rounds = torch.randperm(count // ranks, generator=generator, device="cpu")
            first = (rounds[:, None] * ranks + torch.arange(ranks, device="cpu")).flatten()
            chosen = torch.cat([first, torch.arange(len(first), count, device="cpu")])
            order = torch.cat([order[: count * size].view(count, size)[chosen].flatten(), order[count * size :]])
        end = count * size if self._drop_last else n
        return Plan(order[:end], equal_bounds(end, size))

    def _settings(self) -> dict[str, Any]:
        more = {"batch_size": self._batch_size, "window": self._window, "tokens": int(self._lengths.sum())}
        return {**super()._settings(), **more}


class Balanced(Batches):
    """Batches of a fixed number of examples in the mean, of as many tokens on each rank.

    In each round of ranks the longest example goes first, and each to the rank with the fewest tokens.
    """

    def __init__(self, lengths: Any, batch_size: Any, **settings: Any) -> None:
        found = example_lengths(self._op, lengths)
        super().__init__(len(found), batch_size, **settings)
        self._lengths = found

    def _of_rank(self, order: Tensor, generator: torch.Generator) -> Plan:
        left, lengths, ranks = order[self._begin :].tolist(), self._lengths.tolist(), self._world_size
        size = self._batch_size * ranks
        end = len(left) - len(left) % size if self._drop_last else len(left)
        mine: list[list[int]] = []
        for begin in range(0, end, size):
            some = sorted(left[begin : begin + size], key=lengths.__getitem__, reverse=True)
            shares, _ = spread(some, lengths, sys.maxsize, ranks)
            if self._even:  # where the last round has fewer examples than ranks
                shares = [share or left[:1] for share in shares]
            mine.append(shares[self._rank])
        return plan_of([torch.tensor(batch, dtype=torch.int64, device="cpu") for batch in mine])

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "tokens": int(self._lengths.sum())}
