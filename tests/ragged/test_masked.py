"""MaskedBatch: mask, rows and indexing, with NaN in all padding, so that a leak shows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tdc
from tdc import DtypeError, IndexingError, MaskedBatch, ShapeError, StructureError

T = torch.tensor
S = slice
NAN = float("nan")


def padded(*features: int) -> tuple[MaskedBatch, list[Tensor]]:
    """Rows of 2, 0 and 4 of at most 5, and a rectangle whose padding is NaN."""
    rows = [torch.randn(n, *features) for n in (2, 0, 4)]
    data = torch.full((3, 5, *features), NAN)
    for i, row in enumerate(rows):
        data[i, : len(row)] = row
    return MaskedBatch(data, T([2, 0, 4])), rows


def images() -> tuple[MaskedBatch, list[Tensor]]:
    """Two channels of images, 2 × 3, 0 × 4 and 3 × 1."""
    rows = [torch.randn(2, h, w) for h, w in ((2, 3), (0, 4), (3, 1))]
    data = torch.full((3, 2, 3, 4), NAN)
    for i, row in enumerate(rows):
        data[i, :, : row.shape[1], : row.shape[2]] = row
    return MaskedBatch(data, T([[2, 3], [0, 4], [3, 1]]), ragged_dims=(2, 3)), rows


def same(x: Any, rows: list[Tensor]) -> None:
    assert isinstance(x, MaskedBatch)
    assert [r.shape for r in x.unbind()] == [r.shape for r in rows]
    assert all(torch.equal(a, b) for a, b in zip(x.unbind(), rows, strict=True))


def test_mask_and_shape():
    x, rows = padded(3)
    assert x.mask.shape == (3, 5, 1)
    assert x.mask[..., 0].tolist() == [[i < len(r) for i in range(5)] for r in rows]
    assert padded()[0].mask.shape == (3, 5)
    y, _ = images()
    assert y.mask.shape == (3, 1, 3, 4)
    assert y.mask.sum((1, 2, 3)).tolist() == [6, 0, 3]
    assert y.mask[0, 0].tolist() == [[True, True, True, False]] * 2 + [[False] * 4]
    assert x.transpose(1, 2).mask.shape == (3, 1, 5)
    assert x.transpose(0, 1).mask.shape == (5, 3, 1)
    assert torch.equal(x.transpose(0, 1).mask, x.mask.transpose(0, 1))


def test_metadata():
    x, rows = padded(3)
    assert x.shape == x.size() == x.data.shape == (3, 5, 3)
    assert (x.size(1), x.ndim, x.dim(), len(x)) == (5, 3, 3, 3)
    assert x.batch_size == (3,)
    assert x.lengths.tolist() == [[2], [0], [4]]
    assert (x.dtype, x.device.type) == (torch.float32, "cpu")
    assert [x.is_cuda, x.is_nested, x.requires_grad] == [False] * 3
    assert [r.shape for r in x] == [r.shape for r in rows]


@pytest.mark.parametrize("make", [padded, lambda: padded(3), images])
def test_rows(make: Callable[[], tuple[MaskedBatch, list[Tensor]]]):
    x, rows = make()
    same(x, rows)
    same(x.transpose(0, 1).transpose(0, 1), rows)
    assert torch.equal(x.filled(7.0) == 7, (~x.mask).expand(x.shape))


@pytest.mark.parametrize(
    "index",
    [S(1, None), S(None), S(None, None, 2), [0, 2], [-1, 0, 0], [], T([True, False, True]), [False, True, True],
     np.array([2]), T([1, 1]), (S(1, None),), (S(1, None), ...), ..., ()],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("make", [lambda: padded(3), images])
def test_index(make: Callable[[], tuple[MaskedBatch, list[Tensor]]], index: Any):
    x, rows = make()
    first = index[0] if isinstance(index, tuple) and index else S(None) if isinstance(index, tuple) else index
    first = T([], dtype=torch.int64) if isinstance(first, list) and not first else first
    same(x[index], [rows[i] for i in torch.arange(3)[first].tolist()])
    assert x[index].shape[1:] == x.shape[1:]


@pytest.mark.parametrize("index", [0, 1, -1, T(2), np.int64(2), (0,), (0, ...)], ids=str)
def test_one_row_is_dense(index: Any):
    for x, rows in (padded(3), images()):
        assert torch.equal(x[index], rows[int(index[0] if isinstance(index, tuple) else index)])


@pytest.mark.parametrize(
    "index", [3, -4, [3], T([0, -4]), 0.5, True, T([[0]]), T([True, False]), (1, 0), (S(None), 0), "x"], ids=str
)
def test_what_an_index_cannot_be(index: Any):
    with pytest.raises(IndexingError):
        padded(3)[0][index]


def test_a_leaf_of_autograd():
    x, _ = padded(3)
    y = x.with_data(x.filled(0)).requires_grad_()
    assert y.requires_grad
    assert y.grad is None
    y.sum().backward()
    assert isinstance(y.grad, MaskedBatch)
    assert torch.equal(y.grad.data, x.mask.expand(x.shape).float())
    assert y.grad.lengths is y.lengths


def test_validate():
    x, _ = padded(3)
    assert tdc.validate(x) is x
    y = MaskedBatch(torch.zeros(3, 2), T([2, 2, 1]))
    y.lengths.copy_(T([[3], [2], [-1]]))
    with pytest.raises(
        StructureError, match=r"got 1 broken rule\nat lengths: outside \[0, 2\], .* dim 1, in row 0 and 1 more"
    ):
        tdc.validate(y)


@pytest.mark.parametrize("lengths", [[3, 1], [-1, 1]], ids=str)
def test_lengths_outside_of_the_data_are_refused(lengths: list[int]):
    with pytest.raises(StructureError, match=r"tdc\.MaskedBatch: expected lengths between 0 and the padded size, got"):
        MaskedBatch(torch.zeros(2, 2), T(lengths))


def test_a_moved_batch_dim():
    x, rows = padded(3)
    y = x.transpose(0, 1)
    assert all(torch.equal(a, b) for a, b in zip(y.unbind(1), rows, strict=True))
    assert torch.equal(y[:, 0], rows[0])
    packed = y.to_packed()
    assert packed.shape == (-1, len(rows), *y.shape[2:])
    assert all(torch.equal(a, b) for a, b in zip(packed.unbind(1), rows, strict=True))
    with pytest.raises(ShapeError, match="expected a static dim or dim 0, the batch, got ragged dim 1"):
        x.unbind(1)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "text"),
    [
        ((torch.zeros(2, 3), [1, 2]), {}, DtypeError, "got Tensor float32.* and list"),
        ((torch.zeros(2, 3), T([1, 2], dtype=torch.int32)), {}, DtypeError, "expected int64 lengths"),
        ((torch.zeros(2, 3), T([1, 2, 3])), {}, ShapeError, r"lengths of shape \(B, 1\)"),
        ((torch.zeros(2, 3, 3), T([1, 2])), {"ragged_dims": (1, 2)}, ShapeError, r"lengths of shape \(B, 2\)"),
        ((torch.zeros(2, 3), T([1, 2])), {"ragged_dims": 0}, ShapeError, r"neighbouring ragged dims in \[1, 1\]"),
        ((torch.zeros(2, 3), T([1, 2])), {"ragged_dims": 2}, ShapeError, r"neighbouring ragged dims in \[1, 1\]"),
        ((torch.zeros(2, 3, 4, 5), T([[1, 2]] * 2)), {"ragged_dims": (1, 3)}, ShapeError, "neighbouring"),
        ((torch.zeros(2), T([1, 2])), {}, ShapeError, "data with a ragged dim"),
    ],
)
def test_constructor_checks(args: Any, kwargs: Any, error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        MaskedBatch(*args, **kwargs)


def test_to_and_copies():
    x, rows = images()
    same(x.to(torch.float64), [r.double() for r in rows])
    assert x.to("meta").lengths.is_meta
    for other in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x)):
        same(other, rows)
        assert other.ragged_dims == (2, 3)
    assert copy.copy(x) is x
    with pytest.raises(tdc.ImmutableError, match=r"got `x\.data = Tensor`\nhint: x\.with_data"):
        x.data = x.data
