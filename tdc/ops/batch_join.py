"""Joining TensorDicts along batch dims: stack, cat and their kin.

Invariant: leaves that share a ragged structure share one in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import normal_dim
from tdc.core.container import dims_of
from tdc.core.errors import ShapeError, StructureError, TdcError, describe, first_line, message, op_name, show_sizes
from tdc.core.keys import show
from tdc.core.rules import define
from tdc.ops.batch import PLAIN
from tdc.ops.join import named_axis, same_kind
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.tensordict.indexing import twin_of
from tdc.tensordict.storage import Leaves, same_size, together
from tdc.tensordict.tensordict import TensorDict, build_td


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
        return {p: joined(join, group, dim, known) for p, group in together(op_name(join), *tds)}
    except PLAIN as error:
        if type(error) not in PLAIN:
            raise
        raise misfit(join, tds, dim, error) from error


def joined(join: Any, group: tuple[Any, ...], dim: int, known: list[tuple[list[Any], Any]]) -> Any:
    """Leaves joined. Of ragged ones that share their structures with others, known by now, also the result does."""
    if isinstance(group[0], Tensor):
        return join(group, dim)
    xs = list(group)  # Dynamo looks for containers in a list, not in a tuple (torch 2.11-2.13)
    if not all([isinstance(x, (NestedTensor, MaskedBatch)) for x in xs]):
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


define(torch.stack, "join", tensordict=named_axis(stack_tensordict))
define(torch.cat, "join", tensordict=named_axis(cat_tensordict))
