"""TensorDict: an immutable dictionary of tensors that share their leading (batch) dims.

Storage is flat: one dict from key path to leaf, and one small dict of inner nodes. An operation is one comprehension
over leaves; there is no recursion, and reading a key is one lookup. An inner node may have more batch dims than the
root; it stores how many *extra* ones, relative to the root, so that indexing and vmap of the root keep it right.

    TensorDict({"a": x, "b": {"c": y}}, batch_size=[3])
        leaves   {("a",): x, ("b", "c"): y}
        nodes    {("b",): 0}

Invariants:
  - never changes; a "write" returns a new TensorDict that shares all other leaves;
  - every leaf's shape begins with the batch size of the root, and of each node it lies in;
  - keys keep insertion order; the pytree context is sorted and holds feature ranks, never sizes, so that equal keys
    give equal treedefs and the batch size is read back from the leaves;
  - a path is a leaf, an inner node, or absent; never two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from tdc._errors import DtypeError, ImmutableError, IndexingError, KeyPathError, message
from tdc._keys import is_key, missing_key, unravel_key
from tdc._pytree import register
from tdc._rules import Container
from tdc._tree import (
    Leaves,
    Nodes,
    absorb,
    any_extra,
    batch_index,
    check_extra,
    check_leaves,
    common,
    is_mask,
    mark_rows,
    misfit,
    node_html,
    node_size,
    node_text,
    overwrite,
    put_leaf,
    put_node,
    same_size,
    shape_of,
    subtree,
    together,
    within,
)
from tdc._typing import KeyPath, NestedKey, OpName

MISSING: Any = object()


class Unsized(tuple):  # type: ignore[type-arg]  # Dynamo cannot trace a subclass of a generic alias
    """In place of a batch size where leaves are no tensors (vmap's `in_dims`, specs): the pytree context."""

    def __repr__(self) -> str:
        return "unknown"


@final
class TensorDict(Container):
    """An immutable dictionary of tensors that share their leading dims.

    Shapes:
        every leaf `(*batch_size, *features)`; features differ freely from leaf to leaf.

    Dtypes:
        any, not converted. numpy arrays, numbers and lists become tensors, mappings become inner nodes.

    Args:
        source: mapping of NestedKeys to leaves, mappings or TensorDicts.
        batch_size: the shared leading sizes; always explicit.
        device: where given, every leaf is moved there.

    Raises:
        ShapeError: leaves that do not begin with the batch size; every one is named.
        KeyPathError: a key that is no NestedKey.
        DtypeError: a value that is no tensor and cannot become one.

    Compile:
        Costs nothing over a plain dict in a compiled call. Reading one key does not look at the others.

    Example:
        >>> td = TensorDict({"x": torch.zeros(3, 4), "meta": {"id": torch.arange(3)}}, batch_size=[3])
        >>> td["meta", "id"], td[0]["x"].shape
        (tensor([0, 1, 2]), torch.Size([4]))

    Source:
        RFC torch.dict.TensorDict.
    """

    __slots__ = ("__weakref__", "_device", "_leaves", "_nodes", "_size")
    _kind = "tensordict"
    _rank = 2

    _leaves: Leaves
    _nodes: Nodes
    _size: torch.Size
    _device: torch.device | None

    def __init__(
        self, source: Mapping[Any, Any] | TensorDict | None = None, batch_size: Any = (), *, device: Any = None
    ) -> None:
        size = torch.Size([batch_size]) if isinstance(batch_size, int) else torch.Size(batch_size)
        place = None if device is None else torch.device(device)
        leaves: Leaves = {}
        nodes: Nodes = {}
        if source is not None:
            absorb(leaves, nodes, (), source, len(size), place)
        check_leaves("TensorDict", leaves, nodes, size)
        if size:
            mark_rows(leaves)
        self._leaves = leaves
        self._nodes = nodes
        self._size = size
        self._device = place

    # -- metadata

    @property
    def batch_size(self) -> torch.Size:
        """The sizes that all leaves begin with."""
        return self._size

    @property
    def device(self) -> torch.device | None:
        """Where all leaves are, if that was asked for; None where leaves may be anywhere."""
        return self._device

    @property
    def shape(self) -> torch.Size:
        """The batch size."""
        return self._size

    @property
    def ndim(self) -> int:
        """Number of batch dims."""
        return len(self._size)

    def dim(self) -> int:
        """Number of batch dims."""
        return len(self._size)

    def size(self, dim: int | None = None) -> Any:
        """The batch size, or its entry at `dim`."""
        return self._size if dim is None else self._size[dim]

    def numel(self) -> int:
        """Number of examples: the product of the batch size."""
        return self._size.numel()

    def __len__(self) -> int:
        if not self._size:
            raise DtypeError(
                message("len", "at least one batch dim", "batch_size=[]", hint="len(td.keys()) counts keys")
            )
        return self._size[0]

    def __iter__(self) -> Any:
        return iter([self[i] for i in range(len(self))])

    def __repr__(self) -> str:
        return node_text(self._leaves, self._nodes, self._size, self._device)

    def _repr_html_(self) -> str:
        return node_html(self._leaves, self._nodes, self._size)

    # -- reading

    def __getitem__(self, key: Any) -> Any:
        if type(key) is str:
            leaf = self._leaves.get((key,))
            if leaf is not None:
                return leaf
            key = (key,)
        elif not (type(key) is tuple and key and type(key[0]) is str):
            if not is_key(key):
                return index(self, key)
            key = unravel_key(key)
        leaf = self._leaves.get(key, MISSING)
        return node(self, unravel_key(key)) if leaf is MISSING else leaf

    def get(self, key: NestedKey, default: Any = MISSING) -> Any:
        """The leaf or inner node at `key`; `default` where there is none, a KeyPathError where none is given."""
        path = unravel_key(key)
        leaf = self._leaves.get(path, MISSING)
        if leaf is not MISSING:
            return leaf
        return node(self, path) if default is MISSING or path in self._nodes else default

    def __contains__(self, key: NestedKey) -> bool:
        path = unravel_key(key)
        return path in self._leaves or path in self._nodes

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> tuple[Any, ...]:
        """Keys in insertion order: str at the top, tuples below it.

        Args:
            include_nested: also keys inside inner nodes.
            leaves_only: leave inner nodes out.
        """
        paths: dict[KeyPath, None] = {}
        for path in [*self._leaves, *self._nodes]:
            for depth in range(1, len(path) + 1 if include_nested else 2):
                paths.setdefault(path[:depth], None)
        found = [p for p in paths if not (leaves_only and p in self._nodes)]
        return tuple([p[0] if len(p) == 1 else p for p in found])

    def values(self, include_nested: bool = False, leaves_only: bool = False) -> tuple[Any, ...]:
        """Values in the order of `keys` with the same arguments."""
        return tuple([self[k] for k in self.keys(include_nested, leaves_only)])

    def items(self, include_nested: bool = False, leaves_only: bool = False) -> tuple[tuple[Any, Any], ...]:
        """Pairs in the order of `keys` with the same arguments."""
        return tuple([(k, self[k]) for k in self.keys(include_nested, leaves_only)])

    def to_dict(self) -> dict[str, Any]:
        """Nested plain dicts of the leaves."""
        out: dict[str, Any] = {}
        for path in [*self._leaves, *self._nodes]:
            inner = out
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            inner.setdefault(path[-1], self._leaves.get(path, {}))
        return out

    # -- writing: each returns a new TensorDict

    def set(self, key: NestedKey, value: Any) -> TensorDict:
        """With `value` at `key`; missing inner nodes are made, what stood there is replaced.

        Raises:
            ShapeError: the value's shape does not begin with the batch size.
            KeyPathError: the path leads through a leaf.
        """
        path, leaves, size = (key,) if type(key) is str else unravel_key(key), self._leaves, self._size
        known = path in leaves and self._device is None and isinstance(value, Tensor)
        alone = len(path) == 1 or not any(self._nodes.values())  # no inner node has batch dims to agree with
        if known and alone and value.shape[: len(size)] == size:
            leaves = leaves.copy()
            leaves[path] = value
            return make(leaves, self._nodes, size)
        base = self.exclude(path) if isinstance(value, (Mapping, TensorDict)) else self
        return base.update({path: value})

    def update(self, other: Mapping[Any, Any] | TensorDict) -> TensorDict:
        """With the entries of `other`, key by key; inner nodes are merged.

        Raises:
            ShapeError, KeyPathError: as `set`, for every entry at once.
        """
        if type(other) is dict and self._device is None and not any(self._nodes.values()):
            leaves = self._leaves.copy()
            if overwrite(leaves, self._nodes, self._size, (), other):
                return make(leaves, self._nodes, self._size)
        fresh: Leaves = {}
        inner: Nodes = {}
        absorb(fresh, inner, (), other, len(self._size), self._device)
        if not (isinstance(other, TensorDict) and other.batch_size == self._size):
            check_leaves("update", fresh, {}, self._size)
        leaves, nodes = dict(self._leaves), dict(self._nodes)
        if fresh.keys() <= leaves.keys() and inner.keys() <= nodes.keys():
            leaves.update(fresh)
        else:
            for path, extra in inner.items():
                put_node(leaves, nodes, path, nodes.get(path, extra))
            for path, leaf in fresh.items():
                put_leaf(leaves, nodes, path, leaf)
        if any_extra(nodes):
            check_extra("update", leaves, nodes, len(self._size))
        return make(leaves, nodes, self._size, self._device)

    def replace(self, **entries: Any) -> TensorDict:
        """`update` with keyword arguments."""
        return self.update(entries)

    def delete(self, *keys: NestedKey) -> TensorDict:
        """Without the leaves and inner nodes at `keys`.

        Raises:
            KeyPathError: one of them is not there.
        """
        return self.exclude(*[present(self, "delete", key) for key in keys])

    def pop(self, key: NestedKey, default: Any = MISSING) -> tuple[Any, TensorDict]:
        """The value at `key` and the TensorDict without it; `(default, self)` where it is absent."""
        if default is not MISSING and key not in self:
            return default, self
        return self.get(key), self.delete(key)

    def select(self, *keys: NestedKey, strict: bool = True) -> TensorDict:
        """Only the leaves and inner nodes at `keys`; absent ones are an error unless `strict=False`."""
        paths = [present(self, "select", key) if strict else unravel_key(key) for key in keys]
        leaves = {p: v for p, v in self._leaves.items() if within(p, paths)}
        nodes = {p: n for p, n in self._nodes.items() if within(p, paths) or any([q[: len(p)] == p for q in leaves])}
        return make(leaves, nodes, self._size, self._device)

    def exclude(self, *keys: NestedKey) -> TensorDict:
        """Everything but the leaves and inner nodes at `keys`."""
        paths = [unravel_key(key) for key in keys]
        leaves = {p: v for p, v in self._leaves.items() if not within(p, paths)}
        nodes = {p: n for p, n in self._nodes.items() if not within(p, paths)}
        return make(leaves, nodes, self._size, self._device)

    def flatten_keys(self, separator: str = ".") -> TensorDict:
        """One level of keys, paths joined by `separator`; empty inner nodes go.

        Raises:
            KeyPathError: two paths join to one key.
        """
        if not self._nodes:
            return self
        leaves = {(separator.join(path),): leaf for path, leaf in self._leaves.items()}
        if len(leaves) < len(self._leaves):
            got = f"paths that join to one key with separator {separator!r}"
            raise KeyPathError(message("flatten_keys", "different joined keys", got, hint="choose another separator"))
        return make(leaves, {}, self._size, self._device)

    def unflatten_keys(self, separator: str = ".") -> TensorDict:
        """Keys split at `separator` into nested ones; the inverse of `flatten_keys`.

        Raises:
            KeyPathError: one key would be a leaf and an inner node.
        """
        leaves: Leaves = {}
        nodes: Nodes = {}
        for path, extra in self._nodes.items():
            put_node(leaves, nodes, unravel_key(tuple([tuple(k.split(separator)) for k in path])), extra)
        for path, leaf in self._leaves.items():
            put_leaf(leaves, nodes, unravel_key(tuple([tuple(k.split(separator)) for k in path])), leaf)
        if len(leaves) < len(self._leaves):
            got, hint = "a key that would be both", "choose another separator, or rename it"
            raise KeyPathError(message("unflatten_keys", "keys that are a leaf or an inner node", got, hint=hint))
        return make(leaves, nodes, self._size, self._device)

    def apply(
        self, fn: Callable[..., Any], *others: TensorDict, batch_size: Any = None, device: Any = None
    ) -> TensorDict:
        """`fn` on every leaf, with the leaves of `others` at the same paths. A key whose result is None is dropped.

        Args:
            fn: takes one leaf for each TensorDict and returns a leaf or None.
            others: TensorDicts with the same keys.
            batch_size, device: those of the result, where `fn` changes them.

        Raises:
            StructureError: others with different keys.
            ShapeError: results that do not begin with the batch size.

        Example:
            >>> td = TensorDict({"a": torch.ones(2)}, [2])
            >>> td.apply(lambda x, y: x + y, td)["a"], td.apply(torch.sum, batch_size=[])["a"]
            (tensor([2., 2.]), tensor(2.))
        """
        if others:
            same_size("apply", self, *others)
            leaves = {p: fn(*values) for p, values in together("apply", self, *others)}
        else:
            leaves = {p: fn(v) for p, v in self._leaves.items()}
        if any([v is None for v in leaves.values()]):
            leaves = {p: v for p, v in leaves.items() if v is not None}
        size = self._size if batch_size is None else torch.Size(batch_size)
        nodes = self._nodes if batch_size is None else dict.fromkeys(self._nodes, 0)
        check_leaves("apply", leaves, nodes, size, "pass batch_size= where fn changes it")
        place = torch.device(device) if device is not None else self._device
        return make(leaves, nodes, size, place)

    def to(self, *args: Any, **kwargs: Any) -> TensorDict:
        """`Tensor.to` for every leaf; a TensorDict as argument gives its device."""
        args = tuple([a.device if isinstance(a, TensorDict) else a for a in args])
        places = [a for a in (*args, kwargs.get("device")) if isinstance(a, (str, torch.device, int)) and a is not True]
        place = torch.device(places[0]) if places else self._device
        return make({p: v.to(*args, **kwargs) for p, v in self._leaves.items()}, self._nodes, self._size, place)

    def __setitem__(self, key: Any, value: Any) -> None:
        spelling = f"td = td.set({key!r}, value)" if is_key(key) else "td = td.at[index].set(value)"
        raise ImmutableError(
            message("TensorDict", "no assignment, TensorDicts are immutable", "td[...] = value", hint=spelling)
        )

    def __delitem__(self, key: Any) -> None:
        got, spelling = f"del td[{key!r}]", f"td = td.delete({key!r})"
        raise ImmutableError(message("TensorDict", "no deletion, TensorDicts are immutable", got, hint=spelling))


def make(leaves: Leaves, nodes: Nodes, batch_size: Any, device: torch.device | None = None) -> TensorDict:
    """A TensorDict of checked parts, which it owns from here on: what operations return."""
    td = object.__new__(TensorDict)
    td._leaves = leaves
    td._nodes = nodes
    td._size = batch_size
    td._device = device
    return td


def node(td: TensorDict, path: KeyPath) -> Any:
    """The leaf or inner TensorDict at a path.

    Raises:
        KeyPathError: nothing is there; the nearest keys are named.
    """
    if path in td._leaves:
        return td._leaves[path]
    if path not in td._nodes:
        raise missing_key("get", path, [*td._leaves, *td._nodes])
    leaves, nodes, extra = subtree(td._leaves, td._nodes, path)
    return make(leaves, nodes, node_size(leaves, td._size, extra), td._device)


def present(td: TensorDict, op: OpName, key: NestedKey) -> KeyPath:
    """The path of a key that is there.

    Raises:
        KeyPathError: it is not; the nearest keys are named.
    """
    path = unravel_key(key)
    if path not in td._leaves and path not in td._nodes:
        raise missing_key(op, path, [*td._leaves, *td._nodes])
    return path


def index(td: TensorDict, idx: Any) -> TensorDict:
    """`td[idx]` on the batch dims, with every index torch has.

    The new batch size is read off one leaf: what is left of its result before the feature dims.
    """
    size = td._size
    k = len(size)
    if k == 0 and idx is not None and idx is not Ellipsis and idx != ():
        hint = "index a leaf, td['key'][i], or give the TensorDict a batch size"
        raise IndexingError(message("index", "at least one batch dim", "batch_size=[]", hint=hint))
    if type(idx) is list:
        idx = torch.as_tensor(idx, dtype=None if idx else torch.int64, device=td._device)
    if type(idx) is tuple or is_mask(idx):
        idx = batch_index(idx if type(idx) is tuple else (idx,), size)
    try:
        leaves = {p: x[idx] for p, x in td._leaves.items()}
    except (IndexError, TypeError) as error:
        raise misfit(idx, size, error) from None
    for path, leaf in leaves.items():
        new = leaf.shape[: leaf.ndim - td._leaves[path].ndim + k]
        break
    else:
        new = torch.empty(()).expand(size)[idx].shape
    return make(leaves, td._nodes, new, td._device)


def flatten(td: Any) -> tuple[list[Any], Any]:
    """Leaves in sorted order, and the context: paths, feature ranks, nodes, device; sizes only without leaves."""
    leaves, size = td._leaves, td._size
    if type(size) is Unsized:
        return [leaves[p] for p in size[0]], tuple(size)
    paths, k = tuple(sorted(leaves)), len(size)
    ranks = tuple([len(leaves[p].shape) - k for p in paths])
    device = None if td._device is None else str(td._device)
    return [leaves[p] for p in paths], (
        paths,
        ranks,
        tuple(sorted(td._nodes.items())),
        device,
        None if paths else tuple(size),
    )


def unflatten(children: Sequence[Any], context: Any) -> TensorDict:
    """A TensorDict of any children. The batch size is what all leaves share before their feature dims."""
    paths, ranks, nodes, device, empty = context
    leaves = dict(zip(paths, children, strict=True))
    size: Any = torch.Size(empty) if empty is not None else Unsized(context)
    for leaf, rank in zip(children, ranks, strict=True):
        shape = shape_of(leaf)
        if shape is None:
            size = Unsized(context)
            break
        own = shape[: max(len(shape) - rank, 0)]
        size = own if type(size) is Unsized else common(size, own)
    return make(leaves, dict(nodes), size, None if device is None else torch.device(device))


register(TensorDict, flatten, unflatten, lambda context: context[0])
