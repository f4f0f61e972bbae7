"""Gated units: one half of the features, times the sigmoid of the other.

    glu(x, d)     (B, -1, 2 D) -> (B, -1, D)     a static dim of a ragged batch, a batch dim of a TensorDict

A ragged dim has no halves that all rows share, so it is refused; `x.chunk(2, d)` says what to do with odd rows.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from tdc.core.arguments import normal_dim
from tdc.core.errors import ShapeError, describe, message
from tdc.core.rules import Rule, add_rule
from tdc.ops.batch import along
from tdc.ops.segments import along_static


def glu_ragged(input: Any, dim: int = -1) -> Any:
    """
    Raises:
        ShapeError: `dim` is the batch, ragged or of odd size.
    """
    d = normal_dim(dim, input.ndim, F.glu)
    if d == input._batch_dim or d in input.ragged_dims or input.shape[d] % 2:
        got = f"dim {dim} of {describe(input)}"
        hint = "name the dim of the features, 2 * D of them, e.g. behind nn.Linear(D, 2 * D)"
        raise ShapeError(message("glu", "a static dim of even size", got, hint=hint))
    return along_static(F.glu, input, d, F.glu)


for _kind in ("nested", "masked"):
    add_rule(Rule(F.glu, _kind, "pointwise", glu_ragged, F.glu, source="torch.nn.GLU"))
along(F.glu, "dim", "pointwise", default=-1)
