"""Filters of logits before a token is drawn: the k largest, and the nucleus of a probability."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect, expect_number
from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor


def top_k_top_p_filtering(
    logits: Any, top_k: int = 0, top_p: float = 1.0, filter_value: float = -math.inf, min_tokens_to_keep: int = 1
) -> Any:
    """Set logits outside the `top_k` largest, or outside the nucleus, to `filter_value`, along the last dim.

    Args:
        top_k: how many to keep, and all that equal the last of them; 0 for all.
        top_p: keep the fewest, from the largest on, whose probabilities add up to it; 1 for all. `top_k` comes first.
        min_tokens_to_keep: the largest ones that stay in any case.

    Shapes:
        logits `(B, -1, K)` of a fixed number of choices, or `(B, -1)` of choices that differ from row to row; a tensor
        `(..., K)`. The result has the shape and dtype of the logits.

    Raises:
        DtypeError: no floating point.
        ShapeError: a negative `top_k`, a `top_p` outside [0, 1].

    Compile:
        One graph for all lengths. What is kept has its gradient.

    Example:
        >>> from tdc.ragged.pack import pack
        >>> top_k_top_p_filtering(pack([torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0.0])]), top_k=2).tolist()
        [[3.0, -inf, 2.0], [0.0]]
    """
    op = "top_k_top_p_filtering"
    expect(op, logits, NestedTensor, MaskedBatch, Tensor)
    expect_number(op, top_k, min_tokens_to_keep, whole=True)
    expect_number(op, top_p, filter_value)
    if not logits.is_floating_point():
        raise DtypeError(message(op, "floating point logits", describe(logits), hint="logits.float()"))
    if top_k < 0 or not 0 <= top_p <= 1:
        got, hint = f"top_k {top_k}, top_p {top_p}", "top_k=50, top_p=0.9; 0 and 1 keep all"
        raise ShapeError(message(op, "top_k of 0 or more, top_p in [0, 1]", got, hint=hint))
    left = logits.detach()
    ordered, order = left.sort(dim=-1, descending=True, stable=True)
    ranks = order.argsort(dim=-1, stable=True)
    if top_k:
        last = torch.where(ranks < max(top_k, min_tokens_to_keep), left, math.inf).amin(-1, keepdim=True)
        left, ordered = [torch.where(x >= last, x, -math.inf) for x in (left, ordered)]
    if top_p < 1:
        chances = ordered.float().softmax(-1)
        before = torch.gather(chances.cumsum(-1) - chances, -1, ranks)
        left = torch.where((before < top_p) | (ranks < min_tokens_to_keep), left, -math.inf)
    return torch.where(left > -math.inf, logits, filter_value)
