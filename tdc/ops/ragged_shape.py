"""Shape operations on the static dims of a NestedTensor, and orders of its rows.

    x (B, -1, H*D)    x.unflatten(2, (H, D)) -> (B, -1, H, D)      x.flatten(2, 3) and back
    x (B, -1)         x.unsqueeze(0) -> (1, B, -1)                 x.expand(3, -1, -1) -> (3, B, -1)
    x.flip(0)         the rows in reverse                          x.flip(1): each row in reverse

Dims are those of the logical shape. A sequence of sizes speaks of all of them, with -1 or the size it has for the batch
and -1 for each ragged dim. What cannot be a NestedTensor is an error: regrouping the batch or a ragged dim.

Invariants: static dims are regrouped as torch does it for each example; rows keep their elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tdc.core.arguments import normal_dim
from tdc.core.errors import ShapeError, describe, message
from tdc.core.typing import Dims, Op
from tdc.ops.join import cat_rows
from tdc.ops.partial_ragged import along_lines, by_lines
from tdc.ops.reduction import drop_static
from tdc.ops.shape import ints, normal_dims, shape_rule
from tdc.ragged.index_nested import index_rows, rows_between
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.segments import mirrored, rolled


def unsqueeze_nested(x: NestedTensor, dim: int) -> NestedTensor:
    """A static dim of size 1 at any place but between ragged dims."""
    opened, axis = x.structure.opened(dim, x.ndim, "unsqueeze")
    return build_nested(opened, x.values.unsqueeze(axis))


def squeeze_nested(x: NestedTensor, dim: Dims | None = None) -> NestedTensor:
    """Without static dims of size 1: all of them, or those given. A ragged dim or the batch stays."""
    s = x.structure
    given = range(x.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    axes = [s.axis(d, x.ndim, "squeeze") for d in given]
    static = [a for a in axes if a is not None and a != s.packed_dim and x.values.shape[a] == 1]
    return drop_static(x.values, s, static) if static else x


def expand_nested(x: NestedTensor, *sizes: Any) -> NestedTensor:
    """Static dims of size 1 grow, and dims come in front of all."""
    x, given = with_dims("expand", x, sizes)
    s = x.structure
    wide = list(x.values.shape)
    for d, n in enumerate(given):
        axis = s.axis(d, x.ndim, "expand")
        if axis is None or axis == s.packed_dim:
            if n != -1 and not (axis is None and n == s.batch_size):
                raise regrouped("expand", x, f"size {n} for dim {d}")
        elif n != -1:
            if wide[axis] != 1 and wide[axis] != n:
                raise regrouped("expand", x, f"size {n} for dim {d}")
            wide[axis] = n
    return build_nested(s, x.values.expand(wide))


def repeat_nested(x: NestedTensor, *sizes: Any) -> NestedTensor:
    """Copies of the whole batch, one after another, and of static dims."""
    x, given = with_dims("repeat", x, sizes)
    s = x.structure
    times = [1] * x.values.ndim
    for d, n in enumerate(given):
        axis = s.axis(d, x.ndim, "repeat")
        if axis == s.packed_dim and n != 1:
            raise regrouped("repeat", x, f"{n} copies along ragged dim {d}")
        if axis is not None:
            times[axis] = n
    y = build_nested(s, x.values.repeat(times))
    copies = given[s.batch_dim]
    return y if copies == 1 else cat_rows([y] * copies) if copies else rows_between(y.structure, 0, 0)(y)


def with_dims(op: str, x: Any, sizes: Any) -> tuple[Any, list[Any]]:
    """A ragged batch with new static dims in front, so that there is one for each size; and the sizes as a list.

    Raises:
        ShapeError: fewer sizes than dims, or one that is no size.
    """
    given = list(ints(sizes))
    if len(given) < x.ndim or (op == "repeat" and any([n < 0 for n in given])):
        hint = "one for each dim; more of them stand in front"
        raise ShapeError(message(op, f"at least {x.ndim} numbers for {describe(x)}", f"{given}", hint=hint))
    while x.ndim < len(given):
        x = x.unsqueeze(0)
    return x, given


def reshape_nested(x: NestedTensor, *sizes: Any) -> NestedTensor:
    """Static dims regrouped; the batch keeps its size and the ragged dims stay -1, side by side and in order."""
    s, given = x.structure, list(ints(sizes))
    if len(given) == x.ndim and all([n == -1 or n == m for n, m in zip(given, x.shape, strict=True)]):
        return x
    e, b = s.packed_dim, s.batch_dim
    if b > e:
        raise regrouped("reshape", x, "the batch behind a ragged dim")
    values = x.values
    front, middle, back = values.shape[:b], values.shape[b:e], values.shape[e + 1 :]
    at = place_of(given, math.prod(front), s.batch_size)
    for d in range(b if at is None else 0):  # static dims from d on become part of the batch
        if place_of(given, math.prod(front[:d]), math.prod(front[d:]) * s.batch_size) is not None:
            return reshape_nested(flatten_rows(x, d, b), *given)
    ragged = [d for d in range(at + 1, len(given)) if given[d] == -1][: s.ragged_ndim] if at is not None else []
    if at is None or len(ragged) < s.ragged_ndim or ragged != list(range(ragged[0], ragged[0] + s.ragged_ndim)):
        raise regrouped("reshape", x, f"sizes {given}")
    new_middle, new_back = given[at + 1 : ragged[0]], given[ragged[-1] + 1 :]
    new_middle, new_back = filled(new_middle, math.prod(middle)), filled(new_back, math.prod(back))
    if new_middle is None or new_back is None:
        raise regrouped("reshape", x, f"sizes {given}")
    shape = [*given[:at], *new_middle, values.shape[e], *new_back]
    return build_nested(s.moved(at + len(new_middle), at), values.reshape(shape))


def place_of(sizes: list[int], before: int, batch: int) -> int | None:
    """Where the batch is in a list of sizes: behind sizes that multiply to those in front of it now."""
    product = 1
    for d, n in enumerate(sizes):
        if product == before and (n == -1 or n == batch):
            return d
        product = product * n
    return None


def filled(sizes: Sequence[int], total: int) -> list[int] | None:
    """Sizes of static dims with one -1 at most replaced; None where they do not multiply to the total."""
    known = math.prod([n for n in sizes if n != -1])
    free = [n for n in sizes if n == -1]
    if len(free) > 1 or (free and (known == 0 or total % known)) or (not free and known != total):
        return None
    return [total // known if n == -1 else n for n in sizes]


def flatten_nested(x: NestedTensor, start_dim: int = 0, end_dim: int = -1) -> NestedTensor:
    s = x.structure
    first, last = normal_dim(start_dim, x.ndim, "flatten"), normal_dim(end_dim, x.ndim, "flatten")
    axes = [s.axis(d, x.ndim, "flatten") for d in range(first, last + 1)]
    static = [a for a in axes if a is not None and a != s.packed_dim]
    if first == last:
        return x
    if len(static) < len(axes):
        return flatten_rows(x, first, last)
    gone = len(static) - 1
    packed = s.packed_dim - gone * (static[0] < s.packed_dim)
    batch = s.batch_dim - gone * (first < s.batch_dim)
    return build_nested(s.moved(packed, batch), x.values.flatten(static[0], static[-1]))


def flatten_rows(x: NestedTensor, first: int, last: int) -> NestedTensor:
    """Static dims around the batch made part of it: each of their places gives rows of its own."""
    s = x.structure
    b, inner = s.batch_dim, last - s.batch_dim
    if any([d in s.ragged_dims for d in range(first, last + 1)]) or b > s.packed_dim:
        raise regrouped("flatten", x, f"dims {first} to {last}")
    values = x.values.flatten(first, last - 1)  # the batch is no axis of values
    outer = math.prod(x.values.shape[first:b])
    copies = values.shape[first]
    part = s.moved(s.packed_dim - (last - first), first)
    y = cat_rows([build_nested(part, values.select(first, i)) for i in range(copies)])
    if inner == 0 or copies == outer:
        return y
    order = torch.arange(copies * s.batch_size, device=x.device).view(outer, -1, s.batch_size).transpose(1, 2)
    return index_rows(y, order.flatten())


def unflatten_nested(x: NestedTensor, dim: int, sizes: Any) -> NestedTensor:
    s, d = x.structure, normal_dim(dim, x.ndim, "unflatten")
    axis = s.axis(d, x.ndim, "unflatten")
    if axis is None or axis == s.packed_dim:
        raise regrouped("unflatten", x, f"dim {dim}")
    parts = filled(sizes, x.values.shape[axis])
    if parts is None:
        raise regrouped("unflatten", x, f"sizes {tuple(sizes)} for dim {dim}")
    more = len(parts) - 1
    moved = s.moved(s.packed_dim + more * (axis < s.packed_dim), s.batch_dim + more * (d < s.batch_dim))
    return build_nested(moved, x.values.unflatten(axis, parts))


def flip_nested(x: NestedTensor, *dims: Any) -> NestedTensor:
    """Static dims, the rows, or each row in reverse."""
    s, given = x.structure, ints(dims)
    axes = [s.axis(d, x.ndim, "flip") for d in given]
    values = x.values.flip([a for a in axes if a is not None and a != s.packed_dim])
    y = build_nested(s, values)
    ragged = tuple([d for d in normal_dims("flip", given, x.ndim) if d in s.ragged_dims])
    if by_lines("flip", x, ragged):
        y = along_lines("flip", lambda v, dim: flip_nested(v, dim), y, ragged)
    elif ragged:
        y = build_nested(s, values.index_select(s.packed_dim, mirrored(s, values.shape[s.packed_dim])))
    return index_rows(y, torch.arange(s.batch_size - 1, -1, -1, device=x.device)) if None in axes else y


def roll_nested(x: NestedTensor, shifts: Any, dims: Any = None) -> NestedTensor:
    """Static dims, the rows, or the elements of each row moved on, the last ones to the front."""
    s = x.structure
    if dims is None:
        raise no_dims("roll")
    for shift, dim in moves(shifts, dims):
        axis = s.axis(dim, x.ndim, "roll")
        if axis is None:
            rows = (torch.arange(s.batch_size, device=x.device) - shift) % max(s.batch_size, 1)
            x = index_rows(x, rows)
            s = x.structure
        elif by_lines("roll", x, dim):
            x = along_lines("roll", lambda v, dim, shift=shift: roll_nested(v, shift, dim), x, dim)
        elif axis == s.packed_dim:
            index = rolled(s, x.values.shape[axis], shift)
            x = build_nested(s, x.values.index_select(axis, index))
        else:
            x = build_nested(s, x.values.roll(shift, axis))
    return x


def no_dims(op: str) -> ShapeError:
    """The error for a roll of the whole batch."""
    hint = "name them, e.g. x.roll(1, 1)"
    return ShapeError(message(op, "dims to roll along", "none: elements would move from row to row", hint=hint))


def moves(shifts: Any, dims: Any) -> list[tuple[int, int]]:
    """The shift and the dim of each step of a roll.

    Raises:
        ShapeError: not as many shifts as dims.
    """
    each = [(n,) if isinstance(n, int) else n for n in (shifts, dims)]
    if len(each[0]) != len(each[1]):
        got = f"{len(each[0])} for {len(each[1])} dims"
        raise ShapeError(message("roll", "one shift for each dim", got, hint="x.roll((1, 2), (1, 2))"))
    return list(zip(*each, strict=True))


def regrouped(op: Op | str, x: NestedTensor, got: str) -> ShapeError:
    """The error for a shape that no NestedTensor has."""
    hint = "the batch and the ragged dims stay; regroup static dims, or use x.to_padded().data"
    return ShapeError(message(op, f"static dims of {describe(x)} regrouped", got, hint=hint))


shape_rule(torch.unsqueeze, nested=unsqueeze_nested)
shape_rule(torch.squeeze, nested=squeeze_nested)
shape_rule(torch.Tensor.expand, nested=expand_nested)
shape_rule(torch.Tensor.repeat, nested=repeat_nested)
shape_rule(torch.reshape, nested=reshape_nested)
shape_rule(torch.Tensor.view, nested=reshape_nested)
shape_rule(torch.flatten, nested=flatten_nested)
shape_rule(torch.unflatten, nested=unflatten_nested)
shape_rule(torch.flip, nested=flip_nested)
shape_rule(torch.roll, nested=roll_nested)
