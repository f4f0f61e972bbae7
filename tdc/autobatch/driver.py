"""The source of a driver: a control tree as Python code whose masks and loops `lowered` has.

Compiled code cannot part the examples, so a driver runs each statement for all of them and keeps, for each way through
the function, who goes there. A piece of it, for `if x > 0: y = log(x)` with `y` read later:

    t1 = decide(f1, (v_x,), n)
    a1, b1 = split(m, t1)
    e1, s1 = [], (v_x, v_y,)
    if a1 is not False:
        (v_x,) = enter(a1, (v_x,))
        (v_y,) = block(f2, (v_x,), n)
        e1.append((a1, (v_y,)))
    if b1 is not False:
        (v_x, v_y,) = s1
        (v_y,) = enter(b1, (v_y,))
        e1.append((b1, (v_y,)))
    (v_y,) = joined(('y',), m, t1, e1)

Where somebody leaves on the way, `meet` also says who is left. Only names that are read before all are together again
are filled by `enter`; examples that are not there for good (`whole` is false) get all of them behind the branch.

A loop is a function of one round, which `loops` runs unrolled, or hands to `while_loop` or `scan`. In a round of a loop
in a graph, an inner loop is one round, too: `resume` lets those join who wait in it since the round before.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tdc.autobatch.flow import blocks_of, every, passes, values_of
from tdc.autobatch.reads import even_lists, loops_in, needed, read_in, reads_of, simple, some, variables, written
from tdc.autobatch.syntax import may_fail
from tdc.autobatch.tree import (
    INDENT,
    ITEM,
    NOTHING,
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
from tdc.autobatch.tree import Names as NameSet

Pieces = dict[str, Callable[..., Any]]
VALUES, ROUNDS = "__walk", "__rounds"  # begin the names of what an inner walk keeps for those who wait in its loop


class Writer:
    """Writes a driver, line by line."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.pieces: Pieces = {}
        self.depth = 1
        self.numbers = 0
        self.number_of: dict[int, int] = {}  # of each loop
        self.around: list[While | For] = []  # the loops around, the innermost last
        self.names: dict[str, tuple[list[str], NameSet]] = {"return": ([], NOTHING)}  # what those who leave take along
        self.ready: dict[int, str] = {}  # the variables of expressions that a block has computed
        self.total = False  # whether none of the code of the loop around can fail
        self.region: NameSet | None = None  # names that are read while some of the examples are elsewhere; None for all

    def line(self, text: str) -> None:
        self.lines.append(INDENT * self.depth + text)

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def numbered(self, node: While | For) -> int:
        """The number of a loop."""
        if id(node) not in self.number_of:
            self.number_of[id(node)] = self.number()
        return self.number_of[id(node)]

    def piece(self, fn: Callable[..., Any] | None) -> str:
        """The name of the code of a block or an expression."""
        assert fn is not None
        name = f"f{len(self.pieces)}"
        self.pieces[name] = fn
        return name

    def value(self, value: Value, mask: str) -> str:
        """An expression, evaluated for those of a mask."""
        ready = self.ready.pop(id(value), None)
        if ready is not None:
            return ready
        if value.name is not None:
            return f"read({value.name!r}, v_{value.name}, {value.line})"
        return f"{self.run(value.fn, value.reads, value.line, [value.expr], mask)}[0]"

    def run(
        self, fn: Callable[..., Any] | None, reads: Sequence[str], line: int, code: Sequence[ast.AST], mask: str
    ) -> str:
        """A call of a piece, given what it reads; not run where it might fail and nobody is there."""
        given = f"{self.piece(fn)}, {reads!r}, {variables(reads)}, {line}, n"
        if not any(may_fail(part) for part in code):
            return f"block({given})"
        return f"guarded({given}, {mask}, {'sure' if mask == 'm' else 'False'})"

    def sequence(
        self, nodes: list[Node], mask: str, ends: str, names: Sequence[str], wanted: NameSet | None = None
    ) -> None:
        """Nodes one behind the other; those who get behind them are added to `ends`, with the values of names."""
        depth = self.depth
        for node in nodes:
            if isinstance(node, Exit):
                self.leave(node, mask)
            else:
                mask = self.node(node, mask)
        if not nodes or passes(nodes[-1]):
            found = variables(names) if wanted is None else some(names, wanted)
            self.line(f"{ends}.append(({mask}, {found}))")
        self.depth = depth

    def leave(self, node: Exit, mask: str) -> None:
        """A break, continue or return; the lists of those who leave bear these names."""
        found = some(*self.names[node.kind]) if node.value is None else f"({self.value(node.value, mask)},)"
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
            old = f"read({node.name!r}, v_{node.name}, {node.line})"
            self.line(f"v_{node.name} = appended({node.name!r}, {old}, {self.value(node.value, mask)}, n)")
        elif isinstance(node, Assert):
            self.line(f"check({self.value(node.test, mask)}, {mask}, n, {node.line}, {node.text!r})")
        return mask

    def block(self, node: Block, mask: str) -> None:
        """A block, and the expression right behind it."""
        code, fn, targets = [*node.body], node.fn, [f"v_{name}" for name in node.wanted]
        if node.along is not None:
            code, fn = [*code, node.along.expr], node.fn_along
            targets.append(f"q{self.number()}")
            self.ready[id(node.along)] = targets[-1]
        target = f"({', '.join(targets)},) = " if targets else ""
        self.line(f"{target}{self.run(fn, node.reads_along, node.line, code, mask)}")

    def branch(self, node: If, mask: str) -> str:
        """Both ways, each for those who take it. Where nobody leaves on the way, those who get behind are who came."""
        k = self.number()
        saved = sorted(node.live_then | node.live_else | written(node.then))
        self.line(f"t{k} = decide({self.value(node.test, mask)}, n, {node.test.line})")
        self.line(f"a{k}, b{k} = split({mask}, t{k})")
        self.line(f"e{k}, s{k} = [], {variables(saved)}")
        live, stay = sorted(node.live), self.stay([*node.then, *node.orelse])
        alone = stay and self.region is None and mask == "m"
        for way, nodes, names in (("a", node.then, node.live_then), ("b", node.orelse, node.live_else)):
            self.line(f"if {way}{k} is not False:")
            self.depth += 1
            if way == "b" and saved:
                self.line(f"{variables(saved)} = s{k}")
            region = self.region
            if alone:
                self.region = read_in(nodes)
            self.enter(f"{way}{k}", mask, names)
            self.sequence(nodes, f"{way}{k}", f"e{k}", live)
            self.region = region
            self.depth -= 1
        if stay:
            self.line(f"{variables(live) if live else '_'} = joined({tuple(live)!r}, {mask}, t{k}, e{k})")
            if alone and live:
                self.line("if not whole:")
                self.line(f"{INDENT}{variables(live)} = enter(m, None, {variables(live)})")
            return mask
        if leaves_early([*node.then, *node.orelse], "return", "break", "continue"):
            self.line(f"if e{k}:")
            self.depth += 1
        return self.meet(k, live)

    def stay(self, nodes: list[Node]) -> bool:
        """Whether all who come to some nodes get behind them, in the same round."""
        waits = self.around and any(isinstance(n, (While, For)) for n in every(nodes))
        return not waits and not leaves_early(nodes, "return", "break", "continue")

    def enter(self, way: str, mask: str, names: Iterable[str]) -> None:
        """Give those who do not come here the values of one who does, of the names that somebody reads before all are
        together again."""
        kept = sorted(names if self.region is None else self.region.intersection(names))
        if kept:
            total = ", True" if self.total else ""
            self.line(f"{variables(kept)} = enter({way}, {mask}, {variables(kept)}{total})")

    def meet(self, k: int, live: list[str]) -> str:
        target = variables(live) if live else "_"
        self.line(f"m{k}, {target} = meet({tuple(live)!r}, e{k})")
        return f"m{k}"

    def loop(self, node: While | For, mask: str) -> str:
        """A function of one round, its loop, `else`, and the meeting of all who come out."""
        k = self.numbered(node)
        carry, fixed = self.kept(node)
        inner = tuple([self.numbered(n) for n in loops_in(node)])
        outer = self.around
        if not outer:
            self.walk_ahead(node, fixed)
        if isinstance(node, While):
            for n in node.pre:
                mask = self.node(n, mask)
            self.line(f"t{k} = decide({self.value(node.test, mask)}, n, {node.test.line})")
            self.line(f"a{k}, b{k} = split({mask}, t{k})")
        else:
            values = ", ".join([self.value(v, mask) for v in node.walk.values()])
            where = f"{'inside' if outer else 'None'}, {mask}"
            given = f"{where}, {node.walk.form}, [{values}], n, {self.changing(node)!r}, {bool(inner)!r}"
            self.line(f"w{k}, h{k}, c{k} = begun({given}{self.rolls(node)})")
            if node.ahead:
                code, reads = self.piece(node.assign.fn), node.assign.reads
                self.line(
                    f"w{k}, d{k} = made(w{k}, {code}, {reads!r}, {variables(reads)}{', inside' if outer else ''})"
                )
        if outer:
            self.resume(node, k, mask, (k, *inner))
        names, region, total, read = dict(self.names), self.region, self.total, read_in([node])
        self.around, self.total = [*outer, node], is_total(node)
        if not outer:
            self.region = read
        self.round(node, k, carry, fixed)
        self.names, self.around, self.region, self.total = names, outer, region, total
        even = f", {found!r}" if (found := even_lists(node)) else ""
        self.line(f"loop{k} = Loop({k}, round{k}, {tuple(carry)!r}, {tuple(fixed)!r}, {inner!r}{even})")
        self.run_loop(node, k, mask, f"{variables(carry)}, {some(fixed, read)}", variables(carry) if carry else "_")
        self.line(f"if r{k} is not False:")
        self.line(f"{INDENT}return_.append((r{k}, (x{k},)))")
        if outer:
            self.line(f"i{k} = waiting_in(inside, {(k, *inner)!r})")
            self.line(f"if i{k} is not False:")
            self.line(f"{INDENT}inside_.append((i{k}, {variables(self.kept(outer[-1])[0])}))")
        return self.after(node, k, mask, carry)

    def run_loop(self, node: While | For, k: int, mask: str, state: str, target: str) -> None:
        """All rounds of a loop, or one of a loop that examples wait in."""
        out = f"l{k}, k{k}, r{k}, x{k}, {target}"
        if isinstance(node, While):
            inside = "inside" if self.around else "None"
            self.line(f"{out} = repeat(loop{k}, a{k}, b{k}, {state}, n, options, {inside})")
            return
        whole = f"{out} = along(loop{k}, w{k}, {mask}, {state}, n, options, {simple(node)!r}, sure)"
        if self.around:
            self.line(f"if v_{ROUNDS}{k} is not None:")
            self.line(f"{INDENT}found = along_inner(loop{k}, w{k}, v_{ROUNDS}{k}, a{k}, {state}, inside)")
            self.line(f"{INDENT}v_{ROUNDS}{k}, ({out}) = found")
            self.line("else:")
            whole = INDENT + whole
        self.line(whole)

    def walk_ahead(self, node: While | For, fixed: list[str]) -> None:
        """The steps of inner loops along values that no round changes."""
        for inner in loops_in(node):
            if isinstance(inner, For):
                names = [value.name for value in inner.walk.values()]
                given = ", ".join([f"v_{name}" for name in names])
                known = names and all(name in fixed for name in names)
                found = f"ahead({inner.walk.form}, [{given}])" if known else "None"
                self.line(f"ahead{self.numbered(inner)} = {found}")

    def resume(self, node: While | For, k: int, mask: str, loops: tuple[int, ...]) -> None:
        """Have those who wait in an inner loop join those who come to it."""
        scope = {*self.kept(self.around[-1])[0], *self.kept(self.around[-1])[1]}
        entering = f"a{k}" if isinstance(node, While) else mask
        if isinstance(node, For):
            self.line(f"v_{VALUES}{k}, v_{ROUNDS}{k} = h{k} if ahead{k} is None else None, c{k}")
        names = sorted(needed(node) & scope) + self.hidden(node)
        self.line(f"a{k}, {variables(names)} = resume(")
        self.line(f"{INDENT}inside, {loops!r}, {mask}, {entering}, {tuple(names)!r}, {variables(names)})")
        if isinstance(node, For):
            kept = {i: f"v_{VALUES}{k}[{j}]" for j, i in enumerate(self.changing(node))}
            given = [kept.get(i, repr(value.name)) for i, value in enumerate(node.walk.values())]
            again = (
                f"begun_again(inside, {node.walk.form}, [{', '.join(given)}], a{k}, {loops[1:]!r}{self.rolls(node)})"
            )
            self.line(f"if v_{ROUNDS}{k} is not None:")
            self.line(f"{INDENT}w{k} = ahead{k} or {again}")

    def rolls(self, node: For) -> str:
        """The options, for a loop that examples leave early and whose items nobody reads."""
        return ", options" if not node.assign.wanted and leaves_early(node.body, "break", "return") else ""

    def changing(self, node: For) -> tuple[int, ...]:
        """Which values of an inner walk are not names of values that no round of the outermost loop changes."""
        fixed = self.kept(self.around[0])[1] if self.around else []
        return tuple([i for i, value in enumerate(node.walk.values()) if value.name not in fixed])

    def hidden(self, node: While | For) -> list[str]:
        """Names for what a walk keeps for those who wait in its loop, of a loop and those inside."""
        numbers = [self.numbered(n) for n in (node, *loops_in(node)) if isinstance(n, For)]
        return [f"{name}{k}" for k in numbers for name in (VALUES, ROUNDS)]

    def kept(self, node: While | For) -> tuple[list[str], list[str]]:
        """The names of the values that rounds change and somebody reads, and of those that they read only."""
        changed = written([node, *(node.pre if isinstance(node, While) else [])])
        carry = sorted(changed & needed(node))
        fixed = sorted((node.live_head | reads_of(node)) - {*carry} - {ITEM})
        return [*carry, *[name for n in loops_in(node) for name in self.own_hidden(n)]], fixed

    def own_hidden(self, node: While | For) -> list[str]:
        return [f"{name}{self.numbered(node)}" for name in (VALUES, ROUNDS)] if isinstance(node, For) else []

    def after(self, node: While | For, k: int, mask: str, carry: list[str]) -> str:
        """Those who come out of a loop: the test failed and `else` ran, or they said break."""
        live = sorted(node.live)
        gone = bool(self.around) or leaves_early(node.body, "return")  # nobody may compute with the values of these
        self.line(f"e{k} = []")
        if node.orelse:
            saved = sorted({*carry, *node.live, *node.live_else, *written(node.orelse)})
            self.line(f"s{k} = {variables(saved)}")
            self.line(f"if l{k} is not False:")
            self.depth += 1
            self.enter(f"l{k}", mask, node.live_else)
            self.sequence(node.orelse, f"l{k}", f"e{k}", live)
            self.depth -= 1
            self.line(f"if k{k} is not False:")
            self.depth += 1
            if saved:
                self.line(f"{variables(saved)} = s{k}")
            if gone:
                self.enter(f"k{k}", "None", live)
            self.line(f"e{k}.append((k{k}, {variables(live)}))")
            self.depth -= 1
        elif not gone:
            self.enter(mask, "None", live)
            return mask
        else:
            self.line(f"o{k} = either(l{k}, k{k})")
            self.line(f"if o{k} is not False:")
            self.depth += 1
            self.enter(f"o{k}", "None", live)
            self.line(f"e{k}.append((o{k}, {variables(live)}))")
            self.depth -= 1
        self.line(f"if e{k}:")
        self.depth += 1
        return self.meet(k, live)

    def round(self, node: While | For, k: int, carry: list[str], fixed: list[str]) -> None:
        """`round(m, carry, fixed, item, sure, inside)`, the body for those in it: who goes on, who leaves, and how."""
        self.line(f"def round{k}(m, carry, fixed, item, sure, inside, n_outer=n):")
        self.depth += 1
        self.line("n = count(m, n_outer)")
        self.line("break_, continue_, return_, inside_ = [], [], [], []")
        for names, source in ((carry, "carry"), (fixed, "fixed")):
            if names:
                self.line(f"{variables(names)} = {source}")
                self.enter("m", "None", names)
        if self.reads_again(node, fixed):
            self.line(f"again = {variables(fixed)}")
        for name in sorted(written([node]) - {*carry, *fixed}):
            self.line(f"v_{name} = UNDEFINED")
        if isinstance(node, For):
            self.line(f"v_{ITEM} = enter(m, None, item)")
            if node.ahead:
                self.line(f"if d{k}:")
                self.line(f"{INDENT}{variables(node.assign.wanted)} = v_{ITEM}")
                self.line("else:")
            self.depth += bool(node.ahead)
            self.block(node.assign, "m")
            self.depth -= bool(node.ahead)
        head = node.live_head | node.live | node.live_else | reads_of(node)
        self.names = {"break": (carry, node.live), "continue": (carry, head), "return": ([], frozenset())}
        self.sequence(node.body, "m", "continue_", carry, head)
        if isinstance(node, While):
            self.test_again(node, carry, fixed, head)
        ends = "[*continue_, *break_, *inside_]"
        going = "g, left" if isinstance(node, While) else "union([m for m, _ in continue_]), False"
        self.line(f"return finish({tuple(carry)!r}, carry, {ends}, {going}, union([m for m, _ in break_]), return_)")
        self.depth -= 1

    def reads_again(self, node: While | For, fixed: list[str]) -> bool:
        """Whether the test at the end of a round is of some who left the body by `continue`: behind it, names have the
        values of others, also those that no round changes."""
        return isinstance(node, While) and bool(fixed) and leaves_early(node.body, "continue")

    def test_again(self, node: While, carry: list[str], fixed: list[str], head: NameSet) -> None:
        """The test of those who go on, at the end of a round."""
        self.line("g, left = False, False")
        self.line("if continue_:")
        self.depth += 1
        self.line(f"g, {variables(carry) if carry else '_'} = meet({tuple(carry)!r}, continue_)")
        self.line(f"continue_ = [(g, {some(carry, head)})]")
        if self.reads_again(node, fixed):
            self.line(f"{variables(fixed)} = again")
        if node.pre or loops_in(node) or leaves_early(node.body, "break", "return"):
            self.enter("g", "None", [name for name in (*carry, *fixed) if name in head])
        mask = "g"
        for n in node.pre:
            mask = self.node(n, mask)
        if node.pre:
            self.line(f"continue_ = [(g, {some(carry, head)})]")
        self.line(f"g, left = split(g, decide({self.value(node.test, mask)}, n, {node.test.line}))")
        self.depth -= 1


