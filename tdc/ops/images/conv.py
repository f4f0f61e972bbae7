"""Convolution of examples of different sizes: conv and conv_transpose in one, two and three dims.

    x (B, C, -1), weight (D, C, K)    nn.Conv1d(C, D, K)(x) -> (B, D, -1), each row as long as torch makes it alone
    x (B, C, -1, -1)                  images; `padding_mode` of a module other than zeros goes through F.pad

A kernel of one position is a matrix for each position. Larger ones run the operator of packed rows on CPU, which for a
transposed convolution is the gradient of a convolution, and rectangles elsewhere.

With stride 1 in one ragged dim the packed total of a result follows from that of x; with another stride it is read
from the lengths (a size that the graph does not know, under compile).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from tdc.core.dtypes import as_autocast
from tdc.core.dynamo import known
from tdc.core.errors import ShapeError, describe, message
from tdc.core.operators import unserved
from tdc.core.typing import Op
from tdc.kernels.convolution import convolve
from tdc.ops.images.planes import (
    Planes,
    Span,
    expect_batch,
    kernel_text,
    measured,
    on_rectangles,
    plane_rows,
    reach,
    sizes_after,
    spatial,
)
from tdc.ragged.nested import NestedTensor


def kernel_of(op: Op, weight: Tensor, n: int) -> tuple[int, ...]:
    """The sizes of the kernel; a ShapeError for a weight of other dims."""
    if weight.ndim != n + 2:
        raise ShapeError(message(op, f"a weight of {n + 2} dims", describe(weight), hint="(out, in, *kernel)"))
    if any([known(k == 0) for k in weight.shape[2:]]):
        raise ShapeError(message(op, "a kernel of at least one position", describe(weight), hint="(out, in, *kernel)"))
    return weight.shape[2:]


class Windows(NamedTuple):
    """The windows of a convolution.

    Attributes:
        spans: sizes of results.
        steps, pads, wide: from window to window, around an example, and from number to number of the kernel.
        uneven: one position more is put behind an example than before.
        alone: each position reads itself only.
        what: the kernel, for errors.
    """

    spans: tuple[Span, ...]
    steps: tuple[int, ...]
    pads: tuple[int, ...]
    wide: tuple[int, ...]
    uneven: bool
    alone: bool
    what: str


def windows(op: Op, n: int, kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any) -> Windows:
    """The windows of a convolution; a ShapeError for arguments that torch refuses."""
    if isinstance(padding, str) and padding not in ("same", "valid"):
        hint = "a number of positions on each side, or one of these two"
        raise ShapeError(message(op, "padding='same' or 'valid'", f"{padding!r}", hint=hint))
    around = 0 if isinstance(padding, str) else padding
    steps, wide, pads = reach(op, n, stride=stride, dilation=dilation, padding=around)
    if padding == "same" and any([s != 1 for s in steps]):
        hint = "padding=(k - 1) // 2 for an odd kernel of size k"
        raise ShapeError(message(op, "stride 1 where padding='same'", f"stride {stride}", hint=hint))
    beyond = [d * (k - 1) for k, d in zip(kernel, wide, strict=True)]
    both = beyond if padding == "same" else [2 * p for p in pads]
    spans = tuple([Span(1, p - more - 1 + s, s) for p, more, s in zip(both, beyond, steps, strict=True)])
    if padding == "same":
        pads = tuple([more // 2 for more in beyond])
    uneven = padding == "same" and any([more % 2 for more in beyond])
    return Windows(spans, steps, pads, wide, uneven, alone(kernel, steps, pads), kernel_text(kernel))


def conv(op: Op, n: int) -> Op:
    """The rule of conv in n dims."""

    def rule(
        input: Any, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1,
    ) -> Any:  # fmt: skip
        expect_batch(op, input)
        w = windows(op, n, kernel_of(op, weight, n), stride, padding, dilation)
        m = measured(input, n, op, w.spans, w.what)
        if groups == 1 and w.alone and suits(input, weight, bias, groups):
            return by_position(input, weight.flatten(1), bias)
        if not w.uneven and on_rows(input, weight, bias, groups):
            return convolved(m, w.spans, weight, bias, (w.steps, w.pads, w.wide), groups)
        how = stride, padding, dilation, groups
        return on_rectangles(m, w.spans, lambda t: op(t, weight, bias, *how), weight, math.prod(w.steps))

    return rule


def conv_transpose(op: Op, n: int) -> Op:
    """The rule of conv_transpose in n dims."""

    def rule(
        input: Any, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
        output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
    ) -> Any:  # fmt: skip
        expect_batch(op, input)
        kernel = kernel_of(op, weight, n)
        given = reach(op, n, stride=stride, padding=padding, output_padding=output_padding, dilation=dilation)
        columns = zip(*given, kernel, strict=True)
        spans = [Span(s, d * (k - 1) + 1 + o - 2 * pad - s) for s, pad, o, d, k in columns]
        m = measured(input, n, op, spans, kernel_text(kernel))
        steps, pads, beyond, wide = given
        if groups == 1 and alone(kernel, steps, [*pads, *beyond]) and suits(input, weight, bias, groups, True):
            return by_position(input, weight.flatten(1).t(), bias)
        covered = all([o < s for o, s in zip(beyond, steps, strict=True)])  # no window more fits into a result
        if covered and on_rows(input, weight, bias, groups, True):
            return convolved(m, spans, weight, bias, (steps, pads, wide), groups, transposed=True)
        how = stride, padding, output_padding, groups, dilation
        return on_rectangles(m, spans, lambda t: op(t, weight, bias, *how), weight)

    return rule


def alone(kernel: Sequence[int], steps: Sequence[int], pads: Sequence[int]) -> bool:
    """True if each position of a result reads the same position of the operand, and no other."""
    return math.prod(kernel) == math.prod(steps) == 1 and not any(pads)


def suits(x: Any, weight: Tensor, bias: Tensor | None, groups: int, transposed: bool = False) -> bool:
    """True if weights suit a packed batch; what torch refuses goes to torch."""
    given = [weight] if bias is None else [weight, bias]
    if not isinstance(x, NestedTensor) or not all([t.device == x.device for t in given]):
        return False
    dtypes = {t.dtype for t in as_autocast(x.values, *given)}
    if not (x.dtype.is_floating_point and len(dtypes) == 1 and isinstance(groups, int) and groups > 0):
        return False
    d, c = weight.shape[0], weight.shape[1] * groups
    channels, results = (d, c) if transposed else (c, d)
    return x.shape[1] == channels and d % groups == 0 and (bias is None or tuple(bias.shape) == (results,))


def on_rows(x: Any, *given: Any) -> bool:
    """True if the operator of packed rows takes what `suits` is given."""
    return suits(x, *given) and x.device.type == "cpu" and not unserved()


def by_position(x: NestedTensor, weight: Tensor, bias: Tensor | None) -> NestedTensor:
    """Each position by itself: a matrix (D, C) for all of them."""
    return x.with_values(F.linear(x.values.movedim(0, -1), weight, bias).movedim(-1, 0))


def convolved(
    m: Planes, spans: Sequence[Span], weight: Tensor, bias: Tensor | None, how: Sequence[tuple[int, ...]], groups: int,
    transposed: bool = False,
) -> NestedTensor:  # fmt: skip
    """A packed batch by its real positions."""
    p = plane_rows(m, spans)
    if p.order != tuple(range(len(p.order))):
        weight = weight.permute(0, 1, *[d + 2 for d in p.order])
    x, weight, *rest = as_autocast(p.x, weight, *([] if bias is None else [bias]))
    given = p.total, *[p.ordered(numbers) for numbers in how], groups
    term = rest[0] if rest else None
    if not transposed:
        return p.done(convolve(x, weight, None, term, p.sizes, *given))
    out = convolve(None, weight, x, None, sizes_after(p.ordered(m.sizes), p.ordered(spans)), *given)
    return p.done(out if term is None else out + term)


for _n, _conv, _transposed in (
    (1, F.conv1d, F.conv_transpose1d), (2, F.conv2d, F.conv_transpose2d), (3, F.conv3d, F.conv_transpose3d),
):  # fmt: skip
    spatial(_conv, conv(_conv, _n), _n, "conv")
    spatial(_transposed, conv_transpose(_transposed, _n), _n, "conv")
