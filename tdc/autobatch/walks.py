"""Iterables of a `for`: which examples have an item in a round, and the items.

    has(k)                True, False, or a mask of the examples with an item in round `k`
    item(k)               the items of round `k`, of all examples
    item_of(k, at)        those of the examples at some positions, which all have one; `at` is None for all in order
    table()               all items, as one value with the rounds in front

In a graph `k` is a number, a 0-d tensor, or a tensor with the round of each example; an example without an item gets
that of another. Shared iterables are walked as Python does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch import blocks
from tdc.autobatch.lists import Grown, room_of
from tdc.autobatch.source import OP
from tdc.autobatch.tree import ITEM
from tdc.autobatch.values import UNDEFINED, Lane, flatten, is_lane, lane_of, map_leaves, select, unflatten
from tdc.compile.upstream import traced
from tdc.core.dynamo import certain, larger, smaller
from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.layout.segments import longest
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import is_ragged
from tdc.tensordict.tensordict import TensorDict

Form = tuple[str, tuple[Any, ...]]  # of a walk, as `Walk.form` has it


class Steps:
    """The items of a walk.

    Attributes:
        items: those of a Python iterable; None of any other.
        lengths: their number, one for all or one for each example.
        full: in each round of `table` an example has an item; else its length is a bound.
        device: of the items.
    """

    items: Any = None
    lengths: Any
    full = False
    device: Any = None

    def scannable(self) -> bool:
        """True if `table` gives all items."""
        return True

    def has(self, k: Any) -> Any:
        return self.lengths > k

    def item(self, k: Any) -> Any:
        raise NotImplementedError

    def item_of(self, k: int, at: Tensor | None) -> Any:
        return self.item(k) if at is None else select(self.item(k), at)

    def longest(self) -> Any:
        """The number of rounds; None where it depends on data."""
        return self.lengths

    def table(self) -> Any:
        raise NotImplementedError


class Slices:
    """The rows of a shared tensor, each taken where it is used: an operator takes no two views of one memory."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return self.x.shape[0]

    def __getitem__(self, k: int) -> Tensor:
        return self.x.select(0, k)


class Items(Steps):
    """Items of a Python iterable: shared, but for lanes among them."""

    def __init__(self, items: Any) -> None:
        self.items = items
        self.lengths = len(items)

    def item(self, k: Any) -> Any:
        if not isinstance(k, Tensor):
            return self.items[k]
        table = self.table().to(k.device)
        where = k.reshape(-1).clamp(max=table.shape[0] - 1)
        found = table.index_select(0, where).reshape((*k.shape, *table.shape[1:]))
        return lane_of(found) if k.ndim else found

    def table(self) -> Any:
        """Numbers or rows in a tensor; of no items one that is never read."""
        if len(self.items) == 0:
            return torch.zeros(1, dtype=torch.long)
        if type(self.items) is Slices:
            return self.items.x
        if not all([isinstance(x, (bool, int, float)) for x in self.items]):
            got, hint = "a Python iterable beside one of the examples", "numbers and tensors can be walked side by side"
            raise DtypeError(message(OP, "walks of one kind in zip", got, hint=hint))
        return torch.tensor([*self.items])


class Rows(Steps):
    """The rows of a tensor of each example: equally many."""

    full = True

    def __init__(self, data: Tensor) -> None:
        if data.ndim < 2:
            got, hint = "one number for each example", "range(n) counts to a number"
            raise ShapeError(message(OP, "something to walk along", got, hint=hint))
        self.data = data
        self.rows: Any = None  # unbound once, so that their gradients are stacked once
        self.lengths = data.shape[1]
        self.device = data.device

    def item(self, k: Any) -> Any:
        if isinstance(k, int):
            self.rows = self.data.unbind(1) if self.rows is None else self.rows
            return lane_of(self.rows[k])
        if k.ndim == 0:
            return lane_of(self.data.index_select(1, k.reshape(1)).squeeze(1))
        here = torch.arange(self.data.shape[0], device=self.device)
        return lane_of(self.data[here, k.clamp(max=self.data.shape[1] - 1)])

    def every(self) -> Tensor:
        return self.data.flatten(0, 1)

    def with_rows(self, rows: Tensor) -> Rows:
        return Rows(rows.unflatten(0, self.data.shape[:2]))

    def table(self) -> Any:
        return lane_of(self.data.movedim(1, 0).clone(memory_format=torch.contiguous_format))


