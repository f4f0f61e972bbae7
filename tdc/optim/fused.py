"""Updates of many leaves as one operator, over torch's kernels for them: Adam, and SGD with momentum.

    eagerly       one pass over the memory of all leaves, where the arithmetic of columns makes up to fourteen
    in a graph    one node for each 8 leaves: as arithmetic, the updates of 300 parameters take more than half of the
                  time that Inductor needs for a training step. A few leaves it fuses with what makes their gradients.

Such an operator changes what it is given, which are copies. Where a graph writes the results into the old state,
Inductor drops the copies, and the kernel changes the old state: see `compile/_torch/writes.py`.

Invariants:
  - float32, one rate and one step for all leaves, no derivative, and not in the body of a loop, which torch lets change
    no lists (2.11-2.13); an optimiser does the arithmetic of all else itself;
  - torch's kernels go by memory alone: gradients and moments have the shape, the dtype and the order in memory of
    their parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tdc.compile._torch.tracing import asked, in_body
from tdc.core.dynamo import eager, exporting, trace_as, under_transform
from tdc.core.errors import ShapeError, describe, message
from tdc.core.operators import LIBRARY, learning, only_results
from tdc.core.torch_functions import fused_kernel
from tdc.ops.leafwise import PLAIN
from tdc.optim.foreach import Column, Scalar

ADAM, ADAMW, SGD = [fused_kernel(name) for name in ("adam", "adamw", "sgd")]
FEW = 12  # a graph of fewer leaves has the arithmetic of each
AT_ONCE = 8  # leaves of one node: their gradients all live until it runs


def takes(columns: list[Column], rate: Scalar, step: Tensor, *settings: Any) -> bool:
    """Whether an operator does this update."""
    leaves = [x for column in columns for x in column]
    if not eager() or not plain(columns[0], rate, step, settings) or not set(map(type, leaves)) <= PLAIN:
        return False
    return {x.device for x in leaves} == {step.device} and only_results(*leaves, rate)


def takes_in_graph(columns: list[Column], rate: Scalar, step: Tensor, *settings: Any) -> bool:
    """What Dynamo traces in place of `takes`."""
    ps = columns[0]
    if len(ps) < FEW or exporting() or under_transform() or in_body() or not plain(ps, rate, step, settings):
        return False
    if [p for p in ps if type(p) not in PLAIN] or learning([rate]):
        return False
    leaves = [step]
    for column in columns:
        leaves += column
    return asked(serves, leaves)


def serves(tensors: list[Tensor]) -> bool:
    """Whether tensors are on one device, and none gets a gradient."""
    return len({x.device for x in tensors}) == 1 and not learning(tensors)


trace_as(takes, takes_in_graph)


def plain(ps: Column, rate: Scalar, step: Tensor, settings: tuple[Any, ...]) -> bool:
    """Whether leaves are float32, and all else is one number for all of them."""
    if None in (ADAM, ADAMW, SGD):
        return False
    if not ps or ps[0].dtype != torch.float32 or step.ndim or (isinstance(rate, Tensor) and rate.ndim):
        return False
    return all([isinstance(x, (int, float)) for x in settings])


class Fused:
    """An optimiser's update as an operator.

    Args:
        name: the operator's. It ends in "_", since the operator changes its arguments.
        moments: how many lists of moments the operator takes. An optimiser with fewer passes empty lists.
        settings: the arguments behind the learning rate, as a schema of torch.
        kernel: torch's, `(lists, step, rate, *settings)`; the lists are parameters, gradients and moments.
    """

    def __init__(self, name: str, moments: int, settings: str, kernel: Callable[..., None]) -> None:
        self.op, self.moments, self.kernel = f"optim.{name[:-1]}", moments, kernel
        changed = ", ".join([f"Tensor({alias}!)[] moments_{alias}" for alias in "bcd"[:moments]])
        LIBRARY.define(f"{name}(Tensor(a!)[] ps, Tensor[] gs, {changed}, Tensor step, Tensor rate, {settings}) -> ()")
        LIBRARY.impl(name, self.run, "CompositeExplicitAutograd")
        LIBRARY.impl(name, self.fake, "Meta")  # for graphs
        self.node: Any = getattr(torch.ops.tdc, name).default

    def stepped(self, columns: list[Column], rate: Scalar, step: Tensor, *settings: Any) -> tuple[Column, ...]:
        """New parameters and moments, from columns of parameters, gradients and moments."""
        ps, gs, *moments = columns
        new = [[x.clone() for x in column] for column in (ps, *moments)]
        columns = [new[0], gs, *new[1:], *[[]] * (self.moments - len(moments))]
        step = step.to(torch.float32)
        rate = rate.to(step) if isinstance(rate, Tensor) else rate
        if eager():
            self.run(*columns, step, rate, *settings)
        else:
            rate = rate if isinstance(rate, Tensor) else torch.full_like(step, rate)
            for i in range(0, len(ps), AT_ONCE):
                self.node(*[column[i : i + AT_ONCE] for column in columns], step, rate, *settings)
        return tuple(new)

    def run(self, *args: Any) -> None:
        """The operator: torch's kernel on tensors in one order; what was put in order for it is copied back."""
        columns, rest = args[: 2 + self.moments], args[2 + self.moments :]
        rows = [zip(xs, columns[0], strict=False) for xs in columns]
        used = [[x if lies_as(x, p) else in_order(x, p) for x, p in row] for row in rows]
        self.kernel(used, *rest)
        for xs, new in zip(columns[2:], used[2:], strict=True):
            for x, y in zip(xs, new, strict=True):
                if x is not y:
                    x.copy_(y)

    def fake(self, ps: Column, *args: Any) -> None:
        """Refuse gradients and moments of other shapes or dtypes in a graph, where `base` compares keys alone."""
        for column in args[: 1 + self.moments]:
            for x, p in zip(column, ps, strict=False):
                if x.shape != p.shape or x.dtype != p.dtype:
                    hint = "make the state with init(params) of these parameters"
                    raise ShapeError(message(self.op, f"gradients and moments {describe(p)}", describe(x), hint=hint))


def lies_as(x: Tensor, p: Tensor) -> bool:
    """Whether a tensor lies in memory as its parameter does; zeros of torch's that have no memory do not."""
    return x.stride() == p.stride() and x.data_ptr() != 0


def in_order(x: Tensor, p: Tensor) -> Tensor:
    """The same numbers, in the order in memory of the parameter."""
    return torch.empty_like(p).copy_(x)


def by_adam(
    lists: list[Column], step: Tensor, rate: Any, beta1: float, beta2: float, eps: float, weight_decay: float,
    decoupled: bool,
) -> None:  # fmt: skip
    """Adam by torch's kernel."""
    (ADAMW if decoupled else ADAM)(
        *lists, [step] * len(lists[0]), lr=rate, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
        amsgrad=bool(lists[4]), maximize=False,
    )  # fmt: skip


def by_sgd(lists: list[Column], step: Tensor, rate: Any, momentum: float, weight_decay: float, nesterov: bool) -> None:
    """SGD with momentum by torch's kernel; the moments begin as zeros, so that no step is the first one."""
    SGD(
        *lists, lr=rate, momentum=momentum, weight_decay=weight_decay, dampening=0.0, nesterov=nesterov,
        maximize=False, is_first_step=False,
    )  # fmt: skip


adam = Fused("adam_", 3, "float beta1, float beta2, float eps, float weight_decay, bool decoupled", by_adam)
sgd = Fused("sgd_", 1, "float momentum, float weight_decay, bool nesterov", by_sgd)
