"""tensorclass: the text of every wrong input, as a newcomer would type it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from texts import Says, Texts, says
from torch import Tensor

import tdc
from tdc import KeyPathError, StructureError


class Named(tdc.TensorClass):
    xy: Tensor
    name: str = "here"


class Holder(tdc.TensorClass):
    named: Named


class Pair(tdc.TensorClass):
    td: tdc.TensorDict
    w: Tensor


def point() -> Named:
    return Named(torch.zeros(3, 2), batch_size=[3])


SAYS: dict[str, Says] = {
    "a field that does not begin with the batch size": (
        lambda: Pair({"a": torch.zeros(2), "b": torch.zeros(3)}, torch.zeros(2, 3), batch_size=[3]), """\
ShapeError
tdc.Pair: expected leaves of shape [3, ...], got 2 that differ
at td.a: Tensor float32[2]
at w: Tensor float32[2, 3]
hint: give the batch size all leaves share, reshape the leaf, or Shared(leaf) without batch dims"""),
    "another mapping for a field of a tensorclass": (lambda: Holder({"xx": torch.zeros(3)}, batch_size=[3]), """\
KeyPathError
tdc.Named: expected a key for each field, got 2 that differ
at xx: no field
at xy: missing
hint: fields: xy, name"""),
    "a tensor for a field of a tensorclass": (lambda: Holder(torch.zeros(3), batch_size=[3]), """\
DtypeError
tdc.tensorclass: expected a mapping for a field annotated as one, got another value
at named: Tensor
hint: annotate the field as Tensor, or as Any"""),
    "an unknown field in replace": (lambda: point().replace(nmae="z", xy=1), """\
KeyPathError
tdc.replace: expected names of fields, got 1 others
at nmae: no field
hint: fields: xy, name"""),
    "a static value that can change": (lambda: Named(torch.zeros(3), ["a"], batch_size=[3]), """\
DtypeError
tdc.tensorclass: expected a hashable object, got list
at name: list
hint: a tuple for a list, ObjectArray for one object per example"""),
    "a static value that can change in set": (lambda: point().set("name", {"a": 1}), """\
DtypeError
tdc.tensorclass: expected a hashable object, got dict
at name: dict
hint: a tuple for a list, ObjectArray for one object per example"""),
    "a tensor for a static field": (lambda: Named(torch.zeros(3), torch.zeros(3)), """\
DtypeError
tdc.tensorclass: expected a Python object, got Tensor
at name: Tensor
hint: a tensor is a leaf: leave Static out or give Shared(tensor), or annotate the field as Tensor"""),
    "an inner node for a tensor field": (lambda: point().set("xy", {"a": torch.zeros(3)}), """\
DtypeError
tdc.tensorclass: expected a tensor for a field annotated as one, got an inner node
at xy: dict
hint: annotate the field as TensorDict, or as Any"""),
    "a string for a tensor field": (lambda: Named("x"), """\
DtypeError
tdc.TensorDict: expected tensors, arrays, numbers or mappings, got a value of another type
at xy: str
hint: Static(x) for one object, ObjectArray(list) for one per example, tdc.pack for tensors of different sizes"""),
    "a setting in brackets": (lambda: tdc.TensorClass["nocast"], """\
UnsupportedError
tdc.TensorClass: expected no setting in brackets, got TensorClass['nocast']
hint: leave it out; a tensorclass is frozen, and takes what annotations say"""),
    "a dataclass of a tensorclass": (lambda: dataclasses.dataclass(type("More", (Named,), {})), """\
UnsupportedError
tdc.More: expected no @dataclass on a tensorclass, got one
hint: leave @dataclass out: a tensorclass is a dataclass"""),
    "keys that are no fields": (lambda: Named.from_tensordict({"xyz": torch.zeros(3)}), """\
KeyPathError
tdc.Named: expected a key for each field, got 2 that differ
at xyz: no field
at xy: missing
hint: fields: xy, name"""),
    "an assignment": (lambda: setattr(point(), "xy", torch.zeros(3)), """\
