"""Images of different sizes cut into windows and put together again, and a random share of their patches.

    x (B, C, -1, -1)    window_partition(x, 7)              -> (B, -1, C, 7, 7), the windows of each image
    x (B, C * 9, -1)    F.fold(x, images, 3)                -> (B, C, -1, -1), sums of blocks, as large as each image
    x (B, -1, D)        random_masking(x, 0.75)             -> (B, -1, D), a quarter of each example's positions
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import expect, expect_number
from tdc.core.asserts import require
from tdc.core.errors import ShapeError, StructureError, describe, message
from tdc.core.rules import define
from tdc.core.typing import OpName
from tdc.ops.images.planes import Planes, Span, kernel_text, measured, planes, reach, resized
from tdc.ops.images.pool import taken
from tdc.ops.rectangle import rectangle, repacked
from tdc.ragged.index import truncate
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import Ragged, is_ragged


def window_partition(x: Any, window_size: int | tuple[int, int]) -> Any:
    """Cut each image into windows that do not overlap, row by row, with zeros behind its last row and column.

    Packed, `.values` are the windows of all images as one dense batch `(W, C, h, w)`: window attention and other
    modules of one size run on it. Windows of one image never hold pixels of another, nor padding but their own.

    Args:
        window_size: height and width `(h, w)`, one number for both.

    Shapes:
        x `(B, C, -1, -1)`, one of the sizes may be static -> `(B, -1, C, h, w)`, `ceil(H / h) * ceil(W / w)` windows of
        each image. Any dtype.

    Raises:
        DtypeError: not a ragged batch, or a window size that is not a number.
        ShapeError: other dims, an image without pixels, or a window size below 1.

    Compile:
        One graph for all sizes. The number of windows is read from the data.

    Source:
        `window_partition` of Swin Transformer and of Segment Anything, on each image.

    Example:
        >>> import torch
        >>> from tdc.ragged.pack import pack
        >>> x = pack([torch.ones(3, 8, 5), torch.ones(3, 4, 4)], ragged_dim=(2, 3))
        >>> windows = window_partition(x, 4)
        >>> windows.lengths, windows.values.shape
        (tensor([4, 1]), torch.Size([5, 3, 4, 4]))
    """
    op = "window_partition"
    expect(op, x, NestedTensor, MaskedBatch)
    h, w = reach(op, 2, window_size=window_size)[0]
    spans = [Span(1, h - 1, h), Span(1, w - 1, w)]
    p, data = planes(x, 2, op, [Span(), Span()], "windows")
    rows, columns = [s.at(n) for s, n in zip(spans, data.shape[2:], strict=True)]
    data = sized(sized(data, 2, rows * h), 3, columns * w)
    parts = data.unflatten(3, (columns, w)).unflatten(2, (rows, h)).permute(0, 1, 3, 5, 2, 4)
    grid: Any = resized(p, parts.flatten(1, 3), spans)
    return grid.flatten(2).transpose(1, 2).unflatten(2, (data.shape[1], h, w))


def window_unpartition(windows: Any, like: Any) -> Any:
    """Put the windows of `window_partition` together again; the inverse, which cuts what was behind the images.

    Args:
        like: the batch that was cut, or another one of its sizes.

    Shapes:
        windows `(B, -1, D, h, w)` and like `(B, C, -1, -1)` -> `(B, D, -1, -1)`.

    Raises:
        DtypeError: not ragged batches.
        StructureError: another container, or another number of windows than the images have.
        ShapeError: other dims.

    Compile:
        One graph for all sizes.

    Source:
        `window_reverse` of Swin Transformer, `window_unpartition` of Segment Anything, on each image.

    Example:
        >>> import torch
        >>> from tdc.ragged.pack import pack
        >>> x = pack([torch.ones(3, 8, 5), torch.ones(3, 4, 4)], ragged_dim=(2, 3))
        >>> window_unpartition(window_partition(x, 4), x).sizes.tolist()
        [[8, 5], [4, 4]]
    """
    op = "window_unpartition"
    expect(op, windows, NestedTensor, MaskedBatch, of=" of windows")
    expect(op, like, type(windows), of=" of images")
    if windows.ndim != 5 or windows._batch_dim or windows.ragged_dims != (1,):
        hint = "window_partition makes them"
        raise ShapeError(message(op, "windows (B, -1, D, h, w)", describe(windows), hint=hint))
    p = measured(like, 2, op, [Span(), Span()], "windows")
    data = rectangle(windows, 0)
    h, w = data.shape[3:]
    data = in_grid(op, windows, data, p, (Span(1, h - 1, h), Span(1, w - 1, w)))[0]
    image = data.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
    return repacked(sized(sized(image, 2, p.widest[0]), 3, p.widest[1]), like)


def sized(x: Tensor, dim: int, size: int) -> Tensor:
    """The first elements along a dim, and zeros behind them; without a guard on whether there are any."""
    place, ones = torch.arange(size, device=x.device), [1] * (x.ndim - 1 - dim)
    out = x.index_select(dim, place.clamp(max=x.shape[dim] - 1))
    return out.masked_fill((place >= x.shape[dim]).view(-1, *ones), 0)


def in_grid(
    op: OpName, parts: Any, data: Tensor, p: Planes, spans: tuple[Span, Span]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A rectangle `(B, P, *S)` of the parts of each image as one of their places, `(B, rows, columns, *S)`, and which
    places an image has, `(B, rows, columns)`; those that it lacks hold any of its parts."""
    high, wide = [span.of(size) for span, size in zip(spans, p.sizes, strict=True)]
    text = message(op, "as many parts as the images have", "others", hint="pass the batch that was cut")
    if parts.batch_size[0] != high.shape[0]:
        raise StructureError(text)
    lengths = parts.lengths if isinstance(parts, NestedTensor) else parts.lengths[:, 0]
    require((lengths == high * wide).all(), text, StructureError)
    rows, columns = [torch.arange(s.at(n), device=data.device) for s, n in zip(spans, p.widest, strict=True)]
    index = rows[:, None] * wide[:, None, None] + columns
    has = (rows[:, None] < high[:, None, None]) & (columns < wide[:, None, None])
    return taken(data, 1, index.clamp(max=data.shape[1] - 1)), has


