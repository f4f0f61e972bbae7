"""Specs, zeros and check, and what they say of a TensorDict that is otherwise."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from texts import Says, Texts, says
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import tdc
from tdc import ObjectArray, Static, StructureError, TensorDict, UnsupportedError
from tdc.interop import Spec


@tdc.tensorclass
class Point:
    xy: Tensor
    name: str = "here"


class Word:
    def __init__(self, size: int) -> None:
        self.size = size


tdc.interop.register_leaf(Word, shape=lambda x: (x.size,), index=lambda x, i: x)


def rich(rows: int = 2) -> TensorDict:
    """A leaf of each kind, a static value, a tensorclass, an empty node, a node with more batch dims."""
    packed = tdc.pack([torch.ones(i + 1, 4) for i in range(rows)])
    images = tdc.pack([torch.ones(4, i + 1, 3) for i in range(rows)], ragged_dim=(2, 3))
    return TensorDict(
        {
            "x": torch.zeros(rows, 3), "n": packed, "m": packed.to_padded(), "images": images,
            "rects": images.to_padded(), "o": ObjectArray(["a"] * rows), "s": Static("t"),
            "p": Point(torch.zeros(rows, 2, dtype=torch.int8), batch_size=[rows]), "e": {},
            "deep": TensorDict({"y": torch.zeros(rows, 5)}, [rows, 5]),
        },
        [rows],
    )  # fmt: skip


def test_specs_are_values():
    a, b = tdc.interop.spec(rich()), tdc.interop.spec(rich())
    assert a == b
    assert hash(a) == hash(b)
    assert a != tdc.interop.spec(rich(3))
    assert a.with_batch_size([None]) == tdc.interop.spec(rich(3), [None])
    assert a != tdc.interop.spec(rich().set("s", Static("z")))
    assert a != "spec"
    assert pickle.loads(pickle.dumps(a)) == copy.deepcopy(a) == a
    assert tdc.interop.spec(TensorDict({"a": 1, "b": 2})) == tdc.interop.spec(TensorDict({"b": 2, "a": 1}))
    assert a.leaves["x"] == tdc.interop.LeafSpec("Tensor", torch.float32, (3,), torch.device("cpu"))
    assert a.with_device("meta").leaves["n"].device == torch.device("meta")
    assert tdc.interop.spec(a) is a


def test_specs_hold_no_sizes_of_rows():
    longer = rich().update({"n": tdc.pack([torch.ones(7, 4), torch.ones(1, 4)])})
    longer = longer.set("m", longer["n"].to_padded())
    assert tdc.interop.spec(longer) == tdc.interop.spec(rich())


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_zeros_have_the_form_of_the_spec(rows: int):
    form = tdc.interop.spec(rich()).with_batch_size([None])
    td = tdc.interop.zeros(form, [rows])
    assert td.batch_size == (rows,)
    assert tdc.interop.check(td, form) is td
    assert tdc.interop.spec(td, [None]) == form
    assert isinstance(td["p"], Point)
    assert td["p"].name == "here"
    assert td["deep"].batch_size == (rows, 5)
    assert td["n"].lengths.tolist() == [0] * rows
    assert td["m"].shape == (rows, 0, 4)
    assert td["images"].sizes.shape == (rows, 2)
    assert td["o"].tolist() == [None] * rows
    assert td.keys() == rich().keys()
    tdc.validate(td["n"])


def test_zeros_of_a_schema():
    schema = {"x": ((4,), torch.float32), "meta": {"id": ((), torch.int64), "row": (3, torch.bool)}, "s": Static(1)}
    td = tdc.interop.zeros(schema, [2, 3])
    assert {k: (td[k].shape, td[k].dtype) for k in ("x", ("meta", "id"), ("meta", "row"))} == {
        "x": ((2, 3, 4), torch.float32),
        ("meta", "id"): ((2, 3), torch.int64),
        ("meta", "row"): ((2, 3, 3), torch.bool),
    }
    assert td["s"] == 1
    assert tdc.interop.zeros(schema)["meta"].batch_size == ()
    assert tdc.interop.zeros(schema, 2, device="meta")["x"].is_meta
    assert tdc.interop.zeros(schema, device="meta").device == torch.device("meta")
    assert tdc.interop.zeros(TensorDict({"x": torch.ones(2, 3)}, [2]))["x"].tolist() == [[0.0] * 3] * 2
    assert tdc.interop.zeros({}, [3]).batch_size == (3,)
    point = tdc.interop.zeros(Point(torch.ones(2, 3), batch_size=[2]))
    assert isinstance(point, Point)


def test_zeros_where_the_spec_says():
    assert tdc.interop.zeros(tdc.interop.spec(TensorDict({"x": torch.ones(2, device="meta")}, [2])), [3])["x"].is_meta


def test_check_takes_a_spec_a_schema_or_a_tensordict():
    td = rich()
    assert tdc.interop.check(td, td) is td
    assert tdc.interop.check(td, tdc.interop.spec(td)) is td
    part = td.select("x", "s", "p")
    point = {"xy": ((2,), torch.int8), "name": Static("here")}
    assert tdc.interop.check(part, {"x": ((3,), torch.float32), "p": point, "s": Static("t")}) is part
    assert tdc.interop.check(td["p"], {"xy": (2, torch.int8), "name": Static("here")}) is not None
    any_device = tdc.interop.spec(td).with_device(None)
    assert tdc.interop.check(td.exclude("o"), tdc.interop.spec(td.exclude("o")).with_device(None)).batch_size == (2,)
    with pytest.raises(StructureError, match=r"on cpu instead of .* on meta"):
        tdc.interop.check(td, any_device.with_device("meta"))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda td: td.delete("x"), r"at x: missing instead of float32\[3\] on cpu"),
        (lambda td: td.set("new", torch.zeros(2)), "at new: not in the spec"),
        (lambda td: td.set("x", torch.zeros(2, 4)), r"at x: float32\[4\] on cpu instead of float32\[3\]"),
        (lambda td: td.set("x", torch.zeros(2, 3).long()), r"at x: int64\[3\] on cpu instead of float32\[3\]"),
        (lambda td: td.delete("x").set(("x", "y"), torch.zeros(2)), "at x: no leaf instead of"),
        (lambda td: td.set("n", td["m"]), "at n: MaskedBatch .* instead of NestedTensor"),
        (lambda td: td.set("n", tdc.pack([torch.ones(1, 5)] * 2)), r"\[-1, 5\] on cpu instead of .*\[-1, 4\]"),
        (lambda td: td.set("s", Static("z")), r"at s: Static\('z'\) instead of Static\('t'\)"),
        (lambda td: td.delete("s"), r"at s: nothing instead of Static\('t'\)"),
        (lambda td: td.delete("e"), "at e: nothing instead of TensorDict"),
        (lambda td: td.set(("p", "z"), torch.zeros(2)), "at p: TensorDict instead of Point"),
        (lambda td: td.set("deep", {"y": torch.zeros(2, 5)}), "TensorDict instead of TensorDict with 1 more batch dim"),
        (lambda td: td[:1], r"at batch_size: \[1\] instead of \[2\]"),
        (lambda td: td.select("x")[None], r"at batch_size: \[1, 2\] instead of \[2\]"),
    ],
)
def test_check_names_the_difference(change: Any, line: str):
    td = rich()
    with pytest.raises(StructureError, match=line):
        tdc.interop.check(change(td), tdc.interop.spec(td))


@pytest.mark.slow
def test_specs_compile():
    td = rich().exclude("o")
    form = tdc.interop.spec(td).with_batch_size([None])

    def fn(td: TensorDict) -> Any:
        tdc.interop.check(td, form)
        own = tdc.interop.spec(td)
        return (
            own,
            tdc.interop.zeros(form, [4]),
            tdc.interop.zeros({"q": ((3,), torch.float32)}, td.batch_size)["q"] + td["x"],
        )

    own, made, x = torch.compile(fn, fullgraph=True, backend="eager")(td)
    assert own == tdc.interop.spec(td)
    assert tdc.interop.spec(made, [None]) == form
    assert x.shape == (2, 3)


def test_check_of_an_open_batch_size_does_not_recompile():
    form = tdc.interop.spec(TensorDict({"x": torch.zeros(2, 3)}, [2])).with_batch_size([None])
    counter = CompileCounter()
    fn = torch.compile(lambda td: tdc.interop.check(td, form) + 1, fullgraph=True, backend=counter, dynamic=True)
    for rows in (2, 5, 9):
        assert fn(TensorDict({"x": torch.zeros(rows, 3)}, [rows])).batch_size == (rows,)
    assert counter.frame_count == 1


def test_no_zeros_of_a_registered_class():
    form = tdc.interop.spec(TensorDict({"w": Word(2)}, [2]))
    assert repr(form) == "Spec(batch_size=[2], {'w': Word []})"
    with pytest.raises(UnsupportedError, match="at w: Word"):
        tdc.interop.zeros(form)


SAYS: dict[str, Says] = {
    "swapped pair": (lambda: tdc.interop.zeros({"x": (torch.float32, (3,)), "y": [3, 4], "z": torch.zeros(2)}), """\
