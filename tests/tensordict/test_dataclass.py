"""A tensorclass where a dataclass is expected: the functions of `dataclasses`, kw_only, and patterns."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import pprint
import sys
from dataclasses import KW_ONLY, InitVar, field
from pkgutil import resolve_name
from typing import Any, ClassVar

import pytest
import torch
from texts import Says, Texts, says
from torch import Tensor

import tdc
from tdc import ShapeError, TensorDict

decorate: Any = tdc.tensorclass  # to a type checker other settings are errors


class Point(tdc.TensorClass):
    xy: Tensor
    name: str = "here"
    extra: TensorDict = field(default_factory=TensorDict)
    rate: float = field(default=0.5, kw_only=True)


class Pair(tdc.TensorClass):
    point: Point
    w: Tensor


@dataclasses.dataclass
class Plain:
    xy: Tensor
    name: str = "here"
    extra: TensorDict = field(default_factory=TensorDict)
    rate: float = field(default=0.5, kw_only=True)


def point(n: int = 3) -> Point:
    return Point(torch.arange(2.0 * n).view(n, 2), name="there", batch_size=[n])


def test_it_is_a_dataclass():
    assert dataclasses.is_dataclass(Point)
    assert dataclasses.is_dataclass(point())
    assert not dataclasses.is_dataclass(TensorDict())


@pytest.mark.parametrize("of", [lambda cls: cls, lambda cls: cls(torch.zeros(2))], ids=["class", "instance"])
def test_fields_are_those_of_the_dataclass(of: Any):
    def told(cls: Any) -> list[Any]:
        return [(f.name, f.default, f.default_factory, f.kw_only, f.init) for f in dataclasses.fields(of(cls))]

    assert told(Point) == told(Plain)
    assert [f.type for f in dataclasses.fields(Point)] == [Tensor, str, TensorDict, float]


def test_fields_of_a_subclass_come_behind():
    class Named(Point, kw_only=True):
        label: str

    assert [f.name for f in dataclasses.fields(Named)] == ["xy", "name", "extra", "rate", "label"]
    assert [f.name for f in dataclasses.fields(Point)] == ["xy", "name", "extra", "rate"]


def test_asdict_goes_down_and_copies():
    p = Pair(point(), torch.ones(3), batch_size=[3])
    found = dataclasses.asdict(p)
    assert list(found) == ["point", "w"]
    assert list(found["point"]) == ["xy", "name", "extra", "rate"]
    assert torch.equal(found["point"]["xy"], p.point.xy)
    assert found["point"]["xy"] is not p.point.xy
    assert found["point"]["rate"] == 0.5
    whole = dataclasses.astuple(p)
    assert whole[0][1] == "there"
    assert torch.equal(whole[1], torch.ones(3))


def test_replace_keeps_batch_size_and_device_and_checks():
    p = Point(torch.zeros(3, 2), batch_size=[3], device="cpu")
    q = dataclasses.replace(p, name="z", xy=torch.ones(3, 2))
    assert (type(q), q.name, q.batch_size, q.device) == (Point, "z", torch.Size([3]), torch.device("cpu"))
    assert q.xy.sum() == 6
    assert dataclasses.replace(p, xy=torch.ones(2), batch_size=[2]).batch_size == (2,)
    with pytest.raises(ShapeError, match=r"tdc.Point: expected leaves of shape \[3, ...\]"):
        dataclasses.replace(p, xy=torch.ones(2))
    with pytest.raises(TypeError, match="unexpected keyword argument 'nmae'"):
        dataclasses.replace(p, nmae="z")  # pyright: ignore[reportCallIssue]  # what is tested


def test_replace_runs_post_init():
    class Positive(tdc.TensorClass):
        x: Tensor
        low: float = 0.0

        def __post_init__(self) -> None:
            if self.low < 0:
                raise ValueError("low")

    p = Positive(torch.ones(2), batch_size=[2])
    with pytest.raises(ValueError, match="low"):
        dataclasses.replace(p, low=-1.0)


@pytest.mark.skipif(sys.version_info < (3, 13), reason="copy.replace is new in Python 3.13")
def test_copy_replace():
    assert copy.replace(point(), name="z").name == "z"  # type: ignore[attr-defined]  # mypy checks for 3.11


def test_the_hook_of_copy_replace():
    p = point().__replace__(name="z")
    assert (p.name, p.batch_size) == ("z", (3,))
    with pytest.raises(ShapeError, match="expected leaves of shape"):
        point().__replace__(xy=torch.ones(2))


def test_printing_takes_it():
    assert "name" in pprint.pformat(point())


def test_a_graph_takes_it_as_before():
    def step(p: Any) -> Any:
        return (p + 1).replace(name="then")

    out = torch.compile(step, backend="eager", fullgraph=True)(point())
    assert (type(out), out.name, out.batch_size) == (Point, "then", (3,))
    assert out.xy[0].tolist() == [1, 2]


def test_a_graph_replaces_as_dataclasses_do():
    out = torch.compile(lambda p: dataclasses.replace(p, xy=p.xy * 2), backend="eager", fullgraph=True)(point())
    assert (type(out), out.batch_size, out.xy.sum().item()) == (Point, (3,), 30)


def test_records_of_torch_find_the_tensors():
    apply = resolve_name("torch.distributed.utils")._apply_to_tensors  # what FSDP runs over the inputs of a module
    out: Any = apply(lambda x: x.double(), {"p": point()})
    assert (out["p"].xy.dtype, out["p"].batch_size, out["p"].name) == (torch.float64, (3,), "there")


# -- kw_only


def decorated() -> Any:
    @tdc.tensorclass(kw_only=True)
    class Step:
        obs: Tensor = torch.zeros(())
        done: Tensor

    return Step


def inherited() -> Any:
    class Step(tdc.TensorClass, kw_only=True):
        obs: Tensor = torch.zeros(())
        done: Tensor

    return Step


def marked() -> Any:
    @tdc.tensorclass
    class Step:
        _: KW_ONLY
        obs: Tensor = torch.zeros(())
        done: Tensor

    return Step


@pytest.mark.parametrize("make", [decorated, inherited, marked])
def test_kw_only(make: Any):
    cls, x = make(), torch.ones(3)
    step = cls(done=x, obs=x * 2, batch_size=[3])
    assert (step.obs.sum(), step.done.sum()) == (6, 3)
    assert type(step[0]) is cls
    assert cls(done=x).obs.shape == ()
    assert cls.__match_args__ == ()
    assert [f.kw_only for f in dataclasses.fields(cls)] == [True, True]
    with pytest.raises(TypeError, match="positional argument"):
        cls(x, x)


def test_a_field_may_say_otherwise_and_a_mark_counts_from_where_it_stands():
    class Mixed(tdc.TensorClass):
        x: Tensor
        _: KW_ONLY
        y: Tensor
        z: int = 0

    class Turned(tdc.TensorClass, kw_only=True):
        x: Tensor = field(kw_only=False)
        y: Tensor

    assert Mixed(torch.ones(2), y=torch.ones(2)).z == 0
    assert Turned(torch.ones(2), y=torch.ones(2)).x.sum() == 2
    assert (Mixed.__match_args__, Turned.__match_args__) == (("x",), ("x",))


def test_a_decorator_without_settings_is_the_plain_one():
    @tdc.tensorclass()
    class Step:
        obs: Tensor

    step: Any = Step(torch.ones(2))
    assert (step + 1).obs.tolist() == [2, 2]


# -- patterns


def test_patterns_take_positional_fields():
    match point():
        case Point(xy, name, rate=rate):
            assert (xy.shape, name, rate) == ((3, 2), "there", 0.5)
        case _:
            raise AssertionError
    match Pair(point(), torch.ones(3), batch_size=[3]):
        case Pair(Point(name="elsewhere")):
            raise AssertionError
        case Pair(Point(name="there"), w=w):
            assert w.sum() == 3
        case _:
            raise AssertionError


def test_own_match_args_stay():
    class Own(tdc.TensorClass):
        __match_args__: ClassVar[Any] = ("name",)  # type checkers have their own idea of it
        xy: Tensor
        name: str = "here"

    own: Any = Own
    match own(torch.zeros(2)):
        case own("here"):
            pass
        case _:
            raise AssertionError


SAYS: dict[str, Says] = {
    "settings of others": (lambda: decorate(autocast=True), """\
