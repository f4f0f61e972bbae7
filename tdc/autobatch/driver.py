"""The source of a driver: a control tree as Python code whose masks and loops `lowered` has.

Compiled code cannot part the examples, so a driver runs each statement for all of them and keeps, for each way through
the function, who goes there. A piece of it, for `if x > 0: y = log(x)` with `y` read later:

    t1 = decide(f1, n, (v_x,))
    a1, b1 = split(m, t1)
    e1, s1 = [], (v_x, v_y,)
    if a1 is not False:
        (v_x,) = enter(a1, (v_x,))
        (v_y,) = block(f2, n, (v_x,))
        e1.append((a1, (v_y,)))
    if b1 is not False:
        (v_x, v_y,) = s1
        (v_y,) = enter(b1, (v_y,))
        e1.append((b1, (v_y,)))
    m1, (v_y,) = meet(('y',), e1)

A loop is a function of one round, which `lowered` runs unrolled, or hands to `while_loop` or `scan`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tdc.autobatch.flow import every
from tdc.autobatch.syntax import may_fail
from tdc.autobatch.tree import INDENT, ITEM, Append, Assert, Block, Call, Exit, For, If, Node, Value, Walk, While

Pieces = dict[str, Callable[..., Any]]


def variables(names: Iterable[str]) -> str:
    """A tuple of variables, as a value or as a target."""
    return "(" + "".join([f"v_{name}, " for name in names]).rstrip() + ")"


def written(nodes: list[Node]) -> set[str]:
    """The names that nodes give values."""
    out: set[str] = set()
    for node in every(nodes):
        if isinstance(node, Block):
            out |= {*node.writes}
        elif isinstance(node, For):
            out |= {*node.assign.writes}
        elif isinstance(node, (Call, Append)):
            out.add(node.target if isinstance(node, Call) else node.name)
    return out


def leaves_early(nodes: list[Node], *kinds: str) -> bool:
    """Whether nodes have a return, or a break or continue of a loop around them."""
    return any(isinstance(node, Exit) and node.kind in kinds for node in own(nodes))


def own(nodes: list[Node]) -> Iterable[Node]:
    """Nodes, but for the break and continue of loops among them."""
    for node in nodes:
        yield node
        if isinstance(node, If):
            yield from own([*node.then, *node.orelse])
        elif isinstance(node, (While, For)):
            inside = [n for n in own(node.body) if not (isinstance(n, Exit) and n.kind != "return")]
            yield from [*inside, *own(node.orelse)]


class Writer:
    """Writes a driver, line by line."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.pieces: Pieces = {}
        self.depth = 1
        self.numbers = 0
        self.names: dict[str, list[str]] = {}  # what those who break or continue take along

    def line(self, text: str) -> None:
        self.lines.append(INDENT * self.depth + text)

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def piece(self, fn: Callable[..., Any] | None) -> str:
        """The name of the code of a block or an expression."""
        assert fn is not None
        name = f"f{len(self.pieces)}"
        self.pieces[name] = fn
        return name

    def value(self, value: Value, mask: str) -> str:
        """An expression, evaluated for those of a mask."""
        if value.name is not None:
            return f"read({value.name!r}, v_{value.name})"
        return f"{self.run(value, [value.expr], mask)}[0]"

    def run(self, piece: Block | Value, code: Sequence[ast.AST], mask: str) -> str:
        """A call of a piece, not run where it might fail and nobody is there."""
        given = f"{self.piece(piece.fn)}, n, {piece.reads!r}, {variables(piece.reads)}"
        if not any(may_fail(part) for part in code):
            return f"block({given})"
        return f"guarded({given}, {mask}, {'sure' if mask == 'm' else 'False'})"

    def sequence(self, nodes: list[Node], mask: str, ends: str, names: Iterable[str]) -> None:
        """Nodes one behind the other; those who get behind them are added to `ends`, with the values of names."""
        depth = self.depth
        for node in nodes:
            if isinstance(node, Exit):
                self.leave(node, mask)
                break
            mask = self.node(node, mask)
        else:
            self.line(f"{ends}.append(({mask}, {variables(names)}))")
        self.depth = depth

    def leave(self, node: Exit, mask: str) -> None:
        """A break, continue or return; the lists of those who leave bear these names."""
        found = variables(self.names[node.kind]) if node.value is None else f"({self.value(node.value, mask)},)"
        self.line(f"{node.kind}_.append(({mask}, {found}))")

    def node(self, node: Node, mask: str) -> str:
        """One node. Returns the variable of those who get behind it."""
        if isinstance(node, Block):
            self.block(node, mask)
        elif isinstance(node, If):
            return self.branch(node, mask)
        elif isinstance(node, (While, For)):
            return self.loop(node, mask)
        elif isinstance(node, Call):
            self.line(f"v_{node.target} = call({self.value(node.given, mask)}, {mask}, n, {node.line})")
        elif isinstance(node, Append):
            self.line(f"v_{node.name} = [*v_{node.name}, {self.value(node.value, mask)}]")
        elif isinstance(node, Assert):
            self.line(f"check({self.value(node.test, mask)}, {mask}, n, {node.line}, {node.text!r})")
        return mask

    def block(self, node: Block, mask: str) -> None:
        names = [w for w in node.writes if w in node.live]
        target = f"{variables(names)} = " if names else ""
        self.line(f"{target}{self.run(node, node.body, mask)}")

    def branch(self, node: If, mask: str) -> str:
        """Both ways, each for those who take it."""
        k = self.number()
        saved = sorted(node.live_then | node.live_else | written(node.then))
        self.line(f"t{k} = decide({self.value(node.test, mask)}, n, {node.test.line})")
        self.line(f"a{k}, b{k} = split({mask}, t{k})")
        self.line(f"e{k}, s{k} = [], {variables(saved)}")
        live = sorted(node.live)
        for way, nodes, names in (("a", node.then, node.live_then), ("b", node.orelse, node.live_else)):
            self.line(f"if {way}{k} is not False:")
            self.depth += 1
            if way == "b" and saved:
                self.line(f"{variables(saved)} = s{k}")
            self.enter(f"{way}{k}", mask, names)
            self.sequence(nodes, f"{way}{k}", f"e{k}", live)
            self.depth -= 1
        if leaves_early([*node.then, *node.orelse], "return", "break", "continue"):
            self.line(f"if e{k}:")
            self.depth += 1
        return self.meet(k, live)

    def enter(self, way: str, mask: str, names: Iterable[str]) -> None:
        """Give those who do not come here the values of one who does."""
        kept = sorted(names)
        if kept:
            self.line(f"{variables(kept)} = enter({way}, {mask}, {variables(kept)})")

    def meet(self, k: int, live: list[str]) -> str:
        target = variables(live) if live else "_"
        self.line(f"m{k}, {target} = meet({tuple(live)!r}, e{k})")
        return f"m{k}"

    def loop(self, node: While | For, mask: str) -> str:
        """A function of one round, its loop, `else`, and the meeting of all who come out."""
        k = self.number()
        inner = [*node.body, *(node.pre if isinstance(node, While) else [])]
        changed = written(inner) | ({*node.assign.writes} if isinstance(node, For) else set())
        carry = sorted(changed & (node.live_head | node.live | node.live_else))
        fixed = sorted((node.live_head | reads_of(node)) - {*carry} - {ITEM})
        outer = dict(self.names)
        if isinstance(node, While):
            for n in node.pre:
                mask = self.node(n, mask)
            self.line(f"t{k} = decide({self.value(node.test, mask)}, n, {node.test.line})")
            self.line(f"a{k}, b{k} = split({mask}, t{k})")
        else:
            values = ", ".join([self.value(v, mask) for v in node.walk.values()])
            self.line(f"w{k} = walk({show_walk(node.walk)}, [{values}], n)")
        self.round(node, k, carry, fixed)
        self.names = outer
        state = f"{variables(carry)}, {variables(fixed)}"
        run = (
            f"repeat(round{k}, {tuple(carry)!r}, a{k}, b{k}, {state}, n, options)"
            if isinstance(node, While)
            else f"along(round{k}, {tuple(carry)!r}, w{k}, {mask}, {state}, n, options, {simple(node)!r}, sure)"
        )
        self.line(f"l{k}, k{k}, r{k}, x{k}, {variables(carry) if carry else '_'} = {run}")
        self.line(f"if r{k} is not False:")
        self.line(f"{INDENT}return_.append((r{k}, (x{k},)))")
        return self.after(node, k, mask, carry)

    def after(self, node: While | For, k: int, mask: str, carry: list[str]) -> str:
        """Those who come out of a loop: the test failed and `else` ran, or they said break."""
        live = sorted(node.live)
        self.line(f"e{k} = []")
        if node.orelse:
            self.line(f"s{k} = {variables(carry)}")
            self.line(f"if l{k} is not False:")
            self.depth += 1
            self.enter(f"l{k}", mask, node.live_else)
            self.sequence(node.orelse, f"l{k}", f"e{k}", live)
            self.depth -= 1
            self.line(f"if k{k} is not False:")
            self.depth += 1
            if carry:
                self.line(f"{variables(carry)} = s{k}")
            self.line(f"e{k}.append((k{k}, {variables(live)}))")
            self.depth -= 1
        else:
            self.line(f"o{k} = either(l{k}, k{k})")
            self.line(f"if o{k} is not False:")
            self.depth += 1
            gone = leaves_early(node.body, "return")  # whose values nobody may compute with
            self.enter(f"o{k}", "None", live if gone else [name for name in carry if name in node.live])
            self.line(f"e{k}.append((o{k}, {variables(live)}))")
            self.depth -= 1
        self.line(f"if e{k}:")
        self.depth += 1
        return self.meet(k, live)

    def round(self, node: While | For, k: int, carry: list[str], fixed: list[str]) -> None:
        """`round(active, carry, fixed, item, sure)`, the body for those in it: who goes on, who leaves, and how."""
        self.line(f"def round{k}(m, carry, fixed, item, sure, n_outer=n):")
        self.depth += 1
        self.line("n = count(m, n_outer)")
        self.line("break_, continue_, return_ = [], [], []")
        for names, source in ((carry, "carry"), (fixed, "fixed")):
            if names:
                self.line(f"{variables(names)} = enter(m, None, {source})")
        for name in sorted((written([node]) | {*names_given(node)}) - {*carry, *fixed}):
            self.line(f"v_{name} = UNDEFINED")
        mask = "m"
        if isinstance(node, For):
            self.line(f"v_{ITEM} = enter(m, None, item)")
            self.block(node.assign, mask)
        self.names = {"break": carry, "continue": carry, "return": []}
        self.sequence(node.body, mask, "continue_", carry)
        left = "False"
        if isinstance(node, While):
            self.line("g, left = False, False")
            self.line("if continue_:")
            self.depth += 1
            target = variables(carry) if carry else "_"
            self.line(f"g, {target} = meet({tuple(carry)!r}, continue_)")
            self.line(f"continue_ = [(g, {variables(carry)})]")
            if node.pre or leaves_early(node.body, "break", "return"):
                self.enter("g", "None", [*carry, *fixed])
            mask = "g"
            for n in node.pre:
                mask = self.node(n, mask)
            if node.pre:
                self.line(f"continue_ = [(g, {variables(carry)})]")
            self.line(f"g, left = split(g, decide({self.value(node.test, mask)}, n, {node.test.line}))")
            self.depth -= 1
            left = "left"
            going = "g"
        else:
            going = "None"
        ends = f"continue_, break_, return_, {going}, {left}, {isinstance(node, For)}"
        self.line(f"return finish({tuple(carry)!r}, m, carry, {ends})")
        self.depth -= 1


