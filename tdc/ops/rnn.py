"""Recurrent networks on rows of different lengths: what `nn.RNN`, `nn.LSTM` and `nn.GRU` call.

    packed (NestedTensor)    (B, -1, D) -> (B, -1, H), and states (layers, B, H) after the last real step of each row
    padded (MaskedBatch)     the same on a rectangle; its padding is never read

Real positions are reordered step by step, longest rows first, for torch's own packed-sequence kernels, so that no
padding is computed in either direction. How many rows are alive at each step is read on the host, as those kernels
want it. In a graph this happens inside one custom op, whose backward runs its forward again; torch would unroll the
steps and specialise the graph on the longest row.

    P places (packed total, or B·L), B rows, D features in, H out; S = layers · directions

Invariants: a row without positions keeps its initial state; dropout falls between layers, as in torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc._errors import StructureError, describe, message
from tdc._rules import Rule, add_rule
from tdc._structure import eager, lengths_of
from tdc.masked import MaskedBatch
from tdc.nested import NestedTensor

KERNELS: dict[str, Any] = {
    "lstm": torch.lstm, "gru": torch.gru, "rnn_tanh": torch.rnn_tanh, "rnn_relu": torch.rnn_relu,
}  # fmt: skip
GIVEN = (
    "Tensor values, Tensor starts, Tensor lengths, Tensor[] states, Tensor[] weights, "
    "str mode, bool bias, int layers, bool bidirectional"
)
torch.library.define("tdc::rnn", f"({GIVEN}) -> Tensor[]")
torch.library.define("tdc::rnn_backward", f"(Tensor[] grads, {GIVEN}) -> Tensor[]")
rnn_op, rnn_backward_op = torch.ops.tdc.rnn.default, torch.ops.tdc.rnn_backward.default


def step_by_step(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Places of step 0 of all rows, of step 1, …, longest rows first; the rows alive at each step; the rows' order.

    Reads the lengths on the host. Rows without positions are left out.
    """
    sizes, order = lengths.cpu().sort(descending=True, stable=True)
    order = order[sizes > 0]
    sizes = sizes[: order.shape[0]]
    steps = torch.arange(int(sizes[0]) if len(sizes) else 0)[:, None]
    alive = steps < sizes
    places = (starts.cpu()[order] + steps)[alive]
    return places.to(starts.device), alive.sum(1), order.to(starts.device)


def run_rows(
    values: Tensor, starts: Tensor, lengths: Tensor, states: list[Tensor], weights: list[Tensor], mode: str, bias: bool,
    layers: int, bidirectional: bool,
) -> list[Tensor]:  # fmt: skip
    """values (P, D), starts and lengths (B,), states (S, B, H) -> outputs (P, H), 0 where nothing is real, and states.

    Differentiable where autograd runs.
    """
    places, alive, order = step_by_step(starts, lengths)
    if len(alive) == 0:
        width = states[0].shape[-1] * (1 + bidirectional)
        return [values.new_zeros(values.shape[0], width), *[s.clone() for s in states]]
    hx = tuple([s.index_select(1, order) for s in states])
    training = torch.is_grad_enabled()  # cuDNN keeps what its backward needs; there is no dropout in here
    given = (hx if mode == "lstm" else hx[0], weights, bias, layers, 0.0, training, bidirectional)
    out, *last = KERNELS[mode](values.index_select(0, places), alive, *given)
    whole = out.new_zeros(values.shape[0], out.shape[1]).index_copy(0, places, out)
    return [whole, *[s.index_copy(1, order, t) for s, t in zip(states, last, strict=True)]]


@torch.library.impl("tdc::rnn", "CompositeExplicitAutograd")
def forward_rows(*args: Any) -> list[Tensor]:
    """`run_rows` as one node."""
    with torch.no_grad():
        return run_rows(*args)


@torch.library.impl("tdc::rnn_backward", "CompositeExplicitAutograd")
def backward_rows(grads: list[Tensor], values: Tensor, starts: Tensor, lengths: Tensor, *args: Any) -> list[Tensor]:
    """Gradients of values, states and weights; runs the forward again."""
    states, weights, *rest = args
    given = [values, *states, *weights]
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in given]
        first, second = leaves[1 : 1 + len(states)], leaves[1 + len(states) :]
        outs = run_rows(leaves[0], starts, lengths, first, second, *rest)
    found = torch.autograd.grad(outs, leaves, grads, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g.contiguous() for t, g in zip(given, found, strict=True)]


@torch.library.register_fake("tdc::rnn")
def _(
    values: Tensor, starts: Tensor, lengths: Tensor, states: list[Tensor], weights: list[Tensor], mode: str, bias: bool,
    layers: int, bidirectional: bool,
) -> list[Tensor]:  # fmt: skip
    width = states[0].shape[-1] * (1 + bidirectional)
    return [values.new_empty(values.shape[0], width), *[s.new_empty(s.shape) for s in states]]


