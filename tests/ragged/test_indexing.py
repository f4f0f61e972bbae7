"""Indices of ragged batches, against the same index of each row: `x[rows, positions, ..., features]`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Counter
from torch import Tensor
from torch.utils import _pytree as pytree

import tdc
from tdc import MaskedBatch, NestedTensor
from tdc.core.errors import DtypeError, IndexingError, ShapeError, StructureError

S, T = slice, torch.tensor
LENGTHS = (2, 4, 3, 2)
ALL = S(None)
ROWS = [ALL, S(1, 3), S(-2, None), S(None, None, -1), S(None, None, 2), [2, 0, 2], T([True, False, True, True])]
POSITIONS = [ALL, S(1, None), S(None, -1), S(-2, None), S(None, None, 2), S(None, None, -1), S(-1, 0, -2), S(1, 1),
          S(0, 9), S(-3, 2), 0, -1, T(1), [0, 1], [-1, 0, -1], T([[0, 1], [1, 0]])]  # fmt: skip
FEATURES = [ALL, 0, -1, S(None, 2), S(None, None, -1), S(-2, None), [2, 0], T([True, False, True]), T([[0, 1], [2, 2]])]


def rows_of(*sizes: int, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(n, *sizes, generator=g) for n in lengths]


def batch(rows: list[Tensor], kind: str) -> Any:
    x = tdc.pack(rows)
    return x if kind == "nested" else x.to_padded(float("nan"), length=x.max_length + 2)


def flipped(x: Tensor, dim: int, part: Any) -> Tensor:
    """An entry of an index on one dim, with negative steps as NumPy has them."""
    if isinstance(part, S):
        part = list(range(x.shape[dim]))[part]
        return x.index_select(dim, T(part, dtype=torch.int64))
    return x[(ALL,) * dim + (part,)]


def by_hand(rows: list[Tensor], parts: tuple[Any, ...]) -> list[Tensor]:
    first, *rest = parts
    chosen = list(range(len(rows)))
    chosen = chosen[first] if isinstance(first, S) else torch.arange(len(rows))[first].tolist()
    out = []
    for i in chosen:
        row = rows[i]
        for d in range(len(rest) - 1, -1, -1):
            row = flipped(row, d, rest[d])
        out.append(row)
    return out


def same(got: Any, want: list[Tensor]) -> None:
    if isinstance(got, Tensor):
        assert torch.equal(got, torch.stack(want))
        return
    found = got.unbind()
    assert len(found) == len(want)
    assert [r.shape for r in found] == [r.shape for r in want]
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("kind", ["nested", "masked"])
@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_positions_of_each_row(positions: Any, kind: str):
    rows = rows_of(3)
    x = batch(rows, kind)
    for first in ROWS:
        if isinstance(first, S) or isinstance(positions, (S, int)):
            same(x[first, positions], by_hand(rows, (first, positions)))
    assert isinstance(x[:, positions], (NestedTensor, MaskedBatch) if isinstance(positions, S) else Tensor)
    for feature in (0, S(None, None, -1)):
        same(x[:, positions, feature], by_hand(rows, (ALL, positions, feature)))
    assert torch.equal(x[1, positions], by_hand(rows, (S(1, 2), positions))[0])


@pytest.mark.parametrize("kind", ["nested", "masked"])
@pytest.mark.parametrize("feature", FEATURES, ids=str)
def test_static_dims(feature: Any, kind: str):
    rows = rows_of(3, 3)
    x = batch(rows, kind)
    same(x[..., feature], by_hand(rows, (ALL, ALL, ALL, feature)))
    same(x[:, :, feature], by_hand(rows, (ALL, ALL, feature)))
    same(x[1:, 1:, feature], by_hand(rows, (S(1, None), S(1, None), feature)))
    same(x[:, 0, feature, 1], by_hand(rows, (ALL, 0, feature, 1)))
    y = x.permute(0, 2, 1, 3)
    same(y[:, feature], [flipped(r.transpose(0, 1), 0, feature) for r in rows])
    same(y[:, feature, :1], [flipped(r[:1].transpose(0, 1), 0, feature) for r in rows])


@pytest.mark.parametrize("kind", ["nested", "masked"])
def test_a_batch_behind_its_ragged_dim(kind: str):
    rows = rows_of(3)
    x = batch(rows, kind).transpose(0, 1)
    assert torch.equal(x[0], torch.stack([r[0] for r in rows]))
    assert torch.equal(x[[1, 0]], torch.stack([r[[1, 0]] for r in rows], 1))
    assert torch.equal(x[:, 2], rows[2])
    assert torch.equal(x[1, 2], rows[2][1])
    assert torch.equal(x[[1, -1], [2, 0]], torch.stack([rows[2][1], rows[0][-1]]))
    same(x[1:, [2, 0], 1].transpose(0, 1), [rows[2][1:, 1], rows[0][1:, 1]])
    same(x[..., None].permute(1, 0, 2, 3), [r[..., None] for r in rows])


@pytest.mark.parametrize("kind", ["nested", "masked"])
def test_spans_with_an_end_for_each_row(kind: str):
    rows = rows_of(3)
    x, ends = batch(rows, kind), T([1, 4, -1, 0])
    same(x[:, :ends], [r[:n] for r, n in zip(rows, ends.tolist(), strict=True)])
    same(x[:, ends:], [r[n:] for r, n in zip(rows, ends.tolist(), strict=True)])
    same(x[:, ends - 1 : ends + 1, 0], [r[n - 1 : n + 1, 0] for r, n in zip(rows, ends.tolist(), strict=True)])
    same(x[:2, : ends[:2]], [r[:n] for r, n in zip(rows[:2], ends.tolist()[:2], strict=True)])
    same(x[:, : T(2)], [r[:2] for r in rows])
    same(tdc.truncate(x, ends), [r[:n] for r, n in zip(rows, ends.tolist(), strict=True)])
    same(x[:, :0], [r[:0] for r in rows])


@pytest.mark.parametrize("kind", ["nested", "masked"])
def test_rows_pair_with_positions(kind: str):
    rows = rows_of(3, 2)
    x = batch(rows, kind)
    last = torch.arange(4), x.sizes[:, 0] - 1 if kind == "nested" else x.lengths[:, 0] - 1
    assert torch.equal(x[last], torch.stack([r[-1] for r in rows]))
    assert torch.equal(x[[3, 1], [-1, 2], 0], torch.stack([rows[3][-1, 0], rows[1][2, 0]]))
    assert torch.equal(x[[3, 1], [0]], torch.stack([rows[3][0], rows[1][0]]))
    y = x.permute(0, 2, 1, 3)
    assert torch.equal(y[[3, 1], :, [-1, 2]], torch.stack([rows[3][-1], rows[1][2]]))
    with pytest.raises(IndexingError, match="one position for each of 2 rows"):
        x[[0, 1], [0, 1, 1]]
    with pytest.raises(IndexingError, match="a shorter row"):
        x[[0, 1], [0, 4]]


@pytest.mark.parametrize("kind", ["nested", "masked"])
def test_new_dims(kind: str):
    rows = rows_of(3)
    x = batch(rows, kind)
    assert x[None].shape[0] == 1
    assert torch.equal(x[None][0][1], rows[1]) if kind == "masked" else True
    same(x[:, None], [r[None] for r in rows])
    same(x[:, None, 1:, None, ::2], [r[None, 1:, None, ::2] for r in rows])
    same(x[..., None], [r[..., None] for r in rows])
    same(x[:, 0, None], [r[0, None] for r in rows])
    same(x[1:, :, [0, 2], None], [r[:, [0, 2], None] for r in rows[1:]])
    assert torch.equal(x[1, None, :, None], rows[1][None, :, None])


@pytest.mark.parametrize("kind", ["nested", "masked"])
def test_a_ragged_mask(kind: str):
    rows, g = rows_of(3), torch.Generator().manual_seed(3)
    x = batch(rows, kind)
    some = [torch.rand(len(r), generator=g) > 0.5 for r in rows]
    same(x[batch([m.float() for m in some], kind) > 0], [r[m] for r, m in zip(rows, some, strict=True)])
    same(x[x > 0], [r[r > 0] for r in rows])
    if kind == "nested":
        y = x.transpose(1, 2)
        same(y[y > 0], [r.t()[r.t() > 0] for r in rows])
    with pytest.raises(DtypeError, match="a bool mask"):
        x[x]
    with pytest.raises(ShapeError, match="a mask with the first dims"):
        x[(x > 0)[..., None]]
    with pytest.raises((StructureError, ShapeError)):
        x[batch(rows_of(3, lengths=(3, 4, 2, 2)), kind) > 0]


def test_several_ragged_dims_of_a_rectangle():
    g = torch.Generator().manual_seed(0)
    rows = [torch.randn(2, h, w, generator=g) for h, w in ((3, 2), (1, 4), (2, 2))]
    x = tdc.pack(rows, ragged_dim=(2, 3)).to_padded(float("nan"))
    same(x[:, :, 1:, :2], [r[:, 1:, :2] for r in rows])
    same(x[:, :, ::-1], [r.flip(1) for r in rows])
    same(x[:, :, 0], [r[:, 0] for r in rows])
    assert torch.equal(x[:, 1, 0, -1], torch.stack([r[1, 0, -1] for r in rows]))
    same(x[:, :, :, [0, 1]], [r[:, :, [0, 1]] for r in rows])
    mask = x[:, 0] > 0
    same(x[:, 0][mask], [r[0][r[0] > 0] for r in rows])
    nested = tdc.pack([r[0] for r in rows], ragged_dim=(1, 2))
    same(nested[nested > 0], [r[0][r[0] > 0] for r in rows])


def test_positions_get_gradients():
    for kind in ("nested", "masked"):
        rows = [r.requires_grad_() for r in rows_of(3)]
        x = batch(rows, kind)
        (x[:, 0].sum() + x[:, -2::, 1].sum() + x[[1], [2]].sum() + x[x.gt(0)].sum()).backward()
        for i, r in enumerate(rows):
            want = (r > 0).float()
            want[0] += 1
            want[-2:, 1] += 1
            want[2:3] += i == 1
            assert torch.equal(r.grad, want)  # type: ignore[arg-type]  # there is one


INDICES = {
    "row": lambda x: x[1] * 2, "rows": lambda x: x[1:3] * 2, "others": lambda x: x[::2] * 2,
    "vector": lambda x: x[[1, 0]], "first": lambda x: x[:, 0], "some": lambda x: x[:, [0, -1]],
    "span": lambda x: x[:, 1:], "steps": lambda x: x[:, ::-2], "reversed": lambda x: x[:, ::-1],
    "features": lambda x: x[..., ::2], "new": lambda x: x[:, None, :, [0, 2]], "mask": lambda x: x[x > 0],
    "lengths": lambda x: tdc.truncate(x, x.sum((1, 2)).clamp(1, 2).long()),
    "rows of a mask": lambda x: x[x.sum((1, 2)) > 0],
}  # fmt: skip


class Module(torch.nn.Module):
    def __init__(self, index: Any) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Any) -> Any:
        return self.index(x)


def parts(x: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(x) if t.numel()]


LEAN = [pytest.param(n, marks=[] if n in ("rows", "span") else [pytest.mark.slow]) for n in INDICES]


@pytest.mark.cases(1, 2)
@pytest.mark.parametrize("name", LEAN)
def test_one_graph_for_all_lengths(name: str):
    index = INDICES[name]
    torch._dynamo.reset()
    counter = Counter()
    compiled = torch.compile(index, fullgraph=True, backend=counter)
    batches = [tdc.pack(rows_of(3, lengths=n)) for n in ((3, 2, 5, 1), (2, 6, 1, 3, 4), (7, 2, 3))]
    for x in batches:
        torch.testing.assert_close(parts(compiled(x)), parts(index(x)))
        values = x.values.clone().requires_grad_()
        out = compiled(x.with_values(values))
        (out if isinstance(out, Tensor) else out.data if isinstance(out, MaskedBatch) else out.values).sum().backward()
        assert values.grad is not None
    assert counter.graphs == 2, "one without gradients, one with them"


@pytest.mark.cases(slow=4)
@pytest.mark.parametrize("name", LEAN)
def test_export(name: str):
    index = INDICES[name]
    batches = [tdc.pack(rows_of(3, lengths=n)) for n in ((3, 2, 5, 1), (2, 6, 1, 3, 4), (7, 2, 3))]
    auto = torch.export.Dim.AUTO
    program = torch.export.export(Module(index), (batches[0],), dynamic_shapes=([{0: auto}, {0: auto}, {0: auto}],))
    for x in batches:
        torch.testing.assert_close(parts(program.module()(x)), parts(index(x)))


@pytest.mark.parametrize("name", ["rows", "vector", "first", "span", "reversed", "new"])
def test_vmap(name: str):
    x = tdc.pack(rows_of(3))
    values = torch.stack([x.values, x.values * 2])
    index = INDICES[name]
    one = lambda v: parts(index(x.with_values(v)))[0]  # noqa: E731
    assert torch.equal(torch.vmap(one)(values), torch.stack([one(v) for v in values]))


@pytest.mark.parametrize("kind", ["nested", "masked"])
def test_a_mask_of_fewer_dims_is_refused(kind: str):
    x = tdc.pack([torch.rand(10, 2), torch.rand(10, 1)], ragged_dim=2)
    mask = tdc.pack([torch.ones(2) > 0, torch.ones(1) > 0])
    if kind == "masked":
        x, mask = x.to_padded(), mask.to_padded()
    for run in (torch.masked_select, lambda x, m: torch.masked_scatter(x, m, x)):
        with pytest.raises(tdc.ShapeError, match="batches whose dims meet, counted from the last"):
            run(x, mask)


@pytest.mark.slow
def test_inductor_takes_batches_of_empty_rows():
    def run(x: Any) -> list[Any]:
        return [x[:, 1:] * 2, x[1:], x.diff(dim=1), torch.cat([x, x], 1)]

    x = tdc.pack([torch.zeros(0, 4)] * 2)
    for got, want in zip(torch.compile(run, fullgraph=True)(x), run(x), strict=True):
        assert torch.equal(got.offsets, want.offsets)
        assert torch.equal(got.values, want.values)


class TestOwnPositions:
    """`x[:, positions]` with a ragged batch of positions, those of each example its own."""

    POSITIONS = ([0, 1, -1], [], [2, 0, 0, 1], [-2])
    FORMS: tuple[tuple[Any, Any], ...] = (
        (lambda x, p: x[:, p], lambda row, p: row[p]),
        (lambda x, p: x[..., p, :], lambda row, p: row[p]),
        (lambda x, p: x[:, p, 1:], lambda row, p: row[p][:, 1:]),
        (lambda x, p: x[:, p, 0], lambda row, p: row[p][:, 0]),
    )

    @pytest.mark.cases(1, 2)
    @pytest.mark.parametrize("kind", ["nested", "masked"])
    @pytest.mark.parametrize("form", range(4))
    def test_equals_each_row(self, kind: str, form: int):
        run, ref = self.FORMS[form]
        counter = Counter()
        graph = torch.compile(run, fullgraph=True, backend=counter)
        for lengths, given in ((LENGTHS, self.POSITIONS), ((3, 3, 5), ([2], [1, 0, 2, 2, 1], [4]))):
            rows = rows_of(3, lengths=lengths)
            positions = [T(p, dtype=torch.int64) for p in given]
            index = tdc.pack(positions) if kind == "nested" else tdc.pack(positions).to_padded(99)
            want = [ref(row, p) for row, p in zip(rows, positions, strict=True)]
            for out in (run(batch(rows, kind), index), graph(batch(rows, kind), index)):
                for got, expected in zip(out.unbind(), want, strict=True):
                    assert torch.equal(got, expected)
        assert counter.graphs == 1

    def test_gradients(self):
        x: Any = tdc.pack(rows_of(3)).requires_grad_()
        index = tdc.pack([T(p, dtype=torch.int64) for p in self.POSITIONS])
        x[:, index].sum().backward()
        pairs = zip(self.POSITIONS, LENGTHS, strict=True)
        counts = [torch.bincount(T(p, dtype=torch.int64) % n, minlength=n) for p, n in pairs]
        assert torch.equal(x.grad.values, torch.cat(counts)[:, None].expand(-1, 3).float())

    @pytest.mark.parametrize(
        "call",
        [
            lambda x, p: x[1:, p], lambda x, p: x[:, :, p], lambda x, p: x[:, p > 0], lambda x, p: x[:, p, p],
            lambda x, p: x[:, p.to_padded()], lambda x, p: x[p, 0], lambda x, p: x[:, p + 5],
            lambda x, p: x[:, p.float()],
        ],
    )  # fmt: skip
    def test_refused(self, call: Any):
        index = tdc.pack([T(p, dtype=torch.int64) for p in self.POSITIONS])
        with pytest.raises(IndexingError):
            call(tdc.pack(rows_of(3)), index)


def test_row_ids():
    assert tdc.pack(rows_of(3, lengths=(2, 0, 3))).row_ids.tolist() == [0, 0, 2, 2, 2]
    images = tdc.pack([torch.ones(1, 2, 2), torch.ones(1, 1, 3)], ragged_dim=(2, 3))
    assert images.row_ids.tolist() == [0, 0, 0, 0, 1, 1, 1]
    with pytest.raises(tdc.ImmutableError):
        setattr(images, "row_ids", None)  # noqa: B010  # which a type checker would refuse, too
