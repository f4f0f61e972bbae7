"""A batch in parts, and the mean of what the parts gave.

    gradients, metrics = sum over parts of (part's mean * its examples) / examples

So where a loss is a mean over examples, gradients and loss are those of the whole batch, however it divides. Sums are
kept in float32 at least.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tdc.compile.vectorize import is_container
from tdc.core import pytree
from tdc.core.dtypes import widened
from tdc.core.errors import ShapeError, describe, message
from tdc.interop.pytrees import from_pytree, to_pytree
from tdc.ragged.storage import is_ragged
from tdc.tensordict.tensordict import TensorDict, build_td


def split(batch: Any, count: int) -> Iterator[tuple[Any, Any]]:
    """Parts of a batch along its first dim, and how many examples each has."""
    rows = first_size(batch)
    if rows < count:
        hint = "accumulate=1, or larger batches"
        raise ShapeError(message("compile.train_step", f"a batch of at least {count} rows", f"{rows}", hint=hint))
    td: Any = batch
    spec = None
    if isinstance(batch, TensorDict):  # with the size that its leaves have, which a compiled graph knows to vary
        td = build_td(batch._leaves, batch._nodes, torch.Size([rows, *batch._size[1:]]), batch._device)
    else:
        td, spec = from_pytree(batch, [rows])
    ends = [i * rows // count for i in range(count + 1)]  # arithmetic alone, so that all sizes are one graph
    lengths = [ends[i + 1] - ends[i] for i in range(count)]
    parts: tuple[Any, ...] = torch.split(td, lengths)
    for part, length in zip(parts, lengths, strict=True):
        yield (part if spec is None else to_pytree(part, spec)), length


def first_size(batch: Any) -> int:
    """The number of examples of a batch, as its first leaf says."""
    is_td = isinstance(batch, TensorDict)
    leaves = list(batch._leaves.values()) if is_td else pytree.tree_leaves(batch, is_leaf=is_container)
    sizes = [x.shape for x in leaves if isinstance(x, (Tensor, TensorDict)) or is_ragged(x)]
    if not sizes or not len(sizes[0]) or (is_td and not batch.ndim):
        got, hint = describe(batch), "give the batch its batch_size, or accumulate=1"
        raise ShapeError(message("compile.train_step", "a batch with a first dim to split", got, hint=hint))
    return sizes[0][0]


def weighted(x: Tensor, rows: Any) -> Tensor:
    """A metric as a term of a mean over examples; counts are summed as they are."""
    return widened(x) * rows if x.is_floating_point() else x
