"""Bodies of loops and branches in Inductor: what they give has memory of its own (torch 2.11-2.13).

Inductor makes `x` of `x + 0`, so that a body may return what it got. It takes operands for dead behind the operator
whose results they are then, and writes other values there: a gradient that no round adds to came out wrong, silently.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pkgutil import resolve_name as load
from typing import Any
from unittest.mock import patch

import torch

internals: Any = torch.ops.higher_order


def own_results() -> AbstractContextManager[Any]:
    """A context: bodies that are lowered in it copy the operands that they return."""
    lowering = load("torch._inductor.graph:SubgraphLowering")
    return patch.object(lowering, "output", copying(lowering.output))


def copying(output: Callable[..., None]) -> Callable[..., None]:
    """Inductor's lowering of what a graph returns, with a copy of each operand among it."""

    def lower(self: Any, *args: Any) -> None:
        output(self, *args)
        if self.parent.current_node.target in (internals.while_loop, internals.while_loop_stack_output, internals.cond):
            self.graph_outputs = [copied(x) if is_operand(self, x) else x for x in self.graph_outputs]

    return lower


def is_operand(graph: Any, x: Any) -> bool:
    """Whether a result of a graph is one of its inputs, and not one that it writes into."""
    name = x.maybe_get_name() if hasattr(x, "maybe_get_name") else None
    return name in graph.graph_inputs and name not in graph.mutated_buffers


def copied(x: Any) -> Any:
    """A copy in memory of its own."""
    return load("torch._inductor.ir:ExternKernel").copy_input(x)
