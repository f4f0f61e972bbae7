"""Reductions and softmax of packed values whose positions lie innermost: both ways, derivatives, graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import tdc
from tdc.compile import counted
from tdc.core.dynamo import watching
from tdc.core.linear_operators import linear
from tdc.ops import subrows
from tdc.ops.segments.softmax import softmax
from tdc.ragged import innermost
from tdc.ragged.innermost import extreme, spread_rows, squares, sum_rows

LENGTHS = (3, 0, 5, 2)
OFFSETS = torch.tensor([0, 3, 3, 8, 10])
DOUBLE = torch.float64


@pytest.fixture(params=["by example", "all at once"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    least = 0 if request.param == "by example" else 1 << 60
    for module in (innermost, subrows):
        monkeypatch.setattr(module, "LEAST", least)


def first(*sizes: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    """Packed values (N, *sizes), positions innermost."""
    return torch.randn(*sizes, 10, dtype=DOUBLE).to(dtype).movedim(-1, 0)


def of_sums(x: Tensor) -> Tensor:
    return linear(sum_rows, x, OFFSETS, 4)


def of_spreads(x: Tensor) -> Tensor:
    return linear(spread_rows, x, OFFSETS, 10)


def of_largest(x: Tensor) -> Tensor:
    return extreme(x, OFFSETS, 4, True, 0.0)


def of_smallest(x: Tensor) -> Tensor:
    return extreme(x, OFFSETS, 4, False, 0.0)


def of_squares(x: Tensor) -> Tensor:
    count = OFFSETS.diff().clamp(min=1).view(-1, *[1] * (x.ndim - 1))
    return squares(x, OFFSETS, 4, linear(sum_rows, x, OFFSETS, 4) / count)


def of_softmax(x: Tensor) -> Tensor:
    return softmax(x, OFFSETS, False)


def of_log_softmax(x: Tensor) -> Tensor:
    return softmax(x, OFFSETS, True)


def each(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A reduction of each example alone, 0 of an empty one."""
    return lambda x: torch.stack([run(row) if len(row) else x.new_zeros(x.shape[1:]) for row in x.split(LENGTHS)])


