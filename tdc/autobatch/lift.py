"""Parts of an expression that need nodes of their own: calls of functions of `batch`, arms, and comprehensions.

They move in front of the statement: arms of `and`, `or` and `if else` that must not run for every example, such as
`n > 0 and x[n] > 1`, and list comprehensions along values that differ between examples or with a call of a function of
`batch`, as the loops that they stand for:

    ys = [cell(x) for x in xs if x[0] > 0]          __v1 = []
                                                    for __v2 in xs:
                                                        if __v2[0] > 0:
                                                            __v1.append(cell(__v2))
                                                    ys = __v1

Other comprehensions stay in their block: those along shared values, along a tuple, or along a call as of `d.items()`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tdc.autobatch.flow import is_uniform
from tdc.autobatch.hoist import names_in
from tdc.autobatch.source import HELPERS, every_argument, located
from tdc.autobatch.syntax import InBlock, Site, call_helper, dotted, load, risky, store
from tdc.autobatch.tree import Block, Call, If, Node, Value

if TYPE_CHECKING:
    from tdc.autobatch.build import Builder

WALKS = ("range", "zip", "enumerate", "reversed", "unbind")
TAKEN = ("sum", "any", "all", "max", "min", "tuple", "list", "torch.stack", "torch.cat")  # generators as lists
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Lift(ast.NodeTransformer):
    """Lifts nodes out of an expression: they go to `pre`, and the expression reads their names."""

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
        self.put(node.target.id, self.visit(node.value), self.pre, node)
        return located(load(node.target.id), node)

    def visit_Call(self, node: ast.Call) -> Any:
        if dotted(node.func) in TAKEN and node.args and isinstance(node.args[0], ast.GeneratorExp):
            first = node.args[0]
            node.args[0] = located(ast.ListComp(first.elt, first.generators), first)
        self.generic_visit(node)
        if not self.builder.site(node):
            return node
        if any(k.arg is None for k in node.keywords):
            raise self.builder.refuse(node, "`**` in a call of a function of tdc.batch", "name the arguments")
        name = self.builder.temporary()
        keys: list[ast.expr | None] = [ast.Constant(k.arg) for k in node.keywords]
        args, named = ast.Tuple(node.args, ast.Load()), ast.Dict(keys, [k.value for k in node.keywords])
        given = located(ast.Tuple([node.func, args, named], ast.Load()), node)
        text = shown(node)
        self.pre.append(Call(node.lineno, name, Value(InBlock().visit(given), node.lineno, text)))
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
        self.assigned(name, values[0], out, at)
        if values[1:]:
            rest: list[Node] = []
            self.arm(name, values[1:], both, rest, at)
            test = located(load(name) if both else call_helper("not_", [load(name)]), at)
            out.append(If(at.lineno, Value(test, at.lineno, shown(test)), rest, []))

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        if not risky(node.body, self.builder.site) and not risky(node.orelse, self.builder.site):
            return self.generic_visit(node)
        name = self.builder.temporary()
        arms: tuple[list[Node], list[Node]] = ([], [])
        test = self.builder.value(node.test, self.pre)
        for part, arm in zip((node.body, node.orelse), arms, strict=True):
            self.assigned(name, part, arm, node)
        self.pre.append(If(node.lineno, test, *arms))
        return located(load(name), node)

    def assigned(self, name: str, value: ast.expr, out: list[Node], at: ast.expr) -> None:
        """`name = value`, with what is lifted out of the value before it."""
        inner: list[Node] = []
        self.put(name, Lift(self.builder, inner).visit(value), inner, at)
        out += inner

    def put(self, name: str, value: ast.expr, out: list[Node], at: ast.expr) -> None:
        """`name = value` as a block."""
        self.builder.add(in_block(located(ast.Assign([store(name)], value), at)), out)


def in_block(stmt: ast.stmt) -> Block:
    """One statement as a block."""
    text = shown(stmt).splitlines()
    return Block(stmt.lineno, [InBlock().visit(stmt)], text)


def shown(node: ast.AST) -> str:
    """The text of code, for `tree`."""
    return ast.unparse(node).replace(f"{HELPERS}.not_", "not ").replace(f"{HELPERS}.", "")


def is_loop(node: ast.ListComp, differing: frozenset[str], site: Site) -> bool:
    """True if a comprehension is to be a loop, and of a form that `for` takes."""
    calls = any(isinstance(n, ast.Call) and site(n) for n in ast.walk(node))
    walks = all(is_walk(g.iter) or (calls and isinstance(g.iter, (ast.Tuple, ast.List))) for g in node.generators)
    if any(g.is_async for g in node.generators) or not walks:
        return False
    given = {name for g in node.generators for name in names_in(g.target, ast.expr_context)}
    if any(given & bound_in(part) for part in ast.walk(node) if part is not node):
        return False
    return calls or any(not is_uniform(part, differing) for g in node.generators for part in (g.iter, *g.ifs))


def is_walk(node: ast.expr) -> bool:
    """True of code that may stand for rows or numbers of each example."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return name in WALKS
    return isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.BinOp))


def bound_in(scope: Any) -> set[str]:
    """The names that a lambda or comprehension binds; none of other code."""
    if isinstance(scope, ast.Lambda):
        return {a.arg for a in every_argument(scope.args)}
    generators = scope.generators if isinstance(scope, COMPREHENSIONS) else []
    return {name for g in generators for name in names_in(g.target, ast.expr_context)}


def as_loop(node: ast.ListComp, out: str, fresh: Callable[[], str]) -> list[ast.stmt]:
    """The statements that assign a name the list of a comprehension; its targets get names of their own."""
    names: dict[str, str] = {}
    heads: list[tuple[ast.expr, ast.expr, list[ast.expr]]] = []
    for g in node.generators:
        along = Renamed(names).visit(g.iter)
        for n in ast.walk(g.target):
            if isinstance(n, ast.Name) and n.id not in names:
                names[n.id] = fresh()
        heads.append((Renamed(names).visit(g.target), along, [Renamed(names).visit(test) for test in g.ifs]))
    append = ast.Call(ast.Attribute(load(out), "append", ast.Load()), [Renamed(names).visit(node.elt)], [])
    body: list[ast.stmt] = [ast.Expr(append)]
    for target, along, tests in reversed(heads):
        for test in reversed(tests):
            body = [ast.If(test, body, [])]
        body = [ast.For(target, along, body, [])]
    found: list[ast.stmt] = [ast.Assign([store(out)], ast.List([], ast.Load())), *body]
    for part in [part for stmt in found for part in ast.walk(stmt)]:
        if isinstance(part, (ast.expr, ast.stmt)) and not hasattr(part, "lineno"):
            located(part, node)
    return found


class Renamed(ast.NodeTransformer):
    """Renames variables."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return located(ast.Name(self.names.get(node.id, node.id), node.ctx), node)