ImmutableError
tdc.Named: expected no change in place, instances are immutable, got `x.xy = Tensor`
hint: x = x.replace(field=value), which returns a new one"""),
}  # fmt: skip
test_says = says(SAYS)


class TestTexts(Texts):
    def test_a_tuple_of_tensors(self):
        class Paired(tdc.TensorClass):
            x: Tensor
            pair: tuple[Tensor, Tensor]

        self.says(lambda: Paired(torch.zeros(3), (torch.zeros(3), torch.zeros(3)), batch_size=[3]), """\
DtypeError
tdc.tensorclass: expected a Python object, got a tuple that holds a Tensor
at pair: tuple
hint: a tensor is a leaf: give each a key or field of its own, or a TensorDict of them""")  # fmt: skip

    def test_names_that_methods_have(self):
        def make() -> Any:
            class Wrong(tdc.TensorClass):
                get: Tensor
                batch_size: Any
                _hidden: Tensor
                keys: Tensor

        self.says(make, """\
KeyPathError
tdc.Wrong: expected field names that no method of TensorDict has, got get, batch_size, _hidden
hint: choose other names for these fields""")  # fmt: skip

    def test_a_base_that_stores_fields_of_its_own(self):
        @dataclasses.dataclass(slots=True)
        class Other:
            y: Tensor

        self.says(lambda: type(Named)("Both", (Named, Other), {}), """\
StructureError
tdc.Both: expected bases without slots of their own, got Named, Other
hint: leave slots=True out, or declare the fields""")  # fmt: skip

    def test_a_constructor_that_leaves_a_field_out(self):
        class Named2(Named):
            weight: Tensor = dataclasses.field(kw_only=True)

            def __init__(self, xy: Tensor) -> None:
                super().__init__(xy)

        self.says(lambda: Named2(torch.zeros(3)), """\
KeyPathError
tdc.Named2: expected a key for each field, got 1 that differ
at weight: missing
hint: fields: xy, name, weight""")  # fmt: skip

    def test_a_dataclass_with_fields_that_are_not_given(self):
        @dataclasses.dataclass
        class Plain:
            x: Tensor
            seed: dataclasses.InitVar[int] = 0
            norm: float = dataclasses.field(init=False, default=0.0)

        self.says(lambda: type("Wrong", (Plain, tdc.TensorClass), {}), """\
StructureError
tdc.Wrong: expected fields that are stored and given, got 2 others
at seed: InitVar
at norm: init=False
hint: a classmethod that computes them, or a property""")  # fmt: skip

    def test_a_field_without_default_behind_one_with_default(self):
        def make() -> Any:
            class Wrong(Named):
                weight: Tensor

        self.says(make, """\
StructureError
tdc.Wrong: expected fields without a default first, got weight behind one with a default
hint: give a default, or dataclasses.field(kw_only=True)""")  # fmt: skip


def test_a_missing_and_an_unknown_argument_read_as_in_a_dataclass():
    with pytest.raises(TypeError, match=r"Named\.__init__\(\) missing 1 required positional argument: 'xy'"):
        Named(batch_size=[3])
    with pytest.raises(TypeError, match=r"Named\.__init__\(\) got an unexpected keyword argument 'nmae'"):
        Named(torch.zeros(3), nmae="z")


def test_joining_different_classes_or_static_values_is_an_error():
    p = point()
    with pytest.raises(StructureError, match="equal static values, got 1 that differ\nat name"):
        p + p.replace(name="z")
    with pytest.raises(StructureError, match="only in operand 0"):
        torch.stack([p, p.delete("xy")])


def test_fields_may_have_names_of_operations():
    class Sums(tdc.TensorClass):
        sum: Tensor
        values: Tensor

    x = Sums(torch.ones(2), torch.ones(2), batch_size=[2])
    assert x.sum.tolist() == [1, 1]
    assert x.values is x["values"]
    assert torch.sum(x).sum == 2
    assert (x + 1)[0].values == 2
    with pytest.raises(KeyPathError, match="field names that no method of TensorDict has, got set"):
        type("Wrong", (tdc.TensorClass,), {"__annotations__": {"items": Tensor, "set": Tensor}})