@torch.library.register_fake("tdc::rnn_backward")
def _(
    grads: list[Tensor], values: Tensor, starts: Tensor, lengths: Tensor, states: list[Tensor], weights: list[Tensor],
    mode: str, bias: bool, layers: int, bidirectional: bool,
) -> list[Tensor]:  # fmt: skip
    return [t.new_empty(t.shape) for t in (values, *states, *weights)]


def over_members(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[list[Tensor], list[int]]:
    """vmap: one member after another, as the kernels take one set of weights."""

    def member(x: Any, dim: Any, i: int) -> Any:
        if isinstance(x, (list, tuple)):
            return [member(t, d, i) for t, d in zip(x, dim, strict=True)]
        return x if dim is None else x.select(dim, i)

    runs = [op(*[member(x, d, i) for x, d in zip(args, in_dims, strict=True)]) for i in range(info.batch_size)]
    outs = [torch.stack(parts) for parts in zip(*runs, strict=True)]
    return outs, [0] * len(outs)


for _op in (rnn_op, rnn_backward_op):
    torch.library.register_vmap(_op, lambda *args, _op=_op: over_members(_op, *args))


class Recur(torch.autograd.Function):
    """The two ops as one differentiable function, for graphs and for `torch.func`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(starts: Tensor, lengths: Tensor, options: tuple[Any, ...], values: Tensor, *rest: Tensor) -> Any:
        count, *given = options
        return tuple(rnn_op(values, starts, lengths, list(rest[:count]), list(rest[count:]), *given))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        starts, lengths, ctx.options, *tensors = inputs
        ctx.save_for_backward(starts, lengths, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        starts, lengths, values, *rest = ctx.saved_tensors
        count, *given = ctx.options
        parts = rnn_backward_op(list(grads), values, starts, lengths, rest[:count], rest[count:], *given)
        return None, None, None, *parts


def run_layers(
    values: Tensor, starts: Tensor, lengths: Tensor, hx: Any, weights: Any, mode: str, bias: bool, layers: int,
    dropout: float, train: bool, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """All layers at once, or one by one where dropout falls between them."""
    states = list(hx) if mode == "lstm" else [hx]
    if not train or dropout == 0.0 or layers == 1:
        given = (mode, bias, layers, bidirectional)
        if eager() and not torch._C._len_torch_dispatch_stack():  # nor under a mode, as export traces
            return tuple(run_rows(values, starts, lengths, states, list(weights), *given))
        states = [s.view_as(s) for s in states]  # Dynamo wants different tensors there (2.13), users may pass one twice
        return Recur.apply(starts, lengths, (len(states), *given), values, *states, *weights)
    count, directions, last = len(weights) // layers, 1 + bidirectional, []
    for i in range(layers):
        values = F.dropout(values, dropout) if i else values
        hx = [s.narrow(0, i * directions, directions) for s in states]
        given = (hx if mode == "lstm" else hx[0], weights[i * count : (i + 1) * count], mode, bias, 1)
        values, *ends = run_layers(values, starts, lengths, *given, 0.0, train, bidirectional)
        last.append(ends)
    return values, *[torch.cat(parts) for parts in zip(*last, strict=True)]


def check_input(x: Any, mode: str, ragged: tuple[int, ...], batch_dim: int, batch_first: bool) -> None:
    """Rows of steps of features.

    Raises:
        StructureError: another layout.
    """
    if x.ndim != 3 or (ragged, batch_dim) != (((1,), 0) if batch_first else ((0,), 1)):
        expected = f"(B, -1, D) and batch_first=True, or (-1, B, D) without, for a {type(x).__name__}"
        got = f"{describe(x)} and batch_first={batch_first}"
        hint = "build the module with batch_first=True"
        raise StructureError(message(mode, expected, got, hint=hint))


def recurrent(mode: str) -> None:
    """The rows of one kind of recurrent network."""
    op = KERNELS[mode]

    def nested(
        input: NestedTensor, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        s = input.structure
        check_input(input, mode, s.ragged_dims, s.batch_dim, batch_first)
        given = (hx, params, mode, has_biases, num_layers, dropout, train, bidirectional)
        out, *last = run_layers(input.values, s.offsets[:-1], lengths_of(s), *given)
        return input.with_values(out), *last

    def masked(
        input: MaskedBatch, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        check_input(input, mode, input.ragged_dims, input.batch_dim, batch_first)
        data = input.data.movedim(input.batch_dim, 0)
        rows, longest = data.shape[:2]
        starts = torch.arange(rows, device=data.device) * longest
        given = (hx, params, mode, has_biases, num_layers, dropout, train, bidirectional)
        out, *last = run_layers(data.flatten(0, 1), starts, input.lengths[:, 0], *given)
        return input.with_data(out.unflatten(0, (rows, longest)).movedim(0, input.batch_dim)), *last

    source = "torch.nn." + {"lstm": "LSTM", "gru": "GRU"}.get(mode, "RNN")
    for kind, impl in (("nested", nested), ("masked", masked)):
        add_rule(Rule(op, kind, "rnn", impl, op, source=source))


for _mode in KERNELS:
    recurrent(_mode)
