"""Random programs: chains of operations on a batch, beside the same operations on each example.

A program begins with two batches of equal structure and goes on step by step. A step is drawn for the layout that the
last value has (`steps.py`), runs on the batch and on the examples, and is compared at once; at the end gradients are,
and for some programs the whole chain compiled as one graph.

    x -> torch.softmax(x, 1) -> x[:, 1:] -> x.to_padded() -> x - x.mean(2, True) -> x.sum((0, 1))

Where the library refuses a step in its own words, the step is left out and counted. Any other error, and any
difference, fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

import tdc

Rows = list[Tensor]
NAN = float("nan")
LARGEST = 1e6  # values beyond end a program, as do NaN and infinities: then rounding decides
MANY = 2000  # elements of one example
UNBACKED = "Could not guard on data-dependent expression"
GAPS = {  # what torch 2.13 asks of sizes that a graph does not know, as those of a slice, and what it says then
    "linear(1,": f"{UNBACKED} Eq(", "matmul(1,": f"{UNBACKED} Eq(",  # in the derivative of one feature: which stride
    "matmul of each (1,": f"{UNBACKED} Eq(",
}  # fmt: skip
# `x @ tensor` reaches the library as `tensor @ x`, and both have a meaning: `by_operator_traced`
REFUSED = "tdc.matmul: expected operands that fit in one order"

Draw = Callable[[Any], Any]  # of Hypothesis


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        text: how a reader would write it.
        batch: `(values, operands) -> value`, of the batches so far, the last one first in meaning, and dense operands.
        rows: the same of the examples of each value; a tensor where the result is dense.
    """

    text: str
    batch: Callable[[list[Any], list[Tensor]], Any]
    rows: Callable[[list[Rows], list[Tensor]], Any]


@dataclass
class Program:
    """What has been drawn so far, with the values it gives."""

    draw: Draw
    inputs: list[Any] = field(default_factory=list)
    leaves: list[Rows] = field(default_factory=list)
    operands: list[Tensor] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    drawn: int = 0
    left: int = 1

    @property
    def x(self) -> Any:
        """The last value."""
        return self.values[-1]

    @property
    def last(self) -> Rows:
        """The examples of the last value."""
        return self.rows[-1]

    @property
    def ragged(self) -> tuple[int, ...]:
        """The dims of an example that are ragged."""
        return tuple(d - 1 for d in self.x.ragged_dims)

    @property
    def static(self) -> list[int]:
        """The dims of an example that are not."""
        return [d for d in range(self.last[0].ndim) if d not in self.ragged]

    def tensor(self, *shape: int) -> Tensor:
        """Numbers that depend on how many were drawn before, so that a program is the same each time."""
        self.drawn += 1
        return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(self.drawn))

    def operand(self, *shape: int) -> int:
        """A dense operand that takes part in autograd; its number."""
        self.operands.append(self.tensor(*shape).requires_grad_())
        return len(self.operands) - 1

    def alike(self) -> list[int]:
        """The values with the structure of the last one, its own number last."""
        sizes = [r.shape for r in self.last]
        return [
            i
            for i, (v, rows) in enumerate(zip(self.values, self.rows, strict=True))
            if type(v) is type(self.x) and v.ragged_dims == self.x.ragged_dims and v.shape == self.x.shape
            and [r.shape for r in rows] == sizes
        ]  # fmt: skip

    def text(self) -> str:
        """The program as a reader would write it."""
        sizes = [tuple(r.shape) for r in self.leaves[0]]
        return f"{type(self.inputs[0]).__name__} of {sizes}: " + " -> ".join(s.text for s in self.steps)


def begin(draw: Draw) -> Program:
    """Two batches of equal structure: ragged dims, static sizes, kind and padding drawn."""
    p = Program(draw)
    count, ragged = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 1, 2]))
    before, behind = [draw(st.lists(st.integers(1, 3), max_size=most)) for most in (1, 2)]
    sizes = [[draw(st.integers(0, 4)) for _ in range(ragged)] for _ in range(count)]
    dims = tuple(range(len(before) + 1, len(before) + 1 + ragged))
    masked, extra = draw(st.booleans()), draw(st.integers(0, 2))
    worst, shared = draw(st.sampled_from([NAN, float("inf"), -1e300, 0.0])), draw(st.booleans())
    first = None
    for _ in range(2):
        leaves = [p.tensor(*before, *size, *behind) for size in sizes]
        x: Any = tdc.pack(leaves, ragged_dim=dims)
        if first is not None and shared:
            x = first.with_values(x.values)
        first = x if first is None else first
        if masked:
            longest = [max(column) + extra for column in zip(*sizes, strict=True)]
            x = x.to_padded(worst, length=longest[0] if ragged == 1 else tuple(longest))
        p.inputs.append(x.detach().requires_grad_())
        p.leaves.append([r.detach().requires_grad_() for r in leaves])
    p.values, p.rows = list(p.inputs), list(p.leaves)
    return p


def replay(p: Program, inputs: list[Any], operands: list[Tensor]) -> Any:
    """The last value, computed anew."""
    values = list(inputs)
    for step in p.steps:
        values.append(step.batch(values, operands))
    return values[-1]


def is_batch(x: Any) -> bool:
    return isinstance(x, (tdc.NestedTensor, tdc.MaskedBatch))


