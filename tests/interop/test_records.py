"""Records, pytrees, state dicts and structured arrays as TensorDicts and back, and what a newcomer types wrong."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from texts import Texts
from torch import Tensor, nn

import tdc
from tdc import DtypeError, KeyPathError, ObjectArray, ShapeError, Static, StructureError, TensorDict


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
        ({"x": torch.zeros(3, 4), "y": torch.zeros(3, 4)}, 1, [3]),
        ({"x": torch.zeros(3, 4)}, 0, []),
        ({"x": torch.zeros(3), "y": 1}, None, []),
        ({}, None, []),
        ({"s": Static("a"), "x": [1, 2, 3]}, None, [3]),
        ({"n": tdc.pack([torch.zeros(1), torch.zeros(2)]), "x": torch.zeros(2, 5)}, None, [2]),
        (TensorDict({"x": torch.zeros(3, 4)}, [3]), None, [3, 4]),
        ({"o": ObjectArray("abc"), "x": torch.zeros(3, 1)}, None, [3]),
        (Point(torch.zeros(3, 2)), 1, [3]),
        (np.zeros((3, 2), dtype=[("a", "f4")]), None, [3, 2]),
    ],
)
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


# -- pytrees


TREES = [
    [torch.zeros(2), {"a": (torch.ones(2), "name")}],
    (torch.zeros(2), None, 3, []),
    {"b": torch.zeros(2), "a": {}},
    OrderedDict(z=torch.zeros(2), a=[torch.ones(2)]),
    defaultdict(list, {"k": [torch.zeros(2)]}),
    Point(torch.zeros(2), "p"),
    deque([torch.zeros(2), torch.ones(2)]),
    {0: torch.zeros(2), (1, 2): torch.ones(2)},
    torch.zeros(2),
    [],
    [tdc.pack([torch.zeros(1), torch.zeros(2)]), TensorDict({"x": {"y": torch.zeros(2)}, "s": Static(1)}, [2])],
    [Frame(torch.zeros(2, 3), batch_size=[2])],
    [ObjectArray(["a", "b"])],
    [[[[torch.zeros(2)]]]],
]


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
def test_pytrees_go_there_and_back(tree: Any):
    td, spec = tdc.interop.from_pytree(tree, [2])
    assert td.batch_size == (2,)
    back = tdc.interop.to_pytree(td, spec)
    assert type(back) is type(tree)
    here, there = [torch.utils._pytree.tree_flatten(x) for x in (tree, back)]
    assert here[1] == there[1]
    assert all([x is y or x == y for x, y in zip(here[0], there[0], strict=True)])
    assert hash(spec) == hash(tdc.interop.from_pytree(tree, [2])[1])


def test_a_pytree_spec_serves_other_leaves():
    td, spec = tdc.interop.from_pytree([torch.zeros(2, 3), {"n": "s"}], [2])
    back = tdc.interop.to_pytree(td[0] + 1, spec)
    assert back[0].tolist() == [1.0, 1.0, 1.0]
    assert back[1] == {"n": "s"}


def test_pytrees_compile():
    def there_and_back(x: Tensor) -> Any:
        td, spec = tdc.interop.from_pytree({"a": [x, (x + 1,)], "n": "s"}, [2])
        return tdc.interop.to_pytree(td * 2, spec), td, spec

    back, td, spec = compiled(there_and_back)(torch.ones(2))
    assert back["a"][1][0].tolist() == [4.0, 4.0]
    assert back["n"] == "s"
    assert tdc.interop.to_pytree(td, spec)["a"][0].tolist() == [1.0, 1.0]


# -- state dicts


def test_state_dicts_go_there_and_back():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 1, bias=False)))
    state = net.state_dict()
    td = tdc.interop.from_state_dict(state)
    assert td["2", "0", "weight"] is state["2.0.weight"]
    back = tdc.interop.to_state_dict(td)
    assert list(back) == list(state)
    assert all([back[k] is state[k] for k in state])
    net.load_state_dict(tdc.interop.to_state_dict(td * 2))
    assert tdc.interop.from_state_dict({"a.b": torch.zeros(4, 2), "extra": "x", "n": None}, [4])["extra"] == "x"
    assert tdc.interop.to_state_dict(TensorDict()) == {}


def test_state_dicts_compile():
    fn = compiled(lambda sd: tdc.interop.to_state_dict(tdc.interop.from_state_dict(sd) + 1))
    assert list(fn({"b.c": torch.zeros(1), "a": torch.zeros(1)})) == ["b.c", "a"]


# -- structured arrays


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


# -- what a newcomer types wrong


class TestTexts(Texts):
    def test_both_batch_size_and_batch_dims(self):
        self.says(
            lambda: tdc.as_tensordict({"x": torch.zeros(3)}, [3], batch_dims=1),
            """\
ShapeError
tdc.as_tensordict: expected one of batch_size and batch_dims, got both
hint: batch_size=[3] says the sizes, batch_dims=1 how many to read from the leaves""",
        )

    def test_batch_dims_that_leaves_do_not_share(self):
        d = {"x": torch.zeros(3, 4), "y": torch.zeros(3), "z": {"w": torch.zeros(3, 5)}}
        self.says(
            lambda: tdc.as_tensordict(d, batch_dims=2),
            """\
ShapeError
tdc.as_tensordict: expected leaves of shape [3, 4, ...], got 2 that differ
at y: Tensor float32[3]
at z.w: Tensor float32[3, 5]
hint: give fewer batch dims, or reshape the leaf""",
        )

    def test_batch_dims_without_leaves(self):
        self.says(
            lambda: tdc.as_tensordict({}, batch_dims=1),
            """\
