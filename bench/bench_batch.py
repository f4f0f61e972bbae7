"""What does code for one example, run on a batch, cost against the loop over examples and against masks by hand?

    recurrent   a cell along the rows of each example, B=32, at most 100 rows, 128 features
    halting     an update until each example halts, at most 34 times, B=64, 64 features
    decoding    the most likely next token until the end of each sequence, at most 60, B=64, without gradients

The candidates are the loop over examples in Python, `tdc.batch` eagerly and compiled, and the same loop written for the
batch with masks, compiled. Training is forward, a weighted sum and backward to the weights. `trace` is the time of a
first call with no code generation; `decoration` reads the source of a function of 99 lines.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tdc
from bench._timing import Call, Report, arguments, interleaved, ratio, spread, traced
from bench.nested_chain import lengths_for

HALTED, MOST, STEPS = 0.99, 34, 60
# over the loop: compiled forward, compiled training, eager; over masks by hand: compiled
LIMITS = {"recurrent": (1 / 4, 1 / 6), "halting": (1 / 12, 1 / 14), "decoding": (1 / 9, 0.0)}
EAGER, BY_HAND, TRACE, DECORATION = 1 / 0.8, 1.3, 2.0, 20.0
LINES = """
    for x in xs:
        h = torch.tanh(x @ w + h @ u)
        if h.sum() > 0:
            total = total + h.mean()
        elif count > {k}:
            total = total - 1
            continue
        count += 1
    while count > {k} and total < 10:
        count -= 2"""


class Weights:
    """Weights of the three programs."""

    def __init__(self, features: int, device: Any) -> None:
        torch.manual_seed(0)
        scale = features**-0.5
        self.w = (torch.randn(features, features, device=device) * scale).requires_grad_()
        self.u = (torch.randn(features, features, device=device) * scale).requires_grad_()
        self.v = (torch.randn(features, device=device) * scale).requires_grad_()
        self.table = torch.randn(50, features, device=device)

    def all(self) -> list[Tensor]:
        return [self.w, self.u, self.v]


def recurrent(p: Weights) -> tuple[Any, Callable[..., Any]]:
    """The last state of a recurrent cell."""

    @tdc.batch
    def one(xs: Any) -> Tensor:
        h = torch.zeros_like(p.v)
        for x in xs:
            h = torch.tanh(x @ p.w + h @ p.u)
        return h

    def by_hand(rows: Any) -> Tensor:
        padded = rows.to_padded()
        xs = tdc.TensorDict(
            {"x": padded.data.movedim(1, 0), "live": padded.mask.movedim(1, 0)}, padded.data.shape[1::-1]
        )

        def step(h: Tensor, now: Any) -> Any:
            return torch.where(now["live"], torch.tanh(now["x"] @ p.w + h @ p.u), h), None

        return tdc.scan(step, padded.data.new_zeros(len(rows), p.v.shape[0]), xs)[0]

    return one, by_hand


def halting(p: Weights) -> tuple[Any, Callable[..., Any]]:
    """An update that each example repeats until its chances of halting add up."""

    @tdc.batch
    def one(x: Tensor) -> Tensor:
        chance, n = torch.zeros_like(x[0]), 0
        while chance < HALTED and n < MOST:
            x = torch.tanh(x @ p.w)
            chance = chance + torch.sigmoid(x @ p.v - 3)
            n += 1
        return x

    def by_hand(x: Tensor) -> Tensor:
        def going(chance: Tensor, n: Tensor) -> Tensor:
            return (chance < HALTED) & (n < MOST)

        def step(x: Tensor, chance: Tensor, n: Tensor) -> tuple[Tensor, ...]:
            live = going(chance, n)
            new = torch.where(live[:, None], torch.tanh(x @ p.w), x)
            return new, torch.where(live, chance + torch.sigmoid(new @ p.v - 3), chance), n + 1

        start = x, x.new_zeros(len(x)), torch.tensor(0, device=x.device)
        return tdc.while_loop(lambda x, chance, n: going(chance, n).any(), step, start)[0]

    return one, by_hand


def decoding(p: Weights) -> tuple[Any, Callable[..., Any]]:
    """Tokens, each the most likely one behind the last, until token 0."""

    @tdc.batch
    def one(h: Tensor) -> Tensor:
        out = torch.zeros(STEPS, dtype=torch.long, device=h.device)
        token = torch.ones((), dtype=torch.long, device=h.device)
        n = 0
        while token != 0 and n < STEPS:
            h = torch.tanh(F.embedding(token, p.table) @ p.w + h @ p.u)
            token = F.linear(h, p.table).argmax()
            out[n] = token
            n += 1
        return out

    def by_hand(h: Tensor) -> Tensor:
        def step(h: Tensor, token: Tensor, out: Tensor, n: Tensor) -> tuple[Tensor, ...]:
            live = token != 0
            new = torch.where(live[:, None], torch.tanh(F.embedding(token, p.table) @ p.w + h @ p.u), h)
            found = torch.where(live, F.linear(new, p.table).argmax(1), token)
            here = torch.arange(STEPS, device=h.device) == n
            return new, found, torch.where(live[:, None] & here, found[:, None], out), n + 1

        token = torch.ones(len(h), dtype=torch.long, device=h.device)
        out = torch.zeros(len(h), STEPS, dtype=torch.long, device=h.device)
        start = h, token, out, torch.tensor(0, device=h.device)
        return tdc.while_loop(lambda h, token, out, n: (token != 0).any() & (n < STEPS), step, start)[2]

    return one, by_hand


def candidates(one: Any, by_hand: Callable[..., Any], batch: Any) -> dict[str, Call]:
    """The same result in four ways."""
    run = one if isinstance(batch, tdc.NestedTensor) else one.map
    compiled, masks = torch.compile(run, fullgraph=True), torch.compile(by_hand, fullgraph=True)
    return {
        "loop": lambda: torch.stack([one(x) for x in batch.unbind()]),
        "eager": lambda: run(batch),
        "compiled": lambda: compiled(batch),
        "by hand": lambda: masks(batch),
    }


def trained(call: Call, weights: list[Tensor]) -> Call:
    """Forward, a weighted sum, and backward."""
    out = call()
    factors = torch.linspace(-1, 1, out.numel(), device=out.device).reshape(out.shape)
    return lambda: torch.autograd.grad((call() * factors).sum(), weights, allow_unused=True, materialize_grads=True)


def quietly(call: Call) -> Call:
    """Without autograd."""

    def run() -> Any:
        with torch.no_grad():
            return call()

    return run


def measure(report: Report, name: str, calls: dict[str, Call], weights: list[Tensor]) -> None:
    """One program, forward and trained."""
    inference, training = LIMITS[name]
    modes = {"": {key: quietly(call) for key, call in calls.items()}}
    if training:
        modes[", training"] = {key: trained(call, weights) for key, call in calls.items()}
    for mode, run in modes.items():
        want = run["loop"]()
        for key, call in run.items():
            found = call()
            pairs = zip(found, want, strict=True) if mode else [(found, want)]
            assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in pairs), f"{name}{mode}: {key}"
        times = interleaved(run, rounds=5 if report.quick else 15, burst=0.02, device=report.device)
        report.row(f"{name}{mode}", times, "loop")
        limit = training if mode else inference
        report.limit(f"{name}{mode}: compiled to the loop", ratio(times["compiled"], times["loop"]), limit)
        report.limit(f"{name}{mode}: eager to the loop", ratio(times["eager"], times["loop"]), EAGER)
        report.limit(f"{name}{mode}: compiled to masks by hand", ratio(times["compiled"], times["by hand"]), BY_HAND)


def measure_trace(report: Report, name: str, one: Any, by_hand: Callable[..., Any], batch: Any) -> None:
    """The trace of one program and of its masks by hand."""
    run = one if isinstance(batch, tdc.NestedTensor) else one.map
    fns: dict[str, Callable[..., Any]] = {"tdc.batch": lambda x: run(x), "by hand": by_hand}
    times: dict[str, list[float]] = {key: [] for key in fns}
    for _ in range(3 if report.quick else 7):
        for key, fn in fns.items():
            times[key].append(traced(fn, batch)[0])
    report.row(f"{name}, trace", times, "by hand")
    report.limit(f"{name}: trace to masks by hand", ratio(times["tdc.batch"], times["by hand"]), TRACE)


def measure_decoration(report: Report) -> None:
    """Milliseconds until a function of 99 lines, most of them with control flow, is decorated."""
    body = "".join([LINES.format(k=k) for k in range(9)])
    more = "\n    h = h * total\n    total = h.amax()" * 3
    text = f"def f(xs, h, w, u):\n    total, count = h.sum(), 0{body}{more}\n    return total\n"
    times: list[float] = []
    for _ in range(9 if report.quick else 25):
        made: dict[str, Any] = {"torch": torch}
        exec(compile(text, "<decorated>", "exec"), made)
        gc.collect()
        begin = time.perf_counter()
        tdc.batch(made["f"], source=text)
        times.append((time.perf_counter() - begin) * 1e3)
    lines = len(text.splitlines())
    report.limit(f"decoration of {lines} lines", spread(times), DECORATION, unit=" ms")


def main() -> None:
    args = arguments("bench_batch")
    question = "What does code for one example, run on a batch, cost?"
    report = Report("bench_batch", question, args.device, args.quick)
    rows = tdc.pack([torch.randn(n, 128, device=report.device) for n in lengths_for(32, 100, 0.5).tolist()])
    x = torch.randn(64, 64, device=report.device)
    programs: Any = ((recurrent, 128, rows), (halting, 64, x), (decoding, 64, x))
    for program, features, batch in programs:
        weights = Weights(features, report.device)
        name = program.__name__
        one, by_hand = program(weights)
        measure(report, name, candidates(one, by_hand, batch), weights.all())
        measure_trace(report, name, one, by_hand, batch)
    measure_decoration(report)
    report.write()


if __name__ == "__main__":
    main()
