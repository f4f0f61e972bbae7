"""A batch in parts, one after another, and the sums of gradients and metrics over the parts.

    gradients, metrics = sum over parts of (part's mean * its weight) / sum of weights

The weight of a part is the count of its loss, or else its examples; so gradients and loss are those of the whole batch,
however it divides. Sums are kept in float32 at least. `ranks` adds those of several processes before the division.

In a graph, micro-batches of one size are one `scan`, whose body is compiled once. Ragged ones, those of a batch that
does not divide, and those under a transform of `torch.func`, which has no rule for loops, follow one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.compile._torch.tracing import at_trace_time, keep_activations, loop_operator
from tdc.compile.carries import is_container
from tdc.compile.gradients import with_leaves
from tdc.compile.loss import not_zero
from tdc.compile.upstream import traced
from tdc.core import pytree
from tdc.core.container import shape_of
from tdc.core.dtypes import widened
from tdc.core.dynamo import under_transform
from tdc.core.errors import ShapeError, describe, message
from tdc.interop.pytrees import from_pytree, to_pytree
from tdc.ragged.storage import is_ragged
from tdc.tensordict.tensordict import TensorDict, build_td

OP = "compile.train_step"
LEAST = 3  # parts that make a loop worth it: its body takes about as long to compile as three of them (torch 2.13)


class Gradients(NamedTuple):
    """Gradients, metrics, new buffers, and count of a loss, of a batch or a part; an empty dict for none.

    Of sums gradients and metrics are multiplied by the weight: the count, or else the number of examples.
    """

    grads: TensorDict
    metrics: TensorDict
    buffers: Any
    count: Any


Of = Callable[..., Gradients]  # sums of (params, buffers, part, in_loop=False)


def mean_of(sums: Gradients, params: TensorDict, rows: Any) -> Gradients:
    """Divide sums over a batch by their weight, once."""
    weight = sums.count if isinstance(sums.count, Tensor) else rows
    by = not_zero(weight) if isinstance(weight, Tensor) else weight
    grads = sums.grads.apply_with_path(lambda p, g: (g / by).to(params[p].dtype))
    return sums._replace(grads=grads, metrics=sums.metrics.apply(lambda x: x / by if x.is_floating_point() else x))


def sum_over_parts(of: Of, params: TensorDict, buffers: Any, batch: Any, count: int, loops: bool) -> Gradients:
    """Sums of `of(params, buffers, part)` over the parts of a batch; with `loops` they may be a loop of the graph."""
    rows = first_size(batch)
    loops = loops and traced() and not under_transform() and count >= LEAST and rows % count == 0
    loops = loops and all([isinstance(x, Tensor) and x.ndim and x.shape[0] == rows for x in leaves_of(batch)])
    return (in_a_loop if loops else one_by_one)(of, params, buffers, batch, count)


def check_rows(rows: Any, count: int) -> None:
    """Refuse a batch of fewer examples than parts."""
    if rows < count:
        hint = "accumulate=1, or larger batches"
        raise ShapeError(message(OP, f"a batch of at least {count} rows", f"{rows}", hint=hint))


def one_by_one(of: Of, params: TensorDict, buffers: Any, batch: Any, count: int) -> Gradients:
    """Sums part by part."""
    at_trace_time(keep_activations)
    sums: list[Any] = []
    total: Any = {}
    for part in split(batch, count):
        grads, metrics, buffers, counted = of(params, buffers, part)
        found = [grads, metrics]
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
        new = [a + g.to(a.dtype) for a, g in zip(sums, grads._leaves.values(), strict=True)]
        kept = [] if buffers is None else [after._leaves[p].clone() for p in buffers._leaves]
        counts = [counted.clone()] if isinstance(counted, Tensor) else []
        return [new, kept], {"metrics": metrics.apply(torch.clone).to_dict(), "counts": counts}

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


def split(batch: Any, count: int) -> Iterator[Any]:
    """Split a batch along its first dim."""
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
    for part in parts:
        yield part if spec is None else to_pytree(part, spec)


def first_size(batch: Any) -> int:
    """Number of examples of a batch, from its first leaf."""
    sizes = [shape_of(x) for x in leaves_of(batch) if isinstance(x, (Tensor, TensorDict)) or is_ragged(x)]
    if not sizes or not len(sizes[0]) or (isinstance(batch, TensorDict) and not len(batch._size)):
        got, hint = describe(batch), "give the batch its batch_size, or accumulate=1"
        raise ShapeError(message(OP, "a batch with a first dim to split", got, hint=hint))
    return sizes[0][0]


def weighted(x: Tensor, weight: Any) -> Tensor:
    """Weigh a number in a sum; whole numbers are summed as they are. A mean of nothing, NaN, adds nothing."""
    if not x.is_floating_point():
        return x
    return torch.where(weight == 0, 0, widened(x) * weight) if isinstance(weight, Tensor) else widened(x) * weight
