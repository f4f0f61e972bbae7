"""TensorDicts of DTensors, by key pattern: torch's DTensor does the work.

    params = shard(params, mesh, {"*.weight": Shard(0), "*": Replicate()})
    params = redistribute(params, {"*": Replicate()})
    params = full_tensor(params)

A rule is a placement of `torch.distributed.tensor`, several for a mesh of several dims, or these by pattern of keys;
the first pattern that matches a key counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tdc.core.arguments import expect
from tdc.core.dynamo import has_loaded
from tdc.core.errors import DtypeError, KeyPathError, UnsupportedError, describe, message, refuse_wrong
from tdc.core.keys import show
from tdc.tensordict.combine import matched
from tdc.tensordict.tensordict import TensorDict, build_td

comm: Any = dist  # parts of it without types


def shard(td: TensorDict, mesh: Any, rule: Any) -> TensorDict:
    """Make DTensors of the leaves, each rank keeping its parts. Nothing is sent.

    All ranks give the same TensorDict, as `tdc.dist.broadcast` makes it.

    Args:
        mesh: a DeviceMesh.
        rule: a placement such as `Shard(0)`, a tuple of one for each dim of the mesh, or `{pattern: these}`. Leaves
            without a pattern stay plain tensors.

    Raises:
        DtypeError: not a TensorDict, a mesh or a rule.
        KeyPathError: a pattern that no key matches.
        UnsupportedError: leaves that are not dense tensors; all are named.

    Compile:
        Eager only; a TensorDict of DTensors goes through compiled functions.

    Example:
        >>> import torch
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> td = TensorDict({"w": torch.ones(4, 2), "b": torch.ones(4)})
        >>> td = shard(td, mesh, {"w": Shard(0), "*": Replicate()})
        >>> td["w"].placements, full_tensor(td)["w"].shape
        ((Shard(dim=0),), torch.Size([4, 2]))
        >>> dist.destroy_process_group()

    Source:
        `torch.distributed.tensor.distribute_tensor`.
    """
    op = "dist.shard"
    expect(op, td, TensorDict)
    module = tensor_module()
    if not isinstance(mesh, comm.DeviceMesh):
        hint = "torch.distributed.init_device_mesh('cuda', (world,))"
        raise DtypeError(message(op, "a DeviceMesh", describe(mesh), hint=hint))

    def distribute(x: Tensor, placements: Any) -> Any:
        return module.distribute_tensor(x, mesh, placements, src_data_rank=None)

    return placed(op, td, rule, mesh.ndim, distribute)


def replicate(td: TensorDict, mesh: Any) -> TensorDict:
    """Make DTensors of the leaves that each rank has whole; as `shard` with `Replicate()`.

    Source:
        `torch.distributed.tensor.Replicate`.
    """
    return shard(td, mesh, (tensor_module().Replicate(),) * getattr(mesh, "ndim", 1))


def redistribute(td: TensorDict, rule: Any) -> TensorDict:
    """Give DTensors other placements. Each leaf is a collective of torch.

    Args:
        rule: as of `shard`; plain tensors and leaves without a pattern stay as they are.

    Raises:
        DtypeError, KeyPathError: as `shard`.

    Compile:
        Traceable.

    Source:
        `torch.distributed.tensor.DTensor.redistribute`.
    """
    op = "dist.redistribute"
    expect(op, td, TensorDict)

    def moved(x: Any, placements: Any) -> Any:
        return x.redistribute(placements=placements) if is_dtensor(x) else x

    sizes = [x.device_mesh.ndim for x in td._leaves.values() if is_dtensor(x)]
    return placed(op, td, rule, sizes[0] if sizes else 1, moved)


def full_tensor(td: TensorDict) -> TensorDict:
    """Make plain tensors of DTensors, whole on every rank. Each leaf is a collective of torch.

    Compile:
        Traceable. The gradient is that of `DTensor.full_tensor`.

    Source:
        `torch.distributed.tensor.DTensor.full_tensor`.
    """
    expect("dist.full_tensor", td, TensorDict)
    leaves = {p: x.full_tensor() if is_dtensor(x) else x for p, x in td._leaves.items()}
    return build_td(leaves, td._nodes, td._size, td._device)


def tensor_module() -> Any:
    """torch's module of DTensors, which `import torch` leaves out."""
    has_loaded("torch.distributed.tensor")
    return sys.modules["torch.distributed.tensor"]


def is_dtensor(x: Any) -> bool:
    """True for a DTensor; there is none before their module is loaded."""
    return hasattr(x, "placements") and hasattr(x, "device_mesh")


def placed(op: str, td: TensorDict, rule: Any, ndim: int, run: Callable[[Any, Any], Any]) -> TensorDict:
    """A TensorDict after a function of each leaf that has placements, and these."""
    rules: dict[Any, Any] = {**rule} if isinstance(rule, Mapping) else {"*": rule}
    paths, leaves = list(td._leaves), dict(td._leaves)
    wrong: dict[str, str] = {}
    left = dict.fromkeys(paths)
    for pattern, given in rules.items():
        placements = as_placements(op, given, ndim)
        expect(op, pattern, str)
        found = [p for p, hit in zip(paths, matched(paths, (pattern,)), strict=True) if hit]
        if not found and paths:
            hint = f"keys are such as {show(paths[0])!r}"
            raise KeyPathError(message(op, f"a key that matches {pattern!r}", "none", hint=hint))
        for path in [p for p in found if p in left]:
            del left[path]
            x: Any = leaves[path]
            if isinstance(x, Tensor):
                leaves[path] = run(x, placements)
            else:
                wrong[show(path)] = describe(x)
    hint = "a pattern that leaves them out; x.to_padded() of ragged batches"
    refuse_wrong(UnsupportedError, op, "dense tensors", wrong, "others", hint)
    return build_td(leaves, td._nodes, td._size, td._device)


def as_placements(op: str, given: Any, ndim: int) -> tuple[Any, ...]:
    """A placement for each dim of a mesh."""
    found: Any = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if len(found) != ndim or not all([hasattr(x, "is_shard") for x in found]):
        hint = "Shard(0) or Replicate() of torch.distributed.tensor, one for each dim of the mesh"
        raise DtypeError(message(op, f"{ndim} placements", describe(given), hint=hint))
    return found
