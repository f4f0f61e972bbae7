"""The derivatives of `torch.ops.tdc.rnn`: gradients by an operator, all others cell by cell.

    recur                  eagerly, with all derivatives; in graphs a gradient alone
    a second derivative    by `by_cells`, which autograd runs through; refused in a graph

P positions (packed total, or B·L), B rows, D features in, H out; S = layers · directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vjp

from tdc.core.dynamo import eager, in_direction, readable, trace_as, trace_with_grad, under_mode, under_transform
from tdc.core.errors import UnsupportedError, message, no_second
from tdc.core.levels import also_below, applied, mapped
from tdc.core.operators import derive, refuse_derivative
from tdc.ops.recurrent.by_cells import run_cells
from tdc.ops.recurrent.operator import backward, forward, rnn_backward_op, rnn_op
from tdc.ops.recurrent.order import Order, order_of


@dataclass(frozen=True)
class Options:
    """What a call has besides tensors; no tuple, which torch would search for tensors with a direction (2.13).

    Attributes:
        states: of the net, 1 or 2.
        count: values, states and weights.
        keep: True if the forward returns buffers for the backward.
        given: mode, bias, layers, bidirectional.
        order: of the rows, where it is known.
        wanted: whether values want a gradient, as far as is known before; in a graph autograd does not say.
    """

    states: int
    count: int
    keep: bool
    given: tuple[Any, ...]
    order: Order | None = field(default=None, compare=False)
    wanted: bool = True


class Recur(torch.autograd.Function):
    """The two ops as one differentiable function, also in graphs and under `torch.func`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(starts: Tensor, lengths: Tensor, options: Options, values: Tensor, *rest: Tensor) -> Any:
        states, weights, order = list(rest[: options.states]), list(rest[options.states :]), options.order
        if order is not None and readable():
            return tuple(forward(options.keep, values, order, states, weights, *options.given))
        return tuple(rnn_op(options.keep, values, starts, lengths, states, weights, *options.given))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        starts, lengths, ctx.options, *tensors = inputs
        kept = output[1 + ctx.options.states :]
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(starts, lengths, *tensors, *kept)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (starts, lengths, *tensors), known = ctx.saved_tensors, ctx.options
        values, states = tensors[0], tensors[1 : 1 + known.states]
        width = states[0].shape[-1] * (1 + known.given[-1])
        shapes = [(values.shape[0], width), *[s.shape for s in states]]
        given = zip((values, *states), shapes, grads[: 1 + known.states], strict=True)
        all_grads = [t.new_zeros(n) if g is None else g for t, n, g in given]
        options = replace(known, wanted=known.wanted and ctx.needs_input_grad[3])
        return None, None, None, *gradients(starts, lengths, options, *all_grads, *tensors)


class Directed(Recur):
    """`Recur` with a derivative in a direction, which is taken cell by cell."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        Recur.setup_context(ctx, inputs, output)
        starts, lengths, _, *tensors = inputs
        kept = output[1 + ctx.options.states :]
        ctx.save_for_forward(starts, lengths, *tensors, *kept)  # what the backward has: vmap keeps dims of one list
        ctx.kept = len(kept)

    @staticmethod
    @also_below
    def jvp(ctx: Any, *directions: Any) -> tuple[Tensor | None, ...]:
        starts, lengths, *tensors = ctx.saved_tensors
        run = by_cells(starts, lengths, ctx.options)
        return *along(run, tensors[: ctx.options.count], directions[3:]), *(None,) * ctx.kept


def along(fn: Callable[..., Any], tensors: list[Tensor], directions: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """The derivative in a direction; None is none."""
    known = [torch.zeros_like(t) if d is None else d for t, d in zip(tensors, directions, strict=True)]
    found: tuple[Tensor, ...] = jvp(fn, tuple(tensors), tuple(known))[1]
    return found


def recur(*inputs: Any) -> Any:
    """`Recur` with all derivatives."""
    return applied(Directed, *inputs)


def recur_traced(*inputs: Any) -> Any:
    """What Dynamo traces for `recur`: it takes no function that has a direction, nor one under a transform (2.13)."""
    if in_direction():
        hint = "call torch.func.jvp outside of torch.compile"
        raise UnsupportedError(message(inputs[2].given[0], "no direction in a graph", "torch.func.jvp", hint=hint))
    return Recur.forward(*inputs) if under_transform() else Recur.apply(*inputs)


def inputs_of(
    keep: bool, values: Tensor, starts: Tensor, lengths: Tensor, states: list[Tensor], weights: list[Tensor],
    *given: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments of `Recur`, from those of `rnn_op`."""
    tensors = values, *states, *weights
    return starts, lengths, Options(len(states), len(tensors), keep, given), *tensors


