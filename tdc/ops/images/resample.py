"""Resampling of examples of different sizes: interpolate, grid_sample, unfold.

    x (B, C, -1, -1)    F.interpolate(x, scale_factor=2)   -> (B, C, -1, -1), each row scaled by itself
                        F.interpolate(x, size=(32, 32))    -> (B, C, 32, 32), dense
                        F.interpolate(x, size=y)           -> (B, C, -1, -1), each row as large as that of y
                        F.grid_sample(x, grid)             -> (B, C, H, W), dense; a grid speaks of each row's own plane
                        F.unfold(x, 3)                     -> (B, C * 9, -1), the blocks of each row

A result along one dim is a sum of a few elements (taps) at positions that depend on the row's own size, and dims are
resampled one after another; with antialias it is a sum of all, most of whose weights are 0. Positions stop at the row's
own ends, so that nothing behind them is read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import expect_number
from tdc.core.dtypes import widened
from tdc.core.dynamo import hold, larger
from tdc.core.errors import DtypeError, ShapeError, StructureError, UnsupportedError, describe, message
from tdc.core.ragged_size import RaggedSize
from tdc.core.rules import define, note_syncs, unsupported
from tdc.ops.images.planes import Span, each, fixed, kernel_text, measured, planes, reach, resized, spatial
from tdc.ops.images.pool import averaged, bins, taken
from tdc.ops.rectangle import repacked, with_sizes
from tdc.ragged.storage import Ragged, is_ragged

Taps = list[tuple[Tensor, Tensor | None]]
MODES = {
    "nearest": 0, "nearest-exact": 0, "linear": 1, "bilinear": 2, "trilinear": 3, "bicubic": 2, "area": 0,
}  # fmt: skip


def interpolate(
    input: Any, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> Ragged | Tensor:  # fmt: skip
    """Rows of a size in common or of another batch (`size`), or each as many times as large (`scale_factor`)."""
    n = input.ndim - 2
    check_mode(input, n, size, scale_factor, mode, align_corners, antialias)
    if is_ragged(size):
        return sized_as(input, size, n, mode, bool(align_corners), antialias)
    scales = None
    if scale_factor is not None:  # integers keep sizes exact
        scales = [int(s) if float(s).is_integer() else float(s) for s in each(scale_factor, n, "interpolate")]
    spans = [Span()] * n if scales is None else [Span(s) for s in scales]
    what = "a new size" if scales is None else f"scales {' x '.join([f'{s}' for s in scales])}"
    p, x = planes(input, n, "interpolate", spans, what)
    wide = widened(x)
    follows = scales is None or recompute_scale_factor or mode == "area"
    ratios = None if follows else steps(mode, p.sizes, spans, antialias)
    for d in reversed(range(n)):
        own, longest = p.sizes[d], x.shape[d + 2]
        out: Any = each(size, n, "interpolate")[d] if scales is None else spans[d].at(longest)
        target = own.new_full(own.shape, out) if scales is None else spans[d].of(own)
        if mode == "area":
            widest = (longest + out - 1) // out if scales is None else math.ceil(1 / scales[d]) + 1
            wide = averaged(wide, [(d + 2, *bins(own, target, out, longest, widest))])
            continue
        step = None if ratios is None else ratios[d]
        wide = along(wide, d + 2, mode, own, target, out, step, bool(align_corners), antialias)
    return resized(p, wide.to(x.dtype), [None] * n if scales is None else spans)


def sized_as(x: Any, like: Any, n: int, mode: str, align: bool, antialias: bool) -> Ragged:
    """Rows resized to those of another batch, whose structure the result has."""
    op = "interpolate"
    if type(like) is not type(x) or like.batch_size[0] != x.batch_size[0]:
        expected, got = f"sizes of a batch like {describe(x)}", describe(like)
        raise StructureError(message(op, expected, got, hint="x.to_padded() and x.to_packed() convert"))
    if mode == "area":
        hint = "mode='bilinear', or a size in common"
        raise UnsupportedError(message(op, "taps at positions for sizes of a batch", "'area'", hint=hint))
    p, data = planes(x, n, op, [Span()] * n, "a new size")
    to, wide = measured(like, n, op, [Span()] * n, "a new size"), widened(data)
    for d in reversed(range(n)):
        wide = along(wide, d + 2, mode, p.sizes[d], to.sizes[d], to.widest[d], None, align, antialias)
    return repacked(wide.to(x.dtype), like)


def along(
    x: Tensor, dim: int, mode: str, own: Tensor, target: Tensor, out: int, step: Tensor | None, align: bool,
    antialias: bool,
) -> Tensor:  # fmt: skip
    """One dim resampled, of rows of sizes `own` before and `target` after, `out` the longest."""
    if antialias:
        return filtered(x, dim, mode, own, target, out, step, align)
    return combined(x, dim, taps(mode, own, target, out, step, align, x.dtype))


def check_mode(
    x: Any, n: int, size: Any, scale_factor: Any, mode: str, align_corners: bool | None, antialias: bool
) -> None:
    """Refuse wrong arguments of interpolate: sizes, scales, modes for other dims, antialias, averages of integers."""
    if (size is None) == (scale_factor is None):
        got = "none" if size is None else "both"
        raise ShapeError(message("interpolate", "one of size and scale_factor", got, hint="scale_factor=2"))
    wanted = each(scale_factor if size is None else size, n, "interpolate") if not is_ragged(size) else ()
    if any([isinstance(number, RaggedSize) for number in wanted]):
        got, hint = "the size of a ragged dim, which is another one in each row", "size=y, for the sizes of a batch y"
        raise ShapeError(message("interpolate", "sizes that are numbers", got, hint=hint))
    expect_number("interpolate", *wanted)
    name, end = ("scale_factor", " and finite") if size is None else ("size", "")
    if not all([number > 0 and (scale_factor is None or number < math.inf) for number in wanted]):
        raise ShapeError(message("interpolate", f"{name} above 0{end}", f"{wanted}", hint=f"{name}=2"))
    if mode not in MODES or MODES[mode] not in (0, n):
        fit = [m for m, dims in MODES.items() if dims in (0, n)]
        expected, got = f"a mode for {n} dims behind the channels", f"{mode!r} for {describe(x)}"
        raise ShapeError(message("interpolate", expected, got, hint=f"one of {', '.join(fit)}"))
    if antialias and mode not in ("bilinear", "bicubic"):
        hint = "mode='bilinear' or 'bicubic', of images"
        raise ShapeError(message("interpolate", "a mode with a filter for antialias=True", repr(mode), hint=hint))
    if not x.dtype.is_floating_point and not mode.startswith("nearest"):
        raise DtypeError(message("interpolate", f"floating point for {mode!r}", describe(x), hint="x.float()"))
    if align_corners is not None and MODES[mode] == 0:
        hint = "leave it out"
        raise ShapeError(message("interpolate", "align_corners for a linear or cubic mode", repr(mode), hint=hint))


def steps(
    mode: str, own: Sequence[Tensor], spans: Sequence[Span], antialias: bool = False
) -> list[Tensor | None]:
    """The steps from position to position of a result along each dim, (B,); None where that follows from the sizes.

    torch 2.13 copies a dim whose size happens to stay, whatever the scale. On CPU linear modes and those with antialias
    do so by the dim, and so does "nearest" of images of up to 128 rows and columns together, where a size that happens
    to double repeats each element, too. On other devices linear and cubic modes copy what keeps all its sizes.
    """
    if all([isinstance(span.times, int) for span in spans]):  # scales that are whole say what the sizes say
        return [None] * len(own)
    targets = [span.of(size) for span, size in zip(spans, own, strict=True)]
    here, linear = own[0].device.type == "cpu", antialias or (MODES[mode] > 0 and mode != "bicubic")
    stays = [a == b for a, b in zip(own, targets, strict=True)]
    if not here:
        stays = [functools.reduce(torch.logical_and, stays)] * len(own)
    found: list[Tensor | None] = []
    for size, target, span, stay in zip(own, targets, spans, stays, strict=True):
        step = torch.full_like(size, 1.0 / span.times, dtype=torch.float64)
        if linear or (mode == "bicubic" and not here):
            step = step.masked_fill(stay, 1.0)
        elif mode == "nearest" and here and len(own) == 2:
            small = targets[0] + targets[1] <= 128
            step = step.masked_fill(stay & small, 1.0).masked_fill((target == 2 * size) & small, 0.5)
        found.append(step)
    return found


def taps(mode: str, own: Tensor, target: Tensor, out: int, step: Tensor | None, align: bool, dtype: Any) -> Taps:
    """The elements of a row that make those of its result, and their weights: (B, out) each.

    Rows have sizes `own` before and `target` after; `step` is as `steps` gives it. Positions are as exact as torch
    computes them for the dtype of the elements.
    """
    fine = torch.float64 if dtype == torch.float64 and not mode.startswith("nearest") else torch.float32
    position = torch.arange(out, device=own.device, dtype=fine)
    before, after = own.unsqueeze(1), target.unsqueeze(1)
    step = before.to(fine) / after if step is None else step.to(fine).unsqueeze(1)
    last = before - 1
    if mode.startswith("nearest"):
        index = ((position + 0.5) * step if mode == "nearest-exact" else position * step).floor().long()
        return [(index.minimum(last).clamp(min=0).expand(own.shape[0], out), None)]
    if align:
        source = position * (last.to(fine) / (after - 1).clamp(min=1)) * (after > 1)
    else:
        source = (position + 0.5) * step - 0.5
    source = source.expand(own.shape[0], out)
    if mode == "bicubic":
        first = source.floor()
        part = source - first
        return [
            ((first.long() + k).minimum(last).clamp(min=0), weight)
            for k, weight in zip((-1, 0, 1, 2), cubic(part), strict=True)
        ]
    source = source.clamp(min=0)
    first = source.long().minimum(last)
    part = (source - first).clamp(0, 1)
    return [(first, 1 - part), ((first + 1).minimum(last), part)]


def cubic(t: Tensor) -> list[Tensor]:
    """Weights of the two elements before a position and the two behind it; torch's a = -0.75."""
    a = -0.75

    def far(x: Tensor) -> Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    def near(x: Tensor) -> Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def filtered(
    x: Tensor, dim: int, mode: str, own: Tensor, target: Tensor, out: int, step: Tensor | None, align: bool
) -> Tensor:
    """A dim resampled with antialias: a product with the weights of each row's elements, (B, out, L).

    The filter of a row that shrinks is as much wider. Weights are those of `taps` where a row grows, but for the cubic
    ones, whose a is -0.5 as in torch. torch 2.13 to 2.15 on CPU is wrong for one column or row.
    """
    fine = torch.float64 if x.dtype == torch.float64 else torch.float32
    before, after = own.view(-1, 1, 1).to(fine), target.view(-1, 1, 1)
    if align:
        scale = (before - 1) / (after - 1).clamp(min=1) * (after > 1)
    else:
        scale = before / after if step is None else step.to(fine).view(-1, 1, 1)
    middle = (torch.arange(out, device=x.device, dtype=fine).unsqueeze(1) + 0.5) * scale
    place = torch.arange(x.shape[dim], device=x.device, dtype=fine)
    away = ((place + 0.5 - middle) / scale.clamp(min=1)).abs()
    if mode == "bicubic":
        near, far = ((1.5 * away - 2.5) * away * away + 1), -0.5 * (((away - 5) * away + 8) * away - 4)
        weights = torch.where(away < 1, near, far.masked_fill(away >= 2, 0))
    else:
        weights = (1 - away).clamp(min=0)
    weights = weights.masked_fill(place >= before, 0)
    total = weights.sum(-1, keepdim=True)
    weights = (weights / total.masked_fill(total == 0, 1)).to(x.dtype)
    moved = x.movedim(dim, 1)
    return (weights @ moved.flatten(2)).view(x.shape[0], out, *moved.shape[2:]).movedim(1, dim)


