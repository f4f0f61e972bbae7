"""Recurrent networks on rows of different lengths: what `nn.RNN`, `nn.LSTM` and `nn.GRU` call.

    (B, -1, D) -> (B, -1, H), and states (layers, B, H) after the last real step of each row

    in training on CPU, in graphs    all layers are one call of `torch.ops.tdc.rnn`
    forward mode                     plain cells
    otherwise                        torch's kernels for packed sequences

Invariants: a row without positions keeps its initial state; dropout falls between layers, as in torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.dtypes import as_autocast
from tdc.core.dynamo import known
from tdc.core.errors import ShapeError, StructureError, describe, message
from tdc.core.rules import define, note_syncs
from tdc.core.typing import Op
from tdc.kernels.recurrent.by_cells import run_cells
from tdc.kernels.recurrent.operator import (
    KERNELS,
    Options,
    fits,
    learns,
    needs_tangents,
    recur,
    rnn_op,
    run_rows,
)
from tdc.kernels.recurrent.order import Order, order_of, order_on, read_order
from tdc.layout.segments import lengths_of
from tdc.ragged.nested import NestedTensor

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
WEIGHTS = "nn.LSTM(...)._flat_weights"  # where to have them from


def run_layers(
    values: Tensor, starts: Tensor, lengths: Tensor, order: Order | None, hx: Any, weights: Any, mode: str, bias: bool,
    layers: int, dropout: float, train: bool, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """All layers at once, or one by one where dropout falls between them. The order is known where it can be read."""
    states = list(hx) if mode == "lstm" else [hx]
    if mode != "gru":  # on CPU autocast leaves a gru as it is, and an lstm of rows of different lengths alone (2.13)
        count = len(states)
        cell = states[-1]
        values, *rest = as_autocast(values, *states, *weights)
        states, weights = rest[:count], rest[count:]
        if values.device.type == "cpu" and cell.shape[-1] != states[0].shape[-1]:
            states = [states[0], cell]  # beside projections it is what it was (2.11-2.13)
    if not train or dropout == 0.0 or layers == 1:
        how = (mode, bias, layers, bidirectional)
        by_layers = fits(values, states) and not torch.is_autocast_enabled(values.device.type)
        tensors = [values, *states, *weights]
        if needs_tangents(tensors):
            return tuple(run_cells(values, order or order_of(starts, lengths), states, list(weights), *how))
        learned = learns(tensors)
        if order is not None and not (by_layers and learned):
            return tuple(run_rows(values, order, states, list(weights), *how))
        if not learned:
            return tuple(rnn_op(False, values, starts, lengths, states, list(weights), *how))
        # Dynamo wants different tensors there (2.13), users may pass one twice.
        tensors[1 : 1 + len(states)] = [s.view_as(s) for s in states]
        options = Options(len(states), len(tensors), by_layers, how, order, learns([values]))
        outs: tuple[Tensor, ...] = recur(starts, lengths, options, *tensors)
        return outs[: 1 + len(states)]
    count, directions, last = len(weights) // layers, 1 + bidirectional, []
    for i in range(layers):
        values = F.dropout(values, dropout) if i else values
        hx = [s.narrow(0, i * directions, directions) for s in states]
        of_layer = (hx if mode == "lstm" else hx[0], weights[i * count : (i + 1) * count], mode, bias, 1)
        values, *ends = run_layers(values, starts, lengths, order, *of_layer, 0.0, train, bidirectional)
        last.append(ends)
    return values, *[torch.cat(parts) for parts in zip(*last, strict=True)]


def check_input(x: Any, mode: str, batch_first: bool) -> None:
    """A StructureError for another layout than rows of steps of features."""
    if x.ndim != 3 or (x.ragged_dims, x._batch_dim) != (((1,), 0) if batch_first else ((0,), 1)):
        expected = f"(B, -1, D) and batch_first=True, or (-1, B, D) without, for a {type(x).__name__}"
        got = f"{describe(x)} and batch_first={batch_first}"
        hint = "build the module with batch_first=True"
        raise StructureError(message(mode, expected, got, hint=hint))


def check_sizes(mode: str, x: Any, states: list[Tensor], weights: Any, bias: bool, runs: int, directions: int) -> None:
    """A ShapeError for states and weights of other sizes than those of a batch and of each other: kernels read on."""
    count = runs * ((4 if bias else 2) + (states[0].shape[-1] != states[-1].shape[-1]))  # a projection is one more
    if len(weights) != count:
        expected = f"{count} weights of {runs} layers and directions"
        raise ShapeError(message(mode, expected, f"{len(weights)}", hint=f"those of a module: {WEIGHTS}"))
    rows, features, h, size = x.shape[x._batch_dim], x.shape[2], states[0].shape[-1], states[-1].shape[-1]
    gates, own = GATES[mode] * size, len(weights) // runs
    for s, n in zip(states, (h, size), strict=False):
        if differ(s.shape, (runs, rows, n)):
            hint = "(layers * directions, batch, hidden size), or none at all for zeros"
            raise ShapeError(message(mode, f"states ({runs}, {rows}, {n})", describe(s), hint=hint))
    for i, w in enumerate(weights):
        width = features if i < own * directions else directions * h
        of_layer = [(gates, width), (gates, h), *[(gates,)] * (2 * bias), (h, size)]
        if differ(w.shape, of_layer[i % own]):
            raise ShapeError(message(mode, f"{of_layer[i % own]} for weight {i}", describe(w), hint=WEIGHTS))


def differ(shape: Any, known_shape: tuple[Any, ...]) -> bool:
    """True if a shape is not the known one, as far as a graph can tell."""
    return len(shape) != len(known_shape) or any([known(a != b) for a, b in zip(shape, known_shape, strict=True)])


def recurrent(mode: str) -> Op:
    """The rule of one kind of recurrent network."""

    def rule(
        input: Any, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        check_input(input, mode, batch_first)
        states, runs = list(hx) if mode == "lstm" else [hx], num_layers * (1 + bidirectional)
        check_sizes(mode, input, states, params, has_biases, runs, 1 + bidirectional)
        given = (hx, params, mode, has_biases, num_layers, dropout, train, bidirectional)
        if isinstance(input, NestedTensor):
            s = input.structure
            order = order_on(s)
            out, *last = run_layers(input.values, s.offsets[:-1], lengths_of(s), order, *given)
            return input.with_values(out), *last
        data = input.data.movedim(input.batch_dim, 0)
        rows, longest = data.shape[:2]
        starts = torch.arange(rows, device=data.device) * longest
        lengths = input.lengths[:, 0]
        order = read_order(starts, lengths)
        out, *last = run_layers(data.flatten(0, 1), starts, lengths, order, *given)
        return input.with_data(out.unflatten(0, (rows, longest)).movedim(0, input.batch_dim)), *last

    return rule


for _mode, _op in KERNELS.items():
    define(_op, "rnn", ragged=recurrent(_mode))
note_syncs("the lengths, which say how many rows have a step", *KERNELS.values())
