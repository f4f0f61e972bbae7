"""How a training step takes the gradients of its loss: by autograd, or by `torch.func`.

    autograd      `torch.autograd.grad` in the step itself, eagerly and in its graph. The loss may use what autograd has
                  and `torch.func.grad` refuses: control flow, `torch.utils.checkpoint`, hooks, saved-tensor hooks,
                  `torch.compiler.nested_compile_region`.
    torch.func    where a transform is around the step (an ensemble under vmap), where somebody differentiates the
                  step, in the body of a loop over parts of a batch, where torch cannot record, and in graphs of a torch
                  that does not trace autograd (before 2.13).

Both give the same numbers, and graphs that take the same time and memory.

Invariant: what a loss hands on beside its value, such as buffers and metrics, takes no part in autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tdc.compile._torch.autograd import is_recordable, recording
from tdc.compile._torch.tracing import at_trace_time, mark_backward
from tdc.compile.gradients import Part, apart, recorded, value_and_grad
from tdc.compile.upstream import traced
from tdc.core import pytree
from tdc.core.dynamo import under_transform
from tdc.tensordict.tensordict import TensorDict


def loss_and_gradients(
    loss_fn: Callable[..., tuple[Tensor, Any]], params: TensorDict, *args: Any, in_loop: bool = False
) -> tuple[tuple[Tensor, Any], TensorDict]:
    """`((loss, aux), gradients)` of `loss_fn(params, *args) -> (loss, aux)`, as `value_and_grad` gives them."""
    if in_loop or torch.is_grad_enabled() or under_transform() or (traced() and not is_recordable()):
        return value_and_grad(loss_fn, has_aux=True)(params, *args)  # type: ignore[no-any-return]  # open in torch
    at_trace_time(mark_backward)
    part = Part(params, "grad", sort=False)
    own = [x.detach().requires_grad_() for x in part.tensors]
    with torch.enable_grad():
        loss, aux = loss_fn(part.filled(own, part.others), *pytree.tree_map(apart, args))
        with recording() if traced() else nullcontext():
            found = recorded(loss, own)
    return (loss.detach(), pytree.tree_map(apart, aux)), part.gradients(found)
