"""Copies in loops of `scan`, taken out of graphs (torch 2.11-2.15).

torch writes each view in a step as a copy: a linear layer copies its weight to transpose it, and the copy is kept for
each step, a second set of the weights of layers.

    kept_twice       read a result that a step returns unchanged where it came from
    read_as_views    let matrix products read a transposed tensor in place

torch writes the gradient of `scan` as a scan of flipped tensors, whose results are flipped back: a copy of all that the
forward pass kept, and one of each gradient. Inductor turns a scan into a `while_loop` that counts up. Here a loop over
flips counts down instead, and the flips go:

    loop(0, flip(x)): while i < n: y[i] = f(x[i]), i + 1;  flip(y)       loop(n - 1, x): while i >= 0: ..., i - 1;  y

Invariants: a step returns no view of its input, and a graph none of its inputs; in a loop that is turned nothing but
the rows that are read and written depends on the counter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from tdc.compile._torch.patches import patched
from tdc.compile._torch.symbolic import same_size, same_strides
from tdc.core.private import find, optional

SCANS = "loops over flips run backwards"
OPS, SCAN, LOOP = torch.ops.aten, torch.ops.higher_order.scan, torch.ops.higher_order.while_loop
PRODUCTS = (OPS.mm.default, OPS.addmm.default, OPS.bmm.default, OPS.baddbmm.default)
FLIPS = (torch.ops.prims.rev.default, OPS.flip.default)
ORDERS: dict[Any, Callable[[Any, Any], Any]] = {OPS.lt.Scalar: operator.lt, OPS.ge.Scalar: operator.ge}
COMPARISONS = (operator.ge, operator.le, operator.lt)  # of assertions


@optional(SCANS, lost="copies in gradients of scans", instead=nullcontext)
def counted_down() -> AbstractContextManager[Any]:
    """A context: lowered loops over flipped tensors run backwards."""
    passes = find("torch._inductor.fx_passes.post_grad")
    make_loops = find("torch._inductor.fx_passes.post_grad:decompose_scan_to_while_loop")

    def decompose(module: Any) -> None:
        make_loops(module)
        turn_loops(module)

    return patched((passes, "decompose_scan_to_while_loop", decompose))


def turn_loops(module: Any) -> None:
    """Turn the loops of a graph where possible."""
    loops = module.graph.find_nodes(op="call_function", target=LOOP)
    if not loops:
        return
    cancel(module.graph)
    for loop in loops:
        cond, body = [getattr(module, part.target) for part in loop.args[:2]]
        rows = rows_of(loop, cond.graph, body.graph)
        if rows is not None:
            turn(loop, cond.graph, body.graph, rows)
            cancel(module.graph)
        if not getattr(find("torch._inductor.config"), "cpp_wrapper", True):
            compare_numbers(cond.graph)
        for part in (cond, body):
            part.recompile()
    module.graph.eliminate_dead_code()
    module.recompile()


def cancel(graph: Any) -> None:
    """Replace the flip of a flip by its source, and the size of a flip by that of its source."""
    for flip in [node for op in FLIPS for node in graph.find_nodes(op="call_function", target=op)]:
        source = unflipped(flip)
        found = None if source is None or source.target not in FLIPS else unflipped(source)
        if found is not None and not given_out(flip):
            flip.replace_all_uses_with(found)
        for size in [user for user in flip.users if user.target is OPS.sym_size.int]:
            size.replace_input_with(flip, flip.args[0])


def given_out(x: Any) -> bool:
    """True if a graph returns a tensor or a view of it, which may then not alias another tensor."""
    return any([user.op == "output" or (is_view(user) and given_out(user)) for user in x.users])


def is_view(x: Any) -> bool:
    """True if a node may return a view of its input."""
    schema = getattr(x.target, "_schema", None)
    return schema is not None and any([found.alias_info is not None for found in schema.returns])


class Rows(NamedTuple):
    """Operands of a loop, by position, of which each round reads a row, and into which it writes one."""

    reads: list[int]
    writes: list[int]


def rows_of(loop: Any, cond: Any, body: Any) -> Rows | None:
    """Rows of a loop over all rows of flipped tensors, if its counter has no other use; else None."""
    counter, *others = body.find_nodes(op="placeholder")
    operands, (results,) = loop.args[2], body.output_node().args
    number, rounds = row_number(counter, results[0]), bound_of(cond)
    if number is None or rounds is None or not is_call(operands[0], OPS.full.default) or operands[0].args != ([], 0):
        return None
    rows = [user for user in number.users if user.target not in COMPARISONS]
    found, taken = Rows([], []), 0
    for i, x in enumerate(others[: len(results) - 1], 1):
        mine = [user for user in x.users if is_call(user, OPS.select.int) and user.args == (x, 0, number)]
        rest = [user for user in x.users if user not in mine and not is_call(user, OPS.sym_size.int)]
        if not mine:
            continue
        written = [is_call(user, OPS.copy_.default) and user.args[0] is row for row in mine for user in row.users]
        passes = results[i] is x and rest == [body.output_node()] and (all(written) or not any(written))
        if not passes or not same_size(x.meta["val"].size(0), rounds):
            return None
        (found.writes if written and all(written) else found.reads).append(i)
        taken += len(mine)
    used = {user.args[1] for user in loop.users}
    flips = [operands[i].target in FLIPS for i in found.reads]
    if taken < len(rows) or not any(flips) or used & {0, *found.reads}:
        return None
    return found if all([unflipped(operands[i]) is not None for i in found.reads]) else None


def row_number(counter: Any, after: Any) -> Any:
    """Counter as a number, if a round does nothing else with it than to add 1."""
    numbers = [user for user in counter.users if user is not after]
    counts = is_call(after, OPS.add.Tensor) and after.args == (counter, 1) and not after.kwargs
    alone = [x.target for x in numbers] == [OPS._local_scalar_dense.default]
    return numbers[0] if counts and alone and list(after.users) == [after.graph.output_node()] else None


def bound_of(cond: Any) -> Any:
    """Bound of the counter, the first input, while a loop goes on; None for other conditions."""
    (test,), counter = cond.output_node().args, cond.find_nodes(op="placeholder")[0]
    if not is_call(test, OPS.lt.Scalar) or test.args[0] is not counter or list(counter.users) != [test]:
        return None
    return value_of(test.args[1])


def value_of(x: Any) -> Any:
    """The value that a node stands for, or a number as it is."""
    return x.meta["val"] if isinstance(x, Node) else x


def unflipped(x: Any) -> Any:
    """Tensor that another is the flip of along its first dim, if their strides are equal; else None."""
    if is_call(x, OPS.full.default):  # the same number everywhere
        return x
    if x.target not in FLIPS or list(x.args[1]) != [0]:
        return None
    source: Any = x.args[0]
    return source if same_strides(source, x) else None


def turn(loop: Any, cond: Any, body: Any, rows: Rows) -> None:
    """Let a loop count down from its last round."""
    graph, operands = loop.graph, list(loop.args[2])
    for i in rows.reads:
        operands[i] = unflipped(operands[i])
    with graph.inserting_before(loop):
        begin = graph.call_function(OPS.full.default, ([], last_of(operands[rows.reads[0]])), dict(operands[0].kwargs))
    begin.meta, operands[0] = dict(operands[0].meta), begin
    loop.args = (*loop.args[:2], tuple(operands), *loop.args[3:])
    (test,), ((step, *_),) = cond.output_node().args, body.output_node().args
    test.target, test.args = OPS.ge.Scalar, (test.args[0], 0)
    step.args = (step.args[0], -1)
    for result in [user for user in loop.users if user.args[1] in rows.writes]:
        turn_result(result)


def last_of(x: Any) -> Any:
    """The position of the last row."""
    rows = x.meta["val"].size(0)
    if isinstance(rows, int):
        return rows - 1
    steps = x.graph.call_function(OPS.sym_size.int, (x, 0))
    last = x.graph.call_function(operator.sub, (steps, 1))
    steps.meta["val"], last.meta["val"] = rows, rows - 1
    return last


def turn_result(result: Any) -> None:
    """Make the result of a loop its flip; a flip of it is the result itself. Of those the graph returns only one is."""
    users = list(result.users)
    flips = [user for user in users if unflipped(user) is result]
    outside = [flip for flip in flips if given_out(flip)]
    same = [flip for flip in flips if flip not in outside[1:]]
    for flip in same:
        flip.replace_all_uses_with(result)
    others = [user for user in users if user not in same]
    if others:
        with result.graph.inserting_after(result):
            turned = result.graph.call_function(FLIPS[0], (result, [0]))
        turned.meta = dict(result.meta)
        for user in others:
            user.replace_input_with(result, turned)


def compare_numbers(cond: Any) -> None:
    """Compare the number of a counter in host memory, so that the comparison is no kernel of its own."""
    counter, (test,) = cond.find_nodes(op="placeholder")[0], cond.output_node().args
    compare = ORDERS.get(test.target) if isinstance(test, Node) else None
    if compare is None or test.args[0] is not counter or counter.meta["val"].dtype is not torch.int64:
        return
    other = value_of(test.args[1])
    if counter.meta["val"].device.type != "cpu" or not isinstance(other, (int, torch.SymInt)):
        return
    bind = find("torch.fx.experimental.symbolic_shapes:compute_unbacked_bindings")
    env = counter.meta["val"].fake_mode.shape_env
    value = env.create_unbacked_symint()
    with cond.inserting_before(test):
        number = cond.call_function(OPS._local_scalar_dense.default, (counter,))
        found = cond.call_function(compare, (number, test.args[1]))
    number.meta["val"], found.meta["val"] = value, compare(value, other)
    number.meta["unbacked_bindings"] = bind(env, value)
    test.replace_all_uses_with(found)
    cond.erase_node(test)


def is_call(x: Any, op: Any) -> bool:
    """True for a call of an operator."""
    return isinstance(x, Node) and x.op == "call_function" and x.target is op


# -- copies


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
    """Read what a step returns unchanged, rows of an operand or what all steps share, where it came from."""
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
    """Drop unused results of a scan, but for one: torch wants a result."""
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
    """Tensor that another is a copy of, through permutations that cancel."""
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
    """Give the scans that read equal rows one of them, shared by their steps."""
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
    """Read transposed tensors in place in the matrix products of a step."""
    for copy in step.find_nodes(op="call_function", target=OPS.clone.default):
        view = copy.args[0]
        if isinstance(view, Node) and view.target is OPS.permute.default:
            for user in list(copy.users):
                if user.target in PRODUCTS:
                    user.replace_input_with(copy, view)
    step.eliminate_dead_code()
