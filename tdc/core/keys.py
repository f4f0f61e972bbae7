"""Key paths: a NestedKey is a str or a tuple of NestedKeys, and means the path its strings spell from left to right.

Each path has one form: a str at the top, a flat tuple of at least two str below it, and `()` for the root. The empty
str is a key as any other.

Invariants: `unravel_key` is idempotent, pure Python and traceable; it never gives the root.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from tdc.core.errors import KeyPathError, describe, message
from tdc.core.typing import KeyPath, OpName


def is_key(x: Any) -> bool:
    """True for a NestedKey (and not an index): a str, or a non-empty tuple of NestedKeys.

    Example:
        >>> is_key("a"), is_key(("a", ("b",))), is_key((0, "a")), is_key(())
        (True, True, False, False)
    """
    keys: Any = x
    return isinstance(x, str) or (isinstance(x, tuple) and len(keys) > 0 and all([is_key(k) for k in keys]))


def unravel_key(key: Any) -> KeyPath:
    """The path of a NestedKey: a str at the top, a flat tuple of str below it.

    Args:
        key: str, or tuple of NestedKeys of any depth.

    Returns:
        A str, or a tuple of at least two, outermost key first.

    Raises:
        KeyPathError: something in `key` is neither a str nor a tuple, or there is no str at all.

    Example:
        >>> unravel_key("a"), unravel_key(("a",)), unravel_key((("a", "b"), ("c",)))
        ('a', 'a', ('a', 'b', 'c'))
    """
    return as_path(key, "unravel_key")


def as_path(key: Any, op: OpName) -> KeyPath:
    """`unravel_key`, as part of another operation."""
    if isinstance(key, str):
        return key
    keys: Any = key
    if isinstance(key, tuple) and key:
        if len(keys) > 1 and all([isinstance(part, str) for part in keys]):
            return tuple(keys)  # also of a named one
        return path_of(tuple([name for part in keys for name in parts(as_path(part, op))]))
    raise not_a_key(key, op)


def not_a_key(x: Any, op: OpName) -> KeyPathError:
    """The error for an object that is no NestedKey."""
    got, given = describe(x), x
    if isinstance(x, tuple):
        got = "an empty tuple"
    elif isinstance(x, (int, float, slice)) or x is None:
        got = f"{given!r} of type {type(given).__name__}"
    hint = 'spell it like "a" or ("a", "b")'
    return KeyPathError(message(op, "a str or a non-empty tuple of str", got, hint=hint))


def parts(path: KeyPath) -> tuple[str, ...]:
    """The keys of a path, outermost first; none for the root."""
    return (path,) if isinstance(path, str) else path


def path_of(keys: tuple[str, ...]) -> KeyPath:
    """The path of keys, outermost first; the inverse of `parts`."""
    return keys[0] if len(keys) == 1 else keys


def show(path: KeyPath) -> str:
    """Text of a path in messages: its keys joined by dots."""
    return path if isinstance(path, str) else ".".join(path)


def missing_key(op: OpName, path: KeyPath, leaves: Iterable[KeyPath], nodes: Iterable[KeyPath] = ()) -> KeyPathError:
    """The error for a path that is not there, with the nearest existing ones, or the leaf that it goes through.

    Example:
        >>> print(missing_key("get", "tokns", ["tokens", "label"]))
        tdc.get: expected an existing key, got 'tokns'
        hint: nearest keys: 'tokens'
    """
    keys, own = parts(path), [*leaves]
    for n in range(1, len(keys)):
        through = path_of(keys[:n])
        if through in own:
            expected, got = f"a TensorDict at {show(through)!r}, above {show(path)!r}", "a leaf"
            hint = f"td[{', '.join([repr(key) for key in keys[:n]])}] is the leaf"
            return KeyPathError(message(op, expected, got, hint=hint))
    names = {show(p): p for p in [*own, *nodes]}
    near = get_close_matches(show(path), names, n=3, cutoff=0.5) or sorted(names)[:5]
    hint = "nearest keys: " + ", ".join(repr(n) for n in near) if near else "the TensorDict has no keys yet"
    if show(path) in names:  # a nested key, and a key with dots, look the same
        hint = f"td[{', '.join(repr(key) for key in parts(names[show(path)]))}]"
    return KeyPathError(message(op, "an existing key", repr(show(path)), hint=hint))
