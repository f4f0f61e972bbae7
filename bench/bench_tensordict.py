"""What does each operation on a TensorDict cost, against dicts by hand, optree and tensordict?

Two batches of 24 small leaves, batch dims (6, 4): `flat`, one level of keys; `nested`, 4 x 3 inner dicts of 2 leaves.
Leaves are float32 with one to three feature dims of 2, so fixed costs are what is measured. The spellings of each row
are in `_tensordict_rows`; every call goes through a lambda, about 0.03 us of each figure.

    eager       all rows: tdc to dicts by hand, tensordict and optree to the same
    compiled    some rows: warm call (Inductor), trace (no code generation), guards (exact)
    tensorclass constructor and attribute read, to a frozen dataclass

Outside the means: `get node`, which reads an inner node: flat storage looks for it, nested dicts have it; `set checked`
and `update checked`, which are `set` and `update` with dicts that see to the batch size, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tdc
from bench import _tensordict_rows as rows
from bench._timing import Call, Report, arguments, geometric_mean, interleaved, own, peer, ratio, spread, traced

CORE = (
    "get", "set", "update", "index", "slice", "mask", "stack", "cat", "reshape", "permute", "apply", "flatten_keys",
)  # fmt: skip
LIMITS = {"core": 1.4, "mean": 1.35, "row": 2.5, "construct": 3.5}
CHECKED = ("set checked", "update checked")
COMPILED = ("index", "mask", "stack", "reshape", "apply two", "add", "sum")


def flat_source(device: str) -> dict[str, Any]:
    """24 leaves at one level."""
    return {f"key{i}": torch.randn(*rows.SIZE, *[2] * (1 + i % 3), device=device) for i in range(24)}


def nested_source(device: str) -> dict[str, Any]:
    """24 leaves in 4 x 3 inner dicts."""
    leaves = iter(flat_source(device).values())
    return {f"a{i}": {f"b{j}": {"x": next(leaves), "y": next(leaves)} for j in range(3)} for i in range(4)}


def inputs(layout: str, device: str, make: Callable[[Any], Any]) -> rows.Inputs:
    """The same data for each candidate, in its form."""
    torch.manual_seed(0)
    nested = layout == "nested"
    sources = [(nested_source if nested else flat_source)(device) for _ in range(4)]
    fresh = sources[3]
    new = {"a1": {"b2": fresh["a1"]["b2"]}} if nested else {k: fresh[k] for k in ("key7", "key8")}
    leaf = fresh["a1"]["b2"]["y"] if nested else fresh["key7"]
    names: list[Any] = ["a0", ("a1", "b0")] if nested else ["key1", "key3", "key20"]
    mask = torch.tensor([True, False, True, True, False, True], device=device)
    index = torch.tensor([5, 0, 0, 2], device=device)
    key = ("a1", "b2", "y") if nested else "key7"
    return rows.Inputs([make(s) for s in sources[:3]], key, leaf, new, mask, index, names, sources[0])


def candidates(layout: str, device: str, library: Any) -> dict[str, dict[str, Call]]:
    """Every row of every candidate."""
    plain = inputs(layout, device, lambda s: s)
    found = {"dict": rows.by_hand(plain, layout == "nested")}
    found["tdc"] = rows.ours(inputs(layout, device, lambda s: tdc.TensorDict(s, rows.SIZE)))
    if library:
        theirs = inputs(layout, device, lambda s: library.TensorDict(s, rows.SIZE))
        found["tensordict"] = rows.theirs(theirs, library)
    return found | {"optree": rows.by_optree(plain)}


def leaves_of(x: Any) -> list[Any]:
    """Tensors in a result, to see that candidates agree; keys come in any order and form."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, (list, tuple)):
        return [leaf for v in x for leaf in leaves_of(v)]
    return [leaf for k in sorted(x.keys()) for leaf in leaves_of(x[k])] if hasattr(x, "keys") else []


def agree(name: str, results: dict[str, Any]) -> None:
    """Every candidate gives the same tensors.

    Raises:
        AssertionError: one does not.
    """
    first, *others = [leaves_of(x) for x in results.values()]
    assert all([len(o) == len(first) for o in others]), f"{name}: different numbers of leaves"
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def eager(report: Report, layout: str, library: Any) -> dict[str, Any]:
    """All rows of one layout, their means to dicts, and the times by row."""
    calls = candidates(layout, report.device, library)
    rounds, found = 7 if report.quick else 31, {}
    for name in calls["dict"]:
        here = {who: table[name] for who, table in calls.items() if name in table}
        if name not in ("keys", "items"):
            agree(f"{layout} {name}", {who: call() for who, call in here.items()})
        found[name] = interleaved(here, rounds=rounds, burst=0.001 if report.quick else 0.002, device=report.device)
        report.row(f"{layout} {name}", found[name], "dict")

    def mean(who: str, base: str, names: Any) -> Any:
        return geometric_mean([(found[n][who], found[n][base]) for n in names])

    for name in CHECKED:
        report.limit(f"{layout} {name}: tdc to dict", ratio(found[name]["tdc"], found[name]["dict"]), LIMITS["row"])
    found = {name: times for name, times in found.items() if name not in ("get node", *CHECKED)}
    report.limit(
        f"{layout}: mean of {len(CORE)} core operations, tdc to dict", mean("tdc", "dict", CORE), LIMITS["core"]
    )
    report.limit(f"{layout}: mean of all {len(found)} rows, tdc to dict", mean("tdc", "dict", found), LIMITS["mean"])
    for name, times in found.items():
        figure = ratio(times["tdc"], times["dict"])
        limit = LIMITS["construct" if name == "construct" else "row"]
        if figure.median > 0.8 * limit:
            report.limit(f"{layout} {name}: tdc to dict", figure, limit)
    return {f"{layout} {name}": times for name, times in found.items()}


