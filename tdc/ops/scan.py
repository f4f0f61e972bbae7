"""Scans of a TensorDict along a batch dim: cumulative sums and products, running extremes, differences.

Invariant: the batch size stays, except that `diff` makes its dim shorter.
"""

from __future__ import annotations

import torch

from tdc.ops.batch import NEEDED, along

for _op in (torch.cumsum, torch.cumprod, torch.logcumsumexp, torch.cummax, torch.cummin):
    along(_op, "dim", "scan", default=NEEDED)
along(torch.diff, "n dim prepend append", "scan", default=-1, spread=("prepend", "append"))
