"""Holds this repository to its architecture, and what `import tdc` does to the process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tdc.core.torch_functions import LEFT_OUT

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


@pytest.mark.slow
def test_loaded_sees_what_is_heavy():
    assert "torch._dynamo" in loaded("import torch, torch._dynamo") - loaded("import torch")


def test_loaded_fails_on_a_warning():
    with pytest.raises(AssertionError, match="UserWarning: noisy"):
        loaded("import warnings; warnings.warn('noisy')")


# What `import tdc` leaves as it was.

STATE = """
import gc, os, signal, sys, threading, warnings, torch
def state():
    known = torch.overrides.get_overridable_functions()
    return {
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks)),
        "warnings": list(warnings.filters),
        "environment": dict(os.environ),
        "hooks": (sys.excepthook, sys.displayhook, list(sys.meta_path), list(sys.path_hooks), list(sys.path)),
        "threads": (threading.active_count(), torch.get_num_threads(), signal.getsignal(signal.SIGINT)),
        "torch": (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.initial_seed()),
        "generator": torch.get_rng_state().tolist(),
        "torch's names": [sorted(vars(x)) for x in (torch, torch.Tensor, torch.nn.functional, torch.nn.Module)],
        "torch's functions": sorted(f"{m.__name__}.{f.__name__}" for m, fs in known.items() for f in fs
                                    if hasattr(m, "__name__") and hasattr(f, "__name__")),
    }
before = state()
"""
COMPARE = """
after = state()
print("changed:", [name for name in before if before[name] != after[name]])
print("functions:", [f for f in after["torch's functions"] if f not in before["torch's functions"]])
"""


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_changes_nothing_but_the_functions_that_torch_hands_on():
    left_out = {f"{module.__name__}.{op.__name__}" for module, ops in LEFT_OUT.items() for op in ops}
    changed, functions = run(f"{STATE}\nimport tdc\n{COMPARE}").splitlines()
    assert changed == """changed: ["torch's functions"]"""
    added = set(re.findall(r"'([^']+)'", functions))
    assert {name for name in added if not name.startswith("torch.masked.")} <= left_out


def test_an_import_that_fails_half_way_changes_nothing_either():
    broken = "sys.modules['tdc.optim'] = None\ntry: import tdc\nexcept ImportError: pass\nelse: raise SystemExit(1)"
    changed = run(f"{STATE}\n{broken}\n{COMPARE}").splitlines()[0]
    assert changed in ("changed: []", """changed: ["torch's functions"]""")


def test_a_changed_state_is_seen():
    assert "'gc'" in run(f"{STATE}\ngc.disable()\n{COMPARE}")
    assert "'warnings'" in run(f"{STATE}\nwarnings.simplefilter('ignore')\n{COMPARE}")
    more = "torch.overrides.get_overridable_functions()[torch].append(torch.abs_)"
    assert "torch.abs_" in run(f"{STATE}\n{more}\n{COMPARE}")


# Tests that are fast by their mark are fast by the clock.

LONG = {  # files with a fast test of more than five seconds, and why it is fast all the same
    "dist/test_dist.py": "one start of two processes for all collectives and kinds of structures",
    "laws/test_conformance.py": "one graph of the rows that stand for all families",
}


def test_no_fast_test_takes_long():
    rows = re.findall(r"^\| (\S+\.py) \|[^|]*\|[^|]*\| ([\d.]+) \|", (ROOT / "tests/durations.md").read_text(), re.M)
    assert len(rows) > 100, "no table found: the check would pass on nothing"
    assert {path for path, longest in rows if float(longest) > 5} <= {*LONG}
