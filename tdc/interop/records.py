"""Records as TensorDicts and back: dicts, dataclasses, named tuples, structured numpy arrays.

    as_tensordict(obj, batch_dims=1)        whatever has fields
    td.to_dict()                            nested dicts
    to_dataclass(td, Step)                  and as `to_namedtuple` and `to_struct_array`

A field that is an array becomes a leaf, a nested record or mapping an inner node, and any other Python object a Static
value, as in a tensorclass; so the way back gives an equal record.

Invariants:
  - tensors pass as they are, nothing is copied; functions are traceable where their docstrings say nothing else;
  - batch sizes are given, or asked for by `batch_dims=`; none is ever guessed in silence.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import torch

from tdc.core.annotations import hints, meant
from tdc.core.arguments import expect, expect_number
from tdc.core.container import Container, shape_of
from tdc.core.dynamo import constant
from tdc.core.errors import DtypeError, KeyPathError, ShapeError, describe, message, refuse_wrong, show_sizes
from tdc.core.keys import show
from tdc.core.typing import OpName
from tdc.interop.arrays import columns, is_struct_array
from tdc.interop.pytrees import as_entry
from tdc.ragged.storage import BATCHES
from tdc.tensordict.mapping import Keyed
from tdc.tensordict.shared import without_shared
from tdc.tensordict.storage import common, is_tensordict
from tdc.tensordict.tensordict import TensorDict

T = TypeVar("T")
CLASSES: dict[tuple[str, ...], Any] = {}  # named tuples of `to_namedtuple`, by their fields


def infer_batch_size(tree: Any, max_dims: int | None = None) -> torch.Size:
    """The longest sizes that all leaves begin with.

    The sizes of features may agree by chance, so this is a question to ask and never a default. Of a ragged leaf only
    the batch counts; of no leaves at all the answer is `[]`.

    Args:
        tree: mapping, TensorDict, or any record that `as_tensordict` takes.
        max_dims: at most so many dims.

    Raises:
        ShapeError: a negative `max_dims`.
        DtypeError: something else than a tree of leaves.

    Compile:
        Traceable; the sizes are compared, which specialises those that differ by chance.

    Example:
        >>> infer_batch_size({"x": torch.zeros(3, 4, 5), "y": {"z": torch.zeros(3, 4)}})
        torch.Size([3, 4])
    """
    if max_dims is not None:
        expect_number("interop.infer_batch_size", max_dims, whole=True)
    if max_dims is not None and max_dims < 0:
        got = f"{max_dims}"
        raise ShapeError(message("interop.infer_batch_size", "max_dims of at least 0", got, hint="leave it out"))
    sizes = [batch_of(x) for x in without_shared(as_tensordict(tree)._leaves).values()]
    size = sizes[0] if sizes else torch.Size()
    for other in sizes[1:]:
        size = common(size, other)
    return torch.Size(size[:max_dims])


def as_tensordict(obj: Any, batch_size: Any = None, *, batch_dims: int | None = None, device: Any = None) -> TensorDict:
    """A TensorDict of a dict, a dataclass, a named tuple, or a structured numpy array, nested in one another or not.

    In a mapping numbers and lists become tensors, as in the constructor of TensorDict. In a dataclass or a named tuple
    arrays become leaves and any other value becomes a Static value.

    Args:
        obj: a TensorDict is returned as it is, where nothing else is asked for.
        batch_size: the shared leading sizes. By default those of a TensorDict or a structured array, `()` of others.
        batch_dims: how many leading dims are the batch; their sizes are read from the leaves.
        device: where given, every leaf is moved there.

    Raises:
        DtypeError: something else; its spelling is named.
        ShapeError: both `batch_size` and `batch_dims`, or leaves that do not agree in the batch; every one is named.

    Compile:
        Traceable, but for numpy arrays.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Point:
        ...     xy: torch.Tensor
        ...     name: str = "here"
        >>> td = as_tensordict({"a": Point(torch.zeros(3, 2)), "y": [1, 2, 3]}, batch_dims=1)
        >>> td.batch_size, td["a", "xy"].shape, td["a", "name"]
        (torch.Size([3]), torch.Size([3, 2]), 'here')
        >>> as_tensordict(torch.max(torch.tensor([[3.0, 1.0], [2.0, 4.0]]), dim=1))["indices"]
        tensor([0, 1])
    """
    if batch_size is not None and batch_dims is not None:
        hint = "batch_size=[3] says the sizes, batch_dims=1 how many to read from the leaves"
        raise ShapeError(message("as_tensordict", "one of batch_size and batch_dims", "both", hint=hint))
    if is_tensordict(obj) and batch_size is None and batch_dims is None and device is None:
        return obj
    if not is_tensordict(obj) and not has_fields(obj):
        cure = "TensorDict({'key': value}), or tdc.interop.from_pytree for lists and tuples"
        hint = "pass an instance of it" if isinstance(obj, type) else cure
        raise DtypeError(message("as_tensordict", "a mapping or a record", describe(obj), hint=hint))
    source = obj if is_tensordict(obj) else entries(obj)
    if batch_dims is not None:
        expect_number("as_tensordict", batch_dims, whole=True)
        source = TensorDict(source, (), device=device)
        size = shared_size(source, batch_dims)
    elif batch_size is None:  # mappings and records have none of their own
        size = () if isinstance(obj, Mapping) or is_record(obj) else shape_of(obj)
    else:
        size = batch_size
    return TensorDict(source, size, device=device)


def to_dataclass(td: TensorDict, cls: type[T]) -> T:
    """An instance of a dataclass, its fields read from the keys of `td`; the way back from `as_tensordict`.

    A field annotated as a dataclass or a named tuple takes an inner node as that, one annotated as a dict as dicts.

    Raises:
        DtypeError: `cls` is no dataclass.
        KeyPathError: keys that are no fields, or fields without a default and without a key; all are named.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Step:
        ...     obs: torch.Tensor
        ...     name: str = "walk"
        >>> to_dataclass(as_tensordict(Step(torch.zeros(3, 2)), [3])[0], Step)
        Step(obs=tensor([0., 0.]), name='walk')
    """
    expect("interop.to_dataclass", td, TensorDict)
    if not isinstance(cls, type) or not is_dataclass(cls):
        hint = "the class itself, e.g. tdc.interop.to_dataclass(td, Step); for a tensorclass Step.from_tensordict(td)"
        raise DtypeError(message("interop.to_dataclass", "a dataclass", describe(cls), hint=hint))
    return record("interop.to_dataclass", td, cls)


def to_namedtuple(td: TensorDict, cls: Any = None) -> Any:
    """A named tuple of the entries of `td`.

    Args:
        cls: its class; the keys of `td` are its fields. None makes one of the keys in their order, the same one for the
            same keys, and makes named tuples of inner nodes, too.

    Raises:
        DtypeError: `cls` is no class of named tuples.
        KeyPathError: keys that are no fields, or fields without a key; without `cls` keys that cannot name a field.

    Compile:
        Traceable where `cls` is given.

    Example:
        >>> to_namedtuple(TensorDict({"x": torch.zeros(2), "meta": {"id": torch.ones(2)}}, [2]))
        Fields(x=tensor([0., 0.]), meta=Fields(id=tensor([1., 1.])))
    """
    expect("interop.to_namedtuple", td, TensorDict)
    if cls is None:
        inner = [(k, to_namedtuple(v) if is_tensordict(v) else v) for k, v in Keyed.items(td)]
        return fields_class(tuple([k for k, _ in inner]))(*[v for _, v in inner])
    if not (isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")):
        hint = "a class made by typing.NamedTuple, or None"
        raise DtypeError(message("interop.to_namedtuple", "a class of named tuples", describe(cls), hint=hint))
    return record("interop.to_namedtuple", td, cls)


# -- helpers


def is_dataclass(x: Any) -> bool:
    """True if a value is an instance of a dataclass, or a class is one; a tensorclass is a TensorDict already."""
    return hasattr(x, "__dataclass_fields__") and not issubclass(x if isinstance(x, type) else type(x), Container)


def is_record(x: Any) -> bool:
    """True if a value has fields that become entries: a dataclass, a named tuple, or one of torch's (`torch.max`)."""
    if isinstance(x, tuple):
        return hasattr(x, "_fields") or hasattr(x, "n_sequence_fields")
    return is_dataclass(x) and not isinstance(x, type)


