"""Gradients of functions with loops, in a graph (torch 2.13-2.15).

`torch.func.grad` puts a level of a transform around its function, and torch's operators of loops have no rule for one:
they fail, or give wrong numbers. `torch.autograd.grad` asks for no level; but what it gives takes no part in autograd,
and it refuses what `torch.func.grad` takes. So a graph is traced with the first, and once more with the second if an
operator of loops was found inside.

    begin()                     where a gradient begins; says whether autograd is to take it
    retrace(context)            at an operator under a transform: trace the graph again, if that helps
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch

from tdc.compile._torch.autograd import is_recordable
from tdc.compile._torch.dynamo import has_comptime
from tdc.core.dynamo import constant, interpreter_stack
from tdc.core.private import find

internals: Any = torch  # parts of torch without types
WITH_LOOPS: WeakSet[Any] = WeakSet()  # code whose graph has an operator of loops in a gradient


class Now:
    """What is known of the trace that runs: whether autograd takes its gradients, and whether it could take the one
    that began last."""

    by_autograd = False
    may = False


def begin() -> bool:
    """Whether autograd takes the gradient that begins here; False outside of a graph, and where somebody may
    differentiate the gradient."""
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
    """Note whether autograd may take the gradient that begins, and whether it does."""
    Now.may = levels() == 0 and is_recordable()
    Now.by_autograd = Now.may and code_of(context) in WITH_LOOPS


def code_of(context: Any) -> Any:
    """The code whose graph is traced."""
    return context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.root_tx.f_code


def levels() -> int:
    """How many transforms of `torch.func` are around the call."""
    return len(interpreter_stack() or ())


def retrace(context: Any) -> None:
    """Have Dynamo trace the graph again, where one gradient is all that is around an operator, and autograd may take
    it."""
    code = code_of(context)
    if Now.may and levels() == 1 and code not in WITH_LOOPS:
        WITH_LOOPS.add(code)
        reason = "tdc: a gradient of a loop is taken by autograd"
        raise find("torch._dynamo.exc:UnspecializeRestartAnalysis")(restart_reason=reason)
