"""Sums of gradients and metrics over several processes, or ranks, each with its part of a batch.

    each rank    gradient of (its mean loss * its weight)      weight: the count of its loss, or else its examples
    all          sum over ranks / sum of weights               divided once

The sum is differentiated, not the mean: a loss may hold a collective, whose gradient is that of the sum of all ranks'
losses. For float16, which a sum overflows, each rank divides by the weight of all before the backward pass.

Invariants: states that are equal on all ranks stay equal to the last digit, but for the part of `optim.sharded`; a rank
without examples adds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tdc.compile.loss import not_zero
from tdc.compile.micro_batches import Gradients, weighted
from tdc.core.dtensor import group_from
from tdc.core.dtypes import sum_dtype
from tdc.core.dynamo import under_transform
from tdc.core.errors import StructureError, UnsupportedError, describe, message, refuse_wrong
from tdc.core.keys import show
from tdc.tensordict.tensordict import TensorDict

OP = "compile.train_step"
PACK = 2**28  # bytes of one broadcast
WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")

def check_group(group: Any, net: Any) -> Any:
    """A process group, also of a mesh; refuse modules that exchange gradients by hooks, which a step skips."""
    modules = net.named_modules() if isinstance(net, nn.Module) else ()
    wrapped = {
        name or "the net": kind.__name__ for name, m in modules for kind in type(m).__mro__ if kind.__name__ in WRAPPERS
    }
    cure = "leave fully_shard out: train_step(net, loss, sharded(adamw(1e-3), group), process_group=group)"
    cure = cure if "FSDPModule" in wrapped.values() else "train_step(net, loss, optimizer, process_group=group)"
    refuse_wrong(UnsupportedError, OP, "a module without wrappers", wrapped, "of them", cure)
    hint = "torch.distributed.init_process_group(...), then process_group=torch.distributed.group.WORLD"
    return None if group is None else group_from(OP, group, hint=hint)


def group_of(optimizer: Any) -> Any:
    """Processes that have different states of an optimizer, as of `optim.sharded`; None where all are equal."""
    return getattr(optimizer, "process_group", None)


def rank_of(group: Any) -> int:
    """The number of this process in a group; 0 without one."""
    return 0 if group is None else dist.get_rank(group)


def as_on_first(td: TensorDict, device: torch.device, group: Any) -> TensorDict:
    """Broadcast the values of rank 0 into a TensorDict of all ranks, over `device`.

    Raises:
        StructureError: other keys, shapes or dtypes.
    """
    own = {path: describe(x) for path, x in td._leaves.items()}
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, own, group)  # so that all ranks raise, and none waits for the others
    wrong = {
        f"rank {i}, {show(path)}": f"{forms.get(path, 'missing')}, on rank 0 {told[0].get(path, 'missing')}"
        for i, forms in enumerate(told)
        for path in [*told[0], *[p for p in forms if p not in told[0]]]
        if forms.get(path) != told[0].get(path)
    }
    hint = "build the same net on all ranks"
    refuse_wrong(StructureError, f"{OP}.init", "the tensors of rank 0", wrong, "that differ", hint)
    for some in packs([x for x in td._leaves.values() if x.numel()], PACK):
        flat = torch.cat([x.to(device).contiguous().reshape(-1).view(torch.uint8) for x in some])
        dist.broadcast(flat, group=group, group_src=0)
        for x, piece in zip(some, flat.split([x.numel() * x.element_size() for x in some]), strict=True):
            x.copy_(piece.clone().view(x.dtype).reshape(x.shape))
    return td


def packs(tensors: list[Tensor], most: int) -> list[list[Tensor]]:
    """Tensors in order, put together up to so many bytes."""
    found: list[list[Tensor]] = []
    size = most
    for x in tensors:
        own = x.numel() * x.element_size()
        if not found or size + own > most:
            found.append([])
            size = 0
        found[-1].append(x)
        size += own
    return found


def sum_over_ranks(sums: Gradients, rows: Any, before: Any, group: Any) -> tuple[Gradients, Tensor]:
    """Add the sums of all ranks, and return the sum of weights. Buffers are weighted means; `before` if nothing counts.

    Whole numbers among metrics are summed.
    """
    if under_transform():
        hint = "train members on ranks of their own, or leave process_group out"
        raise UnsupportedError(message(OP, "no vmap around a step with process_group=", "one", hint=hint))
    first = next(iter(sums.grads._leaves.values()))
    weight = sums.count if isinstance(sums.count, Tensor) else torch.ones((), device=first.device) * rows
    whole = TensorDict({"grads": sums.grads, "metrics": sums.metrics})
    inexact = {path: x for path, x in whole._leaves.items() if is_inexact(x)}
    counts = {path: x for path, x in whole._leaves.items() if path not in inexact}
    held = before._leaves if isinstance(before, TensorDict) else {}
    statistics = {path: sums.buffers._leaves[path] for path, x in held.items() if is_inexact(x)}
    own = [torch.where(weight == 0, 0, x * weight) for x in statistics.values()]
    *found, total = sum_of_ranks([*inexact.values(), *own, weight], group)
    whole = whole.update({**dict(zip(inexact, found[: len(inexact)], strict=True)), **summed(counts, group)})
    buffers = sums.buffers
    if statistics:
        means = zip(statistics.items(), found[len(inexact) :], strict=True)
        by = not_zero(total)
        buffers = buffers.update({p: torch.where(total == 0, held[p], s / by).to(x.dtype) for (p, x), s in means})
    count = total if isinstance(sums.count, Tensor) else sums.count
    return Gradients(whole["grads"], whole["metrics"], buffers, count), total


def sum_of_ranks(tensors: list[Tensor], group: Any) -> list[Tensor]:
    """The sums over all ranks of floating-point tensors, by one exchange for float64 and one for all others."""
    kinds: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(tensors):
        kinds.setdefault(sum_dtype(x.dtype), []).append(i)
    found = list(tensors)
    for dtype, positions in kinds.items():
        sums = all_summed([parts_of(tensors[i]).to(dtype) for i in positions], group)
        for i, x in zip(positions, sums, strict=True):
            found[i] = as_given(x, tensors[i])
    return found


def mean_over_ranks(metrics: TensorDict, weight: Tensor, group: Any) -> tuple[TensorDict, Tensor]:
    """Weighted means of the metrics of all ranks, and the sum of weights; whole numbers are summed."""
    means = {path: x for path, x in metrics._leaves.items() if is_inexact(x)}
    counts = {path: x for path, x in metrics._leaves.items() if path not in means}
    *found, total = sum_of_ranks([*[weighted(x, weight) for x in means.values()], weight], group)
    new = {path: (s / not_zero(total)).to(x.dtype) for s, (path, x) in zip(found, means.items(), strict=True)}
    return metrics.update({**new, **summed(counts, group)}), total


def summed(counts: Mapping[Any, Tensor], group: Any) -> dict[Any, Tensor]:
    """Whole numbers of all ranks together."""
    if not counts:
        return {}
    return dict(zip(counts, all_summed([x.to(torch.int64) for x in counts.values()], group), strict=True))


def all_summed(tensors: list[Tensor], group: Any) -> list[Tensor]:
    """The sums over all ranks of tensors of one dtype, by one exchange."""
    flat = torch.cat([x.reshape(-1) for x in tensors])
    dist.all_reduce(flat, group=group)
    parts = flat.split([x.numel() for x in tensors])
    return [part.reshape(x.shape) for part, x in zip(parts, tensors, strict=True)]


def is_inexact(x: Tensor) -> bool:
    """True for floating-point and complex tensors."""
    return x.is_floating_point() or x.is_complex()


def parts_of(x: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones."""
    return torch.view_as_real(x) if x.is_complex() else x


def as_given(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `parts_of`, in the dtype that went in."""
    return (torch.view_as_complex(x) if like.is_complex() else x).to(like.dtype)
