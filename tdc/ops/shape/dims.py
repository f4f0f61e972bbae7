"""Shape operations on ragged batches, packed and padded: dims moved, static dims regrouped, elements reordered.

    x (B, -1, H*D)    x.reshape(B, -1, H, D)                       x.reshape(B, -1, H * D) and back
    x (B, -1)         x.unsqueeze(0) -> (1, B, -1)                 x.expand(3, -1, -1) -> (3, B, -1)
    x.flip(0)         the examples in reverse                      x.flip(1): each example in reverse

Dims and sizes are those of the logical shape, with -1 or its size for the batch and each ragged dim; `reshape` takes
one -1 for all ragged dims of an example, too. The batch may be regrouped with static dims in front of it only.
`batch_dims` has the same of TensorDicts.

Invariants: static dims are regrouped as torch does it for each example; no copy that torch would not make for a dense
tensor; lengths go along with their examples; padding stays behind each and gets no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tdc.core.arguments import int_tuple, normal_dim
from tdc.core.dynamo import constant, known
from tdc.core.errors import DtypeError, ShapeError, describe, message, show_size, show_sizes
from tdc.core.rules import define, note_syncs
from tdc.core.typing import Dims, OpName
from tdc.layout.segments import columns, mirrored, rolled, several, sizes_of, tell
from tdc.layout.structure import Structure, extent_of
from tdc.ops.reduce.partial_ragged import along_lines, by_lines, in_order
from tdc.ops.shape.flatten import filled, flatten_ragged, regrouped, unflatten_ragged
from tdc.ragged.index import insert_dim
from tdc.ragged.index_forms import FULL
from tdc.ragged.index_ragged import at_each, neutral
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import Ragged, axis_entries, axis_of, data_of, sizes_along, with_data, without_dims


def ints(op: OpName, sizes: tuple[Any, ...]) -> tuple[int, ...]:
    """Dims or sizes given one by one or as one sequence."""
    if len(sizes) == 1 and isinstance(sizes[0], torch.dtype):
        hint = "x.to(dtype) converts; td.apply(lambda leaf: leaf.view(dtype)) reads the bytes of leaves anew"
        raise DtypeError(message("view", "sizes", "a dtype", hint=hint))
    return int_tuple(op, sizes[0] if len(sizes) == 1 else sizes)


def normal_dims(op: OpName, dims: Any, ndim: int) -> tuple[int, ...]:
    """One dim or several, counted from the front."""
    given = (dims,) if isinstance(dims, int) else dims
    if not isinstance(given, (tuple, list)) or not all([isinstance(d, int) for d in given]):
        raise ShapeError(message(op, "a dim or several, as ints", f"{dims!r}", hint="count batch dims: 0 or -1"))
    found = tuple([normal_dim(d, ndim, op) for d in given])
    if op != "roll" and any([d in found[:i] for i, d in enumerate(found)]):
        raise ShapeError(message(op, "each dim once", f"{dims}", hint="drop the second one"))
    return found


# axes of the values, None where they stay; the packed dim, None where ragged dims would not be side by side; the batch
# dim; the ragged dims by their old numbers, None where they keep their order
Turn = tuple[tuple[int, ...] | None, int | None, int, tuple[int, ...] | None]


def full_order(dims: tuple[int, ...], ndim: int) -> list[int]:
    """All dims in an order, counted from the front; a ShapeError where one is missing, doubled or out of range."""
    order = [normal_dim(d, ndim, "permute") for d in dims]
    if sorted(order) != list(range(ndim)):
        hint = f"e.g. {tuple(range(ndim))}"
        raise ShapeError(message("permute", f"each of {ndim} dims once", str(tuple(dims)), hint=hint))
    return order


# -- dims in another order


def permute_ragged(x: Ragged, *dims: Any) -> Ragged:
    """Logical dims in another order; several ragged dims stay side by side. In another order they are a gather."""
    order = full_order(ints("permute", dims), x.ndim)
    return permute_nested(x, order) if isinstance(x, NestedTensor) else permute_masked(x, order)


def permute_nested(x: NestedTensor, order: list[int]) -> NestedTensor:
    s, values = x.structure, x.values
    axes, packed_dim, batch_dim, numbers = turn(tuple(order), s.packed_dim, s.batch_dim, s.ragged_ndim)
    if packed_dim is None:
        got = f"ragged dims {s.ragged_dims} at {[order.index(d) for d in s.ragged_dims]}"
        raise ShapeError(message("permute", "several ragged dims side by side", got, hint="x.to_padded() first"))
    turned = s.moved(packed_dim, batch_dim)
    if numbers is not None:
        values = in_order(x, list(numbers))
        extent = None if s.extent is None else extent_of(tuple([s.extent.shape[r] for r in numbers]), x.device)
        sizes = columns(sizes_of(s), numbers)
        turned = Structure(s.offsets, sizes, extent, packed_dim, batch_dim, s.ragged_ndim).marked()
        tell(turned, [s], lambda known: columns(known[0], numbers))
    return build_nested(turned, values if axes is None else values.permute(axes))


@constant
def turn(order: tuple[int, ...], packed_dim: int, batch_dim: int, ragged_ndim: int) -> Turn:
    """Another order of logical dims as a `Turn`."""
    inside = [d for d in range(len(order)) if d != batch_dim]  # dims of an example
    ragged = inside[packed_dim : packed_dim + ragged_ndim]
    new = [d for d in order if d != batch_dim]
    at = [new.index(d) for d in ragged]
    if sorted(at) != list(range(min(at), min(at) + ragged_ndim)):
        return None, None, batch_dim, None
    axis = {d: k if k <= packed_dim else k - ragged_ndim + 1 for k, d in enumerate(inside)}
    axes: list[int] = []
    for d in new:
        here = packed_dim if d in ragged else axis[d]
        if here != packed_dim or packed_dim not in axes:
            axes.append(here)
    numbers = tuple([ragged.index(d) for d in new if d in ragged])
    same = axes == list(range(len(axes)))
    straight = numbers == tuple(range(ragged_ndim))
    return None if same else tuple(axes), axes.index(packed_dim), order.index(batch_dim), None if straight else numbers


def permute_masked(x: MaskedBatch, order: list[int]) -> MaskedBatch:
    at = [order.index(d) for d in x.ragged_dims]
    ragged, turned = tuple(sorted(at)), sorted(at) != at
    if ragged != tuple(range(ragged[0], ragged[0] + len(ragged))):
        got = f"dims {x.ragged_dims} at {tuple(at)}"
        raise ShapeError(message("permute", "several ragged dims side by side", got, hint="use x.data"))
    lengths = columns(x.lengths, [at.index(d) for d in ragged]) if turned else x.lengths
    return build_masked(x.data.permute(order), lengths, ragged, order.index(x.batch_dim), turned)


def transpose_ragged(x: Ragged, dim0: int, dim1: int) -> Ragged:
    """Two dims swapped."""
    a, b = normal_dim(dim0, x.ndim, "transpose"), normal_dim(dim1, x.ndim, "transpose")
    order = list(range(x.ndim))
    order[a], order[b] = b, a
    return permute_nested(x, order) if isinstance(x, NestedTensor) else permute_masked(x, order)


# -- static dims regrouped


def squeeze_ragged(x: Ragged, dim: Dims | None = None) -> Ragged:
    """Without static dims of size 1: all of them, or those given."""
    given = range(x.ndim) if dim is None else normal_dims("squeeze", dim, x.ndim)
    others = [d for d in given if d == x._batch_dim or d in x.ragged_dims]
    if dim is not None and others:
        got, hint = f"dim {others[0]}", "x[:, 0] where every row has one element, x[0] for the only example"
        raise ShapeError(message("squeeze", f"static dims of {describe(x)}", got, hint=hint))
    data = data_of(x)
    ones = [d for d in given if d not in others and data.shape[axis_of("squeeze", x, d)] == 1]
    return without_dims(x, data, ones) if ones else x


def reshape_ragged(x: Ragged, *sizes: Any) -> Ragged:
    """Static dims regrouped; the batch and the ragged dims keep their sizes, side by side and in order."""
    given, old, b = list(ints("reshape", sizes)), list(x.shape), x._batch_dim
    if len(given) == x.ndim and all([n == -1 or n == m for n, m in zip(given, old, strict=True)]):
        return x
    found = grouped(given, old, sorted((b, *x.ragged_dims)))
    # Static dims from d on become part of the batch.
    for d in range(b if found is None and b < x.ragged_dims[0] else 0):
        merged, kept = [*old[:d], math.prod(old[d : b + 1]), *old[b + 1 :]], [d, *[r - b + d for r in x.ragged_dims]]
        if grouped(given, merged, kept) is not None:
            return reshape_ragged(flatten_ragged(x, d, b), *given)
    if found is None:
        return reshape_each(x, given)
    positions, shape = found
    batch, ragged = positions[b], tuple([positions[r] for r in x.ragged_dims])
    if ragged[-1] - ragged[0] != x.ragged_dims[-1] - x.ragged_dims[0]:
        raise regrouped("reshape", x, f"sizes {show_sizes(given)}")
    if isinstance(x, MaskedBatch):
        return build_masked(x.data.reshape(shape), x.lengths, ragged, batch)
    s, e = x.structure, ragged[0] - (batch < ragged[0])
    axes = [n for d, n in enumerate(shape) if d not in (batch, *ragged[1:])]
    axes[e] = x.values.shape[s.packed_dim]
    return build_nested(s.moved(e, batch), x.values.reshape(axes))


def reshape_each(x: Ragged, given: list[Any]) -> Ragged:
    """Each example of a packed batch in another shape, with one ragged size.

    Padded ones are refused: code that reads sizes off a rectangle expects its positions to stay.
    """
    ragged = x.ragged_dims
    if isinstance(x, MaskedBatch):
        hint = "x.flatten(2, 3) and x.unflatten(1, (-1, 8)) say which dims, and put real positions first"
        expected, got = f"static dims of {describe(x)} regrouped", f"sizes {show_sizes(given)}"
        raise ShapeError(message("reshape", expected, got, hint=hint))
    if len(ragged) > 1:
        y = flatten_ragged(x, ragged[0], ragged[-1])
        if grouped(given, list(y.shape), sorted((y._batch_dim, *y.ragged_dims))) is not None:
            return reshape_ragged(y, *given)
    whole = x._batch_dim == 0 and (given[0] == -1 or given[0] == x.batch_size[0])
    if not whole or len([n for n in given[1:] if n == -1]) != 1 or any([n == 0 for n in given[1:]]):
        raise regrouped("reshape", x, f"sizes {show_sizes(given)}")
    out: Any = unflatten_ragged(flatten_ragged(x, 1), 1, given[1:])
    return out


def grouped(
    given: list[Any], old: list[Any], kept: Sequence[int], begin: int = 0, before: int = 0
) -> tuple[dict[int, int], list[Any]] | None:
    """Positions among new sizes of the `kept` dims, and all new sizes; None where static dims do not fit them.

    `begin` new sizes and `before` old ones are matched already.
    """
    d = kept[0] if kept else len(old)
    for at in candidates(given, begin, old[d], before > 0) if kept else (len(given),):
        group = filled(given[begin:at], math.prod(old[before:d]))
        if group is None:
            continue
        rest = grouped(given, old, kept[1:], at + 1, d + 1) if kept else ({}, [])
        if rest is not None:
            return {d: at, **rest[0]} if kept else {}, [*group, *old[d : d + 1], *rest[1]]
    return None


def candidates(sizes: list[Any], begin: int, size: Any, ragged: bool) -> Iterator[int]:
    """Positions among sizes that a dim that stays may have. For ragged ones -1 is meant first: the longest row may have
    the size of a static dim."""
    behind = range(begin, len(sizes))
    if ragged:
        for d in behind:  # Dynamo ends no `yield from` of a list (torch 2.15)
            if sizes[d] == -1:
                yield d
    for d in behind:
        if (sizes[d] == -1 and not ragged) or (sizes[d] != -1 and sizes[d] == size):
            yield d


# -- copies


def expand_ragged(x: Ragged, *sizes: Any) -> Ragged:
    """Static dims of size 1 grow, and dims come in front of all."""
    x, given = with_dims("expand", x, sizes)
    for d in (x._batch_dim, *x.ragged_dims):
        if given[d] != -1 and given[d] != x.shape[d]:
            raise regrouped("expand", x, f"size {show_size(given[d])} for dim {d}")
        given[d] = -1
    try:
        return with_data(x, data_of(x).expand(axis_entries(x, given)))
    except RuntimeError:
        raise regrouped("expand", x, f"sizes {show_sizes(given)}") from None


def repeat_ragged(x: Ragged, *sizes: Any) -> Ragged:
    """Copies of the whole batch, one after another, and of static dims."""
    x, given = with_dims("repeat", x, sizes)
    if any([given[r] != 1 for r in x.ragged_dims]):
        packed = "" if isinstance(x, NestedTensor) else ".to_packed()"
        hint = f"torch.cat([x{packed}] * n, dim) repeats the elements of each row"
        expected, got = f"copies along static dims of {describe(x)}", "copies along a ragged one"
        raise ShapeError(message("repeat", expected, got, hint=hint))
    copies = given[x._batch_dim]
    if isinstance(x, MaskedBatch):
        return build_masked(x.data.repeat(given), x.lengths.repeat(copies, 1), x.ragged_dims, x.batch_dim, True)
    given[x.ragged_dims[0]] = copies  # of packed rows, which hold the batch
    data = x.values.repeat(axis_entries(x, given))
    return x.with_values(data) if copies == 1 else build_nested(several(x.structure, copies), data)


def with_dims(op: str, x: Any, sizes: Any) -> tuple[Any, list[Any]]:
    """A ragged batch with new static dims in front, so that there is one for each size; and the sizes as a list."""
    given = list(ints(op, sizes))
    if len(given) < x.ndim or (op == "repeat" and any([n < 0 for n in given])):
        hint = "one for each dim; more of them stand in front"
        raise ShapeError(message(op, f"at least {x.ndim} numbers for {describe(x)}", show_sizes(given), hint=hint))
    while x.ndim < len(given):
        x = x.unsqueeze(0)
    return x, given


# -- examples and elements in another order


def flip_ragged(x: Any, *dims: Any) -> Ragged:
    """Static dims, the examples, or each example in reverse."""
    given = normal_dims("flip", ints("flip", dims), x.ndim)
    ragged = tuple([d for d in given if d in x.ragged_dims])
    static = [axis_of("flip", x, d) for d in given if d != x._batch_dim and d not in ragged]
    x = with_data(x, data_of(x).flip(static)) if static else x
    packs = isinstance(x, NestedTensor)
    if packs and by_lines("flip", x, ragged):
        x = along_lines("flip", lambda lines, dim: flip_ragged(lines, dim), x, ragged)
    elif packs and ragged:
        s, values = x.structure, x.values
        x = x.with_values(values.index_select(s.packed_dim, mirrored(s, values.shape[s.packed_dim])))
    for d in given:
        if d == x._batch_dim or (d in ragged and not packs):
            x = x[(FULL,) * d + (slice(None, None, -1),)]
    return x


def moved_on(values: torch.Tensor, shift: int, axis: int) -> torch.Tensor:
    """`torch.roll` along one axis; it asks whether there are any elements, which a graph may not know."""
    size = values.shape[axis]
    if known(values.numel() != 0) or not known(size != 0):
        return values.roll(shift, axis)
    front = shift % size
    return torch.cat([values.narrow(axis, size - front, front), values.narrow(axis, 0, size - front)], axis)


def roll_ragged(x: Any, shifts: Any, dims: Any = None) -> Ragged:
    """Static dims, the examples, or the elements of each example moved on, the last ones to the front."""
    if dims is None:
        got, hint = "none: elements would move from example to example", "name them, e.g. x.roll(1, 1)"
        raise ShapeError(message("roll", "dims to roll along", got, hint=hint))
    each = [int_tuple("roll", n) for n in (shifts, dims)]
    if len(each[0]) != len(each[1]):
        got = f"{len(each[0])} for {len(each[1])} dims"
        raise ShapeError(message("roll", "one shift for each dim", got, hint="x.roll((1, 2), (1, 2))"))
    for shift, dim in zip(*each, strict=True):
        d, packs = normal_dim(dim, x.ndim, "roll"), isinstance(x, NestedTensor)
        if d == x._batch_dim:
            count = x.batch_size[0]
            rows = (torch.arange(count, device=x.device) - shift) % max(count, 1)
            x = x[(FULL,) * d + (rows,) if d else rows]
        elif d not in x.ragged_dims:
            x = with_data(x, moved_on(data_of(x), shift, axis_of("roll", x, d)))
        elif packs and by_lines("roll", x, d):
            x = along_lines("roll", lambda v, dim, shift=shift: roll_ragged(v, shift, dim), x, d)
        elif packs:
            s, values = x.structure, x.values
            x = x.with_values(values.index_select(s.packed_dim, rolled(s, values.shape[s.packed_dim], shift)))
        else:
            positions = torch.arange(x.data.shape[d], device=x.device) - shift
            x = neutral(x.with_data(at_each(x, d, positions % sizes_along(x, d)[:, None].clamp(min=1))))
    return x


define(torch.transpose, "shape", ragged=transpose_ragged, dims="input dim0* dim1*")
for _op, _impl in (
    (torch.permute, permute_ragged),
    (torch.unsqueeze, lambda x, dim: insert_dim(x, normal_dim(dim, x.ndim + 1, "unsqueeze"), "unsqueeze")),
    (torch.squeeze, squeeze_ragged), (torch.reshape, reshape_ragged), (torch.Tensor.view, reshape_ragged),
    (torch.Tensor.expand, expand_ragged), (torch.Tensor.repeat, repeat_ragged), (torch.flip, flip_ragged),
    (torch.roll, roll_ragged),
):  # fmt: skip
    define(_op, "shape", ragged=_impl)
note_syncs("the number of elements of the rows, along the batch", torch.roll, kinds=("nested",))
