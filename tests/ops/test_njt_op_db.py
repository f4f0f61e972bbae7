"""torch's own samples for nested tensors are right on NestedTensor, eagerly and compiled.

`python tests/njt_op_db.py` prints the score. What is in `GAPS` is not right, with the text that says so; an op that is
mended must leave it.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import njt_op_db
import pytest

import tdc

OPS = njt_op_db.supported()
MASKED = [op.full_name for op in OPS if op.full_name.startswith("masked.")]
GAPS: dict[str, str] = dict.fromkeys(MASKED, "tdc.layout: expected")  # torch's Python counts masks by their shape
SEEDED = "__new__"  # torch's sample sets the seed inside the function, which Dynamo does not trace
COMPILED_GAPS: dict[str, str] = {"nn.functional.rrelu": SEEDED}


def assert_clean(op: Any, backend: str | None, most: int | None, gaps: dict[str, str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        score = njt_op_db.score(op, backend=backend, most=most)
    failures = score.wrong + score.raised
    if op.full_name in gaps:
        assert not score.wrong
        assert failures, f"{op.full_name} is mended: take it out of the gaps"
        assert all(gaps[op.full_name] in text for text in failures), failures[0]
    else:
        assert not failures, "\n".join(failures[:3])


@pytest.mark.cases(0, 30)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.full_name)
def test_eager(op: Any):
    assert_clean(op, None, None if op.full_name in GAPS else 3, GAPS)


@pytest.mark.cases(0, 4)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.full_name)
def test_eager_on_all_samples(op: Any):
    assert_clean(op, None, None, GAPS)


@pytest.mark.cases(0, 3)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.full_name)
def test_compiled(op: Any):
    assert_clean(op, "aot_eager", 2, COMPILED_GAPS)


def test_the_gaps_are_few():
    assert len(GAPS) == 11
    assert len(COMPILED_GAPS) <= 5


def test_the_score_can_be_low():
    """A wrong result is seen, and so is a wrong gradient."""
    op = next(op for op in OPS if op.full_name == "sin")
    sample = next(iter(njt_op_db.samples(op)))
    assert njt_op_db.run_sample(op, sample, "tdc", None) == ("", True)
    for wrong, text in ((lambda x: x.sin() + 1, "row 0"), (lambda x: x.detach().sin() + 0 * x, "gradient 0")):
        broken = copy.copy(op)
        broken.op = lambda x, f=wrong: f(x) if isinstance(x, tdc.NestedTensor) else x.sin()
        assert text in njt_op_db.run_sample(broken, sample, "tdc", None)[0]
