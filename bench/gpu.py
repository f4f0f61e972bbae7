"""What do ragged batches cost on a GPU, against padding, packing by hand, DanLing and torch.nested?

    python -m bench.gpu                         all tables, in at most 8 minutes on one H100 or H200 with 16 cores
    python -m bench.gpu --part encoder text     some of them; --minutes 4, --dtype float32
    python -m bench.gpu --dry                   the same program on the CPU, with tiny sizes: nothing is stored
    timeout 180 python -m pytest tests/gpu -n 12 --dist worksteal -q         the tests that need a GPU

Each part of `bench/_gpu_workloads.py`, in inference and in training, is a job in a process of its own. Jobs compile
side by side in the first 60 % of the time, then measure one after another (`bench/_gpu_turns.py`), and each stores its
table as soon as it is done. Columns are prepared in the order of `COLUMNS`, and what there is no time for is named.

    padded, tdc, raw          eager; `last` is a rectangle of images with channels innermost
    tdc compiled              one graph for all occupancies
    padded graph, tdc graph   CUDA graphs, `mode="reduce-overhead"`; of tdc with `buckets="auto"`, at each occupancy
    torch.nested, danling     eager and compiled, where they run

Inference is without autograd. Training is forward, sum of squares of real elements, which is in the graph of compiled
columns, and backward to the weights. Real elements, or the loss, are compared with those of tdc before they are timed.
Times are whole calls with the device waited for; `bench/_gpu_meters.py` has the figures beside them.

Compiling costs some 10 s for inference of an encoder of 6 layers, 25 s for training; CUDA graphs of tdc at three
occupancies are traced once and cost Inductor three times that. A decoder costs 1.5 times an encoder, `nn.Transformer`
2.5 times, 24 layers 4 times. So the longest jobs take 3 to 5 minutes with all columns, side by side. Measuring takes
some 3 s a row, 100 s in all. These are estimates: no run of this file has been timed on a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "3")  # of each job, before bench._timing says 1

import torch
from torch import Tensor

from bench._gpu_meters import METERS, figures, settle
from bench._gpu_turns import Clock, Job, in_turns
from bench._gpu_workloads import PARTS, TINY, Candidate, Setup, Sizes, Workload
from bench._timing import RESULTS, Report, Spread, interleaved, own, peer, ratio, spread
from tdc.compile import counted

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ROOM = {torch.bfloat16: 0.25, torch.float32: 1e-2}  # how far results may be off those of tdc, of the largest
ROUNDS, FEW, SLOW, BURST = 11, 5, 0.05, 0.01  # rounds; of a row with a call that takes so many seconds; of a turn
OURS = ("padded", "last", "raw", "tdc")  # candidates that have to run
Run = Callable[[], Any]


class Column(NamedTuple):
    """A candidate, and how it runs: eagerly, compiled, or as a CUDA graph."""

    kind: str
    how: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.how}".strip()


COLUMNS = (
    Column("tdc"), Column("padded"), Column("raw"), Column("last"), Column("padded", "graph"), Column("tdc", "graph"),
    Column("tdc", "compiled"), Column("torch.nested"), Column("danling"), Column("torch.nested", "compiled"),
    Column("danling", "compiled"),
)  # fmt: skip
NOT_ON_CPU = ("torch.nested compiled", "danling compiled")

JOBS: list[Job] = [
    ("encoder", "training"), ("encoder", "inference"), ("resnet50", "training"), ("resnet50", "inference"),
    ("text", "training"), ("operators", "training"), ("operators", "inference"), ("decoder", "training"),
    ("decoder", "inference"), ("transformer", "training"), ("transformer", "inference"),
]  # fmt: skip


class Limit(NamedTuple):
    """How much a column may take of another: at most so much in each row, or in all."""

    part: str
    ways: tuple[str, ...]
    ours: str
    base: str
    most: dict[str, float] | float
    figure: str = "time"


BOTH = ("inference", "training")
LIMITS = (
    Limit("encoder", ("inference",), "tdc graph", "padded graph", {"20%": 0.40, "35%": 0.55, "77%": 0.95}),
    Limit("encoder", ("training",), "tdc graph", "padded graph", {"20%": 0.45, "35%": 0.60, "77%": 0.95}),
    Limit("encoder", BOTH, "tdc graph", "padded", {"20%": 0.25, "35%": 0.35, "77%": 0.60}),
    Limit("resnet50", BOTH, "tdc graph", "padded graph", {"43%": 1.0}),
    Limit("resnet50", BOTH, "tdc", "padded", {"43%": 1.5}),
    Limit("text", ("training",), "tdc graph", "padded graph", 0.35),
    Limit("text", ("training",), "tdc", "padded", 0.2, "memory"),
    Limit("operators", ("training",), "tdc", "padded", 1.1),
)


@dataclass
class Row:
    """A workload in one way: its warm calls by column, the seconds of one, and graphs of the compiled ones."""

    what: str
    workload: Workload
    calls: dict[str, Run] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    found: dict[str, Tensor] = field(default_factory=dict)  # real elements or a loss


@dataclass
class Bench:
    """One job: a part of the workloads, in inference or in training."""

    part: str
    way: str
    setup: Setup
    report: Report
    dry: bool
    failed: int = 0  # cells of candidates that have to run
    off: dict[str, float] = field(default_factory=dict)  # by column, from tdc
    compiled: dict[Any, Callable[..., Any]] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return self.setup.device

    def prepared(self, clock: Clock) -> list[Row]:
        """All rows, compiled and warm, column by column: one compiled function of a column serves all rows."""
        torch.manual_seed(0)
        rows = [Row(f"{w.name} {self.way}", w) for w in PARTS[self.part](self.setup)]
        for column in COLUMNS:
            if not any(column.kind in row.workload.candidates for row in rows):
                continue
            if self.dry and column.name in NOT_ON_CPU:
                self.note(f"{column.name}: not on the CPU")
                continue
            for row in rows:
                if time.time() < clock.prepared:
                    self.prepare(row, column)
                else:
                    self.note(f"{row.what}: {column.name}: left out, no time left to compile")
        return rows

    def prepare(self, row: Row, column: Column) -> None:
        """One cell: a warm call whose results are those of tdc."""
        c = row.workload.candidates.get(column.kind)
        if c is None:
            return
        try:
            call = self.call(c, column)
            call()
            self.compare(row, column, c, call())
            settle(self.device)
            begin = time.perf_counter()
            call()
            settle(self.device)
            row.seconds[column.name], row.calls[column.name] = time.perf_counter() - begin, call
        except Exception as error:  # of a peer, or of memory
            self.failed += column.kind in OURS
            self.note(f"{row.what}: {column.name}: {said(error)}")
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def call(self, c: Candidate, column: Column) -> Run:
        """A cell as a function without arguments."""
        module = c.module.train(self.way == "training")
        key = column, module
        if key not in self.compiled:
            self.compiled[key] = self.run_as(column, forward(c) if self.way == "inference" else loss(c))
        fn, fast, wanted = self.compiled[key], column.how == "", c.wanted()

        def infer() -> Any:
            torch.backends.mha.set_fastpath_enabled(fast)  # which torch 2.11 cannot trace
            with torch.no_grad():
                return fn(*c.inputs)

        def train() -> Any:
            total = fn(c.hidden, *c.inputs)
            return total, torch.autograd.grad(total, wanted)

        return infer if self.way == "inference" else train

    def run_as(self, column: Column, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function as the column runs it."""
        how: dict[str, Any] = {"mode": "reduce-overhead"} if column.how == "graph" else {}
        if self.dry:
            how = {"backend": "aot_eager"}
        if column.how == "":
            return fn
        if column.kind == "tdc":
            return counted(fn, buckets="auto" if column.how == "graph" else None, **how)
        return torch.compile(own(fn), fullgraph=True, **how)  # graphs are kept on the code object

    def compare(self, row: Row, column: Column, c: Candidate, result: Any) -> None:
        """Refuse results that are far off those of tdc."""
        y = real(c, result) if self.way == "inference" else result[0].detach().float()
        want = row.found.setdefault("tdc", y)
        if self.part == "resnet50" and column.kind in ("padded", "last"):
            return  # the rectangle has other results
        off = float((y - want).abs().max() / want.abs().max())
        if not off <= ROOM[self.setup.dtype]:
            raise ArithmeticError(f"off tdc by {off:.1e} of the largest")
        self.off[column.name] = max(off, self.off.get(column.name, 0.0))

    def measure(self, row: Row) -> None:
        """Time one row, and take its other figures."""
        slowest = max(row.seconds.values())
        rounds = 1 if self.dry else FEW if slowest > SLOW else ROUNDS
        counts = {name: 1 if self.dry else max(1, round(BURST / s)) for name, s in row.seconds.items()}
        times = interleaved(row.calls, rounds=rounds, count=counts, device=self.device)
        meters = {name: figures(call, self.device, name.endswith("graph")) for name, call in row.calls.items()}
        base = "padded" if "padded" in times else next(iter(times))
        self.report.row(row.what, times, base, **{f"figures of {name}": each for name, each in meters.items()})
        for limit in LIMITS:
            if limit.part == self.part and self.way in limit.ways:
                self.check(limit, row, times, meters)

    def check(self, limit: Limit, row: Row, times: dict[str, list[float]], meters: dict[str, list[int | None]]) -> None:
        """Say if a limit holds in a row."""
        most = limit.most.get(row.workload.name) if isinstance(limit.most, dict) else limit.most
        what = f"{row.what}: {limit.figure} of {limit.ours} to {limit.base}"
        if most is None:
            return
        if limit.ours not in times or limit.base not in times:
            self.note(f"MISSES: {what}: not measured")
        elif limit.figure == "time":
            self.report.limit(what, ratio(times[limit.ours], times[limit.base]), most)
        else:
            ours, base = [meters[name][METERS.index("MB")] or 0 for name in (limit.ours, limit.base)]
            self.report.limit(what, spread([ours / max(base, 1)]), most)

    def finish(self, folder: Path) -> None:
        """Count graphs and failures, and store the table."""
        self.note(", ".join([f"{name} off tdc by {off:.0e} of the largest" for name, off in self.off.items()]))
        for column in COLUMNS:
            counts = [fn.counts for (of, _), fn in self.compiled.items() if of == column and isinstance(fn, counted)]
            if counts:
                traces, buckets = sum(each.compiles for each in counts), sum(each.buckets for each in counts)
                self.note(f"{column.name}: {len(counts)} functions, {traces} traces, {buckets} graphs of fixed sizes")
        self.report.limit("cells of padded, raw and tdc that fail", Spread(*[float(self.failed)] * 3), 0, unit="")
        self.report.write(folder)

    def note(self, text: str) -> None:
        self.report.note(f"{self.part}, {self.way}: {text}")


