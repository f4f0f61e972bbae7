"""Tables of key paths: what lies above a path, what lies below a node, and runs of neighbouring entries.

    table {"x": ., ("a", "b"): ., ("a", "c"): .}        below(table, "a")      {("a", "b"): ., ("a", "c"): .}
    ancestors(("a", "b", "c"))   ["a", ("a", "b")]      subtable(table, "a")   {"b": ., "c": .}

In a graph a lookup costs a guard for each path it touches. So whatever depends on paths alone is a constant of the
graph, and entries that follow one another are taken as one slice.

Invariant: functions here know paths and tables, not what the entries are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tdc.core.dynamo import constant, traced_for
from tdc.core.keys import parts, path_of
from tdc.core.typing import KeyPath

T = TypeVar("T")


def depth(path: KeyPath) -> int:
    """Number of keys of a path."""
    return 1 if isinstance(path, str) else len(path)


def join(prefix: KeyPath, path: KeyPath) -> KeyPath:
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


def ancestors(path: KeyPath) -> list[Any]:
    """The nodes that a path goes through, outermost first, without the root and itself.

    Example:
        >>> ancestors("a"), ancestors(("a", "b", "c"))
        ([], ['a', ('a', 'b')])
    """
    if isinstance(path, str) or len(path) < 2:
        return []
    return [path[0], *[path[:n] for n in range(2, len(path))]]


def all_ancestors(paths: Iterable[KeyPath]) -> list[Any]:
    """The nodes that some paths go through, each once, outer ones first: `ancestors` of all, without a call for each.

    Example:
        >>> all_ancestors(["x", ("a", "b", "c"), ("a", "d")])
        ['a', ('a', 'b')]
    """
    inner = dict.fromkeys([p[:-1] for p in paths if type(p) is tuple])
    found: dict[Any, None] = dict.fromkeys([p[0] for p in inner])
    for n in range(2, max([len(p) for p in inner], default=0) + 1):
        found |= dict.fromkeys([p[:n] for p in inner if len(p) >= n])
    return list(found)


def within(path: KeyPath, node: KeyPath) -> bool:
    """True if a path is that of a node or below it.

    Example:
        >>> within(("a", "b"), "a"), within("a", "a"), within("ab", "a"), within("a", ())
        (True, True, False, True)
    """
    above = parts(node)
    return path == node or parts(path)[: len(above)] == above


def below(table: Mapping[Any, T], node: KeyPath) -> dict[Any, T]:
    """The entries of a table below a node, without the node itself."""
    if isinstance(node, str):
        return {p: x for p, x in table.items() if p and p[0] == node and type(p) is tuple}
    if not node:
        return {p: x for p, x in table.items() if p != ()}
    n, top = len(node), node[0]
    return {p: x for p, x in table.items() if p and p[0] == top and len(p) > n and p[:n] == node}


def subtable(table: Mapping[KeyPath, T], node: KeyPath) -> dict[Any, T]:
    """The entries of a table below a node, each at its path from the node on."""
    if isinstance(node, str):  # the usual case, in one step
        return {p[1] if len(p) == 2 else p[1:]: x for p, x in table.items() if p and p[0] == node and type(p) is tuple}
    return from_node(below(table, node), node)


@traced_for(subtable)
def subtable_traced(table: Mapping[Any, T], node: KeyPath) -> dict[Any, T]:
    """Traced in place of `subtable`: it does not look at the paths that are elsewhere, and at no path by
    itself where all have one key more than the node."""
    first, count, flat = span(tuple(table), node)
    if first < 0:
        return from_node(below(table, node), node)
    run = slice(first, first + count)
    found, values = list(table)[run], list(table.values())[run]
    if flat:
        return {p: x for p, x in zip([*zip(*found, strict=True)][-1], values, strict=True)}
    return from_node({p: x for p, x in zip(found, values, strict=True)}, node)


def from_node(table: Mapping[Any, T], node: KeyPath) -> dict[Any, T]:
    """Entries that all lie below a node, each at its path from the node on."""
    n = 1 if isinstance(node, str) else len(node)
    return {(p[n] if len(p) == n + 1 else p[n:]): x for p, x in table.items()}


@constant
def span(paths: Sequence[KeyPath], node: KeyPath) -> tuple[int, int, bool]:
    """At which position the paths below a node begin, how many they are, and whether all are its children, which of
    the root is not asked; position -1 where others lie between them."""
    run = list(below(dict.fromkeys(paths), node))
    first, depth = run_position(paths, run), len(parts(node))
    children = depth > 0 and {len(parts(p)) for p in run} == {depth + 1}
    return (first, len(run), children) if first >= 0 else (-1, 0, False)


@constant
def run_position(paths: Sequence[KeyPath], run: Sequence[KeyPath], prefix: KeyPath = ()) -> int:
    """The position among paths where a run of some paths below `prefix` begins; -1 where they are not neighbours."""
    wanted = prefixed(prefix, run)
    first = paths.index(wanted[0]) if wanted and wanted[0] in paths else 0
    return first if [*paths[first : first + len(wanted)]] == wanted else -1


def gathered(table: Mapping[Any, T], paths: Sequence[KeyPath], prefix: KeyPath = ()) -> list[T]:
    """The entries of a table at some paths below `prefix`."""
    first = run_position(list(table), paths, prefix)
    if first < 0:
        return [table[p] for p in prefixed(prefix, paths)]
    return list(table.values())[first : first + len(paths)]


def replaced(
    table: Mapping[Any, T], paths: Sequence[KeyPath], values: Sequence[T], prefix: KeyPath = ()
) -> dict[Any, T]:
    """A table with other entries at some paths below `prefix`."""
    first = run_position(list(table), paths, prefix)
    keys = prefixed(prefix, paths) if first < 0 else list(table)[first : first + len(paths)]
    return {**table, **{p: x for p, x in zip(keys, values, strict=True)}}


@constant
def top_keys(paths: Sequence[KeyPath]) -> tuple[str, ...]:
    """The keys directly below the root, in the order of the paths. In a graph to look up entries, not to hand out.

    Example:
        >>> top_keys(["x", ("a", "b"), ("a", "c"), ()])
        ('x', 'a')
    """
    return tuple(dict.fromkeys([p if isinstance(p, str) else p[0] for p in paths if p != ()]))


@constant
def arrangement(paths: Sequence[KeyPath], wanted: Sequence[KeyPath]) -> str:
    """Comparison of paths with others: "same", the same in another "order", or "other"."""
    return "same" if [*paths] == [*wanted] else "order" if set(paths) == set(wanted) else "other"


def ordered(paths: Iterable[KeyPath]) -> list[Any]:
    """Paths in the order of their keys, nodes before what is below them."""
    return sorted(paths, key=parts)