class RaggedRows(Steps):
    """The rows of ragged examples; in a graph `values` has one more, for examples without an item."""

    def __init__(self, x: NestedTensor, backwards: bool, values: Tensor | None = None) -> None:
        if x.structure.packed_dim != 0 or x.structure.batch_dim != 0 or x.structure.ragged_ndim != 1:
            got, hint = describe(x), "a batch whose first dim of each example is the ragged one"
            raise ShapeError(message(OP, "rows to walk along", got, hint=hint))
        self.x, self.backwards = x, backwards
        self.lengths, self.begins = x.lengths.long(), x.offsets[:-1].clone().long()
        self.device = x.values.device
        self.values = with_row(x.values) if values is None and traced() else values
        self.split: Any = None
        self.most = longest(x.structure)[0]

    def longest(self) -> Any:
        return self.most

    def item(self, k: Any) -> Any:
        return lane_of(self.rows(self.positions(k)))

    def every(self) -> Tensor:
        return self.x.values if self.values is None else self.values

    def with_rows(self, rows: Tensor) -> RaggedRows:
        if self.values is None:
            return RaggedRows(self.x.with_values(rows), self.backwards)
        return RaggedRows(self.x, self.backwards, rows)

    def rows(self, where: Tensor) -> Tensor:
        if self.values is None:
            self.values = with_row(self.x.values)
        return self.values.index_select(0, where)

    def positions(self, k: Any) -> Tensor:
        """The positions of the rows of a round; the last for examples without one."""
        step = self.lengths - 1 - k if self.backwards else k
        return torch.where(k < self.lengths, self.begins + step, self.x.values.shape[0])

    def table(self) -> Any:
        rounds = torch.arange(at_least_one(self.longest()), device=self.device)
        where = self.positions(rounds[:, None])
        return lane_of(self.rows(where.flatten()).unflatten(0, where.shape))

    def item_of(self, k: int, at: Tensor | None) -> Any:
        """Rows in the order of the rounds, split once, without padding."""
        if self.split is None:
            step = torch.arange(self.most, device=self.device)
            there = step[:, None] < self.lengths
            who = [row.nonzero().squeeze(1) for row in there]
            rows = self.x.values.index_select(0, self.positions(step[:, None])[there])
            self.split = who, rows.split(there.sum(1).tolist())
        who, rows = self.split[0][k], self.split[1][k]
        if at is None or (len(at) == len(who) and torch.equal(at, who)):
            return lane_of(rows)
        return lane_of(rows.index_select(0, torch.searchsorted(who, at)))


def with_row(values: Tensor) -> Tensor:
    """Rows, and a row of zeros."""
    return torch.cat([values, values.new_zeros((1, *values.shape[1:]))])


def at_least_one(n: Any) -> Any:
    """The number of rounds of a scan, which has one without any items, too."""
    return larger(n, 1)


class ListItems(Steps):
    """The items of a list of which each example has its own length."""

    def __init__(self, x: Grown, backwards: bool) -> None:
        self.x, self.backwards = x, backwards
        self.lengths, self.device = x.count.data, x.count.data.device

    def longest(self) -> Any:
        return room_of(self.x)

    def item(self, k: Any) -> Any:
        last = self.lengths - 1
        step = (last - k if self.backwards else k + torch.zeros_like(last)).clamp(0, room_of(self.x) - 1)
        here = torch.arange(self.lengths.shape[0], device=self.device)
        return map_leaves(lambda x: lane_of(x.data[here, step], x.number), self.x.items)

    def table(self) -> Any:
        return self.item(torch.arange(at_least_one(self.longest()), device=self.device)[:, None])


