"""What stands in for the kernels of CUDA for packed rows, on a machine without a GPU."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.ops.attention import scaled_dot_product


class Kernel:
    """What stands in for a kernel of CUDA: its arguments and layouts, numbers by the definition, calls on record.

    Args:
        ends: a causal mask is aligned with the ends of rows, as that of the flash kernel is.
    """

    def __init__(self, ends: bool) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.ends = ends
        self.used: Tensor | None = None  # how many keys of each row there are
        self.sides: tuple[int | None, int | None] = None, None  # how many keys a query sees to the left and the right

    def rows(self, starts: tuple[Any, ...], queries: list[Tensor], keys: list[Tensor]) -> Iterator[list[Tensor]]:
        """The examples (H, L, D) of tensors of queries and of keys (N, H, D), with as many heads of keys."""
        self.calls.append(starts)
        sizes = []
        for offsets, limit in zip(starts[:2], starts[2:], strict=True):
            assert offsets.dtype == torch.int32
            assert offsets.diff().max() <= limit
            sizes.append(offsets.diff().tolist())
        used = sizes[1] if self.used is None else self.used.tolist()
        heads = queries[0].shape[1]
        for t in (*queries, *keys):
            assert t.ndim == 3
            assert t.stride(2) == 1
            assert not [n for n in t.stride()[:2] if n % (16 // t.element_size())]
        parts = [t.split(sizes[0]) for t in queries]
        parts += [
            [x[:n] for x, n in zip(t.repeat_interleave(heads // t.shape[1], 1).split(sizes[1]), used, strict=True)]
            for t in keys
        ]
        for example in zip(*parts, strict=True):
            yield [t.transpose(0, 1) for t in example]

    def scores(self, q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
        scores = q @ k.mT * scale
        behind = torch.ones_like(scores, dtype=torch.bool).triu(1 + (k.shape[1] - q.shape[1]) * self.ends)
        scores = scores.masked_fill(behind, -math.inf) if causal else scores
        left, right = self.sides
        if left is None or right is None:
            return scores
        inside = torch.ones_like(scores, dtype=torch.bool).tril(right).triu(-left)
        return scores.masked_fill(~inside, -math.inf)

    def kept(self, shape: torch.Size, p: float, drawn: torch.Generator) -> Tensor:
        """What weights are multiplied by."""
        return (torch.rand(shape, generator=drawn) >= p) / (1 - p)

    def attend(self, starts: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, p: float, seed: int):
        """Packed results, and for each example logsumexp (H, L)."""
        outs, sums, drawn = [], [], torch.Generator().manual_seed(seed)
        for x, y, z in self.rows(starts, [q], [k, v]):
            sums.append(self.scores(x, y, causal, scale).logsumexp(-1))
            weights = (self.scores(x, y, causal, scale) - sums[-1][..., None]).exp()
            outs.append((weights * self.kept(weights.shape, p, drawn) @ z).transpose(0, 1))
        return torch.cat(outs), sums

    def slopes(
        self, starts: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: list[Tensor],
        causal: bool, scale: float, p: float, seed: int,
    ) -> list[Tensor]:  # fmt: skip
        """Gradients of q, k and v, with as many heads of keys as of queries."""
        found, drawn = [], torch.Generator().manual_seed(seed)
        for (g, x, o, y, z), lse in zip(self.rows(starts, [grad, q, out], [k, v]), sums, strict=True):
            weights = (self.scores(x, y, causal, scale) - lse[..., None]).exp()
            keep = self.kept(weights.shape, p, drawn)
            slope = weights * (keep * (g @ z.mT) - (g * o).sum(-1, keepdim=True)) * scale
            found.append([t.transpose(0, 1) for t in (slope @ y, slope.mT @ x, (weights * keep).mT @ g)])
        return [torch.cat(parts) for parts in zip(*found, strict=True)]


class Flash(Kernel):
    """torch's `_flash_attention_forward` and `_flash_attention_backward` of packed rows."""

    def __init__(self) -> None:
        super().__init__(ends=True)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_starts: Any, k_starts: Any, max_q: int, max_k: int, dropout: float,
        causal: bool, debug: bool, *, scale: float, window_size_left: int | None = None,
        window_size_right: int | None = None, seqused_k: Tensor | None = None,
    ) -> Any:  # fmt: skip
        assert not debug
        assert seqused_k is None or seqused_k.dtype == torch.int32
        self.sides, self.used = (window_size_left, window_size_right), seqused_k
        seed = int(torch.randint(2**31, ())) if dropout else 0
        out, sums = self.attend((q_starts, k_starts, max_q, max_k), q, k, v, causal, scale, dropout, seed)
        state = torch.tensor([seed, 0], dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        return out, torch.cat(sums, 1), *state, q.new_empty(0)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_starts: Any, k_starts: Any,
        max_q: int, max_k: int, dropout: float, causal: bool, state: Tensor, unused: Tensor, *, scale: float,
        window_size_left: int | None = None, window_size_right: int | None = None,
    ) -> Any:  # fmt: skip
        self.sides = window_size_left, window_size_right
        assert (state.dtype, unused.dtype) == (torch.uint64, torch.uint64)
        assert lse.shape == (q.shape[1], q.shape[0])
        assert lse.is_contiguous()
        sums = list(lse.split(q_starts.diff().tolist(), 1))
        starts, options = (q_starts, k_starts, max_q, max_k), (causal, scale, dropout, int(state[0]))
        dq, dk, dv = self.slopes(starts, grad, q, k, v, out, sums, *options)
        return dq, *[t.unflatten(1, (k.shape[1], -1)).sum(2) for t in (dk, dv)]


