"""Elementwise operations on TensorDicts: the torch operation on each leaf, operands paired leaf by leaf.

    td + td         leaves at the same paths
    td + tensor     the tensor has batch dims, and is extended over the features of each leaf
    td + 1          every leaf

Eagerly, plain tensors go to one of torch's foreach kernels, all in one call. These have no batching rule and take no
ragged leaves, and the compiler fuses single operations better, so elsewhere each leaf has an operation of its own.

Invariant: the result has the keys, nodes and batch size of the first TensorDict.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tdc.core.container import Container
from tdc.core.dtensor import with_replicas
from tdc.core.dynamo import eager, skipped_in_graphs
from tdc.core.errors import ShapeError, StructureError, describe, message, show_sizes
from tdc.core.torch_functions import list_kernel
from tdc.core.typing import Op
from tdc.ops.tensordict.batch import explained
from tdc.tensordict.nodes import any_extra
from tdc.tensordict.storage import check_extra, columns_of, same_size
from tdc.tensordict.tensordict import TensorDict, build_td

FOREACH: dict[Op, Op] = {
    getattr(torch, name): list_kernel(f"foreach_{name}")
    for name in (
        "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac", "lgamma",
        "log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh",
        "sqrt", "tan", "tanh", "trunc", "add", "sub", "mul", "div",
    )
}  # fmt: skip
PLAIN = {Tensor, Parameter}
NUMBERS = (bool, int, float, complex)  # of Python: those of numpy are subclasses of some, and have a dtype
EXACT = {torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}


def unary_tensordict(op: Op) -> Op:
    """A rule that runs `op` on each leaf, or on all at once."""
    at_all = FOREACH.get(op)

    def run(x: TensorDict, *args: Any, **kwargs: Any) -> TensorDict:
        leaves = x._leaves
        if not args and not kwargs and at_all is not None and at_once(leaves.values()):
            done = at_all(list(leaves.values()))
            return build_td(dict(zip(leaves, done, strict=True)), x._nodes, x._size, x._device)
        try:
            if args or kwargs:
                out = {p: op(v, *args, **kwargs) for p, v in leaves.items()}
            else:  # most are called so, and the other call takes half as long again to trace
                out = {p: op(v) for p, v in leaves.items()}
            return build_td(out, x._nodes, x._size, x._device)
        except RuntimeError as error:
            raise refused(op, lambda v: op(v, *args, **kwargs), x, [x], error) from None

    return run


def nary_tensordict(op: Op, call: Op) -> Op:
    """A rule that runs `call` on leaves at the same paths; `op` names it."""

    def run(*args: Any, **kwargs: Any) -> TensorDict:
        try:
            return by_columns(op, call, args, kwargs)
        except RuntimeError as error:
            like, n = first_of(TensorDict, op, args, kwargs), len(args)
            if "mixed torch.Tensor and DTensor" in str(error):
                return by_columns(op, with_replicas(call), args, kwargs)

            def again(*values: Any) -> Any:
                return call(*values[:n], **dict(zip(kwargs, values[n:], strict=True)))

            raise refused(op, again, like, (*args, *kwargs.values()), error) from None

    return run


def refused(op: Op, call: Op, like: TensorDict, operands: Sequence[Any], error: Exception) -> Exception:
    """An error of torch with the leaves where it arises."""
    if type(error) not in (RuntimeError, NotImplementedError):  # the library's own, which say more
        return error
    paths = list(like._leaves)
    columns = [[a._leaves[p] for p in paths] if isinstance(a, TensorDict) else column(a, like, op) for a in operands]
    return explained(op, like, call, columns, error)


def by_columns(op: Op, call: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TensorDict:
    operands = (*args, *kwargs.values())
    like = first_of(TensorDict, op, args, kwargs)
    tds = [a for a in operands if isinstance(a, TensorDict)]
    own = columns_of(op, *tds)
    if len(tds) > 1:
        same_size(op, *tds)
    for a in operands:
        if (isinstance(a, Tensor) and a.ndim > 0) or (isinstance(a, Container) and not isinstance(a, TensorDict)):
            check_broadcast(a, like._size, op)
    paths, k = list(like._leaves), len(like._size)
    found = [own.pop(0) if isinstance(a, TensorDict) else column(a, like, op) for a in operands]
    if len(tds) > 1:
        found = aligned(found, [isinstance(a, TensorDict) for a in operands], k)
    at_all = kernel_of_lists(op)
    if kwargs:
        n, names = len(args), list(kwargs)
        done: Any = [
            call(*row[:n], **{name: x for name, x in zip(names, row[n:], strict=True)})
            for row in zip(*found, strict=True)
        ]
    elif at_all is not None and pairs(args) and at_once([x for td in tds for x in td._leaves.values()]):
        done = at_all(found[0], found[1] if len(tds) == 2 else args[1])
    else:
        done = [call(*values) for values in zip(*found, strict=True)]
    leaves = {p: x for p, x in zip(paths, done, strict=True)}  # a call of dict takes 2 ms to trace
    if len(tds) > 1 and any_extra(like._nodes):
        check_extra(op, leaves, like._nodes, k)
    return build_td(leaves, like._nodes, like._size, like._device)


def aligned(columns: list[list[Any]], own: list[bool], k: int) -> list[list[Any]]:
    """Columns with equally many dims at each path: dims of size 1 go behind batch dims, so that features meet."""
    ranks = [[x.ndim for x in column] for column, mine in zip(columns, own, strict=True) if mine]
    if all([r == ranks[0] for r in ranks]):
        return columns
    top = [max(r) for r in zip(*ranks, strict=True)]
    return [
        [x[(slice(None),) * k + (None,) * (n - x.ndim)] for x, n in zip(column, top, strict=True)] if mine else column
        for column, mine in zip(columns, own, strict=True)
    ]


def first_of(cls: Any, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first operand of a class: it gives the result its structure."""
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, cls):
            return a
    name = cls.__name__ if isinstance(cls, type) else "ragged batch"
    raise StructureError(message(op, f"a {name} among the operands", "one inside a list", hint="pass it directly"))


