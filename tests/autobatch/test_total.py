"""What may run in a graph for examples that do not come to it, and that all else does not.

And examples that have left a loop: whose values they run on with, and what a loop carries for them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tdc
from tdc.compile._torch import total

VALUES = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, 1e4, -1e4, 1e18, -1e18])
GIVEN: dict[str, tuple[Any, ...]] = {"masked_fill": (VALUES > 0, 2.0), "dropout": (0.5, True)}
BITS = ("and_", "invert", "or_", "xor", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "not_")


def of_name(name: str) -> Any:
    """A function of torch, a method, or an operator of Python."""
    return next((f for f in (getattr(o, name, None) for o in (torch, F, Tensor, operator)) if f is not None), None)


def test_every_name_is_of_torch():
    assert [name for name in sorted(total.TOTAL - {*total.LEVELS}) if of_name(name) is None] == []


@pytest.mark.parametrize("name", sorted({*total.POINTWISE, *total.REDUCING} - {*BITS}))
def test_no_derivative_comes_from_who_is_not_there(name: str):
    """Where a cotangent is 0, the gradient is, too, whatever the value is."""
    fn, errors = of_name(name), []
    for rest in (GIVEN.get(name, ()), (VALUES.flip(0),), (0,)):
        x = VALUES.clone().requires_grad_()
        try:
            y = fn(VALUES > 0, x, VALUES) if name == "where" else fn(x, *rest)
            break
        except (TypeError, RuntimeError) as error:
            errors.append(error)
    else:
        raise AssertionError(errors)
    y = y[0] if isinstance(y, tuple) else y
    if isinstance(y, Tensor) and y.requires_grad:
        (grad,) = torch.autograd.grad(y, x, torch.zeros_like(y))
        assert not grad.any()


def test_a_position_that_is_data_may_be_out_of_range():
    graph = torch.fx.Graph()
    x, i = graph.placeholder("x"), graph.placeholder("i")
    calls = {
        graph.call_method("narrow", (x, 0, 1, 2)): True, graph.call_method("narrow", (x, 0, i, 2)): False,
        graph.call_function(torch.narrow, (x, 0), {"start": i, "length": 1}): False,
        graph.call_function(operator.getitem, (x, (slice(1), 0))): True,
        graph.call_function(operator.getitem, (x, (slice(1), i))): False,
        graph.call_function(torch.div, (x, 2)): True, graph.call_function(torch.div, (x, 0)): False,
        graph.call_function(torch.div, (x, i)): False, graph.call_method("add_", (x, i)): False,
    }  # fmt: skip
    assert {str(node): total.total_node(node) for node in calls} == {str(node): sure for node, sure in calls.items()}


def exponential(x: Tensor, w: Tensor) -> Tensor:
    return x.exp()


def logarithm(x: Tensor, w: Tensor) -> Tensor:
    return (x - w[0]).log()


def quotient(x: Tensor, w: Tensor) -> Tensor:
    return w[1] / x


def looked_up(x: Tensor, w: Tensor) -> Tensor:
    return w[x.long()]


def linear(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(torch.stack([x, w[0], w[1] * 2]) / 2).sum() * w[-1] + (x.clamp(max=1) - w[:2].mean()) ** 2


CODE: dict[Callable[[Tensor, Tensor], Tensor], bool] = {  # whether it may run for nobody
    exponential: False, logarithm: False, quotient: False, looked_up: False, linear: True,
}  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize("code", CODE)
def test_nobody_comes(code: Callable[[Tensor, Tensor], Tensor]):
    """Values and gradients are those of examples alone, and only what may fail has a `cond`."""

    @tdc.batch
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = x * 1
        if x > 0 and x < 2:
            y = code(x, w) + x
        return y * 2

    operators: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        operators.extend([n.target for n in graph.graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator)])
        return graph

    compiled = torch.compile(lambda x, w: f.map(x, w, in_dims=(0, None)), backend=backend, fullgraph=True)
    for values in ((1000.0, 0.0, -4.0), (1.5, 0.0, 1000.0)):
        x, w = torch.tensor(values, requires_grad=True), torch.tensor([0.5, 0.25, 3.0], requires_grad=True)
        found = torch.autograd.grad(compiled(x, w).sum(), (x, w), materialize_grads=True)
        alone = torch.stack([f(one, w) for one in x])
        torch.testing.assert_close(found, torch.autograd.grad(alone.sum(), (x, w), materialize_grads=True))
    assert (operators == []) is CODE[code]


# -- what idle examples carry


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
