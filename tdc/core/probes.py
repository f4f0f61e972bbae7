"""Questions to the torch that is installed: does it still do what `core/dynamo.py` relies on?

    failing = [name for name, holds in PROBES if not holds()]

They ask about what would degrade without an error, such as a mark that marks nothing. They trace small functions with
Dynamo, a few seconds in all, and compile nothing with Inductor; call `torch.compiler.reset()` before each. `FEATURES`
are those that older versions of torch lack; nothing depends on them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import checkpoint as checkpointing

from tdc.core import dynamo, torch_functions
from tdc.core.dynamo import mark_dynamic, mark_only_result, mark_result, recorded_operations, trace_as

recompute: Any = getattr(checkpointing, "checkpoint")  # noqa: B009  # whose types are open
untyped: Any = torch  # whose stubs leave types open


def graphs_of(
    fn: Callable[..., Any],
    *inputs: Any,
    fullgraph: bool = True,
    keep: Callable[[torch.fx.GraphModule], Any] = lambda graph: graph,
) -> list[Any]:
    """Graphs that calls of a function are compiled to, anew, or the result of `keep` for each."""
    found: list[Any] = []

    def backend(graph: torch.fx.GraphModule, given: Any) -> Callable[..., Any]:
        found.append(keep(graph))
        return graph.forward

    def call(x: Any) -> Any:
        return fn(x)

    run = untyped.compile(dynamo.with_own_graphs(call), backend=backend, fullgraph=fullgraph)
    dynamo.configured(lambda: [run(x) for x in inputs], automatic_dynamic_shapes=False)
    return found


def marks_sizes() -> bool:
    """A tensor that is marked compiles once for all sizes; without the mark twice."""
    marked, plain = [[torch.ones(n) for n in (3, 4)] for _ in range(2)]
    return len(graphs_of(torch.relu, *[mark_dynamic(x, 0) for x in marked])) == 1 < len(graphs_of(torch.relu, *plain))


def marks_results() -> bool:
    """A tensor that a graph marks is marked for the next graph, a view or the tensor itself."""

    def compiles(mark: Callable[..., Any]) -> int:
        def marked(x: Tensor) -> Tensor:
            return mark(x + 1, 0)

        first = untyped.compile(marked, backend="eager", fullgraph=True)
        return len(graphs_of(torch.relu, *[first(mark_dynamic(torch.ones(n), 0)) for n in (3, 4)]))

    return [compiles(mark) for mark in (mark_result, mark_only_result)] == [1, 1]


def traces_another() -> bool:
    """Another function is traced in the stead of one that has it."""

    def eagerly(x: Tensor) -> Tensor:
        return x.sin()

    def in_graphs(x: Tensor) -> Tensor:
        return x.cos()

    trace_as(eagerly, in_graphs)
    return [str(n.target) for n in graphs_of(eagerly, torch.ones(2))[0].graph.nodes][1:-1] == ["cos"]


def holds_constants() -> bool:
    """A constant function runs once, while it is traced, and whatever it does is not traced."""
    calls: list[str] = []

    @dynamo.constant
    def decide(name: str) -> int:
        calls.append(repr(object()) + name)  # Dynamo could trace neither
        return len(name)

    def fn(x: Tensor) -> Tensor:
        return x * decide("abc")

    run = untyped.compile(fn, backend="eager", fullgraph=True)
    return [float(run(torch.ones(()))) for _ in range(2)] == [3.0, 3.0] and len(calls) == 1


class Taker:
    """Takes every function that torch hands on to it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        return torch.zeros(2)


