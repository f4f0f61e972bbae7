"""Products with weights: linear.

A weight meets every position, so in a padded batch its gradient would read padding. The rule therefore fills padding
with 0 before the product and cuts it off behind it: NaN there reaches neither the result nor the weight's gradient.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tdc._errors import ShapeError, message
from tdc._rules import Rule, add_rule
from tdc._typing import OpName
from tdc.masked import MaskedBatch
from tdc.nested import NestedTensor


def last_is_static(x: NestedTensor | MaskedBatch, op: OpName, count: int) -> None:
    """The last `count` dims are features, neither ragged nor the batch.

    Raises:
        ShapeError: one of them is not.
    """
    if isinstance(x, NestedTensor):
        s, static = x._structure, x._values.ndim - count
        fits = s.packed_dim < static and s.batch_dim < static + s.ragged_ndim
    else:
        fits = max(x.ragged_dims[-1], x.batch_dim) < x.ndim - count
    if not fits:
        got = f"shape {list(x.shape)} with ragged dims {x.ragged_dims}"
        raise ShapeError(
            message(op, f"{count} static dims at the end", got, hint="transpose the ragged dim to the front")
        )


def linear_nested(input: NestedTensor, weight: Tensor, bias: Tensor | None = None) -> NestedTensor:
    """One product over all real positions: (B, -1, I) -> (B, -1, O)."""
    last_is_static(input, "linear", 1)
    return input.with_values(F.linear(input._values, weight, bias))


def linear_masked(input: MaskedBatch, weight: Tensor, bias: Tensor | None = None) -> MaskedBatch:
    last_is_static(input, "linear", 1)
    out: Any = F.linear(input.filled(0), weight, bias)
    return input.with_data(out.masked_fill(~input.mask, 0))


add_rule(Rule(F.linear, "nested", "linalg", linear_nested, F.linear, source="torch.nn.Linear"))
add_rule(Rule(F.linear, "masked", "linalg", linear_masked, F.linear, source="torch.nn.Linear"))