def has_fields(x: Any) -> bool:
    """True if a value is a mapping, a record, or a structured array."""
    return isinstance(x, Mapping) or is_record(x) or is_struct_array(x)


def entries(obj: Any) -> dict[Any, Any]:
    """A mapping, a record or a structured array as a dict of entries, and so whatever has fields in it."""
    if isinstance(obj, Mapping):
        return {k: entries(v) if is_nested(v) else v for k, v in obj.items()}
    if not is_record(obj):
        return columns(obj)
    names = field_names(obj)
    values = obj if isinstance(obj, tuple) else [getattr(obj, n) for n in names]
    return {k: entries(v) if is_nested(v) else as_entry(v) for k, v in zip(names, values, strict=True)}


def is_nested(value: Any) -> bool:
    """True if an entry has fields of its own."""
    return not isinstance(value, (torch.Tensor, Container)) and has_fields(value)


def field_names(x: Any) -> tuple[str, ...]:
    """Names of the fields of a record, or of a class of records."""
    if is_dataclass(x):
        return tuple([f.name for f in fields(x)])
    if hasattr(x, "_fields"):
        return tuple(x._fields)
    cls = x if isinstance(x, type) else type(x)  # torch.return_types: their fields are descriptors of the C API
    return tuple(cls.__match_args__)  # type: ignore[attr-defined]  # every struct sequence has it


