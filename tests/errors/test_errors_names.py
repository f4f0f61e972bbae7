"""Texts for what newcomers pass where a TensorDict, a key or sizes are expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from texts import Says, T, Texts, says
from texts import ragged as rows_of
from texts import tree as tree_of

import tdc
from tdc import ObjectArray, TensorDict

tree: Any = tree_of
ragged: Any = rows_of
lib: Any = tdc
torch_: Any = torch


SAYS: dict[str, Says] = {
    "apply with a dict": (lambda: tree().apply(torch.add, {"a": T(1)}), """\
DtypeError
tdc.apply: expected TensorDicts behind the function, got dict
hint: td.apply(fn, TensorDict(d, td.batch_size)), or lambda leaf: fn(leaf, x) for what all leaves share"""),
    "a view of another dtype": (lambda: tree().view(torch.int32), """\
DtypeError
tdc.view: expected sizes, got a dtype
hint: x.to(dtype) converts; td.apply(lambda leaf: leaf.view(dtype)) reads the bytes of leaves anew"""),
    "a ragged view of another dtype": (lambda: ragged().view(torch.int32), """\
DtypeError
tdc.view: expected sizes, got a dtype
hint: x.to(dtype) converts; td.apply(lambda leaf: leaf.view(dtype)) reads the bytes of leaves anew"""),
    "size of a dim that is not there": (lambda: tree().size(5), """\
ShapeError
tdc.size: expected a dim in [-2, 1], got 5
hint: count dims of the logical shape"""),
    "a dtype that an operation does not take": (lambda: tree() | tree(), """\
DtypeError
tdc.bitwise_or: expected arguments for batch_size [3, 4], got others
at tokens: Tensor float32[3, 4, 2] and Tensor float32[3, 4, 2]
hint: torch: "bitwise_or_cpu" not implemented for 'Float'"""),
    "a dtype that a function does not take": (lambda: ~tree(), """\
DtypeError
tdc.bitwise_not: expected arguments for batch_size [3, 4], got others
at tokens: Tensor float32[3, 4, 2]
hint: torch: "bitwise_not_cpu" not implemented for 'Float'"""),
    "features that do not go together": (lambda: tree() + tree().set("tokens", torch.zeros(3, 4, 3)), """\
ShapeError
tdc.add: expected arguments for batch_size [3, 4], got others
at tokens: Tensor float32[3, 4, 2] and Tensor float32[3, 4, 3]
hint: torch: The size of tensor a (2) must match the size of tensor b (3) at non-singleton dimension 2"""),
    "a tensor as a key": (lambda: T([1.0, 2.0]) in tree(), """\
KeyPathError
tdc.in: expected a str or a non-empty tuple of str, got Tensor float32[2]
hint: spell it like "a" or ("a", "b")"""),
}  # fmt: skip
test_says = says(SAYS)


class TestTexts(Texts):
    def test_a_write_into_objects(self):
        td = TensorDict({"n": ObjectArray(["a", "b"])}, [2])
        self.says(lambda: td.at[0].set({"n": "z"}), """\
