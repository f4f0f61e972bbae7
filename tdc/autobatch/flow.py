"""Data flow of a control tree: which names are read and written, live, certainly assigned, and equal for all examples.

liveness      backwards through the tree: blocks return only names that are read later
assignment    forwards: an error where a name was assigned for some examples only
uniform       a test on a shared value sends all examples one way, as in `if h is None` or `if self.training`
"""

from __future__ import annotations

import ast
from itertools import pairwise
from typing import Any, NamedTuple

from tdc.autobatch.source import HELPERS, OP, Source, every_argument
from tdc.autobatch.syntax import Names, called
from tdc.autobatch.tree import (
    ITEM,
    NOTHING,
    TEMPORARY,
    Append,
    Assert,
    Block,
    Exit,
    For,
    If,
    Loop,
    Node,
    Value,
    While,
    blocks_of,
    every,
    given_by,
    leaves_early,
    parts_of,
    values_of,
)  # fmt: skip
from tdc.core.errors import StructureError, message

UNIFORM_CALLS = ("isinstance", "hasattr", "callable", "type", "is_instance", "is_tensor")
UNIFORM_TYPES = ("int", "bool", "str", "float")
EXITS = ("break", "continue", "return")
Live = frozenset[str]
Exits = dict[str, Live]


def fill(nodes: list[Node], names: Live) -> None:
    """Remove unreachable nodes, then fill in reads, writes, live names, and which expression a block computes."""
    ends(nodes)
    for node in every(nodes):
        for value in values_of(node):
            value.reads = tuple(Names(names, value.expr).reads)
        for block in blocks_of(node):
            found = Names(names | {ITEM}, *block.body)
            block.reads, block.writes = tuple(found.reads), tuple(found.writes)
    live(nodes, NOTHING, {"return": NOTHING})
    for part in [nodes, *[part for node in every(nodes) for part in parts_of(node)]]:
        for block, node in pairwise(part):
            if isinstance(block, Block):
                block.along = right_after(node)
    for node in every(nodes):  # the test of a loop that all who began a round come to
        last = node.body[-1] if isinstance(node, While) and not node.pre and node.body else None
        if isinstance(node, While) and isinstance(last, Block):
            whole = not leaves_early(node.body, *EXITS) and not any(isinstance(n, Loop) for n in every(node.body))
            last.along = right_after(node) if whole else last.along


def right_after(node: Node) -> Value | None:
    """The expression that a node begins with, if it has one that needs code."""
    begins = isinstance(node, (If, Append, Assert, Exit)) or (isinstance(node, While) and not node.pre)
    found = next(iter(values_of(node)), None) if begins else None
    return None if found is None or found.name is not None or isinstance(found.expr, ast.Constant) else found


def ends(nodes: list[Node]) -> bool:
    """Remove unreachable nodes; True if examples reach the end."""
    for k, node in enumerate(nodes):
        if not passes(node):
            del nodes[k + 1 :]
            return False
    return True


def passes(node: Node) -> bool:
    """True if examples get past a node."""
    if isinstance(node, If):
        ways = [ends(node.then), ends(node.orelse)]
        return any(ways)
    if isinstance(node, Loop):
        ends(node.body)
        return (ends(node.orelse) and not is_endless(node)) or leaves_early(node.body, "break")
    return not isinstance(node, Exit)


def is_endless(node: Loop) -> bool:
    """True of a `while True`."""
    test = node.test.expr if isinstance(node, While) else None
    return isinstance(test, ast.Constant) and bool(test.value)


# -- liveness


def live(nodes: list[Node], out: Live, exits: Exits) -> Live:
    """The names that are live before some nodes, where `out` is live after them."""
    for node in reversed(nodes):
        node.live = out
        if isinstance(node, Exit):
            out = exits[node.kind] | reads(node)
        elif isinstance(node, If):
            node.live_then, node.live_else = live(node.then, out, exits), live(node.orelse, out, exits)
            out = node.live_then | node.live_else | reads(node)
        elif isinstance(node, Loop):
            out = live_loop(node, out, exits)
        elif isinstance(node, Append):
            out = out | reads(node) | {node.name}
        else:
            out = (out - {*given_by(node)}) | (frozenset(node.reads) if isinstance(node, Block) else reads(node))
    return out


