"""What a TensorDict holds beside tensors: Static values, ObjectArray, and leaves of other libraries' classes."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import pytest
import torch
from texts import Says, says
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils import _pytree as pytree

import tdc
from tdc import DtypeError, ObjectArray, ShapeError, Static, StructureError, TensorDict
from tdc.compile import counted


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float
    name: str = "c"


VALUES = ["train", 3, 0.5, None, True, ("a", (1, 2)), torch.float32, torch.device("cpu"), Config(0.1), frozenset({1})]


def split(value: Any = "train", size: tuple[int, ...] = (3,)) -> TensorDict:
    return TensorDict({"x": torch.zeros(*size, 2), "meta": {"split": Static(value), "y": torch.ones(size)}}, size)


# -- Static


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_static_value_is_read_as_it_is(value: Any):
    td = split(value)
    assert td["meta", "split"] is value
    assert td["meta"]["split"] is value
    assert td.get(("meta", "split"), "default") is value
    assert ("meta", "split") in td
    assert ("meta", "split") in td.keys(True, True)
    assert td.to_dict()["meta"]["split"] is value
    assert pickle.loads(pickle.dumps(td))["meta", "split"] == value
    assert copy.deepcopy(td)["meta", "split"] == value


def test_static_compares_by_type_and_value():
    assert Static(1) == Static(1)
    assert len({Static(1), Static(True), Static(1.0), Static("1"), Static(1)}) == 4
    assert Static("a") != "a"
    assert repr(Static("a")) == "Static('a')"
    with pytest.raises(tdc.ImmutableError):
        Static("a").value = "b"  # type: ignore[misc]  # the assignment is what is tested


KEEPING: dict[str, Callable[[TensorDict], Any]] = {
    "index": lambda td: td[0], "mask": lambda td: td[torch.tensor([True, False, True])],
    "stack": lambda td: torch.stack([td, td]), "cat": lambda td: torch.cat([td, td + 1]),
    "unbind": lambda td: td.unbind()[1], "reshape": lambda td: td.reshape(3, 1), "arithmetic": lambda td: td * 2 + td,
    "reduction": lambda td: td.sum(0), "where": lambda td: torch.where(torch.tensor([True, False, True]), td, td + 1),
    "apply": lambda td: td.apply(torch.neg), "apply with others": lambda td: td.apply(torch.add, td),
    "to": lambda td: td.to(torch.float64), "at": lambda td: td.at[0].set(1),
    "set": lambda td: td.set("new", torch.zeros(3)), "select": lambda td: td.select("meta"),
    "flatten_keys": lambda td: td.flatten_keys().unflatten_keys(),
    "vmap": lambda td: torch.vmap(lambda row: row + 1)(td),
    "torch tree_map": lambda td: pytree.tree_map(lambda x: x + 1, td),
    "optree tree_map": lambda td: optree.tree_map(lambda x: x + 1, td),
}  # fmt: skip


@pytest.mark.parametrize("op", KEEPING.values(), ids=KEEPING.keys())
def test_operations_keep_static_values(op: Callable[[TensorDict], Any]):
    assert op(split())["meta", "split"] == "train"


def test_static_values_are_set_replaced_and_deleted():
    td = split()
    assert td.set(("meta", "split"), Static("test"))["meta", "split"] == "test"
    assert td.update({"meta": {"split": Static("test")}})["meta", "split"] == "test"
    assert td.set(("meta", "split"), torch.ones(3))["meta", "split"].sum() == 3
    assert td.set("x", Static(1))["x"] == 1
    assert ("meta", "split") not in td.delete(("meta", "split"))
    assert td.pop(("meta", "split"))[0] == "train"
    assert td.rename_keys({("meta", "split"): "part"})["part"] == "train"


def test_nothing_is_set_below_a_static_value():
    with pytest.raises(tdc.KeyPathError):
        split().set(("meta", "split", "deep"), torch.ones(3))


def test_treedefs_differ_where_static_values_do():
    assert pytree.tree_structure(split()) == pytree.tree_structure(split(size=(5,)))
    assert pytree.tree_structure(split()) != pytree.tree_structure(split("test"))
    assert optree.tree_structure(split()) != optree.tree_structure(split("test"))
    for value in ("train", 3, None, ("a", (1, 2))):
        spec = pytree.tree_structure(split(value))
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_a_static_value_that_json_cannot_hold():
    with pytest.raises(tdc.FormatError, match="static values that JSON can hold"):
        pytree.treespec_dumps(pytree.tree_structure(split(Config(0.1))))


JOINING: dict[str, Callable[[Any, Any], Any]] = {
    "add": torch.add,
    "where": lambda a, b: torch.where(torch.tensor([True, False, True]), a, b),
    "stack": lambda a, b: torch.stack([a, b]),
    "cat": lambda a, b: torch.cat([a, b]),
    "apply": lambda a, b: a.apply(torch.add, b),
}
joining = pytest.mark.parametrize("op", [
    pytest.param(op, id=name) for name, op in JOINING.items()
])  # fmt: skip


@joining
@pytest.mark.parametrize("other", [split("test"), split().delete(("meta", "split")).set(("meta", "z"), Static(1))])
def test_different_static_values_do_not_meet(op: Callable[[Any, Any], Any], other: TensorDict):
    with pytest.raises(StructureError, match=r"expected equal static values, got \d that differ\nat meta\.split"):
        op(split(), other)


@pytest.mark.parametrize("op", JOINING.values(), ids=JOINING.keys())
def test_equal_static_values_meet_in_any_order_of_keys(op: Callable[[Any, Any], Any]):
    a = TensorDict({"s": Static("a"), "x": torch.ones(3), "t": Static(1)}, [3])
    b = TensorDict({"t": Static(1), "x": torch.ones(3), "s": Static("a")}, [3])
    assert op(a, b)["s"] == "a"


def test_compile_makes_one_graph_for_each_static_value():
    counts = CompileCounter()
    fn = torch.compile(lambda td: td["x"] + len(td["s"]), backend=counts, fullgraph=True, dynamic=True)
    for value, rows in (("a", 3), ("a", 4), ("bcd", 3), ("a", 5), ("bcd", 7)):
        td = TensorDict({"x": torch.zeros(rows), "s": Static(value)}, [rows])
        assert fn(td).eq(len(value)).all()
    assert counts.frame_count == 2


def test_compile_makes_and_returns_static_values():
    def fn(td: TensorDict) -> TensorDict:
        return td.set("s", Static(td["s"] + "!")) + 1

    td = TensorDict({"x": torch.zeros(2), "s": Static("a")}, [2])
    assert torch.compile(fn, backend="eager", fullgraph=True)(td)["s"] == "a!"


class Twice(torch.nn.Module):
    def forward(self, td: TensorDict) -> TensorDict:
        return td * 2


def test_export_keeps_static_values(tmp_path: Any):
    program = torch.export.export(Twice(), (split(("a", 1)),))
    torch.export.save(program, tmp_path / "x.pt2")
    out = torch.export.load(tmp_path / "x.pt2").module()(split(("a", 1)))
    assert out["meta", "split"] == ("a", 1)
    assert out["meta", "y"].eq(2).all()


def test_save_and_safe_load(tmp_path: Any):
    td = split().set("names", ObjectArray(["a", "b", "c"]))
    torch.save(td, tmp_path / "x.pt")
    back = torch.load(tmp_path / "x.pt", weights_only=True)
    assert (back["meta", "split"], back["names"].tolist()) == ("train", ["a", "b", "c"])


# -- ObjectArray


LETTERS = np.array(list("abcdef"), dtype=object).reshape(3, 2)


def letters() -> TensorDict:
    return TensorDict({"n": ObjectArray(LETTERS), "i": torch.arange(6).view(3, 2)}, [3, 2])


MOVING: dict[str, Callable[[Any], Any]] = {
    "int": lambda x: x[1], "slice": lambda x: x[1:], "pair": lambda x: x[2, 0], "ellipsis": lambda x: x[..., 1],
    "None": lambda x: x[None], "list": lambda x: x[[2, 0, 2]], "tensor": lambda x: x[torch.tensor([[0, 1], [2, 2]])],
    "mask": lambda x: x[torch.tensor([True, False, True])],
    "mask over all": lambda x: x[torch.tensor([[True, False], [False, False], [True, True]])],
    "reshape": lambda x: x.reshape(2, -1), "view": lambda x: x.view(6), "permute": lambda x: x.permute(1, 0),
    "transpose": lambda x: x.transpose(0, 1), "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(1, (1, 2)), "unsqueeze": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x[:, :1].squeeze(1), "expand": lambda x: x.expand(2, 3, 2), "repeat": lambda x: x.repeat(2, 1),
    "flip": lambda x: x.flip(0), "roll": lambda x: x.roll(1, 0),
    "index_select": lambda x: x.index_select(0, torch.tensor([2, 2])),
    "gather": lambda x: x.gather(0, torch.tensor([[0, 2]])), "unbind": lambda x: x.unbind(1)[1],
    "split": lambda x: x.split(2)[0], "chunk": lambda x: x.chunk(2)[1],
    "stack": lambda x: torch.stack([x, x.flip(0)], 1), "cat": lambda x: torch.cat([x, x[:1]]),
    "clone": lambda x: x.clone(),
}  # fmt: skip


@pytest.mark.parametrize("op", MOVING.values(), ids=MOVING.keys())
def test_objects_go_where_their_rows_go(op: Callable[[Any], Any]):
    out = op(letters())
    want = LETTERS.reshape(-1)[out["i"].numpy()]
    assert out["n"].shape == out.batch_size == out["i"].shape
    assert out["n"].tolist() == (want.tolist() if out.ndim else want)


def test_an_array_of_no_dims_holds_one_object():
    one = letters()[1, 1]["n"]
    assert (one.shape, one.ndim, one.item(), one.tolist()) == ((), 0, "d", "d")
    assert ObjectArray(["x"], ()).item() == "x"
    with pytest.raises(ShapeError, match="expected one object, got 6"):
        letters()["n"].item()


def test_object_arrays_compare_object_by_object():
    x = letters()["n"]
    assert (x == x).all()
    assert (x == "a").tolist() == [[True, False], [False, False], [False, False]]
    assert (x != "a").sum() == 5
    assert (x[0] == ObjectArray(["a", "z"])).tolist() == [True, False]
    both = letters() == letters()
    assert both["n"].all()
    assert (letters() != letters())["i"].sum() == 0
    with pytest.raises(ShapeError, match=r"expected arrays of one shape, got \[3, 2\] and \[2\]"):
        assert x == ObjectArray(["a", "b"])


def test_numpy_arrays_of_objects_and_strings_are_converted():
    td = TensorDict({"o": np.array([{"k": 1}, None], dtype=object), "s": np.array(["x", "y"])}, [2])
    assert isinstance(td["o"], ObjectArray)
    assert td["o"].tolist() == [{"k": 1}, None]
    assert td["s"].tolist() == ["x", "y"]
    assert all(type(s) is str for s in td["s"].tolist())
    with pytest.raises(ShapeError, match=r"at o: ObjectArray \[2\]"):
        TensorDict({"o": np.array(["x", "y"])}, [3])


def test_object_arrays_iterate_and_never_change():
    x = letters()["n"]
    assert len(x) == 3
    assert [row.tolist() for row in x] == LETTERS.tolist()
    for attempt in (lambda: x.__setitem__(0, "z"), lambda: setattr(x, "shape", ())):
        with pytest.raises(tdc.ImmutableError):
            attempt()
    assert len({x, x}) == 1


def test_object_arrays_are_leaves_of_a_pytree_and_survive_copies():
    td = letters()
    assert [type(leaf) for leaf in pytree.tree_leaves(td)] == [Tensor, ObjectArray]
    assert pytree.tree_map(lambda x: x, td)["n"].tolist() == LETTERS.tolist()
    for out in (pickle.loads(pickle.dumps(td)), copy.deepcopy(td), td.to(torch.float64), td.to("cpu")):
        assert out["n"].tolist() == LETTERS.tolist()
        assert out[0]["n"].tolist() == ["a", "b"]


def test_compile_leaves_object_arrays_out():
    fn = torch.compile(lambda td: td.exclude("n")[0] + td["i"][1], backend="eager", fullgraph=True)
    assert fn(letters())["i"].tolist() == [2, 4]


def test_object_arrays_are_shown_by_their_class():
    assert "n: ObjectArray(shape=torch.Size([3, 2])" in repr(letters())


SAYS: dict[str, Says] = {
    "a static value that can change": (lambda: Static(["a"]), """\
