"""Ragged batches that broadcast against each other: a static dim of size 1 against a ragged dim.

    q (B, -1, D)        q[:, None] - q[:, :, None]      (B, 1, -1, D), (B, -1, 1, D) -> (B, -1, -1, D)
    p (B, -1, -1, D)    p + q.unsqueeze(2)              each row's q along the columns of its p

Dims are counted from the last. The result is ragged where any operand is; where several are, their rows have equal
sizes, compared on the device: a ragged dim whose rows all have size 1 does not broadcast.

    `widest` of some operands is one with all ragged dims of the result; `onto` gives the values of another beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tdc.core.asserts import require
from tdc.core.errors import ShapeError, StructureError, describe, message
from tdc.core.typing import Op
from tdc.layout.segments import counts_on_host, positions_in, sizes_of, sizes_on_host, structure_of_sizes, total_of
from tdc.layout.structure import remember, require_same
from tdc.ops.tensordict.leafwise import first_of
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import Ragged, ragged_sizes

UNEQUAL = "rows of different lengths"


def widest(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NestedTensor:
    """The first NestedTensor among the operands; where layouts differ, one with the dims that they broadcast to."""
    like = first_of(NestedTensor, op, args, kwargs)
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, NestedTensor) and x is not like and not one_layout(x, like):
            return spanned(op, [a for a in (*args, *kwargs.values()) if isinstance(a, NestedTensor)])
    return like


def widest_of(op: Op, *xs: Any) -> Ragged:
    """`widest` of a NestedTensor and others, or of a MaskedBatch."""
    packed = isinstance(first_of((NestedTensor, MaskedBatch), op, xs, {}), NestedTensor)
    return widest(op, xs, {}) if packed else widest_masked(op, xs, {})


def one_layout(x: NestedTensor, y: NestedTensor) -> bool:
    """True if the dims of two batches are the same in number and kind."""
    s, t = x._structure, y._structure
    if x._values.ndim != y._values.ndim:
        return False
    return s is t or (s.packed_dim, s.batch_dim, s.ragged_ndim) == (t.packed_dim, t.batch_dim, t.ragged_ndim)


def spanned(op: Op, xs: list[NestedTensor]) -> NestedTensor:
    """A batch of the shape that several broadcast to; its values are never read."""
    ndim = max([x.ndim for x in xs])
    batch, ragged = spans_of(op, xs, ndim)
    sizes = static_sizes(op, xs, ndim, batch, ragged)
    e = ragged[0] - (ragged[0] > batch)
    full = [x for x in xs if len(x.ragged_dims) == len(ragged)]
    if full:
        s, total = full[0]._structure, full[0]._values.shape[full[0]._structure.packed_dim]
        s = s if (s.packed_dim, s.batch_dim) == (e, batch) else s.moved(e, batch)
    else:
        longs = [next(n for x in xs for n, r in bounds(x, ndim) if r == d) for d in ragged]
        known = None if any([n is None for n in longs]) else tuple(longs)
        s = structure_of_sizes(first_sizes(xs, ndim, ragged), known, e, batch)
        if counts_on_host(s):
            remember(sizes_on_host, s, first_sizes(xs, ndim, ragged, lambda x: sizes_on_host(x._structure)))
        total = total_of(s)
    sizes[e : e + len(ragged)] = [total]
    return build_nested(s, xs[0]._values.new_empty(()).expand(sizes))


def spans_of(op: Op, xs: list[Any], ndim: int) -> tuple[int, tuple[int, ...]]:
    """The batch dim and the ragged dims of what several batches broadcast to."""
    batches = {x._batch_dim + ndim - x.ndim for x in xs}
    batch = min(batches)
    ragged = tuple(sorted({d + ndim - x.ndim for x in xs for d in x.ragged_dims}))
    positions = [d - (d > batch) for d in ragged]
    if any([x.batch_size[0] != xs[0].batch_size[0] for x in xs[1:]]):
        hint = "x[rows] and y[rows] of the same rows"
        raise StructureError(message(op, "operands of equally many rows", "others", operands(xs), hint))
    if len(batches) > 1:
        got, hint = "other numbers of dims", "y.unsqueeze(d) where y lacks a dim of x"
        raise misfit(op, xs, "batches whose dims meet, counted from the last", got, hint)
    if positions[-1] - positions[0] >= len(positions):
        raise misfit(op, xs, "ragged dims side by side", "static dims between them", "permute static dims first")
    return batch, ragged


def static_sizes(op: Op, xs: list[Any], ndim: int, batch: int, ragged: tuple[int, ...]) -> list[Any]:
    """The sizes of all dims but the batch that several batches broadcast to; -1 on ragged ones."""
    found: list[Any] = []
    for d in range(ndim):
        kinds = [x.shape[d - ndim] for x in xs if d >= ndim - x.ndim and d + x.ndim - ndim not in x.ragged_dims]
        if d == batch:
            continue
        wide = [n for n in kinds if n != 1]
        if wide and (d in ragged or any([n != wide[0] for n in wide])):
            hint = "a ragged dim meets one of the same sizes, or a static one of size 1"
            raise misfit(op, xs, "operands that broadcast", f"other sizes at dim {d}", hint)
        found.append(-1 if d in ragged else wide[0] if wide else 1)
    return found


def misfit(op: Op, xs: list[Any], expected: str, got: str, hint: str) -> ShapeError:
    """The error for batches that do not broadcast, all of which are listed."""
    return ShapeError(message(op, expected, got, operands(xs), hint))


def operands(xs: list[Any]) -> dict[str, str]:
    """The operands, for a message."""
    return {f"operand {i}": describe(x) for i, x in enumerate(xs)}


def first_sizes(
    xs: list[Any], ndim: int, ragged: tuple[int, ...], of: Callable[[Any], Tensor] = ragged_sizes
) -> Tensor:  # fmt: skip
    """The sizes (B, R) of ragged dims, each of the first batch that has it; `of` reads them, here or on the host."""
    pairs = [(x, d, n) for x in reversed(xs) for d, n in zip(x.ragged_dims, of(x).unbind(1), strict=True)]
    found = {d + ndim - x.ndim: n for x, d, n in pairs}
    return torch.stack([found[d] for d in ragged], 1)


def bounds(x: NestedTensor, ndim: int) -> list[tuple[Any, int]]:
    """The longest size of each ragged dim, None where the batch does not carry it, and the dim."""
    s = x._structure
    longs = [None] * s.ragged_ndim if s.extent is None else s.extent.shape[:-1]
    return list(zip(longs, [d + ndim - x.ndim for d in x.ragged_dims], strict=True))


def onto(x: NestedTensor, like: NestedTensor, op: Op) -> Tensor:
    """The values of a batch as they broadcast against those of `like`, which is at least as ragged."""
    s, t = x._structure, like._structure
    if one_layout(x, like):
        require_same(t, s, op)
        return x._values
    ndim = like.ndim
    batch, ragged = spans_of(op, [like, x], max(ndim, x.ndim))
    static_sizes(op, [like, x], max(ndim, x.ndim), batch, ragged)
    if ragged != like.ragged_dims:
        got, hint = "more ragged dims", "y[:, None] or y[:, :, None] for one number for each element"
        raise misfit(op, [like, x], "an operand that broadcasts against the first", got, hint)
    own = [ragged.index(d + ndim - x.ndim) for d in x.ragged_dims]
    mine, all_sizes = sizes_of(s), sizes_of(t)
    text = message(op, "rows of equal sizes where both are ragged", UNEQUAL, hint="x.to_padded() both, or slice rows")
    require(torch.stack([(mine[:, c] == all_sizes[:, r]).all() for c, r in enumerate(own)]).all(), text, StructureError)
    missing = [d + x.ndim - ndim for r, d in enumerate(ragged) if r not in own and d + x.ndim >= ndim]
    axes: list[Any] = [s.axis(d, x.ndim, op) for d in missing]
    values, e = x._values.squeeze(axes), s.packed_dim - len([a for a in axes if a < s.packed_dim])
    if len(own) == len(ragged):
        return values
    index = positions_in(s, t, like._values.shape[t.packed_dim], own)
    return values.index_select(e, index)


# -- MaskedBatch: rectangles broadcast as they are


def widest_masked(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MaskedBatch:
    """`widest` of padded batches."""
    like = first_of(MaskedBatch, op, args, kwargs)
    xs = [x for x in (*args, *kwargs.values()) if isinstance(x, MaskedBatch)]
    if all([x.ragged_dims == like.ragged_dims and x.ndim == like.ndim for x in xs]):
        return like
    ndim = max([x.ndim for x in xs])
    batch, ragged = spans_of(op, xs, ndim)
    static_sizes(op, xs, ndim, batch, ragged)
    try:
        data = torch.broadcast_tensors(*[x.data for x in xs])[0].detach()
    except RuntimeError:
        raise misfit(op, xs, "rectangles that broadcast", "others", "x.to_padded(length=...) for all") from None
    return build_masked(data, first_sizes(xs, ndim, ragged), ragged, batch, new_lengths=True)


def onto_masked(x: MaskedBatch, like: MaskedBatch, op: Op) -> Tensor:
    """`onto` of padded batches, whose data broadcasts as it is."""
    spans_of(op, [like, x], like.ndim)
    at = [like.ragged_dims.index(d + like.ndim - x.ndim) for d in x.ragged_dims]
    text = message(op, "rows of equal sizes where both are ragged", UNEQUAL, hint="build both from one batch")
    require((x.lengths == torch.stack([like.lengths[:, r] for r in at], 1)).all(), text, StructureError)
    return x.data
