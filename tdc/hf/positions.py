"""Positions that a model counts itself, anew in each row of a packed batch.

    tables of positions   BART and its kin count 0, 1, … N along the packed sequence; they are given positions of rows
    biases of distances   T5 and its kin make (1, H, N, N) of it; they are given (1, H, L, M) of the longest rows, of which
                          each row reads its corner

Both are hooks before the forward of a module, which change an argument and nothing else, and only while the batch is
packed. A table does not see the batch, so `counted` says for how long which positions hold, to the thread that calls.

Invariant: calls that are not packed are as they were.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from tdc.hf.packed import Packed
from tdc.ragged.segments import longest


class Counted(threading.local):
    """The positions (N,) of the packed rows that a model is called with, in this thread."""

    positions: Tensor | None = None


current = Counted()


@contextmanager
def counted(positions: Tensor | None) -> Iterator[None]:
    """Positions that tables look up until the context ends."""
    current.positions = positions
    try:
        yield
    finally:
        current.positions = None


def hook_positions(model: nn.Module) -> list[Any]:
    """Hook all modules of a model that count positions; the handles that undo it."""
    found = [(m, hook_of(m)) for m in model.modules()]
    return [m.register_forward_pre_hook(hook, with_kwargs=True) for m, hook in found if hook is not None]


def hook_of(module: nn.Module) -> Any:
    """The hook of a module, by what it is asked; None of most."""
    asked = inspect.signature(module.forward).parameters
    if isinstance(module, nn.Embedding) and "position_ids" in asked:
        return count_in_rows
    if hasattr(module, "compute_bias") and {"mask", "position_bias"} <= set(asked):
        return bias_in_rows
    return None


def count_in_rows(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A table of positions, called with those of the rows."""
    if current.positions is None:
        return None
    return args, {**kwargs, "position_ids": current.positions}


def bias_in_rows(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attention with a bias of distances, called with that of the longest rows; a number where it has none."""
    rows = kwargs.get("mask")
    if not isinstance(rows, Packed) or kwargs.get("position_bias") is not None:
        return None
    bias = args[0].new_zeros(())
    if module.has_relative_attention_bias:
        bias = module.compute_bias(longest(rows.queries)[0], longest(rows.keys)[0], device=args[0].device)
    return args, {**kwargs, "position_bias": bias}
