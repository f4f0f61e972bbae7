"""Values of the active examples: trees in which a leaf of each example is a `Lane`, and any other leaf is shared.

    select      the value of the examples at some positions
    as_result   the value that the caller gets
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
from tdc.tensordict.tensordict import TensorDict, on_rows

NUMBERS = (bool, int, float, complex)
NUMBER_ASKED = "tensors that stay tensors", "a number asked of one that differs between examples"


class Lane:
    """A tensor or ragged batch with the values of the examples.

    Attributes:
        data: dim 0 counts examples.
        number: each value is a Python number; data of floats is float64.
    """

    data: Any
    number: bool = False


def lane_of(data: Any, number: bool = False) -> Lane:
    """A `Lane`. Dynamo takes three times as long to trace `Lane(data)` (torch 2.13)."""
    made: Lane = object.__new__(Lane)
    made.data = data
    if number:
        made.number = True
    return made


class Undefined:
    """The value of a name that has none."""

    def __repr__(self) -> str:
        return "no value"


UNDEFINED = Undefined()
LEAVES = (Lane, Tensor, *NUMBERS, str, type(None), Undefined, torch.nn.Module)


def is_tree(x: Any) -> bool:
    """True of a value that may have leaves inside."""
    return not isinstance(x, LEAVES)


def is_lane(x: Any) -> bool:
    """True of a leaf that is a tensor of each example."""
    return type(x) is Lane and isinstance(x.data, Tensor)


class Compound:
    """A value made of other values and of constants, which `parts` returns: `type(x)(*values, *constants)`."""

    parts: Callable[..., tuple[list[Any], tuple[Any, ...]]]


def flatten(x: Any) -> tuple[list[Any], Any]:
    """Leaves and form of a value; the form of a leaf is None. Most forms are tuples, which are traced faster than
    pytree's."""
    if isinstance(x, LEAVES):
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
        if isinstance(part, LEAVES):  # not `is_tree`: a call less to trace
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


def select(x: Any, positions: Tensor) -> Any:
    """The value of the examples at some positions."""

    def leaf(x: Any) -> Any:
        if type(x) is not Lane:
            return x
        dense = isinstance(x.data, Tensor)
        return lane_of(x.data.index_select(0, positions) if dense else x.data[positions], x.number)

    return map_leaves(leaf, x)


def like(mask: Tensor, x: Tensor) -> Tensor:
    """A mask of examples with as many dims as a tensor."""
    return mask if x.ndim == 1 else mask.reshape(-1, *[1] * (x.ndim - 1))


def as_lane(x: Any, count: int) -> Lane:
    """A leaf as a `Lane` of `count` examples."""
    if type(x) is Lane:
        return x
    if isinstance(x, Tensor):
        return lane_of(x.expand(count, *x.shape))
    dtype = torch.float64 if isinstance(x, float) else None
    return lane_of(torch.full((count,), x, dtype=dtype), True)


def one_shape(name: str, parts: Sequence[Lane]) -> None:
    """Raise ShapeError for tensors of different shapes."""
    first = parts[0].data.shape[1:]
    if any([x.data.shape[1:] != first for x in parts[1:]]):  # a comparison does not make sizes constants of a graph
        shapes = {tuple(x.data.shape[1:]) for x in parts}
        got = " and ".join(sorted([str([*s]) for s in shapes]))
        hint = "ways through a function must give a name tensors of one shape"
        raise ShapeError(message(OP, f"one shape of {name!r} for all examples", got, hint=hint))


def cast(parts: Sequence[Any], dtype: torch.dtype | None) -> list[Any]:
    """Tensors in one dtype; as they are where it is None, as of ragged batches."""
    return [x if dtype is None else x.to(dtype) for x in parts]


def common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def with_number(dtype: torch.dtype, x: Any, kind: torch.dtype) -> torch.dtype:
    """The dtype of tensors that a number joins: torch's promotion, and int64 for an int `x` that is out of range."""
    dtype = beside_number(str(dtype), str(kind))
    if type(x) is not int or dtype.is_floating_point or dtype.is_complex or dtype in (torch.bool, torch.int64):
        return dtype
    low, high = limits(str(dtype))
    return dtype if low <= x <= high else torch.int64


@constant
def beside_number(dtype: str, kind: str) -> torch.dtype:
    """The dtype of a tensor's sum with a number, whose kind is that of another dtype."""
    tensor, number = [getattr(torch, name.removeprefix("torch.")) for name in (dtype, kind)]
    return torch.result_type(torch.empty(1, dtype=tensor), torch.empty((), dtype=number).item())


@constant
def limits(dtype: str) -> tuple[int, int]:
    """The least and the largest integer of a dtype."""
    info = torch.iinfo(getattr(torch, dtype.removeprefix("torch.")))
    return info.min, info.max


def differing(values: Sequence[Any]) -> str:
    """A description of different values, for messages."""
    found = [*dict.fromkeys([shown(x) for x in values])]
    return f"{found[0]} and {found[1]}" if len(found) > 1 else f"two of {found[0]}"


def shown(x: Any) -> str:
    """A description of a value."""
    if isinstance(x, str):
        return repr(x)
    if isinstance(x, dict):
        return f"dict of {[*x]}"
    if isinstance(x, (tuple, list)):
        return f"{type(x).__name__} of {len(x)}"
    return describe(x.data if type(x) is Lane else x)


def as_result(x: Any, count: int) -> Any:
    """The value that the caller gets: tensors of all examples; floats of Python have torch's default dtype."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, (Lane, Tensor, *NUMBERS)):
            return x
        found = as_lane(x, count)
        is_float = found.number and found.data.is_floating_point()
        return found.data.to(torch.get_default_dtype()) if is_float else found.data

    if isinstance(x, TensorDict):
        return on_rows(lambda part: as_result(part, count), x, one_for_all)
    if type(x) in (tuple, list, dict):
        parts = [as_result(part, count) for part in (x.values() if isinstance(x, dict) else x)]
        return dict(zip(x, parts, strict=True)) if isinstance(x, dict) else type(x)(parts)
    return map_leaves(leaf, x)


def one_for_all(x: Any) -> Any:
    """The tensor of a Shared in a result; an error where the examples have different ones."""
    if type(x) is Lane:
        hint = "td.set(key, tensor), without Shared, for one of each example"
        raise StructureError(message(OP, "a Shared that all examples share", "one of each example", hint=hint))
    return x


RESULT = "the result"


def no_value(name: str, line: int) -> StructureError:
    """The error for a name without a value."""
    hint = f"give {name} a value before the statement that may skip it"
    return StructureError(message(OP, "names that have a value", f"{name!r}, which has none at line {line}", hint=hint))


def no_condition(data: Any, line: int) -> ShapeError:
    """The error for a condition that is not one element for each example."""
    what = f"shape {[*data.shape[1:]]}" if isinstance(data, Tensor) else describe(data)
    got, hint = f"{what} at line {line}", "x.any(), x.all(), or torch.where"
    return ShapeError(message(OP, "a condition of one element for each example", got, hint=hint))


def no_return() -> StructureError:
    """The error for a function that returns a value to some examples only."""
    got, hint = "some that reach the end of the function", "return a value on each way through it"
    return StructureError(message(OP, "examples that all return a value", got, hint=hint))
