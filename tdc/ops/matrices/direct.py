"""Products of each example that are one call of torch's: what `x @ w` and `x.mT @ y` take where nobody differentiates.

    (B, -1, D) @ (B, D, E)     (B, -1, E)
    (B, D, -1) @ (B, -1, E)    (B, D, E)

The way through letters, sizes and the operator gives the same results, and takes as long as products of small matrices.

Invariant: only what the operator, too, hands to `F.grouped_mm` on CPU is computed here; all else is None.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.container import Container
from tdc.core.dynamo import readable
from tdc.core.operators import only_results
from tdc.ops.matrices.cpu import GROUPED, grouped
from tdc.ops.segments.operator import serves
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.segments import offsets_int32


def product_of_groups(a: NestedTensor, b: NestedTensor | Tensor) -> NestedTensor | Tensor | None:
    """`a @ b` by one call; None where it is another product, or not to be had so."""
    if not readable():
        return None
    s, left, right = a._structure, a._values, b._values if isinstance(b, NestedTensor) else b
    turned = s.packed_dim == 1
    if left.ndim != 2 or s.batch_dim or s.ragged_ndim > 1 or right.ndim != 3 - turned:
        return None
    if turned:
        t = b._structure if isinstance(b, NestedTensor) else None
        fits = t is not None and t.offsets is s.offsets and t.ragged_ndim == 1 and not (t.packed_dim or t.batch_dim)
    else:
        fits = not isinstance(b, Container) and right.shape[:2] == (s.batch_size, left.shape[1])
    if not fits or not is_plain(left.t() if turned else left, right):
        return None
    y = F.grouped_mm(left, right, offs=offsets_int32(s)[1:])
    return y if turned else build_nested(s, y)


def is_plain(left: Tensor, right: Tensor) -> bool:
    """Whether torch's loop over groups takes operands as they lie, and their product is wanted for itself alone."""
    lie = left.is_contiguous() and right.is_contiguous() and left.dtype == right.dtype and left.dtype in GROUPED
    if not lie or not left.numel() or not right.numel() or not grouped(left, left.shape[1], right.shape[-1]):
        return False
    return serves(left) and serves(right) and not torch.is_autocast_enabled("cpu") and only_results(left, right)
