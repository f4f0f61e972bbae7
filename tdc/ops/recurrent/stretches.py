"""LSTMs on CPU where nobody differentiates: a stretch of steps at which the same rows are alive is one call of oneDNN.

Rows lie step by step, longest first, so that a stretch of T steps of n rows is (T, n, D) as it lies. A call hands its
states on to the rows that live on, which come first; those of the others are their last ones. Weights are laid out for
oneDNN once for all calls.

Invariant: no position is padded. Where stretches are short, or weights large for so few positions, steps run: `pays`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.torch_functions import pack_lstm_weights
from tdc.ops.recurrent.layers import Kept, Layer, Net, Way
from tdc.ops.recurrent.order import Order

LEAST = 4  # steps of a stretch, on average
LAID_OUT = 8192  # elements of weights that are laid out in the time that a position saves
LSTM = 2  # what `run_stretch` calls it
run_stretch: Any = torch.ops.aten.mkldnn_rnn_layer.default


def serves(tensors: list[Tensor]) -> bool:
    """Whether oneDNN has an LSTM, without projections, of these."""
    onednn: Any = torch.backends.mkldnn
    if not onednn.is_available() or not onednn.enabled:
        return False
    return all([t.dtype == torch.float32 and t.numel() > 0 for t in tensors])


def pays(order: Order, weights: list[Tensor]) -> bool:
    """Whether an LSTM runs so that oneDNN `serves`."""
    enough = sum([t.numel() for t in weights[:2]]) <= LAID_OUT * order.total
    return pack_lstm_weights is not None and LEAST * len(order.stretches) <= order.steps and enough


def run(net: Net, layer: Layer, keep: bool) -> tuple[Tensor, list[Tensor], Kept]:
    """One layer in one direction, which keeps nothing."""
    x, (w, u, *biases), (h, c), alive = layer.x, layer.weights, layer.first, net.by_steps.stretches
    size = u.shape[1]
    both = biases or [u.new_zeros(4 * size)] * 2
    (rows, steps), ends, outs = alive[0], list[tuple[Tensor, Tensor]](), list[Tensor]()
    packed, w, u = pack_lstm_weights, w.contiguous(), u.contiguous()  # it reads no strides
    laid_out = packed(w, u, size, False, True, False, [steps, rows, x.shape[1]])
    how: Any = False, [], LSTM, size, 1, True, False, False, False
    for (n, t), part in zip(alive, x.split([n * t for n, t in alive]), strict=True):
        ends.append((h[n:], c[n:]))
        y, h, c, _ = run_stretch(part.view(t, n, -1), *laid_out, *both, h[:n], c[:n], *how)
        outs.append(y.view(n * t, size))
    return torch.cat(outs), [torch.cat(parts[::-1]) for parts in zip(*ends, (h, c), strict=True)], []


def refused(*args: Any) -> Any:
    raise AssertionError("stretches have no gradient")


STRETCHES = Way(run, refused, refused)
