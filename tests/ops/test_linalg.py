"""Linear algebra of ragged batches: what it says to matrices that it cannot take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from texts import Says, says
from texts import ragged as packed_rows
from versions import before

import tdc
from tdc import NestedTensor, ShapeError, UnsupportedError

LINALG: Any = torch.linalg
NAN = float("nan")


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


def test_older_methods_are_torchs():
    """Methods whose results or arguments are not those of the function of this name in `torch.linalg`."""
    x: Any = tdc.pack([torch.randn(2, 3, 3), torch.randn(1, 3, 3)])
    v = x.values
    assert torch.equal(x.svd().V.values, v.svd().V)
    assert torch.equal(x.svd(some=False, compute_uv=True)[2].values, v.svd().V)
    factors, pivots = x.lu()
    assert torch.equal(factors.values, LINALG.lu_factor(v).LU)
    assert torch.equal(pivots.values, LINALG.lu_factor(v).pivots)
    assert [type(part) for part in x.lu(True, True)] == [NestedTensor] * 3
    if not before(2, 14):  # which has no `qr` and no `cholesky`
        return
    assert torch.equal(x.qr(some=True)[1].values, torch.linalg.qr(v).R)
    definite = x @ x.mT + torch.eye(3)
    assert torch.equal(definite.cholesky(True).values, torch.linalg.cholesky(definite.values).mH)


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_dense_operands_broadcast_against_the_logical_shape(padded: bool):
    rows = [torch.randn(n, 2, 2) + 3 * torch.eye(2) for n in (2, 1, 3)]
    x: Any = tdc.pack(rows).to_padded(NAN) if padded else tdc.pack(rows)
    sides = torch.randn(3, 1, 2, 4)
    got = LINALG.solve(x, sides)
    tdc.validate(got)
    torch.testing.assert_close(got.unbind(), [LINALG.solve(row, b) for row, b in zip(rows, sides, strict=True)])
    with pytest.raises(ShapeError, match="broadcasts against"):
        LINALG.solve(x, sides[:2, 0])
    turned = LINALG.solve(sides[..., :2] + 3 * torch.eye(2), x)
    for y, row, a in zip(turned.unbind(), rows, sides[..., :2] + 3 * torch.eye(2), strict=True):
        torch.testing.assert_close(y, LINALG.solve(a, row))
    ranks = LINALG.matrix_rank(x, atol=torch.tensor([[0.0], [100.0], [0.0]]))
    assert [r.tolist() for r in ranks.unbind()] == [[2, 2], [0], [2, 2, 2]]


def test_solutions_from_the_right_of_ragged_rows():
    rows, a = [torch.randn(n, 3) for n in (2, 0, 4)], torch.randn(3, 3, 3) + 3 * torch.eye(3)
    for x in (tdc.pack(rows), tdc.pack(rows).to_padded(NAN)):
        for y, row, matrix in zip(LINALG.solve(a, x, left=False).unbind(), rows, a, strict=True):
            torch.testing.assert_close(y, LINALG.solve(matrix, row, left=False))
    with pytest.raises(UnsupportedError, match="matrices of static size"):
        LINALG.solve(a[0], tdc.pack(rows))


def test_norms_of_matrices_at_any_dims():
    rows = [torch.randn(n, 3, 4) for n in (2, 1)]
    x: Any = tdc.pack(rows)
    for batch in (x, x.to_padded(NAN)):
        for order, dims in ((2, (2, 3)), ("nuc", (-1, -2)), ("fro", (1, 2)), (1, (1, 3)), (float("-inf"), (1, 2))):
            own = tuple([d - (d > 0) for d in dims])
            for keepdim in (False, True):
                got = LINALG.matrix_norm(batch, order, dims, keepdim)
                parts = got.unbind() if not isinstance(got, torch.Tensor) else got
                for y, row in zip(parts, rows, strict=True):
                    torch.testing.assert_close(y, LINALG.matrix_norm(row, order, own, keepdim))


@pytest.mark.parametrize("shape", [(2, 0), (0, 2)])
def test_norms_of_matrices_without_elements(shape: tuple[int, int]):
    dim = shape.index(2)  # the ragged one
    x = tdc.pack([torch.randn(*shape), torch.randn(*[n * 2 for n in shape])], ragged_dim=dim + 1)
    for batch in (x, x.to_padded(NAN)):
        assert LINALG.matrix_norm(batch, (1, float("inf"))[dim], (1, 2)).tolist() == [0, 0]


@pytest.mark.parametrize("options", [{"dim": (1, 1)}, {"dim": (0, 2)}, {"ord": "nuc"}, {"ord": 2}, {"ord": -2}])
def test_norms_of_no_matrix_and_by_singular_values_are_refused(options: dict[str, Any]):
    x = tdc.pack([torch.ones(3, 4, 4), torch.ones(2, 4, 4)])
    with pytest.raises(tdc.UnsupportedError, match="expected matrices of static size"):
        LINALG.matrix_norm(x, **{"dim": (1, 2), **options})


SAYS: dict[str, Says] = {
    "a cross product that chooses its dim": (lambda: torch.cross(packed_rows()[..., :3], packed_rows()[..., :3]), """\