def is_total(loop: While | For) -> bool:
    """Whether no code of a loop may fail, or reads what only some examples have."""
    inside = list(every([loop]))
    if isinstance(loop, For) or not all(isinstance(n, (Block, If, Assert, Exit)) for n in inside[1:]):
        return False
    code = [part for n in inside for block in blocks_of(n) for part in block.body]
    return not any(may_fail(part) for part in [*code, *[v.expr for n in inside for v in values_of(n)]])


def write(nodes: list[Node], arguments: list[str], names: Iterable[str]) -> tuple[str, Pieces]:
    """The source of the driver of a function, `driver(m, n, values, options, call)`, and what it calls."""
    writer = Writer()
    writer.line("return_, end_ = [], []")
    for name in sorted({*names} - {*arguments}):
        writer.line(f"v_{name} = UNDEFINED")
    for name in arguments:
        writer.line(f"v_{name} = values[{name!r}]")
    writer.line("whole = sure = m is None")
    begin = len(writer.lines)
    writer.sequence(nodes, "m", "end_", [])
    kept = [f"{name}{k}" for k in writer.number_of.values() for name in (VALUES, ROUNDS)]
    writer.lines[begin:begin] = [f"{INDENT}v_{name} = UNDEFINED" for name in kept]
    writer.depth = 1
    writer.line("return finished(return_, end_)")
    return "\n".join(["def driver(m, n, values, options, call):", *writer.lines, ""]), writer.pieces
