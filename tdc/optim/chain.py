"""Gradient transforms before an optimiser, as one optimiser."""

from __future__ import annotations

from typing import Any

from tdc.core.errors import DtypeError, refuse_wrong
from tdc.optim.base import Optimizer, Transform, check_state
from tdc.tensordict.tensordict import TensorDict


def chain(*parts: Transform | Optimizer) -> Optimizer:
    """Transforms of the gradients, in order, then an optimiser that takes what they leave.

    Args:
        parts: `Transform`s, such as `clip_by_global_norm(1.0)`, and an `Optimizer` last.

    Returns:
        An `Optimizer`; its state is `{"0": …, "1": …}`, the states of the parts in order.

    Raises:
        DtypeError: the last part is no Optimizer, or an earlier one is no Transform.
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
    op = "optim.chain"
    wrong = {f"part {i}": type(x).__name__ for i, x in enumerate(parts[:-1]) if not isinstance(x, Transform)}
    if not parts or not isinstance(parts[-1], Optimizer):
        wrong[f"part {max(len(parts) - 1, 0)}"] = type(parts[-1]).__name__ if parts else "missing"
    expected, hint = "Transforms, then one Optimizer", "chain(clip_by_global_norm(1.0), adamw(1e-3))"
    refuse_wrong(DtypeError, op, expected, wrong, "out of place", hint)
    keys = tuple([f"{i}" for i in range(len(parts))])

    def init(params: TensorDict) -> TensorDict:
        return TensorDict({k: part.init(params) for k, part in zip(keys, parts, strict=True)}, params.batch_size)

    def update(grads: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
        check_state(op, state, params, keys, ())
        states: dict[str, Any] = {}
        for k, part in zip(keys, parts, strict=True):
            grads, states[k] = part.update(grads, state[k], params)
        return grads, TensorDict(states, params.batch_size)

    return Optimizer(init, update)
