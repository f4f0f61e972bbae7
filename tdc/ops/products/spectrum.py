"""Decompositions of square matrices of different sizes, each in a corner of one rectangle.

    [A 0 0]
    [0 r 0]    0 < r < s, larger than all eigenvalues and singular values of A
    [0 0 s]

The spectrum of this block-diagonal matrix is that of A and the numbers behind it, and its vectors are those of A with 0
behind them. So `eigh`, `eig` and `svd` of such a rectangle hold those of A, and the numbers say where: all of them are
above a limit that the spectrum of A stays below. They are distinct, so that no derivative divides by 0, and at most
twice as large as the matrix lets its spectrum be, so that they cost no digits.

Functions here take matrices (B, *S, L, L), 0 behind those that are smaller, and `beyond` (B, L), True there. Results
have what belongs to a matrix in front, in the order that torch gives.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.typing import Op


def apart(data: Tensor, beyond: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices with distinct numbers behind them, and the limit between their spectrum and these, (B, *S, 1).

    Args:
        read: the part of each matrix that its decomposition reads.
    """
    n, sizes = data.shape[-1], read.detach().abs()
    least = torch.finfo(sizes.dtype).tiny / torch.finfo(sizes.dtype).eps  # whose inverse is finite
    bound = F.pad(sizes.sum(-1) + sizes.sum(-2), (0, 1)).amax(-1, keepdim=True).clamp(min=least)
    steps = 1 + torch.arange(1, n + 1, device=data.device) / (n + 1)
    added = torch.where(along_rows(beyond, data), bound * steps.to(sizes.dtype), 0)
    return data + torch.diag_embed(added), bound * (1 + 0.5 / (n + 1))


def along_rows(beyond: Tensor, data: Tensor) -> Tensor:
    """`beyond` as it broadcasts against the rows (B, *S, L) of matrices."""
    return beyond.view(beyond.shape[0], *[1] * (data.ndim - 3), beyond.shape[1])


def in_front(values: Tensor, limit: Tensor) -> Tensor:
    """The order that has the values of a matrix first, and then those behind it."""
    return (values.detach().abs() > limit).to(torch.uint8).argsort(stable=True, dim=-1)


def columns(vectors: Tensor, order: Tensor) -> Tensor:
    return vectors.gather(-1, order.unsqueeze(-2).expand(vectors.shape))


def eigh(op: Op, data: Tensor, beyond: Tensor, UPLO: str = "L") -> Any:
    """`eigh` and `eigvalsh`, in ascending order: what is behind a matrix comes last."""
    read = torch.triu(data) if UPLO in ("U", "u") else torch.tril(data)
    return op(apart(data, beyond, read)[0], UPLO)


def eig(data: Tensor, beyond: Tensor) -> Any:
    ready, limit = apart(data, beyond, data)
    out = torch.linalg.eig(ready)
    order = in_front(out[0], limit)
    return type(out)((out[0].gather(-1, order), columns(out[1], order)))


def values(op: Op, data: Tensor, beyond: Tensor, **kwargs: Any) -> Tensor:
    """`eigvals` and `svdvals`."""
    ready, limit = apart(data, beyond, data)
    out = op(ready, **kwargs)
    return out.gather(-1, in_front(out, limit))


def svd(op: Op, data: Tensor, beyond: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`torch.linalg.svd`, which gives the second vectors as rows, and `torch.svd`, which gives columns."""
    ready, limit = apart(data, beyond, data)
    out = op(ready, *args, **kwargs)
    order = in_front(out[1], limit)
    second = columns(out[2], order) if op is torch.svd else columns(out[2].mT, order).mT
    return type(out)((columns(out[0], order), out[1].gather(-1, order), second))


def by_rank(op: Op, data: Tensor, beyond: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`pinv` and `matrix_rank`: 0 adds no rank, and the tolerance is that of the size of each matrix."""
    if not args and all([kwargs.get(name) is None for name in ("rtol", "rcond", "tol")]):
        size = (~beyond).sum(-1).view(-1, *[1] * (data.ndim - 3)).expand(data.shape[:-2])
        rtol = size * torch.finfo(data.dtype).eps
        atol = kwargs.get("atol")
        given = {name: v for name, v in kwargs.items() if name not in ("rtol", "rcond", "tol", "atol")}
        absolute = torch.zeros_like(rtol) if atol is None else torch.as_tensor(atol, device=data.device)
        return op(data, atol=absolute, rtol=torch.where(absolute > 0, 0, rtol), **given)
    return op(data, *args, **kwargs)
