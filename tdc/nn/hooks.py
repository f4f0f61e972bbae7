"""Backward hooks of modules that take or return containers, which torch's own hooks do not see.

    handle = tdc.nn.register_full_backward_hook(layer, lambda module, grad_input, grad_output: None)

Around the call stand two autograd functions that change no values: the one on the results sees `grad_output` first, the
one on the arguments `grad_input` at last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tdc.core.arguments import expect, expect_function
from tdc.core.container import Container
from tdc.core.errors import StructureError, describe, message
from tdc.ragged.storage import data_of, differentiable, with_data
from tdc.tensordict.tensordict import TensorDict

OP = "nn.register_full_backward_hook"
Hook = Callable[[nn.Module, tuple[Any, ...], tuple[Any, ...]], Any]


def register_full_backward_hook(module: nn.Module, hook: Hook) -> RemovableHandle:
    """Call a hook with the gradients of a module's arguments and results, containers among them.

    Torch's own method of this name leaves containers out: a module that returns a batch has no hook called.

    Args:
        module: its positional arguments and its results, one or a tuple, are tensors and containers.
        hook: `hook(module, grad_input, grad_output)`, tuples with an entry for each argument and result: in the form of
            a tensor or batch; a TensorDict without the keys that have no gradient; None without a gradient. It may
            return another `grad_input`.

    Returns:
        A handle, whose `remove()` takes the hook away.

    Raises:
        DtypeError: not a module, not a function.
        StructureError: from a backward pass, where the hook returns another number of gradients.

    Compile:
        Eager modules only: a graph holds no hooks that are called in its backward.

    Example:
        >>> from tdc.ragged.pack import pack
        >>> layer, seen = nn.Linear(2, 3), []
        >>> handle = register_full_backward_hook(layer, lambda module, inputs, outputs: seen.append(outputs))
        >>> layer(pack([torch.rand(2, 2), torch.rand(1, 2)])).sum().backward()
        >>> seen[0][0].shape, handle.remove()
        (torch.Size([2, -1, 3]), None)

    Source:
        `torch.nn.Module.register_full_backward_hook`.
    """
    expect(OP, module, nn.Module)
    expect_function(OP, hook)
    running: list[Call] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        running.append(Call(module, hook, args))
        return running[-1].enter()

    def after(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        return running.pop().leave(result)

    first = module.register_forward_pre_hook(before)
    last = module.register_forward_hook(after, always_call=False)
    return Both(first, last)


class Both(RemovableHandle):
    """The handle of two hooks."""

    def __init__(self, first: RemovableHandle, last: RemovableHandle) -> None:
        self.handles = first, last

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


class Call:
    """One call of a module, and the gradients of its results once they are there."""

    def __init__(self, module: nn.Module, hook: Hook, args: tuple[Any, ...]) -> None:
        self.module, self.hook, self.args = module, hook, args
        self.grad_output: tuple[Any, ...] = ()
        self.watched = torch.is_grad_enabled() and any([t.requires_grad for t in tensors_of(args)])

    def enter(self) -> tuple[Any, ...]:
        """The arguments, watched by autograd."""
        return through(self.args, self.on_inputs) if self.watched else self.args

    def leave(self, result: Any) -> Any:
        """The results, watched by autograd."""
        outs = result if isinstance(result, tuple) else (result,)
        if not torch.is_grad_enabled() or not any([t.requires_grad for t in tensors_of(outs)]):
            return result
        form = tuple([bare(x) for x in outs])
        watched = through(outs, lambda grads: self.on_outputs(form, grads))
        return watched if isinstance(result, tuple) else watched[0]

    def on_outputs(self, outs: tuple[Any, ...], grads: Sequence[Any]) -> Sequence[Any]:
        self.grad_output = in_form(outs, iter(grads))
        if not self.watched:
            self.hook(self.module, tuple([None] * len(self.args)), self.grad_output)
        return grads

    def on_inputs(self, grads: Sequence[Any]) -> Sequence[Any]:
        found = in_form(self.args, iter(grads))
        other = self.hook(self.module, found, self.grad_output)
        if other is None:
            return grads
        given = other if isinstance(other, tuple) else (other,)
        if len(given) != len(found):
            got = f"{len(given)} for {len(found)} arguments"
            raise StructureError(message(OP, "a gradient for each argument from the hook", got, hint="return None"))
        return [t for x, g in zip(self.args, given, strict=True) for t in given_for(x, g)]


class Watch(torch.autograd.Function):
    """Tensors as they are; the gradients go through a function."""

    @staticmethod
    def forward(ctx: Any, call: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple([t.view_as(t) for t in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return None, *ctx.call(grads)


def through(values: tuple[Any, ...], call: Callable[[Sequence[Any]], Sequence[Any]]) -> tuple[Any, ...]:
    """Values whose gradients go through `call`."""
    tensors: Any = Watch.apply(call, *tensors_of(values))
    found = iter(tensors)
    return tuple([with_tensors(x, found) for x in values])


def tensors_of(values: Sequence[Any]) -> list[Tensor]:
    """Floating-point tensors of arguments or results."""
    leaves = [leaf for x in values for leaf in (x._leaves.values() if isinstance(x, TensorDict) else [x])]
    return [data_of(leaf) for leaf in leaves if differentiable(leaf)]


def with_tensors(x: Any, tensors: Iterator[Tensor]) -> Any:
    """A value with other tensors."""
    if isinstance(x, TensorDict):
        return x.apply(lambda leaf: with_data(leaf, next(tensors)) if differentiable(leaf) else leaf)
    return with_data(x, next(tensors)) if differentiable(x) else x


def in_form(values: tuple[Any, ...], grads: Iterator[Any]) -> tuple[Any, ...]:
    """Gradients in the form of values."""

    def one(x: Any) -> Any:
        grad = next(grads) if differentiable(x) else None
        return None if grad is None else with_data(x, grad)

    return tuple([x.apply(one) if isinstance(x, TensorDict) else one(x) for x in values])


def bare(x: Any) -> Any:
    """A value without its autograd graph, for its form alone."""
    return torch.detach(x) if isinstance(x, (Tensor, Container)) else x  # type: ignore[arg-type]  # it dispatches


def given_for(x: Any, grad: Any) -> list[Any]:
    """Gradient of each tensor of an argument from that of the argument."""
    if not isinstance(x, TensorDict):
        if differentiable(x) and grad is not None and type(grad) is not type(x) and not isinstance(x, Tensor):
            got = f"{describe(grad)} for {describe(x)}"
            raise StructureError(message(OP, "a gradient in the form of its argument", got, hint="return None"))
        return [None if grad is None else data_of(grad)] if differentiable(x) else []
    leaves = {} if grad is None else grad._leaves
    return [data_of(leaves[p]) if p in leaves else None for p, leaf in x._leaves.items() if differentiable(leaf)]
