"""Key paths: a NestedKey is a str or a tuple of NestedKeys, and means the path its strings spell from left to right.

Each path has one form: a str at the top, a flat tuple of at least two str below it, and `()` for the root. So what
users write is most often the path itself, found by one lookup. The empty str is a key as any other.

Invariants: `unravel_key` is idempotent, pure Python and traceable; it never gives the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from tdc.core.dynamo import constant, trace_as
from tdc.core.errors import KeyPathError, describe, message
from tdc.core.typing import KeyPath, OpName

T = TypeVar("T")


def is_key(x: Any) -> bool:
    """Whether `x` is a NestedKey (and not an index): a str, or a non-empty tuple of NestedKeys.

    Example:
        >>> is_key("a"), is_key(("a", ("b",))), is_key((0, "a")), is_key(())
        (True, True, False, False)
    """
    return isinstance(x, str) or (isinstance(x, tuple) and len(x) > 0 and all([is_key(k) for k in x]))


def unravel_key(key: Any) -> Any:
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
    if isinstance(key, str):
        return key
    if isinstance(key, tuple) and key:
        if len(key) > 1 and all([isinstance(part, str) for part in key]):
            return key if type(key) is tuple else tuple(key)  # not a named one
        return path_of(tuple([name for part in key for name in parts(unravel_key(part))]))
    plain = isinstance(key, (int, float, slice)) or key is None
    other = "an empty tuple" if isinstance(key, tuple) else describe(key)
    got = f"{key!r} of type {type(key).__name__}" if plain else other
    raise KeyPathError(message("key", "a str or a non-empty tuple of str", got, hint='spell it like "a" or ("a", "b")'))


def parts(path: KeyPath) -> tuple[str, ...]:
    """The keys of a path, outermost first; none for the root."""
    return (path,) if isinstance(path, str) else path


def depth(path: KeyPath) -> int:
    """How many keys a path has."""
    return 1 if isinstance(path, str) else len(path)


def path_of(keys: tuple[str, ...]) -> Any:
    """The path of keys, outermost first; the inverse of `parts`."""
    return keys[0] if len(keys) == 1 else keys


def join(prefix: KeyPath, path: KeyPath) -> Any:
    """A path below another.

    Example:
        >>> join((), "a"), join("a", "b"), join("a", ("b", "c")), join("a", ())
        ('a', ('a', 'b'), ('a', 'b', 'c'), 'a')
    """
    return path if prefix == () else path_of(parts(prefix) + parts(path))


def prefixed(prefix: KeyPath, leaves: Iterable[KeyPath]) -> list[Any]:
    """Paths of leaves below another path: `join` of each, without a call for each."""
    head = parts(prefix)
    return [head + (p if type(p) is tuple else (p,)) for p in leaves] if head else list(leaves)


def heads(path: KeyPath) -> list[Any]:
    """The nodes that a path goes through, outermost first, without the root and itself.

    Example:
        >>> heads("a"), heads(("a", "b", "c"))
        ([], ['a', ('a', 'b')])
    """
    if isinstance(path, str) or len(path) < 2:
        return []
    return [path[0], *[path[:n] for n in range(2, len(path))]]


def nodes_above(paths: Iterable[KeyPath]) -> list[Any]:
    """The nodes that some paths go through, each once, outer ones first: `heads` of all, without a call for each.

    Example:
        >>> nodes_above(["x", ("a", "b", "c"), ("a", "d")])
        ['a', ('a', 'b')]
    """
    inner = dict.fromkeys([p[:-1] for p in paths if type(p) is tuple])
    found: dict[Any, None] = dict.fromkeys([p[0] for p in inner])
    for n in range(2, max([len(p) for p in inner], default=0) + 1):
        found |= dict.fromkeys([p[:n] for p in inner if len(p) >= n])
    return list(found)


def within(path: KeyPath, node: KeyPath) -> bool:
    """Whether a path is that of a node or below it.

    Example:
        >>> within(("a", "b"), "a"), within("a", "a"), within("ab", "a"), within("a", ())
        (True, True, False, True)
    """
    above = parts(node)
    return path == node or parts(path)[: len(above)] == above


def below(table: Mapping[Any, T], node: KeyPath) -> dict[Any, T]:
    """The entries of a table of paths below a node, without the node itself."""
    if isinstance(node, str):
        return {p: x for p, x in table.items() if p and p[0] == node and type(p) is tuple}
    if not node:
        return {p: x for p, x in table.items() if p != ()}
    n, top = len(node), node[0]
    return {p: x for p, x in table.items() if p and p[0] == top and len(p) > n and p[:n] == node}


def inside(table: Mapping[Any, T], node: KeyPath) -> dict[Any, T]:
    """The entries of a table of paths below a node, by their paths from the node on."""
    if isinstance(node, str):  # the usual case, in one step
        return {p[1] if len(p) == 2 else p[1:]: x for p, x in table.items() if p and p[0] == node and type(p) is tuple}
    n = depth(node)
    return {(p[n] if len(p) == n + 1 else p[n:]): x for p, x in below(table, node).items()}


def inside_traced(table: Mapping[Any, T], node: KeyPath) -> dict[Any, T]:
    """What Dynamo traces in place of `inside`: nothing for the paths that are elsewhere."""
    first, count = span(tuple(table), node)
    if first < 0:
        found = below(table, node)
        paths, values = list(found), list(found.values())
    else:
        paths, values = list(table)[first : first + count], list(table.values())[first : first + count]
    n = depth(node)
    return {(p[n] if len(p) == n + 1 else p[n:]): x for p, x in zip(paths, values, strict=True)}


trace_as(inside, inside_traced)


@constant
def span(paths: Sequence[KeyPath], node: KeyPath) -> tuple[int, int]:
    """Where the paths below a node begin, and how many they are; (-1, 0) where others lie between them."""
    run = list(below(dict.fromkeys(paths), node))
    first = place_of(paths, run)
    return (first, len(run)) if first >= 0 else (-1, 0)


def gathered(table: Mapping[Any, T], paths: Sequence[KeyPath], prefix: KeyPath = ()) -> list[T]:
    """The entries of a table at some paths below `prefix`; in one step where they follow one another in it."""
    first = place_of(list(table), paths, prefix)
    if first < 0:
        return [table[p] for p in prefixed(prefix, paths)]
    return list(table.values())[first : first + len(paths)]


def replaced(
    table: Mapping[Any, T], paths: Sequence[KeyPath], values: Sequence[T], prefix: KeyPath = ()
) -> dict[Any, T]:
    """A table with other entries at some paths below `prefix`."""
    first = place_of(list(table), paths, prefix)
    keys = prefixed(prefix, paths) if first < 0 else list(table)[first : first + len(paths)]
    return {**table, **{p: x for p, x in zip(keys, values, strict=True)}}


@constant
def place_of(paths: Sequence[KeyPath], run: Sequence[KeyPath], prefix: KeyPath = ()) -> int:
    """Where some paths below `prefix` follow one another among others; -1 where they do not."""
    wanted = prefixed(prefix, run)
    first = paths.index(wanted[0]) if wanted and wanted[0] in paths else 0
    return first if [*paths[first : first + len(wanted)]] == wanted else -1


@constant
def children(paths: Sequence[KeyPath]) -> tuple[str, ...]:
    """The keys directly below the root, in the order of the paths. In a graph to look up entries, not to hand out.

    Example:
        >>> children(["x", ("a", "b"), ("a", "c"), ()])
        ('x', 'a')
    """
    return tuple(dict.fromkeys([p if isinstance(p, str) else p[0] for p in paths if p != ()]))


@constant
def arrangement(paths: Sequence[KeyPath], wanted: Sequence[KeyPath]) -> str:
    """Whether paths are the "same" as others, in another "order", or "other" ones."""
    return "same" if [*paths] == [*wanted] else "order" if set(paths) == set(wanted) else "other"


def ordered(paths: Iterable[KeyPath]) -> list[Any]:
    """Paths in the order of their keys, nodes before what is below them."""
    return sorted(paths, key=parts)


def show(path: KeyPath) -> str:
    """How a path is written in messages: its keys joined by dots."""
    return path if isinstance(path, str) else ".".join(path)


def missing_key(op: OpName, path: KeyPath, present: Iterable[KeyPath]) -> KeyPathError:
    """The error for a path that is not there, with the nearest existing ones.

    Example:
        >>> print(missing_key("get", "tokns", ["tokens", "label"]))
        tdc.get: expected an existing key, got 'tokns'
        hint: nearest keys: 'tokens'
    """
    names = [show(p) for p in present]
    near = get_close_matches(show(path), names, n=3, cutoff=0.5) or sorted(names)[:5]
    hint = "nearest keys: " + ", ".join(repr(n) for n in near) if near else "the TensorDict has no keys yet"
    return KeyPathError(message(op, "an existing key", repr(show(path)), hint=hint))
