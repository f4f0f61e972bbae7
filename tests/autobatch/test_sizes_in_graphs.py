"""Tests on sizes of dense dims in graphs, where such a size may be a symbol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tdc


@tdc.batch
def broken_off(xs: Tensor, n: Tensor) -> Tensor:
    t = torch.zeros(())
    for x in xs:
        t = t + x
        if t > n:
            break
    return t


@tdc.batch
def returned(xs: Tensor, n: Tensor) -> Tensor:
    t = torch.zeros(())
    for x in xs:
        t = t + x
        if t > n:
            return t * 10
    else:
        t = t - 1
    return t


@tdc.batch
def counted(xs: Tensor, n: Tensor) -> Tensor:
    k, t = 0, n * 0
    while k < len(xs):
        t = t + xs[k] * n
        k += 1
    return t * k


@tdc.batch
def branched(xs: Tensor, n: Tensor) -> Tensor:
    if xs.size(0) > 4:
        n = n * 10
    elif not xs.shape[0] > 3:
        return xs.sum() - n
    return (xs.sum() if xs.size(0) > 5 else -xs.sum()) * n


@tdc.batch
def asserted(xs: Tensor, n: Tensor) -> Tensor:
    assert xs.size(0) > 2, "rows"
    while xs.size(0) > 4 and n < 3:
        n = n * 2
    return xs.sum() * n


@tdc.batch(lower="while")
def in_a_while(xs: Tensor, n: Tensor) -> Tensor:
    t = n * 0
    while t < n:
        for x in xs:
            t = t + x.square() + 0.1
            if xs.size(0) > 4 and t > n:
                break
    return t


@tdc.batch
def wide(rows: Tensor, n: Tensor) -> Tensor:
    t = n * 0
    for row in rows:
        t = t + (row.sum() if row.size(0) > 4 else row.prod())
    if rows.size(1) > 5:
        return t * n
    return t


DENSE = (broken_off, returned, counted, branched, asserted, in_a_while)
RUNS: dict[str, Any] = {"default": {}, "dynamic": {"dynamic": True}}


def dense(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return torch.rand(4, size, generator=generator).requires_grad_(), torch.tensor([0.3, 1.0, 2.0, 9.0])


def ragged(size: int) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(size)
    rows = [torch.rand(n, size, generator=generator) for n in (2, 1, 3)]
    return tdc.pack(rows).requires_grad_(), torch.tensor([0.3, 1.0, 2.0])


def agrees(fn: Any, run: Callable[..., Any], xs: Any, n: Tensor) -> None:
    """A batch has the values and gradients of its examples."""
    both = run(xs, n), torch.stack([fn(a, b) for a, b in zip(xs.unbind(), n, strict=True)])
    leaf = xs.values if isinstance(xs, tdc.NestedTensor) else xs
    torch.testing.assert_close(*both)
    torch.testing.assert_close(*[torch.autograd.grad(x.sum(), leaf)[0] for x in both])


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("options", RUNS)
@pytest.mark.parametrize("fn", DENSE, ids=lambda f: f.__name__)
def test_a_size_of_a_dense_dim(fn: Any, options: str):
    """Found by hand: a test on a size that was a symbol held for nobody."""
    torch.compiler.reset()
    run = torch.compile(lambda xs, n: fn.map(xs, n), backend="eager", fullgraph=True, **RUNS[options])
    for size in (3, 5, 6):
        agrees(fn, run, *dense(size))


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("options", RUNS)
def test_a_dense_dim_of_ragged_examples(options: str):
    torch.compiler.reset()
    run = torch.compile(lambda xs, n: wide(xs, tdc.lanes(n)), backend="eager", fullgraph=True, **RUNS[options])
    for size in (3, 5, 6):
        agrees(wide, run, *ragged(size))


@tdc.batch
def scanned(xs: Tensor, n: Tensor) -> Tensor:
    t = n * 0
    for x in xs:
        t = t + x * n
    return t if xs.size(0) > 4 else -t


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "fn", [broken_off, returned, branched, asserted, in_a_while, scanned], ids=lambda f: f.__name__
)
def test_a_size_that_varies_in_an_exported_program(fn: Any):
    exported = tdc.compile.export(lambda xs, n: fn.map(xs, n), dense(7), dynamic={"xs": {1: ("T", 6, 64)}})
    for size in (6, 9):
        xs, n = dense(size)
        torch.testing.assert_close(exported(xs, n), fn.map(xs, n).detach())
