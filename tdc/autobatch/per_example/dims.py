"""Rows of operations whose arguments name dims: the same dims, counted from the batch on.

Each row is written as its parameters in torch's order; those with a star are dims of an example. Behind `=` stands the
dim where none is given:

    "input dim*"              must be given, or torch's own counts from the last dim
    "input dim*=1"            this one
    "input dim*=all"          all dims of each example, none of the batch
    "input dim*=flat"         the dim that all of them become: torch takes one dim only

Other operands meet the first from the last dim; positions along a dim count within each example, as in `tdc.ops`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.autobatch.per_example.operands import together
from tdc.autobatch.per_example.table import (
    all_dims,
    behind,
    each,
    flattened,
    is_operand,
    of_rank,
    one_by_one,
    only_shared,
    put,
    ragged,
    rank,
    refuse,
)
from tdc.core.rules import name_of
from tdc.core.torch_functions import is_handed_on
from tdc.core.typing import Op
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import map_results

OPERANDS = ("index", "indices", "src", "other", "x", "y", "x2", "prepend", "append")  # what meets the first operand
Parameter = tuple[str, bool, str]  # its name, whether it is a dim, and what it is where it is not given


def parameters(text: str) -> list[Parameter]:
    """The parameters that a row is written as."""
    found: list[Parameter] = []
    for word in text.split():
        name, _, default = word.partition("=")
        found.append((name.rstrip("*"), name.endswith("*"), default))
    return found


def counted(op: Any, text: str) -> Op:
    """A row for an operation with dims among its arguments."""
    known = parameters(text)
    names = [name for name, _, _ in known]

    def run(*args: Any, **kwargs: Any) -> Any:
        x = ragged(args[0], op)
        given = dict(zip(names, args, strict=False)) | kwargs
        n, more = x.ndim - 1, args[len(names) :]
        flat = keep = False
        for name, is_dim, default in known:
            if is_dim and given.get(name) is not None and given[name] != ():
                given[name] = behind(op, given[name], n)
            elif default == "all":
                given[name] = all_dims(x)
            elif default == "flat":
                flat, keep, given[name] = True, bool(given.pop("keepdim", False)), 1
            elif default:
                given[name] = behind(op, int(default), n)
        others = [*given][1:]
        x = flattened(x) if flat else x
        only_shared(op, *more, *[given[name] for name in others if flat or name not in OPERANDS])
        rest = {name: of_rank(given[name], n) for name in others}
        positional = [rest.pop(name) for name in names[1 : len(args)] if name in rest]
        found = op(x, *positional, *more, **rest)
        return map_results(found, lambda t: t.reshape(-1, *[1] * n)) if keep else found

    return run


def reduction(op: Any) -> Op:
    """A row for `op(x)` of all elements and `op(x, dim, keepdim)`."""
    return counted(op, "input dim*=all keepdim")


def spread_of(op: Any) -> Op:
    """A row for `std` and its kin, whose second argument may say whether they are unbiased."""
    inner = counted(op, "input dim*=all unbiased keepdim")

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], bool):
            return inner(x, None, correction=int(args[0]), **kwargs) if len(args) == 1 else inner(x, None, *args)
        return inner(x, *args, **kwargs)

    return run


def extreme(op: Any) -> Op:
    """A row for `max`, `min`: of all elements, along a dim, or of two operands."""
    along = counted(op, "input dim* keepdim")
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
    inner = counted(op, "input q dim*=flat keepdim")

    def run(x: Any, q: Any, *args: Any, **kwargs: Any) -> Any:
        only_shared(op, q)
        found = inner(x, q, *args, **kwargs)
        return found.movedim(0, 1) if isinstance(q, Tensor) and q.ndim else found

    return run


def through(op: Any) -> Op:
    """A row for an operation that counts its dims from the last: the batch is one more in front."""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        n = rank(x)
        ready = [of_rank(a, n) for a in args]
        return op(ragged(x, op), *ready, **{k: of_rank(a, n) for k, a in kwargs.items()})

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
    """`through` for what takes the sizes of the last dims of examples, and weights that all share."""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        only_shared(op, *args, *kwargs.values())
        return op(ragged(x, op), *args, **kwargs)

    return run


def matrices(op: Any) -> Op:
    """`through` for operations on the last two dims, which examples must have."""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        n = rank(x)
        if any([is_operand(a) and 0 < rank(a) < max(n, 2) for a in (x, *args, *kwargs.values())]):
            refuse(f"vectors in torch.{name_of(op)}", "x[:, None] makes matrices")
        ready = [of_rank(a, n) for a in args]
        return op(ragged(x, op), *ready, **{k: of_rank(a, n) for k, a in kwargs.items()})

    return run


def of_vectors(op: Any, row: Op) -> Op:
    """A row for an operation that has no dim and flattens: of examples of one dim."""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        if rank(x) != 1:
            refuse(f"torch.{name_of(op)} without a dim", "name the dim")
        return row(x, *args, **kwargs)

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
    inner = counted(op, "input dim*=flat keepdim")

    def run(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
        found = inner(input, dim, keepdim)
        if dim is not None:
            return found
        if input.dtype.is_floating_point:
            return found[0]
        return torch.where(numel(input) == 0, torch.iinfo(input.dtype).min, found[0])  # torch's of no elements

    return run


def index_fill(input: Any, dim: int, index: Any, value: Any) -> Any:
    only_shared(torch.index_fill, index, value)
    return torch.index_fill(ragged(input, torch.index_fill), behind("index_fill", dim, rank(input)), index, value)


def index_select(input: Any, dim: int, index: Any) -> Any:
    only_shared(torch.index_select, index)
    return torch.index_select(ragged(input, torch.index_select), behind("index_select", dim, rank(input)), index)


def unfold(input: Any, dimension: int, size: int, step: int) -> Any:
    only_shared(torch.Tensor.unfold, size, step)
    return ragged(input, torch.Tensor.unfold).unfold(behind("unfold", dimension, rank(input)), size, step)


def msort(input: Any) -> Any:
    return torch.sort(ragged(input, torch.msort), 1)[0]


def norm(A: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """`torch.linalg.norm`: of vectors, or of matrices where an order is asked for and there are two dims."""
    x = ragged(A, torch.linalg.norm)
    if dim is None and ord is not None and rank(x) > 2:
        refuse("torch.linalg.norm of an order without dims", "name the dims")
    dims = all_dims(x) if dim is None else behind("norm", dim, rank(x))
    if ord is None or isinstance(dims, int) or len(dims) == 1:
        return torch.linalg.vector_norm(x, 2 if ord is None else ord, dims, keepdim, dtype=dtype)
    return torch.linalg.matrix_norm(x, ord, dims, keepdim, dtype=dtype)


def gather(op: Any, text: str) -> Op:
    """A row for what reads or writes at positions that each example has."""
    inner = counted(op, text)

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


COUNTED: dict[Any, dict[str, str]] = {
    torch: {
        "logsumexp": "input dim* keepdim", "argmax argmin": "input dim*=flat keepdim",
        "mode": "input dim* keepdim",
        "kthvalue": "input k dim* keepdim",
        "cumsum cumprod logcumsumexp cummax cummin": "input dim*", "sort": "input dim* descending",
        "argsort": "input dim* descending", "topk": "input k dim*", "transpose": "input dim0* dim1*",
        "movedim": "input source* destination*", "unbind": "input dim*=0",
        "tensor_split": "input indices dim*=0",
        "split_with_sizes": "input sizes dim*=0", "narrow": "input dim* start length",
        "diff": "input n dim* prepend append", "trapezoid cumulative_trapezoid": "y x dim*",
        "diagonal": "input offset dim1*=0 dim2*=1", "diag_embed": "input offset dim1* dim2*",
        "select": "input dim* position", "norm": "input p dim*=all keepdim", "unflatten": "input dim* sizes",
        "aminmax": "input dim*=flat keepdim", "prod": "input dim*=flat keepdim", "cross": "input other dim*",
    },
    F: {
        "softmin": "input dim*", "normalize": "input p dim*=1 eps", "cosine_similarity": "x1 x2 dim*=1 eps",
        "gumbel_softmax": "logits tau hard eps dim*", "glu": "input dim*",
    },
    torch.linalg: {
        "vector_norm": "x ord dim*=all keepdim", "matrix_norm": "A ord dim* keepdim", "cross": "input other dim*",
        "diagonal": "A offset dim1* dim2*", "vecdot": "x y dim*",
    },
}  # fmt: skip
POSITIONS = {
    "gather": "input dim* index", "take_along_dim": "input indices dim*", "scatter": "input dim* index src",
    "scatter_add": "input dim* index src", "scatter_reduce": "input dim* index src reduce",
}  # fmt: skip
REDUCTIONS = "sum mean amax amin any all count_nonzero nansum nanmean"
MATRICES = """
    det slogdet cholesky inv matrix_power matrix_exp inv_ex cholesky_ex qr svd svdvals eig eigh eigvals eigvalsh cond
    pinv matrix_rank lu lu_factor lu_factor_ex ldl_factor ldl_factor_ex solve solve_ex solve_triangular
    householder_product
