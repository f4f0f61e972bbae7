"""Key paths: a NestedKey is a str or a tuple of NestedKeys, and means the path its strings spell from left to right.

Invariants: `unravel_key` is idempotent, pure Python and traceable; a path is never empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from tdc._errors import KeyPathError, message
from tdc._typing import KeyPath, OpName


def is_key(x: Any) -> bool:
    """Whether `x` is a NestedKey (and not an index): a str, or a non-empty tuple of NestedKeys.

    Example:
        >>> is_key("a"), is_key(("a", ("b",))), is_key((0, "a")), is_key(())
        (True, True, False, False)
    """
    return isinstance(x, str) or (isinstance(x, tuple) and len(x) > 0 and all([is_key(k) for k in x]))


def unravel_key(key: Any) -> KeyPath:
    """The path of a NestedKey as a flat tuple of str.

    Args:
        key: str, or tuple of NestedKeys of any depth.

    Returns:
        Tuple of str, outermost key first.

    Raises:
        KeyPathError: something in `key` is neither a str nor a tuple, or there is no str at all.

    Example:
        >>> unravel_key("a"), unravel_key((("a", "b"), ("c",)))
        (('a',), ('a', 'b', 'c'))
    """
    if isinstance(key, str):
        return (key,)
    path: KeyPath = ()
    if isinstance(key, tuple):
        for part in key:
            path = path + ((part,) if isinstance(part, str) else unravel_key(part))
        if path:
            return path
    got = "an empty tuple" if isinstance(key, tuple) else f"{key!r} of type {type(key).__name__}"
    raise KeyPathError(message("key", "a str or a non-empty tuple of str", got, hint='spell it like "a" or ("a", "b")'))


def show(path: KeyPath) -> str:
    """How a path is written in messages: its keys joined by dots."""
    return ".".join(path)


def missing_key(op: OpName, path: KeyPath, present: Iterable[KeyPath]) -> KeyPathError:
    """The error for a path that is not there, with the nearest existing ones.

    Example:
        >>> print(missing_key("get", ("tokns",), [("tokens",), ("label",)]))
        tdc.get: expected an existing key, got 'tokns'
        hint: nearest keys: 'tokens'
    """
    names = [show(p) for p in present]
    near = get_close_matches(show(path), names, n=3, cutoff=0.5) or sorted(names)[:5]
    hint = "nearest keys: " + ", ".join(repr(n) for n in near) if near else "the TensorDict has no keys yet"
    return KeyPathError(message(op, "an existing key", repr(show(path)), hint=hint))
