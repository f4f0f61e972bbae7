"""The examples run as a user runs them, learn what they are for, and are one graph each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "train", "ensemble", "actor_critic", "batch/adaptive_computation", "batch/ctc", "batch/decoding",
        "batch/environment", "batch/newton", "batch/tree_lstm",
    ],
)  # fmt: skip
def test_example(name: str):
    command = [sys.executable, "-W", "error::UserWarning:tdc", f"examples/{name}.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert run.returncode == 0, run.stderr
    assert "graphs 1, breaks 0, compiles 1" in run.stdout
