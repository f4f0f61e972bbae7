"""Operations on positions that have neighbours: what convolution, pooling and resampling share.

    (B, C, -1)        sequences, as conv1d takes them       (B, C, -1, -1)    images; one of these dims may be static
    (B, -1, C, H, W)  frames: examples of several images of one size

Channels are dim 1 and the dims behind them have neighbours. A batch of them becomes a rectangle, padded with what its
operation ignores at the borders of an example; the operation runs once on the rectangle, and of its result each row
keeps the size that the operation gives for that row's own size (`Span`). Examples of frames are rows of whole images,
so that the operation itself runs on all frames.

Invariants: what lies behind a row's end looks like the operation's own padding; padding of a result holds zeros and
gets no gradient; a result with the sizes of its operand shares its structure object.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect_at_least
from tdc.core.asserts import require
from tdc.core.dynamo import is_zero, known, larger, smaller
from tdc.core.errors import ShapeError, describe, message
from tdc.core.rules import define
from tdc.core.typing import Op, OpName
from tdc.layout.padding import pack_rows
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
from tdc.ops.reduction import finite
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import Ragged, Results, is_ragged, map_results


@dataclass(frozen=True, slots=True)
class Span:
    """The size of a result along one dim: `(times * size + add) // by`, and not above `(size + rest) // by`.

    `times` may be a fraction, then the product is rounded down.
    """

    times: int | float = 1
    add: int = 0
    by: int = 1
    rest: int | None = None

    def of(self, size: Tensor) -> Tensor:
        """The sizes of a result, of those of rows."""
        grown = size * self.times if isinstance(self.times, int) else (size.double() * self.times).floor().long()
        out = (grown + self.add) // self.by
        return out if self.rest is None else out.minimum((size + self.rest) // self.by)

    def at(self, size: int) -> int:
        """The size of a result, of that of one row."""
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
        """Whether sizes add up: the sum of results follows from the sum of sizes."""
        return self.by == 1 and self.rest is None and isinstance(self.times, int)

    @property
    def same(self) -> bool:
        """Whether sizes stay."""
        return self.linear and self.times == 1 and self.add == 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the planes of a batch.

    Attributes:
        own: of each row, along each dim behind the channels, (B,).
        widest: the longest of each of them; at least as long as leaves something.
        ragged: which of these dims are ragged, counted from 0.
        source: the container.
    """

    own: tuple[Tensor, ...]
    widest: tuple[int, ...]
    ragged: tuple[int, ...]
    source: Ragged


@dataclass(frozen=True, slots=True)
class Planes:
    """A batch as a rectangle `(B, C, *P)`.

    Attributes:
        data: the rectangle, the fill of its operation in padding.
        sizes: of each row, along each dim behind the channels, (B,).
        ragged: which of these dims are ragged, counted from 0.
        source: the container.
    """

    data: Tensor
    sizes: tuple[Tensor, ...]
    ragged: tuple[int, ...]
    source: Ragged


def expect_batch(op: OpName, x: Any) -> None:
    """A ShapeError where weights are the batch."""
    if not is_ragged(x):
        got, hint = describe(x), "weights are common to all rows; the input is the batch"
        raise ShapeError(message(op, "a ragged batch as its input", got, hint=hint))


