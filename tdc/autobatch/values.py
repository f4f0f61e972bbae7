"""Values of the examples that are there: what differs between them, what all share, and how they part and meet.

A value is a tree. A leaf that each example has for itself is a `Lane`; any other leaf is the same for all: a number, a
module, a tensor such as a weight.

    select      the examples at some positions
    as_result   what the caller gets
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch.source import OP
from tdc.core import pytree
from tdc.core.dynamo import constant
from tdc.core.errors import ShapeError, StructureError, describe, message
from tdc.ragged.storage import is_ragged

NUMBERS = (bool, int, float, complex)
NUMBER_ASKED = "tensors that stay tensors", "a number asked of one that differs between examples"


class Lane:
    """A tensor, or ragged batch, of the values that the examples have.

    Attributes:
        data: the examples in front.
        number: whether each has a Python number; of floats the data is float64.
    """

    data: Any
    number: bool = False


def lane_of(data: Any, number: bool = False) -> Lane:
    """A value that each example has for itself. Dynamo is three times as long about `Lane(data)` (torch 2.13)."""
    made: Lane = object.__new__(Lane)
    made.data = data
    if number:
        made.number = True
    return made


class Undefined:
    """Stands for a name without a value."""

    def __repr__(self) -> str:
        return "no value"


UNDEFINED = Undefined()


LEAVES = (Lane, Tensor, *NUMBERS, str, type(None), Undefined, torch.nn.Module)


def is_tree(x: Any) -> bool:
    """Whether a value may have leaves inside."""
    return not isinstance(x, LEAVES)


def is_lane(x: Any) -> bool:
    """Whether a leaf is a tensor that each example has for itself."""
    return type(x) is Lane and isinstance(x.data, Tensor)


class Compound:
    """A value that is made of other values and of constants: `type(x)(*values, *constants)`.

    Attributes:
        parts: a method that returns the values and the constants.
    """

    parts: Callable[..., tuple[list[Any], tuple[Any, ...]]]


def flatten(x: Any) -> tuple[list[Any], Any]:
    """Leaves and form of a value; a leaf has none. The form of what most functions have is a tuple: a graph is traced
    through tuples faster than through torch's forms."""
    if not is_tree(x):
        return [x], None
    kind, rest = type(x), ()
    if kind is dict:
        parts, rest = [*x.values()], tuple(x)
    elif kind is list or kind is tuple:
        parts = x
    elif isinstance(x, Compound):
        parts, rest = x.parts()
    else:
        return pytree.tree_flatten(x, is_leaf=is_ragged)
    leaves: list[Any] = []
    forms: list[Any] = []
    for part in parts:
        if isinstance(part, LEAVES):  # not `is_tree`: a graph is traced faster without the call
            leaves.append(part)
            forms.append((1, None))
        else:
            found, form = flatten(part)
            leaves += found
            forms.append((len(found), form))
    return leaves, (kind, rest, tuple(forms))


def unflatten(leaves: list[Any], form: Any) -> Any:
    if form is None:
        return leaves[0]
    if type(form) is not tuple:
        return pytree.tree_unflatten(leaves, form)
    kind, rest, forms = form
    parts: list[Any] = []
    begin = 0
    for size, inner in forms:
        parts.append(leaves[begin] if inner is None else unflatten(leaves[begin : begin + size], inner))
        begin += size
    if kind is dict:
        return dict(zip(rest, parts, strict=True))
    return kind(parts) if kind is list or kind is tuple else kind(*parts, *rest)


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
    return map_leaves(lambda leaf: lane_of(take(leaf.data, positions), leaf.number) if type(leaf) is Lane else leaf, x)


def like(mask: Tensor, x: Tensor) -> Tensor:
    """A mask of examples with as many dims as a tensor."""
    return mask if x.ndim == 1 else mask.reshape(-1, *[1] * (x.ndim - 1))


def as_lane(x: Any, count: int) -> Lane:
    """A leaf that each of `count` examples has for itself."""
    if type(x) is Lane:
        return x
    if isinstance(x, Tensor):
        return lane_of(x.expand(count, *x.shape))
    dtype = torch.float64 if isinstance(x, float) else None
    return lane_of(torch.full((count,), x, dtype=dtype), True)


def one_shape(name: str, parts: Sequence[Lane]) -> None:
    """
    Raises:
        ShapeError: tensors of different shapes.
    """
    first = parts[0].data.shape[1:]
    if any([x.data.shape[1:] != first for x in parts[1:]]):  # compared, not counted: a graph reads no size for that
        shapes = {tuple(x.data.shape[1:]) for x in parts}
        got = " and ".join(sorted([str([*s]) for s in shapes]))
        hint = "ways through a function must give a name tensors of one shape"
        raise ShapeError(message(OP, f"one shape of {name!r} for all examples", got, hint=hint))


def cast(parts: Sequence[Any], dtype: torch.dtype | None) -> list[Any]:
    """Tensors in one dtype; ragged batches, of which the dtype is not asked for, as they are."""
    return [x if dtype is None else x.to(dtype) for x in parts]


def common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def with_number(dtype: torch.dtype, x: Any, kind: torch.dtype) -> torch.dtype:
    """The dtype of tensors that a number becomes part of: as torch has it, and int64 for a whole number that is out of
    range. Of a number of each example only the kind is known."""
    dtype = beside_number(str(dtype), str(kind))
    return torch.int64 if type(x) is int and not is_within(x, dtype) else dtype


@constant
def beside_number(dtype: str, kind: str) -> torch.dtype:
    """What torch computes in for a tensor of one dtype and a number of Python, whose kind is that of another."""
    tensor, number = [getattr(torch, name.removeprefix("torch.")) for name in (dtype, kind)]
    return torch.result_type(torch.empty(1, dtype=tensor), torch.empty((), dtype=number).item())


def is_within(x: int, dtype: torch.dtype) -> bool:
    """Whether a tensor of a dtype may hold a whole number; a float is as near as it can."""
    if dtype.is_floating_point or dtype.is_complex or dtype in (torch.bool, torch.int64):
        return True
    low, high = limits(str(dtype))
    return low <= x <= high


@constant
def limits(dtype: str) -> tuple[int, int]:
    """The least and the largest whole number of a dtype."""
    info = torch.iinfo(getattr(torch, dtype.removeprefix("torch.")))
    return info.min, info.max


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


RESULT = "the result"


def no_value(name: str, line: int) -> StructureError:
    """The error for a name without a value."""
    hint = f"give {name} a value before the statement that may skip it"
    return StructureError(message(OP, "names that have a value", f"{name!r}, which has none at line {line}", hint=hint))


def no_condition(data: Any, line: int) -> ShapeError:
    """The error for a condition that is no tensor of one element for each example."""
    what = f"shape {[*data.shape[1:]]}" if isinstance(data, Tensor) else describe(data)
    got, hint = f"{what} at line {line}", "x.any(), x.all(), or torch.where"
    return ShapeError(message(OP, "a condition of one element for each example", got, hint=hint))


def no_return() -> StructureError:
    """The error for a function that returns a value to some examples only."""
    got, hint = "some that reach the end of the function", "return a value on each way through it"
    return StructureError(message(OP, "examples that all return a value", got, hint=hint))
