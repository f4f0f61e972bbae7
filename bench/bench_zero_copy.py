"""What does it cost to take a TensorDict of 100 leaves over a border: to another process, and into one buffer?

    send     round trip through two queues of torch.multiprocessing to a spawned process that sends back what it gets:
             one tiny shared tensor, a TensorDict in shared memory and a new one, tensordict consolidated and as it is
    pack     tdc.io.to_buffer against a `cat` of the bytes by hand, from_buffer against views by hand
    share    td.share_memory() against share_memory_() of each clone

Leaves have 1 KiB or 256 KiB. The clock is the wall's, since two processes take turns. What a receiver does with what it
gets is not counted, but all leaves are there when it has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

import tdc
from bench._timing import Report, arguments, interleaved, peer, ratio
from bench.bench_store import in_turns
from tdc import TensorDict
from tdc.io import from_buffer, to_buffer

LEAVES, SIZES = 100, {"1 KiB": 256, "256 KiB": 65536}


def echo(inbox: Any, outbox: Any) -> None:
    """Sends back what it gets."""
    for x in iter(inbox.get, None):
        outbox.put(x)
        del x


def leaves(length: int) -> dict[str, Tensor]:
    return {f"k{i}": torch.rand(length) for i in range(LEAVES)}


def sending(report: Report) -> None:
    """Round trips to another process."""
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=echo, args=(inbox, outbox), daemon=True)
    process.start()

    def trip(make: Callable[[], Any]) -> Callable[[], None]:
        def go() -> None:
            inbox.put(make())
            outbox.get()

        return go

    other: Any = peer("tensordict", report)
    if other is not None:
        report.version(other)
    rounds = 7 if report.quick else 31
    tiny = torch.zeros(4).share_memory_()
    for name, length in SIZES.items():
        own = leaves(length)
        shared = TensorDict(own).share_memory()
        calls = {"tiny": trip(lambda: tiny), "tdc": trip(lambda shared=shared: shared)}
        if other is not None:
            consolidated = other.TensorDict(own).consolidate(share_memory=True)
            calls["tensordict"] = trip(lambda consolidated=consolidated: consolidated)
        times = in_turns(calls, rounds, 30, clock=time.perf_counter)
        report.row(f"send {LEAVES} x {name}, shared", times, "tiny")
        report.limit(f"send {LEAVES} x {name}, shared: tdc to one tiny tensor", ratio(times["tdc"], times["tiny"]), 2.0)
        fresh = {
            "dict": trip(lambda own=own: {k: v.clone() for k, v in own.items()}),
            "tdc": trip(lambda own=own: TensorDict({k: v.clone() for k, v in own.items()})),
        }
        if other is not None:
            fresh["tensordict"] = trip(lambda own=own: other.TensorDict({k: v.clone() for k, v in own.items()}))
        times = in_turns(fresh, min(rounds, 15), 2, clock=time.perf_counter)
        report.row(f"send {LEAVES} x {name}, new", times, "dict")
        report.limit(f"send {LEAVES} x {name}, new: tdc to a dict", ratio(times["tdc"], times["dict"]), 1.0)
    inbox.put(None)
    process.join(60)


def views(buffer: Tensor, length: int) -> list[Tensor]:
    """The leaves of a buffer, by hand."""
    floats = buffer.view(torch.float32)
    return [floats[i * length : (i + 1) * length] for i in range(LEAVES)]


def packing(report: Report) -> None:
    """One buffer, and memory that is shared."""
    rounds = 7 if report.quick else 31
    for name, length in SIZES.items():
        own = leaves(length)
        td = TensorDict(own)
        buffer, schema = to_buffer(td)
        calls = {
            "by hand": lambda own=own: torch.cat([x.view(torch.uint8) for x in own.values()]),
            "tdc": lambda td=td: to_buffer(td),
        }
        report.row(f"to a buffer, {LEAVES} x {name}", interleaved(calls, rounds=rounds), "by hand")
        calls = {
            "by hand": lambda buffer=buffer, length=length: views(buffer, length),
            "tdc": lambda buffer=buffer, schema=schema: from_buffer(buffer, schema),
        }
        report.row(f"from a buffer, {LEAVES} x {name}", interleaved(calls, rounds=rounds), "by hand")
        calls = {
            "by hand": lambda own=own: [x.clone().share_memory_() for x in own.values()],
            "tdc": lambda td=td: td.share_memory(),
        }
        times = interleaved(calls, rounds=rounds)
        report.row(f"share, {LEAVES} x {name}", times, "by hand")
        report.limit(f"share, {LEAVES} x {name}: tdc to each by itself", ratio(times["tdc"], times["by hand"]), 1.0)


def main() -> None:
    args = arguments("bench_zero_copy")
    question = "What does it cost to take 100 leaves over a border: to another process, and into one buffer?"
    report = Report("bench_zero_copy", question, quick=args.quick)
    torch.manual_seed(0)
    report.note(f"sharing strategy {mp.get_sharing_strategy()}, tdc {tdc.__version__}")
    sending(report)
    packing(report)
    report.write()


if __name__ == "__main__":
    main()
