"""Hyperparameters as part of the state: read, changed and checkpointed there, one for each member of an ensemble."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tdc.core.arguments import expect_function
from tdc.core.errors import DtypeError, message
from tdc.optim.base import DOUBLE
from tdc.optim.transform import Transform, check_keys, check_rate, check_td, check_transform, rate_at, trainable
from tdc.tensordict.tensordict import TensorDict

T = TypeVar("T", bound=Transform)


def inject(make: Callable[..., T], **settings: Any) -> T:
    """An optimiser or transform whose numbers are in its state: `state.set(("hyper", "lr"), tensor)` changes one.

    Args:
        make: `adamw`, `clip_by_global_norm`, or any function that makes a transform of settings, which may be tensors.
        settings: what `make` takes, by name. Floats and tensors go into the state. So do schedules: the state has the
            number of the last step, to be read. The rest, such as ints, bools and tuples, stays with the transform.

    Returns:
        A transform of the kind that `make` makes; its state is `{"inner": …, "hyper": {name: number}}`, with schedules
        also `"step"`.

    Raises:
        DtypeError: no function, one that makes no transform, or no number to put into the state.
        ShapeError: in `init`, numbers that are neither one nor one for each member.

    Compile:
        a number that changes makes no new graph.

    Example:
        >>> from tdc.optim import sgd
        >>> opt, params = inject(sgd, lr=0.5), TensorDict({"w": torch.ones(2)})
        >>> state = opt.init(params).set(("hyper", "lr"), torch.tensor(0.1))
        >>> opt.update(params, state, params)[0]["w"]
        tensor([0.9000, 0.9000])

    Source:
        `optax.inject_hyperparams`.
    """
    op = "optim.inject"
    expect_function(op, make)
    numbers = {k: x for k, x in settings.items() if isinstance(x, (float, Tensor)) or callable(x)}
    fixed = {k: x for k, x in settings.items() if k not in numbers}
    scheduled = any([callable(x) for x in numbers.values()])
    if not numbers:
        hint = "inject(adamw, lr=1e-3, weight_decay=0.1)"
        raise DtypeError(message(op, "floats, tensors or schedules by name", "none", hint=hint))
    kind: Any = make(**fixed, **{k: torch.zeros(()) if callable(x) else x for k, x in numbers.items()})
    check_transform(op, kind)
    keys = ("inner", "hyper", *["step"] * scheduled)

    def init(params: TensorDict) -> TensorDict:
        check_td("optim.init", params)
        step, hyper = first_numbers(op, numbers, params)
        entries: dict[str, Any] = {"inner": make(**fixed, **hyper).init(params), "hyper": hyper}
        return TensorDict({**entries, "step": step} if scheduled else entries, params.batch_size)

    def update(updates: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
        check_td(op, updates, params)
        check_keys(op, state, keys)
        hyper = numbers_at(state, numbers)
        new, inner = make(**fixed, **hyper).update(updates, state["inner"], params)
        entries: dict[str, Any] = {"inner": inner, "hyper": hyper}
        after = {**entries, "step": state["step"] + 1} if scheduled else entries
        return new, TensorDict(after, params.batch_size)

    def rates(state: TensorDict) -> dict[str, Tensor]:
        return {**make(**fixed, **numbers_at(state, numbers)).rates(state["inner"])}

    return replace(kind, init=init, update=update, rates=rates)


def first_numbers(op: str, numbers: dict[str, Any], params: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    """Step 0, and the numbers that hold there, one for each member, with the digits that parameters have."""
    tensors = [x for x in params._leaves.values() if trainable(x)]
    device, size = tensors[0].device if tensors else params.device, params.batch_size
    dtype = torch.float64 if any([x.dtype in DOUBLE for x in tensors]) else torch.float32
    step = torch.zeros(size, dtype=torch.int64, device=device)
    given = {name: rate_at(x, step, dtype) for name, x in numbers.items()}
    for x in given.values():
        check_rate(op, x, params)
    return step, {k: torch.as_tensor(x, dtype=dtype, device=device).expand(size).clone() for k, x in given.items()}


def numbers_at(state: TensorDict, numbers: dict[str, Any]) -> dict[str, Tensor]:
    """The numbers of the next step: those in a state, and those of its schedules."""
    found = {name: state["hyper", name] for name in numbers}
    schedules: dict[str, Any] = {name: x for name, x in numbers.items() if callable(x)}
    rates: dict[str, Any] = {name: rate_at(x, state["step"], found[name].dtype) for name, x in schedules.items()}
    return found | {name: rate.to(found[name].dtype) for name, rate in rates.items()}
