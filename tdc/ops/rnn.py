"""Recurrent networks on rows of different lengths: what `nn.RNN`, `nn.LSTM` and `nn.GRU` call.

    packed (NestedTensor)    (B, -1, D) -> (B, -1, H), and states (layers, B, H) after the last real step of each row
    padded (MaskedBatch)     the same on a rectangle; its padding is never read

Real positions are reordered step by step, longest rows first, so that no padding is computed in either direction. How
many rows are alive at each step is read on the host. In a graph this happens inside one custom op; torch would unroll
the steps and specialise the graph on the longest row.

    on CPU                                    the cells of `rnn_cell`, which keep their gates for the backward
    elsewhere, projections, autocast          torch's kernels for packed sequences; a graph's backward runs them again
    a gradient of a gradient, a direction     `rnn_cells`, step by step; refused in a graph

    P positions (packed total, or B·L), B rows, D features in, H out; S = layers · directions

Invariants: a row without positions keeps its initial state; dropout falls between layers, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jvp, vjp

from tdc.core.dtypes import as_autocast
from tdc.core.dynamo import eager, readable, trace_as, trace_with_grad, under_mode, under_transform
from tdc.core.errors import ShapeError, StructureError, describe, message, no_second
from tdc.core.levels import also_below, recording
from tdc.core.operators import derive, one_by_one, refuse_derivative
from tdc.core.rules import define, note_syncs
from tdc.core.typing import Op
from tdc.ops import rnn_steps, rnn_stretches
from tdc.ops.rnn_cells import run_cells, without_steps
from tdc.ops.rnn_steps import order_of
from tdc.ragged.nested import NestedTensor
from tdc.ragged.segments import lengths_of

KERNELS: dict[str, Any] = {
    "lstm": torch.lstm, "gru": torch.gru, "rnn_tanh": torch.rnn_tanh, "rnn_relu": torch.rnn_relu,
}  # fmt: skip
GIVEN = (
    "Tensor values, Tensor starts, Tensor lengths, Tensor[] states, Tensor[] weights, "
    "str mode, bool bias, int layers, bool bidirectional"
)
torch.library.define("tdc::rnn", f"(bool keep, {GIVEN}) -> Tensor[]")
torch.library.define("tdc::rnn_backward", f"(Tensor[] grads, Tensor[] kept, bool wants_values, {GIVEN}) -> Tensor[]")
rnn_op, rnn_backward_op = torch.ops.tdc.rnn.default, torch.ops.tdc.rnn_backward.default


def run_rows(
    values: Tensor, starts: Tensor, lengths: Tensor, states: list[Tensor], weights: list[Tensor], mode: str, bias: bool,
    layers: int, bidirectional: bool,
) -> list[Tensor]:  # fmt: skip
    """values (P, D), starts and lengths (B,), states (S, B, H) -> outputs (P, H), 0 where nothing is real, and states.

    Differentiable where autograd runs.
    """
    order = order_of(starts, lengths)
    positions, rows = [t.to(values.device) for t in (order.positions, order.rows)]
    if len(rows) == 0:
        return without_steps(values, states, bidirectional)
    hx = tuple([s.index_select(1, rows) for s in states])
    training = torch.is_grad_enabled()  # cuDNN keeps what its backward needs; there is no dropout in here
    given = (hx if mode == "lstm" else hx[0], weights, bias, layers, 0.0, training, bidirectional)
    with of_cells(values, states):
        out, *last = KERNELS[mode](values.index_select(0, positions), order.alive, *given)
    values_out = out.new_zeros(values.shape[0], out.shape[1]).index_copy(0, positions, out)
    return [values_out, *[s.index_copy(1, rows, t) for s, t in zip(states, last, strict=True)]]


def of_cells(values: Tensor, states: list[Tensor]) -> Any:
    """The autocast that cells of another dtype than values came from, which a graph has no more as it runs."""
    differ = values.dtype != states[-1].dtype
    return torch.autocast(values.device.type, values.dtype) if differ else nullcontext()


@torch.library.impl("tdc::rnn", "CompositeExplicitAutograd")
def forward_rows(
    keep: bool, values: Tensor, starts: Tensor, lengths: Tensor, states: list[Tensor], weights: list[Tensor], mode: str,
    *args: Any,
) -> list[Tensor]:  # fmt: skip
    """Outputs, last states, and if asked what the backward wants of the forward."""
    device, given = values.device.type, (values, starts, lengths, states, weights)
    with torch.no_grad():
        if rnn_steps.fits(values, states) and (keep or not torch.is_autocast_enabled(device)):
            with torch.autocast(device, enabled=False):
                if mode == "lstm" and not keep and rnn_stretches.pays(values, lengths, weights):
                    found = rnn_stretches.forward(*given, *args)
                else:
                    found = rnn_steps.forward(keep, *given, mode, *args)
        else:
            found = run_rows(*given, mode, *args)
    return [t.contiguous() for t in found]  # last states lie as the first do


@torch.library.impl("tdc::rnn_backward", "CompositeExplicitAutograd")
def backward_rows(
    grads: list[Tensor], kept: list[Tensor], wants_values: bool, values: Tensor, starts: Tensor, lengths: Tensor,
    states: list[Tensor], weights: list[Tensor], *args: Any,
) -> list[Tensor]:  # fmt: skip
    """Gradients of values, states and weights."""
    if kept:
        with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
            found = rnn_steps.backward(grads, kept, wants_values, values, starts, lengths, states, weights, *args)
    else:
        found = recorded_backward(grads, values, starts, lengths, states, weights, *args)
    return [g.contiguous() for g in found]


def recorded_backward(
    grads: list[Tensor], values: Tensor, starts: Tensor, lengths: Tensor, states: list[Tensor], weights: list[Tensor],
    *args: Any,
) -> Sequence[Tensor]:  # fmt: skip
    """Gradients by autograd, which the forward runs under again."""
    with recording():
        leaves = [t.detach().requires_grad_() for t in (values, *states, *weights)]
        split = 1 + len(states)
        outs = run_rows(leaves[0], starts, lengths, leaves[1:split], leaves[split:], *args)
        learned = [i for i, out in enumerate(outs) if out.requires_grad]  # without positions the states alone
        outs, grads = [outs[i] for i in learned], [grads[i] for i in learned]
        return torch.autograd.grad(outs, leaves, grads, allow_unused=True, materialize_grads=True)


@torch.library.impl("tdc::rnn", "Meta")
def fake_rows(keep: bool, values: Tensor, starts: Tensor, lengths: Tensor, states: list[Tensor], *args: Any) -> Any:
    out = values.new_empty(values.shape[0], states[0].shape[-1] * (1 + args[-1]))
    kept = [b for _ in range(states[0].shape[0] if keep else 0) for b in rnn_steps.buffers(values, states, args[1])]
    return [out, *[s.new_empty(s.shape) for s in states], *kept]


@torch.library.impl("tdc::rnn_backward", "Meta")
def fake_gradients(*args: Any) -> list[Tensor]:
    _, _, _, values, _, _, states, weights, *_ = args
    return [t.new_empty(t.shape) for t in (values, *states, *weights)]


for _op in (rnn_op, rnn_backward_op):  # the kernels take one set of weights
    torch.library.register_vmap(_op, lambda info, in_dims, *args, _op=_op: one_by_one(_op, info, in_dims, *args))


@dataclass(frozen=True)
class Options:
    """What a call has besides tensors; no tuple, which torch would search for tensors with a direction (2.13).

    Attributes:
        states: of the net, 1 or 2.
        count: values, states and weights.
        flag: whether gates are kept; of a gradient, whether values want one.
        given: mode, bias, layers, bidirectional.
    """

    states: int
    count: int
    flag: bool
    given: tuple[Any, ...]


class Recur(torch.autograd.Function):
    """The two ops as one differentiable function, also in graphs and under `torch.func`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(starts: Tensor, lengths: Tensor, options: Options, values: Tensor, *rest: Tensor) -> Any:
        states, weights = list(rest[: options.states]), list(rest[options.states :])
        return tuple(rnn_op(options.flag, values, starts, lengths, states, weights, *options.given))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        starts, lengths, ctx.options, *tensors = inputs
        kept = output[1 + ctx.options.states :]
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(starts, lengths, *tensors, *kept)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (starts, lengths, *tensors), known = ctx.saved_tensors, ctx.options
        values, states = tensors[0], tensors[1 : 1 + known.states]
        width = states[0].shape[-1] * (1 + known.given[-1])
        shapes = [(values.shape[0], width), *[s.shape for s in states]]
        given = zip((values, *states), shapes, grads[: 1 + known.states], strict=True)
        all_grads = [t.new_zeros(n) if g is None else g for t, n, g in given]
        options = Options(known.states, known.count, ctx.needs_input_grad[3], known.given)
        return None, None, None, *gradients(starts, lengths, options, *all_grads, *tensors)


