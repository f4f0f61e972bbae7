"""What all optimisers share: their types, the state they begin with, and the update.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tdc.compile.upstream import traced
from tdc.core.arguments import expect
from tdc.core.dtypes import HALF
from tdc.core.dynamo import constant
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message, refuse_wrong, show_sizes
from tdc.core.keys import show
from tdc.core.typing import KeyPath
from tdc.optim.foreach import Column, Scalar
from tdc.tensordict.paths import gathered, prefixed, replaced
from tdc.tensordict.storage import same_size
from tdc.tensordict.tensordict import TensorDict, build_td

Schedule: TypeAlias = Callable[[Tensor], Tensor]
Rate: TypeAlias = "float | Tensor | Schedule"
Many: TypeAlias = Callable[..., tuple[Column, ...]]
Scalars: TypeAlias = Callable[[Any, Tensor], tuple[Scalar, ...]]
DOUBLE = {torch.float64, torch.complex128}


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Two functions: `init(params) -> state` and `update(grads, state, params) -> (params, state)`.

    Shapes:
        parameters, gradients and moments `(*batch_size, *features)`, step `batch_size`.

    Raises:
        StructureError, DtypeError, ShapeError: in `update`, gradients or a state of other parameters.

    Compile:
        fullgraph, one graph for all steps (the step count is a tensor); vmap over stacked parameters and states.
    """

    init: Callable[[TensorDict], TensorDict]
    update: Callable[[TensorDict, TensorDict, TensorDict], tuple[TensorDict, TensorDict]]


@dataclass(frozen=True, slots=True)
class Transform:
    """Two functions: `init(params) -> state` and `update(grads, state, params) -> (grads, state)`."""

    init: Callable[[TensorDict], TensorDict]
    update: Callable[[TensorDict, TensorDict, TensorDict], tuple[TensorDict, TensorDict]]


def optimizer(op: str, lr: Rate, names: tuple[str, ...], many: Many, scalars: Scalars) -> Optimizer:
    """An optimiser with moments of these names.

    `scalars` get the learning rate and the number of this step, from 1, with the digits that the parameters have.
    """

    def init(params: TensorDict) -> TensorDict:
        return begin(params, names)

    def update(grads: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
        def given(n: Tensor) -> tuple[Scalar, ...]:
            rate = lr(state["step"]) if callable(lr) else lr
            if isinstance(rate, Tensor) and rate.ndim and rate.shape != params.batch_size:
                hint = "a tensor for stacked parameters outside of vmap, which optimisers take as they are"
                got = f"{describe(rate)} for batch_size {show_sizes(params.batch_size)}"
                raise ShapeError(message(op, "a learning rate of one number, or one for each member", got, hint=hint))
            return scalars(rate, n)

        return updated(op, many, grads, state, params, names, given)

    return Optimizer(init, update)


def begin(params: TensorDict, names: tuple[str, ...]) -> TensorDict:
    """The state before the first step: zeros for each moment, and step 0 for each member."""
    expect("optim.init", params, TensorDict, of=" of parameters")
    moments = {name: params.apply(zeros) for name in names}
    devices = [p.device for p in params._leaves.values() if trainable(p)]
    step = torch.zeros(params.batch_size, dtype=torch.int64, device=devices[0] if devices else params.device)
    return TensorDict({**moments, "step": step}, params.batch_size)


def zeros(p: Any) -> Tensor | None:
    """Zeros for a parameter; None, and so no key, for what is not optimised."""
    return torch.zeros_like(p, dtype=wide(p.dtype)) if trainable(p) else None


def trainable(x: Any) -> bool:
    """Whether a leaf is a tensor with a gradient."""
    return isinstance(x, Tensor) and (x.dtype.is_floating_point or x.dtype.is_complex)


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
    grads: Sequence[KeyPath], params: Sequence[KeyPath], state: Sequence[KeyPath], names: Sequence[str]
) -> bool:
    """Whether a state has the moments of these gradients and nothing else, and all are of parameters."""
    moments = [p for name in names for p in prefixed(name, grads)]
    return {"step", *moments} == set(state) and set(params).issuperset(grads)


def updated(
    op: str, many: Many, grads: TensorDict, state: TensorDict, params: TensorDict, names: tuple[str, ...],
    scalars: Callable[[Tensor], tuple[Scalar, ...]],
) -> tuple[TensorDict, TensorDict]:  # fmt: skip
    """New parameters and state: `many` on all leaves of one dtype that have a gradient, the rest as it was."""
    for x in (grads, state, params):
        expect(op, x, TensorDict)
    columns = matching_columns(grads, state, params, names)
    if columns is None:
        check_state(op, state, params, (*names, "step"), names)
        check_grads(op, grads, params)
        columns = columns_of(grads, state, params, names)
    paths, step = list(grads._leaves), state._leaves["step"] + 1
    kinds = grouped([x.dtype for x in columns[0]])
    given = scalars(step.to(torch.float64 if any([dtype in DOUBLE for dtype, _ in kinds]) else torch.float32))
    if len(kinds) == 1:
        found = of_dtype(many, kinds[0][0], columns, given)
    else:
        found = [list(columns[0]), *[list(column) for column in columns[2:]]]
        for dtype, positions in kinds:
            some = of_dtype(many, dtype, [[column[i] for i in positions] for column in columns], given)
            for column, xs in zip(found, some, strict=True):
                for i, x in zip(positions, xs, strict=True):
                    column[i] = x
    after = {**state._leaves, "step": step}
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
    grads: TensorDict, state: TensorDict, params: TensorDict, names: tuple[str, ...]
) -> list[Column] | None:
    """Columns, where gradients, moments and parameters have the same keys and shapes; None where they do not.

    Of moments a graph looks at keys and dtypes alone: comparing all shapes is a fifth of what such a step takes to
    trace.
    """
    if not matching(list(grads._leaves), list(params._leaves), list(state._leaves), names):
        return None
    if grads._size != params._size or state._leaves["step"].shape != params._size:
        return None
    columns = columns_of(grads, state, params, names)
    if not all([isinstance(x, Tensor) and (x.dtype.is_floating_point or x.dtype.is_complex) for x in columns[0]]):
        return None
    known = columns[:1] if traced() else columns
    if any([[x.shape for x in c] != [g.shape for g in columns[1]] for c in known]):
        return None
    return columns


