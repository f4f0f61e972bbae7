"""Questions to the installed torch: does it still do what this package relies on?

    failing = [name for name, holds in PROBES if not holds()]

They ask about names whose change would raise no error, such as a mark without effect. They compile nothing with
Inductor, and take a few seconds in all. `FEATURES` are what older versions lack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tdc.compile._torch.autograd import is_recordable, recording
from tdc.compile._torch.collectives import has_collectives
from tdc.compile._torch.dynamo import (
    NO_COMPILE,
    current_compile,
    graph_breaks,
    listening,
    mark_bounds,
    mark_static,
    most_compiles,
    named_backend,
)
from tdc.compile._torch.inductor import BUDGET, apart_in_caches, asks_no_example, memory_budget, settings_of
from tdc.compile._torch.levels import map_lanes
from tdc.compile._torch.symbolic import any_size, fixed, line_of
from tdc.compile._torch.tracing import (
    at_trace_time,
    innermost_transform,
    scan_copies_gradients,
    trace_outside,
)
from tdc.core.dynamo import is_batched, mark_dynamic
from tdc.core.private import find
from tdc.core.probes import graphs_of

internals: Any = torch  # parts of torch without types


def finds_backends() -> bool:
    """Backends are found by name, and only those."""
    return callable(named_backend("eager")) and named_backend("no such backend") is None


def knows_compiles() -> bool:
    """A backend knows which compile of which frame it is called for, and of how many."""
    found = graphs_of(torch.relu, torch.ones(3), torch.ones(4), keep=lambda graph: current_compile())
    told = len(found) == 2 and found[0] != NO_COMPILE and found[0][0] == found[1][0] and found[0] != found[1]
    return told and most_compiles() > 1


def counts_breaks() -> bool:
    """Graph breaks are counted."""
    before = graph_breaks()

    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    graphs_of(broken, torch.ones(2), fullgraph=False)
    return graph_breaks() > before


def marks_static() -> bool:
    """A tensor that is marked static is compiled for each size, though it was marked dynamic before."""
    return len(graphs_of(torch.relu, *[mark_static(mark_dynamic(torch.ones(n), 0)) for n in (3, 4, 5)])) == 3


def marks_bounds() -> bool:
    """A size that is marked with bounds is compiled once."""
    xs = [torch.ones(n) for n in (3, 4, 5)]
    for x in xs:
        mark_bounds(x, 0, 2, 64)
    return len(graphs_of(torch.relu, *xs)) == 1


def acts_while_traced() -> bool:
    """A function is called with Dynamo's context while it traces."""
    seen: list[Any] = []

    def note(context: Any) -> None:
        seen.append(context)

    def fn(x: Tensor) -> Tensor:
        at_trace_time(note)
        return x + 1

    graphs_of(fn, torch.ones(2))
    return len(seen) == 1


def removes_assertions() -> bool:
    """Assertions on data in a trace outside of an operator are taken out of the graph."""

    def fn(x: Tensor) -> Tensor:
        trace_outside(lambda x: internals._assert_async((x > 0).all()), x)
        return x + 1

    [module] = graphs_of(fn, torch.ones(2))
    return not any(["assert" in str(node.target) for node in module.graph.nodes])


def sees_transforms() -> bool:
    """A transform around a call has a name, and tensors under a vmap are told."""
    seen: list[Any] = []

    def fn(x: Tensor) -> Tensor:
        seen.extend([innermost_transform(), is_batched(x)])
        return x

    torch.vmap(fn)(torch.ones(2))
    return innermost_transform() is None and seen == ["vmap", True]


def hears_trace() -> bool:
    """The trace tells where a compile begins, its guards, and why it was repeated."""
    with listening() as events:
        graphs_of(torch.relu, torch.ones(3), torch.ones(4))
    return {"dynamo_start", "dynamo_cpp_guards_str", "recompile_reasons"} <= {e.name for e in events}


def frees_sizes() -> bool:
    """A size that is 1 in the example varies in an exported program, and is read as a multiple of its symbol."""

    class Twice(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, x])

    with any_size():
        program = torch.export.export(Twice(), (torch.ones(1),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    size = list(program.graph.nodes)[-2].meta["val"].shape[0]
    line = line_of(size)
    return fixed(size) is None and line is not None and (line.factor, line.plus) == (2, 0)


def sets_inductor() -> bool:
    """Modes of `torch.compile` are settings of Inductor, and the tag of its caches can be set for a while."""
    config: Any = torch.compiler.config
    before = config.cache_key_tag
    with apart_in_caches("probe"):
        apart = config.cache_key_tag == f"{before}probe"
    return apart and config.cache_key_tag == before and bool(settings_of("max-autotune", None))


def budgets_activations() -> bool:
    """The share of activations that a graph keeps can be set for a while."""
    config = find("torch._functorch.config")
    with memory_budget(0.5):
        half = getattr(config, BUDGET)
    return half == 0.5 and getattr(config, BUDGET) == 1.0


def counts_kernels() -> bool:
    """Inductor has counters of its kernels and of the bytes they touch."""
    metrics = find("torch._inductor.metrics")
    return all([type(getattr(metrics, name, None)) is int for name in ("generated_kernel_count", "num_bytes_accessed")])


def maps_lanes() -> bool:
    """One level of vmap by hand maps what differs between examples, and nothing else, eagerly and in a graph."""

    def both(x: Tensor) -> tuple[Tensor, bool]:
        w = torch.ones(2)
        (doubled, same), mapped = map_lanes(lambda row: (row * 2, w), [x], 3)
        return doubled, mapped == [True, False] and same is w

    x = torch.arange(6.0).reshape(3, 2)
    (graph,) = graphs_of(lambda x: both(x)[0], x)
    return both(x)[1] and torch.equal(both(x)[0], x * 2) and torch.equal(graph(x)[0], x * 2)


def records_autograd() -> bool:
    """A graph holds the gradient that autograd takes in it, of a tensor that requires grad in it alone."""
    if not is_recordable():
        return False

    def slope(x: Tensor) -> Tensor:
        with torch.enable_grad(), recording():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(leaf.sin().sum(), [leaf])[0]

    [graph] = graphs_of(slope, torch.zeros(2))
    return torch.equal(graph(torch.zeros(2))[0], torch.ones(2))


PROBES: tuple[tuple[str, Callable[[], bool]], ...] = (
    ("backends by name", finds_backends),
    ("ids of compiles", knows_compiles),
    ("graph breaks counted", counts_breaks),
    ("sizes marked static", marks_static),
    ("sizes marked with bounds", marks_bounds),
    ("calls while Dynamo traces", acts_while_traced),
    ("assertions taken out of a graph", removes_assertions),
    ("transforms seen", sees_transforms),
    ("one level of vmap by hand", maps_lanes),
    ("trace of guards and recompiles", hears_trace),
    ("sizes 0 and 1 exported as any", frees_sizes),
    ("Inductor's settings and caches", sets_inductor),
    ("budget of activations", budgets_activations),
    ("Inductor's counters", counts_kernels),
    ("functional collectives", has_collectives),
)
FEATURES: tuple[tuple[str, Callable[[], bool]], ...] = (
    ("Inductor free of the example", asks_no_example),
    ("gradients of scan copied", scan_copies_gradients),
    ("autograd in graphs", records_autograd),
)
