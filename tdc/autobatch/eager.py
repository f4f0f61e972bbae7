"""Runs a control tree eagerly: every block for the active examples, and for no other.

A `Group` is some of the examples, with their values. A test parts a group, and groups that reach the same statement
meet. So no example computes what it would not compute alone: there are no masks and no inactive examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch import blocks
from tdc.autobatch.lists import appended
from tdc.autobatch.merging import merge
from tdc.autobatch.source import OP
from tdc.autobatch.tree import ITEM, Append, Assert, Block, Call, Exit, For, If, Loop, Names, Node, Value, While
from tdc.autobatch.values import RESULT, UNDEFINED, Lane, no_condition, no_return, no_value, select
from tdc.autobatch.walks import made, walk
from tdc.core.dynamo import is_batched
from tdc.core.errors import TdcError, UnsupportedError, message

Exits = dict[str, list["Group"]]
Function = Callable[[Any, "Group"], "Group"]


class Group:
    """Some of the examples.

    Attributes:
        lanes: their positions in the whole batch.
        values: the values of names.
    """

    __slots__ = ("lanes", "values")

    def __init__(self, lanes: Tensor, values: dict[str, Any]) -> None:
        self.lanes = lanes
        self.values = values

    def __len__(self) -> int:
        return self.lanes.shape[0]

    def parted(self, test: bool | Tensor, yes: Names, no: Names) -> tuple[Group | None, Group | None]:
        """The examples for which a test holds, and the others, each with the names that they still need."""
        if isinstance(test, bool):
            return (self, None) if test else (None, self)
        return self.part(test, yes), self.part(~test, no)

    def part(self, mask: Tensor, names: Names) -> Group:
        at = mask.nonzero().squeeze(1)
        kept = {name: select(x, at) for name, x in self.values.items() if name in names}
        return Group(self.lanes.index_select(0, at), kept)


def join(groups: Sequence[Group | None], names: Names | None = None) -> Group | None:
    """Groups that meet as one, with the names that they still need; None of none."""
    there = [g for g in groups if g is not None]
    if len(there) < 2:
        return there[0] if there else None
    shared = [name for name in there[0].values if names is None or name in names]
    shared = [name for name in shared if all([name in g.values for g in there[1:]])]
    counts = [len(g) for g in there]
    values = {name: merge(name, [g.values[name] for g in there], counts) for name in shared}
    return Group(torch.cat([g.lanes for g in there]), values)


def run(nodes: list[Node], group: Group | None, exits: Exits, call: Function) -> Group | None:
    """Run nodes for a group. Returns the examples that reach their end; the others are added to `exits`.

    Raises:
        TdcError: with the line of the node, which `Source.located` shows.
    """
    for node in nodes:
        if group is None:
            return None
        try:
            group = after(node, group, exits, call)
        except TdcError as error:
            error.line = error.line or node.line
            raise
    return group


def after(node: Node, group: Group, exits: Exits, call: Function) -> Group | None:
    """The examples that get past one node."""
    if isinstance(node, Block):
        return block(node, group)
    if isinstance(node, If):
        yes, no = group.parted(decide(node.test, group), node.live_then, node.live_else)
        return join([run(node.then, yes, exits, call), run(node.orelse, no, exits, call)], node.live)
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
    if isinstance(node, Assert):
        test = decide(node.test, group)
        if isinstance(test, Tensor) or not test:
            wrong = group.lanes[~test] if isinstance(test, Tensor) else group.lanes
            raise AssertionError(f"{node.text} (line {node.line}, example {int(wrong.min())})")
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
    """Straight-line code; names that are not read later are dropped."""
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
    """A mask, or one bool where all examples have the same.

    Raises:
        UnsupportedError: it is batched by a vmap around the batch.
    """
    if is_batched(mask):
        got, hint = "a vmap around a batch", "map over what the vmap maps, too: in_dims, or tdc.lanes"
        raise UnsupportedError(message(OP, "examples that are mapped by tdc.batch alone", got, hint=hint))
    count = int(mask.sum())
    return mask if 0 < count < mask.numel() else count > 0


def while_loop(node: While, group: Group, exits: Exits, call: Function) -> Group | None:
    """Examples leave the loop when their test fails."""
    left: list[Group | None] = []
    inside: Exits = {**exits, "break": [], "continue": []}
    before_body = node.live_head.union(*[n.live for n in node.pre])  # `pre` assigns names that the body reads
    staying: Group | None = group
    while staying is not None:
        staying = run(node.pre, staying, exits, call)
        if staying is None:
            break
        staying, leaving = staying.parted(decide(node.test, staying), before_body, node.live_else)
        left.append(leaving)
        if staying is not None:
            staying = iteration(node, staying, inside, call)
    return after_loop(node, left, inside, exits, call)


def iteration(node: Loop, group: Group, inside: Exits, call: Function) -> Group | None:
    """The body, once. Returns the examples that go on, by `continue` as well."""
    going = [run(node.body, group, inside, call), *inside["continue"]]
    inside["continue"].clear()
    return join(going, node.live_head)


def after_loop(node: Loop, left: list[Group | None], inside: Exits, exits: Exits, call: Function) -> Group | None:
    """The examples that left by the test run `else`, and meet those that left by `break`."""
    return join([run(node.orelse, join(left, node.live_else), exits, call), *inside["break"]], node.live)


def for_loop(node: For, group: Group, exits: Exits, call: Function) -> Group | None:
    """Examples leave the loop when they have no more items."""
    steps = walk(node.walk.form, [evaluate(v, group) for v in node.walk.values()])
    whole = False
    if node.ahead:
        assert node.assign.fn is not None
        given = [group.values.get(name, UNDEFINED) for name in node.assign.reads]
        steps, whole = made(steps, node.assign.fn, node.assign.reads, given)
    inside: Exits = {**exits, "break": [], "continue": []}
    left: list[Group | None] = []
    staying: Group | None = group
    positions_of = Positions(group.lanes)
    step = 0
    while staying is not None:
        test = steps.has(step)
        if isinstance(test, Tensor):
            at = positions_of(staying.lanes)
            test = settled(test if at is None or test.ndim == 0 else test[at])
        staying, leaving = staying.parted(test, node.live_head, node.live_else)
        left.append(leaving)
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
    """The positions of examples among those that entered a loop; None for all of them in order."""

    def __init__(self, entered: Tensor) -> None:
        self.entered = self.last = entered
        self.found: Tensor | None = None

    def __call__(self, lanes: Tensor) -> Tensor | None:
        if lanes is not self.last:
            where = torch.empty(int(self.entered.max()) + 1, dtype=torch.long, device=lanes.device)
            where[self.entered] = torch.arange(len(self.entered), device=lanes.device)
            self.last, self.found = lanes, where[lanes]
        return self.found


def run_function(nodes: list[Node], values: dict[str, Any], count: int, call: Function, device: Any) -> Any:
    """Run a function for `count` examples.

    Raises:
        StructureError: some examples return a value, others get to the end of the function.
    """
    exits: Exits = {"return": [], "break": [], "continue": []}
    lanes = torch.arange(count, device=device)
    rest = run(nodes, Group(lanes, values), exits, call)
    returned = exits["return"]
    if rest is not None and any(g.values[RESULT] is not None for g in returned):
        raise no_return()
    end = join([*returned, None if rest is None else Group(rest.lanes, {RESULT: None})])
    assert end is not None
    found = end.values[RESULT]
    return found if end.lanes is lanes else select(found, end.lanes.argsort())
