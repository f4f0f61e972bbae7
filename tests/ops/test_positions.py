"""Reading, writing and moving at positions, against the loop over examples: operands of several kinds and forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tdc

T = torch.tensor
ROWS = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in (2, 4, 3)]
WIDE = torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(9))
KINDS = pytest.mark.parametrize("kind", ["nested", "masked"])


def batch(rows: list[Tensor], kind: str) -> Any:
    """A batch of rows; its padding holds the worst there is."""
    x = tdc.pack(rows)
    if kind == "nested":
        return x
    dtype = rows[0].dtype
    worst = True if dtype == torch.bool else float("nan") if dtype.is_floating_point else 99
    return x.to_padded(worst)


def same(got: Any, want: list[Tensor]) -> None:
    rows = list(got.unbind())
    assert [(r.shape, r.dtype) for r in rows] == [(w.shape, w.dtype) for w in want]
    assert all(torch.equal(r, w) for r, w in zip(rows, want, strict=True))


def ids(kind: str, size: int = 2, columns: int = 3) -> tuple[Any, list[Tensor]]:
    rows = [torch.arange(n * columns).view(n, columns) % size for n in (2, 4, 3)]
    return batch(rows, kind), rows


@KINDS
def test_a_dense_tensor_read_by_a_ragged_index(kind: str):
    index, each = ids(kind, 5)
    same(WIDE.gather(1, index), [w.gather(0, i) for w, i in zip(WIDE, each, strict=True)])
    index, each = ids(kind, 3, 2)
    same(WIDE.gather(2, index), [w.gather(1, i) for w, i in zip(WIDE, each, strict=True)])
    same(torch.take(WIDE[0, :, 0], index - 5), [torch.take(WIDE[0, :, 0], i - 5) for i in each])


@KINDS
def test_a_dense_tensor_written_by_a_ragged_index(kind: str):
    x, (index, each) = batch(ROWS, kind), ids(kind, 5)
    got = WIDE.scatter_add(1, index, x)
    same(got, [w.scatter_add(0, i, r) for w, i, r in zip(WIDE, each, ROWS, strict=True)])
    index, each = ids(kind, 3)
    same(WIDE.scatter(2, index, 7.0), [w.scatter(1, i, 7.0) for w, i in zip(WIDE, each, strict=True)])


@KINDS
def test_a_ragged_source_of_a_dense_index(kind: str):
    x, index = batch(ROWS, kind), torch.zeros(3, 2, 3, dtype=torch.int64)
    same(x.scatter_add(1, index, x), [r.scatter_add(0, i, r) for r, i in zip(ROWS, index, strict=True)])
    same(WIDE.scatter_add(1, index, x), [w.scatter_add(0, i, r) for w, i, r in zip(WIDE, index, ROWS, strict=True)])


@KINDS
def test_a_dense_source_of_a_ragged_index(kind: str):
    x, (index, each) = batch(ROWS, kind), ids(kind, 2)
    same(x.scatter_add(1, index, WIDE), [r.scatter_add(0, i, w) for r, i, w in zip(ROWS, each, WIDE, strict=True)])


@KINDS
def test_positions_from_the_end_and_sizes_that_broadcast(kind: str):
    x, along = batch(ROWS, kind), torch.take_along_dim
    for dim, index in ((1, [T([[-1], [-2]])] * 3), (2, [torch.full((len(r), 1), -1) for r in ROWS])):
        got = along(x, batch(index, kind), dim)
        same(got, [along(r, i, dim - 1) for r, i in zip(ROWS, index, strict=True)])
    same(
        along(x, T([[[-1]], [[0]], [[-3]]]), 1), [along(r, T([[k]]), 0) for r, k in zip(ROWS, (-1, 0, -3), strict=True)]
    )
    narrow = [r[:, :1] for r in ROWS]
    index, each = ids(kind, 2)
    got = along(batch(narrow, kind), index, 1)
    same(got, [along(r, i, 0) for r, i in zip(narrow, each, strict=True)])
    same(along(x, T([5, 0])), [along(r, T([5, 0])) for r in ROWS])
    same(
        along(x, T([[[0, 3]], [[5, 1]], [[2, 2]]])),
        [along(r, i) for r, i in zip(ROWS, T([[0, 3], [5, 1], [2, 2]]), strict=True)],
    )


@KINDS
def test_what_a_mask_chooses_where_both_broadcast(kind: str):
    x, masks = batch([r[:, :1] for r in ROWS], kind), [r > 0 for r in ROWS]
    same(x.masked_select(batch(masks, kind)), [r[:, :1].masked_select(m) for r, m in zip(ROWS, masks, strict=True)])
    row = T([True, False, True])
    same(torch.masked_select(x, row), [r[:, :1].masked_select(row) for r in ROWS])
    same(torch.masked_select(T(2.0), batch(masks, kind)), [T(2.0).masked_select(m) for m in masks])


@KINDS
def test_masked_scatter_of_a_dense_source(kind: str):
    x, masks = batch(ROWS, kind), [r > 0 for r in ROWS]
    each = torch.arange(3 * 12.0).view(3, 4, 3)
    got = x.masked_scatter(batch(masks, kind), each)
    same(got, [r.masked_scatter(m, s) for r, m, s in zip(ROWS, masks, each, strict=True)])
    same(
        x.masked_scatter(batch(masks, kind), each[0]),
        [r.masked_scatter(m, each[0]) for r, m in zip(ROWS, masks, strict=True)],
    )


@KINDS
@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put_of_a_mask_takes_values_in_order(kind: str, accumulate: bool):
    x, masks = batch(ROWS, kind), [r[:, 0] > 0 for r in ROWS]
    values = [torch.arange(float(m.sum()) * 3).view(-1, 3) for m in masks]
    mask = batch(masks, kind)
    got = x.index_put((mask,), batch(values, kind), accumulate)
    same(got, [r.index_put((m,), v, accumulate) for r, m, v in zip(ROWS, masks, values, strict=True)])
    one = torch.arange(3.0)
    same(
        x.index_put((mask,), one, accumulate),
        [r.index_put((m,), one, accumulate) for r, m in zip(ROWS, masks, strict=True)],
    )
    with pytest.raises(tdc.ShapeError, match="as many values in each example"):
        x.index_put((mask,), batch([v.new_zeros(len(v) + 1, 3) for v in values], kind))
    with pytest.raises(tdc.ShapeError, match="one value for all positions"):
        x.index_put((mask,), torch.zeros(2, 3))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_padded_results_keep_their_dtype(dtype: torch.dtype):
    rows = [torch.arange(n).to(dtype) for n in (2, 4, 3)]
    x = batch(rows, "masked")
    calls: dict[str, Callable[[Any, int], Any]] = {
        "flip": lambda x, d: x.flip(d), "roll": lambda x, d: x.roll(1, d), "pad": lambda x, d: F.pad(x, (1, 1)),
        "pad with a number": lambda x, d: F.pad(x, (1, 1), value=0.5), "unfold": lambda x, d: x.unfold(d, 2, 1),
        "select": lambda x, d: x.masked_select(x == x), "reverse": lambda x, d: x[:, ::-1] if d else x.flip(0),
        "chunk": lambda x, d: x.chunk(2, d)[0], "turn": lambda x, d: x[..., None].rot90(2, (d, d + 1))[..., 0],
    }  # fmt: skip
    for name, call in calls.items():
        got = call(x, 1)
        assert got.dtype == dtype, name
        if name not in ("chunk", "tensor_split"):
            same(got, [call(r, 0) for r in rows])


@KINDS
def test_narrow(kind: str):
    x = batch(ROWS, kind)
    assert torch.equal(x.narrow(1, -2, 2), torch.stack([r.narrow(0, -2, 2) for r in ROWS]))
    for wrong in (lambda: x.narrow(1, -1, 2), lambda: x.narrow(1, True, 1), lambda: x.narrow(2, -1, 2)):
        with pytest.raises(tdc.TdcError):
            wrong()
    images = tdc.pack([torch.ones(2, 3), torch.ones(3, 2)], ragged_dim=(1, 2))
    images = images if kind == "nested" else images.to_padded()
    same(images.narrow(1, 0, 0), [torch.ones(0, 3), torch.ones(0, 2)])


@KINDS
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.flip((1, 1)), lambda x: x.movedim((1, 1), (1, 2)), lambda x: x.rot90(1, (1,)),
        lambda x: x.rot90(1, (1, 1)), lambda x: x.squeeze(1), lambda x: x.squeeze((2, 2)),
        lambda x: x.repeat_interleave(torch.ones(3, 3, dtype=torch.int64), 2),
        lambda x: x.masked_scatter(x.to(torch.uint8), torch.ones(20)),
        lambda x: x.gather(1, torch.zeros(2, 1, 3, dtype=torch.int64)),
        lambda x: torch.take(torch.ones(3, 3), x.long()), lambda x: x.index_put((T([0]), T([0])), x),
        lambda x: torch.take_along_dim(x, T([[0]]), 1), lambda x: tdc.TensorDict({"a": torch.ones(9)}, [9])[x.long()],
        lambda x: torch.bucketize(torch.ones(3), x), lambda x: torch.isin(torch.ones(3), x), lambda x: torch.isin(x, x),
        lambda x: x[:, :, 0].tril(),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused(call: Callable[[Any], Any], kind: str):
    with pytest.raises(tdc.TdcError):
        call(batch(ROWS, kind))


@KINDS
def test_reshape_as_another_layout(kind: str):
    x = tdc.pack([torch.arange(4.0 * n).view(4, n) for n in (2, 3)], ragged_dim=2)
    other = tdc.pack([torch.zeros(2, 2, n) for n in (2, 3)], ragged_dim=3)
    x, other = (x, other) if kind == "nested" else (x.to_padded(), other.to_padded(length=5))
    same(x.reshape_as(other), [torch.arange(4.0 * n).view(2, 2, n) for n in (2, 3)])
    with pytest.raises(tdc.StructureError):
        x.reshape_as(other[[1, 0]])
    narrow = batch([r[:, :1] for r in ROWS], kind)
    same(narrow.expand_as(batch(ROWS, kind)), [r[:, :1].expand_as(r) for r in ROWS])


def test_padded_batches_of_other_widths_are_joined():
    x, y = tdc.pack(ROWS).to_padded(), tdc.pack(ROWS).to_padded(length=6)
    same(torch.cat([x, y], 2), [torch.cat([r, r], 1) for r in ROWS])
    same(torch.stack([y, x], 1), [torch.stack([r, r]) for r in ROWS])
    same(torch.cat([y, WIDE]), [*ROWS, *WIDE])


@KINDS
@pytest.mark.parametrize("step", [torch.randn, torch.rand])
def test_gradients_reach_dense_operands(kind: str, step: Any):
    x, w = batch(ROWS, kind), WIDE.double().requires_grad_()
    index, each = ids(kind, 5)
    loss = w.gather(1, index).sum() + w.scatter_add(1, index, x.double()).square().sum()
    (got,) = torch.autograd.grad(loss, w)
    rows = [
        v.gather(0, i).sum() + v.scatter_add(0, i, r.double()).square().sum()
        for v, i, r in zip(w, each, ROWS, strict=True)
    ]
    (want,) = torch.autograd.grad(torch.stack(rows).sum(), w)
    torch.testing.assert_close(got, want)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("positions", [pytest.param([1, 3], marks=pytest.mark.slow), [-3, -1]])
def test_parts_between_positions_in_a_tensor(positions: list[int]):
    """Along a ragged dim they are data like lengths; sizes of another dim are not, in a graph."""
    x: Any = tdc.pack([torch.randn(n, 5) for n in (4, 1, 2)])
    given = torch.tensor(positions)
    for y in (x, x.to_padded()):
        for run in (torch.tensor_split, torch.compile(torch.tensor_split, fullgraph=True, backend="aot_eager")):
            for got, want in zip(run(y, given, 1), y.tensor_split(positions, 1), strict=True):
                assert all(torch.equal(a, b) for a, b in zip(got.unbind(), want.unbind(), strict=True))
            if run is torch.tensor_split:
                assert [part.shape[2] for part in run(y, given, 2)] == [
                    len(p) for p in torch.ones(5).tensor_split(given)
                ]
                continue
            with pytest.raises(
                Exception, match="tensor_split: expected positions in a list, in a graph, got Tensor int64"
            ):
                run(y, given, 2)


OF_NONE: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {  # and the shape of the result
    "a position": (lambda x: x[:, 0], (0, 2)),
    "positions": (lambda x: x[:, [0, 1, 0]], (0, 3, 2)),
}


@KINDS
@pytest.mark.parametrize("name", OF_NONE)
def test_of_no_examples(name: str, kind: str):
    """A rectangle of none may be narrower than what is asked of each."""
    fn, shape = OF_NONE[name]
    x = tdc.pack([torch.zeros(0, 2, requires_grad=True)])[:0]
    x = x if kind == "nested" else x.to_padded()
    assert fn(x).shape == shape
    fn(x).sum().backward()


@KINDS
@pytest.mark.parametrize("name", ["index_add", "index_copy", "index_reduce"])
@pytest.mark.filterwarnings("ignore:index_reduce")
def test_a_number_writes_one_example(name: str, kind: str):
    more = ("amax",) if name == "index_reduce" else ()
    for rows in (ROWS, [row[:0] for row in ROWS]):
        x, source = batch(rows, kind), [rows[1].neg().add(1)]
        want = getattr(torch, name)(rows[1][None], 0, T(0), source[0][None], *more)[0]
        source_of = batch(source, kind)
        same(getattr(torch, name)(x, 0, T(1), source_of, *more), [rows[0], want, rows[2]])


@pytest.mark.parametrize("ragged_dim", [1, 2])
def test_rows_go_on_in_each_other(ragged_dim: int):
    rows = [torch.randn(n, 4, dtype=torch.float64).movedim(0, ragged_dim - 1) for n in (2, 0, 3)]
    others = [torch.randn(n, 4).movedim(0, ragged_dim - 1) for n in (1, 0, 0)]
    x, y = tdc.pack(rows, ragged_dim=ragged_dim), tdc.pack(others, ragged_dim=ragged_dim)
    same(
        tdc.validate(torch.cat([x, y, x], ragged_dim)),
        [torch.cat(r, ragged_dim - 1) for r in zip(rows, others, rows, strict=True)],
    )

    def values(v: Tensor) -> Tensor:
        return torch.cat([x.with_values(v), y, x.with_values(v * v)], ragged_dim).values

    assert torch.autograd.gradcheck(values, [x.values.clone().requires_grad_()])
    assert torch.autograd.gradgradcheck(values, [x.values.clone().requires_grad_()])
    assert torch.equal(torch.func.jvp(values, (x.values,), (torch.ones_like(x.values),))[0], values(x.values))
    none = x[:0]
    assert torch.cat([none, none], ragged_dim).shape == none.shape
