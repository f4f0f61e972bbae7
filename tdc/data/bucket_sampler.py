"""Batches of examples of near lengths, for padded batches with little padding.

The order of the epoch is cut into windows of many batches; a window is sorted by length and cut into batches, and then
batches are shuffled. The batches of one round of ranks are neighbours in length, so that no rank waits for another.

Invariant: every example is in exactly one batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.data.epochs import EpochSampler, Plan, equal_bounds, whole_number
from tdc.data.example_lengths import example_lengths


class BucketSampler(EpochSampler):
    """Batches of examples of near lengths, each example once in an epoch.

    It is a `batch_sampler=` for `torch.utils.data.DataLoader` and for `tdc.data.loader`.

    Args:
        lengths: a ragged leaf, or the lengths of examples (B,).
        batch_size: examples of a batch.
        window: how many batches are sorted by length together: more for less padding, fewer for batches that are more
            random. Of 1, batches are random.
        shuffle: another order in each epoch; without it windows are of consecutive examples, and batches in order.
        seed, drop_last, rank, world_size: as of `TokenBudgetSampler`.

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
        drop_last: bool = False, rank: int = 0, world_size: int = 1,
    ) -> None:  # fmt: skip
        found = example_lengths(self._op, lengths)
        self._batch_size = whole_number(self._op, 1, "batch_size", batch_size)
        self._window = whole_number(self._op, 1, "window", window)
        super().__init__(len(found), shuffle, seed, drop_last, rank, world_size)
        self._lengths = found

    def _batches(self, order: Tensor, generator: torch.Generator) -> Plan:
        size, n = self._batch_size, self._examples
        windows = torch.arange(n, device="cpu") // (size * self._window)
        longest_first = self._lengths[order].argsort(descending=True, stable=True)
        order = order[longest_first][windows[longest_first].argsort(stable=True)]
        count = n // size  # of full batches
        if self._shuffle:
            ranks = self._world_size
            rounds = torch.randperm(count // ranks, generator=generator, device="cpu")
            first = (rounds[:, None] * ranks + torch.arange(ranks, device="cpu")).flatten()
            chosen = torch.cat([first, torch.arange(len(first), count, device="cpu")])
            order = torch.cat([order[: count * size].view(count, size)[chosen].flatten(), order[count * size :]])
        end = count * size if self._drop_last else n
        return Plan(order[:end], equal_bounds(end, size))

    def _settings(self) -> dict[str, Any]:
        more = {"batch_size": self._batch_size, "window": self._window, "tokens": int(self._lengths.sum())}
        return {**super()._settings(), **more}
