"""Attention within rows on CUDA in half precision: torch's flash kernel, which takes packed rows as they are.

    q (N, H, D), k and v (M, G, D), offsets of both (B+1,)  ->  out (N, H, D), logsumexp (N, H), seed, offset

Offsets are int32. Backward draws the same dropout again, from seed and offset. The kernel wants a bound of the lengths,
which it reads on the device, so there is no sync. Groups of H / G heads share keys.

Invariants: exact for every length, zero included; the same bits for every bound that is large enough.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tdc.core.dynamo import constant
from tdc.core.torch_functions import flash_backward, flash_forward

contiguous = torch.ops.aten.contiguous  # the method asks for the device, which tensors without data may not have

ALIGNED = 8  # numbers of 16 bits in the 16 bytes that the kernel loads at once
EVERY_GPU = 192  # largest head size whose backward runs on every GPU that has the kernel


@constant
def largest_head(device: torch.device) -> int:
    """The largest head size the kernel has on a device: 0 where there is none, `EVERY_GPU` where no GPU is at hand."""
    if torch.version.hip is not None or flash_forward is None or flash_backward is None:
        return 0  # with HIP the logsumexp has another layout (torch 2.11)
    version = capability(device)
    if version is None:
        return EVERY_GPU
    if version < (8, 0) or not torch.backends.cuda.is_flash_attention_available():
        return 0
    return 256 if version in ((8, 0), (9, 0)) else EVERY_GPU


@cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """The version of a GPU, which takes microseconds to ask for; None where none is at hand."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


def forward_rows(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor | None, max_q: int, max_k: int, window: int,
    causal: bool, scale: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """q (N, H, D), k, v (M, G, D), offsets (B+1,), bounds of lengths -> what the operator gives."""
    if gives_zeros(q, k, dropout):
        out, lse = zeros(q), q.new_zeros(q.shape[:2], dtype=torch.float32)
        return out, lse, torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_zeros((), dtype=torch.uint64)
    starts = q_offsets, q_offsets if k_offsets is None else k_offsets
    parts, options = [loadable(t) for t in (q, k, v)], (dropout, causal, False)
    found = flash_forward(*parts, *starts, max_q, max_k, *options, scale=scale, **sides_of(window, causal))
    out, lse, seed, offset, *_ = found
    return contiguous(out), contiguous(lse.t()), seed, offset


def backward_rows(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_offsets: Tensor,
    k_offsets: Tensor | None, seed: Tensor, offset: Tensor, max_q: int, max_k: int, window: int, causal: bool,
    scale: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    if gives_zeros(q, k, dropout):
        return zeros(q), zeros(k), zeros(v)
    starts = q_offsets, q_offsets if k_offsets is None else k_offsets
    parts = [loadable(t) for t in (grad, q, k, v, out)]
    options = max_q, max_k, dropout, causal, seed, offset
    dq, dk, dv = flash_backward(*parts, contiguous(lse.t()), *starts, *options, scale=scale, **sides_of(window, causal))
    return contiguous(dq), contiguous(dk), contiguous(dv)


def gives_zeros(q: Tensor, k: Tensor, dropout: float) -> bool:
    """True if all results are 0, without a kernel: there is nothing to attend to, or dropout leaves nothing."""
    return q.shape[0] == 0 or k.shape[0] == 0 or dropout >= 1


def zeros(t: Tensor) -> Tensor:
    return torch.zeros_like(t, memory_format=torch.contiguous_format)


def sides_of(window: int, causal: bool) -> dict[str, int]:
    """Number of keys that a query sees to the left and to the right of its own position."""
    if not window:
        return {}
    return {"window_size_left": window - 1, "window_size_right": 0 if causal else window - 1}


def loadable(t: Tensor) -> Tensor:
    """A tensor (N, H, D) with all its rows aligned for the kernel; else a copy."""
    starts = (t.storage_offset(), *t.stride()[:2])
    if t.stride(2) == 1 and all([s % ALIGNED == 0 for s in starts]):
        return t
    return t.clone(memory_format=torch.contiguous_format)
