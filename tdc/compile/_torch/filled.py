"""Graphs of torch's operators with named sizes, forward and backward, and graphs of fixed sizes (torch 2.11-2.15)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.core.dynamo import has_address
from tdc.core.errors import refusing
from tdc.core.private import find, optional

FEATURE, LOST = "filled graphs", "buckets= of compiled functions and steps"
SIZE_OF = re.compile(r"(\w+)\.size\(\)\[(\d+)\]$")  # of a source, such as "L['x']._values.size()[0]"
Compiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


@optional(FEATURE, lost=LOST, instead=refusing("buckets="))
def in_operators(graph: torch.fx.GraphModule, inputs: list[Any], compiler: Compiler) -> Callable[..., Any]:
    """Compile a graph of Dynamo by a function of graphs of torch's core operators: one, or forward and backward."""
    wrap = find("torch._dynamo.backends.common:aot_autograd")
    table = find("torch._decomp:core_aten_decompositions")()
    found: Callable[..., Any] = wrap(fw_compiler=compiler, bw_compiler=compiler, decompositions=table)(graph, inputs)
    return found


@optional(FEATURE, lost=LOST, instead=refusing("buckets="))
def at_sizes(
    fn: Callable[..., Any], inputs: Sequence[Tensor], backend: Callable[[Any, list[Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Trace a function of tensors of fixed sizes, and compile it, outside of the modes that torch has around a call."""
    make_fx = find("torch.fx.experimental.proxy_tensor:make_fx")
    # Offsets of torch's jagged tensors it knows by identity, as symbols, which a graph of fixed sizes has not.
    known = [x if x.is_floating_point() or has_address(x) else x.detach() for x in inputs]
    with find("torch.utils._python_dispatch:_disable_current_modes")():
        return backend(make_fx(fn, tracing_mode="fake")(*known), known)


class Operator(NamedTuple):
    """An operator of a graph: its name, such as "aten", "sum", "dim_IntList", and name and type of each argument."""

    space: str
    name: str
    overload: str
    arguments: dict[str, str]


def operator_of(target: Any) -> Operator | None:
    """The operator that a node of a graph calls; None of a function of Python and an operator of higher order."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    space, _, name = target._schema.name.partition("::")
    return Operator(space, name, target._overloadname, {a.name: str(a.type) for a in target._schema.arguments})


def is_of_higher_order(target: Any) -> bool:
    """True if a node calls an operator of functions, such as a loop."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def is_of_data(size: Any) -> bool:
    """True of a size whose symbols depend on data."""
    unknown: Any = find("torch.fx.experimental.symbolic_shapes:free_unbacked_symbols")
    return bool(unknown(size))


def no_owners(size: Any) -> list[tuple[str, int, Any]]:
    """No attributes, where sources are not to be had."""
    return []


@optional("sources of sizes", lost="filling: each size is a graph of its own", instead=no_owners)
def owners_of(size: Any) -> list[tuple[str, int, Any]]:
    """Attributes of arguments that have a symbol among their sizes, such as "offsets", the dim, and that size."""
    env: Any = size.node.shape_env
    (symbol,) = size.node.expr.free_symbols
    others = [(old, new) for old, new in env.replacements.items() if symbol in getattr(new, "free_symbols", ())]
    found = list[tuple[str, int, Any]]()
    for old, new in [(symbol, symbol), *others]:
        for source in env.var_to_sources.get(old, []):
            match = SIZE_OF.search(source.name if isinstance(source.name, str) else source.name())
            found += [(match[1], int(match[2]), new)] if match else []
    return found
