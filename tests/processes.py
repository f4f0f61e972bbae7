"""Scripts that several processes run at once, for what they exchange."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist


def run_processes(
    script: Path, arguments: Callable[[int], Sequence[str]], world: int, limit: float = 240
) -> list[str]:
    """Run a script in so many processes with the arguments of each rank. Returns what each wrote to stderr.

    Args:
        limit: seconds for each, after which all are killed.

    Raises:
        AssertionError: one of them failed.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments(rank)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    try:
        errors = [process.communicate(timeout=limit)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world, "\n".join(errors)
    return [own_lines(text) for text in errors]


def own_lines(text: str) -> str:
    """Leave out the line that a torch for CUDA logs where it finds CUDA's compiler and no device."""
    return "".join(line for line in text.splitlines(True) if "No CUDA runtime is found" not in line)


def leave(dead: bool = False) -> None:
    """End a process of several, without the destructors of torch 2.13: now and then they find a thread of gloo that
    still runs, and abort."""
    if not dead:  # a group that failed
        dist.barrier()  # a process that leaves early takes the connection of the others along
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":  # processes.py PROGRAM ARGUMENTS: run a program as it stands, and leave as above
    sys.argv.pop(0)
    runpy.run_path(sys.argv[0], run_name="__main__")
    leave(dead=True)