def live_loop(node: Loop, out: Live, exits: Exits) -> Live:
    """Live names before a loop: its body is read until those at its head stay the same."""
    node.live_else = live(node.orelse, out, exits)
    head: Live = NOTHING
    while True:
        now = live(node.body, head, {**exits, "break": out, "continue": head})
        if isinstance(node, While):
            now = live(node.pre, now | node.live_else | reads(node), exits)
        elif isinstance(node, For):
            node.assign.live = now
            now = (now - {*node.assign.writes}) | ({*node.assign.reads} - {ITEM}) | node.live_else
        if now == head:
            node.live_head = head
            return head | (reads(node) if isinstance(node, For) else NOTHING)
        head = now


def reads(node: Node) -> Live:
    """The names that the expressions of a node read."""
    return frozenset(name for value in values_of(node) for name in value.reads)


def written(nodes: list[Node]) -> set[str]:
    """The names that nodes assign."""
    return {name for node in every(nodes) for name in given_by(node)}


def read_in(nodes: list[Node]) -> Live:
    """The names that nodes read."""
    inside = list(every(nodes))
    found = {name for n in inside for block in blocks_of(n) for name in block.reads}
    appended = {n.name for n in inside if isinstance(n, Append)}
    return NOTHING.union(found, appended, *[reads(n) for n in inside]) - {ITEM}


def loops_in(node: Loop) -> list[Loop]:
    """The loops in the body of a loop."""
    return [n for n in every([*node.body, *(node.pre if isinstance(node, While) else [])]) if isinstance(n, Loop)]


def tested(node: Loop) -> Live:
    """The names that the test of a `while` reads."""
    return reads(node) if isinstance(node, While) else NOTHING


def needed(node: Loop) -> Live:
    """The names that are read in a loop or after it."""
    return NOTHING.union(*[n.live_head | n.live | n.live_else | tested(n) for n in (node, *loops_in(node))]) - {ITEM}


def is_simple(node: For) -> bool:
    """True if `scan` can run a loop: its items all run the body to its end, and loops inside are plain walks."""
    exits = [n for n in every(node.body) if isinstance(n, Exit)]
    inner = all(isinstance(n, For) and not loops_in(n) and not n.orelse for n in loops_in(node))
    return inner and all(n.kind == "continue" for n in exits)


def even_lists(node: Loop) -> tuple[str, ...]:
    """The names of lists that grow by as many items for all examples in each round of a `for`."""
    inside = list(every(node.body))
    if not isinstance(node, For) or any(isinstance(n, Exit) for n in inside):
        return ()
    always = [n for n in node.body if isinstance(n, Append)]
    others = {name for n in inside if n not in always for name in given_by(n)} | {*node.assign.writes}
    return tuple([name for name in dict.fromkeys([n.name for n in always]) if name not in others])


# -- assignment


class Assigned:
    """Checks that names are assigned where they are read, for all examples.

    Args:
        tainted: names whose values may differ between examples.
    """

    def __init__(self, source: Source, tainted: Live) -> None:
        self.source = source
        self.tainted = tainted
        self.lines: dict[str, int] = {}  # where a name is assigned for some examples only

    def check(self, nodes: list[Node], sure: Live | None, exits: dict[str, list[Live]]) -> Live | None:
        """The names that are assigned after some nodes; None where no example gets there.

        Raises:
            StructureError: a name is read that some examples did not assign.
        """
        for node in nodes:
            if sure is None:
                return None
            for value in [] if isinstance(node, While) else values_of(node):
                self.read(value.reads, sure, value.line)
            if isinstance(node, Exit):
                exits[node.kind].append(sure)
                return None
            if isinstance(node, If):
                both = [self.check(node.then, sure, exits), self.check(node.orelse, sure, exits)]
                sure = self.meet(both, [], [node.test], node.line)
            elif isinstance(node, Loop):
                sure = self.loop(node, sure, exits)
            else:
                self.read(node.reads if isinstance(node, Block) else (), sure, node.line)
                self.read(given_by(node) if isinstance(node, Append) else (), sure, node.line)
                sure = sure | {*given_by(node)}
        return sure

    def loop(self, node: Loop, sure: Live, exits: dict[str, list[Live]]) -> Live | None:
        inside: dict[str, list[Live]] = {**exits, "break": [], "continue": []}
        endless = is_endless(node)
        if isinstance(node, While):
            sure = self.check(node.pre, sure, exits) or sure
            self.read(node.test.reads, sure, node.test.line)
        end = self.check(node.body, sure | {*given_by(node)}, inside)
        normal = None if endless else self.check(node.orelse, sure, exits)
        more = [*([] if end is None or endless else [end]), *inside["continue"]]
        return self.meet([normal, *inside["break"]], more, values_of(node), node.line)

    def meet(self, ways: list[Live | None], more: list[Live], tests: list[Value], line: int) -> Live | None:
        """Names assigned on all ways; on some ways, too, where shared tests send all examples one way."""
        there = [names for names in ways if names is not None]
        if not there:
            return None
        both, some = frozenset.intersection(*there), frozenset.union(*there, *more)
        if all(is_uniform(test.expr, self.tainted) for test in tests):
            return some
        for name in some - both:
            self.lines.setdefault(name, line)
        return both

    def read(self, names: tuple[str, ...], sure: Live, line: int) -> None:
        """Raise StructureError for the first name that is not assigned."""
        for name in names:
            if name in sure or name == ITEM:
                continue
            got, since = f"{name!r}, read at {self.source.where(line)}, which ", self.lines.get(name)
            got += "has none" if since is None else f"gets one only inside the statement of line {since}"
            hint = f"give {name} a value " + ("first" if since is None else f"before line {since}")
            raise StructureError(message(OP, "names that have a value for every example", got, hint=hint))


