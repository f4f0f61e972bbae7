"""Adam and SGD with momentum on lists of leaves, each as one operator over torch's fused kernels.

The operators write into parameters and moments. All tensors are float32, with one step and one learning rate.
torch's kernels read memory in order, so gradients and moments are brought into the memory order of their parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tdc.core.dynamo import constant, eager
from tdc.core.errors import ShapeError, describe, message
from tdc.core.operators import LIBRARY
from tdc.core.torch_functions import fused_kernel

Column: TypeAlias = "list[Tensor]"
ADAM, ADAMW, SGD = [fused_kernel(name) for name in ("adam", "adamw", "sgd")]


@constant
def has_kernels() -> bool:
    """True if torch has the kernels."""
    return None not in (ADAM, ADAMW, SGD)


class Fused:
    """An optimiser's update as an operator.

    Args:
        name: of the operator; it ends in "_", since the operator writes into its arguments.
        moments: number of lists of moments. An optimiser with fewer passes empty lists.
        settings: schema of the arguments after the learning rate.
        kernel: torch's kernel, `(lists, step, rate, *settings)`; the lists are parameters, gradients and moments.
    """

    __slots__ = "kernel", "moments", "node", "op"

    def __init__(self, name: str, moments: int, settings: str, kernel: Callable[..., None]) -> None:
        self.op, self.moments, self.kernel = f"optim.{name[:-1]}", moments, kernel
        changed = ", ".join([f"Tensor({alias}!)[] moments_{alias}" for alias in "bcd"[:moments]])
        LIBRARY.define(f"{name}(Tensor(a!)[] ps, Tensor[] gs, {changed}, Tensor step, Tensor rate, {settings}) -> ()")
        LIBRARY.impl(name, self.run, "CompositeExplicitAutograd")
        LIBRARY.impl(name, self.fake, "Meta")
        self.node: Any = getattr(torch.ops.tdc, name).default

    def update_(self, columns: list[Column], rate: Any, step: Tensor, settings: tuple[Any, ...], at_once: int) -> None:
        """Write the step into parameters and moments; a graph gets one node for each `at_once` leaves."""
        columns = [*columns, *[[]] * (2 + self.moments - len(columns))]
        step = step.to(torch.float32)
        rate = rate.to(step) if isinstance(rate, Tensor) else rate
        if eager():
            self.run(*columns, step, rate, *settings)
            return
        rate = rate if isinstance(rate, Tensor) else torch.full_like(step, rate)
        for i in range(0, len(columns[0]), at_once):
            self.node(*[column[i : i + at_once] for column in columns], step, rate, *settings)

    def run(self, *args: Any) -> None:
        """Run torch's kernel on tensors in one memory order, and copy reordered moments back."""
        columns, rest = args[: 2 + self.moments], args[2 + self.moments :]
        rows = [zip(xs, columns[0], strict=False) for xs in columns]
        used = [[x if has_order_of(x, p) else torch.empty_like(p).copy_(x) for x, p in row] for row in rows]
        self.kernel(used, *rest)
        for xs, new in zip(columns[2:], used[2:], strict=True):
            for x, y in zip(xs, new, strict=True):
                if x is not y:
                    x.copy_(y)

    def fake(self, ps: Column, *args: Any) -> None:
        """Refuse gradients and moments of other shapes or dtypes in a graph, where `optim.base` compares keys alone."""
        for column in args[: 1 + self.moments]:
            for x, p in zip(column, ps, strict=False):
                if x.shape != p.shape or x.dtype != p.dtype:
                    hint = "make the state with init(params) of these parameters"
                    raise ShapeError(message(self.op, f"gradients and moments {describe(p)}", describe(x), hint=hint))


def has_order_of(x: Tensor, p: Tensor) -> bool:
    """True if a tensor has the memory order of its parameter; zero tensors without storage do not."""
    return x.stride() == p.stride() and x.data_ptr() != 0


def run_adam(
    lists: list[Column], step: Tensor, rate: Any, beta1: float, beta2: float, eps: float, weight_decay: float,
    decoupled: bool,
) -> None:  # fmt: skip
    """Adam by torch's kernel."""
    (ADAMW if decoupled else ADAM)(
        *lists, [step] * len(lists[0]), lr=rate, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
        amsgrad=bool(lists[4]), maximize=False,
    )  # fmt: skip


def run_sgd(lists: list[Column], step: Tensor, rate: Any, momentum: float, weight_decay: float, nesterov: bool) -> None:
    """SGD with momentum by torch's kernel; moments begin as zeros, so no step is the first one."""
    SGD(
        *lists, lr=rate, momentum=momentum, weight_decay=weight_decay, dampening=0.0, nesterov=nesterov,
        maximize=False, is_first_step=False,
    )  # fmt: skip


adam = Fused("adam_", 3, "float beta1, float beta2, float eps, float weight_decay, bool decoupled", run_adam)
sgd = Fused("sgd_", 1, "float momentum, float weight_decay, bool nesterov", run_sgd)
