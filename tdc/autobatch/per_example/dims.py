"""Rows of operations whose arguments name dims: the same dims, counted from the batch on.

Most are derived from what the rule says of its arguments, see `core/rules.py`. Other operands meet the first from the
last dim; positions along a dim count within each example, as in `tdc.ops`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.autobatch.per_example.operands import together
from tdc.autobatch.per_example.table import (
    NESTED,
    TABLE,
    all_dims,
    behind,
    each,
    flattened,
    is_operand,
    is_own,
    of_rank,
    one_by_one,
    only_shared,
    put,
    ragged,
    rank,
    refuse,
)
from tdc.core.rules import RULES, Dims, name_of
from tdc.core.torch_functions import is_handed_on
from tdc.core.typing import Op
from tdc.ops.tensordict.batch import on_leaves
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import map_results


def counted(op: Any, takes: Dims) -> Op:
    """A row for an operation with dims among its arguments.

    Where none is given, torch takes all elements: all dims of each example, or one dim that they become.
    """
    call = on_leaves(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        x = ragged(args[0], op)
        given = dict(zip(takes.names, args, strict=False)) | kwargs
        n, more = x.ndim - 1, args[len(takes.names) :]
        flat = keep = False
        for name, default in takes.defaults:
            if given.get(name) is not None and given[name] != ():
                given[name] = behind(op, given[name], n)
            elif default is None and takes.several:
                given[name] = all_dims(x)
            elif default is None:
                flat, keep, given[name] = True, bool(given.pop("keepdim", False)), 1
            elif isinstance(default, int):
                given[name] = behind(op, default, n)
        others = [*given][1:]
        x = flattened(x) if flat else x
        only_shared(op, *more, *[given[name] for name in others if flat or name not in takes.operands])
        rest = {name: of_rank(given[name], n) for name in others}
        positional = [rest.pop(name) for name in takes.names[1 : len(args)] if name in rest]
        found = call(x, *positional, *more, **rest)
        return map_results(found, lambda t: t.reshape(-1, *[1] * n)) if keep else found

    return run


def takes(op: Any) -> Dims:
    """The arguments of an operation, as its row writes them."""
    found = next(rule.dims for rule in RULES if rule.op is op and rule.kind == "nested")
    assert found is not None
    return found


def spread_of(op: Any) -> Op:
    """A row for `std` and its kin, whose second argument may say whether they are unbiased."""
    inner = counted(op, takes(op))

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], bool):
            return inner(x, None, correction=int(args[0]), **kwargs) if len(args) == 1 else inner(x, None, *args)
        return inner(x, *args, **kwargs)

    return run


def extreme(op: Any) -> Op:
    """A row for `max`, `min`: of all elements, along a dim, or of two operands."""
    along = counted(op, takes(op))
    whole = torch.amax if op is torch.max else torch.amin

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        other = kwargs.get("other", args[0] if args else None)
        if is_operand(other):
            return op(*together(op, [x, other]))
        if not args and not kwargs:
            return whole(ragged(x, op), all_dims(x))
        return along(x, *args, **kwargs)

    return run


def quantile(op: Any) -> Op:
    """A row for quantiles: several are the first dim of each example's result."""
    inner = counted(op, takes(op))

    def run(x: Any, q: Any, *args: Any, **kwargs: Any) -> Any:
        only_shared(op, q)
        found = inner(x, q, *args, **kwargs)
        return found.movedim(0, 1) if isinstance(q, Tensor) and q.ndim else found

    return run


def parted(op: Any) -> Op:
    """A row for `split` and `chunk`: along a ragged dim into parts of sizes that all share."""

    def run(x: Any, size: Any = None, dim: int = 0, **named: Any) -> Any:
        for given in named.values():  # which has a name of its own in each
            size = given
        only_shared(op, size)
        dim = behind(op, dim, rank(x))
        if dim in ragged(x, op).ragged_dims and not isinstance(size, (list, tuple)):
            got = f"torch.{name_of(op)} along a ragged dim, which gives each example its own number of parts"
            refuse(got, "x.tensor_split(n, dim), or for row in x")
        return op(x, size, dim)

    return run


def static_tail(op: Any) -> Op:
    """A row for what takes the sizes of the last dims of examples, and weights that all share."""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        only_shared(op, *args, *kwargs.values())
        return op(ragged(x, op), *args, **kwargs)

    return run


