"""The source of a driver: a control tree as Python code that calls `lowered` and `loops`.

Compiled code cannot part the examples, so a driver runs each statement for all of them and keeps, for each way through
the function, a mask of the examples that take it. For `if x > 0: y = log(x)` with `y` read later:

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

With an early exit, `meet` also returns the mask of the examples that are left. Only names that are read before all
examples are together again are filled by `enter`; where some are inactive (`whole` is false) all are filled after it.

A loop is a function of one round, which `loops` runs unrolled, or hands to `while_loop` or `scan`. In a round of a loop
in a graph, an inner loop is one round, too: `resume` adds the examples that wait in it since the round before.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tdc.autobatch.flow import EXITS, even_lists, is_simple, loops_in, needed, passes, read_in, tested, written
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
    Loop,
    Names,
    Node,
    Value,
    While,
    blocks_of,
    every,
    leaves_early,
    values_of,
)  # fmt: skip

Pieces = dict[str, Callable[..., Any]]
VALUES, ROUNDS = "__walk", "__rounds"  # prefixes of names that an inner walk keeps for examples that wait in its loop


def variables(names: Iterable[str], wanted: Names | None = None) -> str:
    """A tuple of variables, as a value or as a target; those that are not wanted as UNDEFINED."""
    found = [f"v_{name}, " if wanted is None or name in wanted else "UNDEFINED, " for name in names]
    return "(" + "".join(found).rstrip() + ")"


class Writer:
    """Writes a driver, line by line."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.pieces: Pieces = {}
        self.depth = 1
        self.numbers = 0
        self.number_of: dict[int, int] = {}  # of each loop
        self.around: list[Loop] = []  # the loops around, the innermost last
        self.names: dict[str, tuple[list[str], Names]] = {"return": ([], NOTHING)}  # that examples take along an exit
        self.ready: dict[int, str] = {}  # the variables of expressions that a block has computed
        self.total = False  # no code of the loop around can fail
        self.region: Names | None = None  # names that are read while some examples are inactive; None for all

    def line(self, text: str, deeper: int = 0) -> None:
        self.lines.append(INDENT * (self.depth + deeper) + text)

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def numbered(self, node: Loop) -> int:
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
        """An expression, evaluated for the examples of a mask."""
        ready = self.ready.pop(id(value), None)
        if ready is not None:
            return ready
        if value.name is not None:
            return f"read({value.name!r}, v_{value.name}, {value.line})"
        return f"{self.run(value.fn, value.reads, value.line, [value.expr], mask)}[0]"

    def run(
        self, fn: Callable[..., Any] | None, reads: Sequence[str], line: int, code: Sequence[ast.AST], mask: str
    ) -> str:
        """A call of a piece; guarded where it might fail and no example may be active."""
        given = f"{self.piece(fn)}, {reads!r}, {variables(reads)}, {line}, n"
        if not any(may_fail(part) for part in code):
            return f"block({given})"
        return f"guarded({given}, {mask}, {'sure' if mask == 'm' else 'False'})"

    def sequence(
        self, nodes: list[Node], mask: str, ends: str, names: Sequence[str], wanted: Names | None = None
    ) -> None:
        """Nodes in order; the examples that reach their end are added to `ends`, with the values of names."""
        depth = self.depth
        for node in nodes:
            mask = self.node(node, mask)
        if not nodes or passes(nodes[-1]):
            self.line(f"{ends}.append(({mask}, {variables(names, wanted)}))")
        self.depth = depth

    def node(self, node: Node, mask: str) -> str:
        """One node. Returns the variable of the mask after it."""
        if isinstance(node, Block):
            self.block(node, mask)
        elif isinstance(node, If):
            return self.branch(node, mask)
        elif isinstance(node, Loop):
            return self.loop(node, mask)
        elif isinstance(node, Exit):
            found = variables(*self.names[node.kind]) if node.value is None else f"({self.value(node.value, mask)},)"
            self.line(f"{node.kind}_.append(({mask}, {found}))")
        elif isinstance(node, Call):
            self.line(f"v_{node.target} = call({self.value(node.given, mask)}, {mask}, n, {node.line})")
        elif isinstance(node, Append):
            old = f"read({node.name!r}, v_{node.name}, {node.line})"
            self.line(f"v_{node.name} = appended({node.name!r}, {old}, {self.value(node.value, mask)}, n)")
        elif isinstance(node, Assert):
            self.line(f"check({self.value(node.test, mask)}, {mask}, n, {node.line}, {node.text!r})")
        return mask

    def block(self, node: Block, mask: str) -> None:
        """A block, and the expression right after it."""
        code, fn, targets = [*node.body], node.fn, [f"v_{name}" for name in node.wanted]
        if node.along is not None:
            code, fn = [*code, node.along.expr], node.fn_along
            targets.append(f"q{self.number()}")
            self.ready[id(node.along)] = targets[-1]
        target = f"({', '.join(targets)},) = " if targets else ""
        self.line(f"{target}{self.run(fn, node.reads_along, node.line, code, mask)}")

    def test(self, node: If | While, k: int, mask: str) -> None:
        """The masks of the examples for which a test holds, and of the others."""
        self.line(f"t{k} = decide({self.value(node.test, mask)}, n, {node.test.line})")
        self.line(f"a{k}, b{k} = split({mask}, t{k})")

    def branch(self, node: If, mask: str) -> str:
        """Both arms, each for the examples that take it. Without an early exit the mask is unchanged after them."""
        k = self.number()
        saved = sorted(node.live_then | node.live_else | written(node.then))
        self.test(node, k, mask)
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
                self.line(f"{variables(live)} = enter(m, None, {variables(live)})", 1)
            return mask
        if leaves_early([*node.then, *node.orelse], *EXITS):
            self.line(f"if e{k}:")
            self.depth += 1
        return self.meet(k, live)

    def stay(self, nodes: list[Node]) -> bool:
        """True if all examples that come to some nodes get past them, in the same round."""
        waits = self.around and any(isinstance(n, Loop) for n in every(nodes))
        return not waits and not leaves_early(nodes, *EXITS)

    def enter(self, way: str, mask: str, names: Iterable[str], always: Sequence[str] = ()) -> None:
        """Give inactive examples the values of an active one, of names read before all are together again, and of
        others."""
        kept = [*sorted(names if self.region is None else self.region.intersection(names)), *always]
        if kept:
            total = ", True" if self.total else ""
            self.line(f"{variables(kept)} = enter({way}, {mask}, {variables(kept)}{total})")

    def meet(self, k: int, live: list[str]) -> str:
        target = variables(live) if live else "_"
        self.line(f"m{k}, {target} = meet({tuple(live)!r}, e{k})")
        return f"m{k}"

    def loop(self, node: Loop, mask: str) -> str:
        """A function of one round, its loop, `else`, and the meeting of the examples after it."""
        k = self.numbered(node)
        carry, fixed = self.kept(node)
        inner = tuple([self.numbered(n) for n in loops_in(node)])
        outer = self.around
        if not outer:
            self.walk_ahead(node, fixed)
        if isinstance(node, While):
            for n in node.pre:
                mask = self.node(n, mask)
            self.test(node, k, mask)
        elif isinstance(node, For):
            values = ", ".join([self.value(v, mask) for v in node.walk.values()])
            where = f"{'inside' if outer else 'None'}, {mask}"
            given = f"{where}, {node.walk.form}, [{values}], n, {self.changing(node)!r}, {bool(inner)!r}"
            self.line(f"w{k}, h{k}, c{k} = begun({given}{self.rolls(node)})")
            if node.ahead:
                code, reads, inside = self.piece(node.assign.fn), node.assign.reads, ", inside" if outer else ""
                self.line(f"w{k}, d{k} = made(w{k}, {code}, {reads!r}, {variables(reads)}{inside})")
        if outer:
            self.resume(node, k, mask, (k, *inner))
        names, region, total, read = dict(self.names), self.region, self.total, read_in([node])
        self.around, self.total = [*outer, node], is_total(node)
        if not outer:
            self.region = read
        self.round(node, k, carry, fixed)
        self.names, self.around, self.region, self.total = names, outer, region, total
        even = f", {found!r}" if (found := even_lists(node)) else ""
        given = f"{k}, round{k}, {tuple(carry)!r}, {tuple(fixed)!r}, {inner!r}{even}, line={node.line}"
        self.line(f"loop{k} = Rounds({given})")
        state = f"{variables(carry)}, {variables(fixed, read)}"
        self.run_loop(node, k, mask, state, variables(carry) if carry else "_")
        self.line(f"if r{k} is not False:")
        self.line(f"return_.append((r{k}, (x{k},)))", 1)
        if outer:
            self.line(f"i{k} = waiting_in(inside, {(k, *inner)!r})")
            self.line(f"if i{k} is not False:")
            self.line(f"inside_.append((i{k}, {variables(self.kept(outer[-1])[0])}))", 1)
        return self.after(node, k, mask, carry)

    def run_loop(self, node: Loop, k: int, mask: str, state: str, target: str) -> None:
        """All rounds of a loop, or one of an inner loop, in which examples wait."""
        out = f"l{k}, k{k}, r{k}, x{k}, {target}"
        if not isinstance(node, For):
            inside = "inside" if self.around else "None"
            self.line(f"{out} = repeat(loop{k}, a{k}, b{k}, {state}, n, options, {inside})")
            return
        whole = f"{out} = along(loop{k}, w{k}, {mask}, {state}, n, options, {is_simple(node)!r}, sure)"
        if self.around:
            self.line(f"if v_{ROUNDS}{k} is not None:")
            self.line(f"v_{ROUNDS}{k}, ({out}) = along_inner(loop{k}, w{k}, v_{ROUNDS}{k}, a{k}, {state}, inside)", 1)
            self.line("else:")
        self.line(whole, bool(self.around))

    def walk_ahead(self, node: Loop, fixed: list[str]) -> None:
        """The steps of inner loops along values that no round changes."""
        for inner in loops_in(node):
            if isinstance(inner, For):
                names = [value.name for value in inner.walk.values()]
                given = ", ".join([f"v_{name}" for name in names])
                known = names and all(name in fixed for name in names)
                found = f"ahead({inner.walk.form}, [{given}])" if known else "None"
                self.line(f"ahead{self.numbered(inner)} = {found}")

    def resume(self, node: Loop, k: int, mask: str, loops: tuple[int, ...]) -> None:
        """Add the examples that wait in an inner loop to those that come to it."""
        scope = {*self.kept(self.around[-1])[0], *self.kept(self.around[-1])[1]}
        entering = f"a{k}" if isinstance(node, While) else mask
        if isinstance(node, For):
            self.line(f"v_{VALUES}{k}, v_{ROUNDS}{k} = h{k} if ahead{k} is None else None, c{k}")
        names = sorted(needed(node) & scope) + self.hidden([node, *loops_in(node)])
        given = f"inside, {loops!r}, {mask}, {entering}, {tuple(names)!r}, {variables(names)}"
        self.line(f"a{k}, {variables(names)} = resume({given})")
        if isinstance(node, For):
            kept = {i: f"v_{VALUES}{k}[{j}]" for j, i in enumerate(self.changing(node))}
            found = ", ".join([kept.get(i, repr(value.name)) for i, value in enumerate(node.walk.values())])
            given = f"inside, {node.walk.form}, [{found}], a{k}, {loops[1:]!r}{self.rolls(node)}"
            self.line(f"if v_{ROUNDS}{k} is not None:")
            self.line(f"w{k} = ahead{k} or begun_again({given})", 1)

    def rolls(self, node: For) -> str:
        """The options, of a loop that examples leave early and whose items are not read."""
        return ", options" if not node.assign.wanted and leaves_early(node.body, "break", "return") else ""

    def changing(self, node: For) -> tuple[int, ...]:
        """The positions of values of an inner walk that rounds of the outermost loop may change."""
        fixed = self.kept(self.around[0])[1] if self.around else []
        return tuple([i for i, value in enumerate(node.walk.values()) if value.name not in fixed])

    def hidden(self, loops: list[Loop]) -> list[str]:
        """Names that walks keep for examples that wait in their loops."""
        numbers = [self.numbered(n) for n in loops if isinstance(n, For)]
        return [f"{name}{k}" for k in numbers for name in (VALUES, ROUNDS)]

    def kept(self, node: Loop) -> tuple[list[str], list[str]]:
        """The names whose values rounds change and that are read, and those that rounds only read."""
        carry = sorted(written([node]) & needed(node))
        fixed = sorted((node.live_head | tested(node)) - {*carry} - {ITEM})
        return [*carry, *self.hidden(loops_in(node))], fixed

    def after(self, node: Loop, k: int, mask: str, carry: list[str]) -> str:
        """The examples after a loop: the test failed and `else` ran, or they left by `break`."""
        live = sorted(node.live)
        gone = bool(self.around) or leaves_early(node.body, "return")  # the values of these may be of no use
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

    def round(self, node: Loop, k: int, carry: list[str], fixed: list[str]) -> None:
        """`round(m, carry, fixed, item, sure, inside)`, the body: which examples go on, which leave, and how."""
        self.line(f"def round{k}(m, carry, fixed, item, sure, inside, n_outer=n):")
        self.depth += 1
        self.line("n = count(m, n_outer)")
        self.line("break_, continue_, return_, inside_ = [], [], [], []")
        for names, source in ((carry, "carry"), (fixed, "fixed")):
            if names:
                self.line(f"{variables(names)} = {source}")
        if isinstance(node, For):
            self.line(f"v_{ITEM} = item")
        self.enter("m", "None", [*carry, *fixed], [ITEM] if isinstance(node, For) else [])
        if self.reads_again(node, fixed):
            self.line(f"again = {variables(fixed)}")
        for name in sorted(written([node]) - {*carry, *fixed}):
            self.line(f"v_{name} = UNDEFINED")
        if isinstance(node, For):
            if node.ahead:
                self.line(f"if d{k}:")
                self.line(f"{variables(node.assign.wanted)} = v_{ITEM}", 1)
                self.line("else:")
            self.depth += bool(node.ahead)
            self.block(node.assign, "m")
            self.depth -= bool(node.ahead)
        head = node.live_head | node.live | node.live_else | tested(node)
        self.names = {"break": (carry, node.live), "continue": (carry, head), "return": ([], frozenset())}
        self.sequence(node.body, "m", "continue_", carry, head)
        if isinstance(node, While):
            self.test_again(node, carry, fixed, head)
        ends = "[*continue_, *break_, *inside_]"
        going = "g, left" if isinstance(node, While) else "union([m for m, _ in continue_]), False"
        self.line(f"return finish({tuple(carry)!r}, carry, {ends}, {going}, union([m for m, _ in break_]), return_)")
        self.depth -= 1

    def reads_again(self, node: Loop, fixed: list[str]) -> bool:
        """True if examples reach the test at the end of a round by `continue`: names that no round changes may have
        values of other examples there."""
        return isinstance(node, While) and bool(fixed) and leaves_early(node.body, "continue")

    def test_again(self, node: While, carry: list[str], fixed: list[str], head: Names) -> None:
        """The test at the end of a round, of the examples that go on."""
        self.line("g, left = False, False")
        self.line("if continue_:")
        self.depth += 1
        self.line(f"g, {variables(carry) if carry else '_'} = meet({tuple(carry)!r}, continue_)")
        self.line(f"continue_ = [(g, {variables(carry, head)})]")
        if self.reads_again(node, fixed):
            self.line(f"{variables(fixed)} = again")
        if node.pre or loops_in(node) or leaves_early(node.body, "break", "return"):
            self.enter("g", "None", [name for name in (*carry, *fixed) if name in head])
        mask = "g"
        for n in node.pre:
            mask = self.node(n, mask)
        if node.pre:
            self.line(f"continue_ = [(g, {variables(carry, head)})]")
        self.line(f"g, left = split(g, decide({self.value(node.test, mask)}, n, {node.test.line}))")
        self.depth -= 1


def is_total(loop: Loop) -> bool:
    """True if code of a loop cannot fail, and reads nothing that only some examples have."""
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
