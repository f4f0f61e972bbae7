"""The rows that ragged libraries are compared by are right: eager, compiled and compiled training.

`python tests/nested_rows.py` prints the score.
"""

from __future__ import annotations

from typing import Any

import nested_rows
import pytest
from nested_rows import ROWS, Row
from torch._dynamo.exc import Unsupported
from versions import before

QUICK = {"relu", "mean(ragged)", "sdpa causal", "MLP block"}


def cases(*modes: str) -> list[Any]:
    """Rows in modes; what is compiled is slow but for a few."""
    return [
        pytest.param(row, mode, id=f"{row.name}-{mode}", marks=[] if quick(row, mode) else pytest.mark.slow)
        for row in ROWS
        for mode in modes
        if row.differentiable or mode != "train"
    ]


def quick(row: Row, mode: str) -> bool:
    return mode == "eager" or (row.name in QUICK and mode == "train")


@pytest.mark.cases(68, 10)
@pytest.mark.parametrize(("row", "mode"), cases(*nested_rows.MODES))
def test_row(row: Row, mode: str):
    assert nested_rows.check(row, mode) == []


@pytest.mark.xfail(before(2, 14), raises=Unsupported, reason="torch cannot trace @ between two objects, 2.13")
def test_two_batches_by_operator():
    """`@` in place of `torch.matmul`, compiled."""
    assert nested_rows.check(Row("x@x^T", lambda m, d, x: x @ x.transpose(d, d + 1)), "compiled") == []


def test_the_rows():
    assert len({row.name for row in ROWS}) == len(ROWS) == 64
    assert [row.name for row in ROWS if not row.differentiable] == ["argmax(-1)"]


def test_a_wrong_row_is_seen():
    """Wrong values, gradients and shapes, and graphs that are too many."""
    wrong = {
        "value 0": lambda m, d, x: x * (1.0 + d),
        "gradient 0": lambda m, d, x: x * 2.0 if d == 0 else x + x.detach(),
        "shapes": lambda m, d, x: x.sum(0 if d == 0 else 2),
    }
    for text, run in wrong.items():
        assert text in nested_rows.check(Row(text, run), "eager")[0]
    anew = Row("anew", lambda m, d, x: x * (1.0 if x.values.shape[0] > 15 else 2.0), ref=lambda m, d, x: x * 1.0)
    assert any(["graphs for 5 batches" in text for text in nested_rows.check(anew, "compiled")])
