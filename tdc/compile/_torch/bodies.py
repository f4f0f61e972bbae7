"""Operands and results of loops, branches and regions in Inductor: their memory is used for nothing else, and operands
of branches lie in it as they were traced (torch 2.11-2.13).

Inductor makes `x` of `x + 0`, so that a body may return what it got, and the result of a loop is its operand. Inductor
takes that for dead behind the loop and writes other values there: a gradient that no round adds to came out wrong,
silently; so did results of `torch.compiler.nested_compile_region`. Here operands and results are freed as early as
before, and the memory is not handed on.

Inductor also forgets the memory format of a clone. Branches were written for an operand in order and got a transposed
one: an assertion fails, or where those are off the branch reads other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name as load
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch

APART: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # by graph: names of buffers


@contextmanager
def memory_apart() -> Iterator[None]:
    """A context: what is lowered in it hands no memory of operands and results of bodies on, nor a branch an operand
    in another order."""
    ir, wrapper = load("torch._inductor.ir"), load("torch._inductor.codegen.wrapper")
    code = wrapper.PythonWrapperCodegen
    with ExitStack() as patches:
        for kind in (ir.WhileLoop, ir.Conditional, ir.InvokeSubgraph):
            patches.enter_context(patch.object(kind, "codegen", marking(kind.codegen)))
        patches.enter_context(patch.object(code, "codegen_free", freeing(code.codegen_free, wrapper.FreeLine)))
        patches.enter_context(patch.object(ir.Conditional, "create", in_order(ir.Conditional.create)))
        yield


def marking(codegen: Callable[..., None]) -> Callable[..., None]:
    """Inductor's code of a loop, a branch or a region, whose operands and results are marked."""

    def mark(node: Any, *args: Any) -> None:
        graph = load("torch._inductor.virtualized:V").graph
        names = {name for x in [*node.inputs, *(node.outputs or ())] for name in memory_of(graph, x)}
        graph.never_reuse_buffers.update(names)
        APART.setdefault(graph, set()).update(names)
        codegen(node, *args)

    return mark


def memory_of(graph: Any, x: Any) -> Iterator[str]:
    """The name of a buffer, and of what it is a view of."""
    name = x.maybe_get_name()
    while name is not None:
        yield name
        view = getattr(getattr(graph.try_get_buffer(name), "layout", None), "view", None)
        name = None if view is None else view.get_name()


def freeing(codegen: Callable[..., None], line: Any) -> Callable[..., None]:
    """Inductor's code that frees a buffer; without it Inductor keeps what it may not use again."""

    def free(wrapper: Any, buffer: Any) -> None:
        graph, name = load("torch._inductor.virtualized:V").graph, buffer.get_name()
        if name not in APART.get(graph, ()) or name in graph.graph_inputs:
            codegen(wrapper, buffer)
        elif name not in wrapper.freed and name not in graph.removed_buffers:
            wrapper.freed.add(name)
            wrapper.writeline(line(wrapper, buffer))

    return free


def in_order(create: Callable[..., Any]) -> Callable[..., Any]:
    """Inductor's branches, whose operands lie in memory as they were traced."""

    def branches(predicate: Any, true_fn: Any, false_fn: Any, operands: list[Any]) -> Any:
        traced = load("torch._inductor.virtualized:V").graph.current_node.args[-1]
        predicate = load("torch._inductor.ir").ExternKernel.realize_input(predicate)  # first, as Inductor does
        found = [laid_out(x, node) for x, node in zip(operands, traced, strict=True)]
        return create(predicate, true_fn, false_fn, found)

    return branches


def laid_out(x: Any, node: Any) -> Any:
    """An operand with the strides of the node that it stands for; numbers as they are."""
    ir, traced = load("torch._inductor.ir"), getattr(node, "meta", {}).get("val")
    if not isinstance(traced, torch.Tensor):
        return x
    found = ir.ExternKernel.realize_input(x)
    box = found if isinstance(found, ir.TensorBox) else ir.TensorBox(found)
    return ir.ExternKernel.require_exact_strides(box, traced.stride())
