"""Attention within rows on CPU by the weights themselves: with dropout, a mask that requires grad, values of another
size.

    q (N, H, D), k (M, H, D) and v (M, H, E), offsets of both (B+1,)  ->  out (N, H, E), logsumexp (N, H)

The weights of one example (H, l, m) exist at a time: backward makes them again from the logsumexp, and the mask of
dropout from a seed.

Invariants: as of `cpu`; forward and backward drop the same weights, and the seeds alone say which.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tdc.core.dtypes import sum_dtype
from tdc.kernels.attention.cpu import Example, examples

BITS = 32  # of a random number for each weight


class Dropout:
    """Kept weights, example after example; the heads are divided evenly between the seeds (S,).

    Args:
        p: probability that a weight becomes 0.
    """

    def __init__(self, p: float, seeds: Tensor | None) -> None:
        self.p = p
        self.generators = [torch.Generator().manual_seed(s) for s in ([] if seeds is None else seeds.tolist())]

    def keep(self, heads: int, queries: int, keys: int) -> Tensor:
        """Bool (H, l, m) of the next example."""
        if self.p >= 1:
            return torch.zeros(heads, queries, keys, dtype=torch.bool, device="cpu")
        each = heads // len(self.generators)
        below = round(self.p * 2**BITS) - 2 ** (BITS - 1)  # of all numbers of so many bits this share is smaller
        parts = [integers(each * queries * keys, g).view(each, queries, keys) for g in self.generators]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)) >= below

    def scaled(self, x: Tensor) -> Tensor:
        """Weights (H, l, m), or their gradients, as the next example has them; in place."""
        if not self.p:
            return x
        return x.mul_(self.keep(*x.shape)).mul_(1 / (1 - self.p) if self.p < 1 else 0.0)


def integers(count: int, generator: torch.Generator) -> Tensor:
    """Random int32 of all values; two of them at once."""
    pairs: Any = torch.empty(-(-count // 2), dtype=torch.int64, device="cpu")  # the stubs lack the call below
    return pairs.random_(-(2**63), None, generator=generator).view(torch.int32)[:count]


def forward_rows(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """q (N, H, D), k (M, H, D), v (M, H, E), offsets, mask, seeds -> out (N, H, E), logsumexp (N, H)."""
    *rows, seeds, causal, scale, p = args
    out, drop = q.new_zeros((*q.shape[:2], v.shape[2])), Dropout(p, seeds)
    lse = q.new_zeros(q.shape[:2], dtype=sum_dtype(q.dtype))
    for at in examples(*rows):
        x, y, z = by_head(q[at.queries]), by_head(k[at.keys]), by_head(v[at.keys])
        s = scores(x, y, at, causal, scale)
        found = s.logsumexp(-1)
        lse[at.queries] = found.t()
        weights = drop.scaled(probabilities(s, found))
        out[at.queries] = (weights.to(z.dtype) @ z).transpose(0, 1)
    return out, lse


def backward_rows(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the mask; of none (0, H)."""
    q_offsets, k_offsets, mask, mask_offsets, seeds, causal, scale, p = args
    operands = q, k, v, q.new_empty(0, q.shape[1]) if mask is None else mask
    grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in operands]
    parts = [] if mask is None else [at.mask for at in examples(q_offsets, k_offsets, grads[3], mask_offsets)]
    drop = Dropout(p, seeds)
    for i, at in enumerate(examples(q_offsets, k_offsets, mask, mask_offsets)):
        x, y, z = by_head(q[at.queries]), by_head(k[at.keys]), by_head(v[at.keys])
        g, o = by_head(grad[at.queries]), by_head(out[at.queries])
        weights = probabilities(scores(x, y, at, causal, scale), lse[at.queries].t())
        mean = (g * o).sum(-1, keepdim=True, dtype=weights.dtype)  # of the gradients of a query's weights
        of_weights = (g @ z.transpose(1, 2)).to(weights.dtype)
        if p:
            scaled = drop.scaled(torch.ones_like(weights))
            of_weights, dropped = of_weights.mul_(scaled), scaled.mul_(weights)
        else:
            dropped = weights
        grads[2][at.keys] = (dropped.to(g.dtype).transpose(1, 2) @ g).transpose(0, 1)
        of_scores = of_weights.sub_(mean).mul_(weights)
        if (of_mask := parts[i] if parts else None) is not None:
            add_to(of_mask[0], of_scores)
        of_scores = of_scores.to(x.dtype)
        grads[0][at.queries] = (of_scores @ y).mul_(scale).transpose(0, 1)
        grads[1][at.keys] = (of_scores.transpose(1, 2) @ x).mul_(scale).transpose(0, 1)
    return grads[0], grads[1], grads[2], grads[3]


def scores(x: Tensor, y: Tensor, at: Example, causal: bool, scale: float) -> Tensor:
    """Queries (H, l, D), keys (H, m, D) -> scores (H, l, m), -inf where one does not attend to the other."""
    s = (x @ y.transpose(1, 2)).to(sum_dtype(x.dtype)).mul_(scale)
    if at.mask is not None:
        s += at.mask[0]
    if causal:
        s.masked_fill_(torch.ones(s.shape[1:], dtype=torch.bool, device=s.device).triu_(1), -math.inf)
    return s


def probabilities(s: Tensor, lse: Tensor) -> Tensor:
    """Weights (H, l, m) of scores and their logsumexp (H, l); 0 of a query without keys. In place."""
    return s.sub_(lse.masked_fill(lse == -math.inf, 0)[..., None]).exp_()


def by_head(t: Tensor) -> Tensor:
    return t.transpose(0, 1)


def add_to(total: Tensor, part: Tensor) -> None:
    """Add (H, l, m) to a gradient of this shape, which may be expanded from sizes of 1."""
    for dim, step in enumerate(total.stride()):
        if step == 0 and total.shape[dim] > 1:
            total, part = total.narrow(dim, 0, 1), part.sum(dim, keepdim=True)
    total += part


def kept_rectangle(sizes: Tensor, heads: int, seeds: Tensor | None, p: float, dtype: torch.dtype) -> Tensor:
    """Factors of `Dropout` for the weights of examples (B, 2), in one rectangle (B, H, L, M) of a dtype."""
    drop, queries_and_keys = Dropout(p, seeds), sizes.tolist()
    shape = [max([pair[i] for pair in queries_and_keys], default=0) for i in (0, 1)]
    found = torch.zeros(len(queries_and_keys), heads, *shape, dtype=dtype, device="cpu")
    for one, (queries, keys) in zip(found, queries_and_keys, strict=True):
        if queries and keys:
            drop.scaled(one[:, :queries, :keys].fill_(1))
    return found