def measured(x: Any, n: int, op: OpName, spans: Sequence[Span], what: str) -> Sizes:
    """Sizes of a batch of n dims with neighbours, once each row is known to leave something.

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
        return Sizes(*sizes_of_packed(x.structure, shape[1:e], shape[e + 1 :], op, tuple(spans), what), x)
    ragged, widest = tuple([d - 2 for d in x.ragged_dims]), tuple(x.data.shape[2:])
    return Sizes(own_sizes(x.lengths, ragged, widest, op, spans, what), widest, ragged, x)


@once_for_each
def sizes_of_packed(
    s: Structure, before: tuple[int, ...], behind: tuple[int, ...], op: OpName, spans: tuple[Span, ...], what: str
) -> tuple[tuple[Tensor, ...], tuple[int, ...], tuple[int, ...]]:
    """`own`, `widest` and `ragged` of `Sizes`, of a packed batch; its planes have these sizes `before` the ragged dims
    and `behind`."""
    ragged = tuple(range(len(before), len(before) + s.ragged_ndim))
    widest = (*before, *longest_at_least(s, tuple([spans[d].least for d in ragged])), *behind)
    own = own_sizes(sizes_of(s), ragged, widest, op, spans, what)
    least = [span.least for span in spans]  # there may be no rows
    return own, tuple([n if known(n >= k) else larger(n, k) for k, n in zip(least, widest, strict=True)]), ragged


def own_sizes(
    lengths: Tensor, ragged: tuple[int, ...], widest: tuple[int, ...], op: OpName, spans: Sequence[Span], what: str
) -> tuple[Tensor, ...]:
    """`own` of `Sizes`, once each row is known to leave something.

    Args:
        lengths: ragged sizes of each example, (B, R).
    """
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


def planes(x: Any, n: int, op: OpName, spans: Sequence[Span], what: str, fill: float = 0) -> Planes:
    """A batch of n dims with neighbours as a rectangle.

    Args:
        fill: what padding holds; an infinity stands for the least number of an integer dtype.
    """
    return filled(measured(x, n, op, spans, what), spans, fill)


def filled(m: Sizes, spans: Sequence[Span], fill: float = 0) -> Planes:
    """The rectangle of a batch that is `measured`; one of no rows is as large as its operation wants it."""
    value = finite(fill, m.source.dtype)
    data = rectangle(m.source, value, tuple([m.widest[d] for d in m.ragged]))
    for d, span in enumerate(spans, 2):
        if not known(data.shape[d] >= span.least):
            more = data.new_full((*data.shape[:d], span.least, *data.shape[d + 1 :]), value)
            data = torch.cat([data, more], d)
    return Planes(data, m.own, m.ragged, m.source)


def resized(p: Planes, out: Tensor, spans: Sequence[Span | int | None]) -> Ragged | Tensor:
    """The container of a result `(B, C, *Q)` that has the sizes of `spans`; no span where all rows have one size."""
    kept = [d for d in p.ragged if isinstance(spans[d], Span)]
    if not kept:
        return out
    x, dims = p.source, tuple([d + 2 for d in kept])
    used: list[Any] = [spans[d] for d in kept]
    if all([span.same for span in used]) and len(kept) == len(p.ragged):
        return beside(x, out)
    if kept[-1] - kept[0] >= len(kept):
        got, hint = "one between them that is not", "pool one of the outer dims, too"
        raise ShapeError(message("resized", "ragged dims side by side", got, hint=hint))
    if not isinstance(x, NestedTensor):
        return with_sizes(out, x, sizes_after([p.sizes[d] for d in kept], used), dims)
    numbers = tuple([p.ragged.index(d) for d in kept])
    structure, total = structure_and_total(x, numbers, used, tuple([out.shape[d] for d in dims]), dims[0] - 1)
    rows = pack_rows(out.movedim(dims, tuple(range(1, len(dims) + 1))), structure, total)
    return build_nested(structure, rows.movedim(0, structure.packed_dim))


def structure_and_total(
    x: NestedTensor, numbers: tuple[int, ...], spans: Sequence[Span], longest: tuple[int, ...], packed_dim: int
) -> tuple[Structure, int]:
    """The structure of a result, and its packed elements.

    Args:
        numbers: which ragged dims of the batch those of the result are.
        longest: a bound of their sizes.
    """
    s, total = x.structure, None
    if len(numbers) == s.ragged_ndim and all([span.linear for span in spans]):
        total = total_after(x, spans)
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
    """Sizes of a result, (B, R), of those of rows along each of its ragged dims."""
    return torch.stack([span.of(n) for n, span in zip(sizes, spans, strict=True)], 1)


def beside(x: Any, out: Tensor) -> Ragged | Tensor:
    """Another rectangle of the sizes that a result of `resized` has."""
    return out if isinstance(x, Tensor) else repacked(out, x)


def total_after(x: NestedTensor, spans: Sequence[Span]) -> int | None:
    """Packed elements of the result where they follow from those of the operand; None where lengths must be read."""
    times: Any = math.prod([span.times for span in spans])
    total = x.values.shape[x.structure.packed_dim] * times
    if len(spans) == 1:
        return total + x.structure.batch_size * spans[0].add
    return total if all([span.add == 0 for span in spans]) else None


def plane_positions(index: Tensor, own: Sequence[Tensor], width: Sequence[int], back: bool = False) -> Tensor:
    """Flat positions `(B, C, *Q)` of the rectangle's plane as those of each row's own plane; `back` the other way.

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


def each(value: Any, n: int, op: OpName) -> tuple[int, ...]:
    """One number for each of n dims, of a number or as many as there are; a ShapeError for another count."""
    given = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if len(given) not in (1, n):
        raise ShapeError(message(op, f"one number for each of {n} dims", f"{given}", hint="one for all, or one each"))
    return given * n if len(given) == 1 else given


def fixed(value: Any, n: int, op: OpName) -> tuple[int, ...]:
    """`each` of what windows are made of: ints, which a graph takes as constants. Others are for checks to refuse."""
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
    """Rows for both ragged containers: `impl` of images, `op` itself of all frames of all examples.

    Args:
        n: dims behind the channels, None for any number.
    """

    def run(input: Any, *args: Any, **kwargs: Any) -> Results:
        rows = is_ragged(input) and input.ragged_dims == (1,) and input._batch_dim == 0
        if not rows or (input.ndim < 4 if n is None else input.ndim != n + 3):
            return impl(input, *args, **kwargs)
        if isinstance(input, NestedTensor):
            return map_results(op(input.values, *args, **kwargs), input.with_values)
        frames, sizes = input.filled(0).flatten(0, 1), input.data.shape[:2]
        return map_results(op(frames, *args, **kwargs), lambda t: repacked(t.view(*sizes, *t.shape[1:]), input))

    define(op, family, ragged=run, aliases=aliases)
