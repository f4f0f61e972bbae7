"""Reductions, orders and scans of ragged batches beyond the matrix: the wrong calls, odd rows, other callers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from texts import Says, Texts, says
from texts import ragged as zeros

import tdc
from tdc import NestedTensor

ragged: Any = zeros  # of any type, as torch's functions take no batches by their types
ROWS = [torch.tensor([3.0, 1.0, 3.0]), torch.tensor([]), torch.tensor([2.0])]


def packed(rows: list[torch.Tensor], **options: Any) -> Any:
    """The rows side by side; with options as a structure that knows no more than those."""
    x = tdc.pack(rows)
    return NestedTensor(x.values, x.offsets, **options) if options else x


def images() -> Any:
    """Two ragged dims."""
    return tdc.pack([torch.ones(2, 3), torch.ones(1, 1)], ragged_dim=(1, 2))


def batches() -> list[Any]:
    """The rows packed, and padded with what must never be read."""
    x = packed(ROWS)
    return [x, x.to_padded(fill=math.nan)]


SAYS: dict[str, Says] = {
    "the batch alone": (lambda: ragged().argmax(0), """\
ShapeError
tdc.argmax: expected a ragged or static dim, got dim 0 of NestedTensor float32[3, -1, 4]
hint: rows of different lengths have no common positions: x.to_padded() first"""),
    "several dims where torch takes one": (lambda: ragged().argmax((1, 2)), """\
ShapeError
tdc.argmax: expected one dim, got (1, 2)
hint: name one dim, e.g. dim=-1"""),
    "a dim that is not there": (lambda: ragged().std(3), """\
ShapeError
tdc.std: expected a dim in [-3, 2], got 3
hint: count dims of the logical shape"""),
    "a dim named twice": (lambda: ragged().sum((1, 1)), """\
ShapeError
tdc.sum: expected each dim once, got dim (1, 1)
hint: the batch has 3 dims"""),
    "an order of several dims": (lambda: images().sort((1, 2)), """\
ShapeError
tdc.sort: expected one dim, got (1, 2)
hint: name one dim, e.g. dim=-1"""),
    "an order of several dims, 2": (lambda: images().quantile(0.5, (0, 1)), """\
ShapeError
tdc.quantile: expected one dim, got (0, 1)
hint: name one dim, e.g. dim=-1"""),
    "the batch and one of several ragged dims": (lambda: images().sum((0, 1)), """\
ShapeError
tdc.sum: expected the ragged dim reduced together with the batch, got dim (0, 1) of NestedTensor float32[2, -1, -1]
hint: rows differ in length: reduce dim (0, 1, 2), or x.to_padded() first"""),
    "unbiased and correction": (lambda: ragged().var(1, False, correction=1), """\
ShapeError
tdc.var: expected unbiased or correction, got both
hint: correction=1 is unbiased=True"""),
    "more than a row has": (lambda: ragged().topk(3, 1), """\
ShapeError
tdc.topk: expected at least 3 elements in each row, got a shorter row
hint: drop short rows first: x = x[x.lengths >= 3]"""),
    "more than a line has": (lambda: images().topk(2, 2), """\
ShapeError
tdc.topk: expected at least 2 elements in each row, got a shorter row
hint: drop short rows first: x = x[x.sizes[:, 1] >= 2]"""),
    "more than a line has, 2": (lambda: images().to_padded().kthvalue(2, 1), """\
ShapeError
tdc.kthvalue: expected at least 2 elements in each row, got a shorter row
hint: drop short rows first: x = x[x.lengths[:, 0] >= 2]"""),
    "the kth of a shorter row": (lambda: ragged().kthvalue(1, 1), """\
ShapeError
tdc.kthvalue: expected at least 1 elements in each row, got a shorter row
hint: drop short rows first: x = x[x.lengths >= 1]"""),
    "the zeroth": (lambda: ragged().kthvalue(0, 1), """\
ShapeError
tdc.kthvalue: expected k of 1 or more, got 0
hint: k = 1 is the smallest element"""),
    "a quantile in percent": (lambda: ragged().quantile(50, 1), """\
ShapeError
tdc.quantile: expected q in [0, 1], got 50
hint: q = 0.5 is the median"""),
    "sorted columns of a rectangle": (lambda: ragged().to_padded().sort(0), """\
ShapeError
tdc.sort: expected a ragged or static dim, got the batch, dim 0
hint: x.filled(value) first"""),
    "scans over the batch": (lambda: ragged().cumsum(0), """\
ShapeError
tdc.cumsum: expected a ragged or static dim, got dim 0 of NestedTensor float32[3, -1, 4]
hint: rows of different lengths have no common positions: x.to_padded() first"""),
    "scans over the batch, 2": (lambda: ragged().to_padded().cumsum(0), """\
ShapeError
tdc.cumsum: expected a ragged or static dim, got the batch, dim 0
hint: x.filled(value) is the rectangle"""),
    "places that are not like the rows": (lambda: torch.trapezoid(ragged(), torch.ones(3), dim=1), """\
ShapeError
tdc.trapezoid: expected points x like y, or dense ones along a static dim, got Tensor float32[3]
hint: y.with_values(points), or dx= for equal distances"""),
    "ragged boundaries": (lambda: torch.searchsorted(ragged(), ragged()), """\
DtypeError
tdc.searchsorted: expected a tensor (n,) to search, got NestedTensor float32[3, -1, 4]
hint: loop over the rows of both: tdc.pack([torch.searchsorted(s, r) for s, r in zip(sequences, x)])"""),
    "boundaries for each row": (lambda: torch.searchsorted(torch.ones(3, 2), ragged()), """\
