"""Linear algebra of the matrices in a ragged batch.

    x (B, -1, D, D)    one matrix for each position          torch.linalg.inv(x) -> (B, -1, D, D)
    x (B, -1, -1)      one square matrix for each example    torch.linalg.inv(x) -> (B, -1, -1), det -> (B,)

Matrices lie in the last two dims, as torch has it. Where these are static, the operation runs on packed values. Square
matrices whose size differs from example to example are put into one rectangle, with an identity matrix behind each of
them: then determinant, inverse, factor and solution of an example are those of its own block, bit for bit up to
rounding. For decompositions that sort or mix the whole spectrum there is no such padding; they refuse.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.asserts import require
from tdc.core.errors import ShapeError, UnsupportedError, describe, message
from tdc.core.rules import MODES, define, unsupported
from tdc.core.typing import Op
from tdc.ops.positionwise import at_positions, ends_static, is_ragged
from tdc.ops.rectangle import rectangle, repacked
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.padding import pad_rows
from tdc.ragged.segments import longest, sizes_of
from tdc.ragged.storage import Ragged, ragged_sizes

# -- matrices of static size


def identities(x: MaskedBatch) -> Tensor:
    """The data with an identity matrix in all padding; vectors are 0 there."""
    if x.ragged_dims[-1] >= x.ndim - 2:
        return x.filled(0)
    eye = torch.eye(x.shape[-2], x.shape[-1], dtype=x.dtype, device=x.device)
    return torch.where(x.mask, x.data, eye)


# -- square matrices of every size


def of_matrices(op: Op, run: Op, parts: tuple[str, ...], x: Any, *args: Any, **kwargs: Any) -> Any:
    """One operand of matrices.

    Args:
        parts: for ragged square matrices what each result is: "ij" such a matrix, "" a number; none where torch's
            function cannot be had by padding.
    """
    if ends_static(x, 2):
        return at_positions(op, run, (x, *args), kwargs, identities)
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
    sizes = ragged_sizes(x)
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


def back(out: Tensor, part: str, x: Any) -> Ragged | Tensor:
    """A result for square rectangles as the batch it is, or as numbers."""
    if part and isinstance(x, MaskedBatch):
        out = F.pad(out, (0, x.shape[-1] - out.shape[-1], 0, x.shape[-2] - out.shape[-2]))
    out = out.movedim(0, x._batch_dim)
    return repacked(out, x) if part else out


# -- systems of equations


def of_system(op: Op, at: int, *args: Any, **kwargs: Any) -> Ragged | tuple[Any, ...]:
    """A matrix, operand `at`, and right-hand sides, the other one of the first two.

    Raises:
        UnsupportedError: ragged matrices with dense right-hand sides, or from the right.
    """
    names = ("A", "B") if at == 0 else ("B", "L")
    args = (*args, *[kwargs.pop(name) for name in names[len(args) :] if name in kwargs])
    matrix, right, rest = args[at], args[1 - at], args[2:]
    ragged_matrix = is_ragged(matrix) and not ends_static(matrix, 2)
    ragged_right = is_ragged(right) and not is_ragged(matrix) and not ends_static(right, 2)
    if not ragged_matrix and not ragged_right:
        if is_ragged(matrix) and not is_ragged(right):
            right = at_every_position(right, matrix)
        return at_positions(op, op, (*((matrix, right) if at == 0 else (right, matrix)), *rest), kwargs, identities)
    if not is_ragged(right) or kwargs.get("left") is False or (ragged_matrix and type(matrix) is not type(right)):
        given = {"matrix": describe(matrix), "right-hand sides": describe(right)}
        hint = "pack the right-hand sides along the ragged dim of the matrices, and solve from the left"
        raise UnsupportedError(message(op, "ragged right-hand sides behind the matrix", "others", given, hint))
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
    """Right-hand sides in a rectangle as high as the matrices, 0 where there is nothing."""
    text = message(op, "right-hand sides as long as the matrices", "others", hint="x.unbind() shows their shapes")
    if isinstance(right, MaskedBatch):
        require((matrix.lengths[:, 0] == right.lengths[:, 0]).all(), text, ShapeError)
        return right.filled(0)[:, :n]
    s = right._structure
    require((sizes_of(matrix._structure)[:, 0] == sizes_of(s)[:, 0]).all(), text, ShapeError)
    return pad_rows(right._values.movedim(s.packed_dim, 0), s, (n, *longest(s)[1:]), cut=True)


def answer(out: Any, right: Any, data: Tensor) -> Ragged | tuple[Any, ...]:
    """Solutions with the structure of the right-hand sides; what else torch returns is dense."""
    if isinstance(out, Tensor):
        if isinstance(right, MaskedBatch) and out.shape != right.shape:
            out = F.pad(out, [0, 0] * (out.ndim - 2) + [0, right.shape[1] - out.shape[1]])
        return repacked(out, right)
    return type(out)([answer(t, right, data) if t.shape == data.shape else t for t in out])


# -- the table


def matrix_rule(op: Op, *parts: str, run: Op | None = None, modes: tuple[str, ...] = MODES) -> None:
    """Rows for a function of matrices, see `of_matrices`."""
    define(op, "linalg", ragged=partial(of_matrices, op, run or op, parts), modes=modes)


def shape_kept(op: Op, x: Any, *args: Any, **kwargs: Any) -> Ragged:
    """A function that keeps the shape and reads nothing behind a matrix: padded where a dim of it is ragged."""
    if isinstance(x, NestedTensor) and ends_static(x, 2):
        return x.with_values(op(x._values, *args, **kwargs))
    return repacked(op(rectangle(x, 0), *args, **kwargs), x)


def trace(x: Any) -> Ragged | Tensor:
    """Of ragged matrices as well, since 0 adds nothing."""
    if ends_static(x, 2):
        return at_positions(torch.trace, traces, (x,), {}, identities)
    if min(*x.ragged_dims, x.ndim) < x.ndim - 2 or x._batch_dim >= x.ndim - 2:
        raise no_matrices(torch.trace, x, True)
    return traces(rectangle(x, 0))


def traces(x: Tensor) -> Tensor:
    return x.diagonal(0, -2, -1).sum(-1)


LINALG = torch.linalg
for _op in (LINALG.det, torch.logdet):
    matrix_rule(_op, "")
matrix_rule(LINALG.slogdet, "", "")
for _op in (LINALG.inv, LINALG.matrix_power, LINALG.matrix_exp, LINALG.cholesky, torch.cholesky_inverse):
    matrix_rule(_op, "ij")
for _op in (LINALG.inv_ex, LINALG.cholesky_ex):
    matrix_rule(_op, "ij", "")
for _op in (
    LINALG.pinv, LINALG.qr, torch.svd, LINALG.svd, LINALG.svdvals, LINALG.eig, LINALG.eigh, LINALG.eigvals,
    LINALG.eigvalsh, LINALG.matrix_rank, LINALG.matrix_norm, LINALG.cond, LINALG.lu, LINALG.lu_factor,
    LINALG.lu_factor_ex, LINALG.ldl_factor, LINALG.householder_product,
):  # fmt: skip
    matrix_rule(_op)
for _op, _at in ((LINALG.solve, 0), (LINALG.solve_ex, 0), (LINALG.solve_triangular, 0), (torch.cholesky_solve, 1)):
    define(_op, "linalg", ragged=partial(of_system, _op, _at))
for _op in (torch.tril, torch.triu):
    define(_op, "linalg", ragged=partial(shape_kept, _op))
define(torch.trace, "linalg", ragged=trace)
unsupported(
    LINALG.lstsq, ["nested", "masked"], "residuals and ranks whose sizes depend on the values", family="linalg",
    hint="torch.linalg.pinv(a) @ b for the solutions",
)  # fmt: skip
