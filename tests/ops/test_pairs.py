"""Pair maps: ragged batches that broadcast against each other, indices and orders of several ragged dims."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Counter
from texts import Texts
from torch import Tensor

import tdc
from tdc import IndexingError, ShapeError

S = slice
LENGTHS = (3, 2, 4)
PARTS = [
    S(None), S(None, 1), S(1, None), S(None, None, -1), S(-2, None, 2), 0, -1, [0, 1], [[0, 1], [1, 0]],
]  # fmt: skip


def rows_of(*sizes: Any, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    """Examples of sizes in which None is the length of the row."""
    g = torch.Generator().manual_seed(1)
    return [torch.randn(*[n if size is None else size for size in sizes], generator=g) for n in lengths]


def same(x: Any, rows: list[Tensor]) -> None:
    if isinstance(x, Tensor):
        assert torch.equal(x, torch.stack(rows))
        return
    tdc.validate(x)
    found = x.unbind(x._batch_dim)
    assert [r.shape for r in found] == [r.shape for r in rows]
    for a, b in zip(found, rows, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def batches(padded: bool) -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    ps, qs = rows_of(None, None, 2), rows_of(None, 2)
    p, q = tdc.pack(ps, ragged_dim=(1, 2)), tdc.pack(qs)
    return (
        (p.to_padded(float("nan"), length=(5, 5)), q.to_padded(float("nan"), length=5), ps, qs)
        if padded
        else (p, q, ps, qs)
    )


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_pairs_of_each_row(padded: bool):
    p, q, ps, qs = batches(padded)
    both = list(zip(ps, qs, strict=True))
    same(q[:, None] - q[:, :, None], [b[None] - b[:, None] for b in qs])
    same(p + q.unsqueeze(2), [a + b[:, None] for a, b in both])
    same(q.unsqueeze(1) * p, [b[None] * a for a, b in both])
    same(torch.where(q[:, None] > q[:, :, None], p, 0.5), [torch.where(b[None] > b[:, None], a, 0.5) for a, b in both])
    same(
        (q[:, None] - q[:, :, None]) * (p + torch.arange(2.0)),
        [(b[None] - b[:, None]) * (a + torch.arange(2.0)) for a, b in both],
    )
    a, b = torch.broadcast_tensors(p, q[:, None])
    same(a, ps)
    same(b, [y[None].expand_as(x) for x, y in both])
    similar = F.cosine_similarity(q[:, None], q[:, :, None], -1)
    torch.testing.assert_close(similar.unbind(), [F.cosine_similarity(x[None], x[:, None], -1) for x in qs])
    torch.testing.assert_close(
        F.mse_loss(p, q[:, None] * p), torch.cat([(a - b[None] * a).flatten() for a, b in both]).square().mean()
    )


def test_features_and_heads_broadcast_as_well():
    p, q, ps, qs = batches(False)
    heads, bias = torch.randn(4, 1, 1), p[..., 0]
    same(q[:, :, 0][:, None, :, None] + heads.unsqueeze(0) * bias[:, None], [
        b[:, 0][None, :, None] + heads * a[..., 0][None] for a, b in zip(ps, qs, strict=True)
    ])  # fmt: skip
    x, y = tdc.pack(rows_of(None, 1)), tdc.pack(rows_of(None, 3, lengths=(1, 5, 2)))
    same(x[:, :, None] + y[:, None], [a[:, None] + b[None] for a, b in zip(x.unbind(), y.unbind(), strict=True)])
    same(x.transpose(0, 1)[:, None] - x.transpose(0, 1)[None], [r[:, None] - r[None] for r in rows_of(None, 1)])
    grid = rows_of(None, 2, None)
    triple = tdc.pack([r.movedim(1, 2) for r in grid], ragged_dim=(1, 2))[:, :, :, None]
    pair = tdc.pack(rows_of(None, lengths=(2, 3, 1)))[:, None, None, :, None]
    same(
        triple + pair,
        [
            a.movedim(1, 2)[:, :, None] + b[None, None, :, None]
            for a, b in zip(grid, rows_of(None, lengths=(2, 3, 1)), strict=True)
        ],
    )


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_gradients_of_pairs(padded: bool):
    p, q, ps, qs = batches(padded)
    p, q = p.requires_grad_(), q.requires_grad_()
    ps, qs = [r.clone().requires_grad_() for r in ps], [r.clone().requires_grad_() for r in qs]
    ((q[:, None] - q[:, :, None]).exp() * p.transpose(1, 2)).sum().backward()
    for a, b in zip(ps, qs, strict=True):
        ((b[None] - b[:, None]).exp() * a.transpose(0, 1)).sum().backward()
    for x, rows in ((p, ps), (q, qs)):
        torch.testing.assert_close(x.grad.unbind(), [want.grad for want in rows])


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_ragged_dims_swap(padded: bool):
    p, _, ps, _ = batches(padded)
    same(p.transpose(1, 2), [r.transpose(0, 1) for r in ps])
    same(p.permute(0, 3, 2, 1), [r.permute(2, 1, 0) for r in ps])
    volumes = [torch.randn(2, n, n + 1, 3 - n) for n in (1, 2, 3)]
    x = tdc.pack(volumes, ragged_dim=(2, 3, 4))
    y = (x.to_padded(float("nan")) if padded else x).permute(0, 4, 2, 3, 1)
    same(y, [r.permute(3, 1, 2, 0) for r in volumes])
    if not padded:
        assert (y.max_length, y.structure.extent.shape) == (2, (2, 3, 4, 0))


def part_of(row: Tensor, dim: int, part: Any) -> Tensor:
    """One entry of an index on one dim."""
    if isinstance(part, int):
        return row.select(dim, part)
    places = torch.tensor(range(row.shape[dim])[part] if isinstance(part, S) else part, dtype=torch.int64)
    return row.index_select(dim, places.flatten()).unflatten(dim, places.shape)


@pytest.mark.parametrize(
    ("a", "b"),
    [pair for pair in product(PARTS, PARTS) if not all(isinstance(i, (list, Tensor)) for i in pair)],
    ids=str,
)
def test_places_of_several_ragged_dims(a: Any, b: Any):
    p, _, ps, _ = batches(False)
    want = [part_of(part_of(r, 1, b), 0, a) for r in ps]
    same(p[:, a, b], want)
    same(p[:, a, b, 1], [r[..., 1] for r in want])
    behind = p.permute(0, 3, 1, 2)
    same(behind[:, :, a, b], [r.movedim(-1, 0) for r in want])
    same(
        behind[[2, 0]][..., :1, a, b] if not isinstance(a, (list, Tensor)) else behind[:, :1, a, b][[2, 0]],
        [want[i][None, ..., 0] for i in (2, 0)],
    )


def test_lengths_of_each_row_and_of_the_middle():
    p, _, ps, _ = batches(False)
    ends = torch.tensor([1, 0, 9])
    same(tdc.truncate(p, ends), [r[:n] for r, n in zip(ps, ends.tolist(), strict=True)])
    same(p[:, :, :ends], [r[:, :n] for r, n in zip(ps, ends.tolist(), strict=True)])
    assert p[:, 1:, :2].max_length == 3
    volumes = rows_of(None, None, 2, None)
    x = tdc.pack([r.movedim(2, 3) for r in volumes], ragged_dim=(1, 2, 3))
    same(x[:, :, 1], [r.movedim(2, 3)[:, 1] for r in volumes])
    with pytest.raises(ShapeError, match="ragged dims side by side"):
        x[:, :, [0, 1]]
    with pytest.raises(IndexingError, match="a shorter row"):
        p[:, :, 2]


def pair_map(q: Any, p: Any) -> Any:
    return (q[:, None] - q[:, :, None]) * (q[:, None] + q[:, :, None]) + p.transpose(1, 2)[:, :, :]


def everything(q: Any, p: Any) -> tuple[Any, ...]:
    return pair_map(q, p), p[:, 1:, :2], p[:, 0] * q, p[:, :, [0, -1]]


@pytest.mark.slow
def test_one_graph_for_all_lengths():
    counter = Counter("aot_eager")
    compiled = torch.compile(everything, backend=counter, fullgraph=True)
    for lengths in ((3, 2, 1), (2, 5, 4, 1), (7, 3, 2, 2, 4)):
        p = tdc.pack(rows_of(None, None, 2, lengths=lengths), ragged_dim=(1, 2))
        q = tdc.pack(rows_of(None, 2, lengths=lengths))
        p, q = p.requires_grad_(), q.requires_grad_()
        found, wanted = compiled(q, p), everything(q, p)
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got.values, want.values)
            assert torch.equal(got.sizes, want.sizes)
        totals = [torch.stack([x.values.square().sum() for x in results]).sum() for results in (found, wanted)]
        torch.testing.assert_close(*[torch.autograd.grad(total, (p.values, q.values)) for total in totals])
    assert counter.graphs == 1


class TestTexts(Texts):
    def test_a_dim_too_few(self):
        p, q, _, _ = batches(False)
        self.says(lambda: p + q, """\
