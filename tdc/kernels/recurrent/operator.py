"""A recurrent network on rows of different lengths, and its gradients, as one node of a graph each.

The rows that have each step are read on the host, inside the operator; torch would unroll the steps and specialise a
graph on the longest row.

    gradients on CPU                                      `recurrent.layers`, which keep their gates
    without gradients, elsewhere, projections, autocast   torch's kernels for packed sequences; the backward of a graph
                                                          runs them again
    second derivatives, forward mode                      `run_cells`, by autograd; refused in a graph

    P positions (packed total, or B·L), B rows, D features in, H out; S = layers · directions
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from tdc.core.dynamo import (
    in_direction,
    readable,
    skipped_in_graphs,
    trace_with_grad,
    traced_for,
    under_mode,
    under_transform,
)
from tdc.core.errors import UnsupportedError, message, no_second
from tdc.core.levels import applied, in_forward_mode, mapped, moving, recording, unrecorded
from tdc.core.operators import derive, one_by_one, operator, refuse_derivative
from tdc.kernels.recurrent import layers
from tdc.kernels.recurrent.by_cells import run_cells, without_steps
from tdc.kernels.recurrent.layers import Net, buffers
from tdc.kernels.recurrent.order import Order, order_of

KERNELS: dict[str, Any] = {
    "lstm": torch.lstm, "gru": torch.gru, "rnn_tanh": torch.rnn_tanh, "rnn_relu": torch.rnn_relu,
}  # fmt: skip
GIVEN = (
    "Tensor values, Tensor starts, Tensor lengths, Tensor[] states, Tensor[] weights, "
    "str mode, bool bias, int layers, bool bidirectional"
)


def fits(values: Tensor, states: list[Tensor]) -> bool:
    """True if `recurrent.layers` can run a call: on CPU, without projections."""
    return values.device.type == "cpu" and states[0].shape[-1] == states[-1].shape[-1]


def run_rows(
    values: Tensor, order: Order, states: list[Tensor], weights: list[Tensor], mode: str, bias: bool, count: int,
    bidirectional: bool,
) -> list[Tensor]:  # fmt: skip
    """values (P, D), states (S, B, H) -> outputs (P, H), 0 in padding, and states, by torch's differentiable kernels.
    """
    if order.count == 0:
        return without_steps(values, states, bidirectional)
    positions, rows = [t.to(values.device) for t in (order.positions, order.rows)]
    hx = tuple([s.index_select(1, rows) for s in states])
    training = torch.is_grad_enabled()  # cuDNN keeps what its backward needs; there is no dropout in here
    given = (hx if mode == "lstm" else hx[0], weights, bias, count, 0.0, training, bidirectional)
    with of_cells(values, states):
        out, *last = KERNELS[mode](values.index_select(0, positions), order.alive, *given)
    whole = out.new_zeros(values.shape[0], out.shape[1]).index_copy(0, positions, out)
    return [whole, *[s.index_copy(1, rows, t) for s, t in zip(states, last, strict=True)]]


def of_cells(values: Tensor, states: list[Tensor]) -> Any:
    """Autocast if cells have another dtype than values, as it left them: a graph runs without it."""
    differ = values.dtype != states[-1].dtype
    return torch.autocast(values.device.type, values.dtype) if differ else nullcontext()


def without_autocast(device: str) -> Any:
    """A context without autocast, free where autocast is off."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def forward(
    keep: bool, values: Tensor, order: Order, states: list[Tensor], weights: list[Tensor], mode: str, bias: bool,
    count: int, bidirectional: bool,
) -> list[Tensor]:  # fmt: skip
    """Outputs, last states, and if asked the buffers for the backward."""
    given = mode, bias, count
    with torch.no_grad():
        if not keep:
            return contiguous(run_rows(values, order, states, weights, *given, bidirectional))
        if order.count == 0:
            return [*contiguous(without_steps(values, states, bidirectional)), *buffers(values, states, mode)]
        with without_autocast(values.device.type), unrecorded():
            return contiguous(layers.forward(Net(order, *given, 1 + bidirectional), values, states, weights))


