"""Everything that reaches into Dynamo and functorch, one function for each thing wanted of them.

    constant        a function whose result is a constant of the graph
    trace_as        another function in its stead, in graphs
    mark_dynamic    sizes that vary from call to call
    eager           whether operations run as they are called
    stamp           whether results may be kept for later calls

Invariant: no other module of `tdc` outside `tdc/compile/_torch/` names what is private to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def constant(fn: F) -> F:
    """Mark a function of Python constants: a graph runs it once, while it is traced, and holds what it returned.

    As `torch._dynamo.assume_constant_result`, without importing Dynamo. What it does costs no time to trace. For
    decisions, such as places and yes or no, not for keys: `type(x)` of a result is something Dynamo cannot trace.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what Dynamo looks for
    return fn


def trace_as(fn: Callable[..., Any], by: Callable[..., Any]) -> None:
    """Let Dynamo trace another function where the program calls `fn`, as `torch.compiler.substitute_in_graph` does for
    functions of C: in a graph the one runs, eagerly the other. torch 2.11-2.13."""
    fn._torchdynamo_inline = by  # type: ignore[attr-defined]  # the attribute Dynamo looks for


def mark_dynamic(x: Any, *dims: int) -> Any:
    """Tell torch.compile that the sizes of `dims` vary, so that the first graph serves all sizes. Returns the tensor.

    The same mark as `torch._dynamo.maybe_mark_dynamic`, without importing Dynamo. A graph's results carry it on to the
    next one. torch 2.11-2.13.
    """
    if hasattr(x, "_dynamo_weak_dynamic_indices"):
        x._dynamo_weak_dynamic_indices.update(dims)
    else:
        x._dynamo_weak_dynamic_indices = set(dims)
    return x


def mark_result(x: Any, dim: int) -> Any:
    """`mark_dynamic` of a tensor that was just made, in one write. Returns the tensor."""
    x._dynamo_weak_dynamic_indices = {dim}
    return x


def mark_traced(x: Any, *dims: int) -> Any:
    """What Dynamo traces in place of `mark_dynamic`: it cannot mark one of several results of an operation (`chunk`,
    `unbind`), a view of it can be marked. torch 2.11-2.13."""
    view = x.view_as(x)
    view._dynamo_weak_dynamic_indices = {*dims}  # `set` would be a guard
    return view


trace_as(mark_dynamic, mark_traced)
trace_as(mark_result, mark_traced)


def eager() -> bool:
    """Whether operations run as they are called: neither traced nor under a transform of `torch.func`."""
    return not torch._C._are_functorch_transforms_active()


def not_eager() -> bool:
    """What Dynamo traces in place of `eager`."""
    return False


trace_as(eager, not_eager)


def under_transform() -> bool:
    """Whether a transform of `torch.func` is around the call; in a graph the same as outside."""
    return torch._C._are_functorch_transforms_active()


def stamp(x: Tensor) -> Any:
    """What tells apart the contents that `x` has had, where a tensor computed from it now may serve later calls.

    None where it may not: under a transform, while a call is traced or a CUDA graph records it, and for a tensor of
    inference mode, which does not count its changes in place. On CUDA a stream has results of its own.
    """
    if type(x) is not Tensor or torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return None
    if x.is_inference():
        return None
    if not x.is_cuda:
        return x._version
    capturing = torch.cuda.is_current_stream_capturing()
    return None if capturing else (x._version, torch.cuda.current_stream(x.device).cuda_stream)


def unmapped(condition: Tensor) -> Tensor:
    """A condition for all members of a `torch.vmap`, which has no rule for assertions (torch 2.11-2.13)."""
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]  # built into torch, without type stubs
    while functorch.is_batchedtensor(condition):
        condition = functorch.get_unwrapped(condition).all()
    return condition


def as_is(condition: Tensor) -> Tensor:
    """What Dynamo traces in place of `unmapped`."""
    return condition


trace_as(unmapped, as_is)


@constant
def in_direction() -> bool:
    """Whether a `torch.func.jvp` is around the call."""
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]  # built into torch, without type stubs
    stack = functorch.get_interpreter_stack()
    return any([level.key() == functorch.TransformType.Jvp for level in stack or ()])


def is_zero(n: int) -> bool:
    """Whether a size is 0; no for a size that a graph does not know, as that of `x @ x.transpose(1, 2)`."""
    return n == 0 if isinstance(n, int) else is_zero_symbol(n)


def is_zero_symbol(n: int) -> bool:
    """`is_zero` of a size in a graph; the module is loaded by whoever traces."""
    fx: Any = torch.fx
    return fx.experimental.symbolic_shapes.guard_or_false(n == 0)


trace_as(is_zero, is_zero_symbol)
