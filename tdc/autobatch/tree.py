"""The control tree of a function: straight-line blocks and what decides which examples run them.

    Block       statements without control flow; run under vmap, for the active examples
    If, While   each example takes its own branch
    For         over the rows of each example, over a range, or over a shared iterable
    Call        of another function of `batch`
    Append      to a list that grows in a loop
    Assert      that holds for each example
    Exit        break, continue or return

`flow` fills in which names blocks and values read and write and which are live; `program` gives them their code.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Names = frozenset[str]
NOTHING: Names = frozenset()
TEMPORARY = "__v"  # prefix of names for values lifted out of expressions
ITEM = "__item"  # the name of the item that a `for` gives to its targets
INDENT = "    "


@dataclass(eq=False)
class Value:
    """An expression, with its text; `name` where it is a variable, which needs no code."""

    expr: ast.expr
    line: int
    text: str
    reads: tuple[str, ...] = ()
    fn: Callable[..., Any] | None = None

    @property
    def name(self) -> str | None:
        return self.expr.id if isinstance(self.expr, ast.Name) and self.reads else None


@dataclass(eq=False)
class Node:
    """A node; `live` are the names that are read after it."""

    line: int
    live: Names = field(default=NOTHING, kw_only=True)


@dataclass(eq=False)
class Block(Node):
    """Statements that all active examples run, with their text.

    Attributes:
        along: the expression right after it, which a driver computes together with the block.
        fn_along: the code of both; its last result is the value of the expression.
    """

    body: list[ast.stmt]
    text: list[str]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    fn: Callable[..., Any] | None = None
    along: Value | None = None
    fn_along: Callable[..., Any] | None = None

    @property
    def reads_along(self) -> tuple[str, ...]:
        """The names that the block and the expression after it read."""
        more = self.along.reads if self.along is not None else ()
        return (*self.reads, *[name for name in more if name not in self.reads and name not in self.writes])

    @property
    def wanted(self) -> list[str]:
        """The assigned names that are read later."""
        return [name for name in self.writes if name in self.live]


@dataclass(eq=False)
class If(Node):
    """A branch; `live_then` and `live_else` are the names that are live at the beginning of each arm."""

    test: Value
    then: list[Node]
    orelse: list[Node]
    live_then: Names = NOTHING
    live_else: Names = NOTHING


@dataclass(eq=False)
class Loop(Node):
    """A loop; `live_head` are the names that are live before its test or its next item."""

    body: list[Node]
    orelse: list[Node]
    live_head: Names = field(default=NOTHING, kw_only=True)
    live_else: Names = field(default=NOTHING, kw_only=True)


@dataclass(eq=False)
class While(Loop):
    """A `while`; `pre` computes what the test needs, and runs before each test."""

    pre: list[Node]
    test: Value


@dataclass(eq=False)
class Walk:
    """The iterable of a `for`: a value, or "range", "enumerate", "zip" or "reversed" of walks."""

    kind: str
    parts: list[Walk] = field(default_factory=list)
    value: Value | None = None

    def values(self) -> list[Value]:
        own = [] if self.value is None else [self.value]
        return [*own, *[value for part in self.parts for value in part.values()]]

    @property
    def form(self) -> tuple[str, tuple[Any, ...]]:
        """The kinds of the walk and of its parts, as nested tuples."""
        return self.kind, tuple([p.form for p in self.parts])

    def __str__(self) -> str:
        return self.value.text if self.value else f"{self.kind}({', '.join([str(p) for p in self.parts])})"


@dataclass(eq=False)
class For(Loop):
    """A `for`; `assign` gives the item to the targets, and computes in `ahead` what depends on the item alone."""

    walk: Walk
    assign: Block

    @property
    def ahead(self) -> list[str]:
        """The text of what depends on the item alone."""
        return self.assign.text[1:]


@dataclass(eq=False)
class Call(Node):
    """`target = callee(arguments)`; the value has the callee, a tuple and a dict."""

    target: str
    given: Value


@dataclass(eq=False)
class Append(Node):
    """`name.append(value)`."""

    name: str
    value: Value


@dataclass(eq=False)
class Assert(Node):
    """`assert test, text`."""

    test: Value
    text: str


@dataclass(eq=False)
class Exit(Node):
    """Leaves a loop ("break"), an iteration ("continue") or the function ("return", with `value`)."""

    kind: str
    value: Value | None = None


def parts_of(node: Node) -> list[list[Node]]:
    """Lists of nodes inside of a node."""
    if isinstance(node, If):
        return [node.then, node.orelse]
    return [*([node.pre] if isinstance(node, While) else []), node.body, node.orelse] if isinstance(node, Loop) else []


def values_of(node: Node) -> list[Value]:
    """Expressions of one node."""
    if isinstance(node, For):
        return node.walk.values()
    if isinstance(node, (If, While, Assert)):
        return [node.test]
    found = node.given if isinstance(node, Call) else node.value if isinstance(node, (Append, Exit)) else None
    return [] if found is None else [found]


def blocks_of(node: Node) -> list[Block]:
    """Blocks of one node."""
    return [node] if isinstance(node, Block) else [node.assign] if isinstance(node, For) else []


def given_by(node: Node) -> tuple[str, ...]:
    """Names that one node assigns."""
    found = node.target if isinstance(node, Call) else node.name if isinstance(node, Append) else None
    return (found,) if found is not None else tuple([name for block in blocks_of(node) for name in block.writes])


def every(nodes: list[Node]) -> Iterator[Node]:
    """All nodes of a tree."""
    for node in nodes:
        yield node
        for part in parts_of(node):
            yield from every(part)


def leaves_early(nodes: list[Node], *kinds: str) -> bool:
    """True if nodes have an exit of one of these kinds that leaves them: no break of a loop inside."""
    for node in nodes:
        if isinstance(node, Exit) and node.kind in kinds:
            return True
        inner = tuple([kind for kind in kinds if kind == "return"]) if isinstance(node, Loop) else kinds
        if isinstance(node, Loop) and (leaves_early(node.body, *inner) or leaves_early(node.orelse, *kinds)):
            return True
        if isinstance(node, If) and leaves_early([*node.then, *node.orelse], *kinds):
            return True
    return False


def show(nodes: list[Node], depth: int = 0) -> Iterator[str]:
    """The tree, one line for each thing."""
    pad = INDENT * depth
    for node in nodes:
        if isinstance(node, Block):
            yield f"{pad}block ({', '.join(node.reads)}) -> ({', '.join(node.writes)})"
            yield from [f"{pad}{INDENT}{line}" for line in node.text]
        elif isinstance(node, (If, Loop)):
            yield from show(node.pre if isinstance(node, While) else [], depth)
            if isinstance(node, For):
                targets = [n.id for n in ast.walk(node.assign.body[0]) if isinstance(n, ast.Name) and n.id != ITEM]
                yield f"{pad}for {', '.join(targets)} in {node.walk}"
                yield from [f"{pad}{INDENT}ahead {line}" for line in node.ahead]
            else:
                yield f"{pad}{type(node).__name__.lower()} {values_of(node)[0].text}"
            yield from show(node.then if isinstance(node, If) else node.body, depth + 1)
            if node.orelse:
                yield f"{pad}else"
                yield from show(node.orelse, depth + 1)
        elif isinstance(node, Exit):
            yield f"{pad}{node.kind}" + (f" {node.value.text}" if node.value else "")
        elif isinstance(node, Call):
            yield f"{pad}call {node.target} = {node.given.text}"
        elif isinstance(node, Append):
            yield f"{pad}append {node.value.text} to {node.name}"
        elif isinstance(node, Assert):
            yield f"{pad}assert {node.test.text}"
