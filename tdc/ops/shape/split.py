"""Parts of batches: split, chunk, tensor_split, unbind.

    x.split(2)            neighbouring examples
    x.split(2, 2)         parts of a static dim, of a TensorDict parts of a batch dim
    x.split(3, 1)         the first 3 positions of each row, the next 3, …
    x.chunk(2, 1)         the two halves of each row

Along the ragged dim a row without more positions has empty parts. There are as many parts as were asked for (chunk,
tensor_split), or as the longest row has (split); in a graph and of a padded batch as many as its bound has.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import normal_dim, shown
from tdc.core.asserts import require
from tdc.core.container import dims_of, shape_of
from tdc.core.dynamo import larger, smaller, traced_for
from tdc.core.errors import ShapeError, describe, message
from tdc.core.rules import define, note_syncs
from tdc.core.typing import Op
from tdc.layout.segments import longest
from tdc.ops.tensordict.batch import lift
from tdc.ragged.index import rows_between
from tdc.ragged.index_forms import FULL
from tdc.ragged.index_ragged import cut_rows
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import Ragged, axis_of, data_of, sizes_along, with_data
from tdc.tensordict.tensordict import TensorDict

SIZES = (int, torch.SymInt)


def is_ragged_dim(x: Any, dim: int) -> bool:
    """True if a dim, counted from the front, is ragged."""
    return not isinstance(x, TensorDict) and dim in x.ragged_dims


def part(x: Any, dim: int, begin: Any, end: Any) -> Ragged | TensorDict:
    """`x[..., begin:end, ...]` on one dim."""
    return cut_rows(x, dim, begin, end) if is_ragged_dim(x, dim) else x[(FULL,) * dim + (slice(begin, end),)]


def apart(x: Any, dim: int, lengths: list[Any]) -> tuple[Any, ...]:
    """Parts of the given lengths, one after another."""
    if isinstance(x, TensorDict):
        return lift(x, lambda v: v.split(lengths, dim), op="split")
    own = dim == x._batch_dim
    if not own and not is_ragged_dim(x, dim):
        return tuple([with_data(x, data) for data in data_of(x).split(lengths, axis_of("split", x, dim))])
    ends = [0]
    for n in lengths:
        ends.append(ends[-1] + n)
    return tuple([rows_between(x, a, b)(x) if own else part(x, dim, a, b) for a, b in pairwise(ends)])


def split(x: Any, split_size_or_sections: Any, dim: int = 0) -> tuple[Any, ...]:
    """Parts of a length, or of a list of lengths; along the ragged dim a list must add up to the length of each row."""
    given, d = split_size_or_sections, normal_dim(dim, dims_of(x), "split")
    if not is_ragged_dim(x, d):
        return apart(x, d, part_lengths(given, shape_of(x)[d]))
    if isinstance(given, (list, tuple)):
        text = message("split", f"rows of length {shown(sum(given))}", "others", hint="x.tensor_split(positions, dim)")
        require((sizes_along(x, d) == sum(given)).all(), text, ShapeError)
        return apart(x, d, part_lengths(given, sum(given)))
    column = x.ragged_dims.index(d)
    top = shape_of(x)[d] if isinstance(x, MaskedBatch) else longest(x.structure, exact=True)[column]
    return apart(x, d, [given] * len(part_lengths(given, top)))


def chunk(x: Any, chunks: int, dim: int = 0) -> tuple[Any, ...]:
    """Parts of nearly equal length; along the ragged dim of each row, none of them left out."""
    d = normal_dim(dim, dims_of(x), "chunk")
    if not is_ragged_dim(x, d):
        return apart(x, d, chunk_lengths(chunks, shape_of(x)[d]))
    step = -(-sizes_along(x, d) // len(chunk_lengths(chunks, 0)))
    return tuple([part(x, d, k * step, (k + 1) * step) for k in range(chunks)])


def tensor_split(
    x: Any, indices_or_sections: Any = None, dim: int = 0, *, sections: Any = None, indices: Any = None
) -> tuple[Any, ...]:
    """Parts whose lengths differ by one at most, or parts between positions."""
    d = normal_dim(dim, dims_of(x), "tensor_split")
    given = indices_or_sections if indices_or_sections is not None else sections if indices is None else indices
    given = between(given, is_ragged_dim(x, d))
    if isinstance(given, (list, tuple)):
        return tuple([part(x, d, a, b) for a, b in pairwise([None, *given, None])])
    if not isinstance(given, int) or given < 1:
        got = f"{given}" if isinstance(given, (int, float)) else describe(given)
        hint = "x.tensor_split(2, dim) or x.tensor_split([1, 3], dim)"
        raise ShapeError(message("tensor_split", "a number of parts of at least 1, or positions", got, hint=hint))
    if not is_ragged_dim(x, d):
        least, more = shape_of(x)[d] // given, shape_of(x)[d] % given
        return apart(x, d, [least + smaller(larger(more - k, 0), 1) for k in range(given)])
    least, more = sizes_along(x, d) // given, sizes_along(x, d) % given
    return tuple([part(x, d, a, b) for a, b in pairwise([least * k + more.clamp(max=k) for k in range(given + 1)])])


def between(given: Any, ragged: bool) -> Any:
    """Positions between parts, or the number of parts; along a ragged dim positions may be tensors."""
    if not isinstance(given, Tensor):
        return given
    return list(given.unbind()) if ragged and given.ndim == 1 else given.tolist()


@traced_for(between)
def between_traced(given: Any, ragged: bool) -> Any:
    """`between` in a graph; a ShapeError where sizes of static dims would depend on data."""
    if not isinstance(given, Tensor):
        return given
    if not ragged or given.ndim != 1:
        hint = "x.tensor_split([1, 3], dim)"
        raise ShapeError(message("tensor_split", "positions in a list, in a graph", describe(given), hint=hint))
    return list(given.unbind())


def split_at(need: int, dim: int, op: Op, x: Any, indices_or_sections: Any) -> tuple[Any, ...]:
    """`hsplit`, `vsplit` and `dsplit`: equal parts of a dim, or parts between positions."""
    d, given, hint = min(dim, dims_of(x) - 1), indices_or_sections, "torch.tensor_split(x, n, dim)"
    if dims_of(x) < need:
        what = "batch dims" if isinstance(x, TensorDict) else "dims"
        raise ShapeError(message(op, f"at least {need} {what}", f"{dims_of(x)}", hint=hint))
    if isinstance(given, int) and given > 0:
        if is_ragged_dim(x, d):
            text = message(op, f"rows whose lengths {shown(given)} divides", "others", hint=hint)
            require((sizes_along(x, d) % given == 0).all(), text, ShapeError)
        elif shape_of(x)[d] % given:
            raise ShapeError(message(op, f"a number of parts that divides {shape_of(x)[d]}", f"{given}", hint=hint))
    return tensor_split(x, given, d)


def unbind_tensordict(x: TensorDict, dim: int = 0) -> tuple[TensorDict, ...]:
    d = normal_dim(dim, dims_of(x), "unbind")
    return lift(x, lambda v: v.unbind(d), op="unbind")


def part_lengths(given: Any, total: Any) -> list[Any]:
    """Lengths of the parts of a dim: all of one length but the last, or as they are given. An empty dim is one part."""
    if isinstance(given, SIZES) and given > 0:
        lengths, rest = [], total
        while rest > given:  # not by a `range`, for which Dynamo takes a size as it is
            lengths.append(given)
            rest = rest - given
        return [*lengths, rest]
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


def chunk_lengths(chunks: Any, total: Any) -> list[Any]:
    """Lengths of so many parts, or of fewer where the dim is short; an empty dim is as many empty parts."""
    if not isinstance(chunks, int) or chunks < 1:
        got = f"{chunks}" if isinstance(chunks, (int, float)) else describe(chunks)
        raise ShapeError(message("chunk", "a number of parts of at least 1", got, hint="td.chunk(2)"))
    return [0] * chunks if total == 0 else part_lengths(-(-total // chunks), total)


for _op, _impl, _dims in (
    (torch.split, split, "tensor split_size_or_sections dim*=0"), (torch.chunk, chunk, "input chunks dim*=0"),
    (torch.tensor_split, tensor_split, "input indices_or_sections dim*=0"),
    (
        torch.split_with_sizes, lambda x, split_sizes, dim=0: split(x, list(split_sizes), dim),
        "input split_sizes dim*=0",
    ),
    (torch.hsplit, partial(split_at, 1, 1, torch.hsplit), ""),
    (torch.vsplit, partial(split_at, 2, 0, torch.vsplit), ""),
    (torch.dsplit, partial(split_at, 3, 2, torch.dsplit), ""),
):  # fmt: skip
    define(_op, "split", ragged=_impl, tensordict=_impl, dims=_dims)
define(
    torch.unbind, "split", nested=NestedTensor.unbind, masked=MaskedBatch.unbind, tensordict=unbind_tensordict,
    dims="input dim*=0",
)  # fmt: skip
note_syncs("the number of elements of each part", torch.chunk, torch.tensor_split, kinds=("nested",))
note_syncs("the lengths", torch.unbind, kinds=("masked",))
