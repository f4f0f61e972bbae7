"""Measure structures over `torch.distributed`: `python -m bench.bench_dist`

Two processes with gloo on one machine, 100 leaves of 1 KiB and of 256 KiB:

    floor          the same bytes as one raw buffer that is there already, by torch.distributed
    tdc            tdc.dist, checked: with the handshake
    unchecked      tdc.dist.all_reduce(check=False)
    leaf by leaf   torch.distributed on each leaf
    tensordict     its spelling, where it is installed

Calls take turns, each behind a barrier, by the wall clock of rank 0. Of a send the time is that of the way there and of
one number back. A figure is the 5 % quantile of calls of a tenth of the rounds, so that other processes weigh little;
ratios are formed within that tenth. Then 20 ragged batches of different lengths, whose messages are counted, and
`balance` of docstrings on four ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tdc
from bench._ranks import of_rank_0
from bench._timing import Report, Spread, keep_freed_memory, spread
from examples.demo.data import load_docstrings
from tdc import TensorDict

LEAVES, TENTHS = 100, 10
Pair = tuple[Callable[[], Any], Callable[[], Any]]  # what rank 0 and rank 1 call
FLOOR, TDC, UNCHECKED, LEAF, PEER = "floor", "tdc", "unchecked", "leaf by leaf", "tensordict"
LIMITS = {  # of tdc over the floor: 1 KiB, 256 KiB
    "send": (5.0, 1.6), "all_reduce": (5.0, 1.6), "broadcast": (5.0, 1.6), "all_gather": (4.5, 0.5),
}  # fmt: skip


def candidates(size: int, rank: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """The calls of a rank, by operation and candidate."""
    td = TensorDict({f"k{i:03d}": torch.rand(size // 4) for i in range(LEAVES)})
    leaves = list(td.values())
    raw = torch.rand(LEAVES * size // 4)
    two = [torch.empty_like(raw), torch.empty_like(raw)]
    one, other, each = torch.zeros(1), 1 - rank, [torch.empty_like(leaves[0]) for _ in range(2)]

    def there_and_back(send: Callable[[], Any], recv: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            if rank == 0:
                send()
                dist.recv(one, 1)
            else:
                recv()
                dist.send(one, 0)

        return run

    calls: dict[str, dict[str, Callable[[], Any]]] = {
        "send": {
            FLOOR: there_and_back(lambda: dist.send(raw, other), lambda: dist.recv(raw, other)),
            TDC: there_and_back(lambda: tdc.dist.send(td, other), lambda: tdc.dist.recv(other)),
            LEAF: there_and_back(
                lambda: [dist.send(x, other) for x in leaves], lambda: [dist.recv(x, other) for x in leaves]
            ),
        },
        "all_reduce": {
            FLOOR: lambda: dist.all_reduce(raw),
            TDC: lambda: tdc.dist.all_reduce(td),
            UNCHECKED: lambda: tdc.dist.all_reduce(td, check=False),
            LEAF: lambda: [dist.all_reduce(x) for x in leaves],
        },
        "broadcast": {
            FLOOR: lambda: dist.broadcast(raw, 0),
            TDC: lambda: tdc.dist.broadcast(None if rank else td),
            LEAF: lambda: [dist.broadcast(x, 0) for x in leaves],
        },
        "all_gather": {
            FLOOR: lambda: dist.all_gather(two, raw),
            TDC: lambda: tdc.dist.all_gather(td, dim=None),
            LEAF: lambda: [dist.all_gather(each, x) for x in leaves],
        },
    }
    try:
        import tensordict
    except ImportError:
        return calls
    theirs = tensordict.TensorDict({k: x.clone() for k, x in td.items()}, [])
    calls["send"][PEER] = there_and_back(lambda: theirs.send(other), lambda: theirs.recv(other))
    return calls


def measured(size: int, rank: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each call on this rank, in turns."""
    calls = candidates(size, rank)
    times: dict[str, dict[str, list[float]]] = {op: {name: [] for name in own} for op, own in calls.items()}
    for turn in range(-3, rounds):
        for op, own in calls.items():
            for name, call in own.items():
                if name == LEAF and turn % (rounds // (2 * TENTHS)):  # slow: twice in a tenth
                    continue
                dist.barrier()
                begin = time.perf_counter()
                call()
                seconds = time.perf_counter() - begin
                if turn >= 0:
                    times[op][name].append(seconds)
    return times


def messages_of_batches(rank: int) -> dict[str, int]:
    """Messages and schemas that 20 ragged batches of different lengths take."""
    sent: list[int] = []
    isend: Any = dist.isend

    def counting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel())
        return isend(tensor, *args, **kwargs)

    setattr(dist, "isend", counting)  # noqa: B010  # to count
    lengths = torch.randint(1, 60, (20, 16), generator=torch.Generator().manual_seed(0)).tolist()
    for row in lengths:
        batch = TensorDict({"text": tdc.pack([torch.ones(n) for n in row]), "label": torch.zeros(16)}, [16])
        if rank == 0:
            tdc.dist.send(batch, 1)
        else:
            tdc.dist.recv(0)
    setattr(dist, "isend", isend)  # noqa: B010  # as it was
    return {"messages": len(sent), "schemas": len(sent) - 2 * len(lengths)}


