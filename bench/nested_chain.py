"""What does a NestedTensor cost over raw packed values in a chain of stock modules?

    nn.Sequential(Linear(D, 2D), ReLU, LayerNorm(2D), Linear(2D, D), GELU)

on the same rows as raw packed values `(N, D)` (the limit: nothing can be cheaper), `tdc.NestedTensor`, `torch.nested`
in its jagged layout, DanLing's NestedTensor, and a padded `(B, longest, D)` tensor, which computes on padding as well.

    small   B=8, N about 200, D=16: the kernels take next to no time, so this is the fixed cost of a call
    large   B=32, longest 256, D=256, 35 % occupancy: the arithmetic, and what padding wastes

The input is built outside the measured call, and its rows are dynamic in all candidates: raw values are marked as a
NestedTensor marks its own. Inference runs without autograd; training is the forward pass, a sum and the backward pass
to the weights, and stands here for information, without a limit. Compiled means one full graph with Inductor, except
where a peer cannot: it then says so and is left out of that row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from bench._timing import Call, Report, arguments, interleaved, own, peer, ratio
from tdc import NestedTensor, offsets_of

LIMITS = {"compiled": 1.10, "eager": 1.6}
SIZES = {"small": (8, 50, 16, 0.5), "large": (32, 256, 256, 0.35)}


def chain(features: int, device: str) -> nn.Module:
    """The modules, from `features` to `features`."""
    wide = 2 * features
    layers = (nn.Linear(features, wide), nn.ReLU(), nn.LayerNorm(wide), nn.Linear(wide, features), nn.GELU())
    return nn.Sequential(*layers).to(device)


def lengths_for(rows: int, longest: int, occupancy: float) -> Tensor:
    """Lengths in [1, longest], the longest among them, with the given share of real positions."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.rand(rows, generator=generator)
    lengths = (lengths / lengths.mean() * occupancy * longest).long().clamp(1, longest)
    lengths[0] = longest
    return lengths


def values_of(name: str, y: Any) -> Tensor:
    """The packed values of a result: what a loss would read."""
    if name == "torch.nested":
        return y.values()
    return {"tdc": lambda: y.values, "danling": lambda: y.concat}.get(name, lambda: y)()


def inputs_for(report: Report, size: str, danling: ModuleType | None) -> dict[str, Any]:
    """The same rows, in the form of each candidate."""
    rows, longest, features, occupancy = SIZES[size]
    lengths = lengths_for(rows, longest, occupancy)
    offsets = offsets_of(lengths).to(report.device)
    values = torch.randn(int(lengths.sum()), features, device=report.device)
    torch._dynamo.maybe_mark_dynamic(values, 0)
    parts = values.split(lengths.tolist())
    inputs: dict[str, Any] = {
        "raw": values,
        "tdc": NestedTensor(values, offsets, max_length=longest),
        "torch.nested": torch.nested.nested_tensor_from_jagged(values, offsets, max_seqlen=longest, min_seqlen=1),
    }
    if danling:
        inputs["danling"] = danling.NestedTensor(*parts)
    inputs["padded"] = nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
    report.note(f"{size}: B={rows}, N={len(values)}, D={features}, {len(values) / rows / longest:.0%} occupancy")
    return inputs


def compiled(model: nn.Module) -> Callable[[Any], Any]:
    """The model in one graph, of its own."""
    return torch.compile(own(lambda x: model(x)), fullgraph=True)


def inference(model: Callable[[Any], Any], x: Any) -> Call:
    """A forward pass without autograd."""

    def call() -> Any:
        with torch.no_grad():
            return model(x)

    return call


def training(model: Callable[[Any], Any], name: str, x: Any, weights: Sequence[Tensor]) -> Call:
    """Forward, sum, backward to the weights."""

    def call() -> Any:
        return torch.autograd.grad(values_of(name, model(x)).sum(), weights)

    return call


def usable(report: Report, what: str, calls: dict[str, Call]) -> dict[str, Call]:
    """The candidates that run; why one does not is printed."""
    found = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            if name in ("raw", "tdc"):
                raise
            first = str(error).strip().splitlines()
            report.note(f"{what}: {name} left out: {type(error).__name__}: {first[0][:100] if first else ''}")
            continue
        found[name] = call
    return found


def measure(report: Report, size: str, danling: ModuleType | None) -> None:
    """Eager and compiled, inference and training, for one size."""
    torch.manual_seed(0)
    inputs = inputs_for(report, size, danling)
    model = chain(inputs["raw"].shape[1], report.device)
    weights = list(model.parameters())
    expected = model(inputs["raw"])
    rounds, burst = (9 if report.quick else 41), 0.004 if size == "small" else 0.02
    for mode in ("compiled", "eager"):
        torch._dynamo.reset()
        models = {n: compiled(model) if mode == "compiled" else model for n in inputs}
        calls = usable(report, f"{size} {mode}", {n: inference(models[n], x) for n, x in inputs.items()})
        for name, call in calls.items():
            if name != "padded":
                torch.testing.assert_close(values_of(name, call()), expected.detach(), rtol=1e-4, atol=1e-5)
        times = interleaved(calls, rounds=rounds, burst=burst, device=report.device)
        report.row(f"{size} {mode} inference", times, "raw")
        figure = ratio(times["tdc"], times["raw"])
        report.limit(f"{size}: {mode} inference, tdc to raw packed values", figure, LIMITS[mode])
        calls = {n: training(models[n], n, x, weights) for n, x in inputs.items()}
        calls = usable(report, f"{size} {mode} training", calls)
        times = interleaved(calls, rounds=rounds // 2 + 1, burst=burst, device=report.device)
        report.row(f"{size} {mode} training", times, "raw")


def main() -> None:
    args = arguments("nested_chain")
    question = "What does a NestedTensor cost in a chain of stock modules, as a multiple of raw packed values?"
    report = Report("nested_chain", question, args.device, args.quick)
    danling = peer("danling", report)
    for size in SIZES:
        measure(report, size, danling)
    report.write()


if __name__ == "__main__":
    main()
