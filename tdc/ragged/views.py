"""Images as views, one example after another, on CPU: moves, sorts, scans and reductions of their lines or columns.

An index of every position would be larger than the image, and take longer to make than the copy. A packed example is a
view of the values with the sizes it has: a copy reads any view of it, and torch works along any dim of it.

    values (*S0, N, *S1)     example b: (*S0, h, w, *S1) -> what a `Move` takes of it -> (*S0, k, l, *S1)

numpy copies, where torch has it: its views step backwards, where torch would reverse into memory of its own first, and
take a fifth of the time to make. On several threads torch copies large examples, and everything where there is no numpy
or values are no plain memory (`tdc.core.arrays`). Which of them mirrors lines is tried out.

Where nobody differentiates, scans, sorts and softmax write results where they lie: `out=` of torch has no derivative.

In graphs, under transforms of `torch.func`, on a GPU and for small examples elements move by an index, in one gather.

Invariants: `Moved` differentiates a move by the same move the other way, as often as anybody asks. Results are new
memory, which nothing has saved, so that numpy may write into it and change no version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from timeit import timeit
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tdc.core.arrays import array_of
from tdc.core.dynamo import never, readable, trace_as
from tdc.core.levels import moving, unrecorded
from tdc.core.operators import learning, only_results
from tdc.ragged.nested import NestedTensor
from tdc.ragged.segments import Packing, packing_of

LEAST = 256  # positions of an example in the mean, below which a gather takes less time where there are many examples
CHANNEL = 8192  # elements of a channel that softmax copies in the time of a call
LARGE = 4  # bytes of an element that numpy reads backwards without loss where lines are long
SPLIT = 32768  # elements that torch copies on one thread (torch 2.11-2.13)
LINE, TRIED, TRIALS = 128, 2**11, 15  # images to try on, and how often: positions of a line, and bytes per position
WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # dtypes, by size
FULL, REVERSED = slice(None), slice(None, None, -1)
Index = tuple[slice, ...]  # of ragged dims
Parts = list[tuple[Index, Index]]
Into = Callable[[Tensor, Any], Any]  # an example, and as `out=` where its results go


class Move(NamedTuple):
    """What becomes of the ragged dims of an example.

    Attributes:
        parts: `(b, size)`: indices of example b, of that size, and of its result, which take the same elements. Those
            of the example may step backwards.
        order: of the dims, before parts are taken.
        whole: every element is taken.
        mirrored: how many of the last dims step backwards.
    """

    parts: Callable[[int, Sequence[int]], Parts]
    order: Sequence[int] = ()
    whole: bool = True
    mirrored: int = 0


class Plan(NamedTuple):
    """A move of a packed batch: where its examples lie before and behind it, and the packed axis."""

    move: Move
    before: Packing
    behind: Packing
    axis: int


def by_views(x: Any, times: int = 1) -> bool:
    """Whether the examples of a batch are better taken one by one; `times` larger ones where the other way is fast."""
    if not isinstance(x, NestedTensor) or x.structure.ragged_ndim == 1 or not x._values.is_cpu or not readable():
        return False
    if type(x._values) not in (Tensor, nn.Parameter):  # a class of its own, which new memory would not have
        return False
    positions = x._values.shape[x.structure.packed_dim]  # an index has one entry for each, whatever lies around it
    return 0 < times * LEAST * x.structure.batch_size <= positions and x._values.numel() > 0


trace_as(by_views, never)


def moved(values: Tensor, move: Move, axis: int, before: Packing, behind: Packing) -> Tensor:
    """The values of examples, which lie along a packed axis, moved."""
    plan = Plan(move, before, behind, axis)
    differentiated = learning((values,)) or moving((values,))
    found: Tensor = Moved.apply(values, plan, False) if differentiated else run(values, plan, False)
    return found


def of_each(x: NestedTensor, fn: Callable[[Tensor], Any], varies: int | None = None, into: Into | None = None) -> Any:
    """The values of what a function gives of each example, whose number of dims stays: a tensor, or a tuple of them.

    Args:
        varies: the ragged dim whose sizes differ in the results, where it is one.
        into: the same with results as large as the example, for where nobody differentiates: they are not copied.
    """
    if into is not None and only_results(x.values):
        return written(x, fn, into)
    e, last = x.structure.packed_dim, x.structure.packed_dim + x.structure.ragged_ndim - 1
    found = [fn(example) for example in views(x.values, e, packing_of(x.structure))]

    def joined(parts: Any) -> Tensor:
        if varies is None:
            return torch.cat([part.flatten(e, last) for part in parts], e)
        return torch.cat(parts, e + varies).flatten(e, last)  # in place of as many views as there are examples

    if isinstance(found[0], Tensor):
        return joined(found)
    return type(found[0])([joined(parts) for parts in zip(*found, strict=True)])


def written(x: NestedTensor, fn: Callable[[Tensor], Any], into: Into) -> Any:
    """What a function gives of each example, in new memory: written there by all but the first, which tells dtypes."""
    e, rows = x.structure.packed_dim, packing_of(x.structure)
    examples = views(x.values, e, rows)
    first = fn(examples[0])
    alone = isinstance(first, Tensor)
    found = [first] if alone else [*first]
    results = [t.new_empty(x.values.shape) for t in found]
    places = [*zip(*[views(t, e, rows) for t in results], strict=True)]
    for place, t in zip(places[0], found, strict=True):
        place.copy_(t)
    for example, place in zip(examples[1:], places[1:], strict=True):
        into(example, place[0] if alone else place)
    return results[0] if alone else type(first)(results)


def by_channel(example: Tensor, out: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Both in parts along their first dim, where these are large: they are contiguous as a rule, the whole is not.

    For functions that copy what is not contiguous (softmax, torch 2.11-2.13), along another dim.
    """
    if (example.is_contiguous() and out.is_contiguous()) or out.numel() < CHANNEL * out.shape[0]:
        return [(example, out)]
    return [*zip(*[t.split_with_sizes([1] * t.shape[0]) for t in (example, out)], strict=True)]


