"""The source of a function as a syntax tree, and pieces of it as functions with the same globals and closure.

Pieces keep the user's file and lines, so that tracebacks and debuggers point there.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import count, takewhile
from types import CellType, CodeType, FunctionType
from typing import Any, TypeGuard, TypeVar

from tdc.core.errors import DtypeError, TdcError, UnsupportedError, describe, message

OP = "batch"
HELPERS = "__tdc"  # the name of `in_block` in pieces
NUMBERS = count()


@dataclass(frozen=True)
class Source:
    """A function with its syntax tree.

    Attributes:
        fn: the function.
        tree: its definition; line numbers are those of the file.
        filename: the file, or its name in tracebacks.
    """

    fn: Any  # FunctionType
    tree: ast.FunctionDef
    filename: str

    @cached_property
    def code(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return [*ast.walk(self.tree)]

    def where(self, line: int) -> str:
        return f"{self.filename}:{line}"

    @contextmanager
    def located(self) -> Iterator[None]:
        """Add the line to errors of tdc that a block raises."""
        try:
            yield
        except TdcError as error:
            if not getattr(error, "__notes__", None):
                line = error.line or self.tree.lineno
                text = linecache.getline(self.filename, line).strip()
                error.add_note(f"at {os.path.basename(self.filename)}:{line} in {self.fn.__name__}: {text}")
            raise


def read(fn: Any, text: Any = None) -> Source:
    """The source of a function, from its file or notebook, or given as text.

    Raises:
        DtypeError: it is not a Python function, or the text not a str.
        UnsupportedError: its source cannot be read or is that of another function; it is a lambda or asynchronous, or
            another decorator has wrapped it.
    """
    if not isinstance(fn, FunctionType):
        hint = "decorate the function or method itself, below other decorators"
        raise DtypeError(message(OP, "a Python function", describe(fn), hint=hint))
    if hasattr(fn, "__wrapped__"):  # whose source is that of the function inside
        got, hint = f"{fn.__name__!r}, which another decorator has wrapped", "tdc.batch below other decorators"
        raise UnsupportedError(message(OP, "a function as it was defined", got, hint=hint))
    if fn.__name__ == "<lambda>":
        got = f"a lambda at {fn.__code__.co_filename}:{fn.__code__.co_firstlineno}"
        raise UnsupportedError(message(OP, "a function that begins with def", got, hint="write def f(x): return ..."))
    if text is None:
        try:
            lines, first = inspect.getsourcelines(fn)
        except (OSError, TypeError):
            raise unreadable(fn, "cannot be read") from None
        text, filename = "".join(lines), fn.__code__.co_filename
    elif isinstance(text, str):
        first, filename = 1, f"<tdc.batch {fn.__name__} {next(NUMBERS)}>"
        linecache.cache[filename] = len(text), None, text.splitlines(True), filename
    else:
        raise DtypeError(message(OP, "the source as text", describe(text), hint="tdc.batch(fn, source=text)"))
    tree = definition_in(text, first, fn)
    if isinstance(tree, ast.AsyncFunctionDef):
        got, hint = "an asynchronous one", "write def f(x): return ..."
        raise UnsupportedError(message(OP, "a function that begins with def", got, hint=hint))
    explicit(tree, fn)
    code, stars = fn.__code__, (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)
    count = code.co_argcount + code.co_kwonlyargcount + sum([bool(code.co_flags & star) for star in stars])
    if [a.arg for a in every_argument(tree.args)] != [*code.co_varnames[:count]]:
        raise unreadable(fn, "has other arguments")
    return Source(fn, tree, filename)


def unreadable(fn: FunctionType, why: str) -> UnsupportedError:
    """The error for a function whose source cannot be used."""
    got, hint = f"{fn.__name__!r}, whose source {why}", "tdc.batch(fn, source=text)"
    return UnsupportedError(message(OP, "a function with its source", got, hint=hint))


def definition_in(text: str, first: int, fn: FunctionType) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """The definition of a function in a text that begins at line `first`; of several the one in the same place.

    Raises:
        UnsupportedError: the text is not Python, or defines other functions.
    """
    begin = next((line for line in text.splitlines() if line.strip()), "")
    inside = begin[:1].isspace()  # an indented block; `dedent` would change its strings
    try:
        above = "\n" * (first - 1 - inside)
        module = ast.parse(f"{above}if True:\n{text}" if inside else above + text)
    except SyntaxError:
        raise unreadable(fn, "is not Python") from None
    place = [part for part in fn.__qualname__.split(".") if part != "<locals>"]
    best: tuple[tuple[int, bool, int], ast.FunctionDef | ast.AsyncFunctionDef] | None = None
    for path, node in definitions_in(module, ()):
        if node.name == fn.__name__:
            line = min([node.lineno, *[d.lineno for d in node.decorator_list]])
            common = [a == b for a, b in zip(reversed(path), reversed(place), strict=False)]
            key = len([*takewhile(bool, common)]), line == fn.__code__.co_firstlineno, node.lineno
            best = (key, node) if best is None or key > best[0] else best
    if best is None:
        raise unreadable(fn, "holds something else")
    return best[1]


def definitions_in(node: ast.AST, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each definition of a function, with its name after those of the classes and functions around it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = (*path, child.name)
            if not isinstance(child, ast.ClassDef):
                yield inner, child
            yield from definitions_in(child, inner)
        elif not isinstance(child, ast.expr):
            yield from definitions_in(child, path)


def every_argument(args: ast.arguments) -> list[ast.arg]:
    """The arguments of a definition, in the order of its code."""
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *[a for a in (args.vararg, args.kwarg) if a]]


def explicit(tree: ast.FunctionDef, fn: FunctionType) -> None:
    """Write out what Python takes from the class around a function: private names, and the arguments of `super()`."""
    parts = fn.__qualname__.split(".")[:-1]
    while parts and parts[-1] == "<locals>":
        parts = parts[:-2]
    owner = parts[-1].lstrip("_") if parts else ""
    first = [arg.arg for arg in (*tree.args.posonlyargs, *tree.args.args)][:1]
    within = ["__class__", *first] if first and "__class__" in fn.__code__.co_freevars else []
    for node in ast.walk(tree):
        if owner and not isinstance(node, ast.keyword):  # whose names are as they are written
            for field in ("attr", "id", "arg"):
                name = getattr(node, field, None)
                if isinstance(name, str) and name.startswith("__") and not name.endswith("__"):
                    setattr(node, field, f"_{owner}{name}")
        if within and isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
            node.args = node.args or [located(ast.Name(name, ast.Load()), node) for name in within]


def local_names(source: Source) -> frozenset[str]:
    """Parameters and names that the function assigns, without targets of comprehensions, which code of Python 3.12
    and later also names."""
    code = source.fn.__code__
    inside = [n for part in source.code if isinstance(part, ast.comprehension) for n in ast.walk(part.target)]
    hidden = {id(n) for n in inside}
    assigned = {n.id for n in source.code if is_assigned(n) and id(n) not in hidden}
    only = {n.id for n in inside if is_assigned(n)} - assigned - {a.arg for a in every_argument(source.tree.args)}
    return frozenset((*code.co_varnames, *code.co_cellvars)) - only


def is_assigned(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)


New = TypeVar("New", bound=ast.AST)
PLACE = ("lineno", "col_offset", "end_lineno", "end_col_offset")
PLACED = (ast.stmt, ast.expr, ast.arg, ast.keyword, ast.ExceptHandler, ast.alias, ast.pattern)


def located(new: New, old: ast.AST) -> New:
    """New code in the place of old code; parts of it that have a place keep it."""
    place = {name: getattr(old, name) for name in PLACE}
    todo: list[ast.AST] = [new]
    vars(new).update(place)
    for node in todo:
        for part in ast.iter_child_nodes(node):
            if not hasattr(part, "lineno"):
                todo.append(part)
                if isinstance(part, PLACED):
                    vars(part).update(place)
    return new


def definition(name: str, reads: Sequence[str], body: list[ast.stmt], line: int) -> ast.FunctionDef:
    """The definition of a function of the names that it reads."""
    args = ast.arguments([], [ast.arg(r) for r in reads], None, [], [], None, [])
    where: dict[str, Any] = {"lineno": line, "end_lineno": line, "col_offset": 0, "end_col_offset": 0}
    made: Any = ast.FunctionDef(name, args, body, [], None, **where)
    if "type_params" in ast.FunctionDef._fields:
        made.type_params = []
    return located(made, made)


def functions(source: Source, definitions: list[ast.FunctionDef], helpers: Any) -> dict[str, FunctionType]:
    """Definitions as functions with the globals and the closure of the source, by their names."""
    fn = source.fn
    cells: dict[str, Any] = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    cells[HELPERS] = CellType(helpers)
    outer = definition("__tdc_outer", list(cells), [*definitions, ast.Pass()], source.tree.lineno)
    code: Any = compile(ast.Module([outer], []), source.filename, "exec").co_consts[0]
    made: dict[str, FunctionType] = {}
    for c in [c for c in code.co_consts if isinstance(c, CodeType)]:
        closure = tuple([cells[name] for name in c.co_freevars])
        made[c.co_name] = FunctionType(c, fn.__globals__, c.co_name, None, closure)
    return made


def binder(source: Source) -> FunctionType:
    """A function of the same signature and defaults that returns its arguments as a dict."""
    args = source.tree.args
    names = [a.arg for a in every_argument(args)]
    keys: list[ast.expr | None] = [ast.Constant(n) for n in names]
    result = ast.Return(ast.Dict(keys, [ast.Name(n, ast.Load()) for n in names]))
    made: Any = definition(source.fn.__name__, [], [result], source.tree.lineno)
    first, middle, last = [[ast.arg(a.arg) for a in part] for part in (args.posonlyargs, args.args, args.kwonlyargs)]
    more, named = [part and ast.arg(part.arg) for part in (args.vararg, args.kwarg)]
    made.args = ast.arguments(first, middle, more, last, [None] * len(last), named, [])
    code: Any = compile(ast.Module([located(made, made)], []), source.filename, "exec").co_consts[0]
    bound = FunctionType(code, source.fn.__globals__, source.fn.__name__, source.fn.__defaults__)
    bound.__kwdefaults__ = source.fn.__kwdefaults__
    return bound
