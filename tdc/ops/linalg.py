"""Linear algebra of the matrices in a ragged batch, and products with weights: linear.

    x (B, -1, D, D)    one matrix for each position          torch.linalg.inv(x) -> (B, -1, D, D)
    x (B, -1, -1)      one square matrix for each example    torch.linalg.inv(x) -> (B, -1, -1), det -> (B,)

Matrices lie in the last two dims, as torch has it. Where these are static, the operation runs on packed values. Square
matrices whose size differs from example to example are put into one rectangle, with an identity matrix behind each of
them: then determinant, inverse, factor and solution of an example are those of its own block, bit for bit up to
rounding. For decompositions that sort or mix the whole spectrum there is no such padding; they refuse.

A weight meets every position, so in a padded batch its gradient would read padding. The rules therefore fill padding
before a product and cut it off behind it: NaN there reaches neither the result nor the weight's gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.asserts import require
from tdc.core.errors import DtypeError, ShapeError, UnsupportedError, describe, message
from tdc.core.rules import MODES, Rule, add_rule, unsupported
from tdc.core.typing import Op, OpName
from tdc.ops.pointwise import mixed
from tdc.ops.rectangle import rectangle, repacked
from tdc.ragged.masked import MaskedBatch, build_masked, require_same_lengths
from tdc.ragged.nested import NestedTensor, build_nested, build_result
from tdc.ragged.padding import pack_rows, pad_rows
from tdc.ragged.segments import longest, sizes_of
from tdc.ragged.structure import require_same


def is_batch(x: Any) -> bool:
    return isinstance(x, (NestedTensor, MaskedBatch))


def ends_static(x: Any, count: int) -> bool:
    """Whether the last `count` dims are features, neither ragged nor the batch."""
    if isinstance(x, NestedTensor):
        s, static = x._structure, x._values.ndim - count
        return s.packed_dim < static and s.batch_dim < static + s.ragged_ndim
    return max(x.ragged_dims[-1], x.batch_dim) < x.ndim - count


def last_is_static(x: NestedTensor | MaskedBatch, op: OpName, count: int) -> None:
    """The last `count` dims are features, neither ragged nor the batch.

    Raises:
        ShapeError: one of them is not.
    """
    if not ends_static(x, count):
        got = f"shape {list(x.shape)} with ragged dims {x.ragged_dims}"
        raise ShapeError(
            message(op, f"{count} static dims at the end", got, hint="transpose the ragged dim to the front")
        )


def linear_nested(input: NestedTensor, weight: Tensor, bias: Tensor | None = None) -> NestedTensor:
    """One product over all real positions: (B, -1, I) -> (B, -1, O)."""
    dense_weight(input, weight, bias)
    last_is_static(input, "linear", 1)
    return build_result(input._structure, F.linear(input._values, weight, bias))


def linear_masked(input: MaskedBatch, weight: Tensor, bias: Tensor | None = None) -> MaskedBatch:
    dense_weight(input, weight, bias)
    last_is_static(input, "linear", 1)
    out: Any = F.linear(input.filled(0), weight, bias)
    return input.with_data(out.masked_fill(~input.mask, 0))


def dense_weight(input: Any, weight: Any, bias: Any) -> None:
    """The batch is what a layer is applied to, not what it learns.

    Raises:
        DtypeError: it is not.
    """
    if not isinstance(input, (NestedTensor, MaskedBatch)) or not isinstance(weight, Tensor):
        at = {"input": describe(input), "weight": describe(weight), "bias": describe(bias)}
        hint = "torch.matmul(x, w.mT) for a weight of each example"
        raise DtypeError(message("linear", "a ragged input and a dense weight", "others", at, hint))


# -- matrices of static size


def each(result: Any, fn: Any) -> Any:
    """`fn` of a tensor, or of every tensor of what torch returns, which keeps its type."""
    if isinstance(result, Tensor):
        return fn(result)
    parts = [fn(t) for t in result]
    return tuple(parts) if type(result) is tuple else type(result)(parts)


def on_static(op: Op, run: Op, args: tuple[Any, ...], kwargs: Any) -> Any:
    """`run` on the matrices of every position; batches among the operands have one structure."""
    like = next(a for a in args if is_batch(a))
    for other in args:
        if is_batch(other) and type(other) is not type(like):
            raise mixed(op, like, other)
    if isinstance(like, NestedTensor):
        s = like._structure
        for a in args:
            if is_batch(a) and a._structure is not s:
                require_same(s, a._structure, op)
        out = run(*[a._values if is_batch(a) else a for a in args], **kwargs)
        return each(out, partial(build_nested, s))
    for a in args:
        if is_batch(a) and a is not like:
            require_same_lengths(like, a, op)
    return each(run(*[identities(a) if is_batch(a) else a for a in args], **kwargs), partial(cut, like))


def identities(x: MaskedBatch) -> Tensor:
    """The data with an identity matrix in all padding; vectors are 0 there."""
    if x.ragged_dims[-1] >= x.ndim - 2:
        return x.filled(0)
    eye = torch.eye(x.shape[-2], x.shape[-1], dtype=x.dtype, device=x.device)
    return torch.where(x.mask, x.data, eye)


def cut(like: MaskedBatch, out: Tensor) -> MaskedBatch:
    """A result for every position of a rectangle, 0 where there is none."""
    ahead = max(like.ragged_dims[-1], like.batch_dim) + 1
    mask = like.mask.flatten(ahead)[..., 0] if like.ndim > ahead else like.mask
    mask = mask.view(*mask.shape, *[1] * (out.ndim - ahead))
    return build_masked(out.masked_fill(~mask, 0), like.lengths, like.ragged_dims, like.batch_dim)


# -- square matrices of every size


def of_matrices(op: Op, run: Op, parts: tuple[str, ...], x: Any, *args: Any, **kwargs: Any) -> Any:
    """One operand of matrices.

    Args:
        parts: for ragged square matrices what each result is: "ij" such a matrix, "" a number; none where torch's
            function cannot be had by padding.
    """
    if ends_static(x, 2):
        return on_static(op, run, (x, *args), kwargs)
    if not parts or x.ragged_dims != (x.ndim - 2, x.ndim - 1):
        raise no_matrices(op, x, bool(parts))
    out = run(with_identity(op, x), *args, **kwargs)
    if isinstance(out, Tensor):
        return back(out, parts[0], x)
    return type(out)([back(t, part, x) for t, part in zip(out, parts, strict=True)])


def no_matrices(op: Op, x: Any, squares: bool) -> UnsupportedError:
    """The error for matrices that have a ragged dim."""
    expected = "matrices of static size in the last two dims" + (", or square ones" if squares else "")
    hint = "transpose the ragged dim to the front, or loop over x.unbind()"
    return UnsupportedError(message(op, expected, describe(x), hint=hint))


def with_identity(op: Op, x: Any) -> Tensor:
    """Ragged square matrices in one rectangle (B, *S, L, L), each followed by an identity matrix.

    Raises:
        ShapeError: some matrix is not square. Immediate on CPU, asynchronous on CUDA.
    """
    sizes = x.sizes if isinstance(x, NestedTensor) else x.lengths
    text = message(op, "square matrices", "one that is not", hint="x.sizes shows them")
    require((sizes[:, 0] == sizes[:, 1]).all(), text, ShapeError)
    data = squares(x)
    beyond = torch.arange(data.shape[-1], device=data.device) >= sizes[:, :1]
    return data + torch.diag_embed(beyond.to(data.dtype)).view(
        data.shape[0], *[1] * (data.ndim - 3), data.shape[-1], data.shape[-1]
    )


def squares(x: Any) -> Tensor:
    """Ragged matrices in square rectangles, 0 where there is nothing, the batch in front."""
    if isinstance(x, MaskedBatch):
        data, n = x.filled(0), min(x.shape[-2:])
        return data[..., :n, :n].movedim(x.batch_dim, 0)
    s = x._structure
    n = longest(s)[0]
    return pad_rows(x._values.movedim(s.packed_dim, 0), s, (n, n), cut=True).movedim((1, 2), (-2, -1))


def back(out: Tensor, part: str, x: Any) -> Any:
    """A result for square rectangles as the batch it is, or as numbers."""
    s = x._structure if isinstance(x, NestedTensor) else x
    if not part:
        return out.movedim(0, s.batch_dim)
    if isinstance(x, MaskedBatch):
        grown = F.pad(out, (0, x.shape[-1] - out.shape[-1], 0, x.shape[-2] - out.shape[-2]))
        return repacked(grown.movedim(0, x.batch_dim), x)
    rows = pack_rows(out.movedim((-2, -1), (1, 2)), s, x._values.shape[s.packed_dim])
    return build_nested(s, rows.movedim(0, s.packed_dim))


# -- systems of equations


def of_system(op: Op, at: int, *args: Any, **kwargs: Any) -> Any:
    """A matrix, operand `at`, and right-hand sides, the other one of the first two.

    Raises:
        UnsupportedError: ragged matrices with dense right-hand sides, or from the right.
    """
    names = ("A", "B") if at == 0 else ("B", "L")
    args = (*args, *[kwargs.pop(name) for name in names[len(args) :] if name in kwargs])
    matrix, right, rest = args[at], args[1 - at], args[2:]
    ragged_matrix = is_batch(matrix) and not ends_static(matrix, 2)
    ragged_right = is_batch(right) and not is_batch(matrix) and not ends_static(right, 2)
    if not ragged_matrix and not ragged_right:
        if is_batch(matrix) and not is_batch(right):
            right = at_every_position(right, matrix)
        return on_static(op, op, (*((matrix, right) if at == 0 else (right, matrix)), *rest), kwargs)
    if not is_batch(right) or kwargs.get("left") is False or (ragged_matrix and type(matrix) is not type(right)):
        places = {"matrix": describe(matrix), "right-hand sides": describe(right)}
        hint = "pack the right-hand sides along the ragged dim of the matrices, and solve from the left"
        raise UnsupportedError(message(op, "ragged right-hand sides behind the matrix", "others", places, hint))
    if ragged_right:
        data, ready = rectangle(right, 0), matrix
    elif matrix.ragged_dims != (1, 2) or matrix.ndim != 3 or right.ragged_dims[0] != 1:
        raise no_matrices(op, matrix, True)
    else:
        ready = with_identity(op, matrix)
        data = sides(op, matrix, right, ready.shape[-1])
    return answer(op(*((ready, data) if at == 0 else (data, ready)), *rest, **kwargs), right, data)


def at_every_position(right: Tensor, matrix: Any) -> Tensor:
    """Dense right-hand sides of each matrix; torch might take them for one vector of each."""
    ahead = (matrix._values if isinstance(matrix, NestedTensor) else matrix.data).shape[:-2]
    return right.expand(*ahead, *right.shape) if right.ndim < 3 else right


def sides(op: Op, matrix: Any, right: Any, n: int) -> Tensor:
    """Right-hand sides in a rectangle of as many rows as the matrices have, 0 where there is nothing."""
    text = message(op, "right-hand sides as long as the matrices", "others", hint="x.unbind() shows their shapes")
    if isinstance(right, MaskedBatch):
        require((matrix.lengths[:, 0] == right.lengths[:, 0]).all(), text, ShapeError)
        return right.filled(0)[:, :n]
    s = right._structure
    require((sizes_of(matrix._structure)[:, 0] == sizes_of(s)[:, 0]).all(), text, ShapeError)
    return pad_rows(right._values.movedim(s.packed_dim, 0), s, (n, *longest(s)[1:]), cut=True)


def answer(out: Any, right: Any, data: Tensor) -> Any:
    """Solutions with the structure of the right-hand sides; what else torch returns is dense."""
    if isinstance(out, Tensor):
        if isinstance(right, MaskedBatch) and out.shape != right.shape:
            out = F.pad(out, [0, 0] * (out.ndim - 2) + [0, right.shape[1] - out.shape[1]])
        return repacked(out, right)
    return type(out)([answer(t, right, data) if t.shape == data.shape else t for t in out])


# -- the table


def matrix_rule(op: Op, *parts: str, run: Op | None = None, modes: tuple[str, ...] = MODES) -> None:
    """Rows for a function of matrices, see `of_matrices`."""
    for kind in ("nested", "masked"):
        impl = partial(of_matrices, op, run or op, parts)
        add_rule(Rule(op, kind, "linalg", impl, op, modes=modes))


def shape_kept(op: Op, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that keeps the shape and reads nothing behind a matrix: padded where a dim of it is ragged."""
    if isinstance(x, NestedTensor) and ends_static(x, 2):
        return x.with_values(op(x._values, *args, **kwargs))
    return repacked(op(rectangle(x, 0), *args, **kwargs), x)


