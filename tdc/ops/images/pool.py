"""Pooling of examples of different sizes: max, average and Lp windows, max_unpool, and adaptive bins.

    x (B, C, -1, -1)    F.max_pool2d(x, 2)           -> (B, C, -1, -1), each row as large as torch makes it alone
                        F.adaptive_avg_pool2d(x, 7)  -> (B, C, 7, 7), dense: bins depend on each row's own size

A batch is pooled as one rectangle. Its padding is -inf for a maximum and 0 for a sum; an average divides by what torch
counts for an example of the row's size. Indices are positions within each row's own plane. Adaptive bins overlap and
differ in size, so they are gathered.

Padding of a maximum is put into the rectangle: in a window of nothing but padding, Inductor would look for the gradient
in front of the plane (torch 2.13).
"""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import expect_number
from tdc.core.asserts import require
from tdc.core.dtypes import rounded_once, widened
from tdc.core.dynamo import eager
from tdc.core.errors import ShapeError, UnsupportedError, describe, message
from tdc.core.rules import unsupported
from tdc.core.typing import Op
from tdc.layout.padding import valid_mask
from tdc.ops.images.planes import (
    Planes,
    Span,
    beside,
    each,
    fixed,
    kernel_text,
    plane_positions,
    planes,
    reach,
    resized,
    spatial,
)
from tdc.ops.reduce.reduction import finite
from tdc.ragged.storage import Ragged, Results, fitted


