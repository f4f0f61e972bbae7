"""Several values as one: of groups of examples that meet, and of two ways that the same examples may have come.

    merge     the examples of several values, one behind the other
    choose    of two values, that of each example

What is the same for all stays one value. Tensors get one dtype; numbers take that of tensors, if there are any that
can hold them. Lists of different lengths become one `Grown`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch.lists import alike_lists
from tdc.autobatch.source import OP
from tdc.autobatch.values import (
    NUMBERS,
    Lane,
    as_lane,
    cast,
    common_dtype,
    differing,
    flatten,
    is_tree,
    lane_of,
    like,
    one_shape,
    unflatten,
    with_number,
)
from tdc.core.errors import StructureError, message
from tdc.ragged.storage import is_ragged


def merge(name: str, values: Sequence[Any], counts: Sequence[int]) -> Any:
    """The value of all examples, those of the first value in front; `counts` has how many have each.

    Raises:
        StructureError, ShapeError: as `combine` and `by_leaves`.
    """

    def leaf(leaves: Sequence[Any]) -> Any:
        return combine(name, leaves, counts, lambda parts, dtype: torch.cat(cast(parts, dtype)))

    return by_leaves(name, values, counts, leaf)


def choose(name: str, mine: Tensor, a: Any, b: Any) -> Any:
    """The value of each example: `a` where the mask says so, else `b`.

    Raises:
        StructureError, ShapeError: as `combine`.
    """
    if both_plain(a, b):
        return a if a is b else lane_of(torch.where(like(mine, a.data), a.data, b.data), a.number)

    def pick(parts: Sequence[Any], dtype: Any) -> Any:
        return torch.where(like(mine, parts[0]), *cast(parts, dtype))

    def leaf(leaves: Sequence[Any]) -> Any:
        if both_plain(*leaves):
            return choose(name, mine, *leaves)
        return combine(name, leaves, counts, pick, one_batch=True)

    counts = [mine.shape[0]] * 2
    return by_leaves(name, [a, b], counts, leaf)


def both_plain(a: Any, b: Any) -> bool:
    """Whether two values are tensors of one dtype and shape. Most are, and a graph is traced faster for asking."""
    if type(a) is not Lane or type(b) is not Lane or a.number is not b.number:
        return False
    x, y = a.data, b.data
    dense = isinstance(x, Tensor) and isinstance(y, Tensor)
    return dense and x.dtype is y.dtype and x.shape[1:] == y.shape[1:]


Pick = Callable[[Sequence[Any], Any], Any]  # of tensors, or ragged batches, and the dtype that they are to have


def combine(name: str, leaves: Sequence[Any], counts: Sequence[Any], pick: Pick, one_batch: bool = False) -> Any:
    """Several leaves as one: what is the same stays, `pick` makes one tensor of several with one dtype and shape.

    Args:
        counts: how many examples have each.
        one_batch: whether they are of the same examples.

    Raises:
        StructureError: different objects that are no tensors.
        ShapeError: tensors of different shapes.
    """
    first = leaves[0]
    if (one_batch or type(first) is not Lane) and all([same(x, first) for x in leaves]):
        return first
    data = [x.data if type(x) is Lane else x for x in leaves]
    if all([type(x) is Lane and is_ragged(x.data) for x in leaves]):
        return lane_of(pick(data, None))
    if not all([isinstance(x, (Tensor, *NUMBERS)) for x in data]):
        got, hint = differing(leaves), NONE if any([x is None for x in leaves]) else TENSORS
        raise StructureError(message(OP, f"one value of {name!r} for all examples", got, hint=hint))
    return alike(name, leaves, [as_lane(x, n) for x, n in zip(leaves, counts, strict=True)], pick)


def by_leaves(name: str, values: Sequence[Any], counts: Sequence[Any], leaf: Callable[[Sequence[Any]], Any]) -> Any:
    """Several values of one form as one, leaf by leaf; lists of different lengths become alike first.

    Raises:
        StructureError: values of different forms.
    """
    if not any([is_tree(x) for x in values]):
        return leaf(values)
    values = alike_lists(name, values, counts)
    flat = [flatten(x) for x in values]
    spec = flat[0][1]
    if any([s != spec for _, s in flat]):
        raise StructureError(message(OP, f"one form of {name!r} for all examples", differing(values), hint=FORMS))
    return unflatten([leaf(column) for column in zip(*[leaves for leaves, _ in flat], strict=True)], spec)


FORMS = "give it the same keys and lengths on each way through the function"
NONE = "begin with a tensor instead of None, and a flag: best, found = torch.zeros(()), False"
TENSORS = "what differs between examples must be a tensor or a number"


def same(a: Any, b: Any) -> bool:
    """Whether two leaves are one value, which all examples can share."""
    if a is b:
        return True
    return type(a) is type(b) and not isinstance(a, (Tensor, Lane)) and bool(a == b) and repr(a) == repr(b)


def alike(name: str, leaves: Sequence[Any], parts: Sequence[Lane], pick: Pick) -> Lane:
    """Tensors and numbers as one tensor; numbers take the dtype of tensors, if there are any that can hold them."""
    tensors = [x.data for x in parts if not x.number]
    dtype = common_dtype(tensors or [x.data for x in parts])
    for x, part in zip(leaves, parts, strict=True) if tensors else ():
        dtype = with_number(dtype, x, part.data.dtype) if part.number else dtype
    one_shape(name, parts)
    return lane_of(pick([x.data for x in parts], dtype), not tensors)
