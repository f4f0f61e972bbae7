"""Functional collectives of `torch.distributed`: traceable, under vmap, with their gradients (torch 2.11-2.15).

    whole(x, "sum", group)            sum over ranks                    adjoint: the same
    whole(x, "gather", group)         rows of all ranks, equally many   adjoint: "scatter"
    whole(x, "scatter", group)        own rows of the sum               adjoint: "gather"
    whole(x, "from", group, src)      those of one rank                 adjoint: "to", the sum there, zero elsewhere
    exchanged(x, send, get, group)    rows to and from each rank        adjoint: the way back
    started(flat, group)              sum over ranks, which `finished` waits for; without a gradient

Gradients are those of the sum of all ranks' losses. `torch.distributed` differentiates some of these wrong, or not
under vmap. All act on dim 0 alone, so a vmapped dim goes to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tdc.core.dynamo import under_transform
from tdc.core.private import find, find_or, nothing, optional

FEATURE = "functional collectives"
BEGUN, LOST = "exchanges under way in graphs", "exchanges while the backward pass of a step goes on"
ALL_REDUCE, WAIT = [
    find_or(None, f"torch:ops._c10d_functional.{name}", feature=BEGUN, lost=LOST) if dist.is_available() else None
    for name in ("all_reduce", "wait_tensor")
]
ops: Any = find_or(None, "torch:ops._c10d_functional", feature=FEATURE, lost="tdc.dist in graphs and with gradients")
recorded: Any = find_or(ops, "torch:ops._c10d_functional_autograd", feature=FEATURE, lost="the same")
ADJOINT = {"sum": "sum", "gather": "scatter", "scatter": "gather", "from": "to", "to": "from"}


NAMES = (
    "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_to_all_single", "wait_tensor",
)  # fmt: skip


def has_collectives() -> bool:
    """True if torch has the operators that are used here, where it is built with `torch.distributed`."""
    there = all([hasattr(ops, name) for name in NAMES]) and hasattr(recorded, "all_to_all_single")
    return there or not dist.is_available()


def run_whole(x: Tensor, kind: str, name: str, world: int, rank: int, src: int) -> Tensor:
    """A collective of equal sizes on plain tensors."""
    given = torch.view_as_real(x) if x.is_complex() else x
    given = given.contiguous()
    if kind in ("sum", "to"):
        out = ops.all_reduce(given, "sum", name)
    elif kind == "gather":
        out = ops.all_gather_into_tensor(given, world, name)
    elif kind == "scatter":
        out = ops.reduce_scatter_tensor(given, "sum", world, name)
    else:
        out = ops.broadcast(given, src, name)
    out = ops.wait_tensor(out)
    if kind == "to" and rank != src:
        out = torch.zeros_like(out)
    return torch.view_as_complex(out) if x.is_complex() else out


class Whole(torch.autograd.Function):
    """`run_whole` with its adjoint."""

    @staticmethod
    def forward(x: Tensor, kind: str, name: str, world: int, rank: int, src: int) -> Tensor:
        return run_whole(x, kind, name, world, rank, src)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.kind, ctx.name, ctx.world, ctx.rank, ctx.src = inputs[1:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return Whole.apply(grads[0], ADJOINT[ctx.kind], ctx.name, ctx.world, ctx.rank, ctx.src), *[None] * 5

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        return behind(args[0], in_dims[0], lambda moved: Whole.apply(moved, *args[1:]))


class Exchanged(torch.autograd.Function):
    """Rows to and from each rank, and the way back."""

    @staticmethod
    def forward(x: Tensor, send: list[int], get: list[int], name: str) -> Tensor:
        given = (torch.view_as_real(x) if x.is_complex() else x).contiguous()
        out = ops.wait_tensor(ops.all_to_all_single(given, get, send, name))
        return torch.view_as_complex(out) if x.is_complex() else out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.send, ctx.get, ctx.name = inputs[1:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return Exchanged.apply(grads[0], ctx.get, ctx.send, ctx.name), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        return behind(args[0], in_dims[0], lambda moved: Exchanged.apply(moved, *args[1:]))


def behind(x: Tensor, dim: int, run: Any) -> tuple[Tensor, int]:
    """A collective of a vmapped tensor: its batch goes behind the rows."""
    if x.ndim == 1:
        return run(x[None]), 1  # of one number, which has no rows
    return run(x.movedim(dim, -1)), x.ndim - 1


def whole(x: Tensor, kind: str, group: Any, src: int = 0) -> Tensor:
    """A collective of equal sizes; see the module."""
    args = kind, group.group_name, group.size(), group.rank(), src
    return Whole.apply(x, *args)


class Waited(torch.autograd.Function):
    """The result of a collective, once it is there."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return ops.wait_tensor(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def exchanged(x: Tensor, send: Sequence[int], get: Sequence[int], group: Any) -> Tensor:
    """Rows of all ranks for this one; `send[r]` rows go to rank r, `get[r]` come from there.

    In a graph of plain operators: Dynamo loses sizes that depend on data among what functions save (2.11-2.15).
    """
    if under_transform() or not torch.compiler.is_dynamo_compiling():
        return Exchanged.apply(x, [*send], [*get], group.group_name)
    given = torch.view_as_real(x) if x.is_complex() else x
    out = Waited.apply(recorded.all_to_all_single(given.contiguous(), [*get], [*send], group.group_name))
    return torch.view_as_complex(out) if x.is_complex() else out


@optional("errors told to other ranks", lost="the error of a rank that failed, on other ranks", instead=nothing)
def store_of_processes() -> Any:
    """The store of the default process group; None where torch does not tell it."""
    return find("torch.distributed.distributed_c10d:_get_default_store")()


def started(flat: Tensor, group: Any) -> Tensor:
    """Begin to sum a tensor over all ranks; `finished` waits for it."""
    if ALL_REDUCE is None or WAIT is None:
        dist.all_reduce(flat, group=group)
        return flat
    return ALL_REDUCE(flat, "sum", group.group_name)  # type: ignore[no-any-return]  # a Tensor


def finished(flat: Tensor) -> Tensor:
    """The sum that `started` began."""
    return flat if ALL_REDUCE is None or WAIT is None else WAIT(flat)
