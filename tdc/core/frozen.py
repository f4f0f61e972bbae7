"""The frozen base that all containers share.

Invariant: an instance of a `Frozen` class never changes after construction. Fields are private slots, written once by
plain assignment where the instance is built; every public name is a property or a method, and assigning one is an error
that says what to do instead. Pickling and copying restore the slots without running a constructor.
"""

from __future__ import annotations

from operator import index
from typing import Any, ClassVar, TypeVar

import torch

from tdc.core.dynamo import trace_as
from tdc.core.errors import ImmutableError, message
from tdc.core.typing import Op

T = TypeVar("T")
untyped: Any = torch  # the stub of `add_safe_globals` leaves types open


class Frozen:
    """Base of classes whose private slots are written once, where an instance is built."""

    __slots__ = ()
    _title = ""  # what messages call the class, where `tdc` does not have it by its name
    _constants: ClassVar[dict[str, Op]] = {}  # properties that are dims, and what Dynamo traces instead of each
    _settings: ClassVar[dict[str, str]] = {}  # for some names, what to write instead of assigning
    _instead = "build a changed copy: a method that returns a new object, or the constructor"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, traced in vars(cls).get("_constants", {}).items():
            trace_as(vars(cls)[name].fget, traced)
        untyped.serialization.add_safe_globals([cls, restore])  # torch.load(weights_only=True) and torch.export.load
        for name, value in list(vars(cls).items()):
            if isinstance(value, property) and value.fset is None:
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


def constant_of(slot: str) -> Op:
    """Replace in graphs a property that reads a dim, or a tuple of dims, from a slot, by a constant.

    A symbol, as an int may be otherwise, Dynamo takes for any object in `1 in dims`, and the graph is wrong
    (2.11-2.13).
    """

    def read(self: Any) -> int | tuple[int, ...]:
        dims: Any = getattr(self, slot)
        entries: Any = dims
        return tuple([index(d) for d in entries]) if isinstance(dims, tuple) else index(entries)

    return read


def read_only(name: str, prop: property) -> property:
    """A property whose assignment and deletion raise the three-line error."""

    def refuse(self: Any, value: Any) -> None:
        raise immutable(self, f"`x.{name} = {type(value).__name__}`", self._settings.get(name, ""))

    def refuse_deletion(self: Any) -> None:
        raise immutable(self, f"`del x.{name}`")

    return property(prop.fget, refuse, refuse_deletion, prop.__doc__)


def immutable(x: Frozen, got: str, hint: str = "") -> ImmutableError:
    """The error for an attempt to change `x` in place; its class says what to do instead."""
    expected = "no change in place, instances are immutable"
    return ImmutableError(message(x._title or type(x).__name__, expected, got, hint=hint or x._instead))


def fields(cls: type) -> tuple[str, ...]:
    """Names of the data slots of a frozen class, base classes first."""
    slots = (name for base in reversed(cls.__mro__) for name in base.__dict__.get("__slots__", ()))
    return tuple(name for name in slots if name != "__weakref__")


def restore(cls: type[T], state: dict[str, Any]) -> T:
    """An instance with the given slots; what unpickling and `copy.deepcopy` call."""
    self = object.__new__(cls)
    for name, value in state.items():
        object.__setattr__(self, name, value)
    return self
