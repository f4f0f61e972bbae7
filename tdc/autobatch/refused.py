"""Code that is refused anywhere in a function when it is decorated: changes of objects, output, late names.

Values of a batch are never changed in place: the statements `x[i] = v`, `x += e` and `o.append(v)` assign the name a
new value. A call that changes an object inside an expression cannot be read so. A call whose result replaces its
object, as in `value, td = td.pop("a")` of a TensorDict, changes none.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from tdc.autobatch.hoist import given_in, names_in
from tdc.autobatch.source import OP, Source, every_argument
from tdc.autobatch.syntax import Names
from tdc.autobatch.tree import Block
from tdc.core.errors import UnsupportedError, message

TAKES = {  # methods that also return a value, and what to write instead; `o` is the object
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
    """Refuse code that changes an object, prints or waits; `names` are the local ones.

    Raises:
        UnsupportedError: there is such code.
    """
    local = {*names}
    nodes = [node for stmt in source.tree.body for node in ast.walk(stmt)]
    refuse_late_names(source, nodes, local)
    refuse_overwritten(source, nodes)
    statements = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
    assigns = [n for n in nodes if isinstance(n, ast.Assign)]
    new = {id(n.value): {name for t in n.targets for name in names_in(t, ast.expr_context)} for n in assigns}
    for node in nodes:
        if type(node) in WAITS:
            hint = "return the results, as a tuple or a tensor"
            raise refusal(source, node, f"`{WAITS[type(node)]}`", hint)
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


def kept_in(nodes: Iterable[ast.AST], keeper: str = "") -> list[ast.Lambda | ast.GeneratorExp]:
    """The lambdas and generators that are kept: no argument of a call, but of a method `keeper`."""
    nodes = [*nodes]
    calls = [n for n in nodes if isinstance(n, ast.Call) and not (keeper and getattr(n.func, "attr", "") == keeper)]
    used = {id(part) for call in calls for part in (*call.args, *[k.value for k in call.keywords])}
    return [n for n in nodes if isinstance(n, (ast.Lambda, ast.GeneratorExp)) and id(n) not in used]


def kind_of(node: ast.AST) -> str:
    return "lambda" if isinstance(node, ast.Lambda) else "generator"


def refuse_kept(source: Source, blocks: Iterable[Block], differing: frozenset[str]) -> None:
    """Refuse a lambda or generator that reads values of each example and outlives its block: other examples, or another
    order of them, may be there.

    Raises:
        UnsupportedError: there is one.
    """
    for stmt, wanted in [(stmt, block.wanted) for block in blocks for stmt in block.body]:
        for node in kept_in(ast.walk(stmt)) if names_in(stmt, ast.Store) & {*wanted} else []:
            name = next(iter(Names(differing, node).reads), None)
            if name is not None:
                text = f"a {kind_of(node)} that reads {name!r} and is kept for other statements,"
                raise refusal(source, node, text, "a function outside, of all that it reads")


def refuse_late_names(source: Source, nodes: list[ast.AST], local: set[str]) -> None:
    """Refuse a kept lambda or generator that reads a name assigned twice: Python reads the value of the time of the
    call, a block that of the time when it was made."""
    kept = kept_in(nodes, "append")
    given = Counter([*[arg.arg for arg in every_argument(source.tree.args)], *given_in(source.tree)]) if kept else {}
    for node in kept:
        late = [name for name in Names(frozenset(local), node).reads if given[name] > 1]
        if late:
            text = f"a {kind_of(node)} that reads {late[0]!r}, which gets another value,"
            raise refusal(source, node, text, f"keep what it reads under a name of its own: now = {late[0]}")


def refuse_overwritten(source: Source, nodes: list[ast.AST]) -> None:
    """Refuse an expression that reads a name and assigns it after that: a block assigns it first."""
    for owner in [node for node in nodes if isinstance(node, (ast.stmt, ast.match_case))]:
        for part in [part for part in ast.iter_child_nodes(owner) if isinstance(part, ast.expr)]:
            found = Overwritten(owner.target if isinstance(owner, ast.AugAssign) else None)
            found.visit(part)
            if found.late is not None:
                name, value = found.late.target.id, ast.unparse(found.late.value)[:40]
                text = f"'{name} := {value}' in an expression that reads {name!r} before,"
                raise refusal(source, found.late, text, f"a statement of its own that gives {name} its value")


class Overwritten(ast.NodeVisitor):
    """Finds where an expression assigns a name that it read before, in the order in which Python evaluates it.

    Args:
        target: what `+=` reads first.
    """

    def __init__(self, target: ast.AST | None = None) -> None:
        self.read = names_in(target, ast.expr_context) if target else set[str]()
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
        """Visit parts that become statements of their own where one of them assigns a name."""
        before, after = self.read, set[str]()
        for part in parts:
            self.read = {*before}
            self.visit(part)
            after |= self.read
        self.read = after


def change(call: ast.Call, func: ast.Attribute, local: set[str], alone: bool, targets: set[str]) -> str:
    """A hint for a method that changes its object; empty for any other.

    Args:
        alone: True if the call is a statement.
        targets: the names that its result is assigned to.
    """
    name, owner = func.attr, func.value
    if name.endswith("_") and any(hasattr(space, name) for space in IN_PLACE):
        return in_place(call, name, owner, local)
    if root(owner) not in local or root(owner) in targets:
        return ""
    attribute = any(isinstance(n, ast.Attribute) for n in ast.walk(owner))
    hint = (TAKES | CHANGES).get(name, "")
    if alone:
        if name == "append" and isinstance(owner, ast.Name):  # a node of its own
            return ""
    elif name == "sort" or (name in CHANGES and attribute):  # returns a value, as the method of tensors does
        return ""
    return "copy it to a local name, and give that a new value" if hint and attribute else spelled(hint, owner)


def in_place(call: ast.Call, name: str, owner: ast.expr, local: set[str]) -> str:
    """A hint for a method, or function of torch, whose name ends with one underscore."""
    begin = owner
    while isinstance(begin, ast.Call) and isinstance(begin.func, ast.Attribute):
        begin = begin.func.value
    own = root(begin) in local and not any(isinstance(n, ast.Attribute) for n in ast.walk(begin))
    if own and begin is owner and name in INSTEAD:
        return spelled(INSTEAD[name], owner)
    text = re.sub(r"(?<=\w)_\(", "(", ast.unparse(call))
    return f"{ast.unparse(begin)} = {text}" if own else text


def spelled(hint: str, owner: ast.expr) -> str:
    """A hint with the object for `o`."""
    return re.sub(r"\bo\b", lambda _: ast.unparse(owner), hint)


def root(expr: ast.expr) -> str:
    """The name that attributes and elements begin with; empty for other code."""
    while isinstance(expr, (ast.Attribute, ast.Subscript)):
        expr = expr.value
    return expr.id if isinstance(expr, ast.Name) else ""


def refusal(source: Source, node: ast.AST, text: str, hint: str) -> UnsupportedError:
    """The error for code that cannot be batched, with its line."""
    where = source.where(getattr(node, "lineno", source.tree.lineno))
    return UnsupportedError(message(OP, "code that can be batched", f"{text} at {where}", hint=hint))
