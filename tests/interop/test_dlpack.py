"""Arrays of numpy and JAX as leaves and back, without a copy; what may only be read stays as it is."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from texts import Says, Texts, says

import tdc
from tdc import ObjectArray, Static, TensorDict, UnsupportedError
from tdc.interop import from_dlpack, to_dlpack

NUMPY = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
    "complex64", "complex128",
)  # fmt: skip
OTHERS = ("bfloat16", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_both_ways(name: str):
    a = np.ones((3, 2), dtype=name)
    td = from_dlpack({"x": a, "meta": {"y": a.T}}, copy=False)
    assert td["x"].dtype == td["meta", "y"].dtype == getattr(torch, name)
    assert td["x"].data_ptr() == a.ctypes.data
    assert td["meta", "y"].stride() == (1, 2)
    back = to_dlpack(td, np.from_dlpack)
    assert back["meta"]["y"].dtype == a.dtype
    assert np.shares_memory(back["x"], a)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_dtypes_that_numpy_does_not_have(name: str):
    td = TensorDict({"good": torch.ones(3), "x": {"y": torch.zeros(3).to(getattr(torch, name))}})
    with pytest.raises(UnsupportedError, match=rf"at x.y: Tensor {name}\[3\]: .*\nhint: .*td.float\(\) of bfloat16"):
        to_dlpack(td, np.from_dlpack)
    with pytest.raises(UnsupportedError, match=rf"tdc.to_numpy: expected .*, got 1 others\nat x.y: Tensor {name}"):
        td.to_numpy()
    with pytest.raises(UnsupportedError, match=rf"at x.y: Tensor {name}"):
        tdc.interop.to_struct_array(td)


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
def test_jax_both_ways():
    """In a process of its own: JAX warns of every fork once it is imported, such as those of a DataLoader."""
    script = Path(__file__).with_name("jax_both_ways.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "19 dtypes\n"


class Locked:
    """An array that says by DLPack 1 alone that it may only be read."""

    def __init__(self, x: np.ndarray[Any, Any]) -> None:
        self.x = x
        x.flags.writeable = False

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


@pytest.mark.parametrize("locked", [Locked, lambda x: Locked(x).x], ids=["flag of DLPack", "flag of numpy"])
def test_what_may_only_be_read_is_copied_or_refused(locked: Callable[[Any], Any]):
    source = np.zeros(3)
    array = locked(source)
    td = from_dlpack({"x": array})
    td["x"].add_(1)
    assert source.tolist() == [0, 0, 0]
    with pytest.raises(UnsupportedError, match=r"can use in place, got 1 others\nat m.x: .* may only be read"):
        from_dlpack({"m": {"x": array}}, copy=False)


@pytest.mark.filterwarnings("error")
def test_constructors_do_not_write_to_read_only_arrays():
    array = np.zeros(3)
    array.flags.writeable = False
    td = TensorDict({"x": array, "y": np.ones(3)}, [3]).set("z", array)
    td["x"].add_(1)
    td["z"].add_(1)
    assert array.tolist() == [0, 0, 0]
    own = np.zeros(3)
    assert TensorDict({"x": own})["x"].data_ptr() == own.ctypes.data
    assert np.asarray(td["y"]).tolist() == [1, 1, 1]
    assert np.asarray(td["y"]).ctypes.data == td["y"].data_ptr()


def test_memory_outlives_the_array():
    td = from_dlpack({"x": np.full(1000, 7.0)})
    assert sum([np.zeros(1000).sum() for _ in range(10)]) == 0
    assert td["x"].eq(7).all()
    assert ctypes.sizeof(ctypes.c_double) == td["x"].element_size()


def test_what_is_no_array_passes_or_is_named():
    rows = tdc.pack([torch.ones(1), torch.ones(2)])
    td = from_dlpack({"r": rows, "s": Static("a"), "t": torch.ones(2), "a": np.ones(2)}, [2])
    assert td["r"] is rows
    back = to_dlpack(td.exclude("r").set("o", ObjectArray(["x", "y"])), np.from_dlpack)
    assert back["s"] == "a"
    assert back["o"].tolist() == ["x", "y"]


def test_arrays_that_go_backwards_are_copied_or_refused():
    source = np.arange(6.0).reshape(2, 3)
    for array in (source[::-1], source[:, ::-1], np.ma.array(source).filled(0)[::-1, ::-1]):
        for copy in (None, True):
            assert from_dlpack({"x": array}, copy=copy)["x"].tolist() == array.tolist()
        with pytest.raises(UnsupportedError, match=r"at x: .* goes backwards in memory"):
            from_dlpack({"x": array}, copy=False)
        assert TensorDict({"x": array})["x"].tolist() == array.tolist()


def test_what_a_tensor_or_an_array_cannot_say_is_refused():
    with pytest.raises(UnsupportedError, match=r"at x: .*, with a mask: array.filled\(value\)"):
        from_dlpack({"x": np.ma.array(np.ones(2), mask=[True, False])})
    negated = torch.tensor([1 + 2j]).conj().imag
    with pytest.raises(UnsupportedError, match=r"at x: .*, which is negated as it is read"):
        to_dlpack(TensorDict({"x": negated}), np.from_dlpack)


SAYS: dict[str, Says] = {
    "values that are no arrays": (lambda: from_dlpack({"a": 1, "b": {"c": "text"}}), """\
