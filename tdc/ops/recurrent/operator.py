"""A recurrent network on rows of different lengths, and its gradients, as one node of a graph each.

How many rows are alive at each step is read on the host, inside the operator; torch would unroll the steps and
specialise a graph on the longest row.

    on CPU                                one of the ways of `recurrent.layers`
    without gradients, but for LSTMs      torch's kernels for packed sequences
    elsewhere, projections, autocast      the same; the backward of a graph runs them again

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
from tdc.ops.recurrent import layers, rectangle, stretches
from tdc.ops.recurrent.by_cells import without_steps
from tdc.ops.recurrent.layers import Net, Way
from tdc.ops.recurrent.order import Order, order_of
from tdc.ops.recurrent.rectangle import RECTANGLE
from tdc.ops.recurrent.steps import KEPT, STEPS, buffers
from tdc.ops.recurrent.stretches import STRETCHES

KERNELS: dict[str, Any] = {
    "lstm": torch.lstm, "gru": torch.gru, "rnn_tanh": torch.rnn_tanh, "rnn_relu": torch.rnn_relu,
}  # fmt: skip
NOTHING, ROOM, ANYTHING = range(3)  # what may be kept; in a graph only what has sizes of B and P
GIVEN = (
    "Tensor values, Tensor starts, Tensor lengths, Tensor[] states, Tensor[] weights, "
    "str mode, bool bias, int layers, bool bidirectional"
)


def fits(values: Tensor, states: list[Tensor]) -> bool:
    """Whether the ways of `recurrent.layers` are for a call: on CPU, without projections."""
    return values.device.type == "cpu" and states[0].shape[-1] == states[-1].shape[-1]


def way_of(order: Order, mode: str, keep: int, values: Tensor, weights: list[Tensor]) -> Way:
    """How each layer runs in each direction."""
    if mode != "lstm" or not stretches.serves([values, *weights]):
        return STEPS
    stretched = keep == NOTHING and stretches.pays(order, weights)
    calls = len(order.stretches) if stretched else order.steps
    if rectangle.pays(order, keep != NOTHING, calls, weights):
        return RECTANGLE
    return STRETCHES if stretched else STEPS


def net_of(
    way: Way, order: Order, values: Tensor, states: list[Tensor], mode: str, bias: bool, count: int, bidirectional: bool
) -> Net:
    """What layers run by, whose order is that of a way."""
    own = order.row_by_row if way is RECTANGLE else order
    return Net(own, (values.shape[0], states[0].shape[1]), mode, bias, count, 1 + bidirectional)


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
    if not training and out.device == order.positions.device:
        values_out = layers.to_positions(out, order, values.shape[0])
    else:
        values_out = out.new_zeros(values.shape[0], out.shape[1]).index_copy(0, positions, out)
    return [values_out, *[s.index_copy(1, rows, t) for s, t in zip(states, last, strict=True)]]


def of_cells(values: Tensor, states: list[Tensor]) -> Any:
    """The autocast that cells of another dtype than values came from, which a graph has no more as it runs."""
    differ = values.dtype != states[-1].dtype
    return torch.autocast(values.device.type, values.dtype) if differ else nullcontext()


def without_autocast(device: str) -> Any:
    """A context that takes no time where there is nothing to switch off."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def forward(
    keep: int, values: Tensor, order: Order, states: list[Tensor], weights: list[Tensor], mode: str, bias: bool,
    count: int, bidirectional: bool,
) -> list[Tensor]:  # fmt: skip
    """Outputs, last states, and if asked what the backward wants: whether rows were padded, and what layers keep."""
    device, results = values.device.type, 1 + len(states)
    by_layers = fits(values, states) and (keep or (mode == "lstm" and not torch.is_autocast_enabled(device)))
    with torch.no_grad():
        if not by_layers:
            return contiguous(run_rows(values, order, states, weights, mode, bias, count, bidirectional))
        if order.count == 0:
            outs, kept, way = without_steps(values, states, bidirectional), list[Tensor](), STEPS
        else:
            way = way_of(order, mode, keep, values, weights)
            net = net_of(way, order, values, states, mode, bias, count, bidirectional)
            with without_autocast(device), unrecorded():
                outs = layers.forward(way, net, keep != NOTHING, values, states, weights)
            outs, kept = outs[:results], outs[results:]
        if keep == NOTHING:
            return contiguous(outs)
        if keep == ROOM:
            kept = in_room(way, kept, values, states, mode)
        return [*contiguous(outs), torch.tensor(way is RECTANGLE), *kept]


