"""Several processes, or ranks, each with its part of a batch: sums of gradients and metrics, and errors of one rank.

    each rank    gradient of (its mean loss * its weight)      weight: the count of its loss, or else its examples
    all          sum over ranks / sum of weights               divided once

The sum is differentiated, not the mean: a loss may hold a collective, whose gradient is that of the sum of all ranks'
losses. For float16, which a sum overflows, each rank divides by the weight of all before the backward pass.

An error of one rank ends the others, in words, before the timeout of the group:

    a rank raises     writes its error where others find it, and waits a moment for theirs
      all raise       the error stands, and the group can be used
      else            this rank leaves the group, so that the exchange in which the others wait fails at once
    those raise       a DistError with the text of the rank that failed

Invariants: states that are equal on all ranks stay equal to the last digit, but for the part of `optim.sharded`; a rank
without examples adds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tdc.compile._torch.collectives import finished, started, store_of_processes
from tdc.compile._torch.tracing import at_trace_time, keep_under_way
from tdc.compile.gradients import with_leaves
from tdc.compile.loss import not_zero
from tdc.compile.micro_batches import Gradients, weighted
from tdc.compile.shards import Shards, cut, joined, packs
from tdc.core.dtensor import group_from
from tdc.core.dtypes import is_inexact, sum_dtype
from tdc.core.dynamo import under_transform
from tdc.core.errors import (
    DistError,
    StructureError,
    TdcError,
    UnsupportedError,
    describe,
    first_line,
    message,
    refuse_wrong,
)
from tdc.core.keys import show
from tdc.core.typing import KeyPath
from tdc.tensordict.tensordict import TensorDict

OP = "compile.train_step"
GRACE = 2.0  # seconds in which ranks that raise the same error do so
HINT = "the group is dead: mend the error of that rank and start again, as torchrun --max-restarts=3 does"
ERRORS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by group: steps that failed on this rank
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
    return None if group is None else group_from(OP, group)


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
    leaves = [x for x in td._leaves.values() if x.numel()]
    for positions in packs([x.numel() * x.element_size() for x in leaves], PACK):
        some = [leaves[i] for i in positions]
        flat = torch.cat([x.to(device).contiguous().reshape(-1).view(torch.uint8) for x in some])
        dist.broadcast(flat, group=group, group_src=0)
        for x, piece in zip(some, flat.split([x.numel() * x.element_size() for x in some]), strict=True):
            x.copy_(piece.clone().view(x.dtype).reshape(x.shape))
    return td


class Exchange(NamedTuple):
    """Reduction of gradients: its processes, the bytes of a message, the dtype, and the parts."""

    group: Any
    most: int
    dtype: torch.dtype | None
    shards: Shards | None


def sum_over_ranks(
    sums: Gradients, rows: Any, params: TensorDict, before: Any, how: Exchange
) -> tuple[Gradients, Tensor]:
    """Add the sums of all ranks, and return the sum of weights. Buffers are weighted means; `before` if nothing counts.

    Whole numbers among metrics are summed. Gradients are those of all parameters, or of this rank's part.
    """
    if under_transform():
        hint = "train members on ranks of their own, or leave process_group out"
        raise UnsupportedError(message(OP, "no vmap around a step with process_group=", "one", hint=hint))
    at_trace_time(keep_under_way)
    grads, metrics = sums.grads, sums.metrics
    first = next(iter(grads._leaves.values()))
    weight = sums.count if isinstance(sums.count, Tensor) else torch.ones((), device=first.device) * rows
    means, counts = means_and_counts(metrics)
    held = before._leaves if isinstance(before, TensorDict) else {}
    statistics = {path: sums.buffers._leaves[path] for path, x in held.items() if is_inexact(x)}
    own = [torch.where(weight == 0, 0, x * weight) for x in statistics.values()]
    numbers = [weight, *means.values(), *own]
    travel = [sum_dtype(x.dtype) for x in numbers]
    if how.shards is None:
        leaves = list(grads._leaves.values())
        dtypes = [*travel, *[how.dtype or sum_dtype(g.dtype) for g in leaves]]
        total, *found = sum_of_ranks([*numbers, *leaves], dtypes, how.group, how.most)
        grads = with_leaves(grads, found[len(numbers) - 1 :])
    else:
        grads = how.shards.summed(grads, params, how.dtype)
        total, *found = sum_of_ranks(numbers, travel, how.group, how.most)
    metrics = metrics.update({**dict(zip(means, found[: len(means)], strict=True)), **summed(counts, how.group)})
    buffers = sums.buffers
    if statistics:
        by = not_zero(total)
        pairs = zip(statistics.items(), found[len(means) : len(means) + len(own)], strict=True)
        buffers = buffers.update({p: torch.where(total == 0, held[p], s / by).to(x.dtype) for (p, x), s in pairs})
    return Gradients(grads, metrics, buffers, total if isinstance(sums.count, Tensor) else sums.count), total


def sum_of_ranks(tensors: list[Tensor], dtypes: list[torch.dtype], group: Any, most: int = PACK) -> list[Tensor]:
    """The sums over all ranks of floating-point tensors, by exchanges of one dtype and at most so many bytes.

    The last tensors go first: gradients in the order in which a backward pass finishes them.
    """
    kinds: dict[torch.dtype, list[int]] = {}
    for i in reversed(range(len(tensors))):
        kinds.setdefault(dtypes[i], []).append(i)
    under_way: list[tuple[list[int], list[Tensor], Tensor]] = []
    for dtype, positions in kinds.items():
        sizes = [parts_of(tensors[i]).numel() * dtype.itemsize for i in positions]
        for some in packs(sizes, most):
            at = [positions[k] for k in some]
            own = [parts_of(tensors[i]).to(dtype) for i in at]
            under_way.append((at, own, started(joined(own), group)))
    found = list(tensors)
    for at, own, flat in under_way:  # all are sent before the first is waited for
        for i, x in zip(at, cut(finished(flat), own), strict=True):
            found[i] = as_given(x, tensors[i])
    return found


def mean_over_ranks(metrics: TensorDict, weight: Tensor, group: Any) -> tuple[TensorDict, Tensor]:
    """Weighted means of the metrics of all ranks, and the sum of weights; whole numbers are summed."""
    means, counts = means_and_counts(metrics)
    own = [*[weighted(x, weight) for x in means.values()], weight]
    *found, total = sum_of_ranks(own, [sum_dtype(x.dtype) for x in own], group)
    new = {path: (s / not_zero(total)).to(x.dtype) for s, (path, x) in zip(found, means.items(), strict=True)}
    return metrics.update({**new, **summed(counts, group)}), total


def means_and_counts(metrics: TensorDict) -> tuple[dict[KeyPath, Tensor], dict[KeyPath, Tensor]]:
    """Metrics that are means over a batch, and whole numbers, which are counts."""
    means = {path: x for path, x in metrics._leaves.items() if is_inexact(x)}
    return means, {path: x for path, x in metrics._leaves.items() if path not in means}


def summed(counts: Mapping[Any, Tensor], group: Any) -> dict[Any, Tensor]:
    """Whole numbers of all ranks together."""
    if not counts:
        return {}
    return dict(zip(counts, all_summed([x.to(torch.int64) for x in counts.values()], group), strict=True))


def all_summed(tensors: list[Tensor], group: Any) -> list[Tensor]:
    """The sums over all ranks of tensors of one dtype, by one exchange."""
    return cut(finished(started(joined(tensors), group)), tensors)


def parts_of(x: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones."""
    return torch.view_as_real(x) if x.is_complex() else x