DtypeError
tdc.interop.zeros: expected entries (feature shape, dtype), got 3 others
at x: (torch.float32, (3,))
at y: [3, 4]
at z: Tensor
hint: {'x': ((4,), torch.float32)} for a leaf of 4 features, () for none"""),
    "open batch size": (lambda: tdc.interop.zeros(tdc.interop.spec({"x": ((), torch.int64)}, [None])), """\
ShapeError
tdc.interop.zeros: expected a batch size without None, got [None]
hint: tdc.interop.zeros(spec, batch_size=[...])"""),
    "a name is no batch size": (lambda: tdc.interop.zeros({"x": ((), torch.int64)}, "auto"), """\
ShapeError
tdc.interop.zeros: expected a batch size, got 'auto'
hint: e.g. [3, 4], or [None, 4] for any first size"""),
    "a list is no schema": (lambda: tdc.interop.spec(["x"]), """\
DtypeError
tdc.interop.spec: expected a TensorDict, a Spec or a schema, got list
hint: {'x': ((4,), torch.float32)}, or a TensorDict"""),
    "a dict is no tensordict": (lambda: tdc.interop.check({"x": 1}, {"x": ((), torch.int64)}), """\
DtypeError
tdc.interop.check: expected a TensorDict, got dict
hint: tdc.as_tensordict(obj) first"""),
    "other number of batch dims": (lambda: tdc.interop.spec(TensorDict({}, [2, 3]), [None]), """\
