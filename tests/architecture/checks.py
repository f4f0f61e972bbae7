"""Checks of the code: rooms, cycles, sizes, hidden imports, forks on compilation, private parts of torch, language.

A check is a function from a tree to a list of problems, one line each; `CHECKS` names them all. Each runs twice: on
this repository, where it must find nothing, and on small trees with planted faults, since a check that cannot fail is
worthless.

Invariants:
- `ROOMS` is the only table of who may import whom. A module that is not in it fails the test, so none slips past.
- Names under `if TYPE_CHECKING:` are no imports. A string or a call (`__import__`, `import_module`) does not hide one.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable

from .internals import check_internals
from .language import check_language
from .pages import check_pages
from .tree import FACADE, Tree, functions, name_of

FOUNDATIONS = ("core", "layout", "kernels", "ragged", "tensordict")
MIDDLE = ("interop", "ops", "nn")
EDGES = ("optim", "io", "viz", "testing", "hf", "einops")
BELOW_COMPILE = (*FOUNDATIONS, *MIDDLE)
ROOMS: dict[str, tuple[str, ...]] = {  # each room, and the rooms that it may import
    "core": (),
    "layout": ("core",),
    "kernels": ("core", "layout"),
    **dict.fromkeys(("ragged", "tensordict"), ("core", "layout")),
    **dict.fromkeys(MIDDLE, FOUNDATIONS),
    "nn": (*FOUNDATIONS, "ops"),
    "compile": BELOW_COMPILE,
    "autobatch": (*BELOW_COMPILE, "compile"),
    **dict.fromkeys(EDGES, (*BELOW_COMPILE, "compile", "autobatch")),
    "data": (*BELOW_COMPILE, "compile", "autobatch", "io"),  # it opens stores
    "dist": (*BELOW_COMPILE, "compile", "autobatch", "io"),  # schemas are manifests of stores
}
ROOT_FILES = ("__main__", "doctor", "migration")  # beside the facade; they may import any room
OUTSIDE_ALLOWED = ("compile", *EDGES, "data", "dist", *ROOT_FILES)  # here a function may import an optional package
EXTRAS = "tdc.core.extras"  # which imports the optional package that it is told
USERS = ROOT_FILES  # and these may use the facade, as users do
REQUIRED = {"torch", "optree", FACADE}
STANDARD = {*sys.stdlib_module_names, "annotationlib"}  # of any Python that tdc runs on: 3.14 has that
MAX_LINES = 500
MAX_FUNCTION = 60
FORKS = {"is_compiling", "is_dynamo_compiling"}

IGNORE = re.compile(r"#\s*(?:type|pyright):\s*ignore(?:\[[^\]]*\])?(?P<reason>.*)")
MACHINE_PATH = re.compile(r"(?<![\w.])(?:/(?:home|root|Users|work|tmp)/\w|[A-Z]:\\+Users\b)")


def check_table(tree: Tree) -> list[str]:
    """Each module of tdc is in a room of the table, or is one of the few files of the root."""
    return [
        f"{module.path}: '{module.unit}' is not in ROOMS; give it a room in tests/architecture/checks.py"
        for module in tree.modules.values()
        if module.name != FACADE and module.unit not in ((*ROOMS,) if module.path.count("/") > 1 else ROOT_FILES)
    ]


def check_rooms(tree: Tree) -> list[str]:
    """A module imports from its own room and from those its room may import; only users import the facade."""
    problems = []
    for name, module in tree.modules.items():
        if name == FACADE or module.unit in ROOT_FILES:
            continue
        allowed = (module.unit, *ROOMS.get(module.unit, ()))
        for target, line in tree.edges(name):
            unit = target.partition(".")[2].partition(".")[0]
            if target == FACADE:
                if module.unit not in USERS:
                    problems.append(f"{module.path}:{line}: imports the facade, which only {', '.join(USERS)} may")
            elif unit not in allowed:
                problems.append(f"{module.path}:{line}: '{module.unit}' imports '{unit}', which its room may not")
    return problems


def check_cycles(tree: Tree) -> list[str]:
    """No module reaches itself through imports."""
    problems, done, path = [], set(), []

    def visit(name: str) -> None:
        if name in path:
            problems.append("import cycle: " + " -> ".join([*path[path.index(name) :], name]))
        elif name not in done and name in tree.modules:
            path.append(name)
            for target in dict.fromkeys(target for target, _ in tree.edges(name)):
                visit(target)
            done.add(path.pop())

    for name in tree.modules:
        visit(name)
    return problems


def check_sizes(tree: Tree) -> list[str]:
    """No file over 500 lines; in tdc no function over 60, its docstring included."""
    problems = []
    for path, text in tree.files.items():
        lines = len(text.splitlines())
        if lines > MAX_LINES:
            problems.append(f"{path}: {lines} lines, {MAX_LINES} at most")
    for module in tree.modules.values():
        for node in functions(module):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION:
                problems.append(f"{module.path}:{node.lineno}: {node.name} has {lines} lines, {MAX_FUNCTION} at most")
    return problems


def check_hidden_imports(tree: Tree) -> list[str]:
    """Imports stand at the top, but for optional packages, which stand in functions of `compile` and the edges, or
    are asked for by `core.extras`."""
    problems = []
    for name, module in tree.modules.items():
        if name == EXTRAS:
            continue
        for found in tree.imports[name]:
            top = found.module.partition(".")[0]
            optional = top not in REQUIRED and top not in STANDARD and top.isidentifier()
            where = f"{module.path}:{found.line}"
            if found.typing_only:
                continue
            if found.hidden and not (optional and module.unit in OUTSIDE_ALLOWED):
                problems.append(f"{where}: imports '{found.module}' in a function or by a call")
            elif not found.hidden and optional:
                problems.append(f"{where}: imports '{found.module}', an optional package, when tdc is imported")
    return problems


def check_forks(tree: Tree) -> list[str]:
    """Code that asks whether it is being compiled is two programs; only tdc/compile may."""
    problems = []
    for module in tree.modules.values():
        if module.unit == "compile":
            continue
        for node in ast.walk(module.tree):
            names = {name_of(node), getattr(node, "value", None) if isinstance(node, ast.Constant) else None}
            names |= {getattr(node, "name", None)} if isinstance(node, ast.alias) else set()
            for name in sorted(FORKS.intersection(n for n in names if isinstance(n, str))):
                problems.append(f"{module.path}:{getattr(node, 'lineno', 0)}: {name} outside tdc/compile")
    return problems


def check_facade(tree: Tree) -> list[str]:
    """`tdc/__init__.py` is a docstring, `from .x import name as name` lines, `__version__` and `__all__`."""
    facade = tree.modules.get(FACADE)
    if facade is None:
        return ["tdc/__init__.py: missing"]
    problems = [] if ast.get_docstring(facade.tree) else [f"{facade.path}: no docstring"]
    body = facade.tree.body[1:] if ast.get_docstring(facade.tree) else facade.tree.body
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            plain = all(alias.name == alias.asname for alias in node.names)
        else:
            target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
            plain = target is not None and name_of(target) in {"__version__", "__all__"}
        if not plain:
            problems.append(f"{facade.path}:{node.lineno}: not `from .x import name as name`: {ast.unparse(node)[:60]}")
    if not any(isinstance(node, ast.Assign) and name_of(node.targets[0]) == "__version__" for node in body):
        problems.append(f"{facade.path}: no __version__")
    return problems


def check_ignores(tree: Tree) -> list[str]:
    """A silenced type checker says why, after the brackets."""
    problems = []
    for path, text in tree.files.items():
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            match = IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
            if match and not re.search(r"\w{3}", match["reason"]):
                problems.append(f"{path}:{token.start[0]}: '{token.string}' gives no reason")
    return problems


def check_machine_paths(tree: Tree) -> list[str]:
    """No path of one machine in code or texts."""
    return [
        f"{path}:{number}: machine path '{match.group()}…'"
        for path, text in tree.texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if (match := MACHINE_PATH.search(line))
    ]


def check_test_names(tree: Tree) -> list[str]:
    """Files of tests have names of their own: pytest imports all that are in no package as modules of the top."""
    found: dict[str, list[str]] = {}
    for path in tree.files:
        folder, _, name = path.rpartition("/")
        if path.startswith("tests/") and f"{folder}/__init__.py" not in tree.files:
            found.setdefault(name, []).append(path)
    return [f"{' and '.join(paths)} have one name: rename one" for paths in found.values() if len(paths) > 1]


CHECKS: dict[str, Callable[[Tree], list[str]]] = {
    "table": check_table,
    "rooms": check_rooms,
    "cycles": check_cycles,
    "sizes": check_sizes,
    "hidden imports": check_hidden_imports,
    "forks": check_forks,
    "facade": check_facade,
    "internals": check_internals,
    "ignores": check_ignores,
    "language": check_language,
    "pages": check_pages,
    "machine paths": check_machine_paths,
    "test names": check_test_names,
}