DtypeError
tdc.Static: expected a hashable object, got list
hint: a tuple for a list, ObjectArray for one object per example"""),
    "a static value that holds one that can change": (lambda: Static(("a", [1])), """\
DtypeError
tdc.Static: expected a hashable object, got tuple
hint: a tuple for a list, ObjectArray for one object per example"""),
    "a static tensor": (lambda: Static(torch.zeros(2)), """\
DtypeError
tdc.Static: expected a Python object, got Tensor
hint: a tensor is a leaf: leave Static out or give Shared(tensor), or annotate the field as Tensor"""),
    "static tensors in a tuple": (lambda: Static(("a", (torch.zeros(2), 1))), """\
DtypeError
tdc.Static: expected a Python object, got a tuple that holds a Tensor
hint: a tensor is a leaf: give each a key or field of its own, or a TensorDict of them"""),
    "static tensors in a list": (lambda: Static([TensorDict({}, [])]), """\
DtypeError
tdc.Static: expected a Python object, got a list that holds a TensorDict
hint: a tensor is a leaf: give each a key or field of its own, or a TensorDict of them"""),
    "different static values": (lambda: split() + split("test").set("more", Static(1)), """\
StructureError
tdc.add: expected equal static values, got 2 that differ
at meta.split
at more
hint: ObjectArray for one object per example, or exclude the key"""),
    "too few objects": (lambda: ObjectArray(["a", "b", "c"], (2, 2)), """\
