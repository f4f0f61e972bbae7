"""Averages of parameters over the steps, which `averaged(state)` returns to evaluate and serve with.

    chain(adamw(1e-3), ema(0.999))      a transform of parameters behind an optimiser; so is `lookahead`
    schedule_free_adamw(1e-3)           an optimiser along averages, which needs no schedule

Schedule-free optimisers have three sets of parameters:

    y   params            gradients are taken here, between the two below
    z   state["fast"]     plain steps along the gradients
    x   state["average"]  a weighted mean of all z
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect_at_least, expect_number
from tdc.core.errors import KeyPathError, message
from tdc.core.keys import parts, show
from tdc.optim import foreach as c
from tdc.optim.adam import debias, decayed, moved_squares
from tdc.optim.base import Start, first_step, of_columns, optimizer, wide
from tdc.optim.checks import check_keys, check_numbers, check_td, differing, pair_of, refuse_differing, trainable
from tdc.optim.foreach import Column, Scalar, extended
from tdc.optim.transform import PARAMETERS, Optimizer, Rate, Transform, takes_rate
from tdc.tensordict.tensordict import TensorDict, build_td

AVERAGE = "average"


def ema(decay: float) -> Transform:
    """An exponential moving average of parameters: `decay * average + (1 - decay) * params`.

    Dtypes:
        averages of bfloat16 and float16 are float32, which small changes need.

    Args:
        decay: in [0, 1), for an average over about `1 / (1 - decay)` steps. A float, or a tensor `batch_size`.

    Returns:
        A `Transform` that returns parameters as they are; its state is `{"average": …}`. Integer buffers and other
        leaves are the latest.

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
    """Slow parameters that move towards the fast ones every `k` steps; the fast ones continue from there.

    Args:
        k: steps of the optimiser in between.
        alpha: part of the way that the slow parameters go, in [0, 1).

    Returns:
        A `Transform` of parameters; its state is `{"average": …, "step": …}`, the slow ones.

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
        return TensorDict({AVERAGE: copied(params), "step": first_step(params)[0]}, params.batch_size)

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
    """Averaged parameters of `ema`, `lookahead` or a schedule-free optimiser, found in any state.

    Args:
        state: of an optimiser, or of a training step.

    Returns:
        The averages. With `masked` they are of the selected leaves only: `params.update(averaged(state))`.

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
    """Copies of parameters in the dtype of averages."""
    return params.apply(lambda p: p.to(wide(p.dtype), copy=True) if trainable(p) else p)


def lerped(op: str, mean: TensorDict, params: TensorDict, by: Any) -> TensorDict:
    """A mean moved towards the parameters; leaves that are not trainable are those of the parameters."""
    fixed = {p: x for p, x in params._leaves.items() if not trainable(x)}
    own = [x.shape for x in mean._leaves.values()]
    if list(mean._leaves) != list(params._leaves) or own != [x.shape for x in params._leaves.values()]:
        old = {p: x for p, x in mean._leaves.items() if trainable(x)}
        refuse_differing(op, differing(build_td(old, {}, mean._size), params), "an average")
    new = of_columns(mean, lambda means, ps: c.lerp(means, ps, by), params)
    return build_td({**new._leaves, **fixed}, params._nodes, params._size, params._device)


# -- schedule-free optimisers


def copy(p: Tensor) -> Tensor:
    """A copy of a parameter in the dtype of moments."""
    return p.detach().to(wide(p.dtype), copy=True)


START: dict[str, Start] = {"fast": copy, "average": copy}


