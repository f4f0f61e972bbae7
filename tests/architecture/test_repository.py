"""Holds this repository to its architecture, and what `import tdc` does to the process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .checks import CHECKS, ROOMS
from .tree import Tree

pytestmark = pytest.mark.architecture

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def repository() -> Tree:
    return Tree(ROOT)


@pytest.mark.parametrize("check", CHECKS)
def test_repository(repository: Tree, check: str):
    assert repository.modules, "no module found: the check would pass on nothing"
    problems = CHECKS[check](repository)
    assert not problems, "\n".join(["", *problems])


def rooms_as_text() -> list[str]:
    """The rows of the table of rooms, one for rooms that may import the same."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for room, below in ROOMS.items():
        groups.setdefault(below, []).append(f"`{room}`")
    names = [", ".join([f"`{room}`" for room in below]) or "nothing else of tdc" for below in groups]
    return [f"| {', '.join(rooms)} | {text} |" for rooms, text in zip(groups.values(), names, strict=True)]


def test_contributing_has_the_table_of_rooms():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `.*\|$", text.partition("## Rooms")[2].partition("\n## ")[0], re.MULTILINE)
    assert rows == rooms_as_text()


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
