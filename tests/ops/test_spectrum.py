"""Decompositions of square matrices of different sizes equal those of each matrix alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Counter
from torch import Tensor
from torch.testing import assert_close

import tdc

LINALG: Any = torch.linalg
NAN = float("nan")
SIZES = ((3, 0, 5, 1), (4, 4), (0, 0), (2, 6, 1))
DTYPES = (torch.float64, torch.complex128)


def drawn(sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(n, n, dtype=dtype) for n in sizes]


def symmetric(sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [(m + m.mH).detach() for m in drawn(sizes, dtype)]


def batches(rows: list[Tensor]) -> tuple[Any, Any]:
    x: Any = tdc.pack(rows, ragged_dim=(1, 2))
    return x, x.to_padded(NAN)


def exponential(x: Any) -> Any:
    """Of symmetric matrices, by their eigenvectors: their sign makes no difference."""
    values, vectors = LINALG.eigh(x)
    return torch.einsum("bij,bkj->bik", torch.einsum("bij,bj->bij", vectors, values.exp()), vectors.conj())


def largest(x: Any) -> Any:
    """The outer product of first singular vectors: where both signs change, it does not."""
    u, _, vh = LINALG.svd(x)
    return torch.einsum("bij,bjk->bik", u, vh)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_matrices_are_made_of_their_parts_again(sizes: tuple[int, ...], dtype: torch.dtype):
    rows, same = drawn(sizes, dtype), symmetric(sizes, dtype)
    for x, y in zip(batches(rows), batches(same), strict=True):
        parts = [LINALG.eigh(y), LINALG.svd(x), torch.svd(x), LINALG.eig(x)]
        for found in parts:
            for part in found:
                tdc.validate(part)
        found = [[part.unbind() for part in each] for each in parts]
        for i, (a, h) in enumerate(zip(rows, same, strict=True)):
            (w, v), (u, s, vh), (u2, s2, v2), (ew, ev) = [[part[i] for part in each] for each in found]
            assert_close(w, LINALG.eigvalsh(h))
            assert_close((v * w) @ v.mH, h)
            assert_close(s, LINALG.svdvals(a))
            assert_close((u * s) @ vh, a)
            assert_close((u2 * s2) @ v2.mH, a)
            assert_close(ew, LINALG.eigvals(a))
            assert_close(a.to(ev.dtype) @ ev, ev * ew)


SLOW = [pytest.param(fn, marks=pytest.mark.slow) for fn in (exponential, largest)]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("fn", [*SLOW, LINALG.eigvalsh, LINALG.svdvals, LINALG.pinv])
def test_gradients_in_one_graph(fn: Any):
    counter = Counter("aot_eager")
    graph = torch.compile(fn, fullgraph=True, backend=counter)
    for sizes in ((3, 2, 5, 1), (4, 4), (2, 6, 3)):
        rows = [m.requires_grad_() for m in symmetric(sizes)]
        want = [one(fn, m) for m in rows]
        grads = torch.autograd.grad([(y.sin() * y).sum() for y in want], rows)
        for call in (fn, graph):
            for x in batches([m.detach() for m in rows]):
                if call is graph and isinstance(x, tdc.MaskedBatch):
                    continue
                leaf = x.requires_grad_()
                out = call(leaf)
                assert_close(out.unbind(), want)
                (out.sin() * out).sum().backward()
                assert_close(leaf.grad.unbind(), grads)
    assert counter.graphs == 1


def one(fn: Any, m: Tensor) -> Tensor:
    """What a function of a batch is for one matrix."""
    if fn in (exponential, largest):
        return fn(m[None])[0]
    return fn(m)


def test_equal_eigenvalues_give_values_gradients():
    rows = [torch.eye(3), torch.zeros(2, 2), torch.eye(4)]
    for x in batches(rows):
        leaf = x.requires_grad_()
        LINALG.eigvalsh(leaf).sum().backward()
        assert_close(leaf.grad.unbind(), [torch.eye(len(row)) for row in rows])


def test_only_the_triangle_that_is_read_matters():
    rows = symmetric((3, 1, 4))
    lower = [m.tril() + torch.full_like(m, NAN).triu(1) for m in rows]
    for uplo, given in (("L", lower), ("U", [m.mT for m in lower])):
        for x in batches(given):
            assert_close(LINALG.eigvalsh(x, UPLO=uplo).unbind(), [LINALG.eigvalsh(m) for m in rows])


def test_numbers_behind_a_matrix_cost_no_digits():
    """Small matrices beside large ones, and of one number, whose bound is the spectrum."""
    rows = [m.float() * s for m, s in zip(symmetric((2, 60, 3, 90, 4)), (1e-20, 1.0, 1e-33, 1e15, 1.0), strict=True)]
    for x in batches([*rows, torch.ones(7, 7)]):
        for op in (LINALG.eigvalsh, LINALG.svdvals):
            for w, m in zip(op(x).unbind(), [*rows, torch.ones(7, 7)], strict=True):
                want = op(m)
                assert (w - want).abs().max() < 1e-5 * want.abs().max()


def test_tolerances_are_those_of_each_matrix():
    rows = [torch.diag(torch.tensor([1.0, 3e-7])), torch.eye(80), torch.diag(torch.tensor([1.0, 0.0, 1e-5]))]
    for x in batches(rows):
        for options in ({}, {"atol": 0.0}, {"atol": 1e-4}, {"rtol": 1e-4}, {"atol": torch.full((3,), 2.0)}):
            assert LINALG.matrix_rank(x, **options).tolist() == [
                LINALG.matrix_rank(m, **{k: v if isinstance(v, float) else 2.0 for k, v in options.items()}).item()
                for m in rows
            ]
            for p, m in zip(LINALG.pinv(x, **options).unbind(), rows, strict=True):
                assert_close(p, LINALG.pinv(m, **{k: v if isinstance(v, float) else 2.0 for k, v in options.items()}))
        assert LINALG.matrix_rank(x, 1e-4).tolist() == [1, 80, 1]


def test_static_dims_in_front_and_a_batch_behind_them():
    rows = [m.expand(5, *m.shape) * torch.arange(1, 6)[:, None, None] for m in symmetric((3, 2))]
    x: Any = tdc.pack(rows, ragged_dim=(2, 3))
    for y in (x, x.to_padded(NAN), x.transpose(0, 1), x.to_padded(NAN).transpose(0, 1)):
        values, vectors = LINALG.eigh(y)
        assert values.shape[:2] == vectors.shape[:2] == y.shape[:2]
        at = y.shape.index(2)
        for w, v, row in zip(values.unbind(at), vectors.unbind(at), rows, strict=True):
            assert_close(w, LINALG.eigvalsh(row))
            assert_close((v * w[:, None]) @ v.mT, row)


def test_factors_and_pivots_are_those_of_each_matrix():
    rows = drawn((3, 0, 5, 1))
    for x in batches(rows):
        for op in (LINALG.qr, LINALG.lu, LINALG.lu_factor):
            for part, wanted in zip(op(x), zip(*[op(m) for m in rows], strict=True), strict=True):
                tdc.validate(part)
                assert_close(part.unbind(), wanted)


def test_what_is_refused():
    x, _ = batches(drawn((2, 3)))
    with pytest.raises(tdc.UnsupportedError, match=r"hint: torch.linalg.qr\(x\).R"):
        LINALG.qr(x, mode="r")
    with pytest.raises(tdc.UnsupportedError, match="matrices of static size"):
        LINALG.cond(x)
    with pytest.raises(tdc.UnsupportedError, match="numbers or tensors"):
        LINALG.pinv(x, rtol=tdc.pack([torch.ones(2), torch.ones(3)]))
    with pytest.raises(tdc.ShapeError, match="square matrices"):
        LINALG.eigvalsh(tdc.pack([torch.ones(2, 3)], ragged_dim=(1, 2)))