def of_dtype(many: Many, dtype: torch.dtype, columns: list[Column], scalars: tuple[Scalar, ...]) -> list[Column]:
    """`many` in the wide dtype, on pairs of reals where parameters are complex; the results in the dtypes before."""
    if dtype.is_complex:
        new, *moments = many(*[[torch.view_as_real(x.to(dtype)) for x in column] for column in columns], *scalars)
        return [[torch.view_as_complex(x) for x in column] for column in (new, *moments)]
    if dtype in HALF or any([g.dtype != dtype for g in columns[1]]):
        columns = [[x.to(wide(dtype)) for x in column] for column in columns]
    new, *moments = many(*columns, *scalars)
    return [[x.to(dtype) for x in new] if dtype in HALF else new, *moments]


# -- checks


def check_grads(op: str, grads: TensorDict, params: TensorDict) -> None:
    """Refuse gradients of other keys, kinds or shapes than the parameters; every one is named."""
    same_size(op, params, grads)
    theirs, hint = params._leaves, "take them with tdc.grad of these parameters"
    stray = {show(p): describe(g) for p, g in grads._leaves.items() if p not in theirs}
    refuse_wrong(StructureError, op, "gradients of keys that params has", stray, "of other keys", hint)
    fixed = {show(p): describe(theirs[p]) for p in grads._leaves if not trainable(theirs[p])}
    cure = "leave these out of grads"
    refuse_wrong(DtypeError, op, "gradients of floating-point tensors", fixed, "of other kinds", cure)
    wrong = {p: g for p, g in grads._leaves.items() if g.shape != theirs[p].shape}
    at = {show(p): f"gradient {describe(g)}, parameter {describe(theirs[p])}" for p, g in wrong.items()}
    refuse_wrong(ShapeError, op, "gradients with the shapes of params", at, "that differ", hint)


def check_state(op: str, state: TensorDict, params: TensorDict, keys: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Refuse a state of another optimiser or of other parameters; every difference is named."""
    found = state.keys()
    if set(found) != set(keys):
        got, hint = f"keys {', '.join(found) or 'none'}", "make the state with init of the same optimiser"
        raise StructureError(message(op, f"a state with keys {', '.join(keys)}", got, hint=hint))
    wrong: dict[str, str] = {}
    for name in names:
        wrong |= differing(state[name], params, f"{name}.")
    if "step" in keys and state["step"].shape != params.batch_size:
        wrong["step"] = f"{describe(state['step'])}, in params batch_size {show_sizes(params.batch_size)}"
    hint = "make the state with init(params) of these parameters"
    refuse_wrong(StructureError, op, "a state of these params", wrong, "leaves that differ", hint)


def differing(moments: TensorDict, params: TensorDict, prefix: str = "") -> dict[str, str]:
    """Where moments do not fit parameters, `{key path: what is there}`."""
    here = moments._leaves
    if list(here) == list(params._leaves) and all([here[p].shape == x.shape for p, x in params._leaves.items()]):
        return {}
    there = {p: x for p, x in params._leaves.items() if trainable(x)}
    paths: list[KeyPath] = [p for p, x in there.items() if p not in here or here[p].shape != x.shape]
    paths += [p for p in here if p not in there]
    return {
        f"{prefix}{show(p)}": f"{describe(here[p]) if p in here else 'nothing'}, in params "
        f"{describe(there[p]) if p in there else 'nothing'}"
        for p in paths
    }


def pair_of(op: str, betas: Any) -> tuple[float, float]:
    """The decay rates of two means, each in [0, 1)."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        got = f"{len(betas)} of them" if isinstance(betas, (tuple, list)) else describe(betas)
        raise DtypeError(message(op, "two numbers as betas", got, hint="betas=(0.9, 0.999)"))
    check_numbers(op, below=1.0, beta1=betas[0], beta2=betas[1])
    return betas[0], betas[1]


def check_numbers(op: str, *, below: float | None = None, **numbers: Any) -> None:
    """Refuse settings below 0, or not less than `below`. Tensors and schedules are not looked at."""
    others = {
        name: describe(x) for name, x in numbers.items() if not (isinstance(x, (int, float, Tensor)) or callable(x))
    }
    refuse_wrong(DtypeError, op, "numbers", others, "others", "a float, e.g. lr=1e-3")
    given = {name: x for name, x in numbers.items() if isinstance(x, (int, float))}
    wrong = [f"{name}={x:g}" for name, x in given.items() if not (x >= 0 and (below is None or x < below))]
    if wrong:
        expected = "numbers of at least 0" if below is None else f"numbers in [0, {below:g})"
        raise StructureError(message(op, expected, ", ".join(wrong), hint="give one in that range"))
