"""Tensors that wait in the memory of the host: two operations, so that a graph may keep what lies between them.

    to_host(x)                  a copy on the CPU, of an accelerator in pinned memory and without waiting
    from_host(copy, device)     the numbers again

On the CPU both are copies: the same graph, with the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.operators import LIBRARY

LIBRARY.define("to_host(Tensor x) -> Tensor")
LIBRARY.define("from_host(Tensor x, Device device) -> Tensor")


def to_host(x: Tensor) -> Tensor:
    """A copy in the memory of the host."""
    pinned = x.device.type != "cpu"
    return torch.empty_like(x, device="cpu", pin_memory=pinned).copy_(x, non_blocking=pinned)


def from_host(x: Tensor, device: torch.device) -> Tensor:
    """A copy of such a tensor on a device. The stream that made the one makes the other, so nothing waits."""
    return x.to(device, non_blocking=True, copy=True)


LIBRARY.impl("to_host", to_host, "CompositeExplicitAutograd")
LIBRARY.impl("from_host", from_host, "CompositeExplicitAutograd")
torch.library.register_fake("tdc::to_host", lambda x: torch.empty_like(x, device="cpu"), lib=LIBRARY)
torch.library.register_fake("tdc::from_host", lambda x, device: torch.empty_like(x, device=device), lib=LIBRARY)
ops: Any = torch.ops.tdc


def by_host(x: Tensor) -> Any:
    """A tensor by way of the host, with no derivative."""
    return ops.from_host(ops.to_host(x), x.device)


class ThroughHost(torch.autograd.Function):
    """A tensor by way of the host; its gradient takes no such way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return by_host(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def through_host(x: Any) -> Any:
    """A floating-point or complex tensor by way of the host; anything else as it is."""
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    through: Any = ThroughHost
    return through.apply(x) if x.requires_grad else by_host(x)


def is_to_host(op: Any) -> bool:
    """Whether an operation is `to_host`."""
    return op is ops.to_host.default


def drop_detours(graph: torch.fx.Graph) -> None:
    """Take a tensor itself where a graph brings it back right after it went to the host: the forward pass does, since
    both passes are made of one function."""
    for node in graph.find_nodes(op="call_function", target=ops.to_host.default):
        source, back = node.args[0], [n for n in node.users if n.target is ops.from_host.default]
        if back and back[0].meta["val"].stride() == source.meta["val"].stride():
            back[0].replace_all_uses_with(source)
            graph.erase_node(back[0])
            if not node.users:
                graph.erase_node(node)
