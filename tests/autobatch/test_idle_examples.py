"""Examples that have left a loop of a graph: whose values they run on with, and what a loop carries for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tdc

STARTS = torch.tensor([0.5, 40.0, 3.0, 2000.0], dtype=torch.float64)


@tdc.batch
def doubles(x: Tensor) -> tuple[Tensor, int]:
    """Code that cannot fail."""
    n = 0
    while x.sum() < 1000:
        x = x * 2 + torch.tanh(x)
        if n > 2:
            x = x + 1
        n += 1
    return x, n


@tdc.batch
def divides(k: Tensor) -> Tensor:
    """Code that fails for an example that has left: it would divide by zero."""
    total = k * 0
    while k > 0:
        total = total + 60 // k
        k = k - 1
    return total


def graphs_of(fn: Callable[..., Any], *args: Any) -> list[torch.fx.GraphModule]:
    """The graphs of a call, those of loops among them."""
    found: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        found.extend(part for part in graph.modules() if isinstance(part, torch.fx.GraphModule))
        return graph.forward

    torch.compiler.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*args)
    return found


def called(graphs: list[torch.fx.GraphModule], name: str) -> int:
    """How many nodes call something by a name."""
    return sum(name in str(node.target) for graph in graphs for node in graph.graph.nodes if node.op != "placeholder")


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("given", [STARTS, torch.full((3,), 5000.0, dtype=torch.float64)], ids=["some", "nobody loops"])
def test_code_that_cannot_fail(grad: bool, given: Tensor):
    """Without gradients idle examples keep their values; nothing is picked for them."""
    with torch.set_grad_enabled(grad):
        graphs = graphs_of(lambda x: doubles.map(x), given)
        found = torch.compile(lambda x: doubles.map(x), backend="eager", fullgraph=True)(given)
    want = [doubles(x) for x in given]
    torch.testing.assert_close(found[0], torch.stack([x for x, _ in want]))
    assert found[1].tolist() == [n for _, n in want]
    assert bool(called(graphs, "index_select")) == grad


def test_code_that_fails_for_idle_examples():
    given = torch.tensor([3, 0, 5, 1])
    with torch.no_grad():
        found = torch.compile(lambda k: divides.map(k), backend="eager", fullgraph=True)(given)
    assert found.tolist() == [int(divides(k)) for k in given]


def test_what_a_loop_carries():
    """What rounds change, and who is there: no count of rounds, and not who has left, which is all others."""
    (loop,) = [
        node
        for graph in graphs_of(lambda x: doubles.map(x), STARTS)
        for node in graph.graph.nodes
        if "while_loop" in str(node.target) and node.op == "call_function"
    ]
    assert len(loop.args[2]) == 3


def test_a_test_is_computed_with_the_block_before_it():
    """One level of vmap for a round, though its block and its test are two pieces of code."""
    bodies = graphs_of(lambda k: divides.map(k), torch.tensor([3, 1]))[1:]
    assert max(called([body], "_vmap_increment_nesting") for body in bodies) == 1
