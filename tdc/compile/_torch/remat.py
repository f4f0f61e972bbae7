"""What torch computes again in the graph of a whole step, whose forward and backward part its pass knows (torch
2.13-2.15).

It refuses every operation that may draw random numbers: attention without dropout as well, which draws none. Inductor
draws from seeds; where they stand in the graph before torch's pass, all but the seeds can be computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from tdc.compile._torch.patches import patched
from tdc.core.private import find, optional
from tdc.core.torch_functions import argument_names

PASS = "torch._functorch._activation_checkpointing.remat_using_tags_for_fwd_loss_bwd_graph_pass"
NAME = "remat_using_tags_for_fwd_loss_bwd_graph"


def is_seeded(op: Any) -> bool:
    """Whether an operation may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an operation draws random numbers: attention with a dropout of 0 does not."""
    if not is_seeded(op):
        return False
    names = argument_names(op)
    given = dict(zip(names, args, strict=False)) | kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


@optional("random numbers drawn once", lost="memory of checkpoints that draw random numbers", instead=nullcontext)
def drawn_once(seeds: bool = False) -> AbstractContextManager[Any]:
    """A context: in graphs of whole steps that are compiled in it, what is drawn at random is drawn once, and all else
    computed again; with `seeds`, which is for Inductor, seeds only are drawn once."""
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
    """torch's pass, on a graph in which what draws is kept, whoever wants it to be computed again."""
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
