"""What do ragged batches cost on a GPU, against padding, kernels by hand, DanLing and torch.nested?

    python -m bench.gpu --part encoder              within ten minutes on one H100
    python -m bench.gpu --part text --dtype bfloat16 --modes eager

Parts are operators, encoder, decoder, transformer, resnet50 and text (`bench/_gpu_workloads.py`), in bfloat16 and
float32, eager and compiled. Inference runs without autograd; training is forward, sum of squares of real elements and
backward to the weights. Beside the time of a call the table counts its kernels, the times that the host waits for the
device, and the most memory that it takes. Results of real elements are compared with the padded ones before anything is
timed. A candidate that cannot do a row says so and is left out. The limit is on tdc over padded.

There is nothing to measure on a machine without a GPU; tests run each workload on tensors without data there.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench._gpu_workloads import PARTS, Candidate, Setup, Workload
from bench._timing import Report, interleaved, own, peer, ratio
from tdc.compile import peak_bytes

LIMIT = 1.0
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Run = Callable[[], Any]


def inference(c: Candidate, module: Callable[..., Any]) -> Run:
    return torch.no_grad()(lambda: module(*c.inputs))


def training(c: Candidate, module: Callable[..., Any]) -> Run:
    """Forward, sum of squares and backward to the weights."""
    weights = list(c.module.parameters())

    def step() -> Any:
        loss = c.values(module(*c.inputs)).float().square().sum()
        return torch.autograd.grad(loss, weights) if weights else loss

    return step


def ready(report: Report, what: str, workload: Workload, wrap: Callable[..., Run], compiled: bool) -> dict[str, Run]:
    """The calls of those candidates that can, warmed up."""
    calls: dict[str, Run] = {}
    torch.compiler.reset()
    for name, c in workload.candidates.items():
        module = torch.compile(alone(c.module), fullgraph=True) if compiled else c.module
        call = wrap(c, module)
        try:
            for _ in range(3):
                call()
        except Exception as error:  # of a peer, or of memory
            report.note(f"{what}: {name}: {type(error).__name__} {str(error).splitlines()[0][:120]}")
        else:
            calls[name] = call
    return calls


def alone(module: nn.Module) -> Callable[..., Any]:
    """A module as a function with a code object of its own: graphs are kept there."""
    return own(lambda *inputs: module(*inputs))


def agree(report: Report, part: str, workload: Workload) -> None:
    """How far each candidate's real elements are from those of padding, relative to the largest."""
    if part == "resnet50":
        return  # the rectangle has other results
    found: dict[str, Tensor] = {}
    for name, c in workload.candidates.items():
        with torch.no_grad():
            try:
                found[name] = c.values(c.module(*c.inputs)).float()
            except Exception:
                continue  # `ready` says so
    if "padded" not in found:
        return
    want = found.pop("padded")
    real = want.flatten(0, 1)[want.flatten(0, 1).abs().sum(-1) > 0]
    for name, y in found.items():
        off = ((y - real).abs().max() / real.abs().max()).item()
        report.note(f"{workload.name}: {name} is off padded by {off:.1e} of the largest")


def kernels(call: Run) -> int:
    """Kernels and copies of a call."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    return sum("CUDA" in str(event.device_type) for event in profiler.events() or ())


def waits(call: Run) -> int:
    """How often the host waits for the device in a call."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in caught)


def measure(report: Report, part: str, workload: Workload, dtype: str, modes: list[str], rounds: int) -> None:
    """All ways of one workload."""
    agree(report, part, workload)
    ways = {"inference": inference, "training": training}
    for mode in modes:
        for way, wrap in ways.items():
            for c in workload.candidates.values():
                c.module.train(way == "training")
            what = f"{workload.name} {dtype} {mode} {way}"
            calls = ready(report, what, workload, wrap, mode == "compiled")
            if not {"padded", "tdc"} <= set(calls):
                continue
            times = interleaved(calls, rounds=rounds, burst=0.02, device="cuda")
            counts = {f"kernels {name}": kernels(call) for name, call in calls.items()}
            counts |= {f"waits {name}": waits(call) for name, call in calls.items()}
            counts |= {f"MB {name}": round(peak_bytes(call) / 1e6) for name, call in calls.items()}
            report.row(what, times, "padded", **counts)
            report.limit(f"{what}: tdc to padded", ratio(times["tdc"], times["padded"]), LIMIT)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--part", choices=list(PARTS), default="operators")
    parser.add_argument("--dtype", choices=list(DTYPES), nargs="+", default=list(DTYPES))
    parser.add_argument("--modes", choices=("eager", "compiled"), nargs="+", default=["eager", "compiled"])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to see that it runs, not to quote")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.gpu: there is no GPU, and nothing to measure")
        return
    report = Report(f"gpu_{given.part}", f"What does the part {given.part} cost on a GPU?", "cuda", given.quick)
    danling = peer("danling", report)
    for name in given.dtype:
        torch.manual_seed(0)
        for workload in PARTS[given.part](Setup("cuda", "cuda", DTYPES[name], danling)):
            measure(report, given.part, workload, name, given.modes, 5 if given.quick else 21)
    report.write()


if __name__ == "__main__":
    main()
