"""Checks that optimisers share. They look at keys, dtypes and shapes, never at values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tdc.core.errors import (
    DtypeError,
    ShapeError,
    StructureError,
    UnsupportedError,
    describe,
    message,
    refuse_wrong,
    show_sizes,
)
from tdc.core.keys import show
from tdc.core.typing import KeyPath
from tdc.optim.transform import Optimizer, Transform
from tdc.tensordict.shared import Shared
from tdc.tensordict.storage import same_size
from tdc.tensordict.tensordict import TensorDict


def trainable(x: Any) -> bool:
    """True for a floating-point or complex tensor; a Shared is refused, since steps and moments are those of rows."""
    if type(x) is Shared:
        hint = "td.set(key, td[key]) without batch dims, or parameters of their own for it"
        raise UnsupportedError(message("optim", "parameters that are plain leaves", describe(x), hint=hint))
    return isinstance(x, Tensor) and (x.dtype.is_floating_point or x.dtype.is_complex)


def given(number: Any) -> bool:
    """True for a tensor or a number other than 0."""
    return isinstance(number, Tensor) or number != 0


def check_transform(op: str, x: Any, *, optimizer: bool = False) -> None:
    """Refuse anything but a transform, or with `optimizer` an optimiser."""
    cls, hint = (Optimizer, "adamw(1e-3)") if optimizer else (Transform, "clip_by_global_norm(1.0), or adamw(1e-3)")
    if not isinstance(x, cls):
        raise DtypeError(message(op, f"a{'n' * optimizer} {cls.__name__}", describe(x), hint=hint))


def check_td(op: str, *tds: Any) -> None:
    """Refuse anything but TensorDicts."""
    for x in tds:
        if not isinstance(x, TensorDict):
            hint = "tdc.from_module(net), or TensorDict({'key': tensor})"
            raise DtypeError(message(op, "a TensorDict", describe(x), hint=hint))


def check_grads(op: str, grads: TensorDict, params: TensorDict) -> None:
    """Refuse gradients of other keys, kinds or shapes than the parameters; all are named."""
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


def check_keys(op: str, state: TensorDict, keys: tuple[str, ...]) -> None:
    """Refuse a state with other entries at the top."""
    check_td(op, state)
    found = state.keys()
    if set(found) != set(keys):
        got, hint = f"keys {', '.join(found) or 'none'}", "make the state with init of the same optimiser"
        raise StructureError(message(op, f"a state with keys {', '.join(keys)}", got, hint=hint))


def check_state(
    op: str, state: TensorDict, params: TensorDict, moments: tuple[str, ...], numbers: tuple[str, ...],
    own_shapes: bool = False,
) -> None:  # fmt: skip
    """Refuse a state of another optimiser or of other parameters; every difference is named."""
    check_keys(op, state, (*moments, *numbers))
    wrong: dict[str, str] = {}
    for name in moments:
        wrong |= differing(state[name], params, f"{name}.", own_shapes)
    for name in numbers:
        if state[name].shape != params.batch_size:
            wrong[name] = f"{describe(state[name])}, in params batch_size {show_sizes(params.batch_size)}"
    refuse_differing(op, wrong)


def check_copies(op: str, name: str, state: TensorDict, params: TensorDict) -> None:
    """Refuse a state whose entry of this name does not fit the parameters."""
    refuse_differing(op, differing(state[name], params, f"{name}."))


def refuse_differing(op: str, wrong: dict[str, str], what: str = "a state") -> None:
    """Refuse moments that do not fit the parameters, as `differing` found."""
    hint = f"make the {what.split()[1]} with init(params) of these parameters"
    refuse_wrong(StructureError, op, f"{what} of these params", wrong, "leaves that differ", hint)


def differing(moments: TensorDict, params: TensorDict, prefix: str = "", own_shapes: bool = False) -> dict[str, str]:
    """Moments that do not fit parameters, by key path."""
    here = moments._leaves
    there = {p: x for p, x in params._leaves.items() if trainable(x)}
    paths: list[KeyPath] = [
        p for p, x in there.items() if p not in here or (here[p].shape != x.shape and not own_shapes)
    ]
    paths += [p for p in here if p not in there]
    return {
        f"{prefix}{show(p)}": f"{describe(here[p]) if p in here else 'nothing'}, in params "
        f"{describe(there[p]) if p in there else 'nothing'}"
        for p in paths
    }


def check_rate(op: str, rate: Any, params: TensorDict) -> None:
    """Refuse a rate that is neither one number nor one for each model."""
    if isinstance(rate, Tensor) and rate.ndim and rate.shape != params.batch_size:
        hint = "a tensor for stacked parameters outside of vmap, which optimisers take as they are"
        got = f"{describe(rate)} for batch_size {show_sizes(params.batch_size)}"
        raise ShapeError(message(op, "a learning rate of one number, or one for each model", got, hint=hint))


def pair_of(op: str, betas: Any) -> tuple[float, float]:
    """Two decay rates, each in [0, 1)."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        got = f"{len(betas)} of them" if isinstance(betas, (tuple, list)) else describe(betas)
        raise DtypeError(message(op, "two numbers as betas", got, hint="betas=(0.9, 0.999)"))
    check_numbers(op, below=1.0, beta1=betas[0], beta2=betas[1])
    return betas[0], betas[1]


def check_numbers(op: str, *, below: float | None = None, **numbers: Any) -> None:
    """Refuse settings below 0, or not less than `below`. Tensors and schedules are not checked."""
    others = {
        name: describe(x)
        for name, x in numbers.items()
        if not (isinstance(x, (int, float, Tensor)) or (name == "lr" and callable(x)))
    }
    refuse_wrong(DtypeError, op, "numbers", others, "others", "a float, e.g. lr=1e-3")
    plain = {name: x for name, x in numbers.items() if isinstance(x, (int, float))}
    wrong = [f"{name}={x:g}" for name, x in plain.items() if not (x >= 0 and (below is None or x < below))]
    if wrong:
        expected = "numbers of at least 0" if below is None else f"numbers in [0, {below:g})"
        raise StructureError(message(op, expected, ", ".join(wrong), hint="give one in that range"))
