"""From the syntax tree of a function to its control tree."""

from __future__ import annotations

import ast
import sys
from typing import Any

from tdc.autobatch.hoist import Hoist
from tdc.autobatch.lift import Lift, in_block, shown
from tdc.autobatch.refused import check, refusal
from tdc.autobatch.source import Source, located
from tdc.autobatch.syntax import InBlock, Site, load, runs, store, subscript_target
from tdc.autobatch.tree import (
    INDENT,
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
    Walk,
    While,
)  # fmt: skip
from tdc.core.errors import UnsupportedError

WALKS = ("enumerate", "zip", "reversed", "range")
BRANCHES = (ast.If, ast.While, ast.For, ast.Return, ast.Break, ast.Continue, ast.Match)
SEVERAL, OUTSIDE = "a block with several ways through it", "put the control flow outside"
REFUSED: dict[type, str] = {
    ast.With: f"{SEVERAL} in `with`: {OUTSIDE}",
    ast.Try: "`try`: errors are for all examples at once",
    ast.TryStar: "`try`: errors are for all examples at once",
    ast.Delete: "`del`: it is not needed",
    ast.Global: "`global`: return the value instead",
    ast.Nonlocal: "`nonlocal`: return the value instead",
    ast.FunctionDef: "a function inside: define it outside, with `@tdc.batch` if it has control flow",
    ast.AsyncFunctionDef: "a function inside: define it outside",
    ast.ClassDef: "a class inside: define it outside",
    ast.Import: "`import`: at the top of the file",
    ast.ImportFrom: "`import`: at the top of the file",
    ast.Raise: "`raise`: `assert test, text` holds for each example",
}
if sys.version_info >= (3, 12):
    REFUSED[ast.TypeAlias] = "`type`: at the top of the file"