def names_given(node: While | For) -> tuple[str, ...]:
    """The targets of a loop."""
    return node.assign.writes if isinstance(node, For) else ()


def reads_of(node: While | For) -> frozenset[str]:
    """The names that a test reads, and so must be there at the end of a round."""
    return frozenset(node.test.reads) if isinstance(node, While) else frozenset()


def simple(node: For) -> bool:
    """Whether all who have an item run the body to its end, and no loop is inside: then `scan` can run it."""
    return not any(
        isinstance(n, (While, For)) or (isinstance(n, Exit) and n.kind != "continue") for n in every(node.body)
    )


def show_walk(walk: Walk) -> str:
    """A walk as nested tuples."""
    return f"({walk.kind!r}, [{', '.join([show_walk(p) for p in walk.parts])}])"


def write(nodes: list[Node], arguments: list[str], names: Iterable[str]) -> tuple[str, Pieces]:
    """The source of the driver of a function, `driver(m, n, values, options, call)`, and what it calls."""
    writer = Writer()
    writer.names = {"return": []}
    writer.line("return_, end_ = [], []")
    for name in sorted({*names} - {*arguments}):
        writer.line(f"v_{name} = UNDEFINED")
    for name in arguments:
        writer.line(f"v_{name} = values[{name!r}]")
    writer.line("sure = m is None")
    writer.sequence(nodes, "m", "end_", [])
    writer.depth = 1
    writer.line("return finished(return_, end_)")
    return "\n".join(["def driver(m, n, values, options, call):", *writer.lines, ""]), writer.pieces
