"""numpy's structured arrays as TensorDicts and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from texts import Says, Texts, says

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


FIELDS: list[Any] = [("flag", "?"), ("x", "f4", (2,)), ("id", "i8"), ("meta", [("z", "c8"), ("n", "u2")])]


def shares(field: np.ndarray[Any, Any], x: torch.Tensor) -> bool:
    """Whether a tensor is the memory of a field."""
    return x.data_ptr() == field.ctypes.data


@pytest.mark.parametrize("copy", [None, False, True])
def test_aligned_fields_are_taken_where_they_lie(copy: bool | None):
    a = np.zeros((3, 2), np.dtype(FIELDS, align=True))
    a["id"] = np.arange(6).reshape(3, 2)
    td = tdc.interop.from_struct_array(a, copy=copy)
    assert td.batch_size == (3, 2)
    for key, field in (("flag", a["flag"]), ("x", a["x"]), ("id", a["id"]), (("meta", "n"), a["meta"]["n"])):
        assert shares(field, td[key]) == (copy is not True)
        assert td[key].tolist() == field.tolist()
    td["id"][0, 0] = 9
    assert a["id"][0, 0] == (0 if copy else 9)


def test_packed_fields_are_copied_where_they_have_to_be():
    a = np.zeros(3, np.dtype(FIELDS))  # 27 bytes
    td = tdc.interop.from_struct_array(a)
    assert shares(a["flag"], td["flag"])
    assert not shares(a["id"], td["id"])
    even = np.zeros(3, np.dtype([("a", "i1"), ("b", "f4"), ("c", "i1", (3,))]))  # 8 bytes, but b begins at 1
    td = tdc.interop.from_struct_array(even)
    assert shares(even["c"], td["c"])
    assert not shares(even["b"], td["b"])


def test_other_orders_of_bytes_and_read_only_arrays():
    a = np.zeros(3, np.dtype([("x", ">f4"), ("y", "f4")]))
    a["x"] = [1, 2, 3]
    assert tdc.interop.from_struct_array(a)["x"].tolist() == [1, 2, 3]
    a.flags.writeable = False
    td = tdc.interop.from_struct_array(a)
    td["y"].add_(1)
    assert a["y"].tolist() == [0, 0, 0]
    back = np.zeros(3, np.dtype([("x", "f4")]))[::-1]
    assert tdc.interop.from_struct_array(back)["x"].shape == (3,)


def test_lazy_signs_and_masks():
    x = torch.tensor([1 + 2j, 3 - 1j])
    td = TensorDict({"imag": x.conj().imag, "conj": x.conj()}, [2])
    assert tdc.interop.to_struct_array(td).tolist() == [(-2.0, 1 - 2j), (1.0, 3 + 1j)]
    masked = np.ma.array(np.zeros(2, [("x", "f4")]), mask=[(True,), (False,)])
    with pytest.raises(tdc.UnsupportedError, match="expected an array without a mask"):
        tdc.interop.from_struct_array(masked)


def test_objects_and_one_of_many():
    a = np.zeros(3, np.dtype([("name", "U5"), ("x", "f4")], align=True))
    td = tdc.interop.from_struct_array(a)
    assert td["name"].tolist() == ["", "", ""]
    assert tdc.interop.from_struct_array(a[1:2]).batch_size == (1,)
    assert tdc.interop.from_struct_array(a[:0]).batch_size == (0,)
    assert tdc.interop.from_struct_array(a[["x"]], copy=False).keys() == ("x",)


SAYS: dict[str, Says] = {
    "a plain array": (lambda: tdc.as_tensordict(np.zeros(3)), """\
DtypeError
tdc.as_tensordict: expected a mapping or a record, got ndarray float64[3]
hint: TensorDict({'key': value}), or tdc.interop.from_pytree for lists and tuples"""),
}  # fmt: skip
test_says = says(SAYS)


class TestTexts(Texts):
    def test_fields_that_need_a_copy(self):
        a = np.zeros(3, np.dtype([("flag", "?"), ("x", "f4"), ("m", [("y", ">i8"), ("o", "O")])]))
        self.says(lambda: tdc.interop.from_struct_array(a, copy=False), """\
UnsupportedError
tdc.interop.from_struct_array: expected fields that torch can use in place, got 3 others
at x: ndarray float32[3], in steps of 21 bytes, where torch steps by multiples of 4
at m.y: ndarray >i8[3], in another order of bytes
at m.o: ndarray object[3], objects and no numbers
hint: leave copy=False out; np.dtype(fields, align=True) for arrays that need no copy""")  # fmt: skip
        a = np.zeros(2, np.dtype([("when", "M8[s]"), ("x", "f4")]))
        self.says(lambda: tdc.interop.from_struct_array(a), """\
DtypeError
tdc.interop.from_struct_array: expected fields of dtypes that torch has, got 1 others
at when: ndarray datetime64[s][2]
hint: array[['x', ...]] of the other fields, or astype('f8') of dates and long doubles""")  # fmt: skip
        self.says(lambda: tdc.interop.from_struct_array(np.zeros(3)), """\
DtypeError
tdc.interop.from_struct_array: expected a structured numpy array, got ndarray float64[3]
hint: np.zeros(n, [('x', 'f4'), ...]); tdc.TensorDict of a dict of arrays, tdc.as_tensordict of one record"""
        )  # fmt: skip

    def test_leaves_numpy_does_not_have(self):
        x = tdc.pack([torch.zeros(1), torch.zeros(2)])
        td = TensorDict({"n": x, "b": torch.zeros(2).bfloat16(), "s": Static("a")}, [2])
        self.says(lambda: tdc.interop.to_struct_array(td), """\
UnsupportedError
tdc.interop.to_struct_array: expected leaves with a numpy dtype, got 3 others
at n: NestedTensor float32[2, -1]
at b: Tensor bfloat16[2]
at s: Static('a')
hint: td.exclude(key); .float() of bfloat16, .to_padded().data of ragged leaves""")  # fmt: skip
