"""What code for one example may not say, wherever it stands: that is found when a function is decorated.

A value of a batch is never changed where it is: the statements `x[i] = v`, `x += e` and `o.append(v)` give the name a
new value. A call that would change an object inside an expression has no such reading. What gives a new value and puts
it under the old name, as TensorDict does in `value, td = td.pop("a")`, is no change of an object.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from tdc.autobatch.hoist import given_in
from tdc.autobatch.source import OP, Source, every_argument
from tdc.autobatch.syntax import Names
from tdc.autobatch.tree import Block
from tdc.core.errors import UnsupportedError, message

TAKES = {  # what gives a value, too; `o` stands for the object
    "pop": "last, o = o[-1], o[:-1]",
    "popitem": "read o[key], and leave it there",
    "setdefault": "if key not in o: o[key] = value",
}
CHANGES = {
    "append": "o = [*o, value]",
    "extend": "o = [*o, *more]",
    "insert": "o = [*o[:i], value, *o[i:]]",
    "remove": "o = [*o[:i], *o[i + 1 :]]",
    "clear": "o = []",
    "sort": "o = sorted(o)",
    "reverse": "o = o[::-1]",
    "update": "o = {**o, **more}",
}
INSTEAD = {
    "copy_": "o = other",
    "zero_": "o = torch.zeros_like(o)",
    "fill_": "o = torch.full_like(o, value)",
    "normal_": "o = torch.randn_like(o)",
    "uniform_": "o = torch.rand_like(o)",
    "requires_grad_": "call it outside, on the arguments",
}
IN_PLACE = (Tensor, torch, torch.nn.functional, torch.nn.init)
WAITS = {ast.Yield: "yield", ast.YieldFrom: "yield from", ast.Await: "await"}


def check(source: Source, names: Iterable[str]) -> None:
    """Refuse what changes an object, prints or waits; `names` are the local ones.

    Raises:
        UnsupportedError: there is such code.
    """
    local = {*names}
    nodes = [node for stmt in source.tree.body for node in ast.walk(stmt)]
    refuse_late_names(source, nodes, local)
    refuse_overwritten(source, nodes)
    statements = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
    new = {id(n.value): targets_of(n) for n in nodes if isinstance(n, ast.Assign)}
    for node in nodes:
        if type(node) in WAITS:
            word = WAITS[type(node)]
            raise refusal(source, node, f"`{word}`", "return the results, as a tuple or a tensor")
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            text = f"an attribute that is set, {ast.unparse(node)!r},"
            raise refusal(source, node, text, "keep it in a local name and return it")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "print" and "print" not in local:
                raise refusal(source, node, "a call of `print`", "call f on one example to print")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            hint = change(node, node.func, local, id(node) in statements, new.get(id(node), set()))
            if hint:
                text = f"{ast.unparse(node)[:40]!r}, which changes an object,"
                raise refusal(source, node, text, hint)


def refuse_kept(source: Source, blocks: Iterable[Block], differing: frozenset[str]) -> None:
    """Refuse a lambda, or generator, that reads what differs between examples and is needed behind its block: there
    other examples may be, or the same in another order.

    Raises:
        UnsupportedError: there is one.
    """
    for block in blocks:
        for stmt in block.body:
            calls = [n for n in ast.walk(stmt) if isinstance(n, ast.Call)]
            used = {id(part) for call in calls for part in (*call.args, *[k.value for k in call.keywords])}
            stores = {n.id for n in ast.walk(stmt) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            for node in ast.walk(stmt):
                if isinstance(node, (ast.Lambda, ast.GeneratorExp)) and id(node) not in used:
                    found = Names(differing)
                    found.visit(node)
                    if found.reads and stores & {*block.wanted}:
                        kind = "lambda" if isinstance(node, ast.Lambda) else "generator"
                        text = f"a {kind} that reads {next(iter(found.reads))!r} and is kept for other statements,"
                        raise refusal(source, node, text, "a function outside, of all that it reads")


def refuse_late_names(source: Source, nodes: list[ast.AST], local: set[str]) -> None:
    """Refuse a lambda, or generator, that is kept and reads a name which gets another value: Python would read the
    value of the moment when it is called, a block has that of the moment when it was made."""
    kept = [n for n in nodes if isinstance(n, (ast.Lambda, ast.GeneratorExp))]
    if not kept:
        return
    calls = [n for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "attr", "") != "append"]
    used = {id(part) for call in calls for part in (*call.args, *[k.value for k in call.keywords])}
    given = Counter([*[arg.arg for arg in every_argument(source.tree.args)], *given_in(source.tree)])
    for node in kept:
        if id(node) not in used:
            found = Names(frozenset(local))
            found.visit(node)
            late = [name for name in found.reads if given[name] > 1]
            if late:
                kind = "lambda" if isinstance(node, ast.Lambda) else "generator"
                text = f"a {kind} that reads {late[0]!r}, which gets another value,"
                raise refusal(source, node, text, f"keep what it reads under a name of its own: now = {late[0]}")


def refuse_overwritten(source: Source, nodes: list[ast.AST]) -> None:
    """Refuse an expression that reads a name and gives it another value behind that: a block gives it first."""
    for owner in [node for node in nodes if isinstance(node, (ast.stmt, ast.match_case))]:
        for part in [part for part in ast.iter_child_nodes(owner) if isinstance(part, ast.expr)]:
            found = Overwritten(owner.target if isinstance(owner, ast.AugAssign) else None)
            found.visit(part)
            if found.late is not None:
                name, value = found.late.target.id, ast.unparse(found.late.value)[:40]
                text = f"'{name} := {value}' in an expression that reads {name!r} before,"
                raise refusal(source, found.late, text, f"a statement of its own that gives {name} its value")


class Overwritten(ast.NodeVisitor):
    """Finds where an expression gives a name a value that it read before, in the order in which Python evaluates it.

    Args:
        target: what `+=` reads first.
    """

    def __init__(self, target: ast.AST | None = None) -> None:
        self.read = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)} if target else set[str]()
        self.late: ast.NamedExpr | None = None

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.read.add(node.id)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        before = {*self.read}
        self.visit(node.value)
        if node.target.id in before:
            self.late = node

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit_apart(node.values)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit_apart([node.test, node.body, node.orelse])

    def visit_apart(self, parts: list[ast.expr]) -> None:
        """Parts that are statements of their own where one of them gives a name a value."""
        before, after = self.read, set[str]()
        for part in parts:
            self.read = {*before}
            self.visit(part)
            after |= self.read
        self.read = after


def change(call: ast.Call, func: ast.Attribute, local: set[str], alone: bool, targets: set[str]) -> str:
    """What to write instead of a method that changes its object; empty for any other.

    Args:
        alone: whether the call is a statement.
        targets: the names that its result is given to.
    """
    name, owner = func.attr, func.value
    if name.endswith("_") and any(hasattr(space, name) for space in IN_PLACE):
        return in_place(call, name, owner, local)
    if root(owner) not in local or root(owner) in targets:
        return ""
    attribute = any(isinstance(n, ast.Attribute) for n in ast.walk(owner))
    hint = (TAKES | CHANGES).get(name, "")
    if alone:
        if name == "append" and isinstance(owner, ast.Name):  # a form of its own
            return ""
    elif name == "sort" or (name in CHANGES and attribute):  # gives a value, as that of tensors does
        return ""
    return "copy it to a local name, and give that a new value" if hint and attribute else spelled(hint, owner)


def in_place(call: ast.Call, name: str, owner: ast.expr, local: set[str]) -> str:
    """What to write instead of a method, or function of torch, that ends with one underscore."""
    begin = owner
    while isinstance(begin, ast.Call) and isinstance(begin.func, ast.Attribute):
        begin = begin.func.value
    attribute = any(isinstance(n, ast.Attribute) for n in ast.walk(begin))
    own = root(begin) in local and not attribute
    if own and begin is owner and name in INSTEAD:
        return spelled(INSTEAD[name], owner)
    text = re.sub(r"(?<=\w)_\(", "(", ast.unparse(call))
    return f"{ast.unparse(begin)} = {text}" if own else text


def spelled(hint: str, owner: ast.expr) -> str:
    """A hint with the object for `o`."""
    return re.sub(r"\bo\b", lambda _: ast.unparse(owner), hint)


def root(expr: ast.expr) -> str:
    """The name that attributes and elements begin with; empty where it is no name."""
    while isinstance(expr, (ast.Attribute, ast.Subscript)):
        expr = expr.value
    return expr.id if isinstance(expr, ast.Name) else ""


def targets_of(stmt: ast.Assign) -> set[str]:
    """The names that an assignment gives values."""
    return {n.id for target in stmt.targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def refusal(source: Source, node: ast.AST, text: str, hint: str) -> UnsupportedError:
    """The error for code that cannot be batched, with its line."""
    where = source.where(getattr(node, "lineno", source.tree.lineno))
    return UnsupportedError(message(OP, "code that can be batched", f"{text} at {where}", hint=hint))
