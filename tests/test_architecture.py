"""Reads the code and holds it to its architecture: rooms, cycles, sizes, hidden imports, forks on compilation, facade.

`Tree` parses the sources under a root with `ast` and imports none of them. A check is a function from a tree to a list
of problems, one line each; `CHECKS` names them all. Each runs twice: on this repository, where it must find nothing,
and on the small trees of `BAD`, where it must find what was planted, since a check that cannot fail is worthless.

Invariants:
- `ROOMS` is the only table of who may import whom. A module that is not in it fails the test, so none slips past.
- Names under `if TYPE_CHECKING:` are no imports. A string or a call (`__import__`, `import_module`) does not hide one.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

pytestmark = pytest.mark.architecture

ROOT = Path(__file__).resolve().parents[1]
FACADE = "tdc"
FOUNDATIONS = ("core", "ragged", "tensordict")
MIDDLE = ("interop", "ops", "nn")
EDGES = ("optim", "io", "data", "dist", "viz", "testing")
BELOW_COMPILE = (*FOUNDATIONS, *MIDDLE)
ROOMS: dict[str, tuple[str, ...]] = {  # each room, and the rooms that it may import
    "core": (),
    **dict.fromkeys(("ragged", "tensordict"), ("core",)),
    **dict.fromkeys(MIDDLE, FOUNDATIONS),
    "compile": BELOW_COMPILE,
    **dict.fromkeys(EDGES, (*BELOW_COMPILE, "compile")),
    "demo": (*BELOW_COMPILE, "compile", *EDGES),
}
ROOT_FILES = ("__main__", "doctor", "migration")  # beside the facade; they may import any room
OUTSIDE_ALLOWED = ("compile", *EDGES, "demo", *ROOT_FILES)  # here a function may import an optional package
USERS = ("demo", *ROOT_FILES)  # and these may use the facade, as users do
REQUIRED = {"torch", "optree", FACADE}
MAX_FILE = 500
MAX_FUNCTION = 60
FORKS = {"is_compiling", "is_dynamo_compiling"}

IGNORE = re.compile(r"#\s*(?:type|pyright):\s*ignore(?:\[[^\]]*\])?(?P<reason>.*)")
MACHINE_PATH = re.compile(r"(?<![\w.])(?:/(?:home|root|Users|work|tmp)/\w|[A-Z]:\\+Users\b)")
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


def check_table(tree: Tree) -> list[str]:
    """Each module of tdc is in a room of the table, or is one of the few files of the root."""
    return [
        f"{module.path}: '{module.unit}' is not in ROOMS; give it a room in tests/test_architecture.py"
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
        if lines > MAX_FILE:
            problems.append(f"{path}: {lines} lines, {MAX_FILE} at most")
    for module in tree.modules.values():
        for node in functions(module):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION:
                problems.append(f"{module.path}:{node.lineno}: {node.name} has {lines} lines, {MAX_FUNCTION} at most")
    return problems


def check_hidden_imports(tree: Tree) -> list[str]:
    """Imports stand at the top, but for optional packages, which stand in functions of `compile` and the edges."""
    problems = []
    for name, module in tree.modules.items():
        for found in tree.imports[name]:
            top = found.module.partition(".")[0]
            optional = top not in REQUIRED and top not in sys.stdlib_module_names and top.isidentifier()
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


CHECKS: dict[str, Callable[[Tree], list[str]]] = {
    "table": check_table,
    "rooms": check_rooms,
    "cycles": check_cycles,
    "sizes": check_sizes,
    "hidden imports": check_hidden_imports,
    "forks": check_forks,
    "facade": check_facade,
    "ignores": check_ignores,
    "machine paths": check_machine_paths,
}


@pytest.fixture(scope="module")
def repository() -> Tree:
    return Tree(ROOT)


@pytest.mark.parametrize("check", CHECKS)
def test_repository(repository: Tree, check: str):
    assert repository.modules, "no module found: the check would pass on nothing"
    problems = CHECKS[check](repository)
    assert not problems, "\n".join(["", *problems])


# The checks themselves: a small sound tree, and what each check must say when one thing in it is wrong.

HEAD = '"""Doc."""\n'
SOUND = {
    "tdc/__init__.py": HEAD
    + "from .ops import relu as relu\nfrom .ragged.nested import (\n    NestedTensor as NestedTensor,\n)\n"
    + "__version__ = '0'\n__all__ = ['relu']\n",
    "tdc/core/__init__.py": HEAD,
    "tdc/core/errors.py": HEAD + "import torch\n",
    "tdc/core/keys.py": HEAD + "from .errors import KeyPathError\n",
    "tdc/ragged/nested.py": HEAD
    + "from typing import TYPE_CHECKING\nfrom ..core import keys\nimport tdc.core.errors\n"
    + "if TYPE_CHECKING:\n    from tdc.ops import join\n",
    "tdc/tensordict/nodes.py": HEAD + "from tdc.core.keys import x\n",
    "tdc/ops/__init__.py": HEAD + "from .pointwise import relu\nfrom . import join\n",
    "tdc/ops/join.py": HEAD + "from .pointwise import relu\nfrom ..ragged.nested import NestedTensor\n",
    "tdc/ops/pointwise.py": HEAD + "def relu(x):\n    return x  # type: ignore[return]  # torch has no stub\n",
    "tdc/compile/__init__.py": HEAD + "import torch\nforked = torch.compiler.is_compiling\n",
    "tdc/viz/plots.py": HEAD
    + "import tdc.ops as ops\n\ndef plot():\n    import matplotlib.pyplot as plt\n    return plt\n",
    "tdc/demo/__init__.py": HEAD + "import tdc\nfrom ..viz.plots import plot\n",
    "tdc/doctor.py": HEAD + "import tdc\nfrom tdc.demo import x\n",
    "tests/test_x.py": "import tdc\n",
    "README.md": "See https://example.org/home/ann and net/work/x.\n",
}
PLACEHOLDER = "/".join(["", "home", "ann", "data"])
LONG_FUNCTION = "def f():\n" + "    a = 1\n" * 60
BAD: tuple[tuple[str, str, str, str], ...] = (  # check, file, its new text, a part of the problem
    ("table", "tdc/helpers.py", HEAD, "'helpers' is not in ROOMS"),
    ("table", "tdc/extra/__init__.py", HEAD, "'extra' is not in ROOMS"),
    ("rooms", "tdc/core/errors.py", "from ..ragged.nested import NestedTensor", "'core' imports 'ragged'"),
    ("rooms", "tdc/ragged/nested.py", "from ..tensordict import nodes", "'ragged' imports 'tensordict'"),
    ("rooms", "tdc/tensordict/nodes.py", "import tdc.ragged.nested", "'tensordict' imports 'ragged'"),
    ("rooms", "tdc/core/errors.py", "import tdc.helpers", "imports 'helpers'"),
    ("rooms", "tdc/ops/join.py", "from ..compile import batch", "'ops' imports 'compile'"),
    ("rooms", "tdc/ops/join.py", "def f():\n    from tdc.viz.plots import plot", "'ops' imports 'viz'"),
    ("rooms", "tdc/ragged/nested.py", "from tdc import NestedTensor", "imports the facade"),
    ("rooms", "tdc/compile/__init__.py", "import tdc", "imports the facade"),
    ("cycles", "tdc/ops/pointwise.py", "from .join import cat", "pointwise -> tdc.ops.join -> tdc.ops.pointwise"),
    ("cycles", "tdc/ops/pointwise.py", "from . import relu", "tdc.ops -> tdc.ops.pointwise -> tdc.ops"),
    ("cycles", "tdc/core/errors.py", "import tdc", "import cycle"),
    ("sizes", "tdc/viz/plots.py", "a = 1\n" * 501, "tdc/viz/plots.py: 501 lines"),
    ("sizes", "tests/test_x.py", "a = 1\n" * 501, "tests/test_x.py: 501 lines"),
    ("sizes", "bench/speed.py", "a = 1\n" * 501, "bench/speed.py: 501 lines"),
    ("sizes", "tdc/viz/plots.py", LONG_FUNCTION, "f has 61 lines"),
    ("sizes", "tdc/viz/plots.py", "class A:\n  async " + LONG_FUNCTION.replace("\n", "\n  "), "f has 61 lines"),
    ("hidden imports", "tdc/ragged/nested.py", "def f():\n    import torch", "imports 'torch' in a function"),
    ("hidden imports", "tdc/ragged/nested.py", "def f():\n    import numpy", "imports 'numpy' in a function"),
    ("hidden imports", "tdc/viz/plots.py", "def f():\n    import json", "imports 'json' in a function"),
    (
        "hidden imports",
        "tdc/viz/plots.py",
        "def f():\n    from ..ragged.nested import x",
        "imports 'tdc.ragged.nested' in a function",
    ),
    (
        "hidden imports",
        "tdc/viz/plots.py",
        "class A:\n    async def f(self):\n        import torch",
        "'torch' in a function",
    ),
    (
        "hidden imports",
        "tdc/ragged/nested.py",
        "import importlib as i\ni.import_module('tdc.ops')",
        "'tdc.ops' in a fun",
    ),
    ("hidden imports", "tdc/viz/plots.py", "def f(name):\n    return __import__(name)", "imports '?' in a function"),
    ("hidden imports", "tdc/viz/plots.py", "import matplotlib", "imports 'matplotlib', an optional package"),
    (
        "hidden imports",
        "tdc/ragged/nested.py",
        "try:\n    import numpy\nexcept ImportError:\n    pass",
        "'numpy', an opt",
    ),
    ("forks", "tdc/ragged/nested.py", "import torch\nx = torch.compiler.is_compiling()", "is_compiling outside"),
    (
        "forks",
        "tdc/ragged/nested.py",
        "from torch.compiler import is_dynamo_compiling as busy",
        "is_dynamo_compiling outside",
    ),
    (
        "forks",
        "tdc/ragged/nested.py",
        "import torch\nx = getattr(torch.compiler, 'is_compiling')",
        "is_compiling outside",
    ),
    ("facade", "tdc/__init__.py", HEAD + "from .ops import relu\n__version__ = '0'", "from .ops import relu"),
    ("facade", "tdc/__init__.py", HEAD + "import torch\n__version__ = '0'", "import torch"),
    ("facade", "tdc/__init__.py", HEAD + "def f(): pass\n__version__ = '0'", "def f()"),
    ("facade", "tdc/__init__.py", HEAD + "from .ops import relu as relu", "no __version__"),
    ("facade", "tdc/__init__.py", "__version__ = '0'", "no docstring"),
    ("ignores", "tdc/ragged/nested.py", "x = 1  # type: ignore", "gives no reason"),
    ("ignores", "tests/test_x.py", "x = 1  # type: ignore[assignment]", "gives no reason"),
    ("ignores", "bench/speed.py", "x = 1  # pyright: ignore[reportX]", "gives no reason"),
    ("machine paths", "tdc/ragged/nested.py", f"x = '{PLACEHOLDER}'", "tdc/ragged/nested.py:1: machine path"),
    ("machine paths", "README.md", f"See {PLACEHOLDER}.", "README.md:1: machine path"),
    ("machine paths", ".ci/run", f"\ncd {PLACEHOLDER}", ".ci/run:2: machine path"),
)


def grow(root: Path, files: dict[str, str]) -> Tree:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return Tree(root)


@pytest.mark.parametrize("check", CHECKS)
def test_sound_tree_passes(tmp_path: Path, check: str):
    assert CHECKS[check](grow(tmp_path, SOUND)) == []


@pytest.mark.parametrize(("check", "path", "text", "problem"), BAD, ids=[f"{b[0]}-{n}" for n, b in enumerate(BAD)])
def test_planted_fault_is_found(tmp_path: Path, check: str, path: str, text: str, problem: str):
    found = CHECKS[check](grow(tmp_path, SOUND | {path: text}))
    assert [line for line in found if problem in line], f"nothing says {problem!r}: {found}"


def test_every_check_has_a_planted_fault():
    assert {bad[0] for bad in BAD} == set(CHECKS)


def test_empty_tree_has_no_facade(tmp_path: Path):
    assert check_facade(grow(tmp_path, {"tests/test_x.py": ""})) == ["tdc/__init__.py: missing"]


# What `import tdc` loads, in a process of its own.

HEAVY = ("torch._dynamo", "torch._inductor", "torch.onnx", "matplotlib", "numpy", "pandas", "triton", "sympy")
REPORT = "print('modules:', *sorted(sys.modules))"


def loaded(statement: str) -> set[str]:
    command = [sys.executable, "-W", "error", "-c", f"import sys\n{statement}\n{REPORT}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.rpartition("modules:")[2].split())


def test_import_is_silent_and_light():
    torch_alone = loaded("import torch")
    added = loaded("import torch, tdc") - torch_alone
    assert "tdc" in added
    assert [name for name in sorted(added) if name.startswith(HEAVY)] == []
    third_party = {name.partition(".")[0] for name in added} - set(sys.stdlib_module_names)
    assert third_party <= {"tdc", "optree", "torch"}


def test_loaded_sees_what_is_heavy():
    assert "torch._dynamo" in loaded("import torch, torch._dynamo") - loaded("import torch")


def test_loaded_fails_on_a_warning():
    with pytest.raises(AssertionError, match="UserWarning: noisy"):
        loaded("import warnings; warnings.warn('noisy')")