def contiguous(found: Sequence[Tensor]) -> list[Tensor]:
    """Results with the strides that a graph expects, whatever those of the initial states are."""
    return [t.contiguous() for t in found]


def backward(
    grads: list[Tensor], kept: list[Tensor], wants_values: bool, values: Tensor, order: Order, states: list[Tensor],
    weights: list[Tensor], mode: str, bias: bool, count: int, bidirectional: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of values (0 unless wanted), states and weights."""
    if not kept:
        return contiguous(recorded_backward(grads, values, order, states, weights, mode, bias, count, bidirectional))
    if order.count == 0:
        nothing = [t.new_zeros(t.shape) for t in (values, *weights)]
        return [nothing[0], *contiguous([g.clone() for g in grads[1:]]), *nothing[1:]]
    net = Net(order, mode, bias, count, 1 + bidirectional)
    with torch.no_grad(), without_autocast(values.device.type), unrecorded():
        return contiguous(layers.backward(net, kept, grads, wants_values, values, weights))


def recorded_backward(
    grads: list[Tensor], values: Tensor, order: Order, states: list[Tensor], weights: list[Tensor], *args: Any
) -> Sequence[Tensor]:
    """Gradients by autograd of the forward, which runs again."""
    with recording():
        leaves = [t.detach().requires_grad_() for t in (values, *states, *weights)]
        split = 1 + len(states)
        outs = run_rows(leaves[0], order, leaves[1:split], leaves[split:], *args)
        learned = [i for i, out in enumerate(outs) if out.requires_grad]  # without positions the states alone
        outs, grads = [outs[i] for i in learned], [grads[i] for i in learned]
        return torch.autograd.grad(outs, leaves, grads, allow_unused=True, materialize_grads=True)


def forward_kernel(keep: bool, values: Tensor, starts: Tensor, lengths: Tensor, *args: Any) -> list[Tensor]:
    return forward(keep, values, order_of(starts, lengths), *args)


def backward_kernel(
    grads: list[Tensor], kept: list[Tensor], wants_values: bool, values: Tensor, starts: Tensor, lengths: Tensor,
    *args: Any,
) -> list[Tensor]:  # fmt: skip
    return backward(grads, kept, wants_values, values, order_of(starts, lengths), *args)


def fake_results(keep: bool, values: Tensor, starts: Tensor, lengths: Tensor, states: list[Tensor], *args: Any) -> Any:
    out = values.new_empty(values.shape[0], states[0].shape[-1] * (1 + args[-1]))
    results = [out, *[s.new_empty(s.shape) for s in states]]
    return [*results, *buffers(values, states, args[1])] if keep else results


def fake_gradients(*args: Any) -> list[Tensor]:
    _, _, _, values, _, _, states, weights, *_ = args
    return [t.new_empty(t.shape) for t in (values, *states, *weights)]


rnn_op = operator(
    f"rnn(bool keep, {GIVEN}) -> Tensor[]", fake_results, one_by_one, CompositeExplicitAutograd=forward_kernel
)
rnn_backward_op = operator(
    f"rnn_backward(Tensor[] grads, Tensor[] kept, bool wants_values, {GIVEN}) -> Tensor[]", fake_gradients, one_by_one,
    CompositeExplicitAutograd=backward_kernel,
)  # fmt: skip


# -- derivatives


@dataclass(frozen=True)
class Options:
    """Arguments of a call besides tensors; no tuple, which torch would search for tensors (2.13).

    Attributes:
        states, count: number of states, 1 or 2, and of values, states and weights.
        keep: True if the forward returns buffers for the backward.
        given: mode, bias, layers, bidirectional.
        order: of the rows, if the lengths can be read.
        wanted: True if values may require grad; in a graph autograd does not say.
    """

    states: int
    count: int
    keep: bool
    given: tuple[Any, ...]
    order: Order | None = field(default=None, compare=False)
    wanted: bool = True


class Recur(torch.autograd.Function):
    """The two ops as one differentiable function, also in graphs and under `torch.func`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(starts: Tensor, lengths: Tensor, options: Options, values: Tensor, *rest: Tensor) -> Any:
        states, weights, order = list(rest[: options.states]), list(rest[options.states :]), options.order
        if order is not None and readable():
            return tuple(forward(options.keep, values, order, states, weights, *options.given))
        return tuple(rnn_op(options.keep, values, starts, lengths, states, weights, *options.given))

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
        options = replace(known, wanted=known.wanted and ctx.needs_input_grad[3])
        return None, None, None, *gradients(starts, lengths, options, *all_grads, *tensors)


@skipped_in_graphs
def needs_tangents(tensors: list[Tensor]) -> bool:
    """True if tensors have tangents, or may have under a transform: these go through plain cells."""
    return in_forward_mode() if under_transform() else bool(moving(tensors))


def recur(*inputs: Any) -> Any:
    """`Recur` with its gradients."""
    return applied(Recur, *inputs)


@traced_for(recur)
def recur_traced(*inputs: Any) -> Any:
    """Replace `recur` where Dynamo traces, which takes no autograd function under a transform (2.13)."""
    if in_direction():
        hint = "call torch.func.jvp outside of torch.compile"
        raise UnsupportedError(message(inputs[2].given[0], "reverse mode in a graph", "torch.func.jvp", hint=hint))
    return Recur.forward(*inputs) if under_transform() else Recur.apply(*inputs)


def inputs_of(
    keep: bool, values: Tensor, starts: Tensor, lengths: Tensor, states: list[Tensor], weights: list[Tensor],
    *given: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments of `Recur`, from those of `rnn_op`."""
    tensors = values, *states, *weights
    return starts, lengths, Options(len(states), len(tensors), keep, given), *tensors


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
        ctx.unread = len(tensors) - len(read)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        starts, lengths, *tensors = ctx.saved_tensors
        fn = gradients_by_cells(starts, lengths, ctx.options)
        return None, None, None, *vjp(fn, *tensors)[1](grads), *(None,) * ctx.unread


def by_cells(starts: Tensor, lengths: Tensor, options: Options) -> Callable[..., tuple[Tensor, ...]]:
    """`run_cells` as a function of values, states and weights."""
    n, order = options.states, options.order or order_of(starts, lengths)
    return lambda values, *rest: tuple(run_cells(values, order, list(rest[:n]), list(rest[n:]), *options.given))


def gradients_by_cells(starts: Tensor, lengths: Tensor, options: Options) -> Callable[..., tuple[Tensor, ...]]:
    """Its gradients as a function of those of results, of values, states and weights."""
    results, run = 1 + options.states, by_cells(starts, lengths, options)
    return lambda *both: vjp(run, *both[results:])[1](tuple(both[:results]))


def run_backward(starts: Tensor, lengths: Tensor, options: Options, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Gradients of values, states and weights, of gradients of results, of these and of what the forward kept."""
    results, n, order = 1 + options.states, options.states, options.order
    grads, (values, *rest) = list(tensors[:results]), tensors[results : results + options.count]
    states, weights, kept = rest[:n], rest[n:], list(tensors[results + options.count :])
    if order is not None and readable():
        kept = [] if mapped(grads) else kept  # by autograd then, which may map over them
        return tuple(backward(grads, kept, options.wanted, values, order, states, weights, *options.given))
    given = values, starts, lengths, states, weights, *options.given
    return tuple(rnn_backward_op(grads, kept, options.wanted, *given))


def gradients(starts: Tensor, lengths: Tensor, options: Options, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`run_backward` with derivatives, which a graph refuses."""
    if under_mode():
        return run_backward(starts, lengths, options, *tensors)
    if needs_tangents(list(tensors)):
        read = tensors[: 1 + options.states + options.count]
        return gradients_by_cells(starts, lengths, options)(*read)
    found: tuple[Tensor, ...] = applied(RecurBackward, starts, lengths, options, *tensors)
    return found


trace_with_grad(gradients, run_backward)  # whose derivative is refused
refuse_derivative(rnn_backward_op, no_second("rnn"))


def learns(tensors: list[Tensor]) -> bool:
    """True if a gradient may be asked for. Transforms of `torch.func` do not tell for which tensors."""
    return torch.is_grad_enabled() and (under_transform() or any([t.requires_grad for t in tensors]))
