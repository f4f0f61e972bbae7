"""Lists of which each example has its own number of items, as one tensor.

A list that grows in a loop is a list of Python as long as all examples have one length. Where lists of different
lengths meet, and in loops of a graph, it is `Grown`: the items side by side, with room for more, and how many each
example has. In a block, which sees one example, `Grown` has what a list has: `out[i]`, `len(out)`, `torch.stack(out)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
    map_leaves,
    one_shape,
    unflatten,
)
from tdc.core.asserts import require
from tdc.core.dynamo import larger
from tdc.core.errors import StructureError, UnsupportedError, message
from tdc.core.pytree import register, tree_leaves


class Grown(Compound):
    """A list of which each example has its own length.

    Attributes:
        items: a value with (B, room, ...) for what is (B, ...) in an item; in a block (room, ...).
        count: how many items each example has; in a block a 0-d tensor.
        fixed: whether no room may be added, as in a loop of a graph.
        even: whether each example has as many items as there is room for.
    """

    def __init__(self, items: Any, count: Any, fixed: bool, even: bool = False) -> None:
        self.items = items
        self.count = count
        self.fixed = fixed
        self.even = even

    def parts(self) -> tuple[list[Any], tuple[Any, ...]]:
        return [self.items, self.count], (self.fixed, self.even)

    def __getitem__(self, i: Any) -> Any:
        """The item at a position, of one example."""
        if isinstance(i, slice) or not (isinstance(i, int) or (isinstance(i, Tensor) and i.ndim == 0)):
            raise refusal("out[...] with something else than a position")
        at = torch.as_tensor(i, device=self.count.device)
        at = torch.where(at < 0, at + self.count, at)
        beyond = flatten(self.items)[0][0].shape[0]  # where there is no item: torch says so
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
    """Refuse a result that holds a list that grew differently for each example."""
    leaves = tree_leaves(result, is_leaf=lambda x: isinstance(x, Grown)) if is_tree(result) else []
    if any([isinstance(x, Grown) for x in leaves]):
        raise refusal("one that is returned")


def alike_lists(name: str, values: Sequence[Any], counts: Sequence[Any]) -> Sequence[Any]:
    """Values of one name; where lists of different lengths are among them, all as `Grown` with the same room."""
    lists = [x for x in values if isinstance(x, (list, Grown))]
    lengths = [len(x) if isinstance(x, list) else -1 for x in lists]
    if len(lists) < len(values) or not lists or (lengths[0] >= 0 and all([n == lengths[0] for n in lengths])):
        return values
    rooms = [room_of(x) for x in lists]
    if all([is_fixed(x) for x in lists]) and all([n == rooms[0] for n in rooms]):
        return values
    room: Any = 0
    for n in rooms:
        room = larger(room, n)
    first = template(lists)
    fixed = any([is_fixed(x) for x in lists])
    even = all([type(x) is Grown and x.even for x in lists]) and all([n == room for n in rooms])
    return [as_grown(name, x, n, first, room, fixed, even) for x, n in zip(values, counts, strict=True)]


def room_of(x: Any) -> Any:
    """How many items a list has room for."""
    return len(x) if isinstance(x, list) else flatten(x.items)[0][0].data.shape[1]


def template(lists: Sequence[Any]) -> Any:
    """An item of lists of which one is not empty, of all examples."""
    for x in lists:
        if type(x) is Grown:
            return map_leaves(lambda leaf: lane_of(leaf.data[:, 0], leaf.number), x.items)
    return next(x[-1] for x in lists if x)


def as_grown(name: str, x: Any, n: Any, like: Any, room: Any, fixed: bool, even: bool = False) -> Grown:
    """A list as `Grown` with some room; its items look like another."""
    if type(x) is Grown:
        items = map_leaves(lambda leaf: lane_of(padded(leaf.data, room - leaf.data.shape[1]), leaf.number), x.items)
        return Grown(items, x.count, fixed, even)
    leaves, spec = flatten(like)
    columns = [[as_lane(flatten(item)[0][j], n) for item in x] for j in range(len(leaves))]
    made = [column_of(name, c, as_lane(leaf, n), n, room) for c, leaf in zip(columns, leaves, strict=True)]
    count = torch.full((n,), len(x), device=made[0].data.device)
    return Grown(unflatten(made, spec), lane_of(count, True), fixed)


def column_of(name: str, parts: list[Lane], like: Lane, n: Any, room: Any) -> Lane:
    """Items side by side, and zeros behind them."""
    one_shape(name, [*parts, like])
    data = [x.data for x in parts]
    dtype = common_dtype([*data, like.data])
    if not data:
        return lane_of(torch.zeros((n, room, *like.data.shape[1:]), dtype=dtype, device=like.data.device), like.number)
    found = torch.stack(cast(data, dtype), 1)
    return lane_of(padded(found, room - len(data)), like.number and all([x.number for x in parts]))


def padded(x: Tensor, more: Any) -> Tensor:
    """With so many zeros behind what stands along dim 1."""
    return x if type(more) is int and more == 0 else F.pad(x, (0, 0) * (x.ndim - 2) + (0, more))


def appended(name: str, x: Any, value: Any, n: Any) -> Any:
    """A list with one more item."""
    if not isinstance(x, Grown):
        return [*x, value]
    whole = x if x.fixed else as_grown(name, x, n, None, room_of(x) + 1, False)
    leaves, spec = flatten(whole.items)
    new = [
        written(name, leaf, as_lane(v, n), whole.count.data) for leaf, v in zip(leaves, flatten(value)[0], strict=True)
    ]
    return Grown(unflatten(new, spec), lane_of(whole.count.data + 1, True), x.fixed, x.even and not x.fixed)


def written(name: str, items: Lane, value: Lane, count: Tensor) -> Lane:
    """Items with one more behind those that each example has."""
    rest = items.data.shape[2:]
    one_shape(name, [value, lane_of(items.data[:, 0])])
    dtype = common_dtype([items.data, value.data])
    here = torch.arange(items.data.shape[1], device=count.device) == count[:, None]
    here = here.reshape(*here.shape, *[1] * len(rest))
    return lane_of(
        torch.where(here, value.data[:, None].to(dtype), items.data.to(dtype)), items.number and value.number
    )


def in_loop(name: str, before: Any, after: Any, n: Any, most: Any) -> Any:
    """A list that a round made longer, with room for what so many rounds append; any other value as it is.

    Raises:
        StructureError: nothing says how many rounds there are at most.
    """
    grows = isinstance(before, (list, Grown)) and isinstance(after, (list, Grown)) and not is_fixed(before)
    more = room_of(after) - room_of(before) if grows else 0
    if not grows or (type(more) is int and more <= 0):
        return before
    if most is None:
        got, hint = f"{name!r} in a while", "tdc.batch(max_iters=...), how often the loop runs at most"
        raise StructureError(message(OP, "a bound for a list that grows in a graph", got, hint=hint))
    return as_grown(name, before, n, template([after]), room_of(before) + more * most, True)


def is_fixed(x: Any) -> bool:
    return type(x) is Grown and x.fixed


def behind_loop(before: Any, after: Any, even: bool = False) -> Any:
    """A list behind the loop of a graph that it grew in: room may be added again; `even` where each round appended as
    many items for all, so that the list is full."""
    if not is_fixed(after) or is_fixed(before):
        return after
    if even and (isinstance(before, list) or before.even):
        return Grown(after.items, after.count, False, True)
    expected, got = "no more items than a loop of at most max_iters rounds appends", "more"
    require((after.count.data <= room_of(after)).all(), message(OP, expected, got, hint="raise max_iters"))
    return Grown(after.items, after.count, False)
