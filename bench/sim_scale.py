"""Simulate structures over many ranks from what two of them measure: `python -m bench.sim_scale`

    measured     latency of small messages (their distribution) and bytes a second between 2 processes with gloo, the
                 time of a call in Python, the plan of `balance`; `--latency`, `--bandwidth` take those of your network
    simulated    rings of 8, 64 and 1024 ranks: in each step a rank waits for its neighbour, and a message takes a
                 latency that is drawn from those measured, and its bytes by the bandwidth

One all_reduce on 2 and 4 real ranks is printed beside its simulation. Not in the model: switches that ranks share,
algorithms other than rings (NCCL has trees), ranks of one machine, lost time of ranks that compute unevenly.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tdc
from bench._ranks import of_rank_0
from examples.demo.data import load_docstrings
from tdc import TensorDict
from tdc.dist.balance import plan

WORLDS = (8, 64, 1024)
LEAVES, HEADER, BUCKET, WIDTH = 100, 256, 25 << 20, 4
SIZES = {"100 x 1 KiB": LEAVES << 10, "100 x 256 KiB": LEAVES << 18}


@dataclass
class Link:
    """Seconds of small messages, bytes a second, and seconds of a call in Python."""

    latencies: Tensor
    bandwidth: float
    call: float

    def ring(self, world: int, steps: int, nbytes: float) -> float:
        """Seconds until the last rank has taken so many steps, each with a message of so many bytes."""
        clock = torch.zeros(world, dtype=torch.float64)
        for _ in range(steps):
            drawn = self.latencies[torch.randint(len(self.latencies), (world,))]
            clock = torch.maximum(clock, clock.roll(1)) + drawn + nbytes / self.bandwidth
        return float(clock.max())

    def handshake(self, world: int) -> float:
        return self.ring(world, world - 1, HEADER)

    def send(self, nbytes: int) -> float:
        """A header and a buffer."""
        return self.call + self.ring(1, 1, HEADER) + self.ring(1, 1, nbytes)

    def all_reduce(self, world: int, nbytes: float) -> float:
        return self.call + self.handshake(world) + self.ring(world, 2 * (world - 1), nbytes / world)

    def half(self, world: int, nbytes: float) -> float:
        """A reduce-scatter, or a gather of as many bytes."""
        return self.ring(world, world - 1, nbytes / world)


def exposed(buckets: list[float], backward: float) -> float:
    """Seconds that exchanges go on after a backward pass that finishes buckets at even intervals."""
    end = 0.0
    for i, seconds in enumerate(buckets, 1):
        end = max(end, backward * i / len(buckets)) + seconds
    return end - backward


def steps(link: Link, world: int, nbytes: float, backward: float) -> dict[str, float]:
    """Seconds that a training step waits for others, by `shard=`."""
    count = math.ceil(nbytes / BUCKET)
    part = nbytes / count
    whole = [link.ring(world, 2 * (world - 1), part / world) for _ in range(count)]
    scattered, gathered = [[link.half(world, part) for _ in range(count)] for _ in range(2)]
    return {
        "None": exposed(whole, backward),
        "optimizer": exposed(scattered, backward) + sum(gathered),
        "params": exposed(scattered, backward) + sum(gathered),
    }


def balanced(link: Link, world: int, lengths: Tensor, rows: int) -> tuple[float, float, float, float]:
    """Largest sum over the mean before and after, seconds of the plan, and of the exchange, for rows on each rank."""
    costs = lengths[torch.randint(len(lengths), (world, rows))].double()
    begin = time.perf_counter()
    targets = torch.tensor(plan(costs.flatten().tolist(), world, False)).view(world, rows)
    seconds = time.perf_counter() - begin
    sums = torch.zeros(world, dtype=torch.float64).index_add_(0, targets.flatten(), costs.flatten())
    moved = torch.zeros(world, world, dtype=torch.float64)
    moved.index_put_((torch.arange(world)[:, None].expand(-1, rows), targets), costs * WIDTH, accumulate=True)
    moved.fill_diagonal_(0)
    busiest = max(float(moved.sum(0).max()), float(moved.sum(1).max())) / link.bandwidth
    messages = int((moved > 0).sum(1).max()) * float(link.latencies.median())
    exchange = 2 * link.handshake(world) + link.half(world, world * rows * 8.0) + busiest + messages
    return float(costs.sum(1).max() / costs.sum(1).mean()), float(sums.max() / sums.mean()), seconds, exchange


# -- measured


def quick_ones(run: Callable[[], Any], times: int) -> list[float]:
    """Seconds of calls, each behind a barrier, without the slowest half."""
    found: list[float] = []
    for _ in range(times):
        dist.barrier()
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return sorted(found)[: max(times // 2, 1)]


def worker(rank: int, world: int, store: str, out: str, times: int) -> None:
    """Measure on one rank; rank 0 writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), world, rank)
    leaves = {name: torch.ones(n // LEAVES // 4) for name, n in SIZES.items()}
    tds = {name: TensorDict({f"k{i}": x.clone() for i in range(LEAVES)}) for name, x in leaves.items()}

    def there_and_back(x: Tensor) -> Callable[[], Any]:
        def run() -> None:
            for call in (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send):
                call(x, 1 - rank)

        return run

    found: dict[str, Any] = {}
    for name, td in tds.items():
        found[name] = statistics.median(quick_ones(lambda td=td: tdc.dist.all_reduce(td), times))
    if world == 2:
        found["latencies"] = [t / 2 for t in quick_ones(there_and_back(torch.zeros(HEADER // 4)), 10 * times)]
        large = statistics.median(quick_ones(there_and_back(torch.zeros(1 << 22)), times)) / 2
        found["bandwidth"] = (4 << 22) / (large - statistics.median(found["latencies"]))
        alone = dist.new_subgroups(1)[0]
        td = tds["100 x 1 KiB"]
        found["call"] = statistics.median(quick_ones(lambda: tdc.dist.all_reduce(td, group=alone), times))
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sim_scale")
    parser.add_argument("--latency", type=float, help="microseconds of a small message, in place of those measured")
    parser.add_argument("--bandwidth", type=float, help="GB/s between two ranks, in place of what is measured")
    parser.add_argument("--parameters", type=float, default=100e6, help="float32, of the sharded steps")
    parser.add_argument("--backward", type=float, default=0.5, help="seconds of the backward pass of a rank")
    parser.add_argument("--quick", action="store_true", help="fewer calls: to see that it runs, not to quote")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        rank, world, store, out, times = args.worker
        worker(int(rank), int(world), store, out, int(times))
    times = 10 if args.quick else 100
    torch.manual_seed(0)
    found = of_rank_0("sim_scale", 2, times)
    own = Link(torch.tensor(found["latencies"], dtype=torch.float64), found["bandwidth"], found["call"])
    us, rate = own.latencies.median() * 1e6, own.bandwidth / 1e9
    print(f"measured on 2 ranks: latency {us:.0f} us, bandwidth {rate:.2f} GB/s, a call {own.call * 1e6:.0f} us")
    for world, real in ((2, found), (4, of_rank_0("sim_scale", 4, times))):
        for name, n in SIZES.items():
            both = f"measured {real[name] * 1e3:.2f} ms, simulated {own.all_reduce(world, n) * 1e3:.2f}"
            print(f"all_reduce of {name} on {world} ranks: {both}")
    link = Link(
        own.latencies if args.latency is None else torch.tensor([args.latency * 1e-6], dtype=torch.float64),
        own.bandwidth if args.bandwidth is None else args.bandwidth * 1e9, own.call,
    )  # fmt: skip
    lengths, nbytes = torch.tensor([*load_docstrings().lengths]), 4 * args.parameters
    us, rate = link.latencies.median() * 1e6, link.bandwidth / 1e9
    print(f"simulated, in ms: latency {us:.0f} us, bandwidth {rate:.2f} GB/s; what steps of "
          f"{args.parameters / 1e6:.0f} M parameters wait beyond a backward pass of {args.backward * 1e3:.0f} ms")
    rows: dict[str, list[str]] = {}
    for world in WORLDS:
        for name, n in SIZES.items():
            rows.setdefault(f"send of {name}", []).append(f"{link.send(n) * 1e3:.2f}")
            rows.setdefault(f"all_reduce of {name}", []).append(f"{link.all_reduce(world, n) * 1e3:.1f}")
        rows.setdefault("handshake in it", []).append(f"{link.handshake(world) * 1e3:.1f}")
        for shard, seconds in steps(link, world, nbytes, args.backward).items():
            rows.setdefault(f"step, shard={shard}", []).append(f"{seconds * 1e3:.0f}")
        before, after, planned, exchange = balanced(link, world, lengths, 64)
        rows.setdefault("balance: max/mean before, after", []).append(f"{before:.2f}, {after:.3f}")
        rows.setdefault("balance: plan (measured), exchange", []).append(f"{planned * 1e3:.1f}, {exchange * 1e3:.1f}")
    print(f"{'ranks':38s}" + "".join(f"{w:>16}" for w in WORLDS))
    for name, cells in rows.items():
        print(f"{name:38s}" + "".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
