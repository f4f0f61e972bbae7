"""Leaves chosen by pattern: a glob on the key with dots, several of them, or a function of key and leaf.

    "encoder.*"                         each key that begins with `encoder.`
    ["*.bias", "norm*"]                 keys that match one of them
    lambda key, leaf: leaf.ndim == 2    leaves for which it is true; keys are str at the top, tuples below

Invariant: globs look at keys alone, so in a graph they cost nothing for each leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from tdc.core.dynamo import constant
from tdc.core.errors import DtypeError, KeyPathError, describe, message
from tdc.core.keys import show
from tdc.core.typing import KeyPath
from tdc.tensordict.leaf import unwrap

Select: TypeAlias = "str | Sequence[str] | Callable[[Any, Any], bool]"
HINT = "'*.bias', ['*.bias', 'norm*'], or lambda key, leaf: leaf.ndim == 2"


def check_select(op: str, select: Any) -> None:
    """Refuse what chooses no leaves, with a DtypeError."""
    given: Any = select
    listed = isinstance(select, (tuple, list)) and len(given) > 0 and all([isinstance(x, str) for x in given])
    if not (isinstance(select, str) or listed or (callable(given) and not isinstance(given, type))):
        expected = "a pattern of keys, several, or a function of key and leaf"
        raise DtypeError(message(op, expected, describe(select), hint=HINT))


def chosen(leaves: Any, select: Select) -> list[bool]:
    """True for each leaf of a table that is chosen, in order."""
    if isinstance(select, str):
        return list(matched(list(leaves), (select,)))
    if callable(select):
        return [bool(select(p, unwrap(x))) for p, x in leaves.items()]
    return list(matched(list(leaves), tuple(select)))


@constant
def matched(paths: Sequence[KeyPath], patterns: Sequence[str]) -> tuple[bool, ...]:
    """True for each path that matches one of the patterns.

    Example:
        >>> matched(["a", ("a", "b"), "c"], ["a.*", "c"])
        (False, True, True)
    """
    return tuple([any([fnmatchcase(show(p), pattern) for pattern in patterns]) for p in paths])


def refuse_unused(op: str, leaves: Any, select: Select, flags: Sequence[bool]) -> None:
    """Refuse a selection that chooses nothing: most often a pattern with a slip."""
    if not any(flags):
        some = ", ".join([repr(show(p)) for p in list(leaves)[:5]]) or "none"
        got = f"none that {select!r} chooses" if not callable(select) else "none that the function chooses"
        raise KeyPathError(message(op, "at least one leaf", got, hint=f"keys are {some}"))