def fold(
    input: Any, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Ragged:  # fmt: skip
    """Blocks of `F.unfold` summed where they overlap: `(B, C * k, -1) -> (B, C, -1, -1)`, as large as the images of the
    batch `output_size`."""
    op, like = "fold", output_size
    if not is_ragged(like):
        hint = "F.fold(blocks, images, ...) of the batch that was cut; F.fold(x.to_padded().data, ...) for one size"
        raise StructureError(message(op, "a batch of images as output_size", describe(like), hint=hint))
    expect(op, like, type(input), of=" as output_size")
    given = reach(op, 2, kernel_size=kernel_size, dilation=dilation, padding=padding, stride=stride)
    kernel, what = given[0], kernel_text(given[0])
    if input.ndim != 3 or input._batch_dim or input.ragged_dims != (2,):
        raise ShapeError(message(op, "blocks (B, C * k, -1)", describe(input), hint="F.unfold makes them"))
    if input.shape[1] % (kernel[0] * kernel[1]):
        hint = "channels times positions of the kernel, as F.unfold makes them"
        raise ShapeError(message(op, f"channels that {what} divides", f"{input.shape[1]}", hint=hint))
    first, second = [Span(1, 2 * pad - d * (k - 1) - 1 + s, s) for k, d, pad, s in zip(*given, strict=True)]
    p = measured(like, 2, op, (first, second), what)
    places, has = in_grid(op, input, rectangle(input, 0).transpose(1, 2), p, (first, second))
    blocks = places.masked_fill(~has.unsqueeze(-1), 0).flatten(1, 2).transpose(1, 2)
    return repacked(F.fold(blocks, p.widest, *given), like)


def random_masking(x: Any, mask_ratio: float, noise: Any = None) -> tuple[Any, Any, Any]:
    """Keep a random share of each example's positions, as masked autoencoders do.

    Args:
        mask_ratio: the share that is removed; of L positions `int(L * (1 - mask_ratio))` stay.
        noise: a batch `(B, -1)` whose smallest numbers stay; uniform by default.

    Shapes:
        x `(B, -1, *S)` -> what is kept `(B, -1, *S)` in random order; a bool batch `(B, -1)`, True where a position was
        removed; and `ids_restore` `(B, -1)`, int64. What is kept, with one token for each position that was removed
        behind it, has its first order as `torch.cat([kept, tokens], 1)[:, ids_restore]`.

    Raises:
        DtypeError: not a ragged batch, or a ratio that is not a number.
        ShapeError: a ratio outside of [0, 1], or another ragged dim than the first one.
        StructureError: noise of other lengths.

    Compile:
        One graph for all lengths. The number of positions that stay is read from the data.

    Source:
        `random_masking` of masked autoencoders (MAE), on each example.

    Example:
        >>> import torch
        >>> from tdc.ragged.pack import pack
        >>> x = pack([torch.ones(8, 2), torch.ones(4, 2)])
        >>> kept, removed, ids_restore = random_masking(x, 0.75)
        >>> kept.lengths, removed.sum(1)
        (tensor([2, 1]), tensor([6, 3]))
    """
    op = "random_masking"
    expect(op, x, NestedTensor, MaskedBatch)
    expect_number(op, mask_ratio)
    if not 0 <= mask_ratio <= 1:
        raise ShapeError(message(op, "a mask_ratio in [0, 1]", f"{mask_ratio}", hint="mask_ratio=0.75"))
    if x._batch_dim or x.ragged_dims != (1,):
        hint = "x.flatten(2).transpose(1, 2) makes patches of images (B, D, -1, -1)"
        raise ShapeError(message(op, "patches (B, -1, D)", describe(x), hint=hint))
    like = torch.zeros_like(x if x.ndim == 2 else x.flatten(2).select(2, 0), dtype=torch.float32)  # (B, -1)
    noise = torch.rand_like(like) if noise is None else noise + like
    order = noise.argsort(1)
    ids_restore = order.argsort(1)
    lengths = x.lengths if isinstance(x, NestedTensor) else x.lengths[:, 0]
    keep = (lengths.double() * (1 - mask_ratio)).long()
    return x[:, truncate(order, keep)], ids_restore >= keep.unsqueeze(1), ids_restore


define(F.fold, "resample", ragged=fold)
