"""What names blocks read and write, which are read later, and which may have no value when they are read.

liveness      backwards through the tree: blocks hand out only what somebody reads
assignment    forwards: an error where a name was given a value only for some examples
uniform       a test on what is the same for all examples sends all of them one way, so that what it skips is
              skipped for all, as in `if h is None` or `if self.training`
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from tdc.autobatch.source import HELPERS, OP, Source, every_argument
from tdc.autobatch.syntax import Names, called
from tdc.autobatch.tree import (
    ITEM,
    TEMPORARY,
    Append,
    Assert,
    Block,
    Call,
    Exit,
    For,
    If,
    Node,
    Value,
    While,
    leaves_early,
)  # fmt: skip
from tdc.core.errors import StructureError, message

UNIFORM_CALLS = ("isinstance", "hasattr", "callable", "type", "is_instance", "is_tensor")
UNIFORM_TYPES = ("int", "bool", "str", "float")
Live = frozenset[str]
Exits = dict[str, Live]


def fill(nodes: list[Node], names: frozenset[str]) -> None:
    """Remove what no example gets to, then fill in what is read and written, and what is live."""
    ends(nodes)
    for node in every(nodes):
        for value in values_of(node):
            found = Names(names)
            found.visit(value.expr)
            value.reads = tuple(found.reads)
        for block in blocks_of(node):
            found = Names(names | {ITEM})
            for stmt in block.body:
                found.visit(stmt)
            block.reads, block.writes = tuple(found.reads), tuple(found.writes)
    live(nodes, frozenset(), {"return": frozenset()})
    put_along(nodes)


def put_along(nodes: list[Node]) -> None:
    """Tell blocks which expression is right behind them: that of the next node, or the test of a loop that all who
    began a round come to."""
    for part in [nodes, *[part for node in every(nodes) for part in children(node)]]:
        for block, node in pairwise(part):
            if isinstance(block, Block):
                block.along = right_behind(node)
    for node in every(nodes):
        if isinstance(node, While) and not node.pre and node.body and isinstance(node.body[-1], Block):
            leaves = leaves_early(node.body, "break", "continue", "return")
            if not leaves and not any(isinstance(n, (While, For)) for n in every(node.body)):
                node.body[-1].along = right_behind(node)


def right_behind(node: Node) -> Value | None:
    """The expression that a node begins with, if it has one that needs code."""
    begins = isinstance(node, (If, Append, Assert, Exit)) or (isinstance(node, While) and not node.pre)
    found = next(iter(values_of(node)), None) if begins else None
    return None if found is None or found.name is not None or isinstance(found.expr, ast.Constant) else found


def ends(nodes: list[Node]) -> bool:
    """Whether examples get to the end of some nodes, of which those that nobody gets to are removed."""
    for k, node in enumerate(nodes):
        if not passes(node):
            del nodes[k + 1 :]
            return False
    return True


def passes(node: Node) -> bool:
    """Whether examples get past a node."""
    if isinstance(node, If):
        ways = [ends(node.then), ends(node.orelse)]
        return any(ways)
    if isinstance(node, (While, For)):
        ends(node.body)
        return (ends(node.orelse) and not is_endless(node)) or leaves_early(node.body, "break")
    return not isinstance(node, Exit)


def is_endless(node: While | For) -> bool:
    """Whether a loop is a `while True`."""
    test = node.test.expr if isinstance(node, While) else None
    return isinstance(test, ast.Constant) and bool(test.value)


def every(nodes: list[Node]) -> Iterator[Node]:
    """All nodes of a tree."""
    for node in nodes:
        yield node
        for part in children(node):
            yield from every(part)


def children(node: Node) -> list[list[Node]]:
    if isinstance(node, If):
        return [node.then, node.orelse]
    if isinstance(node, While):
        return [node.pre, node.body, node.orelse]
    return [node.body, node.orelse] if isinstance(node, For) else []


def values_of(node: Node) -> list[Value]:
    """The expressions of one node."""
    if isinstance(node, (If, While, Assert)):
        return [node.test]
    if isinstance(node, For):
        return list(node.walk.values())
    if isinstance(node, Call):
        return [node.given]
    if isinstance(node, Append):
        return [node.value]
    return [node.value] if isinstance(node, Exit) and node.value is not None else []


def blocks_of(node: Node) -> list[Block]:
    """The blocks of one node."""
    return [node] if isinstance(node, Block) else [node.assign] if isinstance(node, For) else []


# -- liveness


def live(nodes: list[Node], out: Live, exits: Exits) -> Live:
    """The names that are live before some nodes, when `out` is live behind them."""
    for node in reversed(nodes):
        node.live = out
        out = live_before(node, out, exits)
    return out


def live_before(node: Node, out: Live, exits: Exits) -> Live:
    if isinstance(node, Exit):
        return exits[node.kind] | reads(node)
    if isinstance(node, If):
        node.live_then, node.live_else = live(node.then, out, exits), live(node.orelse, out, exits)
        return node.live_then | node.live_else | reads(node)
    if isinstance(node, (While, For)):
        return live_loop(node, out, exits)
    if isinstance(node, Block):
        return (out - {*node.writes}) | {*node.reads}
    if isinstance(node, Call):
        return (out - {node.target}) | reads(node)
    return out | reads(node) | ({node.name} if isinstance(node, Append) else frozenset())


def live_loop(node: While | For, out: Live, exits: Exits) -> Live:
    """A loop, until what is live at its head stays the same."""
    node.live_else = live(node.orelse, out, exits)
    head: Live = frozenset()
    while True:
        inside = {**exits, "break": out, "continue": head}
        body = live(node.body, head, inside)
        if isinstance(node, For):
            node.assign.live = body
            body = (body - {*node.assign.writes}) | ({*node.assign.reads} - {ITEM})
            now = body | node.live_else
        else:
            now = live(node.pre, body | node.live_else | reads(node), exits)
        if now == head:
            node.live_head = head
            return head | (reads(node) if isinstance(node, For) else frozenset())
        head = now


def reads(node: Node) -> Live:
    return frozenset(name for value in values_of(node) for name in value.reads)


# -- assignment


class Assigned:
    """Which names have a value, for all examples or for some."""

    def __init__(self, source: Source, tainted: frozenset[str]) -> None:
        self.source = source
        self.tainted = tainted
        self.lines: dict[str, int] = {}  # where a name is given a value that some examples lack

    def check(self, nodes: list[Node], sure: Live | None, exits: dict[str, list[Live]]) -> Live | None:
        """The names that have a value behind some nodes; None where no example gets there.

        Raises:
            StructureError: a name is read that some examples gave no value.
        """
        for node in nodes:
            if sure is None:
                return None
            sure = self.node(node, sure, exits)
        return sure

    def node(self, node: Node, sure: Live, exits: dict[str, list[Live]]) -> Live | None:
        if not isinstance(node, While):
            for value in values_of(node):
                self.read(value.reads, sure, value.line)
        if isinstance(node, Exit):
            exits[node.kind].append(sure)
            return None
        if isinstance(node, If):
            return self.branch(node, sure, exits)
        if isinstance(node, (While, For)):
            return self.loop(node, sure, exits)
        if isinstance(node, Block):
            self.read(node.reads, sure, node.line)
            return sure | {*node.writes}
        if isinstance(node, Append):
            self.read((node.name,), sure, node.line)
        return sure | {node.target} if isinstance(node, Call) else sure

    def branch(self, node: If, sure: Live, exits: dict[str, list[Live]]) -> Live | None:
        ends = [self.check(node.then, sure, exits), self.check(node.orelse, sure, exits)]
        there = [end for end in ends if end is not None]
        if not there:
            return None
        both = frozenset.intersection(*there)
        return both | self.partial(frozenset.union(*there) - both, self.varies(node.test.expr), node.line)

    def loop(self, node: While | For, sure: Live, exits: dict[str, list[Live]]) -> Live | None:
        inside: dict[str, list[Live]] = {**exits, "break": [], "continue": []}
        endless = is_endless(node)
        if isinstance(node, While):
            sure = self.check(node.pre, sure, exits) or sure
            self.read(node.test.reads, sure, node.test.line)
            varies = self.varies(node.test.expr)
            begin = sure
        else:
            varies = any(self.varies(value.expr) for value in node.walk.values())
            begin = sure | {*node.assign.writes}
        end = self.check(node.body, begin, inside)
        normal = None if endless else self.check(node.orelse, sure, exits)
        there = [s for s in (normal, *inside["break"]) if s is not None]
        if not there:
            return None
        both = frozenset.intersection(*there)
        most = frozenset.union(*there, *([] if end is None or endless else [end]), *inside["continue"])
        return both | self.partial(most - both, varies, node.line)

    def partial(self, names: Live, varies: bool, line: int) -> Live:
        """Names that only some ways give a value; those of ways that all examples take together count as given."""
        if not varies:
            return names
        for name in names:
            self.lines.setdefault(name, line)
        return frozenset()

    def varies(self, test: ast.expr) -> bool:
        return not is_uniform(test, self.tainted)

    def read(self, names: tuple[str, ...], sure: Live, line: int) -> None:
        for name in names:
            if name in sure or name == ITEM:
                continue
            where, since = self.source.where(line), self.lines.get(name)
            got = f"{name!r}, read at {where}, which has none"
            hint = f"give {name} a value first"
            if since is not None:
                got = f"{name!r}, read at {where}, which gets one only inside the statement of line {since}"
                hint = f"give {name} a value before line {since}"
            raise StructureError(message(OP, "names that have a value for every example", got, hint=hint))


def is_uniform(expr: ast.expr, tainted: frozenset[str]) -> bool:
    """Whether an expression has one value for all examples, for all that its text says."""
    if isinstance(expr, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in expr.ops):
        return True
    if isinstance(expr, ast.Call) and isinstance(expr.func, ast.Name) and expr.func.id in UNIFORM_CALLS:
        return True
    if isinstance(expr, ast.BoolOp):
        return all(is_uniform(v, tainted) for v in expr.values)
    func = expr.func if isinstance(expr, ast.Call) else None
    if isinstance(expr, ast.Call) and isinstance(func, ast.Attribute) and getattr(func.value, "id", "") == HELPERS:
        if func.attr in UNIFORM_CALLS:
            return True
        return all(is_uniform(a.body if isinstance(a, ast.Lambda) else a, tainted) for a in expr.args)
    found = Names(tainted)
    found.visit(expr)
    return not found.reads and not is_random(expr)


def is_random(node: ast.AST) -> bool:
    """Whether code draws random numbers, which differ between examples."""
    names = [called(n) for n in ast.walk(node) if isinstance(n, ast.Call)]
    return any("rand" in n or "bernoulli" in n or "multinomial" in n or "normal" in n for n in names)


def tainted_names(source: Source, nodes: list[Node], names: frozenset[str]) -> frozenset[str]:
    """Names whose values may differ between examples: parameters, and what is made of them or under their tests."""
    given = every_argument(source.tree.args)
    found = frozenset(a.arg for a in given if a.arg not in ("self", "cls") and not is_python(a.annotation))
    facts = {id(stmt): Facts.of(stmt, names) for n in every(nodes) if isinstance(n, Block) for stmt in n.body}
    while True:
        now = found | spread(nodes, found, False, facts)
        if now == found:
            return found
        found = now


def is_python(annotation: Any) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id in UNIFORM_TYPES


class Facts(NamedTuple):
    """What a statement of a block reads and gives a value, and whether that differs whatever it reads: random numbers,
    and names that were lifted out of expressions."""

    reads: frozenset[str]
    stores: frozenset[str]
    differs: bool

    @staticmethod
    def of(stmt: ast.stmt, names: frozenset[str]) -> Facts:
        found = Names(names)
        found.visit(stmt)
        stores = {n.id for n in ast.walk(stmt) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        lifted = any(name.startswith(TEMPORARY) for name in found.reads)
        return Facts(frozenset(found.reads), frozenset(stores), lifted or is_random(stmt))


def spread(nodes: list[Node], tainted: frozenset[str], apart: bool, facts: dict[int, Facts]) -> frozenset[str]:
    """Names that nodes give values that may differ; `apart` where examples come here that others do not."""
    out: set[str] = set()
    for node in nodes:
        differs = apart or any(not is_uniform(v.expr, tainted) for v in values_of(node))
        if isinstance(node, Block):
            for reads, stores, anyway in [facts[id(stmt)] for stmt in node.body]:
                if apart or anyway or not reads.isdisjoint(tainted):
                    out |= stores
        elif isinstance(node, (Call, Append)) and differs:
            out.add(node.target if isinstance(node, Call) else node.name)
        elif isinstance(node, For) and differs:
            out |= {*node.assign.writes}
        for part in children(node):
            out |= spread(part, tainted, differs, facts)
    return frozenset(out)
