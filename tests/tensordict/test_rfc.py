"""The RFC "torch.dict.TensorDict", block by block: what it shows runs here, in the spelling that changes nothing.

The headings are those of the RFC; those on functorch and pytrees are in `test_rfc_functorch.py`. A write returns a new
object, so `td.set(...)` becomes `td = td.set(...)`, and `td[index] = value` becomes `td = td.at[index].set(value)`.
Printed texts are those of the RFC; where a line must differ, the test says why.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import tdc
from tdc import KeyPathError, ShapeError, TensorDict


def example() -> TensorDict:
    return TensorDict(
        {
            "tensor": torch.zeros(3),
            "from_np": np.zeros((3,)),
            "from_int": 1,
            "from_list": [[1, 2, 3]],
            "from_dict": {"a": 1},
        },
        batch_size=[],
    )


def batch() -> TensorDict:
    """Batch (3, 4), one nested key, features of different sizes."""
    leaves = {"a": torch.arange(12.0).view(3, 4), "b": {"c": torch.arange(24).view(3, 4, 2)}}
    return TensorDict(leaves, batch_size=[3, 4])


class TestPrinting(TestCase):
    """Basic usage and concepts; Printing data content."""

    def test_a_tensordict(self):
        self.assertExpectedInline(
            str(example()),
            """\
TensorDict(
    fields={
        tensor: Tensor(shape=torch.Size([3]), device=cpu, dtype=torch.float32, is_shared=False),
        from_np: Tensor(shape=torch.Size([3]), device=cpu, dtype=torch.float64, is_shared=False),
        from_int: Tensor(shape=torch.Size([]), device=cpu, dtype=torch.int64, is_shared=False),
        from_list: Tensor(shape=torch.Size([1, 3]), device=cpu, dtype=torch.int64, is_shared=False),
        from_dict: TensorDict(
            fields={
                a: Tensor(shape=torch.Size([]), device=cpu, dtype=torch.int64, is_shared=False)},
            batch_size=torch.Size([]),
            device=None,
            is_shared=False)},
    batch_size=torch.Size([]),
    device=None,
    is_shared=False)""",
        )

    def test_parameters(self):
        """`from_module` gives plain tensors, not Parameters: a TensorDict is no module, and grad takes it as it is."""
        net = nn.Sequential(nn.Linear(3, 4))
        self.assertExpectedInline(
            str(tdc.from_module(net)),
            """\
TensorDict(
    fields={
        0: TensorDict(
            fields={
                weight: Tensor(shape=torch.Size([4, 3]), device=cpu, dtype=torch.float32, is_shared=False),
                bias: Tensor(shape=torch.Size([4]), device=cpu, dtype=torch.float32, is_shared=False)},
            batch_size=torch.Size([]),
            device=None,
            is_shared=False)},
    batch_size=torch.Size([]),
    device=None,
    is_shared=False)""",
        )

    def test_parameters_of_autograd(self):
        td = TensorDict({"weight": nn.Parameter(torch.zeros(4, 3))})
        self.assertExpectedInline(
            str(td),
            """\
TensorDict(
    fields={
        weight: Parameter(shape=torch.Size([4, 3]), device=cpu, dtype=torch.float32, is_shared=False)},
    batch_size=torch.Size([]),
    device=None,
    is_shared=False)""",
        )

    def test_a_nested_tensor(self):
        """The RFC prints `Tensor(...)` for the leaf; ours is a class of its own and says so."""
        td = TensorDict({"nested_tensor": ragged()}, batch_size=[2])
        self.assertExpectedInline(
            str(td),
            """\
TensorDict(
    fields={
        nested_tensor: NestedTensor(shape=torch.Size([2, -1]), device=cpu, dtype=torch.float32, is_shared=False)},
    batch_size=torch.Size([2]),
    device=None,
    is_shared=False)""",
        )

    def test_a_tensorclass(self):
        self.assertExpectedInline(
            str(my_data()[:2]),
            """\