def contiguous(found: Sequence[Tensor]) -> list[Tensor]:
    """Results as they lie in a graph: states do not as the first ones."""
    return [t.contiguous() for t in found]


def room(values: Tensor, states: list[Tensor], mode: str) -> tuple[list[Tensor], list[Tensor]]:
    """What a graph knows as kept, empty: buffers of all layers and directions for steps, and for a rectangle."""
    runs, rows, size = states[0].shape
    of_steps = [b for _ in range(runs) for b in buffers(values, values.shape[0], rows, size, mode)]
    return of_steps, [values.new_empty(0, dtype=t) for _ in range(runs * (mode == "lstm")) for t in rectangle.DTYPES]


def in_room(way: Way, kept: list[Tensor], values: Tensor, states: list[Tensor], mode: str) -> list[Tensor]:
    """What is kept as a graph knows it."""
    of_steps, of_rectangle = room(values, states, mode)
    if way is RECTANGLE:
        return [*of_steps, *rectangle.hidden(kept)]
    return [*(kept or of_steps), *of_rectangle]


def out_of_room(way: Way, net: Net, states: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
    """What layers and directions kept, in a graph or not; nothing where that is lost."""
    runs, _, size = states[0].shape
    if way is STEPS:
        return kept[: runs * len(KEPT[net.mode])]
    n = runs * len(rectangle.DTYPES)
    return kept if len(kept) == n else rectangle.found_again(net, size, kept[-n:])


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
    padded, *kept = kept
    way = RECTANGLE if padded.item() else STEPS
    net = net_of(way, order, values, states, mode, bias, count, bidirectional)
    with torch.no_grad(), without_autocast(values.device.type), unrecorded():
        own = out_of_room(way, net, states, kept)
        if not own:
            own = layers.forward(way, net, True, values, states, weights)[1 + len(states) :]
        return contiguous(layers.backward(way, net, own, grads, wants_values, values, states, weights))


def recorded_backward(
    grads: list[Tensor], values: Tensor, order: Order, states: list[Tensor], weights: list[Tensor], *args: Any
) -> Sequence[Tensor]:
    """Gradients by autograd, which the forward runs under again."""
    with recording():
        leaves = [t.detach().requires_grad_() for t in (values, *states, *weights)]
        split = 1 + len(states)
        outs = run_rows(leaves[0], order, leaves[1:split], leaves[split:], *args)
        learned = [i for i, out in enumerate(outs) if out.requires_grad]  # without positions the states alone
        outs, grads = [outs[i] for i in learned], [grads[i] for i in learned]
        return torch.autograd.grad(outs, leaves, grads, allow_unused=True, materialize_grads=True)


def forward_kernel(keep: int, values: Tensor, starts: Tensor, lengths: Tensor, *args: Any) -> list[Tensor]:
    return forward(keep, values, order_of(starts, lengths), *args)


def backward_kernel(
    grads: list[Tensor], kept: list[Tensor], wants_values: bool, values: Tensor, starts: Tensor, lengths: Tensor,
    *args: Any,
) -> list[Tensor]:  # fmt: skip
    return backward(grads, kept, wants_values, values, order_of(starts, lengths), *args)


def fake_results(keep: int, values: Tensor, starts: Tensor, lengths: Tensor, states: list[Tensor], *args: Any) -> Any:
    out = values.new_empty(values.shape[0], states[0].shape[-1] * (1 + args[-1]))
    results = [out, *[s.new_empty(s.shape) for s in states]]
    if keep == NOTHING:
        return results
    of_steps, of_rectangle = room(values, states, args[1])
    return [*results, values.new_empty((), dtype=torch.bool), *of_steps, *of_rectangle]


def fake_gradients(*args: Any) -> list[Tensor]:
    _, _, _, values, _, _, states, weights, *_ = args
    return [t.new_empty(t.shape) for t in (values, *states, *weights)]


rnn_op = operator(
    f"rnn(int keep, {GIVEN}) -> Tensor[]", fake_results, one_by_one, CompositeExplicitAutograd=forward_kernel
)
rnn_backward_op = operator(
    f"rnn_backward(Tensor[] grads, Tensor[] kept, bool wants_values, {GIVEN}) -> Tensor[]", fake_gradients, one_by_one,
    CompositeExplicitAutograd=backward_kernel,
)  # fmt: skip
