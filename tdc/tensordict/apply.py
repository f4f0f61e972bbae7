"""`td.apply` where inner nodes may be entries as a whole, or other TensorDicts lack keys: `is_leaf=` and `default=`.

    td.apply(fn, is_leaf=lambda cls: cls is Step)       fn sees a Step, not its fields
    td.apply(fn, other, default=None)                   fn(x, None) where the other has nothing

Invariant: the result has the entries of the first TensorDict, without those for which the function gave None; Static
values and empty nodes stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tdc.core.typing import MISSING, KeyPath
from tdc.tensordict.mapping import any_below, present, walk
from tdc.tensordict.nodes import Nodes, Static, without_extra
from tdc.tensordict.paths import within
from tdc.tensordict.storage import Leaves, absorb, retype


def entries_applied(
    td: Any, call: Callable[..., Any], others: Iterable[Any], size: torch.Size, is_leaf: Any, default: Any
) -> tuple[Leaves, Nodes]:
    """Leaves and nodes of what `call` makes of each entry.

    Args:
        call: takes the path, the entry of `td` there, and those of the others.
        size: the batch size of the result.

    Raises:
        KeyPathError: another TensorDict lacks a key, and there is no default.
    """
    paths = list(td._leaves) if is_leaf is None else walk(td, True, False, is_leaf, False)
    paths = [p for p in paths if p in td._leaves or whole(td, p, is_leaf)]
    made = {p: call(p, td.get(p), *[entry_of(x, p, default) for x in others]) for p in paths}
    return put_entries(td, made, size)


def put_entries(td: Any, made: Leaves, size: torch.Size) -> tuple[Leaves, Nodes]:
    """Leaves and nodes with what was made of entries in their place: leaves, TensorDicts, or None to drop one."""
    paths, made = list(made), {p: x for p, x in made.items() if x is not None}
    kept = {p: n for p, n in td._nodes.items() if p == () or not any([within(p, q) for q in paths])}
    leaves: Leaves = {}
    nodes = kept if size == td._size else without_extra(kept)
    absorb(leaves, nodes, (), made, len(size), None)
    return leaves, retype(leaves, pruned(nodes, td._leaves, leaves))


def whole(td: Any, path: KeyPath, is_leaf: Any) -> bool:
    """Whether an inner node goes to the function as it is."""
    return type(td._nodes[path]) is not Static and is_leaf(type(td.get(path)))


def entry_of(td: Any, path: KeyPath, default: Any) -> Any:
    """What a TensorDict has at a path."""
    return td.get(present(td, "apply", path)) if default is MISSING else td.get(path, default)


def pruned(nodes: Nodes, before: Leaves, after: Leaves) -> Nodes:
    """Nodes without those that lost all their leaves."""
    lost = [p for p in before if p not in after]
    return {p: n for p, n in nodes.items() if type(n) is Static or not any_below(p, lost) or any_below(p, after)}
