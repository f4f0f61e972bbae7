"""Sums over ranks, and other reductions: one message for each dtype, of all leaves at once.

Structures have one form and one size on all ranks; the offsets of ragged leaves agree, and stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tdc.compile.shards import joined
from tdc.core.arguments import expect_number
from tdc.core.dynamo import skipped_in_graphs
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message, refuse_wrong
from tdc.core.keys import show
from tdc.dist.form import Described, as_td, described
from tdc.dist.in_graphs import in_transform, records, reduce_whole, scatter_rows
from tdc.dist.transport import (
    Handshake,
    Ranks,
    agreed,
    as_group,
    check_rank,
    contents,
    header_of,
    is_structural,
    ranks_of,
    sending,
    taking_part,
)
from tdc.dist.wire import built, by_dtype, views
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.two_level import TwoLevelTensor
from tdc.tensordict.leaf import unwrap

comm: Any = dist  # parts of it without types
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
COMPLEX = {torch.complex64, torch.complex128}
WHOLE = {torch.int32, torch.int64}
SMALL = {torch.bool, torch.uint8, torch.int8}
TAKES = {  # dtypes that every backend reduces right; of others gloo overflows, refuses or counts bools as one
    "sum": FLOATS | COMPLEX | WHOLE,
    "mean": FLOATS | COMPLEX,
    "max": FLOATS | WHOLE | SMALL,
    "min": FLOATS | WHOLE | SMALL,
    "prod": FLOATS | WHOLE,
}
CASTS = {"sum": "dtype=torch.int64 for bool and integers", "mean": "td.float() of integers"}
OPS = {"sum": "SUM", "mean": "SUM", "max": "MAX", "min": "MIN", "prod": "PRODUCT"}


def all_reduce(
    td: Any, op: str = "sum", *, weight: Any = None, dtype: torch.dtype | None = None, group: Any = None,
    check: bool = True,
) -> Any:  # fmt: skip
    """Reduce the structures of all ranks elementwise, on every rank.

    A handshake and one message for each dtype, of 2 N (world - 1) / world bytes.

    Args:
        td: a TensorDict or tensorclass, or one tensor or ragged batch, of one form and size on all ranks.
        op: "sum", "mean", "max", "min" or "prod".
        weight: number of this rank, by which its numbers count in "sum" and "mean"; the mean is by the sum of weights.
        dtype: convert leaves of its sort (floating, complex, or integers and bool) first, and return them in it.
        group: a process group or a DeviceMesh of one dim; the default group without it.
        check: False leaves the handshake out, where one form and size on all ranks is certain.

    Returns:
        A new structure, equal in every bit on all ranks. Padding of MaskedBatches is reduced like the rest.

    Raises:
        DtypeError: dtypes that gloo reduces wrong (sums of bool and of integers of 8 and 16 bits, float8, an order of
            complex numbers), means of integers, ObjectArrays. All leaves are named, with the cast.
        StructureError: on every rank: another operation on some rank, another form or size, other lengths of examples.
        UnsupportedError: leaves that cannot travel; all are named.
        DistError: a rank is gone or did not come in time.

    Compile:
        fullgraph, without the handshake. The gradient is that of the sum of all ranks' losses.

    Example:
        >>> store = dist.HashStore()  # with torchrun, init_process_group() alone
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> all_reduce(torch.tensor([1.0, 2.0]), "mean", weight=3)
        tensor([1., 2.])
        >>> dist.destroy_process_group()

    Source:
        `torch.distributed.all_reduce`.
    """
    return reduced("dist.all_reduce", td, op, weight, dtype, group, check, None)


def reduce(
    td: Any, dst: int = 0, op: str = "sum", *, weight: Any = None, dtype: torch.dtype | None = None, group: Any = None,
    check: bool = True,
) -> Any:  # fmt: skip
    """Reduce the structures of all ranks elementwise, on one rank.

    Args:
        td, op, weight, dtype, group, check: as of `all_reduce`.
        dst: a rank within the group.

    Returns:
        As of `all_reduce` on rank `dst`; None elsewhere.

    Raises:
        DtypeError, StructureError, UnsupportedError, DistError: as `all_reduce`.

    Compile:
        Eager only, without gradients.

    Example:
        >>> store = dist.HashStore()  # with torchrun, init_process_group() alone
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> reduce(torch.ones(2), op="max")
        tensor([1., 1.])
        >>> dist.destroy_process_group()

    Source:
        `torch.distributed.reduce`.
    """
    return reduced("dist.reduce", td, op, weight, dtype, group, check, dst)


def reduced(
    name: str, td: Any, op: str, weight: Any, dtype: Any, group: Any, check: bool, dst: int | None
) -> Any:
    """The body of `all_reduce` and `reduce`."""
    if not isinstance(op, str) or op not in OPS:
        hint = ", ".join([repr(known) for known in OPS])
        raise StructureError(message(name, "a known operation", repr(op), hint=hint))
    if weight is not None and op not in ("sum", "mean"):
        raise StructureError(message(name, "weight= of a sum or mean", repr(op), hint="weight the td itself"))
    pg = as_group(name, group)
    agreement = agree_and_reduce(name, td, op, weight, dtype, group, check, dst)
    if agreement is not None:
        return agreement[0]
    whole = cast(name, td, dtype)
    refuse_dtypes(name, whole, op)
    found = reduce_whole(name, whole, op, weight, pg)
    return found if dst is None or dst == pg.rank() else None


@skipped_in_graphs
def agree_and_reduce(
    name: str, td: Any, op: str, weight: Any, dtype: Any, group: Any, check: bool, dst: int | None
) -> tuple[Any] | None:
    """The handshake of a reduction, and its result; None where gradients are to be recorded."""
    if in_transform():
        return None
    ranks = ranks_of(name, group)
    recorded = dst is None and (records(td) or (isinstance(weight, Tensor) and records(weight)))
    text = f"{name} {op} dst={dst} {dtype}{' weighted' * (weight is not None)}{' recorded' * recorded}"
    with taking_part(text, ranks):
        if dst is not None:
            check_rank(name, "dst", dst, ranks)
        whole = cast(name, td, dtype)
        x = described(name, whole)
        if not (x.form.is_plain and TAKES[op].issuperset(x.form.groups)):
            refuse_dtypes(name, whole, op)
        factor = 1.0 if weight is None else number_of(name, weight, x)
    shake = Handshake(name, ranks, header_of(text, x, content=contents(x), weight=factor)) if check else None
    if recorded:
        if shake is not None:
            agreed(name, ranks, shake.headers(), x.form, sizes=True)
        return None
    flats = flat(x, factor)
    out = unflattened(name, x, flats)  # which the reduction writes to; both while the handshake is under way
    total = float(ranks.world)
    if shake is not None:
        heads = shake.headers()
        agreed(name, ranks, heads, x.form, sizes=True)
        total = sum([h.weight for h in heads]) if weight is not None else total
    elif weight is not None and op == "mean":
        own = torch.tensor(factor, dtype=torch.float64, device=ranks.device)
        run_all(name, ranks, [own], "SUM", None)
        total = float(own)
    run_all(name, ranks, [*flats.values()], OPS[op], dst)
    if op == "mean":
        for whole_flat in flats.values():
            whole_flat.div_(total)
    return (out if dst in (None, ranks.rank) else None,)


def run_all(name: str, ranks: Ranks, tensors: Sequence[Tensor], op: str, dst: int | None) -> None:
    """Reduce tensors in place, all at once."""
    how = getattr(dist.ReduceOp, op)
    there = [x for x in tensors if x.numel() and ranks.world > 1]
    with sending(name, ranks):
        if dst is None:
            works = [comm.all_reduce(x, how, group=ranks.group, async_op=True) for x in there]
        else:
            works = [comm.reduce(x, op=how, group=ranks.group, group_dst=dst, async_op=True) for x in there]
        for work in works:
            work.wait()


def cast(name: str, td: Any, dtype: torch.dtype | None) -> Any:
    """A structure with the leaves of one sort in a dtype."""
    if dtype is None:
        return td
    if not isinstance(dtype, torch.dtype):
        raise DtypeError(message(name, "a dtype", describe(dtype), hint="dtype=torch.float32"))

    def converted(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, DENSE) and sort_of(x.dtype) == sort_of(dtype) else x

    return td.apply(converted) if hasattr(td, "_leaves") else converted(td)


DENSE = Tensor, NestedTensor, TwoLevelTensor, MaskedBatch


def sort_of(dtype: torch.dtype) -> str:
    """Floating, complex, or whole numbers."""
    return "floating" if dtype.is_floating_point else "complex" if dtype.is_complex else "whole"


def refuse_dtypes(name: str, td: Any, op: str) -> None:
    """Refuse leaves whose reduction would be wrong."""
    whole, bare = as_td(name, td)
    takes = TAKES[op]
    leaves = {p: unwrap(x) for p, x in whole._leaves.items()}
    wrong = {
        "it" if bare else show(p): describe(x)
        for p, x in leaves.items()
        if not isinstance(x, DENSE) or x.dtype not in takes
    }
    hint = CASTS.get(op, "td.to(dtype), or td.exclude(key)") + ", or td.exclude(key)" * (op in CASTS)
    refuse_wrong(DtypeError, name, f"dtypes with a {op} over ranks", wrong, "others", hint)


def number_of(name: str, weight: Any, x: Described) -> float:
    """A weight as a number; a whole one of whole numbers."""
    if not (isinstance(weight, Tensor) and weight.numel() == 1):
        expect_number(name, weight)
    number = float(weight)
    if not number.is_integer() and any([sort_of(dtype) == "whole" for dtype in x.form.groups if x.form.is_plain]):
        hint = "td.float() of integers"
        raise DtypeError(message(name, "a whole number as the weight of integers", "a fraction", hint=hint))
    return number


def flat(x: Described, weight: float) -> dict[torch.dtype, Tensor]:
    """The numbers of each dtype in one new tensor, times a weight."""
    with torch.no_grad():
        found = {dtype: joined(own) for dtype, own in numbers_of(x) if own}
        for dtype, whole in found.items() if weight != 1.0 else ():
            whole.mul_(int(weight) if sort_of(dtype) == "whole" else weight)
    return found


def numbers_of(x: Described) -> Iterator[tuple[torch.dtype, Sequence[Tensor]]]:
    """The tensors that are reduced, by dtype."""
    if x.form.is_plain:
        return by_dtype(x.form, x.tensors)
    found: dict[torch.dtype, list[Tensor]] = {dtype: [] for dtype in x.form.groups}
    for (_, part), tensor in zip(x.form.templates, x.tensors, strict=True):
        if not is_structural(part):
            found[tensor.dtype].append(tensor)
    return iter(found.items())


def unflattened(name: str, x: Described, flats: dict[torch.dtype, Tensor]) -> Any:
    """The structure with other numbers."""
    tensors: list[Tensor] = []
    if x.form.is_plain:
        pairs = [*zip(x.form.runs, x.form.layout(x.sizes).shapes, strict=True)]
        for dtype, whole in flats.items():
            own = [pair for pair in pairs if pair[0].dtype == dtype]
            tensors += views(whole, [run for run, _ in own], [shape for _, shape in own])
    else:
        parts = {
            dtype: iter(whole.split([t.numel() for t in own]))
            for (dtype, own), whole in zip([g for g in numbers_of(x) if g[1]], flats.values(), strict=True)
        }
        for (_, part), old in zip(x.form.templates, x.tensors, strict=True):
            tensors.append(old if is_structural(part) else next(parts[old.dtype]).view(old.shape))
    return built(name, x.form, x.sizes, tensors, {}, x.td)


def reduce_scatter(td: Any, dim: int = 0, *, group: Any = None) -> Any:
    """Sum the structures of all ranks, and give each rank its part of the rows.

    A handshake and one message for each dtype, of N (world - 1) / world bytes.

    Shapes:
        `(world * n, *F) -> (n, *F)` along `dim`.

    Args:
        td: a TensorDict or tensorclass, or one tensor or ragged batch, of one form and size on all ranks.
        dim: the batch dim that is shared out.
        group: a process group or a DeviceMesh of one dim; the default group without it.

    Raises:
        ShapeError: no such batch dim, or one that the number of ranks does not divide.
        DtypeError, StructureError, UnsupportedError, DistError: as `all_reduce` of a sum.

    Compile:
        fullgraph, without the handshake. The gradient is that of the sum of all ranks' losses.

    Example:
        >>> store = dist.HashStore()  # with torchrun, init_process_group() alone
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> reduce_scatter(torch.ones(2))
        tensor([1., 1.])
        >>> dist.destroy_process_group()

    Source:
        `torch.distributed.reduce_scatter`.
    """
    op = "dist.reduce_scatter"
    pg = as_group(op, group)
    agree_on_sum(op, td, dim, group)
    whole, at = rows_of(op, td, dim, pg.size())
    if all([isinstance(x, Tensor) for x in whole._leaves.values()]):
        return scatter_rows(op, td, at, pg)
    n = whole._size[at] // pg.size()
    rows = slice(pg.rank() * n, (pg.rank() + 1) * n)
    return reduce_whole(op, td, "sum", None, pg)[(slice(None),) * at + (rows,)]


def rows_of(op: str, x: Any, dim: int, world: int) -> tuple[Any, int]:
    """A structure as a TensorDict, and a batch dim of it that can be shared out."""
    td, _ = as_td(op, x)
    refuse_dtypes(op, x, "sum")
    k = len(td._size)
    if type(dim) is not int or not -k <= dim < k:
        got = f"dim={dim}" if type(dim) is int else describe(dim)
        raise ShapeError(message(op, f"one of {k} batch dims", got, hint="td.unsqueeze(0) adds one"))
    if td._size[dim] % world:
        hint = "pad the batch, or all_reduce and take rows"
        raise ShapeError(message(op, f"a multiple of {world} rows", f"{td._size[dim]}", hint=hint))
    return td, dim % k


@skipped_in_graphs
def agree_on_sum(op: str, td: Any, dim: int, group: Any) -> None:
    """The handshake of `reduce_scatter`."""
    if in_transform():
        return
    ranks = ranks_of(op, group)
    text = f"{op} dim={dim}{' recorded' * records(td)}"
    with taking_part(text, ranks):
        rows_of(op, td, dim, ranks.world)
        x = described(op, td)
    heads = Handshake(op, ranks, header_of(text, x, content=contents(x))).headers()
    agreed(op, ranks, heads, x.form, sizes=True)
