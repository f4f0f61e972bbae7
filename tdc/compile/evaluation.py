"""Evaluation with the state of a training step: `(state, batch) -> metrics`, no gradients, nothing updated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tdc.compile.counts import Counts, counted
from tdc.compile.loss import read_result
from tdc.compile.one_step import Step
from tdc.compile.train_metrics import rows_of, tokens_of
from tdc.core.errors import DtypeError, StructureError, describe, message, refuse_wrong
from tdc.core.keys import parts, show
from tdc.core.typing import MISSING
from tdc.tensordict.tensordict import TensorDict

OP = "compile.train_step.eval"


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """What `TrainStep.eval` returns: call it as `(state, batch) -> metrics`."""

    _step: Step
    _fn: Callable[..., Any] | None
    _averaged: bool
    _metrics: tuple[str, ...]
    _how: dict[str, Any] | None

    def __repr__(self) -> str:
        return f"Evaluation({self._step.title})"

    def __call__(self, state: TensorDict, batch: Any = MISSING) -> TensorDict:
        """The metrics of a batch."""
        if batch is MISSING:
            hint = "metrics = evaluate(state, batch), with the state of the training step"
            raise DtypeError(message(OP, "a state and a batch", f"{describe(state)} alone", hint=hint))
        self._step.check(state, batch)
        with torch.no_grad():
            return self._run(state, batch)

    @cached_property
    def _run(self) -> Callable[[TensorDict, Any], TensorDict]:
        """What a call runs: compiled, unless not."""
        return self.metrics if self._how is None else counted(self.metrics, name="eval", **self._how)

    def metrics(self, state: TensorDict, batch: Any) -> TensorDict:
        """The metrics of a batch, not compiled."""
        params = with_mean(state) if self._averaged else state["params"]
        buffers = state["buffers"] if "buffers" in state._nodes else None
        fn = self._step.loss.fn if self._fn is None else self._fn
        out, _ = self._step.called(fn, params, buffers, batch, training=False)
        count: Any = {}
        if isinstance(out, (Mapping, TensorDict)):
            found = dict(out.items())
        else:
            result = read_result(out, None, None)
            count, found = result.count, dict(result.aux.items())
            found = {"loss": result.loss, **found} if "loss" in self._metrics else found
        if "tokens" in self._metrics:
            found["tokens"] = tokens_of(batch, count)
        if "rows" in self._metrics:
            found["rows"] = rows_of(batch)
        return TensorDict(found)

    @property
    def counts(self) -> Counts:
        """What compiling did; see `counted`."""
        if not isinstance(self._run, counted):
            raise StructureError(message(f"{OP}.counts", "a compiled step", "compile=False", hint="leave compile out"))
        return self._run.counts


def with_mean(state: TensorDict, op: str = OP) -> TensorDict:
    """The parameters; the mean of the step, or of a transform in its optimizer, replaces those that it has."""
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
