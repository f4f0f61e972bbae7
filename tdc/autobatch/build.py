"""From the syntax tree of a function to its control tree.

What cannot stay in a block is lifted out in front of the statement: calls of other functions of `batch`, and the arms
of `and`, `or` and `if else` that must not run for every example, such as `n > 0 and x[n] > 1`.
"""

from __future__ import annotations

import ast
import sys
from typing import Any

from tdc.autobatch.comprehensions import as_loop, is_loop, with_lists
from tdc.autobatch.hoist import Hoist
from tdc.autobatch.refused import check, refusal
from tdc.autobatch.source import HELPERS, Source, located
from tdc.autobatch.syntax import InBlock, Site, call_helper, load, risky, runs, store, subscript_target
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
    Walk,
    While,
)
from tdc.autobatch.within import OUTSIDE, SEVERAL, Entered
from tdc.core.errors import UnsupportedError

WALKS = ("enumerate", "zip", "reversed", "range")
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
        site: whether a call is one of a function of `batch`.
        product: whether a call is one of a linear layer.
        differing: names whose values may differ between examples; comprehensions along these are loops.

    Raises:
        UnsupportedError: code that changes objects, prints or waits; methods refuse what else has no meaning here.
    """

    def __init__(
        self, source: Source, names: frozenset[str], site: Site, product: Site, differing: frozenset[str] = frozenset()
    ) -> None:
        self.source = source
        self.differing = differing
        self.names = names
        self.site = site
        self.product = product
        self.temporaries = 0
        check(source, names)

    def refuse(self, node: Any, text: str, hint: str = "") -> UnsupportedError:
        return refusal(self.source, node, text, hint)

    def temporary(self) -> str:
        self.temporaries += 1
        return f"{TEMPORARY}{self.temporaries}"

    def is_local(self, name: str) -> bool:
        return name in self.names or name.startswith(TEMPORARY)

    # -- statements

    def nodes(self, stmts: list[ast.stmt]) -> list[Node]:
        """The nodes of statements; what follows a return, break or continue is never reached."""
        out: list[Node] = []
        for stmt in stmts:
            self.statement(stmt, out)
            if out and isinstance(out[-1], Exit):
                break
        return out

    def statement(self, stmt: ast.stmt, out: list[Node]) -> None:
        """Add one statement to nodes."""
        found = REFUSED.get(type(stmt))
        if isinstance(stmt, ast.With) and not any(isinstance(n, BRANCHES) for s in stmt.body for n in ast.walk(s)):
            self.within(stmt, out)
        elif found is not None:
            text, _, hint = found.partition(": ")
            raise self.refuse(stmt, text, hint)
        elif isinstance(stmt, ast.If):
            test = self.value(stmt.test, out)
            out.append(If(test, self.nodes(stmt.body), self.nodes(stmt.orelse), stmt.lineno))
        elif isinstance(stmt, ast.While):
            pre: list[Node] = []
            test = self.value(stmt.test, pre)
            body, orelse = self.nodes(stmt.body), self.nodes(stmt.orelse)
            out.append(While(pre, test, body, orelse, stmt.lineno))
        elif isinstance(stmt, ast.For):
            self.names_only("for", stmt.target)
            walk = self.walk(stmt.iter, out)
            given = located(ast.Assign([stmt.target], load(ITEM)), stmt.target)
            assign = in_block(given)
            hoist = Hoist(stmt, self.site, self.product, self.temporary)
            body = self.nodes(hoist.body(stmt.body))
            for ahead in hoist.ahead:
                self.add(in_block(ahead), [assign])
            out.append(For(walk, assign, body, self.nodes(stmt.orelse), stmt.lineno))
        elif isinstance(stmt, (ast.Break, ast.Continue)):
            out.append(Exit(type(stmt).__name__.lower(), stmt.lineno))
        elif isinstance(stmt, ast.Return):
            value = self.value(stmt.value or located(ast.Constant(None), stmt), out)
            out.append(Exit("return", stmt.lineno, value))
        elif isinstance(stmt, ast.Assert):
            text = ast.unparse(stmt.msg) if stmt.msg else ast.unparse(stmt.test)
            out.append(Assert(self.value(stmt.test, out), text, stmt.lineno))
        elif isinstance(stmt, ast.Match):
            self.match(stmt, out)
        elif isinstance(stmt, ast.Expr):
            self.expression(stmt, out)
        else:
            self.assignment(stmt, out)

    def names_only(self, word: str, target: ast.expr) -> None:
        """Refuse elements that a statement sets in passing."""
        for leaf in leaves(target):
            if not isinstance(leaf, ast.Name):
                text = f"an element that a `{word}` sets, {ast.unparse(leaf)!r},"
                raise self.refuse(leaf, text, "set a name, and give the element its value behind")

    def within(self, stmt: ast.With, out: list[Node]) -> None:
        """The statements of a `with`, which mean what they mean outside."""
        pre: list[Node] = []
        for item in stmt.items:
            if item.optional_vars is not None:
                self.names_only("with", item.optional_vars)
            item.context_expr = Lift(self, pre).visit(item.context_expr)
        for node in pre:
            self.add(node, out)
        head = shown(located(ast.With(stmt.items, []), stmt))
        stmt.items = [InBlock().visit(item) for item in stmt.items]
        for node in Entered(self.source, stmt, head, self.temporary).nodes(self.nodes(stmt.body)):
            self.add(node, out)

    def expression(self, stmt: ast.Expr, out: list[Node]) -> None:
        """A statement that is an expression: a docstring, or `name.append(value)`."""
        call = stmt.value
        if isinstance(call, ast.Constant):
            return
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and len(call.args) == 1:
            owner = call.func.value
            if call.func.attr == "append" and isinstance(owner, ast.Name) and self.is_local(owner.id):
                out.append(Append(owner.id, self.value(call.args[0], out), stmt.lineno))
                return
        text = f"an expression whose value is not used, {ast.unparse(call)[:40]!r},"
        raise self.refuse(stmt, text, "assign the result to a name, or leave it out")

    def assignment(self, stmt: ast.stmt, out: list[Node]) -> None:
        """Assignments, functional: `x += e` and `x[i] = e` give the name a new value."""
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
            self.assignment(located(ast.Assign([target], value), stmt), out)
        elif isinstance(stmt, ast.AnnAssign):
            if stmt.value is not None:
                self.assignment(located(ast.Assign([stmt.target], stmt.value), stmt), out)
        elif isinstance(stmt, ast.Assign):
            self.assign(stmt, out)
        elif not isinstance(stmt, ast.Pass):
            raise self.refuse(stmt, f"`{type(stmt).__name__.lower()}`", "write it for all examples, outside")

    def assign(self, stmt: ast.Assign, out: list[Node]) -> None:
        """`targets = value`, an element or a slice among the targets by way of a temporary name."""
        if all(isinstance(t, ast.Name) for target in stmt.targets for t in leaves(target)):
            self.plain(stmt, out)
            return
        if len(stmt.targets) == 1 and isinstance(stmt.targets[0], ast.Subscript):
            target = stmt.targets[0]
            if any(isinstance(n, ast.NamedExpr) for n in ast.walk(target)):  # the value comes first
                stmt.value = self.kept(stmt.value, out)
            if isinstance(target.value, ast.Subscript):
                self.once(target, out)
            name, value = subscript_target(stmt.targets[0], stmt.value)
            if name not in self.names:
                raise self.refuse(stmt, f"an element of {name!r}, which is not local,", "give it a local name first")
            self.plain(located(ast.Assign([store(name)], value), stmt), out)
            return
        whole = self.temporary()
        self.plain(located(ast.Assign([store(whole)], stmt.value), stmt), out)
        for target in stmt.targets:
            self.unpack(target, load(whole), stmt, out)

    def kept(self, expr: ast.expr, out: list[Node]) -> ast.expr:
        """A name for the value of an expression."""
        name = self.temporary()
        self.plain(located(ast.Assign([store(name)], expr), expr), out)
        return located(load(name), expr)

    def once(self, target: ast.Subscript, out: list[Node]) -> None:
        """Give names to what the indices of a target call: it is both read and set, but computed once."""
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
        if isinstance(target, (ast.Tuple, ast.List)):
            names = [self.temporary() for _ in target.elts]
            stars = [isinstance(t, ast.Starred) for t in target.elts]
            parts = zip(names, stars, strict=True)
            new: Any = [ast.Starred(store(n), ast.Store()) if s else store(n) for n, s in parts]
            self.plain(located(ast.Assign([ast.Tuple(new, ast.Store())], value), stmt), out)
            for part, name in zip(target.elts, names, strict=True):
                self.unpack(part.value if isinstance(part, ast.Starred) else part, load(name), stmt, out)
        else:
            self.assign(located(ast.Assign([target], value), stmt), out)

    def plain(self, stmt: ast.stmt, out: list[Node]) -> None:
        """A statement for the block at the end of `out`, or for a new one."""
        pre: list[Node] = []
        stmt = Lift(self, pre).visit(stmt)
        for node in pre:
            self.add(node, out)
        self.add(in_block(stmt), out)

    def add(self, node: Node, out: list[Node]) -> None:
        if isinstance(node, Block) and out and isinstance(out[-1], Block):
            out[-1].body += node.body
            out[-1].text += node.text
        else:
            out.append(node)

    def match(self, stmt: ast.Match, out: list[Node]) -> None:
        """`match` on a Python value, as a chain of ifs; patterns are constants, dotted names, `_` and `|`."""
        subject = self.temporary()
        self.assignment(located(ast.Assign([store(subject)], stmt.subject), stmt), out)
        chain: list[ast.stmt] = []
        for case in reversed(stmt.cases):
            test = self.pattern(case.pattern, subject)
            if case.guard is not None:
                test = case.guard if test is None else ast.BoolOp(ast.And(), [test, case.guard])
            if test is None:
                chain = case.body
            else:
                chain = [located(ast.If(test, case.body, chain), case.body[0])]
        out += self.nodes(chain)

    def pattern(self, pattern: ast.pattern, subject: str) -> ast.expr | None:
        """The test that a pattern stands for; None for `_`."""
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
        """An expression; what must be lifted out goes to `out` first."""
        pre: list[Node] = []
        line = expr.lineno
        found = Lift(self, pre).visit(expr)
        text = shown(found)
        for node in pre:
            self.add(node, out)
        return Value(InBlock().visit(found), line, text)

    def walk(self, expr: ast.expr, out: list[Node]) -> Walk:
        """What a `for` walks along."""
        if isinstance(expr, ast.Call) and isinstance(expr.func, ast.Name) and expr.func.id in WALKS:
            kind = expr.func.id
            if kind not in self.names and not any(isinstance(a, ast.Starred) for a in expr.args):
                if any(k.arg == "strict" and getattr(k.value, "value", True) for k in expr.keywords):
                    raise self.refuse(expr, "zip(strict=True)", "leave out strict: the shortest ends the walk")
                given: list[ast.expr] = [*expr.args, *[k.value for k in expr.keywords if k.arg != "strict"]]
                if kind in ("range",) or (kind == "enumerate" and len(given) > 1):
                    head = [self.walk(given[0], out)] if kind == "enumerate" else []
                    rest = given[1:] if kind == "enumerate" else given
                    return Walk(kind, [*head, *[Walk("value", [], self.value(a, out)) for a in rest]])
                return Walk(kind, [self.walk(a, out) for a in given])
        method = expr.func if isinstance(expr, ast.Call) else None
        if isinstance(expr, ast.Call) and isinstance(method, ast.Attribute) and method.attr == "unbind":
            first = all(isinstance(a, ast.Constant) and a.value == 0 for a in expr.args)
            if first and not expr.keywords:
                return self.walk(method.value, out)
        return Walk("value", [], self.value(expr, out))


def in_block(stmt: ast.stmt) -> Block:
    """One statement as a block."""
    text = shown(stmt).splitlines()
    return Block([InBlock().visit(stmt)], stmt.lineno, text)


def shown(node: ast.AST) -> str:
    """The text of code, for `tree`."""
    return ast.unparse(node).replace(f"{HELPERS}.not_", "not ").replace(f"{HELPERS}.", "")


BRANCHES = (ast.If, ast.While, ast.For, ast.Return, ast.Break, ast.Continue, ast.Match)


def leaves(target: ast.expr) -> list[ast.expr]:
    """The names, elements and attributes that a target sets."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return [leaf for t in target.elts for leaf in leaves(t)]
    return leaves(target.value) if isinstance(target, ast.Starred) else [target]


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Lift(ast.NodeTransformer):
    """Lifts what needs a node of its own out of an expression: it goes to `pre`, and the expression reads its name."""

    def __init__(self, builder: Builder, pre: list[Node]) -> None:
        self.builder = builder
        self.pre = pre

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        return node

    def generic_visit(self, node: Any) -> Any:
        """Comprehensions stay as they are, too."""
        return node if isinstance(node, COMPREHENSIONS) else super().generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
        if not is_loop(node, self.builder.differing, self.builder.site):
            return node
        name = self.builder.temporary()
        for stmt in as_loop(node, name, self.builder.temporary):
            self.builder.statement(stmt, self.pre)
        return located(load(name), node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.expr:
        value = self.visit(node.value)
        self.put(node.target.id, value, self.pre, node)
        return located(load(node.target.id), node)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(with_lists(node))
        if not self.builder.site(node):
            return node
        if any(k.arg is None for k in node.keywords):
            raise self.builder.refuse(node, "`**` in a call of a function of tdc.batch", "name the arguments")
        name = self.builder.temporary()
        keys: list[ast.expr | None] = [ast.Constant(k.arg) for k in node.keywords]
        args, named = ast.Tuple(node.args, ast.Load()), ast.Dict(keys, [k.value for k in node.keywords])
        given = located(ast.Tuple([node.func, args, named], ast.Load()), node)
        text = shown(node)
        self.pre.append(Call(name, Value(InBlock().visit(given), node.lineno, text), node.lineno))
        return located(load(name), node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        if not any(risky(v, self.builder.site) for v in node.comparators[1:]):
            return self.generic_visit(node)
        left = node.left
        parts: list[ast.expr] = []
        for op, right in zip(node.ops, node.comparators, strict=True):
            name = self.builder.temporary()
            parts.append(ast.Compare(left, [op], [ast.NamedExpr(store(name), right)]))
            left = load(name)
        return self.visit_BoolOp(located(ast.BoolOp(ast.And(), parts), node))

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        if not any(risky(v, self.builder.site) for v in node.values[1:]):
            return self.generic_visit(node)
        name = self.builder.temporary()
        self.arm(name, node.values, isinstance(node.op, ast.And), self.pre, node)
        return located(load(name), node)

    def arm(self, name: str, values: list[ast.expr], both: bool, out: list[Node], at: ast.expr) -> None:
        """`name = values[0]`, and where that does not decide, the same of the rest."""
        inner: list[Node] = []
        self.put(name, Lift(self.builder, inner).visit(values[0]), inner, at)
        out += inner
        if values[1:]:
            rest: list[Node] = []
            self.arm(name, values[1:], both, rest, at)
            test: ast.expr = load(name) if both else call_helper("not_", [load(name)])
            test = located(test, at)
            out.append(If(Value(test, at.lineno, shown(test)), rest, [], at.lineno))

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        if not risky(node.body, self.builder.site) and not risky(node.orelse, self.builder.site):
            return self.generic_visit(node)
        name, arms = self.builder.temporary(), []
        test = self.builder.value(node.test, self.pre)
        for part in (node.body, node.orelse):
            arm: list[Node] = []
            self.put(name, Lift(self.builder, arm).visit(part), arm, node)
            arms.append(arm)
        self.pre.append(If(test, arms[0], arms[1], node.lineno))
        return located(load(name), node)

    def put(self, name: str, value: ast.expr, out: list[Node], at: ast.expr) -> None:
        """`name = value` as a block."""
        stmt = located(ast.Assign([store(name)], value), at)
        self.builder.add(in_block(stmt), out)
