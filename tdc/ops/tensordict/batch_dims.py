"""Shape operations and indexing on the batch dims of a TensorDict.

An index, a mask or a source that is a tensor has batch dims and is extended over features; one that is a TensorDict
has an entry for each feature, such as the indices of `argsort`.

Invariants: no copy that torch would not make for the dense tensor; features of leaves are never regrouped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import int_tuple, normal_dim
from tdc.core.container import Container, dims_of
from tdc.core.dynamo import known
from tdc.core.errors import ShapeError, UnsupportedError, describe, message, show_sizes
from tdc.core.rules import define, note_syncs, unsupported
from tdc.core.typing import Dims
from tdc.ops.indexing import flat_index
from tdc.ops.shape.dims import full_order, grouped, ints, normal_dims
from tdc.ops.shape.flatten import filled, regrouped
from tdc.ops.tensordict.batch import along, along_dims, along_tensordict, lift
from tdc.ops.tensordict.leafwise import check_broadcast
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.storage import Ragged, is_ragged
from tdc.tensordict.indexing import Known, picked
from tdc.tensordict.leaf import Leaf
from tdc.tensordict.tensordict import TensorDict, index


def permute_tensordict(x: TensorDict, *dims: Any) -> TensorDict:
    order = full_order(ints("permute", dims), dims_of(x))
    axes = {n: [*order, *range(len(order), n)] for n in {v.ndim for v in x._leaves.values()}}
    return lift(x, lambda v: v.permute(axes[v.ndim]), size=[x.batch_size[d] for d in order], op="permute")


def transpose_tensordict(x: TensorDict, dim0: int, dim1: int) -> TensorDict:
    a, b = normal_dim(dim0, dims_of(x), "transpose"), normal_dim(dim1, dims_of(x), "transpose")
    return lift(x, lambda v: v.transpose(a, b), op="transpose")


def reshape_tensordict(method: str, x: TensorDict, *sizes: Any) -> TensorDict:
    """`reshape` or `view` of the batch dims; one size may be -1."""
    size = resolve(ints(method, sizes), x.batch_size)
    return lift(x, lambda v: with_front(method, v, dims_of(x), size), size=size, op=method)


def with_front(method: str, v: Any, k: int, size: Sequence[int]) -> Any:
    """A leaf whose first k dims have other sizes. A ragged dim of a padded one may be 1 long, too."""
    if len(size) == 1 and k > 1 and is_ragged(v):
        return v.flatten(0, k - 1)
    if not isinstance(v, MaskedBatch) or v.ragged_dims[0] < k:
        return getattr(v, method)((*size, *v.shape[k:]))
    old, b = list(v.shape[:k]), v.batch_dim
    for d in range(b, -1, -1):  # static dims from d on become part of the batch
        found = grouped(list(size), [*old[:d], math.prod(old[d : b + 1]), *old[b + 1 :]], [d])
        if found is not None:
            y, ragged = v.flatten(d, b), tuple([r - k + len(size) for r in v.ragged_dims])
            return build_masked(y.data.reshape((*size, *v.shape[k:])), y.lengths, ragged, found[0][d])
    raise regrouped(method, v, f"batch dims {show_sizes(size)}")


def resolve(sizes: tuple[int, ...], old: torch.Size) -> torch.Size:
    """Sizes with -1 replaced by what is left over; a ShapeError for another number of elements."""
    total = math.prod(old)
    found = filled(sizes, total)
    if found is None:
        expected = f"sizes with {total} examples, batch_size {show_sizes(old)}"
        hint = "reshape acts on batch dims only; features stay"
        raise ShapeError(message("reshape", expected, show_sizes(sizes), hint=hint))
    return torch.Size(found)


def flatten_tensordict(x: TensorDict, start_dim: int = 0, end_dim: int = -1) -> TensorDict:
    if not dims_of(x):
        return unsqueeze_tensordict(x, 0)
    a, b = normal_dim(start_dim, dims_of(x), "flatten"), normal_dim(end_dim, dims_of(x), "flatten")
    return lift(x, lambda v: v.flatten(a, b), op="flatten")


def unflatten_tensordict(x: TensorDict, dim: int, sizes: Any) -> TensorDict:
    d = normal_dim(dim, dims_of(x), "unflatten")
    split = resolve(int_tuple("unflatten", sizes), x.batch_size[d : d + 1])
    return lift(x, lambda v: v.unflatten(d, split), op="unflatten")


def unsqueeze_tensordict(x: TensorDict, dim: int) -> TensorDict:
    d = normal_dim(dim, dims_of(x) + 1, "unsqueeze")
    return lift(x, lambda v: v.unsqueeze(d), op="unsqueeze")


def squeeze_tensordict(x: TensorDict, dim: Dims | None = None) -> TensorDict:
    size = x.batch_size
    if isinstance(dim, int) and -len(size) <= dim < len(size) and not known(size[dim] == 1):
        return x
    given = range(dims_of(x)) if dim is None else normal_dims("squeeze", dim, dims_of(x))
    dims = tuple([d for d in given if known(size[d] == 1)])
    if not dims:
        return x
    first = tuple([0 if d in dims else slice(None) for d in range(dims_of(x))])  # the one row of a ragged leaf

    def squeezed(v: Any) -> Any:
        return v[first] if is_ragged(v) and v._batch_dim in dims else v.squeeze(dims)

    return lift(x, squeezed, size=[n for d, n in enumerate(x.batch_size) if d not in dims], op="squeeze")


def expand_tensordict(x: TensorDict, *sizes: Any) -> TensorDict:
    k, size = len(x.batch_size), list(ints("expand", sizes))
    more = len(size) - k
    old = [1] * more + list(x.batch_size)
    if more < 0 or -1 in size[:more] or any([misfit(n, m) for n, m in zip(size, old, strict=True)]):
        expected = f"sizes that extend batch_size {show_sizes(x.batch_size)}"
        raise ShapeError(message("expand", expected, str(size), hint="only size 1 grows"))
    size = [m if n == -1 else n for n, m in zip(size, old, strict=True)]
    return lift(x, lambda v: v.expand((*size, *v.shape[k:])), size=size, op="expand")


def misfit(n: int, old: int) -> bool:
    """True if a dim is known not to expand to `n`; -1 keeps it."""
    return n != -1 and known(n != old) and known(old != 1)


def flip_tensordict(x: TensorDict, *dims: Any) -> TensorDict:
    axes = normal_dims("flip", ints("flip", dims), dims_of(x))
    return lift(x, lambda v: v.flip(axes), size=x.batch_size, op="flip")


def roll_tensordict(x: TensorDict, shifts: Any, dims: Any = None) -> TensorDict:
    """Without dims the batch is rolled as if it were one dim."""
    if dims is None or dims == ():
        normal_dim(0, dims_of(x), "roll")
        rolled = roll_tensordict(flatten_tensordict(x), shifts, 0)
        return reshape_tensordict("reshape", rolled, x.batch_size)
    axes = normal_dims("roll", dims, dims_of(x))
    return lift(x, lambda v: v.roll(shifts, axes), size=x.batch_size, op="roll")


def repeat_tensordict(x: TensorDict, *sizes: Any) -> TensorDict:
    """Copies along batch dims, of which there may be more in front."""
    times = ints("repeat", sizes)
    if len(times) < dims_of(x):
        hint = "torch.tile adds what is missing"
        raise ShapeError(message("repeat", f"at least {dims_of(x)} numbers", f"{len(times)}", hint=hint))
    return lift(x, lambda v: v.repeat((*times, *[1] * (v.ndim - dims_of(x)))), op="repeat")


def repeat_interleave_tensordict(x: TensorDict, repeats: Any, dim: int | None = None, **kwargs: Any) -> TensorDict:
    """Each example several times. Numbers of times in a tensor become positions, found once for all leaves."""
    td = x if dim is not None or dims_of(x) == 1 else reshape_tensordict("reshape", x, -1)
    d = 0 if dim is None else normal_dim(dim, dims_of(x), "repeat_interleave")
    if isinstance(repeats, int) and known(repeats < 0):
        raise ShapeError(message("repeat_interleave", "0 times or more", f"{repeats}", hint="td[:0] has no examples"))
    if not isinstance(repeats, Tensor):
        return lift(td, lambda v: v.repeat_interleave(repeats, d, **kwargs), op="repeat_interleave")
    count = repeats.numel()
    if repeats.ndim > 1 or (count != 1 and count != td.batch_size[d]):
        expected, hint = f"{td.batch_size[d]} numbers of times, or one", "one for each example along the dim"
        raise ShapeError(message("repeat_interleave", expected, describe(repeats), hint=hint))
    positions = torch.repeat_interleave(repeats.expand(td.batch_size[d]), **kwargs)
    return lift(td, lambda v: v.index_select(d, positions), op="repeat_interleave")


def unfold_tensordict(x: TensorDict, dimension: int, size: int, step: int) -> TensorDict:
    """Windows along a batch dim; the position in the window is the last batch dim."""
    d = normal_dim(dimension, dims_of(x), "unfold")
    return lift(x, lambda v: v.unfold(d, size, step).movedim(-1, dims_of(x)), op="unfold")


def pad_tensordict(input: TensorDict, pad: Any, mode: str = "constant", value: float | None = None) -> TensorDict:
    """Batch dims grown or cut, two numbers for each, the last batch dim first; torch has other modes for images."""
    if mode != "constant":
        raise UnsupportedError(message("pad", "mode 'constant'", f"{mode!r}", hint="td.apply(lambda x: F.pad(x, ...))"))
    if len(pad) > 2 * dims_of(input):
        expected, hint = f"at most {2 * dims_of(input)} numbers", "two for each batch dim; features stay"
        raise ShapeError(message("pad", expected, f"{len(pad)}", hint=hint))
    return lift(input, lambda v: F.pad(v, (*[0] * (2 * (v.ndim - dims_of(input))), *pad), mode, value), op="pad")


# -- reading and writing


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
    if any([not isinstance(v, Leaf) for v in others]) and isinstance(index, Tensor) and index.ndim == dims_of(x):
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

for _op, _impl in (
    (torch.permute, permute_tensordict), (torch.transpose, transpose_tensordict),
    (torch.reshape, partial(reshape_tensordict, "reshape")), (torch.Tensor.view, partial(reshape_tensordict, "view")),
    (torch.flatten, flatten_tensordict), (torch.unflatten, unflatten_tensordict),
    (torch.unsqueeze, unsqueeze_tensordict), (torch.squeeze, squeeze_tensordict),
    (torch.Tensor.expand, expand_tensordict), (torch.flip, flip_tensordict),
    (torch.ravel, lambda input: reshape_tensordict("reshape", input, -1)),
    (torch.roll, roll_tensordict), (torch.Tensor.repeat, repeat_tensordict),
    (torch.repeat_interleave, repeat_interleave_tensordict), (F.pad, pad_tensordict),
    (torch.Tensor.unfold, unfold_tensordict),
):  # fmt: skip
    define(_op, "shape", tensordict=_impl)
note_syncs("the number of rows, of repeats that are data", torch.repeat_interleave, kinds=("tensordict",))
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
