"""Recurrent networks on CPU: the order of steps, layers and directions around the cells of `rnn_cell`.

    P positions (packed total, or B·L), B rows, D features in, H out; S = layers · directions
    N real positions, step by step and longest rows first; R rows that have any

A reversed direction is the same layer on reversed rows: a permutation of the N positions that is its own inverse.

Invariants: what is kept for the backward has sizes of B and P, not of lengths; a row without positions keeps its
initial state, and its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from tdc.ops import rnn_cell
from tdc.ops.rnn_cell import Steps

KEPT = {"lstm": ("gates", "h", "c"), "gru": ("gates", "h"), "rnn_tanh": ("h",), "rnn_relu": ("h",)}
RUN: dict[str, Any] = {
    "lstm": rnn_cell.run_lstm, "gru": rnn_cell.run_gru, "rnn_tanh": partial(rnn_cell.run_plain, torch.tanh_),
    "rnn_relu": partial(rnn_cell.run_plain, torch.relu_),
}  # fmt: skip
BACK: dict[str, Any] = {
    "lstm": rnn_cell.back_lstm, "gru": rnn_cell.back_gru,
    "rnn_tanh": partial(rnn_cell.back_plain, rnn_cell.tanh_slope),
    "rnn_relu": partial(rnn_cell.back_plain, rnn_cell.relu_slope),
}  # fmt: skip


@dataclass(frozen=True)
class Order:
    """The order in which steps run.

    Args:
        positions: of each step of each row in the values, (N,).
        rows: longest first, (R,).
        sizes: their lengths, (R,).
        real: which rows have step 0, 1, …, (longest, R).
    """

    positions: Tensor
    rows: Tensor
    sizes: Tensor
    real: Tensor

    @cached_property
    def alive(self) -> Tensor:
        """How many rows have each step."""
        return self.real.sum(1)

    @cached_property
    def at(self) -> Tensor:
        """The position of each row at each step, among all that run, (longest, R)."""
        return (self.alive.cumsum(0) - self.alive)[:, None] + torch.arange(len(self.rows))

    @cached_property
    def before(self) -> Tensor:
        """Where a buffer of states holds the step before, (N,)."""
        return torch.cat([self.at[:1], self.at[:-1] + len(self.rows)]).masked_select(self.real)

    @cached_property
    def last(self) -> Tensor:
        """Where it holds each row's last step, (R,)."""
        return len(self.rows) + self.at.gather(0, (self.sizes - 1)[None])[0] if len(self.rows) else self.rows

    @cached_property
    def flip(self) -> Tensor:
        """The same position of the reversed row, (N,)."""
        steps = torch.arange(len(self.real))[:, None]
        return self.at.gather(0, (self.sizes - 1 - steps).clamp(min=0)).masked_select(self.real)

    @property
    def steps(self) -> Steps:
        return Steps(self.alive.tolist(), self.before)


def order_of(starts: Tensor, lengths: Tensor) -> Order:
    """Step 0 of all rows, step 1 of those that have it, …, longest rows first. On CPU; reads the lengths."""
    sizes, rows = lengths.cpu().sort(descending=True, stable=True)
    rows = rows[sizes > 0]
    sizes = sizes[: len(rows)]
    steps = torch.arange(int(sizes[0]) if len(sizes) else 0)[:, None]
    real = steps < sizes
    return Order((starts.cpu()[rows] + steps).masked_select(real), rows, sizes, real)


def fits(values: Tensor, states: list[Tensor]) -> bool:
    """Whether the cells of `rnn_cell` are for a call: on CPU, without projections."""
    return values.device.type == "cpu" and states[0].shape[-1] == states[-1].shape[-1]


def buffers(values: Tensor, states: list[Tensor], mode: str) -> list[Tensor]:
    """What one layer in one direction keeps, empty, with room for every position."""
    positions, (_, rows, size) = values.shape[0], states[0].shape
    shapes = [(positions, 4 * size) if name == "gates" else (rows + positions, size) for name in KEPT[mode]]
    return [values.new_empty(shape) for shape in shapes]


def filled(bufs: list[Tensor], mode: str, order: Order) -> list[Tensor]:
    """Buffers without the room that is left."""
    real, rows = len(order.positions), len(order.rows)
    return [b[:real] if name == "gates" else b[: rows + real] for name, b in zip(KEPT[mode], bufs, strict=True)]


def turned(x: Tensor, order: Order, direction: int) -> Tensor:
    """Positions as a direction runs through them, and back."""
    return x.index_select(0, order.flip) if direction else x


