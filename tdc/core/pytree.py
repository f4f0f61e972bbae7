"""One helper that makes a container a pytree, for torch and for optree.

A container says three things: how it comes apart (children and a hashable context), how it is put together, and what
its children are called. From these come the registrations with `torch.utils._pytree` (with a serialized name and key
paths, which `torch.export.save` and AOTInductor need) and with `optree`, so that `optree.tree_map` sees the tensors.

Invariants:
  - a context never holds sizes, so that vmap, dynamic export and AOTInductor rebuild the container from what they have;
  - `unflatten` accepts anything as a child (int, None, spec): `torch.vmap` unflattens `in_dims` into our types;
  - equal keys give equal contexts, in whatever order they were inserted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch.utils._pytree as torch_pytree
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL_NAMESPACE

from tdc._errors import FormatError, message
from tdc._nodes import TYPES, Static, Typed, name_of

Flatten = Callable[[Any], "tuple[list[Any], Any]"]
Unflatten = Callable[[Any, Any], Any]


def register(
    cls: type,
    flatten: Flatten,
    unflatten: Unflatten,
    names: Callable[[Any], Sequence[Any]],
    name: str = "",
    entry: Any = torch_pytree.GetAttrKey,
) -> None:
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

    torch_pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=name or f"tdc.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
        to_dumpable_context=lists_of,
        from_dumpable_context=tuples_of,
    )
    optree.register_pytree_node(
        cls, optree_flatten, lambda context, children: unflatten(children, context), namespace=GLOBAL_NAMESPACE
    )


def lists_of(context: Any) -> Any:
    """A context as JSON data: its tuples as lists, static values and tensorclasses as one-key dicts."""
    if isinstance(context, Static):
        return {"static": lists_of(context.value)}
    if isinstance(context, Typed):
        return {"type": [name_of(context.cls), context.extra]}
    if isinstance(context, tuple):
        return [lists_of(part) for part in context]
    if context is None or isinstance(context, (str, int, float)):
        return context
    got, hint = f"a static value of type {type(context).__name__}", "give it as a str or int, or exclude the key"
    raise FormatError(message("export", "static values that JSON can hold", got, hint=hint))


def tuples_of(data: Any) -> Any:
    """A context from JSON data; the inverse of `lists_of`.

    Raises:
        FormatError: a tensorclass that is not defined in this process.
    """
    if isinstance(data, dict) and "static" in data:
        return Static(tuples_of(data["static"]))
    if isinstance(data, dict) and "type" in data:
        name, extra = data["type"]
        if name not in TYPES:
            hint = f"import {name.rpartition('.')[0]} first"
            raise FormatError(message("load", f"the tensorclass {name!r} to be defined", "no such class", hint=hint))
        return Typed(extra, TYPES[name])
    return tuple([tuples_of(part) for part in data]) if isinstance(data, list) else data