trace_as(recur, recur_traced)
derive(rnn_op, Recur, inputs_of)


class RecurBackward(torch.autograd.Function):
    """The gradients of `Recur` as a differentiable function; their own derivatives run the forward again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(starts: Tensor, lengths: Tensor, options: Options, *tensors: Tensor) -> tuple[Tensor, ...]:
        return run_backward(starts, lengths, options, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        starts, lengths, ctx.options, *tensors = inputs
        read = tensors[: 1 + ctx.options.states + ctx.options.count]
        ctx.save_for_backward(starts, lengths, *read)
        ctx.save_for_forward(starts, lengths, *read)
        ctx.unread = len(tensors) - len(read)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        starts, lengths, *tensors = ctx.saved_tensors
        fn = gradients_by_cells(starts, lengths, ctx.options)
        return None, None, None, *vjp(fn, *tensors)[1](grads), *(None,) * ctx.unread

    @staticmethod
    @also_below
    def jvp(ctx: Any, *directions: Any) -> tuple[Tensor, ...]:
        starts, lengths, *tensors = ctx.saved_tensors
        return along(gradients_by_cells(starts, lengths, ctx.options), tensors, directions[3 : 3 + len(tensors)])


def by_cells(starts: Tensor, lengths: Tensor, options: Options) -> Callable[..., tuple[Tensor, ...]]:
    """`run_cells` as a function of values, states and weights."""
    n, order = options.states, options.order or order_of(starts, lengths)
    return lambda values, *rest: tuple(run_cells(values, order, list(rest[:n]), list(rest[n:]), *options.given))


def gradients_by_cells(starts: Tensor, lengths: Tensor, options: Options) -> Callable[..., tuple[Tensor, ...]]:
    """Its gradients as a function of those of results, of values, states and weights."""
    results, run = 1 + options.states, by_cells(starts, lengths, options)
    return lambda *both: vjp(run, *both[results:])[1](tuple(both[:results]))


def run_backward(starts: Tensor, lengths: Tensor, options: Options, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Gradients of values, states and weights, of gradients of results, of these and of what the forward kept."""
    results, n, order = 1 + options.states, options.states, options.order
    grads, (values, *rest) = list(tensors[:results]), tensors[results : results + options.count]
    states, weights, kept = rest[:n], rest[n:], list(tensors[results + options.count :])
    if order is not None and readable():
        kept = [] if mapped(grads) else kept  # by autograd then, which may map over them
        return tuple(backward(grads, kept, options.wanted, values, order, states, weights, *options.given))
    given = values, starts, lengths, states, weights, *options.given
    return tuple(rnn_backward_op(grads, kept, options.wanted, *given))


def gradients(starts: Tensor, lengths: Tensor, options: Options, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`run_backward` with a derivative, which a graph refuses."""
    if under_mode():
        return run_backward(starts, lengths, options, *tensors)
    found: tuple[Tensor, ...] = applied(RecurBackward, starts, lengths, options, *tensors)
    return found


trace_with_grad(gradients, run_backward)  # whose derivative is refused
refuse_derivative(rnn_backward_op, no_second("rnn"))


def learns(tensors: list[Tensor]) -> bool:
    """Whether there may be a derivative. Transforms of `torch.func` keep gradients to themselves."""
    gradients = torch.is_grad_enabled() and (not eager() or any([t.requires_grad for t in tensors]))
    return gradients or (under_transform() and in_direction())


def learns_traced(tensors: list[Tensor]) -> bool:
    """What Dynamo traces for `learns`: without a gradient it gives `Recur.forward` a context (2.11-2.13)."""
    known = any([t.requires_grad for t in tensors])
    return torch.is_grad_enabled() and (known or under_transform())


trace_as(learns, learns_traced)
