"""Layers and directions of a recurrent network on CPU: their steps forward and back.

    P positions (packed total, or B·L), B rows, D features in, H out; S = layers · directions
    N real positions, step by step and longest rows first; R rows that have any, at least one

    gates      (N, 4·H)      LSTM: i, f, g, o. GRU: n, r, z, and the state's term of n before r scales it
    states     (R + N, H)    before the first step, then after each: h, and c of an LSTM

The input is multiplied once for all steps; a step is one gemm of the rows that have it and a few passes over its gates.
The backward makes the factors of all gates at once, takes the steps with one gemm each, and the weights' gradients by
one product. A reversed direction is the layer on reversed rows, a permutation that is its own inverse.

Invariants: a row without positions keeps its initial state, and its gradient. Buffers for the backward are never
written again, and have sizes of B and P, not of lengths, so that a graph knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.kernels.recurrent.order import Order


def before_and_after(states: Tensor, order: Order) -> Iterator[tuple[Tensor, Tensor]]:
    """A state before and after each step, of the rows that have it."""
    parts = states.split([order.count, *order.counts])
    for n, old, new in zip(order.counts, parts, parts[1:], strict=False):
        yield (old if old.shape[0] == n else old[:n]), new


def from_the_last(order: Order) -> Iterator[tuple[int, int]]:
    """Each step from the last to the first, and how many rows have it."""
    return zip(reversed(range(order.steps)), reversed(order.counts), strict=True)


def project(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write what the input adds to the gates of all steps."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def summed(biases: list[Tensor]) -> Tensor | None:
    """Both biases of gates that add what comes from the input and from the state."""
    return biases[0] + biases[1] if biases else None


# -- h = tanh or relu


def run_plain(
    act: Callable[[Tensor], Tensor], x: Tensor, weights: list[Tensor], kept: list[Tensor], order: Order
) -> None:
    """Fill `kept`, a state whose first rows are given."""
    w, u, *biases = weights
    (h,) = kept
    project(x, w, summed(biases), h[order.count :])
    u = u.t().contiguous()
    for h0, h1 in before_and_after(h, order):
        act(h1.addmm_(h0, u))


def back_plain(
    slope: Callable[[Tensor], Tensor], grad: Tensor, ends: list[Tensor], u: Tensor, kept: list[Tensor], order: Order
) -> tuple[Tensor, Tensor]:
    """Gradients of the gates; those of the state, in `ends`, become those of the initial state."""
    (dh,) = ends
    d = slope(kept[0][order.count :])
    grads, steps = grad.split(order.counts), d.split(order.counts)
    for t, n in from_the_last(order):
        h = dh[:n]
        torch.mm(steps[t].mul_(h.add_(grads[t])), u, out=h)
    return d, d


# -- LSTM


def run_lstm(x: Tensor, weights: list[Tensor], kept: list[Tensor], order: Order) -> None:
    """Fill `kept`, gates and two states whose first rows are given."""
    w, u, *biases = weights
    gates, hs, cs = kept
    project(x, w, summed(biases), gates)
    u, size = u.t().contiguous(), hs.shape[1]
    columns = [gates, gates[:, : 2 * size], *gates.chunk(4, 1)]
    parts = zip(*[part.split(order.counts) for part in columns], strict=True)
    states = zip(before_and_after(hs, order), before_and_after(cs, order), strict=True)
    for (step, opens, i, f, g, o), ((h0, h1), (c0, c1)) in zip(parts, states, strict=True):
        step.addmm_(h0, u)
        opens.sigmoid_()
        torch.mul(i, g.tanh_(), out=c1).addcmul_(f, c0)
        torch.tanh(c1, out=h1).mul_(o.sigmoid_())


def back_lstm(grad: Tensor, ends: list[Tensor], u: Tensor, kept: list[Tensor], order: Order) -> tuple[Tensor, Tensor]:
    """Gradients of the gates; those of the states, in `ends`, become those of the initial states."""
    gates, hs, cs = kept
    dh, dc = ends
    size = hs.shape[1]
    i, _, g, o = gates.chunk(4, 1)
    d = torch.empty_like(gates)
    di, df, dg, do = d.chunk(4, 1)
    tanh = cs[order.count :].tanh()
    opens = gates[:, : 2 * size]
    torch.addcmul(opens, opens, opens, value=-1, out=d[:, : 2 * size])
    di.mul_(g)
    df.mul_(cs.index_select(0, order.before))
    torch.addcmul(i, i, torch.mul(g, g, out=dg), value=-1, out=dg)
    torch.addcmul(o, o, o, value=-1, out=do).mul_(tanh)
    torch.addcmul(o, o, tanh.square_(), value=-1, out=tanh)  # from h to c
    columns = [d, d[:, : 3 * size].unflatten(1, (3, size)), do, gates[:, size : 2 * size], tanh, grad]
    steps, of_c, of_h, forget, into, grads = [part.split(order.counts) for part in columns]
    for t, n in from_the_last(order):
        h, c = dh[:n], dc[:n]
        c.addcmul_(h.add_(grads[t]), into[t])
        of_c[t].mul_(c.unsqueeze(1))
        of_h[t].mul_(h)
        c.mul_(forget[t])
        torch.mm(steps[t], u, out=h)
    return d, d


# -- GRU


def run_gru(x: Tensor, weights: list[Tensor], kept: list[Tensor], order: Order) -> None:
    """Fill `kept`, gates and a state whose first rows are given. The input has n, r, z and the state r, z, n."""
    w, u, *biases = weights
    gates, hs = kept
    size = hs.shape[1]
    first, bias = gates[:, : 3 * size], None
    gates[:, 3 * size :] = biases[1][2 * size :] if biases else 0
    if biases:
        bias = biases[0].roll(size)
        bias[size:] += biases[1][: 2 * size]
    project(x, w.roll(size, 0), bias, first)
    u = u.t().contiguous()
    columns = [gates[:, size:], first[:, size:], *gates.chunk(4, 1)]
    parts = zip(*[part.split(order.counts) for part in columns], strict=True)
    for (step, opens, n, r, z, m), (h0, h1) in zip(parts, before_and_after(hs, order), strict=True):
        step.addmm_(h0, u)
        opens.sigmoid_()
        torch.lerp(n.addcmul_(r, m).tanh_(), h0, z, out=h1)


def back_gru(grad: Tensor, ends: list[Tensor], u: Tensor, kept: list[Tensor], order: Order) -> tuple[Tensor, Tensor]:
    """Gradients of the gates n, r, z and r, z, n; those of the state, in `ends`, become those of the initial state."""
    gates, hs = kept
    (dh,) = ends
    size = hs.shape[1]
    n, r, z, m = gates.chunk(4, 1)
    opens = gates[:, size : 3 * size]
    d = torch.empty_like(gates)
    dn, dr, dz, dm = d.chunk(4, 1)
    torch.mul(n, n, out=dn).neg_().add_(1)
    torch.addcmul(dn, dn, z, value=-1, out=dn)
    torch.addcmul(opens, opens, opens, value=-1, out=d[:, size : 3 * size])
    dr.mul_(dn).mul_(m)
    dz.mul_(hs.index_select(0, order.before).sub_(n))
    torch.mul(dn, r, out=dm)
    columns = [d.unflatten(1, (4, size)), d[:, size:], z, grad]
    steps, of_u, stays, grads = [part.split(order.counts) for part in columns]
    for t, k in from_the_last(order):
        h = dh[:k]
        steps[t].mul_(h.add_(grads[t]).unsqueeze(1))
        h.mul_(stays[t]).addmm_(of_u[t], u)
    return d[:, : 3 * size], d[:, size:]


# -- layers

KEPT = {"lstm": ("gates", "h", "c"), "gru": ("gates", "h"), "rnn_tanh": ("h",), "rnn_relu": ("h",)}
RUN: dict[str, Any] = {
    "lstm": run_lstm, "gru": run_gru, "rnn_tanh": partial(run_plain, torch.tanh_),
    "rnn_relu": partial(run_plain, torch.relu_),
}  # fmt: skip
BACK: dict[str, Any] = {
    "lstm": back_lstm, "gru": back_gru, "rnn_tanh": partial(back_plain, lambda h: h.square().neg_().add_(1)),
    "rnn_relu": partial(back_plain, lambda h: (h > 0).to(h.dtype)),
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