DtypeError
tdc.at.set: expected an instance of ObjectArray, got str
at n: ObjectArray [2]
hint: ObjectArray([x], ()) for one object, ObjectArray(list) for one per example""")  # fmt: skip


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


PACKED, BATCH = tdc.pack([torch.ones(2), torch.ones(3)]), TensorDict({"a": torch.ones(2)}, [2])
WRONG_KINDS: dict[str, Any] = {
    "pack": [lambda: lib.pack(T(1.0)), lambda: lib.pack([T([1.0])], ragged_dim=None), lambda: lib.pack(TensorDict)],
    "from_list": [lambda: lib.from_list([[1]], ragged_dim="1"), lambda: lib.from_list(TensorDict)],
    "from_padded": [lambda: lib.from_padded([[1.0]]), lambda: lib.from_padded(torch.ones(1, 1), mask=[[True]])],
    "offsets_of": [lambda: lib.offsets_of(T(3))],
    "NestedTensor": [
        lambda: lib.NestedTensor(torch.ones(3), T([0, 3]), ragged_dim=None),
        lambda: lib.NestedTensor(torch.ones(3), T([0, 3]), shapes=[3]),
        lambda: lib.NestedTensor(torch.ones(3), T([0, 3]), max_length=2.5),
    ],
    "MaskedBatch": [lambda: lib.MaskedBatch(torch.ones(1, 3), T([3]), ragged_dims=None)],
    "to_padded": [lambda: PACKED.to_padded(length="3")],
    "size": [lambda: PACKED.size("1"), lambda: BATCH.size(1.5), lambda: BATCH.size([0])],
    "map": [lambda: lib.map(torch.relu, BATCH, None), lambda: lib.map(torch.relu, BATCH, chunksize="2")],
    "update": [lambda: BATCH.update({"a": T([1, 2])}, keys=3), lambda: BATCH.update({"a": T([1, 2])}, keys="a")],
    "split_keys": [lambda: BATCH.split_keys("a"), lambda: BATCH.split_keys(None)],
    "rename_keys": [lambda: BATCH.rename_keys(["a", "b"])],
    "flatten_keys": [lambda: BATCH.flatten_keys(3)],
    "unflatten_keys": [lambda: BATCH.unflatten_keys("")],
    "filter": [lambda: BATCH.filter(["a"])],
    "keys": [lambda: BATCH.keys(is_leaf=True)],
    "apply": [lambda: BATCH.apply(3)],
    "to": [lambda: BATCH.to("cpu", where=True)],
    "at.set": [lambda: BATCH.at["a"].set(1, mode="drop"), lambda: BATCH.at[1.5].set(1, mode="clip")],
    "grad": [lambda: lib.grad(torch.sum, argnums=None)],
    "data.collate": [lambda: lib.data.collate([{"a": T(1)}], ragged_keys=3)],
    "data.pad_sequence": [lambda: lib.data.pad_sequence([{"a": T([1])}], keys=[["a"]])],
    "data.unpad_sequence": [lambda: lib.data.unpad_sequence(BATCH, batch_dims="1")],
    "interop.infer_batch_size": [lambda: lib.interop.infer_batch_size({"a": T(1)}, "1")],
    "interop.zeros": [lambda: lib.interop.zeros({"x": ((), torch.int64)}, [-1])],
    "nn.TensorDictParams": [lambda: lib.nn.TensorDictParams(BATCH, buffers=3)],
}


@pytest.mark.parametrize(("op", "call"), [(op, call) for op, calls in WRONG_KINDS.items() for call in calls])
def test_an_argument_of_another_kind_is_named(op, call):
    with pytest.raises(tdc.TdcError, match=rf"^tdc\.{op}: expected .*\n(.*\n)*hint: "):
        call()


def test_rows_on_several_devices():
    with pytest.raises(tdc.DtypeError, match=r"tdc.pack: expected rows on cpu.*\nat row 1: .* on meta\nhint: "):
        tdc.pack([torch.ones(2), torch.ones(2, device="meta")])


APART = TensorDict({"a": torch.ones(2, 1), "b": torch.ones(2, 1, device="meta")}, [2])


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("stack", lambda: torch_.stack([APART, APART.to("meta")])),
        ("cat", lambda: torch_.cat([APART, APART.to("meta")])),
        ("cat_keys", lambda: tdc.cat_keys(APART, ["a", "b"], "c")),
        ("ravel", lambda: tdc.ravel(APART)),
    ],
)
def test_leaves_on_several_devices_are_named(op, call):
    with pytest.raises(
        tdc.StructureError, match=rf"^tdc\.{op}: expected leaves on one device.*\nat a: .*\n(.*\n)*hint: td.to"
    ):
        call()


def test_indices_that_a_batch_does_not_take():
    with pytest.raises(tdc.IndexingError, match=r"hint: dim 0 is empty"):
        TensorDict({"a": torch.ones(0)}, [0])[0]
    with pytest.raises(tdc.IndexingError, match=r"hint: td.flip\(dim\)"):
        BATCH[::-1]


def test_map_of_no_examples():
    none = TensorDict({"a": torch.ones(0)}, [0])
    assert tdc.map(lambda td: td + 1, none, chunksize=1).batch_size == (0,)
    with pytest.raises(tdc.StructureError, match=r"tdc.map: expected examples to stack the results of"):
        tdc.map(lambda td: td + 1, none, chunksize=0)
