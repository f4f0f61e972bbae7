"""Linear algebra of ragged batches: what it says to matrices that it cannot take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from texts import Texts
from texts import ragged as packed_rows

import tdc
from tdc import NestedTensor

LINALG: Any = torch.linalg


def ragged() -> Any:
    return packed_rows()


def squares(*sizes: int) -> Any:
    torch.manual_seed(0)
    return tdc.pack([torch.randn(n, n) + 3 * torch.eye(n) for n in sizes], ragged_dim=(1, 2))


def test_bounds_of_square_matrices_need_not_be_square():
    x = squares(2, 3)
    wide = NestedTensor(x.values, x.offsets, shapes=x.sizes, max_length=(4, 7))
    torch.testing.assert_close(LINALG.inv(wide).values, LINALG.inv(x).values)
    torch.testing.assert_close(LINALG.det(wide), torch.stack([LINALG.det(row) for row in x]))


def test_a_singular_matrix_spoils_its_own_example_only():
    rows = [torch.eye(2), torch.zeros(3, 3), 2 * torch.eye(1)]
    x: Any = tdc.pack(rows, ragged_dim=(1, 2))
    inverse, info = LINALG.inv_ex(x)
    assert info.tolist() == [0, 1, 0]
    assert torch.equal(inverse.unbind()[2], torch.tensor([[0.5]]))
    assert LINALG.det(x).tolist() == [1.0, 0.0, 2.0]


def test_names_of_results_are_torchs():
    x: Any = tdc.pack([torch.eye(2).expand(3, 2, 2)])
    assert LINALG.slogdet(x).logabsdet.shape == (1, -1)
    assert LINALG.qr(x).R.shape == (1, -1, 2, 2)


def test_distances_do_not_depend_on_the_batch():
    near = torch.tensor([[1000.0, 0.0], [1000.0, 1e-3]])
    alone: Any = tdc.pack([near])
    among: Any = tdc.pack([near, torch.zeros(60, 2)])
    assert torch.equal(torch.cdist(alone, alone).unbind()[0], torch.cdist(among, among).unbind()[0])


def test_operands_by_name():
    x = squares(2, 3)
    b: Any = tdc.pack([torch.ones(2, 1), torch.ones(3, 1)])
    assert torch.equal(LINALG.solve(A=x, B=b).values, LINALG.solve(x, b).values)


def test_other_names():
    x = squares(2, 3)
    assert torch.equal(torch.det(x), x.det())
    inverse: Any = torch.inverse(x)
    assert torch.equal(inverse.values, x.inverse().values)


class TestTexts(Texts):
    def test_ragged_matrices_of_no_padding(self):
        self.says(
            lambda: LINALG.eigvalsh(squares(2, 3)),
            """\
UnsupportedError
tdc.eigvalsh: expected matrices of static size in the last two dims, got NestedTensor float32[2, -1, -1]
hint: transpose the ragged dim to the front, or loop over x.unbind()""",
        )

    def test_half_ragged_matrices(self):
        self.says(
            lambda: LINALG.inv(ragged()),
            """\
UnsupportedError
tdc.inv: expected matrices of static size in the last two dims, or square ones, got NestedTensor float32[3, -1, 4]
hint: transpose the ragged dim to the front, or loop over x.unbind()""",
        )

    def test_matrices_that_are_not_square(self):
        self.says(
            lambda: LINALG.det(tdc.pack([torch.ones(2, 3)], ragged_dim=(1, 2))),
            """\
ShapeError
tdc.det: expected square matrices, got one that is not
hint: x.sizes shows them""",
        )

    def test_dense_sides_of_ragged_matrices(self):
        self.says(
            lambda: LINALG.solve(squares(2, 3), torch.ones(3, 1)),
            """\
UnsupportedError
tdc.solve: expected ragged right-hand sides behind the matrix, got others
at matrix: NestedTensor float32[2, -1, -1]
at right-hand sides: Tensor float32[3, 1]
hint: pack the right-hand sides along the ragged dim of the matrices, and solve from the left""",
        )

    def test_sides_of_other_lengths(self):
        self.says(
            lambda: LINALG.solve(squares(2, 3), tdc.pack([torch.ones(3, 1), torch.ones(2, 1)])),
            """\
ShapeError
tdc.solve: expected right-hand sides as long as the matrices, got others
hint: x.unbind() shows their shapes""",
        )

    def test_least_squares(self):
        self.says(
            lambda: LINALG.lstsq(ragged(), ragged()),
            """\
UnsupportedError
tdc.lstsq: expected an operation with a rule for NestedTensor, got residuals and ranks whose sizes depend on the values
hint: torch.linalg.pinv(a) @ b for the solutions""",
        )

    def test_similarity_over_the_batch(self):
        self.says(
            lambda: torch.nn.functional.cosine_similarity(ragged(), ragged(), 0),
            """\
ShapeError
tdc.cosine_similarity: expected a dim of the examples, got dim 0, the batch
hint: the examples of a batch are no vectors; name another dim""",
        )

    def test_cross_product_of_other_sizes(self):
        self.says(
            lambda: torch.cross(ragged(), ragged()),
            """\
ShapeError
tdc.cross: expected a static dim of size 3, got dim -1 of NestedTensor float32[3, -1, 4]
hint: torch.linalg.cross(x, y, dim=...)""",
        )

    def test_diagonal_of_the_batch(self):
        self.says(
            lambda: torch.diagonal(ragged()),
            """\
ShapeError
tdc.diagonal: expected two dims of the examples, got dims 0 and 1
hint: name two dims of the examples, e.g. torch.diagonal(x, 0, 1, 2)""",
        )

    def test_diagflat_of_matrices(self):
        self.says(
            lambda: torch.diagflat(ragged()),
            """\
UnsupportedError
tdc.diagflat: expected examples that are vectors, got NestedTensor float32[3, -1, 4]
hint: loop over x.unbind()""",
        )


@pytest.mark.parametrize("op", [F.cosine_similarity, torch.linalg.vecdot, F.pairwise_distance])
@pytest.mark.parametrize("first", [True, False])
def test_padding_reaches_no_gradient_of_a_dense_operand(op: Any, first: bool):
    data = torch.randn(2, 3, 4)
    data[0, 1:] = float("nan")
    x, w = tdc.MaskedBatch(data, torch.tensor([1, 3])), torch.randn(4, requires_grad=True)
    options = {} if op is F.pairwise_distance else {"dim": -1}
    pair = (w[None, None], x) if first else (x, w[None, None])
    (grad,) = torch.autograd.grad(op(*pair, **options).data.sum(), w)
    assert not grad.isnan().any()