def parts(x: Any) -> Rows:
    """The examples of a batch; a dense result is one."""
    return list(x.unbind()) if is_batch(x) else [x]


def differ(got: Any, want: Any) -> str:
    """How the examples of a result differ from those they should be; empty where they do not."""
    if is_batch(got):
        tdc.validate(got)
    got, want = parts(got), want if isinstance(want, list) else [want]
    if [r.shape for r in got] != [r.shape for r in want]:
        return f"shapes {[tuple(r.shape) for r in got]} instead of {[tuple(r.shape) for r in want]}"
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.dtype != b.dtype:
            return f"{a.dtype} instead of {b.dtype}"
        if not torch.allclose(a, b, rtol=1e-6, atol=1e-8, equal_nan=True):
            return f"example {i}: {a.flatten()[:6].tolist()} instead of {b.flatten()[:6].tolist()}"
    return ""


def loss(results: Any) -> Tensor:
    """A sum with fixed factors, so that each element has a gradient of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for i, r in enumerate(results if isinstance(results, list) else parts(results)):
        factors = torch.randn(r.shape, dtype=r.dtype, generator=torch.Generator().manual_seed(i))
        total = total + torch.where(r.isfinite(), r, 0).mul(factors).sum()
    return total


def gradients(result: Any, leaves: list[Any], again: bool = False) -> list[Any]:
    total = loss(result)
    if not total.requires_grad:
        return [None] * len(leaves)
    return list(torch.autograd.grad(total, leaves, retain_graph=again, allow_unused=True))


def batch_gradients(p: Program, result: Any, inputs: list[Any]) -> list[Tensor]:
    """Gradients of all examples of both inputs, then of the operands; 0 where there is none."""
    data = [x.values if isinstance(x, tdc.NestedTensor) else x.data for x in inputs]
    found: list[Tensor] = []
    grads = gradients(result, [*data, *p.operands])
    for x, g in zip(inputs, grads[:2], strict=True):
        whole = torch.zeros_like(data[0]) if g is None else g
        found += (x.with_values(whole) if isinstance(x, tdc.NestedTensor) else x.with_data(whole)).unbind()
    return found + [torch.zeros_like(o) if g is None else g for o, g in zip(p.operands, grads[2:], strict=True)]


def row_gradients(p: Program) -> list[Tensor]:
    """The same by the loop over examples."""
    leaves = [r for rows in p.leaves for r in rows] + p.operands
    grads = gradients(p.rows[-1], leaves, again=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]


def grow(p: Program, table: dict[str, Callable[[Program], Step | None]], most: int, refused: Counter[str]) -> None:
    """Draw steps until there are so many, or a result has no examples any more.

    Raises:
        AssertionError: a step differs, or raises an error that is none of the library's.
    """
    for _ in range(4 * most):
        p.left = most - len(p.steps)
        if not p.left:
            return
        name = p.draw(st.sampled_from(sorted(table)))
        before = len(p.operands)
        step = table[name](p)
        if step is None:
            continue
        p.steps.append(step)
        want = step.rows(p.rows, p.operands)
        try:
            got = step.batch(p.values, p.operands)
        except tdc.TdcError as error:
            refused[f"{name}: {str(error).splitlines()[0]}"] += 1
            p.steps.pop()
            del p.operands[before:]
            continue
        except Exception as error:
            raise AssertionError(f"{p.text()}\nraises {type(error).__name__}: {error}") from error
        text = differ(got, want)
        assert not text, f"{p.text()}\n{text}"
        p.values.append(got)
        p.rows.append(want)
        if not is_batch(got) or any(not bool((r.abs() < LARGEST).all()) or r.numel() > MANY for r in want):
            return


def check_gradients(p: Program) -> None:
    """
    Raises:
        AssertionError: gradients are not those of the loop over examples.
    """
    got, want = batch_gradients(p, p.x, p.inputs), row_gradients(p)
    text = differ_all(got, want)
    assert not text, f"{p.text()}\ngradient {text}"


def differ_all(got: list[Tensor], want: list[Tensor]) -> str:
    """The first difference of two lists of gradients."""
    pairs = enumerate(zip(got, want, strict=True))
    return next((f"{i}: {text}" for i, (a, b) in pairs if (text := differ(a, b))), "")


def check_compiled(p: Program, backend: str = "aot_eager") -> str:
    """The whole program as one graph, with its gradients: whether it was compared, or why not.

    Raises:
        AssertionError: it does not trace, or results or gradients are others.
    """
    torch.compiler.reset()
    compiled = torch.compile(lambda inputs, operands: replay(p, inputs, operands), backend=backend, fullgraph=True)
    try:
        out = compiled(p.inputs, p.operands)
        grads = batch_gradients(p, out, p.inputs)
    except Exception as error:
        if any(name in p.text() and text in str(error) for name, text in GAPS.items()):
            return "not traced by torch"
        if REFUSED in str(error) and any(step.text.startswith("matmul(") for step in p.steps):
            return "refused in a graph"
        raise AssertionError(f"{p.text()}\ncompiled raises {type(error).__name__}: {str(error)[:2000]}") from error
    text = differ(out, p.rows[-1]) or differ_all(grads, row_gradients(p))
    assert not text, f"{p.text()}\ncompiled: {text}"
    return "compiled"