@takes_rate
def schedule_free_sgd(lr: Rate = 1.0, momentum: float = 0.9, weight_decay: float = 0.0, warmup: int = 0) -> Optimizer:
    """Schedule-free SGD; evaluate with `averaged(state)`.

    Args:
        lr: a float, a tensor `batch_size`, or a schedule `step -> lr`; larger than for SGD with momentum.
        momentum: weight of the average where gradients are taken, in [0, 1).
        weight_decay: a term of the gradient.
        warmup: number of steps of a linear rise of the rate.

    Returns:
        An `Optimizer`; its state is `{"fast": …, "average": …, "weight": …, "step": …}`, the sum of squared rates.

    Example:
        >>> opt, params = schedule_free_sgd(lr=0.5), TensorDict({"w": torch.ones(2)})
        >>> params, state = opt.update(params, opt.init(params), params)
        >>> params["w"], averaged(state)["w"]
        (tensor([0.5000, 0.5000]), tensor([0.5000, 0.5000]))

    Source:
        Defazio et al., The Road Less Scheduled, 2024, equations 2 to 4, with weights of squared rates.
    """
    op = "optim.schedule_free_sgd"
    check_numbers(op, lr=lr, weight_decay=weight_decay, warmup=warmup)
    check_numbers(op, below=1.0, momentum=momentum)
    expect_number(op, warmup, whole=True)

    def many(ps: Column, gs: Column, fast: Column, means: Column, rate: Scalar, part: Scalar) -> tuple[Column, ...]:
        _, gs = decayed(ps, gs, weight_decay, None)
        fast = c.minus(fast, gs, rate)
        means = c.lerp(means, fast, part)
        return c.lerp(fast, means, momentum), fast, means

    def scalars(rate: Any, n: Tensor, weight: Tensor) -> tuple[Scalar, ...]:
        rate, weight, part = weighed(rate, n, weight)
        return weight, rate, part

    return optimizer(op, lr, ("fast", "average"), many, scalars, start=START, kept={"weight": 0.0}, warmup=warmup)


@takes_rate
def schedule_free_adamw(
    lr: Rate = 2.5e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
    warmup: int = 0,
) -> Optimizer:  # fmt: skip
    """Schedule-free AdamW; evaluate with `averaged(state)`.

    Args:
        betas: weight of the average where gradients are taken, and decay of the mean of squares.
        eps: as in `adamw`.
        weight_decay: multiplied by the rate and the parameters `y`.
        warmup: number of steps of a linear rise of the rate.

    Returns:
        An `Optimizer`; its state is that of `schedule_free_sgd` with `"square"`.

    Example:
        >>> opt, params = schedule_free_adamw(lr=0.5), TensorDict({"w": torch.ones(2)})
        >>> opt.update(params, opt.init(params), params)[0]["w"]
        tensor([0.5000, 0.5000])

    Source:
        Defazio et al., The Road Less Scheduled, 2024, algorithm 1.
    """
    op = "optim.schedule_free_adamw"
    beta1, beta2 = pair_of(op, betas)
    check_numbers(op, lr=lr, eps=eps, weight_decay=weight_decay, warmup=warmup)
    expect_number(op, warmup, whole=True)

    def many(
        ps: Column, gs: Column, fast: Column, means: Column, squares: Column, rate: Scalar, part: Scalar, root: Scalar
    ) -> tuple[Column, ...]:
        squares = moved_squares(squares, gs, beta2)
        steps = c.ratio(gs, c.plus_number(c.over(c.sqrt(squares), root), eps))
        _, steps = decayed(ps, steps, weight_decay, None)
        fast = c.minus(fast, steps, rate)
        means = c.lerp(means, fast, part)
        return c.lerp(fast, means, beta1), fast, means, squares

    def scalars(rate: Any, n: Tensor, weight: Tensor) -> tuple[Scalar, ...]:
        rate, weight, part = weighed(rate, n, weight)
        return weight, rate, part, debias(beta2, n).sqrt()

    return optimizer(
        op, lr, ("fast", "average", "square"), many, scalars, start=START, kept={"weight": 0.0}, warmup=warmup
    )


def weighed(rate: Any, n: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rate, the sum of squared rates, and the part of this step in it; 0 if all rates are 0."""
    rate = torch.ones_like(n) * rate
    after = weight + rate * rate
    return rate, after, torch.where(after > 0, rate * rate / torch.where(after > 0, after, 1.0), 0.0)
