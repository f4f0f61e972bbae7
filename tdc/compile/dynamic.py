"""Dynamic shapes: sizes of our types that vary from call to call.

For `torch.compile` the containers mark their packed axis, offsets and longest length themselves; `dynamic` marks more,
and gives bounds. For `torch.export`, `dynamic_shapes` is a tree of `Dim`s.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor
from torch.export import Dim

from tdc.compile._torch.dynamo import mark_bounds
from tdc.core import pytree
from tdc.core.container import Container
from tdc.core.dynamo import mark_dynamic
from tdc.core.errors import DtypeError, KeyPathError, ShapeError, describe, message
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.paths import ordered
from tdc.tensordict.storage import is_tensordict
from tdc.tensordict.tensordict import TensorDict

T = TypeVar("T")
Axis = tuple[Tensor, int, int | None]


def dynamic(x: T, dims: Any = "batch", *, min: int | None = None, max: int | None = None) -> T:
    """Mark sizes as varying, so that one graph serves all of them from the first call on. Returns `x`.

    Args:
        x: a tensor, a container, or a tree of them.
        dims: "batch" for all batch dims, "length" for ragged and padded dims, an int for a dim of `x` (of a TensorDict
            its batch dims), or several of these. A mapping gives dims for each key.
        min, max: bounds of the sizes, those of "length" for the longest row; with them a function that specialises a
            size is an error. Sizes 0 and 1 are compiled apart in any case.

    Raises:
        ShapeError: a dim that `x` lacks; bounds that hold fewer than two sizes, or not this one.
        DtypeError: dims of another type.
        KeyPathError: another name, or a missing key.

    Compile:
        Call it before the compiled function, on each batch. Marks of the containers themselves stay.

    Example:
        >>> import torch
        >>> dynamic(TensorDict({"x": torch.zeros(3, 2)}, [3])).batch_size
        torch.Size([3])
        >>> _ = dynamic({"image": torch.zeros(3, 32, 32)}, {"image": (1, 2)}, min=16, max=64)
    """
    if min is not None and max is not None and not 0 <= min < max:
        got = f"min={min}, max={max}"
        raise ShapeError(message("compile.dynamic", "0 <= min < max", got, hint="leave the size unmarked"))
    if isinstance(dims, Mapping):
        for key, own in dims.items():
            dynamic(entry(x, key), own, min=min, max=max)
        return x
    leaves = pytree.tree_leaves(x, is_leaf=lambda v: isinstance(v, Container))
    for dim in dims if isinstance(dims, (tuple, list)) else (dims,):
        found = [one for leaf in leaves for one in axes_of(leaf, dim)]
        if not found and dim != "batch":
            got = f"dim {dim!r} of {describe(x)}"
            raise ShapeError(message("compile.dynamic", "a dim of x", got, hint="'batch', 'length', or an int"))
        for tensor, axis, shift in found:
            mark(tensor, axis, shift, min, max)
    return x


def entry(x: Any, key: Any) -> Any:
    """Look up a key of a container or mapping."""
    try:
        return x[key]
    except (KeyError, TypeError, IndexError):
        got = f"{key!r} for {describe(x)}"
        raise KeyPathError(message("compile.dynamic", "an existing key", got, hint="dims={'key': 'length'}")) from None


def mark(x: Tensor, axis: int, shift: int | None, low: int | None, high: int | None) -> None:
    """Mark a size: weakly, or strongly with bounds of the size less `shift`; weakly if that is None."""
    if shift is None or (low is None and high is None):
        mark_dynamic(x, axis)
        return
    size = x.shape[axis] - shift
    if not (low or 0) <= size <= (size if high is None else high):
        expected = f"a size in [{low or 0}, {'...' if high is None else high}]"
        got = f"{size} at dim {axis} of {describe(x)}"
        raise ShapeError(message("compile.dynamic", expected, got, hint="give the bounds of all batches to come"))
    if size > 1:  # torch compiles 0 and 1 apart, and a strong mark would not let it
        top = sys.maxsize if high is None else high + shift  # torch 2.11-2.13 wants both bounds or none
        mark_bounds(x, axis, max(2, low or 0) + shift, top)


def axes_of(x: Any, dim: Any) -> list[Axis]:
    """Locate a dim of a leaf: tensors, their axes, and how much longer each is than what the user counts."""
    if not isinstance(dim, (str, int)):
        hint = "dims='batch', 'length', 1, or (1, 2)"
        raise DtypeError(message("compile.dynamic", "dims as names or ints", describe(dim), hint=hint))
    if isinstance(dim, str) and dim not in ("batch", "length"):
        hint = "an int for another dim"
        raise KeyPathError(message("compile.dynamic", "'batch' or 'length'", repr(dim), hint=hint))
    if is_tensordict(x):
        if isinstance(dim, int):
            inner = range(len(x._size))[dim : dim + 1 or None] if -len(x._size) <= dim < len(x._size) else ()
        else:
            inner = range(len(x._size)) if dim == "batch" else ("length",)
        return [one for leaf in x._leaves.values() for d in inner for one in axes_of(leaf, d)]
    if isinstance(x, NestedTensor):
        return axes_of_nested(x, dim)
    if isinstance(x, MaskedBatch):
        if dim == "length":
            return [(x.data, d, 0) for d in x.ragged_dims]
        if dim in ("batch", x.batch_dim, x.batch_dim - x.ndim):
            return [(x.data, x.batch_dim, 0), (x.lengths, 0, 0)]
        return axes_of_tensor(x.data, dim)
    return axes_of_tensor(x, 0 if dim == "batch" else dim) if isinstance(x, Tensor) and dim != "length" else []


def axes_of_tensor(x: Tensor, dim: Any) -> list[Axis]:
    """A dim of a plain tensor, if it has it."""
    return [(x, dim % x.ndim, 0)] if -x.ndim <= dim < x.ndim else []


def axes_of_nested(x: NestedTensor, dim: Any) -> list[Axis]:
    """A dim of a packed batch: offsets are one longer than the batch, bounds of rows are none of the packed axis."""
    s = x.structure
    if not isinstance(dim, str):
        if not -x.ndim <= dim < x.ndim:
            return []
        axis = s.axis(dim, x.ndim, "compile.dynamic")
        if axis is not None and axis != s.packed_dim:
            return [(x.values, axis, 0)]
        dim = "batch" if axis is None else "length"
    if dim == "batch":
        return [(s.offsets, 0, 1), *([] if s.shapes is None else [(s.shapes, 0, 0)])]
    extent = [] if s.extent is None else [(s.extent, r, 0) for r in range(s.ragged_ndim)]
    return [(x.values, s.packed_dim, None), *extent]


def dynamic_shapes(tree: Any, *, batch_dim: int = 0) -> Any:
    """Dims of a tree of containers and tensors that vary, as `torch.export.export` takes them.

    Ragged and padded axes, batch sizes of containers, and `batch_dim` of plain tensors vary; export finds equal ones.

    Args:
        tree: example inputs, such as the tuple of arguments.

    Returns:
        The same tree with `{dim: Dim.AUTO}` for every tensor.

    Example:
        >>> import torch
        >>> dynamic_shapes((torch.zeros(3, 2),)) == ({0: Dim.AUTO},)
        True
    """

    def one(x: Any) -> Any:
        if isinstance(x, TensorDict):
            leaves, batch = [x._leaves[p] for p in ordered(x._leaves)], dict.fromkeys(range(x.ndim), Dim.AUTO)
            return [{**batch} if isinstance(leaf, Tensor) else one(unwrap(leaf)) for leaf in leaves]
        if isinstance(x, Container):
            found = [*axes_of(x, "batch"), *axes_of(x, "length")]
            return [{axis: Dim.AUTO for t, axis, _ in found if t is part} for part in pytree.tree_leaves(x)]
        return {batch_dim: Dim.AUTO} if isinstance(x, Tensor) and x.ndim > batch_dim else None

    return pytree.tree_map(one, tree, is_leaf=lambda x: isinstance(x, Container))