def record(op: OpName, td: TensorDict, cls: type[T]) -> T:
    """An instance of a class of records, of the entries of `td`."""
    rows, keys = plan(cls), Keyed.keys(td)
    names = [name for name, *_ in rows]
    wrong = [f"{k}: no field" for k in keys if k not in names]
    wrong += [f"{name}: missing" for name, required, *_ in rows if required and name not in keys]
    hint = f"fields of {cls.__name__}: {', '.join(names)}; td.select(...) takes some keys"
    refuse_wrong(KeyPathError, op, "a key for each field", wrong, "that differ", hint)
    forms = {name: form for name, _, taken, form in rows if taken}
    return cls(**{k: formed(op, td.get(k), forms[k]) for k in keys if k in forms})


def formed(op: OpName, value: Any, form: Any) -> Any:
    """An inner node in the form that a field asks for; any other value as it is."""
    if form is None or type(value) is not TensorDict:
        return value
    return value.to_dict() if isinstance(form, str) else record(op, value, form)


@constant
def plan(cls: Any) -> tuple[tuple[str, bool, bool, Any], ...]:
    """For each field of a class of records its name, whether it must be given, whether the class takes it (others it
    makes itself), and the form of an inner node there: a class of records, "dict", or None for a TensorDict.

    None of it is compared: Dynamo cannot compare a class that a constant function returned (torch 2.11).
    """
    notes = hints(cls)
    if is_dataclass(cls):
        made = {f.name for f in fields(cls) if not f.init}  # by the class itself
        bare = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
        return tuple([(n, n in bare - made, n not in made, form_of(notes.get(n))) for n in field_names(cls)])
    return tuple([(n, n not in cls._field_defaults, True, form_of(notes.get(n))) for n in cls._fields])


def form_of(note: Any) -> Any:
    """The form in which a field takes an inner node: a class of records, "dict", or None for a TensorDict."""
    note = meant(note)
    for part in get_args(note) if get_origin(note) in (Union, UnionType) else (note,):
        cls = get_origin(part) or part
        if isinstance(cls, type) and (is_dataclass(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))):
            return cls
        if isinstance(cls, type) and issubclass(cls, Mapping):
            return "dict"
    return None


def fields_class(names: tuple[str, ...]) -> Callable[..., tuple[Any, ...]]:
    """The class of named tuples with these fields; one class for the same names, so that their pytrees match."""
    renamed = namedtuple("Fields", names, rename=True)._fields
    wrong = [n for n, r in zip(names, renamed, strict=True) if n != r]
    hint = "td.rename_keys({old: new}) first"
    refuse_wrong(KeyPathError, "interop.to_namedtuple", "keys that can name a field", wrong, "others", hint)
    return CLASSES.setdefault(names, namedtuple("Fields", names))


def batch_of(leaf: Any) -> torch.Size:
    """Sizes of a leaf that may be batch sizes: of a ragged one the number of examples, of any other all."""
    return leaf.batch_size if isinstance(leaf, BATCHES) else leaf.shape


def shared_size(td: TensorDict, dims: int) -> torch.Size:
    """The first `dims` sizes, which all leaves share."""
    op, leaves = "as_tensordict", without_shared(td._leaves)
    sizes = {p: batch_of(x)[:dims] for p, x in leaves.items()}
    full = [z for z in sizes.values() if len(z) == dims]
    first = full[0] if full else None
    if dims < 0 or (not leaves and dims):
        got = f"batch_dims={dims}" if dims < 0 else "no leaf"
        raise ShapeError(message(op, "leaves to read the batch size from", got, hint="batch_size=[...] says it"))
    wrong = {show(p): describe(leaves[p]) for p, z in sizes.items() if z != first}
    if wrong and dims:
        expected = f"leaves of shape {show_sizes([*first, '...'])}" if first else f"leaves with {dims} batch dims"
        hint = "give fewer batch dims, or reshape the leaf"
        raise ShapeError(message(op, expected, f"{len(wrong)} that differ", wrong, hint))
    return first if first is not None else torch.Size()
