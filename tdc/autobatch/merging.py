"""Several values as one: those of groups of examples that meet, and those of two branches of the same examples.

    merge     the examples of several values, one after the other
    choose    of two values, that of each example

A value that is shared stays one value. Tensors get one dtype; numbers take that of tensors, if there are any that can
hold them. Lists of different lengths become one `Grown`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch.lists import Grown, alike_lists
from tdc.autobatch.source import OP
from tdc.autobatch.values import (
    LEAVES,
    NUMBERS,
    Lane,
    as_lane,
    cast,
    common_dtype,
    differing,
    flatten,
    lane_of,
    like,
    one_shape,
    unflatten,
    with_number,
)  # fmt: skip
from tdc.core.errors import StructureError, message
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import is_ragged

Pick = Callable[[Sequence[Any], Any], Any]  # one tensor, or ragged batch, of several, given their dtype
Leaf = Callable[[str, Sequence[Any], Sequence[Any]], Any]  # one leaf of several, given their name and counts
FORMS = "give it the same keys and lengths on each way through the function"
NONE = "begin with a tensor instead of None, and a flag: best, found = torch.zeros(()), False"
TENSORS = "what differs between examples must be a tensor or a number"


def merge(name: str, values: Sequence[Any], counts: Sequence[int]) -> Any:
    """The value of all examples; `counts` has the number of examples of each value.

    Raises:
        StructureError, ShapeError: as `combine` and `by_leaves`.
    """
    return by_leaves(name, values, counts, merged_leaf)


def merged_leaf(name: str, leaves: Sequence[Any], counts: Sequence[Any]) -> Any:
    return combine(name, leaves, counts, lambda parts, dtype: torch.cat(cast(parts, dtype)))


def choose(name: str, mine: Tensor, a: Any, b: Any) -> Any:
    """The value of each example: `a` where the mask is true, else `b`.

    Raises:
        StructureError, ShapeError: as `combine`.
    """
    if both_plain(a, b):
        return a if a is b else lane_of(torch.where(like(mine, a.data), a.data, b.data), a.number)

    def leaf(name: str, leaves: Sequence[Any], counts: Sequence[Any]) -> Any:
        if both_plain(*leaves):
            return choose(name, mine, *leaves)
        return combine(name, leaves, counts, pick, one_batch=True)

    def pick(parts: Sequence[Any], dtype: Any) -> Any:
        if is_ragged(parts[0]) and not same_lengths(*parts):
            return chosen_rows(mine, *parts)
        return torch.where(like(mine, parts[0]), *cast(parts, dtype))

    return by_leaves(name, [a, b], [mine.shape[0]] * 2, leaf)


def same_lengths(x: Any, y: Any) -> bool:
    """True if two ragged batches share one structure, by identity, and the sizes of other dims."""
    if type(x) is not type(y) or x.ndim != y.ndim:
        return False
    if not isinstance(x, NestedTensor):
        return x.lengths is y.lengths and x.data.shape == y.data.shape
    dim = x.structure.packed_dim
    static = [(a, b) for i, (a, b) in enumerate(zip(x.values.shape, y.values.shape, strict=True)) if i != dim]
    return x.structure is y.structure and all([a == b for a, b in static])


def chosen_rows(mine: Tensor, a: Any, b: Any) -> Any:
    """Rows of one ragged batch where a mask is true, else those of another, which have lengths of their own."""
    rows = torch.arange(mine.shape[0], device=mine.device)
    return torch.cat([a, b])[torch.where(mine, rows, rows + mine.shape[0])]


def both_plain(a: Any, b: Any) -> bool:
    """True of two tensors of one dtype and shape. Most are, and a graph is traced faster for asking."""
    if type(a) is not Lane or type(b) is not Lane or a.number is not b.number:
        return False
    x, y = a.data, b.data
    dense = isinstance(x, Tensor) and isinstance(y, Tensor)
    return dense and x.dtype is y.dtype and x.shape[1:] == y.shape[1:]


def combine(name: str, leaves: Sequence[Any], counts: Sequence[Any], pick: Pick, one_batch: bool = False) -> Any:
    """Several leaves as one: equal ones stay, `pick` makes one tensor of several with one dtype and shape.

    Args:
        counts: the number of examples of each.
        one_batch: they are of the same examples.

    Raises:
        StructureError: different objects that are not tensors.
        ShapeError: tensors of different shapes.
    """
    first, equal = leaves[0], one_batch or type(leaves[0]) is not Lane
    data: list[Any] = []
    ragged = dense = True
    for x in leaves:  # a loop, not comprehensions: a graph is traced through it faster
        equal = equal and same(x, first)
        data.append(x.data if type(x) is Lane else x)
        ragged = ragged and type(x) is Lane and is_ragged(x.data)
        dense = dense and isinstance(data[-1], (Tensor, *NUMBERS))
    if equal:
        return first
    if ragged:
        return lane_of(pick(data, None))
    if not dense:
        got, hint = differing(leaves), NONE if any([x is None for x in leaves]) else TENSORS
        raise StructureError(message(OP, f"one value of {name!r} for all examples", got, hint=hint))
    parts = [as_lane(x, n) for x, n in zip(leaves, counts, strict=True)]
    tensors = [x.data for x in parts if not x.number]
    dtype = common_dtype(tensors or [x.data for x in parts])
    for x, part in zip(leaves, parts, strict=True) if tensors else ():
        dtype = with_number(dtype, x, part.data.dtype) if part.number else dtype
    one_shape(name, parts)
    return lane_of(pick([x.data for x in parts], dtype), not tensors)


def by_leaves(name: str, values: Sequence[Any], counts: Sequence[Any], leaf: Leaf) -> Any:
    """Several values of one form as one, leaf by leaf; lists of different lengths become alike first.

    Raises:
        StructureError: values of different forms.
    """
    trees = lists = False
    for x in values:
        trees, lists = trees or not isinstance(x, LEAVES), lists or isinstance(x, (list, Grown))
    if not trees:
        return leaf(name, values, counts)
    values = alike_lists(name, values, counts) if lists else values
    flat = [flatten(value) for value in values]
    form = flat[0][1]
    if any([other != form for _, other in flat]):
        raise StructureError(message(OP, f"one form of {name!r} for all examples", differing(values), hint=FORMS))
    columns = zip(*[leaves for leaves, _ in flat], strict=True)
    return unflatten([leaf(name, list(column), counts) for column in columns], form)


def same(a: Any, b: Any) -> bool:
    """True if two leaves are one value, which all examples can share."""
    if a is b:
        return True
    return type(a) is type(b) and not isinstance(a, (Tensor, Lane)) and bool(a == b) and repr(a) == repr(b)
