"""Dense masks of attention: bool, where True attends, or added to the scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tdc.core.errors import ShapeError, message


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as numbers added to scores: -inf where a bool mask is False."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)


def check_mask(have: tuple[int, ...], need: tuple[int, ...]) -> None:
    """A ShapeError where a dense mask ends before the longest example."""
    if any([h < n and h != 1 for h, n in zip(have, need, strict=True)]):
        raise ShapeError(too_small(have, f" for {need[0]} queries and {need[1]} keys"))


def too_small(have: tuple[int, ...] | None = None, rows: str = " for longer rows") -> str:
    """The text for a dense mask that ends before the longest example, with its sizes (Lq, Lk) where they are known."""
    got = "a smaller one" if have is None else f"(..., {have[0]}, {have[1]}){rows}"
    expected, hint = "a mask (..., Lq, Lk) of at least the longest rows", "build it for x.max_length"
    return message("attention", expected, got, hint=hint)


TOO_SMALL = too_small()  # without sizes, which a graph would be made for


def window_mask(window: int, sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """(L, M), True where positions are less than a window apart."""
    apart = torch.arange(sizes[0], device=device)[:, None] - torch.arange(sizes[1], device=device)
    return apart.abs() < window


def causal_mask(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """(L, M), True on and below the diagonal."""
    return torch.ones(sizes, dtype=torch.bool, device=device).tril()
