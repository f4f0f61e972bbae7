"""Shape operations: they move and regroup dims and never touch values.

On a NestedTensor dims are those of its logical shape: the batch and the ragged dims may move among the others, only
`structure` says where they are. On a TensorDict they act on batch dims: `x -> x.reshape(*new_batch, *features)`.

Invariants: no copy that torch would not make for the dense tensor; features of a TensorDict's leaves are never
regrouped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tdc._errors import ShapeError, message, show_sizes
from tdc._rules import Rule, add_rule
from tdc._structure import normal_dim
from tdc._typing import Op
from tdc.masked import MaskedBatch
from tdc.masked import like as masked_like
from tdc.nested import NestedTensor
from tdc.nested import like as nested_like
from tdc.tensordict import TensorDict, make


def shape_rule(op: Op, **impls: Op) -> None:
    """Rows for a shape operation, one implementation for each kind given."""
    for kind, impl in impls.items():
        add_rule(Rule(op, kind, "shape", impl, op))


def ints(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    """Dims or sizes given one by one or as one sequence."""
    return tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes


# -- NestedTensor and MaskedBatch


def permute_nested(x: NestedTensor, *dims: Any) -> NestedTensor:
    """Logical dims in another order; several ragged dims must stay side by side and in order."""
    s, order = x.structure, full_order(ints(dims), x.ndim)
    at = order.index(s.batch_dim)
    axes: list[int] = []
    for d in order:
        axis = s.axis(d, x.ndim, "permute")
        if axis is not None and (axis != s.packed_dim or axis not in axes):
            axes.append(axis)
    kept = [d for d in order if d in s.ragged_dims]
    places = [order.index(d) for d in s.ragged_dims]
    others = [d for d in order if d != s.batch_dim]
    together = [others.index(d) for d in kept]
    if tuple(kept) != s.ragged_dims or together != list(range(together[0], together[0] + len(together))):
        got = f"ragged dims {s.ragged_dims} at {places}"
        raise ShapeError(message("permute", "several ragged dims side by side", got, hint="x.to_padded() first"))
    return nested_like(s.moved(axes.index(s.packed_dim), at), x.values.permute(axes))


def permute_masked(x: MaskedBatch, *dims: Any) -> MaskedBatch:
    order = full_order(ints(dims), x.ndim)
    ragged = tuple([order.index(d) for d in x.ragged_dims])
    if ragged != tuple(range(ragged[0], ragged[0] + len(ragged))):
        got = f"dims {x.ragged_dims} at {ragged}"
        raise ShapeError(message("permute", "several ragged dims side by side", got, hint="use x.data"))
    return masked_like(x.data.permute(order), x.lengths, ragged, order.index(x.batch_dim))


def full_order(dims: tuple[int, ...], ndim: int) -> list[int]:
    """A permutation of all dims, counted from the front.

    Raises:
        ShapeError: some dim is missing, doubled or out of range.
    """
    order = [normal_dim(d, ndim, "permute") for d in dims]
    if sorted(order) != list(range(ndim)):
        raise ShapeError(
            message("permute", f"each of {ndim} dims once", str(tuple(dims)), hint=f"e.g. {tuple(range(ndim))}")
        )
    return order


def transpose(permute: Op, x: Any, dim0: int, dim1: int) -> Any:
    """Two dims swapped, by the `permute` of the same kind."""
    a, b = normal_dim(dim0, x.ndim, "transpose"), normal_dim(dim1, x.ndim, "transpose")
    order = list(range(x.ndim))
    order[a], order[b] = b, a
    return permute(x, order)


# -- TensorDict: batch dims only


def lift(x: TensorDict, fn: Callable[[Any], Any], size: Any) -> TensorDict:
    """`fn` on every leaf, and the batch size that it brings about."""
    return make({p: fn(v) for p, v in x._leaves.items()}, x._nodes, torch.Size(size), x.device)


def permute_tensordict(x: TensorDict, *dims: Any) -> TensorDict:
    order = full_order(ints(dims), x.ndim)
    axes = {n: [*order, *range(len(order), n)] for n in {v.ndim for v in x._leaves.values()}}
    return lift(x, lambda v: v.permute(*axes[v.ndim]), [x.batch_size[d] for d in order])


def reshape_tensordict(method: str, x: TensorDict, *sizes: Any) -> TensorDict:
    """`reshape` or `view` of the batch dims; one size may be -1."""
    k, size = x.ndim, resolve(ints(sizes), x.batch_size)
    return lift(x, lambda v: getattr(v, method)(*size, *v.shape[k:]), size)


def resolve(sizes: tuple[int, ...], old: torch.Size) -> torch.Size:
    """Sizes with -1 replaced by what is left over.

    Raises:
        ShapeError: the numbers of elements differ.
    """
    known, total = 1, math.prod(old)
    for n in sizes:
        known = known * (1 if n == -1 else n)
    free = sizes.count(-1)
    if free > 1 or (free == 1 and (known == 0 or total % known)) or (free == 0 and known != total):
        hint = "reshape acts on batch dims only; features stay"
        expected = f"sizes with {total} examples, batch_size {show_sizes(old)}"
        raise ShapeError(message("reshape", expected, show_sizes(sizes), hint=hint))
    return torch.Size([total // known if n == -1 else n for n in sizes])


def flatten_tensordict(x: TensorDict, start_dim: int = 0, end_dim: int = -1) -> TensorDict:
    a, b = normal_dim(start_dim, x.ndim, "flatten"), normal_dim(end_dim, x.ndim, "flatten")
    size = x.batch_size
    merged = torch.Size([*size[:a], math.prod(size[a : b + 1]), *size[b + 1 :]])
    return lift(x, lambda v: v.flatten(a, b), merged)


def unflatten_tensordict(x: TensorDict, dim: int, sizes: Any) -> TensorDict:
    d = normal_dim(dim, x.ndim, "unflatten")
    split = resolve(tuple(sizes), x.batch_size[d : d + 1])
    return lift(x, lambda v: v.unflatten(d, split), [*x.batch_size[:d], *split, *x.batch_size[d + 1 :]])


def unsqueeze_tensordict(x: TensorDict, dim: int) -> TensorDict:
    d = normal_dim(dim, x.ndim + 1, "unsqueeze")
    return lift(x, lambda v: v.unsqueeze(d), [*x.batch_size[:d], 1, *x.batch_size[d:]])


def squeeze_tensordict(x: TensorDict, dim: int | None = None) -> TensorDict:
    given = range(x.ndim) if dim is None else (normal_dim(dim, x.ndim, "squeeze"),)
    dims = tuple([d for d in given if x.batch_size[d] == 1])
    return lift(x, lambda v: v.squeeze(dims), [n for d, n in enumerate(x.batch_size) if d not in dims])


def expand_tensordict(x: TensorDict, *sizes: Any) -> TensorDict:
    k, size = x.ndim, list(ints(sizes))
    old = [1] * (len(size) - k) + list(x.batch_size)
    if len(size) < k or any([n not in (-1, m) and m != 1 for n, m in zip(size, old, strict=True)]):
        got = str(size)
        raise ShapeError(
            message("expand", f"sizes that extend batch_size {show_sizes(x.batch_size)}", got, hint="only size 1 grows")
        )
    size = [m if n == -1 else n for n, m in zip(size, old, strict=True)]
    return lift(x, lambda v: v.expand(*size, *v.shape[k:]), size)


shape_rule(torch.permute, nested=permute_nested, masked=permute_masked, tensordict=permute_tensordict)
shape_rule(
    torch.transpose,
    nested=partial(transpose, permute_nested),
    masked=partial(transpose, permute_masked),
    tensordict=partial(transpose, permute_tensordict),
)
shape_rule(torch.reshape, tensordict=partial(reshape_tensordict, "reshape"))
shape_rule(torch.Tensor.view, tensordict=partial(reshape_tensordict, "view"))
shape_rule(torch.flatten, tensordict=flatten_tensordict)
shape_rule(torch.unflatten, tensordict=unflatten_tensordict)
shape_rule(torch.unsqueeze, tensordict=unsqueeze_tensordict)
shape_rule(torch.squeeze, tensordict=squeeze_tensordict)
shape_rule(torch.Tensor.expand, tensordict=expand_tensordict)
