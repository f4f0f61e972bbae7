"""Operations that torch's vmap specialises on sizes (torch 2.11-2.13), in forms that it does not.

`dropout` and `layer_norm` read the number of elements; the rules of `index_select`, `index_add`, `gather`,
`scatter_add` and `scatter_reduce` ask for sizes. Under `AnySize` they give the same numbers and gradients by two
operators, each the derivative of the other. The index is one for all columns, or has the shape of the elements:

    take    x (.., N, ..), index (M) or (.., M, ..)  ->  (.., M, ..)
    put     x (.., M, ..), index (M) or (.., M, ..)  ->  (.., N, ..)    sums of elements of one index
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tdc.core.dtypes import sum_dtype
from tdc.core.operators import derive, in_front, itself, operator
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import data_of, is_ragged, with_data

# -- operations in other forms


class AnySize(TorchFunctionMode):
    """Operations in the form that traces under vmap with sizes that vary."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        return FORMS[func](*args, **named) if func in FORMS else func(*args, **named)


def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """`F.dropout` of a tensor or ragged batch."""
    if inplace or not training or not 0 < p < 1 or not (is_ragged(input) or isinstance(input, Tensor)):
        return F.dropout(input, p, training, inplace)
    found = torch.native_dropout(data_of(input), p, True)[0]
    return found if isinstance(input, Tensor) else with_data(input, found)


