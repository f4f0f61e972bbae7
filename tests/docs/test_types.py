"""Type checkers on code as users write it: what must pass passes, and what must be an error is one, of its kind."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "tests" / "typing").glob("*.py"))
EXPECTED = re.compile(r"# expect: (\S+) (\S+)$")
Found = dict[int, set[str]]


def expected(path: Path, checker: int) -> Found:
    """Rules by line, as the comments of a file say; pyright is checker 1, mypy checker 2."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    return {n: set(match[checker].split(",")) for n, line in lines if (match := EXPECTED.search(line))}


def run(*args: str) -> str:
    command = [sys.executable, "-m", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def pyright(path: Path) -> Found:
    found: Found = {}
    report = json.loads(run("pyright", "--pythonpath", sys.executable, "--outputjson", str(path)))
    for problem in report["generalDiagnostics"]:
        found.setdefault(problem["range"]["start"]["line"] + 1, set()).add(problem["rule"])
    return found


def mypy(path: Path, cache: Path) -> Found:
    found: Found = {}
    for line in run("mypy", "--output", "json", "--cache-dir", str(cache), str(path)).splitlines():
        if line.startswith("{"):
            problem = json.loads(line)
            if problem["severity"] == "error" and Path(problem["file"]).name == path.name:
                found.setdefault(problem["line"], set()).add(problem["code"])
    return found


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_pyright(path: Path):
    assert pyright(path) == expected(path, 1)


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_mypy(path: Path, tmp_path: Path):
    assert mypy(path, tmp_path) == expected(path, 2)


@pytest.mark.sweep
def test_an_error_is_found(tmp_path: Path):
    path = tmp_path / "page.py"
    path.write_text("x: int = 'a'\ny: str = 'b'\n", encoding="utf-8")
    assert pyright(path) == {1: {"reportAssignmentType"}}
    path.write_text("x: int = 'a'  # expect: one,two three\n", encoding="utf-8")
    assert expected(path, 1) == {1: {"one", "two"}}
    assert expected(path, 2) == {1: {"three"}}
