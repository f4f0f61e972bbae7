"""Dataclasses, named tuples and mappings as TensorDicts and back, and what a newcomer types wrong."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from texts import Says, Texts, says
from torch import Tensor

import tdc
from tdc import ObjectArray, ShapeError, Static, TensorDict


class Point(NamedTuple):
    xy: Tensor
    name: str = "here"


@dataclass
class Inner:
    a: Tensor
    label: str = "inner"


@dataclass(frozen=True)
class Outer:
    inner: Inner
    point: Point
    maybe: Inner | None = None
    plain: dict[str, Any] = field(default_factory=dict)
    rate: float = 0.1
    node: Any = None
    made: int = field(default=3, init=False)


@tdc.tensorclass
class Frame:
    image: Tensor
    name: str = "frame"


def compiled(fn: Any) -> Any:
    return torch.compile(fn, fullgraph=True, backend="eager")


def outer() -> Outer:
    node = TensorDict({"z": torch.ones(2)}, [2])
    return Outer(Inner(torch.zeros(2, 3)), Point(torch.ones(2)), Inner(torch.ones(2)), {"x": torch.zeros(2)}, 0.5, node)


# -- batch sizes


@pytest.mark.parametrize(
    ("tree", "max_dims", "size"),
    [
        ({"x": torch.zeros(3, 4, 5), "y": {"z": torch.zeros(3, 4)}}, None, [3, 4]),
        ({"x": torch.zeros(3, 4), "y": torch.zeros(3, 4)}, None, [3, 4]),
        ({"x": torch.zeros(3, 4), "y": torch.zeros(3, 4)}, 1, [3]), ({"x": torch.zeros(3, 4)}, 0, []),
        ({"x": torch.zeros(3), "y": 1}, None, []), ({}, None, []), ({"s": Static("a"), "x": [1, 2, 3]}, None, [3]),
        ({"n": tdc.pack([torch.zeros(1), torch.zeros(2)]), "x": torch.zeros(2, 5)}, None, [2]),
        (TensorDict({"x": torch.zeros(3, 4)}, [3]), None, [3, 4]),
        ({"o": ObjectArray(list("abc")), "x": torch.zeros(3, 1)}, None, [3]), (Point(torch.zeros(3, 2)), 1, [3]),
        (np.zeros((3, 2), dtype=[("a", "f4")]), None, [3, 2]),
    ],
)  # fmt: skip
def test_infer_batch_size(tree: Any, max_dims: int | None, size: list[int]):
    assert tdc.interop.infer_batch_size(tree, max_dims) == torch.Size(size)


def test_infer_padded_leaves_by_their_rows():
    x = tdc.pack([torch.zeros(5), torch.zeros(2)]).to_padded()
    assert tdc.interop.infer_batch_size({"m": x, "y": torch.zeros(2, 5)}) == (2,)


def test_mappings():
    d = {"x": torch.zeros(3, 4), "y": {"z": [1, 2, 3]}}
    assert tdc.as_tensordict(d).batch_size == ()
    assert tdc.as_tensordict(d, [3]).batch_size == (3,)
    assert tdc.as_tensordict(d, 3).batch_size == (3,)
    td = tdc.as_tensordict(d, batch_dims=1, device="meta")
    assert td.batch_size == (3,)
    assert td["y"].batch_size == (3,)
    assert td["x"].is_meta
    assert tdc.as_tensordict(d, batch_dims=0).batch_size == ()
    inner = TensorDict({"w": torch.zeros(3, 4, 5)}, [3, 4])
    td = tdc.as_tensordict({"x": torch.zeros(3), "inner": inner}, batch_dims=1)
    assert td["inner"].batch_size == (3, 4)


# -- records


def test_dataclasses_go_there_and_back():
    td = tdc.as_tensordict(outer(), [2])
    assert set(td.keys(True, True)) == {
        *("rate", "made", ("inner", "a"), ("inner", "label"), ("point", "xy"), ("point", "name"), ("maybe", "a")),
        *(("maybe", "label"), ("plain", "x"), ("node", "z")),
    }
    assert td["rate"] == 0.5
    back = tdc.interop.to_dataclass(td, Outer)
    assert isinstance(back.inner, Inner)
    assert isinstance(back.point, Point)
    assert isinstance(back.maybe, Inner)
    assert isinstance(back.plain, dict)
    assert isinstance(back.node, TensorDict)
    assert back.inner.a is td["inner", "a"]
    assert (back.inner.label, back.point.name, back.rate, back.made) == ("inner", "here", 0.5, 3)


def test_absent_optional_record_is_a_static_none():
    td = tdc.as_tensordict(Outer(Inner(torch.zeros(2)), Point(torch.ones(2))), [2])
    assert td["maybe"] is None
    assert tdc.interop.to_dataclass(td[0], Outer).maybe is None
    assert tdc.interop.to_dataclass(td.delete("maybe"), Outer).maybe is None


def test_named_tuples_go_there_and_back():
    td = tdc.as_tensordict(Point(torch.zeros(2, 3)), [2])
    back = tdc.interop.to_namedtuple(td[0], Point)
    assert isinstance(back, Point)
    assert back.xy.shape == (3,)
    assert tdc.interop.to_namedtuple(td.delete("name"), Point).name == "here"
    made = tdc.interop.to_namedtuple(TensorDict({"p": td, "q": torch.ones(2)}, [2]))
    assert made._fields == ("p", "q")
    assert type(made.p) is type(tdc.interop.to_namedtuple(td))
    old = namedtuple("old", "x y")(torch.zeros(2), {"z": torch.zeros(2)})
    assert tdc.as_tensordict(old, [2]).keys(True, True) == ("x", ("y", "z"))
    assert tdc.as_tensordict(torch.sort(torch.randn(2, 3)), [2, 3]).keys() == ("values", "indices")


def test_as_tensordict_takes_what_has_fields():
    td = TensorDict({"x": torch.zeros(3, 4)}, [3])
    assert tdc.as_tensordict(td) is td
    assert tdc.as_tensordict(td, [3, 4]).batch_size == (3, 4)
    frame = Frame(torch.zeros(2, 3), batch_size=[2])
    assert tdc.as_tensordict(frame) is frame
    mixed = {"p": Point(torch.zeros(2)), "d": {"o": outer()}, "f": frame, "n": 1.0}
    td = tdc.as_tensordict({k: v for k, v in mixed.items() if k != "n"}, [2])
    assert td["p", "name"] == "here"
    assert td["d", "o", "inner", "label"] == "inner"
    assert isinstance(td["f"], Frame)
    assert tdc.as_tensordict({"n": 1.0})["n"].dtype == torch.float32  # in a mapping numbers are tensors
    assert tdc.as_tensordict(np.zeros(3, dtype=[("a", "f4")])).batch_size == (3,)
    array = np.zeros((3, 2), dtype=[("a", "f4"), ("s", "U2")])
    td = tdc.as_tensordict({"r": array, "p": Point(torch.zeros(3), array)}, batch_dims=1)
    assert td.batch_size == (3,)
    assert td["r", "a"].shape == td["p", "name", "a"].shape == (3, 2)
    assert td["r", "s"][0, 0].item() == ""


def test_as_tensordict_gives_another_batch_size_or_device():
    td = TensorDict({"x": torch.zeros(3, 4)}, [3])
    assert tdc.as_tensordict(td, batch_dims=2).batch_size == (3, 4)
    assert tdc.as_tensordict(td, device="meta")["x"].is_meta
    assert tdc.as_tensordict(td, device="meta").batch_size == (3,)
    array = np.zeros((3, 2), dtype=[("a", "f4")])
    assert tdc.as_tensordict(array, batch_dims=1).batch_size == (3,)
    assert tdc.as_tensordict(array, device="meta").device == torch.device("meta")
    assert tdc.as_tensordict(outer(), batch_dims=1, device="meta")["inner", "a"].is_meta


def test_ragged_fields():
    x = tdc.pack([torch.zeros(1), torch.zeros(2)])
    td = tdc.as_tensordict(Inner(x), [2])
    assert td["a"] is x
    assert tdc.interop.to_dataclass(td, Inner).a is x


def test_records_compile():
    def there_and_back(x: Tensor) -> Any:
        o = Outer(Inner(x), Point(x + 1), None, {"x": x})
        td = tdc.as_tensordict(o, [2]) * 2
        back = tdc.interop.to_dataclass(td, Outer)
        point = tdc.interop.to_namedtuple(tdc.as_tensordict(back.point, [2]) + 1, Point)
        return back.inner.a, point.xy, tdc.as_tensordict({"x": x}, batch_dims=1), tdc.interop.infer_batch_size({"x": x})

    a, xy, td, size = compiled(there_and_back)(torch.ones(2))
    assert a.tolist() == [2.0, 2.0]
    assert xy.tolist() == [5.0, 5.0]
    assert td.batch_size == size == (2,)


# -- what a newcomer types wrong


SAYS: dict[str, Says] = {
    "both batch size and batch dims": (lambda: tdc.as_tensordict({"x": torch.zeros(3)}, [3], batch_dims=1), """\
