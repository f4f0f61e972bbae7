"""Spellings that a newcomer would try on ragged batches, and what the library says where they have no meaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Counter
from texts import Says, says
from texts import ragged as ragged_of
from torch import Tensor

import tdc

LENGTHS = (3, 0, 5)


def rows_of(*sizes: int, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(n, *sizes, generator=g) for n in lengths]


def ragged() -> Any:
    return ragged_of()


def same(x: Any, rows: list[Tensor]) -> None:
    tdc.validate(x)
    for a, b in zip(x.unbind(), rows, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("padded", [False, True])
def test_matrices_transposed(padded: bool):
    rows = rows_of(4)
    x: Any = tdc.pack(rows).to_padded() if padded else tdc.pack(rows)
    same(x.mT, [r.mT for r in rows])
    torch.testing.assert_close((x @ x.mT).unbind(), [r @ r.mT for r in rows])
    z = x * (1 + 2j)
    same(z.mH, [r.mH for r in z.unbind()])
    for name in ("mT", "mH"):
        with pytest.raises(tdc.ShapeError, match="expected matrices, got"):
            getattr(x[:, :, 0], name)


def test_axis_is_dim_where_batches_are_joined():
    rows = rows_of(4)
    x: Any = tdc.pack(rows)
    same(torch.cat([x, x], axis=1), [torch.cat([r, r]) for r in rows])
    same(torch.stack([x, x], axis=2), [torch.stack([r, r], 1) for r in rows])


def test_dense_rows_join_ragged_ones():
    rows, token = rows_of(4), torch.randn(3, 1, 4)
    x: Any = tdc.pack(rows)
    y: Any = torch.cat([token, x], 1)
    same(y, [torch.cat([t, r]) for t, r in zip(token, rows, strict=True)])
    assert y.max_length == 6
    same(torch.cat([x, token.expand(3, 2, 4)], 1), [torch.cat([r, t, t]) for t, r in zip(token, rows, strict=True)])
    same(torch.cat([x, torch.ones(2, 3, 4)]), [*rows, torch.ones(3, 4), torch.ones(3, 4)])
    images = [torch.randn(2, h, w) for h, w in ((3, 2), (3, 4), (3, 1))]
    frame = torch.randn(3, 2, 3, 1)
    z: Any = tdc.pack(images, ragged_dim=(2, 3))
    same(torch.cat([frame, z], 3), [torch.cat([f, r], 2) for f, r in zip(frame, images, strict=True)])


@pytest.mark.slow
def test_a_token_in_front_is_one_graph():
    def run(x: Any, token: Tensor) -> Any:
        joined: Any = torch.cat([token.expand(len(x), 1, 4), x], 1)
        return joined.to_padded().data.sum((1, 2))

    counter = Counter("aot_eager")
    compiled, token = torch.compile(run, backend=counter, fullgraph=True), torch.randn(4, requires_grad=True)
    for lengths in (LENGTHS, (2, 5, 4, 1), (7, 3, 2, 2, 6)):
        x = tdc.pack(rows_of(4, lengths=lengths))
        out = compiled(x, token)
        torch.testing.assert_close(out, torch.stack([r.sum() + token.sum() for r in x.unbind()]))
        (grad,) = torch.autograd.grad(out.sum(), token)
        torch.testing.assert_close(grad, torch.full((4,), float(len(lengths))))
    assert counter.graphs == 1


def test_dtype_and_device_of_another():
    x, y = tdc.pack(rows_of(4)), tdc.pack(rows_of(2, lengths=(1, 2))).double()
    assert torch.ones(7).type_as(y).dtype == torch.float64
    for other in (y, y.to_padded(), torch.ones(1).double()):
        assert torch.ones(3).to(other).dtype == torch.float64
        for batch in (x, x.to_padded()):
            assert batch.to(other).dtype == batch.type_as(other).dtype == torch.float64
    assert torch.ones(3).to(y, copy=True).dtype == torch.float64


SAYS: dict[str, Says] = {
    "rows for the constructor": (lambda: tdc.NestedTensor([torch.ones(1), torch.ones(2)]), """\
DtypeError
tdc.NestedTensor: expected tensors of values and offsets, got list and NoneType
hint: tdc.pack(rows)"""),
    "a ragged weight": (lambda: F.linear(torch.ones(3, 4), ragged()), """\
DtypeError
tdc.linear: expected a ragged input and dense weights, got others
at input: Tensor float32[3, 4]
at weight 0: NestedTensor float32[3, -1, 4]
at weight 1: NoneType
hint: torch.matmul(x, w.mT), or x.gather, for a weight of each example"""),
    "a ragged weight of padded rows": (lambda: F.linear(ragged(), ragged().to_padded()), """\
DtypeError
tdc.linear: expected a ragged input and dense weights, got others
at input: NestedTensor float32[3, -1, 4]
at weight 0: MaskedBatch float32[3, 3, 4]
at weight 1: NoneType
hint: torch.matmul(x, w.mT), or x.gather, for a weight of each example"""),
    "a token for other rows": (lambda: torch.cat([torch.zeros(2, 1, 4), ragged()], 1), """\
StructureError
tdc.cat: expected as many rows in each, got batch sizes [2, 3]
hint: along the batch, dim 0, rows follow rows"""),
    "a token without its dim": (lambda: torch.cat([torch.zeros(3, 4), ragged()], 1), """\
StructureError
tdc.cat: expected operands that are all NestedTensor, got 1 others
at operand 0: Tensor float32[3, 4]
hint: make each a NestedTensor first"""),
}  # fmt: skip
test_says = says(SAYS)
