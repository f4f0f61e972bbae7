"""Expressions of a block: `and`, `or`, `not`, `if else`, chained comparisons and indices as calls of helpers.

The helpers are in `in_block`: Python's meaning for Python values, element by element for tensors.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection
from typing import Any

from tdc.autobatch.source import HELPERS, every_argument, located
from tdc.autobatch.tree import TEMPORARY

SAFE = (  # calls in a test that may run for inactive examples
    "sum", "mean", "any", "all", "abs", "size", "dim", "numel", "norm", "ndim", "len", "isinstance", "float", "bool",
    "eq", "ne", "lt", "le", "gt", "ge", "length", "is_instance", "is_tensor", "as_bool",
)  # fmt: skip
FAILING = (ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
TOTAL = frozenset((  # calls with finite results and derivatives, of ragged examples as well; else the graph decides
    *SAFE, "tanh", "sigmoid", "relu", "gelu", "silu", "softplus", "softmax", "log_softmax", "sin", "cos", "neg",
    "square", "clamp", "where", "maximum", "minimum", "mm", "matmul", "bmm", "linear", "add", "sub", "mul", "cat",
    "stack", "zeros", "ones", "zeros_like", "ones_like", "full", "arange", "tensor", "double", "long", "int", "reshape",
    "view", "flatten", "transpose", "unsqueeze", "expand", "new_zeros", "new_ones", "detach", "clone", "to", "and_",
    "or_", "not_", "if_else", "chain", "turned", "layer_norm", "dropout", "logical_and", "logical_or", "logical_not",
    "argmax", "builtin", "contains", "update",
))  # fmt: skip
CALLS = {  # and their helpers
    "len": "length", "torch.cat": "cat", "torch.concat": "cat", "torch.stack": "stack", "torch.tensor": "tensor",
    "torch.is_tensor": "is_tensor",
}  # fmt: skip
NUMBER_CALLS = ("float", "int", "complex")  # return a Python number
NUMBER_METHODS = ("item", "tolist")
OWN_HELPERS = {  # functions of Python, and the helpers that take them as their first argument
    **dict.fromkeys(("sum", "any", "all", "max", "min"), "builtin"),
    **dict.fromkeys(("str", "repr", "ascii", "format", "hash"), "text"),
    "divmod": "divided", "isinstance": "is_instance", "bool": "as_bool", "round": "rounded",
}  # fmt: skip
COMPARE: dict[type, str] = {
    ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne", ast.Is: "is_",
    ast.IsNot: "is_not", ast.In: "in_", ast.NotIn: "not_in",
}  # fmt: skip


def load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def store(name: str) -> ast.Name:
    return ast.Name(name, ast.Store())


def call_helper(name: str, args: list[ast.expr], keywords: list[ast.keyword] | None = None) -> ast.Call:
    """A call of a helper of `in_block`."""
    return ast.Call(ast.Attribute(load(HELPERS), name, ast.Load()), args, keywords or [])


def later(expr: ast.expr) -> ast.Lambda:
    """An expression that is evaluated when it is called."""
    return ast.Lambda(ast.arguments([], [], None, [], [], None, []), expr)


def called(call: ast.Call) -> str:
    """The last name of a called function."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def dotted(node: ast.AST) -> str:
    """A name, or an attribute of one such as `self.cell`, as text; empty for other code."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return owner and f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


Site = Callable[[ast.Call], bool]


def risky(expr: ast.expr, site: Site) -> bool:
    """True if an arm may fail, cost much, or assign a name, for examples that do not take it."""
    if has_more_than(SAFE, expr):
        return True
    return any(isinstance(n, ast.NamedExpr) or (isinstance(n, ast.Call) and site(n)) for n in ast.walk(expr))


def runs(expr: ast.expr) -> bool:
    """True if an expression assigns a name, or has a call that may return another value the next time."""
    nodes = [*ast.walk(expr)]
    return any(isinstance(n, ast.NamedExpr) or (isinstance(n, ast.Call) and called(n) not in SAFE) for n in nodes)


def may_fail(node: ast.AST) -> bool:
    """True if code may raise an error, or have no finite derivative, for some values."""
    return has_more_than(TOTAL, node)


def has_more_than(calls: Collection[str], code: ast.AST) -> bool:
    """True if code has an index, an operator of `FAILING`, or a call of another name."""
    for node in ast.walk(code):
        if isinstance(node, ast.Call) and called(node) not in calls:
            return True
        if isinstance(node, ast.Subscript) or (isinstance(node, ast.BinOp) and isinstance(node.op, FAILING)):
            return True
    return False


def subscript_target(target: ast.Subscript, value: ast.expr) -> tuple[str, ast.expr]:
    """`name[i][j] = value` as the name and its new value."""
    base: Any = target.value
    read: Any = ast.parse(ast.unparse(base), mode="eval").body
    for node in ast.walk(read):
        ast.copy_location(node, target)
    new = call_helper("put", [read, index_of(target.slice), value])
    if isinstance(base, ast.Subscript):
        return subscript_target(base, new)
    return (base.id if isinstance(base, ast.Name) else ast.unparse(base)), new


def index_of(index: ast.expr) -> ast.expr:
    """An index as an argument: slices as calls of `slice`."""
    if isinstance(index, ast.Slice):
        return call_helper("slice", [p or ast.Constant(None) for p in (index.lower, index.upper, index.step)])
    if isinstance(index, ast.Tuple):
        return ast.Tuple([index_of(e) for e in index.elts], ast.Load())
    return index


def is_text(expr: ast.expr) -> bool:
    return isinstance(expr, ast.Constant) and isinstance(expr.value, str)


def written(expr: ast.expr) -> ast.expr:
    """An expression whose value goes into a text."""
    if isinstance(expr, ast.Starred):
        return located(ast.Starred(written(expr.value), ast.Load()), expr)
    return located(call_helper("written", [expr]), expr)


class InBlock(ast.NodeTransformer):
    """Rewrites code that would ask a tensor for its truth, or index by one."""

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        name = "and_" if isinstance(node.op, ast.And) else "or_"
        return located(call_helper(name, [node.values[0], *[later(v) for v in node.values[1:]]]), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        name = {ast.Not: "not_", ast.Invert: "invert"}.get(type(node.op))
        return node if name is None else located(call_helper(name, [node.operand]), node)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        self.generic_visit(node)
        return located(call_helper("if_else", [node.test, later(node.body), later(node.orelse)]), node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        if len(node.ops) == 1 and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            found = call_helper("contains", [node.comparators[0], node.left])
            return located(found if isinstance(node.ops[0], ast.In) else call_helper("not_", [found]), node)
        if len(node.ops) == 1:
            return node
        pairs: list[ast.expr] = []
        for op, value in zip(node.ops, node.comparators, strict=True):
            pairs += [ast.Constant(COMPARE[type(op)]), later(value)]
        return located(call_helper("chain", [node.left, *pairs]), node)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr in NUMBER_METHODS:
            func.value = located(call_helper("numbered", [func.value]), node)
            return node
        if isinstance(func, ast.Attribute) and func.attr == "format" and is_text(func.value):
            node.args = [written(part) for part in node.args]
            for given in node.keywords:
                given.value = written(given.value)
            return node
        if isinstance(func, ast.Name) and func.id in NUMBER_CALLS and len(node.args) == 1:
            node.args = [located(call_helper("numbered", node.args), node)]
            return node
        if isinstance(func, ast.Name) and func.id in OWN_HELPERS:
            helper = OWN_HELPERS[func.id]
            return located(call_helper(helper, [func, *node.args], node.keywords), node)
        helper = CALLS.get(dotted(func), "")
        return located(call_helper(helper, node.args, node.keywords), node) if helper else node

    def visit_FormattedValue(self, node: Any) -> Any:
        self.generic_visit(node)
        node.value = written(node.value)
        return node

    visit_Interpolation = visit_FormattedValue  # of t"{x}", in Python 3.14

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        if isinstance(node.op, ast.Mod) and is_text(node.left):
            node.right = written(node.right)
        is_product = isinstance(node.op, ast.MatMult)
        return located(call_helper("matmul", [node.left, node.right]), node) if is_product else node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        name: Any = node.target  # of builders, a name
        new = self.visit(located(ast.BinOp(load(name.id), node.op, node.value), node))
        if not isinstance(node.op, ast.MatMult):
            new = call_helper("update", [load(name.id), new])
        return located(ast.Assign([name], new), node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        if node.attr not in ("T", "mT") or not isinstance(node.ctx, ast.Load):
            return node
        return located(call_helper("turned", [node.value, ast.Constant(node.attr)]), node)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        self.generic_visit(node)
        varies = any(isinstance(n, (ast.Name, ast.Call, ast.Attribute)) for n in ast.walk(node.slice))
        if not isinstance(node.ctx, ast.Load) or not varies:
            return node
        return located(call_helper("get", [node.value, index_of(node.slice)]), node)


class Names(ast.NodeVisitor):
    """Finds which names of interest code reads before it assigns them, and which it assigns, with their lines."""

    def __init__(self, names: frozenset[str], *code: ast.AST) -> None:
        self.names = names
        self.reads: dict[str, int] = {}
        self.writes: dict[str, int] = {}
        self.inner: list[set[str]] = []
        for part in code:
            self.visit(part)

    def visit_Name(self, node: ast.Name) -> None:
        if (node.id in self.names or node.id.startswith(TEMPORARY)) and not any(node.id in i for i in self.inner):
            if not isinstance(node.ctx, ast.Load):
                self.writes.setdefault(node.id, node.lineno)
            elif node.id not in self.writes:
                self.reads.setdefault(node.id, node.lineno)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for default in (*node.args.defaults, *[d for d in node.args.kw_defaults if d]):
            self.visit(default)
        self.within({a.arg for a in every_argument(node.args)}, [node.body])

    def comprehension(self, node: Any) -> None:
        self.visit(node.generators[0].iter)
        targets = {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
        rest = [part for g in node.generators for part in (g.iter, *g.ifs)][1:]
        self.within(targets, [*rest, *[getattr(node, name) for name in ("elt", "key", "value") if hasattr(node, name)]])

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = comprehension

    def within(self, hidden: set[str], parts: list[ast.AST]) -> None:
        """Visit parts in which some names are local."""
        self.inner.append(hidden)
        for part in parts:
            self.visit(part)
        self.inner.pop()
