"""Arithmetic on the segments of a packed batch: lengths, row ids, spans, reductions over rows.

A segment is the stretch of the packed axis that belongs to one example; `offsets` says where each begins. Everything
here is plain traceable tensor code on a `Structure`.

Invariant: nothing here reads a value on the host, except functions that say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import expect
from tdc.core.dtypes import rounded_once, sum_dtype
from tdc.core.dynamo import (
    certain,
    eager,
    exporting,
    has_gradients_in_graphs,
    hold,
    is_on_host,
    is_zero,
    number_of_read,
    readable,
    stamp,
    traced_for,
)
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message
from tdc.core.operators import new_size, only_results, operator, refuse_mapped
from tdc.layout.structure import Structure, counted, extent_of, once, once_on_host, remember, remembered

HAS_GRADIENTS = has_gradients_in_graphs()


def offsets_of(lengths: Tensor) -> Tensor:
    """Offsets of rows of the given lengths: `(B,) -> (B+1,)`, int64, first 0, last the packed total.

    Raises:
        DtypeError: no tensor, or lengths that are not whole.
        ShapeError: not one dim.
        StructureError: a negative length, where it can be read at no cost: eagerly and on CPU.

    Example:
        >>> offsets_of(torch.tensor([2, 0, 3]))
        tensor([0, 2, 2, 5])
    """
    expect("offsets_of", lengths, Tensor)
    if lengths.ndim != 1:
        raise ShapeError(message("offsets_of", "lengths (B,)", describe(lengths), hint="lengths.flatten()"))
    if lengths.is_floating_point():
        raise DtypeError(message("offsets_of", "whole lengths", describe(lengths), hint="lengths.long()"))
    if is_on_host(lengths) and lengths.shape[0] and int(lengths.min()) < 0:
        hint = "lengths.clamp(min=0)"
        raise StructureError(message("offsets_of", "lengths of 0 or more", "a negative one", hint=hint))
    return sums_of(lengths)


def sums_of(lengths: Tensor) -> Tensor:
    """`offsets_of` of lengths that are known to be right."""
    whole = lengths.to(torch.int64)
    if certain(whole.shape[0] != 0):
        return counted(F.pad(whole.cumsum(0), (1, 0)))
    padded = F.pad(whole, (0, 1))  # in front of no rows Inductor would read (torch 2.13)
    return counted(padded.cumsum(0) - padded)


def structure_of_sizes(
    sizes: Tensor, longest: tuple[Any, ...] | None = None, packed_dim: int = 0, batch_dim: int = 0
) -> Structure:
    """The structure of examples of ragged sizes (B, R), with a bound of the sizes where one is known."""
    extent = None if longest is None else extent_of(longest, sizes.device)
    count = sizes.shape[1]
    offsets = sums_of(sizes.prod(1) if count > 1 else sizes[:, 0])
    return Structure(offsets, counted(sizes) if count > 1 else None, extent, packed_dim, batch_dim, count).marked()


def repeated(s: Structure, times: int) -> Structure:
    """The structure of examples so many times as long along their only ragged dim."""
    extent = None if s.extent is None else extent_of((s.extent.shape[0] * times,), s.offsets.device)
    t = Structure(s.offsets * times, None, extent, s.packed_dim, s.batch_dim, 1).marked()
    return tell(t, [s], lambda known: known[0] * times)


def several(s: Structure, copies: int) -> Structure:
    """The structure of so many copies of all examples, one after another."""
    longest = None if s.extent is None else tuple(s.extent.shape[:-1])
    t = structure_of_sizes(sizes_of(s).repeat(copies, 1), longest, s.packed_dim, s.batch_dim)
    return tell(t, [s], lambda known: known[0].repeat(copies, 1))


def columns(sizes: Tensor, order: Sequence[int]) -> Tensor:
    """Columns of a matrix in another order; a list as an index would be copied to the device."""
    return torch.stack([sizes[..., k] for k in order], -1)


def total_of(s: Structure) -> int:
    """Packed elements of all examples: one host read in eager, unless the structure was told its sizes; an unbacked
    size in a graph. An exported graph needs no Python: there it is the size of an index of all elements."""
    known = elements(remembered(sizes_on_host, s))
    return last_of(s.offsets) if known is None else known


def last_of(offsets: Tensor) -> int:
    """The last of the offsets as a size, see `total_of`."""
    if stamp(offsets) is not None:
        return int(offsets[-1])
    if exporting():
        return torch.repeat_interleave(offsets.diff()).shape[0]
    return as_size(offsets, number_of_read()).shape[0]


def elements(sizes: Tensor | None) -> int | None:
    """Packed elements of examples of ragged sizes (B, R) on the host; None of sizes that are not known there."""
    return None if sizes is None else int(sizes.prod(1).sum())


def last_as_size(offsets: Tensor, number: int) -> Tensor:
    """(B+1,) -> (N, 0): the last of the offsets as a size, which a graph can go on with; `number` tells reads apart."""
    return offsets.new_empty((int(offsets[-1]), 0))


def fake_size(offsets: Tensor, number: int) -> Tensor:
    return offsets.new_empty((new_size(), 0))


def shared_size(
    op: Any, info: Any, in_dims: tuple[int | None, ...], offsets: Tensor, number: int
) -> tuple[Tensor, None]:  # fmt: skip
    refuse_mapped("offsets", in_dims)
    return op(offsets, number), None


as_size = operator(
    "as_size(Tensor offsets, int number) -> Tensor", fake_size, shared_size, False,
    CompositeExplicitAutograd=last_as_size,
)  # fmt: skip


@once
def lengths_of(s: Structure) -> Tensor:
    """Packed elements of each example, (B,)."""
    return s.offsets.diff()


@once
def sizes_of(s: Structure) -> Tensor:
    """Ragged sizes of each example, (B, R)."""
    return s.offsets.diff()[:, None] if s.shapes is None else s.shapes


@once_on_host
def sizes_on_host(s: Structure) -> Tensor:
    """Ragged sizes of each example on the host, (B, R): a device sync, unless the structure was told them."""
    return sizes_of(s).cpu()


def known_sizes(s: Structure) -> Tensor | None:
    """Ragged sizes of each example on the host; None where that takes a sync, or there are no numbers to read."""
    return sizes_of(s) if is_on_host(s.offsets) else remembered(sizes_on_host, s)


def offsets_to_read(s: Structure) -> Tensor:
    """Offsets of which some are read, (B+1,): all on the host, where each read would wait for the device."""
    return offsets_on_host(s) if counts_on_host(s) else s.offsets


def sizes_to_read(s: Structure) -> Tensor:
    """Ragged sizes of which some are read, (B, R): all on the host, where each read would wait for the device."""
    return sizes_on_host(s) if counts_on_host(s) else sizes_of(s)


@once_on_host
def offsets_on_host(s: Structure) -> Tensor:
    """Offsets on the host, (B+1,): a device sync, unless the structure was told the sizes."""
    return sums_of(sizes_on_host(s).prod(1))


def on_host_too(s: Structure, fn: Callable[[Tensor], Tensor]) -> Tensor | None:
    """A function of the ragged sizes computed on the host, so that the size of a result need not be read; None where it
    saves nothing, see `counts_on_host`."""
    return fn(sizes_on_host(s)) if counts_on_host(s) else None


def tell(t: Structure, sources: Sequence[Structure], fn: Callable[[list[Tensor]], Tensor]) -> Structure:
    """Tell a structure its sizes on the host, made by `fn` of those of others, where all of these know theirs. Returns
    it."""
    if not counts_on_host(t):
        return t
    known = [sizes for s in sources if (sizes := remembered(sizes_on_host, s)) is not None]
    return remember(sizes_on_host, t, fn(known) if len(known) == len(sources) else None)


def counts_on_host(s: Structure) -> bool:
    """True if sizes of results are computed on the host: not on CPU, where reads take no sync, nor in graphs."""
    return readable() and s.offsets.device.type != "cpu"


def extent_of_rows(s: Structure, sizes_of_rows: Callable[[], Tensor]) -> Tensor | None:
    """The longest sizes that some rows on a device carry: of `sizes_of_rows()`, (K, R), where these are on the host,
    else the bound of all. None on CPU, where reading them takes no sync, and in graphs, which read them where they
    need them."""
    if s.extent is None or not counts_on_host(s):
        return None
    sizes = sizes_of_rows()
    if sizes.device.type != "cpu":
        return s.extent
    longest = on_host(sizes.amax(0)) if sizes.shape[0] else [0] * s.ragged_ndim
    return extent_of(tuple(longest), s.offsets.device)


@once
def lengths_on_host(s: Structure) -> list[int]:
    """Packed elements of each example as ints: a device sync, unless the structure was told the sizes."""
    known = remembered(sizes_on_host, s)
    return on_host(lengths_of(s) if known is None else known.prod(1))


def on_host(x: Any) -> list[Any]:
    """A tensor as numbers or nested lists of them: a device sync."""
    return x.tolist()


@traced_for(on_host)
def on_host_traced(x: Any) -> Any:
    """Replace `on_host` in graphs: the numbers are sizes that depend on data, see `number_of_read`."""
    if exporting():
        return x.tolist()
    return last_of(x.reshape(1)) if x.ndim == 0 else [on_host_traced(n) for n in x.unbind()]


@once
def offsets_int32(s: Structure) -> Tensor:
    """Offsets as flash-style kernels take them, (B+1,) int32."""
    return s.offsets.to(torch.int32)


def longest(s: Structure, exact: bool = False) -> tuple[int, ...]:
    """Largest size of each ragged dim. Read from the data where the structure does not carry it (a device sync).

    Args:
        exact: read the data also where the structure carries a bound; in eager calls.
    """
    if s.extent is not None and not (exact and eager()):
        return tuple(s.extent.shape[:-1])
    return longest_on_host(s)


def longest_at_least(s: Structure, least: tuple[int, ...]) -> tuple[int, ...]:
    """`longest`, in a graph that reads it from the data no shorter than `least`, which the graph knows."""
    if s.extent is not None or readable():
        return longest(s)
    sizes = tuple(on_host(longest_tensor(s).maximum(torch.tensor(least, device=s.offsets.device))))
    for n, k in zip(sizes, least, strict=True):
        hold(n >= k)
    return sizes


def longest_tensor(s: Structure) -> Tensor:
    """Largest size of each ragged dim, 0 of no examples, (R,)."""
    return largest(sizes_of(s))


def largest(sizes: Tensor) -> Tensor:
    """Of ragged sizes (B, R) the largest, 0 of no examples, (R,)."""
    return (sizes if certain(sizes.shape[0] != 0) else F.pad(sizes, (0, 0, 0, 1))).amax(0)


@once
def longest_on_host(s: Structure) -> tuple[int, ...]:
    """Largest size of each ragged dim, read from the data, 0 of no examples: a device sync."""
    known = remembered(sizes_on_host, s)
    return tuple(on_host(longest_tensor(s) if known is None else largest(known)))


@once
def row_ids(s: Structure, total: int) -> Tensor:
    """The example that each packed position belongs to, (N,).

    On a GPU a binary search, which Inductor fuses there into its reader. All offsets are searched: of a view, as
    `offsets[1:]`, Inductor of torch 2.11 reads the wrong end.
    """
    if s.offsets.device.type == "cpu":
        return torch.repeat_interleave(lengths_of(s), output_size=total)
    positions = torch.arange(total, device=s.offsets.device)
    return torch.bucketize(positions, s.offsets, right=True) - 1


@once
def begins(s: Structure, total: int) -> Tensor:
    """Begin of the example of each packed position, (N,)."""
    return s.offsets[row_ids(s, total)]


@once
def local_positions(s: Structure, total: int) -> Tensor:
    """Position of each packed element within its example, (N,): 0, 1, … for each anew."""
    return torch.arange(total, device=s.offsets.device) - begins(s, total)


@once
def strides(s: Structure) -> tuple[Tensor, ...]:
    """Strides of ragged dims in the packed axis, (B,) each."""
    sizes = sizes_of(s)
    return tuple([sizes[:, r + 1 :].prod(1) for r in range(s.ragged_ndim)])


@once
def coordinates(s: Structure, total: int) -> tuple[Tensor, ...]:
    """Position of each packed element along each ragged dim, (N,) each."""
    rest, found = local_positions(s, total), ()
    for stride in strides(s)[:-1] if s.ragged_ndim > 1 else ():
        each = stride[row_ids(s, total)]
        found, rest = (*found, rest // each), rest % each
    return (*found, rest)


def positions_in(s: Structure, out: Structure, total: int, columns: list[int]) -> Tensor:
    """The position of `s` that each packed position of `out` reads, (N,); `columns` are the ragged dims of `s` in
    `out`."""
    rows = row_ids(out, total)
    positions, index = coordinates(out, total), s.offsets[rows]
    for c, r in enumerate(columns):
        index = index + positions[r] * strides(s)[c][rows]
    return index


def spread(per_row: Tensor, s: Structure, total: int) -> Tensor:
    """Repeat the entry of each example at its packed positions: (B, *D) -> (N, *D)."""
    return select(per_row, 0, row_ids(s, total))


def select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """`x.index_select(dim, index)`, which has no gradient in graphs of torch 2.11 where sizes vary."""
    return x.index_select(dim, index) if HAS_GRADIENTS else x[(slice(None),) * dim + (index,)]


def take_spans(starts: Tensor, lengths: Tensor, step: int = 1, total: int | None = None) -> tuple[Tensor, Tensor]:
    """Offsets and gather index of new rows, each a span of the packed axis: (K,), (K,) -> (K+1,), (M,).

    Args:
        total: M, where it is known; else one host read in eager, an unbacked size in a graph.
    """
    offsets = sums_of(lengths)
    rows = torch.repeat_interleave(lengths, output_size=last_of(offsets) if total is None else total)
    steps = torch.arange(rows.shape[0], device=rows.device)
    return offsets, steps * step + (starts - offsets[:-1] * step).index_select(0, rows)


def gather_spans(values: Tensor, dim: int, index: Tensor) -> Tensor:
    """Values at an index of `take_spans`. Inductor refuses an index of unknown size into no values (torch 2.13)."""
    return values if is_zero(values.shape[dim]) else select(values, dim, index)


def reduce_rows(values: Tensor, s: Structure, reduce: str, identity: float) -> Tensor:
    """Reduce the packed axis, each example for itself: values (N, *D) -> (B, *D); the identity for an empty example.

    Args:
        reduce: "sum" (half precision in float32, as in torch), "amax" or "amin".
    """
    ids = row_ids(s, values.shape[0])
    shape = (s.batch_size, *values.shape[1:])
    if reduce == "sum":
        return rounded_once(lambda v: v.new_zeros(shape).index_add(0, ids, v), values)
    index = column(ids, values).expand_as(values)
    rows = values.new_full(shape, identity).scatter_reduce(0, index, values, reduce)
    return own_share(rows, identity, lambda: (column(lengths_of(s), rows), 1))


def column(t: Tensor, like: Tensor) -> Tensor:
    """One number for each example or position, to broadcast against values like these: (K,) -> (K, 1, ...)."""
    return t.view(-1, *[1] * (like.ndim - 1))


def own_share(extremes: Tensor, nothing: float, counts: Callable[[], tuple[Tensor, Any]]) -> Tensor:
    """The same extremes, whose derivative goes to real elements alone, shared by equal ones.

    Args:
        counts: how many elements each is of, and how many beside them hold `nothing`.
    """
    if only_results(extremes) or not extremes.is_floating_point():
        return extremes
    (real, beside), dtype = counts(), sum_dtype(extremes.dtype)
    share = torch.where(extremes == nothing, 1 + beside / real.clamp(min=1).to(dtype), 1)
    return (extremes * share).to(extremes.dtype)


def count_rows(ids: Tensor, s: Structure) -> Tensor:
    """Count of each example among row ids, (M,) -> (B,)."""
    return torch.zeros_like(s.offsets[1:]).index_add(0, ids, torch.ones_like(ids))


@once
def mirrored(s: Structure, total: int) -> Tensor:
    """For each packed position, the one that it swaps with where every row is reversed, (N,)."""
    ids = row_ids(s, total)
    return s.offsets[ids] + s.offsets[ids + 1] - 1 - torch.arange(total, device=s.offsets.device)


def rolled(s: Structure, total: int, shift: int) -> Tensor:
    """For each packed position, the source of its element once every row is rolled, (N,)."""
    ids = row_ids(s, total)
    return s.offsets[ids] + (local_positions(s, total) - shift) % lengths_of(s)[ids]
