"""Random operations: dropout, and new random batches like an existing one.

Random numbers are drawn for real elements only in a NestedTensor and for the whole rectangle in a MaskedBatch, so the
same seed drops different elements in the two. A TensorDict draws leaf after leaf.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tdc._rules import Rule, add_rule
from tdc.masked import MaskedBatch
from tdc.ops.leafwise import unary_tensordict
from tdc.ops.pointwise import unary, unary_nested


def bernoulli_masked(x: MaskedBatch, *args: Any, **kwargs: Any) -> MaskedBatch:
    """Padding is no probability, and draws 0."""
    return x.with_data(torch.bernoulli(x.filled(0), *args, **kwargs))


for _op in (F.dropout, F.alpha_dropout):
    unary(_op, family="random")
for _op in (torch.rand_like, torch.randn_like, torch.randint_like):
    unary(_op, family="random")
for _kind, _impl in (
    ("nested", partial(unary_nested, torch.bernoulli)),
    ("masked", bernoulli_masked),
    ("tensordict", partial(unary_tensordict, torch.bernoulli)),
):
    add_rule(Rule(torch.bernoulli, _kind, "random", _impl, torch.bernoulli))
