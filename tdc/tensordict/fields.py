"""The fields of a tensorclass: what annotations and defaults say, which values fields take, its constructor, and what
dataclasses need.

    x: Tensor                 a leaf
    inner: TensorDict         an inner node
    inner: Batch              an inner node of this tensorclass, made of any mapping with its fields
    name: str                 a static value
    note: Any                 the value decides

`dataclasses.fields`, `asdict` and `replace` take a tensorclass. `replace` calls the constructor with all fields; batch
size and device are `InitVar`s, so that it hands them on, too, though they are no fields.

Invariants:
  - what a field takes does not depend on the values of others;
  - `__dataclass_params__` do not say frozen, though instances never change: Dynamo rebuilds an instance of a frozen
    dataclass from its fields alone (torch 2.11-2.13).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import UnionType
from typing import Any, ClassVar, Union, get_args, get_origin

import torch
from torch import Tensor

from tdc.core.annotations import hints, meant
from tdc.core.arguments import as_own_device
from tdc.core.container import Container
from tdc.core.errors import DtypeError, KeyPathError, StructureError, message, refuse_wrong
from tdc.core.typing import MISSING
from tdc.tensordict.leaf import PROTOCOLS
from tdc.tensordict.nodes import Nodes, Static, check_static
from tdc.tensordict.shared import over
from tdc.tensordict.storage import Leaves, absorb, as_leaf, as_size, check_leaves, is_tensordict, mark_examples
from tdc.tensordict.tensordict import TensorDict

MARKERS: dict[str, Any] = {"ClassVar": ClassVar, "InitVar": dataclasses.InitVar, "KW_ONLY": dataclasses.KW_ONLY}


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One field of a tensorclass.

    Attributes:
        kind: "tensor", "static", "node" (a TensorDict or a tensorclass), or "any", where each value decides.
        optional: whether None may stand in for a tensor or a node: the annotation or the default says so.
        cls: the tensorclass that a node is an instance of; None where the annotation names none.
        default, factory: as of `dataclasses.field`, MISSING where there is none.
    """

    name: str
    kind: str
    optional: bool
    cls: Any = None
    default: Any = MISSING
    factory: Any = MISSING
    kw_only: bool = False

    @property
    def required(self) -> bool:
        return self.default is MISSING and self.factory is MISSING


def is_marker(note: Any, name: str) -> bool:
    """True if an annotation is `ClassVar` or `InitVar`, of any type, or `KW_ONLY`, which makes no field."""
    if isinstance(note, str):
        return note.split("[")[0].split(".")[-1] == name
    return any([x is MARKERS[name] for x in (note, get_origin(note), note.__class__)])


def declared(name: str, note: Any, default: Any, by_name: bool) -> Field:
    """A field from its annotation and default; `by_name` where the default does not say otherwise."""
    note = meant(note)
    stated: Any = default
    if isinstance(default, dataclasses.Field):
        given, factory = [MISSING if x is dataclasses.MISSING else x for x in (stated.default, stated.default_factory)]
        by_name = by_name if default.kw_only is dataclasses.MISSING else default.kw_only
        return Field(name, kind_of(note), allows_none(note, given), class_of(note), given, factory, by_name)
    return Field(name, kind_of(note), allows_none(note, default), class_of(note), default, kw_only=by_name)


def allows_none(note: Any, default: Any) -> bool:
    """True if a field may be None."""
    return default is None or type(None) in get_args(note) or (isinstance(note, str) and "None" in note)


def class_of(note: Any) -> type[TensorDict] | None:
    """The tensorclass that an annotation names, alone or beside None; None for any other."""
    named: list[Any] = [array_of(p) for p in (get_args(note) or (note,)) if p is not type(None)]
    if len(named) != 1 or not isinstance(named[0], type):
        return None
    cls: type[Any] = named[0]
    return cls if issubclass(cls, TensorDict) and getattr(cls, "_typed", None) else None


def kind_of(note: Any) -> str:
    """The kind of a field, by its annotation: `Tensor | None` is a tensor field, a union of Python types static."""
    if isinstance(note, str):
        return "tensor" if note.split(".")[-1] == "Tensor" else "any"
    parts = get_args(note) if get_origin(note) in (Union, UnionType) else (note,)
    kinds = {kind_of_class(p) for p in parts if p is not type(None)}
    return kinds.pop() if len(kinds) == 1 else "any"


def array_of(note: Any) -> Any:
    """The class that an annotation of jaxtyping says the shape of, as `Float[Tensor, "b d"]`; another as it is."""
    return getattr(note, "array_type", note)


