"""What all optimisers share: their types, the state they begin with, and the update leaf by leaf.

An optimiser is a function `one(p, g, *moments, *scalars) -> (p, *moments)` on plain tensors. `updated` runs it on every
leaf that has a gradient: one loop, because `lerp`, `addcmul` and their like do in one graph node what arithmetic of
TensorDicts does in two or three.

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
from tdc._keys import show
from tdc._tree import same_size
from tdc._typing import KeyPath
from tdc.tensordict import TensorDict, make

Schedule: TypeAlias = Callable[[Tensor], Tensor]
Rate: TypeAlias = "float | Tensor | Schedule"
Scalar: TypeAlias = "float | Tensor"
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


def counted_from_one(state: TensorDict, params: TensorDict) -> Tensor:
    """The number of this step, from 1, as a float with the digits that the parameters have."""
    double = any([p.dtype in DOUBLE for p in params._leaves.values() if trainable(p)])
    return (state["step"] + 1).to(torch.float64 if double else torch.float32)


def rate_of(lr: Rate, step: Tensor) -> Scalar:
    """The learning rate of a step."""
    return lr(step) if callable(lr) else lr


def fitted(scalar: Scalar, x: Tensor) -> Any:
    """A scalar that combines with a leaf: of its dtype, extended over its features."""
    if not isinstance(scalar, Tensor):
        return scalar
    scalar = scalar if scalar.dtype == x.dtype else scalar.to(x.dtype)
    return scalar.view(*scalar.shape, *[1] * (x.ndim - scalar.ndim)) if scalar.ndim else scalar


def descend(p: Tensor, direction: Tensor, rate: Scalar) -> Tensor:
    """`p - rate * direction`, in one graph node."""
    if isinstance(rate, Tensor):
        return torch.addcmul(p, direction, rate, value=-1)
    return plus(p, direction, -rate)


def plus(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """`x + alpha * y`, in one graph node.

    Not `torch.add`: Inductor makes `addmm` of the sum of anything and a matrix product, which a gradient is, and loses
    the alpha (torch 2.11-2.13, `post_grad.addmm`). A difference it leaves alone.
    """
    return torch.sub(x, y, alpha=-alpha)


def updated(
    op: str, one: Callable[..., tuple[Tensor, ...]], grads: TensorDict, state: TensorDict, params: TensorDict,
    names: tuple[str, ...], scalars: tuple[Scalar, ...],
) -> tuple[TensorDict, TensorDict]:  # fmt: skip
    """New parameters and state: `one` on every leaf that has a gradient, everything else as it was."""
    check_state(op, state, params, (*names, "step"), names)
    check_grads(op, grads, params)
    before = [params, *[state[name] for name in names]]
    after = [dict(td._leaves) for td in before]
    for path, g in grads._leaves.items():
        found = one_leaf(one, g, [td._leaves[path] for td in before], scalars)
        for leaves, x in zip(after, found, strict=True):
            leaves[path] = x
    new, *moments = [make(leaves, td._nodes, td._size, td._device) for leaves, td in zip(after, before, strict=True)]
    entries = dict(zip(names, moments, strict=True))
    return new, TensorDict({**entries, "step": state["step"] + 1}, params.batch_size)


def one_leaf(
    one: Callable[..., tuple[Tensor, ...]], g: Tensor, before: list[Tensor], scalars: tuple[Scalar, ...]
) -> list[Tensor]:
    """`one` in the wide dtype, on pairs of reals where the parameter is complex; the results in the dtypes before."""
    dtype = before[0].dtype
    if dtype.is_complex:
        g, *before = [torch.view_as_real(x) for x in (g.to(dtype), *before)]
    elif dtype in HALF or g.dtype != dtype:
        g, *before = [x.to(wide(dtype)) for x in (g, *before)]
    new, *moments = one(before[0], g, *before[1:], *[fitted(s, before[0]) for s in scalars])
    if dtype.is_complex:
        return [torch.view_as_complex(x) for x in (new, *moments)]
    return [new.to(dtype), *moments]


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