DtypeError
tdc.interop.from_dlpack: expected nested mappings of arrays, got 2 values that are not
at a: int
at b.c: str
hint: arrays with __dlpack__; tdc.TensorDict(...) takes lists and numbers, Static(x) any object"""),
    "values that are no arrays, 2": (
        lambda: from_dlpack({"a": np.zeros(3, ">f4"), "b": np.zeros(3, "M8[s]"), "c": np.array(["x"])}), """\
UnsupportedError
tdc.interop.from_dlpack: expected arrays that torch has a dtype for, got 3 others
at a: ndarray >f4[3]: DLPack only supports native byte order.
at b: ndarray datetime64[s][3]: DLPack only supports signed/unsigned integers, float and complex dtypes.
at c: ndarray <U1[1]: DLPack only supports signed/unsigned integers, float and complex dtypes.
hint: array.astype(...) of a dtype and byte order that torch has"""),
    "values that are no arrays, 3": (lambda: from_dlpack([np.zeros(3)]), """\
DtypeError
tdc.interop.from_dlpack: expected a Mapping of arrays, got list
hint: pass a dict"""),
}  # fmt: skip
test_says = says(SAYS)


class TestTexts(Texts):
    def test_leaves_that_do_not_go(self):
        td = TensorDict({"g": torch.ones(2, requires_grad=True), "r": tdc.pack([torch.ones(1), torch.ones(2)])}, [2])
        self.says(lambda: to_dlpack(td.set("c", torch.ones(2, dtype=torch.complex64).conj()), np.from_dlpack), """\
UnsupportedError
tdc.interop.to_dlpack: expected leaves that the library takes, got 3 others
at g: Tensor float32[2], which requires a gradient
at r: NestedTensor float32[2, -1]
at c: Tensor complex64[2]: Can't export tensors with the conjugate bit set
hint: td.detach() of gradients, td.float() of bfloat16, x.to_padded().data of ragged leaves, or td.exclude(key)"""
        )  # fmt: skip
        self.says(lambda: to_dlpack(td, "numpy"), """\
DtypeError
tdc.interop.to_dlpack: expected a function, got str
hint: the function itself, e.g. torch.relu""")  # fmt: skip
        self.says(lambda: to_dlpack(td, np), """\
DtypeError
tdc.interop.to_dlpack: expected a function, got the module numpy
hint: the function itself, e.g. torch.relu""")  # fmt: skip
