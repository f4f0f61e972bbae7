"""Images as views, one example after another, on CPU: moves, sorts, scans and reductions of their lines or columns.

An index of every position would be larger than the image, and take longer to make than the copy. A packed example is a
view of the values with the sizes it has: torch copies from any view of it, and works along any dim of it.

    values (*S0, N, *S1)     example b: (*S0, h, w, *S1) -> what a `Move` takes of it -> (*S0, k, l, *S1)

In graphs, under transforms of `torch.func`, on a GPU and for small examples elements move by an index, in one gather.

Invariant: `Moved` differentiates a move by the same move the other way, as often as anybody asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tdc.core.dynamo import readable, trace_as
from tdc.ragged.nested import NestedTensor
from tdc.ragged.segments import on_host, sizes_of
from tdc.ragged.structure import Structure

LEAST = 4096  # elements of an example in the mean, below which a gather takes less time


class Strided(NamedTuple):
    """A view as the numbers that `as_strided` takes. To make it view by view takes longer than a small copy.

    Attributes:
        size, stride, offset: of the view.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def narrow(self, dim: int, start: int, length: int) -> Strided:
        """Some of the elements along a dim."""
        size = (*self.size[:dim], length, *self.size[dim + 1 :])
        return Strided(size, self.stride, self.offset + start * self.stride[dim])

    def permute(self, order: Sequence[int]) -> Strided:
        """The dims in another order."""
        return Strided(tuple([self.size[d] for d in order]), tuple([self.stride[d] for d in order]), self.offset)


class Move(NamedTuple):
    """What becomes of an example.

    Attributes:
        parts: `(example, result, b)`: views of example b and of its result that have the same elements.
        reversed: dims in which a view of the result has them the other way round.
        whole: every element is taken.
    """

    parts: Callable[[Strided, Strided, int], list[tuple[Strided, Strided]]]
    reversed: tuple[int, ...] = ()
    whole: bool = True


class Plan(NamedTuple):
    """A move of a packed batch: the sizes of each example before and behind it, and the packed axis."""

    move: Move
    before: list[list[int]]
    behind: list[list[int]]
    axis: int


def by_views(x: Any) -> bool:
    """Whether the examples of a batch are better taken one by one."""
    if not isinstance(x, NestedTensor) or x.structure.ragged_ndim == 1 or not x._values.is_cpu or not readable():
        return False
    if type(x._values) not in (Tensor, nn.Parameter):  # a class of its own, which new memory would not have
        return False
    return 0 < LEAST * x.structure.batch_size <= x._values.numel()


def never(x: Any) -> bool:
    """What Dynamo traces in place of `by_views`."""
    return False


trace_as(by_views, never)


def moved(values: Tensor, s: Structure, t: Structure, move: Move) -> Tensor:
    """The values of a batch of structure s, moved into one of structure t; both have one packed axis."""
    sizes = on_host(sizes_of(s))
    return Moved.apply(values, Plan(move, sizes, sizes if t is s else on_host(sizes_of(t)), s.packed_dim), False)


def of_each(x: NestedTensor, fn: Callable[[Tensor], Any]) -> Any:
    """The values of what a function gives of each example, whose number of dims stays: a tensor, or a tuple of them."""
    e, last = x.structure.packed_dim, x.structure.packed_dim + x.structure.ragged_ndim - 1
    found = [fn(example) for example in views(x.values, e, on_host(sizes_of(x.structure)))]

    def joined(parts: Any) -> Tensor:
        return torch.cat([part.flatten(e, last) for part in parts], e)

    if isinstance(found[0], Tensor):
        return joined(found)
    return type(found[0])([joined(parts) for parts in zip(*found, strict=True)])


def all_have_elements(x: NestedTensor) -> bool:
    """Whether no ragged dim of an example has size 0, read on the host."""
    return all([all(size) for size in on_host(sizes_of(x.structure))])


