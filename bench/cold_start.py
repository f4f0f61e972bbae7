"""How soon does a second process take its first training step, with the file of `step.save_cache` and without?

Each step runs in a process of its own with an empty folder of caches. The first saves a file, the second loads it, in
turns. The time is that of the first step, with loading the file: CPU time of the process and the compilers it runs,
since a busy machine stretches the wall clock; that is shown beside it. Limit: 0.2 of the time without the file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import tdc
from bench._timing import Report, arguments, ratio, spread
from tdc.compile import train_step
from tdc.optim import adamw

ROOT = Path(__file__).resolve().parents[1]


def cpu() -> tuple[float, float]:
    """CPU time of this process, and of those that it ran."""
    times = os.times()
    return times.user + times.system, times.children_user + times.children_system


def first_step(action: str, file: str) -> None:
    """Take a first step of an encoder on a ragged batch, and print what it took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    batch = tdc.pack([torch.randn(n, 64) for n in (3, 9, 5, 7)])
    step = train_step(net, lambda net, x: net(x).values.square().mean(), adamw(1e-3), donate=True)
    state = step.init()
    begin, (own, others) = time.perf_counter(), cpu()
    if action == "load":
        step.load_cache(file)
    _, metrics = step(state, batch)
    seconds = {"wall": time.perf_counter() - begin, "own": cpu()[0] - own, "compilers": cpu()[1] - others}
    if action == "save":
        step.save_cache(file)
    print(json.dumps({**seconds, "loss": metrics["loss"].item()}))


def measured(action: str, file: Path, folder: Path) -> dict[str, float]:
    """Time it in a process with an empty folder of caches."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    command = [sys.executable, "-m", "bench.cold_start", action, str(file)]
    out = subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True).stdout
    return json.loads(out.splitlines()[-1])


def main() -> None:
    args = arguments("cold_start")
    question = "What part of its first step does a process save with the file of another?"
    report = Report("cold_start", question, quick=args.quick)
    found: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        for turn in range(1 if report.quick else 3):
            for label, action in (("without", "save"), ("with", "load")):
                found[label].append(measured(action, base / "step.cache", base / f"{label}{turn}"))
        size = (base / "step.cache").stat().st_size
    if len({run["loss"] for runs in found.values() for run in runs}) != 1:
        raise SystemExit("the losses differ")
    cpu = {label: [run["own"] + run["compilers"] for run in runs] for label, runs in found.items()}
    wall = {label: [run["wall"] for run in runs] for label, runs in found.items()}
    report.row("first step, CPU time", cpu, "without", file_kB=size // 1000)
    report.row("first step, wall clock", wall, "without")
    for label, runs in found.items():
        parts = {part: spread([run[part] for run in runs]) for part in ("own", "compilers")}
        report.note(
            f"{label} the file: {parts['own']:.1f} s in the process, {parts['compilers']:.1f} s in C++ compilers"
        )
    report.limit("first step with the file, to without", ratio(cpu["with"], cpu["without"]), 0.2)
    report.write()


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in ("save", "load"):
        first_step(*sys.argv[1:])
    else:
        main()
