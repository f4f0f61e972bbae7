"""Images as views, one example after another, on CPU: moves, sorts, scans and reductions of their lines or columns.

An index of every position would be larger than the image, and take longer to make than the copy. A packed example is a
view of the values with the sizes it has: torch copies from any view of it, and works along any dim of it.

    values (*S0, N, *S1)     example b: (*S0, h, w, *S1) -> what a `Move` takes of it -> (*S0, k, l, *S1)

In graphs, under transforms of `torch.func`, on a GPU and for small examples elements move by an index, in one gather.

Invariant: `Moved` differentiates a move by the same move the other way, as often as anybody asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.core.dynamo import readable, trace_as
from tdc.ragged.index_forms import FULL
from tdc.ragged.nested import NestedTensor
from tdc.ragged.segments import on_host, sizes_of
from tdc.ragged.structure import Structure

LEAST = 4096  # elements of an example in the mean, below which a gather takes less time


class Move(NamedTuple):
    """What becomes of an example, whose first ragged dim is `axis`.

    Attributes:
        take: `(example, b)`: the elements of example b that the result has, in its order.
        put: `(buffer, b, moved)`: the other way, into zeros of the size of the example.
        whole: every element is taken.
    """

    take: Callable[[Tensor, int], Tensor]
    put: Callable[[Tensor, int, Tensor], None]
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
        given, sizes = (behind, before) if back else (before, behind)
        out = new_values(values, axis, sizes, torch.zeros if back and not move.whole else torch.empty)
        for b, (a, z) in enumerate(zip(views(values, axis, given), views(out, axis, sizes), strict=True)):
            if back:
                move.put(z, b, a)
            else:
                z.copy_(move.take(a, b))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return Moved.apply(grads[0], ctx.plan, not ctx.back), None, None

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor) -> Tensor:
        return Moved.apply(directions[0], ctx.plan, ctx.back)  # type: ignore[no-any-return]  # untyped in torch


def new_values(values: Tensor, axis: int, sizes: list[list[int]], make: Any) -> Tensor:
    """Values with the packed axis of other examples."""
    total = sum(counts(sizes))
    shape = (*values.shape[:axis], total, *values.shape[axis + 1 :])
    return make(shape, dtype=values.dtype, device=values.device)  # type: ignore[no-any-return]  # empty or zeros


def counts(sizes: list[list[int]]) -> list[int]:
    """The positions of each example."""
    return [math.prod(size) for size in sizes]


def views(values: Tensor, axis: int, sizes: list[list[int]]) -> list[Tensor]:
    """Each example with its sizes."""
    front, rest = values.shape[:axis], values.shape[axis + 1 :]
    parts = values.split_with_sizes(counts(sizes), axis)
    return [part.view(*front, *size, *rest) for part, size in zip(parts, sizes, strict=True)]


# -- moves


def spans_taken(axis: int, first: list[list[int]], lengths: list[list[int]], steps: list[int]) -> Move:
    """A slice of each ragged dim: where it begins and how many positions it has, (B, R) each; its steps, (R,)."""
    turned = [axis + r for r, step in enumerate(steps) if step < 0]
    entries = [
        (FULL,) * axis + tuple([span(f, n, step) for f, n, step in zip(*row, steps, strict=True)])
        for row in zip(first, lengths, strict=True)
    ]

    def take(example: Tensor, b: int) -> Tensor:
        found = example[entries[b]]
        return found.flip(turned) if turned else found

    def put(buffer: Tensor, b: int, given: Tensor) -> None:
        buffer[entries[b]].copy_(given.flip(turned) if turned else given)

    return Move(take, put, whole=False)


def span(first: int, count: int, step: int) -> slice:
    """So many positions from the first one on, in the order of memory."""
    last = first + step * (count - 1)
    if not count:
        return slice(0, 0)
    return slice(first, last + 1, step) if step > 0 else slice(last, first + 1, -step)


def flipped(dims: list[int]) -> Move:
    """The dims of an example in reverse."""
    return along(lambda x: x.flip(dims), lambda x: x.flip(dims))


def shifted(shift: int, dim: int) -> Move:
    """The elements of an example moved on along a dim, the last ones to the front."""
    return along(lambda x: x.roll(shift, dim), lambda x: x.roll(-shift, dim))


def permuted(axis: int, order: list[int]) -> Move:
    """The ragged dims of an example in another order."""

    def turned(x: Tensor, order: list[int]) -> Tensor:
        return x.permute(*range(axis), *[axis + r for r in order], *range(axis + len(order), x.ndim))

    return along(lambda x: turned(x, order), lambda x: turned(x, inverse(order)))


def inverse(order: list[int]) -> list[int]:
    """The order that undoes another one."""
    return sorted(range(len(order)), key=order.__getitem__)


def along(there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Move:
    """The same for every example, and its inverse."""

    def take(example: Tensor, b: int) -> Tensor:
        return there(example)

    def put(buffer: Tensor, b: int, given: Tensor) -> None:
        buffer.copy_(back(given))

    return Move(take, put)
