"""Constructors of its own, and bases of a tensorclass: tensorclasses and dataclasses contribute fields."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import tdc
from tdc import ImmutableError, TensorDict


class Point(tdc.TensorClass):
    xy: Tensor
    name: str = "here"


class Doubled(Point):
    def __init__(self, xy: Tensor, **given: Any) -> None:
        super().__init__(xy * 2, **given)


class Quadrupled(Doubled):
    def half(self) -> Tensor:
        return self.xy / 2


class Normed(tdc.TensorClass):
    x: Tensor
    norm: Tensor
    name: str = "here"

    def __init__(self, x: Tensor) -> None:
        super().__init__(x=x, norm=x.norm(dim=-1), batch_size=x.shape[:1])


STAYING: dict[str, Callable[[Any], Any]] = {
    "index": lambda x: x[0], "slice": lambda x: x[1:], "map": lambda x: x.apply(torch.sin),
    "tree_map": lambda x: pytree.tree_map(lambda leaf: leaf + 1, x),
    "tdc.map": lambda x: tdc.map(lambda part: part, x, chunksize=1), "replace": lambda x: x.replace(name="z"),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)), "stack": lambda x: torch.stack([x, x]),
    "vmap": lambda x: torch.vmap(lambda row: row * 2)(x), "back": lambda x: type(x).from_tensordict(x.to_tensordict()),
    "graph": lambda x: torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)(x),
}  # fmt: skip


@pytest.mark.parametrize("op", STAYING.values(), ids=STAYING.keys())
@pytest.mark.parametrize("cls", [Doubled, Quadrupled, Normed])
def test_an_instance_of_its_own_constructor_keeps_its_class(cls: Any, op: Callable[[Any], Any]):
    """From a report: what an `__init__` of a subclass made was of the base once it was indexed."""
    x = torch.arange(6.0).view(3, 2)
    made = cls(x) if cls is Normed else cls(x, batch_size=[3])
    out = op(made)
    assert type(made) is type(out) is cls
    assert out.name in ("here", "z")


@tdc.tensorclass
class Scaled:
    x: Tensor
    by: float = 2.0

    def __init__(self, x: Tensor, by: float = 2.0) -> None:
        super().__init__(x=x * by, by=by, batch_size=x.shape)  # type: ignore[call-arg]  # of the class that is made

    @property
    def text(self) -> str:
        return super().__repr__()

    @classmethod
    def none(cls) -> Any:
        return super().__new__(cls)


def test_a_decorated_class_may_call_super():
    """Found by hand: `super()` was of the class before it was decorated, a TypeError."""
    x: Any = Scaled(torch.ones(3), 3.0)
    assert (x[0].x, x[0].by, type(x[0])) == (3, 3.0, Scaled)
    assert x.text == repr(x)
    assert type(Scaled.none()) is Scaled


def test_a_dataclass_is_made_a_tensorclass():
    cls: Any = tdc.tensorclass(Record)
    x = cls(torch.ones(3), rate=0.1, batch_size=[3])
    assert (x[0].rest.batch_size, x[0].rate, x[1:].twice().tolist()) == ((), 0.1, [2, 2])
    assert (x == x).a.all()
    assert (cls.__name__, cls.__qualname__, cls.__module__) == ("Record", "Record", __name__)


def test_a_constructor_of_its_own_runs_where_it_is_called():
    x = torch.ones(3, 2)
    assert torch.equal(Doubled(x, batch_size=[3]).xy, x * 2)
    assert torch.equal(Quadrupled(x, batch_size=[3]).half(), x)
    assert torch.equal(Normed(x).norm, x.norm(dim=-1))
    back = Doubled.from_tensordict(TensorDict({"xy": x}, [3], device="cpu"))
    assert torch.equal(back.xy, x), "the entries are the fields"
    assert back.device == torch.device("cpu")


@dataclasses.dataclass
class Record:
    a: Tensor
    tag: str = "t"
    rest: TensorDict = dataclasses.field(default_factory=TensorDict)
    rate: float = dataclasses.field(default=0.5, kw_only=True)

    def twice(self) -> Tensor:
        return self.a * 2


@dataclasses.dataclass(frozen=True, order=True)
class Frozen:
    a: Tensor
    kept: ClassVar[int] = 3


def test_a_dataclass_among_the_bases_contributes_its_fields():
    """From a report: only the fields of the class itself were there."""

    @tdc.tensorclass
    class Row(Record):
        b: Tensor | None = None

    class Cold(Frozen, tdc.TensorClass):
        pass

    row = Row(torch.ones(3), "u", b=torch.zeros(3), rate=0.1, batch_size=[3])
    assert [f.name for f in dataclasses.fields(Row)] == ["a", "tag", "rest", "rate", "b"]
    assert [f.type for f in dataclasses.fields(Row)][:2] == [Tensor, str]
    assert Row.__match_args__ == ("a", "tag", "rest", "b")
    assert (row[0].tag, row[:2].rate, type(row[0]), isinstance(row[0], Record)) == ("u", 0.1, Row, True)
    assert row[1:].twice().tolist() == [2, 2]
    cold = Cold(torch.ones(2), batch_size=[2])
    for x in (row, cold):
        assert repr(x).startswith(f"{type(x).__name__}(\n    fields=")
        assert (x == x).a.all()
        assert len({x, x}) == 1
        with pytest.raises(ImmutableError):
            x.a = x["a"]
    assert ((cold < 2).a.all(), Cold.kept) == (True, 3)


def test_fields_of_several_bases_are_in_the_order_of_a_dataclass():
    @dataclasses.dataclass
    class Left:
        a: Tensor
        b: Tensor

    @dataclasses.dataclass
    class Right(Left):
        c: Tensor
        a: Tensor

    class Point3(tdc.TensorClass):
        z: Tensor
        a: Tensor

    class Both(Right, Point3):
        d: Tensor

    @dataclasses.dataclass
    class Third:
        z: Tensor
        a: Tensor

    @dataclasses.dataclass
    class Wanted(Right, Third):
        d: Tensor

    assert [f.name for f in dataclasses.fields(Both)] == [f.name for f in dataclasses.fields(Wanted)]
    x = Both(*[torch.full((2,), float(n)) for n in range(5)], batch_size=[2])[0]
    assert {f: x[f].item() for f in Both._fields} == {f: getattr(x, f).item() for f in Both._fields}


class Place(tdc.TensorClass):
    xy: Tensor
    tag: str

    def shifted(self) -> Any:
        return self.replace(xy=self.xy + 1)


class Speed(tdc.TensorClass):
    v: Tensor
    tag: str


class Car(Place, Speed):
    seats: int = dataclasses.field(default=4, kw_only=True)


class Named(Car):
    name: str = "car"


class Moved(Place):
    by: Tensor | None = None


class Diamond(Moved, Place):
    pass


@pytest.mark.parametrize("op", STAYING.values(), ids=STAYING.keys())
def test_bases_that_are_tensorclasses_contribute_their_fields(op: Callable[[Any], Any]):
    out = op(Named(torch.ones(3), "t", torch.ones(3, 2), batch_size=[3]))
    assert type(out) is Named
    assert isinstance(out, Speed)
    assert (out.seats, out.tag, out.shifted().xy.ndim) == (4, "t", out.xy.ndim)
    assert set(out.keys()) == {"v", "tag", "xy", "seats", "name"}


def test_fields_of_several_tensorclasses_are_in_the_order_of_a_dataclass():
    bases = [dataclasses.make_dataclass(c.__name__, [*c.__annotations__.items()]) for c in (Place, Speed)]
    wanted = dataclasses.make_dataclass("Wanted", [("seats", int)], bases=tuple(bases))
    assert [f.name for f in dataclasses.fields(Car)] == [f.name for f in dataclasses.fields(wanted)]
    assert (Car.__match_args__, list(Car._fields)) == (("v", "tag", "xy"), ["v", "tag", "xy", "seats"])
    x = Car(torch.zeros(2), "t", torch.ones(2), seats=2, batch_size=[2])
    assert (x.v.sum(), x.xy.sum(), x.tag, x.seats, x.shifted().xy.sum()) == (0, 2, "t", 2, 4)
    assert Diamond(torch.ones(2), "t", batch_size=[2])[0].by is None
    with pytest.raises(ImmutableError):
        x.v = x.xy


def test_a_base_whose_required_field_comes_behind_a_default_is_refused():
    with pytest.raises(tdc.StructureError, match=r"fields without a default first, got .* behind one with a default"):
        type(Place)("Wrong", (Place, Point), {"__module__": __name__})
