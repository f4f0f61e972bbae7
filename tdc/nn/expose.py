"""Hooks through which FSDP2 and DistributedDataParallel find the tensors in batches.

    fully_shard(net)
    expose_tensors(net)

`fully_shard` gathers parameters and reduces gradients by hooks on the tensors that a module takes and returns. It finds
them in tensors, lists, tuples, dicts and dataclasses only: a module that returns a NestedTensor has no gradients
reduced, mostly without an error. So hooks of the module open containers for FSDP2 and close them again:

    arguments  -> opened -> FSDP2 -> closed -> forward -> opened -> FSDP2 -> closed -> result

DistributedDataParallel looks for unused parameters in results; the hooks are on the module that it wraps.

Invariant: the module takes and returns the same containers as without hooks, lengths included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import nn

from tdc.core import pytree
from tdc.core.container import Container
from tdc.core.errors import DtypeError, StructureError, describe, message
from tdc.ragged.storage import data_of, is_ragged, with_data

M = TypeVar("M")  # of `fully_shard` the type says nothing of a module
OP = "nn.expose_tensors"


def expose_tensors(module: M) -> M:
    """Let FSDP2 and DistributedDataParallel find the tensors of the batches that modules take and return.

    Args:
        module: wrapped, or with wrapped modules inside. Call this after all wrapping. `MixedPrecisionPolicy` casts the
            values of a batch, and never its lengths.

    Returns:
        The module itself.

    Raises:
        DtypeError: not a module.
        StructureError: nothing is wrapped.

    Compile:
        Layers compiled before they are wrapped, `fully_shard(torch.compile(layer))`, are one graph each for all
            lengths; a compiled whole has graph breaks at the hooks of FSDP2.

    Example:
        >>> from torch.distributed.fsdp import fully_shard
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> expose_tensors(net)
        Traceback (most recent call last):
        tdc.StructureError: tdc.nn.expose_tensors: expected a module that FSDP2 or DistributedDataParallel wraps, got Sequential
        hint: expose_tensors(fully_shard(net)), behind all that is wrapped
        >>> # in each process: fully_shard(net), then expose_tensors(net)

    Source:
        `torch.distributed.fsdp.fully_shard`, `torch.nn.parallel.DistributedDataParallel`.
    """  # noqa: E501  # the error as it is printed
    if not isinstance(module, nn.Module):
        raise DtypeError(message(OP, "a module", describe(module), hint="expose_tensors(fully_shard(net))"))
    wrapped = [(m, inside) for m in module.modules() if (inside := inside_of(m)) is not None]
    if not wrapped:
        expected, hint = "a module that FSDP2 or DistributedDataParallel wraps", "expose_tensors(fully_shard(net))"
        raise StructureError(message(OP, expected, type(module).__name__, hint=f"{hint}, behind all that is wrapped"))
    for outer, inner in wrapped:
        outer.register_forward_pre_hook(open_arguments, prepend=True, with_kwargs=True)
        inner.register_forward_pre_hook(close_arguments, with_kwargs=True)
        inner.register_forward_hook(open_result, prepend=True)
        outer.register_forward_hook(close_result)
    return module


def inside_of(module: nn.Module) -> nn.Module | None:
    """The module that a wrapper calls, with FSDP2 the wrapper itself; None for other modules."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return module.module
    return module if "FSDPModule" in [c.__name__ for c in type(module).__mro__] else None


# -- containers as tuples


class Opened(NamedTuple):
    """A container as a tuple, in which wrappers find and replace tensors."""

    tensors: list[Any]
    close: Callable[[list[Any]], Any]


def opened(x: Container) -> Opened:
    """Open a container: its tensors without lengths, and the function that closes it."""
    leaves, spec = pytree.tree_flatten(x, is_leaf=is_ragged)

    def close(tensors: list[Any]) -> Any:
        return pytree.tree_unflatten([with_data(old, new) for old, new in zip(leaves, tensors, strict=True)], spec)

    return Opened([data_of(leaf) for leaf in leaves], close)


def closed(x: Opened) -> Any:
    """Close an opened container."""
    return x.close(x.tensors)


def replaced(x: Any, kind: type, fn: Callable[[Any], Any]) -> Any:
    """Apply `fn` to each instance of a class in a tree; a tree without any stays the same object."""

    def stops(y: Any) -> bool:
        return isinstance(y, kind) or (dataclasses.is_dataclass(y) and not isinstance(y, type))

    def changed(y: Any) -> Any:
        if isinstance(y, kind):
            return fn(y)
        if not stops(y):
            return y
        fields = {f.name: getattr(y, f.name) for f in dataclasses.fields(y)}
        new = {name: z for name, old in fields.items() if (z := replaced(old, kind, fn)) is not old}
        return dataclasses.replace(y, **new) if new else y

    leaves, spec = pytree.tree_flatten(x, is_leaf=stops)
    new = [changed(leaf) for leaf in leaves]
    return x if all([a is b for a, b in zip(new, leaves, strict=True)]) else pytree.tree_unflatten(new, spec)


# -- hooks


def open_arguments(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return each(args, kwargs, Container, opened)


def close_arguments(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return each(args, kwargs, Opened, closed)


def open_result(_: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
    return replaced(result, Container, opened)


def close_result(_: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
    return replaced(result, Opened, closed)


def each(args: tuple[Any, ...], kwargs: dict[str, Any], kind: type, fn: Callable[[Any], Any]) -> Any:
    """Replace argument by argument, so that a list that the module writes into stays the same object."""
    return tuple([replaced(x, kind, fn) for x in args]), {name: replaced(x, kind, fn) for name, x in kwargs.items()}
