"""What all optimisers share: their types, the state they begin with, and the update.

An optimiser is a function `many(ps, gs, *moments, *scalars) -> (ps, *moments)` on columns, lists of plain tensors of
one dtype; see `columns`. `updated` runs it on the leaves that have a gradient.

    k batch dims: none for one model; (K,) for K stacked ones
    parameters, gradients, moments (*k, *features)        step, learning rate, other scalars (*k,)

Invariants:
  - a parameter without a gradient, and its moments, are the same objects before and after;
  - moments of bfloat16 and float16 parameters, and the arithmetic, are float32; complex ones go as pairs of reals;
  - a check looks at keys, dtypes and shapes, never at values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tdc._errors import DtypeError, ShapeError, StructureError, describe, message, show_sizes
from tdc._keys import join, prefixed, show
from tdc._tree import same_size
from tdc._typing import KeyPath
from tdc.compile.upstream import traced
from tdc.optim.columns import Column, Scalar
from tdc.tensordict import TensorDict, make

Schedule: TypeAlias = Callable[[Tensor], Tensor]
Rate: TypeAlias = "float | Tensor | Schedule"
HALF = {torch.bfloat16, torch.float16}
DOUBLE = {torch.float64, torch.complex128}


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Two functions: `init(params) -> state` and `update(grads, state, params) -> (params, state)`."""

    init: Callable[[TensorDict], TensorDict]
    update: Callable[[TensorDict, TensorDict, TensorDict], tuple[TensorDict, TensorDict]]


@dataclass(frozen=True, slots=True)
class Transform:
    """Two functions: `init(params) -> state` and `update(grads, state, params) -> (grads, state)`."""

    init: Callable[[TensorDict], TensorDict]
    update: Callable[[TensorDict, TensorDict, TensorDict], tuple[TensorDict, TensorDict]]


def begin(params: TensorDict, names: tuple[str, ...]) -> TensorDict:
    """The state before the first step: zeros for each moment, and step 0 for each member."""
    moments = {name: params.apply(zeros) for name in names}
    places = [p.device for p in params._leaves.values() if trainable(p)]
    step = torch.zeros(params.batch_size, dtype=torch.int64, device=places[0] if places else params.device)
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


def rate_of(lr: Rate, step: Tensor) -> Scalar:
    """The learning rate of a step."""
    return lr(step) if callable(lr) else lr


def by_dtype(td: TensorDict, like: TensorDict) -> dict[torch.dtype, list[KeyPath]]:
    """The paths of `td`, apart by the dtype that `like` has there."""
    kinds: dict[torch.dtype, list[KeyPath]] = {}
    for path in td._leaves:
        kinds.setdefault(like._leaves[path].dtype, []).append(path)
    return kinds


def updated(
    op: str, many: Callable[..., tuple[Column, ...]], grads: TensorDict, state: TensorDict, params: TensorDict,
    names: tuple[str, ...], scalars: Callable[[Tensor], tuple[Scalar, ...]],
) -> tuple[TensorDict, TensorDict]:  # fmt: skip
    """New parameters and state: `many` on all leaves of one dtype that have a gradient, the rest as it was.

    Args:
        names: of the moments.
        scalars: of the number of this step, from 1: a float with the digits that the parameters have.
    """
    kinds = usual(grads, state, params, names)
    if kinds is None:
        check_state(op, state, params, (*names, "step"), names)
        check_grads(op, grads, params)
        kinds = by_dtype(grads, params)
    old, new, after = state._leaves, dict(params._leaves), dict(state._leaves)
    step = old["step"] + 1
    given = scalars(step.to(torch.float64 if any([dtype in DOUBLE for dtype in kinds]) else torch.float32))
    for dtype, paths in kinds.items():
        places = [prefixed(name, paths) for name in names]
        moments = [[old[p] for p in there] for there in places]
        columns = [[x._leaves[p] for p in paths] for x in (params, grads)]
        found, *rest = of_dtype(many, dtype, [*columns, *moments], given)
        new.update(zip(paths, found, strict=True))
        for there, column in zip(places, rest, strict=True):
            after.update(zip(there, column, strict=True))
    after["step"] = step
    new_params = make(new, params._nodes, params._size, params._device)
    return new_params, make(after, state._nodes, state._size, state._device)


