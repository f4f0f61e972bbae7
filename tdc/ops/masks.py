"""Elements that ragged masks choose: masked_select, masked_scatter, index_put of a mask, nonzero.

Invariant: only the number of elements of a packed `masked_select` and `nonzero` depends on data.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.asserts import require
from tdc.core.errors import DtypeError, ShapeError, UnsupportedError, describe, message
from tdc.core.rules import define, note_syncs
from tdc.layout.segments import coordinates, count_rows, row_ids, structure_of_sizes
from tdc.ops.positions import flat_bounds, flat_examples
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import Ragged, data_of, fitted, ragged_sizes, with_data


def put_where(x: Any, mask: Any, values: Any, accumulate: bool) -> Any:
    """Write where a ragged mask is True: a number, a tensor over the dims behind the mask, or a batch with as many
    elements in each example as its mask is True on, in order."""
    op = torch.index_put
    if mask.dtype != torch.bool:
        raise DtypeError(message(op, "a bool mask", describe(mask), hint="mask.bool()"))
    mask = fitted(op, x, mask)
    more = x.ndim - mask.ndim
    for _ in range(more):
        mask = mask.unsqueeze(-1)
    if isinstance(values, type(x)):
        expected = "as many values in each example as its mask is True on"
        text = message(op, expected, "others", hint="x[mask] has as many")
        counts = flat_examples(op, mask).sum(1)
        require((counts == ragged_sizes(values)[:, 0]).all(), text, ShapeError)
        base = torch.zeros_like(x) if accumulate else x
        put = torch.masked_scatter(base, mask.expand(*[-1] * (x.ndim - more), *x.shape[x.ndim - more :]), values)
        return x + put if accumulate else put
    if isinstance(values, Tensor) and values.ndim > more:
        if values.ndim > more + 1 or values.shape[0] != 1:
            hint = "a batch of x[mask]'s lengths, such as x[mask] * 2"
            raise ShapeError(message(op, "one value for all positions, or a batch", describe(values), hint=hint))
        values = values.squeeze(0)
    data = data_of(x)
    return with_data(x, torch.where(data_of(mask), data + values if accumulate else values, data).to(x.dtype))


def masked_select_ragged(x: Any, mask: Any) -> Ragged:
    """The elements of each example on which a mask is True, in order: `(B, -1)`. The two broadcast."""
    wide, chosen = torch.broadcast_tensors(x, mask)
    return wide[chosen]


def masked_scatter_ragged(x: Any, mask: Any, source: Any) -> Ragged:
    """Elements of the source in order, each example from its own example of the source; a source with fewer dims is
    for all examples."""
    op = torch.masked_scatter
    if mask.dtype != torch.bool:
        raise DtypeError(message(op, "a bool mask", describe(mask), hint="mask.bool()"))
    if getattr(source, "dtype", x.dtype) != x.dtype:
        raise DtypeError(message(op, f"a source of {x.dtype}", describe(source), hint="source.to(x.dtype)"))
    x, chosen = torch.broadcast_tensors(x, mask)
    if isinstance(x, NestedTensor):
        s = flat_examples(op, x).structure
        begin, ids, chosen = s.offsets[:-1], row_ids(s, x.values.numel()), chosen.values.flatten()
    else:
        if isinstance(chosen, MaskedBatch):
            flat_examples(op, x)
        flat = (chosen.data & x.mask).flatten(1)
        (count, width), chosen = flat.shape, flat.flatten()
        rows = torch.arange(count, device=x.device)
        begin, ids = rows * width, rows[:, None].expand(count, width).flatten()
    before = torch.cat([ids.new_zeros(1), chosen.cumsum(0)])
    rank = before[1:] - 1 - before[begin][ids]
    if isinstance(source, type(x)):
        pool, first, last = flat_bounds(flat_examples(op, source))
        first, count = first[ids], (last - first)[ids]
    elif isinstance(source, Tensor) and source.ndim < x.ndim:
        pool, first, count = source.flatten(), 0, source.numel()
    elif isinstance(source, Tensor) and source.shape[0] == x.batch_size[0]:
        pool, count = source.flatten(), math.prod(source.shape[1:])
        first = ids * count
    else:
        expected, hint = f"a source of {x.batch_size[0]} examples", "a vector serves all examples"
        raise ShapeError(message(op, expected, describe(source), hint=hint))
    text = message(op, "as many elements as the mask is True on", "fewer", hint="an element for each")
    require((~chosen | (rank < count)).all(), text, ShapeError)
    found = F.pad(pool, (0, 1))[torch.where(chosen, rank + first, pool.shape[0])]  # one more element stands for none
    data = data_of(x)
    return with_data(x, torch.where(chosen, found, data.flatten()).view(data.shape))


def nonzero_ragged(x: Ragged, *, as_tuple: bool = False) -> Ragged:
    """Positions of nonzero elements within their examples, `(B, -1, dims of an example)`; of a pair map the edges.

    Packed, their number depends on data; a rectangle keeps its size, and they are moved to the front.
    """
    if as_tuple or x._batch_dim:
        got = "as_tuple=True" if as_tuple else f"the batch at dim {x._batch_dim}"
        hint = "x.nonzero().unbind(-1) for one batch of positions for each dim"
        raise UnsupportedError(message("nonzero", "positions as one batch, in examples along dim 0", got, hint=hint))
    return nonzero_packed(x) if isinstance(x, NestedTensor) else nonzero_padded(x)


def nonzero_packed(x: NestedTensor) -> NestedTensor:
    s, e = x.structure, x.structure.packed_dim
    found, total = x.values.nonzero(), x.values.shape[e]
    rows = row_ids(s, total)[found[:, e]]
    if e:
        rows, order = rows.sort(stable=True)
        found = found[order]
    columns = list(found.unbind(1))
    columns[e : e + 1] = [position[columns[e]] for position in coordinates(s, total)]
    return build_nested(structure_of_sizes(count_rows(rows, s)[:, None]), torch.stack(columns, 1))


def nonzero_padded(x: MaskedBatch) -> MaskedBatch:
    chosen = ((x.data != 0) & x.mask).flatten(1)
    rest, columns = (~chosen).to(torch.uint8).argsort(dim=1, stable=True), []
    for size in reversed(x.data.shape[1:]):
        columns.append(rest % size)
        rest = rest // size
    return build_masked(torch.stack(columns[::-1], 2), chosen.sum(1)[:, None], (1,), 0, True)


NO_VMAP = ("eager", "compile", "grad", "export")  # vmap cannot hold a number of elements that is data
define(torch.masked_scatter, "masks", ragged=masked_scatter_ragged)
for _op, _impl in (
    (torch.masked_select, masked_select_ragged), (torch.nonzero, nonzero_ragged), (torch.argwhere, nonzero_ragged),
):  # fmt: skip
    define(_op, "masks", nested=_impl, modes=NO_VMAP)
    define(_op, "masks", masked=_impl)
note_syncs("the number of elements", torch.masked_select, torch.nonzero, torch.argwhere, kinds=("nested",))
