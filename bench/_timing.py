"""Shared parts of benchmarks: interleaved timing, exact counts of compilation, and one form of report.

Machines are noisy, and noise drifts. So the candidates take turns in bursts of a few milliseconds, in an order that
rotates, and a ratio is formed within a round and only then summarised: what slows a whole round down cancels out.
Figures are medians; the spread is the two quartiles. On the CPU the clock is that of the measuring thread, so that what
other processes take is not counted; on a device it is the wall clock, and the device is waited for.

Invariants:
  - one thread, unless the benchmark says otherwise; garbage is collected between bursts and not within;
  - every candidate of a row runs on the same inputs, in the same process, in the same rounds;
  - a peer that is not installed is named and left out; a limit that is missed is printed like one that holds;
  - memory that is freed stays with the process (glibc), for all candidates: by default it goes back to the system, and
    what is measured of large tensors is mostly how the system clears pages. `--trim` measures that.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # idle compile workers would be noise

import torch
import torch._dynamo
from torch._logging._internal import set_logs

import tdc

RESULTS = Path(__file__).parent / "results"
TRIM_THRESHOLD, MMAP_THRESHOLD, LARGEST = -1, -3, 2**31 - 1  # of glibc's mallopt
MEMORY = {"kept": False}  # whether freed memory stays with the process
Call = Callable[[], Any]


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} [{self.low:{spec}}-{self.high:{spec}}]"


def exact(figure: float) -> Spread:
    """A figure without a spread, such as a count."""
    return Spread(figure, figure, figure)


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of one figure per round."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Spread(median, low, high)


def ratio(ours: Sequence[float], base: Sequence[float]) -> Spread:
    """How many times the base, round by round."""
    return spread([a / b for a, b in zip(ours, base, strict=True)])


def geometric_mean(rows: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Spread:
    """Geometric mean of the median ratios of rows `(ours, base)`; quartiles of the same mean taken round by round."""
    rounds = zip(*[[math.log(a / b) for a, b in zip(ours, base, strict=True)] for ours, base in rows], strict=True)
    around = spread([math.exp(statistics.fmean(logs)) for logs in rounds])
    middle = math.exp(statistics.fmean([math.log(ratio(ours, base).median) for ours, base in rows]))
    return Spread(middle, around.low, around.high)


def interleaved(
    calls: Mapping[str, Call],
    *,
    rounds: int = 31,
    burst: float = 0.002,
    device: str = "cpu",
    count: int | Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """Seconds per call of each candidate, one figure for each round.

    Args:
        calls: candidates by name, without arguments.
        rounds: how often each has its turn.
        burst: seconds that one turn takes, about.
        device: "cuda" waits for the device at both ends of a turn.
        count: calls in one turn, of all candidates or of each, if these are warm already; found by timing otherwise.
    """
    watch = wall_time if device == "cuda" else thread_time
    counts = dict(count) if isinstance(count, Mapping) else dict.fromkeys(calls, count or 1)
    for name, call in calls.items() if count is None else ():
        for _ in range(5):
            call()
        once = min(watch(call, 3) for _ in range(3)) / 3
        counts[name] = max(1, round(burst / once))
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        gc.collect(0)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(watch(calls[name], counts[name]) / counts[name])
    return times


def in_turns(
    calls: Mapping[str, Call],
    rounds: int,
    count: int = 1,
    after: Call | None = None,
    clock: Callable[[], float] = time.thread_time,
) -> dict[str, list[float]]:
    """Seconds per call of each candidate, one figure for each round; `after` runs behind each, untimed."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds + 1):
        gc.collect(0)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            gc.disable()
            begin = clock()
            for _ in range(count):
                calls[name]()
            seconds = (clock() - begin) / count
            gc.enable()
            if after is not None:
                after()
            if turn:  # the first round warms up
                times[name].append(seconds)
    return times


def thread_time(call: Call, count: int) -> float:
    """Seconds of this thread for `count` calls."""
    gc.disable()
    begin = time.thread_time()
    for _ in range(count):
        call()
    end = time.thread_time()
    gc.enable()
    return end - begin


