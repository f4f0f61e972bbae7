"""Random functions of one example, as source text: `program(seed)` always writes the same one.

    def make(w, c, flag, other):
        def f(x, v, n, xs, ys):
            s0, s1, s2 = x * 1, x * 0.5 + 0.25, -x      each name of a kind has a value from the start
            ...
            while s0 < 1.5 and i1 < 4:                  every loop ends
                i1 += 1
                if k0 != 0 and 12 // k0 > 2:            what fails or gives NaN is behind a test
                    s1 = torch.log(s0) if s0 > 0.1 else s0
                    break
            return {"s": s0, "v": v1, "k": k0}

`s` are numbers (0-d tensors), `v` vectors of three, `k` whole numbers (of Python, or tensors), `q` floats of Python,
`b` conditions, `i` and `j` counters. `n` is a whole number from 0 to 4, `xs` has rows of three, `ys` numbers.

A name is cloned before it is changed in place, as for autograd the function of one example asks; no two names stand for
one tensor. Whole numbers are only multiplied by powers of two: a batch has them as tensors, whose product with 0.1 is
float32. Everything else is Python as people write it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

SIZE = 3  # of a vector, and of static rows
INDENT = "    "
KINDS = {"s": 3, "v": 2, "k": 3, "q": 1, "b": 1}
BEGIN = """\
s0, s1, s2 = x * 1, x * 0.5 + 0.25, -x
v0, v1 = v * 1, v * 0.5 + w
k0, k1, k2 = 0, {one}, n + 0
q0, b0 = 0.5, x > 0
i1 = i2 = i3 = j = 0
r, a = v * 0.5, x * 0.5"""


@dataclass(frozen=True)
class Program:
    """A random function and how it is run.

    Attributes:
        text: source of `make(w, c, flag, other)`, which returns the function; `helper` is the source of `other`.
        size: how many examples.
        rows: "static", "ragged" or "padded".
        style: how the examples are given: "map", "lanes", "shared" (`v` is the same for all) or "moved" (along dim 1).
        double: float64, else float32.
    """

    seed: int
    text: str
    helper: str
    size: int
    rows: str
    style: str
    double: bool


STATEMENTS = 24  # about, of a program


def program(seed: int, calls: bool = True, statements: int = STATEMENTS) -> Program:
    """The random program of a seed, of about so many statements; without calls of other functions, if those are not
    wanted."""
    rng = random.Random(seed)
    helper = Writer(rng, rows="none", helper=False).helper()
    rows = rng.choice(["static", "ragged", "ragged", "padded"])
    writer = Writer(rng, rows, helper=calls)
    writer.left = statements
    text = writer.function()
    size = rng.choice([1, 2, 7, 7])
    style = rng.choice(["map", "map", "lanes", "shared", "moved"])
    return Program(seed, text, helper, size, rows, style, rng.random() < 0.8)


class Writer:
    """Writes one function."""

    def __init__(self, rng: random.Random, rows: str, helper: bool) -> None:
        self.rng = rng
        self.rows = rows
        self.calls = helper
        self.lines: list[str] = []
        self.depth = 2
        self.loops: list[bool] = []  # whether each loop around may be left early
        self.fresh = 0
        self.left = STATEMENTS
        self.form = rng.choice(["s", "sv", "svk", "dict", "kq"])

    # -- the whole function

    def function(self) -> str:
        """The text of `make`."""
        self.line("def make(w, c, flag, other):", 0)
        self.line("def f(x, v, n, xs, ys):", 1)
        self.line("m = torch.diag(w) * 0.5 + 0.125")
        for text in BEGIN.format(one=self.rng.choice(["1", "1", "n + 1"])).splitlines():
            self.line(text)
        self.body(self.rng.randint(3, 6), 0)
        if self.rng.random() < 0.4:
            self.collect()
        self.body(self.rng.randint(1, 3), 0)
        self.line(f"return {self.result()}")
        self.line("return f", 1)
        return "\n".join(self.lines) + "\n"

    def helper(self) -> str:
        """The text of a function that others call: it takes a number and a whole number, and returns a number."""
        self.form, self.left = "s", 7
        self.line("def make(w, c, flag, other):", 0)
        self.line("def g(x, n):", 1)
        self.line("v = w * x")
        for text in BEGIN.format(one="1").splitlines():
            self.line(text)
        self.body(self.rng.randint(2, 3), 1)
        self.line(f"return {self.result()}")
        self.line("return g", 1)
        return "\n".join(self.lines) + "\n"

    def line(self, text: str, depth: int | None = None) -> None:
        self.lines.append(INDENT * (self.depth if depth is None else depth) + text)

    def body(self, count: int, level: int) -> None:
        """So many statements inside `level` others; the last may leave a loop or the function."""
        for _ in range(count):
            self.statement(level)

    def block(self, level: int, leave: float = 0.0) -> None:
        """The lines behind a colon; with some chance an exit stands at their end."""
        self.depth += 1
        exits = self.rng.random() < leave
        self.body(self.rng.randint(0 if exits else 1, 2), level + 1)
        if exits:
            kinds = ["return"] + ["break", "break", "continue"] * (2 if self.loops and self.loops[-1] else 0)
            kind = self.rng.choice(kinds)
            self.line(f"return {self.result()}" if kind == "return" else kind)
        self.depth -= 1

    def result(self) -> str:
        """What the function returns, of the same form on each way."""
        s, v = f"{self.number(1)} + {self.name('s')} * a + (r * {self.name('v')}).sum()", self.vector(1)
        if self.form == "s":
            return s
        if self.form == "sv":
            return f"({s}, {v})"
        k = self.whole(1)
        if self.form == "svk":
            return f"({s}, ({v}, {k}))"
        if self.form == "kq":
            return f"[{s}, {k}, {self.name('q')} + 0.25]"
        return f'{{"s": {s}, "v": {v}, "k": {k}}}'

    # -- statements

    def statement(self, level: int) -> None:
        """One statement; those with others inside grow rare with the level."""
        self.left -= 1
        compound: list[Callable[[int], None]] = [self.branch, self.branch, self.branch, self.both_ways, self.guarded]
        compound += [self.while_loop, self.for_loop, self.for_loop] if len(self.loops) < 3 else []
        if level < 4 and self.left > 0 and self.rng.random() < (0.65 if level < 2 else 0.4):
            self.rng.choice(compound)(level)
        else:
            self.assignment()

    def assignment(self) -> None:
        """A statement without others inside."""
        s, v, k = self.name("s"), self.name("v"), self.name("k")
        choices = [
            lambda: self.line(f"{s} = {self.number()}"), lambda: self.line(f"{v} = {self.vector()}"),
            lambda: self.line(f"{k} = {self.whole()}"), lambda: self.line(f"{k} = {k} + {self.rng.randint(1, 3)}"),
            lambda: self.lines_of(f"j {self.rng.choice(['+=', '-=', '*='])} 3", "j %= 5"),
            lambda: self.line(f"q0 += {self.rng.choice([0.5, -0.25])}"), lambda: self.line(f"b0 = {self.test()}"),
            lambda: self.line("s0, s1 = s1, s0"), lambda: self.line(f"{s}, {k} = {self.number(1)}, {self.whole(1)}"),
            lambda: self.line(f"(k0, k1), {s} = (k1, k0), {self.number(1)}"),
            lambda: self.lines_of(f"{s} = {s}.clone()", f"{s} {self.rng.choice(['+=', '-='])} {self.number(1)}"),
            lambda: self.put(v), lambda: self.put(v),
        ]  # fmt: skip
        if self.calls:
            call = f"other({self.number(1)}, {self.whole(1)})"
            choices.append(lambda: self.line(f"{s} = {call} * 0.5"))
        self.rng.choice(choices)()

    def lines_of(self, *lines: str) -> None:
        for text in lines:
            self.line(text)

    def put(self, v: str) -> None:
        """An element, or a slice, of a vector."""
        op = self.rng.choice(["=", "=", "+=", "*="])
        at = self.rng.choice([self.position(), self.position(), self.position(), "1:", "-1"])
        self.lines_of(f"{v} = {v}.clone()", f"{v}[{at}] {op} {self.number(1)}")

    def branch(self, level: int) -> None:
        self.line(f"if {self.test()}:")
        self.block(level, 0.35)
        while self.rng.random() < 0.25:
            self.line(f"elif {self.test()}:")
            self.block(level, 0.2)
        if self.rng.random() < 0.4:
            self.line("else:")
            self.block(level, 0.2)

    def both_ways(self, level: int) -> None:
        """A new name that each way gives a value, or leaves."""
        self.fresh += 1
        name = f"t{self.fresh}"
        self.line(f"if {self.test()}:")
        self.block(level)
        self.line(f"{INDENT}{name} = {self.number(1)}")
        self.line("else:")
        if self.rng.random() < 0.3:
            self.line(f"{INDENT}return {self.result()}")
        else:
            self.block(level)
            self.line(f"{INDENT}{name} = {self.number(1)}")
        self.line(f"{self.name('s')} = {name} * 0.5")

    def guarded(self, level: int) -> None:
        """A test and what would fail, or give NaN, where it does not hold."""
        s, k = self.name("s"), self.name("k")
        to = self.name("s")
        line = self.rng.choice([
            (f"{s} > 0.25", f"{to} = torch.log({s})"), (f"{s} > 0.25", f"{to} = torch.sqrt({s}) + 1 / {s}"),
            (f"{k} != 0", f"{self.name('k')} = 12 // {k}"), (f"{k} > 0", f"{self.name('k')} = 7 % {k}"),
            (f"0 <= {k} < {SIZE}", f"{to} = {self.name('v')}[{k}] * 0.5"),
            (f"not {k} == 0", f"{to} = {to} * 0.5 + {k} % {k}"),
            (f"{s} * {s} > 0.1", f"{to} = ({s} * {s} - 0.1) ** 0.5"),
        ])  # fmt: skip
        self.line(f"if {line[0]}:")
        self.line(INDENT + line[1])
        if self.rng.random() < 0.5:
            self.block(level, 0.2)

    # -- loops

    def loop(self, level: int, head: str, *first: str) -> None:
        """A loop with its body, and sometimes an else."""
        self.line(f"{head}:")
        for text in first:
            self.line(INDENT + text)
        self.loops.append(True)
        self.block(level, 0.1)
        self.loops.pop()
        if self.rng.random() < 0.25:
            self.line("else:")
            self.block(level, 0.15)

    def while_loop(self, level: int) -> None:
        i = f"i{len(self.loops) + 1}"
        most = self.rng.randint(2, 4)
        self.line(f"{i} = 0")
        kind = self.rng.randrange(5)
        if kind == 0:
            self.loop(
                level, f"while {i} < {self.rng.choice(['n', 'k2 % 4'])}", f"{i} += 1", f"k2 = {self.whole(1)} % 5"
            )
        elif kind == 1:
            self.loop(level, "while True", f"{i} += 1", f"if {i} > {most} or ({self.test()}):", f"{INDENT}break")
        elif kind == 2:
            self.loop(level, f"while {i} < {most} and {self.test(1)}", f"{i} = {i} + 1")
        elif kind == 3:
            self.loop(level, f"while not ({self.test(1)} or {i} >= {most})", f"{i} += 1")
        else:
            self.loop(level, f"while {self.name('s')} < 1.5 and {i} < {most}", f"{i} += 1")

    def for_loop(self, level: int) -> None:
        i = f"i{len(self.loops) + 1}"
        k = self.name("k")
        heads = [
            f"{i} in range({self.rng.randint(0, 3)})", f"{i} in range(1, 6, 2)", f"{i} in range(4, 0, -2)",
            f"{i} in range(n)", f"{i} in range({k} % 4)", f"{i} in range({k} % 3, 4)", f"{i} in range(n, 0, -1)",
            f"{i} in range(n, n + 3, 2)", f"{i} in reversed(range(3))", f"{i} in reversed(range(n))",
            f"a in (0.5, {self.name('s')} * 0.5, {self.name('q')})", f"{i}, a in ((1, 0.5), (2, s0 * 0.5))",
            f"{i}, a in enumerate([0.5, -0.5], 1)", f"a in {self.name('v')} * 0.5", f"{i}, a in zip(range(n), v0)",
        ]  # fmt: skip
        if self.rows != "none":
            heads += [
                "r in xs", "r in xs", "a in ys", f"{i}, r in enumerate(xs)", f"{i}, a in enumerate(ys, 1)",
                "r, a in zip(xs, ys)", f"r, {i} in zip(xs, range(n))", "r in reversed(xs)", "a in reversed(ys)",
                f"{i}, (r, a) in enumerate(zip(xs, ys))", f"{i}, r in zip(range(2), xs)", "r in xs.unbind(0)",
                f"r, {i} in zip(reversed(xs), range(1, 4))",
            ]  # fmt: skip
        head = self.rng.choice(heads)
        v, products = self.name("v"), []
        if head[0] == "r" and self.rng.random() < 0.5:
            products = self.rng.choice([
                [f"{v} = torch.tanh(r @ m + {v} @ m)"], [f"{v} = torch.tanh(F.linear(r * 2, m) + w * {v})"],
                ["e1 = r * 0.5", "e2 = torch.relu(e1 @ m)", f"{v} = torch.tanh(e2 @ m - e1) + {v} * 0.5"],
            ])  # fmt: skip
        self.loop(level, f"for {head}", *products)

    def collect(self) -> None:
        """A list that grows in a loop which no example leaves but by return, stacked behind it."""
        self.line("out = []")
        heads = ["i1 in range(3)", "r in (v0 * 1, v1 * 0.5, w * 2)", "i1 in reversed(range(2, 5))"]
        heads += ["r in xs", "i1, r in enumerate(reversed(xs))"] if self.rows == "static" else []
        self.line(f"for {self.rng.choice(heads)}:")
        self.loops.append(False)
        self.block(0)
        part = self.rng.choice(["s", "v"])
        self.depth += 1
        self.line(f"out.append({self.number(1) if part == 's' else self.vector(1)})")
        if self.rng.random() < 0.4:
            self.line(f"if {self.test()}:")
            self.block(1, 0.3)
        self.depth -= 1
        self.loops.pop()
        if part == "s":
            self.line(f"v0 = torch.stack(out) * 0.5 + {self.name('s')}")
        else:
            self.line(f"v1 = torch.stack(out)[{self.position()}] + torch.stack(out).mean(0)")
        self.lines_of("for z in out:", f"{INDENT}s1 = s1 * 0.5 + z.sum() * 0.1")

    # -- expressions

    def name(self, kind: str) -> str:
        return f"{kind}{self.rng.randrange(KINDS[kind])}"

    def counter(self) -> str:
        return self.rng.choice(["i1", "i2", "i3", "n", "j"])

    def position(self) -> str:
        """An index of a vector."""
        return self.rng.choice([f"{self.name('k')} % {SIZE}", f"n % {SIZE}", f"{self.counter()} % {SIZE}", "1"])

    def number(self, deep: int = 0) -> str:
        """A 0-d tensor of floats, of modest size."""
        s, v, k = self.name("s"), self.name("v"), self.name("k")
        leaves = [f"{s} * 0.5", f"{s} + 0.25", f"{v}.sum() * 0.3", f"{v}[{self.position()}] * 0.7", "c * 1", f"-{s}"]
        if self.rows == "static":
            leaves += [f"xs[{self.position()}, {self.position()}] * 0.5", f"ys[{self.position()}] * 0.5"]
        if deep:
            return self.rng.choice(leaves)
        leaf = self.rng.choice(leaves)
        more = [
            f"torch.sin({leaf}) + {k} * 0.125", f"torch.tanh({leaf}) * {self.name('s')}", f"{s} * 0.5 + a * 0.25",
            f"{leaf} + {self.counter()} * 0.25", f"torch.tanh({s}) + q0", f"(r * {v}).sum() * 0.2", f"(w * {v}).sum()",
            f"{leaf} if {self.test(1)} else {self.number(1)}", f"torch.log({s}) if {s} > 0.3 else {leaf}",
            f"torch.sin({s}) / {k} if {k} != 0 else {leaf}", f"{s}.clamp(min=0) + c",
            f"({leaf}) / (1 + {s} * {s})", f"torch.where({s} > 0, {s}, {leaf})",
        ]  # fmt: skip
        if self.calls:
            more += [f"torch.tanh(other({leaf}, {k}))", f"other({leaf}, 2) * 0.5 if {self.test(1)} else {s} * 0.5"]
        return self.rng.choice(more)

    def vector(self, deep: int = 0) -> str:
        """A vector of modest size."""
        s, v = self.name("s"), self.name("v")
        leaves = [f"{v} * 0.5", f"{v} + w", f"torch.sin({v})", f"r * {s}.tanh()", f"{v}.flip(0) * 1"]
        if self.rows == "static":
            leaves += [f"xs[{self.position()}] * 0.5", f"xs[:, {self.position()}] + 0.1"]
        more = [
            f"torch.tanh({v} + {s})", f"{v} * w + {s} * 0.25", f"{v} * 0.5 if {self.test(1)} else {v} * w",
            f"torch.stack([{s}, {s} - a * 0.5, {self.number(1)}])", f"torch.softmax({v}, 0) + {self.counter()} * 0.125",
            f"torch.tanh({v} - {v}.mean()) * q0 * 0.5",
        ]  # fmt: skip
        return self.rng.choice(leaves if deep else leaves + more)

    def whole(self, deep: int = 0) -> str:
        """A whole number from -20 to 20 or so."""
        k, other = self.name("k"), self.name("k")
        leaves = [f"{k} + 0", f"{k} % 5", f"{self.counter()} + 1", f"-{k}", f"n + {self.rng.randint(-2, 2)}"]
        more = [
            f"({k} + {other}) % 7", f"({k} - {other}) % 5 - 2", f"{k} * 2 % 9", f"{k} // 2", f"({k} or 3) + 1",
            f"12 // {k} if {k} != 0 else {other} + 1", f"{k} + 1 if {self.test(1)} else 0 - {k}", f"({k} and 4) + 0",
        ]  # fmt: skip
        return f"({self.rng.choice(leaves if deep else leaves + more)}) % 19"

    def test(self, deep: int = 0) -> str:
        """A condition, of Python or a tensor."""
        s, v, k = self.name("s"), self.name("v"), self.name("k")
        level = self.rng.choice([-0.5, 0.0, 0.3, 0.8])
        leaves = [
            f"{s} > {level}", f"{s} < {self.name('s')} + {level}", f"{k} > {self.rng.randint(0, 3)}", f"{k} % 2 == 0",
            "b0", f"(k2 := {k} % 6) > 2", f"-1 < {s} <= {level + 0.5}", f"0 < {k} < 4", f"n > {self.rng.randint(0, 3)}",
            f"({v} > 0.5).any()",
            f"{v}[{self.position()}] > {level}", f"{self.counter()} >= {k}", f"q0 > {level}", "not b0",
        ]  # fmt: skip
        if deep or self.rng.random() < 0.5:
            return self.rng.choice(leaves)
        more = [
            f"{k} != 0 and 12 // {k} > 2", f"0 < {k} < 12 // {k}",
            f"{s} > 0.2 and torch.log({s}) < -0.1", f"{k} == 0 or 7 % {k} == 1",
            f"({self.test(1)}) and ({self.test(1)})", f"({self.test(1)}) or ({self.test(1)})",
            f"not ({self.test(1)})", f"0 <= {k} < {SIZE} and {v}[{k}] > 0", "flag", f"flag and {self.test(1)}",
            f"({self.test(1)}) and ({self.test(1)} or {self.test(1)})", f"{k} < 2 if {self.test(1)} else {s} > 0",
        ]  # fmt: skip
        return self.rng.choice(more)