def all_have_elements(x: NestedTensor) -> bool:
    """Whether no ragged dim of an example has size 0, read on the host."""
    return all([all(size) for size in packing_of(x.structure).sizes])


class Moved(torch.autograd.Function):
    """A move, or the same the other way."""

    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(ctx: Any, values: Tensor, plan: Plan, back: bool) -> Tensor:
        ctx.plan, ctx.back = plan, back  # without a setup_context, for which torch looks up the signature at each call
        return run(values, plan, back)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return Moved.apply(grads[0], ctx.plan, not ctx.back), None, None

    @staticmethod
    def jvp(ctx: Any, *directions: Tensor) -> Tensor:
        return Moved.apply(directions[0], ctx.plan, ctx.back)  # type: ignore[no-any-return]  # untyped in torch


def run(values: Tensor, plan: Plan, back: bool) -> Tensor:
    """A move, or the same the other way, into new memory."""
    move, before, behind, axis = plan
    make: Any = values.new_zeros if back and not move.whole else values.new_empty
    out: Tensor = make((*values.shape[:axis], (before if back else behind).ends[-1], *values.shape[axis + 1 :]))
    examples, results = (out, values) if back else (values, out)
    one, other = [array_of(x, axis + 1) if readable() else None for x in (examples, results)]
    if one is None or other is None:
        copy_tensors(examples, results, plan, back)
    elif by_arrays(values, plan):
        copy_arrays(one, other, plan, back)
    else:
        with unrecorded():
            copy_tensors(whole_numbers(examples), whole_numbers(results), plan, back)
    return out


def whole_numbers(x: Tensor) -> Tensor:
    """Elements as whole numbers of their size: torch reverses all of these, and bfloat16 in ten times as long."""
    alike = WHOLE.get(x.element_size())
    return x if alike is None else x.view(alike)


def views(values: Tensor, axis: int, rows: Packing) -> list[Tensor]:
    """Each example with its sizes."""
    front, rest = values.shape[:axis], values.shape[axis + 1 :]
    parts = values.split_with_sizes([end - begin for begin, end in pairwise(rows.ends)], axis)
    return [part.view(*front, *size, *rest) for part, size in zip(parts, rows.sizes, strict=True)]


def views_of_array(values: Any, rows: Packing) -> list[Any]:
    """The same of an array of numpy, whose last axis is the packed one."""
    front = values.shape[:-1]
    parts = [values[..., begin:end] for begin, end in pairwise(rows.ends)]
    return [part.reshape(*front, *size) for part, size in zip(parts, rows.sizes, strict=True)]


# -- copies


def by_arrays(values: Tensor, plan: Plan) -> bool:
    """Whether numpy may copy: it takes one thread, as torch does for copies of fewer elements than it splits."""
    if torch.get_num_threads() > 1 and values.numel() >= SPLIT * len(plan.before.sizes):
        return False
    turned, size, behind = plan.move.mirrored, values.element_size(), values.shape[plan.axis + 1 :].numel()
    # Whole images are one long line backwards, which numpy reads faster than torch writes it twice.
    return turned == 0 or (turned > 1 and size >= LARGE) or mirrors_by_arrays(size, behind)


