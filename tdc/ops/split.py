"""Parts of ragged batches: split, chunk, tensor_split, unbind.

    x.split(2)            neighbouring rows                    x.split(2, 2)     parts of a static dim
    x.split(3, 1)         the first 3 positions of each row, the next 3, …
    x.chunk(2, 1)         the two halves of each row

Every part is an index `x[..., a:b, ...]`, so it is what `_ragged_index` makes of it, packed or padded.
Along the ragged dim rows have different numbers of parts; where a row has no more its part is empty. There are as many
parts as were asked for (chunk, tensor_split), or as the longest row has (split); a graph, which cannot know
that, has as many as `max_length` bounds, and so does a padded batch of its rectangle.

Invariant: parts of an example follow each other and make up the example.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import normal_dim
from tdc.core.asserts import require
from tdc.core.errors import ShapeError, describe, message
from tdc.core.rules import define
from tdc.core.typing import Op
from tdc.ops.batch_split import chunk_lengths, part_lengths, split_with_sizes
from tdc.ragged.index import cut_rows, rows_between
from tdc.ragged.index_forms import FULL
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor
from tdc.ragged.segments import longest


def part(x: Any, dim: int, begin: Any, end: Any) -> Any:
    """`x[..., begin:end, ...]` on one dim."""
    if dim in x.ragged_dims:
        return cut_rows(x, dim, begin, end)
    return x[(FULL,) * dim + (slice(begin, end),)]


def apart(x: Any, dim: int, lengths: list[Any]) -> tuple[Any, ...]:
    """Parts of the given lengths, one after another."""
    ends = [0]
    for n in lengths:
        ends.append(ends[-1] + n)
    return between(x, dim, ends)


def between(x: Any, dim: int, ends: list[Any]) -> tuple[Any, ...]:
    """Parts from each position to the next one; positions of the batch are in order and in range."""
    return tuple([rows(x, a, b) if dim == x._batch_dim else part(x, dim, a, b) for a, b in pairwise(ends)])


def rows(x: Any, begin: Any, end: Any) -> Any:
    """Neighbouring rows. Not by a `slice`, whose ends Dynamo reads on the host (torch 2.11-2.13)."""
    if isinstance(x, NestedTensor):
        return rows_between(x, begin, end)(x)
    data, lengths = [t.narrow(d, begin, end - begin) for t, d in ((x.data, x.batch_dim), (x.lengths, 0))]
    return build_masked(data, lengths, x.ragged_dims, x.batch_dim)


def row_sizes(x: Any, dim: int) -> Tensor:
    """The size of each row along a ragged dim, (B,)."""
    return (x.lengths if isinstance(x, MaskedBatch) else x.sizes)[:, x.ragged_dims.index(dim)]


def split_ragged(x: Any, split_size_or_sections: Any, dim: int = 0) -> tuple[Any, ...]:
    """Parts of a length, or of a list of lengths; along the ragged dim a list must add up to the length of each row."""
    given, d = split_size_or_sections, normal_dim(dim, x.ndim, "split")
    if d not in x.ragged_dims:
        return apart(x, d, part_lengths(given, x.shape[d]))
    column = x.ragged_dims.index(d)
    top = x.shape[d] if isinstance(x, MaskedBatch) else longest(x.structure, exact=True)[column]
    if isinstance(given, (list, tuple)):
        text = message("split", f"rows of length {sum(given)}", "others", hint="x.tensor_split(positions, dim)")
        require((row_sizes(x, d) == sum(given)).all(), text, ShapeError)
        return apart(x, d, part_lengths(given, sum(given)))
    return apart(x, d, [given] * len(part_lengths(given, top)))


def chunk_ragged(x: Any, chunks: int, dim: int = 0) -> tuple[Any, ...]:
    """So many parts of nearly equal length; along the ragged dim of each row, none of them left out."""
    d = normal_dim(dim, x.ndim, "chunk")
    if d not in x.ragged_dims:
        return apart(x, d, chunk_lengths(chunks, x.shape[d]))
    sizes = row_sizes(x, d)
    step = -(-sizes // len(chunk_lengths(chunks, 0)))
    return tuple([part(x, d, k * step, (k + 1) * step) for k in range(chunks)])


def tensor_split_ragged(
    x: Any, indices_or_sections: Any = None, dim: int = 0, *, sections: Any = None, indices: Any = None
) -> tuple[Any, ...]:
    """So many parts whose lengths differ by one at most, or parts between positions."""
    d = normal_dim(dim, x.ndim, "tensor_split")
    given = indices_or_sections if indices_or_sections is not None else sections if indices is None else indices
    given = given.tolist() if isinstance(given, Tensor) else given
    if isinstance(given, (list, tuple)):
        ends = [None, *given, None]
        return tuple([part(x, d, a, b) for a, b in pairwise(ends)])
    if not isinstance(given, int) or given < 1:
        got = f"{given}" if isinstance(given, (int, float)) else describe(given)
        hint = "x.tensor_split(2, dim) or x.tensor_split([1, 3], dim)"
        raise ShapeError(message("tensor_split", "a number of parts of at least 1, or positions", got, hint=hint))
    size = row_sizes(x, d) if d in x.ragged_dims else x.shape[d]
    least, more = size // given, size % given
    low = (lambda k: more.clamp(max=k)) if isinstance(more, Tensor) else (lambda k: torch.sym_min(more, k))
    return between(x, d, [least * k + low(k) for k in range(given + 1)])


def split_at(dim: int, op: Op, x: Any, indices_or_sections: Any) -> tuple[Any, ...]:
    """`vsplit`, `hsplit` and `dsplit`: equal parts of dim 0, 1 or 2, or parts between positions.

    Raises:
        ShapeError: there is no such dim, or a number of parts that does not divide it.
    """
    d, given = normal_dim(dim, x.ndim, op), indices_or_sections
    if isinstance(given, int) and given > 0:
        hint = "torch.tensor_split(x, n, dim)"
        if d in x.ragged_dims:
            text = message(op, f"rows whose lengths {given} divides", "others", hint=hint)
            require((row_sizes(x, d) % given == 0).all(), text, ShapeError)
        elif x.shape[d] % given:
            raise ShapeError(message(op, f"a number of parts that divides {x.shape[d]}", f"{given}", hint=hint))
    return tensor_split_ragged(x, given, d)


def unbind_ragged(x: Any, dim: int = 0) -> tuple[Any, ...]:
    """The rows, or ragged batches along a static dim."""
    return x.unbind(dim)


for _op, _impl in (
    (torch.split, split_ragged), (torch.chunk, chunk_ragged), (torch.tensor_split, tensor_split_ragged),
    (torch.unbind, unbind_ragged), (torch.split_with_sizes, partial(split_with_sizes, split_ragged)),
):  # fmt: skip
    define(_op, "split", ragged=_impl)
for _dim, _op in enumerate((torch.vsplit, torch.hsplit, torch.dsplit)):
    define(_op, "split", ragged=partial(split_at, _dim, _op))