def along(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of each example alone."""
    return lambda x: torch.cat([run(row) for row in x.split(LENGTHS)])


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "sums": (of_sums, each(lambda row: row.sum(0))),
    "largest": (of_largest, each(lambda row: row.amax(0))),
    "smallest": (of_smallest, each(lambda row: row.amin(0))),
    "squares": (of_squares, each(lambda row: (row - row.mean(0)).square().sum(0))),
    "softmax": (of_softmax, along(lambda row: row.softmax(0))),
    "log_softmax": (of_log_softmax, along(lambda row: row.log_softmax(0))),
    "spreads": (of_spreads, lambda x: x.repeat_interleave(torch.tensor(LENGTHS), 0)),
}
ALL = pytest.mark.parametrize("name", FUNCTIONS)


def operand(name: str) -> Tensor:
    return torch.randn(4, 2, 3, dtype=DOUBLE) if name == "spreads" else first(2, 3)


@ALL
def test_numbers_are_those_of_each_example(way: None, name: str):
    ours, theirs = FUNCTIONS[name]
    x = operand(name)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours(x.contiguous()), theirs(x))


@pytest.mark.cases(1, 5)
@ALL
def test_derivatives(way: None, name: str):
    ours, theirs = FUNCTIONS[name]
    x = operand(name).requires_grad_()
    assert torch.autograd.gradcheck(ours, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ours, x)
    weights = torch.randn(ours(x).shape, dtype=DOUBLE)
    found = [torch.func.grad(lambda t, fn=fn: (fn(t).square() * weights).sum())(x) for fn in (ours, theirs)]
    torch.testing.assert_close(*found)


@ALL
def test_members_of_a_vmap(way: None, name: str):
    ours, _ = FUNCTIONS[name]
    x = torch.stack([operand(name), operand(name)], 1)
    torch.testing.assert_close(torch.func.vmap(ours, 1, 1)(x), torch.stack([ours(t) for t in x.unbind(1)], 1))


def test_equal_elements_share_the_gradient(way: None):
    x = torch.zeros(2, 10, dtype=DOUBLE).movedim(-1, 0).requires_grad_()
    grad = torch.autograd.grad(of_largest(x).sum(), x)[0]
    torch.testing.assert_close(grad[:, 0], torch.tensor([1 / n for n in LENGTHS for _ in range(n)], dtype=DOUBLE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.complex64])
def test_dtypes(way: None, dtype: torch.dtype):
    """Of half precision sums are in float32, and rounded once."""
    x = first(3, dtype=dtype)
    torch.testing.assert_close(of_sums(x), each(lambda row: row.sum(0, dtype=dtype))(x))
    if not dtype.is_complex:
        torch.testing.assert_close(of_largest(x), each(lambda row: row.amax(0))(x))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["sums", "largest", "softmax", "log_softmax"])
def test_what_is_not_finite(way: None, name: str, value: float):
    ours, theirs = FUNCTIONS[name]
    x = first(2)
    x[4, 0] = x[8, 1] = x[9, 1] = value
    torch.testing.assert_close(ours(x), theirs(x), equal_nan=True)


RUNS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(2), "mean": lambda x: x.mean(2), "amax": lambda x: x.amax(2), "var": lambda x: x.var(2),
    "softmax": lambda x: x.softmax(2).values, "log_softmax": lambda x: x.log_softmax(2).values,
    "cumsum": lambda x: x.cumsum(2).values, "instance norm": lambda x: torch.nn.functional.instance_norm(x).values,
    "group norm": lambda x: torch.nn.functional.group_norm(x, 2).values,
    "per example": lambda x: (x * x.sum(2)[:, :, None]).values,
}  # fmt: skip


def sequences(*lengths: int) -> tdc.NestedTensor:
    return tdc.pack([torch.randn(4, n, dtype=DOUBLE) for n in lengths], ragged_dim=2)


@pytest.mark.parametrize("name", RUNS)
def test_no_position_is_added_by_itself(name: str):
    """Results and gradients of sequences (B, C, -1) lie in memory as they do, and no operation scatters."""
    x, ran = sequences(700, 900, 800), list[str]()
    leaf = x.values.requires_grad_()
    with watching(lambda op, args, kwargs: ran.append(str(op))):
        out = RUNS[name](x)
        grad = torch.autograd.grad(out.square().sum(), leaf)[0]
    assert not [op for op in ran if "index_add" in op or "scatter" in op or "index_select" in op]
    assert grad.stride() == leaf.stride()
    assert out.ndim > 2 or out.shape[1] < 2400 or out.stride() == leaf.stride()


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", RUNS)
def test_no_examples(name: str):
    x, want = sequences(3, 4)[:0], RUNS[name](sequences(3, 4))
    for run in (RUNS[name], torch.compile(RUNS[name], backend="aot_eager", fullgraph=True)):
        assert run(x).numel() == 0
        assert run(x).ndim == want.ndim


@pytest.mark.cases(1, 5)
@pytest.mark.parametrize("name", RUNS)
def test_one_graph_for_all_lengths(name: str):
    step = counted(RUNS[name], backend="aot_eager", fullgraph=True)
    for lengths in ((3, 4, 5), (8, 2), (700, 900, 800)):
        x = sequences(*lengths)
        leaf = x.values.requires_grad_()
        found = [run(x) for run in (step, RUNS[name])]
        torch.testing.assert_close(*found)
        torch.testing.assert_close(*[torch.autograd.grad(y.square().sum(), leaf) for y in found])
    assert (step.counts.graphs, step.counts.compiles) == (1, 1)


def test_nodes_of_a_graph():
    """Sums are one node, and what spreads them is an index that Inductor fuses."""
    graphs: list[str] = []

    def note(graph: Any, inputs: Any) -> Any:
        graphs.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.compile(RUNS["per example"], backend=aot_autograd(fw_compiler=note), fullgraph=True)(sequences(3, 4))
    assert any("sum_rows" in name for name in graphs)
    assert not [name for name in graphs if "spread_rows" in name or "index_add" in name]


def test_few_features_are_summed_by_example(monkeypatch: pytest.MonkeyPatch):
    """Eagerly, for who wants no gradient."""
    x, ran = tdc.pack([torch.randn(n, 3) for n in (1000, 900)]), list[str]()
    with watching(lambda op, args, kwargs: ran.append(str(op))):
        found = x.sum(1)
    torch.testing.assert_close(found, torch.stack([row.sum(0) for row in x.unbind()]))
    assert not [op for op in ran if "index_add" in op]