def combined(x: Tensor, dim: int, parts: Taps) -> Tensor:
    """Weighted sums of elements along a dim."""
    ones = [1] * (x.ndim - 2)
    terms = []
    for index, weight in parts:
        term = taken(x, dim, index)
        terms.append(term if weight is None else term * weight.to(x.dtype).view(*weight.shape, *ones))
    return functools.reduce(torch.add, terms).movedim(1, dim)


def grid_sample(
    input: Any, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Tensor:
    """Values at positions of each row's own plane: the grid is dense, and so is the result.

    Positions become those of the rectangle; padding other than zeros folds them into the row first.
    """
    n, align = input.ndim - 2, bool(align_corners)
    if not isinstance(grid, Tensor):
        hint = "pad the grid: grid.to_padded().data"
        raise ShapeError(message("grid_sample", f"a dense grid (B, ..., {n})", describe(grid), hint=hint))
    if mode == "bicubic" and padding_mode != "zeros":
        hint = "padding_mode='zeros', or mode='bilinear'"
        raise UnsupportedError(message("grid_sample", "bicubic with zeros", repr(padding_mode), hint=hint))
    p, data = planes(input, n, "grid_sample", [Span()] * n, "a grid")
    parts = []
    for d in range(n):  # the last dim of a grid counts from the last dim of a plane
        at = n - 1 - d
        own = p.sizes[at].view(-1, *[1] * n).to(grid.dtype)
        parts.append(placed(grid[..., d], own, data.shape[at + 2], mode, padding_mode, align))
    return F.grid_sample(data, torch.stack(parts, -1), mode, "zeros", align)


def placed(grid: Tensor, own: Tensor, longest: int, mode: str, padding_mode: str, align: bool) -> Tensor:
    """A grid along one dim of each row as one of the rectangle.

    Positions on an element are kinks, whose slope torch takes from one side. So a grid is scaled, which changes no
    bit for a row as long as the rectangle; only folded or rounded positions are computed anew.
    """
    less = int(align)  # with align_corners a grid counts between the middles of the first and the last element
    spread = larger(longest - less, 1)  # a row of one element has nothing between
    position = ((grid + 1) * (own - less) - (1 - less)) / 2
    result = (grid + 1) * ((own - less) / spread) - 1

    def counted(x: Tensor) -> Tensor:
        return (2 * x + 1 - less) / spread - 1

    if padding_mode == "reflection":
        low, high = (0.0, own - 1) if align else (-0.5, own - 0.5)
        folded, kept = reflected(position, low, high), (position > low) & (position < high)
        position, result = folded, torch.where(kept, result, counted(folded))
    if mode == "nearest":
        inside = position if padding_mode == "zeros" else position.clamp(min=0).minimum(own - 1)
        return counted(inside.round())
    if padding_mode != "zeros":  # no clamp: torch has no slope on the ends themselves
        result = torch.where(position < own - 1, result, counted(own - 1))
        result = torch.where(position > 0, result, counted(torch.zeros_like(own)))
    return result


def reflected(position: Tensor, low: Any, high: Any) -> Tensor:
    """Positions folded at both ends of a row."""
    span = (high - low).clamp(min=1e-6)
    rest = (position - low).abs()
    folds = (rest / span).floor()
    rest = rest - folds * span
    return torch.where(folds % 2 == 0, rest + low, high - rest)


def unfold(input: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Ragged:
    """Blocks of each image, one after another: `(B, C, -1, -1) -> (B, C * k, -1)`."""
    given = reach("unfold", 2, kernel_size=kernel_size, dilation=dilation, padding=padding, stride=stride)
    columns = zip(*given, strict=True)
    spans = [Span(1, 2 * pad - d * (k - 1) - 1 + s, s) for k, d, pad, s in columns]
    p, data = planes(input, 2, "unfold", spans, kernel_text(fixed(kernel_size, 2, "unfold")))
    width = (data.shape[3] + spans[1].add) // spans[1].by
    blocks = F.unfold(data, kernel_size, dilation, padding, stride)
    hold(blocks.shape[2] != 0)  # what the derivative asks
    high, wide = [span.of(size) for span, size in zip(spans, p.sizes, strict=True)]
    position, own = torch.arange(blocks.shape[2], device=blocks.device), wide.unsqueeze(1)
    index = (position // own * width + position % own).clamp(max=blocks.shape[2] - 1)
    return with_sizes(taken(blocks, 2, index).movedim(1, 2), input, (high * wide).unsqueeze(1), (2,))


spatial(F.interpolate, interpolate, None, "resample")
spatial(F.unfold, unfold, 2, "resample")
define(F.grid_sample, "resample", ragged=grid_sample)
DENSE = "theta that is ragged; it has one matrix for each example"
unsupported(F.affine_grid, ["nested", "masked"], DENSE, family="resample", hint="pass theta as a dense tensor")
note_syncs("the number of windows", F.unfold, kinds=("nested",))
