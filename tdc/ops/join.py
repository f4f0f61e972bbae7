"""Joining and splitting: stack, cat, unbind, split.

A NestedTensor is concatenated along its batch (rows follow rows) or along a static dim; along the ragged dim each row
is joined to its partner. `stack` is always dense: it never turns into something else because sizes differ; use `pack`
for that.

Invariants: one traversal; the result's container is that of the operands, whatever the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tdc._errors import ShapeError, StructureError, UnsupportedError, describe, message, show_sizes
from tdc._rules import Rule, add_rule
from tdc._structure import Structure, extent_of, normal_dim, require_same, take_spans
from tdc._tree import same_size, together
from tdc._typing import Op
from tdc.masked import MaskedBatch, require_same_lengths
from tdc.masked import like as masked_like
from tdc.nested import NestedTensor
from tdc.nested import like as nested_like
from tdc.tensordict import TensorDict, make


def same_kind(op: str, xs: Sequence[Any], cls: type) -> list[Any]:
    """The operands as a list, all of one class, at least one.

    Raises:
        StructureError: something else is among them; every one is named.
    """
    wrong = {f"operand {i}": describe(x) for i, x in enumerate(xs) if not isinstance(x, cls)}
    if wrong:
        hint = f"make each a {cls.__name__} first"
        raise StructureError(message(op, f"operands that are all {cls.__name__}", f"{len(wrong)} others", wrong, hint))
    return list(xs)


# -- TensorDict


def stack_tensordict(tensors: Sequence[TensorDict], dim: int = 0) -> TensorDict:
    tds = same_kind("stack", tensors, TensorDict)
    first = tds[0]
    d = normal_dim(dim, first.ndim + 1, "stack")
    same_size("stack", *tds)
    leaves = {p: torch.stack(group, d) for p, group in together("stack", *tds)}
    size = first.batch_size
    return make(leaves, first._nodes, torch.Size([*size[:d], len(tds), *size[d:]]), first.device)


def cat_tensordict(tensors: Sequence[TensorDict], dim: int = 0) -> TensorDict:
    tds = same_kind("cat", tensors, TensorDict)
    first = tds[0]
    d = normal_dim(dim, first.ndim, "cat")
    sizes = [tuple(td.batch_size) for td in tds]
    before, after = sizes[0][:d], sizes[0][d + 1 :]
    wrong = {f"operand {i}": show_sizes(z) for i, z in enumerate(sizes) if z[:d] != before or z[d + 1 :] != after}
    if wrong:
        expected = f"batch sizes like {list(sizes[0])} but for dim {d}"
        raise ShapeError(message("cat", expected, f"{len(wrong)} others", wrong, "index them"))
    leaves = {p: torch.cat(group, d) for p, group in together("cat", *tds)}
    return make(leaves, first._nodes, torch.Size([*before, sum([z[d] for z in sizes]), *after]), first.device)


def unbind_tensordict(x: TensorDict, dim: int = 0) -> tuple[TensorDict, ...]:
    d = normal_dim(dim, x.ndim, "unbind")
    size = torch.Size([*x.batch_size[:d], *x.batch_size[d + 1 :]])
    parts = {p: v.unbind(d) for p, v in x._leaves.items()}
    return tuple([make({p: v[i] for p, v in parts.items()}, x._nodes, size, x.device) for i in range(x.batch_size[d])])


def split_tensordict(x: TensorDict, split_size_or_sections: Any, dim: int = 0) -> tuple[TensorDict, ...]:
    d = normal_dim(dim, x.ndim, "split")
    total, given = x.batch_size[d], split_size_or_sections
    lengths = [min(given, total - i) for i in range(0, total, given)] if isinstance(given, int) else list(given)
    parts = {p: v.split(lengths, d) for p, v in x._leaves.items()}
    size = x.batch_size
    return tuple(
        [
            make({p: v[i] for p, v in parts.items()}, x._nodes, torch.Size([*size[:d], n, *size[d + 1 :]]), x.device)
            for i, n in enumerate(lengths)
        ]
    )


def chunk_tensordict(x: TensorDict, chunks: int, dim: int = 0) -> tuple[TensorDict, ...]:
    return split_tensordict(x, max(1, -(-x.batch_size[normal_dim(dim, x.ndim, "chunk")] // chunks)), dim)


# -- NestedTensor


def cat_nested(tensors: Sequence[NestedTensor], dim: int = 0) -> NestedTensor:
    xs = same_kind("cat", tensors, NestedTensor)
    first = xs[0]
    s = first.structure
    axis = s.axis(dim, first.ndim, "cat")
    if axis is None:
        return cat_rows(xs)
    if axis == s.packed_dim:
        return cat_ragged(xs)
    for x in xs[1:]:
        require_same(s, x.structure, "cat")
    return first.with_values(torch.cat([x.values for x in xs], axis))


def cat_rows(xs: list[NestedTensor]) -> NestedTensor:
    """Batches one after another."""
    s = xs[0].structure
    offsets = [s.offsets]
    for x in xs[1:]:
        offsets.append(x.offsets[1:] + offsets[-1][-1])
    shapes = None if s.shapes is None else torch.cat([x.sizes for x in xs])
    extents = [x.structure.extent for x in xs]
    extent = None
    if all([e is not None for e in extents]):
        sizes = zip(*[e.shape[:-1] for e in extents if e is not None], strict=True)
        extent = extent_of(tuple([max(z) for z in sizes]), s.offsets.device)
    joined = Structure(torch.cat(offsets), shapes, extent, s.packed_dim, s.batch_dim, s.ragged_ndim)
    return nested_like(joined.marked(), torch.cat([x.values for x in xs], s.packed_dim))


def cat_ragged(xs: list[NestedTensor]) -> NestedTensor:
    """Row i of the result is row i of every operand, end to end."""
    s, count = xs[0].structure, len(xs)
    sizes = [x.structure.batch_size for x in xs]
    layouts = {(x.structure.packed_dim, x.structure.batch_dim) for x in xs}
    if s.ragged_ndim > 1 or len(layouts) > 1 or any([n != sizes[0] for n in sizes]):
        got = f"{s.ragged_ndim} ragged dims, {len(layouts)} layouts, batch sizes {sizes}"
        raise StructureError(
            message("cat", "one ragged dim and as many rows in each", got, hint="x.unbind() and tdc.pack")
        )
    rows = cat_rows(xs)
    starts = rows.offsets[:-1].view(count, -1).t().reshape(-1)
    lengths = torch.stack([x.lengths for x in xs], 1)
    offsets, gather = take_spans(starts, lengths.reshape(-1))
    values = rows.values.index_select(s.packed_dim, gather)
    return nested_like(Structure(offsets[::count], None, None, s.packed_dim, s.batch_dim, 1).marked(), values)


def stack_nested(tensors: Sequence[NestedTensor], dim: int = 0) -> NestedTensor:
    xs = same_kind("stack", tensors, NestedTensor)
    s, d = xs[0].structure, normal_dim(dim, xs[0].ndim + 1, "stack")
    if d <= s.batch_dim or s.batch_dim != 0 or d in s.ragged_dims[1:]:
        hint = "stack on a dim behind the batch, or cat on dim 0"
        raise UnsupportedError(message("stack", "a new static dim behind the batch", f"dim {d}", hint=hint))
    for x in xs[1:]:
        require_same(s, x.structure, "stack")
    k = d - 1
    axis = k if k <= s.packed_dim else k - s.ragged_ndim + 1
    moved = s.moved(s.packed_dim + (axis <= s.packed_dim), 0)
    return nested_like(moved, torch.stack([x.values for x in xs], axis))


# -- MaskedBatch


def cat_masked(tensors: Sequence[MaskedBatch], dim: int = 0) -> MaskedBatch:
    xs = same_kind("cat", tensors, MaskedBatch)
    first = xs[0]
    d = normal_dim(dim, first.ndim, "cat")
    if d in first.ragged_dims:
        raise UnsupportedError(
            message("cat", "a batch or static dim", f"ragged dim {d}", hint="to_packed() first, which can")
        )
    if d != first.batch_dim:
        for x in xs[1:]:
            require_same_lengths(first, x, "cat")
        return first.with_data(torch.cat([x.data for x in xs], d))
    top = [max([x.data.shape[r] for x in xs]) for r in first.ragged_dims]
    data = torch.cat([grown(x, top) for x in xs], d)
    return masked_like(data, torch.cat([x.lengths for x in xs]), first.ragged_dims, first.batch_dim, True)


def grown(x: MaskedBatch, sizes: list[int]) -> torch.Tensor:
    """The data with its ragged dims padded to `sizes`."""
    pad = [0] * (2 * x.ndim)
    for r, size in zip(x.ragged_dims, sizes, strict=True):
        pad[2 * (x.ndim - 1 - r) + 1] = size - x.data.shape[r]
    return F.pad(x.data, pad)


def stack_masked(tensors: Sequence[MaskedBatch], dim: int = 0) -> MaskedBatch:
    xs = same_kind("stack", tensors, MaskedBatch)
    first, d = xs[0], normal_dim(dim, xs[0].ndim + 1, "stack")
    if first.ragged_dims[0] < d <= first.ragged_dims[-1] or d <= first.batch_dim:
        hint = "stack on a dim behind the batch, or cat on dim 0"
        raise UnsupportedError(message("stack", "a new static dim behind the batch", f"dim {d}", hint=hint))
    for x in xs[1:]:
        require_same_lengths(first, x, "stack")
    ragged = tuple([r + (d <= r) for r in first.ragged_dims])
    return masked_like(torch.stack([x.data for x in xs], d), first.lengths, ragged, first.batch_dim)


def join_rule(op: Op, **impls: Op) -> None:
    """Rows for a joining or splitting operation."""
    for kind, impl in impls.items():
        add_rule(Rule(op, kind, "join", impl, op))


join_rule(torch.stack, nested=stack_nested, masked=stack_masked, tensordict=stack_tensordict)
join_rule(torch.cat, nested=cat_nested, masked=cat_masked, tensordict=cat_tensordict)
join_rule(torch.unbind, tensordict=unbind_tensordict)
join_rule(torch.split, tensordict=split_tensordict)
join_rule(torch.chunk, tensordict=chunk_tensordict)

stack = torch.stack
cat = torch.cat
