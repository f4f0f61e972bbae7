"""One step of training as a pure function of tensors: `(state, batch) -> (state, metrics)`.

    batch --split--> parts --loss, grad--> mean over parts and ranks --optimizer--> params --average--> averaged params
                                                 |
                                        finite? else all of it stays as it was

Invariants: buffers go through the parts in order, as copies, since a module may write into them; a step that is left
out changes "step", "rng", "skipped" and "scaler" alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tdc.compile import train_state
from tdc.compile._torch.inductor import BUDGET
from tdc.compile.gradients import loss_and_gradients
from tdc.compile.loss import Functional, OfModule, not_zero, read_result
from tdc.compile.micro_batches import (
    Gradients,
    check_rows,
    first_size,
    leaves_of,
    mean_of,
    sum_over_parts,
    weighted,
)
from tdc.compile.ranks import Exchange, all_summed, sum_over_ranks, summed
from tdc.compile.shards import Shards
from tdc.compile.train_metrics import global_norm, metrics_of, rate_of
from tdc.compile.train_state import advanced, chosen, next_scale, next_state, unscaled
from tdc.core.arguments import SWAPPED, expect
from tdc.core.dtypes import widened
from tdc.core.errors import (
    DtypeError,
    ShapeError,
    StructureError,
    UnsupportedError,
    describe,
    message,
    refuse_wrong,
)
from tdc.ragged.storage import data_of, is_ragged
from tdc.tensordict.tensordict import TensorDict

OP = "compile.train_step"
DTYPES = (None, torch.bfloat16, torch.float16)


class Updates(Protocol):
    """Optimiser: two functions, such as those of `tdc.optim`."""

    @property
    def init(self) -> Callable[[Any], Any]: ...
    @property
    def update(self) -> Callable[[Any, Any, Any], tuple[Any, Any]]: ...


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One step with its settings."""

    loss: Functional | OfModule
    optimizer: Updates
    accumulate: int
    dtype: torch.dtype | None
    metrics: tuple[str, ...]
    skip_nonfinite: bool
    error_if_nonfinite: bool
    average: Any
    exchange: Exchange | None = None

    @property
    def process_group(self) -> Any:
        """Processes that take the step together; None for one."""
        return None if self.exchange is None else self.exchange.group

    @property
    def shards(self) -> Shards | None:
        """The update in parts, where each rank has one."""
        return None if self.exchange is None else self.exchange.shards

    @property
    def title(self) -> str:
        """Net, loss and optimizer, for the repr of a step and of its evaluation."""
        net, fn = self.loss.net, self.loss.fn
        parts = [] if net is None else [f"net={type(net).__name__}"]
        optimizer = getattr(self.optimizer, "title", type(self.optimizer).__name__)
        return ", ".join([*parts, f"loss={getattr(fn, '__name__', type(fn).__name__)}", f"optimizer={optimizer}"])

    def __call__(self, state: TensorDict, batch: Any) -> tuple[TensorDict, TensorDict]:
        self.check(state, batch)
        held, before = state["params"], state["optimizer"]
        buffers = state["buffers"] if "buffers" in state._nodes else None
        scale = state["scaler", "scale"] if self.scales else None
        found = self.gradients(held, buffers, batch, scale)
        new: dict[str, Any] = {}
        update = self.optimizer.update if self.shards is None else self.shards.update
        new["params"], new["optimizer"] = update(found.grads, before, held)
        if self.average is not None:
            new["params"], new["average"] = self.average.update(new["params"], state["average"], held)
        if buffers is not None:
            new["buffers"] = found.buffers
        known = self.known_metrics(found, before, new["optimizer"])
        if self.skips or self.error_if_nonfinite:
            finite = known["grad_norm"].isfinite() if self.skips else known["finite"]
            new = {name: chosen(finite, x, state[name]) for name, x in new.items()}
            if self.skips:
                new["skipped"] = state["skipped"] + ~finite
            if self.scales:
                new["scaler"] = next_scale(state["scaler"], finite, train_state.SCALING)
        new["step"] = state["step"] + 1
        if "rng" in state._leaves:
            new["rng"] = advanced(state["rng"])
        metrics = metrics_of(self.metrics, found, batch, new, **known)
        if self.process_group is not None:
            counts = ["rows", *["tokens"] * (not isinstance(found.count, Tensor))]
            own = {name: metrics[name] for name in counts if name in self.metrics}
            metrics = metrics.update(summed(own, self.process_group))
        return next_state(new, state), metrics

    @property
    def scales(self) -> bool:
        """True if losses are scaled."""
        return self.dtype is torch.float16

    @property
    def skips(self) -> bool:
        """True if steps without finite gradients are left out."""
        return self.skip_nonfinite or self.scales

    def known_metrics(self, found: Gradients, before: TensorDict, after: TensorDict) -> dict[str, Any]:
        """Metrics of the gradients and of the optimizer, where the step needs them."""
        known: dict[str, Any] = {}
        if "lr" in self.metrics:
            known["lr"] = rate_of(self.optimizer, before, after)
        if self.skips or "grad_norm" in self.metrics or "finite" in self.metrics:
            known["grad_norm"] = norm = global_norm(found.grads, None if self.shards is None else self.process_group)
            loss = found.metrics["loss"].isfinite()
            known["finite"] = loss if self.scales else loss & norm.isfinite()  # a scale that is too large is no error
        return known

    def whole(self, held: TensorDict) -> TensorDict:
        """The parameters of a state, gathered from the parts of all ranks if it has parts."""
        return held if self.shards is None else self.shards.whole(held)

    def gradients(self, held: TensorDict, buffers: Any, batch: Any, scale: Tensor | None) -> Gradients:
        """Gradients and metrics of a batch in one or several parts, on one or several ranks."""
        params = self.whole(held)

        def of(params: TensorDict, buffers: Any, part: Any, in_loop: bool = False) -> Gradients:
            return self.sums_of(params, buffers, part, scale, in_loop)

        parts, group = self.accumulate, self.process_group
        if parts == 1 and group is None:
            found = self.gradients_of(params, buffers, batch, scale, False)[0]
        else:
            rows: Any = first_size(batch)
            if group is None:
                check_rows(rows, parts)
            if parts == 1:
                sums = of(params, buffers, batch)
            else:
                loops = group is None or not self.divides_first(params)
                sums = sum_over_parts(of, params, buffers, batch, parts, loops)
            if self.exchange is not None:
                sums, rows = sum_over_ranks(sums, rows, params, buffers, self.exchange)
            found = mean_of(sums, params if self.shards is None else self.shards.own(held), rows)
        return found if scale is None else found._replace(grads=unscaled(found.grads, scale))

    def sums_of(self, params: TensorDict, buffers: Any, part: Any, scale: Tensor | None, in_loop: bool) -> Gradients:
        """Gradients and metrics of one part, multiplied by its weight."""
        found, base = self.gradients_of(params, buffers, part, scale, in_loop)
        weight = self.weight_of(found.count, part, found.metrics["loss"])
        if self.process_group is None:
            grads = found.grads.apply(lambda g: widened(g) * weight)
        else:
            grads = found.grads.apply(lambda g: widened(g) * base if isinstance(base, Tensor) else widened(g))
        return found._replace(grads=grads, metrics=found.metrics.apply(lambda x: weighted(x, weight)))

    def weight_of(self, count: Any, part: Any, loss: Tensor) -> Any:
        """Weight of a part: the count of its loss, or else its examples, over ranks as a tensor."""
        if isinstance(count, Tensor):
            return count
        rows = first_size(part)
        return rows if self.process_group is None else torch.ones((), device=loss.device) * rows

    def divides_first(self, params: TensorDict) -> bool:
        """True if ranks divide by the weight of all before the backward pass, since float16 holds no sums."""
        travels = None if self.exchange is None else self.exchange.dtype
        return self.scales or torch.float16 in [travels, *[p.dtype for p in params._leaves.values()]]

    def gradients_of(
        self, params: TensorDict, buffers: Any, batch: Any, scale: Tensor | None, in_loop: bool
    ) -> tuple[Gradients, Any]:
        """Gradients, metrics, new buffers and count of one part.

        With several ranks the gradients are those of the loss times its weight, divided by the number that is returned
        beside them, the same on all ranks.
        """
        group = self.process_group
        divides = group is not None and self.divides_first(params)

        def loss_of(params: TensorDict, buffers: Any, batch: Any) -> tuple[Tensor, tuple[Any, ...]]:
            out, after = self.called(self.loss.fn, params, buffers, batch)
            loss, count, after, aux = read_result(out, buffers, after)
            given: Tensor = loss
            base: Any = {}
            if group is not None:
                weight = self.weight_of(count, batch, loss)
                given = weighted(loss, weight)
                if divides:
                    base = not_zero(all_summed([weight], group)[0])
                    given = given / base
            return given if scale is None else given * scale, (loss, count, after, aux, base)

        (_, found), grads = loss_and_gradients(loss_of, params, buffers, batch, in_loop=in_loop)
        loss, count, after, aux, base = found
        metrics = TensorDict({"loss": loss.detach(), **dict(aux.items())})
        return Gradients(grads, metrics, None if buffers is None else after, count), base

    def called(
        self, fn: Callable[..., Any], params: TensorDict, buffers: Any, batch: Any, training: bool = True
    ) -> Any:
        """Call a function of the loss's arguments under autocast; return its result and the new buffers."""
        with nullcontext() if self.dtype is None else torch.autocast(device_of(params).type, self.dtype):
            return self.loss.call(fn, params, buffers, batch, training)

    def check(self, state: Any, batch: Any) -> None:
        """Refuse another state than one of this step, and a missing batch."""
        lacking = self.lacking(state)
        if lacking:
            hint = "state = step.init(net)" if self.lacking(batch) else SWAPPED
            if not isinstance(state, TensorDict):
                raise DtypeError(message(OP, "a state made by init", describe(state), hint=hint))
            raise StructureError(message(OP, "a state made by init", f"one without {', '.join(lacking)}", hint=hint))
        if batch is None:
            raise DtypeError(message(OP, "a batch", "None", hint="step(state, batch)"))
        if self.shards is not None:
            self.shards.check(state["params"])

    def lacking(self, state: Any) -> list[str]:
        """Entries of a state of this step that an object does not have: all of them unless it is a TensorDict."""
        nodes = ["params", "optimizer", *["scaler"] * self.scales, *["average"] * (self.average is not None)]
        nodes += ["buffers"] * (isinstance(self.loss, Functional) and self.loss.buffers)
        leaves = ["step", *["skipped"] * self.skips]
        if not isinstance(state, TensorDict):
            return [*nodes, *leaves]
        return [p for p in nodes if p not in state._nodes] + [p for p in leaves if p not in state._leaves]

    def check_device(self, state: TensorDict, batch: Any) -> None:
        """Refuse a batch on another device than the parameters."""
        device = device_of(state["params"])
        wrong = {
            f"leaf {i} of the batch": f"{describe(x)} on {data_of(x).device}"
            for i, x in enumerate(leaves_of(batch))
            if (isinstance(x, Tensor) or is_ragged(x)) and data_of(x).device != device and data_of(x).ndim
        }
        hint = f"batch.to('{device}'), or init the step with net.to(device)"
        expected = f"a batch on {device}, where the parameters are"
        refuse_wrong(StructureError, OP, expected, wrong, "leaves elsewhere", hint)


def device_of(td: TensorDict) -> torch.device:
    """Device of the first tensor."""
    return next(x.device for x in td._leaves.values())


def check_settings(accumulate: Any, dtype: Any, options: Any, compile: Any) -> None:
    """Refuse invalid settings, and an option without effect in a graph of both passes."""
    expect(OP, compile, bool, of=" for compile")
    if BUDGET in (options or {}):
        hint = "checkpoint_blocks(net, kind, policy=[torch.ops.aten.addmm]) says what is kept"
        raise UnsupportedError(message(OP, "options that act on one graph of both passes", BUDGET, hint=hint))
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise ShapeError(message(OP, "accumulate of at least 1", f"{accumulate!r}", hint="1 takes the batch as it is"))
    if dtype not in DTYPES:
        hint = "torch.bfloat16, torch.float16, or None"
        raise DtypeError(message(OP, "dtype=torch.bfloat16 or torch.float16", f"{dtype}", hint=hint))
