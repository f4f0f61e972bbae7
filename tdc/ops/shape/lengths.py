"""Operations that give rows another length: pad, repeat_interleave, unfold, pixel_shuffle.

    lengths 2, 3        F.pad(x, (1, 2)) -> 5, 6       x.repeat_interleave(2, 1) -> 4, 6      x.unfold(1, 2, 1) -> 1, 2

The new lengths follow from the old ones, and so does the packed total of all but `unfold`: nothing is read on the host.

Invariants: each row is padded with its own elements or with the value; new padding of a rectangle gets no gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import expect_at_least, expect_number, normal_dim, shown
from tdc.core.asserts import require
from tdc.core.dynamo import known, larger
from tdc.core.errors import DtypeError, ShapeError, StructureError, UnsupportedError, describe, message
from tdc.core.rules import define, note_syncs
from tdc.core.typing import Op
from tdc.layout.segments import (
    elements,
    lengths_of,
    on_host_too,
    reduce_rows,
    repeated,
    row_ids,
    structure_of_sizes,
    take_spans,
    tell,
)
from tdc.layout.structure import Structure, extent_of, require_same
from tdc.ops.positions import dim_of, flat_examples
from tdc.ops.rectangle import rectangle, with_sizes
from tdc.ops.reduce.along_dim import expect_elements
from tdc.ragged.convert import to_packed, to_padded
from tdc.ragged.index import rows_at
from tdc.ragged.index_ragged import at_each
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import Ragged, axis_of, changed_sizes, data_of, is_ragged, ragged_sizes, sizes_along, with_data

MODES = ("constant", "reflect", "replicate", "circular")

# -- pad


def amounts(x: Any, pad: Any, mode: str) -> list[tuple[int, int, int]]:
    """The dims that `F.pad` changes: a dim, how much in front and how much behind.

    A circular dim shrinks before it grows: elements cut off on one side do not come back on the other.
    """
    if mode not in MODES:
        raise UnsupportedError(message("pad", f"a mode of {', '.join(MODES)}", f"{mode!r}", hint="mode='constant'"))
    if len(pad) % 2 or len(pad) > 2 * x.ndim:
        hint = "two for each dim, the last dim first"
        raise ShapeError(message("pad", f"an even count of numbers, {2 * x.ndim} at most", f"{len(pad)}", hint=hint))
    found = [(x.ndim - 1 - k, pad[2 * k], pad[2 * k + 1]) for k in range(len(pad) // 2)]
    if mode == "circular":
        cuts = [(d, min(front, 0), min(behind, 0)) for d, front, behind in found]
        found = [*cuts, *[(d, max(front, 0), max(behind, 0)) for d, front, behind in found]]
    found = [entry for entry in found if entry[1:] != (0, 0)]
    if any([d == x._batch_dim for d, _, _ in found]):
        raise ShapeError(message("pad", "dims of a row", f"the batch, dim {x._batch_dim}", hint="torch.cat([x, rows])"))
    return found


def source(position: Tensor, length: Any, mode: str) -> Tensor:
    """Positions within a row of the elements that positions in front of it, in it and behind it take."""
    if mode == "reflect":
        last = length - 1
        return last - (last - position.abs()).abs()
    if mode == "circular":
        return position % (length.clamp(min=1) if isinstance(length, Tensor) else max(length, 1))
    return position.clamp(min=0).clamp(max=length - 1)


def check_lengths(lengths: Tensor, front: int, behind: int, mode: str) -> None:
    """Require that every row is long enough for what is cut off it or mirrored in it."""
    most = max(front, behind, 0)
    need = {"constant": 0, "reflect": most + 1, "replicate": 1, "circular": max(most, 1)}[mode]
    least, hint = max(need, -front - behind, -front, -behind), "mode='constant'"
    if mode == "constant":
        hint = "cut less, or drop short rows first: x = x[x.lengths > k]"
    expected = "rows as long as what is cut off" if mode == "constant" else f"rows long enough for mode={mode!r}"
    text = message("pad", expected, "a shorter row", hint=hint)
    require((lengths >= least).all(), text, ShapeError)


def pad(input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Ragged:
    """Static dims grow or shrink, and every row along a ragged one; several ragged dims go through a rectangle."""
    x: Any = input
    found, packs = amounts(x, pad, mode), x._kind == "nested"
    several = [entry for entry in found if entry[0] in x.ragged_dims] if packs and len(x.ragged_dims) > 1 else []
    if several:
        known = on_host_too(x.structure, lambda sizes: grown(sizes, x.ragged_dims, several))
        x = to_packed(pad_rectangle(to_padded(x), several, mode, value), total=elements(known))
    for entry in [entry for entry in found if entry not in several]:
        d, front, behind = entry
        if d not in x.ragged_dims:
            x = with_data(x, pad_axis(data_of(x), axis_of("pad", x, d), front, behind, mode, value))
        elif packs:
            x = pad_rows(x, front, behind, mode, value)
        else:
            x = pad_rectangle(x, [entry], mode, value)
    return x


def grown(sizes: Tensor, dims: tuple[int, ...], found: list[tuple[int, int, int]]) -> Tensor:
    """Ragged sizes (B, R) of padded examples."""
    more = [sum([front + behind for at, front, behind in found if at == d]) for d in dims]
    return torch.stack([n + m for n, m in zip(sizes.unbind(1), more, strict=True)], 1)


def pad_axis(x: Tensor, axis: int, front: int, behind: int, mode: str, value: float | None) -> Tensor:
    """One dim of a dense tensor."""
    size = x.shape[axis]
    if mode == "constant":
        return F.pad(x, [*[0, 0] * (x.ndim - 1 - axis), front, behind], mode, value)
    most = size - 1 if mode == "reflect" else size
    if mode != "replicate" and not max(front, behind) <= most:
        expected, got = f"at most {most} on each side", f"{front} and {behind}"
        raise ShapeError(message("pad", expected, got, hint="mode='constant'"))
    return x.index_select(axis, source(torch.arange(-front, size + behind, device=x.device), size, mode))


def pad_rows(x: NestedTensor, front: int, behind: int, mode: str, value: float | None) -> NestedTensor:
    """The ragged dim: each element of the longer rows is looked up in its own row."""
    s, e, more = x.structure, x.structure.packed_dim, front + behind
    lengths, total = lengths_of(s), x.values.shape[e]
    check_lengths(lengths, front, behind, mode)
    extent = None if s.extent is None else extent_of((s.extent.shape[0] + more,), s.offsets.device)
    offsets = s.offsets + torch.arange(s.batch_size + 1, device=x.device) * more
    t = tell(Structure(offsets, None, extent, e, s.batch_dim, 1).marked(), [s], lambda known: known[0] + more)
    count = total + s.batch_size * more
    ids = row_ids(t, count)
    position = torch.arange(count, device=x.device) - offsets[ids] - front
    length = lengths[ids]
    if mode != "constant":
        return build_nested(t, x.values.index_select(e, s.offsets[ids] + source(position, length, mode)))
    wide = F.pad(x.values, [*[0, 0] * (x.values.ndim - 1 - e), 0, 1], value=value or 0)  # the value is one more element
    where = torch.where((position >= 0) & (position < length), s.offsets[ids] + position, total)
    return build_nested(t, wide.index_select(e, where))


def pad_rectangle(x: Any, found: list[tuple[int, int, int]], mode: str, value: float | None) -> MaskedBatch:
    """Ragged dims of a padded batch."""
    for d, front, behind in found:
        lengths = sizes_along(x, d)
        check_lengths(lengths, front, behind, mode)
        if mode == "constant":
            fill = torch.full((), value or 0, dtype=x.dtype, device=x.device)
            data = pad_axis(torch.where(x.mask, x.data, fill), d, front, behind, mode, value)
        else:
            positions = torch.arange(-front, x.data.shape[d] + behind, device=x.device)
            data = at_each(x, d, source(positions, lengths[:, None], mode))
        sizes = changed_sizes(x, (d,), lambda n, more=front + behind: n + more)
        x = with_sizes(data, x, sizes, x.ragged_dims)
    return x


# -- repeat_interleave


def repeat_interleave(x: Any, repeats: Any, dim: int | None = None, *, output_size: Any = None) -> Ragged:
    """Rows, positions of static dims, or the elements of each row several times. Without a dim rows are flattened."""
    op, times = torch.repeat_interleave, repeats
    if not isinstance(repeats, int) and getattr(repeats, "dtype", torch.int64) not in (torch.int32, torch.int64):
        raise DtypeError(message(op, "int32 or int64 repeats", describe(repeats), hint="repeats.long()"))
    if isinstance(repeats, Tensor):
        times = int(repeats) if repeats.numel() == 1 and repeats.ndim < 2 else repeats
    elif not is_ragged(repeats):
        expect_number(op, repeats, whole=True)
    if dim is None:
        x, dim = flat_examples(op, x), 1
    d = normal_dim(dim, x.ndim, op)
    if isinstance(times, Tensor) and times.ndim > 1:
        got, hint = describe(times), "one number for each position, the same for all examples"
        raise ShapeError(message(op, "a vector of numbers of times", got, hint=hint))
    if d == x._batch_dim:
        rows = torch.arange(x.batch_size[0], device=x.device).repeat_interleave(times, output_size=output_size)
        return rows_at(x, rows)(x)
    axis, packs = axis_of(op, x, d), isinstance(x, NestedTensor)
    if d not in x.ragged_dims:
        return with_data(x, data_of(x).repeat_interleave(times, axis, output_size=output_size))
    if packs and len(x.ragged_dims) > 1:
        got, hint = f"dim {dim}, one of {len(x.ragged_dims)}", "F.interpolate scales images; or loop over x.unbind()"
        raise UnsupportedError(message(op, "the only ragged dim", got, hint=hint))
    if packs and isinstance(times, NestedTensor):
        if times.values.ndim != 1:
            raise StructureError(message(op, "numbers (B, -1)", describe(times), hint="one for each element"))
        require_same(x.structure.moved(0, 0), times.structure, op)
        counts = reduce_rows(times.values, times.structure, "sum", 0)
        t = structure_of_sizes(counts[:, None], None, axis, x._batch_dim)
        return build_nested(t, x.values.repeat_interleave(times.values, axis, output_size=output_size))
    if not isinstance(times, int):
        hint = "an int, or of a NestedTensor a batch (B, -1) with a number of times for each element"
        raise StructureError(message(op, "one number of times for a ragged dim", describe(repeats), hint=hint))
    data = data_of(x).repeat_interleave(times, axis)
    if packs:
        return build_nested(repeated(x.structure, times), data)
    return build_masked(data, changed_sizes(x, (d,), lambda n: n * times), x.ragged_dims, x.batch_dim, True)


# -- windows, pixels


def unfold(x: Any, dimension: int, size: int, step: int) -> Ragged:
    """Windows along a static dim or within each row; the position in the window is the last dim."""
    op = torch.Tensor.unfold
    expect_at_least(op, 0, "size", size)
    expect_at_least(op, 1, "step", step)
    d = dim_of(op, x, dimension)
    axis = axis_of(op, x, d)
    if d not in x.ragged_dims:
        expect_elements(op, size, x, d)
        return with_data(x, data_of(x).unfold(axis, size, step))
    hint = "drop short rows first: x = x[x.lengths >= size]"
    text = message(op, f"rows of at least {shown(size)} positions", "a shorter row", hint=hint)
    require((sizes_along(x, d) >= size).all(), text)

    def windows(n: Tensor) -> Tensor:
        return (n - size) // step + 1

    counts = changed_sizes(x, (d,), windows)
    if isinstance(x, MaskedBatch):
        data, width = x.data, x.data.shape[d]
        if not known(width >= size):  # where there is no example
            data = pad_axis(data, d, 0, larger(size, width) - width, "constant", None)
        return with_sizes(data.unfold(d, size, step), x, counts, x.ragged_dims)
    total = elements(on_host_too(x.structure, windows))
    offsets, begins = take_spans(x.offsets[:-1], counts[:, 0], step, total)
    where = begins[:, None] + torch.arange(size, device=x.device)
    values = x.values.index_select(axis, where.flatten()).unflatten(axis, where.shape).movedim(axis + 1, -1)
    return build_nested(Structure(offsets, None, None, axis, x._batch_dim, 1).marked(), values)


def pixels(op: Op, input: Any, factor: int) -> Ragged:
    """`pixel_shuffle` and `pixel_unshuffle` of rows (C, H, W), of which H, W or both are ragged."""
    expect_at_least(op, 1, "upscale_factor" if op is F.pixel_shuffle else "downscale_factor", factor)
    x, sizes, grows = input, ragged_sizes(input), op is F.pixel_shuffle
    if x.ndim != 4 or x._batch_dim or x.ragged_dims[0] < 2:
        raise ShapeError(message(op, "rows of (C, H, W) with ragged H or W", describe(x), hint="x.permute(...) first"))
    data, times = rectangle(x, 0), factor ** len(x.ragged_dims)
    total = x.values.shape[x.structure.packed_dim] if isinstance(x, NestedTensor) else 0
    if grows:
        if data.shape[1] % factor**2:
            expected = f"a number of channels that {factor} * {factor} divides"
            raise ShapeError(message(op, expected, f"{data.shape[1]}", hint="F.pad, or x[:, :n]"))
        return with_sizes(shuffled(data, factor), x, sizes * factor, x.ragged_dims, total * times)
    text = message(op, f"heights and widths that {shown(factor)} divides", "others", hint="F.pad, or x[..., :n]")
    if any([data.shape[d] % factor for d in (2, 3) if d not in x.ragged_dims]):
        raise ShapeError(text)
    require((sizes % factor == 0).all(), text, ShapeError)
    more = [n for d in (3, 2) for n in (0, -data.shape[d] % factor if d in x.ragged_dims else 0)]
    return with_sizes(unshuffled(F.pad(data, more), factor), x, sizes // factor, x.ragged_dims, total // times)


def shuffled(images: Tensor, factor: int) -> Tensor:
    """(B, C * f * f, H, W) -> (B, C, H * f, W * f)."""
    parts = images.unflatten(1, (images.shape[1] // factor**2, factor, factor))
    return parts.permute(0, 1, 4, 2, 5, 3).flatten(4, 5).flatten(2, 3)


def unshuffled(images: Tensor, factor: int) -> Tensor:
    """(B, C, H * f, W * f) -> (B, C * f * f, H, W). torch's own leaves images without elements as they are (2.13)."""
    rows, columns = [n // factor for n in images.shape[2:]]
    parts = images.unflatten(3, (columns, factor)).unflatten(2, (rows, factor))
    return parts.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)


define(F.pad, "shape", ragged=pad)
define(torch.repeat_interleave, "shape", ragged=repeat_interleave)
define(torch.Tensor.unfold, "shape", ragged=unfold, dims="input dimension* size step")
for _op in (F.pixel_shuffle, F.pixel_unshuffle):
    define(_op, "shape", ragged=partial(pixels, _op))
note_syncs("the number of elements, of repeats that are data", torch.repeat_interleave, kinds=("nested", "masked"))
