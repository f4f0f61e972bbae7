"""Orders along one dim: sort, argsort, topk; and where values lie among sorted boundaries.

    NestedTensor, MaskedBatch    the elements of each example along a ragged dim, of each position along a static one
    TensorDict                   along a batch dim, for each leaf and feature by itself

Indices are positions within the example. For a TensorDict they have the shape of the values, features among them:
`torch.take_along_dim(td, td.argsort(0), 0)` sorts each feature on its own. To order whole examples by one key:
`td[td["key"].argsort()]`.

Invariants: examples keep their lengths; equal elements keep their order along a ragged dim.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect_number
from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.core.rules import define, unsupported
from tdc.core.typing import Op
from tdc.ops.reduce.along_dim import (
    along_static,
    expect_elements,
    named_result,
    order_of,
    ragged_dim,
    segments_of,
    with_elements,
)
from tdc.ops.reduce.order_statistics import check_lengths
from tdc.ops.reduce.partial_ragged import along_lines, by_lines, over_lines
from tdc.ops.tensordict.batch import along, lift
from tdc.ragged.storage import Ragged

RECTANGLE = "x.filled(value) first"  # sorted columns would have other lengths


def sort_ragged(op: Op) -> Op:
    """The rule of `sort` or `argsort`; a closure, of which a graph holds fewer guards than of a partial."""

    def run(x: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Ragged | tuple[Ragged, ...]:
        def dense(values: Tensor, axis: int) -> Any:
            return op(values, dim=axis, descending=descending, stable=stable)

        if by_lines(op, x, dim):
            return along_lines(op, partial(run, descending=descending, stable=stable), x, dim)
        d = ragged_dim(op, x, dim, RECTANGLE)
        if d is None:
            return along_static(op, x, dim, dense)
        segments = segments_of(op, x, d)
        order, begin = order_of(segments, descending)
        positions = with_elements(x, d, order - begin)
        if op is torch.argsort:
            return positions
        return named_result(op, with_elements(x, d, segments.values.gather(0, order)), positions)

    return run


def topk_ragged(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Any, ...]:
    """Along a ragged dim every example has k elements, so that the result is dense, k at the ragged dim.

    Raises:
        ShapeError: k is negative; an example is shorter: at once on CPU, asynchronously on CUDA.
    """
    expect_number("topk", k, whole=True)
    if k < 0:
        raise ShapeError(message("topk", "k of 0 or more", f"{k}", hint="k = 1 is the largest element"))
    d = ragged_dim(torch.topk, x, dim, RECTANGLE)
    if d is None:
        expect_elements(torch.topk, k, x, dim)
        return along_static(torch.topk, x, dim, lambda v, axis: torch.topk(v, k, axis, largest, sorted))
    check_lengths(torch.topk, k, x, dim)
    if by_lines(torch.topk, x, dim):
        return over_lines(torch.topk, lambda v, dim, keepdim: top(v, k, dim, largest), x, dim, True)
    return top(x, k, d, largest)


def top(x: Any, k: int, dim: int, largest: bool) -> tuple[Any, ...]:
    """The first `k` in order along a ragged dim, where there are as many."""
    if k == 0:
        none = x.sum(dim, keepdim=True).narrow(dim, 0, 0)
        return named_result(torch.topk, none.to(x.dtype), none.to(torch.int64))
    segments = segments_of(torch.topk, x, dim)
    order, start = order_of(segments, largest)[0], segments.starts
    start = start if segments.structure is None else start.unsqueeze(1)
    ranks = start + torch.arange(k, device=order.device).view(1, k, *[1] * (order.ndim - 1))
    shape = ranks.shape[0], k, *order.shape[1:]
    chosen = order.gather(0, ranks.expand(shape).flatten(0, 1))
    values, positions = segments.values.gather(0, chosen).view(shape), chosen.view(shape) - start
    if segments.real is not None:  # no gradient passes to an empty line, one of padding
        values = values.masked_fill((segments.lengths < k).unsqueeze(1), 0)
    found = [segments.back(each.movedim(1, -1), True) for each in (values, positions)]  # (..., 1, ..., k)
    return named_result(torch.topk, *[each.transpose(dim, -1).squeeze(-1) for each in found])


def searchsorted_ragged(
    sorted_sequence: Any, input: Any, *, side: str | None = None, right: bool = False, **kwargs: Any
) -> Ragged | Tensor:
    """Position of each element in a sorted sequence `(n,)` that all examples share."""
    if not isinstance(sorted_sequence, Tensor):
        hint = "loop over the rows of both: tdc.pack([torch.searchsorted(s, r) for s, r in zip(sequences, x)])"
        raise DtypeError(message("searchsorted", "a tensor (n,) to search", describe(sorted_sequence), hint=hint))
    if sorted_sequence.ndim != 1:
        hint = "one sequence for all rows"
        raise ShapeError(message("searchsorted", "a tensor (n,) to search", describe(sorted_sequence), hint=hint))
    return torch.bucketize(input, sorted_sequence, right=right or side == "right", **kwargs)


for _op in (torch.sort, torch.argsort):
    along(_op, "input dim*=-1 descending stable", "sort", ragged=sort_ragged(_op))
along(torch.topk, "input k dim*=-1 largest sorted", "sort", ragged=topk_ragged)
define(torch.searchsorted, "sort", ragged=searchsorted_ragged)
define(torch.msort, "sort", tensordict=lambda x: lift(x, torch.msort, size=x.batch_size, op="msort"))

unsupported(
    torch.msort, ["nested", "masked"], "the batch, along which msort orders elements, while rows differ in length",
    family="sort", hint="x.sort(1).values sorts each row",
)  # fmt: skip
unsupported(
    torch.searchsorted, ["tensordict"], "sorted sequences that lie along the last dim, which are features",
    family="sort", hint="of one leaf: torch.searchsorted(td['key'], values); torch.bucketize(td, boundaries)",
)  # fmt: skip
