"""numpy's structured arrays as TensorDicts and back."""

from __future__ import annotations

import numpy as np
import torch
from texts import Texts

import tdc
from tdc import Static, TensorDict


def test_structured_arrays_go_there_and_back():
    dtype = [("xy", "f4", (2,)), ("id", ">i8"), ("ok", "?"), ("meta", [("name", "U5"), ("z", "c8"), ("o", "O")])]
    a = np.zeros((3, 2), dtype=dtype)
    a["id"] = np.arange(6).reshape(3, 2)
    a["meta"]["name"][0, 0] = "ada"
    a["meta"]["o"][1, 1] = [1, 2]
    td = tdc.as_tensordict(a)
    assert td.batch_size == (3, 2)
    assert td["xy"].shape == (3, 2, 2)
    assert td["id"].tolist() == a["id"].tolist()
    assert td["meta", "name"][0, 0].item() == "ada"
    back = tdc.interop.to_struct_array(td)
    assert back.shape == (3, 2)
    assert set(back.dtype.names) == set(a.dtype.names)
    for name in ("xy", "id", "ok"):
        assert (back[name] == a[name]).all()
    assert back["meta"]["o"][1, 1] == [1, 2]
    assert back["meta"]["name"][0, 0] == "ada"
    again = tdc.as_tensordict(back)
    assert again.keys(True, True) == td.keys(True, True)
    assert torch.equal(again["id"], td["id"])


def test_one_record_and_no_records():
    a = np.zeros(2, dtype=[("x", "f4"), ("s", "U3"), ("n", [("y", "i4")])])
    td = tdc.as_tensordict(a[1])
    assert td.batch_size == ()
    assert td["n", "y"].dtype == torch.int32
    assert tdc.as_tensordict(a[:0]).batch_size == (0,)
    assert tdc.interop.to_struct_array(TensorDict({}, [3])).shape == (3,)
    assert tdc.interop.to_struct_array(TensorDict({"x": 1.5}))["x"] == 1.5
    assert tdc.as_tensordict(np.zeros((2, 3), dtype=[("x", "f4")]), [2]).batch_size == (2,)


def test_structured_arrays_copy():
    a = np.zeros(2, dtype=[("x", "f4")])
    td = tdc.as_tensordict(a)
    a["x"] = 1
    assert td["x"].tolist() == [0.0, 0.0]
    back = tdc.interop.to_struct_array(TensorDict({"x": torch.ones(2, requires_grad=True)}, [2]))
    assert back["x"].tolist() == [1.0, 1.0]


class TestTexts(Texts):
    def test_a_plain_array(self):
        self.says(
            lambda: tdc.as_tensordict(np.zeros(3)),
            """\
DtypeError
tdc.as_tensordict: expected a mapping or a record, got ndarray float64[3]
hint: TensorDict({'key': value}), or tdc.interop.from_pytree for lists and tuples""",
        )

    def test_leaves_numpy_does_not_have(self):
        x = tdc.pack([torch.zeros(1), torch.zeros(2)])
        td = TensorDict({"n": x, "b": torch.zeros(2).bfloat16(), "s": Static("a")}, [2])
        self.says(
            lambda: tdc.interop.to_struct_array(td),
            """\
UnsupportedError
tdc.interop.to_struct_array: expected leaves with a numpy dtype, got 3 others
at n: NestedTensor float32[2, -1]
at b: Tensor bfloat16[2]
at s: Static('a')
hint: td.exclude(key); .float() of bfloat16, .to_padded().data of ragged leaves""",
        )
