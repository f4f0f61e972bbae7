"""The choice of the operators of `kernels.optimizers` for the updates of Adam and SGD.

    eagerly       one pass over the memory of all leaves, where the arithmetic of columns makes up to fourteen
    in a graph    one node for each 8 leaves: as arithmetic, the updates of 300 parameters take more than half of the
                  time that Inductor needs for a training step. A few leaves it fuses with what makes their gradients.

The operators get copies. Where a graph writes the results into the old state, Inductor drops the copies and the kernel
updates the old state in place: see `compile/_torch/writes.py`.

Invariant: float32, one rate and one step for all leaves, no derivative, not in the body of a loop, where torch allows
no operators that mutate lists (2.11-2.13). Everything else is arithmetic of columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tdc.compile._torch.tracing import asked, in_body
from tdc.core.dynamo import eager, exporting, traced_for, under_transform
from tdc.core.operators import learning, only_results
from tdc.kernels.optimizers import Fused, has_kernels
from tdc.optim.foreach import Column, Scalar

FEW = 12  # a graph of fewer leaves has the arithmetic of each
AT_ONCE = 8  # leaves of one node: their gradients all live until it runs


def fused_update(fused: Fused, columns: list[Column], rate: Scalar, step: Tensor, *settings: Any) -> tuple[Column, ...]:
    """New parameters and moments, from columns of parameters, gradients and moments."""
    ps, gs, *moments = columns
    new = [[x.clone() for x in column] for column in (ps, *moments)]
    fused.update_([new[0], gs, *new[1:]], rate, step, settings, AT_ONCE)
    return tuple(new)


def can_fuse(columns: list[Column], rate: Scalar, step: Tensor, *settings: Any) -> bool:
    """True if an operator can do this update."""
    leaves = [x for column in columns for x in column]
    if not eager() or not is_uniform(columns[0], rate, step, settings):
        return False
    if not {type(x) for x in leaves} <= {Tensor, Parameter}:
        return False
    return {x.device for x in leaves} == {step.device} and only_results(*leaves, rate)


@traced_for(can_fuse)
def can_fuse_traced(columns: list[Column], rate: Scalar, step: Tensor, *settings: Any) -> bool:
    ps = columns[0]
    if len(ps) < FEW or exporting() or under_transform() or in_body() or not is_uniform(ps, rate, step, settings):
        return False
    if [p for p in ps if type(p) not in (Tensor, Parameter)] or learning([rate]):
        return False
    leaves = [step]
    for column in columns:
        leaves += column
    return asked(on_one_device, leaves)


def on_one_device(tensors: list[Tensor]) -> bool:
    """True if all tensors are on one device and none requires grad."""
    return len({x.device for x in tensors}) == 1 and not learning(tensors)


def is_uniform(ps: Column, rate: Scalar, step: Tensor, settings: tuple[Any, ...]) -> bool:
    """True if leaves are float32, and rate, step and settings are one number each."""
    if not has_kernels() or not ps or ps[0].dtype != torch.float32:
        return False
    if step.ndim or (isinstance(rate, Tensor) and rate.ndim):
        return False
    return all([isinstance(x, (int, float)) for x in settings])
