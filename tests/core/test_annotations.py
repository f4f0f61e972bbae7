"""Annotations of tensorclasses, records and functions: as values, as texts, and computed late, as in Python 3.14."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import typing_extensions
from torch import Tensor

import tdc
from tdc.compile.loss import count_of_arguments
from tdc.core.annotations import hints, meant, python_signature
from tdc.testing import assert_batched_equal

X = torch.arange(6.0).reshape(3, 2)
TEXTS = "from __future__ import annotations\n"
HEAD = "import dataclasses, typing\nimport torch, tdc\nfrom torch import Tensor\n"
LATE = pytest.mark.skipif(sys.version_info < (3, 14), reason="a class may name what follows it since Python 3.14")
PARAMETERS = pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters and aliases are new in Python 3.12")
Load = Callable[[str], Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Makes a module of a text, in which annotations are what Python makes of them unless it begins with `TEXTS`."""

    def made(text: str) -> Any:
        module = ModuleType("tdc_annotated")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        begin = TEXTS if text.startswith(TEXTS) else ""
        code = compile(begin + HEAD + text.removeprefix(begin), module.__name__, "exec", dont_inherit=True)
        exec(code, vars(module))
        return module

    return made


def kinds(cls: Any) -> dict[str, tuple[str, bool]]:
    return {name: (field.kind, field.optional) for name, field in cls._fields.items()}


FORWARD = """
class Tree(tdc.TensorClass):
    value: Tensor
    name: str = "leaf"
    left: Tree | None = None
    later: Later = 3
    some: list[Later] | None = None
    count: typing.ClassVar[Later] = 0
    weight: Tensor | None = None

@tdc.tensorclass
class Step:
    obs: Tensor
    before: Step | None = None
    lacks: nowhere.Ghost = "nothing"
    name: str = "here"

class More(Tree):
    extra: Tensor | None = None

class Later(tdc.TensorClass):
    x: Tensor
"""


@pytest.mark.parametrize("begin", [TEXTS, pytest.param("", marks=LATE)], ids=["texts", "late"])
def test_names_of_what_is_not_there_yet(load: Load, begin: str):
    """Found on Python 3.14: such a class raised a NameError. As a text, one such name hid the types of all fields."""
    module = load(begin + FORWARD)
    known = {"value": ("tensor", False), "name": ("static", False), "left": ("node", True), "weight": ("tensor", True)}
    assert kinds(module.Tree) == {**known, "later": ("any", False), "some": ("any", True)}
    assert kinds(module.More) == {**kinds(module.Tree), "extra": ("tensor", True)}
    assert kinds(module.Step) == {
        "obs": ("tensor", False), "before": ("node", True), "lacks": ("any", False), "name": ("static", False)
    }  # fmt: skip
    tree = module.More(X, "root", left={"value": X}, later={"x": X}, batch_size=[3])
    assert (type(tree.left), tree.left.name, tree[1].later["x"].tolist()) == (module.Tree, "leaf", [2, 3])
    assert type(module.Step(X, before={"obs": X}, batch_size=[3]).before) is module.Step
    assert module.Step(X, batch_size=[3]).lacks == "nothing"
    with pytest.raises(tdc.DtypeError, match="not optional"):
        module.Tree(None, "root", batch_size=[3])


@pytest.mark.cases(1)
@pytest.mark.parametrize("begin", [TEXTS, pytest.param("", marks=LATE)], ids=["texts", "late"])
def test_a_mark_of_what_is_not_there_yet(load: Load, begin: str):
    text = "class A(tdc.TensorClass):\n    x: Tensor\n    y: dataclasses.InitVar[Later] = 1\n"
    with pytest.raises(tdc.StructureError, match="at y: InitVar"):
        load(begin + text)
    text = "class A(tdc.TensorClass):\n    _: dataclasses.KW_ONLY\n    x: Tensor\n    y: Later = 1\n"
    assert str(inspect.signature(load(begin + text).A)).startswith("(*, x, y=")


def test_a_name_means_the_class_only_where_python_finds_it(load: Load):
    text = "class B(tdc.TensorClass):\n    x: Tensor\n\nclass A:\n    class B(tdc.TensorClass):\n        y: B\n"
    module = load(TEXTS + text)
    assert module.A.B._fields["y"].cls is module.B


@pytest.mark.parametrize("begin", [TEXTS, ""], ids=["texts", "python"])
def test_what_is_recorded_for_dataclasses(load: Load, begin: str):
    text = "class A(tdc.TensorClass):\n    x: Tensor\n\n@tdc.tensorclass\nclass B(A):\n    y: int | None = None\n"
    cls = load(begin + text).B
    assert [(f.name, f.type) for f in dataclasses.fields(cls)] == [("x", Tensor), ("y", int | None)]


# -- type parameters and aliases


