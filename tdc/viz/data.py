"""The lengths of a data set, and what padding and buckets would make of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.viz.figure import PADDING, QUIET, REAL, empty, row_lengths

OP = "viz.lengths"
BINS = 40


def lengths(x: Any, *, batch_size: int = 32, seed: int = 0) -> Any:
    """Draw how long examples are, and how full batches of them would be if they were padded.

    Shapes:
        x: (N, -1, ...) or lengths (N,).

    Args:
        x: a NestedTensor or MaskedBatch of one ragged dim, or a tensor of lengths.
        batch_size: examples in a batch.
        seed: of the random order.

    Returns:
        A `matplotlib.figure.Figure` of two axes: a histogram of lengths with median and 90th percentile, and the
        share of real positions of a padded batch: in random order, in order of length, packed.

    Raises:
        DtypeError: neither a batch nor lengths; ShapeError: no example; UnsupportedError: matplotlib is not installed.

    Compile:
        not traceable: it reads the lengths.

    Example:
        >>> figure = lengths(torch.tensor([3, 9, 4, 4, 7, 1]), batch_size=2)
        >>> [axes.get_title('left') for axes in figure.axes]
        ['6 examples, 28 positions', 'real positions of batches of 2']
    """
    found = lengths_of(x)
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))
    shares = {
        "padded, random order": occupancy(found[order], batch_size),
        "padded, by length": occupancy(found.sort().values, batch_size),
        "packed": 1.0,
    }
    titles = (f"{len(found):,} examples, {int(found.sum()):,} positions", f"real positions of batches of {batch_size}")
    figure, (left, right) = empty(OP, 2, (8.0, 2.8), titles)
    left.hist(found.tolist(), bins=min(BINS, int(found.max()) + 1), color=REAL)
    left.set_xlabel("length")
    left.set_ylabel("examples")
    for name, part in (("median", 0.5), ("90 %", 0.9)):
        at = float(found.double().quantile(part))
        left.axvline(at, color=QUIET, linewidth=1, linestyle="--")
        left.annotate(f"{name} {at:.0f}", (at, 1), xycoords=("data", "axes fraction"), va="top", fontsize=8)
    names = list(shares)[::-1]
    right.barh(names, [shares[name] for name in names], color=REAL)
    rest = [1 - shares[name] for name in names]
    right.barh(names, rest, left=[shares[name] for name in names], color=PADDING, alpha=0.5)
    for name in names:
        right.annotate(f"{shares[name]:.0%}", (0.02, name), va="center", color="white", fontsize=9)
    right.set_xlim(0, 1)
    right.set_xticks([])
    return figure


def lengths_of(x: Any) -> Tensor:
    """The lengths of a batch, or a tensor of lengths as it is; on the host."""
    if isinstance(x, (NestedTensor, MaskedBatch)):
        found = row_lengths(OP, x)
    elif isinstance(x, Tensor) and x.ndim == 1 and not x.is_floating_point():
        found = x
    else:
        got = describe(x)
        raise DtypeError(message(OP, "a batch of one ragged dim, or a tensor of lengths (N,)", got, hint="x.lengths"))
    if not len(found):
        raise ShapeError(message(OP, "at least one example", "none"))
    return found.detach().cpu()


def occupancy(found: Tensor, batch_size: int) -> float:
    """The share of real positions of padded batches of examples in this order."""
    parts = found.split(batch_size)
    room = sum(int(part.max()) * len(part) for part in parts)
    return float(found.sum()) / max(room, 1)
