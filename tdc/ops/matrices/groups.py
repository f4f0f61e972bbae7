"""Products of each example that are one call of torch's loop over groups, on CPU.

    x (N, K), w (B, K, L), offsets (B+1,)   ->  y (N, L)       (B, -1, K) @ (B, K, L)
    x (N, K), y (N, L), offsets             ->  w (B, K, L)    (B, K, -1) @ (B, -1, L)

The sum of `x @ w * y` is linear in three tensors, and each of the three operations is its derivative by the third, as
often as anybody asks, and so is the one in a direction. The way through letters and sizes (`by_letters`) gives the same
results, and takes as long as products of small matrices.

Invariants: `Grouped` differentiates the operators, and nothing else does; nothing but an example's own rows enters its
product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.container import Container
from tdc.core.dynamo import readable, trace_with_grad
from tdc.core.operators import (
    derive,
    differentiable,
    in_direction_of_each,
    one_by_one,
    only_results,
    operator,
    refuse_mapped,
    serves,
)
from tdc.ops.matrices.cpu import GROUPED, grouped
from tdc.ragged.nested import NestedTensor, build_nested


def product_of_groups(a: NestedTensor, b: NestedTensor | Tensor) -> NestedTensor | Tensor | None:
    """`a @ b` by one call; None where it is another product, or not to be had so."""
    s, left, right = a._structure, a._values, b._values if isinstance(b, NestedTensor) else b
    turned = s.packed_dim == 1
    if left.ndim != 2 or s.batch_dim or s.ragged_ndim > 1 or right.ndim != 3 - turned:
        return None
    if turned:
        t = b._structure if isinstance(b, NestedTensor) else None
        fits = t is not None and t.offsets is s.offsets and t.ragged_ndim == 1 and not (t.packed_dim or t.batch_dim)
    else:
        fits = not isinstance(b, Container) and right.shape[:2] == (s.batch_size, left.shape[1])
    if not fits or left.dtype != right.dtype or left.dtype not in GROUPED or torch.is_autocast_enabled("cpu"):
        return None
    x = left.t() if turned else left
    if not (grouped(x, x.shape[1], right.shape[-1]) and serves(left) and serves(right)):
        return None
    at_once = readable() and only_results(x, right)  # the call of an operator takes as long as a small product
    if turned:
        return matrices_kernel(x, right, s.offsets) if at_once else multiply(x, None, right, s.offsets)
    return build_nested(s, rows_kernel(x, right, s.offsets) if at_once else multiply(x, right, None, s.offsets))


def product(x: Tensor | None, w: Tensor | None, y: Tensor | None, offsets: Tensor) -> Tensor:
    """The operation for the one of three that is missing."""
    if w is None:
        return group_matrices(x, y, offsets)  # type: ignore[no-any-return]  # untyped in torch
    return group_rows(x if y is None else y, w, offsets, y is not None)  # type: ignore[no-any-return]  # the same


class Grouped(torch.autograd.Function):
    """`product` with its gradients."""

    apply: Any  # torch leaves it untyped

    @staticmethod
    def forward(x: Tensor | None, w: Tensor | None, y: Tensor | None, offsets: Tensor) -> Tensor:
        return product(x, w, y, offsets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        *tensors, offsets = ctx.saved_tensors
        all_three = [grads[0] if t is None else t for t in tensors]
        found: list[Tensor | None] = []
        for i, t in enumerate(tensors):
            others = [None if k == i else other for k, other in enumerate(all_three)]
            found.append(derived(*others, offsets) if t is not None and ctx.needs_input_grad[i] else None)
        return *found, None


class Directed(Grouped):
    """`Grouped` with a derivative in a direction."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        Grouped.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Tensor:
        *tensors, offsets = ctx.saved_tensors
        return in_direction_of_each(lambda x, w, y: multiply(x, w, y, offsets), tensors, directions[:3])


multiply: Callable[..., Tensor] = differentiable(Grouped, Directed)  # `product` with all its derivatives


def derived(*args: Any) -> Tensor:
    """`multiply` of a derivative."""
    return multiply(*args)


trace_with_grad(derived, product)


def rows_kernel(x: Tensor, w: Tensor, offsets: Tensor, turned: bool = False) -> Tensor:
    """x (N, K) times the matrix (K, L) of each example, or times its transpose."""
    count, used = w.shape[1 if turned else 2], int(offsets[-1])
    if not used or not w.numel():
        return x.new_zeros(x.shape[0], count)
    w = w if w.is_contiguous() or w.mT.is_contiguous() else w.contiguous()
    y = F.grouped_mm(x[:used].contiguous(), w.mT if turned else w, offs=offsets[1:].to(torch.int32))
    return y if used == x.shape[0] else F.pad(y, (0, 0, 0, x.shape[0] - used))


def matrices_kernel(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """The transpose of each example's rows (n, K) times its rows (n, L)."""
    used = int(offsets[-1])
    if not used or not x.shape[1] or not y.shape[1]:
        return x.new_zeros(offsets.shape[0] - 1, x.shape[1], y.shape[1])
    return F.grouped_mm(x[:used].contiguous().t(), y[:used].contiguous(), offs=offsets[1:].to(torch.int32))


def fake_rows(x: Tensor, w: Tensor, offsets: Tensor, turned: bool) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1 if turned else 2])


def fake_matrices(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0] - 1, x.shape[1], y.shape[1])


def over_members(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
    """One member after another, each a call for all examples."""
    refuse_mapped("offsets", [in_dims[2]])
    outs, dims = one_by_one(lambda *given: (op(*given),), info, in_dims, *args)
    return outs[0], dims[0]


def inputs_of_rows(x: Tensor, w: Tensor, offsets: Tensor, turned: bool) -> tuple[Any, ...]:
    """What `Grouped` takes, of the arguments of `group_rows`."""
    return (None, w, x, offsets) if turned else (x, w, None, offsets)


def inputs_of_matrices(x: Tensor, y: Tensor, offsets: Tensor) -> tuple[Any, ...]:
    """What `Grouped` takes, of the arguments of `group_matrices`."""
    return x, None, y, offsets


group_rows = operator(
    "group_rows(Tensor x, Tensor w, Tensor offsets, bool turned) -> Tensor", fake_rows, over_members, CPU=rows_kernel
)
group_matrices = operator(
    "group_matrices(Tensor x, Tensor y, Tensor offsets) -> Tensor", fake_matrices, over_members, CPU=matrices_kernel
)
derive(group_rows, Directed, inputs_of_rows)
derive(group_matrices, Directed, inputs_of_matrices)
