"""Values of the examples that are there: what differs between them, what all share, and how they part and meet.

A value is a tree. A leaf that each example has for itself is a `Lane`; any other leaf is the same for all: a number, a
module, a tensor such as a weight.

    select      the examples at some positions
    merge       the examples of several values, one behind the other
    as_result   what the caller gets
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch.source import OP
from tdc.core import pytree
from tdc.core.errors import ShapeError, StructureError, UnsupportedError, describe, message
from tdc.ragged.storage import is_ragged

NUMBERS = (bool, int, float, complex)


class Lane:
    """A tensor, or ragged batch, of the values that the examples have.

    Attributes:
        data: the examples in front.
        number: whether each has a Python number; of floats the data is float64.
    """

    __slots__ = ("data", "number")

    def __init__(self, data: Any, number: bool = False) -> None:
        self.data = data
        self.number = number


LEAVES = (Lane, Tensor, *NUMBERS, str, type(None), torch.nn.Module)


def is_tree(x: Any) -> bool:
    """Whether a value may have leaves inside."""
    return not isinstance(x, LEAVES)


def is_lane(x: Any) -> bool:
    """Whether a leaf is a tensor that each example has for itself."""
    return type(x) is Lane and isinstance(x.data, Tensor)


def flatten(x: Any) -> tuple[list[Any], Any]:
    """Leaves and form of a value; a leaf has none."""
    return pytree.tree_flatten(x, is_leaf=is_ragged) if is_tree(x) else ([x], None)


def unflatten(leaves: list[Any], spec: Any) -> Any:
    return leaves[0] if spec is None else pytree.tree_unflatten(leaves, spec)


def map_leaves(fn: Callable[[Any], Any], x: Any) -> Any:
    """A value with `fn` of its leaves."""
    if not is_tree(x):
        return fn(x)
    leaves, spec = flatten(x)
    return unflatten([fn(leaf) for leaf in leaves], spec)


def take(data: Any, positions: Tensor) -> Any:
    """The examples at some positions."""
    return data.index_select(0, positions) if isinstance(data, Tensor) else data[positions]


def select(x: Any, positions: Tensor) -> Any:
    """The value of the examples at some positions."""
    return map_leaves(lambda leaf: Lane(take(leaf.data, positions), leaf.number) if type(leaf) is Lane else leaf, x)


def merge(name: str, values: Sequence[Any], counts: Sequence[int]) -> Any:
    """The value of all examples, those of the first value in front; `counts` has how many have each.

    Raises:
        StructureError: values of different forms, or different objects that are no tensors.
        ShapeError: tensors of different shapes.
    """
    if not any([is_tree(x) for x in values]):
        return merge_leaf(name, values, counts)
    one_length(name, values)
    flat = [flatten(x) for x in values]
    spec = flat[0][1]
    if any([s != spec for _, s in flat]):
        raise StructureError(message(OP, f"one form of {name!r} for all examples", differing(values), hint=FORMS))
    columns = zip(*[leaves for leaves, _ in flat], strict=True)
    return unflatten([merge_leaf(name, column, counts) for column in columns], spec)


FORMS = "give it the same keys and lengths on each way through the function"


def merge_leaf(name: str, values: Sequence[Any], counts: Sequence[int]) -> Any:
    """`merge` of leaves."""
    first = values[0]
    if type(first) is not Lane and all([same(x, first) for x in values]):
        return first
    if all([isinstance(x.data if type(x) is Lane else x, (Tensor, *NUMBERS)) for x in values]):
        return merge_tensors(name, values, counts)
    if all([type(x) is Lane and is_ragged(x.data) for x in values]):
        return Lane(torch.cat([x.data for x in values]))
    raise StructureError(message(OP, f"one value of {name!r} for all examples", differing(values), hint=TENSORS))


TENSORS = "what differs between examples must be a tensor or a number"


def same(a: Any, b: Any) -> bool:
    """Whether two leaves are one value, which all examples can share."""
    if a is b:
        return True
    return type(a) is type(b) and not isinstance(a, (Tensor, Lane)) and bool(a == b) and repr(a) == repr(b)


def merge_tensors(name: str, values: Sequence[Any], counts: Sequence[int]) -> Lane:
    """Tensors and numbers of all examples; numbers take the dtype of tensors, if there are any."""
    parts = [as_lane(x, n) for x, n in zip(values, counts, strict=True)]
    tensors = [x.data for x in parts if not x.number]
    dtype = common_dtype(tensors or [x.data for x in parts])
    one_shape(name, parts)
    return Lane(torch.cat([x.data.to(dtype) for x in parts]), not tensors)


Pick = Callable[[Any, Any, torch.dtype, bool], Lane]


def merge_forms(name: str, a: Any, b: Any, pick: Pick) -> Any:
    """Two values as one: what is the same stays; `pick` makes one of two tensors or numbers, in their common dtype.

    Raises:
        StructureError, ShapeError: as `merge`.
    """
    one_length(name, [a, b])
    (ours, spec), (theirs, other) = flatten(a), flatten(b)
    if spec != other:
        raise StructureError(message(OP, f"one form of {name!r} for all examples", differing([a, b]), hint=FORMS))

    def leaf(x: Any, y: Any) -> Any:
        if same(x, y):
            return x
        parts = [t.data if type(t) is Lane else t for t in (x, y)]
        if not all([isinstance(t, (Tensor, *NUMBERS)) for t in parts]):
            got = differing([x, y])
            raise StructureError(message(OP, f"one value of {name!r} for all examples", got, hint=TENSORS))
        pair = [t if type(t) is Lane else as_lane(t, 1) for t in (x, y)]
        tensors = [t.data for t in pair if not t.number]
        one_shape(name, pair)
        return pick(x, y, common_dtype(tensors or [t.data for t in pair]), not tensors)

    return unflatten([leaf(x, y) for x, y in zip(ours, theirs, strict=True)], spec)


def one_length(name: str, values: Sequence[Any]) -> None:
    """
    Raises:
        UnsupportedError: lists of different lengths.
    """
    lengths = [len(x) for x in values if isinstance(x, list)]
    if any([n != lengths[0] for n in lengths]):
        got, hint = (
            f"{name!r} of {min(lengths)} and {max(lengths)}",
            "keep results in a tensor of fixed size: out[i] = value",
        )
        raise UnsupportedError(message(OP, "lists of one length for all examples", got, hint=hint))


def one_shape(name: str, parts: Sequence[Lane]) -> None:
    """
    Raises:
        ShapeError: tensors of different shapes.
    """
    shapes = {tuple(x.data.shape[1:]): None for x in parts}
    if len(shapes) > 1:
        got = " and ".join(sorted([str([*s]) for s in shapes]))
        hint = "ways through a function must give a name tensors of one shape"
        raise ShapeError(message(OP, f"one shape of {name!r} for all examples", got, hint=hint))


def common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def as_lane(x: Any, count: int) -> Lane:
    """A leaf that each of `count` examples has for itself."""
    if type(x) is Lane:
        return x
    if isinstance(x, Tensor):
        return Lane(x.expand(count, *x.shape))
    dtype = torch.float64 if isinstance(x, float) else None
    return Lane(torch.full((count,), x, dtype=dtype), True)


def differing(values: Sequence[Any]) -> str:
    """What the values are, for messages."""
    found: list[str] = []
    for x in values:
        text = shown(x)
        found += [text] if text not in found else []
    return f"{found[0]} and {found[1]}" if len(found) > 1 else f"two of {found[0]}"


def shown(x: Any) -> str:
    """What a value is."""
    if isinstance(x, str):
        return repr(x)
    if isinstance(x, dict):
        return f"dict of {[*x]}"
    if isinstance(x, (tuple, list)):
        return f"{type(x).__name__} of {len(x)}"
    return describe(x.data if type(x) is Lane else x)


def as_number(x: Lane) -> Tensor:
    """What the caller gets of numbers: floats in torch's default dtype."""
    return x.data.to(torch.get_default_dtype()) if x.number and x.data.is_floating_point() else x.data


def as_result(x: Any, count: int) -> Any:
    """What the caller gets: every tensor and number with the examples in front."""

    def leaf(x: Any) -> Any:
        return as_number(as_lane(x, count)) if isinstance(x, (Lane, Tensor, *NUMBERS)) else x

    return map_leaves(leaf, x)
