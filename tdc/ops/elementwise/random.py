"""Random operations: dropout, gumbel_softmax, and new random batches like an existing one.

A NestedTensor draws for real elements only, a MaskedBatch for the whole rectangle, so one seed drops different elements
in the two. A TensorDict draws leaf after leaf.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import normal_dim
from tdc.core.dynamo import is_zero
from tdc.core.errors import DtypeError, UnsupportedError, describe, message
from tdc.core.rules import define
from tdc.layout.segments import spread
from tdc.ops.elementwise.pointwise import unary, unary_nested
from tdc.ops.rectangle import rectangle, repacked
from tdc.ops.reduce.along_dim import along_static, segments_of, with_elements
from tdc.ops.reduce.extremes import extreme_position
from tdc.ops.tensordict.batch import along
from tdc.ops.tensordict.leafwise import unary_tensordict
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.storage import Ragged, data_of, with_data


def gumbel_softmax_ragged(logits: Any, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Any:
    """A draw from the softmax along a static or ragged dim; `hard` is one-hot, with the derivative of the soft one.

    `eps` has no effect, as in torch.
    """
    data, d = data_of(logits), normal_dim(dim, logits.ndim, F.gumbel_softmax)
    if not data.is_floating_point():
        raise DtypeError(message("gumbel_softmax", "floating point logits", describe(logits), hint="x.float()"))
    if d == logits._batch_dim:
        hint = "name the dim of the choices, e.g. dim=-1"
        raise UnsupportedError(message("gumbel_softmax", "a static or ragged dim", "the batch", hint=hint))
    drawn = -torch.empty_like(data).exponential_().log()
    soft = torch.softmax(with_data(logits, (data + drawn) / tau), d)
    return one_hot(soft.detach(), d) - soft.detach() + soft if hard else soft


def one_hot(x: Any, dim: int) -> Ragged:
    """1 at the largest element along a static or ragged dim, 0 elsewhere."""
    if dim not in x.ragged_dims:
        return along_static(F.gumbel_softmax, x, dim, largest)
    if isinstance(x, MaskedBatch) or len(x.ragged_dims) > 1:
        return repacked(largest(rectangle(x, 0), dim), x)
    segments = segments_of(F.gumbel_softmax, x, dim)
    position = spread(extreme_position(segments, -math.inf), x.structure, segments.values.shape[0])
    return with_elements(x, dim, (position == segments.positions).to(x.dtype))


def largest(values: Tensor, axis: int) -> Tensor:
    """`one_hot` of a dense tensor; as it is where there is no element."""
    if is_zero(values.shape[axis]):
        return values
    return torch.zeros_like(values).scatter(axis, values.argmax(axis, True), 1.0)


for _op in (F.dropout, F.alpha_dropout, torch.rand_like, torch.randn_like, torch.randint_like):
    unary(_op, family="random")
define(
    torch.bernoulli, "random", nested=unary_nested(torch.bernoulli),
    masked=lambda x, *args, **kwargs: x.with_data(torch.bernoulli(x.filled(0), *args, **kwargs)),  # of padding 0
    tensordict=unary_tensordict(torch.bernoulli),
)  # fmt: skip
along(F.gumbel_softmax, "logits tau hard eps dim*=-1", "random", ragged=gumbel_softmax_ragged)
