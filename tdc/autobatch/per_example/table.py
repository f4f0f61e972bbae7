"""The table of operations on one example of a ragged batch: each runs once, on the whole batch.

A row is a function that takes the arguments of one example, and calls the operation of `tdc.ops` with those of the
batch, whose dims count from the batch on:

    example    xs (T, D)       xs.sum(0)        h (D,)          xs + h
    batch      xs (B, -1, D)   xs.sum(1)        h (B, D)        xs + h (B, 1, D)

    NestedTensor    a ragged operand: one example has one dim less
    Lane            a dense tensor of each example, (B, ...)
    Tensor          a shared tensor

Rows have the names of the table of operations, so that one look-up serves functions, methods and operators. An
operation without a row is refused. Dim 0 of a result counts examples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from tdc.autobatch.source import OP
from tdc.autobatch.values import Lane
from tdc.core.arguments import normal_dim
from tdc.core.dynamo import constant
from tdc.core.errors import UnsupportedError, message
from tdc.core.rules import DISPATCH, METHOD, REFLECTED_ROW, name_of, swapped
from tdc.core.signatures import NUMPY
from tdc.core.typing import Op
from tdc.layout.segments import local_positions, row_ids
from tdc.layout.structure import Structure
from tdc.ragged.nested import NestedTensor, build_nested

ROWS = SimpleNamespace()
TABLE: dict[str, Op] = vars(ROWS)
NESTED = DISPATCH["nested"]
HINT = "walk along it with for, or compute with the whole batch outside of the function"


def put(op: Any, row: Callable[..., Any]) -> None:
    """Add a row, for all functions that share a row of the table of operations."""
    name = NESTED[op]
    if name in TABLE:
        raise ValueError(message("put", "one row for each operation", f"a second one for {name}"))
    TABLE[name] = row
    for end in (METHOD, REFLECTED_ROW):
        TABLE[name + end] = swapped(row)


def each(module: Any, names: str) -> list[Any]:
    """Functions of a module, by name."""
    return [getattr(module, name) for name in names.split()]


def one_by_one(name: str, row: Callable[..., Any]) -> Callable[..., Any]:
    """A row whose sizes or dims are given one by one, as one sequence, or by name."""

    def run(input: Any, *given: Any, **kwargs: Any) -> Any:
        if name in kwargs:
            given = (*given, kwargs.pop(name))
        if kwargs:
            refuse(f"{next(iter(kwargs))}= of a ragged example")
        sizes = [*given[0]] if len(given) == 1 and isinstance(given[0], (tuple, list)) else [*given]
        return row(input, sizes)

    return run


@constant
def row_of(func: Any) -> str:
    """The name of the row of a function; UnsupportedError without one."""
    name = NESTED.get(func)
    if name is None or name not in TABLE:
        refuse(f"torch.{name_of(func)}")
    return name


@constant
def fits(row: str, count: int, names: tuple[str, ...]) -> bool:
    """True if a row takes so many arguments by position, and others by name."""
    try:
        inspect.signature(TABLE[row]).bind(*[None] * count, **dict.fromkeys(names))
    except TypeError:
        return False
    return True


def call(row: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a row; UnsupportedError for arguments that it does not take."""
    if kwargs:
        named = {NUMPY.get(name, name) if name != "x" else "input": a for name, a in kwargs.items()}
        first = [named.pop("input")] if "input" in named and not args else []
        args, kwargs = [*first, *args], named
        if kwargs.get("out", True) is None:
            kwargs.pop("out")
    if not fits(row, len(args), tuple(kwargs)):
        names = ", ".join([f"{name}=" for name in kwargs]) or f"{len(args)} arguments"
        refuse(f"{names} of a ragged example")
    return getattr(ROWS, row)(*args, **kwargs)


def refuse(got: str, hint: str = HINT, expected: str = "an operation that ragged examples have") -> NoReturn:
    """Raise UnsupportedError."""
    raise UnsupportedError(message(OP, expected, got, hint=hint))


# -- operands


def rank(x: Any) -> int:
    """The number of dims of one example of an operand; 0 of a number."""
    if isinstance(x, NestedTensor):
        return x.ndim - 1
    if type(x) is Lane:
        return int(x.data.ndim) - 1
    return x.ndim if isinstance(x, Tensor) else 0


