"""Inner nodes and static values of a TensorDict: what it knows of a key path that is no leaf.

    int             an inner node: how many batch dims it has beyond those of the root
    Typed           the same, and the tensorclass that the node is an instance of
    Static          no node, but one Python object for the whole TensorDict

The table of these, `{path: entry}`, is passed on as it is from a TensorDict to the results of operations on it. The
root has an entry, at the path `()`, only where it is a tensorclass.

Invariants: entries are hashable, so that the table can go into a pytree context; they hold no tensors and no sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from tdc.core.errors import DtypeError, FormatError, message
from tdc.core.frozen import Frozen
from tdc.core.pytree import lists_of, register_entry, tuples_of
from tdc.core.typing import KeyPath

TYPES: dict[str, type] = {}


class Static(Frozen):
    """One Python object for a whole TensorDict: a name, a setting, a dtype. Not a leaf: no operation touches it.

    It lives in the pytree context, so a compiled function is compiled anew for each value. Reading the key gives the
    object back. For one object per example see `ObjectArray`.

    Args:
        value: hashable, such as an instance of a frozen dataclass. An export holds it as JSON: str, int, float, bool,
            None and tuples of these.

    Raises:
        DtypeError: the value is not hashable, or holds tensors.

    Example:
        >>> import torch
        >>> from tdc.tensordict.tensordict import TensorDict
        >>> td = TensorDict({"x": torch.zeros(2), "split": Static("train")}, [2])
        >>> td["split"], td[0]["split"]
        ('train', 'train')
    """

    __slots__ = ("_value",)
    _value: Any

    def __init__(self, value: Any) -> None:
        check_static("Static", value)
        self._value = value

    @property
    def value(self) -> Any:
        """The object."""
        return self._value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return False
        return type(other._value) is type(self._value) and other._value == self._value

    def __hash__(self) -> int:
        return hash((Static, self._value))

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"Static({self._value!r})"


def check_static(op: str, value: Any, at: Mapping[str, str] | Iterable[str] = ()) -> None:
    """Check that a static value is hashable and holds no tensors, whose hash does not depend on their content."""
    if value is None or isinstance(value, (str, int, float)):
        return
    got, hint = type(value).__name__, "a tuple for a list, ObjectArray for one object per example"
    found = tensor_in(value)
    if found is not None:
        hint = "a tensor is a leaf: leave Static out or give Shared(tensor), or annotate the field as Tensor"
        if found is not value:
            got = f"a {got} that holds a {type(found).__name__}"
            hint = "a tensor is a leaf: give each a key or field of its own, or a TensorDict of them"
        raise DtypeError(message(op, "a Python object", got, at, hint))
    try:
        hash(value)
    except TypeError:
        raise DtypeError(message(op, "a hashable object", got, at, hint)) from None


def tensor_in(value: Any) -> Any:
    """The first tensor or container that a value is, or holds in tuples, lists, sets and fields of dataclasses."""
    if isinstance(value, (torch.Tensor, Frozen)):
        return value
    given: Any = value
    names: Any = getattr(given, "__dataclass_fields__", ()) if not isinstance(value, type) else ()
    members = given if isinstance(value, (tuple, list, frozenset, set)) else [getattr(given, name) for name in names]
    for x in members:
        found = tensor_in(x)
        if found is not None:
            return found
    return None


class Typed(NamedTuple):
    """An inner node, or the root, that is a tensorclass. Its truth value says whether it has extra batch dims."""

    extra: int
    cls: Any

    def __bool__(self) -> bool:
        return self.extra > 0


Entry = int | Typed | Static
Nodes = dict[KeyPath, Entry]


def extra_of(entry: Entry) -> int:
    """Batch dims beyond those of the root."""
    return entry if type(entry) is int else entry.extra if type(entry) is Typed else 0


def with_extra(entry: Entry, extra: int) -> Entry:
    """The same entry with another number of extra batch dims."""
    return extra if type(entry) is int else Typed(extra, entry.cls) if type(entry) is Typed else entry


def any_extra(nodes: Nodes) -> bool:
    """True if some node has more batch dims than the root. Static values are false, so that this is one call in C."""
    return any(nodes.values())


def without_extra(nodes: Nodes) -> Nodes:
    """The same nodes with no more batch dims than the root."""
    return {p: with_extra(n, 0) for p, n in nodes.items()}


def statics(nodes: Mapping[KeyPath, Any]) -> dict[KeyPath, Static]:
    """The static values among the entries."""
    return {p: n for p, n in nodes.items() if type(n) is Static}


def is_inner(entry: Any) -> bool:
    """True for a node, not a static value."""
    return entry is not None and type(entry) is not Static


def name_of(cls: type) -> str:
    """The name a tensorclass goes by in files."""
    return f"{cls.__module__}.{cls.__qualname__}"


def typed_from(data: Any) -> Typed:
    """The entry of a tensorclass from the JSON data of a context."""
    name, extra = data
    if name not in TYPES:
        hint = f"import {name.rpartition('.')[0]} first"
        raise FormatError(message("load", f"the tensorclass {name!r} to be defined", "no such class", hint=hint))
    return Typed(extra, TYPES[name])


register_entry(Static, "static", lambda entry: lists_of(entry.value), lambda data: Static(tuples_of(data)))
register_entry(Typed, "type", lambda entry: [name_of(entry.cls), entry.extra], typed_from)
