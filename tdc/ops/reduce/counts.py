"""Distinct elements of each row and how often they occur: unique, unique_consecutive, bincount, and `tdc.ops.histc`.

    x (B, -1, *D)                    dim 1, the ragged dim
    x.unique(dim=1)                  (B, -1, *D), the distinct slices of each row in order
    torch.bincount(x)                (B, K), K the largest value of all rows + 1, or `minlength`
    tdc.ops.histc(x, bins, 0, 1)     (B, bins)

Packed, how many distinct elements there are is data. A rectangle keeps its size, and they are moved to its front.

Invariants: no element meets one of another row; padding is neither found nor counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect, expect_number, normal_dim
from tdc.core.asserts import require
from tdc.core.errors import DtypeError, ShapeError, StructureError, UnsupportedError, describe, message
from tdc.core.rules import define, note_syncs, unsupported
from tdc.core.typing import Op
from tdc.layout.segments import column, local_positions, reduce_rows, row_ids, structure_of_sizes, total_of
from tdc.ops.reduce.along_dim import order_by_owner
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import Ragged, fitted

NO_VMAP = ("eager", "compile", "grad", "export")  # how many there are is data


# -- distinct elements


def unique_ragged(
    input: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    return distinct(torch.unique, input, dim, True, return_inverse, return_counts)


def consecutive_ragged(
    input: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    return distinct(torch.unique_consecutive, input, dim, False, return_inverse, return_counts)


def distinct(op: Op, x: Any, dim: int | None, ordered: bool, inverse: bool, counts: bool) -> Any:
    """Distinct slices of each row along its ragged dim, and what else is asked for, as torch returns them."""
    if dim is None:
        hint = "x.unique(dim=1) for each row; torch.unique(x.values) for all rows of a NestedTensor"
        got = "none, which could mean values of each row or of all rows"
        raise UnsupportedError(message(op, "dim, the ragged dim", got, hint=hint))
    if normal_dim(dim, x.ndim, op) not in x.ragged_dims or len(x.ragged_dims) > 1:
        hint = "tdc.unbatched(fn)(x) loops over examples"
        raise UnsupportedError(message(op, "dim, the one ragged dim", f"dim {dim} of {describe(x)}", hint=hint))
    packed = isinstance(x, NestedTensor)
    out, places, numbers = distinct_packed(x, ordered) if packed else distinct_padded(x, ordered)
    if not (inverse or counts):
        return out
    return (out, *[places] * inverse, *[numbers] * counts)


def keys_of(rows: Tensor) -> Tensor:
    """One number for each slice along dim 0, in the order of slices: (N, *D) -> (N,)."""
    return rows if rows.ndim == 1 else torch.unique(rows, dim=0, return_inverse=True)[1]


def differs(rows: Tensor, others: Tensor) -> Tensor:
    """True where slices differ, (N, *D) -> (N,)."""
    return (rows != others).reshape(rows.shape[0], -1).any(1) if rows.ndim > 1 else rows != others


def distinct_packed(x: NestedTensor, ordered: bool) -> tuple[NestedTensor, NestedTensor, NestedTensor]:
    s, p = x.structure, x.structure.packed_dim
    rows = x.values.movedim(p, 0)
    total, keys = rows.shape[0], keys_of(rows.detach()) if ordered else rows
    owner, at = row_ids(s, total), torch.arange(total, device=rows.device)
    order = order_by_owner(keys, owner, False) if ordered else at
    keys = keys[order]
    first = (local_positions(s, total) == 0) | differs(keys, keys[(at - 1).clamp(min=0)])
    t = structure_of_sizes(reduce_rows(first.to(torch.int64), s, "sum", 0)[:, None])
    found, group = order[first.nonzero().squeeze(1)], first.cumsum(0) - 1
    out = build_nested(t.moved(p, s.batch_dim), rows[found].movedim(0, p))
    places = torch.zeros_like(group).scatter(0, order, group - t.offsets[owner])
    numbers = torch.zeros_like(found).index_add(0, group, torch.ones_like(group))
    return out, build_nested(s.moved(0, 0), places), build_nested(t.moved(0, 0), numbers)


def distinct_padded(x: MaskedBatch, ordered: bool) -> tuple[MaskedBatch, MaskedBatch, MaskedBatch]:
    (d,), b = x.ragged_dims, x._batch_dim
    rows = x.filled(0).movedim((d, b), (0, 1))  # (L, B, *D)
    shape, lengths = rows.shape[:2], x.lengths[:, 0]
    at = torch.arange(shape[0], device=rows.device)[:, None]
    real, flat = at < lengths, rows.flatten(0, 1)
    keys = keys_of(flat.detach()).unflatten(0, shape) if ordered else rows
    order = order_by_owner(keys, (~real).to(torch.uint8), False) if ordered else at.expand(shape)
    keys = keys.gather(0, order) if ordered else keys
    former = keys[(at[:, 0] - 1).clamp(min=0)]
    first = real & ((at == 0) | differs(keys.flatten(0, 1), former.flatten(0, 1)).unflatten(0, shape))
    front = (~first).to(torch.uint8).argsort(dim=0, stable=True)
    count = first.sum(0)[:, None]
    found = order.gather(0, front) * shape[1] + torch.arange(shape[1], device=rows.device)
    data = flat[found.flatten()].unflatten(0, shape).movedim((0, 1), (d, b))
    group = (first.cumsum(0) - 1).clamp(min=0)
    places = torch.zeros_like(group).scatter(0, order, group)
    numbers = torch.zeros_like(group).scatter_add(0, group, real.to(torch.int64))
    each = [build_masked(t.movedim(0, 1), n, (1,), 0) for t, n in ((places, x.lengths), (numbers, count))]
    return build_masked(data, count, (d,), b, new_lengths=True), each[0], each[1]


# -- counts


def elements_of(x: Ragged) -> tuple[Tensor, Tensor, Tensor | None]:
    """All elements of a batch in one row, the example that each belongs to, and a mask of real ones."""
    if isinstance(x, NestedTensor):
        s, rows = x.structure, x.values.movedim(x.structure.packed_dim, 0)
        owner = column(row_ids(s, rows.shape[0]), rows).expand(rows.shape)
        return rows.flatten(), owner.flatten(), None
    data = x.data.movedim(x._batch_dim, 0)
    owner = column(torch.arange(data.shape[0], device=data.device), data).expand(data.shape)
    return data.flatten(), owner.flatten(), x.mask.expand(x.data.shape).movedim(x._batch_dim, 0).flatten()


def bincount_ragged(input: Any, weights: Any = None, minlength: int = 0) -> Tensor:
    """Count of each whole number in each row, (B, K); weights are as ragged as the rows."""
    op, x = torch.bincount, input
    expect_number("bincount", minlength, whole=True)
    if minlength < 0:
        raise ShapeError(message(op, "minlength of 0 or more", f"{minlength}", hint="minlength=0 adds no counts"))
    if x.ndim != 2:
        hint = "x.flatten(1, 2) counts all elements of each row"
        raise ShapeError(message(op, "rows of numbers, (B, -1)", describe(x), hint=hint))
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise DtypeError(message(op, "whole numbers", describe(x), hint="x.long()"))
    values, owner, real = elements_of(x)
    ones = torch.ones_like(values, dtype=torch.int64)
    if weights is not None:
        if type(weights) is not type(x):
            hint = "x.with_values(weights) of packed ones, x.with_data(weights) of padded ones"
            raise StructureError(message(op, f"weights in a {type(x).__name__}", describe(weights), hint=hint))
        ones = elements_of(fitted(op, x, weights))[0]
        ones = ones if ones.dtype == torch.float32 else ones.to(torch.float64)
    values = values.to(torch.int64)
    if real is not None:
        values, ones = torch.where(real, values, 0), torch.where(real, ones, 0)
    text = message(op, "numbers from 0", "a negative one", hint="x - x.min() begins at 0")
    require((values >= 0).all(), text, ShapeError)
    most = torch.cat([values, values.new_full((1,), minlength - 1)]).amax() + 1
    size, count = total_of(structure_of_sizes(most.view(1, 1))), x.batch_size[0]
    flat = ones.new_zeros(count * size).index_add(0, owner * size + values, ones)
    return flat.view(count, size)


def range_of_rows(x: Any) -> tuple[Tensor, Tensor]:
    """The least and the greatest element of each example, (B,) both; one below and one above where all are equal."""
    dims = tuple([d for d in range(x.ndim) if d != x._batch_dim])
    low, high = x.amin(dims), x.amax(dims)
    text = message("histc", "finite elements", "NaN or an infinity", hint="name the range: min=0, max=1")
    require(((low.isfinite() & high.isfinite()) | (low > high)).all(), text, ShapeError)
    same = low == high
    return torch.where(same, low - 1, low), torch.where(same, high + 1, high)


def histc(x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Count the elements of each example in bins of equal width: `torch.histc` of each row.

    Elements outside the range, NaN among them, are not counted. `torch.histc(nested)` counts all rows together.

    Args:
        x: a NestedTensor or a MaskedBatch of floating point.
        bins: how many bins.
        min, max: the range of all examples; where both are equal, each example has that of its own elements.

    Shapes:
        x `(B, ..., -1, ...)` -> `(B, bins)`, in the dtype of x. An example without elements has counts of 0.

    Raises:
        DtypeError: no ragged batch, or no floating point.
        ShapeError: no bins, or a range that ends before it begins.

    Compile:
        One graph for all lengths. Counts have no gradient.

    Example:
        >>> from tdc.ragged.pack import pack
        >>> histc(pack([torch.tensor([0.1, 0.9, 0.8]), torch.tensor([0.2])]), 2, 0, 1)
        tensor([[1., 2.],
                [1., 0.]])
    """
    expect("histc", x, NestedTensor, MaskedBatch)
    expect_number("histc", bins, whole=True)
    if not x.is_floating_point():
        raise DtypeError(message("histc", "floating point", describe(x), hint="x.float(), or torch.bincount(x)"))
    if bins < 1 or min > max:
        got = f"{bins} bins from {min} to {max}"
        expected = "one bin or more, from min to a larger max"
        raise ShapeError(message("histc", expected, got, hint="bins=10, min=0, max=1"))
    values, owner, real = elements_of(x)
    values = values.detach()
    if min == max:
        low, high = range_of_rows(x.detach())
    else:
        low, high = [torch.full((x.batch_size[0],), end, dtype=x.dtype, device=x.device) for end in (min, max)]
    first, last = low[owner], high[owner]
    inside = (values >= first) & (values <= last)
    inside = inside if real is None else inside & real
    bin = ((values - first) * bins / (last - first)).masked_fill(~inside, 0).to(torch.int64).clamp(max=bins - 1)
    counts = torch.zeros(x.batch_size[0] * bins, dtype=torch.int64, device=x.device)
    counts = counts.index_add(0, owner * bins + bin, inside.to(torch.int64))
    return counts.view(x.batch_size[0], bins).to(x.dtype)


for _op, _impl, _more in ((torch.unique, unique_ragged, "sorted "), (torch.unique_consecutive, consecutive_ragged, "")):
    _dims = f"input {_more}return_inverse return_counts dim*=None"
    define(_op, "counts", nested=_impl, dims=_dims, modes=NO_VMAP)
    define(_op, "counts", masked=_impl, dims=_dims, modes=(*NO_VMAP, "vmap"))
    unsupported(
        _op, ["tensordict"], "results of other sizes from leaf to leaf", family="counts",
        hint="of one leaf: td['key'].unique()",
    )  # fmt: skip
define(torch.bincount, "counts", ragged=bincount_ragged, modes=NO_VMAP)
note_syncs("the number of distinct elements", torch.unique, torch.unique_consecutive, kinds=("nested",))
note_syncs("the largest number", torch.bincount)
