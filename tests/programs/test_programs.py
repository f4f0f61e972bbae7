"""A hundred random programs; `python tests/programs/run.py --count 5000 --seed 0` draws more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from programs import run, steps

import tdc


@pytest.mark.slow
@pytest.mark.parametrize(("start", "compiled"), [(0, 50), pytest.param(1, 12, marks=pytest.mark.sweep)])
def test_random_programs(start: int, compiled: int):
    """Most of the time is that of the programs which are compiled."""
    found = run.check_programs(100, start, compiled)
    assert found["compiled"] >= 2
    assert found["programs"] >= 100
    assert found["steps"] > 3 * found["programs"]


@pytest.mark.slow
def test_a_wrong_step_is_seen(monkeypatch: pytest.MonkeyPatch):
    """A wrong value, a wrong gradient, an error of torch."""
    wrong = {
        "values": steps.each("x + 1", lambda x: x + 1, lambda r: r + 2),
        "gradient": steps.each("x", lambda x: x.detach() + 0 * x, lambda r: r * 1),
        "raises RuntimeError": steps.each("fails", lambda x: torch.zeros(2) + torch.zeros(3), lambda r: r),
        "example": steps.each("x", lambda x: x.flip(1), lambda r: r),
    }
    for text, step in wrong.items():
        monkeypatch.setattr(run, "TABLE", {"wrong": lambda _, step=step: step})
        with pytest.raises(AssertionError, match="example" if text == "values" else text):
            run.check_programs(20, compiled=1000)


@pytest.mark.slow
def test_a_graph_packs_a_batch_without_positions():
    """Found by a program: the gradient of packing read a row where there was none."""
    compiled = torch.compile(lambda x: x.to_packed(), backend="aot_eager", fullgraph=True)
    for lengths in ([2, 1], [0, 0]):
        x = tdc.MaskedBatch(torch.randn(2, 3), torch.tensor(lengths)).requires_grad_()
        (grad,) = torch.autograd.grad(compiled(x).values.sum(), x.data)
        assert torch.equal(grad, x.mask.float())


@pytest.mark.sweep
@pytest.mark.slow
def test_a_graph_scans_what_it_does_not_know_the_size_of():
    """Found by programs: scans and their derivatives ask how many elements there are."""
    rows = [torch.randn(n, 2, dtype=torch.float64) for n in (2, 0, 3)]

    def scan(x: Any) -> Any:
        both = torch.cat([x, x[[2, 1, 0]]], 1)
        return torch.cumsum(both, 1), torch.cummax(both, 1).values, torch.logcumsumexp(both, 1)

    compiled = torch.compile(scan, backend="aot_eager", fullgraph=True)
    for lengths in (rows, rows[1:2] * 3):
        found: list[Any] = []
        for fn in (scan, compiled):
            x = tdc.pack(lengths).detach().requires_grad_()
            outs = [out.values for out in fn(x)]
            total = torch.stack([out.square().sum() for out in outs]).sum()
            found.append((*outs, *torch.autograd.grad(total, x.values)))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_a_graph_scans_some_of_the_examples():
    """Found by a program: neither the number of positions nor how many of the other dim there are is known."""

    def scan(x: Any) -> Any:
        packed = x.to_packed()
        return torch.cummax(torch.cat([packed, packed], -2)[torch.tensor([True])], -2).values

    x = tdc.pack([torch.randn(2, 3)], ragged_dim=(1, 2)).to_padded(length=(4, 5))
    found = torch.compile(scan, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(found.values, scan(x).values)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("dim", [2, -1, (2, 3), 3])
def test_a_graph_sums_exponents_of_what_it_does_not_know_the_size_of(dim: Any):
    """Found by programs: torch.logsumexp asks whether there is any element."""
    rows = [torch.randn(n, 2, 3, dtype=torch.float64) for n in (2, 0, 3)]
    rows[0][0, 0, 1] = -torch.inf
    found: list[Any] = []
    for fn in (
        lambda x: x[[2, 1, 0]].logsumexp(dim),
        torch.compile(lambda x: x[[2, 1, 0]].logsumexp(dim), fullgraph=True, backend="aot_eager"),
    ):
        x = tdc.pack(rows).detach().requires_grad_()
        out = fn(x).values
        found.append((out, *torch.autograd.grad(out.exp().sum(), x.values)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