class Builder:
    """Builds the control tree of one function.

    Args:
        source: of the function.
        names: its local names.
        site: True of a call of a function of `batch`.
        product: True of a call of a linear layer.
        differing: names whose values may differ between examples; comprehensions along these are loops.

    Raises:
        UnsupportedError: code that changes objects, prints or waits; methods refuse other code without a meaning here.
    """

    def __init__(
        self, source: Source, names: frozenset[str], site: Site, product: Site, differing: frozenset[str] = frozenset()
    ) -> None:
        self.source, self.names, self.site, self.product, self.differing = source, names, site, product, differing
        self.temporaries = 0
        check(source, names)

    def refuse(self, node: Any, text: str, hint: str = "") -> UnsupportedError:
        return refusal(self.source, node, text, hint)

    def temporary(self) -> str:
        self.temporaries += 1
        return f"{TEMPORARY}{self.temporaries}"

    # -- statements

    def nodes(self, stmts: list[ast.stmt]) -> list[Node]:
        """The nodes of statements up to the first return, break or continue."""
        out: list[Node] = []
        for stmt in stmts:
            self.statement(stmt, out)
            if out and isinstance(out[-1], Exit):
                break
        return out

    def statement(self, stmt: ast.stmt, out: list[Node]) -> None:
        """Add one statement to nodes."""
        found, line = REFUSED.get(type(stmt)), stmt.lineno
        if isinstance(stmt, ast.With) and not any(isinstance(n, BRANCHES) for s in stmt.body for n in ast.walk(s)):
            self.with_block(stmt, out)
        elif found is not None:
            text, _, hint = found.partition(": ")
            raise self.refuse(stmt, text, hint)
        elif isinstance(stmt, ast.If):
            test = self.value(stmt.test, out)
            out.append(If(line, test, self.nodes(stmt.body), self.nodes(stmt.orelse)))
        elif isinstance(stmt, ast.While):
            pre: list[Node] = []
            test = self.value(stmt.test, pre)
            out.append(While(line, self.nodes(stmt.body), self.nodes(stmt.orelse), pre, test))
        elif isinstance(stmt, ast.For):
            self.names_only("for", stmt.target)
            walk = self.walk(stmt.iter, out)
            assign = in_block(located(ast.Assign([stmt.target], load(ITEM)), stmt.target))
            hoist = Hoist(stmt, self.site, self.product, self.temporary)
            body = self.nodes(hoist.body(stmt.body))
            for ahead in hoist.ahead:
                self.add(in_block(ahead), [assign])
            out.append(For(line, body, self.nodes(stmt.orelse), walk, assign))
        elif isinstance(stmt, (ast.Break, ast.Continue)):
            out.append(Exit(line, type(stmt).__name__.lower()))
        elif isinstance(stmt, ast.Return):
            value = self.value(stmt.value or located(ast.Constant(None), stmt), out)
            out.append(Exit(line, "return", value))
        elif isinstance(stmt, ast.Assert):
            text = ast.unparse(stmt.msg) if stmt.msg else ast.unparse(stmt.test)
            out.append(Assert(line, self.value(stmt.test, out), text))
        elif isinstance(stmt, ast.Match):
            self.match(stmt, out)
        elif isinstance(stmt, ast.Expr):
            self.expression(stmt, out)
        else:
            self.assignment(stmt, out)

    def names_only(self, word: str, target: ast.expr) -> None:
        """Refuse elements as targets of a `for` or `with`."""
        for leaf in leaves(target):
            if not isinstance(leaf, ast.Name):
                text = f"an element that a `{word}` sets, {ast.unparse(leaf)!r},"
                raise self.refuse(leaf, text, "set a name, and give the element its value behind")

    def with_block(self, stmt: ast.With, out: list[Node]) -> None:
        """The statements of a `with`: each block enters it for itself, and so do the values that other nodes need.

        with torch.no_grad():           with torch.no_grad():
            y = x * 2                       y = x * 2
            out.append(y + 1)               __v1 = y + 1
            y = y * 3                   append __v1 to out
                                        with torch.no_grad():
                                            y = y * 3
        """
        for item in stmt.items:
            if item.optional_vars is not None:
                self.names_only("with", item.optional_vars)
            item.context_expr = self.lifted(item.context_expr, out)
        head = shown(located(ast.With(stmt.items, []), stmt))
        stmt.items = [InBlock().visit(item) for item in stmt.items]
        for node in self.entered(stmt, head, self.nodes(stmt.body)):
            self.add(node, out)

    def entered(self, stmt: ast.With, head: str, body: list[Node]) -> list[Node]:
        """Nodes that enter a `with`, whose first line is `head`.

        Raises:
            UnsupportedError: a loop, or a call of another function of `batch`.
        """
        out: list[Node] = []
        inside: list[Block] = []

        def close() -> None:
            if inside:
                text = [head, *[INDENT + line for block in inside for line in block.text]]
                whole = located(ast.With(stmt.items, [s for block in inside for s in block.body]), stmt)
                out.append(Block(stmt.lineno, [whole], text))
                inside.clear()

        def named(value: Value) -> Value:
            name = self.temporary()
            assign = located(ast.Assign([store(name)], value.expr), value.expr)
            inside.append(Block(value.line, [assign], [f"{name} = {value.text}"]))
            close()
            return Value(located(load(name), value.expr), value.line, name)

        for node in body:
            if isinstance(node, Block):
                inside.append(node)
            elif isinstance(node, Append):
                out.append(Append(node.line, node.name, named(node.value)))
            elif isinstance(node, Assert):
                out.append(Assert(node.line, named(node.test), node.text))
            elif isinstance(node, If):
                test = named(node.test)
                arms = [self.entered(stmt, head, arm) for arm in (node.then, node.orelse)]
                out.append(If(node.line, test, arms[0], arms[1]))
            else:
                text = "a call of a function of tdc.batch" if isinstance(node, Call) else SEVERAL
                raise self.refuse(stmt, f"{text} in `with`", OUTSIDE)
        close()
        return out

    def expression(self, stmt: ast.Expr, out: list[Node]) -> None:
        """A statement that is an expression: a docstring, or `name.append(value)`."""
        call = stmt.value
        if isinstance(call, ast.Constant):
            return
        func = call.func if isinstance(call, ast.Call) and len(call.args) == 1 else None
        if isinstance(call, ast.Call) and isinstance(func, ast.Attribute) and func.attr == "append":
            owner = func.value.id if isinstance(func.value, ast.Name) else ""
            if owner in self.names or owner.startswith(TEMPORARY):
                out.append(Append(stmt.lineno, owner, self.value(call.args[0], out)))
                return
        text = f"an expression whose value is not used, {ast.unparse(call)[:40]!r},"
        raise self.refuse(stmt, text, "assign the result to a name, or leave it out")

    def assignment(self, stmt: ast.stmt, out: list[Node]) -> None:
        """Assignments out of place: `x += e` and `x[i] = e` assign the name a new value."""
        if isinstance(stmt, ast.AugAssign):
            target: Any = stmt.target
            if isinstance(target, ast.Name):
                self.plain(stmt, out)
                return
            if isinstance(target, ast.Subscript):
                self.once(target, out)
            read: Any = ast.parse(ast.unparse(target), mode="eval").body
            value = located(ast.BinOp(read, stmt.op, stmt.value), stmt)
            located(read, stmt)
            self.assign(located(ast.Assign([target], value), stmt), out)
        elif isinstance(stmt, ast.AnnAssign) and stmt.value is not None:
            self.assign(located(ast.Assign([stmt.target], stmt.value), stmt), out)
        elif isinstance(stmt, ast.Assign):
            self.assign(stmt, out)
        elif not isinstance(stmt, (ast.Pass, ast.AnnAssign)):
            raise self.refuse(stmt, f"`{type(stmt).__name__.lower()}`", "write it for all examples, outside")

    def assign(self, stmt: ast.Assign, out: list[Node]) -> None:
        """`targets = value`, where elements or slices are among the targets by way of a temporary name."""
        target = stmt.targets[0]
        if all(isinstance(t, ast.Name) for target in stmt.targets for t in leaves(target)):
            self.plain(stmt, out)
        elif len(stmt.targets) == 1 and isinstance(target, ast.Subscript):
            if any(isinstance(n, ast.NamedExpr) for n in ast.walk(target)):  # the value comes first
                stmt.value = self.kept(stmt.value, out)
            if isinstance(target.value, ast.Subscript):
                self.once(target, out)
            name, value = subscript_target(target, stmt.value)
            if name not in self.names:
                raise self.refuse(stmt, f"an element of {name!r}, which is not local,", "give it a local name first")
            self.plain(located(ast.Assign([store(name)], value), stmt), out)
        else:
            whole = self.kept(stmt.value, out, stmt)
            for part in stmt.targets:
                self.unpack(part, whole, stmt, out)

    def kept(self, expr: ast.expr, out: list[Node], at: ast.AST | None = None) -> ast.Name:
        """A name for the value of an expression."""
        name = self.temporary()
        self.plain(located(ast.Assign([store(name)], expr), at or expr), out)
        return located(load(name), at or expr)

    def once(self, target: ast.Subscript, out: list[Node]) -> None:
        """Name the calls in the indices of a target, which is both read and set: they run once."""
        if isinstance(target.value, ast.Subscript):
            self.once(target.value, out)
        target.slice = self.index_once(target.slice, out)

    def index_once(self, index: Any, out: list[Node]) -> Any:
        """One index, or a part of one."""
        if isinstance(index, (ast.Tuple, ast.Slice, ast.Starred)):
            for name, part in ast.iter_fields(index):
                if isinstance(part, ast.expr):
                    setattr(index, name, self.index_once(part, out))
                elif isinstance(part, list):
                    setattr(index, name, [self.index_once(p, out) for p in part])
            return index
        return self.kept(index, out) if runs(index) else index

    def unpack(self, target: ast.expr, value: ast.expr, stmt: ast.stmt, out: list[Node]) -> None:
        """One target of several."""
        if not isinstance(target, (ast.Tuple, ast.List)):
            self.assign(located(ast.Assign([target], value), stmt), out)
            return
        names = [self.temporary() for _ in target.elts]
        parts = [t.value if isinstance(t, ast.Starred) else t for t in target.elts]
        stars = [part is not t for part, t in zip(parts, target.elts, strict=True)]
        new: Any = [ast.Starred(store(n), ast.Store()) if s else store(n) for n, s in zip(names, stars, strict=True)]
        self.plain(located(ast.Assign([ast.Tuple(new, ast.Store())], value), stmt), out)
        for part, name in zip(parts, names, strict=True):
            self.unpack(part, load(name), stmt, out)

    def plain(self, stmt: ast.stmt, out: list[Node]) -> None:
        """A statement for the block at the end of `out`, or for a new one."""
        self.add(in_block(self.lifted(stmt, out)), out)

    def lifted(self, code: Any, out: list[Node]) -> Any:
        """Code without the parts that need nodes of their own, which are added to `out`."""
        pre: list[Node] = []
        found = Lift(self, pre).visit(code)
        for node in pre:
            self.add(node, out)
        return found

    def add(self, node: Node, out: list[Node]) -> None:
        if isinstance(node, Block) and out and isinstance(out[-1], Block):
            out[-1].body += node.body
            out[-1].text += node.text
        else:
            out.append(node)

    def match(self, stmt: ast.Match, out: list[Node]) -> None:
        """`match` on a Python value, as a chain of ifs; patterns are constants, dotted names, `_` and `|`."""
        subject = self.temporary()
        self.assign(located(ast.Assign([store(subject)], stmt.subject), stmt), out)
        chain: list[ast.stmt] = []
        for case in reversed(stmt.cases):
            test = self.pattern(case.pattern, subject)
            if case.guard is not None:
                test = case.guard if test is None else ast.BoolOp(ast.And(), [test, case.guard])
            chain = case.body if test is None else [located(ast.If(test, case.body, chain), case.body[0])]
        out += self.nodes(chain)

    def pattern(self, pattern: ast.pattern, subject: str) -> ast.expr | None:
        """The test of a pattern; None for `_`."""
        if isinstance(pattern, ast.MatchValue):
            return ast.Compare(load(subject), [ast.Eq()], [pattern.value])
        if isinstance(pattern, ast.MatchSingleton):
            return ast.Compare(load(subject), [ast.Is()], [ast.Constant(pattern.value)])
        if isinstance(pattern, ast.MatchOr):
            tests = [self.pattern(p, subject) for p in pattern.patterns]
            return None if None in tests else ast.BoolOp(ast.Or(), [t for t in tests if t is not None])
        if isinstance(pattern, ast.MatchAs) and pattern.pattern is None and pattern.name is None:
            return None
        raise self.refuse(pattern, "a pattern that takes a value apart", "match constants, and unpack in the case")

    # -- expressions

    def value(self, expr: ast.expr, out: list[Node]) -> Value:
        """An expression; what is lifted out goes to `out`."""
        line, found = expr.lineno, self.lifted(expr, out)
        text = shown(found)
        return Value(InBlock().visit(found), line, text)

    def walk(self, expr: ast.expr, out: list[Node]) -> Walk:
        """The iterable of a `for`."""
        func = expr.func if isinstance(expr, ast.Call) else None
        kind = func.id if isinstance(func, ast.Name) else ""
        if not isinstance(expr, ast.Call) or any(isinstance(a, ast.Starred) for a in expr.args):
            return Walk("value", [], self.value(expr, out))
        if kind in WALKS and kind not in self.names:
            if any(k.arg == "strict" and getattr(k.value, "value", True) for k in expr.keywords):
                raise self.refuse(expr, "zip(strict=True)", "leave out strict: the shortest ends the walk")
            given: list[ast.expr] = [*expr.args, *[k.value for k in expr.keywords if k.arg != "strict"]]
            walks = 0 if kind == "range" else 1 if kind == "enumerate" else len(given)  # the others are numbers
            parts = [self.walk(a, out) for a in given[:walks]]
            return Walk(kind, [*parts, *[Walk("value", [], self.value(a, out)) for a in given[walks:]]])
        first = not expr.keywords and all(isinstance(a, ast.Constant) and a.value == 0 for a in expr.args)
        if isinstance(func, ast.Attribute) and func.attr == "unbind" and first:
            return self.walk(func.value, out)
        return Walk("value", [], self.value(expr, out))


def leaves(target: ast.expr) -> list[ast.expr]:
    """The names, elements and attributes that a target sets."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return [leaf for t in target.elts for leaf in leaves(t)]
    return leaves(target.value) if isinstance(target, ast.Starred) else [target]
