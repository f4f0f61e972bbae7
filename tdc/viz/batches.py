"""Pictures of one batch: where its numbers are, packed and padded, and the attention of its examples."""

from __future__ import annotations

from typing import Any

import torch

from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.viz.figure import PADDING, REAL, empty, row_lengths

MOST = 8  # examples of `attention`


def batch(x: Any) -> Any:
    """Draw a batch as it is in memory, packed, beside the rectangle that padding would make of it.

    Shapes:
        x: (B, -1, ...).

    Args:
        x: a NestedTensor or MaskedBatch of one ragged dim.

    Returns:
        A `matplotlib.figure.Figure` of two axes: rows one after another, and rows in a rectangle.

    Raises:
        DtypeError: not a batch of one ragged dim; UnsupportedError: matplotlib is not installed.

    Compile:
        not traceable: it reads the lengths.

    Example:
        >>> from tdc.ragged.pack import pack
        >>> figure = batch(pack([torch.ones(2), torch.ones(0), torch.ones(3)]))
        >>> [axes.get_title('left') for axes in figure.axes]
        ['packed: 5 positions', 'padded: 9 positions, 56% real']
    """
    if not isinstance(x, (NestedTensor, MaskedBatch)):
        raise DtypeError(message("viz.batch", "a batch of one ragged dim", describe(x), hint="tdc.pack(rows)"))
    found = row_lengths("viz.batch", x).tolist()
    total, longest = sum(found), max(found, default=0)
    share = total / max(longest * len(found), 1)
    titles = (f"packed: {total} positions", f"padded: {longest * len(found)} positions, {share:.0%} real")
    figure, (left, right) = empty("viz.batch", 2, (8.0, 0.6 + 0.22 * max(len(found), 4)), titles)
    begin, dark = 0, False
    for n, length in enumerate(found):
        dark = dark != (length > 0)
        left.barh(0, length, left=begin, height=0.6, color=REAL, alpha=1 if dark else 0.7)
        right.barh(n, length, height=0.8, color=REAL)
        right.barh(n, longest - length, left=length, height=0.8, color=PADDING, alpha=0.5)
        begin += length
    left.set_ylim(-1.5, 1.5)
    left.set_yticks([])
    right.invert_yaxis()
    right.set_ylabel("example")
    for axes in (left, right):
        axes.set_xlabel("position")
    return figure


def attention(weights: Any, *, labels: Any = None) -> Any:
    """Draw the attention of each example, one square for each, as large as the example.

    Shapes:
        weights: (B, -1, -1), from 0 to 1; the first 8 examples are drawn.

    Args:
        weights: a NestedTensor of two ragged dims, as `nn.MultiheadAttention` returns, or a list of matrices.
        labels: for each example a list of texts, one for each position.

    Returns:
        A `matplotlib.figure.Figure`, with axes for each example.

    Raises:
        DtypeError: not a batch of matrices; ShapeError: no example; UnsupportedError: matplotlib is not installed.

    Compile:
        not traceable: it reads the numbers.

    Example:
        >>> figure = attention([torch.eye(3), torch.eye(2)], labels=[["a", "b", "c"], ["d", "e"]])
        >>> len(figure.axes), [text.get_text() for text in figure.axes[1].get_xticklabels()]
        (2, ['d', 'e'])
    """
    op = "viz.attention"
    rows = list(weights.unbind()) if isinstance(weights, (NestedTensor, MaskedBatch, torch.Tensor)) else weights
    if not isinstance(rows, list) or not all(isinstance(row, torch.Tensor) and row.ndim == 2 for row in rows):
        hint = "average heads first: weights.mean(1)"
        raise DtypeError(message(op, "a batch of matrices (B, -1, -1)", describe(weights), hint=hint))
    if not rows:
        raise ShapeError(message(op, "at least one example", "none"))
    shown = [row.detach().float().cpu() for row in rows[:MOST]]
    titles = tuple(f"example {n}: {row.shape[0]} by {row.shape[1]}" for n, row in enumerate(shown))
    figure, made = empty(op, len(shown), (2.6 * len(shown), 2.8), titles)
    for n, (axes, row) in enumerate(zip(made, shown, strict=True)):
        if not row.numel():
            axes.set_axis_off()
            continue
        axes.imshow(row.tolist(), cmap="viridis", vmin=0, vmax=1, aspect="auto")
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
        if labels is not None:
            axes.set_xticks(range(row.shape[1]), labels[n], rotation=90)
            axes.set_yticks(range(row.shape[0]), labels[n])
    return figure
