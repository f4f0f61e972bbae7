"""Benchmarks that run themselves in several processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def of_rank_0(name: str, world: int, times: int) -> Any:
    """Run `python -m bench.name --worker rank world store out times` on each rank, and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        given = [str(world), f"{folder}/store", f"{folder}/out", str(times)]
        command = [sys.executable, "-m", f"bench.{name}", "--worker"]
        workers = [subprocess.Popen([*command, str(rank), *given]) for rank in range(world)]
        try:
            for process in workers:
                process.wait(timeout=500)
        finally:
            for process in workers:
                process.kill()
        return json.loads(Path(f"{folder}/out").read_text())
