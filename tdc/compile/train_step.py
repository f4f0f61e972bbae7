"""Whole training steps: forward, loss, backward and update as one function `(state, batch) -> (state, metrics)`.

    step = train_step(net, loss, adamw(1e-3))       loss(net, batch): the net has the parameters of the state
    state = step.init(seed=0)
    for batch in batches:
        state, metrics = step(state, batch)
    evaluate = step.eval()                          evaluate(state, batch) -> metrics, in evaluation mode

    state     "params"      trained parameters                       "optimizer"   result of `optimizer.init`
              "buffers"     of a net that has some                   "step"        steps taken, int64
              "average"     mean of params, with `average=`          "skipped"     steps left out, with `skip_nonfinite`
              "scaler"      scale of float16 losses                  "rng"         random state, where a seed was given

`train_step(loss_fn, optimizer)` takes a function of parameters instead of a net. `step.update` is the pure step of
`one_step`, not compiled, to vmap or differentiate. Calling `step` compiles it, seeds it, and with `donate` writes the
new state into the memory of the old one.

Invariants:
  - the state is all that one step hands to the next: saved, loaded or copied, training goes on with the same numbers;
  - with a seed, the step reads and changes no random state of the process;
  - training does not change the net: its tensors are the first ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tdc.compile._torch.caches import load_cache, save_cache
from tdc.compile.counts import Counts, counted, counts_of
from tdc.compile.filling.sizes import Buckets, buckets_of
from tdc.compile.inductor import backend as inductor
from tdc.compile.inductor import backend_of
from tdc.compile.loss import loss_of
from tdc.compile.one_step import Step, check_settings, device_of
from tdc.compile.ranks import Exchange, all_together, as_on_first, check_group, group_of, rank_of
from tdc.compile.shards import Shards
from tdc.compile.train_metrics import check_names, refuse_nonfinite
from tdc.compile.train_state import (
    SCALING,
    advanced,
    apart,
    check_update,
    first_scale,
    in_order,
    locals_of,
    mark_addresses,
    mixed,
    overwrite,
    seeded,
    storages,
    unshared,
    with_locals,
    without_keys,
)
from tdc.compile.trained import Evaluation, load_into
from tdc.compile.vectorize import vmap
from tdc.core.arguments import expect_function, expect_number
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message, refuse_wrong
from tdc.core.keys import show
from tdc.core.typing import MISSING
from tdc.interop.pytrees import from_state_dict
from tdc.tensordict.tensordict import TensorDict

OP = "compile.train_step"


def train_step(
    net: Any, loss: Any, optimizer: Any = None, *, buffers: bool = False, accumulate: int = 1,
    dtype: torch.dtype | None = None, metrics: tuple[str, ...] = ("loss",), skip_nonfinite: bool = False,
    error_if_nonfinite: bool = False, average: Any = None, process_group: Any = None, shard: str | None = None,
    reduce_dtype: torch.dtype | None = None, bucket: int = 25 << 20, donate: bool = False, compile: bool = True,
    backend: Any = inductor, mode: str | None = None, options: dict[str, Any] | None = None,
    dynamic: bool | None = None, buckets: Buckets | Literal["auto"] | None = None,
) -> TrainStep:  # fmt: skip
    """Make a training step `(state, batch) -> (state, metrics)`; its `init` makes the first state.

    Args:
        net, loss, optimizer: a module and `loss(net, batch)`; or `train_step(loss_fn, optimizer)` with
            `loss_fn(params, batch)`. A loss returns one number, or `(sum, count)`, whose loss is sum / count in a batch
            of several parts, too; either with a dict of metrics. An optimizer is one of `tdc.optim`, or anything with
            `init(params) -> state` and `update(grads, state, params) -> (params, state)`.
        buffers: `loss_fn` takes and returns buffers: `(params, buffers, batch) -> (loss, buffers)`.
        accumulate: number of parts that a batch is split into along its first dim.
        dtype: `torch.bfloat16` for a loss under autocast; `torch.float16` scales it, too, as `torch.amp.GradScaler`.
        metrics: names of numbers to return beside those of the loss; see `train_metrics`.
        skip_nonfinite: leave out steps whose gradients are not all finite, and count them.
        error_if_nonfinite: raise in such a step, or where the loss is not finite; each step waits for the device.
        average: `tdc.optim.ema(0.999)` keeps a mean of the parameters in the state, for `step.eval`.
        process_group: of `torch.distributed`, or a `DeviceMesh` with one dim; each process gives its part of the batch.
        shard: "optimizer" keeps a part of the optimizer's state on each process; "params" of the parameters, too.
        reduce_dtype: of gradients between processes, such as `torch.bfloat16`; by default float32, or float64.
        bucket: bytes of gradients in one message, which the backward pass sends while it goes on.
        donate: write the new state into the memory of the old one and return it; `state.clone()` keeps a copy.
        compile, backend, mode, options, dynamic, buckets: as of `counted`; `compile=False` runs eagerly.

    Raises:
        DtypeError, StructureError, ShapeError, UnsupportedError: invalid arguments.

    Compile:
        One graph. `step.update` goes through `vmap` and `grad`.

    Example:
        >>> from tdc.optim import sgd
        >>> net = nn.Linear(2, 1, bias=False)
        >>> step = train_step(net, lambda net, x: net(x).sum(), sgd(0.1), compile=False)
        >>> state, metrics = step(step.init(), torch.ones(3, 2))
        >>> torch.allclose(state["params", "weight"], net.weight - 0.3), state["step"], metrics.keys()
        (True, tensor(1), ('loss',))
    """
    net, fn, optimizer = (None, net, loss) if optimizer is None else (net, loss, optimizer)
    found = loss_of(net, fn, buffers)
    group = check_group(process_group, net)
    check_optimizer(optimizer, average, group)
    if compile:
        backend_of(backend, mode, options, OP, dynamic)
    check_settings(accumulate, dtype, options, compile)
    exchange = exchange_of(optimizer, group, shard, reduce_dtype, bucket)
    names = names_for(metrics, skip_nonfinite, error_if_nonfinite, dtype)
    how = {"backend": backend, "mode": mode, "options": options, "dynamic": dynamic, "buckets": buckets_of(buckets, OP)}
    run = Step(found, optimizer, accumulate, dtype, names, skip_nonfinite, error_if_nonfinite, average, exchange)
    return TrainStep(run, run, donate, how if compile else None)


@dataclass(frozen=True, eq=False, repr=False)
class TrainStep:
    """Training step, made by `train_step`: call it as `(state, batch) -> (state, metrics)`.

    Attributes:
        update: the same function, pure and not compiled. It leaves "rng" to the caller.
    """

    update: Callable[[TensorDict, Any], tuple[TensorDict, TensorDict]]
    _step: Step
    _donate: bool
    _how: dict[str, Any] | None

    def __repr__(self) -> str:
        return f"TrainStep({self._step.title}, {'not compiled' if self._how is None else 'compiled'})"

    def init(
        self, module: nn.Module | TensorDict | None = None, *, buffers: TensorDict | None = None,
        seed: int | None = None,
    ) -> TensorDict:  # fmt: skip
        """Make the state before the first step. It shares no memory with the module.

        Args:
            module: a module, whose parameters that require grad are trained; or a TensorDict of parameters, stacked
                for an ensemble. By default the net of the step.
            buffers: beside a TensorDict of parameters.
            seed: seed of random numbers in the step, such as dropout.

        Returns:
            A TensorDict with the batch size of the parameters.

        Raises:
            DtypeError: neither a module nor a TensorDict.
            StructureError: no parameters to train, or those of another net; statistics such as those of BatchNorm, for
                a loss that does not take buffers, or among the parameters; an optimizer whose update changes the form
                of parameters or of its state.

        Example:
            >>> from tdc.optim import sgd
            >>> step = train_step(nn.Linear(2, 1), lambda net, x: net(x).sum(), sgd(0.1))
            >>> sorted(step.init(seed=0).keys())
            ['optimizer', 'params', 'rng', 'step']
        """
        with all_together(f"{OP}.init", self._step.process_group):
            return self._first(module, buffers, seed)

    def _first(self, module: Any, buffers: TensorDict | None, seed: int | None) -> TensorDict:
        """The state before the first step, the same on all ranks."""
        if seed is not None:
            expect_number(f"{OP}.init", seed, whole=True)
        run = self._step
        params, own = run.loss.parts(module, buffers)
        if not params._leaves:
            hint = "net.requires_grad_(True), or p.requires_grad_(True) of those that shall learn"
            raise StructureError(message(f"{OP}.init", "parameters that require grad", "none", hint=hint))
        size, device = params.batch_size, device_of(params)
        params = params.apply(torch.clone)
        given = {"params": params} if own is None else {"params": params, "buffers": own.apply(torch.clone)}
        if run.process_group is not None:
            as_on_first(TensorDict(given, size), device, run.process_group)
        shards = run.shards
        keeps_parts = shards is not None and shards.keeps_params

        def made(init: Callable[[TensorDict], TensorDict], in_parts: bool) -> TensorDict:
            return init(params) if shards is None or not in_parts else shards.init(init, params)

        held = {"params": made(lambda own: own, keeps_parts), "optimizer": made(run.optimizer.init, True)}
        if run.average is not None:
            held["average"] = made(run.average.init, keeps_parts)
        kept = locals_of(held["params"])
        entries: dict[str, Any] = {"params": kept, "optimizer": unshared(locals_of(held["optimizer"]), kept)}
        check_update(run.optimizer, locals_of(made(lambda own: own, True)), entries["optimizer"])
        entries["step"] = torch.zeros(size, dtype=torch.int64, device=device)
        entries |= {**given, "params": kept}
        if run.average is not None:
            entries["average"] = unshared(locals_of(held["average"]), kept)
        if run.skips:
            entries["skipped"] = torch.zeros(size, dtype=torch.int64, device=device)
        if run.scales:
            entries["scaler"] = first_scale(size, device, SCALING)
        if seed is not None:
            entries["rng"] = torch.full(size, mixed(seed), dtype=torch.int64)
        state = TensorDict(entries, size)
        if run.process_group is not None:
            spread = [name for name, td in held.items() if locals_of(td) is not td]
            as_on_first(state.exclude(*given, *spread), device, run.process_group)
        return state if run.process_group is None else with_locals(state, TensorDict(held))

    def __call__(self, state: TensorDict, batch: Any = MISSING) -> tuple[TensorDict, TensorDict]:
        """Take one step.

        Returns:
            The new state, with `donate` the given one, and the metrics `{"loss": ..., **aux}`.

        Raises:
            StructureError: a state of another step; a batch on another device.
            DtypeError: no batch; a loss of another type.
            ShapeError: a loss of more than one number; a batch of fewer rows than parts.
            NonfiniteError: with `error_if_nonfinite`, an infinite or NaN loss or gradient.
            DistError: another rank raised an error, which is named, or is gone.
        """
        if batch is MISSING:
            hint = "state, metrics = step(state, batch), the first state from step.init()"
            raise DtypeError(message(OP, "a state and a batch", f"{describe(state)} alone", hint=hint))
        with all_together(OP, self._step.process_group):
            return self._taken(state, batch)

    def _taken(self, state: TensorDict, batch: Any) -> tuple[TensorDict, TensorDict]:
        """Take one step."""
        self._step.check(state, batch)
        if "_run" not in self.__dict__:  # the first call
            self._step.check_device(state, batch)
        group = self._step.process_group
        own = state if group is None else locals_of(state)  # a graph has no DTensors
        if self._donate and self._how is not None:
            mark_addresses(own)
        keys = state._leaves.get("rng")
        with torch.no_grad():
            if keys is None:
                out = self._run(own, batch)
            else:
                with seeded(keys, state._leaves["step"].device, rank_of(group)):
                    out = self._run(without_keys(own), batch)
        new, metrics = (state, out) if self._donate else out
        if own is not state and not self._donate:
            new = with_locals(new, state)
        if keys is not None and self._donate:
            keys.copy_(advanced(keys))
        elif keys is not None:
            new = in_order({**new._leaves, "rng": advanced(keys)}, state)
        if self._step.error_if_nonfinite:
            refuse_nonfinite(metrics, new)
        return new, metrics

    @cached_property
    def _run(self) -> Callable[[TensorDict, Any], Any]:
        """Function that a call runs, compiled or not."""
        update = self.update

        def pure(state: TensorDict, batch: Any) -> tuple[TensorDict, TensorDict]:
            new, metrics = update(state, batch)
            return in_order(new._leaves, state), metrics  # again: vmap sorts keys

        def donating(state: TensorDict, batch: Any) -> TensorDict:
            new, metrics = pure(state, batch)
            old, known = state._leaves, storages(state)
            metrics = metrics.apply(lambda x: apart(x, known))
            changed = [p for p, x in new._leaves.items() if x is not old[p]]
            overwrite([old[p] for p in changed], [new._leaves[p] for p in changed], known)
            return metrics

        run: Any = donating if self._donate else pure
        return run if self._how is None else counted(run, name="train_step", **self._how)

    @property
    def counts(self) -> Counts:
        """Counts of compiling; see `counted`."""
        return counts_of(f"{OP}.counts", self._run)

    def eval(
        self, fn: Callable[..., Any] | None = None, *, averaged: bool = False, metrics: tuple[str, ...] = ("loss",)
    ) -> Evaluation:
        """Make a function `(state, batch) -> metrics` for evaluation: no gradients, no updates.

        Args:
            fn: function of the arguments of the loss, `(net, batch)` or `(params, batch)`; it returns the result of a
                loss, or a dict, such as predictions. The loss by default.
            averaged: take the mean of the parameters that `average=` keeps, or an average in the optimizer.
            metrics: beside those of fn: "loss", and "rows" or "tokens" as weights of batches.

        Returns:
            A function, compiled as the step is, that runs a net in evaluation mode.

        Raises:
            DtypeError: fn is not a function.
            StructureError: other metrics; a call with averaged on a state without an average.

        Example:
            >>> from tdc.optim import sgd
            >>> step = train_step(nn.Linear(2, 1), lambda net, x: net(x).sum(), sgd(0.1), compile=False)
            >>> evaluate = step.eval(lambda net, x: {"out": net(x)}, metrics=("rows",))
            >>> found = evaluate(step.init(), torch.ones(3, 2))
            >>> found["out"].shape, found["rows"]
            (torch.Size([3, 1]), tensor(3))
        """
        op = f"{OP}.eval"
        if fn is not None:
            expect_function(op, fn)
        return Evaluation(self._step, fn, averaged, check_names(metrics, ("loss", "tokens", "rows")), self._how)

    def load_into(self, target: Any, state: TensorDict, *, averaged: bool = False) -> Any:
        """Copy trained weights into a module, and return it. It then computes what `eval` does with this state.

        Args:
            target: the module that was trained, or one made like it. For an ensemble a list of modules, or stacked
                parameters as from `stack_modules`, which are returned anew.
            averaged: as in `eval`.

        Raises:
            DtypeError: another target.
            StructureError, ShapeError: other names, shapes, ties or numbers of modules; nothing was written.
            UnsupportedError: a module on the meta device or sharded.

        Example:
            >>> from tdc.optim import sgd
            >>> net = nn.Linear(2, 1)
            >>> step = train_step(net, lambda net, x: net(x).sum(), sgd(0.1), compile=False)
            >>> state, _ = step(step.init(), torch.ones(3, 2))
            >>> torch.equal(step.load_into(net, state).weight, state["params", "weight"])
            True
        """
        return load_into(self._step, target, state, averaged)

    def vmap(self, in_dims: Any = None, *, randomness: str = "different") -> TrainStep:
        """Make the step of an ensemble: models stacked in the state, all trained in one graph.

        Args:
            in_dims: dim of the batch with a part for each model; None shares one batch.
            randomness: models draw "different" random numbers or the "same".

        Returns:
            A `TrainStep` whose metrics have one entry for each model.

        Example:
            >>> from tdc.optim import sgd
            >>> step = train_step(lambda params, x: (params["w"] * x).sum(), sgd(0.1), compile=False).vmap()
            >>> state, metrics = step(step.init(TensorDict({"w": torch.ones(3, 2)}, [3])), torch.tensor([1.0, 2.0]))
            >>> metrics["loss"], state["step"]
            (tensor([3., 3., 3.]), tensor([1, 1, 1]))
        """
        return replace(self, update=vmap(self.update, (0, in_dims), randomness=randomness))

    def load_state_dict(self, state: TensorDict, state_dict: Mapping[str, Tensor]) -> TensorDict:
        """Return a state with the values of a state dict: training goes on where it was saved.

        Args:
            state: a state of the same step, such as `step.init(net)`, which gives keys, shapes, dtypes and devices.
            state_dict: `tdc.interop.to_state_dict(saved)`, a flat dict of tensors.

        Raises:
            StructureError: other keys, shapes or dtypes; every difference is named.
            DtypeError: a TensorDict, or anything else but a flat dict.

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
        op, hint = f"{OP}.load_state_dict", "load it into a state of the same step and module"
        if isinstance(state_dict, TensorDict):
            use = "step(state_dict, batch), a state already; or tdc.interop.to_state_dict(state_dict)"
            raise DtypeError(message(op, "a flat dict of tensors", describe(state_dict), hint=use))
        given = dict(from_state_dict(state_dict)._leaves)
        wrong = {
            show(p): f"{describe(given[p]) if p in given else 'missing'}, wanted {describe(x)}"
            for p, x in state._leaves.items()
            if p not in given or given[p].shape != x.shape or given[p].dtype != x.dtype
        }
        wrong |= {show(p): f"{describe(x)}, not wanted" for p, x in given.items() if p not in state._leaves}
        if given.keys() == state["params"]._leaves.keys():  # of the module
            hint = "net.load_state_dict(state_dict), then step.init(net)"
        refuse_wrong(StructureError, op, "entries of this state", wrong, "entries that differ", hint)
        return state.update({p: given[p].to(x.device, copy=True) for p, x in state._leaves.items()})

    def save_cache(self, file: str | os.PathLike[str]) -> Path:
        """Write this step's graph, and all else that Inductor compiled in this process, to a file.

        Returns:
            The path.

        Raises:
            StructureError: nothing was compiled yet.

        Source:
            `torch.compiler.save_cache_artifacts`, and the libraries of C++ kernels, which it leaves out.
        """
        return save_cache(f"{OP}.save_cache", file)

    def load_cache(self, file: str | os.PathLike[str]) -> bool:
        """Load kernels that another process compiled, before the first step: it is traced, but no kernel is compiled.

        The file holds machine code: load only files you trust.

        Returns:
            True if kernels for the CPU could be used; those of another kind of processor are not.

        Raises:
            FormatError: not a file of `save_cache`, or one of another version of torch.

        Source:
            `torch.compiler.load_cache_artifacts`.
        """
        return load_cache(f"{OP}.load_cache", file)


