"""`optimizer` makes an optimiser of a function on columns, lists of tensors of one dtype (see `foreach`).

    many(ps, gs, *moments, *scalars) -> (ps, *moments)      for the leaves that have a gradient

    k batch dims: none for one model; (K,) for K stacked ones
    parameters, gradients, moments (*k, *features)        step, learning rate, other scalars (*k,)

Invariants:
  - a parameter without a gradient, and its moments, are the same objects before and after;
  - moments and arithmetic of bfloat16 and float16 parameters are float32; complex numbers are pairs of reals;
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
from tdc.optim.checks import check_grads, check_rate, check_state, check_td, trainable
from tdc.optim.foreach import Column, Scalar
from tdc.optim.transform import Optimizer, Rate, maker_of, rate_at
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
        scalars: `(rate, step from 1, *kept) -> (*kept, *scalars)`, the numbers that `many` gets after the columns.
        start: functions of a parameter that make moments before the first step; the others are zeros.
        kept: numbers in the state beside the step, and their first values.
        features: for an optimiser that is not elementwise: `many` takes the number of batch dims first, and
            `features(op, leaves, batch dims)` refuses unsuitable parameters.
        own_shapes: True if moments have other shapes than the parameters.
        warmup: number of steps of a linear rise of the rate.
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

    shown = f"{lr:g}" if isinstance(lr, (int, float)) else maker_of(lr)
    name = f"{op.rpartition('.')[2]}(lr={shown})"
    return Optimizer(init, update, rates=rates, elementwise=features is None and not own_shapes, name=name)


def begin(
    params: TensorDict, names: tuple[str, ...], start: Mapping[str, Start], kept: Mapping[str, float]
) -> TensorDict:
    """The state before the first step."""
    moments = {}
    for name in names:
        make = start.get(name, zeros)
        moments[name] = params.apply(lambda p, make=make: make(p) if trainable(p) else None)
    step, dtype = first_step(params)
    numbers = {name: torch.full_like(step, x, dtype=dtype) for name, x in kept.items()}
    return TensorDict({**moments, **numbers, "step": step}, params.batch_size)


def first_step(params: TensorDict) -> tuple[Tensor, torch.dtype]:
    """Step 0 of each model, and the dtype of other numbers in a state."""
    tensors = [p for p in params._leaves.values() if trainable(p)]
    device = tensors[0].device if tensors else params.device
    dtype = torch.float64 if any([p.dtype in DOUBLE for p in tensors]) else torch.float32
    return torch.zeros(params.batch_size, dtype=torch.int64, device=device), dtype


def zeros(p: Tensor) -> Tensor:
    """Zeros for a parameter."""
    return torch.zeros_like(p, dtype=wide(p.dtype))


@constant
def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of moments and of arithmetic."""
    return torch.float32 if dtype in HALF else dtype


@constant
def grouped(dtypes: Sequence[Any]) -> tuple[tuple[Any, tuple[int, ...]], ...]:
    """Positions of each dtype: `((torch.float32, (0, 2)), (torch.float64, (1,)))`."""
    kinds: dict[torch.dtype, list[int]] = {}
    for i, dtype in enumerate(dtypes):
        kinds.setdefault(dtype, []).append(i)
    return tuple([(dtype, tuple(positions)) for dtype, positions in kinds.items()])


@constant
def matching(
    grads: Sequence[KeyPath], params: Sequence[KeyPath], state: Sequence[KeyPath], names: Sequence[str],
    kept: Sequence[str],
) -> bool:  # fmt: skip
    """True if a state has the moments of these gradients and nothing else, and params has their keys."""
    moments = [p for name in names for p in prefixed(name, grads)]
    return {"step", *kept, *moments} == set(state) and set(params).issuperset(grads)


def updated(
    op: str, many: Many, grads: TensorDict, state: TensorDict, params: TensorDict, names: tuple[str, ...],
    kept: tuple[str, ...], scalars: Callable[[Tensor], tuple[Scalar, ...]], own_shapes: bool,
) -> tuple[TensorDict, TensorDict]:  # fmt: skip
    """New parameters and state: `many` on the leaves of each dtype that have a gradient."""
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
    """Columns of parameters, gradients, and moments of each name."""
    paths = list(grads._leaves)
    moments = [gathered(state._leaves, paths, name) for name in names]
    return [gathered(params._leaves, paths), list(grads._leaves.values()), *moments]


def matching_columns(
    grads: TensorDict, state: TensorDict, params: TensorDict, names: tuple[str, ...], kept: tuple[str, ...],
    keys_only: bool,
) -> list[Column] | None:  # fmt: skip
    """Columns if gradients, moments and parameters have the same keys and shapes, else None.

    With `keys_only` the shapes of moments are not compared, a fifth of the time to trace a step.
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
    """True if all are floating-point or complex dtypes."""
    return all([dtype is not None and (dtype.is_floating_point or dtype.is_complex) for dtype in dtypes])


def of_dtype(many: Many, dtype: torch.dtype, columns: list[Column], scalars: tuple[Scalar, ...]) -> list[Column]:
    """`many` in the wide dtype, of complex parameters on pairs of reals; results in the dtypes of its arguments."""
    if dtype.is_complex:
        new, *moments = many(*[[torch.view_as_real(x.to(dtype)) for x in column] for column in columns], *scalars)
        return [[torch.view_as_complex(x) for x in column] for column in (new, *moments)]
    within = wide(dtype)
    if within != dtype or any([g.dtype != dtype for g in columns[1]]):
        columns = [[x.to(within) for x in column] for column in columns]
    new, *moments = many(*columns, *scalars)
    return [[x.to(dtype) for x in new] if within != dtype else new, *moments]


def of_columns(td: TensorDict, fn: Callable[..., Column], *others: TensorDict) -> TensorDict:
    """`fn` on the floating-point leaves of each dtype and those of others at the same keys, in wide dtypes."""
    kinds = [x.dtype if isinstance(x, Tensor) else None for x in td._leaves.values()]
    leaves, paths = dict(td._leaves), list(td._leaves)
    for dtype, positions in grouped(kinds):
        if dtype is not None and (dtype.is_floating_point or dtype.is_complex):
            own = [paths[i] for i in positions]
            columns = [cast([x._leaves[p] for p in own], wide(dtype)) for x in (td, *others)]
            leaves |= {p: x for p, x in zip(own, cast(fn(*columns), dtype), strict=True)}
    return build_td(leaves, td._nodes, td._size, td._device)


def cast(xs: Column, dtype: torch.dtype) -> Column:
    """A column in a dtype; the column itself if it has it, since a conversion takes as long to trace as a product."""
    return xs if not [x for x in xs if x.dtype != dtype] else [x.to(dtype) for x in xs]
