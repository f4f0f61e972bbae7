"""Loop fission: products in a `for` that depend on its item alone are computed for all items, before the loop.

`h = torch.tanh(x @ w + h @ u)` in `for x in xs` needs the previous round for `h @ u` only. So `x @ w` moves to the
block that assigns `x`. A walk along rows runs that block once, for all rounds of all examples.

Only products move, with their operands and what is added to them, and only from the leading statements of a loop
without early exit: nothing is computed that an example alone would not compute. Calls that may fail, draw random
numbers, or have an unknown name stay.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tdc.autobatch.source import located
from tdc.autobatch.syntax import TOTAL, Site, called, load, store

PRODUCTS = frozenset(("matmul", "mm", "linear"))
CALLS = TOTAL - {"dropout"} | {"exp"}  # every item reaches it, so an overflow is the example's own
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.MatMult)
ARMS = (ast.Lambda, ast.IfExp, ast.BoolOp, ast.Compare, ast.NamedExpr, ast.ListComp, ast.SetComp, ast.DictComp)


class Hoist(ast.NodeTransformer):
    """Names the products in expressions that depend on nothing but the item of a loop.

    Args:
        loop: the loop.
        site: True of a call of a function of `batch`.
        product: True of a call of a linear layer.
        temporary: makes a name.
    """

    def __init__(self, loop: ast.For, site: Site, product: Site, temporary: Callable[[], str]) -> None:
        self.site, self.product, self.temporary = site, product, temporary
        self.assigned = Counter(given_in(loop))
        self.known = {name for name in given_in(loop.target) if self.assigned[name] == 1}
        self.ahead: list[ast.stmt] = []

    def body(self, stmts: list[ast.stmt]) -> list[ast.stmt]:
        """The statements that stay in the body; those that move before the loop are in `ahead`."""
        if any(isinstance(n, (ast.Break, ast.Return)) for stmt in stmts for n in ast.walk(stmt)):
            return stmts
        kept: list[ast.stmt] = []
        read: set[str] = set()  # names that earlier statements read, of the previous round
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
        moved, self.ahead = self.ahead, []
        read = set()  # by statements that move
        for stmt in reversed(moved):
            moves = self.has_product(stmt) or read & {*given_in(stmt)}
            (self.ahead if moves else kept).insert(0, stmt)
            read |= names_in(stmt) if moves else set()
        return kept

    def is_whole(self, stmt: ast.stmt, read: set[str]) -> bool:
        """True if a statement is the only one to assign its name, a value of the item."""
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

    def has_product(self, code: ast.AST) -> bool:
        """True if code has `@`, or a call of `PRODUCTS` or a linear layer."""
        for n in ast.walk(code):
            if isinstance(n, ast.MatMult) or (isinstance(n, ast.Call) and (called(n) in PRODUCTS or self.product(n))):
                return True
        return False

    def is_pure(self, node: ast.expr) -> bool:
        """True if an expression depends on the item, and otherwise on values that no round changes."""
        return bool(names_in(node) & self.known) and self.is_fixed(node)

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


def names_in(code: ast.AST, ctx: type[ast.expr_context] = ast.Load) -> set[str]:
    """The names that code reads, or with `ast.Store` those that it assigns."""
    return {n.id for n in ast.walk(code) if isinstance(n, ast.Name) and isinstance(n.ctx, ctx)}


def given_in(code: ast.AST) -> Iterator[str]:
    """The names that code gives values: `x = `, `x[i] = `, and `x.append(...)`, once for each time."""
    for node in ast.walk(code):
        owner: ast.AST | None = None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            owner = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            owner = node.func.value
        yield from [n.id for n in ast.walk(owner) if isinstance(n, ast.Name)] if owner is not None else ()
