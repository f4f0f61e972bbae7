"""Texts for what newcomers pass where a TensorDict, a key or sizes are expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from texts import T, Texts
from texts import ragged as rows_of
from texts import tree as tree_of

import tdc
from tdc import ObjectArray, TensorDict

tree: Any = tree_of
ragged: Any = rows_of
lib: Any = tdc
torch_: Any = torch


class TestTexts(Texts):
    def test_apply_with_a_dict(self):
        self.says(lambda: tree().apply(torch.add, {"a": T(1)}), """\
DtypeError
tdc.apply: expected TensorDicts behind the function, got dict
hint: td.apply(fn, TensorDict(d, td.batch_size)), or lambda leaf: fn(leaf, x) for what all leaves share""")  # fmt: skip

    def test_a_view_of_another_dtype(self):
        self.says(lambda: tree().view(torch.int32), """\
DtypeError
tdc.view: expected sizes, got a dtype
hint: x.to(dtype) converts; td.apply(lambda leaf: leaf.view(dtype)) reads the bytes of leaves anew""")  # fmt: skip

    def test_a_ragged_view_of_another_dtype(self):
        self.says(lambda: ragged().view(torch.int32), """\
DtypeError
tdc.view: expected sizes, got a dtype
hint: x.to(dtype) converts; td.apply(lambda leaf: leaf.view(dtype)) reads the bytes of leaves anew""")  # fmt: skip

    def test_size_of_a_dim_that_is_not_there(self):
        self.says(lambda: tree().size(5), """\
ShapeError
tdc.size: expected a dim in [-2, 1], got 5
hint: count dims of the logical shape""")  # fmt: skip

    def test_a_dtype_that_an_operation_does_not_take(self):
        self.says(lambda: tree() | tree(), """\
DtypeError
tdc.bitwise_or: expected arguments for batch_size [3, 4], got others
at tokens: Tensor float32[3, 4, 2] and Tensor float32[3, 4, 2]
hint: torch: "bitwise_or_cpu" not implemented for 'Float'""")  # fmt: skip

    def test_a_dtype_that_a_function_does_not_take(self):
        self.says(lambda: ~tree(), """\
DtypeError
tdc.bitwise_not: expected arguments for batch_size [3, 4], got others
at tokens: Tensor float32[3, 4, 2]
hint: torch: "bitwise_not_cpu" not implemented for 'Float'""")  # fmt: skip

    def test_features_that_do_not_go_together(self):
        self.says(lambda: tree() + tree().set("tokens", torch.zeros(3, 4, 3)), """\
ShapeError
tdc.add: expected arguments for batch_size [3, 4], got others
at tokens: Tensor float32[3, 4, 2] and Tensor float32[3, 4, 3]
hint: torch: The size of tensor a (2) must match the size of tensor b (3) at non-singleton dimension 2""")  # fmt: skip

    def test_a_tensor_as_a_key(self):
        self.says(lambda: T([1.0, 2.0]) in tree(), """\
KeyPathError
tdc.in: expected a str or a non-empty tuple of str, got Tensor float32[2]
hint: spell it like "a" or ("a", "b")""")  # fmt: skip

    def test_a_write_into_objects(self):
        td = TensorDict({"n": ObjectArray(["a", "b"])}, [2])
        self.says(lambda: td.at[0].set({"n": "z"}), """\
UnsupportedError
tdc.at.set: expected tensor leaves, got another
at n: ObjectArray [2]
hint: td.set('n', value) for all of it, value made anew""")  # fmt: skip


def test_concatenate_by_axis():
    assert torch_.concatenate([tree(), tree()], axis=1).batch_size == (3, 8)
    assert torch_.stack([tree(), tree()], axis=1).batch_size == (3, 2, 4)
    assert torch_.cat([ragged(), ragged()], axis=2).shape == (3, -1, 8)


def test_an_error_of_torch_of_no_leaf_passes_as_it_is():
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine$"):
        tree().apply(broken)


@pytest.mark.parametrize("op", ["grad", "value_and_grad", "jacrev", "jacfwd", "hessian"])
def test_derivatives_name_the_function_that_was_called(op):
    with pytest.raises(tdc.DtypeError, match=rf"^tdc\.{op}: expected a function"):
        getattr(lib, op)(3)
    with pytest.raises(tdc.DtypeError, match=rf"^tdc\.{op}: expected an argument with floating-point"):
        getattr(lib, op)(lambda x: x.sum())(torch.ones(2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("unravel_key", lambda: tdc.unravel_key(lib.nn)),
        ("get", lambda: tree().get(3)),
        ("set", lambda: tree().set(("a", 3), T(1))),
        ("exclude", lambda: tree().exclude(3)),
        ("mutate", lambda: tree().mutate().update({3: T(1)})),
        ("interop.spec", lambda: tdc.interop.spec({3: ((), torch.float32)})),
    ],
)
def test_wrong_keys_name_what_was_called(op, call):
    with pytest.raises(tdc.KeyPathError, match=rf"^tdc\.{op}: expected a str or a non-empty tuple"):
        call()
