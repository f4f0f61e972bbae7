"""Rules of filled graphs for branches and loops, whose bodies are filled graphs, too.

Real sizes are among the operands, since a body takes nothing from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.compile.filling.run import Graph, rule
from tdc.compile.filling.values import Filled, Node, Size, refuse


def tensors_of(operands: Sequence[Any]) -> list[Tensor]:
    """Operands that are tensors."""
    return [x.x for x in operands if isinstance(x, Filled)]


def body(g: Graph, module: torch.fx.GraphModule, operands: Sequence[Any]) -> Callable[..., Any]:
    """A function of the tensors among some operands, and of real sizes behind them, that runs a traced body."""

    def run(*given: Tensor) -> Any:
        count = len(given) - len(g.real)
        tensors, numbers = iter(given[:count]), dict(zip(g.real, given[count:], strict=True))
        full = [next(tensors) if isinstance(x, Filled) else getattr(x, "full", x) for x in operands]
        found = Graph(module, g.full, numbers)(full)
        if any([x is None for x in found] if isinstance(found, (tuple, list)) else [found is None]):
            raise refuse("a number that a branch or a loop returns")
        return tuple(found) if isinstance(found, (tuple, list)) else found

    return run


@rule("higher_order.cond")
def cond(g: Graph, node: Node, chosen: Any, on_true: Any, on_false: Any, operands: Sequence[Any]) -> Any:
    """One of two branches."""
    branches = [body(g, module, operands) for module in (on_true, on_false)]
    at = chosen.x if isinstance(chosen, Filled) else chosen
    if isinstance(at, Size):
        at = at.real
    return node.target(at, *branches, (*tensors_of(operands), *g.real.values()))


@rule("higher_order.while_loop")
def while_loop(g: Graph, node: Node, goes_on: Any, step: Any, carried: Sequence[Any], more: Sequence[Any]) -> Any:
    """A loop while a condition holds."""
    if not all([isinstance(x, Filled) for x in carried]):
        raise refuse(f"{node.target} that carries numbers")
    functions = [body(g, module, (*carried, *more)) for module in (goes_on, step)]
    return node.target(*functions, tuple(tensors_of(carried)), (*tensors_of(more), *g.real.values()))


@rule("higher_order.invoke_subgraph")
def region(g: Graph, node: Node, module: Any, _: Any, *operands: Any) -> Any:
    """A region that is compiled once, as a part of the graph."""
    return body(g, module, operands)(*tensors_of(operands), *g.real.values())


@rule("higher_order.scan")
def scan(g: Graph, node: Node, step: Any, init: Sequence[Any], xs: Sequence[Any], more: Sequence[Any]) -> Any:
    """A loop along the first dim; steps of filling keep the carry."""
    if not all([isinstance(x, Filled) for x in (*init, *xs)]):
        raise refuse(f"{node.target} that carries numbers")
    run, rest = body(g, step, (*init, *xs, *more)), (*tensors_of(more), *g.real.values())
    filled, count, size = [x for x in xs if 0 in x.dims], len(init), len(init) + len(xs)
    if not filled:
        return node.target(run, tensors_of(init), tensors_of(xs), rest)

    def masked(*given: Tensor) -> tuple[Tensor, ...]:
        found = run(*given[:size], *given[size + 1 :])
        kept = [torch.where(given[size], new, old) for new, old in zip(found[:count], given, strict=False)]
        return (*kept, *found[count:])

    real = g.valid(filled[0].sizes[0], filled[0].x.shape[0])
    return node.target(masked, tensors_of(init), [*tensors_of(xs), real], rest)
