"""Layers and directions of a recurrent network on CPU, around one of the ways in which a layer runs in a direction.

    P positions (packed total, or B·L), B rows, D features in, H out; S = layers · directions
    N real positions, in the order of a way; R rows that have any, at least one

    steps        each step on the rows that have it                                       `recurrent.steps`
    stretches    an LSTM's steps of the same rows as one call, without gradients          `recurrent.stretches`
    rectangle    an LSTM's rows as one call, padded                                       `recurrent.rectangle`

A reversed direction is the same layer on reversed rows: a permutation of the N positions that is its own inverse.

Invariant: a row without positions keeps its initial state, and its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.ops.recurrent.order import Order, RowByRow, Rows

Kept = list[Tensor]  # what the backward of a layer in one direction wants of its forward


class Net(NamedTuple):
    """What a call has besides tensors that learn.

    Attributes:
        room: P and B, of which buffers have the size.
    """

    order: Rows
    room: tuple[int, int]
    mode: str
    bias: bool
    layers: int
    directions: int

    @property
    def by_steps(self) -> Order:
        """The order, where rows run step by step."""
        assert isinstance(self.order, Order)
        return self.order

    @property
    def row_by_row(self) -> RowByRow:
        """The order, where rows run as they come."""
        assert isinstance(self.order, RowByRow)
        return self.order

    def own(self, weights: list[Tensor], k: int) -> list[Tensor]:
        """The weights of one layer in one direction: of the input, of the state, and biases."""
        n = 4 if self.bias else 2
        return weights[k * n : (k + 1) * n]


class Layer(NamedTuple):
    """One layer in one direction: its input (N, D), its initial states (R, H) each, and its weights."""

    x: Tensor
    first: list[Tensor]
    weights: list[Tensor]


class Way(NamedTuple):
    """How a layer runs in a direction.

    Attributes:
        run: outputs (N, H), states after the last step of each row (R, H), and if asked what is kept.
        back: of a gradient of the outputs and of those of the last states, those of the input if asked, of the
            initial states and of the weights.
        outputs: those of `run`, of what is kept.
    """

    run: Callable[[Net, Layer, bool], tuple[Tensor, list[Tensor], Kept]]
    back: Callable[[Net, Layer, Kept, Tensor, list[Tensor], bool], tuple[Tensor | None, list[Tensor], list[Tensor]]]
    outputs: Callable[[Net, Kept], Tensor]


def turned(x: Tensor, order: Rows, direction: int) -> Tensor:
    """Positions as a direction runs through them, and back."""
    return x.index_select(0, order.flip) if direction else x


def joined(outs: list[Tensor]) -> Tensor:
    """What a layer hands on, directions side by side."""
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def in_order(x: Tensor, order: Rows) -> Tensor:
    """The N positions of the values that are real."""
    return x[: order.total] if order.positions is None else x.index_select(0, order.positions)


def to_positions(x: Tensor, order: Rows, positions: int) -> Tensor:
    """The N positions where they lie in the values, and 0 where nothing is real."""
    if order.positions is None:
        return x if len(x) == positions else F.pad(x, (0, 0, 0, positions - len(x)))
    if len(x) == positions:
        return x.index_select(0, order.inverse)
    return x.new_zeros(positions, x.shape[1]).index_copy_(0, order.positions, x)


def of_rows(states: list[Tensor], k: int, order: Rows) -> list[Tensor]:
    """The states of one layer in one direction (R, H), of all (S, B, H)."""
    return [s[k].contiguous() if order.rows is None else s[k].index_select(0, order.rows) for s in states]


def put_rows(states: list[Tensor], k: int, order: Rows, found: list[Tensor]) -> None:
    """The other way: into the states of all layers and directions."""
    for s, t in zip(states, found, strict=True):
        s[k].copy_(t) if order.rows is None else s[k].index_copy_(0, order.rows, t)


def forward(
    way: Way, net: Net, keep: bool, values: Tensor, states: list[Tensor], weights: list[Tensor]
) -> list[Tensor]:
    """Outputs (P, H), 0 where nothing is real, last states, and if asked what each layer and direction keeps."""
    order = net.order
    x, ends, kept = in_order(values, order), [s.clone() for s in states], Kept()
    for i in range(net.layers):
        outs = list[Tensor]()
        for d in range(net.directions):
            k = i * net.directions + d
            layer = Layer(turned(x, order, d), of_rows(states, k, order), net.own(weights, k))
            out, last, own = way.run(net, layer, keep)
            kept += own
            outs.append(turned(out, order, d))
            put_rows(ends, k, order, last)
        x = joined(outs)
    return [to_positions(x, order, len(values)), *ends, *kept]


def backward(
    way: Way, net: Net, kept: Kept, grads: list[Tensor], wants_values: bool, values: Tensor, states: list[Tensor],
    weights: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    """Gradients of values (0 unless wanted), states and weights."""
    order, both, runs = net.order, net.directions, net.layers * net.directions
    ends, found, count = [g.clone() for g in grads[1:]], list[Tensor](), len(kept) // runs
    parts = [kept[k : k + count] for k in range(0, len(kept), count)]
    inputs = [in_order(values, order)]
    for k in range(0, runs - both, both):
        inputs.append(joined([turned(way.outputs(net, parts[k + d]), order, d) for d in range(both)]))
    grad = in_order(grads[0], order)
    for i in reversed(range(net.layers)):
        to_input, of_layer = list[Tensor](), list[Tensor]()
        for d, g in enumerate(grad.chunk(both, 1)):
            k = i * both + d
            layer = Layer(turned(inputs[i], order, d), of_rows(states, k, order), net.own(weights, k))
            held, wanted = of_rows(ends, k, order), i > 0 or wants_values
            to_x, to_states, to_weights = way.back(net, layer, parts[k], turned(g, order, d), held, wanted)
            put_rows(ends, k, order, to_states)
            of_layer += to_weights
            if to_x is not None:
                to_input.append(turned(to_x, order, d))
        found = of_layer + found
        grad = sum(to_input[1:], to_input[0]) if to_input else grad
    return [to_positions(grad, order, len(values)) if wants_values else torch.zeros_like(values), *ends, *found]
