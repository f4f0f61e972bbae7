"""Inductor: graphs to kernels, its settings, and its counters (torch 2.11-2.13)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from pkgutil import resolve_name as load
from typing import Any

import torch

from tdc.compile._torch.bodies import memory_apart
from tdc.compile._torch.caches import keep_functions
from tdc.compile._torch.kernels import fewer_kernels
from tdc.compile._torch.scans import counted_down
from tdc.compile._torch.symbolic import any_size, order_of_sizes

BUDGET = "activation_memory_budget"


def compile_graph(
    graph: torch.fx.GraphModule, inputs: list[Any], change: Callable[[torch.fx.GraphModule], None],
    settings: dict[str, Any],
) -> Callable[..., Any]:  # fmt: skip
    """Compile a graph, for all sizes where Inductor can; `change` is called with each graph that is lowered, of the
    forward and of the backward pass."""
    inductor = load("torch._inductor.compile_fx")

    def inner_compile(module: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        change(module)
        if "get_decomp_fn" in kwargs:  # of 2.13: part of the key of the cache on disk, where it must be torch's own
            kwargs["get_decomp_fn"] = load("torch._inductor.decomposition").select_decomp_table
        with lowering(guards=True), counted_down():
            return inductor.compile_fx_inner(module, *args, **kwargs)

    with keep_functions():
        return inductor.compile_fx(
            graph, inputs, inner_compile=inner_compile, config_patches=settings, decompositions=decompositions(settings)
        )


@contextmanager
def lowering(guards: bool) -> Iterator[None]:
    """A context in which graphs are lowered for all sizes.

    Args:
        guards: whether what is found out about sizes may guard the graph; an exported one has none.
    """
    with any_size(asks_no_example()), order_of_sizes(guards), memory_apart(), fewer_kernels():
        yield


def decompositions(settings: dict[str, Any]) -> dict[Any, Callable[..., Any]]:
    """Inductor's decompositions, without its questions about the sizes of matrices."""
    with load("torch._inductor.config").patch(settings):
        table = {**load("torch._inductor.decomposition").select_decomp_table()}
    return table | {op: fn for op, fn in PRODUCTS.items() if op in table}


def product_of_any_size(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Inductor's decomposition of a product, which asks on CPU whether the matrices are small: here the answer is no,
    unless their sizes are numbers, and there is no guard."""
    with any_size():
        return load("torch._inductor.decomposition").decompositions[op](*args, **kwargs)


PRODUCTS = {op: partial(product_of_any_size, op) for op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)}


@cache
def asks_no_example() -> bool:
    """Whether Inductor decides without the example what it is asked about a size under `any_size`.

    torch 2.11 takes the lesser of two sizes by the example and guards, and cannot lower a slice under the flag; so
    there the flag stays unset.
    """
    symbolic, sympy = load("torch.fx.experimental.symbolic_shapes"), load("sympy")
    env, source = symbolic.ShapeEnv(), load("torch._dynamo.source").ConstantSource("size")
    size = env.create_symbol(5, source, symbolic.DimDynamic.DYNAMIC, constraint_dim=None)
    with any_size():
        try:
            load("torch._inductor.sizevars").SizeVarAllocator(env).evaluate_min(size, sympy.Integer(3))
        except TypeError:
            return True
    return False


def apart_in_caches(tag: str) -> AbstractContextManager[None]:
    """A context: what is compiled in it has entries of its own in the caches on disk."""
    config: Any = torch.compiler.config
    return config.patch(cache_key_tag=f"{config.cache_key_tag}{tag}")


def settings_of(mode: str | None, options: dict[str, Any] | None) -> dict[str, Any]:
    """Inductor's settings for a mode and options of `torch.compile`; `BUDGET` among them, which is AOTAutograd's."""
    own = {k: x for k, x in (options or {}).items() if k != BUDGET}
    found: dict[str, Any] = torch._TorchCompileInductorWrapper(mode, own, None).config if mode or own else {}
    return {**found, BUDGET: options[BUDGET]} if options and BUDGET in options else found


@contextmanager
def memory_budget(budget: float | None) -> Iterator[None]:
    """A context: graphs that are compiled in it keep this share of activations, as torch chooses; None says nothing.

    It is torch's partitioner that chooses, so it has no say where forward and backward pass are one graph.
    """
    if budget is None:
        yield
    else:
        with load("torch._functorch.config").patch({BUDGET: budget}), apart_in_caches(f"budget {budget}"):
            yield


def kernels_generated() -> int:
    """Kernels that Inductor generated in this process so far."""
    return int(load("torch._inductor.metrics").generated_kernel_count)


def bytes_accessed() -> int:
    """Bytes that all kernels read and write, as Inductor estimated them in this process so far."""
    return int(load("torch._inductor.metrics").num_bytes_accessed)