ShapeError
tdc.ObjectArray: expected 4 objects for shape [2, 2], got 3
hint: leave shape out for one dim"""),
    "objects that do not begin with the batch size": (lambda: TensorDict({"n": ObjectArray(["a", "b"])}, [3]), """\
ShapeError
tdc.TensorDict: expected leaves of shape [3, ...], got 1 that differ
at n: ObjectArray [2]
hint: give the batch size all leaves share, reshape the leaf, or Shared(leaf) without batch dims"""),
    "arithmetic of objects": (lambda: letters() + 1, """\
UnsupportedError
tdc.add: expected an operation registered for ObjectArray, got 'add', which has none
hint: tdc.interop.register_leaf(ObjectArray, ..., ops={'add': fn}), or td.exclude(key) first"""),
}  # fmt: skip
test_says = says(SAYS)


def test_a_loss_keeps_static_values():
    assert torch.nn.functional.mse_loss(split(), split())["meta", "split"] == "train"


def test_a_frozen_dataclass_is_one_value():
    def td(rate: float) -> TensorDict:
        return TensorDict({"x": torch.ones(3), "s": Static(Config(rate))}, [3])

    assert Static(Config(0.1)) == Static(Config(0.1)) != Static(Config(0.2))
    assert len({Static(Config(0.1)), Static(Config(0.1))}) == 1
    run = counted(lambda td: td * td["s"].rate, backend="eager")
    assert [run(td(rate))["x"][0].item() for rate in (0.5, 0.5, 2.0)] == [0.5, 0.5, 2.0]
    assert run.counts.compiles == 2
    assert torch.stack([td(0.1), td(0.1)])["s"] == Config(0.1)
    wrong: Any = torch.ones(2)
    with pytest.raises(DtypeError, match=r"a Python object, got a Config that holds a Tensor"):
        Static(Config(wrong))
