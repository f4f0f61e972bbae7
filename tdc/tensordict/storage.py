"""Flat storage of nested keys: one dict of leaves and one of inner nodes, both keyed by path.

    {"a": x, "b": {"c": y, "d": {}}}   ->   leaves {"a": x, ("b", "c"): y},  nodes {"b": 0, ("b", "d"): 0}

A node's entry says how many batch dims it has beyond those of the root, and more; see `nodes`. Functions here build,
check and compare the two dicts and do not know the class that holds them.

Invariants:
  - a path is a leaf, a node, or absent; every proper prefix of a path is a node;
  - a dict that a function returns belongs to the caller; the arguments `leaves` and `nodes` of functions that put,
    remove or absorb are changed, no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from tdc.core.arguments import NUMBERS, as_data
from tdc.core.container import Container
from tdc.core.dynamo import mark_dynamic, traced_for
from tdc.core.errors import (
    DtypeError,
    KeyPathError,
    ShapeError,
    StructureError,
    describe,
    message,
    refuse_wrong,
    show_sizes,
)
from tdc.core.keys import as_path, parts, show
from tdc.core.typing import MISSING, KeyPath, OpName
from tdc.tensordict.leaf import PROTOCOLS, Leaf, wrap_leaf
from tdc.tensordict.nodes import Nodes, Static, Typed, any_extra, extra_of, statics, with_extra
from tdc.tensordict.object_array import ObjectArray
from tdc.tensordict.paths import ancestors, below, join, ordered, prefixed, subtable, top_keys
from tdc.tensordict.shared import over, seated

Leaves = dict[KeyPath, Any]


def remove(leaves: Leaves, nodes: Nodes, path: KeyPath) -> None:
    """Remove a leaf, or a node with all that lies below it."""
    for table in (leaves, nodes):
        table.pop(path, None)
        for p in below(table, path):
            del table[p]


def put_node(leaves: Leaves, nodes: Nodes, path: KeyPath, entry: Any = 0) -> None:
    """Make a path and all its proper prefixes inner nodes, or put a static value at the path."""
    put_ancestors(leaves, nodes, path)
    if type(entry) is Static:
        remove(leaves, nodes, path)
        nodes[path] = entry
    else:
        put_node_at(leaves, nodes, path, entry)


def put_ancestors(leaves: Leaves, nodes: Nodes, path: KeyPath) -> None:
    """Make all proper prefixes of a path inner nodes; most of them are already."""
    for node in ancestors(path):
        if nodes.get(node) != 0:
            put_node_at(leaves, nodes, node, 0)


def put_node_at(leaves: Leaves, nodes: Nodes, path: KeyPath, entry: Any) -> None:
    known = nodes.get(path, 0)
    if path in leaves or type(known) is Static:
        got = f"a leaf at {show(path)!r}"
        raise KeyPathError(message("set", "inner nodes on the way to a key", got, hint=f"delete {show(path)!r} first"))
    top = max(extra_of(entry), extra_of(known))
    nodes[path] = with_extra(known if type(entry) is int else entry, top)


def put_leaf(leaves: Leaves, nodes: Nodes, path: KeyPath, leaf: Any) -> None:
    """Put a leaf at a path, in place of what was there."""
    put_ancestors(leaves, nodes, path)
    if path in nodes:
        remove(leaves, nodes, path)
    leaves[path] = leaf


def make_room(leaves: Leaves, nodes: Nodes, new_nodes: Nodes, source: Any) -> None:
    """Remove leaves and static values where a mapping or TensorDict has an inner node, not one on the way to a key."""
    taken = [p for p in new_nodes if p in leaves or type(nodes.get(p)) is Static]
    if taken:
        for path in set(taken).intersection(given_nodes(source)):
            remove(leaves, nodes, path)


def given_nodes(source: Any, prefix: KeyPath = ()) -> list[KeyPath]:
    """Paths at which a mapping or TensorDict has mappings and TensorDicts."""
    if is_tensordict(source):
        return [join(prefix, p) for p in source._nodes]
    found: list[KeyPath] = []
    for key, x in source.items():
        if isinstance(x, Mapping) or is_tensordict(x):
            path = join(prefix, as_path(key, "update"))
            found += [path, *given_nodes(x, path)]
    return found


def put_all(leaves: Leaves, nodes: Nodes, new_leaves: Leaves, new_nodes: Nodes) -> None:
    """Put new nodes and leaves at their paths, in place of what was there."""
    for path, entry in new_nodes.items():
        put_node(leaves, nodes, path, entry)
    for path, leaf in new_leaves.items():
        put_leaf(leaves, nodes, path, leaf)


def retype(leaves: Leaves, nodes: Nodes) -> Nodes:
    """Nodes after keys came or went: a node is a tensorclass as long as it has exactly the fields of it."""
    if not any([type(n) is Typed for n in nodes.values()]):  # `in map(type, ...)` does not trace on torch 2.11
        return nodes
    out = dict(nodes)
    for path, entry in nodes.items():
        if type(entry) is Typed:
            keys = top_keys([*subtable(leaves, path), *subtable(nodes, path)])
            out[path] = entry if set(keys) == set(entry.cls._fields) else entry.extra
    if type(out.get(())) is int:
        del out[()]
    return out


def is_tensordict(x: Any) -> bool:
    """True for a TensorDict."""
    return isinstance(x, Container) and x._kind == "tensordict"


def absorb(
    leaves: Leaves, nodes: Nodes, prefix: KeyPath, source: Any, size: torch.Size, device: torch.device | None
) -> None:
    """Add the entries of a mapping or TensorDict below `prefix`; values become leaves.

    Args:
        size: batch size of the root, to whose dims extra ones are relative.
        device: where given, leaves are moved there.
    """
    entries: Any = source
    if is_tensordict(source):
        absorb_tensordict(leaves, nodes, prefix, source, size, device)
        return
    if not isinstance(source, Mapping):
        hint = "TensorDict({'key': tensor}, batch_size=[...])"
        raise DtypeError(message("TensorDict", "a mapping of keys to tensors", type(source).__name__, hint=hint))
    if prefix != ():
        put_node(leaves, nodes, prefix)
    head = parts(prefix)
    for key, value in entries.items():
        plain = type(key) is str
        path = (head + (key,) if head else key) if plain else join(prefix, as_path(key, "TensorDict"))  # noqa: RUF005  # in half the time
        if plain and type(value) is Tensor and device is None:  # the usual case, in one step
            if path in leaves or path in nodes:
                raise taken(path)
            leaves[path] = value
        elif isinstance(value, Mapping) or is_tensordict(value):
            absorb(leaves, nodes, path, value, size, device)
        elif type(value) is Static:
            put_new(leaves, nodes, path, value)
        else:
            put_new(leaves, nodes, path, over(as_leaf(value, path, device), size))


def absorb_tensordict(
    leaves: Leaves, nodes: Nodes, prefix: KeyPath, source: Any, size: torch.Size, device: torch.device | None
) -> None:
    """`absorb` of a TensorDict, in one step where nothing can be there already."""
    more = len(source.batch_size) - len(size)
    vacant = prefix not in nodes if prefix != () else not leaves and not nodes
    values = list(source._leaves.values()) if device is None else [x.to(device) for x in source._leaves.values()]
    new_leaves = dict(zip(prefixed(prefix, source._leaves), values, strict=True))
    new_nodes = {join(prefix, p): with_extra(e, max(more + extra_of(e), 0)) for p, e in source._nodes.items()}
    new_leaves = seated(new_leaves, new_nodes, size) if more < 0 else new_leaves
    if prefix != ():
        put_node(leaves, nodes, prefix, max(more, 0))
    else:
        new_nodes.pop((), None)  # the class of the root is that of the receiver
    if vacant:
        leaves.update(new_leaves)
        nodes.update(new_nodes)
        return
    for path, entry in new_nodes.items():
        put = put_new if type(entry) is Static else put_node
        put(leaves, nodes, path, entry)
    for path, leaf in new_leaves.items():
        put_new(leaves, nodes, path, leaf)


def put_new(leaves: Leaves, nodes: Nodes, path: KeyPath, value: Any) -> None:
    """Put a leaf or a static value where nothing is yet."""
    if path in leaves or path in nodes:
        raise taken(path)
    if type(value) is Static:
        put_node(leaves, nodes, path, value)
    else:
        put_leaf(leaves, nodes, path, value)


def taken(path: KeyPath) -> KeyPathError:
    """The error for a path that is given twice."""
    got, hint = f"two entries at {show(path)!r}", "a key is a leaf or an inner node, and is given once"
    return KeyPathError(message("TensorDict", "different keys", got, hint=hint))


def as_leaf(value: Any, path: KeyPath, device: torch.device | None) -> Tensor | Container:
    """A leaf: tensors and containers as they are, numpy arrays, numbers and lists of them as tensors."""
    if not isinstance(value, (Tensor, Container)):
        if type(value) in NUMBERS:
            return as_data(value, device)
        if type(value) in PROTOCOLS:
            return wrap_leaf(value) if device is None else wrap_leaf(value).to(device)
        if getattr(getattr(value, "dtype", None), "kind", "") in ("O", "U", "S"):  # a numpy array of objects or strings
            return wrap_leaf(ObjectArray(value))
        if isinstance(value, (str, bytes)) or value is None:
            raise not_a_leaf(value, path)
        if not getattr(getattr(value, "flags", None), "writeable", True):  # an array, which torch would write to
            value = value.copy()
        strides: Any = getattr(value, "strides", None)
        steps = cast(tuple[int, ...], strides if isinstance(strides, tuple) else ())
        if any([n < 0 for n in steps]):  # of `array[::-1]`, which torch does not take
            value = value.copy()
        try:
            value = as_data(value)
        except (TypeError, ValueError, RuntimeError):
            raise not_a_leaf(value, path) from None
    return value if device is None else value.to(device)


def not_a_leaf(value: Any, path: KeyPath) -> DtypeError:
    """The error for a value that cannot be a leaf."""
    at = {show(path): describe(value)}
    hint = "Static(x) for one object, ObjectArray(list) for one per example, tdc.pack for tensors of different sizes"
    expected = "tensors, arrays, numbers or mappings"
    return DtypeError(message("TensorDict", expected, "a value of another type", at, hint))


def check_leaves(op: OpName, leaves: Leaves, nodes: Nodes, size: torch.Size, hint: str = "") -> None:
    """Check that every leaf begins with the batch size, and with that of its inner nodes."""
    k = len(size)
    if k:
        try:
            misfits = [p for p, x in leaves.items() if x.shape[:k] != size]
        except RuntimeError as error:
            raise unsized(op, leaves, error) from None
        if misfits:
            wrong = {show(p): describe(leaves[p]) for p in misfits}
            hint = hint or "give the batch size all leaves share, reshape the leaf, or Shared(leaf) without batch dims"
            expected = f"leaves of shape {show_sizes([*size, '...'])}"
            raise ShapeError(message(op, expected, f"{len(wrong)} that differ", wrong, hint))
    if any_extra(nodes):
        check_extra(op, leaves, nodes, k)


def unsized(op: OpName, leaves: Leaves, error: Exception) -> Exception:
    """The error for strided tensors of `torch.nested`, which have no shape to compare with a batch size."""
    wrong = {show(p): describe(x) for p, x in leaves.items() if isinstance(x, Tensor) and x.is_nested}
    hint = "tdc.pack(x.unbind()), or layout=torch.jagged"
    got = f"{len(wrong)} strided tensors of torch.nested"
    return DtypeError(message(op, "leaves with a shape", got, wrong, hint)) if wrong else error


def same_keys(op: OpName, first: Any, *others: Any) -> None:
    """Check that TensorDicts have the same keys of leaves and the same static values."""
    for i, other in enumerate(others, 1):
        if other._leaves.keys() != first._leaves.keys():
            here, there = set(first._leaves), set(other._leaves)
            wrong = [f"{show(p)}: only in operand 0" for p in ordered(here - there)]
            wrong += [f"{show(p)}: only in operand {i}" for p in ordered(there - here)]
            got, hint = f"{len(wrong)} that differ", "select the keys they share first"
            raise StructureError(message(op, "TensorDicts with the same keys", got, wrong, hint))
        if nodes_differ(first._nodes, other._nodes):
            check_statics(op, first, other)


def check_statics(op: OpName, first: Any, other: Any) -> None:
    """Check that two TensorDicts have the same static values."""
    here, there = statics(first._nodes), statics(other._nodes)
    wrong = [show(p) for p in {**here, **there} if here.get(p) != there.get(p)] if here or there else []
    hint = "ObjectArray for one object per example, or exclude the key"
    refuse_wrong(StructureError, op, "equal static values", wrong, "that differ", hint)


def same_size(op: OpName, first: Any, *others: Any) -> None:
    """Check that TensorDicts have the same batch size."""
    for other in others:
        if other.batch_size != first.batch_size:
            got = f"{show_sizes(first.batch_size)} and {show_sizes(other.batch_size)}"
            raise ShapeError(message(op, "TensorDicts of one batch size", got, hint="index or expand one of them"))


def columns_of(op: OpName, *tds: Any) -> list[list[Any]]:
    """The leaves of each TensorDict, in the order of the first. Raises as `same_keys`.

    The others are only looked up, so that a graph holds no guard on the order of their keys.
    """
    first = tds[0]
    order: list[Any] = list(first._leaves)
    found: list[list[Any]] = [list(first._leaves.values())]
    for td in tds[1:]:
        own = td._leaves
        try:
            found.append([own[p] for p in order])
            same = len(own) == len(order)
        except KeyError:
            same = False
        if not same:
            same_keys(op, *tds)
        if nodes_differ(first._nodes, td._nodes):
            check_statics(op, first, td)
    return found


def nodes_differ(a: Nodes, b: Nodes) -> bool:
    """True if two tables of nodes differ."""
    return a is not b and a != b


@traced_for(nodes_differ)
def nodes_differ_traced(a: Nodes, b: Nodes) -> bool:
    """Traced in place of `nodes_differ`: `b` is only looked up, which takes half the guards."""
    return len(a) != len(b) or any([b.get(p, MISSING) != entry for p, entry in a.items()])


def together(op: OpName, *tds: Any) -> Iterable[tuple[KeyPath, tuple[Any, ...]]]:
    """For each path of the first TensorDict, the leaves there of all. Raises as `same_keys`."""
    return zip(list(tds[0]._leaves), zip(*columns_of(op, *tds), strict=True), strict=True)


def mark_examples(leaves: Leaves) -> None:
    """Mark dim 0 of tensors beside a ragged leaf as dynamic: the number of examples varies from batch to batch."""
    if any([isinstance(x, Container) for x in leaves.values()]):
        for leaf in leaves.values():
            if isinstance(leaf, Tensor):
                mark_dynamic(leaf, 0)


def check_extra(op: OpName, leaves: Leaves, nodes: Nodes, k: int) -> None:
    """Check that the leaves of a node with extra batch dims agree in these, too."""
    for node, entry in nodes.items():
        extra = extra_of(entry)
        own = below(leaves, node) if extra else {}
        sizes = {p: x.shape[: k + extra] for p, x in own.items()}
        first = [*sizes.values(), None][0]
        wrong = {show(p): describe(own[p]) for p, z in sizes.items() if z != first or len(z) < k + extra}
        expected = f"leaves that share {k + extra} batch dims below {show(node)!r}"
        hint = "give the inner TensorDict fewer batch dims"
        refuse_wrong(ShapeError, op, expected, wrong, "that differ", hint)


def subtree(leaves: Leaves, nodes: Nodes, path: KeyPath) -> tuple[Leaves, Nodes, int]:
    """Leaves and nodes below a node by their paths from it on, and its extra batch dims."""
    extra = extra_of(nodes[path])
    inner: Nodes = {(): nodes[path], **subtable(nodes, path)}
    if extra:
        inner = {p: with_extra(e, extra_of(e) - extra) for p, e in inner.items()}
    if type(inner[()]) is int:
        del inner[()]
    return subtable(leaves, path), inner, extra


def node_size(leaves: Leaves, batch_size: torch.Size, extra: int) -> torch.Size:
    """Batch size of a node, read from its leaves: that of the root and its extra dims."""
    for leaf in leaves.values() if extra and isinstance(batch_size, torch.Size) else ():
        return leaf.shape[: len(batch_size) + extra]
    return batch_size


def children(leaves: Leaves, nodes: Nodes, size: torch.Size) -> list[tuple[str, Any, Any]]:
    """The children of the root, in insertion order: each key, what is there, and of an inner node its leaves,
    nodes and batch size; None of a leaf or a static value."""
    found: list[tuple[str, Any, Any]] = []
    for key in top_keys([*leaves, *nodes]):
        entry, inner = leaves[key] if key in leaves else nodes[key], None
        if key not in leaves and type(entry) is not Static:
            below_it, inner_nodes, extra = subtree(leaves, nodes, key)
            inner = below_it, inner_nodes, node_size(below_it, size, extra)
        found.append((key, entry, inner))
    return found


def shape_of(x: Any) -> torch.Size | None:
    """Shape of a leaf; None of what is no tensor, such as a container of other things than tensors."""
    known = isinstance(x, (Tensor, Leaf)) or (isinstance(x, Container) and isinstance(x._content, Tensor))
    return x.shape if known else None


def common(a: torch.Size, b: torch.Size) -> torch.Size:
    """The longest common beginning of two sizes."""
    n = 0
    while n < len(a) and n < len(b) and a[n] == b[n]:
        n += 1
    return a[:n]


def as_size(size: Any) -> torch.Size:
    """A batch size given as a sequence or as one int."""
    try:
        return torch.Size(size if type(size) is not int else (size,))
    except TypeError:
        got, hint = type(size).__name__, "batch_size=[3] or batch_size=(3, 4); [] for none"
        raise DtypeError(message("TensorDict", "a batch size of ints", got, hint=hint)) from None
