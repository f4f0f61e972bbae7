"""Order of a TensorDict along a batch dim, for each leaf and feature by itself.

Indices have the shape of the values, features among them: `torch.take_along_dim(td, td.argsort(0), 0)` sorts each
feature on its own. To order whole examples by one key: `td[td["key"].argsort()]`.

Invariant: what would give leaves of different sizes (`unique`) is refused, since a TensorDict has one batch size.
"""

from __future__ import annotations

import torch

from tdc._rules import Rule, add_rule, unsupported
from tdc.ops.batch import along, lift
from tdc.tensordict import TensorDict


def msort_tensordict(x: TensorDict) -> TensorDict:
    return lift(x, torch.msort, size=x.batch_size, op="msort")


along(torch.sort, "dim descending stable", "sort", default=-1)
along(torch.argsort, "dim descending stable", "sort", default=-1)
along(torch.topk, "k dim largest sorted", "sort", default=-1)
along(torch.kthvalue, "k dim keepdim", "sort", default=-1)
add_rule(Rule(torch.msort, "tensordict", "sort", msort_tensordict, torch.msort))

for _op in (torch.unique, torch.unique_consecutive):
    unsupported(
        _op, ["tensordict"], "results of other sizes from leaf to leaf", family="sort",
        hint="of one leaf: td['key'].unique()",
    )  # fmt: skip
unsupported(
    torch.searchsorted, ["tensordict"], "sorted sequences that lie along the last dim, which are features",
    family="sort", hint="of one leaf: torch.searchsorted(td['key'], values); torch.bucketize(td, boundaries)",
)  # fmt: skip
