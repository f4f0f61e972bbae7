"""An empty figure for the pictures of this room, and the colours that they share.

Figures are built from objects: no pyplot, no global settings, no display. A notebook shows what a cell returns, and
`figure.savefig("lengths.png")` writes a file.
"""

from __future__ import annotations

import io
import re
import zlib
from html import escape
from typing import Any

from torch import Tensor

from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.core.extras import extra
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor

REAL, PADDING, QUIET = "#0f766e", "#a3520f", "#8b929c"  # readable on light and on dark pages
SPACES = re.compile(r'xmlns(:xlink)?="[^"]*" ?')  # which HTML does not need
NAMES = re.compile(r'\bid="|href="#|url\(#')  # which several pictures of a page must not share
NOTE: Any = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}  # of a bar, beside it


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


def to_html(figure: Any, alt: str) -> str:
    """Return a figure as HTML: an inline SVG, for a page of one's own.

    Shapes:
        none.

    Args:
        figure: a `matplotlib.figure.Figure`, as the functions of `tdc.viz` return.
        alt: a text that says the same to readers who cannot see it.

    Returns:
        A `<figure>` with an SVG as wide as the page allows; no script, no file beside it. Texts and axes have the
        colour of the page's text, light or dark. The same figure and text give the same HTML.

    Raises:
        DtypeError: not a figure, or no text.

    Compile:
        not traceable.

    Example:
        >>> import torch
        >>> from tdc.viz.data import lengths
        >>> html = to_html(lengths(torch.tensor([3, 9, 4])), "Three lengths: 3, 9 and 4.")
        >>> html[:70]
        '<figure><svg role="img" aria-label="Three lengths: 3, 9 and 4." style='
    """
    if not hasattr(figure, "savefig") or not isinstance(alt, str) or not alt.strip():
        got = describe(figure if not hasattr(figure, "savefig") else alt)
        raise DtypeError(message("viz.to_html", "a figure, and a text that says what it shows", got))
    file, bare = io.StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with extra("viz.to_html", "matplotlib", "torch-tdc[viz]").rc_context({"svg.hashsalt": "tdc"}):
        figure.savefig(file, format="svg", transparent=True, metadata=bare)
    svg = SPACES.sub("", file.getvalue().partition("<svg ")[2].strip()).replace("xlink:href", "href")
    svg = svg.replace("#000000", "currentColor")
    svg = NAMES.sub(rf"\g<0>{zlib.crc32(alt.encode() + svg.encode()):08x}-", svg)
    style = "max-width:100%;height:auto"
    return f'<figure><svg role="img" aria-label="{escape(alt)}" style="{style}" fill="currentColor" {svg}</figure>'


def row_lengths(op: str, x: NestedTensor | MaskedBatch) -> Tensor:
    """The lengths (B,) of a batch; refuse one of several ragged dims."""
    if len(x.ragged_dims) != 1:
        raise ShapeError(message(op, "a batch of one ragged dim", describe(x), hint="tdc.viz.lengths(x.sizes[:, 0])"))
    return x.lengths.reshape(-1)
