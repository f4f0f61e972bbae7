"""What does a training step as one function cost, against the best that torch's own modules and optimisers do?

    time      `train_step` against a compiled nn.Module with torch.optim.AdamW: eager (foreach, fused) and compiled
              (also capturable, on accelerators). All take the same batch, and their first losses are compared. Limit
              1.00 times the best.
    memory    peak bytes of one such step, beyond what was there before it. Limit 1.05 times the least of these.
    trace     time of a first call with no code generation of a step of 100 parameters, over the same step on plain
              dicts. Limit 1.2.
    compiles  graphs, breaks and compiles over 10 batches of different sizes. Exactly 1, 0 and 1.

Three models: a small MLP, a wide one (for comparison, without a limit), and the demo's transformer on ragged batches.
Two kinds of step: pure, which returns a new state, and donating, which writes into the old one as torch.optim does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bench._timing import Report, arguments, exact, guards_of, interleaved, own, ratio, traced
from examples.demo.data import load_docstrings, split
from examples.demo.model import Classifier, ragged_batch
from examples.demo.train import loader
from tdc import TensorDict, functional_call
from tdc.compile import backend, dynamic, peak_bytes, train_step
from tdc.optim import adamw

LR = 1e-3
OPTIMIZERS: dict[str, tuple[dict[str, Any], bool]] = {  # settings, and whether the optimiser's step is compiled
    "foreach": ({"foreach": True}, False),
    "fused": ({"fused": True}, False),
    "compiled": ({}, True),
    "compiled capturable": ({"capturable": True}, True),
}
Run = Callable[[TensorDict], torch.Tensor]


class Rows(nn.Module):
    """A plain model as one of batches."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.GELU())]
        self.net = nn.Sequential(*layers[:-1])

    def forward(self, batch: TensorDict) -> torch.Tensor:
        return self.net(batch["x"])


def flat(rows: int, width: int, device: str) -> TensorDict:
    batch = TensorDict({"x": torch.randn(rows, width), "label": torch.randint(10, (rows,))}, [rows])
    return dynamic(batch.to(device))


def models(device: str) -> dict[str, tuple[nn.Module, list[TensorDict]]]:
    """By name: a model, and ten batches of different sizes."""
    corpus = load_docstrings()
    train, _ = split(corpus)
    plan = [tuple(train[i * 40 : i * 40 + 24 + i]) for i in range(10)]
    return {
        "small MLP": (Rows(32, 64, 64, 10), [flat(32 + i, 32, device) for i in range(10)]),
        "wide MLP": (Rows(512, 1024, 1024, 10), [flat(128 + i, 512, device) for i in range(10)]),
        "transformer": (Classifier(len(corpus.classes)), list(loader(corpus, plan, ragged_batch, device))),
    }


def by_module(model: nn.Module, settings: dict[str, Any], compiled: bool) -> Run:
    """The peer: a compiled module, backward, and an optimiser that changes parameters in place."""
    net = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, **settings)
    update = (
        torch.compile(own(optimizer.step.__func__).__get__(optimizer), backend=backend) if compiled else optimizer.step
    )

    def loss_fn(batch: TensorDict) -> torch.Tensor:
        return F.cross_entropy(net(batch), batch["label"])

    forward = torch.compile(own(loss_fn), backend=backend, fullgraph=True)

    def run(batch: TensorDict) -> torch.Tensor:
        loss = forward(batch)
        loss.backward()
        update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return run


class Functional:
    """Ours: the state goes round."""

    def __init__(self, model: nn.Module, donate: bool) -> None:
        def loss_fn(params: TensorDict, batch: TensorDict) -> torch.Tensor:
            return F.cross_entropy(functional_call(model, params, (batch,)), batch["label"])

        self.step = train_step(loss_fn, adamw(LR), donate=donate)
        self.state = self.step.init(model)

    def __call__(self, batch: TensorDict) -> torch.Tensor:
        self.state, metrics = self.step(self.state, batch)
        return metrics["loss"]


