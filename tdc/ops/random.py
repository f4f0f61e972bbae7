"""Random operations: dropout.

Random numbers are drawn for real elements only in a NestedTensor and for the whole rectangle in a MaskedBatch, so the
same seed drops different elements in the two.
"""

from __future__ import annotations

import torch.nn.functional as F

from tdc.ops.pointwise import unary

unary(F.dropout, family="random")
