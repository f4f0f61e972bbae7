"""Inductor: graphs to kernels, its settings, and its counters (torch 2.11-2.15)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from tdc.compile._torch.bodies import MEMORY, ORDER, memory_apart, refuse_reuse
from tdc.compile._torch.caches import keep_functions
from tdc.compile._torch.indices import INDICES, raised_behind_loops
from tdc.compile._torch.kernels import KERNELS, fewer_kernels
from tdc.compile._torch.patches import with_changes_that_fit
from tdc.compile._torch.scans import SCANS, counted_down
from tdc.compile._torch.symbolic import ANY_SIZE, SMALLER, any_size, order_of_sizes, setting
from tdc.core.errors import refusing
from tdc.core.private import find, optional

BUDGET = "activation_memory_budget"
CHANGES = (KERNELS, SCANS, ORDER, INDICES, SMALLER, ANY_SIZE, MEMORY)  # to Inductor


def compile_graph(
    graph: torch.fx.GraphModule, inputs: list[Any], change: Callable[[torch.fx.GraphModule], None],
    settings: dict[str, Any],
) -> Callable[..., Any]:  # fmt: skip
    """Compile a graph for all sizes; `change` is called with each lowered graph, forward and backward."""
    found = with_changes_that_fit(lambda: compiled(graph, inputs, change, settings), CHANGES)
    refuse_reuse(graph)  # now it is known whether memory is kept apart
    return found


def plain(graph: torch.fx.GraphModule, inputs: list[Any], change: Any, settings: dict[str, Any]) -> Callable[..., Any]:
    """Compile a graph with Inductor as it is; refuse one that adds with `alpha`, where Inductor is wrong."""
    if any([node.kwargs.get("alpha", 1) != 1 for node in graph.graph.nodes]):
        refusing("alpha of torch.add in graphs")()
    found: Callable[..., Any] = find("torch:_TorchCompileInductorWrapper")(None, settings, None)(graph, inputs)
    return found


@optional("graphs changed before Inductor", lost="speed, and one graph for all sizes", instead=plain)
def compiled(
    graph: torch.fx.GraphModule, inputs: list[Any], change: Callable[[torch.fx.GraphModule], None],
    settings: dict[str, Any],
) -> Callable[..., Any]:  # fmt: skip
    """Compile a graph with Inductor, and change each graph before it is lowered."""
    compile_fx = find("torch._inductor.compile_fx:compile_fx", takes=("inner_compile", "config_patches"))
    lower = find("torch._inductor.compile_fx:compile_fx_inner")

    def inner_compile(module: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        change(module)
        with products_of_any_size(settings), lowering(guards=True), counted_down():
            return lower(module, *args, **kwargs)

    with keep_functions(), products_of_any_size(settings):
        found: Callable[..., Any] = compile_fx(graph, inputs, inner_compile=inner_compile, config_patches=settings)
    return found


@optional("equal operations merged", lost="speed of graphs without gradients", instead=lambda module: None)
def merge_equal(module: torch.fx.GraphModule) -> None:
    """Merge equal operations of a graph, as torch does in graphs for training only.

    Two that each make a size from data, such as `nonzero`, stay as they are, see `number_of_read`.
    """
    merged = find("torch._functorch.compile_utils:fx_graph_cse")(module.graph)
    if sizes_made(merged) == sizes_made(module.graph):
        module.graph = merged


def sizes_made(graph: torch.fx.Graph) -> int:
    """Operations of a graph that make sizes from data."""
    return len([node for node in graph.nodes if node.meta.get("unbacked_bindings")])


@contextmanager
def lowering(guards: bool) -> Iterator[None]:
    """A context in which graphs are lowered for all sizes; without `guards` findings about sizes are errors."""
    with any_size(asks_no_example()), order_of_sizes(guards), memory_apart(), fewer_kernels(), raised_behind_loops():
        yield


@optional(ANY_SIZE, lost="a recompile where a size crosses a threshold", instead=lambda settings: nullcontext())
def products_of_any_size(settings: dict[str, Any]) -> AbstractContextManager[Any]:
    """A context in which Inductor decomposes products, and traces its patterns, without asking for their sizes."""
    with find("torch._inductor.config:patch")(settings):
        table = find("torch._inductor.decomposition:select_decomp_table")()
    ops: Any = torch.ops.aten
    products = [op for op in (ops.mm.default, ops.addmm.default) if op in table]
    return patch.dict(table, {op: of_any_size(table[op]) for op in products})


def of_any_size(decompose: Callable[..., Any]) -> Callable[..., Any]:
    """Decompose a product without asking if its matrices are small, unless their sizes are numbers."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with any_size():
            return decompose(*args, **kwargs)

    return run


@cache
@optional(ANY_SIZE, lost="a recompile where a size crosses a threshold", instead=lambda: False)
def asks_no_example() -> bool:
    """True if Inductor decides about sizes under `any_size` without the example.

    torch 2.11 takes the lesser of two sizes by the example and guards, and cannot lower a slice under the flag.
    """
    symbolic, sympy = find("torch.fx.experimental.symbolic_shapes"), find("sympy")
    env, source = symbolic.ShapeEnv(), find("torch._dynamo.source:ConstantSource")("size")
    ask = find("torch._inductor.sizevars:SizeVarAllocator.evaluate_min")
    size = env.create_symbol(5, source, symbolic.DimDynamic.DYNAMIC, constraint_dim=None)
    with any_size():
        try:
            ask(find("torch._inductor.sizevars:SizeVarAllocator")(env), size, sympy.Integer(3))
        except TypeError:
            return True
    return False


def apart_in_caches(tag: str) -> AbstractContextManager[Any]:
    """A context whose graphs have entries of their own in the caches on disk."""
    config: Any = torch.compiler.config
    return config.patch(cache_key_tag=f"{config.cache_key_tag}{tag}")


@optional("modes of Inductor", lost="mode= and options= of torch.compile", instead=lambda mode, options: {})
def settings_of(mode: str | None, options: dict[str, Any] | None) -> dict[str, Any]:
    """Settings of Inductor for a mode and options of `torch.compile`, with AOTAutograd's `BUDGET`."""
    own = {k: x for k, x in (options or {}).items() if k != BUDGET}
    found: dict[str, Any] = find("torch:_TorchCompileInductorWrapper")(mode, own, None).config if mode or own else {}
    return {**found, BUDGET: options[BUDGET]} if options and BUDGET in options else found


@contextmanager
def memory_budget(budget: float | None) -> Iterator[None]:
    """A context: graphs keep this share of activations, by torch's partitioner; None is a no-op."""
    with budget_set(budget), apart_in_caches("" if budget is None else f"budget {budget}"):
        yield


@optional("budget of activations", lost="the budget", instead=nullcontext)
def budget_set(budget: float | None) -> AbstractContextManager[Any]:
    """A context with a budget."""
    return nullcontext() if budget is None else setting("torch._functorch.config", **{BUDGET: budget})


@optional("kernels counted", lost="counts.kernels", instead=lambda: 0)
def kernels_generated() -> int:
    """Kernels that Inductor generated in this process so far."""
    return int(find("torch._inductor.metrics:generated_kernel_count"))


@optional("bytes counted", lost="bytes_moved of a report", instead=lambda: 0)
def bytes_accessed() -> int:
    """Bytes that all kernels read and write, as Inductor estimated them in this process so far."""
    return int(find("torch._inductor.metrics:num_bytes_accessed"))