GENERIC = """
class Batch[T](tdc.TensorClass):
    x: Tensor
    tag: T

@tdc.tensorclass(kw_only=True)
class Step[T: Tensor, *Ts]:
    x: T
    note: tuple[*Ts] | None = None
    def of(self, y: T) -> T:
        return self.x + y

class Named(Batch[str]):
    y: Tensor | None = None
"""


@PARAMETERS
@pytest.mark.parametrize("begin", [TEXTS, ""], ids=["texts", "python"])
def test_type_parameters(load: Load, begin: str):
    module = load(begin + GENERIC)
    batch, named = module.Batch(X, "a", batch_size=[3]), module.Named(X, "b", batch_size=[3])
    step = module.Step(x=X, batch_size=[3])
    assert kinds(module.Named) == {"x": ("tensor", False), "tag": ("any", False), "y": ("tensor", True)}
    assert (batch[1:].tag, torch.stack([named, named]).tag, isinstance(named, module.Batch)) == ("a", "b", True)
    assert step[1].of(X[1]).tolist() == [4, 6]
    assert module.Batch[int](X, 1, batch_size=[3]).tag == 1
    for x in (batch, step, named):
        for same in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), dataclasses.replace(x, x=X)):
            assert (type(same), same.x.tolist()) == (type(x), X.tolist())
    run = torch.compile(lambda x: (x + 1).replace(tag="c"), backend="eager", fullgraph=True)
    assert (type(run(named)), run(named).tag, run(named).x[0].tolist()) == (module.Named, "c", [1, 2])


ALIASES = """
type Value = Tensor
type Maybe[T] = T | None
type Name = str
type Later = Ghost

class Inner(tdc.TensorClass):
    x: Value

type In = Inner

class Outer(tdc.TensorClass):
    x: Value
    inner: In
    name: Name
    late: Later = 1
    y: Maybe[Value] = None
    other: In | None = None
"""


@PARAMETERS
@pytest.mark.parametrize("begin", [TEXTS, ""], ids=["texts", "python"])
def test_aliases(load: Load, begin: str):
    module = load(begin + ALIASES)
    assert kinds(module.Outer) == {
        "x": ("tensor", False), "inner": ("node", False), "name": ("static", False), "late": ("any", False),
        "y": ("tensor", True), "other": ("node", True),
    }  # fmt: skip
    outer = module.Outer(X, {"x": X}, "a", batch_size=[3])
    assert (type(outer.inner), outer.y, outer.other) == (module.Inner, None, None)


def test_what_an_alias_means():
    """The aliases of typing_extensions are those of Python 3.12, on all versions."""
    T, U = typing_extensions.TypeVar("T"), typing_extensions.TypeVar("U")
    alias: Any = typing_extensions.TypeAliasType
    value, itself = alias("value", Tensor), alias("itself", T, type_params=(T,))
    maybe, turned = alias("maybe", T | None, type_params=(T,)), alias("turned", dict[U, T], type_params=(T, U))
    ignored, of_alias = alias("ignored", int, type_params=(T,)), alias("of_alias", maybe[T], type_params=(T,))
    means = {
        value: Tensor, value | None: Tensor | None, itself[int]: int, maybe[value]: Tensor | None,
        turned[int, str]: dict[str, int], ignored[str]: int, of_alias[int]: int | None, maybe: T | None,
        int: int, "text": "text", None: None, list[int]: list[int],
    }  # fmt: skip
    assert {note: meant(note) for note in means} == means


# -- records and functions


@pytest.mark.parametrize("begin", [TEXTS, pytest.param("", marks=LATE)], ids=["texts", "late"])
def test_a_record_with_a_name_that_is_not_there(load: Load, begin: str):
    """Found by reading: the name hid the classes of all other fields, which became TensorDicts."""
    text = (
        "@dataclasses.dataclass\nclass A:\n    x: Tensor\n\n@dataclasses.dataclass\nclass B:\n    a: A\n    n: Ghost\n"
    )
    module = load(begin + text)
    found = tdc.interop.to_dataclass(tdc.TensorDict({"a": {"x": X}, "n": X}, [3]), module.B)
    assert (type(found.a), found.a.x.tolist()) == (module.A, X.tolist())
    assert hints(module.B) == {"a": module.A, "n": "Ghost"}


@pytest.mark.parametrize("begin", [TEXTS, pytest.param("", marks=LATE)], ids=["texts", "late"])
def test_a_function_with_a_name_that_is_not_there(load: Load, begin: str):
    """Found on Python 3.14: its signature raised a NameError, where only the names of its parameters were asked for."""
    text = "def f(x: Ghost, n: int = 2) -> Ghost:\n    y: Ghost = x * n\n    return y\n\n"
    module = load(begin + text)
    assert list(python_signature(module.f).parameters) == ["x", "n"]
    assert_batched_equal(tdc.batch(module.f, source=text), [torch.ones(2), torch.zeros(2)], backends=())
    assert count_of_arguments(module.f) == (1, 2)
