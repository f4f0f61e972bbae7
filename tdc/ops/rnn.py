"""Recurrent networks on rows of different lengths: what `nn.RNN`, `nn.LSTM` and `nn.GRU` call.

    packed (NestedTensor)    (B, -1, D) -> (B, -1, H), and states (layers, B, H) after the last real step of each row
    padded (MaskedBatch)     the same on a rectangle; its padding is never read

Real positions are reordered step by step, longest rows first, so that no padding is computed in either direction. How
many rows are alive at each step is read on the host. In a graph this happens inside one custom op; torch would unroll
the steps and specialise the graph on the longest row.

    on CPU                                    the cells of `rnn_cell`, which keep their gates for the backward
    elsewhere, projections, autocast          torch's kernels for packed sequences; a graph's backward runs them again
    a gradient of a gradient, without graph   the same, by autograd

    P positions (packed total, or B·L), B rows, D features in, H out; S = layers · directions

Invariants: a row without positions keeps its initial state; dropout falls between layers, as in torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.dynamo import eager, readable, trace_as, under_transform
from tdc.core.errors import StructureError, describe, message
from tdc.core.rules import Rule, add_rule
from tdc.ops import rnn_steps
from tdc.ops.rnn_steps import order_of
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.segments import lengths_of

KERNELS: dict[str, Any] = {
    "lstm": torch.lstm, "gru": torch.gru, "rnn_tanh": torch.rnn_tanh, "rnn_relu": torch.rnn_relu,
}  # fmt: skip
GIVEN = (
    "Tensor values, Tensor starts, Tensor lengths, Tensor[] states, Tensor[] weights, "
    "str mode, bool bias, int layers, bool bidirectional"
)
torch.library.define("tdc::rnn", f"(bool keep, {GIVEN}) -> Tensor[]")
torch.library.define("tdc::rnn_backward", f"(Tensor[] grads, Tensor[] kept, bool wants_values, {GIVEN}) -> Tensor[]")
rnn_op, rnn_backward_op = torch.ops.tdc.rnn.default, torch.ops.tdc.rnn_backward.default


def run_rows(
    values: Tensor, starts: Tensor, lengths: Tensor, states: list[Tensor], weights: list[Tensor], mode: str, bias: bool,
    layers: int, bidirectional: bool,
) -> list[Tensor]:  # fmt: skip
    """values (P, D), starts and lengths (B,), states (S, B, H) -> outputs (P, H), 0 where nothing is real, and states.

    Differentiable where autograd runs.
    """
    order = order_of(starts, lengths)
    positions, rows = [t.to(values.device) for t in (order.positions, order.rows)]
    if len(rows) == 0:
        width = states[0].shape[-1] * (1 + bidirectional)
        return [values.new_zeros(values.shape[0], width), *[s.clone() for s in states]]
    hx = tuple([s.index_select(1, rows) for s in states])
    training = torch.is_grad_enabled()  # cuDNN keeps what its backward needs; there is no dropout in here
    given = (hx if mode == "lstm" else hx[0], weights, bias, layers, 0.0, training, bidirectional)
    out, *last = KERNELS[mode](values.index_select(0, positions), order.alive, *given)
    values_out = out.new_zeros(values.shape[0], out.shape[1]).index_copy(0, positions, out)
    return [values_out, *[s.index_copy(1, rows, t) for s, t in zip(states, last, strict=True)]]


@torch.library.impl("tdc::rnn", "CompositeExplicitAutograd")
def forward_rows(
    keep: bool, values: Tensor, starts: Tensor, lengths: Tensor, states: list[Tensor], *args: Any
) -> list[Tensor]:
    """Outputs, last states, and if asked what the backward wants of the forward."""
    device = values.device.type
    with torch.no_grad():
        if rnn_steps.fits(values, states) and (keep or not torch.is_autocast_enabled(device)):
            with torch.autocast(device, enabled=False):
                return rnn_steps.forward(keep, values, starts, lengths, states, *args)
        return run_rows(values, starts, lengths, states, *args)


@torch.library.impl("tdc::rnn_backward", "CompositeExplicitAutograd")
def backward_rows(
    grads: list[Tensor], kept: list[Tensor], wants_values: bool, values: Tensor, starts: Tensor, lengths: Tensor,
    states: list[Tensor], weights: list[Tensor], *args: Any,
) -> list[Tensor]:  # fmt: skip
    """Gradients of values, states and weights."""
    if kept:
        with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
            return rnn_steps.backward(grads, kept, wants_values, values, starts, lengths, states, weights, *args)
    with torch.enable_grad():
        tensors = [t.detach().requires_grad_() for t in (values, *states, *weights)]
        found = gradients(False, tensors, grads, starts, lengths, len(states), args)
    return [g.contiguous() for g in found]


def gradients(
    again: bool, tensors: list[Tensor], grads: list[Tensor], starts: Tensor, lengths: Tensor, count: int, args: Any
) -> list[Tensor]:
    """Of values, `count` states and weights by autograd, which runs the forward again; differentiable if asked."""
    leaves = [t.view_as(t) if t.requires_grad else t for t in tensors]  # views: one tensor may be there twice
    outs = run_rows(leaves[0], starts, lengths, leaves[1 : 1 + count], leaves[1 + count :], *args)
    wanted = [t for t in leaves if t.requires_grad]
    found = iter(torch.autograd.grad(outs, wanted, grads, allow_unused=True, create_graph=again))
    each = [next(found) if t.requires_grad else None for t in leaves]
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, each, strict=True)]


@torch.library.register_fake("tdc::rnn")
def _(
    keep: bool, values: Tensor, starts: Tensor, lengths: Tensor, states: list[Tensor], weights: list[Tensor], mode: str,
    bias: bool, layers: int, bidirectional: bool,
) -> list[Tensor]:  # fmt: skip
    out = values.new_empty(values.shape[0], states[0].shape[-1] * (1 + bidirectional))
    count = states[0].shape[0] if keep and rnn_steps.fits(values, states) else 0
    kept = [b for _ in range(count) for b in rnn_steps.buffers(values, states, mode)]
    return [out, *[s.new_empty(s.shape) for s in states], *kept]


@torch.library.register_fake("tdc::rnn_backward")
def _(
    grads: list[Tensor], kept: list[Tensor], wants_values: bool, values: Tensor, starts: Tensor, lengths: Tensor,
    states: list[Tensor], weights: list[Tensor], mode: str, bias: bool, layers: int, bidirectional: bool,
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
    """The two ops as one differentiable function, also in graphs and under `torch.func`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(starts: Tensor, lengths: Tensor, options: tuple[Any, ...], values: Tensor, *rest: Tensor) -> Any:
        keep, count, *given = options
        return tuple(rnn_op(keep, values, starts, lengths, list(rest[:count]), list(rest[count:]), *given))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        starts, lengths, ctx.options, *tensors = inputs
        kept, ctx.count = output[1 + ctx.options[1] :], len(tensors)
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(starts, lengths, *tensors, *kept)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        starts, lengths, *saved = ctx.saved_tensors
        tensors, kept = saved[: ctx.count], saved[ctx.count :]
        (_, count, *given), (values, *rest) = ctx.options, tensors
        states, weights = rest[:count], rest[count:]
        width = states[0].shape[-1] * (1 + given[-1])
        shapes = [(values.shape[0], width), *[s.shape for s in states]]
        known = [values.new_zeros(n) if g is None else g for n, g in zip(shapes, grads[: 1 + count], strict=True)]
        if eager() and torch.is_grad_enabled():
            return None, None, None, *gradients(True, tensors, known, starts, lengths, count, given)
        wants = ctx.needs_input_grad[3]
        return None, None, None, *rnn_backward_op(known, kept, wants, values, starts, lengths, states, weights, *given)


