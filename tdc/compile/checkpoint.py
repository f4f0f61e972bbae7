"""checkpoint: keep what goes into a function, and compute the rest again when gradients are wanted.

    @tdc.compile.checkpoint
    def block(x, w1, b1, w2, b2): ...

`torch.utils.checkpoint` works by hooks on saved tensors, which `torch.func.grad` refuses; in a compiled graph it leaves
the work to the partitioner, which does not run for a whole training step. This one is a function with a derivative of
its own, so it goes into the one graph. The second computation waits for the gradient: it depends on it by a number that
is always 0, else Inductor might do both at once and keep everything.

Invariant: what is kept are the arguments, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tdc.core.errors import DtypeError, describe, message

OP = "compile.checkpoint"


def checkpoint(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function with the same result and gradients that keeps nothing in between.

    Args:
        fn: a function of tensors that returns one tensor. Whatever it is differentiated by is an argument, parameters
            too. It draws no random numbers: they would be others the second time.

    Returns:
        A function to call in its place. Make it outside of compiled code; `@checkpoint` does.

    Raises:
        DtypeError: a module; an argument or a result that is no tensor.

    Compile:
        fullgraph under `grad`, so in `train_step`; under `vmap` eagerly only. Eagerly nothing is saved, since
        `torch.func.grad` keeps what it computes the second time.

    Example:
        >>> block = checkpoint(lambda x, w: torch.tanh(x @ w))
        >>> torch.func.grad(lambda w: block(torch.ones(1, 2), w).sum())(torch.zeros(2, 1)).tolist()
        [[1.0], [1.0]]

    Source:
        `torch.utils.checkpoint.checkpoint`; `jax.checkpoint`; Chen et al., Training Deep Nets with Sublinear Memory
        Cost, 2016.
    """
    if isinstance(fn, nn.Module) or not callable(fn):
        hint = "def block(x, weight, bias): ..., with the module's parameters as arguments"
        raise DtypeError(message(OP, "a function of tensors", describe(fn), hint=hint))

    kinds = {dtype: recomputed(fn, dtype) for dtype in (None, torch.bfloat16, torch.float16)}

    def call(*args: Any) -> Tensor:
        wrong = [describe(x) for x in args if not isinstance(x, Tensor)]
        if wrong or not args:
            hint = "give x.values and x.offsets of a NestedTensor x, and make it inside"
            raise DtypeError(message(OP, "tensors as arguments", ", ".join(wrong) or "none", hint=hint))
        device = args[0].device.type
        return kinds[torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None].apply(*args)

    return call


def recomputed(fn: Callable[..., Tensor], dtype: torch.dtype | None) -> type[torch.autograd.Function]:
    """The autograd function, which computes again under the autocast that there was the first time."""

    class Recomputed(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*given: Any) -> Tensor:
            # Dynamo (torch 2.11-2.13) hands a context to this signature, too.
            out = fn(*[x for x in given if isinstance(x, Tensor)])
            if not isinstance(out, Tensor):
                hint = "return x.values of a NestedTensor x"
                raise DtypeError(message(OP, "one tensor as result", describe(out), hint=hint))
            return out

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
            first = grads[0][(slice(0, 1),) * grads[0].ndim].sum()
            zero = (first != first) * 0  # the number 0, known when the gradient is, whatever its values
            saved = [x + zero.to(x.dtype) if x.is_floating_point() else x for x in ctx.saved_tensors]

            def of_floats(*floats: Tensor) -> Tensor:
                it = iter(floats)
                with nullcontext() if dtype is None else torch.autocast(floats[0].device.type, dtype):
                    return fn(*[next(it) if x.is_floating_point() else x for x in saved])

            pull: Any = torch.func.vjp(of_floats, *[x for x in saved if x.is_floating_point()])[1]
            found = iter(pull(grads[0]))
            return tuple([next(found) if x.is_floating_point() else None for x in saved])

    return Recomputed