def as_given(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `parts_of`, in the dtype that went in."""
    return (torch.view_as_complex(x) if like.is_complex() else x).to(like.dtype)


# -- errors


@contextmanager
def all_together(op: str, group: Any) -> Generator[None]:
    """Let an error within end the other ranks of a group, and raise a DistError where it is that of another rank."""
    try:
        yield
    except Exception as error:
        if group is None or dist.get_world_size(group) == 1:
            raise
        others = settled(group, first_line(error), is_lost(error))
        if is_lost(error):
            raise lost(op, group, error, others) from error
        raise


def is_lost(error: Exception) -> bool:
    """True for an error of torch's exchange between processes."""
    text = str(error)
    return isinstance(error, RuntimeError) and not isinstance(error, TdcError) and ("gloo" in text or "NCCL" in text)


def settled(group: Any, text: str, is_lost: bool) -> dict[int, str]:
    """Tell the others of an error, and leave the group unless all of them have one. Returns their errors by rank."""
    store, rank, world = store_of_processes(), dist.get_rank(group), dist.get_world_size(group)
    count = ERRORS[group] = ERRORS.get(group, 0) + 1
    names = {i: f"tdc.error/{group.group_name}/{count}/{i}" for i in range(world)}
    if store is not None:
        store.set(names[rank], f"lost: {text}" if is_lost else f"error: {text}")
        if not is_lost and waited(store, list(names.values()), GRACE):
            return {}
    group.abort()
    if store is None:
        return {}
    waited(store, list(names.values()), GRACE)  # the store may be in this process, which is about to end
    told = {i: store.get(name).decode() for i, name in names.items() if i != rank and store.check([name])}
    return {i: text.removeprefix("error: ") for i, text in told.items() if text.startswith("error: ")}


def waited(store: Any, names: list[str], seconds: float) -> bool:
    """Wait until all of these are in a store, or so many seconds. Returns True if they are."""
    end = time.monotonic() + seconds
    while not store.check(names):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def lost(op: str, group: Any, error: Exception, others: dict[int, str]) -> DistError:
    """The error of a rank whose exchange failed, with those of ranks that told theirs."""
    rank = dist.get_rank(group)
    said = {f"rank {i}": text for i, text in others.items()} or {f"rank {rank}": first_line(error)[:200]}
    got = "an error of another" if others else "an exchange that failed"
    return DistError(message(op, "all ranks to take part", got, said, HINT), next(iter(others), rank), op)