@cache
def mirrors_by_arrays(size: int, behind: int) -> bool:
    """Whether numpy mirrors lines of positions of so many elements of a size faster than torch does, in two passes.

    Milliseconds of trying tell. Single bytes take numpy four times as long; larger elements a third to three times, by
    how far a processor looks ahead of what is read backwards.
    """
    lines, dtype = 1 + TRIED // (behind * size), WHOLE.get(size, torch.complex128)
    images, results = torch.ones(2, TRIALS, lines, LINE, behind, dtype=dtype, device="cpu").unbind()
    pairs = [*zip(images, results, strict=True)]
    arrays = [(array_of(one, 2), array_of(other, 2)) for one, other in pairs]

    def by_array() -> None:
        for one, other in arrays:
            other[...] = one[:, ::-1]

    def by_tensor() -> None:
        for one, other in pairs:
            other.copy_(one.flip(1))

    won = [timeit(by_array, number=1) <= timeit(by_tensor, number=1) for _ in range(TRIALS)]
    return sum(won) > TRIALS // 2


def copy_arrays(examples: Any, results: Any, plan: Plan, back: bool) -> None:
    """The copies of a move by numpy, whose views step backwards, too, and take a fifth of the time to make."""
    move, before, behind, axis = plan
    front, wholes = (FULL,) * axis, views_of_array(examples, before)
    if move.order:
        wholes = [example.transpose(order_of_axes(plan, axis + 1)) for example in wholes]
    pairs = [
        (example[(*front, *taken)], result[(*front, *put)] if put else result)
        for b, (example, result) in enumerate(zip(wholes, views_of_array(results, behind), strict=True))
        for taken, put in move.parts(b, before.sizes[b])
    ]
    for one, other in pairs:  # with nothing in between, which would no longer lie in the caches
        if back:
            one[...] = other
        else:
            other[...] = one


def copy_tensors(examples: Tensor, results: Tensor, plan: Plan, back: bool) -> None:
    """The copies of a move by torch, which reverses into memory of its own: it has no views that step backwards."""
    move, before, behind, axis = plan
    wholes = views(examples, axis, before)
    if move.order:
        wholes = [example.permute(order_of_axes(plan, examples.ndim)) for example in wholes]
    for b, (example, result) in enumerate(zip(wholes, views(results, axis, behind), strict=True)):
        for taken, put in move.parts(b, before.sizes[b]):
            turned = [axis + r for r, part in enumerate(taken) if part.step is not None and part.step < 0]
            source, target = forwards(example, axis, taken), forwards(result, axis, put)
            if back:
                source, target = target, source
            target.copy_(source.flip(turned) if turned else source)


def forwards(example: Tensor, axis: int, index: Index) -> Tensor:
    """A view of the positions that an index takes, in the order in which they lie.

    No view of all positions: torch has none where it takes several gradients at once (2.11-2.13).
    """
    for d, part in enumerate(index, axis):
        if part in (FULL, REVERSED):
            continue
        n, taken = example.shape[d], range(example.shape[d])[part]
        if not taken:
            example = example.narrow(d, 0, 0)
        elif len(taken) < n:
            first, last = sorted((taken[0], taken[-1]))
            example = example[(*[FULL] * d, slice(first, last + 1, min(abs(taken.step), n)))]
    return example


def order_of_axes(plan: Plan, ndim: int) -> list[int]:
    """The axes of examples in the order of a move, where values have so many dims."""
    e, order = plan.axis, plan.move.order
    return [*range(e), *[e + r for r in order], *range(e + len(order), ndim + len(order) - 1)]


# -- moves


def sliced(slices: Sequence[Index]) -> Move:
    """A slice of each dim, for each example."""

    def parts(b: int, size: Sequence[int]) -> Parts:
        return [(slices[b], ())]

    return Move(parts, whole=False)


def flipped(dims: Sequence[int], ndim: int) -> Move:
    """Some of so many dims in reverse."""
    taken = tuple([REVERSED if r in dims else FULL for r in range(ndim)])

    def parts(b: int, size: Sequence[int]) -> Parts:
        return [(taken, ())]

    return Move(parts, mirrored=sum([{*range(r, ndim)} <= {*dims} for r in range(ndim)]))


def shifted(shift: int, r: int) -> Move:
    """The elements moved on along a dim, the last ones to the front."""

    def parts(b: int, size: Sequence[int]) -> Parts:
        front, every = shift % max(size[r], 1), (FULL,) * r
        rest = size[r] - front
        pieces = [(slice(rest), slice(front, None)), (slice(rest, None), slice(front))]
        return [((*every, taken), (*every, put)) for taken, put in pieces]

    return Move(parts)


def permuted(order: Sequence[int]) -> Move:
    """The dims in another order."""

    def parts(b: int, size: Sequence[int]) -> Parts:
        return [((), ())]

    return Move(parts, order)


def inverse(order: list[int]) -> list[int]:
    """The order that undoes another one."""
    return sorted(range(len(order)), key=order.__getitem__)
