"""A recurrent layer on CPU step by step, each on the rows that have it, by the cells of `recurrent.cell`.

    P positions (packed total, or B·L), B rows, D features in, H out
    N real positions, step by step and longest rows first; R rows that have any

Invariant: what is kept for the backward has sizes of B and P, not of lengths.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.ops.recurrent import cell
from tdc.ops.recurrent.cell import Steps
from tdc.ops.recurrent.layers import Kept, Layer, Net, Way

KEPT = {"lstm": ("gates", "h", "c"), "gru": ("gates", "h"), "rnn_tanh": ("h",), "rnn_relu": ("h",)}
RUN: dict[str, Any] = {
    "lstm": cell.run_lstm, "gru": cell.run_gru, "rnn_tanh": partial(cell.run_plain, torch.tanh_),
    "rnn_relu": partial(cell.run_plain, torch.relu_),
}  # fmt: skip
BACK: dict[str, Any] = {
    "lstm": cell.back_lstm, "gru": cell.back_gru, "rnn_tanh": partial(cell.back_plain, cell.tanh_slope),
    "rnn_relu": partial(cell.back_plain, cell.relu_slope),
}  # fmt: skip


def buffers(x: Tensor, positions: int, rows: int, size: int, mode: str) -> Kept:
    """What one layer in one direction keeps, empty, with room for every position."""
    shapes = [(positions, 4 * size) if name == "gates" else (rows + positions, size) for name in KEPT[mode]]
    return [x.new_empty(shape) for shape in shapes]


def filled(net: Net, kept: Kept) -> Kept:
    """Buffers without the room that is left."""
    real, rows = net.by_steps.total, net.by_steps.count
    return [b[:real] if name == "gates" else b[: rows + real] for name, b in zip(KEPT[net.mode], kept, strict=True)]


def steps_of(net: Net) -> Steps:
    return Steps(net.by_steps.counts, net.by_steps.before)


def run(net: Net, layer: Layer, keep: bool) -> tuple[Tensor, list[Tensor], Kept]:
    """Forward. Buffers hold initial states first."""
    order, rows = net.by_steps, net.by_steps.count
    kept = buffers(layer.x, *net.room, layer.first[0].shape[1], net.mode)
    own = filled(net, kept)
    held = own[-len(layer.first) :]
    for buf, s in zip(held, layer.first, strict=True):
        buf[:rows] = s
    RUN[net.mode](layer.x, layer.weights, own, steps_of(net))
    return outputs(net, kept), [buf.index_select(0, order.last) for buf in held], kept if keep else []


def back(
    net: Net, layer: Layer, kept: Kept, grad: Tensor, held: list[Tensor], wanted: bool
) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
    """Backward. Gradients of the last states become those of the initial ones, where they lie."""
    own, (w, u) = filled(net, kept), layer.weights[:2]
    from_x, from_h = BACK[net.mode](grad, held, u, own, steps_of(net))
    before = own[KEPT[net.mode].index("h")].index_select(0, net.by_steps.before)
    found = weight_grads(from_x, from_h, layer.x, before, net.mode, net.bias)
    return from_x @ turn_gates(w, net.mode, 1) if wanted else None, held, found


def outputs(net: Net, kept: Kept) -> Tensor:
    return filled(net, kept)[KEPT[net.mode].index("h")][net.by_steps.count :]


def turn_gates(w: Tensor, mode: str, shift: int) -> Tensor:
    """The input's weights of a GRU as n, r, z from torch's r, z, n (1), and back (-1)."""
    return w.roll(shift * (w.shape[0] // 3), 0) if mode == "gru" else w


def weight_grads(from_x: Tensor, from_h: Tensor, x: Tensor, h: Tensor, mode: str, bias: bool) -> list[Tensor]:
    """In torch's order: gates of all positions (N, G·H) by what they were made of."""
    found = [turn_gates(from_x.t() @ x, mode, -1), from_h.t() @ h]
    return [*found, turn_gates(from_x.sum(0), mode, -1), from_h.sum(0)] if bias else found


STEPS = Way(run, back, outputs)
