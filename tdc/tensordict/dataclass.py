"""What the standard library asks of a dataclass: `dataclasses.fields`, `asdict` and `replace` take a tensorclass.

`dataclasses.replace` calls the constructor with all fields. Batch size and device are there as `InitVar`: read from the
old instance and given to the new one, but no fields.

Invariant: `__dataclass_params__` do not say frozen, though instances never change: Dynamo rebuilds an instance of a
frozen dataclass from its fields alone (torch 2.11-2.13).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple, get_origin

from tdc.core.errors import StructureError, message
from tdc.core.typing import MISSING

CONSTRUCTOR = (
    ("batch_size", dataclasses.InitVar[Any], dataclasses.field(default=(), kw_only=True)),
    ("device", dataclasses.InitVar[Any], dataclasses.field(default=None, kw_only=True)),
)


class Declared(NamedTuple):
    """One field as it was declared; MISSING where there is no default or factory."""

    name: str
    note: Any
    default: Any
    factory: Any
    kw_only: bool


def as_dataclass(cls: Any, fields: Iterable[Declared]) -> None:
    """Give a class the records of its fields."""
    rows = list(fields)
    columns: list[Any] = [(r.name, r.note, dataclasses.field(kw_only=r.kw_only)) for r in rows]
    made: Any = dataclasses.make_dataclass(
        cls.__name__, [*columns, *CONSTRUCTOR], init=False, repr=False, eq=False, match_args=False
    )
    for row in rows:
        field = made.__dataclass_fields__[row.name]  # defaults go in here: a dataclass refuses some that we take
        field.default = dataclasses.MISSING if row.default is MISSING else row.default
        field.default_factory = dataclasses.MISSING if row.factory is MISSING else row.factory
    cls.__dataclass_fields__ = made.__dataclass_fields__
    cls.__dataclass_params__ = made.__dataclass_params__


def is_mark(note: Any) -> bool:
    """Whether an annotation is `dataclasses.KW_ONLY`: fields behind it go by name."""
    return note is dataclasses.KW_ONLY or (isinstance(note, str) and note.split(".")[-1] == "KW_ONLY")


def check_stored(name: str, notes: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Every field is stored, and an argument of the constructor.

    Raises:
        StructureError: some are not; all are named.
    """
    wrong = [f"{n}: InitVar" for n, note in notes.items() if is_init_var(note)]
    wrong += [f"{n}: init=False" for n, x in defaults.items() if isinstance(x, dataclasses.Field) and not x.init]
    if wrong:
        got, hint = f"{len(wrong)} others", "a classmethod that computes them, or a property"
        raise StructureError(message(name, "fields that are stored and given", got, wrong, hint))


def is_init_var(note: Any) -> bool:
    if isinstance(note, str):
        return note.split("[")[0].split(".")[-1] == "InitVar"
    return isinstance(note, dataclasses.InitVar) or dataclasses.InitVar in (note, get_origin(note))
