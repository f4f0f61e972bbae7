"""Averages of parameters over the steps: transforms of parameters, which stand behind an optimiser in a chain.

opt = chain(adamw(1e-3), ema(0.999))
averaged(state)                         another set of parameters, to evaluate and serve with
"""

from __future__ import annotations

from typing import Any

import torch

from tdc.core.arguments import expect_at_least
from tdc.core.errors import KeyPathError, StructureError, message, refuse_wrong
from tdc.core.keys import parts, show
from tdc.optim import foreach as c
from tdc.optim.base import of_columns, wide
from tdc.optim.foreach import extended
from tdc.optim.transform import PARAMETERS, Transform, check_keys, check_numbers, check_td, differing, trainable
from tdc.tensordict.tensordict import TensorDict, build_td

AVERAGE = "average"


def ema(decay: float) -> Transform:
    """An exponential moving average of parameters: `decay * average + (1 - decay) * params`, from the first ones on.

    Shapes:
        average as the parameters.

    Dtypes:
        those of the parameters; float32 for bfloat16 and float16, whose digits would swallow the small changes.

    Args:
        decay: in [0, 1), how much of the average stays; it looks back some `1 / (1 - decay)` steps. A float, or a
            tensor `batch_size`.

    Returns:
        A `Transform` that takes parameters and gives them as they are; its state is `{"average": …}`. Integer buffers
        and other leaves are the latest.

    Raises:
        StructureError: a decay out of its range; in `update`, an average of other parameters.

    Compile:
        fullgraph and vmap.

    Example:
        >>> mean = ema(0.9)
        >>> state = mean.init(TensorDict({"w": torch.tensor(1.0)}))
        >>> new = TensorDict({"w": torch.tensor(2.0)})
        >>> new, state = mean.update(new, state, new)
        >>> state["average", "w"]
        tensor(1.1000)

    Source:
        `torch.optim.swa_utils.get_ema_avg_fn`; AveragedModel begins with the parameters of its first update.
    """
    op = "optim.ema"
    check_numbers(op, below=1.0, decay=decay)

    def init(params: TensorDict) -> TensorDict:
        check_td("optim.init", params)
        return TensorDict({AVERAGE: copied(params)}, params.batch_size)

    def update(updates: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
        check_td(op, updates, params)
        check_keys(op, state, (AVERAGE,))
        mean = lerped(op, state[AVERAGE], updates, 1 - decay)
        return updates, TensorDict({AVERAGE: mean}, params.batch_size)

    return Transform(init, update, PARAMETERS, PARAMETERS)


def lookahead(k: int = 5, alpha: float = 0.5) -> Transform:
    """Slow parameters that every `k` steps go a part of the way to the fast ones, which start there again.

    Args:
        k: how many steps the optimiser before it takes alone.
        alpha: how far the slow parameters go, in [0, 1).

    Returns:
        A `Transform` that takes parameters and gives parameters; its state is `{"average": …, "step": …}`, the slow
        ones.

    Raises:
        ShapeError: `k` below 1.
        StructureError: alpha out of its range; in `update`, a state of other parameters.

    Example:
        >>> from tdc.optim import chain, sgd
        >>> opt = chain(sgd(1.0), lookahead(2))
        >>> grads, params = TensorDict({"w": torch.tensor(1.0)}), TensorDict({"w": torch.tensor(10.0)})
        >>> params, state = opt.update(grads, opt.init(params), params)
        >>> opt.update(grads, state, params)[0]["w"]
        tensor(9.)

    Source:
        Zhang et al., Lookahead Optimizer: k steps forward, 1 step back, 2019, algorithm 1.
    """
    op = "optim.lookahead"
    expect_at_least(op, 1, "k", k)
    check_numbers(op, below=1.0, alpha=alpha)

    def init(params: TensorDict) -> TensorDict:
        check_td("optim.init", params)
        step = torch.zeros(params.batch_size, dtype=torch.int64, device=params.device)
        return TensorDict({AVERAGE: copied(params), "step": step}, params.batch_size)

    def update(updates: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
        check_td(op, updates, params)
        check_keys(op, state, (AVERAGE, "step"))
        slow, step = state[AVERAGE], state["step"] + 1
        nearer = lerped(op, slow, updates, alpha)
        due, fast, after = step % k == 0, {}, {}
        for path, x in updates._leaves.items():
            now = extended(due, x) if trainable(x) else None
            after[path] = x if now is None else torch.where(now, nearer._leaves[path], slow._leaves[path])
            fast[path] = x if now is None else torch.where(now, nearer._leaves[path].to(x.dtype), x)
        new = [build_td(table, updates._nodes, updates._size, updates._device) for table in (fast, after)]
        return new[0], TensorDict({AVERAGE: new[1], "step": step}, params.batch_size)

    return Transform(init, update, PARAMETERS, PARAMETERS)


def averaged(state: TensorDict) -> TensorDict:
    """The averaged parameters in a state: those of `ema`, `lookahead` or a schedule-free optimiser, wherever they are.

    Args:
        state: of an optimiser, or of a training step that holds one.

    Returns:
        The averages as they are in the state; of `masked` leaves only these: `params.update(averaged(state))`.

    Raises:
        KeyPathError: no averages in the state, or several.

    Example:
        >>> from tdc.optim import chain, sgd
        >>> opt = chain(sgd(1.0), ema(0.9))
        >>> params = TensorDict({"w": torch.tensor(1.0)})
        >>> params, state = opt.update(params, opt.init(params), params)
        >>> params["w"], averaged(state)["w"]
        (tensor(0.), tensor(0.9000))
    """
    op = "optim.averaged"
    check_td(op, state)
    found = [p for p in state._nodes if p != () and parts(p)[-1] == AVERAGE]
    if len(found) != 1:
        hint = "chain(adamw(1e-3), ema(0.999)); of several read one, as in state['1', 'average']"
        raise KeyPathError(message(op, "a state with one average", f"{len(found)}", [show(p) for p in found], hint))
    return state.get(found[0])


def copied(params: TensorDict) -> TensorDict:
    """Parameters in the dtype that averages have, in memory of their own."""
    return params.apply(lambda p: p.to(wide(p.dtype), copy=True) if trainable(p) else p)


def lerped(op: str, mean: TensorDict, params: TensorDict, by: Any) -> TensorDict:
    """A mean that goes a part of the way to these parameters; leaves that have none are those of the parameters."""
    fixed = {p: x for p, x in params._leaves.items() if not trainable(x)}
    own = [x.shape for x in mean._leaves.values()]
    if list(mean._leaves) != list(params._leaves) or own != [x.shape for x in params._leaves.values()]:
        old = {p: x for p, x in mean._leaves.items() if trainable(x)}
        wrong = differing(build_td(old, {}, mean._size), params)
        hint = "make the average with init(params) of these parameters"
        refuse_wrong(StructureError, op, "an average of these params", wrong, "leaves that differ", hint)
    new = of_columns(mean, lambda means, ps: c.lerp(means, ps, by), params)
    return build_td({**new._leaves, **fixed}, params._nodes, params._size, params._device)
