"""Indexing a TensorDict on its batch dims and writing at an index: each leaf is what doing it by hand gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tdc
from tdc import DtypeError, IndexingError, KeyPathError, NestedTensor, ShapeError, TensorDict

T = torch.tensor
S = slice
ROWS = T([True, False, True])
GRID = T([[True, False, False, True], [False] * 4, [False, True, True, True]])


def tree() -> TensorDict:
    """Batch (3, 4), leaves without, with one and with two feature dims."""
    return TensorDict(
        {
            "a": torch.arange(24.0).view(3, 4, 2),
            "b": {"c": torch.arange(12).view(3, 4), "d": {"e": torch.arange(72.0).view(3, 4, 2, 3)}},
        },
        [3, 4],
    )


def on_batch(index: Any, features: int) -> Any:
    """The index of a leaf that means `index` on the first two dims: an Ellipsis must not reach features."""
    parts = index if isinstance(index, tuple) else (index,)
    return (*parts, *[S(None)] * features) if any(p is Ellipsis for p in parts) else index


INDICES = {
    "int": 0, "negative": -1, "numpy int": np.int64(1), "int tensor": T(1), "slice": S(1, None),
    "slice with step": S(None, None, 2), "empty slice": S(2, 1), "beyond slice": S(1, 99), "none": None,
    "ellipsis": ..., "list": [0, 2, 0], "empty list": [], "list of bool": [True, False, True], "range": range(2),
    "vector": T([2, 0]), "matrix": T([[0, 1], [2, 2]]), "negative vector": T([-1, 0]),
    "int32 vector": T([2, 0], dtype=torch.int32), "empty vector": T([], dtype=torch.int64), "array": np.array([2, 0]),
    "mask": ROWS, "mask of nothing": torch.zeros(3, dtype=torch.bool), "numpy mask": np.array([True, False, True]),
    "mask of two dims": GRID, "true": True, "false": False, "()": (), "two ints": (0, 1),
    "int, slice": (0, S(None, None, 2)), "slice, int": (S(None), -1), "two slices": (S(1, None), S(None, 2)),
    "ellipsis, int": (..., 0), "int, ellipsis": (1, ...), "ellipsis between": (0, ..., 1),
    "none, ellipsis, none": (None, ..., None), "none, int": (None, 0), "int, none": (0, None),
    "list, list": ([0, 1], [1, 2]), "list, slice": ([0, 1], S(None)), "slice, vector": (S(None), T([3, 0])),
    "int, vector": (1, T([3, 0])), "vectors apart": (T([0, 1]), None, T([1, 2])),
    "vectors that broadcast": (T([[0], [1]]), T([1, 2])), "mask, int": (ROWS, 0), "mask, vector": (ROWS, T([3, 0])),
    "slice, mask": (S(None), T([True, False, True, True])), "ellipsis, mask": (..., GRID), "none, mask": (None, GRID),
    "true, int": (True, 0), "list of bool, int": ([True, False, True], 0), "array, int": (np.array([0, 1]), 0),
}  # fmt: skip


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES.keys())
def test_index(index: Any):
    td = tree()
    out = td[index]
    assert out.keys(True) == td.keys(True)
    for key, features in (("a", 1), (("b", "c"), 0), (("b", "d", "e"), 2)):
        want = td[key][on_batch(index, features)]
        assert torch.equal(out[key], want), key
        assert out.batch_size == want.shape[: want.ndim - features]
        assert out["b"].batch_size == out.batch_size


@pytest.mark.parametrize("index", [0, S(1, None), None, ..., (), (0, 1), (None, 0)])
def test_basic_indices_are_views(index: Any):
    td = tree()
    assert td[index]["b", "c"].untyped_storage().data_ptr() == td["b", "c"].untyped_storage().data_ptr()


@pytest.mark.parametrize("index", [3, -4, T([3]), [0, 9], (0, 4), (0, 0, 0), (..., 0, 0, 0), 1.5, T([0.5]), (1, "a")])
def test_what_reaches_nothing(index: Any):
    with pytest.raises(IndexingError, match=r"tdc\.index: expected"):
        tree()[index]


@pytest.mark.parametrize("mask", [torch.ones(4, dtype=torch.bool), torch.ones(3, 3, dtype=torch.bool)])
def test_a_mask_covers_whole_dims(mask: Tensor):
    with pytest.raises(IndexingError, match="a mask of shape"):
        tree()[mask]


def test_no_batch_dim_no_index():
    td = TensorDict({"a": torch.zeros(3)})
    with pytest.raises(IndexingError, match=r"td\['key'\]\[i\]"):
        td[0]
    assert td[...].batch_size == ()
    assert td[()]["a"].shape == (3,)
    assert td[None].batch_size == (1,)
    assert td[None]["a"].shape == (1, 3)


NO_DIM = [(None,), (...,), (None, ...), (..., None), (None, None), True, False, T(True)]


@pytest.mark.parametrize("index", NO_DIM, ids=str)
def test_no_batch_dim_takes_what_a_number_takes(index: Any):
    a, size = torch.arange(3.0), torch.tensor(0.0)[index].shape
    td = TensorDict({"a": a, "in": {"b": torch.tensor(2.0)}})
    assert td[index].batch_size == td["in"][index].batch_size == TensorDict()[index].batch_size == size
    assert torch.equal(td[index]["a"], a.expand(*size, 3))
    assert torch.equal(td.at[index].set(7)["a"], a if index is False else torch.full((3,), 7.0))
    if isinstance(index, tuple):
        ragged = TensorDict({"r": tdc.pack([torch.ones(2), torch.ones(1)])})
        assert ragged[index]["r"].shape == (*size, 2, -1)
        assert torch.compile(lambda td: td[index], backend="eager", fullgraph=True)(td).batch_size == size


# -- ragged leaves


def ragged() -> tuple[TensorDict, list[Tensor]]:
    rows = [torch.randn(n, 3) for n in (2, 0, 3)]
    x = tdc.pack(rows)
    return TensorDict({"x": x, "m": x.to_padded(), "y": {"z": torch.arange(3)}}, [3]), rows


@pytest.mark.parametrize("index", [S(1, None), S(2, 1), ROWS, [2, 0], T([-1, 0, 0]), np.array([1]), ..., (), (S(1),)])
def test_ragged_leaves_keep_their_kind(index: Any):
    td, rows = ragged()
    out = td[index]
    ids = torch.arange(3)[index].tolist()
    assert out.batch_size == (len(ids),)
    assert isinstance(out["x"], NestedTensor)
    for leaf in (out["x"], out["m"]):
        assert len(leaf) == len(ids)
        for got, i in zip(leaf.unbind(), ids, strict=True):
            assert torch.equal(got, rows[i])
    assert out["y", "z"].tolist() == ids


@pytest.mark.parametrize("index", [0, 1, -1, (2,), T(0)])
def test_one_example_is_dense(index: Any):
    td, rows = ragged()
    i = int(index[0] if isinstance(index, tuple) else index)
    assert torch.equal(td[index]["x"], rows[i])
    assert torch.equal(td[index]["m"], rows[i])
    assert td[index].batch_size == ()


@pytest.mark.parametrize("index", [3, -4, [7], T([0, 3]), T([[0]]), True, 0.5, (0, 0)])
def test_ragged_leaves_refuse(index: Any):
    with pytest.raises(IndexingError):
        ragged()[0][index]


def test_a_new_dim_in_front_of_ragged_leaves():
    td, rows = ragged()
    out = td[None]
    assert out.batch_size == (1, 3)
    assert out["x"].shape == (1, 3, -1, 3)
    assert torch.equal(out[0, 2]["m"], rows[2])


def test_ragged_leaves_join_and_combine():
    td, rows = ragged()
    twice = torch.cat([td, td[:1]])
    assert twice.batch_size == (4,)
    assert [r.shape[0] for r in twice["x"]] == [2, 0, 3, 2]
    assert [r.shape[0] for r in twice["m"]] == [2, 0, 3, 2]
    for i, one in enumerate(td.unbind()):
        assert torch.equal(one["x"], rows[i])
    both: Any = torch.stack([td, td])
    assert both.batch_size == (2, 3)
    for part in both.unbind():
        for key in ("x", "m"):
            assert [r.tolist() for r in part[key].unbind()] == [r.tolist() for r in td[key].unbind()]
    out = td.select("x") * T([1.0, 2.0, 3.0])
    for i, row in enumerate(out["x"]):
        assert torch.equal(row, rows[i] * (i + 1))


def test_a_ragged_leaf_has_one_batch_dim():
    td, _ = ragged()
    with pytest.raises(ShapeError, match=r"at x: NestedTensor float32\[3, -1, 3\]"):
        TensorDict({"x": td["x"]}, [3, 2])
    assert TensorDict({"x": td["x"]}).batch_size == ()


# -- at


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES.keys())
def test_at_set_writes_what_the_index_reads(index: Any):
    td = tree()
    out = td.at[index].set(-1)
    for key, features in (("a", 1), (("b", "c"), 0), (("b", "d", "e"), 2)):
        want = td[key].clone()
        want[on_batch(index, features)] = -1
        assert torch.equal(out[key], want), key
        assert out[key].dtype == td[key].dtype
    assert torch.equal(td["a"], tree()["a"])
    assert torch.equal(td.at[index].get()["a"], td[index]["a"])


AT = {
    "set": lambda x, v: v.expand_as(x), "add": lambda x, v: x + v, "mul": lambda x, v: x * v, "min": torch.minimum,
    "max": torch.maximum,
}  # fmt: skip


@pytest.mark.parametrize("method", AT)
@pytest.mark.parametrize("kind", ["number", "tensor", "tensordict", "mapping"])
def test_at_takes(method: str, kind: str):
    td, rows = tree().to(torch.float64), T([2, 0])
    values: dict[str, Any] = {
        "number": 3.0,
        "tensor": T([5.0, -2.0], dtype=torch.float64)[:, None].expand(2, 4),
        "tensordict": tree()[:2].to(torch.float64) * 0.5,
        "mapping": {"a": T([5.0, -2.0]), "b": {"c": torch.randn(2, 4)}, ("b", "d", "e"): T(2.0)},
    }
    value = values[kind]
    out = getattr(td.at[rows], method)(value)
    mapping = TensorDict(value) if kind == "mapping" else value
    for key in td.keys(True, True):
        leaf = td[key]
        v = mapping[key] if kind in ("tensordict", "mapping") else torch.as_tensor(value, dtype=leaf.dtype)
        if kind == "tensor":
            v = v.reshape(2, 4, *[1] * (leaf.ndim - 2))
        want = leaf.clone()
        want[rows] = AT[method](leaf[rows], v.to(leaf.dtype))
        assert torch.allclose(out[key], want), key


def test_at_leaves_other_keys_alone():
    td = tree()
    out = td.at[0].set({"a": 1.0})
    assert out["b", "c"] is td["b", "c"]
    assert out["a"][0].eq(1).all()
    assert torch.equal(out["a"][1:], td["a"][1:])


def test_at_duplicates_accumulate():
    td = TensorDict({"x": torch.ones(3)}, [3])
    assert td.at[[0, 0, 2]].add(T([1.0, 2.0, 5.0]))["x"].tolist() == [4, 1, 6]
    assert td.at[[0, 0, 2]].mul(T([2.0, 3.0, 5.0]))["x"].tolist() == [6, 1, 5]
    assert td.at[[0, 0]].max(T([2.0, 9.0]))["x"].tolist() == [9, 1, 1]
    assert td.at[[0, 0]].min(T([-2.0, 9.0]))["x"].tolist() == [-2, 1, 1]


def test_at_apply_and_no_batch_dims():
    td = tree()
    out = td.at[:, 1].apply(lambda x: x + 100)
    assert torch.equal(out["b", "c"][:, 1], td["b", "c"][:, 1] + 100)
    assert torch.equal(out["b", "c"][:, 2:], td["b", "c"][:, 2:])
    assert TensorDict({"x": T([1, 2])}).at[...].set(7)["x"].tolist() == [7, 7]


def test_at_is_differentiable():
    x, v = torch.randn(3, 2, requires_grad=True), torch.randn(2, requires_grad=True)
    out = TensorDict({"x": x}, [3]).at[T([0, 2])].set({"x": v})["x"]
    out.pow(2).sum().backward()
    assert torch.equal(x.grad[1], 2 * x[1])
    assert x.grad[[0, 2]].eq(0).all()
    assert torch.allclose(v.grad, 4 * v)


@pytest.mark.parametrize(
    ("write", "error", "text"),
    [
        (lambda td: td.at[0].add(TensorDict({"q": 1})), KeyPathError, "nearest keys"),
        (lambda td: td.at[0].set({"b": 1}), KeyPathError, r"nearest keys: .*'b\.c'"),
        (lambda td: td.at[0].set(torch.ones(5)), ShapeError, r"broadcasts to \[4, 2\]"),
        (lambda td: td.at[0].set(td), ShapeError, r"broadcasts to \[4, 2\]"),
        (lambda td: td.at[0].set(None), DtypeError, "expected tensors or numbers, got NoneType"),
        (lambda td: td.at[0].set("x"), DtypeError, "expected tensors or numbers, got str"),
        (lambda td: td.at[7].set(1), IndexingError, r"batch_size \[3, 4\], got td\[7\]"),
        (lambda td: td.at[0, 0, 0].set(1), IndexingError, "got 3 indices"),
        (lambda td: td.set("x", tdc.pack([torch.ones(4)] * 3)), ShapeError, r"x: NestedTensor"),
    ],
)
def test_at_refuses(write: Callable[[TensorDict], Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        write(tree())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bool, torch.bfloat16, torch.uint16, torch.complex64, torch.float8_e5m2]
)
def test_vectors_of_positions(dtype: torch.dtype):
    """Rows come by `index_select` where that does the same: positions from the end and wrong ones do not."""
    x = torch.randint(0, 2, (5, 3)).to(dtype)
    td = TensorDict({"x": x, "column": x[:, 0], "turned": x.t().contiguous().t(), "none": x[:, :0]}, [5])
    for idx in (
        torch.tensor([4, 0, 4]),
        torch.tensor([-1, 0]),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([1], dtype=torch.int32),
    ):
        got = td[idx]
        assert got.batch_size == idx.shape
        assert all(
            [torch.equal(got[k].view(torch.uint8), td[k][idx].view(torch.uint8)) for k in ("x", "turned", "none")]
        )
    for wrong in (5, -6):
        with pytest.raises(tdc.IndexingError):
            td[torch.tensor([0, wrong])]
    with pytest.raises(tdc.IndexingError):
        td[:0][torch.tensor([0])]


def test_gradients_of_vectors_of_positions():
    x = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    idx = torch.tensor([1, 1, 3])
    assert torch.autograd.gradcheck(lambda x: TensorDict({"x": x}, [4])[idx]["x"].square(), (x,))
    both = torch.vmap(lambda i: TensorDict({"x": x.detach()}, [4])[i]["x"])(torch.tensor([[0, 1], [-1, 2]]))
    assert torch.equal(both, x.detach()[torch.tensor([[0, 1], [3, 2]])])


def test_a_list_of_numbers_in_a_tuple_is_a_vector():
    """Without the tuple torch reads a list of tensors as a tuple of them."""
    td = TensorDict({"x": torch.arange(6.0).view(3, 2), "rows": tdc.pack([torch.ones(n) for n in (2, 1, 3)])}, [3])
    for numbers in ([torch.tensor(1)], [torch.tensor(1), torch.tensor(0)]):
        got = td[(numbers,)]
        assert got.batch_size == (len(numbers),)
        assert torch.equal(got["x"], td["x"][(numbers,)])
        assert torch.equal(got, td[torch.stack(numbers)])
