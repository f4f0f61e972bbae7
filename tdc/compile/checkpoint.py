"""Activation checkpoints: keep the inputs of a function, and compute the rest again for gradients.

    block = tdc.compile.checkpoint(block)                          a function or a module
    net = tdc.compile.checkpoint_blocks(net, nn.TransformerEncoderLayer)    every such block of a module

By `torch.utils.checkpoint`. In the graph of a training step, where torch refuses to draw random numbers again, they are
drawn once, or from seeds drawn once. A policy says which results are kept; inputs can wait in the memory of the host;
under a transform of `torch.func`, which refuses checkpoints, the function is called as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.checkpoint import create_selective_checkpoint_contexts as create

from tdc.compile._torch.remat import draws, is_to_host, through_host
from tdc.compile._torch.tracing import in_body_of_scan
from tdc.compile.functional import held, restored
from tdc.compile.upstream import traced
from tdc.core import pytree
from tdc.core.dynamo import under_transform
from tdc.core.errors import DtypeError, StructureError, describe, message

OP = "compile.checkpoint"
Policy: TypeAlias = "Collection[Any] | Callable[..., CheckpointPolicy | bool]"
Module = TypeVar("Module", bound=nn.Module)


def checkpoint(fn: Callable[..., Any], *, policy: Policy | None = None, offload: bool = False) -> Callable[..., Any]:
    """Make a function that keeps its inputs, and computes the rest again for gradients.

    Args:
        fn: a function or module of containers, tensors, and pytrees of them. Tensors it closes over have gradients,
            too; dropout draws one mask. Such functions may be nested.
        policy: operations whose results are kept, such as `[torch.ops.aten.mm, torch.ops.aten.addmm]`, or a function
            `(ctx, op, *args, **kwargs)` that returns a bool or a `torch.utils.checkpoint.CheckpointPolicy`.
        offload: keep floating-point inputs in the memory of the host, pinned for an accelerator. On the CPU that is a
            copy.

    Returns:
        A function with the same results and gradients.

    Raises:
        DtypeError: `fn` is no function; a policy that is none.

    Compile:
        fullgraph, in `train_step` and in functions whose result is differentiated. A graph keeps random numbers; the
        graph of a whole step by `tdc.compile.backend` keeps seeds alone, and saves more memory than by Inductor, which
        moves recomputation to the front. Everything is kept under `torch.func` (`step.vmap()`), in the body of a scan,
        and in graphs of `train_step` before torch 2.13.

    Example:
        >>> w = torch.zeros(2, 1, requires_grad=True)
        >>> block = checkpoint(lambda x: torch.tanh(x @ w))
        >>> torch.autograd.grad(block(torch.ones(1, 2)).sum(), [w])[0].tolist()
        [[1.0], [1.0]]

    Source:
        `torch.utils.checkpoint.checkpoint`, `create_selective_checkpoint_contexts`; Chen et al., Training Deep Nets
        with Sublinear Memory Cost, 2016.
    """
    if not callable(fn):
        raise DtypeError(message(OP, "a function or a module", describe(fn), hint="checkpoint(layer)(x)"))
    eagerly, in_graphs = ({}, IN_GRAPHS) if policy is None else contexts(policy)

    def call(*args: Any, **kwargs: Any) -> Any:
        if under_transform() or (torch.compiler.is_dynamo_compiling() and in_body_of_scan()):
            return fn(*args, **kwargs)
        if not traced():
            with save_on_cpu(pin_memory=True) if offload else nullcontext():
                return recompute(fn, *args, use_reentrant=False, **as_now(eagerly), **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))  # Dynamo takes no containers here

        def inner(*leaves: Any) -> Any:
            given = [through_host(x) for x in leaves] if offload else list(leaves)
            args, kwargs = pytree.tree_unflatten(given, spec)
            return fn(*args, **kwargs)

        return recompute(inner, *leaves, use_reentrant=False, **in_graphs)

    return call


def checkpoint_blocks(
    module: Module, kind: type[nn.Module] | tuple[type[nn.Module], ...], *, policy: Policy | None = None,
    offload: bool = False,
) -> Module:  # fmt: skip
    """Copy a module with each block of a kind under `checkpoint`; parameters and buffers are shared.

    Args:
        module: is left as it is. Names of parameters stay.
        kind: a class of modules, or several. Blocks inside a block are not wrapped.
        policy, offload: as of `checkpoint`.

    Raises:
        DtypeError: no module.
        StructureError: no block of that kind.

    Compile:
        As `checkpoint`.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        >>> cheap = checkpoint_blocks(net, nn.Linear)
        >>> cheap[0].weight is net[0].weight, [name for name, _ in cheap.named_parameters()][2]
        (True, '1.0.weight')
    """
    op = "compile.checkpoint_blocks"
    names = check_kinds(op, module, kind)
    known: dict[nn.Module, nn.Module] = {}
    found = with_blocks(module, kind, partial(checkpoint, policy=policy, offload=offload), known)
    if not any([isinstance(m, kind) for m in known]):
        there = ", ".join(sorted({type(m).__name__ for m in known}))
        raise StructureError(message(op, f"a module with a {names}", f"one of {there}", hint="name one of these"))
    return found  # type: ignore[return-value]  # of the class of the module, or a subclass of it


def check_kinds(op: str, module: Any, kind: Any) -> str:
    """Names of kinds, for messages; refuse other objects than a module and classes of modules."""
    if not isinstance(module, nn.Module):
        hint = f"{op.partition('.')[2]}(net, nn.TransformerEncoderLayer)"
        raise DtypeError(message(op, "a module", describe(module), hint=hint))
    kinds = kind if isinstance(kind, tuple) else (kind,)
    wrong = [describe(k) for k in kinds if not (isinstance(k, type) and issubclass(k, nn.Module))]
    if wrong or not kinds:
        got, hint = ", ".join(wrong) or "none", "kind=nn.TransformerEncoderLayer"
        raise DtypeError(message(op, "classes of modules", got, hint=hint))
    return " or ".join([k.__name__ for k in kinds])


def with_blocks(module: nn.Module, kind: Any, wrap: Any, known: dict[nn.Module, nn.Module]) -> nn.Module:
    """Copy the tree of modules, a shared module once, with wrapped blocks; tensors are shared."""
    if module not in known:
        known[module] = own = copy_of(module)
        within = kind
        if isinstance(module, kind):
            run, within = wrap(type(module).forward), ()
            own.__class__ = type(type(module).__name__, (type(module),), {"forward": run, "__module__": __name__})
        for name, child in module._modules.items():
            own._modules[name] = None if child is None else with_blocks(child, within, wrap, known)
    return known[module]


def copy_of(module: nn.Module) -> nn.Module:
    """Copy a module with the same tensors and children in stores of its own."""
    own = copy.copy(module)
    own._parameters, own._buffers = dict(module._parameters), dict(module._buffers)
    own._modules = dict(module._modules)
    return own


# -- what is kept


def as_now(eagerly: dict[str, Any]) -> dict[str, Any]:
    """Let modules have their present tensors when they run again: a training step restores theirs before gradients."""
    moment = held()
    if not moment:
        return eagerly
    make: Any = eagerly.get("context_fn", lambda: (nullcontext(), nullcontext()))

    def both() -> tuple[Any, Any]:
        first, again = make()
        return first, restored(moment, again)

    return {**eagerly, "context_fn": both}


def keeps_few(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """In a graph: keep what must be kept, compute all else again."""
    return CheckpointPolicy.MUST_SAVE if is_kept(op, args, kwargs) else CheckpointPolicy.MUST_RECOMPUTE


def is_kept(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for results that a graph keeps: copies on the host, and random draws (see `drawn_once`)."""
    return is_to_host(op) or draws(op, args, kwargs)


def contexts(policy: Policy) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of torch's checkpoint for a policy, eagerly and in graphs."""
    if not callable(policy) and (isinstance(policy, str) or not isinstance(policy, Collection)):
        hint = "policy=[torch.ops.aten.mm]"
        raise DtypeError(message(OP, "a policy that is a function or operations", describe(policy), hint=hint))
    kept = policy if callable(policy) else frozenset(policy)

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if callable(kept):
            found = kept(ctx, op, *args, **kwargs)
        else:
            found = op in kept or getattr(op, "overloadpacket", None) in kept
        if isinstance(found, CheckpointPolicy):
            return found
        return CheckpointPolicy.MUST_SAVE if found else CheckpointPolicy.PREFER_RECOMPUTE

    def in_graphs(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_kept(op, args, kwargs) else decide(ctx, op, *args, **kwargs)

    return {"context_fn": partial(create, decide)}, {"context_fn": partial(create, in_graphs)}


IN_GRAPHS: dict[str, Any] = {"context_fn": partial(create, keeps_few)}
IN_GRAPHS["context_fn"].cache_hash = "tdc.compile.checkpoint, 4"  # lets torch keep such graphs in its cache on disk
