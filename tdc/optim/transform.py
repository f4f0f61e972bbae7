"""`Transform`, of which all optimisers are made, and the checks that they share.

    init(params) -> state
    update(updates, state, params) -> (updates, state)

    clip_by_global_norm      gradients  -> gradients
    adamw, sgd, ...          gradients  -> parameters     an optimiser
    ema, lookahead           parameters -> parameters     with the parameters before the step beside them

Invariants:
  - nothing is changed in place; a check looks at keys, dtypes and shapes, never at values;
  - a parameter without an update stays the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message, refuse_wrong, show_sizes
from tdc.core.keys import show
from tdc.core.typing import KeyPath
from tdc.tensordict.storage import same_size
from tdc.tensordict.tensordict import TensorDict

Schedule: TypeAlias = Callable[[Tensor], Tensor]
Rate: TypeAlias = "float | Tensor | Schedule"
Update: TypeAlias = Callable[[TensorDict, TensorDict, TensorDict], tuple[TensorDict, TensorDict]]
Rates: TypeAlias = Callable[[TensorDict], dict[str, Tensor]]
GRADIENTS, PARAMETERS = "gradients", "parameters"


def rate_at(lr: Rate, step: Tensor, dtype: torch.dtype) -> float | Tensor:
    """The rate of a step; schedules of float64 parameters count in float64."""
    if not callable(lr):
        return lr
    return lr(step.to(dtype) if dtype == torch.float64 else step)


def no_rates(state: TensorDict) -> dict[str, Tensor]:
    """No learning rates."""
    return {}


@dataclass(frozen=True, slots=True, repr=False)
class Transform:
    """Two functions: `init(params) -> state` and `update(updates, state, params) -> (updates, state)`.

    Shapes:
        parameters, updates and moments `(*batch_size, *features)`, numbers of a state such as the step `batch_size`.

    Args:
        takes, gives: kind of the updates before and after, "gradients" or "parameters".
        rates: `state -> {name: rate}`, learning rates of the next update by the keys of parts; "" is its own.
        elementwise: True if a new number depends only on numbers at its own position.
        process_group: processes of `sharded`, whose states differ.
        name: shown by repr; that of the function it was made in by default.

    Raises:
        StructureError, DtypeError, ShapeError: in `update`, updates or a state of other parameters.

    Compile:
        fullgraph, one graph for all steps (the step count is a tensor); vmap over stacked parameters and states.

    Source:
        `optax.GradientTransformation`.
    """

    init: Callable[[TensorDict], TensorDict]
    update: Update
    takes: str = GRADIENTS
    gives: str = GRADIENTS
    rates: Rates = no_rates
    elementwise: bool = False
    process_group: Any = None
    name: str = ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.title})"

    @property
    def title(self) -> str:
        """The name, such as "adamw(lr=0.001)"."""
        return self.name or maker_of(self.update)


@dataclass(frozen=True, slots=True, repr=False)
class Optimizer(Transform):
    """A `Transform` of gradients into new parameters: `update(grads, state, params) -> (params, state)`."""

    gives: str = PARAMETERS


def maker_of(fn: Any) -> str:
    """The function that a function was made in, by name: "cosine" of `cosine(3e-4, steps=100)`."""
    return str(getattr(fn, "__qualname__", type(fn).__name__)).partition(".")[0]


def of_parts(parts: Mapping[str, Transform], init: Callable[[TensorDict], TensorDict], update: Update) -> Transform:
    """A transform of parts in order, with their states by name; an `Optimizer` if it makes parameters of gradients."""
    own = list(parts.values())
    first, last = own[0], own[-1]
    kind = Optimizer if (first.takes, last.gives) == (GRADIENTS, PARAMETERS) else Transform
    elementwise = all([part.elementwise for part in own])
    name = f"{maker_of(update)}({', '.join([part.title for part in own])})"
    return kind(init, update, first.takes, last.gives, rates_of(parts), elementwise, group_of(parts), name)


def around(
    inner: Transform, init: Callable[[TensorDict], TensorDict], update: Update, elementwise: bool = False,
    process_group: Any = None,
) -> Optimizer:  # fmt: skip
    """An optimiser around another, whose state is at "inner"."""
    group = inner.process_group if process_group is None else process_group
    name, rates = f"{maker_of(update)}({inner.title})", rates_of({"inner": inner})
    return Optimizer(init, update, rates=rates, elementwise=elementwise, process_group=group, name=name)


def group_of(parts: Mapping[str, Transform]) -> Any:
    """Process group of a sharded part; None without one."""
    return next((part.process_group for part in parts.values() if part.process_group is not None), None)


def rates_of(parts: Mapping[str, Transform]) -> Rates:
    """Rates of parts by name; without the name if only one part has rates."""

    def rates(state: TensorDict) -> dict[str, Tensor]:
        found = {name: part.rates(state[name]) for name, part in parts.items()}
        telling = {name: own for name, own in found.items() if own}
        if len(telling) == 1:
            return next(iter(telling.values()))
        return {f"{name}.{path}".rstrip("."): x for name, own in telling.items() for path, x in own.items()}

    return rates


def stateless(update: Callable[[TensorDict, TensorDict], TensorDict], elementwise: bool = False) -> Transform:
    """A transform of gradients, `(grads, params) -> grads`, with an empty state."""
    return Transform(
        lambda params: TensorDict({}, params.batch_size),
        lambda grads, state, params: (update(grads, params), state),
        elementwise=elementwise,
        name=maker_of(update),
    )


# -- checks


def trainable(x: Any) -> bool:
    """True for a floating-point or complex tensor."""
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
