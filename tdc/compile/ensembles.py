"""Several models of one architecture, called as one.

    members = stack_modules([make_net() for _ in range(8)])       batch_size [8]
    y = ensemble(net, members)(x)                                 (8, B, D): every model on the same batch
    y = ensemble(net, members, in_dims=0)(xs)                     every model on its own batch xs[k]

It is `vmap` of `functional_call`: one graph, differentiated together. `members[k]` is one model, a view. To train them,
`vmap` the training step of one. To stop some of them, use `torch.where(alive, new, members)` with a mask of shape (K,).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tdc.compile.functional import functional_call
from tdc.compile.vectorize import one_for_each, vmap
from tdc.core import pytree
from tdc.core.arguments import expect
from tdc.core.errors import DtypeError, ShapeError, UnsupportedError, describe, message
from tdc.ragged.storage import is_ragged
from tdc.tensordict.tensordict import TensorDict


def ensemble(
    module: nn.Module,
    params: TensorDict,
    in_dims: Any = None,
    randomness: str = "error",
    *,
    return_buffers: bool = False,
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """Make a function of the module's arguments that calls all models of an ensemble.

    Shapes:
        params of batch_size `[K, ...]`; an output `(B, D)` of one model -> `(K, B, D)`. A NestedTensor `(B, -1, D)` ->
        `(K, B, -1, D)`, with one structure for all.

    Args:
        module: the template; its own tensors are used for names that `params` lacks.
        params: stacked, as from `stack_modules`.
        in_dims: dim of models of each positional argument, None for shared data; one for all or a tuple, as in
            `tdc.vmap`. Keyword arguments are shared.
        randomness: "different" or "same" random numbers in each model, or "error".
        return_buffers: also return the buffers of each model after the call, stacked.
        chunk_size: as in `torch.vmap`: number of models at a time, to save memory.

    Returns:
        A function `(*args, **kwargs) -> outputs`, or with `return_buffers` `-> (outputs, buffers)`; None stays None.

    Raises:
        DtypeError, ShapeError: params that is no TensorDict or has no batch dim, in_dims of other arguments.

    Compile:
        fullgraph, one graph for all models. Where a `forward` is a function of `tdc.batch`, each has its own loop.

    Example:
        >>> import torch
        >>> from tdc import stack_modules
        >>> nets = [nn.Linear(3, 1) for _ in range(4)]
        >>> y = ensemble(nets[0], stack_modules(nets))(torch.ones(5, 3))
        >>> y.shape, torch.allclose(y[2], nets[2](torch.ones(5, 3)))
        (torch.Size([4, 5, 1]), True)

    Source:
        torch's tutorial on model ensembling; `torch.func.stack_module_state`.
    """
    check_stacked(module, params)

    def call(*args: Any, **kwargs: Any) -> Any:
        dims = one_for_each("ensemble", in_dims, args)

        def one(member: TensorDict, *parts: Any) -> Any:
            return functional_call(module, member, parts, kwargs, return_buffers=return_buffers)

        if has_ways(module):
            return one_by_one(one, params, args, dims, randomness)
        if params._leaves:
            return vmap(one, (0, *dims), 0, randomness, chunk_size=chunk_size)(params, *args)
        run = vmap(lambda _, *parts: one(params, *parts), (0, *dims), 0, randomness, chunk_size=chunk_size)
        return run(torch.empty(params.batch_size[0], 0), *args)  # of modules without tensors only the number is known

    return call


def has_ways(module: nn.Module) -> bool:
    """True if a module has a function of `tdc.batch` with control flow: no vmap can run several at once."""
    return any([getattr(m.forward, "has_ways", False) is True for m in module.modules()])


def one_by_one(
    one: Callable[..., Any], params: TensorDict, args: tuple[Any, ...], dims: tuple[Any, ...], randomness: str
) -> Any:
    """Call one model after the other.

    Raises:
        ShapeError: a mapped dim that is no int.
        UnsupportedError: the same random numbers for all models.
    """
    if randomness == "same":
        got, hint = "randomness='same'", "randomness='different', or a seed before each call of one member"
        raise UnsupportedError(message("ensemble", "members that draw their own random numbers", got, hint=hint))
    if not all([d is None or isinstance(d, int) for d in dims]):
        hint = "an int, or None, for each argument"
        raise ShapeError(message("ensemble", "one dim for each argument, of modules with tdc.batch", "more", hint=hint))
    found: list[Any] = []
    for k in range(params.batch_size[0]):
        parts = [x if d is None else torch.select(x, d, k) for x, d in zip(args, dims, strict=True)]
        found.append(one(params[k], *parts))
    return pytree.tree_map(lambda *xs: None if xs[0] is None else torch.stack(xs), *found, is_leaf=is_ragged)


def check_stacked(module: Any, params: Any) -> None:
    """Refuse what is not a module, and params without a batch dim."""
    expect("ensemble", module, nn.Module)
    if not isinstance(params, TensorDict):
        hint = "tdc.ensemble(net, tdc.stack_modules([net, other]))"
        raise DtypeError(message("ensemble", "params as a TensorDict", describe(params), hint=hint))
    if not params.batch_size:
        hint = "tdc.stack_modules([net, other]), or torch.stack of such TensorDicts"
        raise ShapeError(message("ensemble", "params with a batch dim of members", "batch_size=[]", hint=hint))