def layer_norm(
    input: Any, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    """`F.layer_norm` of a tensor, or of the packed positions of a NestedTensor."""
    shape, given, x = tuple(normalized_shape), [t for t in (weight, bias) if t is not None], data_of(input)
    before = input.structure.packed_dim + 1 if isinstance(input, NestedTensor) else 0
    plain = isinstance(input, (Tensor, NestedTensor)) and x.ndim - before >= len(shape) > 0
    alike = plain and all([t.dtype == x.dtype and tuple(t.shape) == shape for t in given])
    if not alike or tuple(x.shape[-len(shape) :]) != shape:
        return F.layer_norm(input, normalized_shape, weight, bias, eps)  # pyright: ignore[reportArgumentType]  # a batch
    wide, dims = x.to(sum_dtype(x.dtype)), tuple(range(-len(shape), 0))
    var, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
    out = (wide - mean) * (var + eps).rsqrt()
    out = out if weight is None else out * weight
    out = (out if bias is None else out + bias).to(x.dtype)
    return out if isinstance(input, Tensor) else with_data(input, out)


def served(dim: Any, index: Any, *tensors: Any) -> bool:
    """True if an operator takes these arguments; others go to torch."""
    plain = all([isinstance(t, Tensor) and t.ndim > 0 for t in (index, *tensors)])
    alike = plain and all([t.dtype == tensors[0].dtype for t in tensors])
    return alike and isinstance(dim, int) and -tensors[0].ndim <= dim < tensors[0].ndim


def index_select(input: Any, dim: Any, index: Any) -> Any:
    """`torch.index_select`."""
    if not served(dim, index, input) or index.ndim != 1:
        return torch.index_select(input, dim, index)
    d = dim % input.ndim
    return take(input, d, index, (*input.shape[:d], index.shape[0], *input.shape[d + 1 :]))


def index_add(input: Any, dim: Any, index: Any, source: Any, *, alpha: float = 1) -> Any:
    """`torch.index_add`."""
    whole = alpha == 1 or (isinstance(source, Tensor) and source.is_floating_point())
    if not served(dim, index, input, source) or index.ndim != 1 or not whole:
        return torch.index_add(input, dim, index, source, alpha=alpha)
    return input + put(source if alpha == 1 else source * alpha, dim % input.ndim, index, input.shape)


def gather(input: Any, dim: Any, index: Any, *, sparse_grad: bool = False) -> Any:
    """`torch.gather`."""
    if not served(dim, index, input) or index.ndim != input.ndim or sparse_grad:
        return torch.gather(input, dim, index, sparse_grad=sparse_grad)
    return take(input, dim % input.ndim, index, index.shape)


def scatter_add(input: Any, dim: Any, index: Any, src: Any) -> Any:
    """`torch.scatter_add`."""
    if not served(dim, index, input, src) or index.shape != src.shape or index.ndim != input.ndim:
        return torch.scatter_add(input, dim, index, src)
    return input + put(src, dim % input.ndim, index, input.shape)


def scatter_reduce(input: Any, dim: Any, index: Any, src: Any, reduce: str, *, include_self: bool = True) -> Any:
    """`torch.scatter_reduce` of extremes."""
    fits = served(dim, index, input, src) and index.shape == src.shape
    if not fits or not include_self or reduce not in ("amax", "amin"):
        return torch.scatter_reduce(input, dim, index, src, reduce, include_self=include_self)
    return extreme_each(input, dim % input.ndim, index, src, reduce)


FORMS: dict[Any, Any] = {
    F.dropout: dropout, F.layer_norm: layer_norm,
    torch.index_select: index_select, torch.Tensor.index_select: index_select,
    torch.index_add: index_add, torch.Tensor.index_add: index_add,
    torch.gather: gather, torch.Tensor.gather: gather,
    torch.scatter_add: scatter_add, torch.Tensor.scatter_add: scatter_add,
    torch.scatter_reduce: scatter_reduce, torch.Tensor.scatter_reduce: scatter_reduce,
}  # fmt: skip


# -- the operators


class Linear(torch.autograd.Function):
    """`take` or `put` as `op(x, dim, index, shape)`; the shape is that of the result."""

    @staticmethod
    def forward(op: Any, x: Tensor, dim: int, index: Tensor, shape: Sequence[int]) -> Tensor:
        return op(x, dim, index, shape)  # type: ignore[no-any-return]  # untyped in torch

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.op, x, ctx.dim, index, ctx.shape = inputs
        ctx.given = x.shape
        ctx.save_for_backward(index)
        ctx.save_for_forward(index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        other = put if ctx.op is take else take
        return None, other(grads[0], ctx.dim, ctx.saved_tensors[0], ctx.given), None, None, None

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Tensor:
        return ctx.op(directions[1], ctx.dim, ctx.saved_tensors[0], ctx.shape)  # type: ignore[no-any-return]  # as above


class Extreme(torch.autograd.Function):
    """`extreme_each` with its gradient: equal extremes share it in equal parts."""

    @staticmethod
    def forward(x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str) -> Tensor:
        return extreme_each(x, dim, index, src, reduce)  # type: ignore[no-any-return]  # untyped in torch

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.dim, index, src, _ = inputs
        ctx.save_for_backward(x, index, src, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, index, src, out = ctx.saved_tensors
        own = (x == out).to(x.dtype)
        others = (src == take(out, ctx.dim, index, index.shape)).to(x.dtype)
        part = grads[0] / (own + put(others, ctx.dim, index, x.shape))
        return own * part, None, None, others * take(part, ctx.dim, index, index.shape), None


def over_members(
    op: Any, info: Any, in_dims: Any, x: Tensor, dim: int, index: Tensor, shape: Sequence[int]
) -> tuple[Tensor, int]:
    """Batching rule: entries in front; an index that differs between them has the shape of the elements."""
    members, x = info.batch_size, in_front(x, in_dims[0], info.batch_size)
    if in_dims[2] is not None or index.ndim > 1:
        index = in_front(index, in_dims[2], members)
        if index.ndim == 2:
            index = index.view(members, *[1] * dim, -1, *[1] * (x.ndim - dim - 2))
            index = index.expand((members, *shape) if op is take else x.shape)
    return op(x, dim + 1, index, (members, *shape)), 0


def extremes_over_members(
    op: Any, info: Any, in_dims: Any, x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str
) -> tuple[Tensor, int]:
    """Batching rule: entries in front."""
    given = (x, in_dims[0]), (index, in_dims[2]), (src, in_dims[3])
    x, index, src = [in_front(t, d, info.batch_size) for t, d in given]
    return op(x, dim + 1, index, src, reduce), 0


def gathered(x: Tensor, dim: int, index: Tensor, shape: Sequence[int]) -> Tensor:
    return x.index_select(dim, index) if index.ndim == 1 else x.gather(dim, index)


def added(x: Tensor, dim: int, index: Tensor, shape: Sequence[int]) -> Tensor:
    none = x.new_zeros(shape)
    return none.index_add_(dim, index, x) if index.ndim == 1 else none.scatter_add_(dim, index, x)


take, put = [
    operator(
        f"{name}(Tensor x, int dim, Tensor index, SymInt[] shape) -> Tensor",
        lambda x, dim, index, shape: x.new_empty(shape), over_members, CompositeExplicitAutograd=kernel,
    )
    for name, kernel in (("take", gathered), ("put", added))
]  # fmt: skip
extreme_each = operator(
    "extreme_each(Tensor x, int dim, Tensor index, Tensor src, str reduce) -> Tensor",
    lambda x, *rest: torch.empty_like(x), extremes_over_members,
    CompositeExplicitAutograd=lambda x, dim, index, src, reduce: x.scatter_reduce(dim, index, src, reduce),
)  # fmt: skip
for _op in (take, put):
    derive(_op, Linear, partial(itself, _op))
derive(extreme_each, Extreme)
