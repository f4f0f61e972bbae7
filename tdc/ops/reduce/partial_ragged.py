"""Operations along some of several ragged dims: a batch of images as the batch of its lines.

    images (B, -1, -1)     sum(x, 2): B images of h lines, of w positions each     -> (B, -1), h numbers in each
                           sum(x, 1): the same of columns

    images (B, -1, -1)     sort(x, 2): each line sorted                          -> (B, -1, -1)

Each line is an example of a longer batch, so that no operation needs a rule of its own. A reduction of the lines gives
a dense result `(M, ...)`, which is packed already. Results that keep the lines, or shorten all lines of an example
alike, get their examples back. Lines along the last ragged dims are contiguous in the packed axis, others are gathered.

    M lines of the whole batch; padded, the lines of padding are among them, and empty

Invariants: a line without elements gives what an empty example gives; M is data, so a packed batch needs its sizes on
the host, and in a graph M is an unbacked size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.core.arguments import normal_dim
from tdc.core.errors import ShapeError, message
from tdc.core.typing import Op, OpName
from tdc.layout.padding import exchange, valid_mask
from tdc.layout.segments import (
    columns,
    elements,
    offsets_of,
    on_host_too,
    positions_in,
    sizes_of,
    sizes_on_host,
    structure_of_sizes,
)
from tdc.layout.structure import Structure, once_for_each, remember
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import changed_sizes, map_results


class Lines(NamedTuple):
    """A batch as its lines.

    Attributes:
        batch: `(M, ...)`, whose ragged dims are those that are reduced.
        dim_of: a dim of the original batch as a dim of this one.
        back: `(out, keepdim)`: a dense result of all its dims, as a batch with those along the lines or without.
        again: a batch of lines as one like the original, or of other sizes `(B, R)`.
    """

    batch: Any
    dim_of: Callable[[int], int]
    back: Callable[[Tensor, bool], Any]
    again: Callable[[Any, Tensor | None], Any]


def by_lines(op: OpName, x: Any, dim: Any) -> bool:
    """True if some but not all of the ragged dims are among one dim or several, and the batch is not.

    Raises:
        ShapeError: a dim out of range.
    """
    if len(x.ragged_dims) == 1 or isinstance(dim, bool) or not isinstance(dim, (int, tuple, list)):
        return False
    dims = dims_of(op, x, dim)
    return x._batch_dim not in dims and 0 < len([d for d in x.ragged_dims if d in dims]) < len(x.ragged_dims)


def over_lines(op: OpName, run: Op, x: Any, dim: Any, keepdim: bool) -> Any:
    """`run(lines, dim=, keepdim=True)` of the lines of a batch along `dim`, one or several; its results as batches.

    Several results come in the named tuple that torch returns, and share their lengths.
    """
    dims = dims_of(op, x, dim)
    kept = split_dims(x.ragged_dims, dims)[1]
    if keepdim and kept[-1] - kept[0] >= len(kept):
        got, hint = "a static dim between them", "keepdim=False where there is one, or loop over x.unbind()"
        raise ShapeError(message(op, "ragged dims side by side", got, hint=hint))
    lines = nested_lines(x, dims) if isinstance(x, NestedTensor) else masked_lines(x, dims)
    out = run(lines.batch, dim=one_or_all(dim, [lines.dim_of(d) for d in dims]), keepdim=True)
    return map_results(out, lambda t: lines.back(t, keepdim))


def along_lines(op: OpName, run: Op, x: Any, dim: Any, resized: Callable[[Tensor], Tensor] | None = None) -> Any:
    """`run(lines, dim=)` of the lines of a batch along `dim`, one or several, which it keeps; its results as batches.

    Args:
        resized: of the sizes of a ragged dim those that `run` makes of them, (B,) -> (B,); without it they stay.
    """
    dims = dims_of(op, x, dim)
    new = None if resized is None else changed_sizes(x, dims, resized)
    lines = nested_lines(x, dims) if isinstance(x, NestedTensor) else masked_lines(x, dims)
    out = run(lines.batch, dim=one_or_all(dim, [lines.dim_of(d) for d in dims]))
    return type(out)([lines.again(y, new) for y in out]) if isinstance(out, tuple) else lines.again(out, new)


def dims_of(op: OpName, x: Any, dim: Any) -> tuple[int, ...]:
    """One dim or several, counted from the front."""
    return tuple([normal_dim(d, x.ndim, op) for d in ((dim,) if isinstance(dim, int) else dim)])


def one_or_all(dim: Any, dims: list[int]) -> Any:
    """Dims as they were given: one of them, or a tuple."""
    return dims[0] if isinstance(dim, int) else tuple(dims)


def resized_structure(s: Structure, sizes: Tensor | None) -> Structure:
    """The structure of a batch whose ragged dims have other sizes (B, R), no longer ones; None for the same."""
    if sizes is None:
        return s
    return Structure(offsets_of(sizes.prod(1)), sizes, s.extent, s.packed_dim, s.batch_dim, s.ragged_ndim).marked()


def split_dims(ragged_dims: tuple[int, ...], dims: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Ragged dims that are among some dims, and those that are not, counted from the first ragged one."""
    along = [r for r, d in enumerate(ragged_dims) if d in dims]
    return along, [r for r in range(len(ragged_dims)) if r not in along]


