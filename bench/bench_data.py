"""What does a batch of a store cost, against a gather by hand, numpy and worker processes; how full are batches?

    rows      an epoch of 1 million rows of 4 keys in random batches of 256: numpy.memmap, tdc.data.loader, `td[index]`
    workers   the same from a DataLoader with 2 worker processes, which fetch whole batches
    ragged    an epoch of 100 thousand rows of 1 to 199 tokens in random batches of 256, and a gather by hand
    tokens    batches of a budget of tokens, of lengths as texts have them: what is left empty, what the plan takes

Every candidate shuffles the epoch itself and takes each row once, so that no batch finds its rows in a cache. Files are
in the page cache. The clock is that of the measuring thread, and the wall's for the DataLoader, which works in other
processes.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import tdc
from bench._timing import Call, Report, Spread, arguments, in_turns, ratio
from tdc import TensorDict

ROWS, BATCH, RAGGED = 1_000_000, 256, 100_000
KEYS = {"obs": (64, torch.float32), "act": (8, torch.float32), "rew": (0, torch.float32), "done": (0, torch.bool)}


class Rows(Dataset[Any]):
    """Rows of mapped tensors for a DataLoader, a batch at once."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> Any:
        return {k: x[i] for k, x in self.tensors.items()}

    def __getitems__(self, indices: list[int]) -> Any:
        index = torch.tensor(indices)
        return {k: x.index_select(0, index) for k, x in self.tensors.items()}


def as_given(batch: Any) -> Any:
    return batch


def epoch_of(count: int, take: Callable[[Tensor], Any]) -> Call:
    """An epoch of random batches, by a function of positions."""

    def run() -> None:
        order = torch.randperm(count)
        for i in range(0, count, BATCH):
            take(order[i : i + BATCH])

    return run


def passes(batches: Any) -> Call:
    """An epoch of a loader."""

    def run() -> None:
        for _ in batches:
            pass

    return run


def each(times: Mapping[str, list[float]], count: int) -> dict[str, list[float]]:
    """Seconds of a batch, of those of an epoch."""
    return {name: [t * BATCH / count for t in ts] for name, ts in times.items()}


