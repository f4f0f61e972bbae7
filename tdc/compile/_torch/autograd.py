"""Autograd in the graph that Dynamo traces (torch 2.13-2.15): forward and backward of a function as one graph.

Dynamo takes `torch.autograd.grad` where a setting says so, which no public function sets for one call.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from tdc.core.dynamo import constant
from tdc.core.private import find, nothing, optional


@cache
@optional("autograd in graphs", lost="loops in tdc.grad and train_step", instead=nothing)
def setting() -> AbstractContextManager[Any] | None:
    """A context that Dynamo knows, in which it traces `torch.autograd.grad`; None where this torch does not trace it,
    nor a tensor of the graph that begins to require grad (before 2.13)."""
    config, log = find("torch._dynamo.config"), find("torch._dynamo.symbolic_convert:SpeculationLog")
    if not hasattr(log, "graph_break_on_requires_grad_") or not hasattr(config, "trace_autograd_ops"):
        return None
    found: AbstractContextManager[Any] = find("torch._dynamo.decorators:DynamoConfigPatchProxy")(
        find("torch._dynamo.config:patch")(trace_autograd_ops=True)
    )
    return found


@constant
def is_recordable() -> bool:
    """Whether a graph may hold `torch.autograd.grad`."""
    return setting() is not None


@constant
def recording() -> AbstractContextManager[Any]:
    """The context in which Dynamo traces `torch.autograd.grad`, where `is_recordable`."""
    found = setting()
    assert found is not None
    return found
