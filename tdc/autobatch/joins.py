"""`len`, `sum`, `any`, `all`, `max`, `min`, `torch.cat`, `torch.stack` and `torch.tensor` in a block: of lists that
grew, and of what differs between examples."""

from __future__ import annotations

import builtins
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch.lists import Grown, refusal
from tdc.autobatch.ragged_example import RaggedExample
from tdc.compile._torch.levels import current_level, mapped, outside, physical
from tdc.compile.upstream import traced
from tdc.core.dynamo import constant, is_batched
from tdc.core.pytree import tree_leaves
from tdc.ragged.masked import MaskedBatch


def length(x: Any) -> Any:
    """`len(x)`; what differs between examples is a 0-d tensor."""
    if isinstance(x, Grown) and x.even:
        return tree_leaves(x.items)[0].shape[0]
    return x.count if isinstance(x, Grown) else x.size(0) if isinstance(x, RaggedExample) else builtins.len(x)


def total(x: Any, start: Any = 0) -> Any:
    """`sum(x, start)`."""
    if not isinstance(x, Grown):
        return builtins.sum(x, start)
    items = items_of(x)
    return start + torch.where(there(x, items), items, torch.zeros_like(items)).sum(0).to(items.dtype)


def some(x: Any) -> Any:
    """`any(x)`, as a bool for each example where there are tensors."""
    if isinstance(x, Grown):
        items = items_of(x)
        return (there(x, items) & items.bool()).any()
    found: Any = False
    for part in x:
        if isinstance(part, Tensor):
            found = part.reshape(()).bool() | found
        elif part:
            return True
    return found


def every(x: Any) -> Any:
    """`all(x)`, as a bool for each example where there are tensors."""
    if isinstance(x, Grown):
        items = items_of(x)
        return (~there(x, items) | items.bool()).all()
    found: Any = True
    for part in x:
        if isinstance(part, Tensor):
            found = part.reshape(()).bool() & found
        elif not part:
            return False
    return found


def furthest(fn: Any, values: Any) -> Any:
    """`max` or `min` of several values: the first of those that no other exceeds."""
    if isinstance(values, Grown):
        return furthest_item(fn, values)
    found, *rest = values
    for other in rest:
        further = other > found if fn is builtins.max else other < found
        found = torch.where(further.reshape(()), other, found) if isinstance(further, Tensor) else fn(found, other)
    return found


def furthest_item(fn: Any, x: Grown) -> Any:
    """`max` or `min` of a list that grew. That an example has an item is checked eagerly, not in a graph.

    Raises:
        ValueError: an example has none.
    """
    items = items_of(x)
    count = x.count if traced() else physical(x.count, current_level())
    if not traced() and bool((count == 0).any()):
        raise ValueError(f"{fn.__name__}() of a list that is empty for an example")
    rest = torch.full_like(items, limit(str(items.dtype), fn is builtins.max))
    first = (torch.arange(items.shape[0], device=items.device) == 0).reshape(-1, *[1] * (items.ndim - 1))
    whole = torch.where(there(x, items) & (first | ~items.isnan()), items, rest)  # NaN is beyond no other behind it
    at = whole.argmax(0) if fn is builtins.max else whole.argmin(0)
    return items[at.reshape(1)].squeeze(0)


@constant
def limit(dtype: str, lowest: bool) -> Any:
    """The number that no other of a dtype is beyond."""
    kind: Any = getattr(torch, dtype.removeprefix("torch."))
    if kind.is_floating_point:
        return -torch.inf if lowest else torch.inf
    return torch.iinfo(kind).min if lowest else torch.iinfo(kind).max


def items_of(x: Grown) -> Tensor:
    """The items of a list that grew, and room behind them.

    Raises:
        UnsupportedError: they are trees.
    """
    if not isinstance(x.items, Tensor):
        raise refusal("items that are no tensors of one shape")
    return x.items


def there(x: Grown, items: Tensor) -> Tensor:
    """Which of the items that there is room for an example has."""
    return (torch.arange(items.shape[0], device=items.device) < x.count).reshape(-1, *[1] * (items.ndim - 1))


def builtin(fn: Any, *args: Any, **options: Any) -> Any:
    """A function that may be Python's `sum`, `any`, `all`, `max` or `min`, or one of the user by that name."""
    if fn is builtins.sum:
        return total(*args, **options)
    if fn is builtins.any or fn is builtins.all:
        return some(*args) if fn is builtins.any else every(*args)
    if (fn is builtins.max or fn is builtins.min) and not options:
        values: Any = args if len(args) != 1 else args[0]
        if isinstance(values, Grown) or (isinstance(values, (tuple, list)) and values):
            return furthest(fn, values)
    return fn(*args, **options)


def stack(tensors: Any, dim: int = 0) -> Any:
    """`torch.stack`, of a list that grew to a ragged example."""
    if not isinstance(tensors, Grown):
        return torch.stack(tensors, dim)
    if tensors.even:
        return torch.movedim(items_of(tensors), 0, dim)
    rows: Any = rows_of(tensors)
    return rows if dim == 0 else torch.movedim(rows, 0, dim)


def cat(tensors: Any, dim: int = 0) -> Any:
    """`torch.cat`. In a graph it runs for all examples at once: torch's own rule fixes their number (torch 2.13)."""
    if isinstance(tensors, Grown):
        rows: Any = items_of(tensors) if tensors.even else rows_of(tensors)
        return torch.flatten(rows, 0, 1)
    parts = [*tensors]
    if not traced() or not all([isinstance(x, Tensor) for x in parts]) or not any([is_batched(x) for x in parts]):
        return torch.cat(tensors, dim)
    level = current_level()
    count = next(physical(x, level).shape[0] for x in parts if is_batched(x))
    found = [physical(x, level) if is_batched(x) else x.expand(count, *x.shape) for x in parts]
    with outside():
        joined = torch.cat(found, dim if dim < 0 else dim + 1)
    return mapped(joined, level)


def tensor(data: Any, **options: Any) -> Tensor:
    """`torch.tensor`; a number that differs between examples is one already."""
    if not isinstance(data, Tensor):
        return torch.tensor(data, **options)
    found = data.detach().clone()
    return found.to(**options) if options else found


def rows_of(x: Grown) -> RaggedExample:
    """The items of a list that grew, as rows."""
    level = current_level()
    items, count = physical(items_of(x), level), physical(x.count, level)
    with outside():
        packed = MaskedBatch(items, count).to_packed()
    return RaggedExample(packed, level)
