"""Retrieval: all pairs of two batches, max-sim, lists of positions, distinct elements and counts of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Counter
from texts import Texts
from torch import Tensor
from torch.testing import assert_close

import tdc

LENGTHS = (((3, 0, 2), (4, 1, 5, 2)), ((1, 7), (2, 2, 3)), ((4, 4, 4, 4, 4), (9, 1, 0, 1, 1, 1)))
FORMS = ["packed", "padded", "mixed"]


def vectors(lengths: tuple[int, ...], seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 6, generator=g, requires_grad=True) for n in lengths]


def batch(rows: list[Tensor], padded: bool) -> tuple[Any, Tensor]:
    """A batch of copies, and the leaf of autograd that it holds."""
    x = tdc.pack([r.detach() for r in rows])
    y = x.to_padded(float("nan")) if padded else x
    leaf = (y.data if padded else y.values).detach().requires_grad_()
    return (y.with_data(leaf) if padded else y.with_values(leaf)), leaf


def rows_of(x: Any, grad: Tensor) -> list[Tensor]:
    """The gradient of each row."""
    return list((x.with_data(grad) if isinstance(x, tdc.MaskedBatch) else x.with_values(grad)).unbind())


def batches(qs: list[Tensor], ds: list[Tensor], form: str) -> tuple[Any, Any]:
    return batch(qs, form == "padded")[0], batch(ds, form != "packed")[0]


def one_score(q: Tensor, d: Tensor) -> Tensor:
    return (q @ d.mT).amax(1).sum() if len(d) else q.new_full((len(q),), -torch.inf).sum()


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("form", ["packed", *[pytest.param(form, marks=pytest.mark.slow) for form in FORMS[1:]]])
def test_max_sim_is_that_of_each_pair_in_one_graph(form: str):
    count = Counter()
    compiled = torch.compile(tdc.ops.max_sim, fullgraph=True, backend=count)
    for lengths in LENGTHS:
        qs, ds = vectors(lengths[0], 0), vectors(lengths[1], 1)
        want = torch.stack([torch.stack([one_score(q, d) for d in ds]) for q in qs])
        some = want.isfinite()
        gradients = torch.autograd.grad(want[some].square().sum(), [*qs, *ds], materialize_grads=True)
        for run in (tdc.ops.max_sim, compiled):
            (q, a), (d, b) = batch(qs, form == "padded"), batch(ds, form != "packed")
            got = run(q, d)
            assert_close(got, want)
            found = torch.autograd.grad(got[some].square().sum(), [a, b])
            assert_close([*rows_of(q, found[0]), *rows_of(d, found[1])], list(gradients))
    assert count.graphs == 1


def test_max_sim_of_dense_and_half():
    qs, ds = vectors((3, 3), 0), vectors((4, 1), 1)
    assert_close(tdc.ops.max_sim(torch.stack(qs), tdc.pack(ds)), tdc.ops.max_sim(tdc.pack(qs), tdc.pack(ds)))
    half = [[t.detach().bfloat16() for t in ts] for ts in (qs, ds)]
    want = torch.stack([torch.stack([one_score(q, d) for d in half[1]]) for q in half[0]])
    assert_close(tdc.ops.max_sim(tdc.pack(half[0]), tdc.pack(half[1])), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("out", ["bqc", "bc", "bcq", "ckb", "bqcd"])
def test_einsum_of_two_batches(out: str, form: str):
    qs, ds = vectors(LENGTHS[0][0], 0), vectors(LENGTHS[0][1], 1)
    got = torch.einsum(f"bqd,ckd->{out}", *batches(qs, ds, form))
    one = out.replace("b", "").replace("c", "")
    pairs = [[torch.einsum(f"qd,kd->{one}", q, d) for d in ds] for q in qs]
    if out == "ckb":
        rows = [torch.stack(list(column), -1) for column in zip(*pairs, strict=True)]
    else:
        rows = [torch.stack(row, out.replace("b", "").index("c")) for row in pairs]
    assert_close(list(got.unbind()) if out != "bc" else list(got), rows)


def lists() -> tuple[list[Tensor], list[Tensor], list[list[list[int]]]]:
    rows = [torch.randn(n, 3, requires_grad=True) for n in (3, 0, 2)]
    fixed = [torch.tensor([[0, 1], [2, -1]]), torch.zeros(0, 2, dtype=torch.int64), torch.tensor([[1, 1]])]
    return rows, fixed, [[[0, 1], [2], []], [], [[1], [0, -1, 1]]]


@pytest.mark.cases(1, 0)
@pytest.mark.parametrize("padded", [False, True])
def test_lists_of_positions(padded: bool):
    rows, fixed, _ = lists()
    index: Any = tdc.pack(fixed).to_padded() if padded else tdc.pack(fixed)
    want = [r[i] for r, i in zip(rows, fixed, strict=True)]
    gradients = torch.autograd.grad(torch.cat(want).square().sum(), rows, materialize_grads=True)
    compiled = torch.compile(lambda x, i: x[:, i], fullgraph=True, backend="eager")
    for run in (lambda x, i: x[:, i], compiled):
        x, leaf = batch(rows, padded)
        got = run(x, index)
        assert_close(list(got.unbind()), want)
        assert_close(rows_of(x, torch.autograd.grad(got.square().sum(), leaf)[0]), list(gradients))
    assert_close(batch(rows, padded)[0][:, index, 0].unbind()[0], want[0][..., 0])


@pytest.mark.sweep
@pytest.mark.slow
def test_lists_of_positions_in_two_levels():
    rows, _, given = lists()
    ids = [t for row in given for t in row]
    two = tdc.ragged.TwoLevelTensor(tdc.from_list(ids), tdc.offsets_of(torch.tensor([len(row) for row in given])))
    for run in (lambda x, i: x[:, i], torch.compile(lambda x, i: x[:, i], fullgraph=True, backend="eager")):
        got = run(tdc.pack([r.detach() for r in rows]), two)
        for row, found, of_row in zip(rows, got.unbind(), given, strict=True):
            assert_close(list(found.unbind()), [row[torch.tensor(i, dtype=torch.int64)] for i in of_row])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_histc_is_that_of_each_row(dtype: torch.dtype, padded: bool):
    rows = [torch.randn(n, 2).to(dtype) for n in (20, 0, 3)]
    rows[0] = (torch.randint(-10, 10, rows[0].shape) / 10).to(dtype)  # on the edges of bins
    x: Any = tdc.pack(rows).to_padded(float("nan")) if padded else tdc.pack(rows)
    for ends in ((-1, 0.7), (0, 0)):
        assert_close(tdc.ops.histc(x, 7, *ends), torch.stack([torch.histc(r, 7, *ends) for r in rows]))


def test_histc_in_one_graph():
    count = Counter("eager")
    compiled = torch.compile(lambda x: tdc.ops.histc(x, 7), fullgraph=True, backend=count)
    for lengths in ((20, 0, 3), (1, 9), (5, 5, 5, 5)):
        rows = [torch.randn(n) for n in lengths]
        assert_close(compiled(tdc.pack(rows)), torch.stack([torch.histc(r, 7) for r in rows]))
    assert count.graphs == 1


def test_distinct_words_of_sentences():
    words = tdc.ragged.TwoLevelTensor(tdc.from_list([[2, 1, 2], [], [3, 3]]), tdc.offsets_of(torch.tensor([2, 1])))
    found, counts = words.unique(return_counts=True, dim=2)
    assert (found.tolist(), counts.tolist()) == ([[[1, 2], []], [[3]]], [[[1, 2], []], [[2]]])


def test_distinct_elements_of_an_example():
    @tdc.batch
    def kinds(ids: Tensor) -> Tensor:
        return ids.unique()

    assert kinds(tdc.from_list([[2, 1, 2], [3]])).tolist() == [[1, 2], [3]]


X = tdc.pack([torch.ones(2, 4), torch.ones(3, 4)])


class TestTexts(Texts):
    def test_vectors(self):
        self.says(lambda: tdc.ops.max_sim(X, X[..., 0]), """\
