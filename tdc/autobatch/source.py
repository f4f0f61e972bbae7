"""The source of a function as a syntax tree, and pieces of it as functions that see the same globals and closures.

Pieces keep the file and the lines of the user, so that tracebacks and debuggers point there.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from types import CellType, CodeType, FunctionType
from typing import Any

from tdc.core.errors import DtypeError, UnsupportedError, describe, message

OP = "batch"
HELPERS = "__tdc"  # the name by which pieces reach `in_block`
NUMBERS = count()


@dataclass(frozen=True)
class Source:
    """A function with its syntax tree.

    Attributes:
        fn: the function.
        tree: its definition; line numbers are those of the file.
        filename: the file, or what stands for it in tracebacks.
    """

    fn: Any  # FunctionType
    tree: ast.FunctionDef
    filename: str

    def where(self, line: int) -> str:
        return f"{self.filename}:{line}"


def read(fn: Any, text: str | None = None) -> Source:
    """The source of a function, from its file or notebook, or given as text.

    Raises:
        DtypeError: no Python function.
        UnsupportedError: its source is not to be had, it is a lambda, a generator, or asynchronous.
    """
    if not isinstance(fn, FunctionType):
        hint = "decorate the function or method itself, below other decorators"
        raise DtypeError(message(OP, "a Python function", describe(fn), hint=hint))
    if fn.__name__ == "<lambda>":
        got = f"a lambda at {fn.__code__.co_filename}:{fn.__code__.co_firstlineno}"
        raise UnsupportedError(message(OP, "a function that begins with def", got, hint="write def f(x): return ..."))
    if text is None:
        try:
            lines, first = inspect.getsourcelines(fn)
        except (OSError, TypeError):
            got, hint = f"{fn.__name__!r}, whose source cannot be read", "tdc.batch(fn, source=text)"
            raise UnsupportedError(message(OP, "a function with its source", got, hint=hint)) from None
        text, filename = "".join(lines), fn.__code__.co_filename
    else:
        first, filename = 1, f"<tdc.batch {fn.__name__} {next(NUMBERS)}>"
        linecache.cache[filename] = len(text), None, text.splitlines(True), filename
    module = ast.parse(textwrap.dedent(text))
    ast.increment_lineno(module, first - 1)
    found = [node for node in ast.walk(module) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    named = [node for node in found if node.name == fn.__name__]
    if not named:
        got, hint = (
            f"{fn.__name__!r}, whose lines hold something else",
            "tdc.batch(fn, source=text), or load the file anew",
        )
        raise UnsupportedError(message(OP, "a function with its source", got, hint=hint))
    if isinstance(named[0], ast.AsyncFunctionDef):
        got, hint = "an asynchronous one", "write def f(x): return ..."
        raise UnsupportedError(message(OP, "a function that begins with def", got, hint=hint))
    return Source(fn, mangled(named[0], fn.__qualname__), filename)


def mangled(tree: ast.FunctionDef, qualname: str) -> ast.FunctionDef:
    """The definition with private names of its class as the class has them."""
    owner = qualname.rpartition(".")[0].rpartition(".")[2].lstrip("_")
    for node in ast.walk(tree) if owner and owner != "<locals>" else ():
        if isinstance(node, ast.Attribute) and node.attr.startswith("__") and not node.attr.endswith("__"):
            node.attr = f"_{owner}{node.attr}"
    return tree


def local_names(source: Source) -> frozenset[str]:
    """Parameters and names that the function assigns."""
    code = source.fn.__code__
    return frozenset((*code.co_varnames, *code.co_cellvars))


def definition(name: str, reads: Sequence[str], body: list[ast.stmt], line: int) -> ast.FunctionDef:
    """A function of the names that it reads."""
    args = ast.arguments([], [ast.arg(r) for r in reads], None, [], [], None, [])
    where: dict[str, Any] = {"lineno": line, "end_lineno": line, "col_offset": 0, "end_col_offset": 0}
    made: Any = ast.FunctionDef(name, args, body, [], None, **where)
    if "type_params" in ast.FunctionDef._fields:
        made.type_params = []
    return made


def functions(source: Source, definitions: list[ast.FunctionDef], helpers: Any) -> dict[str, FunctionType]:
    """Definitions as functions with the globals and the closure of the source, by their names."""
    fn = source.fn
    cells: dict[str, Any] = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    cells[HELPERS] = CellType(helpers)
    outer = definition("__tdc_outer", list(cells), [*definitions, ast.Pass()], source.tree.lineno)
    module = ast.fix_missing_locations(ast.Module([outer], []))
    code: Any = compile(module, source.filename, "exec").co_consts[0]
    assert isinstance(code, CodeType)
    inner: list[CodeType] = [c for c in code.co_consts if isinstance(c, CodeType)]
    made: dict[str, FunctionType] = {}
    for c in inner:
        closure = tuple([cells[name] for name in c.co_freevars])
        made[c.co_name] = FunctionType(c, fn.__globals__, c.co_name, None, closure)
    return made


def binder(source: Source) -> FunctionType:
    """A function of the same signature and defaults that returns its arguments as a dict."""
    args = source.tree.args
    names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    names += [a.arg for a in (args.vararg, args.kwarg) if a is not None]
    keys: list[ast.expr | None] = [ast.Constant(n) for n in names]
    result = ast.Return(ast.Dict(keys, [ast.Name(n, ast.Load()) for n in names]))
    made: Any = definition(source.fn.__name__, [], [result], source.tree.lineno)
    first, middle, last = [[ast.arg(a.arg) for a in part] for part in (args.posonlyargs, args.args, args.kwonlyargs)]
    more, named = [part and ast.arg(part.arg) for part in (args.vararg, args.kwarg)]
    made.args = ast.arguments(first, middle, more, last, [None] * len(last), named, [])
    code: Any = compile(ast.fix_missing_locations(ast.Module([made], [])), source.filename, "exec").co_consts[0]
    bound = FunctionType(code, source.fn.__globals__, source.fn.__name__, source.fn.__defaults__)
    bound.__kwdefaults__ = source.fn.__kwdefaults__
    return bound
