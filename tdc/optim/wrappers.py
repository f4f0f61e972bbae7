"""What stands around an optimiser: gradients of several calls as one, steps left out, parameters in more digits.

Each takes an optimiser and is one, so they stand around each other, too; the state of what is inside is at "inner".

Invariant: whether a step is taken is a tensor, one for each member, so all steps are one graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect_at_least
from tdc.core.dtypes import HALF
from tdc.core.errors import StructureError, refuse_wrong
from tdc.optim.base import begin, wide
from tdc.optim.foreach import extended
from tdc.optim.transform import (
    Optimizer,
    Transform,
    around,
    check_grads,
    check_keys,
    check_td,
    check_transform,
    differing,
    trainable,
)
from tdc.tensordict.paths import gathered
from tdc.tensordict.tensordict import TensorDict, build_td


def multi_steps(optimizer: Transform, k: int) -> Optimizer:
    """One step of an optimiser for every `k` calls, along the mean of their gradients; between them nothing changes.

    Args:
        optimizer: takes the mean. `train_step(accumulate=)` is for one batch that is split.
        k: how many calls make a step.

    Returns:
        An `Optimizer`; its state is `{"inner": …, "sum": …, "calls": …}`. Schedules count the steps, not the calls.

    Raises:
        DtypeError: no optimiser.
        ShapeError: `k` below 1.
        StructureError: in `update`, gradients or a state of other parameters.

    Compile:
        the step is computed in each call, and taken or not.

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
    """No step where a gradient is infinite or NaN: parameters and state stay, and a counter tells how often.

    Each member of a stacked ensemble skips by itself.

    Returns:
        An `Optimizer`; its state is `{"inner": …, "skipped": …}`.

    Raises:
        DtypeError: no optimiser.

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
        entries = {"inner": optimizer.init(params), "skipped": begin(params, (), {}, {})["step"]}
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
    """Parameters of bfloat16 and float16 with a float32 copy in the state: each step changes it and is rounded once.

    Without it a step smaller than a digit of the parameter is lost.

    Returns:
        An `Optimizer`; its state is `{"inner": …, "master": …}`, copies of parameters in half precision only.

    Raises:
        DtypeError: no optimiser.
        StructureError: in `update`, a state of other parameters.

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


def check_copies(op: str, name: str, state: TensorDict, params: TensorDict) -> None:
    """Refuse a state whose entry of this name is not of these parameters."""
    wrong = differing(state[name], params, f"{name}.")
    hint = "make the state with init(params) of these parameters"
    refuse_wrong(StructureError, op, "a state of these params", wrong, "leaves that differ", hint)


def either(flag: Tensor, new: TensorDict, old: TensorDict) -> TensorDict:
    """The new leaves where a flag is set, else the old ones: one flag for each member."""
    paths, xs = list(new._leaves), list(new._leaves.values())
    ranks = {x.ndim: x for x in xs if isinstance(x, Tensor)}
    flags = {n: extended(flag, x) for n, x in ranks.items()}
    rows = zip(xs, gathered(old._leaves, paths), strict=True)
    found: list[Any] = [x if x is y or not isinstance(x, Tensor) else torch.where(flags[x.ndim], x, y) for x, y in rows]
    return build_td(dict(zip(paths, found, strict=True)), new._nodes, new._size, new._device)


def all_finite(td: TensorDict) -> Tensor:
    """Whether all numbers of each member are finite, `batch_size`."""
    k = len(td._size)
    found = [torch.isfinite(x) for x in td._leaves.values() if trainable(x)]
    flags = [x.flatten(k).all(k) if x.ndim > k else x for x in found]
    return torch.stack(flags).all(0) if flags else torch.ones(td.batch_size, dtype=torch.bool, device=td.device)
