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
import torch.nn.functional as F
from torch import Tensor

from tdc.core.dtypes import rounded_once, sum_dtype, widened
from tdc.core.dynamo import certain, is_zero, known
from tdc.core.errors import ShapeError, message
from tdc.core.rules import define, unsupported
from tdc.core.typing import Op
from tdc.ops.reduce.partial_ragged import by_lines, over_lines
from tdc.ops.reduce.reduction import count, filled, reduce_ragged, reduction, sum_of
from tdc.ops.tensordict.batch import along
from tdc.ragged.storage import Ragged, data_of, with_data


def nansum_of(x: Any, dims: tuple[int, ...], keepdim: bool, *, dtype: Any = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    return sum_of(with_data(x, torch.nansum(data_of(x).unsqueeze(-1), -1)), dims, keepdim)


def nanmean_of(x: Any, dims: tuple[int, ...], keepdim: bool, *, dtype: Any = None) -> Tensor:
    """Where all elements are NaN, or none is there, 0 / 0 is NaN."""
    real = sum_of(x.isnan().logical_not(), dims, keepdim)
    return rounded_once(lambda x: nansum_of(x, dims, keepdim) / real, x, dtype)


def logsumexp_of(x: Any, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    exact = x.dtype.is_floating_point or x.dtype.is_complex
    run = partial(log_of_sum, dims=dims, keepdim=keepdim)
    return rounded_once(run, x if exact else x.to(torch.get_default_dtype()))


def log_of_sum(x: Any, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """Of what lies below the largest element, so that nothing overflows; -inf where there is nothing."""
    x = filled(x, -math.inf)
    top = (torch.real(x) if x.dtype.is_complex else x).detach().amax(dims, True)
    top = top.masked_fill(top.abs() == math.inf, 0)  # Inductor (2.13) asks `isinf` of each element by itself
    total = torch.sub(x, top).exp().sum(dims, keepdim)
    none = total == 0
    top = top if keepdim else top.squeeze(dims)
    return (total.masked_fill(none, 1).log() + top).masked_fill(none, -math.inf)


def log_values(values: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """torch asks whether there is any element, which a graph need not know."""
    dims = tuple(range(values.ndim)) if dim is None else dim if isinstance(dim, tuple) else (dim,)
    if certain(math.prod(values.shape) > 0):
        return torch.logsumexp(values, dims, keepdim)
    unsure = [d for d in dims if not certain(values.shape[d] > 0)]
    if unsure and (known(values.numel() != 0) or any([is_zero(values.shape[d]) for d in unsure])):
        return torch.logsumexp(values, dims, keepdim)
    for d in unsure:  # one more element, so that there is a largest one
        values = F.pad(values, [*[0, 0] * (values.ndim - 1 - d % values.ndim), 0, 1], value=-math.inf)
    return log_of_sum(values, dims, keepdim)


def squares(x: Any, mean: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Sums of squared differences from means, of which each example has one."""
    apart = filled(torch.sub(x, mean), 0)
    square = torch.real(apart.mul(apart.conj())) if x.dtype.is_complex else apart.square()
    return square.sum(dims, True)


def spread_of(x: Any, dims: tuple[int, ...], keepdim: bool, correction: float, root: bool = False) -> Tensor:
    """The variance or its root, in two passes.

    It is divided by no less than 0, but its derivative by what is left of the number, as in torch.
    """
    dtype, wide = x.dtype, widened(x)
    number = count(x, dims, True).to(sum_dtype(dtype))
    left, mean = number - correction, wide.sum(dims, True) / number
    total = squares(wide, torch.where(left == 0, mean.detach(), mean), dims)  # else inf - inf in its derivative
    bound = left.clamp(min=0).masked_fill(number == 0, 0)
    out = total / left.masked_fill(number == 0, 1) + (total.detach() / bound).masked_fill(bound > 0, 0)
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
    correction = float(unbiased is not False) if correction is None else correction + 0  # a bool is a number here
    rule = partial(spread_of, root=op is torch.std)
    return reduce_ragged(op, rule, op, x, dim, keepdim, correction=correction)


def with_mean_ragged(
    op: Op, x: Any, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, **kwargs: Any
) -> tuple[Any, Any]:
    """`std_mean` and `var_mean`: what `op` gives, and the mean."""
    if by_lines(op, x, dim):  # so that both share their lengths
        return over_lines(op, partial(with_mean_ragged, op, unbiased=unbiased, **kwargs), x, dim, keepdim)
    mean = x.mean(None if isinstance(dim, bool) else dim, keepdim)
    return moment_ragged(op, x, dim, unbiased, keepdim, **kwargs), mean


reduction(
    torch.count_nonzero, lambda x, dims, keepdim: sum_of(x.ne(0), dims, keepdim), family="moments",
    dense=lambda values, dim=None, keepdim=False: values.ne(0).sum(dim, keepdim), dims="input dim**=None", identity=0,
)  # fmt: skip
reduction(torch.nansum, nansum_of, family="moments", identity=0)
reduction(
    torch.nanmean, nanmean_of, family="moments",
    dense=lambda x, dim=None, keepdim=False, dtype=None: rounded_once(lambda v: v.nanmean(dim, keepdim), x, dtype),
)  # fmt: skip
reduction(torch.logsumexp, logsumexp_of, family="moments", dense=log_values, identity=-math.inf)
for _op, _impl in (
    (torch.std, partial(moment_ragged, torch.std)), (torch.var, partial(moment_ragged, torch.var)),
    (torch.std_mean, partial(with_mean_ragged, torch.std)), (torch.var_mean, partial(with_mean_ragged, torch.var)),
):  # fmt: skip
    along(_op, "input dim**=None unbiased keepdim", "moments", ragged=_impl)
define(torch.histc, "moments", nested=lambda input, *args, **kwargs: torch.histc(input.values, *args, **kwargs))
unsupported(
    torch.histc, ["masked"], "bins, into which padding would be counted", family="moments",
    hint="x.to_packed().histc()",
)  # fmt: skip
