"""Attention within rows on rectangles: the backend that runs everything, and MaskedBatches.

    B examples, L and M longest queries and keys, H heads, D and E features of keys and values

Invariants: padding is finite and meets no real query; a query without any key to attend to gives 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.dynamo import eager, known, unchanged_in_graphs, under_transform
from tdc.core.errors import ShapeError, UnsupportedError, message
from tdc.core.operators import directed
from tdc.layout.padding import pack_rows, pad_rows, valid_mask
from tdc.layout.segments import longest, sizes_of
from tdc.layout.structure import Structure

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # of a score, example, head, query and key


class How(NamedTuple):
    """Options of attention; `scale` is `1 / sqrt(D)` by default.

    Args:
        mask: (B or 1, H or 1, L, M) where rectangles meet; before that in any form that `ops.attention.masks` takes.
        keep: (B, H, L, M), factors of the weights: a dropout that is known.
    """

    causal: bool
    scale: float | None = None
    dropout: float = 0.0
    mask: Any = None
    score_mod: ScoreMod | None = None
    keep: Tensor | None = None


def attend_rectangle(q: Tensor, k: Tensor, v: Tensor, q_rows: Structure, k_rows: Structure, how: How) -> Tensor:
    """Packed rows (N, H, D), padded on the way."""
    q_BHLD, k_BHMD, v_BHMD = (
        pad_rows(t, rows, longest(rows)).transpose(1, 2) for t, rows in ((q, q_rows), (k, k_rows), (v, k_rows))
    )
    out = attend_padded(q_BHLD, k_BHMD, v_BHMD, (sizes_of(q_rows), sizes_of(k_rows)), how)
    return pack_rows(out.transpose(1, 2), q_rows, q.shape[0])


def attend_padded(q_BHLD: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, sizes: tuple[Tensor, Tensor], how: How) -> Tensor:
    """Attention on rectangles whose padding is finite, queries and keys of sizes (B, 1) -> (B, H, L, E), finite in
    padding."""
    # Fused kernels have no forward-mode derivative; on a GPU they take no mask that a vmap shares (torch 2.11-2.13).
    by_hand = how.score_mod is not None or (q_BHLD.is_cuda and under_transform())
    if not (known(q_BHLD.shape[2] != 0) and known(k_BHMD.shape[2] != 0)):  # torch asks for sizes that a graph lacks
        by_hand = True
    if by_hand or directed((q_BHLD, k_BHMD, v_BHMD)):
        weights, dead = weights_and_dead(q_BHLD, k_BHMD, sizes, how)
        return (weights.to(v_BHMD.dtype) @ v_BHMD).masked_fill(dead, 0)  # score_mod may have made weights wider
    mask = score_mask(q_BHLD, k_BHMD, sizes, how)
    dead = ~(mask if mask.dtype == torch.bool else mask > -math.inf).any(-1, keepdim=True)
    mask = mask | dead if mask.dtype == torch.bool else mask.masked_fill(dead, 0)
    out = F.scaled_dot_product_attention(q_BHLD, k_BHMD, v_BHMD, mask, how.dropout, scale=how.scale)
    return once_differentiable(out).masked_fill(dead, 0)


@unchanged_in_graphs
def once_differentiable(out: Tensor) -> Tensor:
    """A result of a fused kernel, whose second derivative is refused where torch has none."""
    made_by = out.grad_fn if eager() else None
    if made_by is not None and "ScaledDotProduct" in made_by.name():
        made_by.register_hook(refuse_second)
    return out


def refuse_second(of_inputs: tuple[Tensor | None, ...], of_outputs: tuple[Tensor | None, ...]) -> None:
    """A hook that lets gradients of a kernel raise where they are differentiated."""
    for grad in of_inputs:
        if grad is not None and grad.requires_grad:
            grad.register_hook(no_second_derivative)


def no_second_derivative(grad: Tensor) -> None:
    hint = "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) around the call, or x.to_packed(), whose attention has two"
    raise UnsupportedError(message("attention", "one derivative of a fused kernel", "a second one", hint=hint))


def score_mask(q_BHLD: Tensor, k_BHMD: Tensor, sizes: tuple[Tensor, Tensor], how: How) -> Tensor:
    """Pairs that attend: bool, or added to the scores where there is a mask."""
    shape = (*q_BHLD.shape[:3], k_BHMD.shape[2])
    allowed = valid_mask(sizes[1], shape[3:])[:, None, None, :]
    if how.causal:
        allowed = allowed & causal_mask(shape[2:], q_BHLD.device)
    mask = how.mask
    if mask is None:
        return allowed
    check_mask(tuple(mask.shape[2:]), shape[2:])
    return additive(mask[..., : shape[2], : shape[3]], q_BHLD.dtype).masked_fill(~allowed, -math.inf)


def attention_weights(q_BHLD: Tensor, k_BHMD: Tensor, sizes: tuple[Tensor, Tensor], how: How) -> Tensor:
    """The weight of each key for each query (B, H, L, M), after dropout; 0 for queries without keys."""
    weights, dead = weights_and_dead(q_BHLD, k_BHMD, sizes, how)
    return weights.masked_fill(dead, 0)


def weights_and_dead(q_BHLD: Tensor, k_BHMD: Tensor, sizes: tuple[Tensor, Tensor], how: How) -> tuple[Tensor, Tensor]:
    """Weights as of `attention_weights`, but finite for queries without keys, and a mask of such queries (B, H, L, 1).
    """
    scale = 1 / math.sqrt(q_BHLD.shape[-1]) if how.scale is None else how.scale
    scores = (q_BHLD * scale) @ k_BHMD.transpose(2, 3)
    if how.score_mod is not None:
        at = [torch.arange(n, device=scores.device) for n in scores.shape]
        scores = how.score_mod(scores, *[p.view([-1 if i == d else 1 for i in range(4)]) for d, p in enumerate(at)])
    mask = score_mask(q_BHLD, k_BHMD, sizes, how)
    scores = scores if mask.dtype == torch.bool else scores + mask
    keep = scores != -math.inf
    keep = keep & mask if mask.dtype == torch.bool else keep
    dead = ~keep.any(-1, keepdim=True)
    hidden = torch.where(dead, 0.0, -math.inf).to(scores.dtype)
    weights = torch.where(keep, scores, hidden).softmax(-1)
    return F.dropout(weights, how.dropout) if how.keep is None else weights * how.keep, dead


def within(window: int, score_mod: ScoreMod | None = None) -> ScoreMod:
    """A function of scores that is also -inf where positions are `window` or more apart, if there is a window."""

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = s if score_mod is None else score_mod(s, b, h, i, j)
        return torch.where((i - j).abs() < window, s, -math.inf) if window else s

    return score


def shared_heads(t: Tensor, heads: int) -> Tensor:
    """Keys (M, G, D) or (B, G, M, D) for as many heads as there are of queries; neighbouring heads share."""
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], 1)


# -- dense masks: bool, True where a query attends, or added to scores


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as numbers added to scores: -inf where a bool mask is False."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)


def check_mask(have: tuple[int, ...], need: tuple[int, ...]) -> None:
    """Refuse with a ShapeError a dense mask that ends before the longest example."""
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