ShapeError
tdc.as_tensordict: expected one of batch_size and batch_dims, got both
hint: batch_size=[3] says the sizes, batch_dims=1 how many to read from the leaves"""),
    "batch dims without leaves": (lambda: tdc.as_tensordict({}, batch_dims=1), """\
ShapeError
tdc.as_tensordict: expected leaves to read the batch size from, got no leaf
hint: batch_size=[...] says it"""),
    "a list is no record": (lambda: tdc.as_tensordict([torch.zeros(3)]), """\
DtypeError
tdc.as_tensordict: expected a mapping or a record, got list
hint: TensorDict({'key': value}), or tdc.interop.from_pytree for lists and tuples"""),
    "a class is no instance": (lambda: tdc.as_tensordict(Inner), """\
DtypeError
tdc.as_tensordict: expected a mapping or a record, got the class Inner
hint: pass an instance of it"""),
    "an instance is no class": (lambda: tdc.interop.to_dataclass(TensorDict(), Inner(torch.zeros(1))), """\
DtypeError
tdc.interop.to_dataclass: expected a dataclass, got Inner
hint: the class itself, e.g. tdc.interop.to_dataclass(td, Step); for a tensorclass Step.from_tensordict(td)"""),
    "a tensorclass is no dataclass": (lambda: tdc.interop.to_dataclass(TensorDict(), Frame), """\
