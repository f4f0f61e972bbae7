"""Blocks of the RFC "torch.dict.TensorDict" that no other test runs, in the spelling that changes nothing.

Its other blocks are tests of their feature: `test_tensordict.py`, `test_tensordict_index.py`, `test_display.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from functorch.dim import dims
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

import tdc
from tdc import KeyPathError, Static, TensorDict


def example() -> TensorDict:
    return TensorDict(
        {
            "tensor": torch.zeros(3), "from_np": np.zeros((3,)), "from_int": 1, "from_list": [[1, 2, 3]],
            "from_dict": {"a": 1},
        },
        batch_size=[],
    )  # fmt: skip


class TestPrinting(TestCase):
    def test_a_tensorclass(self):
        self.assertExpectedInline(str(my_data()[:2]), """\
MyData(
    fields={
        images: Tensor(shape=torch.Size([2, 3, 64, 64]), device=cpu, dtype=torch.int64, is_shared=False),
        labels: Tensor(shape=torch.Size([2]), device=cpu, dtype=torch.int64, is_shared=False),
        non_tensor: Static(None),
        path_to_data: Static('/data')},
    batch_size=torch.Size([2]),
    device=None,
    is_shared=False)""")  # fmt: skip


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


def ragged() -> tdc.NestedTensor:
    return tdc.pack([torch.zeros(3), torch.ones(4)])


def lengths(td: Any) -> list[int]:
    """Lengths of the ragged leaf, row by row."""
    return td["nested_tensor"].lengths.tolist()


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
    "reshape": (lambda td: td.reshape(2), [2]), "reshape to two dims": (lambda td: td.reshape(2, 1), [2, 1]),
    "unsqueeze": (lambda td: td.unsqueeze(0), [1, 2]), "None": (lambda td: td[None], [1, 2]),
    "flip": (lambda td: td.flip(0), [2]), "gather": (lambda td: td.gather(0, torch.tensor([1, 0, 0])), [3]),
    "stack": (lambda td: torch.stack([td, td]), [2, 2]), "expand": (lambda td: td.expand(3, 2), [3, 2]),
    "repeat": (lambda td: td.repeat(2), [4]), "roll": (lambda td: td.roll(1, 0), [2]),
    "clone": (lambda td: td.clone(), [2]),
}  # fmt: skip


@pytest.mark.parametrize(("op", "size"), BATCH_OPS.values(), ids=BATCH_OPS)
def test_nested_tensors_take_operations_on_batch_dims(op: Any, size: list[int]):
    td = TensorDict({"nested_tensor": ragged(), "x": torch.arange(2)}, batch_size=[2])
    out = op(td)
    assert out.batch_size == torch.Size(size)
    rows = out.flatten() if out.ndim > 1 else out
    want = {0: torch.zeros(3), 1: torch.ones(4)}
    for i, x in enumerate(rows["x"].tolist()):
        assert torch.equal(rows[i]["nested_tensor"], want[x])


@tdc.tensorclass
class MyData:
    images: torch.Tensor
    labels: torch.Tensor
    non_tensor: Any
    path_to_data: str

    def __post_init__(self) -> None:
        assert self.path_to_data


def my_data() -> Any:
    images = torch.randint(255, (42, 3, 64, 64))
    labels = torch.randint(100, (42,))  # the RFC draws a label for each pixel, with which its method cannot work
    return MyData(images, labels, batch_size=[42], non_tensor=None, path_to_data="/data")


def test_key_and_shape_based_indexing_compile():
    def fn(data: TensorDict) -> Any:
        data = data.set("a_str", data.get("x") + 1).set(("a", "tuple"), data.get(("nested", "y")))
        return data[:3], data.get("a_str"), data.get(("a", "tuple")), data[0]

    data = TensorDict({"x": torch.randn(5), "nested": {"y": torch.randn(5, 2)}}, [5])
    got = torch.compile(fn, backend="eager", fullgraph=True)(data)
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(fn(data)), strict=True):
        assert torch.equal(a, b)


def test_first_class_dims():
    """The RFC hands the result to `functional_call`; that of torch (2.13) takes no tensor with such a dim."""
    module1, module2 = nn.Linear(3, 2), nn.Linear(3, 2)
    params = torch.stack([tdc.from_module(module1), tdc.from_module(module2)], 0)
    dim = dims(1)
    hidden = params[dim]
    assert len(hidden.batch_size) == 0
    x = torch.randn(5, 3)
    y = F.linear(x, hidden["weight"], hidden["bias"]).order(dim)
    assert torch.allclose(y, torch.stack([module1(x), module2(x)]), atol=1e-6)


def test_dataloader_fetches_whole_batches():
    data = TensorDict({"x": torch.arange(10), "name": Static("train"), "y": {"z": torch.zeros(10, 2)}}, [10])
    assert data.__getitems__([3, 1])["x"].tolist() == [3, 1]
    loader = DataLoader(data, batch_size=4, shuffle=True, collate_fn=lambda batch: batch)
    batches = list(loader)
    assert [b.batch_size for b in batches] == [(4,), (4,), (2,)]
    assert sorted(torch.cat(batches)["x"].tolist()) == list(range(10))
    assert batches[0]["name"] == "train"
