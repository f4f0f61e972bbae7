"""Functions that torch hands on to containers eagerly only: the list that Dynamo goes by leaves them out.

In a graph Dynamo (torch 2.11-2.13) hands a call on to a class only if `torch.overrides.get_overridable_functions` has
the function, and refuses containers as arguments of any other of torch's. What is missing there is put there here;
what was compiled before `tdc` was imported keeps the list that Dynamo had then.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tdc.core.typing import Op

LEFT_OUT: dict[Any, tuple[Op, ...]] = {
    torch: (torch.fill, torch.rand_like, torch.randn_like, torch.randint_like),
    F: (F.hardsigmoid, F.hardswish),
}


def hand_on(module: Any, ops: tuple[Op, ...]) -> None:
    """Put functions of a module into torch's list of those that it hands on."""
    known = torch.overrides.get_overridable_functions()[module]
    known += [op for op in ops if op not in known]


for _module, _ops in LEFT_OUT.items():
    hand_on(_module, _ops)
