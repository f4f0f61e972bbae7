"""What the programs of this folder share: one function in a loop over examples, as a batch, and as a compiled batch.

The three must agree, values and gradients. Times are medians of calls behind a first one, which compiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.compile import counted


def compare(
    one: Callable[..., Any], batched: Callable[..., Any], *batches: Any, wrt: Sequence[Tensor] = (),
    backend: str = "inductor",
) -> Any:  # fmt: skip
    """Check that three ways agree, print how long they take, and return the compiled function.

    Args:
        one: the function of one example; it returns a tensor, a number, or a tuple of these.
        batched: the same of a batch.
        batches: arguments, each a tensor of examples or a ragged batch.
        backend: that of `torch.compile`.
        wrt: the tensors whose gradients, of all results with one, are compared and timed as well.
    """
    compiled = counted(batched, backend=backend)  # torch.compile(batched, fullgraph=True), and counts of graphs

    def loop(*batches: Any) -> Any:
        return stacked([one(*example) for example in zip(*[x.unbind() for x in batches], strict=True)])

    ways = {"loop": loop, "batched": batched, "compiled": compiled}
    first, times, results = {}, {}, {}
    for name, way in ways.items():
        begin = time.perf_counter()
        results[name] = trained(way, batches, wrt)
        first[name] = time.perf_counter() - begin
        times[name] = 1e3 * timed(lambda way=way: trained(way, batches, wrt), first[name])
    torch.testing.assert_close(results["batched"], results["loop"])
    torch.testing.assert_close(results["compiled"], results["loop"])
    line = [
        f"{name} {ms:.1f} ms" + (f" ({times['loop'] / ms:.0f}x)" if name != "loop" else "")
        for name, ms in times.items()
    ]
    print("   ".join(line), f"  compile {first['compiled']:.1f} s", "  with gradients" if wrt else "")
    print(f"graphs {compiled.counts.graphs}, breaks {compiled.counts.breaks}, compiles {compiled.counts.compiles}")
    return compiled


def stacked(results: list[Any]) -> Any:
    """Results of examples, as a batch returns them."""
    if isinstance(results[0], tuple):
        return tuple([stacked([*parts]) for parts in zip(*results, strict=True)])
    return torch.stack([torch.as_tensor(x) for x in results])


def trained(way: Callable[..., Any], batches: Sequence[Any], wrt: Sequence[Tensor]) -> Any:
    """Results and, of the sum of those that have them, gradients."""
    out = way(*batches)
    if not wrt:
        return out
    parts = out if isinstance(out, tuple) else (out,)
    return out, torch.autograd.grad(sum([x.sum() for x in parts if x.requires_grad]), wrt)


def timed(call: Callable[[], Any], seconds: float) -> float:
    """The median of several calls; of few where one takes long."""
    found = []
    for _ in range(3 if seconds > 1 else 7):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)
