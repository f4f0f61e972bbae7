"""Masks as indices, written as the positions where they are True, whose number depends on data."""

from __future__ import annotations

from typing import Any

import torch

from tdc.compile._torch.filled import operator_of
from tdc.compile.filling.values import Node, shapes_in

aten: Any = torch.ops.aten


def without_masks(graph: torch.fx.Graph) -> None:
    """Replace each mask of `x[mask]` and `x[mask] = y` by positions, or by `where` if y is the same for all of them."""
    found: dict[Node, Node] = {}
    for node in list(graph.nodes):
        op = operator_of(node.target)
        if op is not None and op.name == "masked_select" and have_same_shape(*node.args):
            node.target, node.args = aten.index.Tensor, (node.args[0], [node.args[1]])
            op = operator_of(node.target)
        if op is None or op.name.removeprefix("_unsafe_") not in ("index", "index_put"):
            continue
        at = [i for i in node.args[1] if i is not None]
        if len(at) == 1 and at[0].meta["val"].dtype == torch.bool and at[0].meta["val"].ndim:
            with graph.inserting_before(node):
                replace(graph, node, at[0], found)


def replace(graph: torch.fx.Graph, node: Node, mask: Node, found: dict[Node, Node]) -> None:
    """Replace the mask of one operation; `found` has positions by mask."""
    x, m, k = node.args[0].meta["val"], mask.meta["val"].ndim, list(node.args[1]).index(mask)
    if len(node.args) == 2:
        count = node.meta["val"].shape[k]
    else:
        values, d = node.args[2], x.ndim - k - m + 1  # the dim of positions, counted from the end
        if values.meta["val"].ndim < d or same(values.meta["val"].shape[-d], 1):
            put_everywhere(graph, node, mask, d)
            return
        count = values.meta["val"].shape[-d]
    if mask not in found:
        found[mask] = graph.call_function(aten.nonzero.default, (mask,))
        found[mask].meta["val"] = mask.meta["val"].new_empty((count, m), dtype=torch.int64)
    columns = [insert(graph, aten.select.int, found[mask], 1, i) for i in range(m)]
    node.update_arg(1, [*[None] * k, *columns])


def put_everywhere(graph: torch.fx.Graph, node: Node, mask: Node, d: int) -> None:
    """Write `x[mask] = y` as `where`, if y has no dim of positions, or one of size 1 as the d-th from the end."""
    x, _, values, *accumulate = node.args
    for _ in range(d - 1):
        mask = insert(graph, aten.unsqueeze.default, mask, -1)
    if values.meta["val"].ndim >= d:
        for _ in range(mask.meta["val"].ndim - d):
            values = insert(graph, aten.unsqueeze.default, values, -d)
    if any(accumulate):
        values = insert(graph, aten.add.Tensor, x, values)
    out = insert(graph, aten.where.self, mask, values, x)
    node.replace_all_uses_with(out)
    graph.erase_node(node)


def insert(graph: torch.fx.Graph, target: Any, *args: Any) -> Node:
    """Insert an operation, with its traced value."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*[a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in args])
    return node


def have_same_shape(x: Node, y: Node) -> bool:
    """True if two values of a graph have the same sizes."""
    return shapes_in(x.meta["val"]) == shapes_in(y.meta["val"])


def same(size: Any, number: int) -> bool:
    """True if a size is a number, not a symbol."""
    return isinstance(size, int) and size == number
