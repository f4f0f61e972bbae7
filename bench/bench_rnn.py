"""What do recurrent modules cost on a NestedTensor against torch's own spellings?

nn.LSTM and nn.GRU, one layer, B=32, longest 128, D=H=128, at occupancies of 20, 35 and 77 %, and small nets of B=8,
longest 10, D=H=32, which are made of calls:

    tdc        module(x) of a NestedTensor, eager
    compiled   the same as one graph with Inductor
    packed     module(pack_padded_sequence(x, lengths, enforce_sorted=False)), as the data comes out of a loader
    padded     module(x) of the rectangle, padding computed; its last states are those of padding

Every candidate has its batch ready: packed values and offsets, or a rectangle and lengths. Rows come in another order
in each of 8 calls, so that nothing that was found out about their lengths serves the next call. Inference runs without
autograd. Training is forward, sum of squares of the real positions, and backward to the weights; all agree on both.
The limit is the faster of torch's two.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from bench._nested_rows import Ragged
from bench._timing import Call, Report, arguments, interleaved, own, ratio
from bench.nested_chain import inference, lengths_for
from tdc import NestedTensor, offsets_of

LIMIT = 1.1
OCCUPANCY = (0.20, 0.35, 0.77)
TURNS = 8
LARGE, SMALL = (32, 128, 128), (8, 10, 32)  # B, longest, D
MODULES = {"LSTM": nn.LSTM, "GRU": nn.GRU}
Model = Callable[[Any], Any]


def turned(batch: Ragged, k: int) -> tuple[Tensor, Tensor]:
    """Values and offsets of a batch whose first k rows come last."""
    rows, lengths = batch.values.split(batch.lengths), batch.lengths[k:] + batch.lengths[:k]
    values = torch.cat([*rows[k:], *rows[:k]])
    torch._dynamo.maybe_mark_dynamic(values, 0)
    return values, offsets_of(torch.tensor(lengths)).to(values.device)


def candidates(module: nn.Module, batch: Ragged) -> dict[str, tuple[Model, Model]]:
    """By name: packed values to outputs, and outputs to the real ones of them."""
    lengths, longest = torch.tensor(batch.lengths), max(batch.lengths)
    rectangle = nn.utils.rnn.pad_sequence(list(batch.values.split(batch.lengths)), batch_first=True)

    others = cycle([turned(batch, k) for k in range(TURNS)])

    def nested(values: Tensor, offsets: Tensor) -> Any:
        return module(NestedTensor(values, offsets, max_length=longest))[0]

    def packed(_: Any) -> Any:
        return module(nn.utils.rnn.pack_padded_sequence(rectangle, lengths, True, enforce_sorted=False))[0]

    graph = torch.compile(own(nested), fullgraph=True)
    found: dict[str, tuple[Model, Model]] = {
        "tdc": (lambda _: nested(*next(others)), lambda y: y.values),
        "compiled": (lambda _: graph(*next(others)), lambda y: y.values),
        "packed": (packed, lambda y: y.data),
        "padded": (lambda _: module(rectangle)[0], lambda y: y[~batch.padding]),
    }
    return found


def training(model: Model, real: Model, weights: Sequence[Tensor]) -> Call:
    """Forward, sum of squares, backward."""
    return lambda: torch.autograd.grad(real(model(None)).square().sum(), weights)


def agree(calls: dict[str, Call]) -> None:
    """All candidates have the gradients of the first."""
    first, *others = [call() for call in calls.values()]
    for other in others:
        close = 1e-2 if other[0].is_cuda else 1e-3  # TF32
        torch.testing.assert_close(other, first, rtol=close, atol=close)


def measure(report: Report, name: str, occupancy: float, sizes: tuple[int, int, int] = LARGE) -> None:
    """Inference and training of one module on one batch."""
    b, longest, d = sizes
    torch.manual_seed(0)
    torch._dynamo.reset()
    lengths = lengths_for(b, longest, occupancy).tolist()
    batch = Ragged(torch.randn(sum(lengths), d, device=report.device), lengths)
    module = MODULES[name](d, d, batch_first=True).to(report.device)
    weights = list(module.parameters())
    models = candidates(module, batch)
    label = f"{name} {occupancy:.0%}" if sizes == LARGE else f"small {name}"
    report.note(f"{label}: B={b}, longest {longest}, N={len(batch.values)}, {batch.occupancy:.0%} real")
    steps = {n: training(model, real, weights) for n, (model, real) in models.items()}
    agree(steps)
    passes = {n: inference(model, None) for n, (model, _) in models.items()}
    for mode, calls in (("inference", passes), ("training", steps)):
        for call in calls.values():
            call()
        count = 1 if sizes == LARGE else 20
        times = interleaved(calls, rounds=5 if report.quick else 25, count=count, device=report.device)
        what = f"{label} {mode}"
        report.row(what, times, "padded")
        best = min(("packed", "padded"), key=lambda n: statistics.median(times[n]))
        for ours in ("tdc", "compiled"):
            report.limit(f"{what}: {ours} to torch's faster, {best}", ratio(times[ours], times[best]), LIMIT)


def main() -> None:
    args = arguments("bench_rnn")
    torch._dynamo.config.allow_rnn = True
    question = "What do recurrent modules cost on a NestedTensor against packed sequences and padding?"
    report = Report("bench_rnn", question, args.device, args.quick)
    for name in MODULES:
        for occupancy in OCCUPANCY:
            measure(report, name, occupancy)
        measure(report, name, OCCUPANCY[-1], SMALL)
    report.write()


if __name__ == "__main__":
    main()