def kind_of_class(note: Any) -> str:
    cls = get_origin(note) or array_of(note)
    if not isinstance(cls, type) or cls in (object, Any):  # Any is a class since Python 3.11
        return "any"
    if issubclass(cls, TensorDict):
        return "node"
    return "tensor" if issubclass(cls, (Tensor, Container)) or cls in PROTOCOLS else "static"


def is_record(base: Any) -> bool:
    """Return whether a class is a dataclass and no tensorclass."""
    return dataclasses.is_dataclass(base) and not issubclass(base, TensorDict)  # type: ignore[arg-type]  # a class


def taken_from(name: str, bases: tuple[Any, ...]) -> tuple[str, ...]:
    """Names of the fields that the dataclasses among the bases of a tensorclass have."""
    found = {n: f for base in bases if is_record(base) for n, f in base.__dataclass_fields__.items()}
    check_stored(name, {n: f.type for n, f in found.items()}, found)
    return tuple(dict.fromkeys([f.name for base in bases if is_record(base) for f in dataclasses.fields(base)]))


def fields_of(base: Any) -> dict[str, Field]:
    """The fields that a base contributes, a tensorclass or a dataclass."""
    if not is_record(base) or "__dataclass_fields__" not in vars(base):
        return vars(base).get("_fields", {}) if issubclass(base, TensorDict) else {}
    notes = hints(base)
    return {f.name: declared(f.name, notes.get(f.name, f.type), f, False) for f in dataclasses.fields(base)}


def types_of(base: Any) -> dict[str, Any]:
    """The annotations of the fields that a base contributes."""
    fields: dict[str, Any] = getattr(base, "__dict__", {}).get("__dataclass_fields__", {})
    notes = hints(base) if is_record(base) else {}
    return {n: notes.get(n, f.type) for n, f in fields.items()}


def stored_as(f: Field, value: Any) -> Any:
    """A value as its field stores it: a Static value where the kind of the field, or else of the value, says so."""
    if value is None and f.kind in ("tensor", "node") and not f.optional:
        at, hint = {f.name: "NoneType"}, "annotate it as Tensor | None"
        raise DtypeError(message("tensorclass", "a value for a field that is not optional", "None", at, hint))
    if f.kind == "node" and not is_inner_value(value) and value is not None:
        at, hint = {f.name: type(value).__name__}, "annotate the field as Tensor, or as Any"
        raise DtypeError(message("tensorclass", "a mapping for a field annotated as one", "another value", at, hint))
    if type(value) is Static or (isinstance(value, Tensor) and f.kind != "static"):
        return value
    inner = f.kind != "static" and is_inner_value(value)
    if inner and f.kind == "tensor":
        at, hint = {f.name: type(value).__name__}, "annotate the field as TensorDict, or as Any"
        raise DtypeError(message("tensorclass", "a tensor for a field annotated as one", "an inner node", at, hint))
    if f.kind == "static" or value is None or (f.kind == "any" and not inner and not is_array(value)):
        check_static("tensorclass", value, {f.name: type(value).__name__})
        return Static(value)
    return value


def as_node(f: Field, value: Any, size: Any) -> Any:
    """An inner node as its field stores it: an instance of the class that the annotation names."""
    if f.cls is None or isinstance(value, f.cls) or not is_inner_value(value):
        return value
    return f.cls.from_tensordict(value, batch_size=size)


def is_inner_value(value: Any) -> bool:
    """True if a value becomes an inner node."""
    return not isinstance(value, Tensor) and (is_tensordict(value) or isinstance(value, Mapping))


def is_array(value: Any) -> bool:
    """True if a value is a leaf, where the annotation of its field does not say."""
    return isinstance(value, (Tensor, Container)) or type(value) in PROTOCOLS or hasattr(value, "__array__")


CONSTRUCTOR = (
    ("batch_size", dataclasses.InitVar[Any], dataclasses.field(default=(), kw_only=True)),
    ("device", dataclasses.InitVar[Any], dataclasses.field(default=None, kw_only=True)),
)


def as_dataclass(cls: Any, fields: Iterable[Field], notes: Mapping[str, Any]) -> None:
    """Give a class what the functions of `dataclasses` read: a record of each field, with its annotation."""
    given = list(fields)
    columns: list[Any] = [(f.name, notes.get(f.name, Any), dataclasses.field(kw_only=f.kw_only)) for f in given]
    made: Any = dataclasses.make_dataclass(
        cls.__name__, [*columns, *CONSTRUCTOR], init=False, repr=False, eq=False, match_args=False
    )
    for f in given:
        field = made.__dataclass_fields__[f.name]  # defaults are set here: `make_dataclass` refuses some of them
        field.default = dataclasses.MISSING if f.default is MISSING else f.default
        field.default_factory = dataclasses.MISSING if f.factory is MISSING else f.factory
    cls.__dataclass_fields__ = made.__dataclass_fields__
    cls.__dataclass_params__ = made.__dataclass_params__


