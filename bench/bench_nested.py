"""What do ragged batches cost against raw packed values, padding, DanLing and torch.nested?

    chain      relu, add, gelu, layer_norm on 17 x 8 numbers: the fixed cost of a call. One graph serves all lengths:
               rows are dynamic in the ragged candidates and in raw values, the base; `fixed` is raw of one length
    encoder    2 stock nn.TransformerEncoder layers, B=32, longest 256, D=256, 8 heads, 1024 wide, at occupancies of
               20, 35 and 77 %; raw is written by hand, with one SDPA for each example
    memory     the most bytes alive in a training step of the encoder at 20 %

Inference runs without autograd on a batch that is ready. Training builds the batch on packed values and runs forward,
sum of squares and backward: to the values in the chain, to the weights in the encoder. Compiled means one full graph
with Inductor; the raw encoder unrolls its loop over fixed lengths and stays eager: it is the base of both modes. A
candidate that cannot do a row says so and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bench import _nested_rows as rows
from bench._timing import Call, Report, arguments, interleaved, peer, ratio, spread
from bench.nested_chain import compiled, inference, lengths_for, usable
from tdc.compile import peak_bytes

CHAIN = {"compiled inference": 1.25, "eager inference": 2.5, "compiled training": 1.1, "eager training": None}
FASTER = {0.20: 1.9, 0.35: 1.5, 0.77: 1.05}  # occupancy: times faster than DanLing
ENCODER, MEMORY = 1.10, 0.35
B, LONGEST, D, HEADS, WIDE = 32, 256, 256, 8, 1024


def training(batch: rows.Ragged, name: str, model: rows.Model, build: rows.Model, wrt: Sequence[Tensor]) -> Call:
    """Build, forward, sum of squares, backward."""

    def call() -> Any:
        return torch.autograd.grad(batch.real(name, model(build(batch.values))).square().sum(), wrt)

    return call


def agree(batch: rows.Ragged, calls: dict[str, Call], train: bool) -> None:
    """Every candidate gives the numbers of raw packed values.

    Raises:
        AssertionError: one does not.
    """
    found = {n: call() if train else [batch.real(n, call())] for n, call in calls.items()}
    for name, tensors in found.items():
        for a, b in zip(tensors, found["raw"], strict=True):
            torch.testing.assert_close(
                a, b, rtol=2e-3, atol=2e-3 * max(1.0, b.abs().max().item()), msg=lambda m, n=name: f"{n}: {m}"
            )


def varying(values: Tensor) -> Tensor:
    """The same tensor with rows marked as a NestedTensor marks its own."""
    torch._dynamo.maybe_mark_dynamic(values, 0)
    return values


def fixed(report: Report, danling: ModuleType | None) -> None:
    """The chain on tiny tensors."""
    torch.manual_seed(0)
    values = varying(torch.randn(17, 8, device=report.device, requires_grad=True))
    batch, model = rows.Ragged(values, [5, 2, 7, 3]), rows.chain(torch.ones(8, device=report.device))
    build = batch.builders(danling) | {"fixed": lambda v: v.view_as(v)}
    ready = {n: make(varying(values.detach())) for n, make in build.items()}
    for what, limit in CHAIN.items():
        torch._dynamo.reset()
        mode, _, train = what.partition(" ")
        models = {n: compiled(model) if mode == "compiled" else model for n in build}  # type: ignore[arg-type]  # a function
        if train == "training":
            calls = {n: training(batch, n, models[n], build[n], [values]) for n in build}
        else:
            calls = {n: inference(models[n], ready[n]) for n in build}
        calls = usable(report, f"chain {what}", calls)
        agree(batch, calls, train == "training")
        times = interleaved(calls, rounds=9 if report.quick else 61, burst=0.004, device=report.device)
        report.row(f"chain {what}", times, "raw")
        if limit:
            report.limit(f"chain: {what}, tdc to raw packed values", ratio(times["tdc"], times["raw"]), limit)


def lengths_at(occupancy: float, rows: int = B, longest: int = LONGEST) -> list[int]:
    """Lengths of the given share of real positions; above a half, what is missing from the longest is drawn."""
    if occupancy <= 0.5:
        return lengths_for(rows, longest, occupancy).tolist()
    lengths = (longest - lengths_for(rows, longest, 1 - occupancy)).clamp(1, longest)
    lengths[0] = longest
    return lengths.tolist()


def sample(report: Report, occupancy: float) -> rows.Ragged:
    """A batch for the encoder."""
    torch.manual_seed(0)
    lengths = lengths_at(occupancy)
    batch = rows.Ragged(torch.randn(sum(lengths), D, device=report.device), lengths)
    report.note(f"encoder {occupancy:.0%}: N={sum(lengths)}, {batch.occupancy:.1%} of {B} x {LONGEST} are real")
    return batch


def transformer(report: Report, occupancy: float, danling: ModuleType | None) -> None:
    """Inference and training, eager and compiled, at one occupancy."""
    batch = sample(report, occupancy)
    model, build = rows.encoder(D, HEADS, WIDE, report.device), batch.builders(danling)
    plain, weights = rows.encoders(model, batch), list(model.parameters())
    ready = {n: make(batch.values) for n, make in build.items()}
    for what in ("eager inference", "compiled inference", "eager training", "compiled training"):
        torch._dynamo.reset()
        mode, _, train = what.partition(" ")
        model.train(train == "training")
        models = {n: compiled(plain[n]) if mode == "compiled" and n != "raw" else plain[n] for n in build}  # type: ignore[arg-type]  # functions
        if train == "training":
            calls = {n: training(batch, n, models[n], build[n], weights) for n in build}
        else:
            calls = {n: inference(models[n], ready[n]) for n in build}
        label = f"encoder {occupancy:.0%} {what}"
        calls = usable(report, label, calls)
        agree(batch, calls, train == "training")
        times = interleaved(calls, rounds=3 if report.quick else 15, device=report.device, count=1)
        report.row(label, times, "raw")
        report.limit(f"{label}: tdc to packed by hand", ratio(times["tdc"], times["raw"]), ENCODER)
        for other, limit in (("danling", 1 / FASTER[occupancy]), ("padded", 1.0)):
            if other in times:
                report.limit(f"{label}: tdc to {other}", ratio(times["tdc"], times[other]), round(limit, 3))


def memory(report: Report) -> None:
    """Bytes of a training step at the lowest occupancy."""
    batch = sample(report, min(FASTER))
    model, build = rows.encoder(D, HEADS, WIDE, report.device), batch.builders(None)
    plain, weights = rows.encoders(model, batch), list(model.parameters())
    for mode in ("eager", "compiled"):
        torch._dynamo.reset()
        found: dict[str, int] = {}
        for name in ("raw", "padded", "tdc"):
            run = compiled(plain[name]) if mode == "compiled" and name != "raw" else plain[name]  # type: ignore[arg-type]  # functions
            step = training(batch, name, run, build[name], weights)
            step()
            found[name] = peak_bytes(step)
        sizes = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in found.items())
        report.note(f"memory of {mode} training, {min(FASTER):.0%}: {sizes}")
        figure = spread([found["tdc"] / found["padded"]])
        report.limit(f"memory of {mode} training at {min(FASTER):.0%}: tdc to padded", figure, MEMORY)


def main() -> None:
    args = arguments("bench_nested")
    question = "What do ragged batches cost against raw packed values, padding, DanLing and torch.nested?"
    report = Report("bench_nested", question, args.device, args.quick)
    danling = peer("danling", report)
    if danling:
        report.version(danling)
    fixed(report, danling)
    memory(report)
    for occupancy in FASTER:
        transformer(report, occupancy, danling)
    report.write()


if __name__ == "__main__":
    main()
