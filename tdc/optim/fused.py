"""Adam's update of many leaves as one operator, over torch's kernel for it.

    eagerly       one pass over the memory of all leaves, where the arithmetic of columns makes fourteen
    in a graph    one node for each 8 leaves: as arithmetic, the updates of 300 parameters take more than half of the
                  time that Inductor needs for a training step. A few leaves it fuses with what makes their gradients.

The operator changes what it is given, which are copies. Where a graph writes the results into the old state, Inductor
drops the copies, and the kernel changes the old state: see `compile/_torch/writes.py`.

Invariants:
  - float32, one rate and one step for all leaves, no derivative, and not in the body of a loop, which torch lets change
    no lists (2.11-2.13); `adam` does the arithmetic of all else itself;
  - torch's kernel goes by memory alone: gradients and moments have the shape, the dtype and the order in memory of
    their parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.compile._torch.tracing import in_body
from tdc.core.dynamo import eager, exporting, list_kernel, trace_as, under_transform
from tdc.core.errors import ShapeError, describe, message
from tdc.core.operators import LIBRARY, learning, only_results
from tdc.ops.leafwise import PLAIN
from tdc.optim.foreach import Column, Scalar

ADAM, ADAMW = list_kernel("fused_adam_"), list_kernel("fused_adamw_")
FEW = 12  # a graph of fewer leaves has the arithmetic of each
AT_ONCE = 8  # leaves of one node: their gradients all live until it runs
LIBRARY.define(
    "adam_(Tensor(a!)[] ps, Tensor[] gs, Tensor(b!)[] means, Tensor(c!)[] squares, Tensor(d!)[] largest, "
    "Tensor step, Tensor rate, float beta1, float beta2, float eps, float weight_decay, bool decoupled) -> ()"
)
node: Any = torch.ops.tdc.adam_.default


def takes(columns: list[Column], rate: Scalar, step: Tensor, *settings: Any) -> bool:
    """Whether the operator does this update."""
    leaves = [x for column in columns for x in column]
    if not eager() or not plain(columns[0], rate, step, settings) or not set(map(type, leaves)) <= PLAIN:
        return False
    return {x.device for x in leaves} == {step.device} and only_results(*leaves, rate)


def takes_in_graph(columns: list[Column], rate: Scalar, step: Tensor, *settings: Any) -> bool:
    """What Dynamo traces in place of `takes`."""
    ps = columns[0]
    if len(ps) < FEW or exporting() or under_transform() or in_body() or not plain(ps, rate, step, settings):
        return False
    if [p for p in ps if type(p) not in PLAIN or p.device != step.device]:
        return False
    return not learning([rate, *[x for column in columns for x in column]])


trace_as(takes, takes_in_graph)


def plain(ps: Column, rate: Scalar, step: Tensor, settings: tuple[Any, ...]) -> bool:
    """Whether leaves are float32, and all else is one number for all of them."""
    if not ps or ps[0].dtype != torch.float32 or step.ndim or (isinstance(rate, Tensor) and rate.ndim):
        return False
    return all([isinstance(x, (int, float)) for x in settings])


def stepped(
    columns: list[Column], rate: Scalar, step: Tensor, betas: tuple[float, float], eps: float, weight_decay: float,
    decoupled: bool,
) -> tuple[Column, ...]:  # fmt: skip
    """New parameters and moments, from columns of parameters, gradients, means, squares, and the largest, if any."""
    ps, gs, *moments = columns
    new = [[x.clone() for x in column] for column in (ps, *moments)]
    step, settings = step.to(torch.float32), (*betas, eps, weight_decay, decoupled)
    rate = rate.to(step) if isinstance(rate, Tensor) else rate
    if eager():
        run(new[0], gs, new[1], new[2], new[3] if len(new) > 3 else [], step, rate, *settings)
    else:
        rate = rate if isinstance(rate, Tensor) else torch.full_like(step, rate)
        for i in range(0, len(ps), AT_ONCE):
            p, mean, square, *largest = [column[i : i + AT_ONCE] for column in new]
            node(p, gs[i : i + AT_ONCE], mean, square, largest[0] if largest else [], step, rate, *settings)
    return tuple(new)


def run(
    ps: Column, gs: Column, means: Column, squares: Column, largest: Column, step: Tensor, rate: Any, beta1: float,
    beta2: float, eps: float, weight_decay: float, decoupled: bool,
) -> None:  # fmt: skip
    """The operator: torch's kernel on tensors in one order; what was put in order for it is copied back."""
    columns = [ps, gs, means, squares, *[largest] * bool(largest)]
    used = [[x if lies_as(x, p) else in_order(x, p) for x, p in zip(xs, ps, strict=True)] for xs in columns]
    (ADAMW if decoupled else ADAM)(
        *used[:4], used[4] if largest else [], [step] * len(ps), lr=rate, beta1=beta1, beta2=beta2, eps=eps,
        weight_decay=weight_decay, amsgrad=bool(largest), maximize=False,
    )  # fmt: skip
    for xs, new in zip(columns[2:], used[2:], strict=True):
        for x, y in zip(xs, new, strict=True):
            if x is not y:
                x.copy_(y)


def lies_as(x: Tensor, p: Tensor) -> bool:
    """Whether a tensor lies in memory as its parameter does; zeros of torch's that have no memory do not."""
    return x.stride() == p.stride() and x.data_ptr() != 0


def in_order(x: Tensor, p: Tensor) -> Tensor:
    """The same numbers, in the order in memory of the parameter."""
    return torch.empty_like(p).copy_(x)


def fake(ps: Column, gs: Column, means: Column, squares: Column, largest: Column, *_: Any) -> None:
    """Refuse gradients and moments of other shapes or dtypes in a graph, where `base` compares keys alone."""
    for column in (gs, means, squares, largest):
        for x, p in zip(column, ps, strict=False):
            if x.shape != p.shape or x.dtype != p.dtype:
                hint = "make the state with init(params) of these parameters"
                raise ShapeError(message("optim.adam", f"gradients and moments {describe(p)}", describe(x), hint=hint))


LIBRARY.impl("adam_", run, "CompositeExplicitAutograd")
LIBRARY.impl("adam_", fake, "Meta")  # for graphs
