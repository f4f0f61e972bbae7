"""Operators of this library, `torch.ops.tdc`, for torch's dispatcher, graphs, vmap and autograd.

    operator(schema, fake, over_vmap, CPU=kernel)  defined, with a kernel for each device, for graphs and for vmap
    derive(op, function)                           the derivatives of an autograd function, which calls the operator
    refuse_derivative(op, text)                    an error as soon as a derivative is asked for
    differentiable(function)                       `apply` of that autograd function, eagerly, in graphs and transforms

A program calls the function. The operator by itself is in the body of a loop of a graph and in exported programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from tdc.core.dynamo import exporting, has_gradients_in_graphs, in_direction, trace_as, traced_for, under_transform
from tdc.core.errors import StructureError, UnsupportedError, message
from tdc.core.levels import applied, at_level, below_autograd, delayed_error, moving, unrecorded

library: Any = torch.library  # some of it has no types
LIBRARY: Any = library.Library("tdc", "FRAGMENT")  # what it registers lasts as long as it does
LIBRARY.define("refused(str text, Tensor[] grads, Tensor[] inputs) -> Tensor[]")


def operator(
    schema: str, fake: Callable[..., Any], over_vmap: Callable[..., Any], sized: bool = True, random: bool = False,
    **kernels: Callable[..., Any],
) -> Any:  # fmt: skip
    """Define an operator and return it.

    Args:
        schema: its name, arguments and results, as torch writes them.
        fake: its results without numbers, for graphs.
        sized: the sizes of its results follow from those of its arguments; else `fake` asks for a `new_size`.
        random: it draws random numbers, so that a graph does not compute it again.
        over_vmap: `over_vmap(op, info, in_dims, *args)`, its batched results under `torch.vmap` and their dims.
        kernels: its function for each dispatch key, `CPU=` or `CUDA=`.
    """
    full = schema.partition("(")[0]
    name, _, overload = full.partition(".")
    LIBRARY.define(schema, tags=(torch.Tag.nondeterministic_seeded,) if random else ())
    op = getattr(getattr(torch.ops.tdc, name), overload or "default")
    for key, kernel in kernels.items():
        LIBRARY.impl(full, as_kernel(kernel), key)
    if sized:
        LIBRARY.impl(op, fake, "Meta")  # `register_fake` looks for its caller in every module
    else:
        library.register_fake(op, fake, lib=LIBRARY)
    library.register_vmap(op, partial(over_vmap, op))
    return op


def as_kernel(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel below autograd, in which operations take less time. It returns new tensors, and writes to no others."""

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        with unrecorded():
            return fn(*args)

    return run


def new_size() -> int:
    """A size that depends on data, in a graph."""
    size: int = library.get_ctx().new_dynamic_size()
    return size


def in_front(x: Tensor, dim: int | None, size: int) -> Tensor:
    """A vmapped tensor with its batch in front; one that is not batched is expanded."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def one_by_one(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """An operator under `torch.vmap`: one example after another."""

    def example(x: Any, dim: Any, i: int) -> Any:
        if type(x) in (list, tuple):
            return [example(t, d, i) for t, d in zip(x, dim, strict=True)]
        return x if dim is None else x.select(dim, i)

    runs = [op(*[example(x, d, i) for x, d in zip(args, in_dims, strict=True)]) for i in range(info.batch_size)]
    outs = tuple([torch.stack(parts) for parts in zip(*runs, strict=True)])
    return outs, (0,) * len(outs)


def unserved() -> bool:
    """True in a graph that takes no operators on rows: an exported one, so that it needs no Python; or one with a
    forward-mode tangent, for which torch (2.11-2.13) compares data-dependent sizes."""
    return torch.compiler.is_exporting()


@traced_for(unserved)
def unserved_traced() -> bool:
    if under_transform() and not has_gradients_in_graphs():
        return True
    return exporting() or in_direction()


def itself(*args: Any) -> tuple[Any, ...]:
    return args


def refuse_mapped(what: str, dims: Iterable[int | None]) -> None:
    """Refuse with a StructureError batched arguments that all examples of a `torch.vmap` must share."""
    if any([d is not None for d in dims]):
        hint = f"map over values only: in_dims with None for {what}"
        raise StructureError(message("vmap", "one ragged structure for all examples", f"mapped {what}", hint=hint))


def differentiable(plain: Any, directed: Any = None) -> Callable[..., Any]:
    """`apply` of an autograd function whose `forward` calls operators; `forward` under a transform of `torch.func`.

    Args:
        directed: the same function with a `jvp`, which Dynamo (2.11-2.13) does not take.
    """

    def run(*args: Any) -> Any:
        if under_transform() or only_results(*args):
            return plain.forward(*args)
        return applied(directed or plain, *args)

    def run_traced(*args: Any) -> Any:
        _ = [isinstance(a, float) for a in args]  # guards on floats now: a function is a graph of its own (2.11-2.13)
        return plain.forward(*args) if under_transform() else plain.apply(*args)

    trace_as(run, run_traced)
    return run


def derive(op: Any, function: Any, inputs: Callable[..., tuple[Any, ...]] = itself) -> None:
    """Give an operator the derivatives of an autograd function, which calls it.

    Args:
        inputs: `inputs(*args)`, those of the function, from the operator's.
    """

    def kernel(keys: Any, *args: Any) -> Any:
        given = inputs(*args)
        if not (learning(given) or moving(given)):
            return below_autograd(op, keys, *args)
        if under_transform():
            return at_level(function, given, partial(below_autograd, op, keys, *args))
        return applied(function, *given)

    LIBRARY.impl(op, kernel, "Autograd", with_keyset=True)


def refuse_derivative(op: Any, text: str) -> None:
    """Make the derivative of an operator's results an error of this text: while it is traced under `torch.func`, else
    when it runs."""

    def kernel(keys: Any, *args: Any) -> Any:
        outs = below_autograd(op, keys, *args)
        learns = learning([t for a in args for t in (a if isinstance(a, (list, tuple)) else [a])])  # pyright: ignore[reportUnknownVariableType]  # lists of anything
        if not learns:
            return outs
        if under_transform():
            return type(outs)(delayed_error(text, outs, learns[0]))
        return type(outs)(refusal.apply(text, len(outs), *outs, *learns))

    LIBRARY.impl(op, kernel, "Autograd", with_keyset=True)


def only_results(*args: Any) -> bool:
    """True if no transform is active and no argument requires grad or has a forward-mode tangent."""
    return not (under_transform() or learning(args) or moving(args))


def directed(args: Sequence[Tensor]) -> bool:
    """True if a forward-mode derivative is taken: by `torch.func.jvp` around the call, or of one of the tensors."""
    return in_direction() if under_transform() else bool(moving(args))


def learning(args: Iterable[Any]) -> list[Tensor]:
    """Tensors that require grad."""
    return [a for a in args if isinstance(a, Tensor) and a.requires_grad] if torch.is_grad_enabled() else []


class Refusal(torch.autograd.Function):
    """Results whose derivative is an error."""

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


def refused_derivative(text: str, out: Tensor, *inputs: Tensor) -> Tensor:
    """The result of some inputs, whose derivative raises an UnsupportedError of this text."""
    found: Tensor = refusal.apply(text, 1, out, *inputs)[0]
    return found


LIBRARY.impl("refused", raise_refused, "CompositeExplicitAutograd")
LIBRARY.impl("refused", empty_refused, "Meta")  # for graphs
