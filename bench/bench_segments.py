"""What does arithmetic along the ragged dim cost against padding, and against raw values with row ids at hand?

B=64, longest 512, at 30 % of real positions, 64 features: reductions, softmax, scans, moves and lookups along the
ragged dim of (B, -1, 64), and some of (B, 64, -1), whose positions lie innermost in memory. The candidates are

    tdc       the operation on a NestedTensor
    padded    the same on a rectangle (B, 512, 64), with a mask where padding would count
    raw       on packed values, with row ids or an index computed beforehand: what one would write by hand

eagerly and compiled, each with the base `padded` of its own mode. Inference runs without autograd; training is forward,
sum of squares and backward to the values. The limit is on tdc over padded; softmax, means and norms are also held to
raw, eagerly. Of the code that Inductor makes of tdc for two threads the table counts atomic additions, calls of torch's
own kernels, and calls of operators of this library; `pads` says whether a rectangle is made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import tdc
from bench._timing import Call, Report, arguments, interleaved, own, ratio
from bench.nested_chain import lengths_for
from tdc.testing import forbid

B, LONGEST, D, OCCUPANCY, WORDS, K, EPS = 64, 512, 64, 0.3, 1000, 8, 1e-5
LIMIT = 1.0
BY_HAND, OVER_RAW = ("softmax", "mean", "layer norm", "norm over positions"), 2.0
Run = Callable[[Any], Any]


class Given(NamedTuple):
    """Values that candidates know beforehand."""

    lengths: Tensor
    offsets: Tensor
    ids: Tensor
    positions: Tensor  # of each element within its example
    mask: Tensor  # (B, longest, 1)
    table: Tensor  # a row for each position
    x: tdc.NestedTensor

    @property
    def mirrored(self) -> Tensor:
        return self.offsets[self.ids] + self.offsets[self.ids + 1] - 1 - torch.arange(self.ids.shape[0])

    @property
    def inner(self) -> Tensor:
        """All positions but the first and the last of each example."""
        last = (self.lengths - 1)[self.ids]
        return ((self.positions > 0) & (self.positions < last)).nonzero()[:, 0]

    @property
    def twice(self) -> Tensor:
        """Each example behind itself."""
        spans = [torch.arange(int(a), int(z)) for a, z in zip(self.offsets, self.offsets[1:], strict=False)]
        return torch.cat([torch.cat([span, span]) for span in spans])


class Operation(NamedTuple):
    """The same operation of each candidate."""

    tdc: Run
    padded: Run
    raw: Run | None
    exact: bool = True  # whether it is differentiable


def total(g: Given, v: Tensor) -> Tensor:
    return v.new_zeros(B, *v.shape[1:]).index_add(0, g.ids, v)


def segment(reduce: str, g: Given, v: Tensor) -> Tensor:
    return torch.segment_reduce(v, reduce, offsets=g.offsets, axis=0)


def raw_softmax(g: Given, v: Tensor) -> Tensor:
    top = segment("max", g, v.detach())
    e = (v - top[g.ids]).exp()
    return e / total(g, e)[g.ids]


def raw_apart(g: Given, v: Tensor) -> Tensor:
    """How far elements are from the mean of their example."""
    return v - (total(g, v) / g.lengths[:, None])[g.ids]


def padded_apart(g: Given, p: Tensor) -> Tensor:
    return torch.where(g.mask, p - p.sum(1, True) / g.lengths[:, None, None], 0)


def raw_var(g: Given, v: Tensor) -> Tensor:
    return total(g, raw_apart(g, v).square()) / (g.lengths - 1)[:, None]


def padded_var(g: Given, p: Tensor) -> Tensor:
    return padded_apart(g, p).square().sum(1) / (g.lengths - 1)[:, None]


def norm_over_positions(x: tdc.NestedTensor) -> tdc.NestedTensor:
    """Each feature of each example with mean 0 and variance 1."""
    var, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
    return (x - mean) * (var + EPS).rsqrt()


def raw_norm(g: Given, v: Tensor) -> Tensor:
    apart = raw_apart(g, v)
    var = total(g, apart.square()) / g.lengths[:, None]
    return apart * (var + EPS).rsqrt()[g.ids]


def padded_norm(g: Given, p: Tensor) -> Tensor:
    apart = padded_apart(g, p)
    return apart * (apart.square().sum(1, True) / g.lengths[:, None, None] + EPS).rsqrt()


def raw_cumsum(g: Given, v: Tensor) -> Tensor:
    """Of all values, less what stands before the example: not exact, but what one finds by hand."""
    sums = F.pad(v.cumsum(0), (0, 0, 1, 0))
    return sums[1:] - sums[g.offsets[g.ids]]


def padded_mirror(g: Given, p: Tensor) -> Tensor:
    steps = (g.lengths[:, None] - 1 - torch.arange(LONGEST)).clamp(min=0)
    return p.gather(1, steps[:, :, None].expand(p.shape))


def padded_inner(g: Given, p: Tensor) -> Tensor:
    """The rectangle keeps rows in place; the last positions become padding."""
    return p[:, 1:-1] * g.mask[:, 2:]


def padded_twice(g: Given, p: Tensor) -> Tensor:
    steps = torch.arange(2 * LONGEST)
    where = torch.where(steps < g.lengths[:, None], steps, steps - g.lengths[:, None]).clamp(max=LONGEST - 1)
    return p.gather(1, where[:, :, None].expand(-1, -1, D))


def operations(g: Given) -> dict[str, Operation]:
    """By name. They differ in what they read of `g`."""
    low = -math.inf
    mirrored, inner, twice, positions, weight = g.mirrored, g.inner, g.twice, g.positions, torch.randn(WORDS, D)
    words = torch.randint(WORDS, (g.ids.shape[0],))
    bags: Any = g.x.with_values(words)
    dense = bags.to_padded().filled(0)
    pads = F.pad(g.table, (0, 0, 0, 0))

    def fill(p: Tensor, value: float) -> Tensor:
        return p.masked_fill(~g.mask, value)

    return {
        "softmax": Operation(lambda x: x.softmax(1), lambda p: fill(p, low).softmax(1), partial(raw_softmax, g)),
        "sum": Operation(lambda x: x.sum(1), lambda p: fill(p, 0).sum(1), partial(total, g)),
        "mean": Operation(
            lambda x: x.mean(1), lambda p: fill(p, 0).sum(1) / g.lengths[:, None],
            lambda v: total(g, v) / g.lengths[:, None],
        ),
        "layer norm": Operation(*[lambda x: F.layer_norm(x, (D,))] * 3),
        "norm over positions": Operation(norm_over_positions, partial(padded_norm, g), partial(raw_norm, g)),
        "amax": Operation(lambda x: x.amax(1), lambda p: fill(p, low).amax(1), partial(segment, "max", g)),
        "var": Operation(lambda x: x.var(1), partial(padded_var, g), partial(raw_var, g)),
        "logsumexp": Operation(
            lambda x: x.logsumexp(1), lambda p: fill(p, low).logsumexp(1), None,
        ),
        "prod": Operation(lambda x: x.prod(1), lambda p: fill(p, 1).prod(1), partial(segment, "prod", g)),
        "argmax": Operation(lambda x: x.argmax(1), lambda p: fill(p, low).argmax(1), None, False),
        "max": Operation(lambda x: x.max(1).values, lambda p: fill(p, low).max(1).values, None),
        "cumsum": Operation(lambda x: x.cumsum(1), lambda p: p.cumsum(1), partial(raw_cumsum, g)),
        "cumprod": Operation(lambda x: x.cumprod(1), lambda p: p.cumprod(1), None),
        "cummax": Operation(lambda x: x.cummax(1).values, lambda p: p.cummax(1).values, None),
        "x + pos[:L]": Operation(
            lambda x: x + g.table, lambda p: p + g.table, lambda v: v + pads.index_select(0, positions)
        ),
        "x[:, 1:-1]": Operation(
            lambda x: x[:, 1:-1], partial(padded_inner, g), lambda v: v.index_select(0, inner)
        ),
        "flip": Operation(lambda x: x.flip(1), partial(padded_mirror, g), lambda v: v.index_select(0, mirrored)),
        "cat": Operation(
            lambda x: torch.cat([x, x], 1), partial(padded_twice, g), lambda v: v.index_select(0, twice)
        ),
        "pad": Operation(lambda x: F.pad(x, (0, 0, 1, 1)), lambda p: F.pad(p, (0, 0, 1, 1)), None),
        "topk": Operation(
            lambda x: x.topk(K, 1).values, lambda p: fill(p, low).topk(K, 1).values, None
        ),
        "embedding_bag": Operation(
            lambda x: F.embedding_bag(bags, weight + x.values[0, 0], mode="mean"),
            lambda p: (F.embedding(dense, weight + p[0, 0, 0]) * g.mask).sum(1) / g.lengths[:, None],
            lambda v: F.embedding_bag(words, weight + v[0, 0], g.offsets[:-1], mode="mean"),
        ),
    }  # fmt: skip


def positions_innermost(g: Given) -> tuple[Given, dict[str, Operation]]:
    """The same batch as (B, D, -1), and operations on it."""
    x = tdc.NestedTensor(g.x.values.t().contiguous(), g.offsets, max_length=LONGEST, ragged_dim=2)
    g, low = g._replace(x=x, mask=g.mask.transpose(1, 2)), -math.inf

    def fill(p: Tensor, value: float) -> Tensor:
        return p.masked_fill(~g.mask, value)

    return g, {
        "softmax": Operation(lambda x: x.softmax(2), lambda p: fill(p, low).softmax(2), None),
        "sum": Operation(lambda x: x.sum(2), lambda p: fill(p, 0).sum(2), None),
        "amax": Operation(lambda x: x.amax(2), lambda p: fill(p, low).amax(2), None),
        "var": Operation(lambda x: x.var(2), partial(padded_var_last, g), None),
        "cumsum": Operation(lambda x: x.cumsum(2), lambda p: p.cumsum(2), None),
        "group norm": Operation(lambda x: F.group_norm(x, 8), lambda p: F.group_norm(p, 8), None),  # counts padding
    }


def padded_var_last(g: Given, p: Tensor) -> Tensor:
    mean = p.sum(2, True) / g.lengths[:, None, None]
    return torch.where(g.mask, p - mean, 0).square().sum(2) / (g.lengths - 1)[:, None]


def content(y: Any) -> Tensor:
    return y if isinstance(y, Tensor) else y.values


def inference(run: Run, x: Any) -> Call:
    def call() -> Any:
        with torch.no_grad():
            return content(run(x))

    return call


def training(run: Run, build: Run, leaf: Tensor) -> Call:
    """Forward, sum of squares, backward."""

    def call() -> Any:
        return torch.autograd.grad(content(run(build(leaf))).square().sum(), leaf)

    return call


CALLED = re.compile(r"^\s*(?:\w+ = )?(?:torch\.ops\.)?(aten|tdc|extern_kernels)\.\w+\S*\(", re.MULTILINE)


def code_of(call: Call) -> dict[str, int]:
    """Code that Inductor makes of a call for two threads; one of its own for one thread comes after."""
    with config.patch({"cpp.threads": 2}):
        _, parts = run_and_get_code(call)
    torch._dynamo.reset()
    code = "\n".join(parts)
    called = [found.group(1) for found in CALLED.finditer(code)]
    return {"atomics": len(re.findall(r"atomic_add\w*\(", code)), "aten": len(called) - called.count("tdc"),
            "tdc ops": called.count("tdc")}  # fmt: skip


def measure(report: Report, name: str, op: Operation, g: Given) -> None:
    """One operation in both modes."""
    v = g.x.values
    padded = g.x.to_padded().filled(0)
    builds: dict[str, tuple[Run, Tensor]] = {
        "tdc": (lambda leaf: g.x.with_values(leaf), v),
        "padded": (lambda leaf: leaf, padded),
        "raw": (lambda leaf: leaf, v),
    }
    runs = {n: run for n, run in zip(builds, op[:3], strict=True) if run is not None}
    rounds = 5 if report.quick else 21
    for train in (False, True) if op.exact else (False,):
        for mode in ("eager", "compiled"):
            torch._dynamo.reset()
            calls: dict[str, Call] = {}
            for n, run in runs.items():
                build, leaf = builds[n]
                # each of its own code: graphs are kept there
                made = torch.compile(own(lambda x, run=run: run(x)), fullgraph=True) if mode == "compiled" else run
                leaf = leaf.detach().requires_grad_(train)
                calls[n] = training(made, build, leaf) if train else inference(made, build(leaf))
            counts: dict[str, Any] = code_of(calls["tdc"]) if mode == "compiled" else {}
            counts["pads"] = pads(lambda run=op.tdc: run(g.x))
            for call in calls.values():
                call()
            what = f"{name}, {mode} {'training' if train else 'inference'}"
            times = interleaved(calls, rounds=rounds, burst=0.01, device=report.device)
            report.row(what, times, "padded", **counts)
            report.limit(f"{what}: tdc to padded", ratio(times["tdc"], times["padded"]), LIMIT)
            if name in BY_HAND and mode == "eager":
                report.limit(f"{what}: tdc to raw", ratio(times["tdc"], times["raw"]), OVER_RAW)


def pads(call: Call) -> str:
    """True if a graph of a call makes a rectangle."""
    torch._dynamo.reset()
    try:
        with forbid(padding=True):
            torch.compile(call, backend="eager", fullgraph=True)()
    except Exception as error:  # Dynamo keeps the text of an error, not its class
        if "no padding" not in str(error):
            raise
        return "yes"
    finally:
        torch._dynamo.reset()
    return "no"


def main() -> None:
    args = arguments("bench_segments")
    question = "What does arithmetic along the ragged dim cost against padding, and raw values with row ids at hand?"
    report = Report("bench_segments", question, args.device, args.quick)
    torch.manual_seed(0)
    lengths = lengths_for(B, LONGEST, OCCUPANCY).clamp(min=K)
    offsets = tdc.offsets_of(lengths)
    ids = torch.repeat_interleave(lengths)
    positions = torch.arange(ids.shape[0]) - offsets[ids]
    mask = (torch.arange(LONGEST) < lengths[:, None]).unsqueeze(2)
    x = tdc.NestedTensor(torch.randn(ids.shape[0], D), offsets, max_length=LONGEST)
    g = Given(lengths, offsets, ids, positions, mask, torch.randn(LONGEST, D), x)
    report.note(f"N={ids.shape[0]}, {ids.shape[0] / (B * LONGEST):.1%} of {B} x {LONGEST} are real")
    for name, op in operations(g).items():
        measure(report, name, op, g)
    g, others = positions_innermost(g)
    for name, op in others.items():
        measure(report, f"{name} of (B, {D}, -1)", op, g)
    report.write()


if __name__ == "__main__":
    main()
