"""Reports of torch.compile: proof of one graph, or the reasons against it.

    report = tdc.compile.report(step, (params, batch1), (params, batch2))
    print(report)                     # text; in a notebook the same as HTML
    report.breaks, report.recompiles  # reasons with the user's lines, and what changed between calls

The function runs over the examples in order, with graph breaks allowed. Then, warm, it is timed against the callables
of the backend on flat tensors: the difference is the cost of guards and containers. Guards, kernels and bytes of a
report are those of the newest compile of each graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from tdc.compile._torch.dynamo import CompileId, Event, current_compile, listening
from tdc.compile._torch.inductor import bytes_accessed
from tdc.compile.counts import counted, peak_bytes
from tdc.compile.inductor import backend as inductor
from tdc.compile.inductor import backend_of
from tdc.compile.report.reasons import Break, break_of, causes_of, guards_of, kernels_of
from tdc.compile.report.record import Compile, Report
from tdc.core.arguments import expect_number
from tdc.core.dynamo import with_own_graphs
from tdc.core.errors import DtypeError, StructureError, describe, message

T = TypeVar("T")
SECONDS = 2.0  # at most for timing
LIMIT = Break(
    "torch compiles a function only so often: some calls ran without compiling",
    hint="mend what the recompiles name, or raise torch._dynamo.config.recompile_limit",
)


def report(
    fn: Callable[..., Any],
    *examples: Any,
    backend: Any = inductor,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    repeats: int = 20,
) -> Report:
    """Run a function over examples under `torch.compile`, and report graphs, compiles, kernels and times.

    Args:
        fn: any function or module, compiled before or not; graph breaks are reported, not raised.
        examples: a tuple of arguments each, or a single argument.
        backend, dynamic, mode, options: as of `torch.compile`; `tdc.compile.backend` by default.
        repeats: timed calls of the last example, 2 seconds at most; 0 measures neither time nor memory.

    Returns:
        A `Report`. Kernels and bytes moved are those of Inductor, and empty or None with another backend.

    Raises:
        StructureError: no examples.
        DtypeError: `fn` cannot be called; `dynamic` is not a bool.
        UnsupportedError: an unknown backend or mode.

    Compile:
        On CPU and CUDA. Code is generated anew, past Inductor's caches; other compiled functions stay as they are.

    Example:
        >>> r = report(lambda x: x * 2, torch.ones(3), torch.ones(4), backend="eager")
        >>> r.graphs, len(r.compiles), r.recompiles[0].causes
        (1, 2, ('x: size of dim 0 was 3, now 4',))
    """
    if not callable(fn):
        raise DtypeError(message("compile.report", "a function first", describe(fn), hint="report(fn, *examples)"))
    if not examples:
        hint = "report(fn, (a, b)) for fn(a, b); give several examples of different sizes"
        raise StructureError(message("compile.report", "at least one example", "none", hint=hint))
    expect_number("compile.report", repeats, whole=True)
    fn = fn.fn if isinstance(fn, counted) else fn
    calls = [x if type(x) is tuple else (x,) for x in examples]
    recorder = Recorder(backend_of(backend, mode, options, "compile.report", dynamic))
    compiled = torch.compile(with_own_graphs(fn), backend=recorder, dynamic=dynamic)
    with listening() as events:
        for args in calls:
            run(compiled, args)
        compiles, breaks = gather(recorder.made, events)
    call = raw = peak = None
    if repeats > 0:
        call, raw = overhead(compiled, calls[-1], recorder, repeats)
        peak = max([peak_bytes(run, compiled, args) for args in calls])
    name = getattr(fn, "__name__", type(fn).__name__)
    label = "tdc.compile.backend" if backend is inductor else getattr(backend, "__name__", f"{backend}")
    return Report(name, label, len(calls), breaks, compiles, call, raw, peak)


class BackendCall(NamedTuple):
    """One call of the backend: for which compile, and what it gave."""

    id: CompileId
    ops: int
    seconds: float
    moved: int


@dataclass(slots=True, eq=False)
class Recorder:
    """A backend that notes what it is asked, and on demand the flat tensors that its graphs are called with."""

    inner: Callable[..., Any]
    made: list[BackendCall] = field(default_factory=list)
    flat: list[tuple[Callable[..., Any], tuple[Any, ...]]] | None = None

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        moved, begin = bytes_accessed(), time.perf_counter()
        out = self.inner(graph, inputs)
        seconds = time.perf_counter() - begin
        ops = sum([node.op.startswith("call_") for node in graph.graph.nodes])
        self.made.append(BackendCall(current_compile(), ops, seconds, bytes_accessed() - moved))

        def call(*args: Any) -> Any:
            if self.flat is not None:
                self.flat.append((out, args))
            return out(*args)

        return call


def gather(made: list[BackendCall], events: list[Event]) -> tuple[tuple[Compile, ...], tuple[Break, ...]]:
    """Compiles and breaks from what the backend was asked and what torch said meanwhile."""
    frames = {frame: n for n, frame in enumerate(dict.fromkeys([m.id[0] for m in made]))}
    known = {m.id for m in made}
    compiles = []
    for m in made:
        own = [e for e in events if e.id == m.id]
        kernels = kernels_of(own)
        causes = [cause for e in own if e.name == "recompile_reasons" for cause in causes_of(e.text, known)]
        guards = [e.text for e in own if e.name == "dynamo_cpp_guards_str"][-1:]
        moved = m.moved if any([e.name == "inductor_output_code" for e in own]) else None
        checks = guards_of(guards[0]) if guards else ()
        compiles.append(Compile(frames[m.id[0]], m.ops, m.seconds, tuple(causes), checks, kernels, moved))
    breaks = [break_of(e.text) for e in events if e.name == "dynamo_graph_break_reason"]
    started = {e.id for e in events if e.name == "dynamo_start"}
    if any([e.name == "recompile_reasons" and e.id not in started for e in events]):
        breaks.append(LIMIT)
    return tuple(compiles), tuple({(b.reason, b.where): b for b in breaks}.values())


def run(compiled: Callable[..., T], args: tuple[Any, ...]) -> T:
    """One call, finished on the device. Results of a call before it may be overwritten, as CUDA graphs do."""
    torch.compiler.cudagraph_mark_step_begin()
    out = compiled(*args)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return out


def overhead(
    compiled: Callable[..., Any], args: tuple[Any, ...], recorder: Recorder, repeats: int
) -> tuple[float, float]:
    """Microseconds of a warm call, and of its graphs on the flat tensors; medians of calls taken in turns."""
    recorder.flat = []
    run(compiled, args)
    graphs, recorder.flat = recorder.flat, None

    def raw() -> None:
        for graph, flat in graphs:
            graph(*flat)

    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + SECONDS
    while len(times[0]) < repeats and (not times[0] or time.perf_counter() < end):
        for kept, fn, inputs in ((times[0], compiled, args), (times[1], raw, ())):
            begin = time.perf_counter()
            run(fn, inputs)
            kept.append(time.perf_counter() - begin)
    middle = len(times[0]) // 2
    return sorted(times[0])[middle] * 1e6, sorted(times[1])[middle] * 1e6