def wall_time(call: Call, count: int) -> float:
    """Seconds until the device is done with `count` calls."""
    torch.cuda.synchronize()
    gc.disable()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    end = time.perf_counter()
    gc.enable()
    return end - begin


def own(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own.

    torch.compile keeps its graphs on the code object, so candidates that share one would run each other's guards.
    """
    return FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


def traced(fn: Callable[..., Any], *args: Any) -> tuple[float, int, int]:
    """Seconds of a first call without code generation, number of graphs, and of guards that each later call runs."""
    torch._dynamo.reset()
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled = torch.compile(fn, backend=count, fullgraph=True)
    gc.collect()
    gc.disable()  # a full search is a hundred milliseconds, and falls on whoever comes by
    begin = time.thread_time()
    compiled(*args)
    seconds = time.thread_time() - begin
    gc.enable()
    return seconds, graphs, guards_of(fn)


def guards_of(fn: Callable[..., Any]) -> int:
    """Guards of all graphs of a function that torch.compile was given."""
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(fn)
    return sum(count_guards(entry.guard_manager.root) for entry in entries)


def count_guards(manager: Any) -> int:
    """Leaf guards in the tree of guard managers that runs before a compiled call: keys of dicts and sizes included."""
    shapes = getattr(manager, "get_epilogue_lambda_guards", list)()
    pairs = getattr(manager, "get_key_value_managers", dict)()
    below = [*manager.get_child_managers(), *[m for pair in pairs.values() for m in pair if m is not None]]
    return len(manager.get_leaf_guards()) + len(shapes) + sum(count_guards(child) for child in below)


def peer(name: str, report: Report) -> ModuleType | None:
    """A library to compare with, or None and a line that says so."""
    try:
        return importlib.import_module(name)
    except ImportError:
        report.note(f"{name}: not installed, left out")
        return None


def keep_freed_memory() -> None:
    """Have the allocator keep what is freed, for results to come, where it is glibc's."""
    change = getattr(ctypes.CDLL(None), "mallopt", None) if platform.system() == "Linux" else None
    if change is not None:
        change(TRIM_THRESHOLD, LARGEST)
        change(MMAP_THRESHOLD, LARGEST)
        MEMORY["kept"] = True


def arguments(name: str) -> argparse.Namespace:
    """`--device`, `--quick` and `--trim`, which every benchmark takes."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to see that it runs, not to quote")
    parser.add_argument("--trim", action="store_true", help="give freed memory back to the system, as glibc does")
    given = parser.parse_args()
    if not given.trim:
        keep_freed_memory()
    return given


@dataclass
class Report:
    """Prints a benchmark while it runs, and stores it: `results/<name>.json`, `.md`, and `.png` with matplotlib.

    What was measured on a GPU is stored as `<name>_cuda`.
    """

    name: str
    question: str
    device: str = "cpu"
    quick: bool = False
    machine: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    limits: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        set_logs(all=logging.ERROR)
        self.machine = machine_line(self.device)
        self.versions = {"python": platform.python_version(), "torch": torch.__version__, "tdc": tdc.__version__}
        print(f"{self.name}: {self.question}\n{self.machine}", flush=True)
        print(", ".join(f"{k} {v}" for k, v in self.versions.items()), flush=True)

    def version(self, module: ModuleType) -> None:
        """State the version of a peer."""
        self.versions[module.__name__] = importlib.metadata.version(module.__name__)
        print(f"{module.__name__} {self.versions[module.__name__]}", flush=True)

    def note(self, text: str) -> None:
        """One line beside the figures."""
        self.notes.append(text)
        print(text, flush=True)

    def row(self, what: str, times: Mapping[str, Sequence[float]], base: str, **counts: Any) -> None:
        """One row: each candidate's time, and its ratio to `base`; further exact figures by name."""
        cells = {
            n: {
                "us": spread([t * 1e6 for t in ts]),
                "ratio": ratio(ts, times[base]),
                "fastest": min(ts) / min(times[base]),  # of the fastest bursts: the least disturbed
            }
            for n, ts in times.items()
        }
        self.rows.append({"row": what, "base": base, "candidates": cells, **counts})
        text = "   ".join(
            f"{name} {c['us']:.3g} us ({c['ratio'].median:.2f}x, fastest {c['fastest']:.2f}x)"
            for name, c in cells.items()
        )
        print(f"  {what:28s} {text}", *[f"  {k} {v}" for k, v in counts.items()], flush=True)

    def limit(self, what: str, figure: Spread, limit: float, *, unit: str = "x") -> None:
        """A must-hold figure with its limit and the verdict."""
        verdict = "HOLDS" if figure.median <= limit else "MISSES"
        self.limits.append({"what": what, "figure": figure, "limit": limit, "unit": unit, "verdict": verdict})
        print(f"{verdict}: {what}: {figure:.3f} {unit}, limit {limit} {unit}", flush=True)

    def write(self, folder: Path = RESULTS) -> None:
        """Store everything."""
        folder.mkdir(exist_ok=True)
        data = json.dumps(self.__dict__, indent=1, default=lambda x: x.__dict__) + "\n"
        name = self.name if self.device == "cpu" else f"{self.name}_{self.device}"
        (folder / f"{name}.json").write_text(data, encoding="utf-8")
        (folder / f"{name}.md").write_text(markdown(self), encoding="utf-8")
        plot(self, folder / f"{name}.png")
        print(f"written: {os.path.relpath(folder)}/{name}.json, .md", flush=True)


def machine_line(device: str) -> str:
    """The machine in one line."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    text = f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}, 1 thread"
    text += ", freed memory is kept" if MEMORY["kept"] else ""
    return f"{text}, {torch.cuda.get_device_name()}" if device == "cuda" else text


def markdown(report: Report) -> str:
    """The report as a page: verdicts first, then one table."""
    names = list(dict.fromkeys([name for row in report.rows for name in row["candidates"]]))
    extra = list(dict.fromkeys([k for row in report.rows for k in row if k not in ("row", "base", "candidates")]))
    versions = ", ".join(f"{k} {v}" for k, v in report.versions.items())
    lines = [f"# {report.name}", "", report.question, "", f"{report.machine}; {versions}.", ""]
    lines += ["Medians of interleaved bursts, quartiles in brackets; ratio to the base of the row in italics.", ""]
    for x in report.limits:
        lines.append(f"- **{x['verdict']}** {x['what']}: {x['figure']:.3f} {x['unit']}, limit {x['limit']} {x['unit']}")
    lines += [f"- {note}" for note in report.notes]
    heads = [*[f"{n}, us" for n in names], *extra]
    lines += ["", f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for row in report.rows:
        cells = []
        for name in names:
            cell = row["candidates"].get(name)
            cells.append(f"{cell['us']:.3g} *{cell['ratio'].median:.2f}*" if cell else "")
        cells += [str(row.get(k, "")) for k in extra]
        lines.append(f"| {row['row']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(report: Report, path: Path) -> None:
    """Ratios to the base, one line per row, where matplotlib is there."""
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        return
    rows = [row for row in report.rows if len(row["candidates"]) > 1][::-1]
    names = list(dict.fromkeys([n for row in rows for n in row["candidates"] if n != row["base"]]))
    if not rows:
        return
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.32 * len(rows)), layout="constrained")
    for name in names:
        found = [(i, row["candidates"][name]["ratio"]) for i, row in enumerate(rows) if name in row["candidates"]]
        error = [[r.median - r.low for _, r in found], [r.high - r.median for _, r in found]]
        axes.errorbar([r.median for _, r in found], [i for i, _ in found], xerr=error, fmt="o", label=name, capsize=2)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["row"] for row in rows])
    axes.set_xscale("log")
    axes.set_xlabel(f"times {', '.join(dict.fromkeys(row['base'] for row in rows))}")
    axes.set_title(report.name)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
