"""List comprehensions along what differs between examples, as the loops that they stand for.

    ys = [cell(x) for x in xs if x[0] > 0]          __v1 = []
                                                    for __v2 in xs:
                                                        if __v2[0] > 0:
                                                            __v1.append(cell(__v2))
                                                    ys = __v1

So is one that calls a function of `batch`. The targets get names of their own, as in Python, where they are not seen
outside. Other comprehensions stay in their block, as Python's own: those along what is the same for all, and along a
tuple or a call, as of `d.items()`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from tdc.autobatch.flow import is_uniform
from tdc.autobatch.source import located
from tdc.autobatch.syntax import Site, dotted, load, store

WALKS = ("range", "zip", "enumerate", "reversed", "unbind")
# what takes a generator as it takes a list
TAKEN = ("sum", "any", "all", "max", "min", "tuple", "list", "torch.stack", "torch.cat")
SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def with_lists(call: ast.Call) -> ast.Call:
    """A call that takes a generator, with a list comprehension instead."""
    if dotted(call.func) in TAKEN and call.args and isinstance(call.args[0], ast.GeneratorExp):
        first = call.args[0]
        call.args[0] = located(ast.ListComp(first.elt, first.generators), first)
    return call


def is_loop(node: ast.ListComp, differing: frozenset[str], site: Site) -> bool:
    """Whether a comprehension goes along what may differ between examples, of a form that `for` takes, or calls a
    function of `batch`."""
    calls = any(isinstance(n, ast.Call) and site(n) for n in ast.walk(node))
    walks = all(is_walk(g.iter) or (calls and isinstance(g.iter, (ast.Tuple, ast.List))) for g in node.generators)
    if any(g.is_async for g in node.generators) or not walks:
        return False
    given = {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
    inner = [n for part in ast.walk(node) if isinstance(part, SCOPES) and part is not node for n in bound_in(part)]
    if given & {*inner}:
        return False
    return calls or any(not is_uniform(part, differing) for g in node.generators for part in (g.iter, *g.ifs))


def is_walk(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return name in WALKS
    return isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.BinOp))


def bound_in(scope: Any) -> list[str]:
    """The names that a lambda or comprehension gives values of its own."""
    if isinstance(scope, ast.Lambda):
        return [n.arg for n in ast.walk(scope.args) if isinstance(n, ast.arg)]
    return [n.id for g in scope.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)]


def as_loop(node: ast.ListComp, out: str, fresh: Callable[[], str]) -> list[ast.stmt]:
    """The statements that give a name the list of a comprehension."""
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
    for stmt in found:
        for part in ast.walk(stmt):
            if isinstance(part, (ast.expr, ast.stmt)) and not hasattr(part, "lineno"):
                located(part, node)
    return found


class Renamed(ast.NodeTransformer):
    """Gives names others."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return located(ast.Name(self.names.get(node.id, node.id), node.ctx), node)
