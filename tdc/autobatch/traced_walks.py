"""What a `for` walks along in a graph: Python items one by one, or items that the number of a round picks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch.source import OP
from tdc.autobatch.values import Lane, flatten, unflatten
from tdc.autobatch.walks import as_whole
from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.segments import longest
from tdc.ragged.storage import is_ragged
from tdc.tensordict.tensordict import TensorDict


class Walked:
    """Items.

    Attributes:
        steps: the items of a Python iterable; None where a round picks them.
        lengths: how many items each example has, or one number for all.
        longest: how many rounds there are.
        device: of the items.
        scannable: whether all items can be had at once.
        full: whether somebody has an item in each round; the longest may be a bound only.
    """

    scannable = True
    full = False

    steps: Any = None
    lengths: Any
    longest: Any
    device: Any = None

    def has(self, k: Any, n: int) -> Any:
        """Who has an item in round `k`."""
        if isinstance(self.lengths, Tensor):
            return self.lengths > k
        found = k < self.lengths
        return found.expand(n) if isinstance(found, Tensor) else torch.full((n,), bool(found), device=self.device)

    def at(self, k: Any) -> Any:
        """The items of round `k`."""
        return self.item([picked(x, k) for x in self.tensors()])

    def tensors(self) -> list[Tensor]:
        """Tensors with the rounds in front."""
        raise NotImplementedError

    def item(self, parts: Sequence[Tensor]) -> Any:
        """The item that parts of `tensors` make up."""
        raise NotImplementedError

    def slices(self, n: int) -> list[Tensor]:
        """Who has an item, and `tensors`, with at least one round."""
        rounds = torch.arange(at_least_one(self.longest), device=self.device)
        mask = self.lengths > rounds[:, None] if isinstance(self.lengths, Tensor) else rounds[:, None] < self.lengths
        return [mask.expand(-1, n), *self.tensors()]


def at_least_one(n: Any) -> Any:
    """The number of rounds of a scan, which has one even if nobody has an item."""
    return torch.sym_max(n, 1)


def picked(x: Tensor, k: Any) -> Tensor:
    return x.index_select(0, k.reshape(1)).squeeze(0) if isinstance(k, Tensor) else x.select(0, k)


class Items(Walked):
    """Of a Python iterable."""

    def __init__(self, steps: Sequence[Any]) -> None:
        self.steps = steps
        self.lengths = self.longest = len(steps)

    def tensors(self) -> list[Tensor]:
        steps = [*self.steps]
        if not steps or not all([isinstance(x, (bool, int, float)) for x in steps]):
            got, hint = "a Python iterable beside one of the examples", "numbers and tensors can stand side by side"
            raise DtypeError(message(OP, "walks of one kind in zip", got, hint=hint))
        return [torch.tensor(steps)]

    def item(self, parts: Sequence[Tensor]) -> Any:
        return parts[0]


class Rows(Walked):
    """The rows of a tensor that each example has."""

    full = True

    def __init__(self, data: Tensor, backwards: bool) -> None:
        if data.ndim < 2:
            got, hint = "one number for each example", "range(n) counts to a number"
            raise ShapeError(message(OP, "something to walk along", got, hint=hint))
        self.data = (data.flip(1) if backwards else data).movedim(1, 0).clone(memory_format=torch.contiguous_format)
        self.lengths = self.longest = data.shape[1]
        self.device = data.device

    def tensors(self) -> list[Tensor]:
        return [self.data]

    def item(self, parts: Sequence[Tensor]) -> Any:
        return Lane(parts[0])


class RaggedRows(Walked):
    """The rows of ragged examples."""

    def __init__(self, x: NestedTensor, backwards: bool) -> None:
        if x.structure.packed_dim != 0 or x.structure.batch_dim != 0 or x.structure.ragged_ndim != 1:
            got, hint = describe(x), "a batch whose first dim of each example is the ragged one"
            raise ShapeError(message(OP, "rows to walk along", got, hint=hint))
        empty = x.values.new_zeros((1, *x.values.shape[1:]))
        self.values = torch.cat([x.values, empty])  # a row that those read who have none
        self.lengths, self.device = x.lengths.long(), x.values.device
        self.begins = x.offsets[:-1].long()
        self.longest = longest(x.structure)[0]
        self.backwards = backwards

    def positions(self, k: Any) -> Tensor:
        """Where the rows of round `k` lie; for those who have none, the last."""
        step = self.lengths - 1 - k if self.backwards else k
        return torch.where(k < self.lengths, self.begins + step, self.values.shape[0] - 1)

    def at(self, k: Any) -> Any:
        return Lane(self.values.index_select(0, self.positions(k)))

    def tensors(self) -> list[Tensor]:
        rounds = torch.arange(at_least_one(self.longest), device=self.device)
        where = self.positions(rounds[:, None])
        return [self.values.index_select(0, where.flatten()).unflatten(0, where.shape)]

    def item(self, parts: Sequence[Tensor]) -> Any:
        return Lane(parts[0])


class Range(Walked):
    """`range` with a bound that is a tensor."""

    scannable = False

    def __init__(self, start: Any, stop: Any, step: Any) -> None:
        self.apart = any([type(x) is Lane for x in (start, step)])
        begin, end, by = [as_whole(x).clone() for x in (start, stop, step)]
        self.begin, self.by, self.device = begin, by, (end + begin + by).device
        rounds = torch.div(end - begin + by - torch.sign(by), by, rounding_mode="floor").clamp(min=0)
        self.lengths = rounds if rounds.ndim else rounds.reshape(())
        self.longest = None

    def has(self, k: Any, n: int) -> Any:
        return (self.lengths > k).expand(n)

    def at(self, k: Any) -> Any:
        found = self.begin + k * self.by
        return Lane(found) if self.apart else found


class Zip(Walked):
    """Several walks side by side."""

    def __init__(self, parts: Sequence[Walked], n: int) -> None:
        self.parts = parts
        self.device = next((p.device for p in parts if p.device is not None), None)
        self.scannable = all([p.scannable for p in parts])
        longest = [p.longest for p in parts if p.longest is not None]
        self.longest = longest[0] if len(longest) == 1 else torch.sym_min(*longest) if longest else None
        self.lengths = torch.stack([as_lengths(p.lengths, n, self.device) for p in parts]).amin(0)

    def at(self, k: Any) -> Any:
        return tuple([p.at(k) for p in self.parts])

    def tensors(self) -> list[Tensor]:
        return [x[: self.longest] for p in self.parts for x in p.tensors()]

    def item(self, parts: Sequence[Tensor]) -> Any:
        counts = [len(p.tensors()) for p in self.parts]
        begins = [sum(counts[:i]) for i in range(len(counts))]
        return tuple([p.item(parts[b : b + c]) for p, b, c in zip(self.parts, begins, counts, strict=True)])


class Enumerate(Walked):
    """Numbered items."""

    def __init__(self, inner: Walked, start: Any) -> None:
        self.inner, self.start = inner, start
        self.lengths, self.longest, self.device = inner.lengths, inner.longest, inner.device
        self.scannable, self.full = inner.scannable, inner.full

    def at(self, k: Any) -> Any:
        return (k + self.start, self.inner.at(k))

    def tensors(self) -> list[Tensor]:
        return [torch.arange(self.longest, device=self.device) + self.start, *self.inner.tensors()]

    def item(self, parts: Sequence[Tensor]) -> Any:
        return (parts[0], self.inner.item(parts[1:]))


def as_lengths(lengths: Any, n: int, device: Any) -> Tensor:
    return lengths.expand(n) if isinstance(lengths, Tensor) else torch.full((n,), lengths, device=device)


def walk(tree: Any, values: list[Any], n: int, backwards: bool = False) -> Walked:
    """The items of a walk; `values` are those of its expressions, in order, and are used up."""
    kind, parts = tree
    if kind == "value":
        return along_value(values.pop(0), backwards)
    if kind == "reversed":
        return walk(parts[0], values, n, not backwards)
    if kind == "range":
        given = [values.pop(0) for _ in parts]
        start, stop, step = [(0, *given, 1), (*given, 1), (*given,)][len(given) - 1]
        if any([isinstance(x, (Lane, Tensor)) for x in given]):
            if backwards:
                start, stop, step = reversed_range(*[as_whole(x) for x in (start, stop, step)])
            return Range(start, stop, step)
        steps = list(range(start, stop, step))
        return Items(steps[::-1] if backwards else steps)
    if backwards:
        got = f"reversed({kind}(...))"
        raise DtypeError(message(OP, "something that Python can reverse", got, hint="reverse each part"))
    inner = [walk(p, values, n) for p in (parts if kind == "zip" else parts[:1])]
    start = values.pop(0) if kind == "enumerate" and len(parts) > 1 else 0
    if all([p.steps is not None for p in inner]):
        columns: Any = [p.steps for p in inner]
        return Items(list(zip(*columns, strict=False)) if kind == "zip" else list(enumerate(columns[0], start)))
    return Zip(inner, n) if kind == "zip" else Enumerate(inner[0], start)


def reversed_range(start: Tensor, stop: Tensor, step: Tensor) -> tuple[Lane, Lane, Lane]:
    """The bounds of a range from its end."""
    rounds = torch.div(stop - start + step - torch.sign(step), step, rounding_mode="floor").clamp(min=0)
    return Lane(start + (rounds - 1) * step), Lane(start - step), Lane(-step)


class TreeRows(Walked):
    """The rows of all tensors of a TensorDict."""

    def __init__(self, leaves: Sequence[Any], spec: Any, backwards: bool) -> None:
        self.leaves, self.spec = leaves, spec
        self.parts = [along_value(x, backwards) for x in leaves]
        self.lengths, self.longest = self.parts[0].lengths, self.parts[0].longest
        self.device = self.parts[0].device

    def tensors(self) -> list[Tensor]:
        return [x for p in self.parts for x in p.tensors()]

    def item(self, parts: Sequence[Tensor]) -> Any:
        rows = zip(self.parts, parts, strict=True)
        return unflatten([p.item([part]) for p, part in rows], self.spec)


def along_value(x: Any, backwards: bool) -> Walked:
    """The items of one value."""
    if isinstance(x, TensorDict) and any([type(leaf) is Lane for leaf in flatten(x)[0]]):
        return TreeRows(*flatten(x), backwards)
    if type(x) is not Lane:
        items = [*x]
        return Items(items[::-1] if backwards else items)
    if is_ragged(x.data):
        return RaggedRows(x.data.to_packed() if isinstance(x.data, MaskedBatch) else x.data, backwards)
    return Rows(x.data, backwards)
