"""Loop fission: what the body of a `for` computes of its item alone goes in front, where it is computed for all items.

`h = torch.tanh(x @ w + h @ u)` in `for x in xs` needs the round before it for `h @ u` only. So `x @ w` goes to the
block that gives the item to `x`, and a walk along rows runs that block once, for the rows of all rounds of all
examples: one product where each round had one, forward and backward.

Only products go, with what they are made of and what is added to them, and only from the statements that every item
comes to first, in a loop that nobody leaves early: nothing is computed that an example alone would not compute. Calls
that may fail, draw random numbers, or are not known by name stay.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tdc.autobatch.source import located
from tdc.autobatch.syntax import TOTAL, Site, called, load, store

PRODUCTS = frozenset(("matmul", "mm", "linear"))
CALLS = TOTAL - {"dropout"} | {"exp"}  # every item comes there, so that an overflow is the example's own
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.MatMult)
ARMS = (ast.Lambda, ast.IfExp, ast.BoolOp, ast.Compare, ast.NamedExpr, ast.ListComp, ast.SetComp, ast.DictComp)


class Hoist(ast.NodeTransformer):
    """Gives names to the products of expressions that depend on nothing but the item of a loop.

    Args:
        loop: whose item it is.
        site: whether a call is one of a function of `batch`.
        product: whether a call is one of a linear layer.
        temporary: makes a name.
    """

    def __init__(self, loop: ast.For, site: Site, product: Site, temporary: Callable[[], str]) -> None:
        self.site, self.product, self.temporary = site, product, temporary
        self.assigned = Counter(given_in(loop))
        self.known = {name for name in given_in(loop.target) if self.assigned[name] == 1}
        self.ahead: list[ast.stmt] = []

    def body(self, stmts: list[ast.stmt]) -> list[ast.stmt]:
        """Returns the statements that stay in the body; those that move in front of the loop are in `ahead`."""
        if any(isinstance(n, (ast.Break, ast.Return)) for stmt in stmts for n in ast.walk(stmt)):
            return stmts
        kept: list[ast.stmt] = []
        read: set[str] = set()  # names that statements before it read, of the round before
        for k, stmt in enumerate(stmts):
            if not isinstance(stmt, (ast.Assign, ast.AugAssign, ast.Expr)):
                kept += stmts[k:]
                break
            if self.is_whole(stmt, read):
                self.ahead.append(stmt)
                self.known |= {*given_in(stmt)}
                continue
            if self.has_product(stmt.value):
                stmt.value = self.visit(stmt.value)
            kept.append(stmt)
            read |= names_in(stmt)
        return [*self.back(), *kept]

    def back(self) -> list[ast.stmt]:
        """Take those out of `ahead` that neither have products nor give them values."""
        ahead: list[ast.stmt] = []
        back: list[ast.stmt] = []
        read: set[str] = set()
        for stmt in reversed(self.ahead):
            if self.has_product(stmt) or read & {*given_in(stmt)}:
                ahead.insert(0, stmt)
                read |= names_in(stmt)
            else:
                back.insert(0, stmt)
        self.ahead = ahead
        return back

    def is_whole(self, stmt: ast.stmt, read: set[str]) -> bool:
        """Whether a statement gives one name a value of the item, and no other statement gives it one."""
        if not isinstance(stmt, ast.Assign) or len(stmt.targets) > 1 or not isinstance(stmt.targets[0], ast.Name):
            return False
        name = stmt.targets[0].id
        return self.assigned[name] == 1 and name not in read and self.is_pure(stmt.value)

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.expr) and self.has_product(node) and self.is_pure(node):
            name = self.temporary()
            self.ahead.append(located(ast.Assign([store(name)], node), node))
            return located(load(name), node)
        return node if isinstance(node, ARMS) else super().generic_visit(node)

    def is_pure(self, node: ast.expr) -> bool:
        """Whether an expression depends on the item, and else on what no round changes."""
        return bool(names_in(node) & self.known) and self.is_fixed(node)

    def has_product(self, code: ast.AST) -> bool:
        """Whether code has `@`, or a call of `PRODUCTS` or a linear layer."""
        for n in ast.walk(code):
            if isinstance(n, ast.MatMult) or (isinstance(n, ast.Call) and (called(n) in PRODUCTS or self.product(n))):
                return True
        return False

    def is_fixed(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self.known or not self.assigned[node.id]
        if isinstance(node, ast.Call):
            known = (called(node) in CALLS or self.product(node)) and not self.site(node)
            return known and all(self.is_fixed(x) for x in [node.func, *node.args, *[k.value for k in node.keywords]])
        if isinstance(node, ast.BinOp):
            return isinstance(node.op, OPERATORS) and self.is_fixed(node.left) and self.is_fixed(node.right)
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.op, ast.USub) and self.is_fixed(node.operand)
        if isinstance(node, (ast.Tuple, ast.List)):
            return all(self.is_fixed(x) for x in node.elts)
        return isinstance(node, ast.Constant) or (isinstance(node, ast.Attribute) and self.is_fixed(node.value))


def names_in(code: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(code) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def given_in(code: ast.AST) -> Iterator[str]:
    """The names that code gives values: `x = `, `x[i] = `, and `x.append(...)`, once for each time."""
    for node in ast.walk(code):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            yield from [n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            yield from [n.id for n in ast.walk(node.func.value) if isinstance(n, ast.Name)]
