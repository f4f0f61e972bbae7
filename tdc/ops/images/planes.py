"""Batches of planes: positions with neighbours, for convolution, pooling and resampling.

    (B, C, -1)        sequences, as conv1d takes them
    (B, C, -1, -1)    images; one of these dims may be static

    measured(x, ...)             sizes of each row's plane, checked
    filled, resized              one rectangle (B, C, *P), and its result (B, D, *Q) as a batch
    on_rectangles(m, ...)        the same, eagerly in a few rectangles of near sizes where that is less work
    plane_rows(m, spans)         real positions only: (N', C), each plane row by row
    spatial(op, impl, ...)       rows: `impl` of planes; of frames (B, -1, C, H, W) `op` itself runs on all of them

A row's result has the size that the operation gives for that row alone, see `Span`.

Invariants: padding of a rectangle looks like the operation's own padding; padding of a result holds zeros and gets no
gradient; a result with the sizes of its operand shares its structure object.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tdc.core.arguments import expect_at_least
from tdc.core.asserts import require
from tdc.core.dynamo import is_zero, known, larger, smaller
from tdc.core.errors import ShapeError, describe, message
from tdc.core.rules import define
from tdc.core.typing import Op, OpName
from tdc.layout.padding import pack_rows
from tdc.layout.rectangles import Rectangles, from_rectangles, near_sizes, to_rectangles
from tdc.layout.segments import (
    counts_on_host,
    longest_at_least,
    sizes_of,
    sizes_on_host,
    structure_of_sizes,
    tell,
    total_of,
)
from tdc.layout.structure import Structure, once, once_for_each
from tdc.ops.rectangle import rectangle, repacked, with_sizes
from tdc.ops.reduce.reduction import finite
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import Ragged, Results, is_ragged, map_results

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Span:
    """The size of a result along one dim: `(times * size + add) // by`, and not above `(size + rest) // by`.

    `times` may be a fraction; then the product is rounded down.
    """

    times: int | float = 1
    add: int = 0
    by: int = 1
    rest: int | None = None

    def of(self, size: Tensor) -> Tensor:
        """Sizes of a result, from those of rows."""
        grown = size * self.times if isinstance(self.times, int) else (size.double() * self.times).floor().long()
        out = (grown + self.add) // self.by
        return out if self.rest is None else out.minimum((size + self.rest) // self.by)

    def at(self, size: int) -> int:
        """The size of a result, from that of one row."""
        grown = size * self.times if isinstance(self.times, int) else math.floor(size * self.times)
        out = (grown + self.add) // self.by
        return out if self.rest is None else smaller(out, (size + self.rest) // self.by)

    @property
    def least(self) -> int:
        """The smallest size that leaves something."""
        need = max(1, math.ceil((self.by - self.add) / self.times))
        return need if self.rest is None else max(need, self.by - self.rest)

    @property
    def linear(self) -> bool:
        """True if the sum of results follows from the sum of sizes."""
        return self.by == 1 and self.rest is None and isinstance(self.times, int)

    @property
    def same(self) -> bool:
        """True if sizes stay."""
        return self.linear and self.times == 1 and self.add == 0


@dataclass(frozen=True, slots=True)
class Planes:
    """Sizes of the planes of a batch.

    Attributes:
        sizes: of each row, along each dim behind the channels, (B,).
        widest: the longest of each of them; at least as long as leaves something.
        ragged: which of these dims are ragged, counted from 0.
        source: the container.
    """

    sizes: tuple[Tensor, ...]
    widest: tuple[int, ...]
    ragged: tuple[int, ...]
    source: Ragged


def expect_batch(op: OpName, x: Any) -> None:
    """A ShapeError for a dense input beside ragged weights."""
    if not is_ragged(x):
        got, hint = describe(x), "weights are common to all rows; the input is the batch"
        raise ShapeError(message(op, "a ragged batch as its input", got, hint=hint))


def measured(x: Any, n: int, op: OpName, spans: Sequence[Span], what: str) -> Planes:
    """Sizes of a batch of n dims with neighbours; a ShapeError unless each row leaves something.

    Args:
        spans: sizes of the result along these dims.
        what: the reach of the operation, for the error.
    """
    expect_batch(op, x)
    if x._batch_dim != 0 or x.ndim != n + 2 or x.ragged_dims[0] < 2:
        expected = f"(B, C, {', '.join(['-1'] * n)}), {n} dim{'s' * (n > 1)} behind channels"
        got, hint = f"{describe(x)}, ragged dims {x.ragged_dims}", "x.transpose(1, 2) puts features of sequences first"
        raise ShapeError(message(op, expected, got, hint=hint))
    if isinstance(x, NestedTensor):
        e, shape = x.structure.packed_dim, x.values.shape
        return Planes(*packed_sizes(x.structure, shape[1:e], shape[e + 1 :], op, tuple(spans), what), x)
    ragged, widest = tuple([d - 2 for d in x.ragged_dims]), tuple(x.data.shape[2:])
    return Planes(checked_sizes(x.lengths, ragged, widest, op, spans, what), widest, ragged, x)


@once_for_each
def packed_sizes(
    s: Structure, before: tuple[int, ...], behind: tuple[int, ...], op: OpName, spans: tuple[Span, ...], what: str
) -> tuple[tuple[Tensor, ...], tuple[int, ...], tuple[int, ...]]:
    """`sizes`, `widest` and `ragged` of packed planes with static sizes `before` the ragged dims and `behind`."""
    ragged = tuple(range(len(before), len(before) + s.ragged_ndim))
    widest = (*before, *longest_at_least(s, tuple([spans[d].least for d in ragged])), *behind)
    own = checked_sizes(sizes_of(s), ragged, widest, op, spans, what)
    least = [span.least for span in spans]  # there may be no rows
    return own, tuple([n if known(n >= k) else larger(n, k) for k, n in zip(least, widest, strict=True)]), ragged


def checked_sizes(
    lengths: Tensor, ragged: tuple[int, ...], widest: tuple[int, ...], op: OpName, spans: Sequence[Span], what: str
) -> tuple[Tensor, ...]:
    """`sizes` of ragged sizes (B, R); a ShapeError unless each row leaves something."""
    first, rows = ragged[0], lengths.shape[0]
    own = [lengths[:, d - first] if d in ragged else lengths.new_full((rows,), n) for d, n in enumerate(widest)]
    least = [span.least for span in spans]
    expected = f"rows of at least {' x '.join([f'{k}' for k in least])} for {what}"
    text = message(op, expected, "a smaller one", hint="leave small rows out, or let F.pad grow them first")
    if not is_zero(rows) and any([known(have < k) for k, have in zip(least, widest, strict=True)]):
        raise ShapeError(text)
    fits = [(size >= k).all() for size, k in zip(own, least, strict=True)]
    require(functools.reduce(torch.logical_and, fits), text, ShapeError)
    return tuple(own)


# -- one rectangle


def planes(x: Any, n: int, op: OpName, spans: Sequence[Span], what: str, fill: float = 0) -> tuple[Planes, Tensor]:
    """`measured` and `filled`."""
    m = measured(x, n, op, spans, what)
    return m, filled(m, spans, fill)


def filled(m: Planes, spans: Sequence[Span], fill: float = 0) -> Tensor:
    """A batch as a rectangle (B, C, *P), as large as the operation needs where there are no rows.

    Args:
        fill: what padding holds; an infinity stands for the extreme of an integer dtype.
    """
    value = finite(fill, m.source.dtype)
    data = rectangle(m.source, value, tuple([m.widest[d] for d in m.ragged]))
    for d, span in enumerate(spans, 2):
        if not known(data.shape[d] >= span.least):
            more = data.new_full((*data.shape[:d], span.least, *data.shape[d + 1 :]), value)
            data = torch.cat([data, more], d)
    return data


def resized(m: Planes, out: Tensor, spans: Sequence[Span | int | None]) -> Ragged | Tensor:
    """The container of a result `(B, C, *Q)` that has the sizes of `spans`; no span where all rows have one size."""
    kept = [d for d in m.ragged if isinstance(spans[d], Span)]
    if not kept:
        return out
    x, dims = m.source, tuple([d + 2 for d in kept])
    used: list[Any] = [spans[d] for d in kept]
    if all([span.same for span in used]) and len(kept) == len(m.ragged):
        return repacked(out, x)
    if kept[-1] - kept[0] >= len(kept):
        got, hint = "one between them that is not", "pool one of the outer dims, too"
        raise ShapeError(message("resized", "ragged dims side by side", got, hint=hint))
    if not isinstance(x, NestedTensor):
        return with_sizes(out, x, sizes_after([m.sizes[d] for d in kept], used), dims)
    numbers = tuple([m.ragged.index(d) for d in kept])
    structure, total = structure_and_total(x, numbers, used, tuple([out.shape[d] for d in dims]), dims[0] - 1)
    rows = pack_rows(out.movedim(dims, tuple(range(1, len(dims) + 1))), structure, total)
    return build_nested(structure, rows.movedim(0, structure.packed_dim))


def beside(x: Any, out: Tensor) -> Ragged | Tensor:
    """Another rectangle of the sizes that a result of `resized` has."""
    return out if isinstance(x, Tensor) else repacked(out, x)


def structure_and_total(
    x: NestedTensor, numbers: tuple[int, ...], spans: Sequence[Span], longest: tuple[int, ...], packed_dim: int
) -> tuple[Structure, int]:
    """The structure of a result with these ragged dims of a batch and a bound of their sizes, and its packed total.

    The total follows from that of x where sizes add up; else it is read from the sizes.
    """
    s, total = x.structure, None
    if len(numbers) == s.ragged_ndim and all([span.linear for span in spans]):
        times: Any = math.prod([span.times for span in spans])
        grown = x.values.shape[s.packed_dim] * times
        if len(spans) == 1:
            total = grown + s.batch_size * spans[0].add
        elif all([span.add == 0 for span in spans]):
            total = grown
    elif counts_on_host(s):
        sizes_on_host(s)  # one read serves all results
    out = structure_after(s, numbers, tuple(spans), longest, packed_dim)
    return out, total_of(out) if total is None else total


@once
def structure_after(
    s: Structure, numbers: tuple[int, ...], spans: tuple[Span, ...], longest: tuple[int, ...], packed_dim: int
) -> Structure:
    """The structure of a result."""

    def after(sizes: Tensor) -> Tensor:
        return sizes_after([sizes[:, r] for r in numbers], spans)

    return tell(structure_of_sizes(after(sizes_of(s)), longest, packed_dim), [s], lambda known: after(known[0]))


def sizes_after(sizes: Sequence[Tensor], spans: Sequence[Span]) -> Tensor:
    """Sizes of a result, (B, R), from those of rows along each of its ragged dims."""
    return torch.stack([span.of(n) for n, span in zip(sizes, spans, strict=True)], 1)


def plane_positions(index: Tensor, own: Sequence[Tensor], width: Sequence[int], back: bool = False) -> Tensor:
    """Flat positions `(B, C, *Q)` in the rectangle's plane as those in each row's own plane; `back` the other way.

    Args:
        own: sizes of each row's plane, (B,) each.
        width: sizes of the rectangle's plane.
    """
    ones = [1] * (index.ndim - 1)
    mine: list[Any] = [size.view(-1, *ones) for size in own]
    source, target = (mine, list(width)) if back else (list(width), mine)
    rest, coordinates = index, []
    for size in reversed(source):
        coordinates.append(rest % size)
        rest = rest // size
    out = coordinates[-1]
    for coordinate, size in zip(reversed(coordinates[:-1]), target[1:], strict=True):
        out = out * size + coordinate
    return out


# -- rows of real positions


class PlaneRows(NamedTuple):
    """A batch of planes as rows, dims in `order`: ragged ones first.

    Attributes:
        x: its positions, (N', C).
        sizes: of each plane, (B, n).
        total: positions of the result, M'.
        done: rows of the result, `(M', D)`, as a batch.
    """

    x: Tensor
    sizes: Tensor
    order: tuple[int, ...]
    total: int
    done: Callable[[Tensor], NestedTensor]

    def ordered(self, given: Sequence[T]) -> list[T]:
        """One entry for each dim of a plane, in `order`."""
        return [given[d] for d in self.order]


def plane_rows(m: Planes, spans: Sequence[Span]) -> PlaneRows:
    """A packed batch as rows. Nothing is padded."""
    x: Any = m.source
    s: Structure = x.structure
    fixed = tuple([d for d in range(len(m.sizes)) if d not in m.ragged])
    order, used = (*m.ragged, *fixed), [spans[d] for d in m.ragged]
    sizes = x.sizes if not fixed else torch.stack([m.sizes[d] for d in order], 1)
    structure, packed = s, x.values.shape[s.packed_dim]
    if not all([span.same for span in used]):
        none = is_zero(s.batch_size)  # whose planes may be smaller than a kernel
        widest = tuple([0 if none else span.at(m.widest[d]) for d, span in zip(m.ragged, used, strict=True)])
        structure, packed = structure_and_total(x, tuple(range(len(used))), used, widest, s.packed_dim)
    sides = [spans[d].at(m.widest[d]) for d in fixed]
    before, after = [[i for i, d in enumerate(fixed, 1) if (d < m.ragged[0]) == first] for first in (True, False)]

    def done(out: Tensor) -> NestedTensor:
        parts = out.view(packed, *sides, out.shape[1])
        values = parts.permute(-1, *before, 0, *after)
        return x.with_values(values) if structure is s else build_nested(structure, values)

    moved = x.values.movedim(s.packed_dim, 0).movedim(1, -1)
    return PlaneRows(moved.flatten(0, -2), sizes, order, packed * math.prod(sides), done)


# -- a few rectangles


def on_rectangles(
    m: Planes, spans: Sequence[Span], run: Callable[[Tensor], Tensor], weight: Tensor, steps: int = 1
) -> Any:
    """The results of `run`, (E, C, *P) -> (E, D, *Q), on one rectangle or on a few of near sizes.

    Few rectangles compute more, many take more launches: the work for each position chooses, a product for each number
    of `weight` at one position in `steps`, and sizes that the host knows.
    """
    x = m.source
    if isinstance(x, NestedTensor) and counts_on_host(x.structure):
        fixed = tuple([n for d, n in enumerate(m.widest) if d not in m.ragged])
        s = x.structure if not fixed else with_fixed(x.structure, fixed)
        r = near_sizes(weight.numel() / steps * x.dtype.itemsize, s)
        if r is not None:
            return on_several(plane_rows(m, spans), s, r, spans, run)
    return resized(m, run(filled(m, spans)), spans)


def on_several(
    p: PlaneRows, s: Structure, r: Rectangles, spans: Sequence[Span], run: Callable[[Tensor], Tensor]
) -> Any:
    """The results of several rectangles of planes with the sizes `s`."""
    inside = [p.order.index(d) + 1 for d in range(len(p.order))]
    behind = [d + 2 for d in p.order]
    parts = [run(t.permute(0, -1, *inside)).permute(0, *behind, 1) for t in to_rectangles(p.x, s, r)]
    used = p.ordered(spans)
    if not all([span.same for span in used]):
        s, r = after(s, r, tuple(used))
    return p.done(from_rectangles(parts, s, r, p.total))


@once
def after(s: Structure, r: Rectangles, spans: tuple[Span, ...]) -> tuple[Structure, Rectangles]:
    """The planes of results, and their rectangles."""
    out = structure_of_sizes(sizes_after(sizes_of(s).unbind(1), spans))
    return out, r.of(lambda size: [span.at(n) for span, n in zip(spans, size, strict=True)])


@once
def with_fixed(s: Structure, fixed: tuple[int, ...]) -> Structure:
    """The structure of planes with dims of one size for all examples behind the ragged ones."""

    def wider(sizes: Tensor) -> Tensor:
        return torch.cat([sizes, *[sizes.new_full((sizes.shape[0], 1), n) for n in fixed]], 1)

    return tell(structure_of_sizes(wider(sizes_of(s))), [s], lambda known: wider(known[0]))


def each(value: Any, n: int, op: OpName) -> tuple[int, ...]:
    """One number for each of n dims, from a number or as many as there are; a ShapeError for another count."""
    given = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if len(given) not in (1, n):
        raise ShapeError(message(op, f"one number for each of {n} dims", f"{given}", hint="one for all, or one each"))
    return given * n if len(given) == 1 else given


def fixed(value: Any, n: int, op: OpName) -> tuple[int, ...]:
    """`each`, with ints as constants of a graph. What is no int is left for checks to refuse."""
    return tuple([index(v) if isinstance(v, int) and not isinstance(v, bool) else v for v in each(value, n, op)])


def reach(op: OpName, n: int, **given: Any) -> list[tuple[int, ...]]:
    """Sizes and steps of windows, an int of at least 1 for each of n dims, and what is put around, 0 or more."""
    found = []
    for name, value in given.items():
        numbers = fixed(value, n, op)
        expect_at_least(op, 0 if name.endswith("padding") else 1, name, *numbers)
        found.append(numbers)
    return found


def kernel_text(kernel: Any) -> str:
    """A kernel's sizes, for errors."""
    return f"a kernel of {' x '.join([f'{index(k)}' for k in kernel])}"


def spatial(op: Op, impl: Op, n: int | None, family: str, *aliases: Op) -> None:
    """Rows for both ragged containers: `impl` of planes with n dims (None for any), `op` itself of frames."""

    def run(input: Any, *args: Any, **kwargs: Any) -> Results:
        rows = is_ragged(input) and input.ragged_dims == (1,) and input._batch_dim == 0
        if not rows or (input.ndim < 4 if n is None else input.ndim != n + 3):
            return impl(input, *args, **kwargs)
        if isinstance(input, NestedTensor):
            return map_results(op(input.values, *args, **kwargs), input.with_values)
        frames, sizes = input.filled(0).flatten(0, 1), input.data.shape[:2]
        return map_results(op(frames, *args, **kwargs), lambda t: repacked(t.view(*sizes, *t.shape[1:]), input))

    define(op, family, ragged=run, aliases=aliases)
