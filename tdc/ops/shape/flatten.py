"""Neighbouring dims flattened into one, and one unflattened into several.

    images (B, C, -1, -1)    y = x.flatten(2)              -> (B, C, -1), height * width positions of each, line by line
                             y.unflatten(2, x)             -> (B, C, -1, -1), with the sizes of x
    x (B, -1, D)             y = x.flatten(1, 2)           -> (B, -1), each D times as long
                             y.unflatten(1, (-1, D))       -> (B, -1, D)
    x (B, H, -1, D)          x.flatten(2, 3)               static dims as torch does it
    x (B, A, -1)             x.flatten(0, 1)               -> (B * A, -1), static dims beside the batch are part of it

A ragged dim takes all that is flattened with it, in torch's order of each example. Packed elements of several ragged
dims, and of static dims behind them, have that order already; others move.

Invariants: a batch is never flattened with a ragged dim; real positions of a flattened rectangle come before padding.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.core.arguments import int_tuple, normal_dim, shown
from tdc.core.asserts import require
from tdc.core.dynamo import is_zero, known
from tdc.core.errors import ShapeError, StructureError, describe, message, show_size, show_sizes
from tdc.core.rules import define, note_syncs
from tdc.core.typing import OpName
from tdc.layout.padding import exchange, valid_mask
from tdc.layout.segments import longest, structure_of_sizes
from tdc.layout.structure import Structure, check_sizes, extent_of
from tdc.ops.reduce.partial_ragged import in_order
from tdc.ops.shape.join import cat_rows
from tdc.ragged.index import rows_at, rows_between
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import Ragged, axis_of, data_of, is_ragged, ragged_sizes, sizes_along, with_static
from tdc.ragged.two_level import TwoLevelTensor, as_levels


def regrouped(op: OpName, x: Ragged, got: str) -> ShapeError:
    """The error for a shape that no ragged batch has."""
    dense = "x.data" if isinstance(x, MaskedBatch) else "x.to_padded().data"
    hint = f"the batch stays, and ragged dims are one or side by side; or use {dense}"
    return ShapeError(message(op, f"dims of each example of {describe(x)} regrouped", got, hint=hint))


def filled(sizes: Sequence[int], total: int) -> list[int] | None:
    """Sizes of static dims with one -1 at most replaced; None where they are known not to multiply to the total."""
    given = math.prod([n for n in sizes if n != -1])
    free = [n for n in sizes if n == -1]
    if len(free) > 1 or (free and known(given == 0)):
        return None
    if known(total % given != 0 if free else total != given):
        return None
    return [total // given if n == -1 else n for n in sizes]


# -- several dims into one


def flatten_ragged(x: Ragged, start_dim: int = 0, end_dim: int = -1) -> Ragged:
    """Neighbouring dims as one, ragged where one of them is; static dims beside the batch become part of it."""
    first, last = normal_dim(start_dim, x.ndim, "flatten"), normal_dim(end_dim, x.ndim, "flatten")
    if first == last:
        return x
    if first > last:
        hint = "the first dim, then the last one"
        raise ShapeError(message("flatten", "start_dim in front of end_dim", f"{first} and {last}", hint=hint))
    ragged, batch = any([first <= r <= last for r in x.ragged_dims]), first <= x._batch_dim <= last
    if ragged and batch:
        got, packed = f"dims {first} to {last}, with the batch", "x" if isinstance(x, NestedTensor) else "x.to_packed()"
        hint = f"{packed}.values has the positions of all examples, one after another"
        raise ShapeError(message("flatten", f"dims of each example of {describe(x)}", got, hint=hint))
    if ragged:
        return flatten_nested(x, first, last) if isinstance(x, NestedTensor) else flatten_masked(x, first, last)
    if batch:
        return into_batch_nested(x, first, last) if isinstance(x, NestedTensor) else into_batch_masked(x, first, last)
    axes = axis_of("flatten", x, first), axis_of("flatten", x, last)
    return with_static(x, data_of(x).flatten(*axes), first, first - last)


def flatten_nested(x: NestedTensor, first: int, last: int) -> NestedTensor:
    """Ragged dims, and static dims beside them, as one ragged dim."""
    s, e, shape = x.structure, x.structure.packed_dim, x.values.shape
    front, behind = max(s.ragged_dims[0] - first, 0), max(last - s.ragged_dims[-1], 0)
    before, after = math.prod(shape[e - front : e]), math.prod(shape[e + 1 : e + 1 + behind])
    at, values = e - front, x.values.flatten(e, e + behind)
    if front:
        values = values.flatten(at, e - 1)
        values = values.squeeze(at) if known(before == 1) else in_front(values, s.offsets * after, at)
    inside, times = [first <= d <= last for d in s.ragged_dims], before * after
    shapes, extent, offsets = s.shapes, s.extent, s.offsets * times if front or behind else s.offsets
    if shapes is not None:
        columns = joined(shapes.unbind(1), inside, times)
        shapes = None if len(columns) == 1 else torch.stack(columns, 1)
    if extent is not None:
        extent = extent_of(tuple(joined(extent.shape[:-1], inside, times)), offsets.device)
    batch = s.batch_dim - (last - first) * (s.batch_dim > last)
    count = 1 if shapes is None else shapes.shape[1]
    return build_nested(Structure(offsets, shapes, extent, at, batch, count).marked(), values)


def joined(sizes: Sequence[Any], inside: list[bool], times: int) -> list[Any]:
    """Sizes of ragged dims, with one product for those that are flattened."""
    k = inside.index(True)
    product = functools.reduce(operator.mul, [n for n, taken in zip(sizes, inside, strict=True) if taken]) * times
    return [*sizes[:k], product, *sizes[k + sum(inside) :]]


def in_front(values: Tensor, offsets: Tensor, axis: int) -> Tensor:
    """A static dim and the packed axis behind it as one: (*S0, F, N, *S1) -> (*S0, F * N, *S1)."""
    count, lengths = values.shape[axis], offsets.diff()
    sizes = torch.stack([lengths, torch.full_like(lengths, count)], 1)
    turned = Structure(offsets * count, sizes, None, axis, 0, 2)
    return in_order(build_nested(turned, values.movedim(axis, axis + 1).flatten(axis, axis + 1)), [1, 0])


def flatten_masked(x: MaskedBatch, first: int, last: int) -> MaskedBatch:
    """Ragged dims, and static dims beside them, as one ragged dim."""
    b, dims = x.batch_dim, range(first, last + 1)
    data, at, more = x.data.movedim(b, 0), first + (first < b), last - first
    widest, columns = tuple([x.data.shape[d] for d in dims]), x.lengths.unbind(1)
    own = [columns[x.ragged_dims.index(d)] if d in x.ragged_dims else torch.full_like(columns[0], n)
           for d, n in zip(dims, widest, strict=True)]  # fmt: skip
    if any([d in x.ragged_dims for d in dims[1:]]):
        t = tracks(own, widest, math.prod(widest))
        rows = data.movedim(tuple(range(at, at + more + 1)), tuple(range(1, more + 2))).flatten(0, more + 1)
        data = exchange(rows, t.plane, t.real, False, t.line, t.keep).movedim(1, at)
    else:
        data = data.flatten(at, at + more)
    others = {r - more * (r > last): n for r, n in zip(x.ragged_dims, columns, strict=True) if r not in dims}
    lengths = {**others, first: functools.reduce(operator.mul, own)}
    ragged, batch = tuple(sorted(lengths)), b - more * (b > last)
    return build_masked(data.movedim(0, batch), torch.stack([lengths[r] for r in ragged], 1), ragged, batch, True)


class Tracks(NamedTuple):
    """Positions of each example in two rectangles, a line (B, L) and one of several dims (B, *widest).

    Attributes:
        plane, real: for each position of the line the one in the flat other rectangle, and which are real.
        line, keep: the other way.
    """

    plane: Tensor
    real: Tensor
    line: Tensor
    keep: Tensor


def tracks(own: Sequence[Tensor], widest: tuple[int, ...], size: int) -> Tracks:
    """Tracks of examples of sizes `own`, (B,) each, in a rectangle of `widest` and in a line of `size` positions."""
    rows, ndim = torch.arange(own[0].shape[0], device=own[0].device), len(own)
    rest = torch.arange(size, device=rows.device).expand(rows.shape[0], size)
    real = rest < functools.reduce(operator.mul, own).unsqueeze(1)
    plane, stride = torch.zeros_like(rest), 1
    for mine, wide in zip(reversed(own), reversed(widest), strict=True):
        each = mine.clamp(min=1).unsqueeze(1)
        plane, rest, stride = plane + rest % each * stride, rest // each, stride * wide
    line, step = (rows * size).view(-1, *[1] * ndim), torch.ones_like(rows)
    keep = valid_mask(torch.stack(list(own), 1), widest)
    for r in reversed(range(ndim)):
        position = torch.arange(widest[r], device=rows.device).view(-1, *[1] * (ndim - 1 - r))
        line, step = line + position * step.view(-1, *[1] * ndim), step * own[r]
    return Tracks(torch.where(real, plane, 0) + (rows * stride).unsqueeze(1), real, torch.where(keep, line, 0), keep)


def into_batch_nested(x: NestedTensor, first: int, last: int) -> NestedTensor:
    """Static dims around the batch made part of it."""
    s = x.structure
    b, inner = s.batch_dim, last - s.batch_dim
    if b > s.packed_dim:
        raise regrouped("flatten", x, f"dims {first} to {last}")
    values = x.values.flatten(first, last - 1)  # the batch is no axis of values
    outer = math.prod(x.values.shape[first:b])
    copies = values.shape[first]
    part = s.moved(s.packed_dim - (last - first), first)
    if is_zero(copies):
        none = build_nested(part, values.sum(first, dtype=values.dtype))
        return rows_between(none, 0, 0)(none)
    y = cat_rows([build_nested(part, values.select(first, i)) for i in range(copies)])
    if inner == 0 or copies == outer:
        return y
    order = torch.arange(copies * s.batch_size, device=x.device).view(outer, -1, s.batch_size).transpose(1, 2)
    return rows_at(y, order.flatten())(y)


def into_batch_masked(x: MaskedBatch, first: int, last: int) -> MaskedBatch:
    """Static dims around the batch made part of it."""
    sizes, count = x.data.shape[first : last + 1], x.lengths.shape[1]
    at = [1] * (x.batch_dim - first) + [x.lengths.shape[0]] + [1] * (last - x.batch_dim)
    lengths = x.lengths.view(*at, count).expand(*sizes, count).flatten(0, -2)
    ragged = tuple([r - (last - first) * (r > first) for r in x.ragged_dims])
    return build_masked(x.data.flatten(first, last), lengths, ragged, first, True)


# -- one dim into several


def unflatten_ragged(x: Ragged, dim: int, sizes: Any) -> Ragged | TwoLevelTensor:
    """A static dim into static ones; the ragged dim into one and static ones, into several, or into two levels."""
    d = normal_dim(dim, x.ndim, "unflatten")
    if isinstance(x, NestedTensor) and isinstance(sizes, NestedTensor) and len(sizes.ragged_dims) == 1:
        return as_levels(x, d, sizes)
    of_each = is_ragged(sizes) or isinstance(sizes, Tensor)
    if d in x.ragged_dims and len(x.ragged_dims) > 1:
        got, hint = f"dim {dim}, one of several ragged dims", "x.flatten(d, d + 1) first"
        raise ShapeError(message("unflatten", f"a static dim of {describe(x)}", got, hint=hint))
    if d == x._batch_dim or (of_each and d not in x.ragged_dims):
        raise regrouped("unflatten", x, f"dim {dim}" + of_each * " by sizes of each example")
    if of_each:
        return into_several(x, d, sizes)
    given = int_tuple("unflatten", sizes)
    if d in x.ragged_dims:
        return with_factors(x, d, given)
    axis = axis_of("unflatten", x, d)
    parts = filled(given, data_of(x).shape[axis])
    if parts is None:
        raise regrouped("unflatten", x, f"sizes {show_sizes(given)} for dim {show_size(dim)}")
    return with_static(x, data_of(x).unflatten(axis, parts), d, len(parts) - 1)


def with_factors(x: Ragged, d: int, sizes: tuple[int, ...]) -> Ragged:
    """The ragged dim as one that is as much shorter, where the size is -1, and static ones around it."""
    if sizes.count(-1) != 1 or any([n < 1 for n in sizes if n != -1]):
        hint = "x.unflatten(d, (-1, 8)), or x.unflatten(d, images) for several ragged dims"
        raise ShapeError(message("unflatten", "one -1 and static sizes for a ragged dim", show_sizes(sizes), hint=hint))
    k = sizes.index(-1)
    lead, tail, step = sizes[:k], sizes[k + 1 :], -math.prod(sizes)
    before, lengths = math.prod(lead), sizes_along(x, d)
    hint = "F.pad, or x[:, :n], before it"
    text = message("unflatten", f"lengths that {shown(step)} divides", "another one", hint=hint)
    if isinstance(x, NestedTensor) and known(x.values.shape[x.structure.packed_dim] % step != 0):
        raise ShapeError(text)  # a graph would fail in torch before it asks for lengths
    require((lengths % step == 0).all(), text, ShapeError)
    batch = x._batch_dim + (len(sizes) - 1) * (d < x._batch_dim)
    if isinstance(x, NestedTensor):
        s, e, values = x.structure, x.structure.packed_dim, x.values
        if before > 1:
            each = torch.stack([torch.full_like(lengths, before), lengths // before], 1)
            values = in_order(build_nested(Structure(s.offsets, each, None, e, 0, 2), values), [1, 0])
        values = values.unflatten(e, (-1, *lead)).movedim(e, e + k) if lead else values
        extent = None if s.extent is None else extent_of((s.extent.shape[0] // step,), x.device)
        t = Structure(s.offsets // step, None, extent, e + k, batch, 1).marked()
        return build_nested(t, values.unflatten(e + k, (-1, *tail)) if tail else values)
    at = d + (d < x._batch_dim)
    longest = x.data.shape[d] // step
    data = x.data.movedim(x._batch_dim, 0).narrow(at, 0, longest * step)
    if before > 1:
        own = [torch.full_like(lengths, before), lengths // before]
        data = spread_out(data, at, own, (before, longest * math.prod(tail))).flatten(at, at + 1)
    data = data.unflatten(at, (*lead, longest, *tail)).movedim(0, batch)
    return build_masked(data, (lengths // step).unsqueeze(1), (d + k,), batch, True)


def spread_out(data: Tensor, at: int, own: Sequence[Tensor], widest: tuple[int, ...]) -> Tensor:
    """Rows `(B, ..., L, ...)` of a rectangle with their dim `at` as several, of sizes `own` in each row."""
    t = tracks(own, widest, data.shape[at])
    out = exchange(data.movedim(at, 1).flatten(0, 1), t.line, t.keep, False, t.plane, t.real)
    return out.movedim(tuple(range(1, len(own) + 1)), tuple(range(at, at + len(own))))


def into_several(x: Ragged, d: int, like: Any) -> Ragged:
    """The ragged dim as several with the sizes of another batch, or of a tensor (B, R)."""
    sizes, lengths = sizes_for(x, like), sizes_along(x, d)
    as_batch, count = is_ragged(like), sizes.shape[1]
    if not (isinstance(x, NestedTensor) and as_batch and like.offsets is x.offsets):
        expected, hint = "sizes that multiply to the lengths", "take them of the batch that was flattened"
        require((sizes.prod(1) == lengths).all(), message("unflatten", expected, "others", hint=hint))
    batch = x._batch_dim + (count - 1) * (d < x._batch_dim)
    if isinstance(x, NestedTensor):
        e = x.structure.packed_dim
        t = like.structure.moved(e, batch) if as_batch else structure_of_sizes(sizes, None, e, batch)
        return build_nested(t, x.values)
    plane = [like.data.shape[r] for r in like.ragged_dims] if as_batch else longest(structure_of_sizes(sizes))
    data = spread_out(x.data.movedim(x.batch_dim, 0), d + (d < x.batch_dim), sizes.unbind(1), tuple(plane))
    return build_masked(data.movedim(0, batch), sizes, tuple(range(d, d + count)), batch, True)


def sizes_for(x: Ragged, like: Any) -> Tensor:
    """The sizes (B, R), R of at least 2, of a batch of the same container, or a tensor of them."""
    rows = x.batch_size[0]
    if not is_ragged(like):
        check_sizes(like, None, rows, "unflatten")
        return like  # type: ignore[no-any-return]  # a tensor, checked above
    if type(like) is not type(x) or len(like.ragged_dims) < 2 or like.batch_size[0] != rows:
        expected = f"sizes of a {type(x).__name__} of {rows} rows with several ragged dims"
        hint = "x.to_padded() and x.to_packed() convert; a tensor of sizes (B, R) serves both"
        raise StructureError(message("unflatten", expected, describe(like), hint=hint))
    return ragged_sizes(like)


define(torch.flatten, "shape", ragged=flatten_ragged)
define(torch.unflatten, "shape", ragged=unflatten_ragged, dims="input dim* sizes")
note_syncs("the number of elements, of the batch with static dims", torch.flatten, kinds=("nested",))
