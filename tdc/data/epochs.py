"""Batches of positions for each epoch, in an order that a seed decides: the base of what samples batches here.

    sampler.plan()          the batches of the current epoch that are those of this rank
    sampler.run(make)       what a pass through the epoch yields, counted
    sampler.state_dict()    the epoch, the number of batches that were yielded, and what decides the batches

A plan is a function of the settings, the seed and the epoch alone, so that a state is some numbers, and every rank
makes the plan of all ranks without a word to the others. Another number of ranks goes on behind the examples that were
handed out: the rest of the epoch is dealt to them.

Invariants:
  - all ranks have the same number of batches;
  - positions are on the host, whatever `torch.set_default_device` says;
  - every example is in one batch of one rank; where the last round of ranks is not full, the first examples (or
    batches) are there twice, or with `drop_last` the last ones not at all, as in
    `torch.utils.data.DistributedSampler`; with `even=False` the last batches are smaller, or empty;
  - what counts as yielded was handed to the loop, whatever a background thread has made beyond it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Sampler

from tdc.core.arguments import expect, expect_at_least
from tdc.core.errors import DtypeError, KeyPathError, ShapeError, StructureError, describe, message, refuse_wrong

SEEDS = 2**62  # they are below this, so that the number of an epoch can be added


class Plan(NamedTuple):
    """Batches of positions: batch i is `positions[bounds[i]:bounds[i + 1]]`.

    Attributes:
        positions: (N,) int64, those of all batches, one after another.
        bounds: where each batch begins, and where the last one ends.
    """

    positions: Tensor
    bounds: list[int]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def batch(self, i: int) -> Tensor:
        """The positions of one batch."""
        return self.positions[self.bounds[i] : self.bounds[i + 1]]

    def of_rank(self, rank: int, world_size: int, drop_last: bool, even: bool) -> Plan:
        """Every `world_size`-th batch. The last round is filled with the first ones, or with empty ones."""
        if world_size == 1:
            return self
        n = len(self)
        rounds = n // world_size if drop_last else -(-n // world_size)
        chosen = range(rank, rounds * world_size, world_size)
        return plan_of([self.batch(i % n) if even or i < n else self.positions[:0] for i in chosen])

    def after(self, examples: int) -> Plan:
        """The batches behind so many examples."""
        first = bisect_left(self.bounds, examples)
        return Plan(self.positions[self.bounds[first] :], [end - self.bounds[first] for end in self.bounds[first:]])


def whole_number(op: str, least: int, name: str, value: Any) -> int:
    """An argument that is a whole number of `least` or more; else an error that names it."""
    try:
        expect_at_least(op, least, name, value)
    except DtypeError:
        hint = f"{name}={max(least, 1)}"
        raise DtypeError(message(op, f"an int for {name}", describe(value), hint=hint)) from None
    return int(value)


def plan_of(batches: list[Tensor]) -> Plan:
    """A plan of batches that are there one by one."""
    bounds = [0]
    for batch in batches:
        bounds.append(bounds[-1] + batch.shape[0])
    return Plan(torch.cat(batches) if batches else torch.empty(0, dtype=torch.int64, device="cpu"), bounds)


def equal_bounds(examples: int, size: int) -> list[int]:
    """The bounds of batches of `size` examples, the last of which may have fewer."""
    return [*range(0, examples, size), examples] if examples else [0]


class EpochSampler(Sampler[list[int]]):
    """Batches of positions, for `DataLoader(dataset, batch_sampler=...)` and for `tdc.data.loader`.

    A pass that hands out its last batch ends the epoch, whether or not its loop asks for another one; `set_epoch`
    chooses an epoch. A new pass begins with the first batch, unless a state was loaded.
    """

    _op: str = "data.loader"
    _free: tuple[str, ...] = ()  # settings that another number of ranks may change
    _examples: int
    _shuffle: bool
    _seed: int
    _drop_last: bool
    _even: bool
    _rank: int
    _world_size: int

    def __init__(
        self, examples: int, shuffle: Any, seed: Any, drop_last: Any, rank: Any, world_size: Any, even: Any = True
    ) -> None:
        for flag, name in ((shuffle, "shuffle"), (drop_last, "drop_last"), (even, "even")):
            expect(self._op, flag, bool, of=f" for {name}")
        self._world_size = whole_number(self._op, 1, "world_size", world_size)
        self._rank = whole_number(self._op, 0, "rank", rank)
        self._seed = whole_number(self._op, 0, "seed", seed)
        if self._rank >= self._world_size:
            hint = f"ranks are 0 to {self._world_size - 1}; give world_size=, the number of processes, too"
            raise ShapeError(message(self._op, f"a rank below world_size={world_size}", f"{rank}", hint=hint))
        if self._seed >= SEEDS:
            raise ShapeError(message(self._op, "a seed below 2**62", f"{seed}", hint="seed=0"))
        self._examples, self._shuffle, self._drop_last, self._even = examples, shuffle, drop_last, even
        self._epoch = self._done = self._first = 0
        self._plan: Plan | None = None
        self._begin = 0  # examples of the epoch that another number of ranks had
        self._arranged_for = self._world_size  # ranks for whom the epoch's batches are arranged
        self._loaded = False

    # -- the batches

    def _batches(self, order: Tensor, generator: torch.Generator) -> Plan:
        """The batches of all ranks, of positions in the order of the epoch; of a subclass."""
        raise NotImplementedError

    def _of_rank(self, order: Tensor, generator: torch.Generator) -> Plan:
        """The batches of this rank: by default every `world_size`-th one."""
        rest = self._batches(order, generator).after(self._begin)
        return rest.of_rank(self._rank, self._world_size, self._drop_last, self._even)

    def _handed_to_all(self, batches: int) -> int:
        """Examples of the epoch that all ranks together have had, after so many batches of each."""
        rest = self._batches(*self._order()).after(self._begin)
        return self._begin + rest.bounds[min(batches * self._world_size, len(rest))]

    def _order(self) -> tuple[Tensor, torch.Generator]:
        """The order of positions in the epoch, that of DistributedSampler with the same seed, and what drew it."""
        generator = torch.Generator("cpu").manual_seed(self._seed + self._epoch)
        if self._shuffle:
            return torch.randperm(self._examples, generator=generator, device="cpu"), generator
        return torch.arange(self._examples, device="cpu"), generator

    def plan(self) -> Plan:
        """The batches of the current epoch on this rank."""
        if self._plan is None:
            self._plan = self._of_rank(*self._order())
        return self._plan

    def __len__(self) -> int:
        """Number of batches in the current epoch, the same on all ranks."""
        return len(self.plan())

    def __iter__(self) -> Iterator[list[int]]:
        return self.run(lists)

    def run(self, make: Callable[[Plan, int], Generator[Any, None, None]]) -> Iterator[Any]:
        """Yield from `make(plan, first)`, from the batch `first` on, and count what is handed out."""
        if self._handed_out():
            self.set_epoch(self._epoch + 1)
        elif self._begin and not self._loaded:  # a new pass begins with the first batch
            self._begin_epoch(self._epoch)
        self._loaded = False
        plan, epoch, first = self.plan(), self._epoch, self._first
        self._first, self._done = 0, first
        items = make(plan, first)
        try:
            for done, item in enumerate(items, first + 1):
                if self._epoch == epoch:  # else another one was chosen meanwhile
                    self._done = done
                yield item
        finally:
            items.close()
        if self._epoch == epoch:
            self.set_epoch(epoch + 1)

    def _handed_out(self) -> bool:
        """True if a pass handed out the last batch, and its loop never asked for another one."""
        return not self._first and 0 < self._done == len(self)

    # -- epochs and states

    @property
    def sampler(self) -> EpochSampler:
        """This sampler, where trainers look for what has `set_epoch`: at the `sampler` of a batch sampler."""
        return self

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. That of a state that was loaded goes on where it was.

        Raises:
            ShapeError, DtypeError: not an int of 0 or more.
        """
        chosen = whole_number(self._op, 0, "epoch", epoch)
        if chosen != self._epoch:
            self._begin_epoch(chosen)
        elif self._handed_out():
            self._done = 0

    def _begin_epoch(self, epoch: int) -> None:
        """Forget the batches of the current epoch."""
        self._epoch, self._done, self._first, self._plan = epoch, 0, 0, None
        self._begin, self._arranged_for, self._loaded = 0, self._world_size, False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join([f'{k}={v}' for k, v in self._settings().items()])})"

    def _settings(self) -> dict[str, Any]:
        """The settings that decide the batches, beside the epoch and the number of ranks."""
        return {
            "examples": self._examples, "shuffle": self._shuffle, "seed": self._seed, "drop_last": self._drop_last,
            "even": self._even,
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """State of the pass: the epoch, the number of its batches handed out, and the settings; plain numbers.

        It is the same on all ranks. The workers of a DataLoader are ahead of the loop: count there, and put the numbers
        in, `{**sampler.state_dict(), "epoch": epoch, "batch": seen}`.
        """
        place = {"epoch": self._epoch, "batch": self._done, "begin": self._begin, "arranged_for": self._arranged_for}
        return {**place, "world_size": self._world_size, **self._settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batches that were handed out before `state_dict` was called.

        With another number of ranks the examples that are left of the epoch are dealt to these; batches of a number of
        examples may have another number then.

        Raises:
            KeyPathError: keys that are missing.
            StructureError: other settings, by which the batches would be others; all are named.
            ShapeError, DtypeError: an epoch or batch that is none.
        """
        op = f"{self._op}.load_state_dict"
        expect(op, state, Mapping)
        hint = "what state_dict() of the same kind of sampler returned"
        missing = [key for key in self.state_dict() if key not in state]
        if missing:
            raise KeyPathError(message(op, "a state", f"a dict without {', '.join(missing)}", hint=hint))
        epoch, batch, begin = [whole_number(op, 0, name, state[name]) for name in ("epoch", "batch", "begin")]
        ranks, arranged_for = [whole_number(op, 1, name, state[name]) for name in ("world_size", "arranged_for")]
        free = self._free if ranks != self._world_size else ()
        wrong = {k: f"{state[k]!r}, here {v!r}" for k, v in self._settings().items() if state[k] != v and k not in free}
        refuse_wrong(StructureError, op, "a state of these settings", wrong, "others", "make it with the same settings")
        before, own = dict(self.__dict__), (self._rank, self._world_size)
        sizes = {f"_{name}": getattr(self, f"_{name}") for name in free}
        self.__dict__.update({f"_{name}": whole_number(op, 1, name, state[name]) for name in free})
        self._begin_epoch(epoch)
        self._begin, self._arranged_for, self._loaded = begin, arranged_for, True
        self._rank, self._world_size = (self._rank if ranks == own[1] else 0), ranks
        if batch > len(self):
            count = len(self)
            self.__dict__.update(before)
            raise ShapeError(message(op, f"at most {count} batches in epoch {epoch}", f"{batch}", hint=hint))
        if ranks == own[1]:
            self._done = self._first = batch
            return
        ended = batch == len(self)
        seen = self._handed_to_all(batch)
        (self._rank, self._world_size), self._plan = own, None
        self.__dict__.update(sizes)
        if ended:
            self._begin_epoch(epoch + 1)
        else:
            self._begin = seen


def lists(plan: Plan, first: int) -> Generator[list[int], None, None]:
    """The batches of a plan as lists, as the workers of a DataLoader take them."""
    for i in range(first, len(plan)):
        yield plan.batch(i).tolist()


class Batches(EpochSampler):
    """Batches of a fixed number of examples. The ranks share out examples, as DistributedSampler does."""

    _free = ("batch_size",)

    def __init__(self, examples: int, batch_size: Any, **settings: Any) -> None:
        super().__init__(examples, **settings)
        self._batch_size = whole_number(self._op, 1, "batch_size", batch_size)

    def _of_rank(self, order: Tensor, generator: torch.Generator) -> Plan:
        order = order[self._begin :]
        n, ranks = order.shape[0], self._world_size
        each = n // ranks if self._drop_last else -(-n // ranks)
        if self._even and each * ranks > n:
            order = order.repeat(-(-each * ranks // n))
        mine = order[self._rank : each * ranks : ranks].contiguous()
        end = each - each % self._batch_size if self._drop_last else each
        bounds = equal_bounds(end, self._batch_size)
        return Plan(mine[:end], [min(bound, mine.shape[0]) for bound in bounds])

    def _handed_to_all(self, batches: int) -> int:
        return min(self._begin + batches * self._batch_size * self._world_size, self._examples)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "batch_size": self._batch_size}