def forever(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def rows(report: Report, folder: Path) -> None:
    """Batches of random rows of fixed size."""
    td = TensorDict({k: torch.rand(ROWS, *([n] if n else [])).to(dtype) for k, (n, dtype) in KEYS.items()}, [ROWS])
    store = td.memmap(folder / "rows", sync=False)
    leaves = {k: store[k] for k in KEYS}
    dtypes = {k: np.dtype(str(dtype).removeprefix("torch.")) for k, (_, dtype) in KEYS.items()}
    maps = {k: np.memmap(folder / "rows" / f"{k}.memmap", dtypes[k], "r", shape=tuple(td[k].shape)) for k in KEYS}
    del td
    rng = np.random.default_rng(0)

    def by_numpy() -> None:
        order = rng.permutation(ROWS)
        for i in range(0, ROWS, BATCH):
            index = order[i : i + BATCH]
            _ = {k: m[index] for k, m in maps.items()}

    calls: dict[str, Call] = {
        "numpy": by_numpy,
        "loader": passes(tdc.data.loader(store, batch_size=BATCH, shuffle=True)),
        "td[index]": epoch_of(ROWS, lambda index: store[index]),
        "by hand": epoch_of(ROWS, lambda index: {k: x.index_select(0, index) for k, x in leaves.items()}),
    }
    times = each(in_turns(calls, 5 if report.quick else 21), ROWS)
    report.row(f"{BATCH} of {ROWS} rows, 4 keys", times, "numpy")
    report.limit("rows: loader to numpy.memmap", ratio(times["loader"], times["numpy"]), 0.7)

    settings: dict[str, Any] = {"collate_fn": as_given, "shuffle": True, "num_workers": 2, "persistent_workers": True}
    theirs = forever(DataLoader(Rows(leaves), BATCH, **settings))
    ours = forever(tdc.data.loader(store, batch_size=BATCH, shuffle=True))
    ahead = forever(tdc.data.loader(store, batch_size=BATCH, shuffle=True, prefetch=2))
    for batches in (theirs, ours, ahead):
        for _ in range(20):
            next(batches)
    slow: dict[str, Call] = {
        "loader": lambda: next(ours),
        "loader, prefetch=2": lambda: next(ahead),
        "DataLoader, 2 workers": lambda: next(theirs),
    }

    def rest() -> None:
        time.sleep(0.1)  # until the workers have filled their queues, which takes time from the others

    times = in_turns(slow, 5 if report.quick else 15, 200, rest, time.perf_counter)
    report.row(f"{BATCH} of {ROWS} rows, wall clock", times, "loader")
    report.limit("rows: loader to a DataLoader, 2 workers", ratio(times["loader"], [*times.values()][-1]), 1 / 50)


def ragged(report: Report, folder: Path) -> None:
    """Batches of random ragged rows."""
    lengths = torch.randint(1, 200, (RAGGED,))
    offsets = tdc.offsets_of(lengths)
    x = tdc.NestedTensor(torch.randint(0, 50_000, (int(offsets[-1]),)), offsets)
    store = TensorDict({"tokens": x}, [RAGGED]).memmap(folder / "tokens", sync=False)
    tokens = store["tokens"]
    values, offsets = tokens.values, tokens.offsets

    def by_hand(index: Tensor) -> tuple[Tensor, Tensor]:
        begin = offsets.index_select(0, index)
        sizes = offsets.index_select(0, index + 1) - begin
        ends = sizes.cumsum(0)
        rows = torch.repeat_interleave(begin - ends + sizes, sizes)
        return values.index_select(0, rows + torch.arange(rows.shape[0])), ends

    calls: dict[str, Call] = {
        "by hand": epoch_of(RAGGED, by_hand),
        "loader": passes(tdc.data.loader(store, batch_size=BATCH, shuffle=True)),
        "td[index]": epoch_of(RAGGED, lambda index: store[index]),
        "x[index]": epoch_of(RAGGED, lambda index: tokens[index]),
    }
    times = each(in_turns(calls, 5 if report.quick else 31), RAGGED)
    report.row(f"{BATCH} of {RAGGED} ragged rows", times, "by hand")
    report.limit("ragged rows: loader to a gather by hand", ratio(times["loader"], times["by hand"]), 1.5)


def lognormal(mean: float, longest: int) -> Tensor:
    return (torch.randn(RAGGED) + math.log(mean)).exp().clamp(1, longest).long()


def budgets(report: Report, folder: Path) -> None:
    """How full batches of a budget are, and what the plan of an epoch takes."""
    texts = {
        "lognormal, median 400, cut at 2048": (lognormal(400, 2048), (16_384, 8192, 4096)),
        "lognormal, median 60, cut at 512": (lognormal(60, 512), (4096,)),
        "uniform, 1 to 199": (torch.randint(1, 200, (RAGGED,)), (4096, 1024)),
    }
    for name, (lengths, sizes) in texts.items():
        for size in sizes:
            sampler = partial(tdc.data.TokenBudgetSampler, lengths, size)
            calls: dict[str, Call] = {
                "shuffled": lambda make=sampler: len(make()),
                "in order": lambda make=sampler: len(make(shuffle=False)),
            }
            times = in_turns(calls, 2 if report.quick else 5)
            batches = list(sampler())
            assert torch.tensor([i for batch in batches for i in batch]).sort()[0].equal(torch.arange(RAGGED))
            empty = [1 - int(lengths[batch].sum()) / size for batch in batches[:-1]]
            mean, worst = sum(empty) / len(empty), max(empty)
            what = f"{name}, {size} tokens"
            figures = {"batches": len(batches), "empty, mean": f"{mean:.5f}", "empty, worst": f"{worst:.4f}"}
            report.row(f"plan: {what}", {n: [t / RAGGED for t in ts] for n, ts in times.items()}, "shuffled", **figures)
            report.limit(f"empty, worst batch but the last: {what}", Spread(worst, mean, worst), 0.02, unit="of it")


def main() -> None:
    args = arguments("bench_data")
    question = "What does a batch of a store cost, against numpy, a gather by hand and worker processes?"
    report = Report("bench_data", question, quick=args.quick)
    torch.manual_seed(0)
    for measure in (rows, ragged, budgets):
        with tempfile.TemporaryDirectory() as folder:
            measure(report, Path(folder))
    report.note("plan: microseconds of an example; empty: tokens of the budget that a batch leaves")
    report.write()


if __name__ == "__main__":
    main()
