"""Transforms one after another, as one."""

from __future__ import annotations

from typing import Any, overload

from tdc.core.errors import DtypeError, describe, message, refuse_wrong
from tdc.optim.transform import Optimizer, Transform, check_keys, check_td, of_parts
from tdc.tensordict.tensordict import TensorDict


@overload
def chain(*parts: *tuple[*tuple[Transform, ...], Optimizer]) -> Optimizer: ...
@overload
def chain(*parts: Transform) -> Transform: ...
def chain(*parts: Transform) -> Transform:
    """Transforms in order, each of which takes what the one before gives.

    Args:
        parts: such as `clip_by_global_norm(1.0)`, `adamw(1e-3)`, `ema(0.999)`: gradients, an optimiser, parameters.

    Returns:
        A `Transform`, with an optimiser among them an `Optimizer`; its state is `{"0": …, "1": …}`, the states of the
        parts in order.

    Raises:
        DtypeError: parts that are none, or that take something else than the one before gives.
        StructureError: in `update`, a state of another chain.

    Compile:
        as its parts.

    Example:
        >>> import torch
        >>> from tdc.optim import clip_by_global_norm, sgd
        >>> opt = chain(clip_by_global_norm(1.0), sgd(lr=1.0))
        >>> params = TensorDict({"w": torch.tensor([3.0, 4.0])})
        >>> params, state = opt.update(params, opt.init(params), params)
        >>> params["w"], state["1", "step"]
        (tensor([2.4000, 3.2000]), tensor(1))

    Source:
        `optax.chain`.
    """
    op, hint = "optim.chain", "chain(clip_by_global_norm(1.0), adamw(1e-3), ema(0.999))"
    if not parts:
        raise DtypeError(message(op, "transforms", "none", hint=hint))
    wrong = {f"part {i}": describe(x) for i, x in enumerate(parts) if not isinstance(x, Transform)}
    refuse_wrong(DtypeError, op, "transforms", wrong, "others", hint)
    for i in range(1, len(parts)):
        if parts[i].takes != parts[i - 1].gives:
            wrong[f"part {i}"] = f"takes {parts[i].takes}, part {i - 1} gives {parts[i - 1].gives}"
    refuse_wrong(DtypeError, op, "parts that take what the one before gives", wrong, "that do not", hint)
    keys = tuple([f"{i}" for i in range(len(parts))])

    def init(params: TensorDict) -> TensorDict:
        check_td("optim.init", params)
        return TensorDict({k: part.init(params) for k, part in zip(keys, parts, strict=True)}, params.batch_size)

    def update(updates: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
        check_keys(op, state, keys)
        states: dict[str, Any] = {}
        for k, part in zip(keys, parts, strict=True):
            updates, states[k] = part.update(updates, state[k], params)
        return updates, TensorDict(states, params.batch_size)

    return of_parts(dict(zip(keys, parts, strict=True)), init, update)
