"""`td.apply`: a function of every leaf, or of inner nodes, too, where `is_leaf=` says so.

    td.apply(fn)                                        fn(x) of each leaf
    td.apply(fn, is_leaf=lambda cls: cls is Step)       fn sees a Step, not its fields
    td.apply(fn, other, default=None)                   fn(x, None) where the other has nothing

Invariant: the result has the entries of the first TensorDict, without those for which the function gave None; Static
values and empty nodes stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import as_device, expect_function
from tdc.core.container import Container
from tdc.core.errors import DtypeError, describe, message
from tdc.core.typing import MISSING, KeyPath
from tdc.tensordict.leaf import unwrapped
from tdc.tensordict.mapping import IsLeaf, Keyed, any_below, existing_path, matching_keys
from tdc.tensordict.nodes import Nodes, Static, without_extra
from tdc.tensordict.paths import within
from tdc.tensordict.shared import like, seated
from tdc.tensordict.storage import Leaves, absorb, as_size, check_leaves, retype, same_size, together

Applied = tuple[Leaves, Nodes, torch.Size, torch.device | None]


def applied(
    td: Any,
    fn: Callable[..., Any],
    others: tuple[Any, ...],
    batch_size: Any,
    device: Any,
    is_leaf: IsLeaf,
    default: Any,
    with_path: bool,
) -> Applied:
    """Arguments of `build_td` for the result of `td.apply` or, `with_path`, of `td.apply_with_path`."""
    expect_function("apply_with_path" if with_path else "apply", fn)
    odd = [describe(x) for x in others if not isinstance(x, Keyed)]
    if odd:
        hint = "td.apply(fn, TensorDict(d, td.batch_size)), or lambda leaf: fn(leaf, x) for what all leaves share"
        raise DtypeError(message("apply", "TensorDicts behind the function", ", ".join(odd), hint=hint))
    same_size("apply", td, *others)
    size = td._size if batch_size is None else as_size(batch_size)
    if is_leaf is not None or default is not MISSING:
        leaves, nodes = put_entries(td, on_entries(td, fn, others, with_path, is_leaf, default), size)
    else:
        leaves = on_leaves(td, fn, others, with_path)
        nodes = td._nodes if batch_size is None else without_extra(td._nodes)
        if [v for v in leaves.values() if not isinstance(v, (Tensor, Container)) or isinstance(v, Keyed)]:
            leaves, nodes = put_entries(td, leaves, size)
    leaves = seated(leaves, nodes, size)
    check_leaves("apply", leaves, nodes, size, "pass batch_size= where fn changes it")
    return leaves, nodes, size, as_device("apply", device) if device is not None else td._device


def on_leaves(td: Any, fn: Callable[..., Any], others: tuple[Any, ...], with_path: bool) -> Leaves:
    """Results of a function for the leaves at each path, as users see them."""
    columns = together("apply", td, *others)
    if with_path:
        return {p: like(v[0], fn(p, *unwrapped(v))) for p, v in columns}
    return {p: like(v[0], fn(*unwrapped(v))) for p, v in columns}


def on_entries(
    td: Any, fn: Callable[..., Any], others: tuple[Any, ...], with_path: bool, is_leaf: IsLeaf, default: Any
) -> Leaves:
    """Results of a function for the leaves and for inner nodes that count as leaves."""
    found = list(td._leaves) if is_leaf is None else matching_keys(td, True, False, is_leaf, False)
    paths = [p for p in found if p in td._leaves or counts_as_leaf(td, p, is_leaf)]
    values = {p: [td.get(p), *[entry_at(x, p, default) for x in others]] for p in paths}
    return {p: like(td._leaves.get(p), fn(p, *v) if with_path else fn(*v)) for p, v in values.items()}


def put_entries(td: Any, made: Leaves, size: torch.Size) -> tuple[Leaves, Nodes]:
    """Leaves and nodes with what was made of entries in their place: leaves, TensorDicts, or None to drop one."""
    kept = {p: n for p, n in td._nodes.items() if p == () or not any([within(p, q) for q in made])}
    leaves: Leaves = {}
    nodes = kept if size == td._size else without_extra(kept)
    absorb(leaves, nodes, (), {p: x for p, x in made.items() if x is not None}, size, None)
    return leaves, retype(leaves, pruned(nodes, td._leaves, leaves))


def counts_as_leaf(td: Any, path: KeyPath, is_leaf: Any) -> bool:
    """True if the function takes an inner node as it is."""
    return type(td._nodes[path]) is not Static and is_leaf(type(td.get(path)))


def entry_at(td: Any, path: KeyPath, default: Any) -> Any:
    """The entry at a path; the default, if there is one, where the path is absent."""
    return td.get(existing_path(td, "apply", path)) if default is MISSING else td.get(path, default)


def pruned(nodes: Nodes, before: Leaves, after: Leaves) -> Nodes:
    """Nodes without those that lost all their leaves."""
    lost = [p for p in before if p not in after]
    return {p: n for p, n in nodes.items() if type(n) is Static or not any_below(p, lost) or any_below(p, after)}
