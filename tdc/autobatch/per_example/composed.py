"""Rows of operations that are others put together: flips, stacks, splits, products over chosen dims, and their kin."""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.autobatch.per_example.layers import pairs
from tdc.autobatch.per_example.operands import reduced
from tdc.autobatch.per_example.products import einsum
from tdc.autobatch.per_example.sizes import cat, unsqueezed
from tdc.autobatch.per_example.table import flattened, only_shared, put, ragged, rank, refuse
from tdc.autobatch.values import Lane
from tdc.core.rules import name_of
from tdc.core.typing import Op
from tdc.ops.loss import named


def flipped(op: Any, dim: int, input: Any) -> Any:
    x = ragged(input, op)
    return torch.flip(x, (dim + 1,))


# -- dims of size 1


def widened(x: Any, dims: int) -> Any:
    """An example of at least so many dims, the third one at its end."""
    while rank(x) < min(dims, 2):
        x = unsqueezed(x)
    return unsqueezed(x, -1) if rank(x) < dims else x


def at_least(dims: int, *given: Any) -> Any:
    """`atleast_1d` and its kin, of one example or several."""
    several = len(given) != 1 or isinstance(given[0], (tuple, list))
    found = [widened(x, dims) for x in (given[0] if several and len(given) == 1 else given)]
    results = [x.data if type(x) is Lane else x for x in found]
    return tuple(results) if several else results[0]


def dstack(tensors: Sequence[Any]) -> Any:
    return cat([widened(x, 3) for x in tensors], 2)


def column_stack(tensors: Sequence[Any]) -> Any:
    return cat([unsqueezed(widened(x, 1), -1) if rank(x) < 2 else x for x in tensors], 1)


def split_at(op: Any, dim: int, input: Any, indices_or_sections: Any) -> Any:
    """`hsplit`, `vsplit`, `dsplit`: between positions, or into equal parts of a static dim."""
    x, given = ragged(input, op), indices_or_sections
    only_shared(op, given)
    dim = 1 if rank(x) == 1 else dim + 1
    if isinstance(given, (tuple, list)):
        return torch.tensor_split(x, given, dim)
    if dim in x.ragged_dims:
        refuse(f"torch.{name_of(op)} into equal parts of a ragged dim", "x.tensor_split(n, dim)")
    if x.shape[dim] % given != 0:
        refuse(f"torch.{name_of(op)} of {x.shape[dim]} into {given} parts", "x.tensor_split(n, dim)", "equal parts")
    return torch.tensor_split(x, given, dim)


# -- values


def msort(input: Any) -> Any:
    return torch.sort(ragged(input, torch.msort), 1)[0]


def diag(input: Any, diagonal: int = 0) -> Any:
    """A matrix with these elements on a diagonal, or the diagonal of a matrix."""
    x = ragged(input, torch.diag)
    if rank(x) == 1:
        return torch.diag_embed(x, diagonal)
    if rank(x) != 2:
        refuse(f"{rank(x)} dims in torch.diag", "torch.diagonal")
    return torch.diagonal(x, diagonal, 1, 2)


def searchsorted(
    sorted_sequence: Any, input: Any, *, out_int32: bool = False, right: bool = False, side: Any = None,
    sorter: Any = None,
) -> Any:  # fmt: skip
    """Places of elements in one sequence that all share."""
    if not isinstance(sorted_sequence, Tensor) or sorted_sequence.ndim != 1 or sorter is not None:
        refuse("torch.searchsorted in a sequence of each example", "share the sequence between examples")
    x = ragged(input, torch.searchsorted)
    return torch.bucketize(x, sorted_sequence, out_int32=out_int32, right=right or side == "right")


# -- products


def tensordot(a: Any, b: Any, dims: Any = 2) -> Any:
    one, two = string.ascii_lowercase[: rank(a)], string.ascii_lowercase[rank(a) : rank(a) + rank(b)]
    if isinstance(dims, int):
        dims = [range(rank(a) - dims, rank(a)), range(dims)]
    for d, e in zip(*dims, strict=True):
        two = two.replace(two[e], one[d])
    out = "".join([c for c in one + two if (one + two).count(c) == 1])
    return einsum(f"{one},{two}->{out}", a, b)


def inner(input: Any, other: Any) -> Any:
    return tensordot(input, other, ([-1], [-1]))


# -- losses


TRIPLET = ("anchor", "positive", "negative", "margin", "p", "eps", "swap", "size_average", "reduce", "reduction")


def triplet_margin_loss(*args: Any, **kwargs: Any) -> Any:
    given, reduction = named(TRIPLET, args, kwargs)
    distance, how = pairs(F.pairwise_distance), (given.get("p", 2.0), given.get("eps", 1e-6))
    near, far = [distance(given["anchor"], given[name], *how) for name in ("positive", "negative")]
    if given.get("swap"):
        far = torch.minimum(far, distance(given["positive"], given["negative"], *how))
    loss = (near - far + given.get("margin", 1.0)).clamp(min=0)
    return reduced(F.triplet_margin_loss, loss, reduction) if loss.ndim > 1 else loss


OWN: dict[Any, Op] = {
    torch.flipud: partial(flipped, torch.flipud, 0), torch.fliplr: partial(flipped, torch.fliplr, 1),
    torch.atleast_1d: partial(at_least, 1), torch.atleast_2d: partial(at_least, 2),
    torch.atleast_3d: partial(at_least, 3), torch.dstack: dstack, torch.column_stack: column_stack,
    torch.vsplit: partial(split_at, torch.vsplit, 0), torch.hsplit: partial(split_at, torch.hsplit, 1),
    torch.dsplit: partial(split_at, torch.dsplit, 2), torch.msort: msort, torch.diag: diag,
    torch.diagflat: lambda input, offset=0: diag(flattened(ragged(input, torch.diagflat)), offset),
    torch.searchsorted: searchsorted, torch.tensordot: tensordot, torch.inner: inner,
    F.triplet_margin_loss: triplet_margin_loss,
}  # fmt: skip

for _op, _row in OWN.items():
    put(_op, _row)
