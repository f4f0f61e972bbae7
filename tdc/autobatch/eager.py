"""Runs a control tree eagerly: every block for the examples that come there, and for no other.

A `Group` is some of the examples, with the values they have. A test parts a group, and groups that reach the same
statement meet. So no example computes what it would not compute alone: no masks, no idle examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch import blocks
from tdc.autobatch.ahead import made
from tdc.autobatch.lists import appended
from tdc.autobatch.merging import merge
from tdc.autobatch.source import OP
from tdc.autobatch.tree import ITEM, Append, Assert, Block, Call, Exit, For, If, Node, Value, While
from tdc.autobatch.values import RESULT, UNDEFINED, Lane, no_condition, no_return, no_value, select
from tdc.autobatch.walks import walk
from tdc.core.dynamo import is_batched
from tdc.core.errors import TdcError, UnsupportedError, message

Exits = dict[str, list["Group"]]
Function = Callable[[Any, "Group"], "Group"]


class Group:
    """Some of the examples.

    Attributes:
        lanes: which, as positions in the whole batch.
        values: what their names stand for.
    """

    __slots__ = ("lanes", "values")

    def __init__(self, lanes: Tensor, values: dict[str, Any]) -> None:
        self.lanes = lanes
        self.values = values

    def __len__(self) -> int:
        return self.lanes.shape[0]

    def part(self, positions: Tensor, names: frozenset[str]) -> Group:
        """The examples at some positions of the group, with the names that they still need."""
        kept = {name: select(x, positions) for name, x in self.values.items() if name in names}
        return Group(self.lanes.index_select(0, positions), kept)


def join(groups: Sequence[Group], names: frozenset[str] | None = None) -> Group | None:
    """Groups that meet as one, with the names that they still need; None of none."""
    if len(groups) < 2:
        return groups[0] if groups else None
    counts = [len(g) for g in groups]
    shared = [name for name in groups[0].values if names is None or name in names]
    shared = [name for name in shared if all([name in g.values for g in groups[1:]])]
    values = {name: merge(name, [g.values[name] for g in groups], counts) for name in shared}
    return Group(torch.cat([g.lanes for g in groups]), values)


def run(nodes: list[Node], group: Group | None, exits: Exits, call: Function) -> Group | None:
    """Run nodes for a group. Returns the examples that get behind them; the others are added to `exits`.

    Raises:
        TdcError: with the line of the node, which `Source.located` shows.
    """
    for node in nodes:
        if group is None:
            return None
        try:
            group = after(node, group, exits, call)
        except TdcError as error:
            error.line = error.line or getattr(node, "line", 0)
            raise
    return group


def after(node: Node, group: Group, exits: Exits, call: Function) -> Group | None:
    """The examples that get behind one node."""
    if isinstance(node, Block):
        return block(node, group)
    if isinstance(node, If):
        return branch(node, group, exits, call)
    if isinstance(node, While):
        return while_loop(node, group, exits, call)
    if isinstance(node, For):
        return for_loop(node, group, exits, call)
    if isinstance(node, Exit):
        found = {RESULT: evaluate(node.value, group)} if node.value is not None else group.values
        exits[node.kind].append(Group(group.lanes, found))
        return None
    if isinstance(node, Call):
        return call(node, group)
    if isinstance(node, Append):
        (old,) = arguments((node.name,), group, node.line)
        new = appended(node.name, old, evaluate(node.value, group), len(group))
        return with_values(group, {node.name: new})
    check(node, group)
    return group


def with_values(group: Group, values: dict[str, Any]) -> Group:
    return Group(group.lanes, {**group.values, **values})


def arguments(reads: Sequence[str], group: Group, line: int) -> list[Any]:
    """The values of names.

    Raises:
        StructureError: a name has none.
    """
    for name in reads:
        if name not in group.values:
            raise no_value(name, line)
    return [group.values[name] for name in reads]


def block(node: Block, group: Group) -> Group:
    """Straight-line code; names that nobody reads later are dropped."""
    assert node.fn is not None
    found = blocks.run(node.fn, arguments(node.reads, group, node.line), len(group))
    return with_values(group, dict(zip(node.wanted, found, strict=True)))


def evaluate(value: Value, group: Group) -> Any:
    """The value of an expression."""
    args = arguments(value.reads, group, value.line)
    if value.name is not None:
        return args[0]
    assert value.fn is not None
    try:
        return blocks.run(value.fn, args, len(group))[0]
    except TdcError as error:
        error.line = error.line or value.line
        raise


def decide(value: Value, group: Group) -> bool | Tensor:
    """A condition: one bool where it is the same for all examples of the group, else one for each.

    Raises:
        ShapeError: a condition of several elements.
    """
    found = evaluate(value, group)
    if type(found) is not Lane:
        return bool(found)
    data = found.data
    if not isinstance(data, Tensor) or data[0].numel() != 1:
        raise no_condition(data, value.line)
    return settled(data.reshape(-1).bool())


def settled(mask: Tensor) -> bool | Tensor:
    """A mask, as one bool where all examples have the same.

    Raises:
        UnsupportedError: it stands for one of a vmap around the batch.
    """
    if is_batched(mask):
        got, hint = "a vmap around a batch", "map over what the vmap maps, too: in_dims, or tdc.lanes"
        raise UnsupportedError(message(OP, "examples that are mapped by tdc.batch alone", got, hint=hint))
    count = int(mask.sum())
    return mask if 0 < count < mask.numel() else count > 0


def branch(node: If, group: Group, exits: Exits, call: Function) -> Group | None:
    """Each example goes one way."""
    test = decide(node.test, group)
    if isinstance(test, bool):
        return run(node.then if test else node.orelse, group, exits, call)
    yes = group.part(positions(test), node.live_then)
    no = group.part(positions(~test), node.live_else)
    ends = [run(node.then, yes, exits, call), run(node.orelse, no, exits, call)]
    return join([g for g in ends if g is not None], node.live)


def positions(mask: Tensor) -> Tensor:
    return mask.nonzero().squeeze(1)


def part(group: Group, test: bool | Tensor, stays: frozenset[str], leaves: frozenset[str]) -> list[Group | None]:
    """Those for whom a test holds, and the others."""
    if isinstance(test, bool):
        return [group, None] if test else [None, group]
    return [group.part(positions(test), stays), group.part(positions(~test), leaves)]


def while_loop(node: While, group: Group, exits: Exits, call: Function) -> Group | None:
    """Examples leave the loop when their test fails."""
    left: list[Group] = []
    inside: Exits = {**exits, "break": [], "continue": []}
    staying: Group | None = group
    while staying is not None:
        at_head = run(node.pre, staying, exits, call)
        if at_head is None:
            break
        staying, leaving = part(at_head, decide(node.test, at_head), node.live_head | at_test(node), node.live_else)
        left += [leaving] if leaving is not None else []
        if staying is not None:
            staying = iteration(node, staying, inside, call)
    return after_loop(node, left, inside, exits, call)


def at_test(node: While) -> frozenset[str]:
    """Names that `pre` gave a value and the body reads."""
    return frozenset(name for n in node.pre for name in n.live)


def iteration(node: While | For, group: Group, inside: Exits, call: Function) -> Group | None:
    """The body, once. Returns those who go on: they fell through, or said continue."""
    end = run(node.body, group, inside, call)
    going = [*([end] if end is not None else []), *inside["continue"]]
    inside["continue"].clear()
    return join(going, node.live_head)


def after_loop(node: While | For, left: list[Group], inside: Exits, exits: Exits, call: Function) -> Group | None:
    """Those who left by the test run `else`, and meet those who said break."""
    normal = join(left, node.live_else)
    end = run(node.orelse, normal, exits, call) if normal is not None else None
    return join([*([end] if end is not None else []), *inside["break"]], node.live)


def for_loop(node: For, group: Group, exits: Exits, call: Function) -> Group | None:
    """Examples leave the loop when they have no more items."""
    steps = walk(node.walk.form, [evaluate(v, group) for v in node.walk.values()])
    whole = False
    if node.ahead:
        assert node.assign.fn is not None
        given = [group.values.get(name, UNDEFINED) for name in node.assign.reads]
        steps, whole = made(steps, node.assign.fn, node.assign.reads, given)
    inside: Exits = {**exits, "break": [], "continue": []}
    left: list[Group] = []
    staying: Group | None = group
    positions_of = Positions(group.lanes)
    step = 0
    while staying is not None:
        test = steps.has(step)
        if isinstance(test, Tensor):
            at = positions_of(staying.lanes)
            test = settled(test if at is None or test.ndim == 0 else test[at])
        staying, leaving = part(staying, test, node.live_head, node.live_else)
        left += [leaving] if leaving is not None else []
        if staying is None:
            break
        item = steps.item_of(step, positions_of(staying.lanes))
        if whole:
            staying = with_values(staying, dict(zip(node.assign.wanted, item, strict=True)))
        else:
            staying = block(node.assign, with_values(staying, {ITEM: item}))
        staying = iteration(node, staying, inside, call)
        step += 1
    return after_loop(node, left, inside, exits, call)


class Positions:
    """The positions, among the examples that entered a loop, of those who are there; None for all of them in order."""

    def __init__(self, entered: Tensor) -> None:
        self.entered = self.last = entered
        self.found: Tensor | None = None

    def __call__(self, lanes: Tensor) -> Tensor | None:
        if lanes is not self.last:
            where = torch.empty(int(self.entered.max()) + 1, dtype=torch.long, device=lanes.device)
            where[self.entered] = torch.arange(len(self.entered), device=lanes.device)
            self.last, self.found = lanes, where[lanes]
        return self.found


def check(node: Assert, group: Group) -> None:
    """
    Raises:
        AssertionError: the test fails for some example.
    """
    test = decide(node.test, group)
    if isinstance(test, Tensor) or not test:
        wrong = group.lanes[~test] if isinstance(test, Tensor) else group.lanes
        raise AssertionError(f"{node.text} (line {node.line}, example {int(wrong.min())})")


def result(groups: Sequence[Group], rest: Group | None) -> Group:
    """What all examples return.

    Raises:
        StructureError: some examples return a value, others get to the end of the function.
    """
    ends = [*groups, *([Group(rest.lanes, {RESULT: None})] if rest is not None else [])]
    if rest is not None and any(g.values[RESULT] is not None for g in groups):
        raise no_return()
    whole = join(ends)
    assert whole is not None
    return whole


def run_function(nodes: list[Node], values: dict[str, Any], count: int, call: Function, device: Any) -> Any:
    """Run a whole function for `count` examples."""
    exits: Exits = {"return": [], "break": [], "continue": []}
    lanes = torch.arange(count, device=device)
    rest = run(nodes, Group(lanes, values), exits, call)
    end = result(exits["return"], rest)
    found = end.values[RESULT]
    return found if end.lanes is lanes else select(found, end.lanes.argsort())
