"""A batch in a notebook: its text, and a bar for each example that shows how much of a padded batch would be real.

The picture is an inline SVG of rectangles: no script, no other package, and the colour of the page's text.
"""

from __future__ import annotations

import math
from html import escape
from typing import Any

from torch import Tensor

from tdc.layout.segments import on_host

MOST, WIDTH, LINE = 64, 320, 6  # examples that are drawn, pixels of the longest bar, pixels of each example
BAR = '<rect y="{y}" width="{width}" height="{height}" fill="currentColor" fill-opacity="{opacity}"/>'


def html(x: Any, sizes: Tensor | None) -> str:
    """The text of a batch, and the picture of its ragged sizes, (B, R), if there are numbers to read."""
    page = f"<pre>{escape(repr(x))}</pre>"
    return page if sizes is None else page + picture(on_host(sizes))


def picture(sizes: list[list[int]]) -> str:
    """Bars of the positions of each example beside those of the longest.

    Args:
        sizes: ragged sizes of each example, (B, R). Of more than 64 examples 64 are drawn, at equal distances.
    """
    if not sizes:
        return ""
    counts = [math.prod(row) for row in sizes]
    total, padded = sum(counts), len(sizes) * math.prod([max(column) for column in zip(*sizes, strict=True)])
    if not total:
        return ""
    drawn = [counts[i * len(counts) // min(len(counts), MOST)] for i in range(min(len(counts), MOST))]
    scale, bars = WIDTH * len(sizes) / padded, [BAR.format(y=0, width=WIDTH, height=LINE * len(drawn), opacity=0.12)]
    for i, count in enumerate(drawn):
        bars.append(BAR.format(y=LINE * i, width=round(count * scale, 1), height=LINE - 1, opacity=0.7))
    said = f"{len(sizes)} examples, {total:,} positions: {total / padded:.0%} of a padded batch"
    svg = f'<svg role="img" aria-label="{said}" width="{WIDTH}" height="{LINE * len(drawn)}">{"".join(bars)}</svg>'
    return f"<figure>{svg}<figcaption>{said}</figcaption></figure>"
