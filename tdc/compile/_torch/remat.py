"""Recomputation in the graph of a whole step (torch 2.13-2.15), and tensors that wait in the memory of the host.

torch's pass refuses every operation that may draw random numbers: attention without dropout as well, which draws none.
Inductor draws from seeds; where they stand in the graph before torch's pass, all but the seeds can be computed again.

`to_host` and `from_host` are two operators, so that a graph may keep the copy between them. On the CPU both are copies.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from tdc.compile._torch.patches import patched
from tdc.core.dtypes import is_inexact
from tdc.core.operators import LIBRARY
from tdc.core.private import find, optional
from tdc.core.torch_functions import argument_names

PASS = "torch._functorch._activation_checkpointing.remat_using_tags_for_fwd_loss_bwd_graph_pass"
NAME = "remat_using_tags_for_fwd_loss_bwd_graph"


def is_seeded(op: Any) -> bool:
    """True if an operation may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a call draws random numbers; attention without dropout does not."""
    if not is_seeded(op):
        return False
    names = argument_names(op)
    given = dict(zip(names, args, strict=False)) | kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


@optional("random numbers drawn once", lost="memory of checkpoints that draw random numbers", instead=nullcontext)
def drawn_once(seeds: bool = False) -> AbstractContextManager[Any]:
    """A context: graphs of whole steps keep random draws (with `seeds`, for Inductor, seeds alone), and no others."""
    if not hasattr(find("torch._functorch.config"), NAME):  # before torch 2.13
        return nullcontext()
    again, seeding = find("torch._functorch.partitioners:must_recompute"), None
    if seeds:
        seeding = find("torch._inductor.fx_passes.replace_random:replace_random_passes")
    find(f"{PASS}:has_recomputable_rng_ops")
    run = partial(computed_again, find(f"{PASS}:{NAME}"), again, seeding)
    return patched((find(PASS), NAME, run))


def computed_again(
    run: Callable[[GraphModule], GraphModule], again: Callable[[Any], bool],
    seeding: Callable[[GraphModule], Any] | None, module: GraphModule,
) -> GraphModule:  # fmt: skip
    """Run torch's pass on a graph in which what draws is kept."""
    for node in calls(module):  # all parts of what was kept because something in it draws
        if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE and is_seeded(node.meta.get("original_aten")):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    if seeding is not None:
        seeding(module)
    for node in calls(module):
        if again(node) and draws(node.target, node.args, node.kwargs):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    with patched((find(PASS), "has_recomputable_rng_ops", lambda module: False)):
        return run(module)


def calls(module: GraphModule) -> list[torch.fx.Node]:
    """The nodes of a graph that call an operation."""
    return [node for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


# -- the memory of the host

LIBRARY.define("to_host(Tensor x) -> Tensor")
LIBRARY.define("from_host(Tensor x, Device device) -> Tensor")


def to_host(x: Tensor) -> Tensor:
    """Copy to the memory of the host, from an accelerator pinned and without waiting."""
    pinned = x.device.type != "cpu"
    return torch.empty_like(x, device="cpu", pin_memory=pinned).copy_(x, non_blocking=pinned)


def from_host(x: Tensor, device: torch.device) -> Tensor:
    """Copy back to a device, on the stream of the first copy, so that nothing waits."""
    return x.to(device, non_blocking=True, copy=True)


LIBRARY.impl("to_host", to_host, "CompositeExplicitAutograd")
LIBRARY.impl("from_host", from_host, "CompositeExplicitAutograd")
torch.library.register_fake("tdc::to_host", lambda x: torch.empty_like(x, device="cpu"), lib=LIBRARY)
torch.library.register_fake("tdc::from_host", lambda x, device: torch.empty_like(x, device=device), lib=LIBRARY)
ops: Any = torch.ops.tdc


def by_host(x: Tensor) -> Any:
    """Send a tensor by way of the host, without a derivative."""
    return ops.from_host(ops.to_host(x), x.device)


class ThroughHost(torch.autograd.Function):
    """A tensor by way of the host; its gradient goes straight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return by_host(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def through_host(x: Any) -> Any:
    """Send a floating-point or complex tensor by way of the host; return anything else as it is."""
    if not is_inexact(x):
        return x
    through: Any = ThroughHost
    return through.apply(x) if x.requires_grad else by_host(x)


def is_to_host(op: Any) -> bool:
    """True for `to_host`."""
    return op is ops.to_host.default


def drop_detours(graph: torch.fx.Graph) -> None:
    """Skip the host where a graph brings a tensor right back, as the forward pass does."""
    for node in graph.find_nodes(op="call_function", target=ops.to_host.default):
        source, back = node.args[0], [n for n in node.users if n.target is ops.from_host.default]
        if back and back[0].meta["val"].stride() == source.meta["val"].stride():
            back[0].replace_all_uses_with(source)
            graph.erase_node(back[0])
            if not node.users:
                graph.erase_node(node)
