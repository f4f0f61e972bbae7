"""What does tdc.map over processes cost, with parts that go by path and as data, and against tensordict's td.map?

55 MiB in two keys, 16 parts, `part + 1`, two processes, whose start is not counted. Each row has the same input and
ends with the same result:

    store to store     from a store into a store: in this process, by threads, by processes, all by path
    store to memory    parts by path, results as data, joined
    memory to memory   parts and results as data

tensordict has a memory map in place of a store, and a `multiprocessing.Pool`. The clock is the wall's, since the work
is done in other processes. `--quick` takes fewer rounds.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import tdc
from bench._timing import Call, Report, arguments, peer, ratio
from bench.bench_store import in_turns
from tdc import TensorDict

ROWS, PARTS, WORKERS = 200_000, 16, 2
START = 0.05  # seconds that processes may take whatever the work is


def plus_one(part: Any) -> Any:
    return part + 1


def measure(report: Report, folder: Path, stack: ExitStack) -> None:
    """All rows."""
    td = TensorDict({"obs": torch.rand(ROWS, 64), "act": torch.rand(ROWS, 8)}, [ROWS])
    store = td.memmap(folder / "in", sync=False)
    out = tdc.io.memmap_empty(td, folder / "out", sync=False)
    spawn = multiprocessing.get_context("spawn")
    threads = stack.enter_context(ThreadPoolExecutor(WORKERS))
    pool = stack.enter_context(ProcessPoolExecutor(WORKERS, spawn, torch.set_num_threads, (1,)))
    calls: dict[str, dict[str, Call]] = {
        "store to store": {
            "in turn": lambda: tdc.map(plus_one, store, num_chunks=PARTS, out=out),
            "threads": lambda: tdc.map(plus_one, store, num_chunks=PARTS, out=out, executor=threads),
            "processes": lambda: tdc.map(plus_one, store, num_chunks=PARTS, out=out, executor=pool),
        },
        "store to memory": {
            "in turn": lambda: tdc.map(plus_one, store, num_chunks=PARTS),
            "processes": lambda: tdc.map(plus_one, store, num_chunks=PARTS, executor=pool),
        },
        "memory to memory": {
            "in turn": lambda: tdc.map(plus_one, td, num_chunks=PARTS),
            "processes": lambda: tdc.map(plus_one, td, num_chunks=PARTS, executor=pool),
        },
    }
    dicts = peer("tensordict", report)
    if dicts is not None:
        report.version(dicts)
        other = dicts.TensorDict(td.to_dict(), [ROWS])
        mapped, target = other.memmap(folder / "other"), other.clone().memmap(folder / "target")
        workers = stack.enter_context(spawn.Pool(WORKERS))
        calls["store to store"]["tensordict"] = lambda: mapped.map(
            plus_one, 0, num_chunks=PARTS, pool=workers, out=target
        )
        calls["store to memory"]["tensordict"] = lambda: mapped.map(plus_one, 0, num_chunks=PARTS, pool=workers)
        calls["memory to memory"]["tensordict"] = lambda: other.map(plus_one, 0, num_chunks=PARTS, pool=workers)
    times = {what: in_turns(found, 5 if report.quick else 21, clock=time.perf_counter) for what, found in calls.items()}
    for what, found in times.items():
        report.row(what, found, "in turn")
    by_path, once = times["store to store"]["processes"], times["store to store"]["in turn"]
    allowed = [3 * seconds + START for seconds in once]
    report.limit("by path, read and written, over 3 times in turn and 50 ms", ratio(by_path, allowed), 1.0)
    report.limit("by path over as data", ratio(by_path, times["memory to memory"]["processes"]), 0.5)
    for what, found in times.items() if dicts is not None else ():
        report.limit(f"{what}: tdc over tensordict", ratio(found["processes"], found["tensordict"]), 1.0)


def main() -> None:
    args = arguments("bench_map")
    report = Report("bench_map", "What does tdc.map over processes cost, by path and as data?", quick=args.quick)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        measure(report, Path(folder), stack)
    report.write()


if __name__ == "__main__":
    main()