"""
OLD_MATRICES = "cholesky cholesky_inverse cholesky_solve logdet geqrf qr svd lu_solve ormqr"
OWN: dict[Any, Op] = {
    torch.softmax: softmax(torch.softmax), torch.log_softmax: softmax(torch.log_softmax),
    torch.roll: roll, torch.flip: one_by_one("dims", flip), torch.rot90: rot90, torch.index_fill: index_fill,
    torch.index_select: index_select, torch.Tensor.unfold: unfold,
    torch.split: parted(torch.split), torch.chunk: parted(torch.chunk),
    torch.median: middle(torch.median), torch.nanmedian: middle(torch.nanmedian), torch.linalg.norm: norm,
    F.pad: pad, torch.repeat_interleave: repeat_interleave, torch.numel: numel,
    torch.trace: trace, torch.quantile: quantile(torch.quantile), torch.nanquantile: quantile(torch.nanquantile),
    torch.max: extreme(torch.max), torch.min: extreme(torch.min), torch.tril: matrices(torch.tril),
    torch.triu: matrices(torch.triu), F.layer_norm: static_tail(F.layer_norm), F.rms_norm: static_tail(F.rms_norm),
    F.pixel_shuffle: static_tail(F.pixel_shuffle), F.pixel_unshuffle: static_tail(F.pixel_unshuffle),
    **{op: spread_of(op) for op in (torch.std, torch.var, torch.std_mean, torch.var_mean)},
}  # fmt: skip

for _module, _texts in COUNTED.items():
    for _names, _text in _texts.items():
        for _op in each(_module, _names):
            put(_op, counted(_op, _text))
for _name, _text in POSITIONS.items():
    put(getattr(torch, _name), gather(getattr(torch, _name), _text))
for _op in each(torch, REDUCTIONS):
    put(_op, reduction(_op))
for _op in (*each(torch.linalg, MATRICES), *filter(is_handed_on, each(torch, OLD_MATRICES))):
    put(_op, matrices(_op))
for _op, _row in OWN.items():
    put(_op, _row)
