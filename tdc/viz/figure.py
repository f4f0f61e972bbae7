"""An empty figure for the pictures of this room, and the colours that they share.

Figures are built from objects: no pyplot, no global settings, no display. A notebook shows what a cell returns, and
`figure.savefig("lengths.png")` writes a file.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tdc.core.errors import ShapeError, describe, message
from tdc.core.extras import extra
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor

REAL, PADDING, QUIET = "#0f766e", "#a3520f", "#8b929c"  # readable on light and on dark pages


def empty(op: str, columns: int, size: tuple[float, float], titles: tuple[str, ...]) -> tuple[Any, list[Any]]:
    """A figure in inches with some axes beside each other.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    figure = extra(op, "matplotlib.figure", "torch-tdc[viz]").Figure(figsize=size, layout="constrained")
    extra(op, "matplotlib.backends.backend_agg", "torch-tdc[viz]").FigureCanvasAgg(figure)
    made = [figure.add_subplot(1, columns, n + 1) for n in range(columns)]
    for axes, title in zip(made, titles, strict=True):
        axes.set_title(title, fontsize=10, loc="left")
        axes.tick_params(labelsize=8, length=0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure, made


def row_lengths(op: str, x: NestedTensor | MaskedBatch) -> Tensor:
    """The lengths (B,) of a batch; refuse one of several ragged dims."""
    if len(x.ragged_dims) != 1:
        raise ShapeError(message(op, "a batch of one ragged dim", describe(x), hint="tdc.viz.lengths(x.sizes[:, 0])"))
    return x.lengths.reshape(-1)
