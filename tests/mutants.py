"""Mutation testing of the rules: one small fault at a time, and do the tests find it?

    python tests/mutants.py --count 50 --seed 0 --within tdc/ops

A mutant is one change in the syntax tree of one file of tdc/ops, tdc/ragged or tdc/tensordict: a comparison, a number,
`and` for `or`, two arguments exchanged, a call left out. Each mutant of a seeded sample runs in a process of its own,
forked from one that has imported torch: the file is compiled from the changed tree, so that nothing is written to disk.
First the rows of the conformance matrix that the file serves are checked, eagerly and with gradients, and the nearest
ones in graphs; then whether the table of rows is as it was, derivatives of derivatives are right, errors say what
they said and inputs stay as they are; then the tests of its name, its folder, its public functions and its rows; until
one fails.

No mutants are made of what cannot change a result on a CPU, by these rules alone:

- annotations, `if TYPE_CHECKING:`, and `strict=` of `zip`;
- the words of errors: `raise`, functions that return an error, calls of `message` and `describe`, variables such as
  `hint`, and `op=`, which is everywhere the name that an error says;
- what only a GPU needs: `device=` left out, `on_host` left out;
- the two arguments of `max`, `min` and `torch.equal` exchanged.

killed      a test fails, or tdc does not import        survived    all pass: a test is missing, or nothing changed
slow        no answer in time: an endless loop, or a file of many tests

What kills is named. It passes without the mutant only if the tests do: run them before.

The tools there are do not fit: mutmut calls every function through a trampoline, which Dynamo does not trace as it does
the function; cosmic-ray writes each mutant into the working tree and has one list of tests for all files.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch  # noqa: F401  # before processes are forked

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tdc/ops", "tdc/ragged", "tdc/tensordict")
WORDS = {"hint", "got", "expected", "text"}  # names of what an error says
SAYS = {"message", "describe", "show", "show_sizes"}  # functions of words
KEPT = {"strict", "op", "device", *WORDS}  # keywords that are not left out
EITHER = {"max", "min", "equal"}  # functions of two arguments in any order
FAST = "not slow and not sweep"
ROWS, TRACED = 120, 12  # of the matrix, at most, for one file: in eager mode, and the nearest in graphs
ALWAYS = [
    str(ROOT / "tests/docs/test_readme.py::test_support_table_is_up_to_date"),
    str(ROOT / "tests/laws/test_derivatives.py"),
    str(ROOT / "tests/errors"),
    str(ROOT / "tests/ops/test_inplace.py"),
]
SWAPS: dict[type, type] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change: the file, where it is, and the texts before and after."""

    path: str
    line: int
    before: str
    after: str
    tree: ast.Module


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of a node."""
    new: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        new.ops = [SWAPS[type(node.ops[0])]()]
        yield new
        if isinstance(node.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE)):  # off by one
            other = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}[type(node.ops[0])]
            yield ast.Compare(node.left, [other()], node.comparators)
    elif isinstance(node, (ast.BoolOp, ast.BinOp)) and type(node.op) in SWAPS:
        new.op = SWAPS[type(node.op)]()
        yield new
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield new.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        yield ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(new.test, new.orelse, new.body)
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        plain = len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args[:2])
        if plain and name not in EITHER and ast.dump(node.args[0]) != ast.dump(node.args[1]):
            yield ast.Call(new.func, [new.args[1], new.args[0], *new.args[2:]], new.keywords)
        if isinstance(node.func, ast.Attribute) and not isinstance(node.func.value, ast.Name):
            yield new.func.value  # the call of a method, left out
        elif len(node.args) == 1 and not (node.keywords or isinstance(node.args[0], ast.Starred) or name == "on_host"):
            yield new.args[0]
        for keyword in [k for k in new.keywords if k.arg not in KEPT]:
            yield ast.Call(new.func, new.args, [k for k in new.keywords if k is not keyword])


def places(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Every expression that may change, as its parent, the field and the index in it."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for i, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or is_without_effect(child):
                continue
            if isinstance(child, ast.expr) and not (isinstance(node, ast.Expr) and isinstance(child, ast.Constant)):
                yield node, field, i
            yield from places(child)


def is_without_effect(node: ast.AST) -> bool:
    """Whether a node changes no result on a CPU: words of errors, and what type checkers alone read."""
    if isinstance(node, ast.Assign):
        return any(isinstance(t, ast.Name) and t.id in WORDS for target in node.targets for t in ast.walk(target))
    if isinstance(node, ast.FunctionDef):
        return node.returns is not None and ast.unparse(node.returns).endswith("Error")
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in SAYS
    if isinstance(node, ast.keyword):
        return node.arg == "strict"
    return isinstance(node, (ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr))


def mutants(path: str) -> Iterator[Callable[[], Mutant]]:
    """All mutants of a file, each made when it is wanted."""
    tree = ast.parse((ROOT / path).read_text())
    for number, (parent, field, i) in enumerate(places(tree)):
        node = getattr(parent, field) if i is None else getattr(parent, field)[i]
        for which in range(len(list(changes(node)))):
            yield lambda number=number, which=which: one(path, number, which)


def one(path: str, number: int, which: int) -> Mutant:
    """The mutant of a place and a change."""
    tree = ast.parse((ROOT / path).read_text())
    parent, field, i = list(places(tree))[number]
    node: Any = getattr(parent, field) if i is None else getattr(parent, field)[i]
    new = list(changes(node))[which]
    before, after, line = ast.unparse(node), ast.unparse(new), node.lineno
    if i is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[i] = new
    return Mutant(path, line, before, after, ast.fix_missing_locations(tree))


# -- one mutant in a process of its own


def put_in_place(mutant: Mutant) -> None:
    """Have the file compiled from the changed tree when it is imported."""
    own, path = SourceFileLoader.get_code, str(ROOT / mutant.path)

    def get_code(self: SourceFileLoader, name: str) -> Any:
        found = self.get_filename(name)
        return compile(mutant.tree, path, "exec") if os.path.realpath(found) == path else own(self, name)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]  # in this process alone


def distances(path: str) -> dict[str, int]:
    """By the name of a module of tdc, how many imports lead from it to a file; 0 for the file and its room in ops."""
    users: dict[str, set[str]] = {}
    for p in (ROOT / "tdc").rglob("*.py"):
        for node in ast.walk(ast.parse(p.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and p.stem != "__init__":
                for used in (node.module.rpartition(".")[2], *[alias.name for alias in node.names]):
                    users.setdefault(used, set()).add(p.stem)
    found = {Path(path).stem: 0} | dict.fromkeys(Path(path).parts[2:-1], 0)
    queue = [Path(path).stem]
    for name in queue:  # grows
        for user in sorted(users.get(name, set()) - found.keys()):
            found[user] = found[name] + 1
            queue.append(user)
    return found


def failing_row(path: str, rng: random.Random) -> str:
    """The first row of those a file serves that is not the loop over examples; empty where all are."""
    from catalogue import samples
    from harness import check

    from tdc.core.rules import RULES

    near = distances(path)
    live = [rule for rule in RULES if not rule.reason and ("tensordict" not in path or rule.kind == "tensordict")]
    rng.shuffle(live)
    live.sort(key=lambda r: min(near.get(n, 99) for n in (r.family, *module_of(r.impl).split(".")[2:])))
    own = {id(rule) for rule in rows_of(path)}
    live.sort(key=lambda r: id(r) not in own)  # its own come first
    cells = [(rule, mode) for rule in live[:ROWS] for mode in ("eager", "grad")]
    cells += [(rule, mode) for rule in live[:TRACED] for mode in ("compile", "vmap")]
    for rule, mode in [(rule, mode) for rule, mode in cells if mode in rule.modes]:
        some = [sample for sample in samples(rule) if mode in sample.modes]
        try:
            check(rule, some[:1] if mode == "compile" else some, mode)
        except BaseException as error:
            return f"{rule}, {mode}: {type(error).__name__}"
    return ""


def module_of(impl: Any) -> str:
    """The module of an implementation, of a partial one that of its function."""
    return getattr(impl, "func", impl).__module__


def files_of_tests(path: str) -> list[str]:
    """Files of tests for a file: those of its name, of its folder (in ops of what imports it), of its public names."""
    near, folder = distances(path), Path(path).parts[1]
    tests = {p: min(near.get(word, 99) for word in p.stem.split("_")[1:]) for p in (ROOT / "tests").rglob("test_*.py")}
    own = [p for p, far in tests.items() if far <= (folder == "ops")]
    rest = sorted((ROOT / "tests" / folder).glob("test_*.py")) if folder != "ops" else []
    defined = [node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)]
    public = [name for name in defined if f"import {name} as {name}" in (ROOT / "tdc/__init__.py").read_text()]
    rows = [rule.name for rule in rows_of(path)]
    users = [p for p in sorted(tests) if calls(p, public) or (p.parent.name == "ops" and calls(p, rows))]
    return [*ALWAYS, *[str(p) for p in dict.fromkeys([*sorted(own, key=lambda p: (tests[p], p)), *rest, *users])]]


def calls(path: Path, names: list[str]) -> bool:
    """True if a file calls a function of one of these names."""
    text = path.read_text()
    return any([re.search(rf"\b{name}\(", text) for name in names])


def rows_of(path: str) -> list[Any]:
    """The rows whose family or implementation is in a file."""
    from tdc.core.rules import RULES

    return [r for r in RULES if Path(path).stem in (r.family, module_of(r.impl).rpartition(".")[2])]


class FirstFailure:
    """A plugin of pytest that keeps the name of the test that failed."""

    name = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.name = self.name or (report.nodeid if report.failed else "")


def verdict(mutant: Mutant, seed: int) -> str:
    """What finds a mutant, in the process that it is in; empty where nothing does."""
    put_in_place(mutant)
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    try:
        found = failing_row(mutant.path, random.Random(seed))
    except BaseException as error:
        return f"import: {type(error).__name__}"
    if found:
        return found
    tests = files_of_tests(mutant.path)
    first, options = FirstFailure(), ["-x", "-q", "-m", FAST, "-p", "no:cacheprovider", "-p", "no:xdist"]
    status = pytest.main([*options, *tests], plugins=[first]) if tests else 0
    return "" if status in (0, 5) else first.name or "tests cannot be collected"


def outcome(mutant: Mutant, seed: int, limit: float) -> tuple[str, float]:
    """Fork, and wait for the verdict."""
    read, write = os.pipe()
    begin, child = time.monotonic(), os.fork()
    if child == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.write(write, (verdict(mutant, seed) or "survived").encode())
        os._exit(0)
    os.close(write)
    ready = select.select([read], [], [], limit)[0]
    found = os.read(read, 200).decode() or "the process ended" if ready else "slow"
    if not ready:
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    return found, time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutation testing of the rules.")
    parser.add_argument("--count", type=int, default=50, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one mutant")
    parser.add_argument("--within", nargs="*", default=FOLDERS, help="folders or files")
    parser.add_argument("--list", action="store_true", help="list the sample, and test nothing")
    args = parser.parse_args()
    files = [ROOT / within for within in args.within]
    found = [p for file in files for p in ([file] if file.suffix else file.rglob("*.py"))]
    paths = sorted({str(p.relative_to(ROOT)) for p in found})
    everything = [make for path in paths for make in mutants(path)]
    sample = [make() for make in random.Random(args.seed).sample(everything, min(args.count, len(everything)))]
    print(f"{len(sample)} of {len(everything)} mutants of {len(paths)} files, seed {args.seed}", flush=True)
    counts: dict[str, int] = {"killed": 0, "slow": 0, "survived": 0}
    for m in sample:
        found, seconds = ("listed", 0.0) if args.list else outcome(m, args.seed, args.limit)
        kind = found if found in counts else "killed"
        counts[kind] += 1
        print(f"{kind:9}{seconds:5.0f} s  {m.path}:{m.line}  {m.before}  ->  {m.after}  ({found})", flush=True)
        if kind == "survived":
            print(f"{'':18}{(ROOT / m.path).read_text().splitlines()[m.line - 1].strip()}", flush=True)
    print(", ".join(f"{name} {count}" for name, count in counts.items()), f"of {len(sample)}")


if __name__ == "__main__":
    main()
