"""Reads the sources under a root with `ast`, and imports none of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

FACADE = "tdc"
TEXTS = ("Makefile", "pyproject.toml", "constraints.txt", "*.md", ".ci/*")


@dataclass(frozen=True)
class Import:
    """One imported module: an absolute name, its line, and whether a function or `if TYPE_CHECKING:` surrounds it."""

    module: str
    line: int
    hidden: bool
    typing_only: bool


@dataclass(frozen=True)
class Module:
    """One source file: dotted name, path relative to the root, text, syntax tree."""

    name: str
    path: str
    text: str
    tree: ast.Module = field(repr=False)

    @property
    def unit(self) -> str:
        """The room, or the file of the root, that the module is: `tdc.ops.join` is in `ops`, the facade in ``."""
        return self.name.partition(".")[2].partition(".")[0]


class Tree:
    """The sources under a root: modules of `tdc` by name, all Python files of tdc, tests and bench, and texts."""

    def __init__(self, root: Path):
        self.root = root
        self.files = {
            path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
            for folder in ("tdc", "tests", "bench")
            for path in sorted((root / folder).rglob("*.py"))
        }
        texts = [path for pattern in TEXTS for path in sorted(root.glob(pattern)) if path.is_file()]
        self.texts = self.files | {p.relative_to(root).as_posix(): p.read_text(encoding="utf-8") for p in texts}

    @cached_property
    def modules(self) -> dict[str, Module]:
        found = {}
        for path, text in self.files.items():
            if path.startswith("tdc/"):
                name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
                found[name] = Module(name, path, text, ast.parse(text, path))
        return found

    @cached_property
    def imports(self) -> dict[str, list[Import]]:
        return {name: list(self._imports(module)) for name, module in self.modules.items()}

    def _imports(self, module: Module) -> Iterator[Import]:
        for node, hidden, typing_only in walk(module.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = absolute(module, node)
                # `from .a import b` is the module b where there is one, else a name of a.
                names = [f"{base}.{a.name}" if f"{base}.{a.name}" in self.modules else base for a in node.names]
            elif isinstance(node, ast.Call) and name_of(node.func) in {"__import__", "import_module"}:
                literal = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else "?"
                names, hidden = [str(literal)], True
            else:
                continue
            for name in dict.fromkeys(names):
                yield Import(name, node.lineno, hidden, typing_only)

    def edges(self, name: str) -> Iterator[tuple[str, int]]:
        """The modules of tdc that one module imports when it is loaded or called."""
        for found in self.imports[name]:
            if not found.typing_only and found.module.partition(".")[0] == FACADE:
                yield found.module, found.line


def absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.name.split(".")
    drop = node.level - module.path.endswith("__init__.py")
    return ".".join(package[: len(package) - drop] + ([node.module] if node.module else []))


def walk(node: ast.AST, hidden: bool = False, typing_only: bool = False) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Every node, with whether it lies in a function and whether it lies in the body of `if TYPE_CHECKING:`."""
    yield node, hidden, typing_only
    inside = hidden or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    guard = isinstance(node, ast.If) and name_of(node.test) == "TYPE_CHECKING"
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from walk(child, inside, typing_only or (guard and name == "body"))


def name_of(node: ast.AST) -> str:
    """The last name of `a`, `x.a` or `from x import a`; empty for anything else."""
    return getattr(node, "attr", None) or getattr(node, "id", None) or ""


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
