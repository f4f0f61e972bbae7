"""Splitting TensorDicts along batch dims: split, chunk, tensor_split, unbind; and the lengths of the parts of a dim.

Invariant: parts follow each other and make up the dim.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tdc.core.arguments import normal_dim
from tdc.core.errors import ShapeError, describe, message
from tdc.core.rules import define
from tdc.core.typing import Op
from tdc.ops.batch import lift
from tdc.tensordict.tensordict import TensorDict

SIZES = (int, torch.SymInt)


def unbind_tensordict(x: TensorDict, dim: int = 0) -> tuple[TensorDict, ...]:
    d = normal_dim(dim, x.ndim, "unbind")
    return lift(x, lambda v: v.unbind(d), op="unbind")


def split_tensordict(x: TensorDict, split_size_or_sections: Any, dim: int = 0) -> tuple[TensorDict, ...]:
    d = normal_dim(dim, x.ndim, "split")
    lengths = part_lengths(split_size_or_sections, x.batch_size[d])
    return lift(x, lambda v: v.split(lengths, d), op="split")


def chunk_tensordict(x: TensorDict, chunks: int, dim: int = 0) -> tuple[TensorDict, ...]:
    d = normal_dim(dim, x.ndim, "chunk")
    return split_tensordict(x, chunk_lengths(chunks, x.batch_size[d]), d)


def tensor_split_tensordict(x: TensorDict, indices_or_sections: Any, dim: int = 0) -> tuple[TensorDict, ...]:
    """Parts of nearly equal size, or between indices; torch says how long they are."""
    d = normal_dim(dim, x.ndim, "tensor_split")
    parts = torch.empty((x.batch_size[d], 0)).tensor_split(indices_or_sections)
    return split_tensordict(x, [part.shape[0] for part in parts], d)


def split_along(dims: tuple[Any, ...], op: Op, x: TensorDict, indices_or_sections: Any) -> tuple[TensorDict, ...]:
    """`hsplit`, `vsplit` and `dsplit`: `dims` says along which dim torch splits a tensor of 1, 2, ... dims.

    Raises:
        ShapeError: too few batch dims, or a number of parts that does not divide the dim.
    """
    d, given = dims[min(x.ndim, len(dims)) - 1] if x.ndim else None, indices_or_sections
    if d is None:
        need = [dim is None for dim in dims].count(True) + 1
        raise ShapeError(message(op, f"at least {need} batch dims", f"{x.ndim}", hint="torch.tensor_split(td, n, dim)"))
    if isinstance(given, int) and x.batch_size[d] % given:
        expected, got = f"a number of parts that divides {x.batch_size[d]}", f"{given}"
        raise ShapeError(message(op, expected, got, hint="torch.tensor_split(td, n, dim)"))
    return tensor_split_tensordict(x, given, d)


def part_lengths(given: Any, total: Any) -> list[Any]:
    """Lengths of the parts of a dim: all of one length but the last, or as they are given. An empty dim is one part.

    Raises:
        ShapeError: a length that is no int above 0, or given lengths that do not add up to the dim.
    """
    if isinstance(given, SIZES) and given > 0:
        return equal_parts(given, total)
    listed = isinstance(given, (list, tuple))
    if not listed or not all([isinstance(n, SIZES) and n >= 0 for n in given]):
        hint = "td.split(2) or td.split([2, 1])"
        got = f"{given}" if listed or isinstance(given, (int, float)) else describe(given)
        raise ShapeError(message("split", "a length of at least 1, or a list of lengths", got, hint=hint))
    lengths = list(given)
    if sum(lengths) != total:
        hint = "torch.tensor_split(x, indices) takes the positions between parts"
        raise ShapeError(message("split", f"lengths that add up to {total}", f"{sum(lengths)}", hint=hint))
    return lengths


def equal_parts(length: Any, total: Any) -> list[Any]:
    """Parts of one length, and what is left. Not by a `range`, for which Dynamo takes a size as it is."""
    lengths, rest = [], total
    while rest > length:
        lengths.append(length)
        rest = rest - length
    return [*lengths, rest]


def chunk_lengths(chunks: Any, total: Any) -> list[Any]:
    """Lengths of so many parts, or of fewer where the dim is short; an empty dim is as many empty parts.

    Raises:
        ShapeError: a number of parts that is no int above 0.
    """
    if not isinstance(chunks, int) or chunks < 1:
        got = f"{chunks}" if isinstance(chunks, (int, float)) else describe(chunks)
        raise ShapeError(message("chunk", "a number of parts of at least 1", got, hint="td.chunk(2)"))
    return [0] * chunks if total == 0 else part_lengths(-(-total // chunks), total)


def split_with_sizes(split: Op, x: Any, split_sizes: Any, dim: int = 0) -> tuple[Any, ...]:
    """`split` of a list of lengths."""
    return split(x, list(split_sizes), dim)


for _op, _impl in (
    (torch.unbind, unbind_tensordict), (torch.split, split_tensordict), (torch.chunk, chunk_tensordict),
    (torch.tensor_split, tensor_split_tensordict),
    (torch.split_with_sizes, partial(split_with_sizes, split_tensordict)),
):  # fmt: skip
    define(_op, "split", tensordict=_impl)
for _op, _dims in ((torch.hsplit, (0, 1)), (torch.vsplit, (None, 0)), (torch.dsplit, (None, None, 2))):
    define(_op, "split", tensordict=partial(split_along, _dims, _op))