def normalized(op: Any) -> Op:
    """A row for `layer_norm` or `rms_norm`, whose weights may differ between examples."""

    def layer_norm(input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
        x = ragged(input, op)
        if not is_own(weight) and not is_own(bias):
            return op(x, normalized_shape, weight, bias, eps)
        y = op(x, normalized_shape, eps=eps)
        if weight is not None:
            y = torch.mul(*together(op, [y, weight]))
        return y if bias is None else torch.add(*together(op, [y, bias]))

    def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        x = ragged(input, op)
        if not is_own(weight):
            return op(x, normalized_shape, weight, eps)
        return torch.mul(*together(op, [op(x, normalized_shape, eps=eps), weight]))

    return layer_norm if op is F.layer_norm else rms_norm


def matrices(op: Any) -> Op:
    """A row for operations on the last two dims, which examples must have: the batch is one more in front."""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        n = rank(x)
        if any([is_operand(a) and 0 < rank(a) < max(n, 2) for a in (x, *args, *kwargs.values())]):
            refuse(f"vectors in torch.{name_of(op)}", "x[:, None] makes matrices")
        ready = [of_rank(a, n) for a in args]
        return op(ragged(x, op), *ready, **{k: of_rank(a, n) for k, a in kwargs.items()})

    return run


def softmax(op: Any) -> Op:
    """A row for `torch.softmax` and for that of `torch.nn.functional`, which hands on how deep its caller lies."""

    def run(input: Any, dim: Any = None, *args: Any, dtype: Any = None, **_: Any) -> Any:
        x = ragged(input, op)
        if dim is None:
            refuse(f"torch.{name_of(op)} without a dim", "name the dim")
        dtype = next((a for a in args if isinstance(a, torch.dtype)), dtype)
        return op(x, behind(op, dim, rank(x)), dtype=dtype)

    return run


def roll(x: Any, shifts: Any, dims: Any = None) -> Any:
    """Without dims of the one dim that there is."""
    only_shared(torch.roll, shifts)
    if dims is None or dims == ():
        if rank(x) != 1:
            refuse("torch.roll without dims", "name the dims")
        dims = 0
    return torch.roll(ragged(x, torch.roll), shifts, behind("roll", dims, rank(x)))


def flip(x: Any, dims: list[Any]) -> Any:
    return torch.flip(ragged(x, torch.flip), behind("flip", dims, rank(x)))


def rot90(input: Any, k: int = 1, dims: Any = (0, 1)) -> Any:
    return torch.rot90(ragged(input, torch.rot90), k, behind("rot90", dims, rank(input)))


def middle(op: Any) -> Op:
    """A row for a median: of all elements its value alone."""
    inner = counted(op, takes(op))

    def run(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
        found = inner(input, dim, keepdim)
        if dim is not None:
            return found
        if input.dtype.is_floating_point:
            return found[0]
        return torch.where(numel(input) == 0, torch.iinfo(input.dtype).min, found[0])  # torch's of no elements

    return run


def distinct(op: Any) -> Op:
    """A row for `unique`: without a dim, positions among distinct elements have the shape of the example."""
    takes_of = takes(op)
    inner = counted(op, takes_of)

    def run(input: Any, *args: Any, **kwargs: Any) -> Any:
        found = inner(input, *args, **kwargs)
        given = {**{name: a for name, a in zip(takes_of.names[1:], args, strict=False)}, **kwargs}
        if given.get("dim") is not None or not given.get("return_inverse") or rank(input) == 1:
            return found
        x = ragged(input, op)
        sizes = [-1 if d in x.ragged_dims else n for d, n in enumerate(x.shape)]
        return found[0], found[1].unflatten(1, sizes[1:]), *found[2:]

    return run


def norm(A: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """`torch.linalg.norm`: of vectors, or of matrices where an order is asked for and there are two dims."""
    x = ragged(A, torch.linalg.norm)
    if dim is None and ord is not None and rank(x) > 2:
        refuse("torch.linalg.norm of an order without dims", "name the dims")
    dims = all_dims(x) if dim is None else behind("norm", dim, rank(x))
    if ord is None or isinstance(dims, int) or len(dims) == 1:
        return torch.linalg.vector_norm(x, 2 if ord is None else ord, dims, keepdim, dtype=dtype)
    return torch.linalg.matrix_norm(x, ord, dims, keepdim, dtype=dtype)


def gather(op: Any) -> Op:
    """A row for what reads or writes at positions that each example has."""
    inner = counted(op, takes(op))

    def run(*args: Any, **kwargs: Any) -> Any:
        x = args[0]
        for a in (*args[1:], *kwargs.values()):
            if (isinstance(a, Tensor) and a.ndim) or (isinstance(a, (Tensor, NestedTensor)) and rank(a) > rank(x)):
                refuse(f"torch.{name_of(op)} with positions that all share", "x[i] of rows, or torch.index_select")
        return inner(*args, **kwargs)

    return run


def pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    only_shared(F.pad, pad, value)
    if len(pad) > 2 * rank(input):
        refuse(f"{len(pad)} numbers in torch.nn.functional.pad", f"two for each of {rank(input)} dims")
    return F.pad(ragged(input, F.pad), pad, mode, value)


def repeat_interleave(x: Any, repeats: Any, dim: Any = None, **kwargs: Any) -> Any:
    only_shared(torch.repeat_interleave, repeats)
    if dim is None and rank(x) != 1:
        refuse("torch.repeat_interleave without a dim", "name the dim")
    at = behind("repeat_interleave", 0 if dim is None else dim, rank(x))
    return torch.repeat_interleave(ragged(x, torch.repeat_interleave), repeats, at, **kwargs)


def numel(x: Any) -> Tensor:
    """A number that each example has."""
    static = 1
    for size in x.shape:
        static *= 1 if size == -1 else size
    return x.lengths * (static // x.structure.batch_size if x.structure.batch_size else 0)


def trace(x: Any) -> Any:
    return torch.sum(torch.diagonal(ragged(x, torch.trace), dim1=1, dim2=2), -1)


MATRICES = """
    det slogdet cholesky inv matrix_power matrix_exp inv_ex cholesky_ex qr svd svdvals eig eigh eigvals eigvalsh cond
    pinv matrix_rank lu lu_factor lu_factor_ex ldl_factor ldl_factor_ex solve solve_ex solve_triangular
    householder_product
"""
OLD_MATRICES = "cholesky cholesky_inverse cholesky_solve logdet geqrf qr svd lu_solve ormqr"
OWN: dict[Any, Op] = {
    torch.softmax: softmax(torch.softmax), torch.log_softmax: softmax(torch.log_softmax),
    torch.roll: roll, torch.flip: one_by_one("dims", flip), torch.rot90: rot90,
    torch.split: parted(torch.split), torch.chunk: parted(torch.chunk),
    torch.unique: distinct(torch.unique), torch.unique_consecutive: distinct(torch.unique_consecutive),
    torch.median: middle(torch.median), torch.nanmedian: middle(torch.nanmedian), torch.linalg.norm: norm,
    F.pad: pad, torch.repeat_interleave: repeat_interleave, torch.numel: numel,
    torch.trace: trace, torch.quantile: quantile(torch.quantile), torch.nanquantile: quantile(torch.nanquantile),
    torch.max: extreme(torch.max), torch.min: extreme(torch.min), torch.tril: matrices(torch.tril),
    torch.triu: matrices(torch.triu), F.layer_norm: normalized(F.layer_norm), F.rms_norm: normalized(F.rms_norm),
    F.pixel_shuffle: static_tail(F.pixel_shuffle), F.pixel_unshuffle: static_tail(F.pixel_unshuffle),
    **{op: spread_of(op) for op in (torch.std, torch.var, torch.std_mean, torch.var_mean)},
}  # fmt: skip

for _op in (*each(torch.linalg, MATRICES), *filter(is_handed_on, each(torch, OLD_MATRICES))):
    put(_op, matrices(_op))
for _op, _row in OWN.items():
    put(_op, _row)
for _op in each(torch, "gather take_along_dim scatter scatter_add scatter_reduce"):
    put(_op, gather(_op))
for _rule in RULES:
    if _rule.kind == "nested" and _rule.dims is not None and NESTED[_rule.op] not in TABLE:
        put(_rule.op, counted(_rule.op, _rule.dims))
