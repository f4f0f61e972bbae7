"""The dictionary side of a TensorDict: reading and writing by key.

Reading is one lookup in flat storage, `{key path: leaf}`. A "write" returns a new object that shares all other leaves.
A tensorclass among the nodes stays one as long as it has exactly its fields; without them it is a plain inner node.

Invariants:
  - nothing here changes a TensorDict or a leaf;
  - keys keep insertion order; sizes are looked at only where a new leaf is checked against the batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from tdc.core.arguments import expect, expect_function, keys_of
from tdc.core.container import Container
from tdc.core.dynamo import constant
from tdc.core.errors import DtypeError, KeyPathError, message
from tdc.core.keys import as_path, missing_key, parts, path_of, show
from tdc.core.typing import MISSING, KeyPath, NestedKey, OpName
from tdc.tensordict.leaf import Leaf, unwrap
from tdc.tensordict.nodes import Nodes, Static, any_extra, is_inner, statics
from tdc.tensordict.paths import all_ancestors, ancestors, below, depth, join, ordered, within
from tdc.tensordict.storage import (
    Leaves,
    absorb,
    check_extra,
    check_leaves,
    is_tensordict,
    make_room,
    node_size,
    put_all,
    put_node,
    remove,
    retype,
    subtree,
)

if TYPE_CHECKING:
    from tdc.tensordict.tensordict import TensorDict

K = TypeVar("K", bound="Keyed")
IsLeaf: TypeAlias = "Callable[[Any], bool] | None"


class Keyed(Container):
    """Base of TensorDict: what reads and writes by key."""

    __slots__ = ()
    _leaves: Leaves
    _nodes: Nodes
    _size: torch.Size
    _device: torch.device | None

    def _with(self, leaves: Leaves, nodes: Nodes, size: Any = None) -> Any:
        """A TensorDict of other leaves and nodes; the nodes say of which class it is."""
        raise NotImplementedError

    # -- reading

    def get(self, key: NestedKey, default: Any = MISSING) -> Any:
        """The leaf or inner node at `key`; where nothing is there `default`, or a KeyPathError without one."""
        path = key if type(key) is str else as_path(key, "get")
        leaf = self._leaves.get(path)
        if leaf is not None:
            return leaf if type(leaf) is Tensor else unwrap(leaf)  # most are: a call less
        return self._at(path) if default is MISSING or path in self._nodes else default

    def _at(self, path: KeyPath) -> Any:
        """The entry at a path.

        Raises:
            KeyPathError: nothing is there; the nearest keys are named.
        """
        if path in self._leaves:
            return unwrap(self._leaves[path])
        entry = self._nodes.get(path)
        if entry is None or path == ():
            raise missing_key("get", path, self._leaves, self._nodes)
        if type(entry) is Static:
            return entry.value
        leaves, nodes, extra = subtree(self._leaves, self._nodes, path)
        return self._with(leaves, nodes, node_size(leaves, self._size, extra))

    def __contains__(self, key: NestedKey) -> bool:
        path = as_path(key, "in")
        return path in self._leaves or path in self._nodes

    def keys(
        self, include_nested: bool = False, leaves_only: bool = False, is_leaf: IsLeaf = None, *, sort: bool = False
    ) -> tuple[Any, ...]:
        """Keys in insertion order: str at the top, tuples below it.

        Args:
            include_nested: also keys inside inner nodes.
            leaves_only: leave inner nodes out.
            is_leaf: takes the class of an entry, True if it is a leaf; by default all but TensorDicts. Keys inside an
                inner node that is a leaf are left out.
            sort: alphabetically.
        """
        if is_leaf is not None or sort:
            return matching_keys(self, include_nested, leaves_only, is_leaf, sort)
        if not self._nodes:
            return tuple(self._leaves)
        if include_nested and leaves_only:
            return (*self._leaves, *statics(self._nodes))
        paths = [*self._leaves, *self._nodes]
        if include_nested:
            found: Iterable[KeyPath] = dict.fromkeys([q for p in paths if p != () for q in (*ancestors(p), p)])
        else:
            found = dict.fromkeys([p[0] if type(p) is tuple else p for p in paths if p != ()])
        return tuple([p for p in found if not (leaves_only and is_inner(self._nodes.get(p)))])

    def values(
        self, include_nested: bool = False, leaves_only: bool = False, is_leaf: IsLeaf = None, *, sort: bool = False
    ) -> tuple[Any, ...]:
        """Values in the order of `keys` with the same arguments."""
        return tuple([self.get(k) for k in Keyed.keys(self, include_nested, leaves_only, is_leaf, sort=sort)])

    def items(
        self, include_nested: bool = False, leaves_only: bool = False, is_leaf: IsLeaf = None, *, sort: bool = False
    ) -> tuple[tuple[Any, Any], ...]:
        """Pairs in the order of `keys` with the same arguments."""
        plain = is_leaf is None and not sort and (not self._nodes or (include_nested and leaves_only))
        if plain and not [x for x in self._leaves.values() if isinstance(x, Leaf)]:  # as they are stored
            return (*self._leaves.items(), *[(p, n.value) for p, n in statics(self._nodes).items()])
        return tuple([(k, self.get(k)) for k in Keyed.keys(self, include_nested, leaves_only, is_leaf, sort=sort)])

    def to_dict(self) -> dict[str, Any]:
        """Nested plain dicts of the leaves and static values."""
        out: dict[str, Any] = {}
        for path in [*self._leaves, *[p for p in self._nodes if p != ()]]:
            inner, keys = out, parts(path)
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
            known = path in self._leaves or type(self._nodes[path]) is Static
            inner.setdefault(keys[-1], self.get(path) if known else {})
        return out

    # -- writing: each returns a new TensorDict

    def set(self, key: NestedKey, value: Any) -> Self:
        """With `value` at `key`, in place of what was there; missing inner nodes are made.

        Raises:
            ShapeError: the value's shape does not begin with the batch size.
            KeyPathError: the path leads through a leaf.
        """
        path = as_path(key, "set")
        return with_entries(self, "set", {path: value}, replacing=path)

    def update(self, other: Mapping[Any, Any] | Keyed, *, keys: Iterable[NestedKey] | None = None) -> Self:
        """With the entries of `other`, key by key; inner nodes are merged, and replace leaves.

        Args:
            keys: only these of `other`.

        Raises:
            ShapeError, KeyPathError: as `set`, for every entry at once.
        """
        if keys is not None:
            other = self._with({}, {}).update(other).select(*keys_of("update", keys))
        return with_entries(self, "update", other)

    def replace(self, **entries: Any) -> Self:
        """`update` with keyword arguments."""
        return self.update(entries)

    __replace__ = replace  # copy.replace, Python 3.13

    def _entry(self, key: NestedKey, value: Any) -> Any:
        """A value as it is stored at a key; a tensorclass makes those of its static fields Static values."""
        return value

    def setdefault(self, key: NestedKey, value: Any) -> Self:
        """`set` where nothing is at `key`; this very object otherwise."""
        return self if key in self else self.set(key, value)

    def delete(self, *keys: NestedKey) -> TensorDict:
        """Without the leaves and inner nodes at `keys`.

        Raises:
            KeyPathError: one of them is not there.
        """
        for key in keys:
            existing_path(self, "delete", key)
        return self.exclude(*keys)

    def pop(self, key: NestedKey, default: Any = MISSING) -> tuple[Any, TensorDict | Self]:
        """The value at `key` and the TensorDict without it; `(default, self)` where it is absent."""
        if default is not MISSING and key not in self:
            return default, self
        return self.get(key), self.delete(key)

    def select(self, *keys: NestedKey, strict: bool = True) -> TensorDict:
        """Only the leaves and inner nodes at `keys`, in their order; absent ones are an error unless `strict=False`."""
        leaves: Leaves = {}
        nodes: Nodes = {(): self._nodes[()]} if () in self._nodes else {}
        for key in keys:
            path: KeyPath = key if type(key) is str else as_path(key, "select")
            leaf = self._leaves.get(path)
            if leaf is not None:
                leaves[path] = leaf
            elif path in self._nodes:
                leaves.update(below(self._leaves, path))
                nodes[path] = self._nodes[path]
                nodes.update(below(self._nodes, path))
            elif strict:
                raise missing_key("select", path, self._leaves, self._nodes)
            else:
                continue
            if type(path) is tuple:
                nodes.update([(head, self._nodes[head]) for head in ancestors(path)])
        return self._with(leaves, retype(leaves, nodes) if nodes else nodes)

    def exclude(self, *keys: NestedKey) -> TensorDict:
        """Everything but the leaves and inner nodes at `keys`."""
        leaves, nodes = self._leaves.copy(), self._nodes
        for key in keys:
            path = key if type(key) is str else as_path(key, "exclude")
            if path in leaves:
                del leaves[path]
            elif path in nodes:
                nodes = nodes.copy() if nodes is self._nodes else nodes
                remove(leaves, nodes, path)
        return self._with(leaves, retype(leaves, nodes) if nodes else nodes)

    def filter(self, fn: Callable[[Any, Any], bool]) -> TensorDict:
        """Only the leaves for which `fn(key, leaf)` is True; inner nodes that become empty go, too."""
        expect_function("filter", fn)
        paths = [p for p, v in self._leaves.items() if fn(p, unwrap(v))]
        return self.select(*paths)

    def split_keys(self, *sets: Iterable[NestedKey]) -> tuple[TensorDict, ...]:
        """One TensorDict for each set of keys, and one of what is left.

        Raises:
            KeyPathError: a key that is not there.

        Example:
            >>> from tdc.tensordict.tensordict import TensorDict
            >>> td = TensorDict({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}, [2])
            >>> [part.keys() for part in td.split_keys(["a"], ["b"])]
            [('a',), ('b',), ('c',)]
        """
        groups = [[existing_path(self, "split_keys", key) for key in keys_of("split_keys", keys)] for keys in sets]
        chosen = [self.select(*paths) for paths in groups]
        return (*chosen, self.exclude(*[path for paths in groups for path in paths]))

    def rename_keys(self, names: Mapping[NestedKey, NestedKey], *, strict: bool = True) -> TensorDict:
        """Leaves and inner nodes under other keys; the order of keys stays.

        Args:
            names: `{old: new}`.
            strict: whether an old key that is not there is an error.

        Raises:
            KeyPathError: an old key that is not there, or a new one that is taken.

        Example:
            >>> from tdc.tensordict.tensordict import TensorDict
            >>> td = TensorDict({"obs": torch.ones(2), "act": torch.ones(2)}, [2])
            >>> td.rename_keys({"obs": ("state", "obs")}).keys(include_nested=True)
            ('state', ('state', 'obs'), 'act')
        """
        expect("rename_keys", names, Mapping, of=" {old: new}")
        moves = {as_path(old, "rename_keys"): as_path(new, "rename_keys") for old, new in names.items()}
        if strict:
            moves = {existing_path(self, "rename_keys", old): new for old, new in moves.items()}
        return relocated(self, "rename_keys", lambda path: renamed(path, moves))

    def flatten_keys(self, separator: str = ".") -> TensorDict | Self:
        """One level of keys, paths joined by `separator`; empty inner nodes go.

        Where nothing is nested this very object comes back, whatever its keys are.

        Raises:
            KeyPathError: keys that `unflatten_keys` would not bring back, since they hold the separator; all are named.
        """
        check_separator("flatten_keys", separator)
        if not self._nodes:
            return self
        fixed = statics(self._nodes)
        leaves: dict[Any, Any] = {p if type(p) is str else separator.join(p): x for p, x in self._leaves.items()}
        wrong = split_elsewhere((*self._leaves, *self._nodes), separator)
        if wrong and any([is_inner(n) for p, n in self._nodes.items() if p != ()]):
            hint = "choose another separator, or td.rename_keys({old: new}) first"
            expected = f"keys that split at {separator!r} as they are joined"
            raise KeyPathError(message("flatten_keys", expected, f"{len(wrong)} others", wrong, hint))
        joined: Nodes = {separator.join(parts(path)): entry for path, entry in fixed.items()}
        if len(leaves.keys() | joined.keys()) < len(self._leaves) + len(fixed):
            got = f"paths that join to one key with separator {separator!r}"
            raise KeyPathError(message("flatten_keys", "different joined keys", got, hint="choose another separator"))
        return self._with(leaves, joined)

    def unflatten_keys(self, separator: str = ".") -> TensorDict | Self:
        """Keys split at `separator` into nested ones; the inverse of `flatten_keys`.

        Raises:
            KeyPathError: one key would be a leaf and an inner node.
        """
        check_separator("unflatten_keys", separator)
        paths = [*self._leaves, *self._nodes]
        if not any([separator in key for p in paths for key in ((p,) if type(p) is str else p)]):
            return self

        def split(path: KeyPath) -> KeyPath:
            return path_of(tuple([key for part in parts(path) for key in part.split(separator)]))

        return relocated(self, "unflatten_keys", split)


def check_separator(op: OpName, separator: Any) -> None:
    """A separator of keys is a str that is not empty."""
    if not isinstance(separator, str) or not separator:
        raise DtypeError(message(op, "a str as separator", f"{separator!r}", hint="separator='.'"))


def matching_keys(td: Keyed, include_nested: bool, leaves_only: bool, is_leaf: IsLeaf, sort: bool) -> tuple[Any, ...]:
    """`keys` with all of its arguments."""
    found = Keyed.keys(td, include_nested, leaves_only and is_leaf is None)
    if is_leaf is not None:
        expect_function("keys", is_leaf)
        closed = [p for p in Keyed.keys(td, True) if is_inner(td._nodes.get(p)) and is_leaf(class_at(td, p))]
        found = tuple([p for p in found if not any([node in closed for node in ancestors(p)])])
        found = tuple([p for p in found if not leaves_only or is_leaf(class_at(td, p))])
    return tuple(ordered(found)) if sort else found


def class_at(td: Keyed, path: KeyPath) -> type[Any]:
    """The class of the entry at a path."""
    return Static if type(td._nodes.get(path)) is Static else td.get(path).__class__


def existing_path(td: Any, op: OpName, key: NestedKey) -> KeyPath:
    """The path of a key that is there."""
    path = key if type(key) is str else as_path(key, op)
    if path not in td._leaves and path not in td._nodes:
        raise missing_key(op, path, td._leaves, td._nodes)
    return path


def with_entries(td: K, op: OpName, other: Any, replacing: KeyPath | None = None) -> K:
    """A TensorDict with the entries of a mapping or of another TensorDict, of which one may replace an inner node."""
    new_leaves: Leaves = {}
    new_nodes: Nodes = {}
    absorb(new_leaves, new_nodes, (), other, td._size, td._device)
    if not (is_tensordict(other) and other._size == td._size):
        check_leaves(op, new_leaves, {}, td._size)
    leaves, nodes = dict(td._leaves), dict(td._nodes)
    if replacing in nodes or (replacing in leaves and replacing in new_nodes):
        remove(leaves, nodes, replacing)
    if op == "update":
        make_room(leaves, nodes, new_nodes, other)
    static = any([type(n) is Static for n in new_nodes.values()])
    if new_leaves.keys() <= leaves.keys() and new_nodes.keys() <= nodes.keys() and not static:
        leaves.update(new_leaves)
    else:
        put_all(leaves, nodes, new_leaves, new_nodes)
        nodes = retype(leaves, nodes)
    if any_extra(nodes):
        check_extra(op, leaves, nodes, len(td._size))
    return td._with(leaves, nodes)


def renamed(path: KeyPath, moves: dict[KeyPath, KeyPath]) -> KeyPath:
    """A path where it, or else the innermost of the nodes above it that moves, has moved to."""
    for start in [path, *reversed(ancestors(path))]:
        if start in moves:
            return join(moves[start], parts(path)[depth(start) :])
    return path


def relocated(td: Keyed, op: OpName, new_path: Callable[[KeyPath], KeyPath]) -> TensorDict:
    """The same leaves and nodes at other paths."""
    fixed = statics(td._nodes)
    old = [*td._leaves, *fixed]
    new = [new_path(path) for path in old]
    nodes: Nodes = dict.fromkeys(all_ancestors(new), 0)
    for path, entry in td._nodes.items():
        if path != () and path not in fixed:
            put_node({}, nodes, new_path(path), entry)
    entries = dict(zip(new, [*td._leaves.values(), *fixed.values()], strict=True))
    if len(entries) < len(new) or any([p in nodes for p in new]):
        raise taken_twice(op, dict(zip(old, new, strict=True)), nodes)
    leaves = {path: entry for path, entry in entries.items() if type(entry) is not Static}
    nodes |= statics(entries)
    if any_extra(nodes):
        check_extra(op, leaves, nodes, len(td._size))
    return td._with(leaves, retype(leaves, nodes))


def taken_twice(op: OpName, moves: dict[KeyPath, KeyPath], nodes: Nodes) -> KeyPathError:
    """The error for leaves that come to one path, or to that of a node; all are named."""
    sources: dict[KeyPath, list[KeyPath]] = {}
    for old, new in moves.items():
        sources.setdefault(new, []).append(old)
    wrong = [f"{show(p)}: {' and '.join([show(q) for q in old])}" for p, old in sources.items() if len(old) > 1]
    wrong += [f"{show(p)}: a leaf and an inner node" for p in sources if p in nodes]
    got, hint = f"{len(wrong)} taken twice", "choose another name, or another separator"
    return KeyPathError(message(op, "different keys", got, wrong, hint))


@constant
def split_elsewhere(paths: tuple[KeyPath, ...], separator: str) -> tuple[str, ...]:
    """Paths that, joined by a separator, split at other places, as a message shows them."""
    return tuple([repr(show(p)) for p in paths if p and separator.join(parts(p)).split(separator) != list(parts(p))])


def any_below(path: KeyPath, paths: Iterable[KeyPath]) -> bool:
    """True if some path is below `path`."""
    return any([p != path and within(p, path) for p in paths])
