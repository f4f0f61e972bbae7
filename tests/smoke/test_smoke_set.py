"""The smoke set names tests that exist: it is run only where the newest torch can be installed."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SET = ROOT / ".ci" / "smoke.txt"  # a file of arguments: python -m pytest @.ci/smoke.txt


def missing(line: str) -> str:
    """Return the first name of a node id that is not there, or an empty text."""
    path, *names = line.partition("[")[0].split("::")
    if not (ROOT / path).is_file():
        return path
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    for name in names:
        found = [node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name]
        if not found:
            return name
        body = found[0].body
    return ""


def test_every_test_exists():
    lines = SET.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len({*lines})
    assert {line: name for line in lines if (name := missing(line))} == {}


def test_a_missing_test_is_found():
    here = "tests/smoke/test_smoke_set.py"
    assert missing(f"{here}::test_every_test_exists[x]") == ""
    assert missing(f"{here}::TestNothing::test_x") == "TestNothing"
    assert missing("tests/smoke/test_nothing.py") == "tests/smoke/test_nothing.py"
