"""tensorclass: constructor, fields of every kind, methods, inheritance, and that an instance stays what it is."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import optree
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import tdc
from tdc import ImmutableError, NestedTensor, ObjectArray, TensorDict


@tdc.tensorclass
class Point:
    xy: Tensor
    name: str = "here"

    def norm(self) -> Tensor:
        return self.xy.norm(dim=-1)


class Step(tdc.TensorClass):
    obs: Tensor
    reward: Tensor | None = None
    tag: Any = None
    places: Point | None = None
    extra: TensorDict = dataclasses.field(default_factory=TensorDict)
    rate: float = dataclasses.field(default=0.5, kw_only=True)

    scale: ClassVar[int] = 3

    def scaled(self) -> Tensor:
        return self.obs * self.scale


class Outer(tdc.TensorClass):
    td: TensorDict
    w: Tensor


class Sized(Protocol):
    xy: Tensor

    def norm(self) -> Tensor: ...


class Shape(ABC):
    @abstractmethod
    def norm(self) -> Tensor: ...

    def twice(self) -> Tensor:
        return self.norm() * 2


def point(*size: int) -> Any:
    size = size or (3,)
    return Point(torch.arange(2.0 * torch.Size(size).numel()).view(*size, 2), batch_size=size)


def nested(*size: int) -> Any:
    """A Point in a TensorDict in an Outer."""
    p = point(*size)
    return Outer(TensorDict({"p": p, "z": torch.zeros(p.batch_size)}, p.batch_size), p.xy.sum(-1), batch_size=p.shape)


# -- the constructor


@pytest.mark.parametrize("make", [
    lambda x: Point(x, "there", batch_size=[3]),
    lambda x: Point(xy=x, name="there", batch_size=3),
    lambda x: Point(name="there", batch_size=torch.Size([3]), xy=x),
])  # fmt: skip
def test_fields_by_position_and_by_name(make: Callable[[Tensor], Any]):
    x = torch.ones(3, 2)
    p = make(x)
    assert p.xy is x
    assert p.name == "there"
    assert p.batch_size == (3,)
    assert isinstance(p, TensorDict)


def test_defaults():
    a, b = Step(torch.ones(2), batch_size=[2]), Step(torch.ones(2), batch_size=[2])
    assert (a.reward, a.tag, a.places, a.rate) == (None, None, None, 0.5)
    assert isinstance(a.extra, TensorDict)
    assert a.extra.batch_size == (2,)
    assert b.extra is not a.extra
    assert Step(torch.ones(2), rate=1.0).rate == 1.0
    assert Step(torch.ones(2)).batch_size == ()
    with pytest.raises(TypeError, match="takes from 2 to 6 positional arguments"):
        Step(torch.ones(2), None, None, None, TensorDict(), 1.0)


def test_values_are_converted_as_in_a_tensordict():
    p = Point([[1, 2], [3, 4]], batch_size=[2])
    assert torch.equal(p.xy, torch.tensor([[1, 2], [3, 4]]))
    assert Point(torch.zeros(2), device="meta").xy.is_meta
    assert Outer({"a": [1, 2]}, [3, 4], batch_size=[2]).td["a"].tolist() == [1, 2]


def test_a_field_without_a_telling_annotation_takes_anything():
    step = Step(torch.ones(2), batch_size=[2])
    for tag in ("a", 3, ("x", 1), None, torch.float32):
        assert step.replace(tag=tag).tag == tag
        assert step.replace(tag=tag)[0].tag == tag
    for tag in (torch.zeros(2), TensorDict({"q": torch.zeros(2, 3)}, [2]), {"q": torch.zeros(2)}):
        assert step.replace(tag=tag)[0].tag.shape == ()


def test_ragged_and_object_fields():
    @tdc.tensorclass
    class Texts:
        tokens: NestedTensor
        captions: ObjectArray

    x = Texts(tdc.pack([torch.ones(2), torch.ones(5)]), ObjectArray(["a", "b"]), batch_size=[2])
    assert x[1].tokens.shape == (5,)
    assert x.captions.tolist() == ["a", "b"]
    assert x[[1, 0]].captions.tolist() == ["b", "a"]
    assert torch.cat([x, x]).captions.tolist() == ["a", "b", "a", "b"]


def test_a_registered_leaf_is_read_as_itself():
    class Names:
        def __init__(self, names: list[str]):
            self.names = names

    tdc.interop.register_leaf(Names, shape=lambda x: (len(x.names),), index=lambda x, i: Names(x.names[i]))

    class Row(tdc.TensorClass):
        names: Names

    assert Row(Names(["a", "b"]), batch_size=[2])[1:].names.names == ["b"]


def test_post_init_runs_last():
    seen = []

    @tdc.tensorclass
    class Checked:
        x: Tensor

        def __post_init__(self) -> None:
            seen.append((self.x.shape, self.batch_size))

    Checked(torch.zeros(2, 3), batch_size=[2])
    Checked([1, 2], batch_size=[2])
    assert seen == [((2, 3), (2,)), ((2,), (2,))]
    assert Checked(torch.zeros(2), batch_size=[2])[0].batch_size == ()
    assert len(seen) == 3, "results of operations are not constructed anew"


def test_a_constructor_of_its_own():
    class Pair(tdc.TensorClass):
        a: Tensor
        b: Tensor

        @classmethod
        def twins(cls, x: Tensor) -> Pair:
            return cls(x, x.clone(), batch_size=x.shape[:1])

    assert Pair.twins(torch.ones(3, 2)).batch_size == (3,)


def test_methods_properties_and_class_variables():
    step = Step(torch.ones(2), batch_size=[2])
    assert step.scaled().tolist() == [3, 3]
    assert Step.scale == step.scale == 3
    assert "scale" not in step
    assert Step._fields.keys() == {"obs", "reward", "tag", "places", "extra", "rate"}


def test_isinstance():
    class Anything(Sized, tdc.TensorClass):
        xy: Tensor

    for cls in (Point, Outer, Step, Anything):
        assert isinstance(point(), cls) is (cls is Point)
        assert issubclass(cls, TensorDict)
        assert not issubclass(cls, Point) or cls is Point
    fn = torch.compile(lambda x: x.xy if isinstance(x, Point) else x["xy"] * 0, backend="eager", fullgraph=True)
    assert torch.equal(fn(point()), point().xy)
    assert fn(point().to_tensordict()).eq(0).all()


# -- both spellings, inheritance


def test_both_spellings_make_the_same_class():
    @tdc.tensorclass
    class A:
        x: Tensor
        s: str = "a"

    class B(tdc.TensorClass):
        x: Tensor
        s: str = "a"

    for cls in (A, B):
        assert issubclass(cls, tdc.TensorClass)
        assert cls._fields == {**A._fields}
        assert cls.__match_args__ == ("x", "s")
        out = cls(torch.ones(2), batch_size=[2]) + 1
        assert type(out) is cls
        assert out.x.tolist() == [2, 2]


@pytest.mark.parametrize("decorate", [lambda cls: cls, tdc.tensorclass], ids=["plain", "decorated"])
def test_inherits_from_another(decorate: Any):
    @decorate
    class Named(Point):
        label: str = "none"
        weight: Tensor | None = None

        def norm(self) -> Tensor:
            return super().norm() * 2

    x = Named(torch.ones(3, 2), label="q", batch_size=[3])
    assert isinstance(x, Point)
    assert list(Named._fields) == ["xy", "name", "label", "weight"]
    assert torch.allclose(x[:1].norm(), torch.tensor([2.0]).sqrt() * 2)
    assert (x[0].name, x[0].label, type(x[0])) == ("here", "q", Named)


def test_inherits_from_a_protocol_and_an_abstract_class():
    @tdc.tensorclass
    class A(Sized):
        xy: Tensor

        def norm(self) -> Tensor:
            return self.xy.norm(dim=-1)

    class B(Shape, tdc.TensorClass):
        xy: Tensor

        def norm(self) -> Tensor:
            return self.xy.norm(dim=-1)

    @tdc.tensorclass
    class Lacking(Shape):
        xy: Tensor

    x = torch.ones(2, 2)
    assert torch.equal(A(x, batch_size=[2])[0].norm(), x[0].norm())
    assert torch.equal(B(x, batch_size=[2]).twice(), x.norm(dim=-1) * 2)
    assert isinstance(B(x, batch_size=[2])[0], Shape)
    with pytest.raises(TypeError, match="abstract"):
        Lacking(x, batch_size=[2])


# -- a typed node keeps its type


KEEPING: dict[str, Callable[[Any], Any]] = {
    "index": lambda x: x[0], "slice": lambda x: x[1:], "mask": lambda x: x[torch.tensor([True, False, True])],
    "list": lambda x: x[[2, 0]], "stack": lambda x: torch.stack([x, x], 1), "cat": lambda x: torch.cat([x, x]),
    "unbind": lambda x: x.unbind(0)[1], "split": lambda x: x.split(2)[0], "reshape": lambda x: x.reshape(3, 1),
    "unsqueeze": lambda x: x.unsqueeze(0), "expand": lambda x: x.expand(2, 3), "arithmetic": lambda x: x * 2 + x,
    "comparison": lambda x: x == x, "reduction": lambda x: x.sum(0), "to": lambda x: x.to(torch.float64),
    "apply": lambda x: x.apply(torch.sin), "at": lambda x: x.at[0].set(0), "clone": lambda x: x.clone(),
    "vmap": lambda x: torch.vmap(lambda row: row * 2)(x),
    "torch tree_map": lambda x: pytree.tree_map(lambda leaf: leaf + 1, x),
    "optree tree_map": lambda x: optree.tree_map(lambda leaf: leaf + 1, x),
    "grad": lambda x: torch.func.grad(lambda x: (x.w * x.td["p"].norm()).sum())(x),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)), "deepcopy": copy.deepcopy, "copy": copy.copy,
}  # fmt: skip


def typed(out: Any) -> None:
    """An Outer, with a Point inside it that reads and computes."""
    assert type(out) is Outer
    assert type(out.td) is TensorDict
    p = out.td["p"]
    assert type(p) is type(out["td", "p"]) is Point
    assert p.name == "here"
    assert p.batch_size == out.batch_size
    assert p.xy.shape == (*out.batch_size, 2)
    assert p.xy is out["td", "p", "xy"]


@pytest.mark.parametrize("op", KEEPING.values(), ids=KEEPING.keys())
def test_a_typed_node_keeps_its_type(op: Callable[[Any], Any]):
    typed(op(nested()))


def test_a_typed_node_seen_by_vmap():
    assert torch.allclose(torch.vmap(lambda x: x.td["p"].norm() + x.w)(nested()), point().norm() + nested().w)


def test_a_typed_node_through_compile():
    def fn(x: Any) -> Any:
        p = x.td["p"]
        return x * 2, p.norm(), p[0], torch.stack([x, x]), Outer(x.td, p.norm(), batch_size=x.batch_size)

    x = nested()
    out = torch.compile(fn, backend="eager", fullgraph=True)(x)
    for got, want in zip(pytree.tree_leaves(out), pytree.tree_leaves(fn(x)), strict=True):
        assert torch.equal(got, want)
    for part in (out[0], out[3], out[4]):
        typed(part)
    assert type(out[2]) is Point


def test_torch_save_and_safe_load(tmp_path: Any):
    torch.save(nested(), tmp_path / "x.pt")
    typed(torch.load(tmp_path / "x.pt", weights_only=True))


class Double(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2


def test_export_save_and_load(tmp_path: Any):
    program = torch.export.export(Double(), (nested(),))
    torch.export.save(program, tmp_path / "x.pt2")
    out = torch.export.load(tmp_path / "x.pt2").module()(nested())
    typed(out)
    assert torch.equal(out.w, nested().w * 2)


# -- changes


def test_changes_of_fields_keep_the_class():
    p = point()
    for new in (p.set("xy", p.xy + 1), p.replace(xy=p.xy + 1), p.update({"xy": p.xy + 1}), p.__replace__(xy=p.xy + 1)):
        assert type(new) is Point
        assert torch.equal(new.xy, p.xy + 1)
        assert new.name == "here"
    for new in (p.set("name", "z"), p.replace(name="z"), p.update({"name": "z"})):
        assert type(new) is Point
        assert (new.name, new["name"]) == ("z", "z")
        assert new.xy is p.xy
    assert p.name == "here"


def test_a_new_inner_node_replaces_the_old_one():
    x, other = nested(), TensorDict({"q": torch.zeros(3)}, [3])
    for new in (x.replace(td=other), x.set("td", other), x.replace(td=other, w=x.w)):
        assert type(new) is Outer
        assert new.td.keys() == ("q",)
    merged = x.update({"td": {"q": torch.zeros(3)}})
    assert type(merged) is Outer
    assert set(merged.td.keys()) == {"p", "z", "q"}
    deep = x.set(("td", "p", "xy"), torch.zeros(3, 2))
    typed(deep)
    assert deep.td["p"].xy.eq(0).all()


def test_a_field_of_a_tensorclass_makes_one_of_a_mapping():
    x, obs = torch.zeros(3, 2), torch.ones(3)
    for given in ({"xy": x, "name": "there"}, TensorDict({"xy": x, "name": tdc.Static("there")}, [3])):
        step = Step(obs, places=given, batch_size=[3])
        for made in (step, Step(obs, batch_size=[3]).replace(places=given), step.set("places", given)):
            assert type(made.places) is Point
            assert made.places.name == "there"
            assert made[:2].places.norm().shape == (2,)
    merged = step.update({"places": {"xy": x + 1}})
    assert type(merged.places) is Point
    assert (merged.places.name, merged.places.xy.sum()) == ("there", 6)


def test_a_new_inner_node_below_a_typed_one():
    td = TensorDict({"x": nested()}, [3])
    assert type(td.set(("x", "td"), TensorDict({"q": torch.zeros(3)}, [3]))["x"]) is Outer


def test_a_builder_takes_static_values():
    m = point().mutate()
    m["name"] = "z"
    assert m.finish().name == "z"


def test_different_static_values_are_not_equal():
    assert torch.equal(point(), point())
    assert not torch.equal(point(), point().replace(name="z"))


def test_another_key_or_a_missing_one_makes_a_tensordict():
    p = point()
    assert type(p.set("q", torch.zeros(3))) is TensorDict
    for new in (p.delete("xy"), p.select("xy"), p.exclude("name"), p.rename_keys({"xy": "x"})):
        assert type(new) is TensorDict
    x = nested()
    assert type(x.delete(("td", "p", "name"))["td", "p"]) is TensorDict
    assert type(x.delete(("td", "p", "name"))) is Outer
    assert type(x.delete("w")["td", "p"]) is Point


def test_from_and_to_a_tensordict():
    p = point()
    td = p.to_tensordict()
    assert type(td) is TensorDict
    assert td.keys() == ("xy", "name")
    back = Point.from_tensordict(td)
    assert type(back) is Point
    assert (back.xy is p.xy, back.name, back.batch_size) == (True, "here", (3,))
    assert Point.from_tensordict(TensorDict({"xy": p.xy}, [3])).name == "here"
    assert type(nested().to_tensordict()["td", "p"]) is Point
    assert Point.from_tensordict({"xy": torch.ones(2)}).batch_size == ()


def test_instances_never_change():
    p = point()
    attempts: list[Callable[[], Any]] = [
        lambda: setattr(p, "xy", p.xy),
        lambda: delattr(p, "xy"),
        lambda: setattr(p, "name", "z"),
        lambda: setattr(p, "batch_size", ()),
        lambda: p.__setitem__("xy", p.xy),
        lambda: p.__setitem__(0, 1),
        lambda: p.__delitem__("xy"),
        lambda: setattr(p, "new", 1),  # a name of tensors
    ]
    for attempt in attempts:
        with pytest.raises(ImmutableError):
            attempt()
    with pytest.raises(AttributeError):
        p.newer = 1


def test_equal_keys_give_equal_treedefs():
    assert pytree.tree_structure(point(3)) == pytree.tree_structure(point(5))
    assert pytree.tree_structure(point()) != pytree.tree_structure(point().to_tensordict())
    assert pytree.tree_structure(point()) != pytree.tree_structure(point().replace(name="z"))
    spec = pytree.tree_structure(nested())
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_classes_of_one_name_have_their_own_treedefs():
    def here() -> Any:
        class Twin(tdc.TensorClass):
            x: Tensor

        return Twin

    def there() -> Any:
        class Twin(tdc.TensorClass):
            x: Tensor

        return Twin

    first, _second = here(), there()
    spec = pytree.tree_structure(first(torch.ones(2), batch_size=[2]))
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
