"""torch functions that call a function: `torch.utils.checkpoint.checkpoint`, `torch.compiler.nested_compile_region`.

Eagerly it hands containers on as they are. In a graph containers are flattened outside of the operator and built
again inside (torch 2.11-2.13; torch 2.11 lets only tensors come out). A region of containers is traced in place: one
of tensors alone is compiled once, but torch takes no closure over a container for it (torch 2.13-2.15).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from tdc.core import pytree
from tdc.core.rules import DISPATCH, IMPLS
from tdc.core.torch_functions import checkpoint_operator, region_operator


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint` with containers among the arguments, as Dynamo traces it."""
    flat, spec = pytree.tree_flatten(args)

    def inner(*leaves: Any, **named: Any) -> Any:
        return function(*pytree.tree_unflatten(list(leaves), spec), **named)

    return torch.utils.checkpoint.checkpoint(inner, *flat, **kwargs)


def region(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function marked by `torch.compiler.nested_compile_region` with containers, as Dynamo traces it."""
    return function(*args, **kwargs)


for _kind in DISPATCH:
    DISPATCH[_kind][region_operator] = f"{_kind}_region"
    IMPLS[f"{_kind}_region"] = region
    DISPATCH[_kind][checkpoint_operator] = f"{_kind}_checkpoint"
    IMPLS[f"{_kind}_checkpoint"] = checkpoint
