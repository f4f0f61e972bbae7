"""Ragged batches meet the rest of the world: lists, numpy, tokenizers, files, loaders, and torch's own machinery."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import tdc
from tdc import (
    DtypeError,
    ImmutableError,
    KeyPathError,
    NestedTensor,
    ShapeError,
    StructureError,
    TensorDict,
    interop,
)
from tdc.testing import assert_one_graph

T = torch.tensor


def rows(*lengths: int) -> Any:
    return tdc.pack([torch.randn(n, 3) for n in lengths])


def same(a: Any, b: Any) -> None:
    """Two containers of one class and equal fields."""
    assert type(a) is type(b)
    assert a.shape == b.shape
    found, wanted = pytree.tree_leaves(a), pytree.tree_leaves(b)
    assert found
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


# -- lists and numpy


@pytest.mark.parametrize(
    ("data", "shape", "dtype"),
    [
        ([[1, 2], [3]], (2, -1), torch.int64), ([[], [3.5], [1]], (3, -1), torch.float32),
        ([[[1, 2], [3, 4]], [], [[5, 6]]], (3, -1, 2), torch.int64), ([[True], [False, True]], (2, -1), torch.bool),
        ([[]], (1, -1), torch.float32), (((1,), (2, 3)), (2, -1), torch.int64),
    ],
)  # fmt: skip
def test_from_list(data: Any, shape: tuple[int, ...], dtype: torch.dtype):
    x = tdc.from_list(data)
    assert x.shape == shape
    assert x.dtype == dtype
    assert x.tolist() == [list(row) for row in data]


def test_from_list_of_other_dims_and_dtype():
    x = tdc.from_list([[[1, 2], [3, 4]], [[5], [6]]], ragged_dim=2, dtype=torch.float64)
    assert x.shape == (2, 2, -1)
    assert x.dtype == torch.float64
    both = tdc.from_list([[[1, 2]], [[5], [6]]], ragged_dim=(1, 2))
    assert both.tolist() == [[[1, 2]], [[5], [6]]]
    assert tdc.from_list([[1], [2, 3]]).to_padded(-1).tolist() == [[1], [2, 3]]


def test_from_numpy():
    arrays = [np.arange(n * 3, dtype=np.float64).reshape(n, 3) for n in (2, 0, 1)]
    objects = np.empty(3, dtype=object)
    objects[:] = arrays
    for x in (tdc.from_numpy(arrays), tdc.from_numpy(objects), tdc.from_numpy(tuple(arrays))):
        assert x.shape == (3, -1, 3)
        assert x.dtype == torch.float64
        assert all(np.array_equal(a, b.numpy()) for a, b in zip(arrays, x.unbind(), strict=True))
    assert tdc.from_numpy(np.ones((2, 3))).tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: tdc.from_list([]), StructureError, r"tdc\.from_list: expected at least one row, got none"),
        (lambda: tdc.from_list([1, 2]), DtypeError, r"rows that are lists, got 2 that are not\nat row 0: int"),
        (lambda: tdc.from_list("ab"), DtypeError, r"a sequence of rows, got str"),
        (lambda: tdc.from_list([["a"], ["b"]]), DtypeError, r"rows of numbers, got something else\nat row 0"),
        (lambda: tdc.from_list([[[1], [2, 3]]]), ShapeError, r"one length in each row, got lists of different"),
        (lambda: tdc.from_list([[[1]], [[2, 3]]]), ShapeError, r"tdc\.pack: expected rows like the first"),
        (lambda: tdc.from_numpy([[1, 2]]), DtypeError, r"numpy arrays, got 1 rows that are not\nat row 0: list"),
        (lambda: tdc.from_numpy(3), DtypeError, r"a sequence of rows, got int"),
        (lambda: tdc.from_numpy([np.array(["a"])]), DtypeError, r"tdc\.from_numpy: expected rows of numbers"),
        (lambda: tdc.from_numpy([np.ones(1), np.ones(1, "f4")]), DtypeError, r"tdc\.pack: expected rows of torch"),
    ],
)
def test_rows_are_checked(call: Any, error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        call()


# -- padding on either side, and cutting


@pytest.mark.parametrize("side", ["left", "right"])
def test_from_padded_on_either_side(side: str):
    data = torch.randn(3, 4, 2, requires_grad=True)
    lengths = T([2, 0, 4])
    mask = torch.arange(4) < lengths[:, None]
    mask = mask.flip(1) if side == "left" else mask
    for given in ({"lengths": lengths}, {"mask": mask}):
        x = tdc.from_padded(data, side=side, **given)
        assert x.lengths.tolist() == [[2], [0], [4]]
        assert torch.equal(x.to_packed().values, data[mask])
        (grad,) = torch.autograd.grad((x.to_packed().values * 3).sum(), data)
        assert torch.equal(grad, mask[..., None].expand_as(data) * 3.0)
    assert tdc.from_padded(torch.zeros(2, 0), lengths=T([0, 0]), side=side).shape == (2, 0)


def test_from_padded_checks_the_side():
    with pytest.raises(ShapeError, match=r"tdc\.from_padded: expected side='left' or side='right', got 'top'"):
        tdc.from_padded(torch.zeros(2, 3), lengths=T([1, 2]), side="top")
    mask = T([[True, False], [True, True]])
    with pytest.raises(StructureError, match="padding in front of each row, got padding elsewhere"):
        tdc.from_padded(torch.zeros(2, 2), mask=mask, side="left")


def test_nested_like():
    x = rows(2, 0, 3)
    out = tdc.nested_like(x.to_padded(float("nan"), length=5).data.repeat(1, 1, 2), x)
    assert out.structure is x.structure
    assert torch.equal(out.values, x.values.repeat(1, 2))
    images = tdc.pack([torch.randn(2, 3, 1), torch.randn(2, 1, 4)], ragged_dim=(2, 3))
    assert torch.equal(tdc.nested_like(images.to_padded().data, images).values, images.values)
    flat = tdc.nested_like(T([[1, 9, 9], [9, 9, 9], [1, 2, 3]]), tdc.from_list([[0], [], [0, 0, 0]]))
    assert flat.tolist() == [[1], [], [1, 2, 3]]
    leaf = torch.randn(3, 4, requires_grad=True)
    tdc.nested_like(leaf, x).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]
    batches = [(torch.randn(b, b + 4), rows(*range(b))) for b in (2, 3, 4)]
    assert_one_graph(tdc.nested_like, *batches, compiles=2, backend="eager")


def test_nested_like_checks():
    with pytest.raises(ShapeError, match=r"nested_like: expected 2 rows with dims \(1,\), got Tensor float32\[3, 4\]"):
        tdc.nested_like(torch.zeros(3, 4), rows(1, 2))
    with pytest.raises(ShapeError, match="expected 2 rows"):
        tdc.nested_like(torch.zeros(2), rows(1, 2))
    with pytest.raises(StructureError, match="a rectangle as long as the longest row, got a shorter one"):
        tdc.nested_like(torch.zeros(2, 1), rows(1, 2))


# -- tokenizers


@pytest.mark.parametrize("side", ["left", "right"])
def test_tokens_there_and_back(side: str):
    ids, labels = tdc.from_list([[5, 6], [7, 8, 9], [4]]), tdc.from_list([[1, 1], [1, 1, 1], [1]])
    td = TensorDict({"input_ids": ids, "labels": labels, "w": torch.ones(3)}, [3])
    out = interop.to_hf(td, side=side, pad={"labels": -100})
    assert list(out) == ["input_ids", "labels", "w", "attention_mask", "position_ids"]
    if side == "left":
        assert out["input_ids"].tolist() == [[0, 5, 6], [7, 8, 9], [0, 0, 4]]
        assert out["labels"][2].tolist() == [-100, -100, 1]
        assert out["attention_mask"].tolist() == [[0, 1, 1], [1, 1, 1], [0, 0, 1]]
        assert out["position_ids"].tolist() == [[0, 0, 1], [0, 1, 2], [0, 0, 0]]
    else:
        assert out["input_ids"].tolist() == [[5, 6, 0], [7, 8, 9], [4, 0, 0]]
        assert out["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0]]
        assert out["position_ids"][:, 0].tolist() == [0, 0, 0]
    back = interop.from_hf(out, keys=["labels"])
    assert back["input_ids"].tolist() == ids.tolist()
    assert back["labels"].tolist() == labels.tolist()
    assert back["labels"].structure is back["input_ids"].structure
    assert torch.equal(back["position_ids"].values, tdc.positions(ids).values)
    assert back["w"].shape == (3,)
    assert back["input_ids"].max_length == 3
    assert "attention_mask" not in back


def test_tokens_that_are_embedded_and_gradients():
    x = rows(2, 0, 3).requires_grad_()
    out = interop.to_hf(x, side="left", length=4)
    assert out["inputs_embeds"].shape == (3, 4, 3)
    assert out["attention_mask"].sum(1).tolist() == [2, 0, 3]
    interop.from_hf(out)["inputs_embeds"].sum().backward()
    assert x.grad is not None
    assert x.grad.values.eq(1).all()


def test_to_hf_is_one_graph():
    def fn(x: NestedTensor) -> Tensor:
        return interop.to_hf(x, side="left")["inputs_embeds"]

    assert_one_graph(fn, rows(2, 4), rows(3, 1, 6), backend="eager")


def test_leaves_of_a_traced_dictionary_are_mapped_and_listed():
    def fn(x: NestedTensor) -> Any:
        td = TensorDict({"x": x}, (len(x),)).apply(torch.relu)
        return [leaf.sum(1) for _, leaf in td.items()]

    assert_one_graph(fn, rows(2, 4), rows(3, 1, 6), backend="eager")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: interop.from_hf({"input_ids": torch.ones(1, 1)}), KeyPathError, r"the key 'attention_mask', got keys"),
        (
            lambda: interop.from_hf({"attention_mask": torch.ones(1, 1).long()}, keys=["labels"]), KeyPathError,
            r"the key 'labels'",
        ),
        (lambda: interop.from_hf({"attention_mask": torch.ones(1, 1)}), DtypeError, r"mask of bool or int, got Tensor"),
        (lambda: interop.from_hf({"attention_mask": T([1])}), ShapeError, r"an attention mask \(B, L\), got Tensor"),
        (
            lambda: interop.from_hf({"attention_mask": T([[1, 1]]), "input_ids": T([[1]])}), ShapeError,
            r"tokens of \[1, 2\], got 1 others\nat input_ids",
        ),
        (
            lambda: interop.to_hf(TensorDict({"a": torch.ones(2)}, [2])), StructureError,
            r"a NestedTensor of tokens, got",
        ),
        (
            lambda: interop.to_hf(rows(1, 2), side="both"), ShapeError,
            r"tdc\.interop\.to_hf: expected side='left' or side='right'",
        ),
        (
            lambda: interop.to_hf(rows(1, 2).transpose(1, 2)), ShapeError,
            r"rows \(B, -1, \.\.\.\), got ragged dims \(2,\)",
        ),
        (
            lambda: interop.to_hf(TensorDict({"a": rows(1, 2), "b": rows(2, 1)}, [2])), StructureError,
            r"tdc\.interop\.to_hf: expected operands of one ragged structure",
        ),
    ],
)  # fmt: skip
def test_tokens_are_checked(call: Any, error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        call()


# -- attributes of tensors


def test_what_kernels_and_tensors_have():
    x = rows(2, 0, 3)
    assert x.cu_seqlens.dtype == torch.int32
    assert x.cu_seqlens.tolist() == [0, 2, 2, 5]
    assert x.max_seqlen == x.max_length == 3
    for batch, data in ((x, x.values), (x.to_padded(), x.to_padded().data)):
        assert batch.is_contiguous() is True
        assert batch.element_size() == batch.itemsize == 4
        assert batch.nbytes == data.nbytes
        assert batch.nelement() == data.numel()
        assert batch.get_device() == -1
        assert batch.is_cpu
        assert batch.is_leaf
        assert batch.grad_fn is None
        assert not batch.is_pinned()
        for name in ("nbytes", "is_leaf"):
            with pytest.raises(ImmutableError, match="no change in place"):
                setattr(batch, name, 1)
    assert torch.compile(lambda x: x.nbytes, backend="eager", fullgraph=True)(x) == x.nbytes
    y = (x.requires_grad_() * 2).tanh()
    y.retain_grad()
    y.sum().backward()
    assert y.grad_fn is not None
    assert y.grad.values.eq(1).all()
    assert not y.transpose(1, 2).is_contiguous()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinning needs CUDA")
def test_pinned():
    for batch in (rows(2, 3), rows(2, 3).to_padded()):
        assert batch.pin_memory().is_pinned()
        same(batch.pin_memory(), batch)


# -- files, processes, loaders


BATCHES = {
    "nested": lambda: rows(2, 0, 3),
    "two": lambda: tdc.pack([torch.randn(2, 3), torch.randn(1, 4)], ragged_dim=(1, 2)),
    "masked": lambda: rows(2, 0, 3).to_padded(),
    "tensordict": lambda: TensorDict({"x": rows(2, 1), "n": {"m": rows(1, 2).to_padded(), "d": torch.ones(2)}}, [2]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_copies_and_files(name: str):
    x = BATCHES[name]()
    same(pickle.loads(pickle.dumps(x)), x)
    other = copy.deepcopy(x)
    same(other, x)
    mine, theirs = (pytree.tree_leaves(b)[0].data_ptr() for b in (x, other))
    assert mine != theirs
    file = io.BytesIO()
    torch.save(x, file)
    for weights_only in (True, False):
        file.seek(0)
        same(torch.load(file, weights_only=weights_only), x)


def test_a_shared_structure_stays_shared_in_files():
    x = rows(2, 0, 3)
    td = pickle.loads(pickle.dumps(TensorDict({"x": x, "y": x * 2}, [3])))
    assert td["x"].structure is td["y"].structure


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of 1, 2, 3, … elements."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Tensor:
        return torch.full((i + 1, 2), float(i))


def labelled(samples: list[Tensor]) -> TensorDict:
    return TensorDict({"x": tdc.pack(samples), "n": T([len(s) for s in samples])}, [len(samples)])


@pytest.mark.parametrize("collate", [tdc.pack, labelled])
def test_loader_with_workers(collate: Any):
    loader = DataLoader(Rows(), batch_size=3, collate_fn=collate, num_workers=2, pin_memory=torch.cuda.is_available())
    batches = [b if isinstance(b, NestedTensor) else b["x"] for b in loader]
    assert [b.lengths.tolist() for b in batches] == [[1, 2, 3], [4, 5, 6]]
    assert all(isinstance(b, NestedTensor) and b.max_length == max(b.lengths) for b in batches)
    assert batches[1].amax((1, 2)).tolist() == [3, 4, 5]


# -- torch's machinery


def test_checkpoint():
    x, linear = rows(2, 0, 3), torch.nn.Linear(3, 3)
    plain, saved = x.clone().requires_grad_(), x.clone().requires_grad_()
    linear(plain).tanh().sum().backward()
    checkpoint(lambda z: linear(z).tanh(), saved, use_reentrant=False).sum().backward()
    assert plain.grad is not None
    assert saved.grad is not None
    same(saved.grad, plain.grad)


def test_derivatives_of_functions_of_batches():
    x, t = rows(2, 0, 3), rows(2, 0, 3)
    t = x.with_values(t.values)
    for batch, tangent in ((x, t), (x.to_padded(), t.to_padded())):
        values = batch.values if isinstance(batch, NestedTensor) else batch.data
        inner = tangent.values if isinstance(tangent, NestedTensor) else tangent.data
        grads = tdc.grad(lambda z: z.sin().sum())(batch)
        assert type(grads) is type(batch)
        y, pullback = tdc.vjp(lambda z: z.sin(), batch)
        same(y, batch.sin())
        (g,) = pullback(tangent)
        got = g.values if isinstance(g, NestedTensor) else g.data
        assert torch.allclose(got, inner * values.cos())
        y, out = tdc.jvp(lambda z: z.sin(), (batch,), (tangent,))
        got = out.values if isinstance(out, NestedTensor) else out.data
        assert torch.allclose(got, inner * values.cos())
    by_values = torch.func.grad(lambda v: x.with_values(v).sin().sum())(x.values)
    assert torch.allclose(by_values, x.values.cos())


def test_derivatives_with_aux_and_several_arguments():
    x, w = rows(2, 0, 3), torch.randn(3)
    y, pullback, aux = tdc.vjp(lambda x, w: ((x * w).sum(1), x.lengths), x, w, has_aux=True)
    gx, gw = pullback(torch.ones_like(y))
    assert aux.tolist() == [2, 0, 3]
    assert torch.allclose(gx.values, w.expand(5, 3))
    assert torch.allclose(gw, x.values.sum(0))
    y, out, aux = tdc.jvp(lambda x, w: ((x * w).sum(1), x.lengths), (x, w), (torch.zeros_like(x), w), has_aux=True)
    assert aux.tolist() == [2, 0, 3]
    assert torch.allclose(out, y)


@pytest.mark.slow
def test_derivatives_are_one_graph():
    def forward(x: NestedTensor) -> Tensor:
        return tdc.jvp(lambda z: z.sin(), (x,), (x,))[1].values

    def backward(x: NestedTensor) -> Tensor:
        y, pullback = tdc.vjp(lambda z: z.sin(), x)
        return pullback(y)[0].values

    for fn in (forward, backward):
        assert_one_graph(fn, rows(2, 4), rows(3, 1, 6), backend="eager")


def test_derivatives_check_their_arguments():
    with pytest.raises(DtypeError, match=r"tdc\.vjp: expected an argument with floating-point tensors"):
        tdc.vjp(lambda z: z, tdc.from_list([[1], [2]]))
    with pytest.raises(DtypeError, match=r"tdc\.jvp: expected an argument with floating-point tensors"):
        tdc.jvp(lambda z: z, (rows(1, 2),), (3,))


def test_packed_rows_of_transformers():
    offsets, flat = torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.arange(5)[None]
    batch = {"input_ids": flat, "labels": flat + 1, "position_ids": flat, "cu_seq_lens_q": offsets, "max_length_q": 3}
    td = tdc.interop.from_hf(batch)
    assert sorted(td.keys()) == ["input_ids", "labels", "position_ids"]
    assert td["input_ids"].tolist() == [[0, 1], [], [2, 3, 4]]
    assert td["labels"].structure is td["input_ids"].structure
    assert td["input_ids"].values.data_ptr() == flat.data_ptr()
    with pytest.raises(tdc.ShapeError, match=r"packed tokens \(1, N\), got 1 others\nat labels: Tensor int64\[2, 5\]"):
        tdc.interop.from_hf({**batch, "labels": flat.expand(2, 5)})
