"""`torch.masked.sum` and the like of ragged batches in a graph.

    masked.sum(x, dim, mask=m) = sum(where(m, x, 0), dim)        others with their identity element

Eagerly torch's own Python runs, which asks no rule; Dynamo (torch 2.11-2.13) does not trace into `torch.masked`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tdc.core.rules import Rule, add_rule
from tdc.core.torch_functions import hand_on
from tdc.core.typing import Op
from tdc.ops.reduce.reduction import finite

MASKED: Any = torch.masked
FILLS: dict[Op, float] = {
    torch.sum: 0, torch.prod: 1, torch.amax: -math.inf, torch.amin: math.inf, torch.logsumexp: -math.inf,
    torch.argmax: -math.inf, torch.argmin: math.inf, torch.softmax: -math.inf, torch.log_softmax: -math.inf,
    F.softmin: math.inf, torch.cumsum: 0, torch.cumprod: 1,
}  # fmt: skip


def covered(x: Any, mask: Any, fill: float, dtype: Any = None) -> Any:
    """Elements outside the mask replaced."""
    x = x if dtype is None else x.to(dtype)
    return x if mask is None else torch.where(mask, x, finite(fill, x.dtype))


def all_of(x: Any, dim: Any) -> Any:
    """The dims that a reduction takes: none named are all."""
    return tuple(range(x.ndim)) if dim is None or dim == () else dim


def reduced(op: Op, input: Any, dim: Any = None, *, keepdim: bool = False, dtype: Any = None, mask: Any = None) -> Any:
    x = covered(input, mask, FILLS[op], dtype)
    if op in (torch.argmax, torch.argmin):
        return op(x, dim, keepdim).to(x.dtype)  # as torch.masked has it
    return op(x, all_of(x, dim), keepdim)


def along(op: Op, input: Any, dim: int, *, dtype: Any = None, mask: Any = None) -> Any:
    return op(covered(input, mask, FILLS[op], dtype), dim)


def norm(
    input: Any, ord: float = 2.0, dim: Any = None, *, keepdim: bool = False, dtype: Any = None, mask: Any = None
) -> Any:
    x = covered(input, mask, math.inf if ord == -math.inf else 0, dtype)
    return torch.linalg.vector_norm(x, ord, all_of(x, dim), keepdim)


def normalize(input: Any, ord: float, dim: int, *, eps: float = 1e-12, dtype: Any = None, mask: Any = None) -> Any:
    length = norm(input, ord, dim, keepdim=True, dtype=dtype, mask=mask)
    return covered(input, mask, 0, dtype) / length.clamp(min=eps)


def median(input: Any, dim: int = -1, *, keepdim: bool = False, dtype: Any = None, mask: Any = None) -> Any:
    own = input.dtype if dtype is None else dtype
    x = input if input.dtype.is_floating_point else input.float()
    out = torch.nanmedian(covered(x, mask, math.nan), dim, keepdim).values
    return out if input.dtype.is_floating_point else out.to(own)


def mean(input: Any, dim: Any = None, *, keepdim: bool = False, dtype: Any = None, mask: Any = None) -> Any:
    x = covered(input, mask, 0, dtype)
    return torch.sum(x, all_of(x, dim), keepdim) / real(x, mask, dim, keepdim)


def var(
    input: Any, dim: Any = None, unbiased: bool | None = None, *, correction: float | None = None,
    keepdim: bool = False, dtype: Any = None, mask: Any = None,
) -> Any:  # fmt: skip
    x = covered(input, mask, 0, dtype)
    less = correction if correction is not None else 1 if unbiased is None else int(unbiased)
    apart = covered(torch.sub(x, mean(x, dim, keepdim=True, mask=mask)), mask, 0)
    total = (apart * apart.conj()).sum(all_of(x, dim), keepdim)
    return total / (real(x, mask, dim, keepdim) - less).clamp(min=0)


def real(x: Any, mask: Any, dim: Any, keepdim: bool) -> Any:
    """The number of elements that the mask leaves."""
    return covered(torch.ones_like(x, dtype=torch.int64), mask, 0).sum(all_of(x, dim), keepdim)


RULES: dict[Op, Op] = {
    MASKED.mean: mean, MASKED.median: median, MASKED.var: var, MASKED.norm: norm, MASKED.normalize: normalize,
    MASKED.std: lambda *args, **kwargs: torch.sqrt(var(*args, **kwargs)),
    **{getattr(MASKED, op.__name__): partial(reduced, op) for op in list(FILLS)[:7]},
    **{getattr(MASKED, op.__name__): partial(along, op) for op in list(FILLS)[7:]},
}  # fmt: skip
hand_on(MASKED, tuple(RULES))
for _op, _impl in RULES.items():
    for _kind in ("nested", "masked"):
        add_rule(Rule(_op, _kind, "torch_masked", _impl, _op), rows=[])
