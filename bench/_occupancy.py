"""Training steps on ragged rows against the same on a rectangle, at several occupancies."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench._timing import Call, Report, arguments, interleaved, ratio

SLACK = 0.15  # how far over the occupancy a step on ragged rows may be


def against_padding(report: Report, what: str, calls: dict[str, Call], occupancy: float) -> None:
    """A row of `padded`, `tdc` and both compiled, and the limits of tdc."""
    for call in calls.values():
        call()
    times = interleaved(calls, rounds=3 if report.quick else 9, burst=0.1, device=report.device)
    report.row(f"{what}, training", times, "padded")
    for k in ("", ", compiled"):
        report.limit(f"{what}{k}: tdc to padded", ratio(times[f"tdc{k}"], times[f"padded{k}"]), occupancy + SLACK)


def at_occupancies(name: str, question: str, measure: Callable[[Report, float], None]) -> None:
    """Run a benchmark at 20, 35 and 77 %, and write its report."""
    args = arguments(name)
    report = Report(name, question, args.device, args.quick)
    torch.manual_seed(0)
    for occupancy in (0.35,) if args.quick else (0.20, 0.35, 0.77):
        measure(report, occupancy)
    report.write()
