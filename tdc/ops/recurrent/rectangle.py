"""LSTMs on CPU whose rows are padded to the longest: one call of oneDNN for each layer and direction.

A step of padding opens the forget gate and closes the input gate, so that c stays what it was after a row's last real
step; h is read there. What tells is a flag: one more feature of the input, whose weights outweigh all others.

    N real positions, row by row; R rows that have any, for T steps; D features in, H out

Invariants: gradients at steps of padding are 0, and nothing is made of what lies there. Padding costs arithmetic and
saves calls: `pays` weighs them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.ops.recurrent.layers import Kept, Layer, Net, Way
from tdc.ops.recurrent.order import Order, RowByRow
from tdc.ops.recurrent.stretches import LSTM, run_stretch

DTYPES = torch.float32, torch.float32, torch.float32, torch.uint8  # kept: outputs, h, c, and what oneDNN wants back
WORTH, TRAINED = 6 * 2**20, 3 * 2**19  # multiplications of a padded step in the time of what it saves; with a backward
GATE = 192  # multiplications in the time of all else that one gate takes
LARGE = 1e30  # what a flag adds to a gate
run_back: Any = torch.ops.aten.mkldnn_rnn_layer_backward.default


def pays(order: Order, keep: bool, calls: int, weights: list[Tensor]) -> bool:
    """Whether an LSTM runs so that oneDNN `serves`, where another way takes so many calls."""
    padding = order.steps * order.count - order.total
    work = sum([t.numel() for t in weights[:2]]) + GATE * weights[0].shape[0]
    return padding * work <= (TRAINED if keep else WORTH) * calls


def padded(x: Tensor, order: RowByRow) -> Tensor:
    """(N, D) to (T, R, D + 1): positions, whose flag is 0, and padding, whose flag is 1."""
    out = x.new_zeros(order.steps * order.count, x.shape[1] + 1)
    out[:, -1] = 1
    return out.index_copy_(0, order.cells, F.pad(x, (0, 1))).view(order.steps, order.count, -1)


def flagged(weights: list[Tensor]) -> list[Tensor]:
    """Weights of gates i, f, g, o with those of the flag; biases, of which there may be none."""
    w, u, *biases = weights
    flag = w.new_zeros(4, w.shape[0] // 4)
    flag[0], flag[1] = -LARGE, LARGE
    return [torch.cat([w, flag.view(-1, 1)], 1), u, *(biases or [u.new_zeros(w.shape[0])] * 2)]


def run(net: Net, layer: Layer, keep: bool) -> tuple[Tensor, list[Tensor], Kept]:
    """Forward."""
    order, size = net.row_by_row, layer.first[0].shape[1]
    given = padded(layer.x, order), *flagged(layer.weights), *layer.first
    with torch.set_grad_enabled(keep):  # oneDNN keeps what its backward wants, where autograd is on
        y, h, c, held = run_stretch(*given, False, [], LSTM, size, 1, True, False, False, keep)
    lines = y.view(-1, size)
    last = [lines.index_select(0, order.ends), c]
    return lines.index_select(0, order.cells), last, [y, h, c, held] if keep else []


def back(
    net: Net, layer: Layer, kept: Kept, grad: Tensor, held: list[Tensor], wanted: bool
) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
    """Backward."""
    (y, h, c, space), (to_h, to_c), order = kept, held, net.row_by_row
    to_y = grad.new_zeros(order.steps * order.count, grad.shape[1]).index_copy_(0, order.cells, grad)
    to_y.index_add_(0, order.ends, to_h)
    given = padded(layer.x, order), *flagged(layer.weights), *layer.first, y, h, c
    grads = to_y.view_as(y), torch.zeros_like(to_h), to_c
    how: Any = False, LSTM, y.shape[2], 1, True, True, False, [], False
    to_x, to_w, *to_weights, first_h, first_c = run_back(*given, *grads, *how, space)
    lines = to_x.flatten(0, 1)[:, :-1].index_select(0, order.cells) if wanted else None
    return lines, [first_h, first_c], [to_w[:, :-1], *to_weights[: len(layer.weights) - 1]]


def hidden(kept: Kept) -> Kept:
    """What is kept as tensors without elements, whose sizes a graph knows: their storages hold it, which they end."""
    return [t.as_strided((0,), (1,), t.numel()) for t in kept]


def found_again(net: Net, size: int, kept: Kept) -> Kept:
    """What was `hidden`, of all layers and directions; nothing where tensors were copied on the way, to storages of
    their own or within others."""
    steps, rows = net.order.steps, net.order.count
    shapes = [(steps, rows, size), (rows, size), (rows, size), (-1,)]
    found = [t.new_empty(0).set_(t.untyped_storage()) for t in kept]
    for k, (t, whole) in enumerate(zip(kept, found, strict=True)):
        known = math.prod(shapes[k % len(shapes)])
        if len(whole) == 0 or t.storage_offset() != len(whole) or known not in (-1, len(whole)):
            return []
    return [whole.view(shapes[k % len(shapes)]) for k, whole in enumerate(found)]


def outputs(net: Net, kept: Kept) -> Tensor:
    return kept[0].flatten(0, 1).index_select(0, net.row_by_row.cells)


RECTANGLE = Way(run, back, outputs)
