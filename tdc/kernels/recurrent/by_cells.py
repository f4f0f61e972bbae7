"""Recurrent networks cell by cell in plain operations, differentiable to any order, also under `torch.func`.

    cell(x, states, weights, bias) -> new states    of rows (R, D) at one step, the output first

torch's own cells write in place, which its rules for vmap do not allow of derivatives (2.11-2.13), and know no
projections.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.kernels.recurrent.layers import turned
from tdc.kernels.recurrent.order import Order

Cell = Callable[[Tensor, list[Tensor], list[Tensor], bool], list[Tensor]]


def run_cells(
    values: Tensor, order: Order, states: list[Tensor], weights: list[Tensor], mode: str, bias: bool, layers: int,
    bidirectional: bool,
) -> list[Tensor]:  # fmt: skip
    """values (P, D), states (S, B, H) -> outputs (P, H), 0 where nothing is real, and states."""
    directions, ends, rows, alive = 1 + bidirectional, list[list[Tensor]](), order.rows, order.counts
    if order.count == 0:
        return without_steps(values, states, bidirectional)
    own, x = len(weights) // (layers * directions), values.index_select(0, order.positions)
    for i in range(layers):
        outs = []
        for d in range(directions):
            k, steps = i * directions + d, []
            given = weights[k * own : (k + 1) * own]
            held = [s[k].index_select(0, rows) for s in states]
            for n, part in zip(alive, turned(x, order, d).split(alive), strict=True):
                new = CELLS[mode](part, [h[:n] for h in held], given, bias)
                held = [torch.cat([a, h[n:]]) for a, h in zip(new, held, strict=True)]
                steps.append(new[0])
            outs.append(turned(torch.cat(steps), order, d))
            ends.append([s[k].index_copy(0, rows, h) for s, h in zip(states, held, strict=True)])
        x = torch.cat(outs, 1)
    out = x.new_zeros(values.shape[0], x.shape[1]).index_copy(0, order.positions, x)
    return [out, *[torch.stack(parts) for parts in zip(*ends, strict=True)]]


def without_steps(values: Tensor, states: list[Tensor], bidirectional: bool) -> list[Tensor]:
    """Outputs and states if no row has a step."""
    width = states[0].shape[-1] * (1 + bidirectional)
    return [values.new_zeros(values.shape[0], width), *[s.clone() for s in states]]


def sides(x: Tensor, h: Tensor, weights: list[Tensor], bias: bool) -> tuple[Tensor, Tensor]:
    """The gates' terms of the input and of the state."""
    w, u, *rest = weights
    first, second = rest[:2] if bias else (None, None)
    return F.linear(x, w, first), F.linear(h, u, second)


def plain(
    act: Callable[[Tensor], Tensor], x: Tensor, states: list[Tensor], weights: list[Tensor], bias: bool
) -> list[Tensor]:
    a, b = sides(x, states[0], weights, bias)
    return [act(a + b)]


def gru(x: Tensor, states: list[Tensor], weights: list[Tensor], bias: bool) -> list[Tensor]:
    (h,), (a, b) = states, [t.chunk(3, 1) for t in sides(x, states[0], weights, bias)]
    r, z = [(p + q).sigmoid() for p, q in zip(a[:2], b[:2], strict=True)]
    n = (a[2] + r * b[2]).tanh()
    return [n + z * (h - n)]


def lstm(x: Tensor, states: list[Tensor], weights: list[Tensor], bias: bool) -> list[Tensor]:
    a, b = sides(x, states[0], weights, bias)
    i, f, g, o = (a + b).chunk(4, 1)
    c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
    h, projection = o.sigmoid() * c.tanh(), weights[2 + 2 * bias :]
    return [h.to(x.dtype) @ projection[0].t() if projection else h, c]  # autocast leaves c as it is beside projections


CELLS: dict[str, Cell] = {
    "lstm": lstm, "gru": gru, "rnn_tanh": partial(plain, torch.tanh), "rnn_relu": partial(plain, torch.relu),
}  # fmt: skip