def learns(tensors: list[Tensor]) -> bool:
    """Whether there may be a gradient. Transforms of `torch.func` keep it to themselves."""
    return torch.is_grad_enabled() and (not eager() or any([t.requires_grad for t in tensors]))


def learns_traced(tensors: list[Tensor]) -> bool:
    """What Dynamo traces in place of `learns`: without a gradient it gives `Recur.forward` a context (2.11-2.13)."""
    known = any([t.requires_grad for t in tensors])
    return torch.is_grad_enabled() and (known or under_transform())


trace_as(learns, learns_traced)


def run_layers(
    values: Tensor, starts: Tensor, lengths: Tensor, hx: Any, weights: Any, mode: str, bias: bool, layers: int,
    dropout: float, train: bool, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """All layers at once, or one by one where dropout falls between them."""
    states = list(hx) if mode == "lstm" else [hx]
    if not train or dropout == 0.0 or layers == 1:
        given = (mode, bias, layers, bidirectional)
        cast = torch.is_autocast_enabled(values.device.type)
        if (cast or not rnn_steps.fits(values, states)) and readable():
            return tuple(run_rows(values, starts, lengths, states, list(weights), *given))  # and not as export traces
        if not learns([values, *states, *weights]):
            return tuple(rnn_op(False, values, starts, lengths, states, list(weights), *given))
        states = [s.view_as(s) for s in states]  # Dynamo wants different tensors there (2.13), users may pass one twice
        outs = Recur.apply(starts, lengths, (not cast, len(states), *given), values, *states, *weights)
        return outs[: 1 + len(states)]
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
