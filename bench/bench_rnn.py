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

The training step of a tagger, embedding, one layer in both directions, linear, cross entropy, backward and SGD, eagerly
and as one graph, with one thread and with two, is compared with the plain rules that are exact, and with padding:

    cells      one step after the other on the rows that have it, eagerly
    scan       `tdc.scan` over a rectangle of gates, as one graph
    padded     the module on a rectangle; its backward direction begins in padding
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from bench._nested_rows import Ragged
from bench._timing import Call, Report, arguments, in_turns, interleaved, own, ratio
from bench.nested_chain import inference, lengths_for
from tdc import NestedTensor, offsets_of, scan
from tdc.kernels.recurrent.by_cells import CELLS, run_cells
from tdc.kernels.recurrent.order import order_of

LIMIT = 1.1
BAR = 1 / 1.5  # of the operators to plain rules
OCCUPANCY = (0.20, 0.35, 0.77)
TURNS = 8
LARGE, SMALL = (32, 128, 128), (8, 10, 32)  # B, longest, D
MODULES = {"LSTM": nn.LSTM, "GRU": nn.GRU}
WAYS = {  # method of a tagger, and whether its step is one graph
    "tdc": ("nested", False), "compiled": ("nested", True), "cells": ("cells", False), "scan": ("scanned", True),
    "padded": ("padded", False),
}  # fmt: skip
Model = Callable[..., Any]


def turned(batch: Ragged, k: int) -> tuple[Tensor, Tensor]:
    """Values and offsets of a batch whose first k rows come last."""
    rows, lengths = batch.values.split(batch.lengths), batch.lengths[k:] + batch.lengths[:k]
    values = torch.cat([*rows[k:], *rows[:k]])
    torch._dynamo.maybe_mark_dynamic(values, 0)
    return values, offsets_of(torch.tensor(lengths)).to(values.device)


def candidates(module: nn.Module, batch: Ragged) -> dict[str, tuple[Model, Model]]:
    """By name: packed values to outputs, and outputs to the real ones of them."""
    lengths, longest = torch.tensor(batch.lengths), max(batch.lengths)
    rectangle = pad_sequence(list(batch.values.split(batch.lengths)), batch_first=True)

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


class Tagger(nn.Module):
    """Embedding, a recurrent layer in both directions, and scores of tags."""

    def __init__(self, name: str, width: int, tokens: int = 5000, tags: int = 20) -> None:
        super().__init__()
        self.embedding, self.scores = nn.Embedding(tokens, width), nn.Linear(2 * width, tags)
        self.layer = MODULES[name](width, width, bidirectional=True, batch_first=True)
        self.name, self.width = name.lower(), width

    def states(self, x: Tensor, rows: int) -> list[Tensor]:
        return [x.new_zeros(2, rows, self.width)] * (2 if self.name == "lstm" else 1)

    def nested(self, tokens: Tensor, offsets: Tensor, longest: int) -> Tensor:
        return self.layer(NestedTensor(self.embedding(tokens), offsets, max_length=longest))[0].values

    def cells(self, tokens: Tensor, offsets: Tensor, longest: int) -> Tensor:
        x, order = self.embedding(tokens), order_of(offsets[:-1], offsets.diff())
        weights: Any = self.layer._flat_weights
        return run_cells(x, order, self.states(x, len(offsets) - 1), weights, self.name, True, 1, True)[0]

    def scanned(self, tokens: Tensor, offsets: Tensor, longest: int) -> Tensor:
        x, rows, lengths = self.embedding(tokens), len(offsets) - 1, offsets.diff()
        owners = torch.repeat_interleave(torch.arange(rows), lengths, output_size=len(x))
        steps, outs = torch.arange(len(x)) - offsets[owners], []
        weights: Any = self.layer._flat_weights
        for d in range(2):
            own = weights[4 * d : 4 * d + 4]
            at = (lengths[owners] - 1 - steps if d else steps) * rows + owners
            filled = x.new_zeros(longest * rows, x.shape[1]).index_copy(0, at, x)

            def step(carry: Any, part: Tensor, own: Any = own) -> Any:
                new = CELLS[self.name](part, list(carry), own, True)
                return tuple(new), new[0]

            carry = tuple([s[d].clone() for s in self.states(x, rows)])
            outs.append(scan(step, carry, filled.unflatten(0, (longest, rows)))[1].flatten(0, 1).index_select(0, at))
        return torch.cat(outs, 1)

    def padded(self, tokens: Tensor, offsets: Tensor, longest: int) -> Tensor:
        return self.layer(self.embedding(tokens))[0]


