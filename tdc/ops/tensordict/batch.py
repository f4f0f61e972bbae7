"""Operations on the batch dims of a TensorDict.

    lift(td, fn)                        `fn` of every leaf; the batch size is read off a result
    along(torch.sort, "input dim*=-1")  a row for an operation that takes dims, by its arguments, see `core/rules.py`

Batch dims are the first dims of every leaf, so the torch operation runs on each leaf with dims counted from the front.
An operation that gives several tensors gives several TensorDicts, in the named tuple that torch returns.

Invariants: features are never reduced, moved or compared with each other; an operand that is a tensor has batch dims
only and is extended over features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect, normal_dim
from tdc.core.container import dims_of
from tdc.core.errors import (
    DtypeError,
    IndexingError,
    ShapeError,
    UnsupportedError,
    describe,
    first_line,
    message,
    show_sizes,
)
from tdc.core.keys import show
from tdc.core.rules import NEEDED, define, name_of, read_dims
from tdc.core.typing import Op
from tdc.ragged.storage import map_results
from tdc.tensordict.indexing import reshared
from tdc.tensordict.shared import without_shared
from tdc.tensordict.storage import Leaves, together
from tdc.tensordict.tensordict import TensorDict, build_td


def on_leaves(op: Op) -> Op:
    """An operation as it is called on leaves: a Tensor method by its name, so that ragged leaves find their own."""
    name = name_of(op)
    return partial(call_method, name) if getattr(torch.Tensor, name, None) is op else op


def call_method(name: str, x: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(x, name)(*args, **kwargs)


def lift(x: TensorDict, fn: Callable[..., Any], *others: TensorDict, size: Any = None, op: Any = "lift") -> Any:
    """`fn` of every leaf of `x` and the leaves of `others` at the same paths.

    Args:
        fn: gives a tensor, or a tuple of them; then a tuple of the same type comes back, one TensorDict for each.
        size: the batch size of the result; None to read it off one leaf, in front of as many dims as it has features.

    Raises:
        ShapeError, IndexingError, DtypeError: what torch raises for a leaf; all such leaves are named.
    """
    expect(op, x, TensorDict, of=" as the first argument")  # another one may be why the call came here
    try:
        if others:
            out = {p: fn(*values) for p, values in together(op, x, *others)}
        else:
            out = {p: fn(v) for p, v in x._leaves.items()}
        first, rank = sample(x, fn, others, out) if size is None else (x, 0)
    except PLAIN as error:
        if type(error) not in PLAIN:  # the library's own, which say more, and those of vmap, export and CUDA
            raise
        raise explained(op, x, fn, [[td._leaves[p] for p in x._leaves] for td in (x, *others)], error) from error
    if not isinstance(first, tuple):
        return of_leaves(x, out, first.shape[: first.ndim - rank] if size is None else torch.Size(size))
    columns = [{p: r[i] for p, r in out.items()} for i in range(len(first))]
    parts = [of_leaves(x, c, y.shape[: y.ndim - rank]) for c, y in zip(columns, first, strict=True)]
    return tuple(parts) if type(first) is tuple else type(first)(parts)


def of_leaves(x: TensorDict, leaves: Leaves, size: torch.Size) -> TensorDict:
    """The TensorDict of results for every leaf of another one; ragged ones that shared a structure share one again."""
    shared = all([isinstance(v, Tensor) for v in leaves.values()])
    return build_td(leaves if shared else reshared(x._leaves, leaves), x._nodes, size, x.device)


def explained(op: Any, x: TensorDict, fn: Op, columns: list[list[Any]], error: Exception) -> Exception:
    """An error of torch as one of the library, with the leaves where it arises; as it is where it does not again.

    Runs the operands once more, columns in the order of the leaves of `x`.
    """
    wrong = {}
    for path, *values in zip(x._leaves, *columns, strict=True):
        try:
            fn(*values)
        except PLAIN:
            wrong[show(path)] = " and ".join([describe(v) for v in values])
    if x._leaves and not wrong:
        return error
    kinds = {IndexError: IndexingError, TypeError: DtypeError, NotImplementedError: DtypeError}
    expected = f"arguments for batch_size {show_sizes(x.batch_size)}"
    return kinds.get(type(error), ShapeError)(message(op, expected, "others", wrong, f"torch: {first_line(error)}"))


def sample(x: TensorDict, fn: Op, others: tuple[TensorDict, ...], out: dict[Any, Any]) -> tuple[Any, int]:
    """One result and how many features its leaf has; without leaves what `fn` makes of batch dims alone."""
    for path, result in out.items():
        return result, x._leaves[path].ndim - dims_of(x)
    return fn(*[torch.empty(td.batch_size, device=x.device) for td in (x, *others)]), 0


@dataclass(frozen=True, slots=True)
class Along:
    """An operation along batch dims.

    Attributes:
        names: its arguments behind the first, in order; "dim" is among them.
        run: the operation on each leaf.
        default: the dim where none is given: None for all batch dims, NEEDED where one must be.
        several: True if torch takes a tuple of dims.
        operands: the arguments that have the dims of the batch, and are extended over features.
        over_all: the operation over all batch dims as one, where torch gives something else then.
    """

    names: tuple[str, ...]
    run: Op
    default: Any
    several: bool
    operands: tuple[str, ...]
    over_all: Op | None


def along_dims(op: Op, text: str, run: Op | None = None, over_all: Op | None = None) -> Along:
    """`Along` of an operation with these arguments."""
    dims = read_dims(text)
    return Along(dims.names[1:], run or on_leaves(op), dims.default, dims.several, dims.operands, over_all)


def along(
    op: Op, dims: str, family: str, *, ragged: Op | None = None, run: Op | None = None, over_all: Op | None = None,
    whole: bool = False, **facts: Any,
) -> None:  # fmt: skip
    """Define the rows of an operation along batch dims, and those of ragged batches where `ragged` does it.

    Args:
        whole: as `of_whole`.
        run, over_all: as of `Along`.
        facts: further arguments of `define`.
    """
    impl = partial(of_whole if whole else along_tensordict, op, along_dims(op, dims, run, over_all))
    define(op, family, ragged=ragged, tensordict=impl, dims=dims, **facts)


def along_tensordict(op: Op, how: Along, x: TensorDict, *args: Any, **kwargs: Any) -> Any:
    given = bound(op, how, args, kwargs)
    dim = given.pop("dim", how.default)
    if not isinstance(dim, int) and (dim is NEEDED or (dim is None and how.default is not None)):
        expected = f"a dim in [{-dims_of(x)}, {dims_of(x) - 1}]"
        raise ShapeError(message(op, expected, "None", hint="name the dim, e.g. dim=-1"))
    dims, run = batch_dims(op, dim, dims_of(x), how.several), how.run
    if dims is None and how.several and dims_of(x):
        dims = tuple(range(dims_of(x)))
    others = {name: value for name, value in given.items() if isinstance(value, TensorDict)}
    fixed = {name: value for name, value in given.items() if name not in others}
    count = 1 if dims is None else dims_of(x)
    if dims is not None and not others and not how.operands:
        return lift(x, lambda leaf: run(leaf, dim=dims, **fixed), op=op)

    def fn(leaf: Any, *rest: Any) -> Any:
        now = {**fixed, **dict(zip(others, rest, strict=True))}
        for name in how.operands:
            if name in fixed:
                now[name] = spread_over(op, name, fixed[name], leaf.shape[dims_of(x) :], count)
        if dims is None:
            return all_as_one(how.over_all or run, leaf, dims_of(x), **now)
        return run(leaf, dim=dims, **now)

    return lift(x, fn, *others.values(), op=op)


def of_whole(op: Op, how: Along, x: TensorDict, dim: Any = None, keepdim: bool = False) -> TensorDict | Tensor:
    """`any` and `all`: without a dim one answer, a tensor without dims, for all elements of all leaves."""
    if dim is not None:
        return along_tensordict(op, how, x, dim=dim, keepdim=keepdim)
    found = [op(leaf).to(torch.bool) for leaf in without_shared(x._leaves).values()]
    every = torch.stack([answer.to(found[0].device) for answer in found]) if found else torch.empty(0, device=x.device)
    return op(every).view([1] * dims_of(x)) if keepdim else op(every)


def bound(op: Op, how: Along, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, without the one that torch's Python functions add to every call; too many are refused."""
    given = {k: v for k, v in kwargs.items() if k != "_stacklevel"}
    if len(args) > len(how.names):
        got = f"{len(args)} of them"
        raise UnsupportedError(message(op, f"the arguments {', '.join(how.names)}", got, hint="leave the others out"))
    return {**{name: a for name, a in zip(how.names, args, strict=False)}, **given}  # no call of dict: 2 ms to trace


