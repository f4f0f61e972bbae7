"""Copies that torch writes into the steps of `scan`, taken out again (torch 2.11-2.13).

torch writes each view in a step as a copy. A linear layer so copies its weight, to transpose it; the copy is what the
backward pass asks for, turned round once more; and it is kept for each step: a second set of the weights of layers, and
of a weight that all steps share one copy for each.

    kept_twice       what a step gives out as it got it is taken from where it came
    read_as_views    matrix products read a transposed tensor where it lies

Invariants: what a step returns is no view of what it got; what a graph returns is none of its inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from tdc.compile._torch.scans import FLIPS, given_out
from tdc.compile._torch.symbolic import same_strides

OPS = torch.ops.aten
PRODUCTS = (OPS.mm.default, OPS.addmm.default, OPS.bmm.default, OPS.baddbmm.default)
SCAN = torch.ops.higher_order.scan


def without_copies(module: Any) -> None:
    """Take the copies out of the scans of a graph."""
    scans = module.graph.find_nodes(op="call_function", target=SCAN)
    for scan in scans:
        if len(scan.args[0].users) == 1:
            kept_twice(scan, module)
    for scan in scans:
        step = getattr(module, scan.args[0].target)
        read_as_views(step.graph)
        step.recompile()
    if scans:
        module.recompile()


def kept_twice(scan: Any, module: Any) -> None:
    """Let others read what a step gives out as it got it, rows of an operand or what all steps get, where it is."""
    begins, operands, shared = scan.args[1:4]
    step = getattr(module, scan.args[0].target).graph
    inputs, output = step.find_nodes(op="placeholder"), step.output_node()
    rows, alike = inputs[len(begins) : len(begins) + len(operands)], inputs[len(begins) + len(operands) :]
    (results,) = output.args
    for user in [user for user in scan.users if user.args[1] >= len(begins)]:
        result = results[user.args[1]]
        source = original(result)
        if source in rows and same_strides(operands[rows.index(source)], user):
            if not given_out(user):
                user.replace_all_uses_with(operands[rows.index(source)])
        elif source in alike and same_strides(source, result):
            share(user, shared[alike.index(source)], module)
        if not user.users:
            scan.graph.erase_node(user)
    drop_unused(scan, step)


def drop_unused(scan: Any, step: Any) -> None:
    """Drop results of a scan that nobody reads, but for one: torch wants a result."""
    output, begins = step.output_node(), len(scan.args[1])
    (results,) = output.args
    used = {user.args[1] for user in scan.users}
    left = [i for i in range(len(results)) if i < begins or i in used]
    left += [begins] if len(left) == begins < len(results) else []
    output.args = (tuple([results[i] for i in left]),)
    scan.meta["val"] = tuple([scan.meta["val"][i] for i in left])
    for user in list(scan.users):
        user.args = (scan, left.index(user.args[1]))
    step.eliminate_dead_code()


def original(x: Any) -> Any:
    """The tensor that another is a copy of. On the way its dims may be permuted, if they are permuted back."""
    if not isinstance(x, Node):
        return None
    source: Any = x
    order: list[int] = list(range(source.meta["val"].ndim))
    while source.target in (OPS.clone.default, OPS.permute.default):
        if source.target is OPS.permute.default:
            order = [source.args[1][d] for d in order]
        source = source.args[0]
    return source if order == sorted(order) else None


def share(rows: Any, one: Any, module: Any) -> None:
    """Give the scans that read rows which are all alike one of them, as what their steps share."""
    turned = [user for user in rows.users if user.target in FLIPS]
    for stack, scan in [(x, user) for x in (rows, *turned) for user in x.users if user.target is SCAN]:
        graph, begins, operands, shared = scan.args
        inputs = getattr(module, graph.target).graph.find_nodes(op="placeholder")
        if len(graph.users) == 1 and stack in operands and stack not in begins and len(operands) > 1:
            i = list(operands).index(stack)
            inputs[-1].append(inputs[len(begins) + i])
            scan.args = (graph, begins, (*operands[:i], *operands[i + 1 :]), (*shared, one))
    for flip in turned:
        if not flip.users:
            module.graph.erase_node(flip)


def read_as_views(step: Any) -> None:
    """Let products of matrices in a step read transposed tensors."""
    for copy in step.find_nodes(op="call_function", target=OPS.clone.default):
        view = copy.args[0]
        if isinstance(view, Node) and view.target is OPS.permute.default:
            for user in list(copy.users):
                if user.target in PRODUCTS:
                    user.replace_input_with(copy, view)
    step.eliminate_dead_code()
