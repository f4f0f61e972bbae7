"""Modules as functions of their parameters.

    params = from_module(net)                       TensorDict, nested as the module tree
    y = functional_call(net, params, (x,))          the same net with these parameters instead

The module itself is a template: nothing of it is changed. So a training step is a function `(params, state, batch) ->
(params, state, loss)` that compiles as one graph, and an ensemble is that function under `vmap`.

Invariant: a tied parameter, registered under two names, is the same tensor object under both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tdc._typing import KeyPath
from tdc.tensordict import TensorDict


def from_module(module: nn.Module, *, params: bool = True, buffers: bool = True) -> TensorDict:
    """Parameters and buffers of a module as a TensorDict, nested as the module tree.

    Shapes:
        batch_size `[]`; stack several for an ensemble.

    Args:
        params, buffers: which of the two to take.

    Returns:
        The tensors themselves, detached from autograd but sharing memory with the module.

    Example:
        >>> td = from_module(nn.Sequential(nn.Linear(3, 4)))
        >>> td["0", "weight"].shape, td.keys(include_nested=True, leaves_only=True)
        (torch.Size([4, 3]), (('0', 'weight'), ('0', 'bias')))
    """
    seen: dict[int, torch.Tensor] = {}
    leaves: dict[KeyPath, torch.Tensor] = {}
    named = [*module.named_parameters(remove_duplicate=False)] if params else []
    named += [*module.named_buffers(remove_duplicate=False)] if buffers else []
    for name, tensor in named:
        leaves[tuple(name.split("."))] = seen.setdefault(id(tensor), tensor.detach())
    return TensorDict(leaves)


def functional_call(
    module: nn.Module, params: TensorDict, args: Any = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Call a module with the parameters and buffers of `params` instead of its own.

    Args:
        params: as from `from_module`; names that are missing are taken from the module.
        args: positional arguments of the module, a tuple; anything else is the one argument.

    Compile:
        fullgraph, and under `torch.func.grad` and `torch.vmap`.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> functional_call(net, from_module(net) * 0, (torch.ones(3, 2),)).tolist()
        [[0.0], [0.0], [0.0]]

    Source:
        `torch.func.functional_call`.
    """
    named = {".".join(path): leaf for path, leaf in params._leaves.items()}
    return torch.func.functional_call(module, named, args, dict(kwargs or {}))
