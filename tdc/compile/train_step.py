"""Whole training steps: forward, loss, backward and update as one function `(state, batch) -> (state, metrics)`.

    step = train_step(loss_fn, adamw(1e-3))
    state = step.init(net, seed=0)
    for batch in batches:
        state, metrics = step(state, batch)

    state     "params"      what is trained                          "optimizer"   what `optimizer.init` made of it
              "step"        steps taken, int64                       "buffers"     where loss_fn takes them
              "rng"         where the next step's random numbers begin, where a seed was given

    batch --split--> micro-batches --loss_fn, grad--> mean of gradients --optimizer--> state, {"loss": ..., **aux}

`step.update` is this function (`Step`), pure and not compiled, to vmap or differentiate. Calling `step` (`TrainStep`)
compiles it, seeds it, and with `donate` writes the new state into the memory of the old one. Three ideas it uses have a
file each: `micro_batches`, `seeds` for random numbers, `train_state` for the order of keys.

Invariants:
  - the state is all that one step hands to the next: saved, loaded or copied, training goes on with the same numbers;
  - with a seed, the step reads and changes no random state of the process;
  - buffers go through the micro-batches in order, as copies: a module may write into those it is given;
  - arguments are checked by keys, kinds and shapes, never by values; in a compiled step that costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tdc.compile.counts import Counts, counted
from tdc.compile.differentiate import loss_and_gradients
from tdc.compile.inductor import backend as inductor
from tdc.compile.loss import not_zero, read_result, takes_buffers
from tdc.compile.micro_batches import split, weighted
from tdc.compile.seeds import advanced, mixed, seeded
from tdc.compile.train_state import apart, in_order, next_state, storages, unshared
from tdc.compile.vectorize import vmap
from tdc.core.dtypes import widened
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message, refuse_wrong
from tdc.core.keys import parts, show
from tdc.interop.pytrees import from_state_dict
from tdc.ops.copy import copy_
from tdc.tensordict.tensordict import TensorDict

OP = "compile.train_step"
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # buffers that stock modules update in training


class Updates(Protocol):
    """An optimiser: two functions, such as those of `tdc.optim`."""

    @property
    def init(self) -> Callable[[Any], Any]: ...
    @property
    def update(self) -> Callable[[Any, Any, Any], tuple[Any, Any]]: ...


def train_step(
    loss_fn: Callable[..., Any],
    optimizer: Updates,
    *,
    has_aux: bool = False,
    accumulate: int = 1,
    dtype: torch.dtype | None = None,
    donate: bool = False,
    compile: bool = True,
    backend: Any = inductor,
) -> TrainStep:
    """A function `(state, batch) -> (state, metrics)` that takes one step of training.

    Args:
        loss_fn: `(params, batch) -> loss`, or `(params, buffers, batch) -> (loss, buffers)`; with `has_aux` one more
            result, a dict or TensorDict of metrics. In place of a loss it may return the pair `(sum, count)`: then
            micro-batches weigh what is counted, such as tokens, and not their rows.
        optimizer: of `tdc.optim`, or anything with `init(params) -> state` and
            `update(grads, state, params) -> (params, state)`.
        has_aux: whether `loss_fn` returns metrics.
        accumulate: number of micro-batches that a batch is split into along its first dim, one after the other.
        dtype: `torch.bfloat16` computes the loss under autocast. Parameters keep their dtype.
        donate: write the new state into the memory of the old one, which is returned. Keep a copy with
            `state.clone()`.
        compile, backend: whether to compile, and with what.

    Returns:
        A `TrainStep`; its `init` makes the first state.

    Raises:
        DtypeError: an optimizer without `init` and `update`; a loss_fn of other arguments; another dtype.
        ShapeError: `accumulate` below 1.

    Compile:
        One graph. `step.update` goes through `vmap` and `grad`.

    Example:
        >>> from tdc.optim import sgd
        >>> step = train_step(lambda params, x: (params["w"] * x).sum(), sgd(0.1), compile=False)
        >>> state, metrics = step(step.init(TensorDict({"w": torch.ones(2)})), torch.tensor([1.0, 2.0]))
        >>> state["params", "w"], state["step"], metrics["loss"]
        (tensor([0.9000, 0.8000]), tensor(1), tensor(3.))
    """
    missing = [name for name in ("init", "update") if not callable(getattr(optimizer, name, None))]
    if missing:
        got, hint = f"{type(optimizer).__name__} without {' and '.join(missing)}", "tdc.optim.adamw(1e-3)"
        raise DtypeError(message(OP, "an optimizer with init and update", got, hint=hint))
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ShapeError(message(OP, "accumulate of at least 1", f"{accumulate!r}", hint="1 takes the batch as it is"))
    if dtype not in (None, torch.bfloat16):
        hint = "torch.bfloat16, or None; float16 needs scaled losses"
        raise DtypeError(message(OP, "dtype=torch.bfloat16", f"{dtype}", hint=hint))
    run = Step(loss_fn, optimizer, takes_buffers(loss_fn), has_aux, accumulate, dtype)
    return TrainStep(run, run, donate, compile, backend)


@dataclass(frozen=True, eq=False)
class TrainStep:
    """What `train_step` returns: call it as `(state, batch) -> (state, metrics)`.

    Attributes:
        update: the same function, pure and not compiled. It leaves "rng" to the caller.
    """

    update: Callable[[TensorDict, Any], tuple[TensorDict, TensorDict]]
    _step: Step
    _donate: bool
    _compile: bool
    _backend: Any

    def init(
        self, module: nn.Module | TensorDict, *, buffers: TensorDict | None = None, seed: int | None = None
    ) -> TensorDict:
        """The state before the first step. Nothing in it shares memory with the module.

        Args:
            module: a module, whose parameters that require grad are trained, a tied one as one; or a TensorDict of
                parameters, stacked for an ensemble.
            buffers: beside a TensorDict of parameters, for a loss_fn of three arguments; a module has its own.
            seed: makes random numbers in the step, such as dropout, those of this seed.

        Returns:
            A TensorDict with the batch size of the parameters.

        Raises:
            DtypeError: neither a module nor a TensorDict.
            StructureError: statistics of a module that training updates, such as those of BatchNorm, for a loss_fn of
                two arguments, or among the parameters.

        Example:
            >>> from tdc.optim import sgd
            >>> step = train_step(lambda params, x: (params["weight"] @ x).sum(), sgd(0.1))
            >>> sorted(step.init(nn.Linear(2, 1), seed=0).keys())
            ['optimizer', 'params', 'rng', 'step']
        """
        if isinstance(module, nn.Module):
            trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
            params, own = from_state_dict(trained), from_state_dict(dict(module.named_buffers()))
            refuse_statistics(module, self._step.buffers)
        elif isinstance(module, TensorDict):
            params, own = module, TensorDict({}, module.batch_size)
            wrong = {show(p): describe(x) for p, x in params._leaves.items() if parts(p)[-1] in STATISTICS}
            hint = "step.init(net), or step.init(tdc.from_module(net, buffers=False), buffers=...)"
            refuse_wrong(StructureError, f"{OP}.init", "parameters to train", wrong, "statistics of a module", hint)
        else:
            expected = "a module or a TensorDict of parameters"
            hint = "step.init(net), or step.init(tdc.from_module(net, buffers=False))"
            raise DtypeError(message(f"{OP}.init", expected, describe(module), hint=hint))
        size = params.batch_size
        params = params.apply(torch.clone)
        device = device_of(params) if params._leaves else None
        entries: dict[str, Any] = {"params": params, "optimizer": unshared(self._step.optimizer.init(params), params)}
        entries["step"] = torch.zeros(size, dtype=torch.int64, device=device)
        if self._step.buffers:
            entries["buffers"] = (own if buffers is None else buffers).apply(torch.clone)
        if seed is not None:
            entries["rng"] = torch.full(size, mixed(seed), dtype=torch.int64)
        return TensorDict(entries, size)

    def __call__(self, state: TensorDict, batch: Any) -> tuple[TensorDict, TensorDict]:
        """Take one step.

        Returns:
            The new state, which with `donate` is the given one, and the metrics `{"loss": ..., **aux}`.

        Raises:
            StructureError: a state of another step.
            DtypeError: no batch; a loss_fn that returns something else than it should.
            ShapeError: a loss of more than one number; a batch of fewer rows than micro-batches.
        """
        self._step.check(state, batch)
        keys = state._leaves.get("rng")
        with torch.no_grad(), nullcontext() if keys is None else seeded(keys, state._leaves["step"].device):
            out = self._run(state, batch)
        return (state, out) if self._donate else out

    @cached_property
    def _run(self) -> Callable[[TensorDict, Any], Any]:
        """What a call runs: compiled, unless not."""
        update = self.update

        def pure(state: TensorDict, batch: Any) -> tuple[TensorDict, TensorDict]:
            new, metrics = update(state, batch)
            return in_order(new._leaves, state), metrics  # again: vmap sorts keys

        def donating(state: TensorDict, batch: Any) -> TensorDict:
            new, metrics = pure(state, batch)
            old, known = state._leaves, storages(state)
            changed = {p: x for p, x in new._leaves.items() if x is not old[p]}
            after = {p: apart(x, known) for p, x in changed.items()}  # all of them before one is written
            metrics = metrics.apply(lambda x: apart(x, known))
            for path, leaf in after.items():
                copy_(old[path], leaf)
            return metrics

        run: Any = donating if self._donate else pure
        return counted(run, name="train_step", backend=self._backend) if self._compile else run

    @property
    def counts(self) -> Counts:
        """What compiling did; see `counted`."""
        if not isinstance(self._run, counted):
            raise StructureError(message(f"{OP}.counts", "a compiled step", "compile=False", hint="leave compile out"))
        return self._run.counts

    def vmap(self, in_dims: Any = None, *, randomness: str = "different") -> TrainStep:
        """The step for an ensemble: members stacked in the state, all trained in one graph.

        Args:
            in_dims: the dim of the batch that has each member's own data; None shares one batch.
            randomness: whether members draw "different" random numbers or the "same".

        Returns:
            A `TrainStep` whose metrics have one entry for each member.

        Example:
            >>> from tdc.optim import sgd
            >>> step = train_step(lambda params, x: (params["w"] * x).sum(), sgd(0.1), compile=False).vmap()
            >>> state, metrics = step(step.init(TensorDict({"w": torch.ones(3, 2)}, [3])), torch.tensor([1.0, 2.0]))
            >>> metrics["loss"], state["step"]
            (tensor([3., 3., 3.]), tensor([1, 1, 1]))
        """
        return replace(self, update=vmap(self.update, (0, in_dims), randomness=randomness))

    def load_state_dict(self, state: TensorDict, state_dict: Mapping[str, Tensor]) -> TensorDict:
        """A state with the values of a state dict: training goes on where it was saved.

        Args:
            state: of the same step and parameters, such as `step.init(net)`; it says what keys, shapes, dtypes and
                devices are wanted.
            state_dict: `tdc.interop.to_state_dict(saved)`, a flat dict of tensors.

        Raises:
            StructureError: other keys, shapes or dtypes; every difference is named.

        Example:
            >>> import tdc
            >>> from tdc.optim import adamw
            >>> step = train_step(lambda params, x: (params["weight"] @ x).sum(), adamw())
            >>> state = step.init(nn.Linear(2, 1))
            >>> loaded = step.load_state_dict(step.init(nn.Linear(2, 1)), tdc.interop.to_state_dict(state))
            >>> torch.equal(loaded["params", "weight"], state["params", "weight"])
            True

        Source:
            `torch.nn.Module.load_state_dict`.
        """
        given = dict(from_state_dict(state_dict)._leaves)
        wrong = {
            show(p): f"{describe(given[p]) if p in given else 'missing'}, wanted {describe(x)}"
            for p, x in state._leaves.items()
            if p not in given or given[p].shape != x.shape or given[p].dtype != x.dtype
        }
        wrong |= {show(p): f"{describe(x)}, not wanted" for p, x in given.items() if p not in state._leaves}
        op, hint = f"{OP}.load_state_dict", "load it into a state of the same step and module"
        refuse_wrong(StructureError, op, "entries of this state", wrong, "entries that differ", hint)
        return state.update({p: given[p].to(x.device, copy=True) for p, x in state._leaves.items()})


@dataclass(frozen=True, eq=False)
class Step:
    """One step as a pure function of tensors: `(state, batch) -> (state, metrics)`."""

    loss_fn: Callable[..., Any]
    optimizer: Updates
    buffers: bool
    has_aux: bool
    accumulate: int
    dtype: torch.dtype | None

    def __call__(self, state: TensorDict, batch: Any) -> tuple[TensorDict, TensorDict]:
        self.check(state, batch)
        params, buffers = state["params"], state["buffers"] if self.buffers else None
        gradients = self.gradients_of if self.accumulate == 1 else self.gradients_of_parts
        grads, metrics, buffers, _ = gradients(params, buffers, batch)
        new: dict[str, Any] = {"step": state["step"] + 1}
        new["params"], new["optimizer"] = self.optimizer.update(grads, state["optimizer"], params)
        if buffers is not None:
            new["buffers"] = buffers
        if "rng" in state._leaves:
            new["rng"] = advanced(state["rng"])
        return next_state(new, state), metrics

    def gradients_of(self, params: TensorDict, buffers: Any, batch: Any) -> tuple[Any, TensorDict, Any, Any]:
        """Gradients, metrics, new buffers, and the count of a loss that has one, of a batch or a micro-batch."""

        def loss_of(params: TensorDict, buffers: Any, batch: Any) -> tuple[Tensor, tuple[Any, Any, Any]]:
            with nullcontext() if self.dtype is None else torch.autocast(device_of(params).type, self.dtype):
                out = self.loss_fn(params, batch) if buffers is None else self.loss_fn(params, buffers, batch)
            return read_result(out, buffers, self.has_aux)

        copies = None if buffers is None else buffers.apply(torch.clone)
        (loss, (new, aux, count)), grads = loss_and_gradients(loss_of, params, copies, batch)
        metrics = TensorDict({"loss": loss, **dict(aux.items())})
        return grads, metrics, None if buffers is None else new, count

    def gradients_of_parts(self, params: TensorDict, buffers: Any, batch: Any) -> tuple[Any, TensorDict, Any, Any]:
        """The same of a batch, from its micro-batches one after another."""
        sums: list[Any] = []
        total: Any = 0
        for part, rows in split(batch, self.accumulate):
            grads, metrics, buffers, count = self.gradients_of(params, buffers, part)
            by = count if isinstance(count, Tensor) else rows
            found = [grads.apply(lambda g, n=by: widened(g) * n), metrics.apply(lambda x, n=by: weighted(x, n))]
            sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
            total = total + by
        total = not_zero(total) if isinstance(total, Tensor) else total
        means = sums[0].apply_with_path(lambda p, g: (g / total).to(params[p].dtype))
        return means, sums[1].apply(lambda x: x / total if x.is_floating_point() else x), buffers, total

    def check(self, state: Any, batch: Any) -> None:
        """Refuse what is no state of this step, or no batch."""
        names = ["params", "optimizer", *["buffers"] * self.buffers]
        if not isinstance(state, TensorDict):
            raise DtypeError(message(OP, "a state made by init", describe(state), hint="state = step.init(net)"))
        lacking = [p for p in names if p not in state._nodes] + [p for p in ["step"] if p not in state._leaves]
        if lacking:
            got, hint = f"one without {', '.join(lacking)}", "state = step.init(net)"
            raise StructureError(message(OP, "a state made by init", got, hint=hint))
        if batch is None:
            raise DtypeError(message(OP, "a batch", "None", hint="step(state, batch)"))


def refuse_statistics(module: nn.Module, buffers: bool) -> None:
    """Refuse a module whose training updates buffers, where the loss does not take them."""
    found = {} if buffers else dict(module.named_modules())
    wrong = {
        name or "the module": type(m).__name__
        for name, m in found.items()
        if m.training and any([x in STATISTICS for x, _ in m.named_buffers(recurse=False)])
    }
    expected = "a loss_fn(params, buffers, batch) -> (loss, buffers) for modules with statistics"
    hint = "loss_fn of three arguments, or net.eval(), which updates none"
    refuse_wrong(StructureError, f"{OP}.init", expected, wrong, "that one of two would not update", hint)


def device_of(td: TensorDict) -> torch.device:
    """The device of the first tensor."""
    return next(x.device for x in td._leaves.values())