def balanced(rank: int, world: int) -> dict[str, float]:
    """The largest sum of tokens over the mean, before and after, and the seconds that it takes."""
    lengths = load_docstrings().lengths  # by class, so a stride goes through all of them
    batch = tdc.pack([torch.ones(n) for n in lengths[:: len(lengths) // 256][:256][rank::world]])

    def uneven(x: Any) -> float:
        sums = tdc.dist.all_gather(x.lengths.sum()[None].double())
        return float(sums.max() / sums.mean())

    seconds: list[float] = []
    for _ in range(10):
        dist.barrier()
        begin = time.perf_counter()
        mine, _ = tdc.dist.balance(batch, batch.lengths)
        seconds.append(time.perf_counter() - begin)
    return {"before": uneven(batch), "after": uneven(mine), "ms": statistics.median(seconds) * 1e3}


def worker(rank: int, world: int, store: str, out: str, rounds: int) -> None:
    """Run everything on one rank; rank 0 writes what it found."""
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), world, rank)
    if world == 2:
        found: dict[str, Any] = {str(kib): measured(kib << 10, rank, rounds) for kib in (1, 256)}
        found["batches"] = messages_of_batches(rank)
    else:
        found = balanced(rank, world)
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def low(times: list[float]) -> list[float]:
    """The 5 % quantile of each tenth of the calls."""
    step = max(len(times) // TENTHS, 1)
    parts = [sorted(times[i : i + step]) for i in range(0, step * TENTHS, step)]
    return [part[len(part) // 20] for part in parts if part]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.bench_dist")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to see that it runs, not to quote")
    parser.add_argument("--worker", nargs=5)
    given = parser.parse_args()
    if given.worker:
        rank, world, store, out, rounds = given.worker
        worker(int(rank), int(world), store, out, int(rounds))
    keep_freed_memory()  # of the workers, as the report says
    report = Report("bench_dist", "What does a structure over torch.distributed cost?", quick=given.quick)
    found = of_rank_0("bench_dist", 2, 40 if given.quick else 400)
    ratios: dict[tuple[str, str, str], Spread] = {}
    for kib in ("1", "256"):
        for op, times in found[kib].items():
            rows = {name: low(ts) for name, ts in times.items()}
            report.row(f"{op}, {LEAVES} x {kib} KiB", rows, FLOOR)
            for name, own in rows.items():
                ratios[kib, op, name] = spread([a / b for a, b in zip(own, rows[FLOOR], strict=True)])
    for op, limits in LIMITS.items():
        for kib, limit in zip(("1", "256"), limits, strict=True):
            report.limit(f"{op} of {LEAVES} leaves of {kib} KiB over one buffer", ratios[kib, op, TDC], limit)
    report.limit("all_reduce unchecked, 1 KiB", ratios["1", "all_reduce", UNCHECKED], 3.0)
    schemas = found["batches"]["schemas"]
    report.limit("messages of 20 ragged batches, without schemas", whole(found["batches"]["messages"] - schemas), 40)
    report.limit("schemas of 20 ragged batches", whole(schemas), 1)
    even = of_rank_0("bench_dist", 4, 0)
    report.note(f"balance of 256 docstrings, 4 ranks: max/mean {even['before']:.3f} before, {even['ms']:.1f} ms")
    report.limit("balance of 256 docstrings on 4 ranks, max/mean", whole(even["after"]), 1.01)
    report.write()


def whole(number: float) -> Spread:
    """An exact figure."""
    return Spread(number, number, number)


if __name__ == "__main__":
    main()
