"""`tdc.vmap` over the examples of a ragged batch: functions by `batch`, gradients by parameters that each example owns.

    tdc.vmap(fn, in_dims=(None, 0))(params, x)                  fn(params, row) of each row: `batch(fn)`
    tdc.vmap(tdc.grad(loss), in_dims=(None, 0))(params, x)      the gradients of each example, (B, *param)

A shared argument that is differentiated is expanded, (B, ...): then the gradient of the sum of losses in it holds that
of each example. Nothing is padded, and products run once for all examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tdc.autobatch.decorator import BatchFunction, batch
from tdc.compile.gradients import both_of
from tdc.compile.upstream import traced
from tdc.compile.vectorize import BY_ROW
from tdc.core import pytree
from tdc.core.arguments import positions_of
from tdc.core.dynamo import constant
from tdc.core.errors import DtypeError, ShapeError, UnsupportedError, describe, message
from tdc.ragged.storage import is_ragged
from tdc.tensordict.tensordict import TensorDict

OP = "vmap"


class Traced:
    """Functions of `batch` in graphs, as attributes, which Dynamo reads when it needs them."""


TRACED = Traced()


@constant
def traced_name(fn: Any) -> str:
    """The attribute of `TRACED` that is `batch(fn)`, which is made while a graph is traced."""
    name = f"function_{id(fn)}"
    if not hasattr(TRACED, name):
        setattr(TRACED, name, as_batch(fn))
    return name


def as_batch(fn: Any) -> BatchFunction:
    """`batch(fn)`; a function of `batch` as it is."""
    return fn if isinstance(fn, BatchFunction) else batch(fn)


def by_row(fn: Any, in_dims: tuple[Any, ...], out_dims: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Results of a function of `vmap` for the examples of ragged batches among its arguments."""
    if any([d != 0 for d in (out_dims if isinstance(out_dims, (tuple, list)) else [out_dims])]):
        hint = "out_dims=0; out.movedim(0, 1) moves it"
        raise ShapeError(message(OP, "the examples of ragged rows at dim 0", f"out_dims={out_dims}", hint=hint))
    if hasattr(fn, "derived"):
        return gradients_by_row(fn.derived, in_dims, args, kwargs)
    return mapped(fn, in_dims)(*args, **kwargs)


def mapped(fn: Any, in_dims: tuple[Any, ...]) -> Callable[..., Any]:
    """`fn` of each example."""
    run: Any = getattr(TRACED, traced_name(fn)) if traced() else as_batch(fn)
    return lambda *args, **kwargs: run.map(*args, in_dims=in_dims, **kwargs)


def gradients_by_row(derived: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gradients of each example, as `tdc.grad(fn)` or `tdc.value_and_grad(fn)` gives them; `derived` is theirs."""
    fn, argnums, has_aux, with_value = derived
    count = count_of(in_dims, args, kwargs)
    given, dims = list(args), list(in_dims)
    for i in positions_of("grad", argnums, len(args)):
        if dims[i] is None:
            given[i], dims[i] = expanded(given[i], count), 0
    run = mapped(fn, tuple(dims))

    def total(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        losses = out[0] if has_aux else out
        if not isinstance(losses, Tensor) or losses.ndim != 1:
            hint = "return loss.mean() or .sum()"
            raise ShapeError(message("grad", "a function that returns one number", describe(losses), hint=hint))
        return losses.sum(), out

    (_, out), grads = both_of("grad", total, argnums, True)(*given, **kwargs)
    if with_value:
        return out, grads
    return (grads, out[1]) if has_aux else grads


def count_of(in_dims: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Number of examples of the first ragged batch that is mapped."""
    given = [x for x, d in zip(args, in_dims, strict=True) if d is not None] + list(kwargs.values())
    x: Any = next(leaf for leaf in pytree.tree_leaves(given, is_leaf=is_ragged) if is_ragged(leaf))
    return x.shape[x._batch_dim]


def expanded(x: Any, count: Any) -> Any:
    """An argument once for each example, in the memory of one."""
    if any([is_ragged(leaf) for leaf in pytree.tree_leaves(x, is_leaf=is_ragged)]):
        got, hint = f"{describe(x)}, which all share", "in_dims=0 for it, or other argnums"
        raise UnsupportedError(message("grad", "a ragged argument of each example", got, hint=hint))
    if isinstance(x, TensorDict):
        return x.apply(lambda leaf: leaf.expand(count, *leaf.shape), batch_size=(count, *x._size))
    leaves, spec = pytree.tree_flatten(x)
    if not all([isinstance(leaf, Tensor) for leaf in leaves]):
        raise DtypeError(message("grad", "tensors to differentiate", describe(x), hint="other argnums"))
    return pytree.tree_unflatten([leaf.expand(count, *leaf.shape) for leaf in leaves], spec)


BY_ROW.append(by_row)
