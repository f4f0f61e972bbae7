"""`x[...]` of one example: the same index after a full slice for the batch.

x[i]  x[positions]     rows at positions of each example; eagerly, a position out of range is an error
x[order]               order is a ragged example of positions: as many rows
x[mask]                the rows on which a ragged mask is true
x[a:b]                 a span, whose ends may be numbers of each example
x[:, k]  x[..., None]  static dims, new dims
table[x]  table[:n]    of a dense tensor: rows at ragged positions, and the first rows of each example
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.autobatch.per_example.operands import together
from tdc.autobatch.per_example.table import first_is_ragged, rank, refuse, with_batch
from tdc.autobatch.values import Lane
from tdc.compile.upstream import traced
from tdc.core.asserts import require
from tdc.core.errors import IndexingError, message
from tdc.layout.segments import gather_spans, row_ids, spread, take_spans
from tdc.layout.structure import Structure
from tdc.ragged.nested import NestedTensor, build_nested

FULL = slice(None)


class Span(NamedTuple):
    """A slice with an end that is a number of each example: Dynamo would read tensors in a `slice`."""

    start: Any
    stop: Any


def picked(x: NestedTensor, entries: Sequence[Any]) -> Any:
    """`x[entries]` of each example."""
    first, rest = entries[0] if len(entries) > 0 else FULL, [*entries[1:]]  # their truth would fix ints in a graph
    if isinstance(first, NestedTensor):
        found = x[first] if first.dtype == torch.bool else at_ragged(x, first)
        return picked(found, [FULL, *rest]) if len(rest) > 0 else found
    if is_positions(first):
        return at_positions(x, first, rest)
    if type(first) is Lane:
        refuse("a mask of its own for each example", "torch.where(mask, x, 0), or a mask as ragged as x")
    if any([isinstance(e, (NestedTensor, Lane)) and not isinstance(e, slice) for e in rest]):
        refuse("positions that differ between examples behind the first dim", "x.transpose(0, 1) puts the dim first")
    if isinstance(first, Span):
        found = cut(x, first)
        return picked(found, [FULL, *rest]) if len(rest) > 0 else found
    if any([isinstance(e, Span) for e in rest]):
        refuse("a span that differs between examples behind the first dim", "x.transpose(0, 1) puts the dim first")
    return x[(FULL, *entries)]


def is_positions(entry: Any) -> bool:
    """True of an entry that has positions of rows."""
    if isinstance(entry, (Tensor, Lane)):
        dtype = entry.dtype if isinstance(entry, Tensor) else entry.data.dtype
        return dtype != torch.bool
    return isinstance(entry, int) and not isinstance(entry, bool)


def ends(span: Span, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """The beginning and the length of a span in each example; `sizes` are the lengths of the examples."""
    begin, end = as_end(span.start, sizes, torch.zeros_like(sizes)), as_end(span.stop, sizes, sizes)
    return begin, (end - begin).clamp(min=0)


def as_end(e: Any, sizes: Tensor, default: Tensor) -> Tensor:
    """An end of a span as a position in each example, clamped as in Python."""
    if e is None:
        return default
    own = e.data if type(e) is Lane else torch.full_like(sizes, int(e))
    return torch.minimum(torch.where(own < 0, own + sizes, own).clamp(min=0), sizes)


def cut(x: NestedTensor, span: Span) -> NestedTensor:
    """`x[a:b]` where an end differs between examples."""
    if not first_is_ragged(x):
        refuse("a span that differs between examples in a static dim", "x.transpose(0, 1) puts the ragged dim first")
    begin, lengths = ends(span, x.lengths)
    offsets, at = take_spans(x.offsets[:-1] + begin, lengths)
    return build_nested(Structure(offsets, None, None, 0, 0, 1).marked(), gather_spans(x.values, 0, at))


def at_positions(x: NestedTensor, at: Any, rest: Sequence[Any]) -> Any:
    """Rows by their positions."""
    if not first_is_ragged(x):
        if type(at) is Lane:
            refuse("a position of each example in a static dim", "torch.gather, or walk along the ragged dim")
        return x[(FULL, at, *rest)]
    count = x.structure.batch_size
    own = torch.as_tensor(at, device=x.values.device) if not isinstance(at, Lane) else at
    own = with_batch(own, count)
    lengths, begins = [t.reshape(-1, *[1] * (own.ndim - 1)) for t in (x.lengths, x.offsets[:-1])]
    own = torch.where(own < 0, own + lengths, own)
    if traced():  # inactive examples have positions of others: they read some row, which is not used
        found = x.values[(begins + own).clamp(0, x.values.shape[0] - 1)]
    else:
        inside(((own >= 0) & (own < lengths)).all())
        found = x.values[begins + own]
    if len(rest) == 0:
        return found
    if any([isinstance(e, (NestedTensor, Lane)) for e in rest]):
        refuse("positions that differ between examples behind the first dim", "x[i][j]")
    return found[(*[FULL] * own.ndim, *rest)]


def inside(there: Tensor) -> None:
    """Assert that positions are inside of their examples."""
    hint = "positions count within each example, from 0"
    require(there, message("index", "positions inside each example", "one beyond", hint=hint), IndexingError)


def at_ragged(x: NestedTensor, at: NestedTensor) -> NestedTensor:
    """Rows at the positions of a ragged example."""
    if not first_is_ragged(x) or not first_is_ragged(at) or at.ndim != 2:
        refuse("an index that is ragged in several dims", "positions (T,) of rows")
    s, total = at.structure, at.values.shape[0]
    lengths, begins = spread(x.lengths, s, total), spread(x.offsets[:-1], s, total)
    own = torch.where(at.values < 0, at.values + lengths, at.values)
    inside(((own >= 0) & (own < lengths)).all())
    return build_nested(s, x.values.index_select(0, begins + own))


def looked_up(table: Any, at: NestedTensor) -> NestedTensor:
    """`table[at]` of a dense table, shared or of each example."""
    s = at.structure
    if isinstance(table, Tensor):
        return build_nested(s, table[at.values])
    rows = row_ids(s, at.values.shape[s.packed_dim])
    shape = [-1 if d == s.packed_dim else 1 for d in range(at.values.ndim)]
    return build_nested(s, table.data[rows.reshape(shape), at.values])


def first_rows(table: Any, span: Span) -> NestedTensor:
    """`table[start:stop]` of a dense table, with an end of each example."""
    end = next(e.data for e in span if type(e) is Lane)
    rows = table.shape[0] if isinstance(table, Tensor) else table.data.shape[1]
    begin, lengths = ends(span, torch.full((end.shape[0],), rows, device=end.device))
    offsets, at = take_spans(begin, lengths)
    s = Structure(offsets, None, None, 0, 0, 1).marked()
    if isinstance(table, Tensor):
        return build_nested(s, gather_spans(table, 0, at))
    return build_nested(s, table.data[row_ids(s, at.shape[0]), at])


def picked_way(taken: Any, yes: NestedTensor, no: NestedTensor) -> NestedTensor:
    """Whole examples, each of one of two batches."""
    count = yes.structure.batch_size
    which = with_batch(taken, count).reshape(count)
    if yes.structure is no.structure and yes.values.ndim == no.values.ndim:
        s, v = yes.structure, yes.values
        mask = spread(which, s, v.shape[s.packed_dim])
        shape = [-1 if d == s.packed_dim else 1 for d in range(v.ndim)]
        return build_nested(s, torch.where(mask.reshape(shape), v, no.values))
    numbers = torch.arange(count, device=which.device)
    batches: list[Any] = [yes, no]
    both: Any = torch.cat(batches)
    return both[torch.where(which, numbers, numbers + count)]


def put_rows(x: NestedTensor, entry: Any, value: Any) -> Any:
    """`x` with another value where a ragged mask is true, or at a position."""
    if isinstance(value, NestedTensor):
        refuse("x[...] = value of a ragged value", "torch.where(mask, value, x)")
    if isinstance(entry, NestedTensor) and entry.dtype == torch.bool:
        mask: Any = entry
        for _ in range(x.ndim - mask.ndim):
            mask = mask.unsqueeze(-1)
        m, v, y = together(torch.where, [mask, value, x])
        return torch.where(m, v, y).to(x.dtype)
    if not is_positions(entry) or rank(entry) or not first_is_ragged(x):
        refuse("x[...] = value of a ragged example", "x[i] = row, or torch.where(mask, value, x)")
    count = x.structure.batch_size
    own = with_batch(entry if isinstance(entry, Lane) else torch.as_tensor(entry, device=x.values.device), count)
    own = torch.where(own < 0, own + x.lengths, own)
    inside(((own >= 0) & (own < x.lengths)).all())
    new = with_batch(value, count) if isinstance(value, (Tensor, Lane)) else torch.as_tensor(value)
    rows = new.to(x.dtype).expand(count, *x.values.shape[1:])
    return build_nested(x.structure, x.values.index_put((x.offsets[:-1] + own,), rows))
