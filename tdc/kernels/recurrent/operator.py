"""A recurrent network on rows of different lengths, and its gradients, as one node of a graph each.

How many rows have each step is read on the host, inside the operator; torch would unroll the steps and specialise a
graph on the longest row.

    gradients on CPU                                          `recurrent.layers`, which keep their gates
    without gradients, elsewhere, projections, autocast       torch's kernels for packed sequences; the backward of a
                                                              graph runs them again

    P positions (packed total, or B·L), B rows, D features in, H out; S = layers · directions

Derivatives are in `recurrent.derivatives`. Whoever knows the order of the rows calls `forward` and `backward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tdc.core.levels import recording, unrecorded
from tdc.core.operators import one_by_one, operator
from tdc.kernels.recurrent import layers
from tdc.kernels.recurrent.by_cells import without_steps
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
    """values (P, D), states (S, B, H) -> outputs (P, H), 0 where nothing is real, and states, by torch's kernels.

    Differentiable where autograd runs.
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