def trace(x: Any) -> Any:
    """Of ragged matrices as well, since 0 adds nothing."""
    if ends_static(x, 2):
        return on_static(torch.trace, traces, (x,), {})
    if min(*x.ragged_dims, x.ndim) < x.ndim - 2 or x._batch_dim >= x.ndim - 2:
        raise no_matrices(torch.trace, x, True)
    return traces(rectangle(x, 0))


def traces(x: Tensor) -> Tensor:
    return x.diagonal(0, -2, -1).sum(-1)


add_rule(Rule(F.linear, "nested", "linalg", linear_nested, F.linear, source="torch.nn.Linear"))
add_rule(Rule(F.linear, "masked", "linalg", linear_masked, F.linear, source="torch.nn.Linear"))

LINALG = torch.linalg
for _op in (LINALG.det, torch.logdet):
    matrix_rule(_op, "")
matrix_rule(LINALG.slogdet, "", "")
for _op in (LINALG.inv, LINALG.matrix_power, LINALG.matrix_exp, LINALG.cholesky, torch.cholesky_inverse):
    matrix_rule(_op, "ij")
for _op in (LINALG.inv_ex, LINALG.cholesky_ex):
    matrix_rule(_op, "ij", "")
for _op in (
    LINALG.pinv, LINALG.qr, LINALG.svd, LINALG.svdvals, torch.svd, LINALG.eig, LINALG.eigh, LINALG.eigvals,
    LINALG.eigvalsh, LINALG.matrix_rank, LINALG.matrix_norm, LINALG.cond, LINALG.lu, LINALG.lu_factor,
    LINALG.lu_factor_ex, LINALG.ldl_factor, LINALG.householder_product,
):  # fmt: skip
    matrix_rule(_op)
for _kind in ("nested", "masked"):
    for _op, _at in ((LINALG.solve, 0), (LINALG.solve_ex, 0), (LINALG.solve_triangular, 0), (torch.cholesky_solve, 1)):
        add_rule(Rule(_op, _kind, "linalg", partial(of_system, _op, _at), _op))
    for _op in (torch.tril, torch.triu):
        add_rule(Rule(_op, _kind, "linalg", partial(shape_kept, _op), _op))
    add_rule(Rule(torch.trace, _kind, "linalg", trace, torch.trace))
unsupported(
    LINALG.lstsq, ["nested", "masked"], "residuals and ranks whose sizes depend on the values", family="linalg",
    hint="torch.linalg.pinv(a) @ b for the solutions",
)  # fmt: skip
