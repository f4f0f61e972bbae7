"""One recurrent layer in one direction on CPU: its steps forward and back.

The input is multiplied once for all steps; a step is one gemm of the rows that have it and a few passes over its gates,
written where they stay for the backward. The backward makes the factors of all gates at once, takes the steps with one
gemm each, and the weights' gradients by one product at the end; autograd of cells, and torch's kernel for packed rows,
add to them at each step (2.13).

    N real positions, step by step and longest rows first; R rows that have any; H features of the state

    gates      (N, 4·H)      LSTM: i, f, g, o. GRU: n, r, z, and what the state adds to n before r scales it
    states     (R + N, H)    before the first step, then after each: h, and c of an LSTM

Invariants: nothing that is kept is written again, so that a backward may run twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

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


def tanh_slope(h: Tensor) -> Tensor:
    return h.square().neg_().add_(1)


def relu_slope(h: Tensor) -> Tensor:
    return (h > 0).to(h.dtype)


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