def step_of(model: Tagger, way: Model, graph: bool, batches: Any) -> Call:
    """A training step on the next batch."""
    optimizer, following = torch.optim.SGD(model.parameters(), 0.1), cycle(batches)

    def loss(tokens: Tensor, tags: Tensor, offsets: Tensor, longest: int) -> Tensor:
        return F.cross_entropy(model.scores(way(tokens, offsets, longest)).flatten(0, -2), tags.flatten())

    run = torch.compile(own(loss), fullgraph=True) if graph else loss

    def step() -> Tensor:
        optimizer.zero_grad()
        found = run(*next(following))
        found.backward()
        optimizer.step()
        return found.detach()

    return step


def train(report: Report, name: str, occupancy: float, threads: int) -> None:
    """The training step of a tagger."""
    b, longest, d = LARGE
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch.set_num_threads(threads)
    lengths, packed, padded = lengths_for(b, longest, occupancy), list[Any](), list[Any]()
    for k in range(TURNS):
        turned = lengths.roll(k)
        tokens, tags = torch.randint(5000, (int(turned.sum()),)), torch.randint(20, (int(turned.sum()),))
        torch._dynamo.maybe_mark_dynamic(tokens, 0)
        torch._dynamo.maybe_mark_dynamic(tags, 0)
        packed.append((tokens, tags, offsets_of(turned), longest))
        parts = [pad_sequence(t.split(turned.tolist()), True, fill) for t, fill in ((tokens, 0), (tags, -100))]
        padded.append((*parts, offsets_of(turned), longest))
    steps = dict[str, Call]()
    for label, (way, graph) in WAYS.items():
        torch.manual_seed(0)
        model = Tagger(name, d)
        steps[label] = step_of(model, getattr(model, way), graph, padded if label == "padded" else packed)
    first = {n: step() for n, step in steps.items()}
    for n in ("cells", "compiled", "scan"):
        torch.testing.assert_close(first[n], first["tdc"], rtol=1e-4, atol=1e-4)
    clock = time.thread_time if threads == 1 else time.perf_counter
    times = in_turns(steps, 3 if report.quick else 15, clock=clock)
    what = f"{name} tagger {occupancy:.0%}, {threads} thread{'s' * (threads > 1)}"
    report.row(what, times, "padded")
    for ours, theirs in (("tdc", "cells"), ("compiled", "scan")):
        report.limit(f"{what}: {ours} to {theirs}", ratio(times[ours], times[theirs]), BAR)
    report.limit(f"{what}: tdc to padded", ratio(times["tdc"], times["padded"]), 1.15)
    torch.set_num_threads(1)


def main() -> None:
    args = arguments("bench_rnn")
    torch._dynamo.config.allow_rnn = True
    question = "What do recurrent modules cost on a NestedTensor against packed sequences and padding?"
    report = Report("bench_rnn", question, args.device, args.quick)
    for name in MODULES:
        for occupancy in OCCUPANCY:
            measure(report, name, occupancy)
        measure(report, name, OCCUPANCY[-1], SMALL)
    for name in MODULES if args.device == "cpu" else ():
        for threads in (1, 2):
            train(report, name, OCCUPANCY[1], threads)
    report.write()


if __name__ == "__main__":
    main()
