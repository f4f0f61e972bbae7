"""Type aliases, and the frozen base that all containers share.

Shape legend used across the library: B batch, L longest row, N packed total, H heads, D features.

Invariant: an instance of a `Frozen` class never changes after construction. Fields are private slots, written once by
plain assignment where the instance is built; every public name is a property or a method, and assigning one is an error
that says what to do instead. (A `__setattr__` that refuses would cost every construction four times as much.) Pickling
and copying restore the slots without running a constructor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch

from tdc._errors import ImmutableError, message

KeyPath: TypeAlias = "str | tuple[str, ...]"
NestedKey: TypeAlias = "str | tuple[NestedKey, ...]"
Op: TypeAlias = Callable[..., Any]
Dims: TypeAlias = "int | tuple[int, ...]"
OpName: TypeAlias = "str | Op"
F = TypeVar("F", bound=Callable[..., Any])
MISSING: Any = object()  # default of an argument for which None means something


def constant(fn: F) -> F:
    """Mark a function of Python constants: a graph runs it once, while it is traced, and holds what it returned.

    As `torch._dynamo.assume_constant_result`, without importing Dynamo. What it does costs no time to trace. For
    decisions, such as places and yes or no, not for keys: `type(x)` of a result is something Dynamo cannot trace.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what Dynamo looks for
    return fn


class Frozen:
    """Base of classes whose private slots are written once, where an instance is built."""

    __slots__ = ()
    _instead = "build a changed copy: a method that returns a new object, or the constructor"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        torch.serialization.add_safe_globals([cls, restore])  # torch.load(weights_only=True) and torch.export.load
        for name, value in list(vars(cls).items()):
            if isinstance(value, property):
                setattr(cls, name, read_only(name, value))

    def __setitem__(self, index: Any, value: Any) -> None:
        raise immutable(self, "`x[...] = value`")

    def __delitem__(self, index: Any) -> None:
        raise immutable(self, "`del x[...]`")

    def __reduce__(self) -> tuple[Any, ...]:
        names = fields(type(self))
        return restore, (type(self), {name: getattr(self, name) for name in names})

    def __copy__(self) -> Frozen:
        return self


def read_only(name: str, prop: property) -> property:
    """A property whose assignment and deletion raise the three-line error."""

    def refuse(self: Any, value: Any) -> None:
        raise immutable(self, f"`x.{name} = {type(value).__name__}`")

    def refuse_deletion(self: Any) -> None:
        raise immutable(self, f"`del x.{name}`")

    return property(prop.fget, refuse, refuse_deletion, prop.__doc__)


def immutable(x: Frozen, got: str) -> ImmutableError:
    """The error for an attempt to change `x` in place; its class says what to do instead."""
    expected = "no change in place, instances are immutable"
    return ImmutableError(message(type(x).__name__, expected, got, hint=x._instead))


def fields(cls: type) -> tuple[str, ...]:
    """Names of the data slots of a frozen class, base classes first."""
    slots = (name for base in reversed(cls.__mro__) for name in base.__dict__.get("__slots__", ()))
    return tuple(name for name in slots if name != "__weakref__")


def restore(cls: type, state: dict[str, Any]) -> Any:
    """An instance with the given slots; what unpickling and `copy.deepcopy` call."""
    self = object.__new__(cls)
    for name, value in state.items():
        object.__setattr__(self, name, value)
    return self
