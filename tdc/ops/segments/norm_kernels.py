"""Kernels of group norm along dim 0 of packed values on CPU, each example for itself.

    x (N, C), offsets (B+1,), weight (C,), bias (C,)    mean, rstd (B, G)

Long examples go one after another through torch's own kernel, or where that is slow through a few passes over memory
that stays in the cache. Short ones go through these passes all at once.

Invariants: the result and the gradient lie in memory as x does; which way runs depends on sizes and strides only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tdc.ops.subrows import worth_calls
from tdc.ragged.innermost import examples, on_host, owners, squared, sums

Three = tuple[Tensor, Tensor, Tensor]
LEAST = 4  # channels of a group that lie innermost, so that torch's kernel is fast
ALL = [True, True, True]  # gradients that it computes
native_backward: Any = torch.ops.aten.native_group_norm_backward.default


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, offsets: Tensor, groups: int, eps: float) -> Three:
    """The result (N, C), mean and rstd."""
    rows, channels, out = offsets.shape[0] - 1, x.shape[1], torch.empty_like(x)
    if by_torch(x, rows, groups):
        lengths, none = offsets.diff(), x.new_zeros(1, groups)
        found = [
            torch.native_group_norm(plane, weight, bias, 1, channels, plane.shape[-1], groups, eps)
            if plane.shape[-1]  # torch 2.14 refuses what has no positions
            else (plane, none, none)
            for plane in planes_of(x, on_host(lengths))
        ]
        planes, *statistics = zip(*found, strict=True)
        mean, rstd = [torch.cat(each) for each in statistics]
        return joined(planes, out), mean, rstd
    count = count_of(x, offsets, groups)
    mean = to_groups(sums(x, offsets, rows), groups) / count
    middle = to_channels(mean, channels)
    rstd = (to_groups(squared(x, offsets, rows, middle), groups) / count + eps).rsqrt_()
    scale = to_channels(rstd, channels)
    scale = scale if weight is None else scale * weight
    shift = x.new_zeros(channels) if bias is None else bias
    for row, into, m, by in parts(offsets, (x, out), (middle, scale)):
        torch.addcmul(shift, torch.sub(row, m, out=into), by, out=into)
    return out, mean, rstd


def backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, offsets: Tensor, groups: int, eps: float
) -> Three:
    """The gradients of x, weight and bias, of that of the result."""
    rows = offsets.shape[0] - 1
    weight = x.new_ones(x.shape[1]) if weight is None else weight
    run = backward_by_torch if by_torch(x, rows, groups) else backward_in_passes
    return run(grad, x, weight, mean, rstd, offsets, groups)


def backward_by_torch(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, offsets: Tensor, groups: int
) -> Three:
    """`backward` by torch's kernel, which wants x and the gradient to lie alike."""
    grad = grad if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)
    lengths, of_rows = on_host(offsets.diff()), [t.unsqueeze(1).unbind() for t in (mean, rstd)]
    both = [planes_of(t, lengths) for t in (grad, x)]
    none = weight.new_zeros(x.shape[1])
    found = [
        native_backward(g, plane, *own, weight, 1, x.shape[1], plane.shape[-1], groups, ALL)
        if plane.shape[-1]
        else (plane, none, none)
        for g, plane, *own in zip(*both, *of_rows, strict=True)
    ]
    planes, *learned = zip(*found, strict=True)
    to_weight, to_bias = [torch.stack(each).sum(0) for each in learned]
    return joined(planes, torch.empty_like(x)), to_weight, to_bias


def backward_in_passes(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, offsets: Tensor, groups: int
) -> Three:
    """`backward`: of x by a factor of what it differs from its mean, a term, and a factor of the gradient."""
    rows, channels = offsets.shape[0] - 1, x.shape[1]
    out, apart, middle = torch.empty_like(x), torch.empty_like(x), to_channels(mean, channels)
    for row, g, a, into, m in parts(offsets, (x, grad, apart, out), (middle,)):
        torch.mul(torch.sub(row, m, out=a), g, out=into)
    both, scale = (sums(out, offsets, rows), sums(grad, offsets, rows)), to_channels(rstd, channels)
    count = count_of(x, offsets, groups)
    by_apart, by_grad = [to_groups(t * weight, groups) / count for t in both]
    factor, term = [to_channels(-t, channels) for t in (by_apart * rstd**3, by_grad * rstd)]
    for a, g, into, f, t, by in parts(offsets, (apart, grad, out), (factor, term, scale * weight)):
        torch.addcmul(t, a, f, out=into).addcmul_(g, by)
    return out, (both[0] * scale).sum(0), both[1].sum(0)


def by_torch(x: Tensor, rows: int, groups: int) -> bool:
    """Whether torch's kernel runs for each example."""
    return worth_calls(rows, x.numel()) and (x.stride(0) == 1 or x.shape[1] >= LEAST * groups)


def planes_of(x: Tensor, lengths: list[int]) -> list[Tensor]:
    """Examples (n, C) as torch's kernel takes them: as (1, C, n), or (1, C, 1, n) with channels innermost."""
    if x.stride(0) == 1:
        return [part.contiguous() for part in x.t().unsqueeze(0).split_with_sizes(lengths, 2)]
    return [*x.contiguous()[None, None].permute(0, 3, 1, 2).split_with_sizes(lengths, 3)]


def joined(planes: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """What torch's kernel gave, in memory of the values (N, C)."""
    if out.stride(0) == 1:
        torch.cat(planes, 2, out=out.t().unsqueeze(0))
    else:
        torch.cat([y.flatten(0, 2).t() for y in planes], out=out)
    return out


def parts(offsets: Tensor, packed: tuple[Tensor, ...], of_rows: tuple[Tensor, ...]) -> Iterable[tuple[Tensor, ...]]:
    """What runs at once: each long example and what belongs to it, or all short ones and the same for each position."""
    total = packed[0].shape[0]
    if worth_calls(offsets.shape[0] - 1, packed[0].numel()):
        return zip(*[examples(t, offsets) for t in packed], *of_rows, strict=True)
    index = owners(offsets, total)
    return [(*packed, *[t.index_select(0, index) for t in of_rows])]


def count_of(x: Tensor, offsets: Tensor, groups: int) -> Tensor:
    """How many elements means are of, 1 of none, (B, 1)."""
    return (offsets.diff() * (x.shape[1] // groups)).clamp(min=1).unsqueeze(1).to(x.dtype)


def to_groups(t: Tensor, groups: int) -> Tensor:
    """Sums over the channels of each group, (B, C) -> (B, G)."""
    return t.unflatten(1, (groups, -1)).sum(2)


def to_channels(t: Tensor, channels: int) -> Tensor:
    """What belongs to a group for each of its channels, (B, G) -> (B, C)."""
    return t.repeat_interleave(channels // t.shape[1], 1)
