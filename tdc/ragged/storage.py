"""The tensor that holds the elements of a ragged batch, packed or padded, for code that serves both.

NestedTensor    values (*S0, N, *S1)      no axis for the batch, one for all ragged dims
MaskedBatch     data (B, *S0, L, *S1)     an axis for each logical dim
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from tdc.core.dynamo import skipped_in_graphs
from tdc.core.typing import OpName
from tdc.layout.structure import require_same
from tdc.ragged.masked import MaskedBatch, build_masked, fitted_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.two_level import TwoLevelTensor

Ragged: TypeAlias = "NestedTensor | MaskedBatch"
Results: TypeAlias = "Ragged | Tensor | tuple[Any, ...]"  # what a function of torch gives for a batch
BATCHES = (NestedTensor, MaskedBatch, TwoLevelTensor)  # every ragged batch, of one level and of two
R = TypeVar("R", NestedTensor, MaskedBatch, Ragged)
B = TypeVar("B", bound=Ragged)


def is_ragged(x: Any) -> bool:
    """True for a ragged batch, packed or padded."""
    return isinstance(x, (NestedTensor, MaskedBatch))


def map_results(result: Any, fn: Callable[[Tensor], Any]) -> Any:
    """`fn` of a tensor, or of every tensor of what torch returns, which keeps its type."""
    if isinstance(result, Tensor):
        return fn(result)
    parts = [fn(t) for t in result]
    return tuple(parts) if type(result) is tuple else type(result)(parts)


def differentiable(x: Any) -> bool:
    """True for floating-point and complex tensors and batches."""
    return isinstance(x, (Tensor, *BATCHES)) and (x.dtype.is_floating_point or x.dtype.is_complex)


def data_of(x: Ragged | TwoLevelTensor | Tensor) -> Tensor:
    """The one differentiable tensor of a batch; a tensor is its own."""
    if isinstance(x, TwoLevelTensor):
        return x.values.values
    return x.values if isinstance(x, NestedTensor) else x.data if isinstance(x, MaskedBatch) else x


def with_data(x: R, data: Tensor) -> R:
    """A batch of the same lengths with other values, or another rectangle; for a tensor, the data itself."""
    if isinstance(x, NestedTensor):
        return x.with_values(data)
    if isinstance(x, TwoLevelTensor):
        return x.with_values(x.values.with_values(data))
    out: Any = x.with_data(data) if isinstance(x, MaskedBatch) else data
    return out


def axis_of(op: OpName, x: Ragged, dim: int) -> int:
    """The axis of the data of a logical dim other than the batch, `dim` counted from the front."""
    axis: Any = x.structure.axis(dim, x.ndim, op) if isinstance(x, NestedTensor) else dim
    return axis


@skipped_in_graphs
def feature_axis(x: Any, dim: Any) -> int | None:
    """The axis of packed values, counted from the last, of a dim behind the batch and all ragged dims; None for other
    dims and batches, and in graphs."""
    if type(x) is not NestedTensor or type(dim) is not int:
        return None
    s, ndim = x._structure, x._values.ndim
    axis = dim if dim < 0 else dim - ndim - s.ragged_ndim
    static = ndim + axis
    return axis if s.packed_dim < static < ndim and s.batch_dim < static + s.ragged_ndim else None


def axis_entries(x: Ragged, entries: list[Any]) -> list[Any]:
    """One entry for each logical dim as one for each axis of the data: packed ragged dims have that of the first."""
    if isinstance(x, MaskedBatch):
        return entries
    gone = (x.structure.batch_dim, *x.ragged_dims[1:])
    return [entry for d, entry in enumerate(entries) if d not in gone]


def with_static(x: Ragged, data: Tensor, dim: int, more: int) -> Ragged:
    """A batch of the same lengths with other data, which has so many more static dims at the logical dim `dim`."""
    batch = x._batch_dim + more * (dim < x._batch_dim)
    if isinstance(x, NestedTensor):
        s = x.structure
        return build_nested(s.moved(s.packed_dim + more * (dim < x.ragged_dims[0]), batch), data)
    return build_masked(data, x.lengths, tuple([r + more * (dim < r) for r in x.ragged_dims]), batch)


def without_dims(x: Any, data: Tensor, dims: Sequence[int]) -> Any:
    """A batch of the same lengths with other data, without static dims that have size 1 there."""
    if not dims:
        return with_data(x, data)
    return lacking(x, data.squeeze(tuple([axis_of("squeeze", x, d) for d in dims])), dims)


def lacking(x: Any, data: Tensor, dims: Sequence[int]) -> Any:
    """A batch of the same lengths with other data, which lacks some static dims of `x`."""
    batch, ragged = x._batch_dim, x.ragged_dims
    before, first = [d for d in dims if d < batch], [d for d in dims if d < ragged[0]]
    if isinstance(x, NestedTensor):
        s = x._structure
        return build_nested(s.moved(s.packed_dim - len(first), batch - len(before)), data)
    ragged = tuple([r - len([d for d in dims if d < r]) for r in ragged])
    return build_masked(data, x.lengths, ragged, batch - len(before))


def ragged_sizes(x: Ragged) -> Tensor:
    """The ragged sizes of each example, (B, R)."""
    return x.sizes if isinstance(x, NestedTensor) else x.lengths


def sizes_along(x: Ragged, dim: int) -> Tensor:
    """The size of each example along a ragged dim, (B,)."""
    return ragged_sizes(x)[:, x.ragged_dims.index(dim)]


def changed_sizes(x: Ragged, dims: tuple[int, ...], fn: Callable[[Tensor], Tensor]) -> Tensor:
    """The ragged sizes of each example, (B, R), with `fn` of those along some dims."""
    sizes = zip(x.ragged_dims, ragged_sizes(x).unbind(1), strict=True)
    return torch.stack([fn(n) if d in dims else n for d, n in sizes], 1)


def fitted(op: OpName, x: Any, y: Any, hint: str = "") -> Any:
    """`y` beside `x`: packed as it is, padded in a rectangle of the size of `x`; a StructureError for other sizes of
    examples."""
    if isinstance(x, MaskedBatch):
        return fitted_masked(op, x, y)
    require_same(x.structure, y.structure, op, hint)
    return y