ShapeError
tdc.interop.spec: expected 2 batch dims, as the TensorDict has, got [None]
hint: None stands for any size, e.g. [None, 4]"""),
    "specs do not change": (lambda: setattr(tdc.interop.spec(TensorDict()), "batch_size", (3,)), """\
ImmutableError
tdc.interop.Spec: expected no change in place, instances are immutable, got `x.batch_size = tuple`
hint: spec.with_batch_size(size), spec.with_device(device), or tdc.interop.spec(td)"""),
}  # fmt: skip
test_says = says(SAYS)


class TestTexts(Texts):
    def test_every_difference(self):
        td = TensorDict({"x": torch.zeros(2, 3), "id": torch.zeros(2), "extra": torch.zeros(2)}, [2])
        schema = {"x": ((4,), torch.float32), "id": ((), torch.int64), "meta": {"y": (1, torch.bool)}}
        form = tdc.interop.spec(schema, [None, 5])
        self.says(lambda: tdc.interop.check(td, form), """\
StructureError
tdc.interop.check: expected a TensorDict of this spec, got 5 differences
at batch_size: [2] instead of [None, 5]
at x: float32[3] instead of float32[4]
at id: float32[] instead of int64[]
at meta.y: missing instead of bool[1]
at extra: not in the spec
hint: mend the leaves, or state what they are: tdc.interop.spec(td)""")  # fmt: skip


def test_repr():
    assert isinstance(tdc.interop.spec(TensorDict()), Spec)
    assert repr(tdc.interop.spec(rich().select("x", "n", "s"), [None])) == (
        "Spec(batch_size=[None], {'x': float32[3] on cpu, 'n': NestedTensor float32[-1, 4] on cpu, 's': Static('t')})"
    )
