"""Flat storage of nested keys: one dict of leaves and one of inner nodes, both keyed by path.

    {"a": x, "b": {"c": y, "d": {}}}   ->   leaves {("a",): x, ("b", "c"): y},  nodes {("b",): 0, ("b", "d"): 0}

A node's number says how many batch dims it has beyond those of the root. Functions here build, check and print this
form and know nothing of the class around it.

Invariants:
  - a path is a leaf, a node, or absent; every proper prefix of a path is a node;
  - dicts handed out are owned by the receiver, dicts handed in are not changed, except by `put_leaf` and `put_node`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tdc._errors import DtypeError, KeyPathError, ShapeError, describe, message
from tdc._keys import show, unravel_key
from tdc._repr import is_shared, leaf_html, tree_html, tree_text
from tdc._rules import Container
from tdc._structure import mark_dynamic
from tdc._typing import KeyPath, OpName

Leaves = dict[KeyPath, Any]
Nodes = dict[KeyPath, int]


def within(path: KeyPath, prefixes: Iterable[KeyPath]) -> bool:
    """Whether a path is one of `prefixes` or below one."""
    return any([path[: len(p)] == p for p in prefixes])


def any_extra(nodes: Nodes) -> bool:
    """Whether some node has more batch dims than the root."""
    return any(nodes.values())


def remove(leaves: Leaves, nodes: Nodes, path: KeyPath) -> None:
    """Take out a leaf, or a node with all below it."""
    for p in [p for p in leaves if p[: len(path)] == path]:
        del leaves[p]
    for p in [p for p in nodes if p[: len(path)] == path]:
        del nodes[p]


def put_node(leaves: Leaves, nodes: Nodes, path: KeyPath, extra: int = 0) -> None:
    """Make a path and all its prefixes inner nodes.

    Raises:
        KeyPathError: a prefix is a leaf.
    """
    for depth in range(1, len(path)):
        put_node_at(leaves, nodes, path[:depth], 0)
    put_node_at(leaves, nodes, path, extra)


def put_node_at(leaves: Leaves, nodes: Nodes, path: KeyPath, extra: int) -> None:
    if path in leaves:
        got = f"a leaf at {show(path)!r}"
        raise KeyPathError(message("set", "inner nodes on the way to a key", got, hint=f"delete {show(path)!r} first"))
    nodes[path] = max(extra, nodes.get(path, 0))


def put_leaf(leaves: Leaves, nodes: Nodes, path: KeyPath, leaf: Any) -> None:
    """Put a leaf at a path, in place of whatever stood there."""
    if len(path) > 1:
        put_node(leaves, nodes, path[:-1])
    if path in nodes:
        remove(leaves, nodes, path)
    leaves[path] = leaf


def is_tensordict(x: Any) -> bool:
    """Whether a value is of the class built on this storage."""
    return isinstance(x, Container) and x._kind == "tensordict"


def absorb(leaves: Leaves, nodes: Nodes, prefix: KeyPath, source: Any, ndim: int, device: torch.device | None) -> None:
    """Add the entries of a mapping or TensorDict below `prefix`; values become leaves.

    Args:
        ndim: number of batch dims of the root, to which extra dims are relative.
        device: where given, leaves are moved there.
    """
    if is_tensordict(source):
        above = len(source.batch_size) - ndim
        if prefix:
            put_node(leaves, nodes, prefix, max(above, 0))
        for path, extra in source._nodes.items():
            put_node(leaves, nodes, prefix + path, max(above + extra, 0))
        for path, leaf in source._leaves.items():
            put_leaf(leaves, nodes, prefix + path, as_leaf(leaf, prefix + path, device))
        return
    if not isinstance(source, Mapping):
        hint = "TensorDict({'key': tensor}, batch_size=[...])"
        raise DtypeError(message("TensorDict", "a mapping of keys to tensors", type(source).__name__, hint=hint))
    if prefix:
        put_node(leaves, nodes, prefix)
    for key, value in source.items():
        path = prefix + unravel_key(key)
        if isinstance(value, Mapping) or is_tensordict(value):
            absorb(leaves, nodes, path, value, ndim, device)
        else:
            put_leaf(leaves, nodes, path, as_leaf(value, path, device))


def as_leaf(value: Any, path: KeyPath, device: torch.device | None) -> Any:
    """A leaf: tensors and containers as they are, numpy arrays, numbers and lists of them as tensors."""
    if not isinstance(value, (Tensor, Container)):
        if isinstance(value, (str, bytes)) or value is None:
            raise not_a_leaf(value, path)
        try:
            value = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            raise not_a_leaf(value, path) from None
    return value if device is None else value.to(device)


def not_a_leaf(value: Any, path: KeyPath) -> DtypeError:
    """The error for a value that cannot be a leaf."""
    at = {show(path): type(value).__name__}
    hint = "lists of tensors: torch.stack, or tdc.pack where sizes differ"
    return DtypeError(
        message("TensorDict", "tensors, arrays, numbers or mappings", "a value of another type", at, hint)
    )


def check_leaves(op: OpName, leaves: Leaves, nodes: Nodes, size: torch.Size, hint: str = "") -> None:
    """Every leaf begins with the batch size, and with that of its inner nodes; all that do not are named.

    Raises:
        ShapeError: at least one leaf does not.
    """
    k = len(size)
    if k:
        wrong = {show(p): describe(x) for p, x in leaves.items() if x.shape[:k] != size}
        if wrong:
            hint = hint or "give the batch size that all leaves share, or reshape the leaf"
            raise ShapeError(
                message(
                    op, f"leaves of shape [{', '.join(map(str, size))}, ...]", f"{len(wrong)} that differ", wrong, hint
                )
            )
    if any_extra(nodes):
        check_extra(op, leaves, nodes, k)


def mark_rows(leaves: Leaves) -> None:
    """Beside a ragged leaf the number of rows varies from batch to batch, so dim 0 is dynamic in every leaf."""
    if any([isinstance(x, Container) for x in leaves.values()]):
        for leaf in leaves.values():
            if isinstance(leaf, Tensor):
                mark_dynamic(leaf, 0)


def check_extra(op: OpName, leaves: Leaves, nodes: Nodes, k: int) -> None:
    """Leaves of a node with extra batch dims agree in these, too."""
    for node, extra in nodes.items():
        below = {p: x for p, x in leaves.items() if extra and p[: len(node)] == node}
        sizes = [x.shape[: k + extra] for x in below.values()]
        wrong = {
            show(p): describe(x)
            for (p, x), z in zip(below.items(), sizes, strict=True)
            if z != sizes[0] or len(z) < k + extra
        }
        if wrong:
            expected = f"leaves that share {k + extra} batch dims below {show(node)!r}"
            raise ShapeError(
                message(op, expected, f"{len(wrong)} that differ", wrong, "give the inner TensorDict fewer batch dims")
            )


def subtree(leaves: Leaves, nodes: Nodes, path: KeyPath) -> tuple[Leaves, Nodes, int]:
    """What lies below a node: its leaves and nodes with shorter paths, and its own extra dims."""
    n, extra = len(path), nodes[path]
    below = {p[n:]: x for p, x in leaves.items() if p[:n] == path}
    return below, {p[n:]: e - extra for p, e in nodes.items() if len(p) > n and p[:n] == path}, extra


def node_size(leaves: Leaves, batch_size: torch.Size, extra: int) -> torch.Size:
    """Batch size of a node from its leaves: that of the root and its extra dims."""
    for leaf in leaves.values() if extra else ():
        return leaf.shape[: len(batch_size) + extra]
    return batch_size


def children(leaves: Leaves, nodes: Nodes) -> list[str]:
    """Keys directly below the root, in insertion order."""
    return list(dict.fromkeys([p[0] for p in leaves] + [p[0] for p in nodes]))


def node_text(leaves: Leaves, nodes: Nodes, size: torch.Size, device: Any, indent: str = "") -> str:
    """A tree as the RFC prints it, keys sorted."""
    fields = []
    for key in sorted(children(leaves, nodes)):
        if (key,) in leaves:
            fields.append((key, leaves[(key,)]))
            continue
        below, inner, extra = subtree(leaves, nodes, (key,))
        fields.append((key, node_text(below, inner, node_size(below, size, extra), device, indent + " " * 8)))
    shared = bool(leaves) and all([is_shared(x) for x in leaves.values()])
    return tree_text("TensorDict", fields, size, device, shared, indent)


def node_html(leaves: Leaves, nodes: Nodes, size: torch.Size, name: str = "TensorDict") -> str:
    """A tree as nested `<details>`, keys in insertion order."""
    items = []
    for key in children(leaves, nodes):
        if (key,) in leaves:
            items.append(leaf_html(key, leaves[(key,)]))
            continue
        below, inner, extra = subtree(leaves, nodes, (key,))
        items.append(f"<li>{node_html(below, inner, node_size(below, size, extra), key)}</li>")
    return tree_html(name, items, f"batch_size={list(size)}")


def batch_index(idx: tuple[Any, ...], k: int) -> tuple[Any, ...]:
    """An index tuple that cannot reach feature dims: an Ellipsis stands for batch dims only.

    Raises:
        IndexError: more indices than batch dims.
    """
    used = sum([0 if i is None or i is Ellipsis else consumed(i) for i in idx])
    if used > k:
        got = f"{used} indices"
        raise IndexError(
            message("index", f"at most {k} batch dims indexed", got, hint="index features leaf by leaf: td.apply")
        )
    out: tuple[Any, ...] = ()
    for i in idx:
        out = out + ((slice(None),) * (k - used) if i is Ellipsis else (i,))
    return out


def consumed(i: Any) -> int:
    """Dims that one entry of an index uses up: a mask as many as it has, anything else one."""
    return i.ndim if isinstance(i, Tensor) and i.dtype == torch.bool else 1


def shape_of(x: Any) -> Any:
    """Shape of a leaf, None for what is no tensor, also where it is a container of something else."""
    if isinstance(x, Tensor):
        return x.shape
    if isinstance(x, Container) and isinstance(getattr(x, "values", getattr(x, "data", None)), Tensor):
        return x.shape
    return None


def common(a: Any, b: Any) -> Any:
    """The longest common beginning of two sizes."""
    n = 0
    while n < len(a) and n < len(b) and a[n] == b[n]:
        n += 1
    return a[:n]
