"""Code as users write it, for type checkers: `tests/docs/test_types.py` runs them, and nothing runs this file.

A line that must be an error ends in `# expect: ` and the rules of pyright and of mypy, in that order and with commas
between several of one; all others must pass. `assert_type` says what an expression is.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any, ClassVar, assert_type

import torch
from torch import Tensor

import tdc


class Point(tdc.TensorClass):
    """By inheritance: type checkers know the fields, `batch_size` and the methods of a TensorDict."""

    xy: Tensor
    name: str = "here"
    weight: Tensor | None = None
    scale: float = field(default=1.0, kw_only=True)
    count: ClassVar[int] = 0

    def norm(self) -> Tensor:  # expect: reportIncompatibleMethodOverride override
        return self.xy.norm(dim=-1)


class Named(Point):
    label: str = "none"


class Outer(tdc.TensorClass):
    point: Point
    extra: tdc.TensorDict
    tag: Any = None


@tdc.tensorclass
class Step:
    """By decoration: type checkers see a frozen dataclass of the fields, and no more."""

    obs: Tensor
    reward: Tensor
    done: bool = False

    def total(self) -> Tensor:
        return self.reward.sum()


# -- the constructor

x = torch.zeros(3, 2)
p = Point(x, batch_size=[3])
q = Point(xy=x, name="there", weight=None, scale=2.0, batch_size=torch.Size([3]), device="cpu")
n = Named(x, "there", None, "label", batch_size=[3])
o = Outer(p, tdc.TensorDict({"a": x}, [3]), batch_size=[3])
s = Step(x, x, done=True)

Point()  # expect: reportCallIssue call-arg
Point(x, nmae="there")  # expect: reportCallIssue call-arg
Point(x, name=3)  # expect: reportArgumentType arg-type
Point("x")  # expect: reportArgumentType arg-type
Step(x)  # expect: reportCallIssue call-arg
Step(x, x, batch_size=[3])  # expect: reportCallIssue call-arg

# -- fields and methods

assert_type(p, Point)
assert_type(p.xy, Tensor)
assert_type(p.name, str)
assert_type(p.weight, Tensor | None)
assert_type(p.scale, float)
assert_type(p.norm(), Tensor)
assert_type(n.label, str)
assert_type(n.norm(), Tensor)
assert_type(o.point, Point)
assert_type(o.point.xy, Tensor)
assert_type(o.extra, tdc.TensorDict)
assert_type(s.obs, Tensor)
assert_type(s.total(), Tensor)
assert_type(Point.count, int)

print(p.yx)  # expect: reportAttributeAccessIssue attr-defined
print(p.name.nothing)  # expect: reportAttributeAccessIssue attr-defined
print(s.nothing)  # expect: reportAttributeAccessIssue attr-defined

# -- instances never change

p.xy = x  # expect: reportAttributeAccessIssue misc
s.obs = x  # expect: reportAttributeAccessIssue misc

# -- methods of a TensorDict

assert_type(p.replace(name="z"), Point)
assert_type(n.replace(label="z"), Named)
assert_type(Point.from_tensordict({"xy": x}), Point)
assert_type(p.to_tensordict(), tdc.TensorDict)
assert_type(p.batch_size, torch.Size)
assert_type(p.keys(), tuple[Any, ...])
assert_type(len(p), int)
total: Tensor = p["xy"] + p.get("weight", 0)
row: Point = p[0]
both: Point = torch.stack([p, p])  # expect: reportAssignmentType,reportArgumentType assignment,list-item


def reads(x: tdc.TensorDict) -> Tensor:
    return x["xy"]


def points(x: Point) -> Tensor:
    return x.norm()


reads(p)
reads(n)
points(n)
points(o)  # expect: reportArgumentType arg-type

match p:
    case Point(xy=a, name=b):
        assert_type(a, Tensor)
        assert_type(b, str)

# -- as a dataclass


class Keyed(tdc.TensorClass, kw_only=True):
    low: Tensor
    high: Tensor | None = None


@tdc.tensorclass(kw_only=True)
class ByName:
    low: Tensor
    high: Tensor | None = None


@tdc.tensorclass()
class Bare:
    low: Tensor


assert_type(Keyed(high=x, low=x, batch_size=[3]).low, Tensor)
assert_type(ByName(high=x, low=x).high, Tensor | None)
assert_type(Bare(x).low, Tensor)
Keyed(x)  # expect: reportCallIssue call-arg
ByName(x)  # expect: reportCallIssue call-arg
tdc.tensorclass(autocast=True)  # expect: reportCallIssue call-overload

assert_type(dataclasses.replace(p, name="z"), Point)
assert_type(dataclasses.replace(s, done=False), Step)
assert_type(dataclasses.asdict(p), dict[str, Any])
assert_type([f.name for f in dataclasses.fields(Point)], list[str])
dataclasses.asdict(tdc.TensorDict())  # expect: reportArgumentType call-overload

match p:
    case Point(a, b):
        assert_type(a, Tensor)
        assert_type(b, str)
