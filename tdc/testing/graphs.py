"""assert_one_graph: a function compiles to one graph, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tdc.compile.inductor import backend as inductor
from tdc.compile.report.build import report
from tdc.compile.report.record import Report
from tdc.core.errors import message
from tdc.tensordict.display import shortened


def assert_one_graph(
    fn: Callable[..., Any], *examples: Any, compiles: int = 1, backend: Any = inductor, dynamic: bool | None = None
) -> Report:
    """Assert that a function compiles to one graph without breaks, and does not recompile for other examples.

    Args:
        fn: the function. It is called once for each example.
        examples: a tuple of arguments each, or a single argument; give some of different sizes.
        compiles: the number of compiles allowed; 2 if torch learns from the second example which sizes vary.
        backend, dynamic: as of `torch.compile`. `backend="eager"` is fast and finds all but the guards of Inductor.

    Returns:
        The report, for further assertions. Time and memory are not measured.

    Raises:
        AssertionError: another number of graphs, or more compiles; names the user's line of each break and the cause of
            each recompile.
        StructureError, DtypeError, UnsupportedError: as `tdc.compile.report`.

    Compile:
        torch remembers the sizes that a function has seen; call `torch._dynamo.reset()` before a test.

    Example:
        >>> import torch
        >>> assert_one_graph(lambda x: x * 2, torch.ones(3), torch.zeros(3), backend="eager").graphs
        1
    """
    r = report(fn, *examples, backend=backend, dynamic=dynamic, repeats=0)
    if r.graphs == 1 and not r.breaks and len(r.compiles) <= compiles:
        return r
    lines = [f"{b.where or 'calls'}: graph break: {shortened(b.reason, 120)}" for b in r.breaks]
    for c in r.recompiles:
        lines.append(f"graph {c.graph}: compiled again: {c.causes[0] if c.causes else 'unknown'}")
    expected = f"1 graph, 0 breaks, at most {compiles} compile{'s' * (compiles != 1)} of {r.name}"
    got = f"{r.graphs} graphs, {len(r.breaks)} breaks, {len(r.compiles)} compiles"
    hint = "tdc.compile.report(fn, *examples) shows all of it"
    raise AssertionError(message("testing.assert_one_graph", expected, got, lines, hint))