DtypeError
tdc.interop.to_dataclass: expected a dataclass, got the class Frame
hint: the class itself, e.g. tdc.interop.to_dataclass(td, Step); for a tensorclass Step.from_tensordict(td)"""),
    "fields and keys that differ": (lambda: tdc.interop.to_dataclass(TensorDict({"b": 1, "label": 2}), Inner), """\
KeyPathError
tdc.interop.to_dataclass: expected a key for each field, got 2 that differ
at b: no field
at a: missing
hint: fields of Inner: a, label; td.select(...) takes some keys"""),
    "a tuple has no names": (lambda: tdc.as_tensordict((1, 2)), """\
DtypeError
tdc.as_tensordict: expected a mapping or a record, got tuple
hint: TensorDict({'key': value}), or tdc.interop.from_pytree for lists and tuples"""),
    "keys that name no field": (lambda: tdc.interop.to_namedtuple(TensorDict({"0": 1, "class": 2, "ok": 3})), """\
KeyPathError
tdc.interop.to_namedtuple: expected keys that can name a field, got 2 others
at 0
at class
hint: td.rename_keys({old: new}) first"""),
    "a dict for a class": (lambda: tdc.interop.to_namedtuple(TensorDict(), tuple), """\
DtypeError
tdc.interop.to_namedtuple: expected a class of named tuples, got the class tuple
hint: a class made by typing.NamedTuple, or None"""),
    "negative max dims": (lambda: tdc.interop.infer_batch_size({}, -1), """\
ShapeError
tdc.interop.infer_batch_size: expected max_dims of at least 0, got -1
hint: leave it out"""),
}  # fmt: skip
test_says = says(SAYS)


class TestTexts(Texts):
    def test_batch_dims_that_leaves_do_not_share(self):
        d = {"x": torch.zeros(3, 4), "y": torch.zeros(3), "z": {"w": torch.zeros(3, 5)}}
        self.says(lambda: tdc.as_tensordict(d, batch_dims=2), """\
ShapeError
tdc.as_tensordict: expected leaves of shape [3, 4, ...], got 2 that differ
at y: Tensor float32[3]
at z.w: Tensor float32[3, 5]
hint: give fewer batch dims, or reshape the leaf""")  # fmt: skip


def test_wrong_leaves_are_named():
    with pytest.raises(ShapeError, match=r"at point\.xy: .*\n"):
        tdc.as_tensordict(outer(), [2, 3])
