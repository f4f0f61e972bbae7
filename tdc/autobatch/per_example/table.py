"""The table of operations on one example of a ragged batch: each runs on the whole batch, once.

What differs between an example and the batch are dims. A row of the table is a function that takes the arguments of one
example and calls the operation, as `tdc.ops` has it, with those of the batch:

    example    xs (T, D)       xs.sum(0)        h (D,)          xs + h
    batch      xs (B, -1, D)   xs.sum(1)        h (B, D)        xs + h (B, 1, D)

    NestedTensor    a ragged operand: one example of it has a dim less
    Lane            a dense tensor that each example has for itself, (B, ...)
    Tensor          one that all examples share

Rows stand under the name that the table of operations has for them, so that one look-up serves functions, methods and
operators alike. Files of this room hold rows by what becomes of their arguments: `dims`, `operands`, `products`,
`sizes`, `layers`.

Invariants:
  - a result that is a tensor has the examples in front, one that is ragged has them as dim 0;
  - an operation without a row is refused: no dim is ever counted wrongly.
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
    """Put a row into the table, for all functions that run one row of the operations."""
    name = NESTED[op]
    if name in TABLE:
        raise ValueError(message("put", "one row for each operation", f"a second one for {name}"))
    TABLE[name] = row
    for end in (METHOD, REFLECTED_ROW):
        TABLE[name + end] = swapped(row)


def each(module: Any, names: str) -> list[Any]:
    """Functions of a module by their names."""
    return [getattr(module, name) for name in names.split()]


def one_by_one(name: str, row: Callable[..., Any]) -> Callable[..., Any]:
    """A row whose sizes or dims may be given one by one, as one sequence, or by name."""

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
    """The name of the row that runs a function.

    Raises:
        UnsupportedError: it has none.
    """
    name = NESTED.get(func)
    if name is None or name not in TABLE:
        refuse(f"torch.{name_of(func)}")
    return name


@constant
def fits(row: str, count: int, names: tuple[str, ...]) -> bool:
    """Whether a row takes so many arguments by position, and others by name."""
    try:
        inspect.signature(TABLE[row]).bind(*[None] * count, **dict.fromkeys(names))
    except TypeError:
        return False
    return True


def call(row: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What a row gives for arguments of examples.

    Raises:
        UnsupportedError: it does not take these.
    """
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
    """
    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(message(OP, expected, got, hint=hint))


# -- operands


def rank(x: Any) -> int:
    """Number of dims that one example of an operand has; 0 of a number."""
    if isinstance(x, NestedTensor):
        return x.ndim - 1
    if type(x) is Lane:
        return int(x.data.ndim) - 1
    return x.ndim if isinstance(x, Tensor) else 0


def is_operand(x: Any) -> bool:
    return isinstance(x, (NestedTensor, Tensor)) or type(x) is Lane


def ragged(x: Any, op: Any) -> Any:
    """The first operand, which must be a ragged one."""
    if not isinstance(x, NestedTensor):
        refuse(f"torch.{name_of(op)} whose first operand is not ragged", "make the dense one ragged: h.expand_as(xs)")
    return x


def of_rank(x: Any, dims: int) -> Any:
    """An operand of the batch in which each example has so many dims; new ones of size 1 stand in front.

    A tensor that all share has no dim for the batch: dims meet from the last.
    """
    missing = dims - rank(x)
    if isinstance(x, NestedTensor):
        for _ in range(missing):
            x = x.unsqueeze(1)
        return x
    if type(x) is Lane:
        return x.data.reshape(x.data.shape[0], *[1] * max(missing, 0), *x.data.shape[1:])
    return x


def with_batch(x: Any, count: Any) -> Any:
    """An operand with the batch in front, also of a tensor that all share."""
    if type(x) is Lane:
        return x.data
    return x.expand(count, *x.shape) if isinstance(x, Tensor) else x


def count_of(operands: Iterable[Any]) -> Any:
    """How many examples there are."""
    return next(x for x in operands if isinstance(x, NestedTensor)).structure.batch_size


def only_shared(op: Any, *args: Any) -> None:
    """
    Raises:
        UnsupportedError: an argument is one of each example.
    """
    for a in args:
        for part in a if isinstance(a, (tuple, list)) else (a,):
            if isinstance(part, NestedTensor) or type(part) is Lane:
                refuse(f"torch.{name_of(op)} with an argument that differs between examples", "share it between them")


# -- dims


def behind(op: Any, dim: Any, n: int) -> Any:
    """A dim of examples of `n` dims, or several, counted in the batch."""
    if isinstance(dim, (tuple, list)):
        return tuple([normal_dim(d, n, op) + 1 for d in dim])
    return normal_dim(dim, n, op) + 1


def all_dims(x: NestedTensor) -> tuple[int, ...]:
    """All dims but that of the batch."""
    return tuple(range(1, x.ndim))


def flattened(x: NestedTensor, first: int = 0, last: int | None = None) -> NestedTensor:
    """Dims of each example as one, its ragged ones among them; by default all dims.

    The ragged dims are packed already. Static dims in front of them are a gather: example i of (S, T, F) has its
    element (s, t, f) at position (s * T_i + t) * F + f.
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
    """Whether the first dim of each example is its only ragged one."""
    return x.structure.packed_dim == 0 and x.structure.ragged_ndim == 1 and x.structure.batch_dim == 0


def dtype_beside(dtype: torch.dtype, zero: torch.dtype) -> torch.dtype:
    """What torch computes in for a tensor of one dtype and a number of another."""
    return with_number(str(dtype), str(zero))


@constant
def with_number(dtype: str, zero: str) -> torch.dtype:
    tensor, number = [getattr(torch, name.removeprefix("torch.")) for name in (dtype, zero)]
    return torch.result_type(torch.empty(1, dtype=tensor), torch.empty((), dtype=number))
