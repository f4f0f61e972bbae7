"""Looking up positions: index_select."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import normal_dim
from tdc.core.errors import DtypeError, describe, message
from tdc.core.rules import Rule, add_rule
from tdc.core.typing import Op
from tdc.ops.batch import lift
from tdc.ragged.index_forms import FULL
from tdc.ragged.index_nested import index_rows
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.tensordict.indexing import picker
from tdc.tensordict.tensordict import TensorDict


def flat_index(index: Any) -> Tensor:
    """The index of `index_select`, one dim.

    Raises:
        DtypeError: it is no tensor.
    """
    if not isinstance(index, Tensor):
        hint = "torch.tensor([0, 2]), or x[[0, 2]]"
        raise DtypeError(message("index_select", "an index tensor", describe(index), hint=hint))
    return index.reshape(-1)


def index_select_nested(x: NestedTensor, dim: int, index: Tensor) -> Any:
    """Rows, static places, or places that every row has: then the result is dense."""
    axis, flat = x.structure.axis(dim, x.ndim, "index_select"), flat_index(index)
    if axis is None:
        return index_rows(x, flat)
    if axis == x.structure.packed_dim:
        return x[(FULL,) * normal_dim(dim, x.ndim, "index_select") + (flat,)]
    return x.with_values(x.values.index_select(axis, flat))


def index_select_masked(x: MaskedBatch, dim: int, index: Tensor) -> Any:
    return x[(FULL,) * normal_dim(dim, x.ndim, "index_select") + (flat_index(index),)]


def index_select_tensordict(x: TensorDict, dim: int, index: Tensor) -> TensorDict:
    d, of = normal_dim(dim, x.ndim, "index_select"), picker(flat_index(index))
    return lift(x, lambda v: v.index_select(d, index) if d or isinstance(v, Tensor) else of(v), op="index_select")


def index_rule(op: Op, **impls: Op) -> None:
    """Rows for an indexing operation."""
    for kind, impl in impls.items():
        add_rule(Rule(op, kind, "indexing", impl, op))


index_rule(
    torch.index_select, nested=index_select_nested, masked=index_select_masked, tensordict=index_select_tensordict
)
