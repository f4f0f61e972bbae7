"""Attention of packed rows (N, H, D), and what a loop over examples gives by the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tdc
from tdc import NestedTensor

QUERIES, KEYS = (3, 0, 140, 5, 2), (4, 2, 150, 0, 6)  # more than one block, rows without queries and without keys
OTHERS = (((150, 7), (3, 160)), ((60, 2, 0, 90), (0, 70, 5, 71)))


def batch(lengths: tuple[int, ...], heads: int, size: int, seed: int, like: Any = None) -> NestedTensor:
    """Rows (B, -1, H, D) whose values want a gradient."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), heads, size, generator=g).to(like).requires_grad_()
    offsets = tdc.offsets_of(torch.tensor(lengths)).to(values.device)
    return NestedTensor(values, offsets, max_length=max(lengths))


def operands(
    queries: tuple[int, ...],
    keys: tuple[int, ...] | None,
    groups: int = 4,
    like: Any = torch.float32,
    size: int = 16,
) -> list[Any]:
    """Queries, keys and values; of one structure where keys is None."""
    q = batch(queries, 4, size, 0, like)
    k, v = (batch(keys or queries, groups, size, seed, like) for seed in (1, 2))
    return [q, q.with_values(k.values), q.with_values(v.values)] if keys is None else [q, k, k.with_values(v.values)]


def run(*parts: Any, **options: Any) -> Tensor:
    q, k, v = parts
    return tdc.ops.varlen_attention(q.values, k.values, v.values, q.structure, k.structure, **options)


def one(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, score_mod: Any = None):
    """One example (L, H, D), by the definition."""
    shared = q.shape[1] // k.shape[1]
    q, k, v = (t.transpose(0, 1) for t in (q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if score_mod is not None:
        h, i, j = (torch.arange(n, device=q.device) for n in scores.shape)
        scores = score_mod(scores, None, h[:, None, None], i[:, None], j)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    weights = scores.softmax(-1) if scores.shape[-1] else scores
    return (weights @ v).transpose(0, 1)


def reference(q: NestedTensor, k: NestedTensor, v: NestedTensor, **options: Any) -> Tensor:
    return torch.cat([one(*each, **options) for each in zip(*[x.unbind() for x in (q, k, v)], strict=True)])


def results(fn: Callable[..., Tensor], parts: list[Any], options: dict[str, Any], more: tuple[Tensor, ...] = ()):
    """Output and gradients of the three operands, and of tensors that the options hold."""
    out = fn(*parts, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    return [out, *torch.autograd.grad((out * weights).sum(), [*[x.values for x in parts], *more])]


def assert_same(fn: Callable[..., Tensor], parts: list[Any], options: dict[str, Any], more: tuple[Tensor, ...] = ()):
    got, want = results(fn, parts, options, more), results(reference, parts, options, more)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], requires_grad=True)


def with_slopes(slopes: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: score - slopes[h] * (i - j).abs()


alibi = with_slopes(SLOPES)


CASES: dict[str, tuple[tuple[int, ...] | None, dict[str, Any]]] = {  # lengths of keys, options
    "self": (None, {}),
    "self causal": (None, {"causal": True, "scale": 0.3}),
    "cross": (KEYS, {}),
    "cross causal": (KEYS, {"causal": True}),
    "score_mod": (KEYS, {"score_mod": alibi}),
}
