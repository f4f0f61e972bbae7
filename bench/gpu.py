"""What do ragged batches cost on a GPU, against padding, kernels by hand, DanLing and torch.nested?

    python -m bench.gpu --part encoder              in bfloat16, within ten minutes on one H100
    python -m bench.gpu --part text --dtype float32 --modes eager
    for part in encoder text; do python -m bench.gpu --part $part --lock gpu.lock & done; wait

Parts are operators, encoder, decoder, transformer, resnet50 and text (`bench/_gpu_workloads.py`), in bfloat16 or
float32, eager and compiled: one function of each candidate serves all occupancies. Processes that share a lock compile
side by side and time one after another. Inference runs without autograd; training is forward, sum of squares of real
elements and backward to the weights. Beside the time of a call the table has its kernels, the time that these take on
the device, how often the host waits for it, the most memory that the call takes, and graphs. Results of real elements
are compared with the padded ones before anything is timed. A candidate that cannot do a row says so and is left out.
The limit is on tdc over padded. Rows of other dtypes and modes that are stored stay.

There is nothing to measure on a machine without a GPU; tests run each workload on tensors without data there.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from bench._gpu_workloads import PARTS, Candidate, Setup, Workload
from bench._timing import RESULTS, Report, Spread, interleaved, own, peer, ratio, wall_time
from tdc.compile import peak_bytes

LIMIT = 1.0
ROUNDS, BURST = 11, 0.01  # of a turn, in seconds
SLOW, FEW = 0.05, 5  # seconds of a call that gets so many rounds, of one call each
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Run = Callable[[], Any]


def inference(c: Candidate, module: Callable[..., Any]) -> Run:
    return torch.no_grad()(lambda: module(*c.inputs))


def training(c: Candidate, module: Callable[..., Any]) -> Run:
    """Forward, sum of squares and backward to the weights."""
    weights = list(c.module.parameters())

    def step() -> Any:
        loss = c.values(module(*c.inputs)).float().square().sum()
        return torch.autograd.grad(loss, weights) if weights else loss

    return step


WAYS = {"inference": inference, "training": training}


@dataclass
class Row:
    """A workload in one way: warm calls of the candidates that can, and how many graphs each compiled one has."""

    what: str
    workload: Workload
    training: bool
    compiled: bool
    calls: dict[str, Run]
    graphs: dict[str, int]
    slowest: float = 0.0

    def set_mode(self) -> None:
        torch.backends.mha.set_fastpath_enabled(not self.compiled)  # which torch 2.11 cannot trace
        for c in self.workload.candidates.values():
            c.module.train(self.training)


@dataclass
class Compiled:
    """Modules as compiled functions: one for all workloads that share a module."""

    made: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = field(default_factory=dict)

    def of(self, key: tuple[str, str], module: nn.Module) -> Callable[..., Any]:
        if (key, module) not in self.made:
            fn = own(lambda *inputs: module(*inputs))  # graphs are kept on its code object
            self.made[key, module] = fn, torch.compile(fn, fullgraph=True)
        return self.made[key, module][1]

    def graphs(self, key: tuple[str, str], module: nn.Module) -> int:
        return len(torch._dynamo.eval_frame._debug_get_cache_entry_list(self.made[key, module][0]))


def ready(report: Report, workload: Workload, dtype: str, mode: str, way: str, compiled: Compiled) -> Row:
    """The calls of one row, warmed up."""
    row = Row(f"{workload.name} {dtype} {mode} {way}", workload, way == "training", mode == "compiled", {}, {})
    row.set_mode()
    for name, c in workload.candidates.items():
        key = name, way
        call = WAYS[way](c, compiled.of(key, c.module) if mode == "compiled" else c.module)
        try:
            call(), call()
            row.slowest = max(row.slowest, wall_time(call, 1))
        except Exception as error:  # of a peer, or of memory
            report.note(f"{row.what}: {name}: {type(error).__name__} {str(error).splitlines()[0][:120]}")
            continue
        row.calls[name] = call
        if mode == "compiled":
            row.graphs[f"graphs {name}"] = compiled.graphs(key, c.module)
    return row


def agree(report: Report, part: str, dtype: str, workload: Workload) -> None:
    """How far each candidate's real elements are from those of padding, relative to the largest."""
    if part == "resnet50":
        return  # the rectangle has other results
    found: dict[str, Tensor] = {}
    for name, c in workload.candidates.items():
        with torch.no_grad():
            try:
                found[name] = c.values(c.module(*c.inputs)).float()
            except Exception:
                continue  # `ready` says so
    if "padded" not in found:
        return
    want = found.pop("padded")
    real = want.flatten(0, 1)[want.flatten(0, 1).abs().sum(-1) > 0]
    for name, y in found.items():
        off = ((y - real).abs().max() / real.abs().max()).item()
        report.note(f"{workload.name} {dtype}: {name} is off padded by {off:.1e} of the largest")


