"""Layers and directions of a recurrent network on CPU, forward and backward.

    P positions (packed total, or B·L), B rows, D features in, H out; S = layers · directions
    N real positions, step by step and longest rows first; R rows that have any, at least one

A reversed direction is the same layer on reversed rows: a permutation of the N positions that is its own inverse.

Invariants: a row without positions keeps its initial state, and its gradient. Buffers kept for the backward have sizes
of B and P, not of lengths, so that a graph knows them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.kernels.recurrent import cell
from tdc.kernels.recurrent.order import Order

KEPT = {"lstm": ("gates", "h", "c"), "gru": ("gates", "h"), "rnn_tanh": ("h",), "rnn_relu": ("h",)}
RUN: dict[str, Any] = {
    "lstm": cell.run_lstm, "gru": cell.run_gru, "rnn_tanh": partial(cell.run_plain, torch.tanh_),
    "rnn_relu": partial(cell.run_plain, torch.relu_),
}  # fmt: skip
BACK: dict[str, Any] = {
    "lstm": cell.back_lstm, "gru": cell.back_gru, "rnn_tanh": partial(cell.back_plain, cell.tanh_slope),
    "rnn_relu": partial(cell.back_plain, cell.relu_slope),
}  # fmt: skip


class Net(NamedTuple):
    """Arguments of a call that are not differentiable."""

    order: Order
    mode: str
    bias: bool
    layers: int
    directions: int

    def weights_of(self, weights: list[Tensor], k: int) -> list[Tensor]:
        """Weights of one layer in one direction: of the input, of the state, and biases."""
        n = 4 if self.bias else 2
        return weights[k * n : (k + 1) * n]

    def buffers_of(self, kept: list[Tensor], k: int) -> list[Tensor]:
        """Buffers of one layer in one direction, without the room that is left."""
        names, real, rows = KEPT[self.mode], self.order.total, self.order.count
        own = kept[k * len(names) : (k + 1) * len(names)]
        return [b[: real if name == "gates" else rows + real] for name, b in zip(names, own, strict=True)]

    def h_of(self, kept: list[Tensor], k: int) -> Tensor:
        """The state h of one layer in one direction, before the first step and after each, (R + N, H)."""
        return self.buffers_of(kept, k)[KEPT[self.mode].index("h")]


def buffers(values: Tensor, states: list[Tensor], mode: str) -> list[Tensor]:
    """Empty buffers of all layers and directions, with room for every position and row."""
    positions, (runs, rows, size) = values.shape[0], states[0].shape
    of_gates, of_state = (positions, 4 * size), (rows + positions, size)
    shapes = [of_gates if name == "gates" else of_state for name in KEPT[mode]]
    return [values.new_empty(shape) for _ in range(runs) for shape in shapes]


def turned(x: Tensor, order: Order, direction: int) -> Tensor:
    """Reverse each row for the backward direction, or undo that."""
    return x.index_select(0, order.flip) if direction else x


def joined(outs: list[Tensor]) -> Tensor:
    """The output of a layer, directions side by side."""
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def to_positions(x: Tensor, order: Order, positions: int) -> Tensor:
    """Put the N real positions where they are in the values, and 0 elsewhere."""
    return x.new_zeros(positions, x.shape[1]).index_copy_(0, order.positions, x)


def forward(net: Net, values: Tensor, states: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """Return outputs (P, H), 0 at padding, last states, and the buffers for the backward."""
    order, kept, ends = net.order, buffers(values, states, net.mode), [s.clone() for s in states]
    x = values.index_select(0, order.positions)
    for i in range(net.layers):
        outs = list[Tensor]()
        for d in range(net.directions):
            k = i * net.directions + d
            own = net.buffers_of(kept, k)
            held = own[-len(states) :]
            for buf, s in zip(held, states, strict=True):
                buf[: order.count] = s[k].index_select(0, order.rows)
            RUN[net.mode](turned(x, order, d), net.weights_of(weights, k), own, order)
            outs.append(turned(net.h_of(kept, k)[order.count :], order, d))
            for end, buf in zip(ends, held, strict=True):
                end[k].index_copy_(0, order.rows, buf.index_select(0, order.last))
        x = joined(outs)
    return [to_positions(x, order, len(values)), *ends, *kept]


def backward(
    net: Net, kept: list[Tensor], grads: list[Tensor], wants_values: bool, values: Tensor, weights: list[Tensor]
) -> list[Tensor]:
    """Return gradients of values (0 unless wanted), states and weights."""
    order, both = net.order, net.directions
    ends, found = [g.clone() for g in grads[1:]], list[Tensor]()
    inputs = [values.index_select(0, order.positions)]
    for k in range(0, (net.layers - 1) * both, both):
        inputs.append(joined([turned(net.h_of(kept, k + d)[order.count :], order, d) for d in range(both)]))
    grad = grads[0].index_select(0, order.positions)
    for i in reversed(range(net.layers)):
        to_input, to_weights = list[Tensor](), list[Tensor]()
        for d, g in enumerate(grad.chunk(both, 1)):
            k = i * both + d
            w, u = net.weights_of(weights, k)[:2]
            held = [e[k].index_select(0, order.rows) for e in ends]
            from_x, from_h = BACK[net.mode](turned(g, order, d), held, u, net.buffers_of(kept, k), order)
            before = net.h_of(kept, k).index_select(0, order.before)
            to_weights += weight_grads(from_x, from_h, turned(inputs[i], order, d), before, net)
            if i > 0 or wants_values:
                to_input.append(turned(from_x @ turn_gates(w, net.mode, 1), order, d))
            for end, s in zip(ends, held, strict=True):
                end[k].index_copy_(0, order.rows, s)
        found = to_weights + found
        grad = sum(to_input[1:], to_input[0]) if to_input else grad
    return [to_positions(grad, order, len(values)) if wants_values else torch.zeros_like(values), *ends, *found]


def turn_gates(w: Tensor, mode: str, shift: int) -> Tensor:
    """The input's weights of a GRU as n, r, z from torch's r, z, n (1), and back (-1)."""
    return w.roll(shift * (w.shape[0] // 3), 0) if mode == "gru" else w


def weight_grads(from_x: Tensor, from_h: Tensor, x: Tensor, h: Tensor, net: Net) -> list[Tensor]:
    """Gradients of weights in torch's order, of those of the gates of all positions (N, G·H)."""
    found = [turn_gates(from_x.t() @ x, net.mode, -1), from_h.t() @ h]
    return [*found, turn_gates(from_x.sum(0), net.mode, -1), from_h.sum(0)] if net.bias else found
