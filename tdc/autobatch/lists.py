"""Lists of which each example has its own number of items, as one tensor, and Python's functions of them.

A list that grows in a loop is a Python list as long as all examples have one length. Where lists of different lengths
meet, and in loops of a graph, it is `Grown`: the items side by side, with room for more, and the number of items of
each example. In a block, which sees one example, it has `out[i]`, `len(out)`, `torch.stack(out)` and the functions
below, which also take values that differ between examples.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.autobatch.ragged_example import RaggedExample
from tdc.autobatch.source import OP
from tdc.autobatch.values import (
    Compound,
    Lane,
    as_lane,
    cast,
    common_dtype,
    flatten,
    is_tree,
    lane_of,
    limits,
    map_leaves,
    one_shape,
    unflatten,
)  # fmt: skip
from tdc.compile._torch.levels import current_level, mapped, outside, physical
from tdc.compile.upstream import traced
from tdc.core.asserts import require
from tdc.core.dynamo import certain, is_batched, larger
from tdc.core.errors import StructureError, UnsupportedError, message
from tdc.core.pytree import register, tree_leaves
from tdc.ragged.masked import MaskedBatch


class Grown(Compound):
    """A list of which each example has its own length.

    Attributes:
        items: a value with (B, room, ...) for (B, ...) in an item; in a block (room, ...).
        count: the number of items of each example; in a block a 0-d tensor.
        fixed: no room may be added, as in a loop of a graph.
        even: all examples have as many items as there is room for.
    """

    def __init__(self, items: Any, count: Any, fixed: bool, even: bool = False) -> None:
        self.items, self.count, self.fixed, self.even = items, count, fixed, even

    def parts(self) -> tuple[list[Any], tuple[Any, ...]]:
        return [self.items, self.count], (self.fixed, self.even)

    def __getitem__(self, i: Any) -> Any:
        """The item at a position, of one example."""
        if isinstance(i, slice) or not (isinstance(i, int) or (isinstance(i, Tensor) and i.ndim == 0)):
            raise refusal("out[...] with something else than a position")
        at = torch.as_tensor(i, device=self.count.device)
        at = torch.where(at < 0, at + self.count, at)
        beyond = flatten(self.items)[0][0].shape[0]  # where there is no item: torch raises
        at = torch.where((at >= 0) & (at < self.count), at, beyond).reshape(1)
        return map_leaves(lambda x: x[at].squeeze(0), self.items)

    def __len__(self) -> int:
        raise refusal("the length of a list as a number of Python")

    def __iter__(self) -> Any:
        raise refusal("a walk along a list inside an expression")

    def __add__(self, other: Any) -> Any:
        raise refusal("`+` or `*` of lists")

    __radd__ = __mul__ = __rmul__ = __add__


register(Grown, Grown.parts, lambda values, constants: Grown(*values, *constants), lambda _: ("items", "count"))


def refusal(got: str) -> UnsupportedError:
    hint = "torch.stack(out), out[i], len(out), out.append(x), or for x in out"
    return UnsupportedError(message(OP, "what a list that grew differently can do", got, hint=hint))


def refuse_returned(result: Any) -> None:
    """Refuse a result that holds a `Grown`."""
    leaves = tree_leaves(result, is_leaf=lambda x: isinstance(x, Grown)) if is_tree(result) else []
    if any([isinstance(x, Grown) for x in leaves]):
        raise refusal("one that is returned")


# -- lists that grow


def alike_lists(name: str, values: Sequence[Any], counts: Sequence[Any]) -> Sequence[Any]:
    """Values of one name; lists of different lengths among them as `Grown` with the same room."""
    lists = [x for x in values if isinstance(x, (list, Grown))]
    lengths = [len(x) if isinstance(x, list) else -1 for x in lists]
    if len(lists) < len(values) or not lists or (lengths[0] >= 0 and all([n == lengths[0] for n in lengths])):
        return values
    rooms, fixed = [room_of(x) for x in lists], [is_fixed(x) for x in lists]
    if all(fixed) and all([n == rooms[0] for n in rooms]):
        return values
    room: Any = 0
    for n in rooms:
        room = larger(room, n)
    even = all([type(x) is Grown and x.even for x in lists]) and all([n == room for n in rooms])
    item = template(lists)
    return [as_grown(name, x, n, item, room, any(fixed), even) for x, n in zip(values, counts, strict=True)]


def room_of(x: Any) -> Any:
    """The number of items that a list has room for."""
    return len(x) if isinstance(x, list) else flatten(x.items)[0][0].data.shape[1]


def template(lists: Sequence[Any]) -> Any:
    """An item of lists of which one is not empty, of all examples."""
    for x in lists:
        if type(x) is Grown:
            return map_leaves(lambda leaf: lane_of(leaf.data[:, 0], leaf.number), x.items)
    return next(x[-1] for x in lists if x)


def as_grown(name: str, x: Any, n: Any, like: Any, room: Any, fixed: bool, even: bool = False) -> Grown:
    """A list as `Grown` with some room; its items have the form of `like`."""
    if type(x) is Grown:
        items = map_leaves(lambda leaf: lane_of(padded(leaf.data, room - leaf.data.shape[1]), leaf.number), x.items)
        return Grown(items, x.count, fixed, even)
    leaves, spec = flatten(like)
    columns = [[as_lane(flatten(item)[0][j], n) for item in x] for j in range(len(leaves))]
    made = [column_of(name, c, as_lane(leaf, n), n, room) for c, leaf in zip(columns, leaves, strict=True)]
    count = torch.full((n,), len(x), device=made[0].data.device)
    return Grown(unflatten(made, spec), lane_of(count, True), fixed)


def column_of(name: str, parts: list[Lane], like: Lane, n: Any, room: Any) -> Lane:
    """Items side by side, and zeros after them."""
    one_shape(name, [*parts, like])
    data = [x.data for x in parts]
    dtype = common_dtype([*data, like.data])
    if not data:
        return lane_of(torch.zeros((n, room, *like.data.shape[1:]), dtype=dtype, device=like.data.device), like.number)
    found = torch.stack(cast(data, dtype), 1)
    return lane_of(padded(found, room - len(data)), like.number and all([x.number for x in parts]))


def padded(x: Tensor, more: Any) -> Tensor:
    """A tensor with so many zeros after dim 1."""
    return x if certain(more == 0) else F.pad(x, (0, 0) * (x.ndim - 2) + (0, more))


def appended(name: str, x: Any, value: Any, n: Any) -> Any:
    """A list with one more item."""
    if not isinstance(x, Grown):
        return [*x, value]
    whole = x if x.fixed else as_grown(name, x, n, None, room_of(x) + 1, False)
    leaves, spec = flatten(whole.items)
    pairs = zip(leaves, flatten(value)[0], strict=True)
    new = [written(name, leaf, as_lane(v, n), whole.count.data) for leaf, v in pairs]
    return Grown(unflatten(new, spec), lane_of(whole.count.data + 1, True), x.fixed, x.even and not x.fixed)


def written(name: str, items: Lane, value: Lane, count: Tensor) -> Lane:
    """Items with one more after those of each example."""
    data, new = items.data, value.data
    one_shape(name, [value, lane_of(data[:, 0])])
    dtype = common_dtype([data, new])
    here = torch.arange(data.shape[1], device=count.device) == count[:, None]
    here = here.reshape(*here.shape, *[1] * (data.ndim - 2))
    return lane_of(torch.where(here, new[:, None].to(dtype), data.to(dtype)), items.number and value.number)


def in_loop(name: str, before: Any, after: Any, n: Any, most: Any) -> Any:
    """A list that a round made longer, with room for what `most` rounds append; any other value as it is.

    Raises:
        StructureError: the number of rounds has no bound.
    """
    grows = isinstance(before, (list, Grown)) and isinstance(after, (list, Grown)) and not is_fixed(before)
    more = room_of(after) - room_of(before) if grows else 0
    if not grows or certain(more <= 0):
        return before
    if most is None:
        got, hint = f"{name!r} in a while", "tdc.batch(max_iters=...), how often the loop runs at most"
        raise StructureError(message(OP, "a bound for a list that grows in a graph", got, hint=hint))
    return as_grown(name, before, n, template([after]), room_of(before) + more * most, True)


def is_fixed(x: Any) -> bool:
    return type(x) is Grown and x.fixed


def after_loop(before: Any, after: Any, even: bool = False) -> Any:
    """A list after the loop of a graph that it grew in: room may be added again; `even` where each round appended as
    many items for all, so that the list is full."""
    if not is_fixed(after) or is_fixed(before):
        return after
    if even and (isinstance(before, list) or before.even):
        return Grown(after.items, after.count, False, True)
    expected, got = "no more items than a loop of at most max_iters rounds appends", "more"
    require((after.count.data <= room_of(after)).all(), message(OP, expected, got, hint="raise max_iters"))
    return Grown(after.items, after.count, False)


# -- functions in a block


def length(x: Any) -> Any:
    """`len(x)`; a 0-d tensor where it differs between examples."""
    if isinstance(x, Grown) and x.even:
        return tree_leaves(x.items)[0].shape[0]
    return x.count if isinstance(x, Grown) else x.size(0) if isinstance(x, RaggedExample) else builtins.len(x)


def items_of(x: Grown) -> tuple[Tensor, Tensor]:
    """The items of a list, and a mask of those that the example has.

    Raises:
        UnsupportedError: the items are trees.
    """
    items = x.items
    if not isinstance(items, Tensor):
        raise refusal("items other than tensors of one shape")
    there = torch.arange(items.shape[0], device=items.device) < x.count
    return items, there.reshape(-1, *[1] * (items.ndim - 1))


def total(x: Any, start: Any = 0) -> Any:
    """`sum(x, start)`."""
    if not isinstance(x, Grown):
        return builtins.sum(x, start)
    items, there = items_of(x)
    return start + torch.where(there, items, torch.zeros_like(items)).sum(0).to(items.dtype)


def decided(by: bool, x: Any) -> Any:
    """`any(x)` where `by` is True, else `all(x)`: a bool of each example where there are tensors."""
    if isinstance(x, Grown):
        items, there = items_of(x)
        return (there & items.bool()).any() if by else (~there | items.bool()).all()
    found: Any = not by
    for part in x:
        if isinstance(part, Tensor):
            one = part.reshape(()).bool()
            found = one | found if by else one & found
        elif bool(part) == by:
            return by
    return found


def furthest(fn: Any, values: Any) -> Any:
    """`max` or `min` of several values: the first of those that no other exceeds. That a `Grown` is not empty is
    checked eagerly only.

    Raises:
        ValueError: an example has no item.
    """
    largest = fn is builtins.max
    if not isinstance(values, Grown):
        found, *rest = values
        for other in rest:
            further = other > found if largest else other < found
            found = torch.where(further.reshape(()), other, found) if isinstance(further, Tensor) else fn(found, other)
        return found
    items, there = items_of(values)
    if not traced() and bool((physical(values.count, current_level()) == 0).any()):
        raise ValueError(f"{fn.__name__}() of a list that is empty for an example")
    least, most = (-torch.inf, torch.inf) if items.dtype.is_floating_point else limits(str(items.dtype))
    rest = torch.full_like(items, least if largest else most)
    first = (torch.arange(items.shape[0], device=items.device) == 0).reshape(-1, *[1] * (items.ndim - 1))
    whole = torch.where(there & (first | ~items.isnan()), items, rest)  # a NaN that is not first exceeds no other
    at = whole.argmax(0) if largest else whole.argmin(0)
    return items[at.reshape(1)].squeeze(0)


def builtin(fn: Any, *args: Any, **options: Any) -> Any:
    """A function that may be Python's `sum`, `any`, `all`, `max` or `min`, or one of the user by that name."""
    if fn is builtins.sum:
        return total(*args, **options)
    if fn is builtins.any or fn is builtins.all:
        return decided(fn is builtins.any, *args)
    if (fn is builtins.max or fn is builtins.min) and not options:
        values: Any = args if len(args) != 1 else args[0]
        if isinstance(values, Grown) or (isinstance(values, (tuple, list)) and values):
            return furthest(fn, values)
    return fn(*args, **options)


def stack(tensors: Any, dim: int = 0) -> Any:
    """`torch.stack`, of a list that grew to a ragged example."""
    if not isinstance(tensors, Grown):
        return torch.stack(tensors, dim)
    rows = rows_of(tensors)
    return rows if dim == 0 else torch.movedim(rows, 0, dim)


def cat(tensors: Any, dim: int = 0) -> Any:
    """`torch.cat`. In a graph it runs for all examples at once: torch's own rule fixes their number (torch 2.13)."""
    if isinstance(tensors, Grown):
        return torch.flatten(rows_of(tensors), 0, 1)
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


def rows_of(x: Grown) -> Any:
    """The items of a list as rows: a ragged example, or a tensor where all examples have as many."""
    items, _ = items_of(x)
    if x.even:
        return items
    level = current_level()
    with outside():
        packed = MaskedBatch(physical(items, level), physical(x.count, level)).to_packed()
    return RaggedExample(packed, level)
