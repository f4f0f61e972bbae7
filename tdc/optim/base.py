"""How an optimiser is written: the state it begins with, and the update.

An optimiser is a function `many(ps, gs, *moments, *scalars) -> (ps, *moments)` on columns, lists of plain tensors of
one dtype; see `foreach`. `optimizer` runs it on the leaves that have a gradient.

    k batch dims: none for one model; (K,) for K stacked ones
    parameters, gradients, moments (*k, *features)        step, learning rate, other scalars (*k,)

Invariants:
  - a parameter without a gradient, and its moments, are the same objects before and after;
  - moments of bfloat16 and float16 parameters, and the arithmetic, are float32; complex ones go as pairs of reals;
  - a check looks at keys, dtypes and shapes, never at values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tdc.compile.upstream import traced
from tdc.core.arguments import expect
from tdc.core.dtypes import HALF
from tdc.core.dynamo import constant
from tdc.core.typing import KeyPath
from tdc.optim.foreach import Column, Scalar
from tdc.optim.transform import (
    Optimizer,
    Rate,
    check_grads,
    check_rate,
    check_state,
    check_td,
    maker_of,
    rate_at,
    trainable,
)
from tdc.tensordict.paths import gathered, prefixed, replaced
from tdc.tensordict.tensordict import TensorDict, build_td

Many: TypeAlias = Callable[..., tuple[Column, ...]]
Scalars: TypeAlias = Callable[..., tuple[Scalar, ...]]
Start: TypeAlias = Callable[[Tensor], Tensor]
DOUBLE = {torch.float64, torch.complex128}


def optimizer(
    op: str, lr: Rate, names: tuple[str, ...], many: Many, scalars: Scalars, *,
    start: Mapping[str, Start] | None = None, kept: Mapping[str, float] | None = None,
    features: Callable[[str, Any, int], None] | None = None, own_shapes: bool = False, warmup: int = 0,
) -> Optimizer:  # fmt: skip
    """An optimiser with moments of these names.

    Args:
        scalars: takes the learning rate and the number of this step, from 1, with the digits that the parameters have,
            and returns what `many` gets behind the columns.
        start: moments before the first step, of the parameter; those of other names are zeros.
        kept: numbers in the state beside the step, and what they are before the first step. `scalars` takes them last
            and returns the new ones first.
        features: for what is not elementwise: `many` takes the number of batch dims before all else, and this function
            refuses parameters that it is not for, `(op, leaves, batch dims)`.
        own_shapes: whether moments have other shapes than the parameters.
        warmup: over how many steps the rate rises in a line.
    """
    numbers: dict[str, float] = dict(kept or {})

    def init(params: TensorDict) -> TensorDict:
        expect("optim.init", params, TensorDict, of=" of parameters")
        if features is not None:
            features(op, params._leaves, len(params._size))
        return begin(params, names, start or {}, numbers)

    def rate_of(step: Tensor, n: Tensor) -> Any:
        rate = rate_at(lr, step, n.dtype)
        return rate * (n / warmup).clamp(max=1.0) if warmup else rate

    def rates(state: TensorDict) -> dict[str, Tensor]:
        step = state["step"]
        n = (step + 1).to(torch.float32)
        return {"": torch.ones_like(n) * rate_of(step, n)}

    def update(grads: TensorDict, state: TensorDict, params: Any = None) -> tuple[TensorDict, TensorDict]:
        def found(n: Tensor) -> tuple[Scalar, ...]:
            rate = rate_of(state["step"], n)
            check_rate(op, rate, params)
            return scalars(rate, n, *[state[name] for name in numbers])

        check_td(op, grads, state, params)
        run = many
        if features is not None:
            features(op, grads._leaves, params.ndim)
            k = params.ndim

            def run(*args: Any) -> tuple[Column, ...]:
                return many(k, *args)

        return updated(op, run, grads, state, params, names, tuple(numbers), found, own_shapes)

    name = f"{op.rpartition('.')[2]}(lr={rate_text(lr)})"
    return Optimizer(init, update, rates=rates, elementwise=features is None and not own_shapes, name=name)


def rate_text(lr: Rate) -> str:
    """A learning rate as an optimiser prints it; a schedule by the function that made it."""
    return f"{lr:g}" if isinstance(lr, (int, float)) else maker_of(lr)


def begin(
    params: TensorDict, names: tuple[str, ...], start: Mapping[str, Start], kept: Mapping[str, float]
) -> TensorDict:
    """The state before the first step: a start for each moment, and numbers for each member."""
    made = [start.get(name, zeros) for name in names]
    moments = {
        name: params.apply(lambda p, make=make: make(p) if trainable(p) else None)
        for name, make in zip(names, made, strict=True)
    }
    tensors = [p for p in params._leaves.values() if trainable(p)]
    device, size = tensors[0].device if tensors else params.device, params.batch_size
    dtype = torch.float64 if any([p.dtype in DOUBLE for p in tensors]) else torch.float32
    numbers = {name: torch.full(size, x, dtype=dtype, device=device) for name, x in kept.items()}
    step = torch.zeros(size, dtype=torch.int64, device=device)
    return TensorDict({**moments, **numbers, "step": step}, size)


def zeros(p: Tensor) -> Tensor:
    """Zeros for a parameter."""
    return torch.zeros_like(p, dtype=wide(p.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which moments are kept and updates computed."""
    return torch.float32 if dtype in HALF else dtype


@constant
def grouped(dtypes: Sequence[Any]) -> tuple[tuple[Any, tuple[int, ...]], ...]:
    """Each dtype and the positions where it is: `((torch.float32, (0, 2)), (torch.float64, (1,)))`."""
    kinds: dict[torch.dtype, list[int]] = {}
    for i, dtype in enumerate(dtypes):
        kinds.setdefault(dtype, []).append(i)
    return tuple([(dtype, tuple(positions)) for dtype, positions in kinds.items()])


