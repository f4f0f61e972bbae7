"""Reading and writing along batch dims of a TensorDict: gather, scatter, index_add, masked_select, select.

An index, a mask or a source that is a tensor speaks of batch dims and is extended over features; one that is a
TensorDict has an entry for each feature, such as the indices that `argsort` gives.

Invariants: a result of data-dependent size is looked up once, so that all leaves agree; `nonzero`, whose size differs
from leaf to leaf, is refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import normal_dim
from tdc.core.container import Container, dims_of
from tdc.core.errors import ShapeError, UnsupportedError, describe, message
from tdc.core.rules import define, note_syncs, unsupported
from tdc.ops.batch import along, along_dims, along_tensordict, lift
from tdc.ops.indexing import flat_index
from tdc.ops.leafwise import check_broadcast
from tdc.ragged.storage import Ragged
from tdc.tensordict.indexing import Known, picked
from tdc.tensordict.leaf import Leaf
from tdc.tensordict.tensordict import TensorDict, index


def index_select_tensordict(x: TensorDict, dim: int, index: Tensor) -> TensorDict:
    d, rows = normal_dim(dim, dims_of(x), "index_select"), flat_index("index_select", index)
    known: list[Known] = []

    def select(v: Any) -> Any:
        return v.index_select(d, index) if d or isinstance(v, Tensor) else picked(v, rows, known)

    return lift(x, select, op="index_select")


def masked_select_tensordict(x: TensorDict, mask: Tensor) -> TensorDict:
    """The examples where a dense mask over batch dims is True, as one batch dim: `[*batch] -> [n]`."""
    if not isinstance(mask, Tensor):
        hint = "a mask over batch dims, or torch.where(mask, td, other)"
        raise UnsupportedError(message("masked_select", "a mask that is a tensor", describe(mask), hint=hint))
    check_broadcast(mask, x.batch_size, torch.masked_select)
    return index(x, mask.expand(x.batch_size))


def diagonal_tensordict(x: TensorDict, offset: int = 0, dim1: int = 0, dim2: int = 1) -> TensorDict:
    """The diagonal of two batch dims, as the last batch dim."""
    a, b = [normal_dim(d, dims_of(x), "diagonal") for d in (dim1, dim2)]
    return lift(x, lambda v: v.diagonal(offset, a, b).movedim(-1, dims_of(x) - 2), op="diagonal")


def scatter_leaf(x: Any, dim: int, index: Tensor, src: Any = None, value: Any = None, **given: Any) -> Any:
    """A number as third argument is a value, for which torch has another name."""
    return torch.scatter(x, dim, index, value if src is None else src, **given)


def take_along_dim_leaf(x: Any, indices: Tensor, dim: int) -> Ragged | Tensor:
    """`gather` of an index that is broadcast; torch's own makes a graph for each size (2.11-2.13)."""
    sizes = [n if d == dim else m for d, (n, m) in enumerate(zip(indices.shape, x.shape, strict=True))]
    return x.gather(dim, indices.expand(sizes))


def gather_tensordict(x: TensorDict, dim: int, index: Any, **kwargs: Any) -> TensorDict:
    """Of ragged leaves whole examples, in one batch dim; other batch dims of the index have size 1."""
    others = [v for v in x._leaves.values() if isinstance(v, Container)]
    if others and isinstance(index, Tensor) and index.ndim == 1:
        return index_select_tensordict(x, dim, index)
    if any([type(v) is not Leaf for v in others]) and isinstance(index, Tensor) and index.ndim == dims_of(x):
        if len([n for n in index.shape if n != 1]) > 1:
            hint = "td[rows, columns] with two vectors, or td.apply(...) of padded leaves"
            expected = "an index along one dim, of size 1 in the others, where leaves are ragged"
            raise ShapeError(message("gather", expected, describe(index), hint=hint))
        positions = torch.arange(x.numel(), device=index.device).view(x.batch_size)
        found = positions.gather(normal_dim(dim, dims_of(x), "gather"), index)
        flat: Any = TensorDict.flatten(x)
        rows: TensorDict = flat[found.flatten()]
        return TensorDict.reshape(rows, index.shape)
    return gather_leaves(x, dim, index, **kwargs)


gather_leaves = partial(along_tensordict, torch.gather, along_dims(torch.gather, "input dim* index+"))

along(torch.select, "input dim* index", "indexing")
along(torch.narrow, "input dim* start length", "indexing")
along(torch.take_along_dim, "input indices+ dim*=None", "indexing", run=take_along_dim_leaf)
along(torch.scatter, "input dim* index+ src+", "indexing", run=scatter_leaf)
along(torch.scatter_add, "input dim* index+ src+", "indexing")
along(torch.scatter_reduce, "input dim* index+ src+ reduce", "indexing")
along(torch.index_add, "input dim* index source+", "indexing")
along(torch.index_copy, "input dim* index source+", "indexing")
along(torch.index_fill, "input dim* index value", "indexing")
for _op, _impl in (
    (torch.index_select, index_select_tensordict), (torch.gather, gather_tensordict),
    (torch.masked_select, masked_select_tensordict), (torch.diagonal, diagonal_tensordict),
):  # fmt: skip
    define(_op, "indexing", tensordict=_impl)
for _op in (torch.nonzero, torch.argwhere):
    unsupported(
        _op, ["tensordict"], "results of other sizes from leaf to leaf", family="indexing",
        hint="of one leaf: td['key'].nonzero()",
    )  # fmt: skip
note_syncs("the number of rows", torch.masked_select, kinds=("tensordict",))