class Range(Steps):
    """`range` with bounds that are tensors."""

    def __init__(self, start: Any, stop: Any, step: Any, backwards: bool) -> None:
        begin, end, by = [as_whole(x) for x in (start, stop, step)]
        if not traced() and (by == 0).any():
            raise ShapeError(message(OP, "a step of range that is not 0", "0", hint="range(a, b, 1) counts up"))
        divisor = torch.where(by == 0, 1, by)  # of inactive examples in a graph
        rounds = torch.div(end - begin + by - by.sign(), divisor, rounding_mode="floor").clamp(min=0)
        rounds = torch.where(by == 0, 0, rounds)
        self.lengths, self.device = rounds, rounds.device
        self.begin, self.by = (begin + (rounds - 1) * by, -by) if backwards else (begin, by)
        self.varies = self.begin.ndim + self.by.ndim > 0
        self.numbers = start, step, type(start) is int and type(step) is int and not backwards

    def scannable(self) -> bool:
        return False

    def longest(self) -> Any:
        return None

    def item(self, k: Any) -> Any:
        start, step, fixed = self.numbers
        if fixed and isinstance(k, int):
            return start + k * step
        found = self.begin + k * self.by
        return lane_of(found) if found.ndim else found


def as_whole(x: Any) -> Tensor:
    """A bound as a tensor of int64."""
    data = x.data if type(x) is Lane else torch.as_tensor(x)
    if data.is_floating_point() or data.is_complex() or data.dtype == torch.bool:
        raise DtypeError(message(OP, "whole numbers in range", describe(data), hint="range(n.long())"))
    return data.reshape(-1 if type(x) is Lane else ()).long()


class Zip(Steps):
    """Several walks side by side; the shortest ends it."""

    def __init__(self, parts: Sequence[Steps]) -> None:
        self.parts = parts
        self.device = next((p.device for p in parts if p.device is not None), None)
        lengths = [p.lengths for p in parts]
        if any([isinstance(x, Tensor) for x in lengths]):
            whole = [torch.as_tensor(x, device=self.device) for x in lengths]
            self.lengths = torch.stack(torch.broadcast_tensors(*whole)).amin(0)
        else:
            self.lengths = min(lengths)

    def scannable(self) -> bool:
        """True if all parts are, and of one length: Inductor (torch 2.13) compiles no scan of `min(a, b)`."""
        found = self.bounds()
        return all([p.scannable() for p in self.parts]) and all([certain(n == found[0]) for n in found[1:]])

    def bounds(self) -> list[Any]:
        """The longest lengths of parts, where they are known."""
        return [n for n in [p.longest() for p in self.parts] if n is not None]

    def longest(self) -> Any:
        found = self.bounds()
        return reduce(smaller, found) if found else None

    def item(self, k: Any) -> Any:
        return tuple([p.item(k) for p in self.parts])

    def item_of(self, k: int, at: Tensor | None) -> Any:
        return tuple([p.item_of(k, at) for p in self.parts])

    def table(self) -> Any:
        n = at_least_one(self.longest())
        tables = [p.table() for p in self.parts]
        return tuple([map_leaves(lambda x: lane_of(x.data[:n]) if type(x) is Lane else x[:n], t) for t in tables])


class Enumerate(Steps):
    """Numbered items."""

    def __init__(self, inner: Steps, start: Any) -> None:
        self.inner, self.start = inner, start
        self.lengths, self.device = inner.lengths, inner.device
        self.full = inner.full

    def scannable(self) -> bool:
        return self.inner.scannable()

    def longest(self) -> Any:
        return self.inner.longest()

    def item(self, k: Any) -> Any:
        return (self.number(k), self.inner.item(k))

    def number(self, k: Any) -> Any:
        """The number of a round."""
        found = k + (self.start.data if type(self.start) is Lane else self.start)
        return lane_of(found) if isinstance(found, Tensor) and found.ndim else found

    def item_of(self, k: int, at: Tensor | None) -> Any:
        number = self.number(k)
        return (number if at is None else select(number, at), self.inner.item_of(k, at))

    def table(self) -> Any:
        rounds, start = torch.arange(at_least_one(self.longest()), device=self.device), self.start
        numbers = lane_of(rounds[:, None] + start.data) if type(start) is Lane else rounds + start
        return (numbers, self.inner.table())