def measure(report: Report, name: str, model: nn.Module, batches: list[TensorDict]) -> None:
    """Time, memory and compiles of one model."""
    torch._dynamo.reset()
    model = model.to(report.device)
    runs: dict[str, Any] = {"pure": Functional(model, False), "donating": Functional(model, True)}
    for label, (settings, compiled) in OPTIMIZERS.items():
        if report.device == "cpu" and settings.get("capturable"):
            report.note(
                f"{name}: {label} left out, torch has it for accelerators only"
            ) if name == "small MLP" else None
            continue
        runs[label] = by_module(model, settings, compiled)
    losses = {label: [run(batch).item() for batch in batches] for label, run in runs.items()}
    apart = max(math.dist(x[:4], losses["fused"][:4]) for x in losses.values())
    report.note(f"{name}: losses of the first 4 steps within {apart:.1e} of each other")
    counts = runs["donating"].step.counts
    for what, limit in (("graphs", 1), ("breaks", 0), ("compiles", 1)):
        report.limit(f"{name}, 10 batches of different sizes: {what}", exact(getattr(counts, what)), limit, unit="")
    peaks = {label: peak_bytes(run, batches[0]) for label, run in runs.items()}
    calls = {label: (lambda run=run: run(batches[0])) for label, run in runs.items()}
    burst = 0.01 if name == "small MLP" else 0.05
    times = interleaved(calls, rounds=9 if report.quick else 31, burst=burst, device=report.device)
    peers = [label for label in runs if label in OPTIMIZERS]
    best = min(peers, key=lambda label: ratio(times[label], times["fused"]).median)
    sizes = ", ".join(f"{label} {size / 1e6:.3g}" for label, size in peaks.items())
    report.row(f"{name} step", times, best, kernels=counts.kernels, peak_MB=sizes)
    if name == "wide MLP":
        return
    report.limit(f"{name}: time, donating to {best}", ratio(times["donating"], times[best]), 1.0)
    least = min(peers, key=lambda label: peaks[label])
    report.limit(f"{name}: peak memory, donating to {least}", exact(peaks["donating"] / peaks[least]), 1.05)


def measure_trace(report: Report) -> None:
    """A step of 100 parameters on a TensorDict and on dicts, traced without code generation."""
    params = {f"w{i}": torch.randn(8, 8) / 3 for i in range(100)}
    x = torch.randn(4, 8)

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        for i in range(100):
            x = torch.tanh(x @ params[f"w{i}"])
        return x.square().mean()

    def on_dicts(state: dict[str, Any], x: torch.Tensor) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        p, m, s = state["params"], state["mean"], state["square"]
        grads, loss = torch.func.grad_and_value(loss_fn)(p, x)
        n = (state["count"] + 1).to(torch.float32)
        rate, root = LR / -torch.expm1(n * math.log(0.9)), (-torch.expm1(n * math.log(0.999))).sqrt()
        m = {k: torch.lerp(m[k], g, 0.1) for k, g in grads.items()}
        s = {k: torch.addcmul(s[k] * 0.999, g, g, value=0.001) for k, g in grads.items()}
        new = {k: torch.addcmul(p[k] * (1 - LR * 0.01), m[k] / (s[k].sqrt() / root + 1e-8), rate, value=-1) for k in p}
        after = {"params": new, "mean": m, "square": s, "count": state["count"] + 1, "step": state["step"] + 1}
        return after, {"loss": loss}

    step = train_step(loss_fn, adamw(LR), compile=False)
    state = step.init(TensorDict(params))
    zero = torch.tensor(0)
    zeros = [{k: torch.zeros_like(v) for k, v in params.items()} for _ in range(2)]
    plain = {"params": params, "mean": zeros[0], "square": zeros[1], "count": zero, "step": zero.clone()}

    def on_state(state: TensorDict, x: torch.Tensor) -> Any:
        return step.update(state, x)

    new, _ = on_state(state, x)
    torch.testing.assert_close(new["params"].to_dict(), on_dicts(plain, x)[0]["params"])
    candidates: dict[str, tuple[Any, Any]] = {"dict": (on_dicts, plain), "train_step": (on_state, state)}
    times: dict[str, list[float]] = {label: [] for label in candidates}
    counts: dict[str, tuple[int, int]] = {}
    for _ in range(3 if report.quick else 9):
        for label, (fn, given) in candidates.items():
            seconds, graphs, guards = traced(fn, given, x)
            times[label].append(seconds)
            counts[label] = graphs, guards
    guards = ", ".join(f"{label} {c[1]}" for label, c in counts.items())
    report.row("trace, 100 parameters", times, "dict", guards=guards)
    report.limit("trace of a step of 100 parameters, to dicts", ratio(times["train_step"], times["dict"]), 1.2)
    compiled = train_step(loss_fn, adamw(LR), backend="eager")  # without guards on code of the library
    compiled(state, x)
    held = guards_of(compiled._run._compiled._torchdynamo_orig_callable)
    report.limit("guards of a compiled step of 100 parameters, to dicts", exact(held / counts["dict"][1]), 1.2)


def main() -> None:
    args = arguments("bench_compile")
    question = "What does a training step as one function cost, against a compiled module with torch.optim?"
    report = Report("bench_compile", question, args.device, args.quick)
    torch.manual_seed(0)
    measure_trace(report)
    for name, (model, batches) in models(args.device).items():
        measure(report, name, model, batches)
    report.write()


if __name__ == "__main__":
    main()
