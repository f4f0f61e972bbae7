"""Counts of compiling: graphs, breaks, compiles, kernels; and the memory of a call.

`counted(fn)` is `torch.compile(fn)` that keeps count: "one graph for all lengths" is a number to check.

    graphs      pieces the function was cut into (1: it compiled whole)
    breaks      graph breaks, 0 with fullgraph=True
    compiles    compiles of all pieces (1: no length or batch size compiled it anew)
    kernels     kernels that Inductor generated, without library calls
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import torch

from tdc.compile._torch.dynamo import current_compile, graph_breaks, raised_by_trace, that_may_change
from tdc.compile._torch.inductor import kernels_generated
from tdc.compile.filling.program import Filling
from tdc.compile.filling.sizes import Buckets, buckets_of
from tdc.compile.inductor import backend as inductor
from tdc.compile.inductor import backend_of
from tdc.core.arguments import expect_function
from tdc.core.container import extend_dynamo
from tdc.core.dynamo import with_own_graphs
from tdc.core.errors import StructureError, message
from tdc.core.slow_paths import users_line

EXPLAINED: list[Callable[[Any], Exception | None]] = []  # what rooms above say of an error of torch in a trace


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of compiling one function.

    Attributes:
        seconds: time of the calls that compiled.
        buckets: graphs of fixed sizes, with `buckets=`.
        filling: packed elements that these ran on beyond the real ones, as a part of the real ones.
    """

    name: str
    graphs: int
    breaks: int
    compiles: int
    kernels: int
    seconds: float
    buckets: int = 0
    filling: float = 0.0


class counted:
    """Compile a function as `torch.compile` does, and count graphs, breaks, compiles and kernels.

    Args:
        fn: the function to compile.
        name: its name in reports.
        backend: a backend of `torch.compile`: a name or a function; `tdc.compile.backend` by default.
        fullgraph: a graph break is an error.
        dynamic: as of `torch.compile`; False specialises on every size that is not marked.
        mode, options: as of `torch.compile`, for Inductor.
        buckets: "auto" or a `Buckets` fills batches up to a few sizes, and compiles a graph of fixed sizes for each,
            as CUDA graphs need them. Results are those without filling. Dynamo traces once.

    Raises:
        UnsupportedError: an unknown backend or mode. A call raises the error of this library that stopped its trace,
            with a note of the user's line.
        DtypeError: `fn` cannot be called; `dynamic` is not a bool.

    Example:
        >>> f = counted(lambda x: x * 2, backend="eager")
        >>> _ = f(torch.ones(3)), f(torch.zeros(3))
        >>> f.counts.graphs, f.counts.breaks, f.counts.compiles
        (1, 0, 1)
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str = "",
        backend: Any = inductor,
        fullgraph: bool = True,
        dynamic: bool | None = None,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
        buckets: Buckets | Literal["auto"] | None = None,
    ) -> None:
        expect_function("compile.counted", fn)
        self.name = name or getattr(fn, "__name__", "function")
        self.fn = fn
        sizes = buckets_of(buckets, "compile.counted")
        if sizes is not None and backend is inductor and options is None:
            mode = mode or "reduce-overhead"
        self._inner = backend_of(backend, mode, options, "compile.counted", dynamic)
        self._filling: Filling | None = None
        if sizes is not None:
            self._inner = self._filling = Filling(self._inner, sizes, self.name)
        self._frames: list[int] = []
        self._kernels = self._breaks = 0
        self._seconds = 0.0
        self._compiled = torch.compile(
            with_own_graphs(fn), backend=self._note, fullgraph=fullgraph, dynamic=dynamic,
            options={"guard_filter_fn": that_may_change},
        )  # fmt: skip
        extend_dynamo()

    def __repr__(self) -> str:
        own = self.counts
        return f"counted({own.name}, graphs={own.graphs}, breaks={own.breaks}, compiles={own.compiles})"

    def _note(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """Call the backend and count."""
        self._frames.append(current_compile()[0])
        before = kernels_generated()
        out = self._inner(graph, inputs)
        self._kernels += kernels_generated() - before
        return out

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiles, breaks, begin = len(self._frames), graph_breaks(), time.perf_counter()
        try:
            out = self._compiled(*args, **kwargs)
        except RuntimeError as error:
            if not hasattr(error, "real_stack"):  # not of a trace
                raise
            raise short_of(error) from None
        self._breaks += graph_breaks() - breaks
        if len(self._frames) > compiles:
            self._seconds += time.perf_counter() - begin
        return out

    @property
    def counts(self) -> Counts:
        """Counts up to now."""
        frames, found = self._frames, self._filling
        own = Counts(self.name, len(set(frames)), self._breaks, len(frames), self._kernels, self._seconds)
        if found is None:
            return own
        filling = found.full / found.real - 1 if found.real else 0.0
        return replace(own, kernels=found.kernels, buckets=len(found.recorded), filling=filling)


def counts_of(op: str, run: Any) -> Counts:
    """Counts of a compiled step; refuse one that is not compiled."""
    if not isinstance(run, counted):
        raise StructureError(message(op, "a compiled step", "compile=False", hint="leave compile out"))
    return run.counts


def short_of(error: Any) -> Exception:
    """Reduce the error of a trace to the one of this library, if it is ours, with a note of the user's line."""
    told = (explain(error) for explain in EXPLAINED)
    found: Exception = raised_by_trace(error) or next((each for each in told if each is not None), error)
    if line := users_line(error.real_stack or ()):
        found.add_note(f"at {line}")
    return found.with_traceback(None)


def peak_bytes(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Measure the peak of bytes alive during a call, beyond those alive before it.

    From the profiler's record of allocations on CPU, from the allocator on CUDA.

    Example:
        >>> peak_bytes(lambda x: (x + 1) * 2, torch.zeros(256)) >= 1024
        True
    """
    expect_function("compile.peak_bytes", fn)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fn(*args, **kwargs)
        torch.cuda.synchronize()
        if torch.cuda.max_memory_allocated() > before:
            return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    quiet = {"KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "6")}  # else it prints that it begins and ends
    profile = torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True)
    with patch.dict(os.environ, quiet), profile as profiler:
        fn(*args, **kwargs)
    events: Any = profiler.profiler
    alive = peak = 0
    for event in sorted(events.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak
