"""The state of a training step in use: evaluation, and trained weights put back into modules.

    evaluate = step.eval()             evaluate(state, batch) -> metrics; no gradients, nothing updated
    step.load_into(net, state)         each tensor of the net takes its value from the state, under any name of a tied
                                       tensor; one that is not trained, from the net of the step

Invariants:
  - after `load_into` the module computes what `step.eval` computes with this state;
  - `load_into` writes nothing unless all of it fits: names, shapes and ties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tdc.compile.counts import Counts, counted, counts_of
from tdc.compile.loss import read_result
from tdc.compile.one_step import Step
from tdc.compile.ranks import all_together, mean_over_ranks, summed
from tdc.compile.train_metrics import rows_of, tokens_of
from tdc.compile.train_state import locals_of
from tdc.core.errors import DtypeError, ShapeError, StructureError, UnsupportedError, describe, message, refuse_wrong
from tdc.core.keys import parts, show
from tdc.core.typing import MISSING, KeyPath
from tdc.tensordict.tensordict import TensorDict, build_td

EVAL, LOAD = "compile.train_step.eval", "compile.train_step.load_into"


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """Evaluation, made by `TrainStep.eval`: call it as `(state, batch) -> metrics`."""

    _step: Step
    _fn: Callable[..., Any] | None
    _averaged: bool
    _metrics: tuple[str, ...]
    _how: dict[str, Any] | None

    def __repr__(self) -> str:
        return f"Evaluation({self._step.title})"

    def __call__(self, state: TensorDict, batch: Any = MISSING) -> TensorDict:
        """Return the metrics of a batch."""
        if batch is MISSING:
            hint = "metrics = evaluate(state, batch), with the state of the training step"
            raise DtypeError(message(EVAL, "a state and a batch", f"{describe(state)} alone", hint=hint))
        self._step.check(state, batch)
        group = self._step.process_group
        own = state if group is None else locals_of(state)
        with torch.no_grad(), all_together(EVAL, group):
            return self._run(own, batch)

    @cached_property
    def _run(self) -> Callable[[TensorDict, Any], TensorDict]:
        """Function that a call runs, compiled or not."""
        return self.metrics if self._how is None else counted(self.metrics, name="eval", **self._how)

    def metrics(self, state: TensorDict, batch: Any) -> TensorDict:
        """Return the metrics of a batch, not compiled."""
        params = self._step.whole(with_mean(state, EVAL) if self._averaged else state["params"])
        buffers = state["buffers"] if "buffers" in state._nodes else None
        fn = self._step.loss.fn if self._fn is None else self._fn
        out, _ = self._step.called(fn, params, buffers, batch, training=False)
        if isinstance(out, (Mapping, TensorDict)):
            found = dict(out.items())
            count: Any = {}
        else:
            loss, count, _, aux = read_result(out, None, None)
            found = dict(aux.items())
            found = {"loss": loss, **found} if "loss" in self._metrics else found
            if self._step.process_group is not None:
                return self.of_all(TensorDict(found), batch, count, loss)
        return TensorDict({**found, **self.sizes(batch, count)})

    def sizes(self, batch: Any, count: Any) -> dict[str, Tensor]:
        """Numbers of tokens and rows of a batch, where they are asked for."""
        found: dict[str, Tensor] = {}
        if "tokens" in self._metrics:
            found["tokens"] = tokens_of(batch, count)
        if "rows" in self._metrics:
            found["rows"] = rows_of(batch)
        return found

    def of_all(self, metrics: TensorDict, batch: Any, count: Any, loss: Tensor) -> TensorDict:
        """The metrics of the batches of all ranks."""
        group = self._step.process_group
        found, total = mean_over_ranks(metrics, self._step.weight_of(count, batch, loss), group)
        sizes = self.sizes(batch, total if isinstance(count, Tensor) else {})
        own = {(name,): x for name, x in sizes.items() if not (name == "tokens" and isinstance(count, Tensor))}
        return found.update({**sizes, **{path[0]: x for path, x in summed(own, group).items()}})

    @property
    def counts(self) -> Counts:
        """Counts of compiling; see `counted`."""
        return counts_of(f"{EVAL}.counts", self._run)


def with_mean(state: TensorDict, op: str) -> TensorDict:
    """Parameters replaced by their mean, that of the step or of a transform in its optimizer."""
    found = [p for p in state._nodes if parts(p)[-1] == "average" and parts(p)[0] in ("average", "optimizer")]
    if not found:
        hint = "train_step(..., average=tdc.optim.ema(0.999))"
        raise StructureError(message(op, "a state with an average", "one without", hint=hint))
    params = state["params"]
    mean = state[max([p for p in found if parts(p)[0] == parts(found[0])[0]], key=lambda p: len(parts(p)))]
    other = [show(p) for p in mean._leaves if p not in params._leaves]
    hint = "a sharded optimizer averages its own part only: train_step(..., average=tdc.optim.ema(0.999))"
    refuse_wrong(StructureError, op, "an average of the parameters", other, "of something else", hint)
    return params.update(mean)


# -- weights put back


class Known(NamedTuple):
    """Values by name; those of `state` have a batch dim in an ensemble.

    `complete`: every tensor of a module must have a value. Without a net in the step, untrained tensors keep theirs.
    """

    values: dict[str, Tensor]
    state: set[str]
    complete: bool

    def member(self, k: int) -> Known:
        """Values of one model of an ensemble; tied names still share one tensor."""
        rows = {id(x): x[k] for name, x in self.values.items() if name in self.state}
        return self._replace(values={name: rows.get(id(x), x) for name, x in self.values.items()})


def load_into(step: Step, target: Any, state: Any, averaged: bool) -> Any:
    """Run `TrainStep.load_into`."""
    if not isinstance(state, TensorDict) or "params" not in state:
        hint = "step.load_into(net, state), with what step.init() or step(state, batch) returned"
        raise StructureError(message(LOAD, "the state of a training step", describe(state), hint=hint))
    known, size = known_values(step, state, averaged), state.batch_size
    if isinstance(target, TensorDict):
        return filled(target, known, size)
    several = isinstance(target, (list, tuple))
    modules: Sequence[Any] = target if several else [target]
    wrong = {f"{i}": describe(m) for i, m in enumerate(modules) if not isinstance(m, nn.Module)}
    hint = "step.load_into(net, state); of an ensemble a list of modules, or stack_modules(nets)"
    refuse_wrong(DtypeError, LOAD, "a module, a list of modules or stacked parameters", wrong, "others", hint)
    if size != (torch.Size([len(modules)]) if several else torch.Size([])):
        got = f"{len(modules)} modules" if several else "one module"
        hint = "a list of as many modules as members; step.load_into(net, state[k]) for one of them"
        raise ShapeError(message(LOAD, f"modules for a state of batch_size {list(size)}", got, hint=hint))
    pairs = [pair for k, m in enumerate(modules) for pair in matched(m, known.member(k) if several else known)]
    with torch.no_grad():
        for own, value in pairs:
            if own is not value:
                own.copy_(value)
    return target


def known_values(step: Step, state: TensorDict, averaged: bool) -> Known:
    """Values of all tensors of a module: those of the state, and the others from the net of its step."""
    net, params = step.loss.net, step.whole(with_mean(state, LOAD) if averaged else state["params"])
    found = {show(p): x for p, x in params._leaves.items()}
    if "buffers" in state:
        found |= {show(p): x for p, x in state["buffers"]._leaves.items()}
    values = dict(found)
    for own in [] if net is None else tensors_of(net):
        trained = [found[name] for name in own.names if name in found]
        values |= dict.fromkeys(own.names, trained[0] if trained else own.tensor.detach())
    learned = {id(x) for x in found.values()}
    return Known(values, {name for name, x in values.items() if id(x) in learned}, net is not None)


class Own(NamedTuple):
    """A parameter or buffer of a module, and all of its names."""

    tensor: Tensor
    names: list[str]


def tensors_of(module: nn.Module) -> list[Own]:
    """Parameters and buffers, a tied one once."""
    found: dict[int, Own] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, x in named(remove_duplicate=False):
            found.setdefault(id(x), Own(x, [])).names.append(name)
    return list(found.values())


def matched(module: nn.Module, known: Known) -> list[tuple[Tensor, Tensor]]:
    """Pair each tensor of a module with its value."""
    pairs: list[tuple[Tensor, Tensor]] = []
    wrong: dict[str, str] = {}
    owned = tensors_of(module)
    for own in owned:
        values = [known.values[name] for name in own.names if name in known.values]
        if not values:
            if known.complete or own.tensor.requires_grad:
                wrong[own.names[0]] = "not in the state"
        elif values[0].shape != own.tensor.shape:
            wrong[own.names[0]] = f"{describe(own.tensor)}, in the state {describe(values[0])}"
        elif any([x is not values[0] for x in values]):
            wrong[own.names[0]] = f"tied to {', '.join(own.names[1:])}, which has another value in the state"
        else:
            pairs.append((own.tensor, values[0]))
    names = {name for own in owned for name in own.names}
    wrong |= dict.fromkeys(unused(known.values, names), "not in the module")
    hint = "load into a module made as the one that was trained"
    refuse_wrong(StructureError, LOAD, "the tensors that were trained", wrong, "that differ", hint)
    bare = [own for own in owned if own.tensor.is_meta or hasattr(own.tensor, "device_mesh")]  # or a DTensor
    elsewhere = {own.names[0]: describe(own.tensor) for own in bare}
    hint = "load into a copy of the net that is whole: net.to_empty(device='cpu'), before fully_shard"
    refuse_wrong(UnsupportedError, LOAD, "tensors with memory of their own", elsewhere, "others", hint)
    return pairs


def unused(values: dict[str, Tensor], names: set[str]) -> list[str]:
    """Names of values that have none of their names among the given ones."""
    arrived = {id(x) for name, x in values.items() if name in names}
    return [name for name, x in values.items() if id(x) not in arrived]


def filled(target: TensorDict, known: Known, size: torch.Size) -> TensorDict:
    """Stacked parameters with the values of the state."""
    names: dict[str, KeyPath] = {show(p): p for p in target._leaves}
    wrong = dict.fromkeys([name for name in names if name not in known.values], "not in the state")
    wrong |= dict.fromkeys(unused(known.values, set(names)), "not in the parameters")
    new = {
        path: known.values[name] if name in known.state else known.values[name].expand(*size, *known.values[name].shape)
        for name, path in names.items()
        if name in known.values
    }
    wrong |= {
        show(p): f"{describe(target._leaves[p])}, in the state {describe(x)}"
        for p, x in new.items()
        if target._leaves[p].shape != x.shape
    }
    hint = "stack_modules(nets) of modules made as the one that was trained"
    refuse_wrong(StructureError, LOAD, "the tensors that were trained", wrong, "that differ", hint)
    leaves = {p: x.to(target._leaves[p].device, target._leaves[p].dtype, copy=True) for p, x in new.items()}
    return build_td(leaves, target._nodes, target._size, target._device)
