"""Sizes that depend on data: read first, or bounded.

    offsets  ->  u0 = offsets[-1]        first, with real sizes: the host reads u0
    values[index of u0 positions]        then: a graph of fixed sizes, in which u0 is filled as a size of an input is

Values that both parts need are computed once, in the first one, and are inputs of the second one.

    net(x) > 0  ->  nonzero of u1        in the graph of fixed sizes, for as many positions as the mask has elements

What a network tells is not worth a wait for the network: its count stays on the device.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tdc.compile._torch.filled import is_of_higher_order, operator_of
from tdc.compile.filling.masks import without_masks
from tdc.compile.filling.values import Expr, Node, expression, shapes_in

First = Callable[..., list[Any]]
COSTLY = ("mm", "bmm", "addmm", "baddbmm", "convolution", "conv_rows", "rnn")  # and attention, and loops


def split(module: torch.fx.GraphModule) -> tuple[First | None, torch.fx.GraphModule]:
    """The first part of a graph, from its inputs to those of the second part, and the second part; None where no size
    depends on data."""
    without_masks(module.graph)
    nodes = list(module.graph.nodes)
    makers = makers_of(nodes)
    if not makers:
        return None, module
    first = before(nodes, makers)
    makers |= {n for n in first if reads_size(n)}
    both = [n for n in nodes if is_single(n) and (n in makers or has_use(n, first))]
    one, two = torch.fx.Graph(), torch.fx.Graph()
    copies: dict[Node, Node] = {}
    for node in nodes:
        if node.op == "placeholder" or node in first:
            copies[node] = one.node_copy(node, copies.__getitem__)
    one.output([copies[node] for node in both])
    moved: dict[Node, Node] = {}
    for node in both:
        moved[node] = two.placeholder(node.name)
        moved[node].meta = dict(node.meta)
    for node in nodes:
        if node.op == "get_attr" or not (node.op == "placeholder" or node in first):
            moved[node] = two.node_copy(node, moved.__getitem__)
    return torch.fx.GraphModule(module, one), torch.fx.GraphModule(module, two)


def makers_of(nodes: list[Node]) -> set[Node]:
    """Operations whose results have a size, or are a number, that no input tells."""
    known: set[Expr] = set()
    found: set[Node] = set()
    late, checked = after_costly(nodes), checked_in(nodes)
    for node in nodes:
        if node in late and is_bounded(node, known | checked):
            known.add(expression(node.meta["val"].shape[0]))
            continue
        val = node.meta.get("val")
        sizes = [expression(val)] if isinstance(val, torch.SymInt) else shapes_in(val)
        own = {symbol for n in sizes for symbol in getattr(n, "free_symbols", ())}
        if node.op != "placeholder" and (reads_size(node) or not own <= known):
            found.add(node)
        known |= own
    return found


def after_costly(nodes: list[Node]) -> set[Node]:
    """Operations that need the result of a layer."""
    found: set[Node] = set()
    for node in nodes:
        op = operator_of(node.target)
        costly = is_of_higher_order(node.target) if op is None else op.name in COSTLY or "attention" in op.name
        if costly or any([n in found for n in node.all_input_nodes]):
            found.add(node)
    return found


def checked_in(nodes: list[Node]) -> set[Expr]:
    """Symbols of which a check asks more than that they are sizes: a graph of fixed sizes has no checks."""
    return {symbol for e in checks_of(nodes) for symbol in e.free_symbols}


def checks_of(nodes: Iterable[Node]) -> list[Expr]:
    """Conditions that sizes are checked by, but for one that every size meets."""
    asked = [n.args[0].meta["val"] for n in nodes if is_check(n) and isinstance(n.args[0], torch.fx.Node)]
    found = [expression(val) for val in asked]
    least = [type(e).__name__ == "GreaterThan" and e.args[1] == 0 for e in found]
    return [e for e, always in zip(found, least, strict=True) if getattr(e, "free_symbols", ()) and not always]


def is_bounded(node: Node, known: set[Expr]) -> bool:
    """True of positions whose number is a symbol of their own."""
    count = expression(node.meta["val"].shape[0]) if finds_positions(node) else 0
    return getattr(count, "is_Symbol", False) and count not in known


def finds_positions(node: Node) -> bool:
    """True of the search for elements other than 0."""
    op = operator_of(node.target)
    return op is not None and op.name == "nonzero"


def bounds_of(nodes: Iterable[Node]) -> dict[Expr, Expr]:
    """For each number of positions the number of elements they are looked for in, in the order of a graph."""
    found = [n for n in nodes if finds_positions(n)]
    return {expression(n.meta["val"].shape[0]): math.prod(shapes_in(n.args[0].meta["val"])) for n in found}


def reads_size(node: Node) -> bool:
    """True of operations that read a size from data, even if the trace has learned that it equals another one."""
    op = operator_of(node.target)
    return finds_positions(node) or (op is not None and op.name == "as_size")


def before(nodes: list[Node], makers: set[Node]) -> set[Node]:
    """All that makers need, parts of results that are several, and checks of the sizes."""
    found = set(makers)
    for node in reversed(nodes):
        if node in found:
            found.update(node.all_input_nodes)
    numbers: set[Node] = set()
    for node in nodes:
        known = all([n in found or n in numbers or n.op == "placeholder" for n in node.all_input_nodes])
        if node.target is operator.getitem and node.args[0] in found:
            found.add(node)
        elif known and isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool, torch.SymFloat)):
            numbers.add(node)
        elif known and is_check(node):
            found.add(node)
    for node in reversed(nodes):
        if node in found:
            found.update([n for n in node.all_input_nodes if n in numbers])
    return found - {n for n in found if n.op == "placeholder"}


def is_check(node: Node) -> bool:
    """True of a check of sizes."""
    op = operator_of(node.target)
    return op is not None and op.name == "_assert_scalar"


def is_single(node: Node) -> bool:
    """True of a value that may be an input; constants are copied, and of several results each is one."""
    return node.op != "get_attr" and not isinstance(node.meta.get("val"), (tuple, list))


def has_use(node: Node, first: set[Node]) -> bool:
    """True of an input, or a value of the first part, that the second part needs."""
    if node.op == "placeholder" and isinstance(node.meta["val"], torch.SymInt):
        return True  # sizes of others may follow from it
    own = node.op == "placeholder" or node in first
    return own and any([user not in first for user in node.users])
