"""Operators of this library, `torch.ops.tdc`: what torch's dispatcher, graphs, vmap and autograd know of each.

    operator(schema, fake, members, CPU=kernel)    defined, with a kernel for each device, for graphs and for vmap
    derive(op, fn, name)                           the derivative of another function, which calls the operator
    refuse_derivative(op, text)                    an error as soon as a derivative is asked for
    with_directions(plain, directed)               an autograd function that also has a derivative in a direction

A program calls the function. The operator by itself is met in the body of a loop of a graph, in exported programs and
by who calls `torch.ops.tdc` by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from tdc.core.dynamo import below_autograd, delayed_error, trace_as, under_transform
from tdc.core.errors import StructureError, UnsupportedError, message

LIBRARY: Any = torch.library.Library("tdc", "FRAGMENT")  # what it registers lasts as long as it does
LIBRARY.define("refused(str text, Tensor[] grads, Tensor[] inputs) -> Tensor[]")


def operator(schema: str, fake: Callable[..., Any], members: Callable[..., Any], **kernels: Callable[..., Any]) -> Any:
    """Define an operator and return it.

    Args:
        schema: its name, arguments and results, as torch writes them.
        fake: its results without numbers, for graphs.
        members: `members(op, info, in_dims, *args)`, its results for all members of a `torch.vmap` and their dims.
        kernels: its function for each dispatch key, `CPU=` or `CUDA=`.
    """
    full = schema.partition("(")[0]
    name, _, overload = full.partition(".")
    LIBRARY.define(schema)
    op = getattr(getattr(torch.ops.tdc, name), overload or "default")
    for key, kernel in kernels.items():
        LIBRARY.impl(full, kernel, key)
    LIBRARY.impl(op, fake, "Meta")  # `register_fake` looks for its caller in every module
    torch.library.register_vmap(op, partial(members, op))  # pyright: ignore[reportUnknownMemberType]  # torch's stub
    return op


def refuse_mapped(what: str, dims: Iterable[int | None]) -> None:
    """A StructureError where `torch.vmap` maps what all members share."""
    if any([d is not None for d in dims]):
        hint = f"map over values only: in_dims with None for {what}"
        raise StructureError(message("vmap", "one ragged structure for all members", f"mapped {what}", hint=hint))


def with_directions(plain: Any, directed: Any) -> Callable[..., Any]:
    """`apply` of an autograd function with a derivative in a direction; in a graph that of one without, since Dynamo
    takes no function that has it."""

    def run(*args: Any) -> Any:
        return directed.apply(*args)

    def run_traced(*args: Any) -> Any:
        return plain.apply(*args)

    trace_as(run, run_traced)
    return run


def derive(op: Any, fn: Callable[..., Any], name: str) -> None:
    """Give an operator the derivative of `fn(*args)`, which calls it in an autograd function.

    A call raises an UnsupportedError in a graph of `torch.func.grad` inside another transform: Dynamo leaves the
    derivative out there (2.11-2.13), and gradients would be wrong.
    """

    def kernel(keys: Any, *args: Any) -> Any:
        if not learning(args):
            return below_autograd(op, keys, *args)
        if under_transform():
            got = "torch.func.grad in another transform, in a graph"
            hint = "call it eagerly, or compile what is differentiated"
            raise UnsupportedError(message(name, "one derivative", got, hint=hint))
        return fn(*args)

    LIBRARY.impl(op, kernel, "Autograd", with_keyset=True)


def refuse_derivative(op: Any, text: str) -> None:
    """Let autograd go through an operator up to the derivative of its results, which raises an error of this text:
    as it is traced under `torch.func`, as it runs where a graph may only prepare for it."""

    def kernel(keys: Any, *args: Any) -> Any:
        outs = below_autograd(op, keys, *args)
        learns = learning([t for a in args for t in (a if isinstance(a, (list, tuple)) else [a])])  # pyright: ignore[reportUnknownVariableType]  # lists of anything
        if not learns:
            return outs
        if under_transform():
            return type(outs)(delayed_error(text, outs, learns[0]))
        return type(outs)(refusal.apply(text, len(outs), *outs, *learns))

    LIBRARY.impl(op, kernel, "Autograd", with_keyset=True)


def learning(args: Iterable[Any]) -> list[Tensor]:
    """The tensors that get a gradient."""
    return [a for a in args if isinstance(a, Tensor) and a.requires_grad] if torch.is_grad_enabled() else []


class Refusal(torch.autograd.Function):
    """Results that have no derivative."""

    @staticmethod
    def forward(ctx: Any, text: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.text, ctx.count = text, count
        ctx.save_for_backward(*tensors[count:])
        return tuple([t.view_as(t) for t in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = torch.ops.tdc.refused(ctx.text, grads, ctx.saved_tensors)
        return None, None, *(None,) * ctx.count, *found


def raise_refused(text: str, grads: list[Tensor], inputs: list[Tensor]) -> NoReturn:
    """Raise an UnsupportedError of this text."""
    raise UnsupportedError(text)


def empty_refused(text: str, grads: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(t) for t in inputs]


refusal: Any = Refusal  # the stubs leave `apply` open
LIBRARY.impl("refused", raise_refused, "CompositeExplicitAutograd")
LIBRARY.impl("refused", empty_refused, "Meta")  # for graphs
