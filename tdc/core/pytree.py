"""Pytrees: torch's functions on them, and one helper that registers a container with torch and with optree.

torch's registration has a serialized name and key paths, which `torch.export.save` and AOTInductor need.

Invariants:
  - a context never holds sizes, so that vmap, dynamic export and AOTInductor rebuild the container from its leaves;
  - `unflatten` accepts anything as a child (int, None, spec): `torch.vmap` unflattens `in_dims` into our types;
  - equal keys give equal contexts, in whatever order they were inserted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch.utils._pytree as torch_pytree
from torch.utils._pytree import GetAttrKey as GetAttrKey
from torch.utils._pytree import MappingKey as MappingKey
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_structure as tree_structure
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils._pytree import treespec_dumps as treespec_dumps
from torch.utils._pytree import treespec_loads as treespec_loads

from tdc.core.errors import FormatError, message, refusing
from tdc.core.private import find_or

untyped_optree: Any = optree
untyped: Any = torch_pytree  # whose types are open in parts
GLOBAL_NAMESPACE: Any = find_or(
    "tdc", "optree.registry:__GLOBAL_NAMESPACE", feature="optree without a namespace", lost="plain calls of optree"
)
broadcast_to_and_flatten: Any = find_or(  # of `in_dims`
    refusing("tdc.vmap with in_dims"), "torch.utils._pytree:_broadcast_to_and_flatten",
    feature="in_dims of tdc.vmap", lost="tdc.vmap with trees of in_dims",
)  # fmt: skip
Flatten = Callable[[Any], "tuple[list[Any], Any]"]
Unflatten = Callable[[Any, Any], Any]
ENTRIES: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {}  # what contexts hold, by its tag


def register(
    cls: type, flatten: Flatten, unflatten: Unflatten, names: Callable[[Any], Sequence[Any]], name: str = "",
    entry: Any = GetAttrKey,
) -> None:  # fmt: skip
    """Register `cls` with torch's pytree and with optree.

    Args:
        flatten: `x -> (children, context)`; the context is made of tuples, str, int, bool and None.
        unflatten: `(children, context) -> x`; children may be anything.
        name: of the class in files; that of a tensorclass names its module, too.
        names: `context -> one name per child`: an attribute, or a key path.
        entry: the class of these names in torch's key paths: `.values` for an attribute, `['a']` for a key.
    """

    def flatten_with_keys(x: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context = flatten(x)
        return [(entry(name), child) for name, child in zip(names(context), children, strict=True)], context

    def optree_flatten(x: Any) -> tuple[list[Any], Any, tuple[Any, ...]]:
        children, context = flatten(x)
        return children, context, tuple(names(context))

    untyped.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=name or f"tdc.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
        to_dumpable_context=lists_of,
        from_dumpable_context=tuples_of,
    )

    def optree_unflatten(context: Any, children: Any) -> Any:
        return unflatten(children, context)

    untyped_optree.register_pytree_node(cls, optree_flatten, optree_unflatten, namespace=GLOBAL_NAMESPACE)


def register_entry(cls: type, tag: str, to_data: Callable[[Any], Any], from_data: Callable[[Any], Any]) -> None:
    """Let contexts hold instances of `cls`: in JSON data they are a dict with one key, the tag."""
    ENTRIES[tag] = cls, to_data, from_data


def lists_of(context: Any) -> Any:
    """A context as JSON data: its tuples as lists, registered entries as dicts with one key."""
    for tag, (cls, to_data, _) in ENTRIES.items():
        if isinstance(context, cls):
            return {tag: to_data(context)}
    entries: Any = context
    if isinstance(context, tuple):
        return [lists_of(part) for part in entries]
    if context is None or isinstance(context, (str, int, float)):
        return context
    got, hint = f"a static value of type {type(context).__name__}", "give it as a str or int, or exclude the key"
    raise FormatError(message("export", "static values that JSON can hold", got, hint=hint))


def tuples_of(data: Any) -> Any:
    """A context from JSON data; the inverse of `lists_of`."""
    entries: Any = data
    if isinstance(data, dict):
        ((tag, value),) = entries.items()
        return ENTRIES[tag][2](value)
    return tuple([tuples_of(part) for part in entries]) if isinstance(data, list) else data
