"""Autograd in the graph that Dynamo traces: forward and backward of a function as one graph (torch 2.13-2.15).

Dynamo takes `torch.autograd.grad` where a setting says so, which no public function sets for one call.

`torch.func.grad` puts a level of a transform around its function, and torch's loop operators have no rule for one: they
fail, or give wrong numbers. `torch.autograd.grad` needs no level; but its result takes no part in autograd, and it
refuses some of what `torch.func.grad` takes. So a graph is traced with the first, and once more with the second if a
loop operator was found inside.

    begin()                     at a gradient; True if autograd is to take it
    retrace(context)            at an operator under a transform: trace the graph again, if that helps
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from weakref import WeakSet

import torch

from tdc.compile._torch.dynamo import has_comptime
from tdc.core.dynamo import constant, interpreter_stack
from tdc.core.private import find, nothing, optional

internals: Any = torch  # parts of torch without types
WITH_LOOPS: WeakSet[Any] = WeakSet()  # code whose graph has a loop operator in a gradient


@cache
@optional("autograd in graphs", lost="loops in tdc.grad and train_step", instead=nothing)
def setting() -> AbstractContextManager[Any] | None:
    """A context in which Dynamo traces `torch.autograd.grad`; None where this torch does not (before 2.13)."""
    config, log = find("torch._dynamo.config"), find("torch._dynamo.symbolic_convert:SpeculationLog")
    if not hasattr(log, "graph_break_on_requires_grad_") or not hasattr(config, "trace_autograd_ops"):
        return None
    found: AbstractContextManager[Any] = find("torch._dynamo.decorators:DynamoConfigPatchProxy")(
        find("torch._dynamo.config:patch")(trace_autograd_ops=True)
    )
    return found


@constant
def is_recordable() -> bool:
    """True if a graph may hold `torch.autograd.grad`."""
    return setting() is not None


@constant
def recording() -> AbstractContextManager[Any]:
    """The context in which Dynamo traces `torch.autograd.grad`, where `is_recordable`."""
    found = setting()
    assert found is not None
    return found


class Now:
    """State of the running trace: autograd takes its gradients; it may take the one that began last."""

    by_autograd = False
    may = False


def begin() -> bool:
    """True if autograd takes the gradient that begins here: in a graph, where nothing differentiates the gradient."""
    if not torch.compiler.is_dynamo_compiling():
        return False
    if has_comptime():
        internals._dynamo.comptime.comptime(refuse if torch.is_grad_enabled() else note)
    return by_autograd()


@constant
def by_autograd() -> bool:
    return Now.by_autograd


def refuse(context: Any) -> None:
    """Note that autograd may not take the gradient that begins."""
    Now.may = Now.by_autograd = False


def note(context: Any) -> None:
    """Note if autograd may take the gradient that begins, and if it does."""
    Now.may = levels() == 0 and is_recordable()
    Now.by_autograd = Now.may and code_of(context) in WITH_LOOPS


def code_of(context: Any) -> Any:
    """Code whose graph is traced."""
    return context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.root_tx.f_code


def levels() -> int:
    """Number of transforms of `torch.func` around the call."""
    return len(interpreter_stack() or ())


def retrace(context: Any) -> None:
    """Restart the trace with autograd, where one gradient alone is around an operator, and autograd may take it."""
    code = code_of(context)
    if Now.may and levels() == 1 and code not in WITH_LOOPS:
        WITH_LOOPS.add(code)
        reason = "tdc: a gradient of a loop is taken by autograd"
        raise find("torch._dynamo.exc:UnspecializeRestartAnalysis")(restart_reason=reason)