def outputs(layer: list[list[Tensor]], mode: str, order: Order) -> Tensor:
    """What a layer hands on, directions side by side."""
    h, rows = KEPT[mode].index("h"), len(order.rows)
    outs = [turned(kept[h][rows:], order, d) for d, kept in enumerate(layer)]
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def forward(
    keep: bool, values: Tensor, starts: Tensor, lengths: Tensor, states: list[Tensor], weights: list[Tensor], mode: str,
    bias: bool, layers: int, bidirectional: bool,
) -> list[Tensor]:  # fmt: skip
    """Outputs (P, H), 0 where nothing is real, last states, and if asked what each layer and direction keeps."""
    order, own, directions = order_of(starts, lengths), 4 if bias else 2, 1 + bidirectional
    x, steps, rows = values.index_select(0, order.positions), order.steps, len(order.rows)
    ends, kept = [s.clone() for s in states], list[Tensor]()
    for i in range(layers):
        layer = []
        for d in range(directions):
            k, bufs = i * directions + d, buffers(values, states, mode)
            kept += bufs if keep else []
            layer.append(filled(bufs, mode, order))
            if rows == 0:
                continue
            held = layer[d][-len(states) :]
            for buf, s in zip(held, states, strict=True):
                buf[:rows] = s[k].index_select(0, order.rows)
            RUN[mode](turned(x, order, d), weights[k * own : (k + 1) * own], layer[d], steps)
            for end, buf in zip(ends, held, strict=True):
                end[k].index_copy_(0, order.rows, buf.index_select(0, order.last))
        x = outputs(layer, mode, order)
    shape = (values.shape[0], x.shape[1])
    out = values.new_empty(shape) if len(x) == len(values) else values.new_zeros(shape)
    return [out.index_copy_(0, order.positions, x), *ends, *kept]


def backward(
    grads: list[Tensor], kept: list[Tensor], wants_values: bool, values: Tensor, starts: Tensor, lengths: Tensor,
    states: list[Tensor], weights: list[Tensor], mode: str, bias: bool, layers: int, bidirectional: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of values (0 unless wanted), states and weights."""
    order, own, directions = order_of(starts, lengths), 4 if bias else 2, 1 + bidirectional
    ends, found = [g.clone() for g in grads[1:]], list[Tensor]()
    if len(order.rows) == 0:
        return [torch.zeros_like(values), *ends, *[torch.zeros_like(w) for w in weights]]
    count = len(KEPT[mode])
    parts = [filled(kept[k : k + count], mode, order) for k in range(0, len(kept), count)]
    stack = [parts[k : k + directions] for k in range(0, len(parts), directions)]
    inputs = [values.index_select(0, order.positions), *[outputs(layer, mode, order) for layer in stack[:-1]]]
    grad, steps = grads[0].index_select(0, order.positions), order.steps
    for i in reversed(range(layers)):
        to_input, of_layer = list[Tensor](), list[Tensor]()
        for d, (bufs, g) in enumerate(zip(stack[i], grad.chunk(directions, 1), strict=True)):
            k = i * directions + d
            w, u = weights[k * own : k * own + 2]
            held = [e[k].index_select(0, order.rows) for e in ends]
            from_x, from_h = BACK[mode](turned(g, order, d), held, u, bufs, steps)
            for e, h in zip(ends, held, strict=True):
                e[k].index_copy_(0, order.rows, h)
            before = bufs[KEPT[mode].index("h")].index_select(0, order.before)
            of_layer += weight_grads(from_x, from_h, turned(inputs[i], order, d), before, mode, bias)
            if i or wants_values:
                to_input.append(turned(from_x @ turn_gates(w, mode, 1), order, d))
        found = of_layer + found
        grad = sum(to_input[1:], to_input[0]) if to_input else grad
    to_values = torch.zeros_like(values)
    if wants_values:
        to_values.index_copy_(0, order.positions, grad)
    return [to_values, *ends, *found]


def turn_gates(w: Tensor, mode: str, shift: int) -> Tensor:
    """The input's weights of a GRU as n, r, z from torch's r, z, n (1), and back (-1)."""
    return w.roll(shift * (w.shape[0] // 3), 0) if mode == "gru" else w


def weight_grads(from_x: Tensor, from_h: Tensor, x: Tensor, h: Tensor, mode: str, bias: bool) -> list[Tensor]:
    """Of one layer in one direction, in torch's order: gates of all positions (N, G·H) by what they were made of."""
    found = [turn_gates(from_x.t() @ x, mode, -1), from_h.t() @ h]
    return [*found, turn_gates(from_x.sum(0), mode, -1), from_h.sum(0)] if bias else found