def usual(
    grads: TensorDict, state: TensorDict, params: TensorDict, names: tuple[str, ...]
) -> dict[torch.dtype, list[KeyPath]] | None:
    """Paths by dtype, where gradients, moments and parameters have the same keys and shapes; None where they do not.

    One pass that calls nothing. A graph looks at keys and dtypes alone: comparing shapes is a fifth of what such a step
    takes to trace, and torch's own operations refuse sizes that do not go together.
    """
    theirs, moments, kinds = params._leaves, state._leaves, {}
    there = set(theirs)  # of our own: asking the dict of an argument whether it has a key makes a guard each time
    if set(moments) != {"step", *[p for name in names for p in prefixed(name, grads._leaves)]}:
        return None
    if grads._size != params._size:
        return None
    seen = not traced()
    for path, g in grads._leaves.items():
        x = theirs[path] if path in there else None
        if not isinstance(x, Tensor):
            return None
        if seen and (g.shape != x.shape or any([moments[join(name, path)].shape != x.shape for name in names])):
            return None
        kinds.setdefault(x.dtype, []).append(path)
    fine = all([dtype.is_floating_point or dtype.is_complex for dtype in kinds])
    return kinds if fine and moments["step"].shape == params._size else None


def of_dtype(
    many: Callable[..., tuple[Column, ...]], dtype: torch.dtype, columns: list[Column], scalars: tuple[Scalar, ...]
) -> list[Column]:
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
    """Gradients are of parameters that are there, floating-point, and of the same shape.

    Raises:
        StructureError, DtypeError, ShapeError: they are not; every one is named.
    """
    same_size(op, params, grads)
    theirs, hint = params._leaves, "take them with tdc.grad of these parameters"
    stray = {show(p): describe(g) for p, g in grads._leaves.items() if p not in theirs}
    if stray:
        got = f"{len(stray)} of other keys"
        raise StructureError(message(op, "gradients of keys that params has", got, stray, hint))
    fixed = {show(p): describe(theirs[p]) for p in grads._leaves if not trainable(theirs[p])}
    if fixed:
        got = f"{len(fixed)} of other kinds"
        raise DtypeError(message(op, "gradients of floating-point tensors", got, fixed, "leave these out of grads"))
    wrong = [p for p, g in grads._leaves.items() if g.shape != theirs[p].shape]
    if wrong:
        at = {show(p): f"gradient {describe(grads._leaves[p])}, parameter {describe(theirs[p])}" for p in wrong}
        raise ShapeError(message(op, "gradients with the shapes of params", f"{len(wrong)} that differ", at, hint))


def check_state(op: str, state: TensorDict, params: TensorDict, keys: tuple[str, ...], names: tuple[str, ...]) -> None:
    """A state has the keys of this optimiser, and moments with the keys and shapes of these parameters.

    Raises:
        StructureError: it is of another optimiser, or of other parameters; every difference is named.
    """
    found = state.keys()
    if set(found) != set(keys):
        got, hint = f"keys {', '.join(found) or 'none'}", "make the state with init of the same optimiser"
        raise StructureError(message(op, f"a state with keys {', '.join(keys)}", got, hint=hint))
    wrong: dict[str, str] = {}
    for name in names:
        wrong |= differing(state[name], params, f"{name}.")
    if "step" in keys and state["step"].shape != params.batch_size:
        wrong["step"] = f"{describe(state['step'])}, in params batch_size {show_sizes(params.batch_size)}"
    if wrong:
        hint = "make the state with init(params) of these parameters"
        raise StructureError(message(op, "a state of these params", f"{len(wrong)} leaves that differ", wrong, hint))


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


def check_numbers(op: str, *, below: float | None = None, **numbers: Any) -> None:
    """Settings are at least 0, and less than `below`. Tensors and schedules are not looked at.

    Raises:
        StructureError: one is not; every one is named.
    """
    given = {name: x for name, x in numbers.items() if isinstance(x, (int, float))}
    wrong = [f"{name}={x:g}" for name, x in given.items() if not (x >= 0 and (below is None or x < below))]
    if wrong:
        expected = "numbers of at least 0" if below is None else f"numbers in [0, {below:g})"
        raise StructureError(message(op, expected, ", ".join(wrong), hint="give one in that range"))
