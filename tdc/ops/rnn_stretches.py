"""LSTMs on CPU where nobody differentiates: a stretch of steps at which the same rows are alive is one call of oneDNN.

Rows lie step by step, longest first, so that a stretch of T steps of n rows is (T, n, D) as it lies. A call hands its
states on to the rows that live on, which come first; those of the others are their last ones. Weights are laid out for
oneDNN once for all calls.

    P positions (packed total, or B·L), B rows, D features in, H out; S = layers · directions
    N real positions, R rows that have any

Invariant: no position is padded. Where stretches are short, or weights large for so few positions, steps run: `pays`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.dynamo import pack_lstm_weights
from tdc.ops.rnn_steps import order_of, turned

LEAST = 4  # steps of a stretch, on average
LAID_OUT = 8192  # elements of weights that are laid out in the time that a position saves
LSTM = 2  # what `run_stretch` calls it
run_stretch: Any = torch.ops.aten.mkldnn_rnn_layer.default


def pays(values: Tensor, lengths: Tensor, weights: list[Tensor]) -> bool:
    """Whether an LSTM without projections runs so."""
    onednn: Any = torch.backends.mkldnn
    if pack_lstm_weights is None or not onednn.is_available() or not onednn.enabled:
        return False
    if any([t.dtype != torch.float32 or not t.numel() for t in (values, *weights)]):
        return False
    sizes = lengths.tolist()
    ends = {n for n in sizes if n}
    return LEAST * len(ends) <= max(ends, default=0) and sum([t.numel() for t in weights[:2]]) <= LAID_OUT * sum(sizes)


def forward(
    values: Tensor, starts: Tensor, lengths: Tensor, states: list[Tensor], weights: list[Tensor], bias: bool,
    layers: int, bidirectional: bool,
) -> list[Tensor]:  # fmt: skip
    """Outputs (P, H), 0 where nothing is real, and last states (S, B, H)."""
    order, own, directions = order_of(starts, lengths), 4 if bias else 2, 1 + bidirectional
    x, ends = values.index_select(0, order.positions), [s.clone() for s in states]
    alive = stretches(order.sizes.tolist())
    for i in range(layers):
        outs = list[Tensor]()
        for d in range(directions):
            k = i * directions + d
            held = [s[k].index_select(0, order.rows) for s in states]
            out, *last = run_layer(turned(x, order, d), held, weights[k * own : (k + 1) * own], alive)
            outs.append(turned(out, order, d))
            for end, t in zip(ends, last, strict=True):
                end[k].index_copy_(0, order.rows, t)
        x = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
    if len(x) < len(values):
        return [values.new_zeros(len(values), x.shape[1]).index_copy_(0, order.positions, x), *ends]
    back = torch.empty_like(order.positions)
    back[order.positions] = torch.arange(len(back))
    return [x.index_select(0, back), *ends]


def stretches(sizes: list[int]) -> list[tuple[int, int]]:
    """Of each stretch how many rows are alive, and its steps; of rows of these lengths, longest first.

    Example:
        >>> stretches([5, 5, 3])
        [(3, 3), (2, 2)]
    """
    found, begin = list[tuple[int, int]](), 0
    for row, end in reversed([*enumerate(sizes)]):
        if end > begin:
            found.append((row + 1, end - begin))
            begin = end
    return found


def run_layer(
    x: Tensor, states: list[Tensor], weights: list[Tensor], alive: list[tuple[int, int]]
) -> tuple[Tensor, ...]:
    """One layer in one direction.

    Args:
        x: (N, D).
        states: before the first step, (R, H) each.
        alive: of each stretch how many rows are alive, and its steps.

    Returns:
        Outputs (N, H), and states after the last step of each row, (R, H) each.
    """
    w, u, *biases = weights
    size, (h, c) = u.shape[1], states
    both = biases or [u.new_zeros(4 * size)] * 2
    (rows, steps), ends, outs = alive[0], list[tuple[Tensor, Tensor]](), list[Tensor]()
    packed = pack_lstm_weights(w, u, size, False, True, False, [steps, rows, x.shape[1]])
    how = False, [], LSTM, size, 1, True, False, False, False
    for (n, t), part in zip(alive, x.split([n * t for n, t in alive]), strict=True):
        ends.append((h[n:], c[n:]))
        y, h, c, _ = run_stretch(part.view(t, n, -1), *packed, *both, h[:n], c[:n], *how)
        outs.append(y.view(n * t, size))
    return torch.cat(outs), *[torch.cat(parts[::-1]) for parts in zip(*ends, (h, c), strict=True)]