def is_uniform(expr: ast.expr, tainted: Live) -> bool:
    """True if the text of an expression shows that it has one value for all examples."""
    if isinstance(expr, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in expr.ops):
        return True
    if isinstance(expr, ast.BoolOp):
        return all(is_uniform(v, tainted) for v in expr.values)
    if isinstance(expr, ast.Call):
        helper = isinstance(expr.func, ast.Attribute) and getattr(expr.func.value, "id", "") == HELPERS
        if called(expr) in UNIFORM_CALLS and (helper or isinstance(expr.func, ast.Name)):
            return True
        if helper:
            return all(is_uniform(a.body if isinstance(a, ast.Lambda) else a, tainted) for a in expr.args)
    return not Names(tainted, expr).reads and not is_random(expr)


def is_random(node: ast.AST) -> bool:
    """True if code draws random numbers, which differ between examples."""
    names = [called(n) for n in ast.walk(node) if isinstance(n, ast.Call)]
    return any(word in name for name in names for word in ("rand", "bernoulli", "multinomial", "normal"))


class Facts(NamedTuple):
    """Names that a statement reads and assigns; `differs` if they differ whatever it reads: random or lifted values."""

    reads: Live
    stores: Live
    differs: bool


def tainted_names(source: Source, nodes: list[Node], names: Live) -> Live:
    """Names whose values may differ between examples: parameters, and what is made of them or under their tests."""
    facts: dict[int, Facts] = {}
    for stmt in [stmt for n in every(nodes) if isinstance(n, Block) for stmt in n.body]:
        found = frozenset(Names(names, stmt).reads)
        stores = frozenset(n.id for n in ast.walk(stmt) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        facts[id(stmt)] = Facts(found, stores, is_random(stmt) or any(name.startswith(TEMPORARY) for name in found))
    given = [a for a in every_argument(source.tree.args) if a.arg not in ("self", "cls")]
    now = frozenset(a.arg for a in given if not is_python(a.annotation))
    while True:
        before, now = now, now | spread(nodes, now, False, facts)
        if now == before:
            return now


def is_python(annotation: Any) -> bool:
    """True of an annotation that names a type of Python, whose values are shared."""
    return isinstance(annotation, ast.Name) and annotation.id in UNIFORM_TYPES


def spread(nodes: list[Node], tainted: Live, apart: bool, facts: dict[int, Facts]) -> Live:
    """Names that nodes assign values that may differ; `apart` where only some examples may come here."""
    out: set[str] = set()
    for node in nodes:
        differs = apart or any(not is_uniform(v.expr, tainted) for v in values_of(node))
        if isinstance(node, Block):
            for read, stores, anyway in [facts[id(stmt)] for stmt in node.body]:
                if apart or anyway or not read.isdisjoint(tainted):
                    out |= stores
        elif differs:
            out |= {*given_by(node)}
        for part in parts_of(node):
            out |= spread(part, tainted, differs, facts)
    return frozenset(out)
