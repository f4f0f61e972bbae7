"""Fewer kernels on CPU: loops between other calls run together, where the order of a graph leaves a choice (torch
2.11-2.15).

Inductor writes all loops between two calls of operators, such as products, as one kernel, and compiles each.

    mm, copy, mm, loops, mm, sum      mm, mm, (copy, loops, sum), mm

Invariants: calls keep their order; where a check fails, nothing that came after it is written; the peak of memory, as
Inductor estimates it, grows by at most 1 % and 64 KiB.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from itertools import groupby
from typing import Any

from tdc.compile._torch.bodies import body_nodes
from tdc.compile._torch.patches import patched
from tdc.core.private import find, optional

KERNELS = "loops gathered into fewer kernels"
SHARE, SPARE = 1.01, 2**16  # of the peak of memory before, and bytes beyond
Stretch = list[Any]  # nodes of Inductor's scheduler that run one after the other: all of them loops, or none


@optional(KERNELS, lost="some speed on CPU", instead=nullcontext)
def fewer_kernels() -> AbstractContextManager[Any]:
    """A context: loops of what is lowered in it are gathered."""
    memory = find("torch._inductor.memory")
    ordered: Callable[..., list[Any]] = find("torch._inductor.memory:reorder_for_peak_memory", takes=("nodes",))
    plan, estimate = [
        find(f"torch._inductor.memory:{name}") for name in ("prepare_planning_info", "estimate_peak_memory")
    ]
    body_nodes()  # are there

    @wraps(ordered)
    def reorder(nodes: list[Any], *names: Any) -> list[Any]:
        order = ordered(nodes, *names)
        if sum(map(is_loop, order)) < 2:
            return order
        _, inputs = plan(order, *names)
        peak, used = estimate(order, inputs, names[-1])
        return gathered(order, Room(dict(zip(order, used, strict=False)), SHARE * peak + SPARE))

    return patched((memory, "reorder_for_peak_memory", reorder))


class Room:
    """Bytes in use while each node runs, and their limit."""

    def __init__(self, used: dict[Any, int], limit: float) -> None:
        self.used, self.limit = used, limit

    def holds(self, more: int, nodes: Stretch) -> bool:
        """True if so many more bytes may be in use while nodes run; then they are added."""
        if more + max([self.used[node] for node in nodes]) > self.limit:
            return False
        for node in nodes:
            self.used[node] += more
        return True


def gathered(nodes: list[Any], room: Room) -> list[Any]:
    """Order the nodes of a graph with fewer stretches of loops."""
    stretches = [list(found) for _, found in groupby(nodes, is_loop)]
    return [node for stretch in earlier(later(stretches, room), room) for node in stretch]


def later(stretches: list[Stretch], room: Room) -> list[Stretch]:
    """Delay loops, which the calls behind them do not read, to the next loops."""

    def may_wait(loops: Stretch, calls: Stretch, others: Stretch) -> bool:
        free = not reads(calls, loops) and not (checks(loops) and acts(calls))
        return free and room.holds(taken(loops), calls + others)

    return backwards(joined(backwards(stretches), may_wait))


def earlier(stretches: list[Stretch], room: Room) -> list[Stretch]:
    """Move loops, which read nothing of the calls before them, to the loops before those."""

    def may_go(loops: Stretch, calls: Stretch, others: Stretch) -> bool:
        free = not reads(loops, calls) and not writes(loops) and not asserts(calls)
        return free and room.holds(made(loops), calls + others)

    return joined(stretches, may_go)


def backwards(stretches: list[Stretch]) -> list[Stretch]:
    """Reverse stretches and their nodes."""
    return [stretch[::-1] for stretch in reversed(stretches)]


def joined(stretches: list[Stretch], joins: Callable[[Stretch, Stretch, Stretch], bool]) -> list[Stretch]:
    """Add stretches of loops to those before them where `joins(loops, calls between, loops before)`."""
    found: list[Stretch] = []
    for stretch in stretches:
        if len(found) > 1 and is_loop(stretch[0]) and joins(stretch, found[-1], found[-2]):
            found[-2] += stretch
        elif found and is_loop(found[-1][0]) is is_loop(stretch[0]):
            found[-1] += stretch
        else:
            found.append(stretch)
    return found


def is_loop(node: Any) -> bool:
    """True if a node can share a kernel with its neighbours, or generates none."""
    device, own = node.get_device(), node.is_extern() or node.is_template() or node.is_foreach()
    return not own and (device is None or device.type == "cpu")


def reads(after: Stretch, before: Stretch) -> bool:
    """True if some node must run after another."""
    names = {name for node in before for name in node.get_buffer_names()}
    return any([dep.name in names for node in after for dep in node.unmet_dependencies])


def writes(nodes: Stretch) -> bool:
    """True if some node writes in place."""
    return any([x.get_mutations() for node in nodes for x in node.get_outputs()])


def checks(loops: Stretch) -> bool:
    """True if loops may raise an error for a condition or an index."""
    bodies = [getattr(part, "_body", None) for node in loops for part in node.get_nodes()]
    indices = any([body is not None and body.indirect_vars for body in bodies])
    return indices or any([node.has_side_effects() for node in loops])


def asserts(calls: Stretch) -> bool:
    """True if a call has side effects other than writes."""
    return any([node.has_side_effects() and not writes([node]) for node in calls])


def acts(nodes: Stretch) -> bool:
    """True if a call may do more than return a result."""
    own = [isinstance(node.node, body_nodes()) for node in nodes]
    return any(own) or writes(nodes) or any([node.has_side_effects() for node in nodes])


def taken(loops: Stretch) -> int:
    """Bytes that loops read, and that are freed after."""
    own = {id(x) for node in loops for x in node.get_outputs()}
    read = {id(x): x for node in loops for x in node.mpi_node.pred_buffers}
    return sum([x.mpi_buffer.size_free for name, x in read.items() if name not in own])


def made(loops: Stretch) -> int:
    """Bytes of the results of loops."""
    return sum([x.mpi_buffer.size_alloc for node in loops for x in node.get_outputs()])
