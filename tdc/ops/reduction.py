"""Reductions over batch, ragged and static dims.

    NestedTensor (B, -1, D)    dim=None -> scalar    dim=2 -> (B, -1)    dim=1 -> (B, D)    dim=(0, 1) -> (D,)
    MaskedBatch  (B, L, D)     the same; padding counts for nothing; dim=0 -> (L, D)
    TensorDict   [B, T]        over batch dims, leaf by leaf; dim=None -> []

Every reduction carries its identity element, the value that changes nothing: padding is filled with it, and an empty
example gives it. Reducing the batch dim of a NestedTensor is a true reduction over the batch, so it needs the ragged
dims reduced as well: examples of different lengths have no common positions.

Some of several ragged dims are reduced line by line, see `partial_ragged`.

Invariants: without a ragged dim a result is a dense tensor, with one the same container, whatever the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.core.arguments import normal_dim
from tdc.core.dtypes import rounded_once
from tdc.core.errors import ShapeError, describe, message
from tdc.core.rules import define
from tdc.core.typing import Op
from tdc.ops.batch import along
from tdc.ops.partial_ragged import by_lines, over_lines
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.segments import lengths_of, reduce_rows
from tdc.ragged.storage import Ragged
from tdc.ragged.structure import Structure

Rows = Callable[[Tensor, Structure], Tensor]


def reduction(op: Op, rows: Rows, *, identity: float, masked: Op | None = None, source: str = "") -> None:
    """Rows for a reduction, for all three containers.

    Args:
        rows: reduces the packed axis example by example, `(N, *D), structure -> (B, *D)`.
        identity: fills padding; infinities become the extreme of an integer dtype.
        masked: `(x, dims, keepdim) -> Tensor` where filling padding with the identity is not enough.
    """
    by_fill = partial(masked_by_fill, op, identity)
    nested, padded = partial(reduce_nested, op, rows), partial(reduce_masked, op, masked or by_fill)
    define(op, "reduction", nested=nested, masked=padded, identity=identity, source=source)
    along(op, "dim keepdim", "reduction", several=op is not torch.prod, identity=identity)


class Plan(NamedTuple):
    """What the dims of a reduction are for a NestedTensor.

    Attributes:
        dims: logical dims, counted from the front.
        static: the axes of `values` among them that are not the packed one.
        ragged: whether all ragged dims are among them.
        batch: whether the batch is.
        some: whether some of several ragged dims are, so that lines give results.
    """

    dims: tuple[int, ...]
    static: tuple[int, ...]
    ragged: bool
    batch: bool
    some: bool

    @property
    def by_rows(self) -> bool:
        """Whether each example gives a result of its own, so that the result is dense."""
        return self.ragged and not self.batch


def reduced_dims(op: Op, dim: Any, ndim: int) -> tuple[int, ...]:
    """The dims that a reduction is over, counted from the front; all of them for None and for ().

    Raises:
        ShapeError: a dim out of range, or named twice.
    """
    given = (dim,) if isinstance(dim, int) else tuple(range(ndim)) if dim is None or len(dim) == 0 else tuple(dim)
    dims = tuple([normal_dim(d, ndim, op) for d in given])
    if len(set(dims)) < len(dims):
        raise ShapeError(message(op, "each dim once", f"dim {dim}", hint=f"the batch has {ndim} dims"))
    return dims


def check_dims(op: Op, x: Any, dim: Any) -> None:
    """What an operation that is made of other reductions refuses itself, so that errors name it."""
    plan(op, x, dim) if isinstance(x, NestedTensor) else reduced_dims(op, dim, x.ndim)


def plan(op: Op, x: NestedTensor, dim: Any) -> Plan:
    """The dims of a reduction of a NestedTensor.

    Raises:
        ShapeError: a dim out of range, or the batch without the ragged dims.
    """
    s = x.structure
    dims = reduced_dims(op, dim, x.ndim)
    ragged, batch = all([d in dims for d in s.ragged_dims]), s.batch_dim in dims
    if batch and not ragged:
        got = f"dim {dim} of {describe(x)}"
        hint = f"rows differ in length: reduce dim {(s.batch_dim, *s.ragged_dims)}, or x.to_padded() first"
        raise ShapeError(message(op, "the ragged dim reduced together with the batch", got, hint=hint))
    axes = [s.axis(d, x.ndim, op) for d in dims if d not in s.ragged_dims]
    return Plan(dims, tuple([a for a in axes if a is not None]), ragged, batch, by_lines(op, x, dims))


def reduce_nested(
    op: Op, rows: Rows, x: NestedTensor, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Ragged | Tensor:
    """Static dims first (they are the short ones), then the packed axis, example by example or whole."""
    if dim is None and not keepdim:
        return op(x.values, **kwargs)
    p = plan(op, x, dim)
    if p.some:
        return over_lines(op, partial(reduce_nested, op, rows, **kwargs), x, p.dims, keepdim)
    if op in (torch.sum, torch.mean) and not p.by_rows:
        return reduce_values(op, x, p, keepdim, **kwargs)
    run = partial(reduce_steps, op, rows, p, keepdim)
    return rounded_once(run, x, **kwargs) if op in SUMS else run(x)


def reduce_steps(op: Op, rows: Rows, p: Plan, keepdim: bool, x: NestedTensor) -> Ragged | Tensor:
    """One dim after another."""
    s, values = x.structure, x.values
    for axis in p.static:
        values = op(values, axis, True)
    if not p.ragged:
        return build_nested(s, values) if keepdim else drop_static(values, s, p.static)
    if p.batch:
        return settle(op(values, s.packed_dim, True).movedim(s.packed_dim, 0), s, p.dims, keepdim)
    return settle(rows(values.movedim(s.packed_dim, 0), s), s, p.dims, keepdim)


def reduce_values(op: Op, x: NestedTensor, p: Plan, keepdim: bool, **kwargs: Any) -> Ragged | Tensor:
    """A reduction of the packed values that needs no lengths: over static dims, or over everything of the batch."""
    s = x.structure
    if not p.ragged:
        out = op(x.values, p.static, keepdim=True, **kwargs)
        return build_nested(s, out) if keepdim else drop_static(out, s, p.static)
    out = op(x.values, (s.packed_dim, *p.static), keepdim=True, **kwargs)
    return settle(out.movedim(s.packed_dim, 0), s, p.dims, keepdim)


def drop_static(values: Tensor, s: Structure, static: Sequence[int]) -> NestedTensor:
    """Squeeze reduced static axes out of packed values."""
    before = sum([a < s.packed_dim for a in static])
    logical = [a if a < s.packed_dim else a + s.ragged_ndim - 1 for a in static]
    lower = sum([k + (k >= s.batch_dim) < s.batch_dim for k in logical])
    return build_nested(s.moved(s.packed_dim - before, s.batch_dim - lower), values.squeeze(tuple(static)))


def settle(out: Tensor, s: Structure, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """One result for each example, `(B, *others)` with size 1 at reduced dims, as a dense tensor of logical dims."""
    for _ in range(s.ragged_ndim):
        out = out.unsqueeze(s.packed_dim + 1)
    out = out.movedim(0, s.batch_dim)
    return out if keepdim else out.squeeze(dims)


def reduce_masked(
    op: Op, rule: Op, x: MaskedBatch, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Ragged | Tensor:
    """A result that has all its ragged dims stays a MaskedBatch; one without them, or the batch, is dense."""
    dims = reduced_dims(op, dim, x.ndim)
    if by_lines(op, x, dims):
        return over_lines(op, partial(reduce_masked, op, rule, **kwargs), x, dims, keepdim)
    run = partial(rule, dims=dims, keepdim=keepdim)
    out = rounded_once(run, x, **kwargs) if op in SUMS else run(x, **kwargs)
    if x.batch_dim in dims or x.ragged_dims[0] in dims:
        return out
    if keepdim:
        return x.with_data(out)
    kept = [d for d in range(x.ndim) if d not in dims]
    return build_masked(out, x.lengths, tuple([kept.index(d) for d in x.ragged_dims]), kept.index(x.batch_dim))


def composed(op: Op, family: str, impl: Op, names: str = "dim keepdim", identity: float | None = None) -> None:
    """Rows for a reduction that is made of others: the same function for both ragged containers.

    Args:
        names: the arguments of `op`, as a TensorDict takes them.
    """
    define(op, family, ragged=impl, identity=identity)
    along(op, names, family, several=True)


def reduce_composed(
    op: Op, rule: Op, x: Any, dim: Any = None, keepdim: bool = False, *, dense: Op | None = None, **kwargs: Any
) -> Ragged | Tensor:
    """A reduction by `rule(x, dims, keepdim, **kwargs)` where lengths or padding matter, by torch itself where not.

    Args:
        dense: what runs on tensors, `(values, axes, keepdim=..., **kwargs)`, where it is not `op`.
    """
    run = dense or op
    if isinstance(x, NestedTensor):
        p = plan(op, x, dim)
        if p.some:
            return over_lines(op, partial(reduce_composed, op, rule, dense=dense, **kwargs), x, p.dims, keepdim)
        return rule(x, p.dims, keepdim, **kwargs) if p.by_rows else reduce_values(run, x, p, keepdim, **kwargs)
    dims = reduced_dims(op, dim, x.ndim)
    if by_lines(op, x, dims):
        return over_lines(op, partial(reduce_composed, op, rule, dense=dense, **kwargs), x, dims, keepdim)
    if x.batch_dim in dims or x.ragged_dims[0] in dims:
        return rule(x, dims, keepdim, **kwargs)
    return reduce_masked(op, partial(reduce_data, run), x, dims, keepdim, **kwargs)


def reduce_data(op: Op, x: MaskedBatch, dims: tuple[int, ...], keepdim: bool, **kwargs: Any) -> Tensor:
    """Static dims of a rectangle, whose padding stays padding."""
    return op(x.data, dims, keepdim=keepdim, **kwargs)


def filled(x: Any, value: float) -> Any:
    """A batch whose padding, if it has any, holds `value`, so that positions may meet."""
    return x if isinstance(x, NestedTensor) else x.with_data(x.filled(finite(value, x.dtype)))


def count(x: Any, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """How many real elements a reduction over dims with a ragged one among them is of."""
    if not isinstance(x, NestedTensor):
        return x.mask.expand(x.data.shape).sum(dims, keepdim)
    s = x.structure
    each = math.prod([x.shape[d] for d in dims if d not in s.ragged_dims])
    return settle((lengths_of(s) * each).view(-1, *[1] * (x.values.ndim - 1)), s, dims, keepdim)


def masked_by_fill(
    op: Op, identity: float, x: MaskedBatch, dims: tuple[int, ...], keepdim: bool, **kwargs: Any
) -> Tensor:
    """Fill padding with the identity and reduce the rectangle, one dim after another where torch takes only one."""
    out = x.filled(finite(identity, x.dtype))
    for d in sorted(dims, reverse=True):
        out = op(out, d, keepdim, **kwargs)
    return out


def masked_mean(x: MaskedBatch, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """Sum of real elements by their number."""
    return x.filled(0).sum(dims, keepdim) / x.mask.expand(x.data.shape).sum(dims, keepdim)


def finite(identity: float, dtype: torch.dtype) -> float:
    """The identity in a dtype: the extreme integer where there is no infinity."""
    if dtype == torch.bool or not math.isinf(identity) or dtype.is_floating_point:
        return bool(identity) if dtype == torch.bool else identity
    return torch.iinfo(dtype).max if identity > 0 else torch.iinfo(dtype).min


def sum_rows(values: Tensor, s: Structure) -> Tensor:
    wide = values if values.is_floating_point() or values.is_complex() else values.to(torch.int64)
    return reduce_rows(wide, s, "sum", 0)


def mean_rows(values: Tensor, s: Structure) -> Tensor:
    counts = lengths_of(s).view(-1, *[1] * (values.ndim - 1))
    return reduce_rows(values, s, "sum", 0) / counts.to(values.dtype)


def prod_rows(values: Tensor, s: Structure) -> Tensor:
    wide = values if values.is_floating_point() else values.to(torch.int64)
    return reduce_rows(wide, s, "prod", 1)


def extreme_rows(reduce: str, sign: float, values: Tensor, s: Structure) -> Tensor:
    return reduce_rows(values, s, reduce, finite(sign * math.inf, values.dtype))


def any_rows(values: Tensor, s: Structure) -> Tensor:
    return reduce_rows((values != 0).to(torch.uint8), s, "amax", 0).bool()


def all_rows(values: Tensor, s: Structure) -> Tensor:
    return reduce_rows((values != 0).to(torch.uint8), s, "amin", 1).bool()


SUMS = (torch.sum, torch.mean, torch.prod)  # what half precision is too short for

reduction(torch.sum, sum_rows, identity=0)
reduction(torch.mean, mean_rows, identity=0, masked=masked_mean)
reduction(torch.prod, prod_rows, identity=1)
reduction(torch.amax, partial(extreme_rows, "amax", -1), identity=-math.inf)
reduction(torch.amin, partial(extreme_rows, "amin", 1), identity=math.inf)
reduction(torch.any, any_rows, identity=0)
reduction(torch.all, all_rows, identity=1)
