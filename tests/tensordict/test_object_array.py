"""ObjectArray among tensors: comparing, casting, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from texts import Texts

import tdc
from tdc import ObjectArray, TensorDict


class Codes:
    """A registered class that can be indexed, and nothing else."""

    def __init__(self, numbers: list[int]):
        self.numbers = numbers


class Halves(Codes):
    """One that follows `to`."""


tdc.interop.register_leaf(Codes, shape=lambda x: (len(x.numbers),), index=lambda x, i: Codes(x.numbers[i]))
tdc.interop.register_leaf(
    Halves,
    shape=lambda x: (len(x.numbers),),
    index=lambda x, i: Halves(x.numbers[i]),
    to=lambda x, dtype: Halves([*x.numbers, dtype]),
)


def people() -> TensorDict:
    return TensorDict({"age": torch.tensor([1, 2]), "name": ObjectArray([["ada"], ["bob"]])}, [2])


def test_equal_compares_objects_by_value():
    td = people()
    assert torch.equal(td, people())
    assert torch.allclose(td, people())
    assert not torch.equal(td, td.set("name", ObjectArray(["ada", "bob"])))
    assert not torch.equal(td, td.set("name", Codes([1, 2])))
    assert torch.equal(td.flip(0).flip(0), td)


@pytest.mark.parametrize("cast", ["float", "half", "double", "bfloat16", "long", "int", "bool", "cfloat"])
def test_casts_leave_objects_alone(cast: str):
    out = getattr(people(), cast)()
    assert out["age"].dtype == getattr(torch.ones(1), cast)().dtype
    assert out["name"].tolist() == people()["name"].tolist()


def test_casts_of_a_registered_leaf_are_its_to():
    assert TensorDict({"x": Halves([])}, [0]).half()["x"].numbers == [torch.float16]


def test_an_int_is_a_shape():
    assert ObjectArray(["a", "b"], 2).shape == (2,)


class TestTexts(Texts):
    def test_no_objects(self):
        self.says(
            lambda: ObjectArray(3),
            """\
DtypeError
tdc.ObjectArray: expected a list of objects, got int
hint: ObjectArray([x]); ObjectArray([x], ()) has no dims""",
        )

    def test_an_object_beyond(self):
        self.says(
            lambda: ObjectArray(["a"])[5],
            """\
IndexingError
tdc.index: expected an index into shape [1], got 5
hint: ints, slices, masks and index vectors, as for a tensor""",
        )

    def test_an_object_by_name(self):
        self.says(
            lambda: ObjectArray(["a"])["a"],
            """\
IndexingError
tdc.index: expected an index into shape [1], got str
hint: ints, slices, masks and index vectors, as for a tensor""",
        )

    def test_equal_of_a_registered_leaf(self):
        td = TensorDict({"x": Codes([1, 2])}, [2])
        self.says(
            lambda: torch.equal(td, td),
            """\
UnsupportedError
tdc.equal: expected an operation registered for Codes, got 'equal', which has none
hint: tdc.interop.register_leaf(Codes, ..., ops={'equal': fn}), or td.exclude(key) first""",
        )
