"""A batch in parts, one after another or on several processes, and the mean of gradients and metrics over the parts.

    gradients, metrics, buffers = sum over parts of (part's mean * its weight) / sum of weights

The weight of a part is the count of its loss, or else its examples; so gradients and loss are those of the whole batch,
however it divides. Sums are kept in float32 at least.

In a graph, micro-batches of one size are one `scan`, whose body is compiled once. Ragged ones, those of a batch that
does not divide, and those under a transform of `torch.func`, which has no rule for loops, follow one another. Over
ranks all sums are one `all_reduce` in the graph of the step; whole numbers are another one.

Invariant: states that are equal on all ranks stay equal to the last digit, but for the part of `optim.sharded`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tdc.compile._torch.tracing import at_trace_time, keep_activations, loop_operator
from tdc.compile.carries import is_container
from tdc.compile.gradients import with_leaves
from tdc.compile.loss import not_zero
from tdc.compile.upstream import traced
from tdc.core import pytree
from tdc.core.container import shape_of
from tdc.core.dtypes import sum_dtype, widened
from tdc.core.dynamo import under_transform
from tdc.core.errors import DtypeError, ShapeError, StructureError, UnsupportedError, describe, message, refuse_wrong
from tdc.core.keys import show
from tdc.interop.pytrees import from_pytree, to_pytree
from tdc.ragged.storage import is_ragged
from tdc.tensordict.tensordict import TensorDict, build_td

OP = "compile.train_step"
WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
LEAST = 3  # parts that make a loop worth it: its body takes about as long to compile as three of them (torch 2.13)


class Gradients(NamedTuple):
    """Gradients, metrics, new buffers, and count of a loss, of a batch or a part; an empty dict for none."""

    grads: TensorDict
    metrics: TensorDict
    buffers: Any
    count: Any


Of = Callable[..., Gradients]  # (params, buffers, part, in_loop=False)


def mean_over_parts(of: Of, params: TensorDict, buffers: Any, batch: Any, count: int) -> Gradients:
    """Mean of `of(params, buffers, part)` over the parts of a batch."""
    rows = first_size(batch)
    if rows < count:
        hint = "accumulate=1, or larger batches"
        raise ShapeError(message(OP, f"a batch of at least {count} rows", f"{rows}", hint=hint))
    loops = traced() and not under_transform() and count >= LEAST and rows % count == 0
    loops = loops and all([isinstance(x, Tensor) and x.ndim and x.shape[0] == rows for x in leaves_of(batch)])
    sums, metrics, buffers, total = (in_a_loop if loops else one_by_one)(of, params, buffers, batch, count)
    by = not_zero(total) if isinstance(total, Tensor) else rows
    grads = sums.apply_with_path(lambda p, g: (g / by).to(params[p].dtype))
    return Gradients(grads, metrics.apply(lambda x: x / by if x.is_floating_point() else x), buffers, total)


def one_by_one(of: Of, params: TensorDict, buffers: Any, batch: Any, count: int) -> Gradients:
    """Sums of gradients, metrics and counts, and the last buffers, part by part."""
    at_trace_time(keep_activations)
    sums: list[Any] = []
    total: Any = {}
    for part, rows in split(batch, count):
        grads, metrics, buffers, counted = of(params, buffers, part)
        by = counted if isinstance(counted, Tensor) else rows
        found = [grads.apply(lambda g, n=by: widened(g) * n), metrics.apply(lambda x, n=by: weighted(x, n))]
        sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
        if isinstance(counted, Tensor):
            total = total + counted if isinstance(total, Tensor) else counted
    return Gradients(sums[0], sums[1], buffers, total)


def in_a_loop(of: Of, params: TensorDict, buffers: Any, batch: Any, count: int) -> Gradients:
    """As `one_by_one`, as one loop of a graph."""
    leaves, spec = pytree.tree_flatten(batch)
    size = leaves[0].shape[0] // count
    xs = [x.reshape(count, size, *x.shape[1:]) for x in leaves]
    zeros = params.apply(lambda p: torch.zeros_like(widened(p)) if p.is_floating_point() or p.is_complex() else None)
    held: list[Tensor] = [] if buffers is None else [x.clone() for x in buffers._leaves.values()]

    def body(carry: list[list[Tensor]], slices: list[Tensor]) -> tuple[list[list[Tensor]], dict[str, Any]]:
        sums, held = carry
        here = None if buffers is None else with_leaves(buffers, held)
        grads, metrics, after, counted = of(params, here, pytree.tree_unflatten(slices, spec), True)
        by: Any = counted if isinstance(counted, Tensor) else size
        new = [a + (widened(g) * by).to(a.dtype) for a, g in zip(sums, grads._leaves.values(), strict=True)]
        kept = [] if buffers is None else [after._leaves[p].clone() for p in buffers._leaves]
        terms = metrics.apply(lambda x: weighted(x, by).clone())
        counts = [counted.clone()] if isinstance(counted, Tensor) else []
        return [new, kept], {"metrics": terms.to_dict(), "counts": counts}

    carry, terms = loop_operator("scan")(body, [list(zeros._leaves.values()), held], xs)
    metrics = TensorDict(terms["metrics"]).apply(lambda x: x.sum(0))
    after = None if buffers is None else with_leaves(buffers, carry[1])
    total = terms["counts"][0].sum(0) if terms["counts"] else {}
    return Gradients(with_leaves(zeros, carry[0]), metrics, after, total)


def leaves_of(batch: Any) -> list[Any]:
    """The leaves of a batch; ragged ones whole."""
    if isinstance(batch, TensorDict):
        return list(batch._leaves.values())
    return pytree.tree_leaves(batch, is_leaf=is_container)


def split(batch: Any, count: int) -> Iterator[tuple[Any, Any]]:
    """Split a batch along its first dim; yield parts and their numbers of examples."""
    rows = first_size(batch)
    td: Any = batch
    spec = None
    if isinstance(batch, TensorDict):  # with the size that its leaves have, which a compiled graph knows to vary
        td = build_td(batch._leaves, batch._nodes, torch.Size([rows, *batch._size[1:]]), batch._device)
    else:
        td, spec = from_pytree(batch, [rows])
    ends = [i * rows // count for i in range(count + 1)]  # arithmetic alone, so that all sizes are one graph
    lengths = [ends[i + 1] - ends[i] for i in range(count)]
    parts: tuple[Any, ...] = torch.split(td, lengths)
    for part, length in zip(parts, lengths, strict=True):
        yield (part if spec is None else to_pytree(part, spec)), length


def first_size(batch: Any) -> int:
    """Number of examples of a batch, from its first leaf."""
    sizes = [shape_of(x) for x in leaves_of(batch) if isinstance(x, (Tensor, TensorDict)) or is_ragged(x)]
    if not sizes or not len(sizes[0]) or (isinstance(batch, TensorDict) and not len(batch._size)):
        got, hint = describe(batch), "give the batch its batch_size, or accumulate=1"
        raise ShapeError(message(OP, "a batch with a first dim to split", got, hint=hint))
    return sizes[0][0]


def weighted(x: Tensor, rows: Any) -> Tensor:
    """Weigh a metric in a mean over examples; counts are summed as they are."""
    return widened(x) * rows if x.is_floating_point() else x


# -- ranks


def check_group(group: Any, net: Any) -> None:
    """Refuse other objects than a process group, and modules that exchange gradients by hooks, which a step skips."""
    modules = net.named_modules() if isinstance(net, nn.Module) else ()
    wrapped = {
        name or "the net": kind.__name__ for name, m in modules for kind in type(m).__mro__ if kind.__name__ in WRAPPERS
    }
    cure = "leave fully_shard out: train_step(net, loss, sharded(adamw(1e-3), group), process_group=group)"
    cure = cure if "FSDPModule" in wrapped.values() else "train_step(net, loss, optimizer, process_group=group)"
    refuse_wrong(UnsupportedError, OP, "a module without wrappers", wrapped, "of them", cure)
    if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        hint = "torch.distributed.init_process_group(...), then process_group=torch.distributed.group.WORLD"
        raise DtypeError(message(OP, "a process group", describe(group), hint=hint))


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
    for x in td._leaves.values():
        given_by_first = x.to(device).contiguous()
        dist.broadcast(given_by_first, group=group, group_src=0)
        x.copy_(given_by_first)
    return td


def mean_over_ranks(found: Gradients, rows: Any, group: Any) -> Gradients:
    """Average the results of all ranks; whole numbers among metrics are summed."""
    if under_transform():
        hint = "train members on ranks of their own, or leave process_group out"
        raise UnsupportedError(message(OP, "no vmap around a step with process_group=", "one", hint=hint))
    buffers = {"buffers": found.buffers} if isinstance(found.buffers, TensorDict) else {}
    whole = TensorDict({"grads": found.grads, "metrics": found.metrics, **buffers})
    means = {path: x for path, x in whole._leaves.items() if x.is_floating_point() or x.is_complex()}
    dtype = max([sum_dtype(x.dtype) for x in means.values()], key=lambda d: d.itemsize)
    first = next(iter(means.values()))
    weight = found.count if isinstance(found.count, Tensor) else torch.ones((), device=first.device) * rows
    *sums, total = all_summed([*[parts_of(x).to(dtype) * weight for x in means.values()], weight.to(dtype)], group)
    new = {path: as_given(s / not_zero(total), x) for s, (path, x) in zip(sums, means.items(), strict=True)}
    counts = {p: x for p, x in whole._leaves.items() if p not in means and p[0] == "metrics"}
    whole = whole.update({**new, **summed(counts, group)})
    count = total.to(found.count.dtype) if isinstance(found.count, Tensor) else found.count
    return Gradients(whole["grads"], whole["metrics"], whole["buffers"] if buffers else found.buffers, count)


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


def parts_of(x: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones."""
    return torch.view_as_real(x) if x.is_complex() else x


def as_given(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `parts_of`, rounded to the dtype that went in."""
    return (torch.view_as_complex(x) if like.is_complex() else x).to(like.dtype)