class Together(Steps):
    """Walks of one length as one, whose items are the leaves of a tree such as a TensorDict or a tuple."""

    def __init__(self, parts: Sequence[Steps], spec: Any) -> None:
        self.parts, self.spec = parts, spec
        self.lengths, self.device, self.full = parts[0].lengths, parts[0].device, parts[0].full

    def longest(self) -> Any:
        return self.parts[0].longest()

    def item(self, k: Any) -> Any:
        return unflatten([p.item(k) for p in self.parts], self.spec)

    def item_of(self, k: int, at: Tensor | None) -> Any:
        return unflatten([p.item_of(k, at) for p in self.parts], self.spec)

    def table(self) -> Any:
        return unflatten([p.table() for p in self.parts], self.spec)


def walk(form: Form, values: list[Any], backwards: bool = False) -> Steps:
    """The steps of a walk; the values of its expressions, in order, are popped."""
    kind, parts = form
    if kind == "value":
        return along_value(values.pop(0), backwards)
    if kind == "reversed":
        return walk(parts[0], values, not backwards)
    if kind == "range":
        given = [as_number(values.pop(0)) for _ in parts]
        start, stop, step = [(0, *given, 1), (*given, 1), (*given,)][len(given) - 1]
        if any([isinstance(x, (Lane, Tensor)) for x in given]):
            return Range(start, stop, step, backwards)
        items = range(start, stop, step)
        return Items(items[::-1] if backwards else items)
    if backwards:
        got = f"reversed({kind}(...))"
        raise DtypeError(message(OP, "something that Python can reverse", got, hint="reverse each part"))
    inner = [walk(p, values) for p in (parts if kind == "zip" else parts[:1])]
    start = whole_number(values.pop(0)) if kind == "enumerate" and len(parts) > 1 else 0
    if all([p.items is not None for p in inner]):
        columns: Any = [[p.items[k] for k in range(len(p.items))] for p in inner]
        numbers = [] if kind == "zip" else [[Enumerate(inner[0], start).number(k) for k in range(len(columns[0]))]]
        return Items([*zip(*numbers, *columns, strict=False)])
    return Zip(inner) if kind == "zip" else Enumerate(inner[0], start)


def as_number(x: Any) -> Any:
    """A shared bound as an int, where it can be read."""
    return int(as_whole(x)) if isinstance(x, Tensor) and not traced() else x


def whole_number(x: Any) -> Any:
    """The start of `enumerate`: an int, or a tensor of int64."""
    x = as_number(x)
    return lane_of(as_whole(x)) if type(x) is Lane else as_whole(x) if isinstance(x, Tensor) else x


def along_value(x: Any, backwards: bool) -> Steps:
    """The steps along one value."""
    if isinstance(x, TensorDict):
        leaves, spec = flatten(x)
        if any([type(leaf) is Lane for leaf in leaves]):
            return Together([along_value(leaf, backwards) for leaf in leaves], spec)
    if type(x) is Grown:
        leaves, spec = flatten(x.items)
        if x.even and not any([leaf.number for leaf in leaves]):
            return Together([along_value(leaf, backwards) for leaf in leaves], spec)
        return ListItems(x, backwards)
    if type(x) is not Lane:
        if isinstance(x, Tensor) and x.ndim and traced():
            return Items(Slices(x.flip(0) if backwards else x))
        items = [*x]
        return Items(items[::-1] if backwards else items)
    return RaggedRows(x.data, backwards) if is_ragged(x.data) else Rows(x.data.flip(1) if backwards else x.data)


def made(
    steps: Steps, fn: Callable[..., Any], names: Sequence[str], args: Sequence[Any], inside: Any = None
) -> tuple[Steps, bool]:
    """The results of a block (`hoist`) as steps, and True if there are any: of rows, where its other inputs are shared.
    It runs once for the rows of all rounds and examples."""
    others = [x for name, x in zip(names, args, strict=True) if name != ITEM]
    shared = [x is not UNDEFINED and not any([type(leaf) is Lane for leaf in flatten(x)[0]]) for x in others]
    if inside is not None or not isinstance(steps, (Rows, RaggedRows)) or not all(shared):
        return steps, False
    rows = steps.every()
    if rows.shape[0] == 0:
        return steps, False
    given = [lane_of(rows) if name == ITEM else x for name, x in zip(names, args, strict=True)]
    found, spec = flatten(tuple(blocks.run(fn, given, rows.shape[0])))
    if not found or not all([is_lane(x) for x in found]):
        return steps, False
    return Together([steps.with_rows(x.data) for x in found], spec), True