def longest_at(s: Structure, which: Sequence[int]) -> tuple[int, ...] | None:
    """The longest of each of some of the ragged dims, where they are known."""
    return None if s.extent is None else tuple([s.extent.shape[r] for r in which])


def kept_structures(s: Structure, dims: tuple[int, ...]) -> tuple[Structure, Structure]:
    """The structures of a batch without the ragged dims among `dims`, and with static dims of size 1 instead."""
    along, kept = split_dims(s.ragged_dims, dims)
    batch_dim = s.batch_dim - len([r for r in along if s.ragged_dims[r] < s.batch_dim])
    outer = structure_with(s, tuple(kept), s.packed_dim, batch_dim)
    return outer, outer.moved(s.packed_dim + kept[0], s.batch_dim)


@once_for_each
def structure_with(s: Structure, kept: tuple[int, ...], packed_dim: int, batch_dim: int) -> Structure:
    """The structure with some of the ragged dims, its axes at these dims."""
    return structure_of_sizes(columns(sizes_of(s), kept), longest_at(s, kept), packed_dim, batch_dim)


def without_static(x: NestedTensor, y: Any, dims: tuple[int, ...]) -> NestedTensor:
    """A result that has lost the ragged dims among `dims` of x, without the static ones among them."""
    lost = [d for d in x.ragged_dims if d in dims]
    static = tuple([d - len([r for r in lost if r < d]) for d in dims if d not in lost])
    return y.squeeze(static) if static else y


def nested_lines(x: NestedTensor, dims: tuple[int, ...]) -> Lines:
    s, e = x.structure, x.structure.packed_dim
    along, kept = split_dims(s.ragged_dims, dims)
    order, turn, count = [*kept, *along], kept[-1] > along[0], len(along)
    values = in_order(x, order) if turn else x.values
    outer, wide = kept_structures(s, dims)
    known = on_host_too(s, lambda sizes: columns(sizes, kept))
    remember(sizes_on_host, outer, known)
    rows = torch.repeat_interleave(sizes_of(outer).prod(1), output_size=elements(known))
    inner = structure_of_sizes(columns(sizes_of(s), along)[rows], longest_at(s, along), e)

    def dim_of(d: int) -> int:
        axis: Any = s.axis(d, x.ndim, "sum")
        return 1 + (axis if axis < e else axis + count - 1 if axis > e else e + along.index(s.ragged_dims.index(d)))

    def back(out: Tensor, keepdim: bool) -> NestedTensor:
        if keepdim:
            return build_nested(wide, out.movedim(0, wide.packed_dim))
        y = build_nested(outer, out.squeeze(tuple(range(e + 1, e + 1 + count))).movedim(0, e))
        return without_static(x, y, dims)

    def again(out: Any, new: Tensor | None) -> NestedTensor:
        t = resized_structure(s, new)
        if not turn:
            return build_nested(t, out.values)
        turned = Structure(t.offsets, columns(sizes_of(t), order), None, e, 0, s.ragged_ndim)
        return build_nested(t, in_order(build_nested(turned, out.values), inverse(order)))

    return Lines(build_nested(inner, values), dim_of, back, again)


def in_order(x: NestedTensor, order: list[int]) -> Tensor:
    """The values of a batch with the ragged dims of each example in another order."""
    s, values, e = x.structure, x.values, x.structure.packed_dim
    turned = Structure(s.offsets, columns(sizes_of(s), order), None, e, 0, s.ragged_ndim)
    total = values.shape[e]
    index, back = positions_in(s, turned, total, inverse(order)), positions_in(turned, s, total, order)
    return exchange(values.movedim(e, 0), index, None, 0.0, back, None).movedim(0, e)


def inverse(order: list[int]) -> list[int]:
    """The order that undoes another one."""
    return sorted(range(len(order)), key=order.__getitem__)


def masked_lines(x: MaskedBatch, dims: tuple[int, ...]) -> Lines:
    along, kept = split_dims(x.ragged_dims, dims)
    front = (x.batch_dim, *[x.ragged_dims[r] for r in kept])
    rest = [d for d in range(x.ndim) if d not in front]
    first = tuple(range(len(front)))
    data = x.data.movedim(front, first)
    lead, lengths = data.shape[: len(front)], x.lengths.unbind(1)
    number = torch.stack([lengths[r] for r in kept], 1)
    real = valid_mask(number, tuple(lead[1:]))
    each = [torch.where(real, lengths[r].view(-1, *[1] * len(kept)), 0).flatten() for r in along]
    ragged = tuple([1 + rest.index(x.ragged_dims[r]) for r in along])
    batch = build_masked(data.flatten(0, len(kept)), torch.stack(each, 1), ragged, new_lengths=True)

    def back(out: Tensor, keepdim: bool) -> MaskedBatch:
        full = out.unflatten(0, lead).movedim(first, front)
        stay = [d for d in range(x.ndim) if keepdim or d not in dims]
        full = full if keepdim else full.squeeze(dims)
        ragged = tuple([stay.index(x.ragged_dims[r]) for r in kept])
        return build_masked(full, number, ragged, stay.index(x.batch_dim), True)

    def again(out: Any, new: Tensor | None) -> MaskedBatch:
        data = out.data.unflatten(0, lead).movedim(first, front)
        return build_masked(data, x.lengths if new is None else new, x.ragged_dims, x.batch_dim, new is not None)

    return Lines(batch, lambda d: 1 + rest.index(d), back, again)