UnsupportedError
tdc.cross: expected the dim, got none, behind a ragged one
hint: torch.linalg.cross(x, y), along the last dim"""),
    "ragged matrices of no padding": (lambda: LINALG.ldl_factor(squares(2, 3)), """\
UnsupportedError
tdc.ldl_factor: expected matrices of static size in the last two dims, got NestedTensor float32[2, -1, -1]
hint: transpose the ragged dim to the front, or loop over x.unbind()"""),
    "half ragged matrices": (lambda: LINALG.inv(ragged()), """\
UnsupportedError
tdc.inv: expected matrices of static size in the last two dims, or square ones, got NestedTensor float32[3, -1, 4]
hint: transpose the ragged dim to the front, or loop over x.unbind()"""),
    "matrices that are not square": (lambda: LINALG.det(tdc.pack([torch.ones(2, 3)], ragged_dim=(1, 2))), """\
ShapeError
tdc.det: expected square matrices, got one that is not
hint: x.sizes shows them"""),
    "dense sides of ragged matrices": (lambda: LINALG.solve(squares(2, 3), torch.ones(3, 1)), """\
UnsupportedError
tdc.solve: expected ragged right-hand sides behind the matrix, got others
at matrix: NestedTensor float32[2, -1, -1]
at right-hand sides: Tensor float32[3, 1]
hint: pack the right-hand sides along the ragged dim of the matrices, and solve from the left"""),
    "sides of other lengths": (lambda: LINALG.solve(squares(2, 3), tdc.pack([torch.ones(3, 1), torch.ones(2, 1)])), """\
ShapeError
tdc.solve: expected right-hand sides as long as the matrices, got others
hint: x.unbind() shows their shapes"""),
    "least squares": (lambda: LINALG.lstsq(ragged(), ragged()), """\
UnsupportedError
tdc.lstsq: expected an operation with a rule for NestedTensor, got residuals and ranks whose sizes depend on the values
hint: torch.linalg.pinv(a) @ b for the solutions"""),
    "similarity over the batch": (lambda: torch.nn.functional.cosine_similarity(ragged(), ragged(), 0), """\
ShapeError
tdc.cosine_similarity: expected a dim of the examples, got dim 0, the batch
hint: the examples of a batch are no vectors; name another dim"""),
    "cross product of other sizes": (lambda: torch.cross(ragged(), ragged()), """\
ShapeError
tdc.cross: expected a static dim of size 3, got dim -1 of NestedTensor float32[3, -1, 4]
hint: torch.linalg.cross(x, y, dim=...)"""),
    "diagonal of the batch": (lambda: torch.diagonal(ragged()), """\
ShapeError
tdc.diagonal: expected two dims of the examples, got dims 0 and 1
hint: name two dims of the examples, e.g. torch.diagonal(x, 0, 1, 2)"""),
    "diagflat of matrices": (lambda: torch.diagflat(ragged()), """\
UnsupportedError
tdc.diagflat: expected examples that are vectors, got NestedTensor float32[3, -1, 4]
hint: loop over x.unbind()"""),
}  # fmt: skip
test_says = says(SAYS)


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


def test_solutions_in_a_wider_rectangle():
    """The right-hand sides keep their rectangle, whatever that of the matrices is."""
    a, b = [torch.eye(n) + torch.rand(n, n) for n in (2, 0, 3)], [torch.rand(n, 2) for n in (2, 0, 3)]
    wide = tdc.pack(b).to_padded(length=5)
    found = LINALG.solve(tdc.pack(a, ragged_dim=(1, 2)).to_padded(), wide)
    assert found.shape == (3, 5, 2)
    for row, matrix, right in zip(found.unbind(), a, b, strict=True):
        torch.testing.assert_close(row, LINALG.solve(matrix, right))


def test_padded_rows_of_length_1_do_not_grow():
    x, wide = tdc.MaskedBatch(torch.randn(2, 1, 3), torch.tensor([1, 1])), torch.randn(2, 4, 3)
    calls: Any = (torch.add, torch.broadcast_tensors, LINALG.cross, LINALG.vecdot, F.cosine_similarity)
    for op in calls:
        with pytest.raises(ShapeError, match="padded shape cannot grow"):
            op(x, wide, dim=2) if op is F.cosine_similarity else op(x, wide)
