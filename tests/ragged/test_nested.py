"""NestedTensor: packing, indexing and shape, against a list of rows treated one by one."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tdc
from tdc import DtypeError, IndexingError, NestedTensor, ShapeError, StructureError

T = torch.tensor
S = slice


def rows_of(layout: str) -> list[Tensor]:
    """Examples of one layout; the second has no element."""
    g = torch.Generator().manual_seed(1)
    shapes = {
        "flat": [(n,) for n in (2, 0, 3, 1)], "features": [(n, 4) for n in (2, 0, 3, 1)],
        "second": [(3, n, 4) for n in (2, 0, 3, 1)], "last": [(4, n) for n in (2, 0, 3, 1)],
        "long": [(n, 4) for n in (2, 4, 3, 2)], "one": [(3, 4)],
        "two": [(h, w, 4) for h, w in ((2, 3), (0, 4), (5, 1), (1, 1))],
        "two behind": [(3, h, w) for h, w in ((2, 3), (0, 4), (5, 1), (1, 1))],
    }[layout]  # fmt: skip
    return [torch.randn(shape, generator=g) for shape in shapes]


RAGGED = {"second": 2, "last": 2, "two": (1, 2), "two behind": (2, 3)}
LAYOUTS = ("flat", "features", "second", "last", "long", "one", "two", "two behind")


def packed(layout: str) -> tuple[NestedTensor, list[Tensor]]:
    rows = rows_of(layout)
    return tdc.pack(rows, ragged_dim=RAGGED.get(layout, 1)), rows


def same(x: Any, rows: Sequence[Tensor]) -> None:
    """A valid NestedTensor of exactly these rows."""
    assert isinstance(x, NestedTensor)
    tdc.validate(x)
    got = x.unbind()
    assert [r.shape for r in got] == [r.shape for r in rows]
    assert all(torch.equal(a, b) for a, b in zip(got, rows, strict=True))


# -- packing


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pack_and_unpack(layout: str):
    x, rows = packed(layout)
    same(x, rows)
    assert all(torch.equal(a, b) for a, b in zip(x.unbind(), rows, strict=True))
    dims = RAGGED.get(layout, 1)
    dims = (dims,) if isinstance(dims, int) else dims
    assert x.ragged_dims == dims
    assert x.shape == tuple([len(rows)] + [-1 if d + 1 in dims else n for d, n in enumerate(rows[0].shape)])
    assert x.offsets.dtype == torch.int64
    assert x.offsets.tolist() == [0, *np.cumsum([np.prod([r.shape[d - 1] for d in dims]) for r in rows]).tolist()]
    assert x.sizes.tolist() == [[r.shape[d - 1] for d in dims] for r in rows]
    assert x.max_length == max(r.shape[dims[0] - 1] for r in rows)
    assert x.numel() == sum(r.numel() for r in rows)


def test_rows_are_views_and_values_are_packed():
    x, rows = packed("features")
    assert torch.equal(x.values, torch.cat(rows))
    assert all(r.untyped_storage().data_ptr() == x.values.untyped_storage().data_ptr() for r in x.unbind())
    assert x.lengths.tolist() == [2, 0, 3, 1]


def test_shape_is_that_of_a_tensor():
    x, _ = packed("second")
    assert x.shape == x.size() == torch.Size([4, 3, -1, 4])
    assert [x.size(d) for d in (0, 1, 2, 3, -1)] == [4, 3, -1, 4, 4]
    assert x.ndim == x.dim() == 4
    assert x.batch_size == (4,)
    assert len(x) == 4
    assert x.dtype == torch.float32
    assert x.device == torch.device("cpu")
    assert not x.is_nested
    assert not x.is_cuda


@pytest.mark.parametrize("layout", LAYOUTS)
def test_iteration_and_tolist(layout: str):
    x, rows = packed(layout)
    assert [r.shape for r in x] == [r.shape for r in rows]
    assert x.tolist() == [r.tolist() for r in rows]


def test_offsets_of():
    assert tdc.offsets_of(T([2, 0, 3])).tolist() == [0, 2, 2, 5]
    assert tdc.offsets_of(T([], dtype=torch.int32)).tolist() == [0]
    assert tdc.offsets_of(T([1], dtype=torch.int32)).dtype == torch.int64


# -- the constructor


def build(**changes: Any) -> NestedTensor:
    given: dict[str, Any] = {"values": torch.zeros(6, 2), "offsets": T([0, 2, 6])}
    given.update(changes)
    return NestedTensor(given.pop("values"), given.pop("offsets"), **given)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"offsets": T([0, 6], dtype=torch.int32)}, DtypeError, "expected int64 offsets, got Tensor int32"),
        ({"offsets": [0, 6]}, DtypeError, "got Tensor float32.* and list"),
        ({"values": [1.0]}, DtypeError, "got list and Tensor"),
        ({"offsets": T([], dtype=torch.int64)}, ShapeError, r"offsets of shape \(B\+1,\)"),
        ({"offsets": T([[0, 6]])}, ShapeError, r"offsets of shape \(B\+1,\)"),
        ({"ragged_dim": 0}, ShapeError, r"a ragged dim in \[1, 2\], got ragged_dim=0"),
        ({"ragged_dim": 3}, ShapeError, r"a ragged dim in \[1, 2\], got ragged_dim=3"),
        ({"shapes": T([2, 3])}, ShapeError, r"shapes of \(2, R\) with R >= 2"),
        ({"shapes": T([[2, 3]])}, ShapeError, r"shapes of \(2, R\) with R >= 2"),
        ({"shapes": T([[2], [4]])}, ShapeError, r"shapes of \(2, R\) with R >= 2"),
        ({"shapes": T([[1, 2], [2, 2]], dtype=torch.int32)}, DtypeError, "int64 shapes"),
        ({"max_length": (2, 3)}, ShapeError, "max_length with 1 sizes, got 2"),
        ({"shapes": T([[1, 2], [2, 2]]), "max_length": 4}, ShapeError, "max_length with 2 sizes, got 1"),
    ],
)
def test_constructor_checks(changes: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        build(**changes)


def test_constructor_takes_what_pack_makes():
    x, rows = packed("two behind")
    same(NestedTensor(x.values, x.offsets, ragged_dim=2, shapes=x.sizes, max_length=(5, 4)), rows)
    assert build(max_length=4).max_length == 4
    assert build().max_length == 4


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"offsets": T([1, 2, 6])}, "do not begin with 0"),
        ({"offsets": T([0, 7, 6])}, "decrease after row 1"),
        ({"offsets": T([0, 2, 5])}, "do not end at N, the 6 packed elements"),
        ({"max_length": 3}, "at least as long as the longest row, got a shorter one"),
        ({"shapes": T([[1, 2], [3, 2]])}, "differs from its span"),
        (
            {"shapes": T([[1, 2], [2, 2]]), "max_length": (2, 1)},
            "at least as long as the longest row, got a shorter one",
        ),
        ({"max_length": -1}, "at least as long as the longest row, got a shorter one"),
    ],
)
def test_validate(changes: dict[str, Any], text: str):
    with pytest.raises(StructureError, match=text):
        tdc.validate(build(**changes))
    x = build()
    assert tdc.validate(x) is x


def test_pack_refuses_rows_that_do_not_fit():
    with pytest.raises(StructureError, match="at least one tensor"):
        tdc.pack([])
    with pytest.raises(ShapeError, match=r"row 1: .*\n.*row 2:"):
        tdc.pack([torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(1, 5)])
    with pytest.raises(ShapeError, match=r"row 1"):
        tdc.pack([torch.zeros(2), torch.zeros(2, 1)])
    with pytest.raises(DtypeError, match=r"rows of torch.float32, as the first.*\nat row 1: Tensor int32"):
        tdc.pack([torch.zeros(2), torch.zeros(2, dtype=torch.int32)])
    with pytest.raises(DtypeError, match="row 0: float"):
        tdc.pack([1.0])  # type: ignore[list-item]  # the mistake under test
    for dims in (0, 3, (1, 3), (2, 1)):
        with pytest.raises(ShapeError, match=r"neighbouring ragged dims in \[1, 2\]"):
            tdc.pack([torch.zeros(2, 3)], ragged_dim=dims)


# -- indexing


def by_hand(rows: list[Tensor], index: Any) -> Any:
    """The same index on a list of rows: the first entry picks rows, the others act on each."""
    parts = index if isinstance(index, tuple) else (index,)
    gap = [i for i, p in enumerate(parts) if p is Ellipsis]
    if gap:
        parts = (*parts[: gap[0]], *[S(None)] * (rows[0].ndim + 2 - len(parts)), *parts[gap[0] + 1 :])
    first, rest = (parts[0], parts[1:]) if parts else (S(None), ())
    if isinstance(first, Tensor) and first.ndim == 0:
        first = int(first)
    if isinstance(first, (int, np.integer)):
        return rows[first][rest]
    if isinstance(first, slice) and first.step == -1:
        return rows[::-1]
    first = T([], dtype=torch.int64) if isinstance(first, list) and not first else first
    return [rows[i][rest] for i in torch.arange(len(rows))[first].tolist()]


ROWS = [0, -1, 2, np.int64(1), T(2), S(1, 3), S(None), S(3, 1), S(None, None, 2), S(-2, None),
        S(None, None, -1), [0, 2], [-1, 0, 0], [], [True, False, True, False], T([True, False, True, False]),
        np.array([3, 1]), range(2), ..., (), (1,), (1, ...), (..., S(None)), T([-1, 1]),
        torch.zeros(4, dtype=torch.bool)]  # fmt: skip
STATIC = [(..., 0), (..., -1), (..., S(None, 2)), (..., S(-2, None)), (..., S(None, None, 2)), ([0, 2], ..., 1),
          (2, ..., 1), (S(1, None), ..., T(0))]  # fmt: skip
RAGGED_SLICES = [S(1, None), S(-2, None), S(0, 2), S(None, -1), S(1, 1), S(5, 1), S(9, None), S(-9, 1), S(1, 2)]


OF_ROWS = [(layout, index) for layout in LAYOUTS if layout != "one" for index in ROWS]
OF_STATIC_DIMS = [(layout, index) for layout in ("features", "second", "long", "two") for index in STATIC]


@pytest.mark.parametrize(("layout", "index"), OF_ROWS + OF_STATIC_DIMS, ids=str)
def test_index_rows_and_static_dims(layout: str, index: Any):
    x, rows = packed(layout)
    want = by_hand(rows, index)
    if isinstance(want, Tensor):
        assert torch.equal(x[index], want)
    else:
        same(x[index], want)


@pytest.mark.parametrize("part", RAGGED_SLICES, ids=str)
@pytest.mark.parametrize("layout", ["flat", "features", "second", "last", "long"])
def test_slice_the_ragged_dim(layout: str, part: slice):
    x, rows = packed(layout)
    before = [S(None)] * (x.ragged_dims[0] - 1)
    for first in (S(None), S(1, None), [2, 0], T([True, False, True, True])):
        index = (first, *before, part)
        same(x[index], by_hand(rows, index))
    if layout == "features":
        same(x[1:, 1:, ::2], by_hand(rows, (S(1, None), S(1, None), S(None, None, 2))))


@pytest.mark.parametrize("k", [0, 1, -1, -2, T(1), np.int64(0)], ids=str)
def test_one_position_of_every_row(k: Any):
    x, rows = packed("long")
    assert torch.equal(x[:, k], torch.stack([r[int(k)] for r in rows]))
    assert torch.equal(x[1:, k, 2], torch.stack([r[int(k), 2] for r in rows[1:]]))
    y = tdc.pack([r.t().contiguous() for r in rows], ragged_dim=2)
    assert torch.equal(y[:, :, k], torch.stack([r.t()[:, int(k)] for r in rows]))
    assert torch.equal(y[:, 1, k], torch.stack([r[int(k), 1] for r in rows]))


def test_rows_are_taken_before_positions():
    x, rows = packed("features")
    assert torch.equal(x[0, 1], rows[0][1])
    assert torch.equal(x[2, -1, 1:], rows[2][-1, 1:])
    assert torch.equal(x[x.lengths > 1, 1], torch.stack([rows[0][1], rows[2][1]]))
    with pytest.raises(IndexingError, match=r"drop short rows first: x = x\[x\.lengths > k\]"):
        x[:, 0]
    y, images = packed("two")
    assert torch.equal(y[0, 1, 2], images[0][1, 2])


def test_slices_of_rows_share_memory():
    x, _ = packed("features")
    assert x[1:3].values.untyped_storage().data_ptr() == x.values.untyped_storage().data_ptr()
    assert x[:1].max_length == 2


@pytest.mark.parametrize(
    "index",
    [4, -5, T([4]), [0, -5], 1.5, T([0.5]), True, "x", T([[0, 1]]), T([True, False]), (0, 0, 0, 0), (..., ...),
     (S(None), [0, 1]), (S(None), T([0, 1])), (S(None), True), (S(None), S(None), 4), (S(None), S(None), [4]),
     (S(None), S(None), -5), (S(None), [0], [0]), ([0, 1], S(None), [0]), ([0, 2], [0, 1, 1]), (S(None), 1.0),
     (S(None), 3), (1, 0), (S(None), S(None, None, 0)), (S(None), S(None), T([True, False])),
     (S(None), S(1.5)), (S(None), T([True, False]))],
    ids=str,
)  # fmt: skip
def test_what_an_index_cannot_be(index: Any):
    with pytest.raises(IndexError):
        packed("features")[0][index]


def test_rows_and_static_dims_of_several_ragged_ones():
    x, rows = packed("two behind")
    same(x[:, 1:], [r[1:] for r in rows])
    same(x[[2, 0], 0], [rows[2][0], rows[0][0]])


# -- shapes, several ragged dims


@pytest.mark.parametrize("layout", ["two", "two behind"])
def test_empty_batches_among_joined_ones(layout: str):
    x, rows = packed(layout)
    assert x.max_length == 5
    same(torch.cat([x, x[:0], x[:0], x[:2]]), [*rows, *rows[:2]])
    assert torch.cat([x[:0]] * 3).shape[0] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transpose_back_and_forth(layout: str):
    x, rows = packed(layout)
    for i in range(x.ndim):
        for j in range(x.ndim):
            if len(x.ragged_dims) > 1 and (i in x.ragged_dims) != (j in x.ragged_dims):
                continue
            y = x.transpose(i, j)
            want = list(x.shape)
            want[i], want[j] = want[j], want[i]
            assert list(y.shape) == want
            same(y.transpose(i, j), rows)
            if i and j:
                same(y, [r.transpose(i - 1, j - 1) for r in rows])


def test_a_moved_batch_dim():
    x, rows = packed("features")
    y = x.transpose(0, 1)
    assert y.shape == (-1, 4, 4)
    assert all(torch.equal(a, b) for a, b in zip(y.unbind(1), rows, strict=True))
    same(x.permute(0, 2, 1), [r.t() for r in rows])
    assert torch.equal(y[:, 0], rows[0])
    same(y[1:, 2:].transpose(0, 1), [r[1:] for r in rows[2:]])
    same(y.to_padded().to_packed().transpose(0, 1), rows)
    with pytest.raises(ShapeError, match="expected a static dim or dim 1, the batch, got ragged dim 0"):
        y.unbind(0)


def test_dims_in_front_of_the_batch():
    x, rows = packed("features")
    y = torch.stack([x, x * 2])
    assert len(y) == 2
    doubled = [r * 2 for r in rows]
    for part in (y[1], y[-1], y.unbind(0)[1], list(y)[1]):
        same(part, doubled)
    assert [part.shape for part in (y[1:], y[[1, 0, 1]])] == [(1, *x.shape), (3, *x.shape)]
    same(y[[1, 0]][0], doubled)
    same(y[1, 1:3], doubled[1:3])
    same(y[:, 1:3][1], doubled[1:3])
    same(y.split([1, 3], 1)[1][1], doubled[1:])
    same(y.index_select(1, T([2, 0]))[1], [doubled[2], doubled[0]])
    same(y[1, ..., 0], [r[:, 0] for r in doubled])
    same(y[:, :, 1:][1], [r[1:] for r in doubled])
    assert torch.equal(y[:, 2], torch.stack([rows[2], doubled[2]]))
    long = x[x.lengths > 0]
    assert torch.equal(torch.stack([long, long])[:, :, 0][1], long[:, 0])
    same(y.reshape(8, -1, 4), [*rows, *doubled])
    same(y.unsqueeze(0).reshape(1, 8, -1, 4)[0], [*rows, *doubled])
    for part, k in zip(x.unbind(2), range(4), strict=True):
        same(part, [r[:, k] for r in rows])


def test_a_literal_batch_size_in_a_compiled_function():
    x, rows = packed("features")

    def fn(x: NestedTensor) -> Any:
        return x.reshape(4, -1, 2, 2).reshape(4, -1, 4).expand(4, -1, 4)

    same(torch.compile(fn, fullgraph=True, backend="eager")(x), rows)


def test_joins_of_other_layouts():
    x, y = tdc.pack([torch.zeros(2, 4)]), tdc.pack([torch.zeros(4, 2)], ragged_dim=2)
    for join in (torch.cat, torch.stack):
        with pytest.raises(StructureError, match=r"(?s)one layout.*operand 0.*operand 1"):
            join([x, y])
        with pytest.raises(ShapeError, match=r"(?s)equal static sizes.*operand 0.*operand 1"):
            join([x, x[:, :, 1:]])


# -- edges


NO_ROWS: list[Callable[[], NestedTensor]] = [
    lambda: NestedTensor(torch.zeros(0, 4), torch.zeros(1, dtype=torch.int64)),
    lambda: packed("features")[0][:0],
    lambda: packed("features")[0][[]],
]


@pytest.mark.parametrize("make", NO_ROWS)
def test_a_batch_of_none(make: Callable[[], NestedTensor]):
    x = make()
    assert x.shape == (0, -1, 4)
    for y in (x, x.relu(), x + x, x[:], x[:, 1:], x.to_padded().to_packed(), copy.deepcopy(x)):
        same(y, [])
    assert x.to_padded().shape == (0, 0, 4)
    assert x.to_padded(length=3).shape == (0, 3, 4)
    assert x.tolist() == []
    assert x.max_length == 0
    assert x[:, 0].shape == x.sum(1).shape == (0, 4)
    with pytest.raises(IndexingError, match="the batch has 0 rows"):
        x[0]


def test_rows_of_none():
    x = tdc.pack([torch.zeros(0, 4), torch.zeros(0, 4)])
    assert x.max_length == 0
    assert x.to_padded().shape == (2, 0, 4)
    assert x.to_padded().mask.shape == (2, 0, 1)
    for y in (x, x.relu(), x[:, 1:], x.to_padded().to_packed(), x.to_padded(length=2).to_packed()):
        same(y, [torch.zeros(0, 4)] * 2)
    assert x.sum(1).tolist() == [[0.0] * 4] * 2
    assert x[1].shape == (0, 4)


# -- device, autograd, copies


def test_to():
    x, rows = packed("two")
    same(x.to(torch.float64), [r.double() for r in rows])
    assert x.to(torch.float64).structure is x.structure
    moved = x.to("meta")
    assert (moved.device.type, moved.offsets.device.type, moved.sizes.device.type) == ("meta",) * 3
    assert moved.max_length == 5


def test_autograd():
    x = packed("features")[0].requires_grad_()
    assert x.requires_grad
    assert x.grad is None
    (x[1:, 1:] ** 2).sum().backward()
    assert isinstance(x.grad, NestedTensor)
    later = [torch.cat([torch.zeros(1, 4), 2 * r[1:]]) for r in x.unbind()[2:]]
    same(x.grad, [torch.zeros(2, 4), torch.zeros(0, 4), *later])
    assert not x.detach().requires_grad


def test_copies_and_lifetime():
    x, rows = packed("two behind")
    for other in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x)):
        same(other, rows)
        assert other.max_length == x.max_length
        assert other.structure.extent is not x.structure.extent
    assert copy.copy(x) is x
    gone = weakref.ref(x)
    del x
    assert gone() is None


def test_immutable():
    x, _ = packed("features")
    for name in ("values", "structure", "shape"):
        with pytest.raises(tdc.ImmutableError, match=rf"got `x\.{name} = NoneType`\nhint: x\.with_values"):
            setattr(x, name, None)
    with pytest.raises(tdc.ImmutableError, match=r"got `x\.new = NoneType`\nhint: x\.with_values"):  # a name of tensors
        x.new = None
    with pytest.raises(AttributeError):
        x.newer = None
    with pytest.raises(tdc.ImmutableError, match=r"`x\.packed_dim = int`"):
        x.structure.packed_dim = 1
    with pytest.raises(tdc.ImmutableError, match=r"torch\.where\(mask, new, x\)"):
        x[0] = 1  # type: ignore[index]  # the mistake under test


@pytest.mark.slow
def test_two_structures_in_generated_code():
    """The text of the assertion that they are equal is part of the C++ that Inductor writes."""
    step = torch.compile(lambda x, y: (x + y).sum(1), backend=tdc.compile.backend, fullgraph=True)

    def rows(*lengths: int) -> tdc.NestedTensor:
        return tdc.pack([torch.ones(n, 2) for n in lengths])

    assert torch.equal(step(rows(2, 3), rows(2, 3)), torch.tensor([[4.0, 4.0], [6.0, 6.0]]))
    with pytest.raises(RuntimeError, match=r"tdc\.add: expected operands of one ragged structure.*; hint: build both"):
        step(rows(2, 3), rows(3, 2))
