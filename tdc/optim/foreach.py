"""Arithmetic of columns, lists of tensors with one for each leaf, in which optimisers are written.

    means = lerp(means, grads, 0.1)        one line for all leaves

Each function is one foreach operation of torch, which Inductor fuses as well as single ones, and on a GPU better. Under
transforms of `torch.func`, which have no rule for foreach, and eagerly where its numbers differ, it is a comprehension.

    xs, ys      columns of one dtype
    a, by       a number, a 0-d tensor, or (K,), one entry for each of K models, for tensors (K, *features)

Whole updates of Adam and SGD go through the operators of `kernels.optimizers` where `can_fuse` says so:

    eagerly       one pass over the memory of all leaves, where the arithmetic of columns makes up to fourteen
    in a graph    one node for each 8 leaves: as arithmetic, the updates of 300 parameters take more than half of the
                  time that Inductor needs for a training step. A few leaves it fuses with what makes their gradients.

The operators get copies. Where a graph writes the results into the old state, Inductor drops the copies and the kernel
updates the old state in place: see `compile/_torch/writes.py`.

Invariant: an operator serves float32, one rate and one step for all leaves, no derivative, and not the body of a loop,
where torch allows no operators that mutate lists (2.11-2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from tdc.compile._torch.tracing import asked, in_body
from tdc.core.dynamo import eager, exporting, traced_for, under_transform
from tdc.core.operators import learning, only_results
from tdc.core.torch_functions import list_kernel
from tdc.kernels.optimizers import Fused, has_kernels
from tdc.ops.tensordict.leafwise import at_once

Column: TypeAlias = "list[Tensor]"
Scalar: TypeAlias = "float | Tensor"
ADD, ADDCMUL = list_kernel("foreach_add"), list_kernel("foreach_addcmul")
FEW = 12  # a graph of fewer leaves has the arithmetic of each
AT_ONCE = 8  # leaves of one node: their gradients all live until it runs


def one_kernel(*columns: Any) -> bool:
    """True if one foreach kernel can take all of these columns and scalars."""
    if not eager():
        return False
    tensors = [x for column in columns if isinstance(column, list) for x in column]
    return at_once(tensors) and not any([isinstance(by, Tensor) and (by.ndim or by.requires_grad) for by in columns])


@traced_for(one_kernel)
def one_kernel_traced(*columns: Any) -> bool:
    """Traced in place of `one_kernel`: a graph has tensors only."""
    if under_transform():
        return False
    return not any([isinstance(by, Tensor) and by.ndim for by in columns])


def each(by: Scalar, xs: Column) -> list[Any]:
    """A scalar for each leaf: in its dtype, with its dims."""
    if not isinstance(by, Tensor) or not xs:
        return [by] * len(xs)
    by = by if xs[0].dtype.is_complex else by.to(xs[0].dtype)
    if not by.ndim:
        return [by] * len(xs)
    ranks = {x.ndim: x for x in xs}
    found = {n: extended(by, x) for n, x in ranks.items()}
    return [found[x.ndim] for x in xs]


def extended(by: Tensor, x: Tensor) -> Tensor:
    """One entry for each model, with the dims of a leaf."""
    return by.view(*by.shape, *[1] * (x.ndim - by.ndim)) if by.ndim else by


def columnwise(op: Callable[..., Tensor]) -> Callable[..., Column]:
    """An operation of torch on a column and other columns or scalars."""
    kernel = list_kernel(f"foreach_{op.__name__}")
    numbers = op is torch.lerp  # torch has no kernel that takes a tensor as the weight

    def run(xs: Column, *others: Column | Scalar) -> Column:
        if one_kernel(xs, *others) and not (numbers and isinstance(others[-1], Tensor)):
            return list(kernel(xs, *others))
        columns = [y if isinstance(y, list) else each(y, xs) for y in others]
        return [op(*row) for row in zip(xs, *columns, strict=True)]

    run.__name__ = op.__name__
    return run


times: Callable[[Column, Scalar], Column] = columnwise(torch.mul)  # x * by
over: Callable[[Column, Scalar], Column] = columnwise(torch.div)  # x / by
ratio: Callable[[Column, Column], Column] = columnwise(torch.div)  # x / y
plus_number: Callable[[Column, Scalar], Column] = columnwise(torch.add)  # x + a
lerp: Callable[[Column, Column, Scalar], Column] = columnwise(torch.lerp)  # x + a * (y - x)
product: Callable[[Column, Column], Column] = columnwise(torch.mul)  # x * y
maximum: Callable[[Column, Column], Column] = columnwise(torch.maximum)
sqrt: Callable[[Column], Column] = columnwise(torch.sqrt)
sign: Callable[[Column], Column] = columnwise(torch.sign)
absolute: Callable[[Column], Column] = columnwise(torch.abs)


def plus(xs: Column, ys: Column, a: Scalar = 1.0) -> Column:
    """`x + a * y`.

    By `torch.sub`: Inductor turns `torch.add` of a matrix product, such as a gradient, into `addmm` and drops alpha
    (torch 2.11-2.13, `post_grad.addmm`).
    """
    if isinstance(a, Tensor):
        return [torch.addcmul(x, y, s) for x, y, s in zip(xs, ys, each(a, xs), strict=True)]
    if one_kernel(xs, ys):
        return list(ADD(xs, ys, alpha=a))
    return [torch.sub(x, y, alpha=-a) for x, y in zip(xs, ys, strict=True)]


def plus_product(xs: Column, ys: Column, zs: Column, a: Scalar) -> Column:
    """`x + a * y * z`."""
    if isinstance(a, Tensor):
        return plus(xs, product(ys, zs), a)
    if one_kernel(xs, ys, zs):
        return list(ADDCMUL(xs, ys, zs, value=a))
    return [torch.addcmul(x, y, z, value=a) for x, y, z in zip(xs, ys, zs, strict=True)]


def minus(xs: Column, ys: Column, by: Scalar) -> Column:
    """`x - by * y`."""
    if not isinstance(by, Tensor):
        return plus(xs, ys, -by)
    if one_kernel(xs, ys, by):
        return list(ADDCMUL(xs, ys, each(by, xs), value=-1))
    return [torch.addcmul(x, y, s, value=-1) for x, y, s in zip(xs, ys, each(by, xs), strict=True)]


# -- whole updates


def fused_update(fused: Fused, columns: list[Column], rate: Scalar, step: Tensor, *settings: Any) -> tuple[Column, ...]:
    """New parameters and moments, from columns of parameters, gradients and moments."""
    ps, gs, *moments = columns
    new = [[x.clone() for x in column] for column in (ps, *moments)]
    fused.update_([new[0], gs, *new[1:]], rate, step, settings, AT_ONCE)
    return tuple(new)


def can_fuse(columns: list[Column], rate: Scalar, step: Tensor, *settings: Any) -> bool:
    """True if an operator can do this update."""
    leaves = [x for column in columns for x in column]
    if not eager() or not is_uniform(columns[0], rate, step, settings):
        return False
    if not {type(x) for x in leaves} <= {Tensor, Parameter}:
        return False
    return {x.device for x in leaves} == {step.device} and only_results(*leaves, rate)


@traced_for(can_fuse)
def can_fuse_traced(columns: list[Column], rate: Scalar, step: Tensor, *settings: Any) -> bool:
    """Traced in place of `can_fuse`."""
    ps = columns[0]
    if len(ps) < FEW or exporting() or under_transform() or in_body() or not is_uniform(ps, rate, step, settings):
        return False
    if [p for p in ps if type(p) not in (Tensor, Parameter)] or learning([rate]):
        return False
    leaves = [step]
    for column in columns:
        leaves += column
    return asked(on_one_device, leaves)


def on_one_device(tensors: list[Tensor]) -> bool:
    """True if all tensors are on one device and none requires grad."""
    return len({x.device for x in tensors}) == 1 and not learning(tensors)


def is_uniform(ps: Column, rate: Scalar, step: Tensor, settings: tuple[Any, ...]) -> bool:
    """True if leaves are float32, and rate, step and settings are one number each."""
    if not has_kernels() or not ps or ps[0].dtype != torch.float32:
        return False
    if step.ndim or (isinstance(rate, Tensor) and rate.ndim):
        return False
    return all([isinstance(x, (int, float)) for x in settings])
