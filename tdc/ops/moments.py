"""Reductions that are made of others: counts, sums without NaN, variances, logsumexp.

    count_nonzero(x, d) = sum(x != 0, d)        nanmean(x, d) = sum(x, NaN as 0, d) / sum(not NaN, d)
    var(x, d) = sum(|x - mean(x, d)|^2, d) / (n - correction)       n real elements, of each example

They are written once, on the containers themselves, for NestedTensor and MaskedBatch. Where the dims are static, or
take in the whole batch, torch's own function runs on packed values.

Invariants: half precision is summed in float32, as torch does it; what torch gives for an example without elements
(NaN for a variance or mean, -inf for logsumexp) an empty example gives, too.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.core.dtypes import rounded_once, sum_dtype, widened
from tdc.core.errors import ShapeError, message
from tdc.core.rules import define, unsupported
from tdc.core.typing import Op
from tdc.ops.partial_ragged import by_lines, over_lines
from tdc.ops.reduction import check_dims, composed, count, filled, reduce_composed
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import Ragged


def count_nonzero_ragged(x: Any, dim: Any = None) -> Ragged | Tensor:
    check_dims(torch.count_nonzero, x, dim)
    return x.ne(0).sum(dim)


def nansum_ragged(x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Ragged | Tensor:
    check_dims(torch.nansum, x, dim)
    return x.masked_fill(x.isnan(), 0).sum(dim, keepdim, **kwargs)


def nanmean_ragged(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Ragged | Tensor:
    """Where all elements are NaN, or none is there, 0 / 0 is NaN."""
    check_dims(torch.nanmean, x, dim)
    if by_lines(torch.nanmean, x, dim):
        return over_lines(torch.nanmean, partial(nanmean_ragged, dtype=dtype), x, dim, keepdim)

    def mean(x: Any) -> Ragged | Tensor:
        total, real = nansum_ragged(x, dim, keepdim), x.isnan().logical_not().sum(dim, keepdim)
        return total / real.to(total.dtype)

    return rounded_once(mean, x, dtype)


def logsumexp_ragged(x: Any, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    x = x if x.dtype.is_floating_point else x.to(torch.get_default_dtype())
    return rounded_once(partial(logsumexp_of, dims=dims, keepdim=keepdim), x)


def logsumexp_of(x: Any, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """Of what lies below the largest element, so that nothing overflows; -inf where there is nothing."""
    x = filled(x, -math.inf)
    top = x.detach().amax(dims, True)
    top = top.masked_fill(top.isinf(), 0)
    total = torch.sub(x, top).exp().sum(dims, keepdim)
    none = total == 0
    top = top if keepdim else top.squeeze(dims)
    return (total.masked_fill(none, 1).log() + top).masked_fill(none, -math.inf)


def spread_of(x: Any, dims: tuple[int, ...], keepdim: bool, correction: float, root: bool = False) -> Tensor:
    """The variance or its root, in two passes."""
    dtype, wide = x.dtype, widened(x)
    number = count(x, dims, True).to(sum_dtype(dtype))
    apart = filled(torch.sub(wide, wide.sum(dims, True) / number), 0)
    out = apart.abs().square().sum(dims, True) / (number - correction).clamp(min=0)
    if root:  # whose derivative at 0 is 0 here, as in torch
        none = out == 0
        out = out.masked_fill(none, 1).sqrt().masked_fill(none, 0)
    out = out if dtype.is_complex else out.to(dtype)
    return out if keepdim else out.squeeze(dims)


def moment_ragged(
    op: Op, x: Any, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *,
    correction: float | None = None,
) -> Ragged | Tensor:  # fmt: skip
    """`std` and `var` in all forms that torch has: `(dim, correction=)`, `(dim, unbiased, keepdim)`, `(unbiased)`."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if unbiased is not None and correction is not None:
        raise ShapeError(message(op, "unbiased or correction", "both", hint="correction=1 is unbiased=True"))
    correction = float(unbiased is not False) if correction is None else correction
    rule = partial(spread_of, root=op is torch.std)
    return reduce_composed(op, rule, x, dim, keepdim, correction=correction)


def with_mean_ragged(
    op: Op, x: Any, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, **kwargs: Any
) -> tuple[Any, Any]:
    """`std_mean` and `var_mean`: what `op` gives, and the mean."""
    if by_lines(op, x, dim):  # so that both share their lengths
        return over_lines(op, partial(with_mean_ragged, op, unbiased=unbiased, **kwargs), x, dim, keepdim)
    return moment_ragged(op, x, dim, unbiased, keepdim, **kwargs), x.mean(
        None if isinstance(dim, bool) else dim, keepdim
    )


def histc_nested(input: NestedTensor, *args: Any, **kwargs: Any) -> Tensor:
    """Of all real elements."""
    return torch.histc(input.values, *args, **kwargs)


composed(torch.count_nonzero, "moments", count_nonzero_ragged, "dim", identity=0)
composed(torch.nansum, "moments", nansum_ragged, identity=0)
composed(torch.nanmean, "moments", nanmean_ragged)
composed(torch.logsumexp, "moments", partial(reduce_composed, torch.logsumexp, logsumexp_ragged), identity=-math.inf)
for _op in (torch.std, torch.var):
    composed(_op, "moments", partial(moment_ragged, _op), "dim unbiased keepdim")
for _op, _moment in ((torch.std_mean, torch.std), (torch.var_mean, torch.var)):
    composed(_op, "moments", partial(with_mean_ragged, _moment), "dim unbiased keepdim")
define(torch.histc, "moments", nested=histc_nested)
unsupported(
    torch.histc, ["masked"], "bins, into which padding would be counted", family="moments",
    hint="x.to_packed().histc()",
)  # fmt: skip