@constant
def matching(
    grads: Sequence[KeyPath], params: Sequence[KeyPath], state: Sequence[KeyPath], names: Sequence[str],
    kept: Sequence[str],
) -> bool:  # fmt: skip
    """Whether a state has the moments of these gradients and nothing else, and all are of parameters."""
    moments = [p for name in names for p in prefixed(name, grads)]
    return {"step", *kept, *moments} == set(state) and set(params).issuperset(grads)


def updated(
    op: str, many: Many, grads: TensorDict, state: TensorDict, params: TensorDict, names: tuple[str, ...],
    kept: tuple[str, ...], scalars: Callable[[Tensor], tuple[Scalar, ...]], own_shapes: bool,
) -> tuple[TensorDict, TensorDict]:  # fmt: skip
    """New parameters and state: `many` on all leaves of one dtype that have a gradient, the rest as it was."""
    columns = matching_columns(grads, state, params, names, kept, own_shapes or traced())
    if columns is None:
        check_state(op, state, params, names, (*kept, "step"), own_shapes)
        check_grads(op, grads, params)
        columns = columns_of(grads, state, params, names)
    paths, step = list(grads._leaves), state._leaves["step"] + 1
    kinds = grouped([x.dtype for x in columns[0]])
    given = scalars(step.to(torch.float64 if any([dtype in DOUBLE for dtype, _ in kinds]) else torch.float32))
    by = given[len(kept) :]
    if len(kinds) == 1:
        found = of_dtype(many, kinds[0][0], columns, by)
    else:
        found = [list(columns[0]), *[list(column) for column in columns[2:]]]
        for dtype, positions in kinds:
            some = of_dtype(many, dtype, [[column[i] for i in positions] for column in columns], by)
            for column, xs in zip(found, some, strict=True):
                for i, x in zip(positions, xs, strict=True):
                    column[i] = x
    after = {**state._leaves, "step": step, **dict(zip(kept, given, strict=False))}
    for name, column in zip(names, found[1:], strict=True):
        after = replaced(after, paths, column, name)
    new_params = build_td(replaced(params._leaves, paths, found[0]), params._nodes, params._size, params._device)
    return new_params, build_td(after, state._nodes, state._size, state._device)


def columns_of(grads: TensorDict, state: TensorDict, params: TensorDict, names: tuple[str, ...]) -> list[Column]:
    """The parameters that have gradients, the gradients, and the moments of each name."""
    paths = list(grads._leaves)
    moments = [gathered(state._leaves, paths, name) for name in names]
    return [gathered(params._leaves, paths), list(grads._leaves.values()), *moments]


def matching_columns(
    grads: TensorDict, state: TensorDict, params: TensorDict, names: tuple[str, ...], kept: tuple[str, ...],
    keys_only: bool,
) -> list[Column] | None:  # fmt: skip
    """Columns, where gradients, moments and parameters have the same keys and shapes; None where they do not.

    Of moments a graph looks at keys alone: comparing all shapes is a fifth of what such a step takes to trace.
    """
    if not matching(list(grads._leaves), list(params._leaves), list(state._leaves), names, kept):
        return None
    if grads._size != params._size or state._leaves["step"].shape != params._size:
        return None
    columns = columns_of(grads, state, params, names)
    if not inexact([x.dtype if isinstance(x, Tensor) else None for x in columns[0]]):
        return None
    known = columns[:1] if keys_only else columns
    if any([[x.shape for x in c] != [g.shape for g in columns[1]] for c in known]):
        return None
    return columns


@constant
def inexact(dtypes: Sequence[torch.dtype | None]) -> bool:
    """Whether all are dtypes of tensors that may have a gradient."""
    return all([dtype is not None and (dtype.is_floating_point or dtype.is_complex) for dtype in dtypes])


def of_dtype(many: Many, dtype: torch.dtype, columns: list[Column], scalars: tuple[Scalar, ...]) -> list[Column]:
    """`many` in the wide dtype, on pairs of reals where parameters are complex; the results in the dtypes before."""
    if dtype.is_complex:
        new, *moments = many(*[[torch.view_as_real(x.to(dtype)) for x in column] for column in columns], *scalars)
        return [[torch.view_as_complex(x) for x in column] for column in (new, *moments)]
    if dtype in HALF or any([g.dtype != dtype for g in columns[1]]):
        columns = [[x.to(wide(dtype)) for x in column] for column in columns]
    new, *moments = many(*columns, *scalars)
    return [[x.to(dtype) for x in new] if dtype in HALF else new, *moments]


def of_columns(td: TensorDict, fn: Callable[..., Column], *others: TensorDict) -> TensorDict:
    """`fn` on the floating-point leaves of each dtype, with those of others at the same keys, in wide dtypes."""
    kinds = [x.dtype if isinstance(x, Tensor) else None for x in td._leaves.values()]
    leaves, paths = dict(td._leaves), list(td._leaves)
    for dtype, positions in grouped(kinds):
        if dtype is not None and (dtype.is_floating_point or dtype.is_complex):
            own = [paths[i] for i in positions]
            columns = [cast([x._leaves[p] for p in own], wide(dtype)) for x in (td, *others)]
            leaves |= {p: x for p, x in zip(own, cast(fn(*columns), dtype), strict=True)}
    return build_td(leaves, td._nodes, td._size, td._device)


def cast(xs: Column, dtype: torch.dtype) -> Column:
    """A column in a dtype; the column itself where it has it: a conversion takes as long to trace as a product."""
    return xs if not [x for x in xs if x.dtype != dtype] else [x.to(dtype) for x in xs]
