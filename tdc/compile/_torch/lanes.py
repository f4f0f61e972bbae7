"""One level of vmap around a function, without the form of its arguments and results (torch 2.11-2.15).

`torch.vmap` takes pytrees apart, checks them and puts results together: more than most blocks cost, and a thousand
lines for Dynamo to trace. Here tensors are lists already, and what the function does not map stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from tdc.compile._torch.levels import add_batch_dim, level_of_vmap, remove_batch_dim
from tdc.compile._torch.patches import patched
from tdc.compile._torch.vmap_rules import register_rules
from tdc.core.dynamo import is_batched, scripting
from tdc.core.private import find, nothing, optional

NESTING = ("_vmap_increment_nesting", "_vmap_decrement_nesting")


def map_lanes(fn: Callable[..., Sequence[Any]], tensors: Sequence[Tensor], count: int) -> tuple[list[Any], list[bool]]:
    """The results of `fn` for each of `count` examples, which are the first dim of tensors, and which are mapped.

    A result is mapped where it is a tensor that differs between examples; any other is returned once.
    """
    given: list[Tensor] = []
    found: list[Any] = []
    mapped: list[bool] = []
    with level_of_vmap(count, "different") as level:
        for x in tensors:  # loops, not comprehensions: a graph is traced through them faster
            given.append(add_batch_dim(x, 0, level))
        for x in fn(*given):
            mapped.append(isinstance(x, Tensor) and is_batched(x))
            found.append(remove_batch_dim(x, level, count, 0) if mapped[-1] else x)
    return found, mapped


@optional("vmap in loops exported", lost="exports of tdc.batch with loops", instead=nullcontext)
def levels_in_loops() -> AbstractContextManager[Any]:
    """Let torch.export say of the nodes that begin and end a level that they return nothing. It does so outside of
    loops, and finds that they lack a value inside (torch 2.13)."""
    check = find("torch._export.verifier:_check_val")

    def checked(node: Any) -> None:
        if getattr(node.target, "__name__", "") in NESTING:
            node.meta.setdefault("val", None)
        check(node)

    return patched((find("torch._export.verifier"), "_check_val", checked))


@cache
def load_decompositions() -> None:
    """Have torch load what vmap needs for some operations, as its first vmap does, and what it has not."""
    with scripting():
        torch.vmap(torch.neg)(torch.zeros(1))
    register_rules()
    keep_levels()


@optional("levels of vmap kept in exports", lost="exports of tdc.batch with loops", instead=nothing)
def keep_levels() -> None:
    """Keep torch.export from dropping the ends of levels from loops, as it does (torch 2.13)."""
    for name in NESTING:
        has_side_effect(find(f"torch._functorch.predispatch:{name}"))


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether somebody listens to the calls of a module. Can be traced."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
