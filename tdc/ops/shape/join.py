"""Joining batches: stack and cat.

Along the batch examples follow examples; along the ragged dim each example is followed by its partner. `stack` adds a
static dim, so its operands have one structure; `tdc.pack` makes a batch of rows that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import normal_dim
from tdc.core.asserts import require
from tdc.core.container import dims_of
from tdc.core.errors import (
    DtypeError,
    ShapeError,
    StructureError,
    TdcError,
    UnsupportedError,
    describe,
    first_line,
    message,
    op_name,
    refuse_wrong,
    show_sizes,
)
from tdc.core.keys import show
from tdc.core.rules import define
from tdc.core.typing import Op
from tdc.layout.segments import (
    columns,
    counts_on_host,
    gather_spans,
    local_positions,
    offsets_of,
    row_ids,
    sizes_on_host,
    strides,
    structure_of_sizes,
    take_spans,
    tell,
)
from tdc.layout.structure import Structure, extent_of, remember
from tdc.ops.tensordict.batch import PLAIN
from tdc.ragged.index import insert_dim
from tdc.ragged.masked import MaskedBatch, build_masked, in_rectangle
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import Ragged, axis_of, data_of, fitted, is_ragged, with_data
from tdc.tensordict.indexing import twin_of
from tdc.tensordict.storage import Leaves, same_size, together
from tdc.tensordict.tensordict import TensorDict, build_td


def same_kind(op: str, xs: Sequence[Any], cls: type) -> list[Any]:
    """The operands as a list, all of one class; the error for others names every one."""
    wrong = {f"operand {i}": describe(x) for i, x in enumerate(xs) if not isinstance(x, cls)}
    expected, hint = f"operands that are all {cls.__name__}", f"make each a {cls.__name__} first"
    refuse_wrong(StructureError, op, expected, wrong, "others", hint)
    return list(xs)


def first_batch(op: str, tensors: Sequence[Any]) -> Any:
    """The first ragged operand; a DtypeError for one batch in place of a list."""
    if is_ragged(tensors):
        one = "x.values has the rows of one batch behind one another"
        hint = f"torch.{op}([x, y]); {one if isinstance(tensors, NestedTensor) else 'x.data is the rectangle'}"
        raise DtypeError(message(op, "a list of batches", describe(tensors), hint=hint))
    return next(x for x in tensors if is_ragged(x))


def cat(tensors: Sequence[Any], dim: int = 0) -> Ragged:
    """Along the batch examples follow examples; along the ragged dim or a static one each goes on in its partner."""
    like = first_batch("cat", tensors)
    packs = isinstance(like, NestedTensor)
    xs = same_kind("cat", [as_rows(x, like) for x in tensors], type(like))
    first = xs[0]
    d = normal_dim(dim, first.ndim, "cat")
    check_layouts("cat", xs, d)
    if d == first._batch_dim:
        return cat_rows(xs) if packs else cat_padded(xs)
    if d not in first.ragged_dims:
        data = [data_of(fitted("cat", first, x)) for x in xs]
        return with_data(first, torch.cat(data, axis_of("cat", first, d)))
    if not packs:
        hint = "to_packed() first, which can"
        raise UnsupportedError(message("cat", "a batch or static dim", f"ragged dim {d}", hint=hint))
    return cat_ragged(xs) if len(first.ragged_dims) == 1 else cat_lines(xs, first.ragged_dims.index(d))


def stack(tensors: Sequence[Any], dim: int = 0) -> Ragged:
    """A new static dim, which all rows share; so the operands have one structure."""
    like = first_batch("stack", tensors)
    xs, d = same_kind("stack", tensors, type(like)), normal_dim(dim, like.ndim + 1, "stack")
    opened = insert_dim(xs[0], d, "stack")
    check_layouts("stack", xs)
    hint = "torch.cat(xs) puts rows after rows, of other lengths as well"
    data = [data_of(fitted("stack", xs[0], x, hint)) for x in xs]
    return with_data(opened, torch.stack(data, axis_of("stack", opened, d)))


def check_layouts(op: str, xs: list[Any], but: int | None = None) -> None:
    """Ragged batches to be joined have their axes at the same positions, and sizes that are equal but for one dim."""
    first = xs[0]
    b, ragged, ndim = first._batch_dim, first.ragged_dims, first.ndim
    if any([(x._batch_dim, x.ragged_dims, x.ndim) != (b, ragged, ndim) for x in xs[1:]]):
        wrong = {f"operand {i}": f"{describe(x)}, batch at dim {x._batch_dim}" for i, x in enumerate(xs)}
        hint = "x.transpose(a, b) or x.unsqueeze(d) brings dims to one position"
        raise StructureError(message(op, "operands of one layout", "several", wrong, hint))
    skip_axes = [axis_of(op, first, d) for d in (b, but, *ragged) if d is not None]
    sizes = [[n for a, n in enumerate(data_of(x).shape) if a not in skip_axes] for x in xs]
    if any([z != sizes[0] for z in sizes]):
        wrong = {f"operand {i}": describe(x) for i, x in enumerate(xs)}
        where = " but for the dim they are joined along" if but not in (None, b, *ragged) else ""
        raise ShapeError(message(op, f"equal static sizes{where}", "others", wrong, "index or expand them"))
    counts = [x.batch_size[0] for x in xs] if but != b else []
    if any([n != counts[0] for n in counts]):
        hint = f"along the batch, dim {b}, rows follow rows"
        raise StructureError(message(op, "as many rows in each", f"batch sizes {counts}", hint=hint))


# -- NestedTensor


def as_rows(x: Any, like: Any) -> Any:
    """A dense operand with as many dims as a batch as rows of one length. Anything else as it is."""
    if not isinstance(x, Tensor) or x.ndim != like.ndim:
        return x
    b, ragged, count = like._batch_dim, like.ragged_dims, len(like.ragged_dims)
    longest = tuple([x.shape[r] for r in ragged])
    sizes = torch.stack([torch.full((x.shape[b],), n, device=like.device) for n in longest], 1)
    if isinstance(like, MaskedBatch):
        return build_masked(x, sizes, ragged, b, True)
    e = like.structure.packed_dim
    rows = structure_of_sizes(sizes, longest, e, b)
    if counts_on_host(rows):
        remember(sizes_on_host, rows, torch.stack([torch.full((x.shape[b],), n, device="cpu") for n in longest], 1))
    values = x.movedim((b, *ragged), tuple(range(1 + count))).flatten(0, count)
    return build_nested(rows, values.movedim(0, e))


def cat_rows(xs: list[NestedTensor]) -> NestedTensor:
    """Batches one after another."""
    s = xs[0].structure
    ends = [s.offsets]
    for x in xs[1:]:
        ends.append(x.offsets + ends[-1][-1])  # of no rows one offset, too
    offsets = [s.offsets, *[found[1:] for found in ends[1:]]]
    shapes = None if s.shapes is None else torch.cat([x.sizes for x in xs])
    joined = Structure(torch.cat(offsets), shapes, joined_extent(xs), s.packed_dim, s.batch_dim, s.ragged_ndim)
    t = tell(joined.marked(), [x.structure for x in xs], torch.cat)
    return build_nested(t, torch.cat([x.values for x in xs], s.packed_dim))


def cat_ragged(xs: list[NestedTensor]) -> NestedTensor:
    """Row i of the result is row i of every operand, end to end."""
    s, count = xs[0].structure, len(xs)
    rows = cat_rows(xs)
    starts = rows.offsets[:-1].view(count, -1).t().reshape(-1)
    lengths = torch.stack([x.lengths for x in xs], 1)
    ends, gather = take_spans(starts, lengths.reshape(-1), total=rows.values.shape[s.packed_dim])
    values, offsets = gather_spans(rows.values, s.packed_dim, gather), ends[::count].contiguous()
    joined = Structure(offsets, None, joined_extent(xs, 0), s.packed_dim, s.batch_dim, 1)
    t = tell(joined.marked(), [x.structure for x in xs], lambda known: torch.stack(known).sum(0))
    return build_nested(t, values)


def cat_lines(xs: list[NestedTensor], r: int) -> NestedTensor:
    """Along one of several ragged dims, number `r`, every line of row i goes on; other sizes of a row are equal."""
    s, each = xs[0].structure, torch.stack([x.sizes for x in xs], 1)  # (B, K, R)
    others = [k for k in range(s.ragged_ndim) if k != r]
    text = message("cat", "rows that differ in the dim they are joined along only", "others", hint="F.pad or crop them")
    require((columns(each, others) == columns(each[:, :1], others)).all(), text, StructureError)
    part, ends = each[:, :, r], each[:, :, r].cumsum(1)
    sizes = torch.stack([ends[:, -1] if k == r else each[:, 0, k] for k in range(s.ragged_ndim)], 1)
    t = Structure(offsets_of(sizes.prod(1)), sizes, joined_extent(xs, r), s.packed_dim, s.batch_dim, s.ragged_ndim)
    values = torch.cat([x.values for x in xs], s.packed_dim)
    rows = row_ids(t, values.shape[s.packed_dim])
    begins, starts = [0], []
    for x in xs:
        starts.append(x.offsets[:-1] + begins[-1])
        begins.append(begins[-1] + x.values.shape[s.packed_dim])
    inner = strides(t)[r][rows]
    rest = local_positions(t, rows.shape[0])
    line, position = rest // inner // ends[rows, -1], rest // inner % ends[rows, -1]
    which = torch.zeros_like(position)
    for k in range(len(xs) - 1):
        which = which + (position >= ends[rows, k])
    position = position - (ends - part)[rows, which]
    source = torch.stack(starts, 1)[rows, which] + (line * part[rows, which] + position) * inner + rest % inner
    return build_nested(t.marked(), values.index_select(s.packed_dim, source))


def joined_extent(xs: list[NestedTensor], r: int | None = None) -> Tensor | None:
    """The longest sizes, or a bound of them, of rows after rows, or of rows that are joined along a ragged dim."""
    extents = [x.structure.extent for x in xs]
    known = [e.shape[:-1] for e in extents if e is not None]
    if len(known) < len(xs):
        return None
    columns = enumerate(zip(*known, strict=True))
    top = [max(sizes) if r is None else sum(sizes) if k == r else sizes[0] for k, sizes in columns]
    return extent_of(tuple(top), xs[0].offsets.device)


# -- MaskedBatch


def cat_padded(xs: list[MaskedBatch]) -> MaskedBatch:
    """Batches one after another, in a rectangle for the longest."""
    first = xs[0]
    top = [max([x.data.shape[r] for x in xs]) for r in first.ragged_dims]
    data = torch.cat([in_rectangle(x, top).data for x in xs], first.batch_dim)
    return build_masked(data, torch.cat([x.lengths for x in xs]), first.ragged_dims, first.batch_dim, True)


def named_axis(impl: Op) -> Op:
    """`axis=`, as numpy calls it, for `dim`."""

    def run(tensors: Sequence[Any], dim: int = 0, *, axis: int | None = None) -> Any:
        return impl(tensors, dim if axis is None else axis)

    return run


# -- TensorDict, along batch dims; leaves that share a ragged structure share one in the result


def stack_tensordict(tensors: Sequence[TensorDict], dim: int = 0) -> TensorDict:
    tds = same_kind("stack", tensors, TensorDict)
    first = tds[0]
    d = normal_dim(dim, dims_of(first) + 1, "stack")
    same_size("stack", *tds)
    leaves = join_leaves(torch.stack, tds, d)
    size = first.batch_size
    return build_td(leaves, first._nodes, torch.Size([*size[:d], len(tds), *size[d:]]), first.device)


def cat_tensordict(tensors: Sequence[TensorDict], dim: int = 0) -> TensorDict:
    tds = same_kind("cat", tensors, TensorDict)
    first = tds[0]
    d = normal_dim(dim, dims_of(first), "cat")
    sizes = [tuple(td.batch_size) for td in tds]
    before, after = sizes[0][:d], sizes[0][d + 1 :]
    wrong = {f"operand {i}": show_sizes(z) for i, z in enumerate(sizes) if z[:d] != before or z[d + 1 :] != after}
    if wrong:
        expected = f"batch sizes like {list(sizes[0])} but for dim {d}"
        raise ShapeError(message("cat", expected, f"{len(wrong)} others", wrong, "index them"))
    leaves = join_leaves(torch.cat, tds, d)
    return build_td(leaves, first._nodes, torch.Size([*before, sum([z[d] for z in sizes]), *after]), first.device)


def join_leaves(join: Any, tds: list[TensorDict], dim: int) -> Leaves:
    """`torch.stack` or `torch.cat` of the leaves at each path. The error for leaves that differ names every path."""
    try:
        known: list[tuple[list[Any], Any]] = []
        return {p: join_group(join, group, dim, known) for p, group in together(op_name(join), *tds)}
    except PLAIN as error:
        if type(error) not in PLAIN:
            raise
        raise misfit(join, tds, dim, error) from error


def join_group(join: Any, group: tuple[Any, ...], dim: int, known: list[tuple[list[Any], Any]]) -> Any:
    """Leaves joined. Results of ragged leaves that share structures share one, too; `known` holds those so far."""
    if isinstance(group[0], Tensor):
        return join(group, dim)
    xs = list(group)  # Dynamo looks for containers in a list, not in a tuple (torch 2.11-2.13)
    if not all([is_ragged(x) for x in xs]):
        return join(xs, dim)
    twin = twin_of(xs, known)
    if twin is None:
        known.append((xs, join(xs, dim)))
        return known[-1][1]
    if join is torch.cat and dim == 0 and isinstance(twin, NestedTensor) and twin.structure.batch_dim == 0:
        return build_nested(twin.structure, torch.cat([x.values for x in xs], twin.structure.packed_dim))
    return join(xs, dim)._with_structure_of(twin)


def misfit(join: Any, tds: list[TensorDict], dim: int, error: Exception) -> TdcError:
    """The error for leaves that do not go together."""
    groups = {show(p): group for p, group in together(op_name(join), *tds)}
    devices = {p: list(dict.fromkeys([f"{v.device}" for v in group])) for p, group in groups.items()}
    apart = {p: " and ".join(found) for p, found in devices.items() if len(found) > 1}
    if apart:
        expected, hint = "leaves on one device for each key", "td.to(device) of one of them"
        return StructureError(message(join, expected, f"{len(apart)} that differ", apart, hint))
    wrong = {}
    for path, group in groups.items():
        kinds = [(not isinstance(v, Tensor), v.ndim, list(v.shape)) for v in group]
        if join is torch.cat:
            kinds = [(ragged, n, [*z[:dim], *z[dim + 1 :]]) for ragged, n, z in kinds]
        if any([kind != kinds[0] for kind in kinds]):
            wrong[path] = " and ".join(dict.fromkeys([describe(v) for v in group]))
    got, hint = "others", f"torch: {first_line(error)}"
    if wrong:
        got = f"{len(wrong)} keys that differ"
        hint = "tdc.data.pad_sequence(tds) or tdc.data.ragged_stack(tds) for rows that differ, or exclude the key"
    return ShapeError(message(join, "leaves of one shape for each key", got, wrong, hint))


define(torch.stack, "join", ragged=named_axis(stack), tensordict=named_axis(stack_tensordict))
define(torch.cat, "join", ragged=named_axis(cat), tensordict=named_axis(cat_tensordict))