ShapeError
tdc.max_sim: expected documents (B, -1, D), got NestedTensor float32[2, -1]
hint: tdc.pack([vectors, ...]) of (tokens, D) each"""
        )  # fmt: skip
        self.says(lambda: tdc.ops.max_sim(X, X[..., :3]), """\
ShapeError
tdc.max_sim: expected vectors of as many features, got NestedTensor float32[2, -1, 4] and NestedTensor float32[2, -1, 3]
hint: project both to one size"""
        )  # fmt: skip

    def test_distinct(self):
        self.says(lambda: X.unique(dim=2), """\
UnsupportedError
tdc.unique: expected dim, the one ragged dim, got dim 2 of NestedTensor float32[2, -1, 4]
hint: tdc.unbatched(fn)(x) loops over examples"""
        )  # fmt: skip

    def test_counts(self):
        self.says(lambda: torch.bincount(X[..., 0]), """\
DtypeError
tdc.bincount: expected whole numbers, got NestedTensor float32[2, -1]
hint: x.long()"""
        )  # fmt: skip
        self.says(lambda: torch.bincount(-X[..., 0].long()), """\
ShapeError
tdc.bincount: expected numbers from 0, got a negative one
hint: x - x.min() begins at 0"""
        )  # fmt: skip
        self.says(lambda: tdc.ops.histc(X, 3, 1, 0), """\
ShapeError
tdc.histc: expected one bin or more, from min to a larger max, got 3 bins from 1 to 0
hint: bins=10, min=0, max=1"""
        )  # fmt: skip
