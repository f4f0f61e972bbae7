"""Numbers that a batch dim cannot serve, asked before torch sees them in graphs: see `core/calls.py`."""

from __future__ import annotations

from typing import Any

import torch

from tdc.core.arguments import normal_dim
from tdc.core.calls import checks
from tdc.core.container import dims_of
from tdc.core.dynamo import known
from tdc.core.errors import ShapeError, is_dict, message
from tdc.core.typing import Op


def batch_dim_size(op: Op, x: Any, dim: Any) -> Any:
    """The size of a batch dim of a TensorDict, None of another batch or without a dim."""
    return x._size[normal_dim(dim, dims_of(x), op)] if is_dict(x) and isinstance(dim, int) else None


def refuse_outside(op: Op, name: str, given: Any, least: int, most: Any) -> None:
    """Refuse an int that is known to lie outside of a range."""
    if isinstance(given, int) and (known(given < least) or known(given > most)):
        hint = "the batch dim that is named has that size"
        raise ShapeError(message(op, f"{name} in [{least}, {most}]", f"{given}", hint=hint))


@checks(torch.topk, torch.kthvalue)
def ranks(op: Op, input: Any, k: Any, dim: Any = -1, *args: Any, **kwargs: Any) -> None:
    size = batch_dim_size(op, input, dim)
    if size is not None:
        refuse_outside(op, "k", k, 0 if op is torch.topk else 1, size)


@checks(torch.narrow)
def span(op: Op, input: Any, dim: Any, start: Any, length: Any) -> None:
    size = batch_dim_size(op, input, dim)
    if size is not None and isinstance(start, int):
        refuse_outside(op, "start", start, -size, size)
        refuse_outside(op, "length", length, 0, -start if known(start < 0) else size - start)


@checks(torch.Tensor.unfold)
def windows(op: Op, input: Any, dimension: Any, size: Any, step: Any) -> None:
    most = batch_dim_size(op, input, dimension)
    if most is not None:
        refuse_outside(op, "size", size, 0, most)