def kernels(call: Run) -> tuple[int, int]:
    """Kernels and copies of a call, and the microseconds that they take on the device."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    found: list[Any] = [event for event in profiler.events() or () if "CUDA" in str(event.device_type)]
    return len(found), round(sum(event.device_time_total for event in found))


def waits(call: Run) -> int:
    """How often the host waits for the device in a call."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in caught)


def measure(report: Report, row: Row, quick: bool) -> None:
    """Time one row, then count its kernels, waits and memory."""
    if not {"padded", "tdc"} <= set(row.calls):
        return
    row.set_mode()
    rounds, count = (FEW, 1) if row.slowest > SLOW else (ROUNDS, max(1, round(BURST / row.slowest)))
    times = interleaved(row.calls, rounds=3 if quick else rounds, count=count, device="cuda")
    profiles = {name: kernels(call) for name, call in row.calls.items()}
    counts: dict[str, int] = {f"kernels {name}": count for name, (count, _) in profiles.items()}
    counts |= {f"device us {name}": time for name, (_, time) in profiles.items()}
    counts |= {f"waits {name}": waits(call) for name, call in row.calls.items()}
    counts |= {f"MB {name}": round(peak_bytes(call) / 1e6) for name, call in row.calls.items()}
    report.row(row.what, times, "padded", **counts, **row.graphs)
    report.limit(f"{row.what}: tdc to padded", ratio(times["tdc"], times["padded"]), LIMIT)


def prepared(report: Report, part: str, dtype: str, modes: list[str], danling: ModuleType | None) -> list[Row]:
    """All rows of a part in one dtype, compiled and warm."""
    torch.manual_seed(0)
    workloads, compiled = list(PARTS[part](Setup("cuda", "cuda", DTYPES[dtype], danling))), Compiled()
    for workload in workloads:
        agree(report, part, dtype, workload)
    rows = [ready(report, w, dtype, mode, way, compiled) for mode in modes for way in WAYS for w in workloads]
    torch.cuda.empty_cache()
    return rows


def keep_others(report: Report) -> None:
    """Add the rows that are stored already, of other dtypes and modes."""
    path = RESULTS / f"{report.name}_{report.device}.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": [], "limits": [], "notes": []}
    measured = {row["row"] for row in report.rows}
    for row in stored["rows"]:
        for cell in row["candidates"].values():
            cell.update({name: Spread(**cell[name]) for name in ("us", "ratio")})
    for limit in stored["limits"]:
        limit["figure"] = Spread(**limit["figure"])
    report.rows[:0] = [row for row in stored["rows"] if row["row"] not in measured]
    report.limits[:0] = [x for x in stored["limits"] if x["what"].removesuffix(": tdc to padded") not in measured]
    report.notes[:0] = [note for note in stored["notes"] if note not in report.notes]


@contextmanager
def held(path: str | None, how: int) -> Iterator[None]:
    """A block that holds a lock which processes share, if there is one."""
    with open(path or os.devnull, "a") as file:
        if path:
            fcntl.flock(file, how)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--part", choices=list(PARTS), default="operators")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--modes", choices=("eager", "compiled"), nargs="+", default=["eager", "compiled"])
    parser.add_argument("--lock", help="a file: processes of several parts prepare at once, and time one after another")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to see that it runs, not to quote")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.gpu: there is no GPU, and nothing to measure")
        return
    report = Report(f"gpu_{given.part}", f"What does the part {given.part} cost on a GPU?", "cuda", given.quick)
    danling = peer("danling", report)
    with held(given.lock, fcntl.LOCK_SH):
        rows = prepared(report, given.part, given.dtype, given.modes, danling)
    with held(given.lock, fcntl.LOCK_EX):  # when all are prepared
        try:
            for row in rows:
                measure(report, row, given.quick)
        finally:
            keep_others(report)
            report.write()


if __name__ == "__main__":
    main()