def column(x: Any, like: TensorDict, op: Op) -> list[Any]:
    """An operand for each leaf: a tensor extended over the features, or the same for all."""
    leaves = like._leaves
    if isinstance(x, Tensor) and x.ndim > 0:
        k = len(like._size)
        wide = {n: x.view(*x.shape, *[1] * (n - k)) for n in {v.ndim for v in leaves.values()}}
        return [wide[v.ndim] for v in leaves.values()]
    if not isinstance(x, Tensor) and type(x) not in NUMBERS and hasattr(x, "__array__"):  # of numpy, from Dynamo
        array = torch.as_tensor(x)
        check_broadcast(array, like._size, op)
        return column(array, like, op)
    return [x] * len(leaves)


def pairs(args: tuple[Any, ...]) -> bool:
    """True if the operands are two TensorDicts, or one and a number, as foreach kernels take them."""
    if len(args) != 2 or not isinstance(args[0], TensorDict):
        return False
    return isinstance(args[1], TensorDict) or type(args[1]) in (int, float)


@skipped_in_graphs
def kernel_of_lists(op: Op) -> Op | None:
    """The foreach kernel of an operation. A graph has none, and would check every entry of the table in each call."""
    return FOREACH.get(op)


@skipped_in_graphs
def at_once(leaves: Collection[Any]) -> bool:
    """True if a foreach kernel may take these leaves: plain tensors, at least one.

    Its derivative is for all or none: integers beside a leaf that requires grad are refused, and results of other
    leaves would require it, too. With half precision it rounds a number before it multiplies.
    """
    kinds = set(map(type, leaves))
    if not eager() or not kinds or not kinds <= PLAIN or not {x.dtype for x in leaves} <= EXACT:
        return False
    return not torch.is_grad_enabled() or len({x.requires_grad for x in leaves}) == 1


def check_broadcast(x: Any, size: Sequence[int], op: Op) -> None:
    """Let a dense operand of a TensorDict broadcast against its batch size, and not make it larger."""
    tail = list(size[len(size) - x.ndim :]) if x.ndim <= len(size) else None
    if tail is None or any([n != 1 and n != m for n, m in zip(x.shape, tail, strict=True)]):
        expected = f"a tensor that broadcasts against batch_size {show_sizes(size)}"
        hint = "for features use td.apply(lambda leaf: ...)"
        raise ShapeError(message(op, expected, describe(x), hint=hint))
