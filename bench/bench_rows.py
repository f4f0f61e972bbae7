"""What do products and sorts of each example cost on a NestedTensor against padding?

B=32, longest 256, at 22, 37 and 67 % of real positions, with 64 and 256 features:

    x @ w       (B, -1, D) @ (B, D, D)      x.T @ x    (B, D, -1) @ (B, -1, D)      x @ x.T    two ragged dims
    sort 1      (B, -1) along the ragged dim, once for all D                        sort       (B, -1, D), the same

The candidates are tdc, eager and compiled, and the same operation on a rectangle that is ready, eager and compiled:
zeros behind the rows, infinity where it is sorted. What is sorted is another batch in each call, out of 64: a processor
learns the comparisons of a batch that comes again, and then sorts up to three times as fast. Inference runs without
autograd; training is forward, sum of squares and backward to x. The limit is on tdc, eager and compiled, over the
rectangle, eager.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch

from bench._nested_rows import Ragged
from bench._timing import Call, Report, arguments, interleaved, own, ratio
from bench.nested_chain import inference, lengths_for

LIMIT = 1.1
OCCUPANCY = (0.20, 0.35, 0.77)
B, LONGEST, BATCHES = 32, 256, 64
Run = Callable[[Any], Any]


def operations(weight: torch.Tensor) -> dict[str, Run]:
    """Operations on a batch, nested or padded."""
    return {
        "x @ w": lambda x: torch.matmul(x, weight),
        "x.T @ x": lambda x: torch.matmul(x.transpose(1, 2), x),
        "x @ x.T": lambda x: torch.matmul(x, x.transpose(1, 2)),
        "sort": lambda x: torch.sort(x, 1).values,
        "sort 1": lambda x: torch.sort(x, 1).values,
    }


def training(run: Run, build: Run, leaf: torch.Tensor) -> Call:
    """Forward, sum of squares, backward."""

    def call() -> Any:
        y = run(build(leaf))
        return torch.autograd.grad((y if isinstance(y, torch.Tensor) else y.values).square().sum(), leaf)

    return call


def in_turn(run: Run, inputs: list[Any]) -> Call:
    """Inference, of the next input in each call."""
    inputs_in_turn = cycle(inputs)
    return inference(lambda _: run(next(inputs_in_turn)), None)


def measure(report: Report, name: str, run: Run, compiled: Run, graph: Run, batch: Ragged) -> None:
    """One operation on one batch; compiled for a nested and for a padded one."""
    x = batch.nested
    if name == "sort 1":
        x = x.with_values(batch.values[:, 0].contiguous())
    batches = [x] + [x.with_values(torch.randn_like(x.values)) for _ in range(BATCHES - 1) if "sort" in name]
    rectangles = [x.to_padded().filled(torch.inf if "sort" in name else 0.0) for x in batches]
    padded = rectangles[0]
    calls = {
        "tdc": in_turn(run, batches), "compiled": in_turn(compiled, batches), "padded": in_turn(run, rectangles),
        "padded, compiled": in_turn(graph, rectangles),
    }  # fmt: skip
    for call in calls.values():
        call()
    rounds = 5 if report.quick else 25
    times = interleaved(calls, rounds=rounds, burst=0.01, device=report.device)
    what = f"{name}, D={batch.values.shape[1]}, {batch.occupancy:.0%}"
    report.row(what, times, "padded")
    for way in ("tdc", "compiled"):
        report.limit(f"{what}: {way} to padded", ratio(times[way], times["padded"]), LIMIT)
    if "sort" in name:
        return
    steps = {
        "tdc": training(run, x.with_values, x.values.detach().requires_grad_()),
        "padded": training(run, lambda leaf: leaf, padded.detach().requires_grad_()),
    }
    times = interleaved(steps, rounds=rounds, burst=0.01, device=report.device)
    report.row(f"{what}, training", times, "padded")
    report.limit(f"{what}: training, tdc to padded", ratio(times["tdc"], times["padded"]), LIMIT)


def main() -> None:
    args = arguments("bench_rows")
    question = "What do products and sorts of each example cost on a NestedTensor against padding?"
    report = Report("bench_rows", question, args.device, args.quick)
    torch.manual_seed(0)
    for features in (64, 256):
        weight = torch.randn(B, features, features, device=report.device)
        for name, run in operations(weight).items():
            if name == "sort 1" and features != 64:
                continue
            torch._dynamo.reset()
            compiled, graph = [torch.compile(own(run), fullgraph=True, dynamic=every) for every in (None, True)]
            for occupancy in OCCUPANCY:
                lengths = lengths_for(B, LONGEST, occupancy).tolist()
                values = torch.randn(sum(lengths), features, device=report.device)
                measure(report, name, run, compiled, graph, Ragged(values, lengths))
    report.write()


if __name__ == "__main__":
    main()