ShapeError
tdc.add: expected batches whose dims meet, counted from the last, got other numbers of dims
at operand 0: NestedTensor float32[3, -1, -1, 2]
at operand 1: NestedTensor float32[3, -1, 2]
hint: y.unsqueeze(d) where y lacks a dim of x""")  # fmt: skip

    def test_a_number_for_each_element_without_its_dim(self):
        _, q, _, _ = batches(False)
        self.says(lambda: q * q[..., 0], """\
ShapeError
tdc.mul: expected batches whose dims meet, counted from the last, got other numbers of dims
at operand 0: NestedTensor float32[3, -1, 2]
at operand 1: NestedTensor float32[3, -1]
hint: y.unsqueeze(d) where y lacks a dim of x""")  # fmt: skip

    def test_a_ragged_and_a_static_dim(self):
        _, q, _, _ = batches(False)
        self.says(lambda: q[:, None] + tdc.pack(rows_of(None, 4, 2))[:, :, :, 0][..., None], """\
ShapeError
tdc.add: expected operands that broadcast, got other sizes at dim 2
at operand 0: NestedTensor float32[3, 1, -1, 2]
at operand 1: NestedTensor float32[3, -1, 4, 1]
hint: a ragged dim meets one of the same sizes, or a static one of size 1""")  # fmt: skip

    def test_other_numbers_of_rows(self):
        p, q, _, _ = batches(False)
        self.says(lambda: p + q[:1].unsqueeze(1), """\
StructureError
tdc.add: expected operands of equally many rows, got others
at operand 0: NestedTensor float32[3, -1, -1, 2]
at operand 1: NestedTensor float32[1, 1, -1, 2]
hint: x[rows] and y[rows] of the same rows""")  # fmt: skip

    def test_rows_of_other_sizes(self):
        p, _, _, _ = batches(False)
        self.says(lambda: p + tdc.pack(rows_of(None, 2, lengths=(1, 1, 1))).unsqueeze(1), """\
StructureError
tdc.add: expected rows of equal sizes where both are ragged, got rows of different lengths
hint: x.to_padded() both, or slice rows""")  # fmt: skip

    def test_padded_rows_of_other_sizes(self):
        p, _, _, _ = batches(True)
        self.says(lambda: p + tdc.pack(rows_of(None, 2, lengths=(1, 1, 1))).to_padded(length=5).unsqueeze(1), """\
StructureError
tdc.add: expected rows of equal sizes where both are ragged, got rows of different lengths
hint: build both from one batch""")  # fmt: skip
