"""What a `for` walks along, step by step, for the examples that entered it.

    has(step, at)     who has an item at a step: all, none, or a mask
    item(step, at)    the items of a step

`at` has the positions, among the examples that entered, of those who are still there; None for all of them in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch.source import OP
from tdc.autobatch.tree import Walk
from tdc.autobatch.values import Lane, flatten, select, unflatten
from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import is_ragged
from tdc.tensordict.tensordict import TensorDict


class Steps:
    """Items that the examples have.

    Attributes:
        lengths: how many, one number for all or one for each example.
    """

    lengths: Any

    def has(self, step: int, at: Tensor | None) -> bool | Tensor:
        """Who has an item at a step."""
        if not isinstance(self.lengths, Tensor):
            return step < self.lengths
        lengths = self.lengths if at is None else self.lengths[at]
        mask = lengths > step
        count = int(mask.sum())
        return mask if 0 < count < len(mask) else count > 0

    def item(self, step: int, at: Tensor | None) -> Any:
        raise NotImplementedError


class Items(Steps):
    """Of a Python iterable: the same for all examples, but for lanes among them."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items
        self.lengths = len(items)

    def item(self, step: int, at: Tensor | None) -> Any:
        return self.items[step] if at is None else select(self.items[step], at)


class Rows(Steps):
    """The rows of a tensor that each example has: equally many."""

    def __init__(self, data: Tensor) -> None:
        if data.ndim < 2:
            got, hint = "one number for each example", "range(n) counts to a number"
            raise ShapeError(message(OP, "something to walk along", got, hint=hint))
        self.rows = data.unbind(1)
        self.lengths = len(self.rows)

    def item(self, step: int, at: Tensor | None) -> Any:
        row = self.rows[step]
        return Lane(row if at is None else row.index_select(0, at))


class RaggedRows(Steps):
    """The rows of ragged examples, in the order of the steps: nothing is padded."""

    def __init__(self, x: NestedTensor, backwards: bool = False) -> None:
        if x.structure.packed_dim != 0 or x.structure.batch_dim != 0 or x.structure.ragged_ndim != 1:
            got, hint = describe(x), "a batch whose first dim of each example is the ragged one"
            raise ShapeError(message(OP, "rows to walk along", got, hint=hint))
        lengths = x.lengths.long()
        begins = lengths.cumsum(0) - lengths
        longest = int(lengths.max()) if len(lengths) else 0
        step = torch.arange(longest, device=lengths.device)
        there = step[:, None] < lengths
        position = begins + (lengths - 1 - step[:, None] if backwards else step[:, None])
        self.lengths = lengths
        self.who = [row.nonzero().squeeze(1) for row in there]
        self.steps = x.values.index_select(0, position[there]).split(there.sum(1).tolist())

    def item(self, step: int, at: Tensor | None) -> Any:
        rows, who = self.steps[step], self.who[step]
        if at is None or (len(at) == len(who) and torch.equal(at, who)):
            return Lane(rows)
        return Lane(rows.index_select(0, torch.searchsorted(who, at)))


class Range(Steps):
    """`range` with bounds that may differ between examples."""

    def __init__(self, start: Any, stop: Any, step: Any, count: int, backwards: bool = False) -> None:
        given: tuple[Any, ...] = (start, stop, step)
        self.backwards = backwards
        self.varies = type(start) is Lane or type(step) is Lane
        self.start: Any
        self.step: Any
        if any([type(x) is Lane for x in given]):
            begin, end, by = [as_whole(x) for x in given]
            found = torch.div(end - begin + by - by.sign(), by, rounding_mode="floor")
            self.lengths = found.clamp(min=0).expand(count)
            self.start, self.step = (begin, by) if self.varies else (int(begin), int(by))
        else:
            self.start, last, self.step = [int(x) for x in given]
            self.lengths = len(range(self.start, last, self.step))

    def item(self, step: int, at: Tensor | None) -> Any:
        turn = self.lengths - 1 - step if self.backwards else step
        if not self.varies and not isinstance(turn, Tensor):
            return self.start + turn * self.step
        found = self.start + turn * self.step
        return Lane(found if at is None else found[at])


def as_whole(x: Any) -> Any:
    """A bound as a tensor of whole numbers."""
    data = x.data if type(x) is Lane else torch.as_tensor(x)
    if data.is_floating_point() or data.is_complex() or data.dtype == torch.bool:
        raise DtypeError(message(OP, "whole numbers in range", describe(data), hint="range(n.long())"))
    return data.reshape(-1) if type(x) is Lane else data


class Zip(Steps):
    """Several walks side by side; the shortest ends it."""

    def __init__(self, parts: Sequence[Steps]) -> None:
        self.parts = parts
        lengths: Any = 0 if not parts else parts[0].lengths
        for p in parts[1:]:
            if isinstance(lengths, Tensor) or isinstance(p.lengths, Tensor):
                lengths = torch.minimum(torch.as_tensor(lengths), torch.as_tensor(p.lengths))
            else:
                lengths = min(lengths, p.lengths)
        self.lengths = lengths

    def item(self, step: int, at: Tensor | None) -> Any:
        return tuple([p.item(step, at) for p in self.parts])


class Enumerate(Steps):
    """Numbered items."""

    def __init__(self, inner: Steps, start: int) -> None:
        self.inner, self.start = inner, start
        self.lengths = inner.lengths

    def item(self, step: int, at: Tensor | None) -> Any:
        return (self.start + step, self.inner.item(step, at))


def steps_of(walk: Walk, values: list[Any], count: int, backwards: bool = False) -> Steps:
    """The steps of a walk; `values` are those of its expressions, in order, and are used up."""
    if walk.kind == "value":
        return steps_along(values.pop(0), backwards)
    if walk.kind == "reversed":
        return steps_of(walk.parts[0], values, count, not backwards)
    if walk.kind == "range":
        given = [values.pop(0) for _ in walk.parts]
        start, stop, step = [(0, *given, 1), (*given, 1), (*given,)][len(given) - 1]
        return Range(start, stop, step, count, backwards)
    if backwards:
        got = f"reversed({walk.kind}(...))"
        raise DtypeError(message(OP, "something that Python can reverse", got, hint="reverse each part"))
    if walk.kind == "zip":
        return Zip([steps_of(p, values, count) for p in walk.parts])
    inner = steps_of(walk.parts[0], values, count)
    return Enumerate(inner, int(values.pop(0)) if len(walk.parts) > 1 else 0)


def steps_along(x: Any, backwards: bool) -> Steps:
    """The steps along one value."""
    if type(x) is not Lane:
        items = rows_of(x) if isinstance(x, TensorDict) else [*x]
        return Items(items[::-1] if backwards else items)
    if is_ragged(x.data):
        nested = x.data.to_packed() if isinstance(x.data, MaskedBatch) else x.data
        return RaggedRows(nested, backwards)
    return Rows(x.data.flip(1) if backwards else x.data)


def rows_of(td: TensorDict) -> list[Any]:
    """The rows of a TensorDict whose leaves may be lanes: of each leaf the first dim behind the examples."""
    leaves, spec = flatten(td)
    steps = [Rows(leaf.data) if type(leaf) is Lane else Items([*leaf]) for leaf in leaves]
    return [unflatten([s.item(t, None) for s in steps], spec) for t in range(int(steps[0].lengths))]
