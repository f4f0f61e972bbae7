"""Factories: new batches in the structure of an existing one.

Invariant: a result shares the structure object of its model, so the two combine without a comparison of offsets.
"""

from __future__ import annotations

import torch

from tdc._structure import local_ids
from tdc.nested import NestedTensor
from tdc.ops.pointwise import unary


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


for _op in (torch.zeros_like, torch.ones_like, torch.full_like):
    unary(_op, family="factory")