def is_operand(x: Any) -> bool:
    return isinstance(x, (NestedTensor, Tensor)) or type(x) is Lane


def is_own(x: Any) -> bool:
    """True for an operand that differs between examples."""
    return isinstance(x, NestedTensor) or type(x) is Lane


def ragged(x: Any, op: Any) -> Any:
    """The first operand, which must be ragged."""
    if not isinstance(x, NestedTensor):
        refuse(f"torch.{name_of(op)} whose first operand is not ragged", "make the dense one ragged: h.expand_as(xs)")
    return x


def of_rank(x: Any, dims: int) -> Any:
    """An operand of the batch whose examples have so many dims: new ones are of size 1, in front. Shared tensors stay
    as they are."""
    missing = dims - rank(x)
    if isinstance(x, NestedTensor):
        for _ in range(missing):
            x = x.unsqueeze(1)
        return x
    if type(x) is Lane:
        return x.data.reshape(x.data.shape[0], *[1] * max(missing, 0), *x.data.shape[1:])
    return x


def with_batch(x: Any, count: Any) -> Any:
    """An operand, also a shared one, with the batch as dim 0."""
    if type(x) is Lane:
        return x.data
    return x.expand(count, *x.shape) if isinstance(x, Tensor) else x


def count_of(operands: Iterable[Any]) -> Any:
    """The number of examples."""
    return next(x for x in operands if isinstance(x, NestedTensor)).structure.batch_size


def only_shared(op: Any, *args: Any) -> None:
    """Raise UnsupportedError for arguments that differ between examples."""
    for part in [part for a in args for part in (a if isinstance(a, (tuple, list)) else (a,))]:
        if is_own(part):
            refuse(f"torch.{name_of(op)} with an argument that differs between examples", "share it between them")


# -- dims


def behind(op: Any, dim: Any, n: int) -> Any:
    """A dim of examples of `n` dims, or several, as dims of the batch."""
    if isinstance(dim, (tuple, list)):
        return tuple([normal_dim(d, n, op) + 1 for d in dim])
    return normal_dim(dim, n, op) + 1


def all_dims(x: NestedTensor) -> tuple[int, ...]:
    """All dims but the batch dim."""
    return tuple(range(1, x.ndim))


def flattened(x: NestedTensor, first: int = 0, last: int | None = None) -> NestedTensor:
    """Dims of each example as one, its ragged ones among them; by default all dims.

    Static dims in front of the ragged ones need a gather: element (s, t, f) of example i of (S, T, F) moves to
    position (s * T_i + t) * F + f.
    """
    s, v, dims = x.structure, x.values, range(x.ndim - 1)
    last = x.ndim - 2 if last is None else last
    e, more = s.packed_dim, s.ragged_ndim - 1
    front = [d for d in dims if first <= d < e]
    back = [d - more for d in dims if e + more < d <= last]
    outer = [d for d in range(v.ndim) if d not in (*front, e, *back)]
    values = v.permute(e, *front, *back, *outer)
    many = [values.shape[k] for k in range(1, 1 + len(front) + len(back))]
    copies = inner = 1
    for k, size in enumerate(many):
        copies, inner = copies * size, inner * (size if k >= len(front) else 1)
    values = values.flatten(0, len(many))
    offsets = s.offsets * copies
    new = Structure(offsets, None, None, first, 0, 1).marked()
    if front:
        total = values.shape[0]
        at, row = local_positions(new, total), row_ids(new, total)
        line = s.offsets.diff()[row] * inner
        begin, rest = at // line, at % line
        where = (s.offsets[row] + rest // inner) * copies + begin * inner + rest % inner
        values = values.index_select(0, where)
    return build_nested(new, values.movedim(0, first))


def first_is_ragged(x: NestedTensor) -> bool:
    """True if the first dim of each example is its only ragged one."""
    return x.structure.packed_dim == 0 and x.structure.ragged_ndim == 1 and x.structure.batch_dim == 0


@constant
def dtype_beside(dtype: str, zero: str) -> torch.dtype:
    """The dtype of the sum of a tensor and a 0-d tensor."""
    tensor, number = [getattr(torch, name.removeprefix("torch.")) for name in (dtype, zero)]
    return torch.result_type(torch.empty(1, dtype=tensor), torch.empty((), dtype=number))