MyData(
    fields={
        images: Tensor(shape=torch.Size([2, 3, 64, 64]), device=cpu, dtype=torch.int64, is_shared=False),
        labels: Tensor(shape=torch.Size([2]), device=cpu, dtype=torch.int64, is_shared=False),
        non_tensor: Static(None),
        path_to_data: Static('/data')},
    batch_size=torch.Size([2]),
    device=None,
    is_shared=False)""",
        )


# -- Basic usage and concepts


def test_a_tensordict_is_a_dictionary_with_a_shape():
    data = example()
    assert data.shape == data.batch_size == torch.Size([])
    assert data["from_np"].dtype == torch.float64
    with pytest.raises(ShapeError, match=r"at b: Tensor float32\[4\]"):
        TensorDict({"a": torch.zeros(3), "b": torch.zeros(4)}, batch_size=[3])
    with pytest.raises(ShapeError):
        TensorDict({"inner": TensorDict({"x": torch.zeros(2)}, [2])}, batch_size=[3])
    assert TensorDict({"inner": TensorDict({"x": torch.zeros(3, 2)}, [3, 2])}, [3])["inner"].shape == (3, 2)


def test_a_device_maps_every_tensor():
    data = TensorDict({"a": torch.zeros(3), "b": {"c": 1}}, batch_size=[], device="meta")
    assert data["a"].is_meta
    assert data["b", "c"].is_meta
    assert data.set("d", torch.zeros(2))["d"].is_meta


def test_nested_keys():
    params = tdc.from_module(nn.Sequential(nn.Linear(3, 4)))
    first = params.get("0")
    for key in [("0",), (("0",),)]:
        assert params.get(key).keys() == first.keys()
        assert params.get((key, "weight")) is first["weight"]

    def get_weight(params: TensorDict, prefix: Any) -> Tensor:
        return params.get((prefix, "weight"))

    for prefix in ("0", ("0",), (("0",),)):
        assert get_weight(params, prefix).shape == (4, 3)


# -- Tensor-like features


def test_shape_operations():
    td = batch()
    for out, size in [
        (td.reshape(12), [12]), (td.view(2, 6), [2, 6]), (td.permute(1, 0), [4, 3]), (td.transpose(0, 1), [4, 3]),
        (td.flatten(), [12]), (td.unflatten(1, (2, 2)), [3, 2, 2]), (torch.permute(td, (1, 0)), [4, 3]),
        (torch.unsqueeze(td, 0), [1, 3, 4]), (torch.squeeze(td.unsqueeze(0)), [3, 4]),
    ]:  # fmt: skip
        assert out.batch_size == torch.Size(size)
        assert out["b", "c"].shape == torch.Size([*size, 2])
    assert torch.equal(td.permute(1, 0)["b", "c"], td["b", "c"].transpose(0, 1))


def test_masking():
    data = TensorDict({"key1": torch.arange(12).view(3, 4, 1)}, batch_size=[3, 4, 1])
    mask = torch.zeros(3, 4, dtype=torch.bool).bernoulli_()
    assert data[mask].shape == (int(mask.sum()), 1)
    assert torch.equal(data[mask]["key1"], data["key1"][mask])
    data = data.at[mask].set(-1)
    assert torch.equal(data["key1"].squeeze(-1) == -1, mask)
    wide = mask.unsqueeze(-1)
    assert torch.equal(torch.masked_select(data, wide)["key1"], data["key1"][wide])


@pytest.mark.parametrize("index", [
    0, -1, slice(1, None), slice(None, None, 2), None, ..., [0, 2], torch.tensor([2, 0]), torch.tensor([[0], [1]]),
    np.array([1, 2]), range(2), (0, slice(1, 3)), (slice(None), [1, 2]), (..., 0), (None, 1), (torch.tensor([0, 1]), 2),
    torch.tensor([True, False, True]), (slice(None), torch.tensor([True, False, True, True])), (), True,
], ids=repr)  # fmt: skip
def test_every_index_of_torch(index: Any):
    td, keys = batch(), torch.arange(12.0).view(3, 4)
    assert torch.equal(td[index]["a"], keys[index])
    assert td[index].batch_size == keys[index].shape


@pytest.mark.parametrize("index", [0, slice(1, None), [0, 2], torch.tensor([True, False, True]), (0, slice(1, 3)), ...])
def test_setitem_in_its_functional_spelling(index: Any):
    td, want = batch(), torch.arange(12.0).view(3, 4)
    want[index] = 0
    new = td.at[index].set(0)
    assert torch.equal(new["a"], want)
    assert td["a"].sum() == 66
    assert torch.equal(td.at[index].set(td[index] * 0)["b", "c"], new["b", "c"])


def test_torch_functions():
    td = batch()
    assert torch.zeros_like(td)["b", "c"].eq(0).all()
    assert torch.ones_like(td)["b", "c"].eq(1).all()
    assert torch.full_like(td, 3)["a"].eq(3).all()
    assert torch.empty_like(td)["b", "c"].shape == (3, 4, 2)
    copy = torch.clone(td)
    assert torch.equal(copy, td)
    assert copy["a"].data_ptr() != td["a"].data_ptr()
    cond = torch.tensor([[True, False, True, True]]).expand(3, 4)
    out = torch.where(cond, td, torch.zeros_like(td))
    assert torch.equal(out["b", "c"], torch.where(cond[..., None], td["b", "c"], 0))
    index = torch.tensor([[0, 0, 1, 1], [2, 2, 0, 0]])
    got = torch.gather(td, 0, index)
    assert got.batch_size == (2, 4)
    assert torch.equal(got["a"], torch.gather(td["a"], 0, index))
    assert torch.equal(got["b", "c"], torch.gather(td["b", "c"], 0, index[..., None].expand(2, 4, 2)))


def test_padding():
    out = F.pad(batch(), (0, 1, 2, 0), value=-1)
    assert out.batch_size == (5, 5)
    assert torch.equal(out["a"], F.pad(batch()["a"], (0, 1, 2, 0), value=-1))
    assert out["b", "c"][:2].eq(-1).all()
    assert out["b", "c"][:, 4].eq(-1).all()


def test_pad_sequence():
    rows = [TensorDict({"obs": torch.ones(n, 3), "act": torch.ones(n)}, [n]) for n in (2, 5)]
    padded = tdc.data.pad_sequence(rows, value=-1.0)
    assert padded["obs"].data.shape == (2, 5, 3)
    assert padded["obs"].data[0, 2:].eq(-1).all()
    assert padded["act"].mask.sum(1).tolist() == [2, 5]
    assert all(torch.equal(a["obs"], b["obs"]) for a, b in zip(tdc.data.unpad_sequence(padded), rows, strict=True))
    assert tdc.data.ragged_stack(rows)["obs"].lengths.tolist() == [2, 5]


def test_stack_cat_split_unbind_chunk():
    td = batch()
    assert torch.stack([td, td], 1).batch_size == (3, 2, 4)
    assert torch.cat([td, td], 1)["b", "c"].shape == (3, 8, 2)
    assert [part.batch_size[0] for part in td.split(2)] == [2, 1]
    assert [part.batch_size[0] for part in td.split([1, 2])] == [1, 2]
    assert [part.batch_size for part in torch.chunk(td, 2, 1)] == [(3, 2), (3, 2)]
    assert torch.equal(torch.stack(td.unbind(1), 1), td)


def test_to_has_the_signature_of_tensors():
    td = batch()
    assert td.to(torch.float64)["b", "c"].dtype == torch.float64
    assert td.to("meta", torch.float16)["a"].dtype == torch.float16
    assert td.to(device="meta", non_blocking=True).device == torch.device("meta")
    assert td.to(torch.zeros((), dtype=torch.int32))["a"].dtype == torch.int32
    assert td.to(TensorDict(device="meta"))["a"].is_meta
    assert td.cpu().device == torch.device("cpu")
    assert td.double()["b", "c"].dtype == torch.float64


# -- Dict-like features


def test_dict_methods():
    data = example()
    assert data.get("from_int") == 1
    assert data.get(("from_dict", "a")) == 1
    for default in (None, "anything", data):
        assert data.get("nothing", default) is default
    value, rest = data.pop("tensor")
    assert value is data["tensor"]
    assert "tensor" not in rest
    assert data.pop("nothing", 7) == (7, data)
    assert data.setdefault("tensor", torch.ones(3)) is data
    assert data.setdefault("new", 3)["new"] == 3
    assert data.delete("tensor").keys() == ("from_np", "from_int", "from_list", "from_dict")
    assert "from_int" not in data.rename_keys({"from_int": "int"})
    assert data.rename_keys({"from_int": ("deep", "int")})["deep", "int"] == 1
    with pytest.raises(KeyPathError):
        data.rename_keys({"from_int": "tensor"})


def test_flatten_and_unflatten_keys():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    data = TensorDict(net.state_dict(), []).unflatten_keys(".")
    assert data["1", "running_mean"].shape == (4,)
    flat = data.flatten_keys(".")
    assert set(flat.keys()) == set(net.state_dict())
    net.load_state_dict(flat.to_dict())


def test_keys_values_items():
    data = batch()
    assert data.keys() == ("a", "b")
    assert data.keys(include_nested=True) == ("a", "b", ("b", "c"))
    assert data.keys(leaves_only=True) == ("a",)
    assert data.keys(include_nested=True, leaves_only=True) == ("a", ("b", "c"))
    assert [v.shape for v in data.values(True, True)] == [(3, 4), (3, 4, 2)]
    assert dict(data.items(include_nested=True))["b", "c"] is data["b", "c"]


# -- Arbitrary functions


def test_apply():
    data_x, data_y = batch(), batch() + 1
    out = data_x.apply(lambda x, y: x + y, data_y)
    assert torch.equal(out["b", "c"], data_x["b", "c"] + data_y["b", "c"])
    data = data_x.to(torch.float32)
    norms = data.apply(lambda x: x.norm().cpu(), batch_size=[], device="cpu")
    assert norms.batch_size == ()
    assert norms.device == torch.device("cpu")
    assert norms["a"] == data["a"].norm()


# -- Nested-tensor compatibility


def ragged() -> tdc.NestedTensor:
    return tdc.pack([torch.zeros(3), torch.ones(4)])


def lengths(td: Any) -> list[int]:
    """Lengths of the ragged leaf, row by row."""
    return td["nested_tensor"].lengths.tolist()


def test_nested_tensors_with_and_without_a_batch_size():
    assert TensorDict({"nested_tensor": ragged()}, []).batch_size == ()
    td = TensorDict({"nested_tensor": ragged()}, batch_size=[2])
    assert torch.equal(td[0]["nested_tensor"], torch.zeros(3))
    with pytest.raises(ShapeError, match=r"NestedTensor float32\[2, -1\]"):
        TensorDict({"nested_tensor": ragged()}, batch_size=[3])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors_have_no_batch_size():
    """The RFC's own spelling makes one of torch's strided layout, which does not tell its shape."""
    nested = torch.nested.nested_tensor([torch.zeros(3), torch.ones(4)])
    td = TensorDict({"nested_tensor": nested}, [])  # no size works perfectly
    assert "nested_tensor: Tensor(shape=torch.Size([2, -1])" in repr(td)
    for call in (
        lambda: TensorDict({"nested_tensor": nested}, batch_size=[2]),
        lambda: TensorDict({"nested_tensor": torch.zeros(2)}, [2]).set("nested_tensor", nested),
        lambda: TensorDict({"nested_tensor": torch.zeros(2)}, [2]).update({"nested_tensor": nested}),
    ):
        with pytest.raises(
            tdc.DtypeError, match=r"strided tensors of torch.nested\nat nested_tensor: .*\nhint: tdc.pack"
        ):
            call()
    assert TensorDict({"nested_tensor": tdc.pack(nested.unbind())}, [2])[0]["nested_tensor"].shape == (3,)


def test_leaves_that_take_no_slices_are_named():
    jagged = torch.nested.nested_tensor([torch.zeros(3), torch.ones(4)], layout=torch.jagged)
    for leaf in (jagged, torch.eye(2).to_sparse()):
        with pytest.raises(tdc.UnsupportedError, match=r"tdc.index: expected leaves that take this index.*\nat x: "):
            TensorDict({"x": leaf, "y": torch.zeros(2)}, [2])[:1]


def test_nested_tensors_take_the_indices_that_the_rfc_says_fail():
    td = TensorDict({"nested_tensor": ragged(), "x": torch.arange(2)}, batch_size=[2])
    assert lengths(td[:1]) == [3]
    assert lengths(td[1:]) == [4]
    assert lengths(td[[1, 0]]) == [4, 3]
    assert lengths(td[torch.tensor([False, True])]) == [4]
    assert lengths(td[torch.tensor([1, 1, 0])]) == [4, 4, 3]
    assert lengths(td[...]) == [3, 4]


def test_nested_tensors_take_arithmetic_and_joining():
    td = TensorDict({"nested_tensor": ragged(), "x": torch.arange(2)}, batch_size=[2])
    assert torch.equal((td + 1)["nested_tensor"][1], torch.full((4,), 2.0))
    assert torch.equal((td * 2 + td)["nested_tensor"][1], torch.full((4,), 3.0))
    assert (td == td)["nested_tensor"].values.all()
    assert lengths(torch.cat([td, td[:1]])) == [3, 4, 3]
    assert torch.stack([td, td], 1)["nested_tensor"].shape == (2, 2, -1)
    assert [part.batch_size for part in td.split(1)] == [(1,), (1,)]
    assert [row["nested_tensor"].shape for row in td.unbind()] == [(3,), (4,)]
    assert lengths(td.index_select(0, torch.tensor([1, 1]))) == [4, 4]
    assert td.to(torch.float64)["nested_tensor"].dtype == torch.float64
    assert lengths(pytree.tree_map(lambda x: x, td)) == [3, 4]


BATCH_OPS: dict[str, tuple[Any, list[int]]] = {
    "reshape": (lambda td: td.reshape(2), [2]),
    "reshape to two dims": (lambda td: td.reshape(2, 1), [2, 1]),
    "unsqueeze": (lambda td: td.unsqueeze(0), [1, 2]),
    "None": (lambda td: td[None], [1, 2]),
    "flip": (lambda td: td.flip(0), [2]),
    "gather": (lambda td: td.gather(0, torch.tensor([1, 0, 0])), [3]),
    "stack": (lambda td: torch.stack([td, td]), [2, 2]),
    "expand": (lambda td: td.expand(3, 2), [3, 2]),
    "repeat": (lambda td: td.repeat(2), [4]),
    "roll": (lambda td: td.roll(1, 0), [2]),
    "clone": (lambda td: td.clone(), [2]),
}


@pytest.mark.parametrize(("op", "size"), BATCH_OPS.values(), ids=BATCH_OPS)
def test_nested_tensors_take_operations_on_batch_dims(op: Any, size: list[int]):
    td = TensorDict({"nested_tensor": ragged(), "x": torch.arange(2)}, batch_size=[2])
    out = op(td)
    assert out.batch_size == torch.Size(size)
    rows = out.flatten() if out.ndim > 1 else out
    want = {0: torch.zeros(3), 1: torch.ones(4)}
    for i, x in enumerate(rows["x"].tolist()):
        assert torch.equal(rows[i]["nested_tensor"], want[x])


# -- @tensorclass


@tdc.tensorclass
class MyData:
    images: torch.Tensor
    labels: torch.Tensor
    non_tensor: Any
    path_to_data: str

    def __post_init__(self) -> None:
        assert self.path_to_data

    def get_data_with_label(self, label: int) -> MyData:
        return self[self.labels == label]


def my_data() -> Any:
    images = torch.randint(255, (42, 3, 64, 64))
    labels = torch.randint(100, (42,))  # the RFC draws a label for each pixel, with which its method cannot work
    return MyData(images, labels, batch_size=[42], non_tensor=None, path_to_data="/data")


def test_tensorclass():
    data = my_data()
    assert data.batch_size == (42,)
    assert data.non_tensor is None
    some = data.get_data_with_label(int(data.labels[5]))
    assert type(some) is MyData
    assert (some.labels == data.labels[5]).all()
    assert some.path_to_data == data.path_to_data == data[0].path_to_data
    assert torch.equal(some.images, data.images[data.labels == data.labels[5]])
    with pytest.raises(AssertionError):
        MyData(data.images, data.labels, None, "", batch_size=[42])


# -- Miscellaneous: locking


def test_a_tensordict_is_always_locked():
    data = example()
    with pytest.raises(TypeError, match=r"td = td\.set\('key', value\)"):
        data["key"] = torch.zeros(3)
    new = data.set("key", torch.zeros(3))
    assert "key" in new
    assert "key" not in data


# -- Open questions: torch.compile


def test_key_and_shape_based_indexing_compile():
    def fn(data: TensorDict) -> Any:
        data = data.set("a_str", data.get("x") + 1).set(("a", "tuple"), data.get(("nested", "y")))
        return data[:3], data.get("a_str"), data.get(("a", "tuple")), data[0]

    data = TensorDict({"x": torch.randn(5), "nested": {"y": torch.randn(5, 2)}}, [5])
    got = torch.compile(fn, backend="eager", fullgraph=True)(data)
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(fn(data)), strict=True):
        assert torch.equal(a, b)