UnsupportedError
tdc.tensorclass: expected no setting but kw_only, got autocast
hint: leave it out; a tensorclass is frozen, and takes what annotations say"""),
}  # fmt: skip
test_says = says(SAYS)


class TestTexts(Texts):
    def test_kw_only_in_front_of_a_class_that_is_made(self):
        class Named(Point):
            label: str = ""

        self.says(lambda: tdc.tensorclass(kw_only=True)(Named), """\
UnsupportedError
tdc.tensorclass: expected kw_only where the class is made, got one in front of Named
hint: class Named(Base, kw_only=True), undecorated""")  # fmt: skip

    def test_what_is_not_stored(self):
        def make() -> Any:
            class Wrong(tdc.TensorClass):
                x: Tensor
                seed: InitVar[int]
                norm: Tensor = field(init=False)

        self.says(make, """\
StructureError
tdc.Wrong: expected fields that are stored and given, got 2 others
at seed: InitVar
at norm: init=False
hint: a classmethod that computes them, or a property""")  # fmt: skip


def test_annotations_that_say_a_shape():
    """Of jaxtyping, `Float[Tensor, "b d"]`, which has the class as `array_type`: fields were Python objects."""
    shaped = {cls: type("Float", (), {"array_type": cls}) for cls in (Tensor, tdc.NestedTensor, Point)}
    notes = {"x": shaped[Tensor] | None, "rows": shaped[tdc.NestedTensor], "p": shaped[Point]}
    cls: Any = tdc.tensorclass(type("Batch", (), {"__annotations__": notes, "__module__": __name__}))
    rows = tdc.pack([torch.ones(2), torch.ones(1), torch.ones(3)])
    batch = cls(torch.ones(3), rows, point(), batch_size=[3])
    assert (batch[:2].x.shape, batch[0].rows.shape, type(batch[0].p)) == ((2,), (2,), Point)


class Around:
    @tdc.tensorclass
    class Inside:
        x: Tensor


def test_a_class_inside_another_is_found_again():
    """Found by hand: the decorator made it a class of the module, where pickle did not find it."""
    x = Around.Inside(torch.ones(3), batch_size=[3])
    assert Around.Inside.__qualname__ == "Around.Inside"
    assert type(pickle.loads(pickle.dumps(x))) is Around.Inside
