"""Jacobians of functions of containers.

    jac = tdc.jacrev(predict)(params)               predict: TensorDict -> Tensor y
    jac["0", "weight"]                              (*y.shape, *weight.shape)

A Jacobian is nested as torch's: first as the result, then as the argument. Where both are TensorDicts, `jac["y"]["w"]`
is that of leaf y with respect to leaf w, also `jac["y", "w"]`. Its last dims are those of the argument:

    result              argument            Jacobian
    Tensor              TensorDict [B]      TensorDict of batch size (*y.shape, *B)
    TensorDict [R]      Tensor              TensorDict [R], leaves (*y.shape, *x.shape)
    TensorDict [R]      TensorDict [B]      TensorDict [R] of TensorDicts (*y.shape, *B)
    Tensor              NestedTensor        NestedTensor (*y.shape, *x.shape), of the structure of x
    NestedTensor        Tensor              NestedTensor (*y.shape, *x.shape), of the structure of y
    NestedTensor        TensorDict          TensorDict of these, of the batch size of the rows

MaskedBatch as NestedTensor. As in `grad`, a TensorDict leaves out other than floating-point tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.compile.carries import is_container, put_back, tensors_in
from tdc.compile.gradients import Part, by_path, pair_of
from tdc.compile.vectorize import check_options
from tdc.core import pytree
from tdc.core.arguments import expect_function, int_tuple, positions_of
from tdc.core.dynamo import has_forward_mode
from tdc.core.errors import DtypeError, UnsupportedError, describe, message
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import data_of, differentiable, is_ragged, with_data
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.shared import Shared
from tdc.tensordict.tensordict import TensorDict


def jacrev(
    fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False, *, chunk_size: int | None = None
) -> Callable[..., Any]:
    """Jacobian in reverse mode: one backward pass for each element of the result, all at once.

    Shapes:
        result `y`, argument `x` -> `(*y.shape, *x.shape)`; for containers see the table in `tdc.compile.jacobian`.

    Args:
        fn: returns tensors or containers, or with `has_aux` a pair of them and anything.
        argnums: positions of arguments; several give a tuple for each result.
        chunk_size: number of elements of the result at a time, to save memory.

    Returns:
        A function of the same arguments that returns the Jacobian, or `(jacobian, aux)`.

    Raises:
        DtypeError: an argument or a result without floating-point tensors.
        UnsupportedError: both the result and the argument are ragged.

    Compile:
        fullgraph (jacfwd from torch 2.13 on), also under `vmap`.

    Example:
        >>> params = TensorDict({"w": torch.tensor([1.0, 2.0]), "step": torch.tensor(1)})
        >>> jacrev(lambda p: p["w"] ** 2)(params)["w"]
        tensor([[2., 0.],
                [0., 4.]])

    Source:
        `torch.func.jacrev`.
    """
    check_options("jacrev", chunk_size=chunk_size)
    return jacobian("jacrev", partial(torch.func.jacrev, has_aux=True, chunk_size=chunk_size), fn, argnums, has_aux)


def jacfwd(
    fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False, *, randomness: str = "error"
) -> Callable[..., Any]:
    """Jacobian in forward mode: one pass for each element of the argument; otherwise as `jacrev`.

    Example:
        >>> jacfwd(lambda x: {"y": x.sum()})(torch.ones(2))
        {'y': tensor([1., 1.])}

    Source:
        `torch.func.jacfwd`.
    """
    check_options("jacfwd", randomness)
    return jacobian("jacfwd", partial(torch.func.jacfwd, has_aux=True, randomness=randomness), fn, argnums, has_aux)


def hessian(fn: Callable[..., Any], argnums: int = 0) -> Callable[..., Any]:
    """Hessian of a function: `jacfwd` of `jacrev`. Of a TensorDict, `h["v", "w"]` is `(*v.shape, *w.shape)`.

    Example:
        >>> h = hessian(lambda p: p["v"] * p["w"].sum())(TensorDict({"v": torch.tensor(1.0), "w": torch.ones(2)}))
        >>> h["v", "w"], h["w", "w"].tolist()
        (tensor([1., 1.]), [[0.0, 0.0], [0.0, 0.0]])

    Source:
        `torch.func.hessian`.
    """
    inner = jacobian("hessian", partial(torch.func.jacrev, has_aux=True), fn, argnums, False)
    return jacobian("hessian", partial(torch.func.jacfwd, has_aux=True), inner, argnums, False)


Transform = Callable[[Callable[..., Any]], Callable[..., Any]]


def jacobian(
    op: str, transform: Transform, fn: Callable[..., Any], argnums: int | tuple[int, ...], has_aux: bool
) -> Callable[..., Any]:
    """`transform` of a function of lists of tensors, put together as result and arguments are."""
    expect_function(op, fn)
    int_tuple(op, argnums)

    def call(*args: Any, **kwargs: Any) -> Any:
        if op != "jacrev":
            has_forward_mode()
        chosen = positions_of(op, argnums, len(args))
        parts = [Part(args[i], op) for i in chosen]
        form: list[Any] = []

        def inner(values: list[list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
            full = list(args)
            for i, part, tensors in zip(chosen, parts, values, strict=True):
                full[i] = part.filled(tensors, part.others)
            out = fn(*full, **kwargs)
            out = pair_of(op, out) if has_aux else out
            leaves = pytree.tree_leaves(out[0] if has_aux else out, is_leaf=is_ragged)
            found = [data_of(x) for x in leaves if differentiable(x)]
            if not found:
                got, hint = describe(out), "return floating-point tensors; has_aux=True for (result, anything else)"
                raise DtypeError(message(op, "a result with floating-point tensors", got, hint=hint))
            return found, tensors_in(out, form)

        found, tensors = transform(inner)([part.tensors for part in parts])
        whole = put_back(tensors, form)
        out, aux = whole if has_aux else (whole, None)
        rows = iter(found)
        jac = pytree.tree_map(lambda y: of_result(op, y, parts, rows, argnums), out, is_leaf=is_container)
        return (jac, aux) if has_aux else jac

    return call


Rows = Iterator[list[list[Tensor]]]  # for each leaf of the result, for each argument, the Jacobian of each tensor


def of_result(op: str, y: Any, parts: list[Part], rows: Rows, argnums: int | tuple[int, ...]) -> Any:
    """Jacobian of one leaf or TensorDict of the result; a tuple for several arguments."""
    if isinstance(y, TensorDict):
        cells = by_path(y, rows)
        columns: list[Any] = [
            TensorDict({p: beside(x, wrt(op, unwrap(x), part, row[j])) for p, (x, row) in cells.items()}, y.batch_size)
            for j, part in enumerate(parts)
        ]
    elif differentiable(y):
        columns = [wrt(op, y, part, tensors) for part, tensors in zip(parts, next(rows), strict=True)]
    else:
        return None
    return columns[0] if isinstance(argnums, int) else tuple(columns)


def wrt(op: str, y: Any, part: Part, tensors: list[Tensor]) -> Any:
    """Jacobian of a leaf of the result with respect to an argument, in its form."""
    it = iter(tensors)

    def one(x: Any) -> Any:
        if not isinstance(x, TensorDict):
            return cell(op, y, x, next(it)) if differentiable(x) else None
        size = y.shape[: min(y.ragged_dims)] if is_ragged(y) else (*y.shape, *x.batch_size)
        cells = {p: beside(leaf, cell(op, y, leaf, tensor)) for p, (leaf, tensor) in by_path(x, it).items()}
        return TensorDict(cells, size)

    return pytree.tree_map(one, part.arg, is_leaf=is_container)


def beside(leaf: Any, found: Any) -> Any:
    """A Jacobian of or by a leaf; of a Shared all tensors are Shared, since batch dims are not theirs."""
    if type(leaf) is not Shared:
        return found
    return found.with_batch_size(()).apply(Shared) if isinstance(found, TensorDict) else Shared(found)


def cell(op: str, y: Any, x: Any, tensor: Tensor) -> Any:
    """Jacobian of one leaf with respect to one leaf, in the ragged structure of one of them."""
    if is_ragged(y) and is_ragged(x):
        got, hint = f"{describe(y)} with respect to {describe(x)}", "differentiate a sum over examples, or by x.values"
        raise UnsupportedError(message(op, "a ragged result or a ragged argument, not both", got, hint=hint))
    k = len(y.shape)
    if isinstance(x, NestedTensor):
        return build_nested(x.structure.moved(x.structure.packed_dim + k, x.structure.batch_dim + k), tensor)
    if isinstance(x, MaskedBatch):
        return build_masked(tensor, x.lengths, tuple([r + k for r in x.ragged_dims]), x.batch_dim + k)
    return with_data(y, tensor)
