"""The transformer that Matchbox was tested with, written for one example: a batch beside the loop.

Each function runs on two batches, of other lengths, other numbers of examples, and two ragged arguments of lengths of
their own; values and gradients are those of the loop. In a graph the second batch is served by the graph of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from autobatch.transformer import CASES
from torch import Tensor, nn

import tdc
from tdc.core import pytree
from tdc.ragged.storage import is_ragged

BATCHES = (((3, 1, 5, 2), (2, 4, 3, 6)), ((6, 2, 4, 3, 5), (5, 2, 7, 3, 4)))  # lengths of first and other arguments
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it of arguments
LARGE = ("heads by chunks", "transformer", "stock encoder")


def made(case: str) -> tuple[Any, list[list[list[Tensor]]]]:
    """The function, and the examples of its arguments in each batch."""
    torch.manual_seed(3)
    make, kinds = CASES[case]
    fn = make()
    fn = fn.to(torch.float64) if isinstance(fn, nn.Module) else fn
    batches = []
    for first, other in BATCHES:
        columns: list[list[Tensor]] = []
        for i, kind in enumerate(kinds):
            lengths = [n + 1 for n in (other if i else first)]  # a target has a word in front
            columns.append(columns[1] if kind == "the second" else [kind(n) for n in lengths])
        batches.append(columns)
    return fn, batches


def packed(columns: list[list[Tensor]]) -> list[Any]:
    """Arguments as batches; those that are one stay one."""
    known: dict[int, Any] = {}
    return [known.setdefault(id(column), tdc.pack(column)) for column in columns]


def agrees(fn: Any, columns: list[list[Tensor]], run: Callable[..., Any]) -> None:
    """The batch has the values and gradients of the loop."""
    alone = [pytree.tree_flatten(fn(*row))[0] for row in zip(*columns, strict=True)]
    found = pytree.tree_flatten(run(*packed(columns)), is_leaf=is_ragged)[0]
    ours = [part for leaf in found for part in leaf.unbind()]
    theirs = [example[i] for i in range(len(found)) for example in alone]
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    leaves = [x for column in columns for x in column if x.requires_grad]
    leaves = [*leaves, *(fn.parameters() if isinstance(fn, nn.Module) else ())]
    if not any([x.requires_grad for x in theirs]):
        return
    weights = [torch.randn_like(x) for x in theirs]
    a, b = [gradients(outs, weights, leaves) for outs in (ours, theirs)]
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    assert any([g.abs().sum() > 0 for g in b])


def gradients(outs: list[Tensor], weights: list[Tensor], leaves: list[Any]) -> list[Tensor]:
    return list(torch.autograd.grad(outs, leaves, weights, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("case", CASES)
def test_eagerly(case: str):
    fn, batches = made(case)
    for columns in batches:
        agrees(fn, columns, fn)


def in_one_graph(case: str) -> None:
    fn, batches = made(case)
    torch.compiler.reset()
    compiled = tdc.compile.counted(fn if isinstance(fn, nn.Module) else fn.map, backend="aot_eager")
    for columns in batches:
        agrees(fn, columns, compiled)
    assert (compiled.counts.graphs, compiled.counts.breaks) == (1, 0)


@pytest.mark.slow
def test_fused_attention_in_one_graph():
    in_one_graph("fused attention")


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("case", LARGE)
def test_large_ones_in_one_graph(case: str):
    in_one_graph(case)


@pytest.mark.parametrize("case", ["encoder", "heads by chunks"])
def test_one_example_alone(case: str):
    fn, batches = made(case)
    agrees(fn, [column[:1] for column in batches[0]], fn)


def test_a_wrong_gradient_is_seen():
    fn, batches = made("encoder")
    with pytest.raises(AssertionError):
        agrees(fn, batches[0], lambda x: fn(x).detach() + 0 * fn(x))