ShapeError
tdc.searchsorted: expected a tensor (n,) to search, got Tensor float32[3, 2]
hint: one sequence for all rows"""),
    "values of each row or of all": (lambda: ragged().unique(), """\
UnsupportedError
tdc.unique: expected dim, the ragged dim, got none, which could mean values of each row or of all rows
hint: x.unique(dim=1) for each row; torch.unique(x.values) for all rows of a NestedTensor"""),
    "the norm of a matrix": (lambda: torch.norm(ragged(), "nuc"), """\
UnsupportedError
tdc.norm: expected the norm of a vector, p a number or 'fro', got 'nuc'
hint: torch.linalg.matrix_norm(x, 'nuc') of static dims"""),
    "the norm of a matrix, 2": (lambda: torch.linalg.norm(ragged(), 2, (1, 2)), """\
UnsupportedError
tdc.norm: expected ord and one dim, or no ord, got ord 2 and dim (1, 2)
hint: torch.linalg.vector_norm(x, ord, dim), or torch.linalg.matrix_norm"""),
    "bins of a rectangle": (lambda: torch.histc(ragged().to_padded()), """\
UnsupportedError
tdc.histc: expected an operation with a rule for MaskedBatch, got bins, into which padding would be counted
hint: x.to_packed().histc()"""),
}  # fmt: skip
test_says = says(SAYS)


class TestTexts(Texts):
    def test_a_layout_with_which_torch_would_count_by_shape(self):
        for x, name in ((ragged(), "NestedTensor"), (ragged().to_padded(), "MaskedBatch")):
            self.says(lambda x=x: torch.masked.sum(x, 1), f"""\
MethodError
tdc.layout: expected an operation with a rule for {name}, got 'layout', which has none
hint: for torch.masked, which counts by shape: x.sum(dim), or torch.where(mask, x, 0).sum(dim) and the like"""
            )  # fmt: skip


@pytest.mark.parametrize("x", batches(), ids=["packed", "padded"])
def test_equal_elements_keep_their_order(x: Any):
    assert [row.tolist() for row in x.argsort(1, descending=True)] == [[0, 2, 1], [], [0]]
    assert x.mode(1).values[0] == 3.0


def test_places_of_all_count_in_the_values():
    x, m = batches()
    assert x.argmax() == 0
    assert x.argmin() == 1
    assert m.argmin() == 1
    assert m.data.flatten()[m.argmin()] == 1.0
    assert x.argmax(keepdim=True).shape == (1, 1)


def test_a_bound_of_the_length_changes_nothing():
    x = packed(ROWS)
    wide, none = [packed(ROWS, max_length=n) for n in (9, None)]
    ops: list[Any] = [
        lambda y: y.cumsum(1), lambda y: y.sort(1).values, lambda y: y.diff(dim=1), lambda y: F.softmin(y, 1),
    ]  # fmt: skip
    for op in ops:
        expected = op(x).values
        assert torch.equal(op(wide).values, expected)
        assert torch.equal(op(none).values, expected)
    assert torch.equal(torch.hash_tensor(wide, 1), torch.hash_tensor(x.to_padded(), 1))


def test_statistics_are_written_for_far_away_means():
    rows = [torch.randn(n, dtype=torch.float32) + 1e4 for n in (50, 7)]
    expected = torch.stack([r.double().var() for r in rows]).float()
    torch.testing.assert_close(packed(rows).var(1), expected, rtol=1e-3, atol=0)


def test_large_elements_do_not_overflow():
    x = packed([torch.tensor([1000.0, 1000.0]), torch.tensor([-math.inf])])
    x.requires_grad_()
    out = x.logsumexp(1)
    torch.testing.assert_close(out, torch.tensor([1000.0 + math.log(2), -math.inf]))
    out[0].backward()
    assert x.values.grad is not None
    assert x.values.grad.tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("how", ["lower", "higher", "nearest"])
def test_a_quantile_that_is_an_element_may_be_infinite(how: str):
    rows = [torch.tensor([-math.inf, -math.inf, 1.0]), torch.tensor([math.inf])]
    expected = [[row.quantile(q, interpolation=how).item() for row in rows] for q in (0.5, 1.0)]
    for x in (tdc.pack(rows), tdc.pack(rows).to_padded(fill=math.nan)):
        assert x.quantile(torch.tensor([0.5, 1.0]), 1, interpolation=how).tolist() == expected
        assert x.nanquantile(torch.tensor([0.5, 1.0]), 1, interpolation=how).tolist() == expected


@pytest.mark.parametrize("op", ["max", "min", "argmax", "argmin"])
def test_a_rectangle_without_positions_has_no_extreme(op: str):
    rows = tdc.pack([torch.zeros(0), torch.zeros(0)])
    lines = tdc.pack([torch.zeros(1, 0), torch.zeros(2, 0)], ragged_dim=(1, 2))
    for x, dim in ((rows, 1), (lines, 2)):
        found, expected = ([*getattr(y, op)(dim)] for y in (x.to_padded(), x))
        for a, b in zip(found, expected, strict=True):
            assert a.tolist() == b.tolist()


@pytest.mark.parametrize("op", [torch.median, torch.nanmedian])
def test_medians_along_an_expanded_dim(op: Any):
    """torch's kernel reads past a dim of stride 0 (2.11-2.13), where other examples and padding lie."""
    x = tdc.pack([torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[4.0, 5.0]])], ragged_dim=2)
    for y in (x, x.to_padded(fill=math.inf)):
        found = op(y.expand(-1, 3, -1), 1)
        assert [row.tolist() for row in found.values.unbind()] == [[1.0, 2.0, 3.0], [4.0, 5.0]]
