"""Loops over rows on CPU: the same results and gradients as whole sorts, and only where they pay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from catalogue import samples, title
from harness import check

import tdc
from tdc.core.rules import Rule
from tdc.ops import RULES, subrows
from tdc.ops.segments import all_rows

FAMILIES = ("sort", "order_statistics", "scan", "extremes")
LOOPS = [r for r in RULES if r.kind == "nested" and r.family in FAMILIES and not r.reason]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any size are large enough."""
    monkeypatch.setattr(subrows, "LEAST", 0)


@pytest.mark.parametrize("mode", ["eager", "grad"])
@pytest.mark.parametrize("rule", LOOPS, ids=title)
def test_rows_of_the_table(rule: Rule, mode: str, always: None):
    check(rule, samples(rule), mode)


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the way that was to be avoided")


def batch(length: int, features: int = 64) -> Any:
    torch.manual_seed(0)
    return tdc.pack([torch.randn(n, features) for n in (length, length // 2, 1)])


def test_large_rows_are_sorted_one_by_one(monkeypatch: pytest.MonkeyPatch):
    x = batch(128)
    x = x.with_values(x.values.round())  # equal elements keep their order
    monkeypatch.setattr(all_rows, "order", refuse)
    values, places = x.sort(dim=1, descending=True, stable=True)
    for row, v, i in zip(x.unbind(), values.unbind(), places.unbind(), strict=True):
        want = row.sort(dim=0, descending=True, stable=True)
        assert torch.equal(v, want.values)
        assert torch.equal(i, want.indices)
    with pytest.raises(AssertionError, match="avoided"):
        tdc.pack([torch.randn(n, 1).double() for n in (500, *[1] * 100)]).sort(1)


def test_one_graph_for_large_and_small_rows(always: None):
    run = lambda x: x.sort(1).values  # noqa: E731
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (128, 4, 60):
            x = batch(length)
            torch.testing.assert_close(compiled(x).values, run(x).values)