def batch_dims(op: Op, dim: Any, ndim: int, several: bool) -> int | tuple[int, ...] | None:
    """Batch dims counted from the front, several only where torch takes them; None for all of them."""
    if dim is None or dim == ():
        return None
    if isinstance(dim, int) and not isinstance(dim, bool):
        return normal_dim(dim, ndim, op)
    if several and isinstance(dim, (tuple, list)):
        return tuple([normal_dim(d, ndim, op) for d in dim])
    hint = "name the argument, e.g. unbiased=False" if isinstance(dim, bool) else "flatten batch dims first"
    raise ShapeError(message(op, "one batch dim", f"{dim}", hint=hint))


def all_as_one(run: Op, leaf: Any, ndim: int, keepdim: bool = False, **given: Any) -> Any:
    """An operation along all batch dims as one; with `keepdim` they stay, with size 1."""
    flat = leaf if ndim == 1 else leaf.flatten(0, ndim - 1) if ndim else leaf.unsqueeze(0)
    out = run(flat, dim=0, **given)
    if not keepdim or not ndim:
        return out

    def kept(part: Tensor) -> Tensor:
        at = part.ndim - leaf.ndim + ndim  # in front of the features
        return part.view(*part.shape[:at], *[1] * ndim, *part.shape[at:])

    return map_results(out, kept)


def spread_over(op: Op, name: str, value: Any, features: Any, count: int) -> Any:
    """A dense operand with `count` batch dims, extended over the features of a leaf; numbers as they are."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    if value.ndim != count:
        expected = f"{name} with {count} batch dim{'s' if count != 1 else ''}"
        raise ShapeError(message(op, expected, describe(value), hint="it is extended over the features of each leaf"))
    return value.view(*value.shape, *[1] * len(features)).expand(*value.shape, *features)


PLAIN = (RuntimeError, IndexError, TypeError)