def hands_on() -> bool:
    """Functions that torch's list left out reach a class in a graph."""
    fill: Any = torch.fill
    calls: list[Callable[[Any], Any]] = [
        *(torch.rand_like, torch.randn_like, F.hardswish, F.hardsigmoid),
        *(partial(fill, value=1.0), partial(torch.randint_like, high=5)),
    ]

    def taken(call: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
        return lambda x: call(Taker()) + x

    return all([len(graphs_of(taken(call), torch.ones(2))) == 1 for call in calls])


def sees_transforms() -> bool:
    """Code can tell whether it runs eagerly, under a transform, in forward mode, or traced."""
    seen: list[Any] = []

    def fn(x: Tensor) -> Tensor:
        seen.append((dynamo.eager(), dynamo.under_transform(), dynamo.readable(), dynamo.in_direction()))
        return x * 1

    fn(torch.ones(2))
    torch.vmap(fn)(torch.ones(2))
    torch.func.jvp(fn, (torch.ones(2),), (torch.ones(2),))

    def either(x: Tensor) -> Tensor:
        return x + 1 if dynamo.eager() or dynamo.readable() else x - 1

    plain = graphs_of(either, torch.ones(2))[0]
    traced = [str(n.target) for n in plain.graph.nodes if n.op == "call_function"]
    hidden = (False, True, False)
    return seen == [(True, False, True, False), (*hidden, False), (*hidden, True)] and "sub" in traced[0]


def sees_modes() -> bool:
    """Numbers are not read where a dispatch mode sees the operations, but for one that only watches."""
    found: list[bool] = []
    recorded_operations(lambda: found.append(dynamo.readable()))
    with dynamo.watching(lambda op, args, kwargs: None):
        found.append(dynamo.readable())
    return dynamo.readable() and found == [False, True]


def asks_no_size() -> bool:
    """A graph can ask if a size is 0 without a guard on it."""

    def fn(x: Tensor) -> Tensor:
        return x + 1 if dynamo.is_zero(int(x.sum().item()) + 1) else x

    graphs = dynamo.configured(lambda: graphs_of(fn, torch.ones(2)), capture_scalar_outputs=True)
    return len(graphs) == 1 and dynamo.is_zero(0) and not dynamo.is_zero(2)


def asserts() -> bool:
    """An assertion fails at once, is a node of a graph, and takes a vmapped condition."""

    def fn(x: Tensor) -> Tensor:
        torch_functions.assert_async(dynamo.without_vmap((x > 0).all()), "positive")
        return x

    torch.vmap(fn)(torch.ones(2))
    nodes = [str(n.target) for n in graphs_of(fn, torch.ones(2))[0].graph.nodes]
    try:
        fn(-torch.ones(2))
    except RuntimeError as error:
        return "positive" in str(error) and any(["assert" in node for node in nodes])
    return False


def knows_lines() -> bool:
    """Traced code knows the calls of the program that lead to it."""
    seen: list[str] = []

    @dynamo.constant
    def note() -> int:
        seen.extend([frame.name for frame in dynamo.program_stack()])
        return 1

    def named_function(x: Tensor) -> Tensor:
        return x * note()

    graphs_of(named_function, torch.ones(2))
    return "named_function" in seen


def checkpoints() -> bool:
    """In a graph `torch.utils.checkpoint` is the operator that containers have a rule for."""

    def fn(x: Tensor) -> Tensor:
        return recompute(torch.sin, x, use_reentrant=False)

    graph = graphs_of(fn, torch.ones(2, requires_grad=True))[0].graph
    return torch_functions.checkpoint_operator in [node.target for node in graph.nodes]


def knows_storage() -> bool:
    """Views share what tells their memory apart; changes in place are counted."""
    x = torch.ones(4)
    before = dynamo.version(x), dynamo.stamp(x)
    x.add_(1)
    apart = dynamo.storage_id(x) == dynamo.storage_id(x[1:]) != dynamo.storage_id(torch.ones(4))
    return apart and dynamo.version(x) == before[0] + 1 and dynamo.stamp(x) != before[1]


def traces_quantile() -> bool:
    """A graph can hold `torch.quantile` (from torch 2.12): before, it compares tensors on the host."""
    seen = recorded_operations(lambda: torch.quantile(torch.zeros(1), 0.5))
    return torch.ops.aten.equal.default not in seen


PROBES: tuple[tuple[str, Callable[[], bool]], ...] = (
    ("sizes marked", marks_sizes),
    ("sizes of results marked", marks_results),
    ("another function traced", traces_another),
    ("constants of a graph", holds_constants),
    ("functions handed on", hands_on),
    ("transforms and traces told", sees_transforms),
    ("dispatch modes told", sees_modes),
    ("sizes asked without a guard", asks_no_size),
    ("assertions on data", asserts),
    ("lines of a traced program", knows_lines),
    ("checkpoints of containers", checkpoints),
    ("memory and its changes", knows_storage),
)
FEATURES: tuple[tuple[str, Callable[[], bool]], ...] = (
    ("quantile in graphs", traces_quantile),
    ("hash_tensor under vmap", dynamo.maps_views_of_bits),
)
