"""DTensors of `torch.distributed`: leaves of which each process has a part, and what groups processes.

Their module is loaded where one is made, and not before: there is no DTensor without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tdc.core.dynamo import has_loaded
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message

X = TypeVar("X")
untyped: Any = torch


def is_dtensor(x: Any) -> bool:
    """True for a DTensor."""
    return type(x).__name__ == "DTensor" and isinstance(x, Tensor)


def local_of(x: X) -> X:
    """The part of a DTensor that this process has; anything else as it is."""
    return x.to_local() if is_dtensor(x) else x  # type: ignore[attr-defined]  # a DTensor


def with_local(local: Tensor, like: Any) -> Any:
    """A DTensor with the mesh, placements and shape of another one, of these parts."""
    made = untyped.distributed.tensor.DTensor
    return made.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def replicated(x: Any, like: Any) -> Any:
    """A tensor that each process has whole, as a DTensor on the mesh of another one. Numbers stay as they are."""
    if not isinstance(x, Tensor) or not x.ndim or is_dtensor(x):
        return x
    made, mesh = untyped.distributed.tensor, like.device_mesh
    return made.DTensor.from_local(x, mesh, [made.Replicate()] * mesh.ndim, run_check=False)


def with_replicas(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of which tensors beside a DTensor are taken as whole ones on its mesh."""

    def run(*args: Any, **kwargs: Any) -> Any:
        like = next((x for x in (*args, *kwargs.values()) if is_dtensor(x)), None)
        if like is None:
            return fn(*args, **kwargs)
        return fn(*[replicated(x, like) for x in args], **{name: replicated(x, like) for name, x in kwargs.items()})

    return run


def part_at(x: Any, idx: Any) -> Any:
    """`x[idx]` of a DTensor, for an index that each process has whole."""
    given: list[Any] = [*idx] if isinstance(idx, tuple) else [idx]
    parts: list[Any] = []
    for part in given:
        is_mask = part.dtype == torch.bool and part.ndim > 0 if isinstance(part, Tensor) else False
        parts += part.nonzero(as_tuple=True) if is_mask else [part]
    return x[tuple([replicated(part, x) for part in parts])]


def vector_of(local: Tensor, length: int, group: Any) -> Any:
    """A vector of `length` as a DTensor: each process has ceil(length / processes) numbers, the last ones fewer."""
    has_loaded("torch.distributed.tensor")
    mesh = untyped.distributed.device_mesh.DeviceMesh.from_group(group, local.device.type)
    made = untyped.distributed.tensor
    shape = torch.Size([length])
    return made.DTensor.from_local(local, mesh, [made.Shard(0)], run_check=False, shape=shape, stride=(1,))


def group_from(op: str, given: Any) -> Any:
    """A process group, also of a DeviceMesh with one dim.

    Raises:
        DtypeError: neither.
        ShapeError: a mesh of several dims.
        StructureError: this process is not in the group.
    """
    mesh: Any = given
    if type(given).__name__ == "DeviceMesh" and hasattr(given, "get_group"):
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or ("dp",)
            cure = f"mesh[{names[0]!r}], one of its dims"
            raise ShapeError(message(op, "a mesh of one dim", f"one of {mesh.ndim}", hint=cure))
        return mesh.get_group()
    if not (dist.is_available() and isinstance(given, dist.ProcessGroup)):
        got = "none" if given is None else describe(given)
        hint = "torch.distributed.init_process_group(...) first, then torch.distributed.group.WORLD or a DeviceMesh"
        raise DtypeError(message(op, "a process group or a DeviceMesh of one dim", got, hint=hint))
    if dist.get_rank(given) < 0:
        raise StructureError(message(op, "a group that this process is in", "another", hint="call it on its ranks"))
    return given
