"""The workloads of `bench.gpu` on CUDA tensors without data: they run, wait for nothing, and make one graph.

What has a gradient needs a GPU, and so do peers. With `--dry` the program itself runs on the CPU: each cell of padded
and tdc, eager, compiled and filled, gives the same numbers.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import fake_cuda, fake_methods, on_fake_cuda
from torch import Tensor, nn

import tdc
from bench import gpu
from bench._gpu_turns import Clock, Job
from bench._gpu_workloads import PARTS, Candidate, Setup, Workload
from tdc.testing import forbid

CANDIDATES = ("padded", "raw", "tdc")
DTYPES = (torch.bfloat16, torch.float32)


class Traced(Exception):
    """A graph would run."""


def workloads(part: str, dtype: torch.dtype) -> list[Workload]:
    """Batches on the CPU, modules without data."""
    return list(PARTS[part](Setup("cpu", "meta", dtype)))


def on_device(c: Candidate) -> tuple[dict[str, Tensor], tuple[Any, ...]]:
    """The state of a module and its inputs."""
    state = {**dict(c.module.named_parameters()), **dict(c.module.named_buffers())}
    return on_fake_cuda((state, c.inputs))


def run(module: nn.Module, state: dict[str, Tensor], inputs: tuple[Any, ...]) -> Any:
    return torch.func.functional_call(module, state, inputs)


@pytest.fixture(params=[(part, dtype) for part in PARTS for dtype in DTYPES], ids=str)
def row(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    part, dtype = request.param
    return part, dtype


@pytest.mark.cases(0, 1)
def test_each_candidate_runs_eagerly_and_waits_for_nothing(row: tuple[str, torch.dtype]):
    for workload in workloads(*row):
        shapes = {}
        for name in (k for k in CANDIDATES if k in workload.candidates):
            c = workload.candidates[name]
            c.module.train(row[0] != "resnet50")  # else torch fuses layers of encoders, which has no fake kernel
            with fake_cuda():
                state, inputs = on_device(c)
                with forbid(padding=name == "tdc" and row[0] != "resnet50", syncs=True):
                    y = run(c.module, state, inputs)
            shapes[name] = tuple((y.values if isinstance(y, tdc.NestedTensor) else y).shape)
        if "raw" in shapes:
            assert shapes["tdc"] == shapes["raw"]


@pytest.mark.cases(0, 1)
def test_one_graph_serves_all_batches(row: tuple[str, torch.dtype]):
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)

        def stop(*args: Any) -> Any:
            raise Traced

        return stop

    part = row[0]
    found = workloads(*row)
    for several in [[w] for w in found] if part == "operators" else [found]:
        torch.compiler.reset()
        graphs.clear()
        compiled: Any = torch.compile(lambda m, s, x: run(m, s, x), backend=keep, fullgraph=True)
        for workload in several:
            c = workload.candidates["tdc"]
            c.module.eval()
            with fake_cuda():
                state, inputs = on_device(c)
            with torch.no_grad(), fake_methods(), forbid(padding=part != "resnet50"), pytest.raises(Traced):
                compiled(c.module, state, inputs)
        assert len(graphs) == 1


HOUR = 3600.0


JOBS = [  # of up to six columns, which take up to a minute; one is enough for each landing
    pytest.param(job, id=" ".join(job), marks=pytest.mark.slow if job[0] == "operators" else pytest.mark.sweep)
    for job in gpu.JOBS
]


@pytest.mark.filterwarnings("ignore")  # of torch, of its own nested tensors and masks
@pytest.mark.parametrize("job", JOBS)
def test_each_cell_runs(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Without kernels of Inductor and CUDA graphs."""
    until = Clock(time.time() + HOUR, time.time() + HOUR)
    options = {"dry": True, "dtype": "float32", "folder": str(tmp_path)}
    assert gpu.work(job, until, lambda: None, options), capsys.readouterr().out
    page = (tmp_path / f"gpu_{'_'.join(job)}_float32.md").read_text()
    heads = next(line for line in page.splitlines() if line.startswith("| | "))
    for column in ("tdc", "padded", "padded graph", "tdc graph", "tdc compiled"):
        assert f" {column}, us |" in heads
    assert "no time left" not in page


@pytest.mark.slow  # processes
def test_jobs_are_measured_in_turns():
    """By the command, in processes of their own."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--dry", "--part", "operators"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("2 of 2 jobs: all is well\n")
