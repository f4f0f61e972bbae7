"""Products along ragged dims and of whole batches, and running products of tensors.

    prod(x, 1)    (B, -1, D) -> (B, D)    1 of an empty example

A rectangle is multiplied whose padding is 1: `scatter_reduce` has no forward mode, and no products of complex numbers.

Invariant: the derivative by an element is the product of the others, zeros, infinities and NaN among them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.core.dtypes import rounded_once
from tdc.core.dynamo import in_direction, trace_with_grad, traced_for, under_transform
from tdc.core.errors import message
from tdc.core.operators import only_results, refused_derivative
from tdc.ops.rectangle import rectangle
from tdc.ops.reduce.reduction import reduction


def prod_dims(values: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    dims = tuple(range(values.ndim)) if dim is None else dim
    return rounded_once(partial(product, dims=dims, keepdim=keepdim), values, dtype)


def product(values: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """torch's product, one dim after another, with derivatives for graphs, see `derivable`."""

    def times(t: Tensor) -> Tensor:
        for d in sorted(dims, reverse=True):
            t = torch.prod(t, d, True)
        return t

    out = derivable(values, times, lambda t: t.sum(dims, True))
    return out if keepdim else out.squeeze(dims)


def cumprod(values: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """torch's own, but for graphs."""
    return torch.cumprod(values, dim, dtype=dtype)


@traced_for(cumprod)
def cumprod_traced(values: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """`cumprod` in graphs, since torch's derivative is a loop over the number of elements of the first call."""
    values = values if dtype is None else values.to(dtype)
    if only_results(values) or in_direction() or not (values.is_floating_point() or values.is_complex()):
        return torch.cumprod(values, dim)
    if under_transform():
        return derivable(values, lambda t: t.cumprod(dim), lambda t: t.cumsum(dim))
    out: Tensor = Running.apply(values, dim)
    return out


class Running(torch.autograd.Function):
    """Running products along a dim, for graphs; they have no second derivative."""

    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(x: Tensor, dim: int) -> Tensor:
        return torch.cumprod(x, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.dim = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, out = ctx.saved_tensors
        return last_gradient(grads[0], x, out, ctx.dim), None


def last_gradient(grad: Tensor, x: Tensor, out: Tensor, dim: int) -> Tensor:
    """`gradient_of_running` whose derivative is refused."""
    return refused_derivative(SECOND, gradient_of_running(grad, x, out, dim), grad, x)


def gradient_of_running(grad: Tensor, x: Tensor, out: Tensor, dim: int) -> Tensor:
    """The gradient of x, whose running products are `out`, by torch's formula.

    Before the first zero, the sums of products from an element on are divided by it. The gradient of that zero takes
    the products without it, up to the next zero. Elements after it have gradient 0.
    """

    def from_each(products: Tensor, within: Tensor) -> Tensor:
        """Sums from each element on. Where nothing is asked for, as in padding, products may be infinite."""
        weighted = torch.where(within & (grad != 0), grad * products.conj(), 0)
        return weighted.flip(dim).cumsum(dim).flip(dim)

    zero = x == 0
    seen = zero.to(torch.int64).cumsum(dim)
    front, first = seen == 0, zero & (seen == 1)
    behind = from_each(out, front) / torch.where(front, x, 1).conj()
    at_zero = from_each(torch.where(first, 1, x).cumprod(dim), (seen == 1) | (zero & (seen == 2)))
    return torch.where(front, behind, torch.where(first, at_zero, 0))


SECOND = message(
    "cumprod", "one derivative of a compiled function", "a second one", hint="torch.func.hessian inside, or no compile"
)
trace_with_grad(last_gradient)


def derivable(values: Tensor, times: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor]) -> Tensor:
    """Products as a constant, times a factor of value 1 or 0 that has their derivatives.

    The backward of torch's own branches on empty tensors, which a graph cannot decide for data-dependent sizes, and a
    zero in one example changes its formula for all. The product of zeros is their elementary symmetric polynomial,
    exact up to the second derivative. A single element that is not finite, beside zeros, has derivative 0.

    Args:
        times, total: products of elements, and sums of the same elements; they broadcast against the elements.
    """
    fixed = values.detach()
    if only_results(values) or not (values.is_floating_point() or values.is_complex()):
        return times(fixed)
    zero, odd = fixed == 0, ~fixed.isfinite()
    count, odds = total(zero.to(torch.int64)), total(odd.to(torch.int64))
    still = zero | (odd & (count > 0) & (odds == 1))
    ratio = torch.where(still, 1, values) / torch.where(still, 1, fixed)
    growth = total(torch.where(odd, 0, torch.log(ratio))).exp()
    zeros = torch.where(zero, values, 0)
    once, twice = total(zeros), total(zeros * zeros)
    none = torch.where(count == 1, once, torch.where(count == 2, (once * once - twice) / 2, 0))
    scale = times(torch.where(zero, 1, fixed))
    too_large = (count > 0) & (odds == 0)  # for the dtype, where it is not finite: 0 times it would be NaN
    scale = torch.where(too_large, torch.nan_to_num(scale), scale)
    return scale * growth * torch.where(count == 0, 1, none) + torch.where(count == 0, 0, times(fixed))


reduction(
    torch.prod, lambda x, *given, **kwargs: prod_dims(rectangle(x, 1), *given, **kwargs), dense=prod_dims,
    dims="input dim*=None keepdim", identity=1,
)  # fmt: skip
