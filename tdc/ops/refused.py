"""Operations that are refused for ragged batches and belong to no file of a family."""

from __future__ import annotations

import torch.nn.functional as F

from tdc.core.rules import unsupported

unsupported(
    F.pdist, ["nested", "masked"], "distances of n positions, n (n - 1) / 2 in each row, which no lengths hold",
    family="linalg", hint="torch.cdist(x, x), both halves of the matrix of each row",
)  # fmt: skip
