"""A compile report as a picture: its compiles with their causes, and where a warm call spends its time."""

from __future__ import annotations

from typing import Any

from tdc.compile.report.record import Report
from tdc.core.errors import DtypeError, describe, message
from tdc.tensordict.display import shortened
from tdc.viz.figure import NOTE, PADDING, REAL, empty


def report(r: Any) -> Any:
    """Draw a compile report: a bar of seconds for each compile, with its cause, and the time of a warm call.

    Shapes:
        none.

    Args:
        r: the result of `tdc.compile.report`.

    Returns:
        A `matplotlib.figure.Figure` of two axes. First compiles of a graph are green, recompiles brown. A warm call
        is the compiled graphs and the overhead around them; with `repeats=0` it was not measured.

    Raises:
        DtypeError: not a report; UnsupportedError: matplotlib is not installed.

    Compile:
        not traceable.

    Example:
        >>> import torch
        >>> from tdc.compile import report as compile_report
        >>> r = compile_report(lambda x, k: x * k, (torch.ones(3), 2), (torch.ones(3), 5), backend="eager", repeats=0)
        >>> [axes.get_title("left") for axes in report(r).axes]
        ['1 graph, 0 breaks, 2 compiles', 'warm call: not measured']
    """
    if not isinstance(r, Report):
        hint = "tdc.compile.report(fn, *examples)"
        raise DtypeError(message("viz.report", "a compile report", describe(r), hint=hint))
    counts = {"graph": r.graphs, "break": len(r.breaks), "compile": len(r.compiles)}
    first = ", ".join([f"{n} {name}{'s' * (n != 1)}" for name, n in counts.items()])
    call, raw = r.call_us or 0.0, min(r.raw_us or 0.0, r.call_us or 0.0)
    second = f"warm call: {call:.0f} µs" if r.call_us is not None else "warm call: not measured"
    size = (9.0, 1.0 + 0.3 * max(len(r.compiles), 3))
    figure, (left, right) = empty("viz.report", 2, size, (first, second))
    for n, c in enumerate(r.compiles):
        again = c in r.recompiles
        left.barh(n, c.seconds, height=0.7, alpha=0.35, color=PADDING if again else REAL)
        text = "; ".join(c.causes) or ("again" if again else "first")
        text = f"{c.ops} operations, {c.seconds:.1f} s: {shortened(text, 48)}"
        left.annotate(text, (0, n), **NOTE)
    left.set_yticks(range(len(r.compiles)), [f"graph {c.graph}" for c in r.compiles])
    left.set_xlabel("seconds")
    left.set_xlim(0, max([c.seconds for c in r.compiles], default=0.0) * 1.1 or 1)
    left.invert_yaxis()
    kernels = f"{len(r.kernels)} kernels, {len(r.externs)} library calls, {len(r.guards)} guards"
    bars = [("graphs", 0.0, raw, REAL), ("around them", raw, call - raw, PADDING)]
    for name, begin, width, color in bars:
        right.barh(name, width, left=begin, height=0.5, alpha=0.35, color=color)
        right.annotate(f"{width:.0f} µs", (begin, name), **NOTE)
    right.set_xlim(0, call or 1)
    right.set_ylim(1.7, -0.7)
    right.set_xlabel(kernels, fontsize=8)
    right.set_xticks([])
    return figure
