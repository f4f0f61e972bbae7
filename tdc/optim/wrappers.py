"""Optimisers around an optimiser: gradients of several calls as one, steps left out, float32 copies, numbers as state.

They nest; the state of the inner one is at "inner". All steps are one graph: a tensor, one for each model, decides if a
step is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tdc.core.arguments import expect_at_least, expect_function
from tdc.core.dtypes import HALF
from tdc.core.errors import DtypeError, message
from tdc.optim.base import begin, first_step, wide
from tdc.optim.checks import check_copies, check_grads, check_keys, check_rate, check_td, check_transform, trainable
from tdc.optim.foreach import extended
from tdc.optim.transform import Optimizer, Transform, around, rate_at
from tdc.tensordict.paths import gathered
from tdc.tensordict.tensordict import TensorDict, build_td

T = TypeVar("T", bound=Transform)


def multi_steps(optimizer: Transform, k: int) -> Optimizer:
    """One step of an optimiser for every `k` calls, with the mean of their gradients; other calls change nothing.

    Args:
        optimizer: takes the mean. To split one batch, use `train_step(accumulate=)`.
        k: number of calls for a step.

    Returns:
        An `Optimizer`; its state is `{"inner": …, "sum": …, "calls": …}`. Schedules count the steps, not the calls.

    Compile:
        each call computes the step, and takes or drops it.

    Example:
        >>> from tdc.optim import sgd
        >>> opt, params = multi_steps(sgd(1.0), 2), TensorDict({"w": torch.tensor(5.0)})
        >>> state = opt.init(params)
        >>> for grad in (1.0, 3.0):
        ...     params, state = opt.update(TensorDict({"w": torch.tensor(grad)}), state, params)
        ...     print(params["w"])
        tensor(5.)
        tensor(3.)

    Source:
        `optax.MultiSteps`.
    """
    op = "optim.multi_steps"
    check_transform(op, optimizer, optimizer=True)
    expect_at_least(op, 1, "k", k)

    def init(params: TensorDict) -> TensorDict:
        check_td("optim.init", params)
        own = begin(params, ("sum",), {}, {})
        entries = {"inner": optimizer.init(params), "sum": own["sum"], "calls": own["step"]}
        return TensorDict(entries, params.batch_size)

    def update(grads: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
        check_td(op, grads, params)
        check_keys(op, state, ("inner", "sum", "calls"))
        check_grads(op, grads, params)
        check_copies(op, "sum", state, params)
        calls = state["calls"] + 1
        due, total = calls % k == 0, state["sum"]
        sums = {p: x + grads._leaves[p] if p in grads._leaves else x for p, x in total._leaves.items()}
        mean = grads.apply_with_path(lambda p, g: (sums[p] / k).to(g.dtype))
        new, inner = optimizer.update(mean, state["inner"], params)
        left = {p: x if x is total._leaves[p] else torch.where(extended(due, x), 0.0, x) for p, x in sums.items()}
        after = {
            "inner": either(due, inner, state["inner"]),
            "sum": build_td(left, total._nodes, total._size, total._device), "calls": calls,
        }  # fmt: skip
        return either(due, new, params), TensorDict(after, params.batch_size)

    return around(optimizer, init, update, optimizer.elementwise)


def skip_nonfinite(optimizer: Transform) -> Optimizer:
    """Skip steps with an infinite or NaN gradient, and count them; parameters and state stay as they are.

    Each model of a stacked ensemble skips by itself.

    Returns:
        An `Optimizer`; its state is `{"inner": …, "skipped": …}`.

    Example:
        >>> from tdc.optim import sgd
        >>> opt, params = skip_nonfinite(sgd(1.0)), TensorDict({"w": torch.ones(2)})
        >>> grads = TensorDict({"w": torch.tensor([1.0, torch.nan])})
        >>> params, state = opt.update(grads, opt.init(params), params)
        >>> params["w"], state["skipped"]
        (tensor([1., 1.]), tensor(1))

    Source:
        `optax.apply_if_finite`; `torch.amp.GradScaler.step`.
    """
    op = "optim.skip_nonfinite"
    check_transform(op, optimizer, optimizer=True)

    def init(params: TensorDict) -> TensorDict:
        check_td("optim.init", params)
        entries = {"inner": optimizer.init(params), "skipped": first_step(params)[0]}
        return TensorDict(entries, params.batch_size)

    def update(grads: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
        check_td(op, grads, params)
        check_keys(op, state, ("inner", "skipped"))
        fine = all_finite(grads)
        new, inner = optimizer.update(grads, state["inner"], params)
        skipped = state["skipped"] + fine.logical_not()
        after = {"inner": either(fine, inner, state["inner"]), "skipped": skipped}
        return either(fine, new, params), TensorDict(after, params.batch_size)

    return around(optimizer, init, update)


def master_weights(optimizer: Transform) -> Optimizer:
    """Keep float32 copies of bfloat16 and float16 parameters in the state; each step updates them and is rounded once.

    Without them a step smaller than the precision of the parameter is lost.

    Returns:
        An `Optimizer`; its state is `{"inner": …, "master": …}`, copies of parameters in half precision only.

    Example:
        >>> from tdc.optim import sgd
        >>> opt, params = master_weights(sgd(1e-3)), TensorDict({"w": torch.ones((), dtype=torch.bfloat16)})
        >>> grads, state = params, opt.init(params)
        >>> for _ in range(10):
        ...     params, state = opt.update(grads, state, params)
        >>> params["w"], state["master", "w"]
        (tensor(0.9883, dtype=torch.bfloat16), tensor(0.9900))

    Source:
        Micikevicius et al., Mixed Precision Training, 2018, section 3.1.
    """
    op = "optim.master_weights"
    check_transform(op, optimizer, optimizer=True)

    def init(params: TensorDict) -> TensorDict:
        check_td("optim.init", params)
        master = params.apply(lambda p: p.to(wide(p.dtype), copy=True) if p.dtype in HALF else None)
        inner = optimizer.init(params.update(master))
        return TensorDict({"inner": inner, "master": master}, params.batch_size)

    def update(grads: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
        check_td(op, grads, params)
        check_keys(op, state, ("inner", "master"))
        old = state["master"]
        halves = {p: x for p, x in params._leaves.items() if isinstance(x, Tensor) and x.dtype in HALF}
        check_copies(op, "master", state, build_td(halves, {}, params._size))
        full = build_td({**params._leaves, **old._leaves}, params._nodes, params._size, params._device)
        new, inner = optimizer.update(grads, state["inner"], full)
        master = {p: new._leaves[p] for p in old._leaves}
        rounded = {p: params._leaves[p] if x is old._leaves[p] else x.to(halves[p].dtype) for p, x in master.items()}
        after = {"inner": inner, "master": build_td(master, old._nodes, old._size, old._device)}
        out = build_td({**new._leaves, **rounded}, params._nodes, params._size, params._device)
        return out, TensorDict(after, params.batch_size)

    return around(optimizer, init, update, optimizer.elementwise)


def inject(make: Callable[..., T], **settings: Any) -> T:
    """An optimiser or transform whose numbers are in its state: `state.set(("hyper", "lr"), tensor)` changes one.

    Args:
        make: `adamw`, `clip_by_global_norm`, or any function that makes a transform of settings, which may be tensors.
        settings: arguments of `make`. Floats and tensors go into the state, and of schedules the number of the last
            step, to be read. The rest, such as ints, bools and tuples, stays with the transform.

    Returns:
        A transform of the kind that `make` returns; its state is `{"inner": …, "hyper": {name: number}}`, and
        `"step"` with schedules.

    Raises:
        DtypeError: not a function of transforms, or no number to put into the state.
        ShapeError: in `init`, tensors of another shape than `()` and `batch_size`.

    Compile:
        no recompile when a number changes.

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
        step = {"step": state["step"] + 1} if scheduled else {}
        return new, TensorDict({"inner": inner, "hyper": hyper, **step}, params.batch_size)

    def rates(state: TensorDict) -> dict[str, Tensor]:
        return make(**fixed, **numbers_at(state, numbers)).rates(state["inner"])

    return replace(kind, init=init, update=update, rates=rates)


