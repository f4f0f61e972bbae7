"""A ragged batch as text, as torch prints a tensor: sizes first, then the numbers of the first and the last rows.

    NestedTensor(shape=torch.Size([3, -1]), lengths=[2, 0, 3], dtype=torch.float32, device=cpu, rows=[
        [0., 1.],
        [],
        [2., 3., 4.]])

Of more than six rows, positions or features three of either end are shown. Numbers look as `torch.set_printoptions`
says. Where tensors have no numbers to read (in a graph, under a transform, on the meta device) only sizes are shown.

In a notebook bars of inline SVG below the text show how much of a padded batch would be real.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import torch
from torch import Tensor

from tdc.core.dynamo import has_numbers as has_numbers
from tdc.layout.segments import on_host

EDGE = 3  # how many entries of either end are shown
NEWLINE = "\n    "
Row = Tensor | tuple[list[Tensor], int]  # an example; of two levels the inner examples that are shown, of so many


def shown(count: int) -> list[int]:
    """The positions that are shown of so many."""
    return list(range(count)) if count <= 2 * EDGE else [*range(EDGE), *range(count - EDGE, count)]


def text(x: Any, sizes: dict[str, Tensor], rows: Sequence[Row] | None, **more: Any) -> str:
    """The text of a batch.

    Args:
        sizes: lengths of its examples by the name to show them under, (B,) or (B, R).
        rows: the examples that are shown; None for none.
        more: what else the first line says.
    """
    lengths = {} if rows is None else {name: listed(n) for name, n in sizes.items()}
    fields = {"shape": x.shape, **more, **lengths, "dtype": x.dtype, "device": x.device}
    if rows is not None and x._content.requires_grad:
        fn = x._content.grad_fn
        fields |= {"requires_grad": True} if fn is None else {"grad_fn": f"<{type(fn).__name__}>"}
    head = f"{type(x).__name__}({', '.join([f'{name}={value}' for name, value in fields.items()])}"
    if rows is None:
        return f"{head})"
    count = next(iter(sizes.values())).shape[0]
    return f"{head}, rows=[{','.join(gap([NEWLINE + line for line in texts_of(rows)], count, f'{NEWLINE}...'))}])"


def texts_of(rows: Sequence[Row]) -> list[str]:
    """Each row as text, their numbers of one width."""
    flat: list[Tensor] = []
    for row in rows:
        flat += [row] if isinstance(row, Tensor) else row[0]
    numbers = iter(formatted([edges(x.detach()) for x in flat]))
    lines: list[str] = []
    for row in rows:
        if isinstance(row, Tensor):
            lines.append(bracketed(row.shape, numbers, 1))
        else:
            inner = [bracketed(x.shape, numbers, 2) for x in row[0]]
            lines.append(f"[{f',{NEWLINE} '.join(gap(inner, row[1], '...'))}]")
    return lines


def edges(x: Tensor) -> Tensor:
    """The elements that are shown of a tensor."""
    for dim, size in enumerate(x.shape):
        if size > 2 * EDGE:
            x = torch.cat([x.narrow(dim, 0, EDGE), x.narrow(dim, size - EDGE, EDGE)], dim)
    return x


def formatted(tensors: list[Tensor]) -> list[str]:
    """The numbers of all tensors, one after another, as torch prints them."""
    if not tensors:
        return []
    flat = torch.cat([x.reshape(-1) for x in tensors])
    texts = repr(flat).partition("[")[2].partition("]")[0].split(",")
    if len(texts) != flat.numel():  # torch is set to show fewer
        texts = [f"{number}" for number in on_host(flat)]
    texts = [item.strip() for item in texts]
    width = max([len(item) for item in texts], default=0)
    return [item.rjust(width) for item in texts]


def bracketed(sizes: Sequence[int], numbers: Iterator[str], depth: int) -> str:
    """A tensor of these sizes as lists in lists, of its numbers that are shown."""
    if not sizes:
        return next(numbers)
    count, *inner = sizes
    items = [bracketed(inner, numbers, depth + 1) for _ in shown(count)]
    between = f",{NEWLINE}{' ' * depth}" if inner else ", "
    return f"[{between.join(gap(items, count, '...'))}]"


def gap(items: list[str], count: int, dots: str) -> list[str]:
    """Texts of what is shown of `count`, with dots for the rest."""
    return items if len(items) == count else [*items[:EDGE], dots, *items[EDGE:]]


def listed(sizes: Tensor) -> str:
    """Lengths as a list, those in the middle of many left out."""
    picked = [f"{n}" for n in on_host(sizes[shown(sizes.shape[0])])]
    return f"[{', '.join(gap(picked, sizes.shape[0], '...'))}]"


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
