"""Ragged values that change in loops of `tdc.batch`: right, eagerly and in a graph, or refused with name and line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tdc

internals: Any = torch


def rows() -> tdc.NestedTensor:
    torch.manual_seed(0)
    return tdc.pack([torch.randn(n) for n in (2, 4, 3, 1)])


def halved(b: Any) -> Any:
    k = 0
    while b.abs().max() > 0.1:
        b, k = b / 2, k + 1
    return b * k


def summed(b: Any) -> Any:
    c = b * 0
    for v in b:
        c = c + v * b
    return c


def nested(b: Any) -> Any:
    for v in b:
        while b.abs().sum() > v.abs() + 1:
            b = b * 0.7
    return b


def stopped(b: Any) -> Any:
    for v in b:
        b = b * 2 + v
        if b.sum() > 1:
            break
    return b


def branched(b: Any) -> Any:
    if b.sum() > 0:
        b = b[1:]
    return b * 2


def doubled(b: Any) -> Any:
    for _ in range(2):
        b = torch.cat([b, b])
    return b


def filtered(b: Any) -> Tensor:
    for _ in range(2):
        b = b[b > 0]
    return b.sum()


def cut(b: Any) -> Any:
    while b.shape[0] > 1:
        b = b[1:]
    return b


def dropped(b: Any) -> Any:
    while b.sum() > 0:
        b = b[1:]
    return b


def paired(b: Any) -> Tensor:
    while len(b) > 1:
        m = len(b) // 2
        b = b[:m] + b[m : 2 * m]
    return b[0]


def copied(b: Any) -> Any:
    c = b[:0]
    for v in b:
        c = torch.cat([c, v[None]])
    return c


KEEP = (halved, summed, nested, stopped, branched, doubled, filtered)
CHANGE = {cut: "b", dropped: "b", paired: "b", copied: "c"}


def same(found: Any, fn: Callable[[Any], Any]) -> None:
    torch.testing.assert_close(found.unbind(), [fn(row) for row in rows().unbind()])


def in_a_graph(fn: Callable[[Any], Any], **options: Any) -> Any:
    torch._dynamo.reset()
    return internals.compile(tdc.batch(fn, **options), fullgraph=True, backend="aot_eager")(rows())


@pytest.mark.parametrize("fn", [*KEEP, *CHANGE])
def test_a_ragged_value_changes_eagerly(fn: Callable[[Any], Any]):
    same(tdc.batch(fn)(rows()), fn)


@pytest.mark.cases(1, 2)
@pytest.mark.parametrize("fn", KEEP)
def test_a_ragged_value_changes_in_a_graph(fn: Callable[[Any], Any]):
    same(in_a_graph(fn), fn)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("fn", CHANGE)
def test_lengths_that_change_in_a_loop_of_a_graph_are_refused(fn: Callable[[Any], Any]):
    got = rf"got {CHANGE[fn]}, whose lengths, shape or dtype change with each round at line \d+"
    with pytest.raises(Exception, match=rf"{got}\\nhint: tdc\.batch\(lower='unroll', max_iters=\.\.\.\)"):
        in_a_graph(fn)


@pytest.mark.sweep
@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("fn", [cut, dropped])
def test_the_rounds_of_an_unrolled_loop_change_lengths(fn: Callable[[Any], Any]):
    same(in_a_graph(fn, lower="unroll", max_iters=4), fn)


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("fn", [halved, summed])
def test_gradients_of_a_ragged_value_in_a_loop(fn: Callable[[Any], Any]):
    torch._dynamo.reset()
    x, batched = rows(), tdc.batch(fn)
    found: list[Tensor] = []
    for run in (batched, internals.compile(batched, fullgraph=True, backend="aot_eager")):
        values = x.values.clone().requires_grad_()
        found += torch.autograd.grad(run(x.with_values(values)).values.square().sum(), [values])
    torch.testing.assert_close(found[1], found[0])