def first_numbers(op: str, numbers: dict[str, Any], params: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    """Step 0 and the numbers of it, one for each model."""
    step, dtype = first_step(params)
    given = {name: rate_at(x, step, dtype) for name, x in numbers.items()}
    for x in given.values():
        check_rate(op, x, params)
    tensors = {k: torch.as_tensor(x, dtype=dtype, device=step.device) for k, x in given.items()}
    return step, {k: x.expand(step.shape).clone() for k, x in tensors.items()}


def numbers_at(state: TensorDict, numbers: dict[str, Any]) -> dict[str, Tensor]:
    """Numbers of the next step: those in a state, and those of its schedules."""
    found = {name: state["hyper", name] for name in numbers}
    schedules: dict[str, Any] = {name: x for name, x in numbers.items() if callable(x)}
    rates: dict[str, Any] = {name: rate_at(x, state["step"], found[name].dtype) for name, x in schedules.items()}
    return found | {name: rate.to(found[name].dtype) for name, rate in rates.items()}


def either(flag: Tensor, new: TensorDict, old: TensorDict) -> TensorDict:
    """New leaves where a flag is set, else old ones; one flag for each model."""
    paths, xs = list(new._leaves), list(new._leaves.values())
    ranks = {x.ndim: x for x in xs if isinstance(x, Tensor)}
    flags = {n: extended(flag, x) for n, x in ranks.items()}
    rows = zip(xs, gathered(old._leaves, paths), strict=True)
    found: list[Any] = [x if x is y or not isinstance(x, Tensor) else torch.where(flags[x.ndim], x, y) for x, y in rows]
    return build_td(dict(zip(paths, found, strict=True)), new._nodes, new._size, new._device)


def all_finite(td: TensorDict) -> Tensor:
    """True for each model whose numbers are all finite, `batch_size`."""
    k = len(td._size)
    found = [torch.isfinite(x) for x in td._leaves.values() if trainable(x)]
    flags = [x.flatten(k).all(k) if x.ndim > k else x for x in found]
    return torch.stack(flags).all(0) if flags else torch.ones(td.batch_size, dtype=torch.bool, device=td.device)