def check_stored(name: str, notes: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Check that every field is stored and is an argument of the constructor."""
    wrong = [f"{n}: InitVar" for n, note in notes.items() if is_marker(note, "InitVar")]
    wrong += [f"{n}: init=False" for n, x in defaults.items() if isinstance(x, dataclasses.Field) and not x.init]
    hint = "a classmethod that computes them, or a property"
    refuse_wrong(StructureError, name, "fields that are stored and given", wrong, "others", hint)


# -- construction


def constructor(cls: Any) -> Callable[..., None]:
    """`__init__` of the fields, in order, and `batch_size` and `device` by name.

    Its own names begin with an underscore: a field may have any other, that of a builtin included.
    """
    fields = list(cls._fields.values())
    check_order(cls.__name__, [f for f in fields if not f.kw_only])
    params = {f.name: f.name if f.required else f"{f.name}=_MISSING" for f in fields}
    self = "_self" if "self" in cls._fields else "self"
    head = [self, *[params[f.name] for f in fields if not f.kw_only], "*"]
    head += [*[params[f.name] for f in fields if f.kw_only], "batch_size=()", "device=None"]
    given = ", ".join([f"{name!r}: {name}" for name in params])
    lines = [f"_store({self}, {{{given}}}, _as_size(batch_size), device)"]
    lines += [f"{self}.__post_init__()"] * hasattr(cls, "__post_init__")
    scope: dict[str, Any] = {"_as_size": as_size, "_store": store, "_MISSING": MISSING}
    exec(f"def __init__({', '.join(head)}):\n    " + "\n    ".join(lines), scope)
    scope["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"
    return scope["__init__"]


def check_order(name: str, fields: list[Field]) -> None:
    """Positional fields without a default come before those with one, as in a dataclass."""
    late = [f.name for i, f in enumerate(fields) if f.required and not all([g.required for g in fields[:i]])]
    if late:
        got = f"{', '.join(late)} behind one with a default"
        hint = "give a default, or dataclasses.field(kw_only=True)"
        raise StructureError(message(name, "fields without a default first", got, hint=hint))


def check_names(cls: Any, entries: Iterable[str]) -> None:
    """Check that there is a value for each field that needs one, and none for anything else."""
    wrong = [f"{k}: no field" for k in entries if k not in cls._fields]
    wrong += [f"{k}: missing" for k, f in cls._fields.items() if k not in entries and f.required]
    hint = f"fields: {', '.join(cls._fields)}"
    refuse_wrong(KeyPathError, cls.__name__, "a key for each field", wrong, "that differ", hint)


def store(self: Any, given: dict[str, Any], size: torch.Size, device: Any) -> None:
    """Check and store the values of all fields, given ones or defaults.

    Raises:
        KeyPathError: a field without a default that is not given, as by the constructor of a base.
    """
    target = as_own_device(type(self).__name__, device)
    leaves: Leaves = {}
    nodes: Nodes = dict(self._typed)
    for f in self._fields.values():
        value = given.get(f.name, MISSING)
        if value is MISSING:
            value = f.default if f.factory is MISSING else f.factory()
            if value is MISSING:
                check_names(type(self), {k: v for k, v in given.items() if v is not MISSING})
        if isinstance(value, Tensor) and target is None and f.kind in ("tensor", "any"):
            leaves[f.name] = value
        else:
            put(f, value, leaves, nodes, size, target)
    check_leaves(type(self).__name__, leaves, nodes, size)
    if size:
        mark_examples(leaves)
    self._leaves, self._nodes, self._size, self._device = leaves, nodes, size, target


def put(f: Field, value: Any, leaves: Leaves, nodes: Nodes, size: Any, device: torch.device | None) -> None:
    """Put the value of a field where its kind says. Raises as `stored_as` and `as_node`."""
    path, value = f.name, as_node(f, stored_as(f, value), size)
    if type(value) is Static:
        nodes[path] = value
    elif is_inner_value(value):
        absorb(leaves, nodes, path, value, size, device)
    else:
        leaves[path] = over(as_leaf(value, path, device), size)
