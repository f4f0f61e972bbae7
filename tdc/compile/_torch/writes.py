"""Writes of a new state into the memory of the old one in a graph, when all numbers are known.

Inductor drops clones (torch 2.13-2.15): `b.copy_(a.clone())` behind `a.copy_(x)` writes x into b. So a value that may
be another input goes through `where(x == x, x, x)`, which Inductor keeps. A newly computed value does not: two more
nodes for each tensor of a state took a third of the time that Inductor needs for a step.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from tdc.compile._torch.dynamo import has_comptime
from tdc.compile._torch.tracing import at_trace_time, compile_through, translator
from tdc.core.torch_functions import list_kernel

COPY = list_kernel("foreach_copy_")
# operations that no compiler takes for one of their operands
NEW = {torch.where, torch.lerp, torch.addcmul, torch.addcdiv}
NEW |= {list_kernel(f"foreach_{op.__name__}") for op in (torch.lerp, torch.addcmul, torch.addcdiv)}
WRITES = "written when all is known"  # marks nodes


def write_in_graph(olds: list[Tensor], news: list[Tensor]) -> None:
    """Write new numbers into inputs of the graph: one node in the trace, one for each before it is compiled."""
    if not has_comptime():
        for old, new in zip(olds, [torch.where(x == x, x, x) for x in news], strict=True):
            old.copy_(new)
        return
    COPY(olds, news)
    at_trace_time(note_writes)


def note_writes(context: Any) -> None:
    """Mark the write that was just traced."""
    graph = translator(context).output.graph
    found = graph.find_nodes(op="call_function", target=COPY)
    if found:  # else torch has no such kernel, and each tensor has a node already
        found[-1].meta[WRITES] = True
        compile_through(context, one_by_one)


def one_by_one(compiler: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile a graph in which each tensor is written by a node of its own."""
    for node in [node for node in graph.graph.nodes if WRITES in node.meta]:
        olds, news = node.args
        with graph.graph.inserting_before(node):
            pairs = zip(olds, news, strict=True)
            known = [x if is_new(x) or is_own(x, old) else copied(graph.graph, x) for old, x in pairs]
            for old, new in zip(olds, known, strict=True):
                graph.graph.call_method("copy_", (old, new))
        graph.graph.erase_node(node)
    graph.recompile()
    return compiler(graph, *args, **kwargs)


def copied(graph: torch.fx.Graph, x: torch.fx.Node) -> torch.fx.Node:
    """Copy by an operation that Inductor keeps; it fuses into the kernel that computes the value."""
    return graph.call_function(torch.where, (graph.call_function(torch.eq, (x, x)), x, x))


def is_new(x: torch.fx.Node) -> bool:
    """True for the result of an operation that computes it; one on a list has a node for each result."""
    made: Any = x.args[0] if x.target is operator.getitem else x
    return isinstance(made, torch.fx.Node) and made.target in NEW and "out" not in made.kwargs


def is_own(x: torch.fx.Node, old: torch.fx.Node) -> bool:
    """True for a clone of `old` changed in place: Inductor drops the clone, and the value is in the memory of `old`."""
    return x.target == "clone" and x.args == (old,) and any([changes(user, x) for user in x.users])


def changes(user: torch.fx.Node, x: torch.fx.Node) -> bool:
    """True if a node is an operator of this library that writes into a value."""
    if getattr(user.target, "namespace", "") != "tdc":
        return False
    schema: Any = getattr(user.target, "_schema", None)
    written = [given for given, arg in zip(user.args, schema.arguments, strict=False) if arg.is_write]
    return any([x is given or (isinstance(given, (list, tuple)) and x in given) for given in written])