def window(op: Op, n: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> list[Span]:
    """Sizes of a result of windows; a last one that `ceil_mode` adds begins in front of the padding behind."""
    spans = []
    given = reach(op, n, kernel_size=kernel, stride=steps_of(kernel, stride), padding=padding, dilation=dilation)
    for k, s, p, d in zip(*given, strict=True):
        add = 2 * p - d * (k - 1) - 1 + s
        spans.append(Span(1, add + s - 1, s, p - 1 + s) if ceil_mode else Span(1, add, s))
    return spans


def steps_of(kernel: Any, stride: Any) -> Any:
    """The stride, by default the size of the kernel."""
    return kernel if stride is None or stride in ([], ()) else stride


def max_pool(op: Op, n: int, indexed: bool = False) -> Op:
    """The rule of max_pool in n dims; `indexed` for the function that always returns indices."""
    plane_pool: Any = F.max_pool3d if n == 3 else F.max_pool2d

    def rule(
        input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ) -> Results:  # fmt: skip
        spans = window(op, n, kernel_size, stride, padding, dilation, ceil_mode)
        wanted = indexed or return_indices
        given = kernel_size, steps_of(kernel_size, stride), padding, dilation
        kernel, steps, pads, wide = [fixed(v, n, op) for v in given]
        if any([2 * p > d * (k - 1) + 1 for k, p, d in zip(kernel, pads, wide, strict=True)]):
            expected = f"padding of at most half {kernel_text(kernel)}"
            raise ShapeError(message(op, expected, f"{tuple(pads)}", hint="F.pad puts more around"))
        p, data = planes(input, n, op, spans, kernel_text(kernel), -math.inf)
        plane = data.shape[2:]
        around = [pad for pad in reversed(pads) for _ in range(2)]
        data = F.pad(data, around, value=finite(-math.inf, data.dtype)) if any(pads) else data
        if n == 1:  # max_pool1d fixes the length in a graph (torch 2.11-2.13)
            found: Any = plane_pool(data.unsqueeze(2), (1, *kernel), (1, *steps), 0, (1, *wide), ceil_mode, wanted)
            found = tuple([t.squeeze(2) for t in found]) if wanted else found.squeeze(2)
        else:
            found = plane_pool(data, kernel, steps, 0, wide, ceil_mode, wanted)
        dense, *rest = found if wanted else (found,)
        if ceil_mode and any(pads):  # there may be one window more, which begins in padding
            for d, span in enumerate(spans):
                dense, *rest = [t.narrow(d + 2, 0, span.at(plane[d])) for t in (dense, *rest)]
        out = resized(p, dense, spans)
        if not wanted:
            return out
        index, width = rest[0], data.shape[2:]
        begin = functools.reduce(lambda at, step: at * step[1] + step[0], zip(pads, width, strict=True), 0)
        first = plane_positions(index.new_full([1] * index.ndim, begin), p.sizes, width)
        return out, beside(out, plane_positions(index, p.sizes, width) - first)

    return rule


def avg_pool(op: Op, n: int) -> Op:
    """The rule of avg_pool in n dims: sums of windows, divided by what each of them counts."""

    def rule(
        input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Ragged | Tensor:  # fmt: skip
        spans = window(op, n, kernel_size, stride, padding, 1, ceil_mode)
        if divisor_override is not None:
            expect_number(op, divisor_override, whole=True)
            if divisor_override == 0:
                raise ShapeError(message(op, "a divisor_override other than 0", "0", hint="None divides by the window"))
        kernel = fixed(kernel_size, n, op)
        steps, pads = fixed(steps_of(kernel_size, stride), n, op), fixed(padding, n, op)
        p, data = planes(input, n, op, spans, kernel_text(kernel))
        plain = (count_include_pad or not any(pads)) and not ceil_mode
        if plain or divisor_override:
            divisor = divisor_override or math.prod(kernel)
            return resized(p, sums(data, kernel, steps, pads, ceil_mode, divisor), spans)
        out = sums(widened(data), kernel, steps, pads, ceil_mode, 1)
        for d in range(n):
            count = counted(p.sizes[d], out.shape[d + 2], kernel[d], steps[d], pads[d], count_include_pad)
            out = out / count.view(-1, 1, *[1] * d, count.shape[1], *[1] * (n - 1 - d)).to(out.dtype)
        return resized(p, out.to(data.dtype), spans)

    return rule


def sums(x: Tensor, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, divisor: int) -> Tensor:
    """Sums of windows by a divisor; torch has it in two and three dims.

    With padding, the derivative on a GPU is wrong where channels are innermost, as in packed rows (torch 2.11).
    """
    x = x.contiguous() if any(padding) else x
    if len(kernel) == 3:
        return F.avg_pool3d(x, kernel, stride, padding, ceil_mode, True, divisor)
    if len(kernel) == 2:
        return F.avg_pool2d(x, kernel, stride, padding, ceil_mode, True, divisor)
    flat = F.avg_pool2d(x.unsqueeze(2), (1, *kernel), (1, *stride), (0, *padding), ceil_mode, True, divisor)
    return flat.squeeze(2)


def counted(size: Tensor, out: int, kernel: int, stride: int, padding: int, include: bool) -> Tensor:
    """Positions that torch counts in each window of an example, (B,) -> (B, out)."""
    start = torch.arange(out, device=size.device) * stride - padding
    length = size.unsqueeze(1)
    end = (start + kernel).minimum(length + padding)
    return (end - start if include else end.minimum(length) - start.clamp(min=0)).clamp(min=1)


def lp_pool(op: Op, n: int) -> Op:
    """The rule of lp_pool: torch's formula over an average."""
    average = getattr(F, f"avg_pool{n}d")

    def rule(input: Any, norm_type: float, kernel_size: Any, stride: Any = None, ceil_mode: bool = False) -> Results:
        out = average(input.pow(norm_type), kernel_size, stride, 0, ceil_mode)
        area = math.prod(fixed(kernel_size, n, op))
        return (torch.sign(out) * torch.relu(torch.abs(out)) * area).pow(1.0 / norm_type)

    return rule


def max_unpool(op: Op, n: int) -> Op:
    """The rule of max_unpool in n dims; rows are as large as windows without overlap make them."""

    def rule(
        input: Any, indices: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, output_size: Any = None
    ) -> Ragged | Tensor:
        if output_size is not None:
            hint = "leave output_size out, and F.pad the rows behind"
            raise UnsupportedError(message(op, "no output_size", "one size for rows of different sizes", hint=hint))
        if type(indices) is not type(input) or fixed_sizes(indices) != fixed_sizes(input):
            expected, hint = f"indices as max_pool gave them for {describe(input)}", "return_indices=True of max_pool"
            raise ShapeError(message(op, expected, describe(indices), hint=hint))
        indices = fitted(op, input, indices)
        steps = steps_of(kernel_size, stride)
        columns = zip(*reach(op, n, kernel_size=kernel_size, stride=steps, padding=padding), strict=True)
        spans = [Span(s, k - 2 * pad - s) for k, s, pad in columns]
        kernel = kernel_text(fixed(kernel_size, n, op))
        (p, data), (_, index) = [planes(x, n, op, spans, kernel) for x in (input, indices)]
        return resized(p, scattered(op, p, data, index, spans), spans)

    return rule


def fixed_sizes(x: Any) -> list[int]:
    """Sizes of the dims that are not ragged."""
    return [n for d, n in enumerate(x.shape) if d not in x.ragged_dims]


def scattered(op: Op, p: Planes, data: Tensor, index: Tensor, spans: list[Span]) -> Tensor:
    """A rectangle of zeros with elements at their positions. One more position, cut off, takes padding, and in a graph
    and under vmap indices outside."""
    own = [span.of(size) for span, size in zip(spans, p.sizes, strict=True)]
    width: list[Any] = [size * span.times + span.add for size, span in zip(data.shape[2:], spans, strict=True)]
    count: Any = math.prod(width)
    real = valid_mask(torch.stack(p.sizes, 1), tuple(data.shape[2:])).unsqueeze(1)
    bound = functools.reduce(torch.mul, own).view(-1, *[1] * (index.ndim - 1))
    there = (index >= 0) & (index < bound)
    hint = "pass kernel_size, stride and padding of the max_pool that found them; sizes must be what its windows cover"
    if eager():
        text = message(op, "indices inside the result of each row", "one outside", hint=hint)
        require((there | ~real).all(), text, ShapeError)
    at = torch.where(real & there, plane_positions(index, own, width, back=True), count).flatten(2)
    zeros = data.new_zeros((*data.shape[:2], count + 1))
    return zeros.scatter(2, at, data.flatten(2))[:, :, :count].view(*data.shape[:2], *width)


# -- bins whose number is given

Todo = list[tuple[int, Tensor, Tensor]]  # a dim, and of its bins positions and which of them are inside


def adaptive_avg(op: Op, n: int) -> Op:
    """The rule of adaptive_avg_pool in n dims."""

    def rule(input: Any, output_size: Any) -> Ragged | Tensor:
        p, data, spans, todo = adaptive(op, n, output_size, input, 0.0)
        return resized(p, rounded_once(lambda x: averaged(x, todo), data), spans)

    return rule


def adaptive_max(op: Op, n: int, indexed: bool = False) -> Op:
    """The rule of adaptive_max_pool in n dims: the first of the largest, the last dim first."""

    def rule(input: Any, output_size: Any, return_indices: bool = False) -> Results:
        p, x, spans, todo = adaptive(op, n, output_size, input, -math.inf)
        width = x.shape[2:]
        index = torch.arange(math.prod(width), device=x.device).view(1, 1, *width)
        found = plane_positions(index, p.sizes, width).expand(x.shape)
        for dim, position, inside in todo:
            parts = taken(x, dim, position)
            parts = parts.masked_fill(~inside.view(*inside.shape, *[1] * (x.ndim - 2)), finite(-math.inf, x.dtype))
            out, which = parts.max(2)
            x = out.movedim(1, dim)
            found = taken(found, dim, position).gather(2, which.unsqueeze(2)).squeeze(2).movedim(1, dim)
        out = resized(p, x, spans)
        return (out, beside(out, found)) if indexed or return_indices else out

    return rule


def adaptive(op: Op, n: int, output_size: Any, x: Any, fill: float) -> tuple[Planes, Tensor, list[Span | int], Todo]:
    """A batch, its rectangle, the sizes of its result, and what is to be pooled, the last dim first.

    Sizes stay where `output_size` has None.
    """
    wanted = each(output_size, n, op)
    expect_number(op, *[size for size in wanted if size is not None], whole=True)
    if any([size is not None and size < 0 for size in wanted]):
        raise ShapeError(message(op, "an output_size of 0 or more", f"{wanted}", hint="None keeps a dim as it is"))
    p, data = planes(x, n, op, [Span()] * n, "adaptive bins", fill)
    todo: Todo = []
    for d, size in reversed([*enumerate(wanted)]):
        longest = data.shape[d + 2]
        if size is not None:
            todo.append((d + 2, *bins(p.sizes[d], size, size, longest, -(-longest // max(size, 1)))))
    return p, data, [Span() if size is None else size for size in wanted], todo


def averaged(x: Tensor, todo: Todo) -> Tensor:
    """Means of bins along some dims."""
    for dim, position, inside in todo:
        ones = [1] * (x.ndim - 2)
        parts = taken(x, dim, position).masked_fill(~inside.view(*inside.shape, *ones), 0)
        count = inside.sum(2).clamp(min=1).view(*inside.shape[:2], *ones).to(x.dtype)
        x = (parts.sum(2) / count).movedim(1, dim)
    return x


def bins(size: Tensor, count: Any, out: int, longest: int, widest: int) -> tuple[Tensor, Tensor]:
    """Positions of `count` adaptive bins of each row, and which are inside: (B,) -> (B, out, W).

    `widest` is the longest row divided by its bins, rounded up.
    """
    index = torch.arange(out, device=size.device)
    length = size.unsqueeze(1)
    total = count.unsqueeze(1) if isinstance(count, Tensor) else max(count, 1)
    start = index * length // total
    end = ((index + 1) * length + total - 1) // total
    position = start.unsqueeze(2) + torch.arange(widest + 1, device=size.device)
    return position.clamp(max=longest - 1), position < end.unsqueeze(2)


def taken(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Elements of each row along a dim: (B, ..., P, ...), (B, *Q) -> (B, *Q, ...), the other dims in order."""
    moved = x.movedim(dim, 1)
    rows = torch.arange(index.shape[0], device=index.device).view(-1, *[1] * (index.ndim - 1)) * moved.shape[1]
    flat = moved.reshape(moved.shape[0] * moved.shape[1], *moved.shape[2:])
    return flat.index_select(0, (rows + index).flatten()).view(*index.shape, *moved.shape[2:])


RANDOM = "the regions of its windows are random, and would differ from those of an example by itself"

for _name, _rule in (
    ("max_pool{}d", max_pool),
    ("max_pool{}d_with_indices", partial(max_pool, indexed=True)),
    ("avg_pool{}d", avg_pool),
    ("lp_pool{}d", lp_pool),
    ("max_unpool{}d", max_unpool),
    ("adaptive_avg_pool{}d", adaptive_avg),
    ("adaptive_max_pool{}d", adaptive_max),
    ("adaptive_max_pool{}d_with_indices", partial(adaptive_max, indexed=True)),
):
    for _n in (1, 2, 3):
        _op: Any = getattr(F, _name.format(_n))
        _aliases = [getattr(torch, _name.format(_n))] if _rule is max_pool else []
        spatial(_op, _rule(_op, _n), _n, "pool", *_aliases)
for _op in (
    F.fractional_max_pool2d, F.fractional_max_pool3d, F.fractional_max_pool2d_with_indices,
    F.fractional_max_pool3d_with_indices,
):  # fmt: skip
    unsupported(_op, ["nested", "masked"], RANDOM, family="pool", hint="max_pool2d, or loop over x.unbind()")