def against(report: Report, found: dict[str, Any]) -> None:
    """All rows of both layouts, to tensordict."""
    pairs = [(times["tdc"], times["tensordict"]) for times in found.values() if "tensordict" in times]
    if not pairs:
        return
    report.limit(f"mean of all {len(pairs)} rows of both layouts, tdc to tensordict", geometric_mean(pairs), 0.5)
    slower = [name for name, times in found.items() if ratio(times["tdc"], times["tensordict"]).median >= 1]
    share = spread([len(slower) / len(pairs)])
    report.limit("share of rows on which tensordict is as fast or faster", share, 0.1, unit="")
    report.note(f"tensordict is as fast or faster on: {', '.join(slower) or 'none'}")


def compiled(report: Report, layout: str, library: Any, ratios: dict[str, list[Any]]) -> None:
    """Trace, guards and warm call of some rows, in one graph each; adds their pairs to `ratios`."""
    calls = candidates(layout, report.device, library)
    del calls["optree"]
    for name in COMPILED:
        here = {who: table[name] for who, table in calls.items()}
        traces: dict[str, list[float]] = {who: [] for who in here}
        guards: dict[str, int] = {}
        for _ in range(1 if report.quick else 3):
            for who, call in here.items():
                seconds, _, guards[who] = traced(own(call))
                traces[who].append(seconds)
        torch._dynamo.reset()
        ready = {who: torch.compile(own(call), fullgraph=True) for who, call in here.items()}
        with torch.no_grad():
            warm = interleaved(ready, rounds=7 if report.quick else 21, burst=0.002, device=report.device)
        counts = ", ".join(f"{who} {n}" for who, n in guards.items())
        report.row(f"{layout} compiled {name}: trace", traces, "dict", guards=counts)
        report.row(f"{layout} compiled {name}: warm", warm, "dict")
        lines = {who: [float(n)] for who, n in guards.items()}
        for what, times in (("warm call", warm), ("trace", traces), ("guards", lines)):
            for base in ("dict", "tensordict"):
                if base in times and min(times[base]) > 0:
                    ratios.setdefault(f"{what}, tdc to {base}", []).append((times["tdc"], times[base]))


@dataclasses.dataclass(frozen=True)
class Plain:
    """Three tensors."""

    obs: Tensor
    action: Tensor
    reward: Tensor


@tdc.tensorclass
class Ours:
    """Batches of the same data with one batch size."""

    obs: Tensor
    action: Tensor
    reward: Tensor


def classes(report: Report) -> None:
    """Constructor and attribute read."""
    x = torch.randn(8, 3, device=report.device)
    size = torch.Size([8])
    plain, ours = Plain(x, x, x), Ours(x, x, x, batch_size=size)  # type: ignore[call-arg]  # added by the decorator
    table = {
        "constructor": ({"dataclass": lambda: Plain(x, x, x), "tdc": lambda: Ours(x, x, x, batch_size=size)}, 2.5),  # type: ignore[call-arg]  # the same
        "attribute read": ({"dataclass": lambda: plain.action, "tdc": lambda: ours.action}, 3.0),
    }
    for name, (calls, limit) in table.items():
        times = interleaved(calls, rounds=9 if report.quick else 41, device=report.device)
        report.row(f"tensorclass {name}", times, "dataclass")
        report.limit(f"tensorclass {name}, to a frozen dataclass", ratio(times["tdc"], times["dataclass"]), limit)


def main() -> None:
    args = arguments("bench_tensordict")
    question = "What does each operation on a TensorDict cost, as a multiple of dicts by hand?"
    report = Report("bench_tensordict", question, args.device, args.quick)
    library = peer("tensordict", report)
    found = {name: times for layout in ("flat", "nested") for name, times in eager(report, layout, library).items()}
    against(report, found)
    classes(report)
    ratios: dict[str, list[Any]] = {}
    for layout in ("flat", "nested"):
        compiled(report, layout, library, ratios)
    for what, pairs in ratios.items():
        mean = geometric_mean(pairs)
        if what.endswith("tensordict"):
            report.limit(f"compiled {what}, mean of {len(pairs)} rows", mean, 0.5)
        else:
            report.note(f"compiled {what}, mean of {len(pairs)} rows: {mean.median:.2f}")
    report.write()


if __name__ == "__main__":
    main()