def said(error: Exception) -> str:
    """The first line of an error."""
    return f"{type(error).__name__} {str(error).partition(chr(10))[0][:160]}"


def forward(c: Candidate) -> Callable[..., Any]:
    module = c.module
    return lambda *inputs: module(*inputs)


def loss(c: Candidate) -> Callable[..., Any]:
    """Sum of squares of real elements."""
    module, values = c.module, c.values
    return lambda hidden, *inputs: values(module(*inputs), hidden).float().square().sum()


def real(c: Candidate, result: Any) -> Tensor:
    """Real elements of a result, packed."""
    y = c.values(result, c.hidden).float()
    return y if c.hidden is None else y[~c.hidden.squeeze(-1)]


def work(job: Job, clock: Clock, wait: Callable[[], None], options: dict[str, Any]) -> bool:
    """Prepare one job, wait for its turn, measure it, and store its table. True if each cell of ours runs."""
    part, way = job
    dry, dtype = options["dry"], options["dtype"]
    device = "cpu" if dry else "cuda"
    named = "" if dtype == "bfloat16" else f"_{dtype}"
    report = Report(f"gpu_{part}_{way}{named}", f"What does {way} of the part {part} cost on a GPU?", device, dry)
    report.note(f"Figures of a column: {', '.join(METERS)}.")
    danling = peer("danling", report)
    bench = Bench(part, way, Setup(device, device, DTYPES[dtype], danling, TINY if dry else Sizes()), report, dry)
    rows = bench.prepared(clock)
    wait()
    try:
        for row in rows:
            if time.time() > clock.end:
                bench.note(f"{row.what}: left out, no time left")
            elif row.calls:
                try:
                    bench.measure(row)
                except Exception as error:  # of memory
                    bench.failed += 1
                    bench.note(f"{row.what}: {said(error)}")
    finally:
        bench.finish(Path(options["folder"]))
    return bench.failed == 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--part", choices=list(PARTS), nargs="+", default=list(PARTS))
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--minutes", type=float, default=8.0, help="when this time is over, what is left is left out")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU, in float32: does each cell run?")
    given = parser.parse_args()
    if not given.dry and not torch.cuda.is_available():
        print("bench.gpu: there is no GPU, and nothing to measure; --dry runs on the CPU")
        return
    jobs = [job for job in JOBS if job[0] in given.part]
    with tempfile.TemporaryDirectory() as nowhere:
        options = {"dry": given.dry, "dtype": "float32" if given.dry else given.dtype, "folder": str(RESULTS)}
        if given.dry:
            options["folder"] = nowhere
        failed = in_turns(work, jobs, 60.0 if given.dry else given.minutes, os.cpu_count() or 1, options)
    print(f"{len(jobs) - len(failed)} of {len(jobs)} jobs: all is well", flush=True)
    for job in failed:
        print(f"failed: {' '.join(job)}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