ShapeError
tdc.as_tensordict: expected leaves to read the batch size from, got no leaf
hint: batch_size=[...] says it""",
        )

    def test_a_list_is_no_record(self):
        self.says(
            lambda: tdc.as_tensordict([torch.zeros(3)]),
            """\
DtypeError
tdc.as_tensordict: expected a mapping or a record, got list
hint: TensorDict({'key': value}), or tdc.interop.from_pytree for lists and tuples""",
        )

    def test_a_class_is_no_instance(self):
        self.says(
            lambda: tdc.as_tensordict(Inner),
            """\
DtypeError
tdc.as_tensordict: expected a mapping or a record, got the class Inner
hint: pass an instance of it""",
        )

    def test_an_instance_is_no_class(self):
        self.says(
            lambda: tdc.interop.to_dataclass(TensorDict(), Inner(torch.zeros(1))),
            """\
DtypeError
tdc.interop.to_dataclass: expected a dataclass, got Inner
hint: the class itself, e.g. tdc.interop.to_dataclass(td, Step); for a tensorclass Step.from_tensordict(td)""",
        )

    def test_a_tensorclass_is_no_dataclass(self):
        self.says(
            lambda: tdc.interop.to_dataclass(TensorDict(), Frame),
            """\
DtypeError
tdc.interop.to_dataclass: expected a dataclass, got the class Frame
hint: the class itself, e.g. tdc.interop.to_dataclass(td, Step); for a tensorclass Step.from_tensordict(td)""",
        )

    def test_fields_and_keys_that_differ(self):
        self.says(
            lambda: tdc.interop.to_dataclass(TensorDict({"b": 1, "label": 2}), Inner),
            """\
KeyPathError
tdc.interop.to_dataclass: expected a key for each field, got 2 that differ
at b: no field
at a: missing
hint: fields of Inner: a, label; td.select(...) takes some keys""",
        )

    def test_a_tuple_has_no_names(self):
        self.says(
            lambda: tdc.as_tensordict((1, 2)),
            """\
DtypeError
tdc.as_tensordict: expected a mapping or a record, got tuple
hint: TensorDict({'key': value}), or tdc.interop.from_pytree for lists and tuples""",
        )

    def test_keys_that_name_no_field(self):
        self.says(
            lambda: tdc.interop.to_namedtuple(TensorDict({"0": 1, "class": 2, "ok": 3})),
            """\
KeyPathError
tdc.interop.to_namedtuple: expected keys that can name a field, got 2 others
at 0
at class
hint: td.rename_keys({old: new}) first""",
        )

    def test_a_dict_for_a_class(self):
        self.says(
            lambda: tdc.interop.to_namedtuple(TensorDict(), tuple),
            """\
DtypeError
tdc.interop.to_namedtuple: expected a class of named tuples, got the class tuple
hint: a class made by typing.NamedTuple, or None""",
        )

    def test_keys_of_a_pytree_that_meet(self):
        self.says(
            lambda: tdc.interop.from_pytree({1: torch.zeros(1), "1": torch.zeros(1)}),
            """\
KeyPathError
tdc.interop.from_pytree: expected dict keys that differ as strings, got 1 that are not
at 1
hint: rename one of them: keys become strings""",
        )

    def test_a_pytree_of_other_paths(self):
        td, spec = tdc.interop.from_pytree([torch.zeros(1), torch.zeros(1)])
        self.says(
            lambda: tdc.interop.to_pytree(td.rename_keys({"1": "2"}), spec),
            """\
StructureError
tdc.interop.to_pytree: expected the paths of the spec, got 2 that differ
at 1: missing
at 2: not in the spec
hint: take the TensorDict and the spec from one call of from_pytree""",
        )

    def test_a_treespec_is_no_spec(self):
        self.says(
            lambda: tdc.interop.to_pytree(TensorDict(), None),
            """\
DtypeError
tdc.interop.to_pytree: expected the spec of from_pytree, got NoneType
hint: td, spec = tdc.interop.from_pytree(tree)""",
        )

    def test_a_module_is_no_state_dict(self):
        self.says(
            lambda: tdc.interop.from_state_dict(nn.Linear(1, 1)),
            """\
DtypeError
tdc.interop.from_state_dict: expected a dict, got Linear
hint: tdc.interop.from_state_dict(module.state_dict())""",
        )

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

    def test_negative_max_dims(self):
        self.says(
            lambda: tdc.interop.infer_batch_size({}, -1),
            """\
ShapeError
tdc.interop.infer_batch_size: expected max_dims of at least 0, got -1
hint: leave it out""",
        )


def test_wrong_leaves_are_named():
    with pytest.raises(ShapeError, match=r"at point\.xy: .*\n"):
        tdc.as_tensordict(outer(), [2, 3])
    with pytest.raises(DtypeError, match=r"at 0: set"):
        tdc.interop.from_pytree([{1, 2}])
    with pytest.raises(KeyPathError):
        tdc.interop.from_state_dict({"a": torch.zeros(1), "a.b": torch.zeros(1)})
    with pytest.raises(KeyPathError, match="choose another separator"):
        tdc.interop.to_state_dict(TensorDict({"a": {"b": 1}, "a.b": 2}))
    with pytest.raises(StructureError, match=r"at 0: missing"):
        tdc.interop.to_pytree(TensorDict(), tdc.interop.from_pytree([torch.zeros(1)])[1])