class Directed(Recur):
    """`Recur` with a derivative in a direction, which is taken cell by cell."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        Recur.setup_context(ctx, inputs, output)
        starts, lengths, _, *tensors = inputs
        kept = output[1 + ctx.options.states :]
        ctx.save_for_forward(starts, lengths, *tensors, *kept)  # what the backward has: vmap keeps dims of one list
        ctx.kept = len(kept)

    @staticmethod
    @also_below
    def jvp(ctx: Any, *directions: Any) -> tuple[Tensor | None, ...]:
        starts, lengths, *tensors = ctx.saved_tensors
        run = by_cells(starts, lengths, ctx.options)
        return *along(run, tensors[: ctx.options.count], directions[3:]), *(None,) * ctx.kept


def along(fn: Callable[..., Any], tensors: list[Tensor], directions: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """The derivative in a direction; None is none."""
    known = [torch.zeros_like(t) if d is None else d for t, d in zip(tensors, directions, strict=True)]
    found: tuple[Tensor, ...] = jvp(fn, tuple(tensors), tuple(known))[1]
    return found


def recur(*inputs: Any) -> Any:
    """`Recur` with all derivatives."""
    return Directed.apply(*inputs)


def recur_traced(*inputs: Any) -> Any:
    """What Dynamo traces for `recur`: it takes no function that has a direction, nor one under a transform (2.13)."""
    return Recur.forward(*inputs) if under_transform() else Recur.apply(*inputs)


def inputs_of(
    keep: bool, values: Tensor, starts: Tensor, lengths: Tensor, states: list[Tensor], weights: list[Tensor],
    *given: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """What `Recur` takes, of the arguments of `rnn_op`."""
    tensors = values, *states, *weights
    return starts, lengths, Options(len(states), len(tensors), keep, given), *tensors


trace_as(recur, recur_traced)
derive(rnn_op, Recur, inputs_of)


class RecurBackward(torch.autograd.Function):
    """The gradients of `Recur` as a differentiable function; their own derivatives run the forward again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(starts: Tensor, lengths: Tensor, options: Options, *tensors: Tensor) -> tuple[Tensor, ...]:
        return run_backward(starts, lengths, options, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        starts, lengths, ctx.options, *tensors = inputs
        read = tensors[: 1 + ctx.options.states + ctx.options.count]
        ctx.save_for_backward(starts, lengths, *read)
        ctx.save_for_forward(starts, lengths, *read)
        ctx.unread = len(tensors) - len(read)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        starts, lengths, *tensors = ctx.saved_tensors
        fn = gradients_by_cells(starts, lengths, ctx.options)
        return None, None, None, *vjp(fn, *tensors)[1](grads), *(None,) * ctx.unread

    @staticmethod
    @also_below
    def jvp(ctx: Any, *directions: Any) -> tuple[Tensor, ...]:
        starts, lengths, *tensors = ctx.saved_tensors
        return along(gradients_by_cells(starts, lengths, ctx.options), tensors, directions[3 : 3 + len(tensors)])


def by_cells(starts: Tensor, lengths: Tensor, options: Options) -> Callable[..., tuple[Tensor, ...]]:
    """`run_cells` as a function of values, states and weights."""
    n = options.states
    return lambda values, *rest: tuple(
        run_cells(values, starts, lengths, list(rest[:n]), list(rest[n:]), *options.given)
    )


def gradients_by_cells(starts: Tensor, lengths: Tensor, options: Options) -> Callable[..., tuple[Tensor, ...]]:
    """Its gradients as a function of those of results, of values, states and weights."""
    results, run = 1 + options.states, by_cells(starts, lengths, options)
    return lambda *both: vjp(run, *both[results:])[1](tuple(both[:results]))


def run_backward(starts: Tensor, lengths: Tensor, options: Options, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Gradients of values, states and weights, of gradients of results, of these and of what the forward kept."""
    results, n = 1 + options.states, options.states
    grads, (values, *rest) = tensors[:results], tensors[results : results + options.count]
    operands = values, starts, lengths, rest[:n], rest[n:]
    kept = list(tensors[results + options.count :])
    return tuple(rnn_backward_op(list(grads), kept, options.flag, *operands, *options.given))


def gradients(starts: Tensor, lengths: Tensor, options: Options, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`run_backward` with a derivative, which a graph refuses."""
    run = run_backward if under_mode() else RecurBackward.apply
    return run(starts, lengths, options, *tensors)


trace_with_grad(gradients, run_backward)  # whose derivative is refused
refuse_derivative(rnn_backward_op, no_second("rnn"))


def learns(tensors: list[Tensor]) -> bool:
    """Whether there may be a gradient. Transforms of `torch.func` keep it to themselves."""
    return torch.is_grad_enabled() and (not eager() or any([t.requires_grad for t in tensors]))


def learns_traced(tensors: list[Tensor]) -> bool:
    """What Dynamo traces in place of `learns`: without a gradient it gives `Recur.forward` a context (2.11-2.13)."""
    known = any([t.requires_grad for t in tensors])
    return torch.is_grad_enabled() and (known or under_transform())


trace_as(learns, learns_traced)


def run_layers(
    values: Tensor, starts: Tensor, lengths: Tensor, hx: Any, weights: Any, mode: str, bias: bool, layers: int,
    dropout: float, train: bool, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """All layers at once, or one by one where dropout falls between them."""
    states = list(hx) if mode == "lstm" else [hx]
    if mode != "gru":  # on CPU autocast leaves a gru as it is, and an lstm of rows of different lengths alone (2.13)
        count = len(states)
        cell = states[-1]
        values, *rest = as_autocast(values, *states, *weights)
        states, weights = rest[:count], rest[count:]
        if values.device.type == "cpu" and cell.shape[-1] != states[0].shape[-1]:
            states = [states[0], cell]  # beside projections it is what it was (2.11-2.13)
    if not train or dropout == 0.0 or layers == 1:
        given = (mode, bias, layers, bidirectional)
        keep = rnn_steps.fits(values, states) and not torch.is_autocast_enabled(values.device.type)
        if not keep and readable():
            return tuple(run_rows(values, starts, lengths, states, list(weights), *given))  # and not as export traces
        if not learns([values, *states, *weights]):
            return tuple(rnn_op(False, values, starts, lengths, states, list(weights), *given))
        states = [s.view_as(s) for s in states]  # Dynamo wants different tensors there (2.13), users may pass one twice
        tensors = values, *states, *weights
        outs = recur(starts, lengths, Options(len(states), len(tensors), keep, given), *tensors)
        return outs[: 1 + len(states)]
    count, directions, last = len(weights) // layers, 1 + bidirectional, []
    for i in range(layers):
        values = F.dropout(values, dropout) if i else values
        hx = [s.narrow(0, i * directions, directions) for s in states]
        given = (hx if mode == "lstm" else hx[0], weights[i * count : (i + 1) * count], mode, bias, 1)
        values, *ends = run_layers(values, starts, lengths, *given, 0.0, train, bidirectional)
        last.append(ends)
    return values, *[torch.cat(parts) for parts in zip(*last, strict=True)]


def check_input(x: Any, mode: str, batch_first: bool) -> None:
    """A StructureError for another layout than rows of steps of features."""
    if x.ndim != 3 or (x.ragged_dims, x._batch_dim) != (((1,), 0) if batch_first else ((0,), 1)):
        expected = f"(B, -1, D) and batch_first=True, or (-1, B, D) without, for a {type(x).__name__}"
        got = f"{describe(x)} and batch_first={batch_first}"
        hint = "build the module with batch_first=True"
        raise StructureError(message(mode, expected, got, hint=hint))


def check_weights(mode: str, hx: Any, weights: Any, bias: bool, rows: int) -> None:
    """A ShapeError for another number of weights than each layer and direction has; a projection is one more."""
    projected = mode == "lstm" and hx[0].shape[-1] != hx[1].shape[-1]
    known = rows * ((4 if bias else 2) + projected)
    if len(weights) != known:
        hint = "those of a module: nn.LSTM(...)._flat_weights"
        raise ShapeError(
            message(mode, f"{known} weights of {rows} layers and directions", f"{len(weights)}", hint=hint)
        )


def recurrent(mode: str) -> Op:
    """The rule of one kind of recurrent network."""

    def rule(
        input: Any, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        check_input(input, mode, batch_first)
        check_weights(mode, hx, params, has_biases, num_layers * (1 + bidirectional))
        given = (hx, params, mode, has_biases, num_layers, dropout, train, bidirectional)
        if isinstance(input, NestedTensor):
            s = input.structure
            out, *last = run_layers(input.values, s.offsets[:-1], lengths_of(s), *given)
            return input.with_values(out), *last
        data = input.data.movedim(input.batch_dim, 0)
        rows, longest = data.shape[:2]
        starts = torch.arange(rows, device=data.device) * longest
        out, *last = run_layers(data.flatten(0, 1), starts, input.lengths[:, 0], *given)
        return input.with_data(out.unflatten(0, (rows, longest)).movedim(0, input.batch_dim)), *last

    return rule


for _mode, _op in KERNELS.items():
    define(_op, "rnn", ragged=recurrent(_mode))
note_syncs("the lengths, which say how many rows have a step", *KERNELS.values())
