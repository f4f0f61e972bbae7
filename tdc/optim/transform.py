"""`Transform`, of which all optimisers are made.

    init(params) -> state
    update(updates, state, params) -> (updates, state)

    clip_by_global_norm      gradients  -> gradients
    adamw, sgd, ...          gradients  -> parameters     an optimiser
    ema, lookahead           parameters -> parameters     with the parameters before the step beside them

Invariant: nothing is changed in place; a parameter without an update stays the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from tdc.core.errors import DtypeError, MethodError, describe, message
from tdc.tensordict.tensordict import TensorDict

Schedule: TypeAlias = Callable[[Tensor], Tensor]
Rate: TypeAlias = "float | Tensor | Schedule"
Update: TypeAlias = Callable[[TensorDict, TensorDict, TensorDict], tuple[TensorDict, TensorDict]]
Rates: TypeAlias = Callable[[TensorDict], dict[str, Tensor]]
GRADIENTS, PARAMETERS = "gradients", "parameters"
P = ParamSpec("P")
Out = TypeVar("Out")
OF_TORCH = {  # attributes of torch's optimisers, and what to write instead
    "step": "params, state = opt.update(grads, state, params), or tdc.compile.train_step(net, loss_fn, opt)",
    "zero_grad": "leave it out: tdc.value_and_grad returns new gradients",
    "param_groups": "tdc.optim.partition({name: optimizer}, labels); opt.rates(state) has learning rates",
    "add_param_group": "tdc.optim.partition({name: optimizer}, labels)",
    "state_dict": "tdc.interop.to_state_dict(state), the state from opt.init and opt.update",
    "load_state_dict": "pass the state itself: opt.update(grads, state, params)",
    "state": "state = opt.init(params), which opt.update takes and returns",
}


def without_parameters(what: str, example: str) -> Callable[[Callable[P, Out]], Callable[P, Out]]:
    """Decorate a function of numbers: refuse parameters in front of them, where `torch.optim` has them.

    Args:
        what: the argument in front, in words.
        example: a call that makes an optimiser, `{name}` being the function.
    """

    def decorate(fn: Callable[P, Out]) -> Callable[P, Out]:
        @wraps(fn)
        def make(*args: P.args, **kwargs: P.kwargs) -> Out:
            first = args[0] if args else None
            if isinstance(first, (torch.nn.Module, Iterable)) and not isinstance(first, (Tensor, str)):
                hint = f"opt = {example.format(name=fn.__name__)}, then tdc.compile.train_step(net, loss_fn, opt)"
                raise DtypeError(message(f"optim.{fn.__name__}", f"{what} first", describe(first), hint=hint))
            return fn(*args, **kwargs)

        return make

    return decorate


takes_rate = without_parameters("a learning rate", "tdc.optim.{name}(lr=1e-3)")
takes_bound = without_parameters("a bound", "tdc.optim.chain(tdc.optim.{name}(1.0), tdc.optim.adamw(1e-3))")


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
        across: of one that is not elementwise, a function that makes it of a process group, for leaves of which each
            process has a part: its norms are those of all processes.

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
    across: Callable[[Any], Any] | None = None

    def over(self, process_group: Any) -> Any:
        """This transform for leaves of which each process of a group has a part; None if it cannot be."""
        return self if self.elementwise else None if self.across is None else self.across(process_group)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.title})"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            hint = OF_TORCH.get(name, "init and update")
            raise MethodError(message("optim", f"an attribute of {type(self).__name__}", f"opt.{name}", hint=hint))

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


def stateless(
    update: Callable[[TensorDict, TensorDict], TensorDict], elementwise: bool = False,
    across: Callable[[Any], Any] | None = None,
) -> Transform:  # fmt: skip
    """A transform of gradients, `(grads, params) -> grads`, with an empty state."""
    return Transform(
        lambda params: TensorDict({}, params.batch_size),
        lambda grads, state, params: (update(grads, params), state),
        elementwise=elementwise,
        name=maker_of(update),
        across=across,
    )
