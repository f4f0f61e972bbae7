"""Factories: new batches that share the structure object of an existing one."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect, int_tuple
from tdc.core.errors import ShapeError, describe, message, show_sizes
from tdc.core.rules import define, note_syncs
from tdc.layout.segments import local_positions
from tdc.ops.elementwise.pointwise import unary
from tdc.ops.shape.dims import ints
from tdc.ops.tensordict.batch import lift
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import axis_entries, data_of
from tdc.tensordict.tensordict import TensorDict


def positions(x: NestedTensor) -> NestedTensor:
    """The position of every element within its example: 0, 1, 2, … for each anew.

    Shapes:
        `(B, *S0, -1, *S1) -> (B, -1)`; with several ragged dims the position in the flattened example.

    Dtypes:
        int64.

    Compile:
        Traceable, one graph for all lengths; nothing is read on the host.

    Example:
        >>> from tdc.ragged.pack import pack
        >>> positions(pack([torch.zeros(2, 8), torch.zeros(3, 8)])).values
        tensor([0, 1, 0, 1, 2])
    """
    expect("positions", x, NestedTensor)
    s = x.structure
    found = local_positions(s, x.values.shape[s.packed_dim])
    same = s.packed_dim == 0 and s.ragged_ndim == 1 and s.batch_dim == 0
    return x.with_values(found) if same else NestedTensor(found, s.offsets)


def new_tensordict(name: str, x: TensorDict, *size: Any, **kwargs: Any) -> TensorDict:
    """`new_zeros`, `new_ones`, `new_empty`: sizes are those of the batch, features stay."""
    given = ints(name, size)
    return lift(x, lambda v: getattr(v, name)((*given, *v.shape[x.ndim :]), **kwargs), size=given, op=name)


def new_full_tensordict(x: TensorDict, size: Any, fill_value: Any, **kwargs: Any) -> TensorDict:
    return lift(x, lambda v: v.new_full((*size, *v.shape[x.ndim :]), fill_value, **kwargs), size=size, op="new_full")


def new_ragged(name: str, x: Any, *size: Any, **kwargs: Any) -> Tensor | NestedTensor:
    """`new_zeros` and the like: a tensor; of a NestedTensor with -1 for its ragged dims a batch of the same rows."""
    apart = (name == "new_full" and len(size) > 1) or name == "new_empty_strided"  # one argument is the size
    given, rest = (int_tuple(name, *size[:1]), size[1:]) if apart else (ints(name, size), ())
    make = getattr(data_of(x), name)
    if all([n != -1 and n >= 0 for n in given]):
        return make(given, *rest, **kwargs)
    gone = tuple([d for d, n in enumerate(given) if n == -1])
    if isinstance(x, MaskedBatch) or gone != x.ragged_dims or given[x._batch_dim] != x.batch_size[0]:
        expected = f"sizes of a tensor, or {len(x)} rows with -1 where {describe(x)} is ragged"
        raise ShapeError(message(name, expected, show_sizes(given), hint="torch.zeros_like(x) keeps the lengths"))
    s, sizes = x.structure, axis_entries(x, list(given))
    sizes[s.packed_dim] = x.values.shape[s.packed_dim]
    return build_nested(s, make(sizes, *rest, **kwargs))


for _op in (torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like):
    unary(_op, family="factory")
for _name in ("new_zeros", "new_ones", "new_empty"):
    _impl = partial(new_tensordict, _name)
    define(getattr(torch.Tensor, _name), "factory", ragged=partial(new_ragged, _name), tensordict=_impl)
define(torch.Tensor.new_full, "factory", ragged=partial(new_ragged, "new_full"), tensordict=new_full_tensordict)
define(torch.Tensor.new_empty_strided, "factory", ragged=partial(new_ragged, "new_empty_strided"))
define(torch.Tensor.new_tensor, "factory", ragged=lambda x, data, **kwargs: data_of(x).new_tensor(data, **kwargs))
note_syncs("nothing, but copies the data to the device", torch.Tensor.new_tensor)
