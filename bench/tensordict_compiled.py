"""Does a TensorDict cost anything over a plain dict of tensors in a compiled call?

Two batches of small leaves (8, 8), batch size 8: `flat`, 50 leaves at one level; `nested`, 24 leaves in 4 x 3 inner
dicts of 2. The compiled function adds 1 to every leaf: `td.apply(lambda x: x + 1)`, a comprehension over the flat dict,
a recursive map over the nested one. The kernels are the same, so the difference is what a call costs besides: guards,
taking the input apart and putting the output together.

    warm call   time of a call once compiled (Inductor)         limits 1.05 (flat) and 1.10 (nested) times the dict
    trace       time of a first call with no code generation    guards, graphs: exact, of that compilation

Guards are the leaf guards that run before each call: types, keys, shapes, identity of the code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench._timing import Report, arguments, interleaved, own, peer, ratio, traced
from tdc import TensorDict

LIMITS = {"flat": 1.05, "nested": 1.10}


def on_flat(d: dict[str, Any]) -> dict[str, Any]:
    return {k: v + 1 for k, v in d.items()}


def on_nested(d: dict[str, Any]) -> dict[str, Any]:
    return {k: on_nested(v) if isinstance(v, dict) else v + 1 for k, v in d.items()}


def on_container(td: Any) -> Any:
    return td.apply(lambda x: x + 1)


def sources(device: str) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """By layout: the function on plain dicts, and the data."""

    def leaf() -> torch.Tensor:
        return torch.randn(8, 8, device=device)

    flat = {f"key{i}": leaf() for i in range(50)}
    nested = {f"a{i}": {f"b{j}": {"x": leaf(), "y": leaf()} for j in range(3)} for i in range(4)}
    return {"flat": (on_flat, flat), "nested": (on_nested, nested)}


def main() -> None:
    args = arguments("tensordict_compiled")
    question = "What does a compiled call on a TensorDict cost, as a multiple of the same call on a plain dict?"
    report = Report("tensordict_compiled", question, args.device, args.quick)
    library = peer("tensordict", report)
    for layout, (by_hand, source) in sources(args.device).items():
        inputs = {"dict": (by_hand, source), "tdc": (on_container, TensorDict(source, [8]))}
        if library:
            inputs["tensordict"] = (own(on_container), library.TensorDict(source, [8]))
        measure(report, layout, inputs)
    report.write()


def measure(report: Report, layout: str, inputs: dict[str, tuple[Callable[..., Any], Any]]) -> None:
    """Trace time and exact counts, then the warm call with its limit."""
    traces: dict[str, list[float]] = {name: [] for name in inputs}
    counts: dict[str, tuple[int, int]] = {}
    for _ in range(3 if report.quick else 9):
        for name, (fn, x) in inputs.items():
            seconds, graphs, guards = traced(fn, x)
            traces[name].append(seconds)
            counts[name] = graphs, guards
    graphs = ", ".join(f"{name} {c[0]}" for name, c in counts.items())
    guards = ", ".join(f"{name} {c[1]}" for name, c in counts.items())
    report.row(f"{layout} trace", traces, "dict", graphs=graphs, guards=guards)
    torch._dynamo.reset()
    calls = {}
    for name, (fn, x) in inputs.items():
        compiled = torch.compile(fn, fullgraph=True)
        calls[name] = lambda compiled=compiled, x=x: compiled(x)
    with torch.no_grad():
        warm = interleaved(calls, rounds=9 if report.quick else 61, burst=0.004, device=report.device)
    report.row(f"{layout} warm call", warm, "dict")
    what = f"{layout}: compiled warm call, tdc to dict"
    report.limit(what, ratio(warm["tdc"], warm["dict"]), LIMITS[layout])


if __name__ == "__main__":
    main()
