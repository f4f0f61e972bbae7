"""The control tree of a function: straight-line blocks and what decides which examples run them.

    Block       statements without control flow; run under vmap, for the examples that are there
    If, While   each example takes its own way
    For         over the rows of each example, over a range, or over what is the same for all
    Call        of another function of `batch`
    Append      to a list that grows in a loop
    Assert      that holds for each example
    Exit        break, continue or return

A `Value` is an expression. What blocks and values read and write, and which names are read later (`live`), is filled in
by `flow`; their code by `source`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Names = frozenset[str]
NOTHING: Names = frozenset()
TEMPORARY = "__v"  # begins the names of what is lifted out of expressions
ITEM = "__item"  # what a `for` hands to its targets
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

    def __str__(self) -> str:
        return self.text


@dataclass(eq=False)
class Block:
    """Statements that every example runs alike, with their text.

    Attributes:
        along: the expression right behind it, which a driver has computed in one go with the block.
        fn_along: the code of both; the last of its results is the value of the expression.
    """

    body: list[ast.stmt]
    line: int
    text: list[str]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    fn: Callable[..., Any] | None = None
    live: Names = NOTHING
    along: Value | None = None
    fn_along: Callable[..., Any] | None = None

    @property
    def reads_along(self) -> tuple[str, ...]:
        """The names that the block and the expression behind it read."""
        more = self.along.reads if self.along is not None else ()
        return (*self.reads, *[name for name in more if name not in self.reads and name not in self.writes])

    @property
    def wanted(self) -> list[str]:
        """The names that it gives values and somebody reads."""
        return [name for name in self.writes if name in self.live]


@dataclass(eq=False)
class If:
    """One way or the other; `live_then` and `live_else` are the names that are live where they begin."""

    test: Value
    then: list[Node]
    orelse: list[Node]
    line: int
    live: Names = NOTHING
    live_then: Names = NOTHING
    live_else: Names = NOTHING


@dataclass(eq=False)
class While:
    """`pre` computes what the test needs, and runs before each test; `live_head` are the names live before it."""

    pre: list[Node]
    test: Value
    body: list[Node]
    orelse: list[Node]
    line: int
    live: Names = NOTHING
    live_head: Names = NOTHING
    live_else: Names = NOTHING


@dataclass(eq=False)
class Walk:
    """What a `for` walks along: a value, or "range", "enumerate", "zip" or "reversed" of walks."""

    kind: str
    parts: list[Walk] = field(default_factory=list)
    value: Value | None = None

    def values(self) -> Iterator[Value]:
        if self.value is not None:
            yield self.value
        for part in self.parts:
            yield from part.values()

    @property
    def form(self) -> tuple[str, tuple[Any, ...]]:
        """The kinds of the walk and of its parts, as nested tuples."""
        return self.kind, tuple([p.form for p in self.parts])

    def __str__(self) -> str:
        return str(self.value) if self.kind == "value" else f"{self.kind}({', '.join([str(p) for p in self.parts])})"


@dataclass(eq=False)
class For:
    """`assign` is the block that gives an item to the targets; further statements in it are `ahead`: they depend on
    the item alone, and can run for all items at once."""

    walk: Walk
    assign: Block
    body: list[Node]
    orelse: list[Node]
    line: int
    live: Names = NOTHING
    live_head: Names = NOTHING
    live_else: Names = NOTHING

    @property
    def targets(self) -> list[str]:
        return [n.id for n in ast.walk(self.assign.body[0]) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]

    @property
    def ahead(self) -> list[str]:
        """The text of what depends on the item alone."""
        return self.assign.text[1:]


@dataclass(eq=False)
class Call:
    """`target = callee(arguments)`; the value has the callee, a tuple and a dict."""

    target: str
    given: Value
    line: int
    live: Names = NOTHING


@dataclass(eq=False)
class Append:
    """`name.append(value)`."""

    name: str
    value: Value
    line: int
    live: Names = NOTHING


@dataclass(eq=False)
class Assert:
    """`assert test, text`."""

    test: Value
    text: str
    line: int
    live: Names = NOTHING


@dataclass(eq=False)
class Exit:
    """Leaves a loop, an iteration or the function, which returns `value`."""

    kind: str
    line: int
    value: Value | None = None
    live: Names = NOTHING


Node: TypeAlias = "Block | If | While | For | Call | Append | Assert | Exit"


def leaves_early(nodes: list[Node], *kinds: str) -> bool:
    """Whether nodes have a return, or a break or continue of a loop around them."""
    return any(isinstance(node, Exit) and node.kind in kinds for node in own(nodes))


def own(nodes: list[Node]) -> Iterator[Node]:
    """Nodes, but for the break and continue of loops among them."""
    for node in nodes:
        yield node
        if isinstance(node, If):
            yield from own([*node.then, *node.orelse])
        elif isinstance(node, (While, For)):
            inside = [n for n in own(node.body) if not (isinstance(n, Exit) and n.kind != "return")]
            yield from [*inside, *own(node.orelse)]


def show(nodes: list[Node], depth: int = 0) -> Iterator[str]:
    """The tree, one line for each thing."""
    pad = INDENT * depth
    for node in nodes:
        if isinstance(node, Block):
            yield f"{pad}block ({', '.join(node.reads)}) -> ({', '.join(node.writes)})"
            yield from [f"{pad}{INDENT}{line}" for line in node.text]
        elif isinstance(node, If):
            yield f"{pad}if {node.test}"
            yield from show(node.then, depth + 1)
            yield from show_else(node.orelse, depth)
        elif isinstance(node, While):
            yield from show(node.pre, depth)
            yield f"{pad}while {node.test}"
            yield from show(node.body, depth + 1)
            yield from show_else(node.orelse, depth)
        elif isinstance(node, For):
            yield f"{pad}for {', '.join(node.targets)} in {node.walk}"
            yield from [f"{pad}{INDENT}ahead {line}" for line in node.ahead]
            yield from show(node.body, depth + 1)
            yield from show_else(node.orelse, depth)
        elif isinstance(node, Exit):
            yield f"{pad}{node.kind}" + (f" {node.value}" if node.value else "")
        elif isinstance(node, Call):
            yield f"{pad}call {node.target} = {node.given}"
        elif isinstance(node, Append):
            yield f"{pad}append {node.value} to {node.name}"
        else:
            yield f"{pad}assert {node.test}"


def show_else(nodes: list[Node], depth: int) -> Iterator[str]:
    if nodes:
        yield f"{INDENT * depth}else"
        yield from show(nodes, depth + 1)
