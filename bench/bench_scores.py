"""What does attention with a function of scores cost on ragged rows, against padding?

    distance    a score falls with the distance of positions, by head, as in ALiBi
    table       a number that is learned for each distance and head is added, as in T5
    cap         scores are bent by tanh
    window      keys that are near count

B=32, 8 heads of 32 features, longest 256, at occupancies of 20, 35 and 77 %. `padded` makes the scores of the
rectangle, changes them and hides padding; `mask` is `F.scaled_dot_product_attention` of the rectangle with what can be
added to scores made before, padding included; it has no tanh, and none is learned. Inference runs without autograd;
training is forward, sum of squares and backward to queries, keys, values and the table. The limit is on tdc over
`padded`, eagerly and as one graph by Inductor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tdc
from bench._timing import Call, Report, arguments, interleaved, own, ratio, spread
from bench.bench_nested import LONGEST, B, lengths_at
from bench.nested_chain import inference
from tdc.compile import peak_bytes
from tdc.ops import varlen_attention

LIMITS = {0.20: 0.35, 0.35: 0.6, 0.77: 1.1}
HEADS, D, WINDOW = 8, 32, 32
Mod = Callable[..., Tensor]


def functions(slopes: Tensor, table: Tensor) -> dict[str, Mod]:
    """A score, row, head, positions of query and key -> a score."""
    return {
        "distance": lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(),
        "table": lambda s, b, h, i, j: s + table[h, i - j + LONGEST],
        "cap": lambda s, b, h, i, j: torch.tanh(s / 20) * 20,
        "window": lambda s, b, h, i, j: torch.where((i - j).abs() < WINDOW, s, -math.inf),
    }


def padded(mod: Mod, hidden: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, H, L, D) -> the same; `hidden` (B, L) are keys of padding."""
    h, i, j = [torch.arange(n, device=q.device) for n in (HEADS, q.shape[2], k.shape[2])]
    scores = mod(q @ k.mT / math.sqrt(D), None, h[:, None, None], i[:, None], j)
    return scores.masked_fill(hidden[:, None, None], -1e9).softmax(-1) @ v


def ragged(mod: Mod, structure: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return varlen_attention(q, k, v, structure, structure, score_mod=mod)


def compiled(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(own(lambda q, k, v: run(q, k, v)), fullgraph=True)


def training(run: Callable[..., Tensor], keep: Tensor | None, leaves: list[Tensor]) -> Call:
    """Forward, sum of squares of real positions, backward."""

    def call() -> Any:
        out = run(*leaves[:3])
        out = out if keep is None else out.masked_fill(keep, 0)
        return torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)

    return call


def measure(report: Report, name: str, occupancy: float) -> None:
    """One function at one occupancy."""
    lengths = lengths_at(occupancy, B, LONGEST)
    parts = [torch.randn(sum(lengths), HEADS, D, device=report.device).requires_grad_() for _ in range(3)]
    slopes, table = torch.rand(HEADS), torch.randn(HEADS, 2 * LONGEST + 1, requires_grad=True)
    mod = functions(slopes.to(report.device), table.to(report.device))[name]
    batches = [tdc.pack([*x.detach().split(lengths)]) for x in parts]
    rect = [x.to_padded().data.transpose(1, 2).contiguous().requires_grad_() for x in batches]
    hidden = torch.arange(LONGEST, device=report.device) >= batches[0].lengths[:, None]
    runs = {"padded": partial(padded, mod, hidden), "tdc": partial(ragged, mod, batches[0].structure)}
    torch._dynamo.reset()
    runs |= {f"{k}, compiled": compiled(f) for k, f in dict(runs).items()}
    leaves = {k: [*(rect if "padded" in k else parts), table] for k in runs}
    rounds, what = 3 if report.quick else 9, f"{name}, {occupancy:.0%}"
    keep = hidden[:, None, :, None]
    calls = {k: inference(lambda a, f=f: f(*a), leaves[k][:3]) for k, f in runs.items()}
    steps = {k: training(f, keep if "padded" in k else None, leaves[k]) for k, f in runs.items()}
    for a, b in zip(steps["padded"](), steps["tdc"](), strict=True):
        if a is not None and b is not None:
            real = a if a is table or a.ndim < 4 else a.transpose(1, 2)[~hidden]
            torch.testing.assert_close(b, real, atol=1e-3, rtol=1e-3)
    if name not in ("cap", "table"):
        h, i, j = [torch.arange(n, device=report.device) for n in (HEADS, LONGEST, LONGEST)]
        bias = mod(torch.zeros(()), None, h[:, None, None], i[:, None], j)
        bias = bias.masked_fill(hidden[:, None, None], -math.inf).expand(B, HEADS, -1, -1).contiguous()
        calls["mask"] = inference(lambda a: F.scaled_dot_product_attention(*a, attn_mask=bias), rect)
    for way, group in (("inference", calls), ("training", steps)):
        for call in group.values():
            call()
        times = interleaved(group, rounds=rounds, burst=0.1, device=report.device)
        report.row(f"{what}, {way}", times, "padded")
        for k in ("", ", compiled"):
            figure = ratio(times[f"tdc{k}"], times[f"padded{k}"])
            report.limit(f"{what}, {way}{k}: tdc to padded", figure, LIMITS[occupancy])
    memory = peak_bytes(steps["tdc"]) / peak_bytes(steps["padded"])
    report.limit(f"{what}, training: memory of tdc to padded", spread([memory]), LIMITS[occupancy])


def main() -> None:
    args = arguments("bench_scores")
    question = "What does attention with a function of scores cost on ragged rows, against padding?"
    report = Report("bench_scores", question, args.device, args.quick)
    torch.manual_seed(0)
    for name in functions(torch.zeros(1), torch.zeros(1)):
        for occupancy in LIMITS:
            measure(report, name, occupancy)
    report.write()


if __name__ == "__main__":
    main()
