"""loader: batches of a TensorDict or of a store, by one gather each, in an order that can be resumed and shared out.

There are no worker processes: gathering rows of mapped memory takes less time than handing a batch over. One background
thread, where it is asked for, gathers and pins ahead. It knows the generator and a small queue, not the iterator that
reads from it: when that is closed, or garbage, the thread is stopped and waited for, as at the exit of Python. The copy
to a device is queued by the thread that runs the loop.

Invariants:
  - those of `epochs`; a batch has memory of its own;
  - at most `prefetch` batches wait, and one is in the making;
  - an error is raised where its batch would have been, with its own traceback.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Never

import torch
from torch import Tensor

from tdc.core.arguments import as_own_device, expect, refuse_unknown
from tdc.core.errors import (
    DtypeError,
    KeyPathError,
    StructureError,
    UnsupportedError,
    describe,
    first_line,
    message,
    refuse_wrong,
)
from tdc.core.keys import show
from tdc.core.progress import Progress, check_progress, each
from tdc.core.typing import NestedKey
from tdc.data.dataset import Dataset, dataset_of
from tdc.data.epochs import Batches, EpochSampler, Plan, whole_number
from tdc.data.samplers import Balanced, TokenBudgetSampler, example_lengths
from tdc.io.save import PathLike
from tdc.ragged.storage import BATCHES
from tdc.tensordict.combine import named_leaves
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.tensordict import TensorDict


class Queue:
    """Items between the two threads."""

    def __init__(self, most: int) -> None:
        self.items: deque[Any] = deque()
        self.most = most
        self.changed = threading.Condition()  # reentrant: the garbage collector may close within
        self.closed = self.ended = False
        self.error: BaseException | None = None

    def put(self, item: Any) -> bool:
        """Wait for room and add an item; False when the reader has stopped."""
        with self.changed:
            while len(self.items) >= self.most and not self.closed:
                self.changed.wait()
            self.items.append(item)
            self.changed.notify_all()
            return not self.closed

    def end(self, error: BaseException | None) -> None:
        """There is nothing more, or an error in place of it."""
        with self.changed:
            self.ended, self.error = True, error
            self.changed.notify_all()

    def take(self) -> Any:
        """Wait for an item. Raises StopIteration, or the error, where there is none."""
        with self.changed:
            while not self.items and not self.ended and not self.closed:
                self.changed.wait()
            if self.items and not self.closed:
                self.changed.notify_all()
                return self.items.popleft()
            error, self.error = self.error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self, thread: threading.Thread) -> None:
        """Stop the thread and wait for it."""
        with self.changed:
            self.closed = True
            self.items.clear()
            self.changed.notify_all()
        if thread is not threading.current_thread():  # where the garbage collector runs in it
            thread.join()


class Ahead(Iterator[Any]):
    """The items of a generator, made by a thread. `close` ends it, as does garbage collection."""

    def __init__(self, items: Generator[Any, None, None], most: int) -> None:
        self._queue = Queue(most)
        thread = threading.Thread(target=fill, args=(items, self._queue), name="tdc.data.loader", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, self._queue.close, thread)  # also at exit

    def __next__(self) -> Any:
        return self._queue.take()


def fill(items: Generator[Any, None, None], queue: Queue) -> None:
    """Put items into a queue until they end or the reader stops."""
    try:
        for item in items:
            if not queue.put(item):
                break
        items.close()
        queue.end(None)
    except BaseException as error:  # whatever it is belongs to who reads
        queue.end(error)


def prefetched(items: Generator[Any, None, None], most: int) -> Generator[Any, None, None]:
    """The same items, up to `most` of them made ahead; without a thread where that is 0."""
    if not most:
        yield from items
        return
    ahead = Ahead(items, most)
    try:
        yield from ahead
    finally:
        ahead.close()


OP = "data.loader"


def loader(
    source: TensorDict | Dataset | PathLike, batch_size: int | None = None, *,
    max_tokens: int | None = None, key: NestedKey | None = None, batch_sampler: EpochSampler | None = None,
    shuffle: bool = False, consecutive: bool = False, seed: int = 0, drop_last: bool = False, prefetch: int = 0,
    pin_memory: bool = False, device: Any = None, rank: int = 0, world_size: int = 1, even: bool = True,
    balance: bool = False, progress: Progress = False, **others: Never,
) -> Loader:  # fmt: skip
    """Batches of examples, again and again: each pass over the result is one epoch.

    Args:
        source: a TensorDict, a Dataset, or the path of a store or of a data set of `tdc.io.writer`, as of Dataset.
        batch_size: examples of a batch.
        max_tokens: in place of it, tokens of a batch: as many examples as fill it, see `TokenBudgetSampler`.
        key: with max_tokens or balance, the ragged leaf whose lengths count, or a leaf that holds lengths.
        batch_sampler: in place of both, a `TokenBudgetSampler` or `BucketSampler` for as many examples.
        shuffle: another order in each epoch, that of `torch.utils.data.DistributedSampler` with the same seed.
        consecutive: with max_tokens, batches of consecutive examples also with shuffle, which then shuffles batches.
        seed: with the epoch, decides the order.
        drop_last: leave out the last batch if it is not full and, with several ranks, what not all ranks have.
        prefetch: how many batches a background thread makes ahead; 0 for no thread.
        pin_memory: batches in page-locked memory, from which a copy to a GPU need not wait.
        device: where batches go; without it they stay where the source is.
        rank, world_size: this process and the number of processes. Each example goes to one rank, and all ranks have
            the same number of batches: the first examples (with max_tokens, batches) are there twice where needed.
        even: False for each example once, as in evaluation: the last batches of some ranks are smaller, or empty.
        balance: with batch_size, as many tokens on each rank, whose batches have that size in the mean.
        progress: True for a bar of each epoch, or a function of how many batches are done and how many there are.

    Returns:
        An iterable of TensorDicts with `len()` batches. `set_epoch(epoch)` chooses an epoch; a pass that ends begins
        the next. `state_dict()` says what was handed out, `load_state_dict(state)` goes on behind it, on any rank.

    Raises:
        DtypeError: neither a TensorDict nor a path; not one of batch_size, max_tokens, batch_sampler; other keywords.
        ShapeError: no batch dim; numbers that are too small; an example longer than max_tokens.
        KeyPathError, StructureError: no key, one that is not there; a batch_sampler for another number of examples.
        UnsupportedError: a device that is not there; pin_memory without one, or of leaves that are on one.
        FormatError, OSError: as `tdc.io.load`.

    Compile:
        Eager only. Batches go into compiled functions as `td[positions]` does.

    Example:
        >>> td = TensorDict({"x": torch.arange(5)}, [5])
        >>> batches = loader(td, batch_size=2, shuffle=True, seed=1)
        >>> [batch["x"].tolist() for batch in batches], len(batches), batches.epoch
        ([[0, 4], [2, 3], [1]], 3, 1)

    Source:
        `torch.utils.data.DataLoader`, `torch.utils.data.DistributedSampler`.
    """
    refuse_unknown(OP, others, loader.__kwdefaults__ or ())
    data = dataset_of(OP, source)
    settings = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last, "even": even}
    settings |= {"rank": rank, "world_size": world_size}
    sampler = sampler_of(data, batch_size, max_tokens, key, batch_sampler, consecutive, balance, settings)
    ahead = whole_number(OP, 0, "prefetch", prefetch)
    check_progress(OP, progress)
    check_pinning(data.parts[0], pin_memory)
    return Loader(data, sampler, ahead, pin_memory, as_own_device(OP, device), progress)


class Loader:
    """The result of `loader`: batches, one epoch in each pass."""

    def __init__(
        self, data: Dataset, sampler: EpochSampler, prefetch: int, pin_memory: bool, device: torch.device | None,
        progress: Progress = False,
    ) -> None:  # fmt: skip
        self._data = data
        self._sampler = sampler
        self._prefetch = prefetch
        self._pin_memory = pin_memory
        self._device = device
        self._progress = progress

    def __len__(self) -> int:
        """Number of batches in the current epoch, the same on all ranks."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[TensorDict]:
        return self._sampler.run(self._batches)

    def _batches(self, plan: Plan, first: int) -> Generator[TensorDict, None, None]:
        made = prefetched(gathered(self._data, plan, first, self._pin_memory), self._prefetch)
        made = made if self._device is None else to_device(made, self._device, self._pin_memory)
        return each(made, self._progress, len(self), "loader", first) if self._progress else made

    @property
    def batch_sampler(self) -> EpochSampler:
        """The sampler that decides the batches. Trainers that count epochs look for `set_epoch` here."""
        return self._sampler

    @property
    def epoch(self) -> int:
        """The current epoch: that of the pass that runs, or of the next one."""
        return self._sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. That of a state that was loaded goes on where it was.

        Raises:
            ShapeError, DtypeError: not an int of 0 or more.
        """
        self._sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """State of the pass: the epoch, the number of batches handed out, and the settings; plain numbers."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batches that were handed out before `state_dict` was called.

        Raises:
            StructureError: other settings, by which the batches would be others; all are named.
            KeyPathError, ShapeError, DtypeError: no such state.
        """
        self._sampler.load_state_dict(state)

    def __repr__(self) -> str:
        return f"Loader({len(self._data)} examples, {len(self)} batches, epoch {self.epoch})"


def gathered(data: Dataset, plan: Plan, first: int, pin_memory: bool) -> Generator[TensorDict, None, None]:
    """The batches of a plan, each by one gather."""
    for begin, end in zip(plan.bounds[first:], plan.bounds[first + 1 :], strict=False):
        batch = data.__getitems__(plan.positions[begin:end])
        yield TensorDict.pin_memory(batch) if pin_memory else batch


def to_device(
    batches: Generator[TensorDict, None, None], device: torch.device, pinned: bool
) -> Generator[TensorDict, None, None]:
    """Batches on another device; where they are pinned, the copy is queued."""
    try:
        for batch in batches:
            yield batch.to(device, non_blocking=pinned)
    finally:
        batches.close()


# -- checks


def sampler_of(
    data: Dataset, batch_size: Any, max_tokens: Any, key: Any, batch_sampler: Any, consecutive: Any, balance: Any,
    settings: dict[str, Any],
) -> EpochSampler:  # fmt: skip
    """The sampler that one of three arguments asks for."""
    given = {"batch_size": batch_size, "max_tokens": max_tokens, "batch_sampler": batch_sampler}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        expected, got = f"one of {', '.join(given)}", " and ".join(names) or "none"
        raise DtypeError(message(OP, expected, got, hint="batch_size=256, or max_tokens=8192 and key="))
    if consecutive and max_tokens is None:
        raise DtypeError(
            message(OP, "consecutive beside max_tokens", names[0], hint="shuffle=False for batches in order")
        )
    expect(OP, balance, bool, of=" for balance")
    if balance and batch_size is None:
        hint = "leave balance out: batches that are full of tokens are balanced"
        raise DtypeError(message(OP, "balance beside batch_size", names[0], hint=hint))
    if balance:
        return Balanced(lengths_at(data.parts, key, "balance"), batch_size, **settings)
    if batch_size is not None:
        return Batches(len(data), batch_size, **settings)
    if max_tokens is not None:
        lengths = lengths_at(data.parts, key, "max_tokens")
        return TokenBudgetSampler(lengths, max_tokens, consecutive=consecutive, **settings)
    check_sampler(batch_sampler, len(data), settings)
    return batch_sampler


def lengths_at(parts: list[TensorDict], key: Any, name: str) -> Any:
    """The leaf whose lengths count for max_tokens and balance; of several parts its lengths."""
    td = parts[0]
    ragged = [show(p) for p, x in td._leaves.items() if isinstance(x, BATCHES)]
    if key is None:
        hint = f"key={ragged[0]!r}" if ragged else "key= of a leaf with the lengths of examples"
        raise KeyPathError(message(OP, f"a key whose tokens {name} counts", "none", hint=hint))
    found = [unwrap(named_leaves(OP, part, [key])[1][0]) for part in parts]
    leaf = found[0]
    if isinstance(leaf, BATCHES) or (isinstance(leaf, Tensor) and leaf.ndim == len(td._size)):
        return leaf if len(found) == 1 else torch.cat([example_lengths(OP, x) for x in found])
    hint = f"ragged leaves are {', '.join(ragged)}" if ragged else "tdc.data.ragged_stack makes ragged leaves"
    raise DtypeError(message(OP, "a ragged leaf, or one length for each example", describe(leaf), hint=hint))


def check_sampler(sampler: Any, examples: int, settings: dict[str, Any]) -> None:
    """Refuse a sampler of torch, one for other data, and settings beside it that are its own."""
    if not isinstance(sampler, EpochSampler):
        hint = "torch.utils.data.DataLoader(tdc.data.Dataset(td), batch_sampler=..., collate_fn=tdc.data.collate)"
        expected = "a tdc.data.TokenBudgetSampler or BucketSampler"
        raise DtypeError(message(OP, expected, describe(sampler), hint=hint))
    defaults = {"shuffle": False, "seed": 0, "drop_last": False, "rank": 0, "world_size": 1, "even": True}
    extra = [name for name, value in settings.items() if value != defaults[name]]
    if extra:
        hint = f"{type(sampler).__name__}(..., {extra[0]}=...)"
        raise DtypeError(message(OP, "a batch_sampler alone", f"{', '.join(extra)} beside it", hint=hint))
    if sampler._examples != examples:
        hint = f"{type(sampler).__name__}(lengths of these examples, ...)"
        got = f"one for {sampler._examples}"
        raise StructureError(message(OP, f"a batch_sampler for {examples} examples", got, hint=hint))


def check_pinning(td: TensorDict, pin_memory: Any) -> None:
    """Refuse to pin where there is no device to pin for, and what is on a device already."""
    expect(OP, pin_memory, bool, of=" for pin_memory")
    if not pin_memory:
        return
    try:
        torch.empty(1, device="cpu").pin_memory()
    except RuntimeError as error:
        hint = f"leave pin_memory out; torch: {first_line(error)[:100]}"
        raise UnsupportedError(message(OP, "a device that memory is pinned for", "none", hint=hint)) from None
    host, leaves = torch.device("cpu"), {show(p): unwrap(x) for p, x in td._leaves.items()}
    wrong = {name: describe(x) for name, x in leaves.items() if (getattr(x, "device", None) or host).type != "cpu"}
    hint = "leave pin_memory out, or td.cpu() first"
    refuse_wrong(UnsupportedError, OP, "leaves on the host to pin", wrong, "on a device", hint)