class Moved(torch.autograd.Function):
    """A move, or the same the other way."""

    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(ctx: Any, values: Tensor, plan: Plan, back: bool) -> Tensor:
        # without a setup_context, for which torch looks up the signature at each call
        ctx.plan, ctx.back = plan, back
        move, before, behind, axis = plan
        sizes = before if back else behind
        out = new_values(values, axis, sizes, values.new_zeros if back and not move.whole else values.new_empty)
        examples, results = (out, values) if back else (values, out)
        rows = zip(strided(examples, axis, before), strided(results, axis, behind), strict=True)
        for b, (example, result) in enumerate(rows):
            for one, other in move.parts(example, result, b):
                source, target = examples.as_strided(*one), results.as_strided(*other)
                if back:
                    source, target = target, source
                target.copy_(source.flip(move.reversed) if move.reversed else source)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return Moved.apply(grads[0], ctx.plan, not ctx.back), None, None

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor) -> Tensor:
        return Moved.apply(directions[0], ctx.plan, ctx.back)  # type: ignore[no-any-return]  # untyped in torch


def new_values(values: Tensor, axis: int, sizes: list[list[int]], make: Callable[[Sequence[int]], Tensor]) -> Tensor:
    """Values with the packed axis of other examples, by `new_empty` or `new_zeros`."""
    return make((*values.shape[:axis], sum(counts(sizes)), *values.shape[axis + 1 :]))


def counts(sizes: list[list[int]]) -> list[int]:
    """The positions of each example."""
    return [math.prod(size) for size in sizes]


def views(values: Tensor, axis: int, sizes: list[list[int]]) -> list[Tensor]:
    """Each example with its sizes."""
    front, rest = values.shape[:axis], values.shape[axis + 1 :]
    parts = values.split_with_sizes(counts(sizes), axis)
    return [part.view(*front, *size, *rest) for part, size in zip(parts, sizes, strict=True)]


def strided(values: Tensor, axis: int, sizes: list[list[int]]) -> list[Strided]:
    """The same views as numbers."""
    shape, strides, offset = values.shape, values.stride(), int(values.storage_offset())
    found: list[Strided] = []
    for size in sizes:
        step, own = strides[axis], ()
        for n in reversed(size):
            step, own = step * n, (step, *own)
        view = (*shape[:axis], *size, *shape[axis + 1 :]), (*strides[:axis], *own, *strides[axis + 1 :])
        found.append(Strided(*view, offset))
        offset += step
    return found


# -- moves


def spans_taken(axis: int, first: list[list[int]], lengths: list[list[int]], steps: list[int]) -> Move:
    """A slice of each ragged dim: where it begins and how many positions it has, (B, R) each; its steps, (R,)."""
    last = axis + len(steps)

    def parts(example: Strided, result: Strided, b: int) -> list[tuple[Strided, Strided]]:
        if 0 in lengths[b]:
            return []
        begin, apart = example.offset, list(example.stride)
        for d, f, n, step in zip(range(axis, last), first[b], lengths[b], steps, strict=True):
            begin += apart[d] * (f if step > 0 else f + step * (n - 1))  # the first in memory
            apart[d] *= abs(step) if n > 1 else 1
        return [(Strided(result.size, tuple(apart), begin), result)]

    return Move(parts, tuple([axis + r for r, step in enumerate(steps) if step < 0]), whole=False)


def flipped(dims: list[int]) -> Move:
    """The dims of an example in reverse."""

    def parts(example: Strided, result: Strided, b: int) -> list[tuple[Strided, Strided]]:
        return [(example, result)]

    return Move(parts, tuple(dims))


def shifted(shift: int, dim: int) -> Move:
    """The elements of an example moved on along a dim, the last ones to the front."""

    def parts(example: Strided, result: Strided, b: int) -> list[tuple[Strided, Strided]]:
        size = example.size[dim]
        front = shift % max(size, 1)
        pieces = (example.narrow(dim, 0, size - front), result.narrow(dim, front, size - front))
        return [pieces, (example.narrow(dim, size - front, front), result.narrow(dim, 0, front))]

    return Move(parts)


def permuted(axis: int, order: list[int]) -> Move:
    """The ragged dims of an example in another order."""

    def parts(example: Strided, result: Strided, b: int) -> list[tuple[Strided, Strided]]:
        last = range(axis + len(order), len(example.size))
        return [(example.permute([*range(axis), *[axis + r for r in order], *last]), result)]

    return Move(parts)


def inverse(order: list[int]) -> list[int]:
    """The order that undoes another one."""
    return sorted(range(len(order)), key=order.__getitem__)
