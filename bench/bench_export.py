"""Does a package that AOTInductor compiled cost more per call than the same function compiled in process?

Two models: `classifier`, the demo's transformer on a ragged batch of 4 texts in a TensorDict; `mlp`, a small stack of
linear layers on a packed batch of 8 rows, where little but the call itself is left to measure. Candidates are called
with the same containers and give the same numbers:

    compiled   torch.compile in this process, without gradients: guards, kernels, containers put together
    package    tdc.compile.load of a package: our checks, flattening, machine code, containers put together
    flat       the package's machine code on flat tensors, as C++ calls it

Limit: package at most 1.3 times compiled.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

import tdc
from bench._timing import Report, arguments, interleaved, ratio
from examples.demo.model import Classifier, ragged_batch

LIMIT = 1.3


def models(device: str) -> dict[str, tuple[nn.Module, Any]]:
    """By name: a model and its input."""
    texts = [torch.randint(0, 256, (n,)) for n in (12, 40, 7, 25)]
    mlp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    packed = tdc.pack([torch.randn(n, 16) for n in (3, 5, 2, 8, 1, 4, 6, 7)]).to(device)
    classifier = Classifier(10, width=64, heads=4, layers=2)
    found = {"classifier": (classifier, ragged_batch(texts, [0] * 4, device)), "mlp": (mlp, packed)}
    return {name: (model.to(device).eval(), x) for name, (model, x) in found.items()}


def main() -> None:
    args = arguments("bench_export")
    report = Report("bench_export", "What does a call of an AOTInductor package cost?", args.device, args.quick)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for name, (model, x) in models(args.device).items():
            measure(report, name, model, x, Path(folder) / f"{name}.pt2")
    report.write()


def measure(report: Report, name: str, model: nn.Module, x: Any, path: Path) -> None:
    """One model, three ways."""
    tdc.compile.export(model, (x,)).save(path, format="aoti")
    package = tdc.compile.load(path)
    compiled = torch.compile(model, backend=tdc.compile.backend, fullgraph=True)
    flat = [t for t in pytree.tree_leaves(x) if isinstance(t, torch.Tensor)]
    machine: Any = torch._inductor.aoti_load_package(str(path)).loader
    for a, b in zip(pytree.tree_leaves(package(x)), pytree.tree_leaves(compiled(x)), strict=True):
        torch.testing.assert_close(a, b)
    calls = {"compiled": lambda: compiled(x), "package": lambda: package(x), "flat": lambda: machine.run(flat)}
    times = interleaved(calls, rounds=9 if report.quick else 61, burst=0.01, device=report.device)
    report.row(name, times, "compiled")
    report.limit(f"{name}: package to in-process call", ratio(times["package"], times["compiled"]), LIMIT)


if __name__ == "__main__":
    main()
