"""tensorclass: a TensorDict with declared fields.

    @tdc.tensorclass                                class Batch(tdc.TensorClass):
    class Batch:                                        images: Tensor
        images: Tensor                                  labels: Tensor
        labels: Tensor                                  split: str = "train"
        split: str = "train"

    batch = Batch(images, labels, batch_size=[42])
    batch[batch.labels == 3].images                 indexing, stack, cat, vmap, compile, pickle: still a Batch

An instance is a TensorDict: the same flat storage, the same implementation of every operation. The class adds a
constructor, attributes, methods of its own, and Python values: a field whose annotation is no tensor type is static,
one hashable object for the whole batch. Inside another TensorDict an instance keeps its class.

Both spellings make the same class. In the second, type checkers also see the methods of a TensorDict, and `batch_size=`
of the constructor.

Invariants: instances never change; an instance has exactly its fields, and what lacks one is a TensorDict.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar, dataclass_transform, overload

import torch

from tdc.core.annotations import annotations_in, evaluated
from tdc.core.arguments import expect
from tdc.core.errors import KeyPathError, StructureError, UnsupportedError, message, refuse_wrong
from tdc.core.frozen import read_only
from tdc.core.pytree import MappingKey, register
from tdc.core.typing import MISSING, NestedKey
from tdc.tensordict.fields import (
    Field,
    as_dataclass,
    as_node,
    check_names,
    check_stored,
    constructor,
    declared,
    fields_of,
    is_inner_value,
    is_marker,
    store,
    stored_as,
    taken_from,
    types_of,
)
from tdc.tensordict.mapping import Keyed
from tdc.tensordict.nodes import TYPES, Nodes, Static, Typed, name_of
from tdc.tensordict.sending import send_as_one
from tdc.tensordict.storage import as_size, is_tensordict
from tdc.tensordict.tensordict import TensorDict, build_td, flatten, unflatten

T = TypeVar("T")
torch.serialization.add_safe_globals([build_td, Typed])  # pyright: ignore[reportUnknownMemberType]  # torch's stub; pickles name them
FREE = {  # fields may hide these, which the library never calls (a DataLoader calls pin_memory, if asked to)
    "keys", "values", "items", "filter", "shape", "ndim", "dim", "size", "batch_dims", "depth", "dtype", "is_cpu",
    "is_cuda", "is_meta", "is_empty", "map", "map_iter", "memmap", "pin_memory", "share_memory", "summary",
}  # fmt: skip
MADE_BY_DATACLASS = (  # a tensorclass with a base that is a dataclass has those of a TensorDict
    "__repr__", "__eq__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__", "__setattr__", "__delattr__",
    "__replace__",
)  # fmt: skip


if TYPE_CHECKING:

    class BatchSize:
        """Of `batch_size` for type checkers: the constructor takes any sizes, reading gives a torch.Size."""

        def __get__(self, x: Any, owner: Any) -> torch.Size: ...
        def __set__(self, x: Any, value: Any) -> None: ...


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class Meta(type(Protocol)):  # of a class that may inherit from protocols
    """Makes a class of annotations a tensorclass."""

    __instancecheck__ = type.__instancecheck__  # that of protocols asks for more than a plain class has
    __subclasscheck__ = type.__subclasscheck__

    def __new__(
        mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], *, kw_only: bool = False, **kwargs: Any
    ) -> Meta:
        if TensorDict in bases:  # TensorClass itself, which has no fields
            return super().__new__(mcs, name, bases, {**body, "__slots__": ()}, **kwargs)
        taken_over = taken_from(name, bases)
        notes = {n: note for n, note in annotations_in(body).items() if not is_marker(note, "ClassVar")}
        marks = [i for i, note in enumerate(notes.values()) if is_marker(note, "KW_ONLY")]  # by name behind it
        names = [n for n, note in notes.items() if not is_marker(note, "KW_ONLY")]
        defaults = {n: body.pop(n) for n in names if n in body}
        check_stored(name, notes, defaults)
        like = next((base for base in bases if issubclass(base, TensorClass)), TensorClass)
        kept = {n: getattr(like, n) for n in MADE_BY_DATACLASS if hasattr(like, n)} if taken_over else {}
        try:
            cls: Any = super().__new__(mcs, name, bases, {**kept, **body, "__slots__": ()}, **kwargs)
        except TypeError as error:
            if "lay-out" not in str(error):
                raise
            got, hint = ", ".join([base.__name__ for base in bases]), "leave slots=True out, or declare the fields"
            raise StructureError(message(name, "bases without slots of their own", got, hint=hint)) from None
        by_name = set(names if kw_only else names[marks[0] :] if marks else ())
        prepare(cls, {n: notes[n] for n in names}, defaults, by_name, taken_over)
        return cls

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "__dataclass_params__" and name in vars(cls):
            hint = "leave @dataclass out: a tensorclass is a dataclass"
            raise UnsupportedError(message(cls.__name__, "no @dataclass on a tensorclass", "one", hint=hint))
        super().__setattr__(name, value)


class TensorClass(TensorDict, metaclass=Meta):
    """Base of tensorclasses: inherit from it, or decorate a class with `tensorclass`.

    Shapes:
        every tensor field `(*batch_size, *features)`.

    Args:
        of a constructor: the fields, in order or by name; `batch_size=()` and `device=None` by name. A
        `__post_init__(self)` is called at the end.

    Raises:
        ShapeError: a field does not begin with the batch size; every one is named.
        DtypeError: a tensor field that is given no tensor, a static one that is not hashable.
        KeyPathError: a field name that a method of TensorDict has.

    Compile:
        As a TensorDict; a static field is a constant of the graph.

    Example:
        >>> class Point(TensorClass):
        ...     xy: torch.Tensor
        ...     name: str = "here"
        ...     def radius(self) -> torch.Tensor:
        ...         return self.xy.norm(dim=-1)
        >>> p = Point(torch.ones(3, 2), batch_size=[3])
        >>> p[:2].radius().shape, torch.stack([p, p]).name
        (torch.Size([2]), 'here')

    Source:
        RFC torch.dict.TensorDict, "@tensorclass".
    """

    _instead = "x = x.replace(field=value), which returns a new one"
    _fields: ClassVar[dict[str, Field]] = {}
    _typed: ClassVar[Nodes] = {}
    _constructor: ClassVar[Any] = None

    if TYPE_CHECKING:  # parameters of every constructor
        batch_size: BatchSize = dataclasses.field(  # pyright: ignore[reportIncompatibleMethodOverride]  # reads alike
            default=BatchSize(), kw_only=True
        )
        device: Any = dataclasses.field(default=None, kw_only=True)

    def __init__(self, /, *, batch_size: Any = (), device: Any = None, **fields: Any) -> None:
        """Called by a constructor of your own: `super().__init__(x=2 * x, batch_size=batch_size)`."""
        check_names(type(self), fields)
        store(self, fields, as_size(batch_size), device)

    if not TYPE_CHECKING:  # to a type checker a class without type parameters takes none

        def __class_getitem__(cls, item: Any) -> Any:
            parametrized = getattr(super(), "__class_getitem__", None)  # that of `Generic`
            if parametrized is None or isinstance(item, str):
                got = f"{cls.__name__}[{item!r}]"
                hint = "leave it out; a tensorclass is frozen, and takes what annotations say"
                raise UnsupportedError(message(cls.__name__, "no setting in brackets", got, hint=hint))
            return parametrized(item)

    @classmethod
    def from_tensordict(cls, td: Mapping[str, Any] | TensorDict, *, batch_size: Any = ()) -> Self:
        """An instance of the entries of a TensorDict, whose keys are the fields.

        Args:
            td: or a plain mapping.
            batch_size: that of a plain mapping; a TensorDict has its own.

        Raises:
            KeyPathError: keys that are no fields, or required fields without a key; all are named.
        """
        entries = dict(Keyed.items(td)) if isinstance(td, TensorDict) else dict(td)
        check_names(cls, entries)
        whole = isinstance(td, TensorDict)
        self = object.__new__(cls)  # its own `__init__` may have other parameters
        store(self, entries, td._size if whole else as_size(batch_size), td._device if whole else None)
        begin: Any = getattr(cls, "__post_init__", None)  # of the user's class
        if begin is not None:
            begin(self)
        return self

    def to_tensordict(self) -> TensorDict:
        """A plain TensorDict of the fields."""
        return TensorDict(self, self._size, device=self._device)

    def _entry(self, key: NestedKey, value: Any) -> Any:
        return as_entry(self, key, value)

    def set(self, key: NestedKey, value: Any) -> Any:
        """With another value of a field; any other key makes a TensorDict of it."""
        known = isinstance(key, str) and key in self._fields
        return with_fields(self, {key: value}) if known else super().set(key, value)

    def update(self, other: Any, *, keys: Iterable[NestedKey] | None = None) -> Any:
        """With other values of fields, inner nodes merged; any other key makes a TensorDict of it."""
        if not is_tensordict(other):
            expect("update", other, Mapping)
            other = {k: as_entry(self, k, v) for k, v in other.items()}
        unset = [p for p, n in self._nodes.items() if isinstance(p, str) and type(n) is Static]
        nodes = {k: other.get(k) for k in unset if k in other and is_inner_value(other.get(k))}  # in place of None
        base: Any = with_fields(self, nodes) if nodes else self
        return Keyed.update(base, other, keys=keys)

    def replace(self, /, **entries: Any) -> Self:
        """With other values of fields.

        Raises:
            KeyPathError: a name that is no field.
        """
        wrong = [f"{k}: no field" for k in entries if k not in self._fields]
        hint = f"fields: {', '.join(self._fields)}"
        refuse_wrong(KeyPathError, "replace", "names of fields", wrong, "others", hint)
        return with_fields(self, entries)

    __replace__ = replace

    def __reduce__(self) -> tuple[Any, ...]:
        return build_td, (self._leaves, self._nodes, self._size, self._device)

@overload
@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def tensorclass(cls: type[T], /) -> type[T]: ...  # to a type checker it is the class it was
@overload
@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def tensorclass(*, kw_only: bool = False) -> Callable[[type[T]], type[T]]: ...
def tensorclass(cls: Any = None, /, *, kw_only: bool = False, **settings: Any) -> Any:
    """Make a class of annotated fields a tensorclass; see `TensorClass`.

    Args:
        kw_only: the constructor takes fields by name only.

    Raises:
        DtypeError: no class.
        UnsupportedError: another setting, of a dataclass or of tensordict.

    Example:
        >>> @tensorclass
        ... class Step:
        ...     obs: torch.Tensor
        ...     reward: torch.Tensor
        >>> step = Step(torch.zeros(4, 3), torch.ones(4), batch_size=[4])
        >>> (step + 1).reward.sum(), step.replace(reward=torch.zeros(4))[0].reward
        (tensor(8.), tensor(0.))
    """
    if settings:
        got, hint = ", ".join(settings), "leave it out; a tensorclass is frozen, and takes what annotations say"
        raise UnsupportedError(message("tensorclass", "no setting but kw_only", got, hint=hint))
    if cls is None:
        return partial(tensorclass, kw_only=kw_only)
    expect("tensorclass", cls, type)
    if issubclass(cls, TensorClass):  # it inherits from one, and so is one already
        if kw_only:
            got, hint = f"one in front of {cls.__name__}", f"class {cls.__name__}(Base, kw_only=True), undecorated"
            raise UnsupportedError(message("tensorclass", "kw_only where the class is made", got, hint=hint))
        return cls
    if "__dataclass_fields__" in vars(cls):  # decorated already, with methods that a tensorclass has of its own
        bases, body = (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__}
    else:
        bases = tuple([b for b in cls.__bases__ if b is not object])
        body = {k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")}
    body["__qualname__"] = cls.__qualname__  # by which pickle finds a class inside another
    made = Meta(cls.__name__, (*bases, TensorClass), body, kw_only=kw_only)
    for member in body.values():
        rebind_super(member, made)
    return made


# -- making a class


def rebind_super(member: Any, cls: Any) -> None:
    """Let `super()` and `__class__` in a method mean another class than the one that it was written in."""
    fn = inspect.unwrap(getattr(member, "__func__", None) or getattr(member, "fget", None) or member)
    free = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    if "__class__" in free:
        fn.__closure__[free.index("__class__")].cell_contents = cls


def prepare(
    cls: Any, written: dict[str, Any], defaults: dict[str, Any], by_name: set[str], taken_over: tuple[str, ...]
) -> None:  # fmt: skip
    """Give a class its fields, its constructor and an attribute for each field, and register it as a pytree.

    Args:
        written: annotations of its body, which is where `defaults` are from; `taken_over`: fields of dataclasses.
    """
    taken = [n for n in (*taken_over, *written) if n.startswith("_") or (n not in FREE and is_written(n))]
    if taken:
        got, hint = ", ".join(taken), "choose other names for these fields"
        raise KeyPathError(message(cls.__name__, "field names that no method of TensorDict has", got, hint=hint))
    cls._typed = {(): Typed(0, cls)}
    notes = evaluated(cls, written)  # which may name the class itself
    fields = {n: f for base in reversed(cls.__mro__[1:]) for n, f in fields_of(base).items()}
    fields |= {n: declared(n, note, defaults.get(n, MISSING), n in by_name) for n, note in notes.items()}
    cls._fields = fields
    for name in (*taken_over, *written):
        setattr(cls, name, read_only(name, attribute(name)))
    if "__init__" not in vars(cls) and fields and (written or taken_over or not has_own_constructor(cls)):
        cls.__init__ = cls._constructor = constructor(cls)
    if "__match_args__" not in vars(cls):
        cls.__match_args__ = tuple([n for n, f in fields.items() if not f.kw_only])
    types = {n: note for base in reversed(cls.__mro__[1:]) for n, note in types_of(base).items()}
    as_dataclass(cls, fields.values(), {**types, **notes})
    TYPES[name_of(cls)] = cls
    register(cls, flatten, unflatten, lambda context: context[0], name_of(cls), MappingKey)
    send_as_one(cls)


def has_own_constructor(cls: Any) -> bool:
    """True if a class inherits an `__init__` that one of its bases, a tensorclass, has written."""
    owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
    return issubclass(owner, TensorClass) and vars(owner)["__init__"] is not vars(owner).get("_constructor")


def is_written(name: str) -> bool:
    """True of a method or property in the code of a tensorclass; fields may hide those of the rule table."""
    found = [v for base in TensorClass.__mro__[:-1] for n, v in vars(base).items() if n == name]
    return any([isinstance(v, property) or "." in getattr(v, "__qualname__", "") for v in found])


def attribute(name: str) -> property:
    """A property that reads a field by its key."""

    def get(self: TensorClass) -> Any:
        return self._at(name)

    return property(get, doc=f"The field {name!r}.")


# -- changing an instance


def with_fields(x: TensorClass, entries: dict[Any, Any]) -> Any:
    """With other values of fields. An inner node replaces the value before it, and is replaced, without a merge."""
    entries = {k: as_node(x._fields[k], as_entry(x, k, v), x._size) for k, v in entries.items()}
    inner = [k for k, v in entries.items() if is_inner_value(v)]
    out = Keyed.update(x.exclude(*inner) if inner else x, entries)
    return build_td(out._leaves, {**out._nodes, **x._typed}, out._size, out._device) if inner else out


def as_entry(x: TensorClass, key: Any, value: Any) -> Any:
    """A value for a key as the field of that name takes it; for other keys as it is."""
    f = x._fields.get(key) if isinstance(key, str) else None
    return value if f is None else stored_as(f, value)