class Efficient(Kernel):
    """torch's `_efficient_attention_forward` and `_efficient_attention_backward`, which leave rows that meet nothing
    as they were in memory."""

    def __init__(self) -> None:
        super().__init__(ends=False)

    def check(self, q: Tensor, k: Tensor, v: Tensor, bias: Any, max_q: int, max_k: int) -> list[Tensor]:
        assert bias is None
        assert 0 < max_q <= q.shape[1]
        assert 0 < max_k <= k.shape[1]
        assert q.shape[2] == k.shape[2] == v.shape[2]
        for t in (q, k, v):
            assert t.shape[0] == 1
            assert not t.shape[3] * t.element_size() % 16
        return [t[0] for t in (q, k, v)]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Any, q_starts: Any, k_starts: Any, max_q: int, max_k: int,
        dropout: float, causal: int, with_sums: bool, *, scale: float, seqlen_k: Tensor | None = None,
    ) -> Any:  # fmt: skip
        assert with_sums == (seqlen_k is None)
        assert seqlen_k is None or seqlen_k.dtype == torch.int32
        self.used, self.ends = seqlen_k, causal == 2
        parts = self.check(q, k, v, bias, max_q, max_k)
        seed = int(torch.randint(2**31, ())) if dropout else 0
        out, sums = self.attend((q_starts, k_starts, max_q, max_k), *parts, bool(causal), scale, dropout, seed)
        lse = torch.full((len(sums), q.shape[2], -(-max_q // 32) * 32), math.nan, dtype=q.dtype)
        for i, found in enumerate(sums):
            lse[i, :, : found.shape[1]] = found
        keys = k_starts if seqlen_k is None else F.pad(seqlen_k.cumsum(0), (1, 0))
        out[self.alone(q_starts, keys, len(out))] = math.nan
        return out[None], lse, torch.tensor(seed), torch.tensor(0), max_q, max_k

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, q_starts: Any, k_starts: Any,
        max_q: int, max_k: int, lse: Tensor, dropout: float, seed: Tensor, offset: Tensor, causal: int,
        bias_learns: bool, *, scale: float,
    ) -> Any:  # fmt: skip
        assert not bias_learns
        assert offset.dtype == seed.dtype == torch.int64
        parts = self.check(q, k, v, bias, max_q, max_k)
        sums = [t[:, :n] for t, n in zip(lse, q_starts.diff().tolist(), strict=True)]
        starts, options = (q_starts, k_starts, max_q, max_k), (bool(causal), scale, dropout, int(seed))
        dq, dk, dv = self.slopes(starts, grad[0], *parts, out[0], sums, *options)
        dq[self.alone(q_starts, k_starts, len(dq))] = math.nan
        for t in (dk, dv):
            t[self.alone(k_starts, q_starts, len(t))] = math.nan
        return dq[None], dk[None], dv[None], torch.zeros(())

    def alone(self, starts: Tensor, others: Tensor, total: int) -> Tensor:
        """Positions of rows that are empty in the other operand."""
        return torch.repeat_interleave(others.diff() == 0, starts.diff(), output_size=total)


@contextmanager
def standing_in(monkeypatch: pytest.MonkeyPatch, name: str, stand_in: Any) -> Iterator[Any]:
    """A route of CUDA for all calls, on CPU, with a kernel that stands in for torch's."""
    module = importlib.import_module(f"tdc.kernels.attention.{name}")
    monkeypatch.setattr(scaled_dot_product, "backend", lambda call: name)
    monkeypatch.setattr(module, f"{name}_forward", stand_in.forward)
    monkeypatch.setattr(module, f"{name}_backward", stand_in.backward)
    torch._dynamo.reset()
    with torch.library._scoped_library("tdc", "IMPL") as library:
        library.impl(f"varlen_attention.{name}", module.forward_rows, "CPU")
        library.impl(f"varlen_attention_backward.{name}", module.backward_rows, "CPU")
        yield stand_in
