"""Factories: new batches in the structure of an existing one.

Invariant: a result shares the structure object of its model, so the two combine without a comparison of offsets.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tdc._rules import Rule, add_rule
from tdc._structure import local_ids
from tdc._typing import Op
from tdc.nested import NestedTensor
from tdc.ops.batch import lift
from tdc.ops.pointwise import unary
from tdc.ops.shape import ints
from tdc.tensordict import TensorDict


def positions(x: NestedTensor) -> NestedTensor:
    """The place of every element within its row: 0, 1, 2, … for each row anew.

    Shapes:
        `(B, *S0, -1, *S1) -> (B, -1)`; with several ragged dims the place in the flattened row.

    Dtypes:
        int64.

    Compile:
        Traceable, one graph for all lengths; nothing is read on the host.

    Example:
        >>> from tdc.nested import pack
        >>> positions(pack([torch.zeros(2, 8), torch.zeros(3, 8)])).values
        tensor([0, 1, 0, 1, 2])
    """
    s = x.structure
    places = local_ids(s, x.values.shape[s.packed_dim])
    same = s.packed_dim == 0 and s.ragged_ndim == 1 and s.batch_dim == 0
    return x.with_values(places) if same else NestedTensor(places, s.offsets)


def new_tensordict(name: str, x: TensorDict, *size: Any, **kwargs: Any) -> TensorDict:
    """`new_zeros`, `new_ones`, `new_empty`: sizes are those of the batch, features stay."""
    given = ints(size)
    return lift(x, lambda v: getattr(v, name)((*given, *v.shape[x.ndim :]), **kwargs), size=given, op=name)


def new_full_tensordict(x: TensorDict, size: Any, fill_value: Any, **kwargs: Any) -> TensorDict:
    return lift(x, lambda v: v.new_full((*size, *v.shape[x.ndim :]), fill_value, **kwargs), size=size, op="new_full")


def factory(op: Op, impl: Op) -> None:
    """A row for a new TensorDict like another."""
    add_rule(Rule(op, "tensordict", "factory", impl, op))


for _op in (torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like):
    unary(_op, family="factory")
factory(torch.Tensor.new_zeros, partial(new_tensordict, "new_zeros"))
factory(torch.Tensor.new_ones, partial(new_tensordict, "new_ones"))
factory(torch.Tensor.new_empty, partial(new_tensordict, "new_empty"))
factory(torch.Tensor.new_full, new_full_tensordict)