# -- checks


def check_optimizer(optimizer: Any, average: Any, group: Any) -> None:
    """Refuse other objects than an optimizer and an average, and one sharded over other processes."""
    given = [("optimizer", optimizer, "tdc.optim.adamw(1e-3)")]
    given += [] if average is None else [("average", average, "tdc.optim.ema(0.999)")]
    for name, x, hint in given:
        missing = [part for part in ("init", "update") if not callable(getattr(x, part, None))]
        if missing:
            got = f"{describe(x)} without {' and '.join(missing)}"
            raise DtypeError(message(OP, f"an {name} with init and update", got, hint=hint))
    if group_of(optimizer) not in (None, group):
        got, hint = "none" if group is None else "another", "train_step(..., process_group=group), that of sharded(...)"
        raise StructureError(message(OP, "the process group of the sharded optimizer", got, hint=hint))


def exchange_of(optimizer: Any, group: Any, shard: Any, dtype: Any, bucket: Any) -> Exchange | None:
    """Settings by which ranks exchange gradients; None for one process. Refuses invalid settings."""
    given = [*["shard"] * (shard is not None), *["reduce_dtype"] * (dtype is not None)]
    if group is None and given:
        hint = "process_group=torch.distributed.group.WORLD"
        raise StructureError(message(OP, f"process_group= beside {given[0]}=", "none", hint=hint))
    if shard not in (None, "optimizer", "params"):
        hint = "shard='params' saves the most memory"
        raise StructureError(message(OP, "shard='optimizer', 'params' or None", repr(shard), hint=hint))
    if dtype not in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise DtypeError(message(OP, "a floating-point reduce_dtype", f"{dtype}", hint="torch.bfloat16, or None"))
    if not isinstance(bucket, int) or isinstance(bucket, bool) or bucket < 1:
        raise ShapeError(message(OP, "bucket of at least 1 byte", f"{bucket!r}", hint="bucket=25 << 20"))
    if group is None:
        return None
    if shard is None:
        return Exchange(group, bucket, dtype, None)
    over = getattr(optimizer, "over", None)
    own = None if over is None or group_of(optimizer) is not None else over(group)
    if own is None:
        got = "one that looks at shapes or keys, or is sharded already"
        hint = "chain(clip_by_global_norm(1.0), adamw(1e-3)), or optim.sharded for parts of partition"
        raise StructureError(message(OP, f"an optimizer of flat vectors for shard={shard!r}", got, hint=hint))
    return Exchange(group, bucket, dtype, Shards(own, group, bucket, shard == "params"))


def names_for(metrics: Any, skips: bool, raises: bool, dtype: torch.dtype | None) -> tuple[str, ...]:
    """Return the names of metrics; refuse those that a step of these settings does not have."""
    if skips and raises:
        hint = "skip_nonfinite=True leaves such steps out, error_if_nonfinite=True raises"
        raise StructureError(message(OP, "one of skip_nonfinite and error_if_nonfinite", "both", hint=hint))
    names, scales = check_names(metrics), dtype is torch.float16
    if raises and "finite" not in names:
        names = (*names, "finite")
    if ("skipped" in names and not (skips or scales)) or ("scale" in names and not scales):
        hint = "skip_nonfinite=True for 'skipped', dtype=torch.float16 for 'scale'"
        raise StructureError(message(OP, "metrics that this step has", ", ".join(names), hint=hint))
    return names
