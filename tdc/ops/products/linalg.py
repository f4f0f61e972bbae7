"""Linear algebra of the matrices in a ragged batch.

    x (B, -1, D, D)    one matrix for each position          torch.linalg.inv(x) -> (B, -1, D, D)
    x (B, -1, -1)      one square matrix for each example    torch.linalg.inv(x) -> (B, -1, -1), det -> (B,)

Matrices are the last two dims. Where these are static, the operation runs on packed values. Ragged square matrices go
into one rectangle, with an identity matrix behind each: then determinant, inverse, factor and solution of an example
are those of its own block, up to rounding. Decompositions of the spectrum have other numbers there, see `spectrum`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import normal_dim
from tdc.core.asserts import require
from tdc.core.errors import ShapeError, UnsupportedError, describe, message
from tdc.core.rules import define, note_syncs, unsupported
from tdc.core.torch_functions import is_handed_on
from tdc.core.typing import Op
from tdc.layout.padding import pack_rows, pad_rows
from tdc.layout.segments import longest, structure_of_sizes, tell, total_of
from tdc.ops.elementwise.pairs import widest_of
from tdc.ops.elementwise.pointwise import fits, packed_operand, padded_operand, unbroadcast
from tdc.ops.layers.positionwise import at_positions, ends_static
from tdc.ops.products import spectrum
from tdc.ops.products.spectrum import along_rows
from tdc.ops.rectangle import as_batch, rectangle, repacked, with_sizes
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import Ragged, axis_of, data_of, is_ragged, map_results, ragged_sizes, with_data, without_dims

# -- matrices of static size


def identities(x: MaskedBatch) -> Tensor:
    """The data with an identity matrix in all padding; vectors are 0 there, and whole numbers, as pivots are, 1."""
    if not x.dtype.is_floating_point and not x.dtype.is_complex:
        return x.filled(1)
    if x.ragged_dims[-1] >= x.ndim - 2:
        return x.filled(0)
    eye = torch.eye(x.shape[-2], x.shape[-1], dtype=x.dtype, device=x.device)
    return torch.where(x.mask, x.data, eye)


def of_operands(op: Op, run: Op, cores: dict[str, int], *args: Any, **kwargs: Any) -> Any:
    """A function of several operands that broadcast but for their last dims; `cores` maps names to numbers of these."""
    names = list(cores)
    given = [*zip(names, args, strict=False), *kwargs.items()]
    batches = [(x, cores[name]) for name, x in given if is_ragged(x)]
    for x, count in batches:
        if not ends_static(x, count):
            raise no_matrices(op, x, False)
    like = widest_of(op, *[leading(x, count) for x, count in batches])
    ready = [beside(op, like, x, cores[name]) if name in cores else x for name, x in given]
    for i in [i for i, (name, _) in enumerate(given) if cores.get(name) == 1]:  # vectors of the matrices before them
        ready[i] = ready[i].expand(*torch.broadcast_shapes(ready[i].shape[:-1], ready[i - 1].shape[:-2]), -1)
    after, first = args[len(names) :], min(len(args), len(names))
    out = run(*ready[:first], *after, **dict(zip(kwargs, ready[first:], strict=True)))
    return map_results(out, lambda t: as_batch(t, like))


def leading(x: Any, count: int) -> Ragged:
    """A batch of the shape of another without its last dims; its elements are never read."""
    data = data_of(x)
    return with_data(x, data.new_empty(()).expand(data.shape[: data.ndim - count]))


def beside(op: Op, like: Any, x: Any, count: int) -> Any:
    """An operand as it broadcasts against the data of a batch with its own last dims behind; with all of these dims."""
    if not is_ragged(x) and (not isinstance(x, Tensor) or x.ndim == 0):
        return x
    data = data_of(like)
    wide = with_data(like, data[(..., *[None] * count)].expand(*data.shape, *x.shape[x.ndim - count :]))
    if isinstance(like, NestedTensor):
        out = packed_operand(x, wide, op)
    elif isinstance(x, MaskedBatch):
        out = padded_operand(x.with_data(identities(x)), wide, op)
    elif x.ndim > wide.ndim or not fits(x.shape, wide.shape):
        raise unbroadcast(op, wide, x)
    else:
        out = x
    full = out[(None,) * (data.ndim + count - out.ndim)]
    fixed = (like._batch_dim, *like.ragged_dims) if isinstance(like, MaskedBatch) else ()
    if any([full.shape[d] not in (1, data.shape[d]) for d in fixed]):
        raise unbroadcast(op, wide, full)
    return full


# -- square matrices of every size


def squares(op: Op, x: Any) -> tuple[Tensor, Tensor]:
    """Ragged square matrices in one rectangle (B, *S, L, L), 0 where there is nothing, and a mask (B, L) of that."""
    sizes = ragged_sizes(x)
    text = message(op, "square matrices", "one that is not", hint="x.sizes shows them")
    require((sizes[:, 0] == sizes[:, 1]).all(), text, ShapeError)
    data = square_data(x)
    return data, torch.arange(data.shape[-1], device=data.device) >= sizes[:, :1]


def square_data(x: Any) -> Tensor:
    """Ragged matrices in square rectangles, 0 where there is nothing, the batch in front."""
    if isinstance(x, MaskedBatch):
        data, n = x.filled(0), min(x.shape[-2:])
        return data[..., :n, :n].movedim(x.batch_dim, 0)
    s = x._structure
    n = longest(s)[0]
    return pad_rows(x._values.movedim(s.packed_dim, 0), s, (n, n), cut=True).movedim((1, 2), (-2, -1))


def with_identity(data: Tensor, beyond: Tensor) -> Tensor:
    """Square matrices, each followed by an identity matrix."""
    return data + torch.diag_embed(along_rows(beyond, data).to(data.dtype))


def beside_identity(run: Op, data: Tensor, beyond: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A function whose result for a matrix followed by an identity matrix holds that for the matrix."""
    return run(with_identity(data, beyond), *args, **kwargs)


def back(out: Tensor, part: str, x: Any) -> Ragged | Tensor:
    """A result for square rectangles as the batch it is, or as numbers."""
    if part == "i":
        return vectors(out, x)
    if part and isinstance(x, MaskedBatch):
        out = F.pad(out, (0, x.shape[-1] - out.shape[-1], 0, x.shape[-2] - out.shape[-2]))
    out = out.movedim(0, x._batch_dim)
    return repacked(out, x) if part else out


def vectors(out: Tensor, x: Any) -> Ragged:
    """Vectors (B, *S, L) of the sizes of ragged square matrices."""
    if isinstance(x, MaskedBatch):
        out = F.pad(out, (0, x.shape[-1] - out.shape[-1])).movedim(0, x.batch_dim)
        return with_sizes(out, x, ragged_sizes(x)[:, :1], (out.ndim - 1,))
    s, own = x._structure, structure_of_sizes(ragged_sizes(x)[:, :1], (out.shape[-1],))
    own = tell(own, [s], lambda known: known[0][:, :1])
    values = pack_rows(out.movedim(-1, 1), own, total_of(own))
    return build_nested(own.moved(s.packed_dim, s.batch_dim), values.movedim(0, s.packed_dim))


def of_matrices(
    op: Op, run: Op, squared: Op, parts: tuple[str, ...], cores: dict[str, int], *args: Any, **kwargs: Any
) -> Any:
    """Matrices, the first operand, and others, see `of_operands`.

    Args:
        squared: the same of ragged square matrices in rectangles, and a mask of padding, see `spectrum`.
        parts: of each result for ragged square matrices: "ij" such a matrix, "i" a vector of its size, "" a number;
            none where the function cannot be had by padding.
    """
    x, *rest = args or [kwargs.pop(next(iter(cores)))]
    if not is_ragged(x) or ends_static(x, 2):
        if rest or len(cores) > 1:
            return of_operands(op, run, cores, x, *rest, **kwargs)
        return at_positions(op, run, (x,), kwargs, identities)
    if not parts or x.ragged_dims != (x.ndim - 2, x.ndim - 1):
        raise no_matrices(op, x, bool(parts))
    wrong = [a for a in (*rest, *kwargs.values()) if is_ragged(a)]
    if wrong:
        hint = "loop over x.unbind()"
        raise UnsupportedError(message(op, "numbers or tensors behind ragged matrices", describe(wrong[0]), hint=hint))
    out = squared(*squares(op, x), *rest, **kwargs)
    if isinstance(out, Tensor):
        return back(out, parts[0], x)
    return type(out)([back(t, part, x) for t, part in zip(out, parts, strict=False)])


def no_matrices(op: Op, x: Any, squares: bool) -> UnsupportedError:
    """The error for matrices that have a ragged dim."""
    expected = "matrices of static size in the last two dims" + (", or square ones" if squares else "")
    hint = "transpose the ragged dim to the front, or loop over x.unbind()"
    return UnsupportedError(message(op, expected, describe(x), hint=hint))


# -- systems of equations


def of_system(op: Op, matrix: int, cores: dict[str, int], *args: Any, **kwargs: Any) -> Any:
    """A system of equations: of two operands number `matrix` is the matrix, the other one has right-hand sides."""
    args = (*args, *[kwargs.pop(name) for name in list(cores)[len(args) :] if name in kwargs])
    a, b, rest = args[matrix], args[1 - matrix], args[2:]
    vector = op in (LINALG.solve, LINALG.solve_ex) and is_vector(a, b)
    left = kwargs.get("left", True)
    summed = b.ndim - 2 + (vector or not left)  # the dim of the right-hand sides that meets the matrix

    def solved(a: Any, b: Any, run: Op = op) -> Any:
        return run(*((b, a) if matrix else (a, b)), *rest, **kwargs)

    if is_ragged(a) and not ends_static(a, 2):
        if not is_ragged(b) or not left or type(a) is not type(b):
            given = {"matrix": describe(a), "right-hand sides": describe(b)}
            hint = "pack the right-hand sides along the ragged dim of the matrices, and solve from the left"
            raise UnsupportedError(message(op, "ragged right-hand sides behind the matrix", "others", given, hint))
        if a.ragged_dims != (1, 2) or b.ragged_dims[0] != 1 or b.ndim != 3 - vector:
            raise no_matrices(op, a, True)
        ready = with_identity(*squares(op, a))
        data = sides(op, a, b, ready.shape[-1])
        return answer(solved(ready, data), b, data)
    if is_ragged(b) and not ends_static(b, 2 - vector):
        if is_ragged(a) or summed in b.ragged_dims or b._batch_dim >= b.ndim - 2:
            raise no_matrices(op, b, False)
        if a.ndim > b.ndim or not fits(a.shape[:-2], b.shape[:-2]) or a.shape[-1] != b.shape[summed]:
            raise ShapeError(message(op, "a matrix for each example", describe(a), hint="shape (B, n, n), or (n, n)"))
        data = rectangle(b, 0)
        return answer(solved(a, data), b, data)
    if a.shape[-1] != b.shape[summed]:
        given = {"matrix": describe(a), "right-hand sides": describe(b)}
        hint = "right-hand sides (..., n, k), or (n,) of `solve`"
        raise ShapeError(message(op, f"right-hand sides of {a.shape[-1]} rows", f"{b.shape[summed]}", given, hint))
    if not vector:
        return solved(a, b, partial(of_operands, op, op, cores))
    b = with_data(b, data_of(b).unsqueeze(-1)) if is_ragged(b) else b.unsqueeze(-1)
    return solved(a, b, partial(of_operands, op, partial(without_columns, op), cores))


def is_vector(a: Any, b: Any) -> bool:
    """True if `solve` takes right-hand sides for vectors."""
    if not is_ragged(a) or not is_ragged(b):
        return b.ndim == 1
    sizes = [[-1 if d in x.ragged_dims else n for d, n in enumerate(x.shape)] for x in (a, b)]
    return sizes[0][:-1] == sizes[1]


def without_columns(op: Op, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
    """Solutions for vectors that are matrices of one column."""
    out = op(*args, **kwargs)
    return out.squeeze(-1) if isinstance(out, Tensor) else type(out)([out[0].squeeze(-1), *out[1:]])


def sides(op: Op, matrix: Any, right: Any, n: int) -> Tensor:
    """Right-hand sides in a rectangle as high as the matrices, 0 where there is nothing."""
    text = message(op, "right-hand sides as long as the matrices", "others", hint="x.unbind() shows their shapes")
    require((ragged_sizes(matrix)[:, 0] == ragged_sizes(right)[:, 0]).all(), text, ShapeError)
    if isinstance(right, MaskedBatch):
        return right.filled(0)[:, :n]
    s = right._structure
    return pad_rows(right._values.movedim(s.packed_dim, 0), s, (n, *longest(s)[1:]), cut=True)


def answer(out: Any, right: Any, data: Tensor) -> Ragged | tuple[Any, ...]:
    """Solutions with the structure of the right-hand sides; what else torch returns is dense."""
    if not isinstance(out, Tensor):
        return map_results(out, lambda t: answer(t, right, data) if t.shape == data.shape else t)
    if isinstance(right, MaskedBatch) and out.shape != right.shape:
        out = F.pad(out, [0, 0] * (out.ndim - 2) + [0, right.shape[1] - out.shape[1]])
    return repacked(out, right)


# -- norms and traces


def matrix_norm(
    A: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Ragged | Tensor:
    """Of two static dims by torch's function, of others where it is made of sums and extremes."""
    dims = [normal_dim(d, A.ndim, LINALG.matrix_norm) for d in dim]
    x = A if dtype is None else A.to(dtype)
    if not set(dims) & {*x.ragged_dims, x._batch_dim}:
        axes = [axis_of(LINALG.matrix_norm, x, d) for d in dims]
        out = LINALG.matrix_norm(x.filled(0) if isinstance(x, MaskedBatch) else x._values, ord, axes, True)
        return without_dims(x, out, () if keepdim else dims)
    if x._batch_dim in dims or dims[0] == dims[1] or (isinstance(ord, str) and ord != "fro") or ord in (2, -2):
        raise no_matrices(LINALG.matrix_norm, x, False)
    if ord == "fro":
        return LINALG.vector_norm(x, 2, tuple(dims), keepdim)
    d, e = dims if abs(ord) == 1 else dims[::-1]
    sums = x.abs().sum(d, True)
    if ord > 0:  # of nothing the norm is 0
        out = sums.sum(e, True) if sums.shape[e] == 0 else sums.amax(e, True).clamp(min=0)
    else:
        out = sums.amin(e, True)
    return out if keepdim else out.squeeze(tuple(dims))


def shape_kept(op: Op, x: Any, *args: Any, **kwargs: Any) -> Ragged:
    """A function of matrices that keeps the shape and reads nothing behind one: padded where a dim of it is ragged."""
    if x.ndim < 3 or x._batch_dim >= x.ndim - 2:
        raise no_matrices(op, x, False)
    if isinstance(x, NestedTensor) and ends_static(x, 2):
        return x.with_values(op(x._values, *args, **kwargs))
    return repacked(op(rectangle(x, 0), *args, **kwargs), x)


def trace(x: Any) -> Ragged | Tensor:
    """Of ragged matrices: 0 adds nothing."""
    if x.ndim != 3 or x._batch_dim != 0:
        hint = "x.diagonal(0, -2, -1).sum(-1) of matrices at each position"
        raise ShapeError(message(torch.trace, "a matrix for each example", describe(x), hint=hint))
    return rectangle(x, 0).diagonal(0, 1, 2).sum(-1)


def vander(op: Op, turned: bool, x: Any, N: int | None = None, increasing: bool = False) -> Any:
    """N powers of every element, by default as many as the last dim has, which is static then.

    The highest power comes first if `turned`, unless `increasing`.
    """
    if N is None and not ends_static(x, 1):
        hint = f"torch.{op.__name__}(x, N=...)"
        raise UnsupportedError(message(op, "a number of powers", "a ragged dim to count them", hint=hint))
    options = {"N": x.shape[-1] if N is None else N, "increasing": increasing or not turned}
    return at_positions(op, powers, (x,), options)


def powers(x: Tensor, N: int, increasing: bool = False) -> Tensor:
    """`torch.vander` of many vectors, whose own derivative is broken (torch 2.13)."""
    out = LINALG.vander(x, N=N)
    return out if increasing else out.flip(-1)


# -- what older functions and methods call otherwise


def cholesky(input: Tensor, upper: bool = False) -> Tensor:
    return LINALG.cholesky(input, upper=upper)


def qr(input: Tensor, some: bool = True) -> tuple[Tensor, Tensor]:
    return LINALG.qr(input, "reduced" if some else "complete")


def qr_of_mode(A: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """`torch.linalg.qr`, whose Q of mode "r" has no dims that could be those of a batch."""
    if mode == "r":
        got, hint = "mode='r', without Q", "torch.linalg.qr(x).R"
        raise UnsupportedError(message(LINALG.qr, "mode='reduced' or mode='complete'", got, hint=hint))
    return LINALG.qr(A, mode)


def lu(input: Tensor, pivot: bool = True, get_infos: bool = False) -> tuple[Tensor, ...]:
    return tuple((LINALG.lu_factor_ex if get_infos else LINALG.lu_factor)(input, pivot=pivot))


def lu_solve(b: Any, LU_data: Any, LU_pivots: Any) -> Ragged | Tensor:
    return LINALG.lu_solve(LU_data, LU_pivots, b)


# -- the table


def matrix_rule(
    op: Op, *parts: str, run: Op | None = None, squared: Op | None = None, cores: Any = None, **facts: Any
) -> None:
    """Rows for a function of matrices and further operands, see `of_matrices`; `run` is called in its place."""
    cores, squared = {"A": 2, **(cores or {})}, squared or partial(beside_identity, run or op)
    define(op, "linalg", ragged=partial(of_matrices, op, run or op, squared, parts, cores), ref=run, **facts)


LINALG = torch.linalg
for _op in (LINALG.det, torch.logdet):
    matrix_rule(_op, "")
matrix_rule(LINALG.slogdet, "", "")
if is_handed_on(torch.cholesky):
    matrix_rule(torch.cholesky, "ij", run=cholesky)
for _op in (LINALG.inv, LINALG.matrix_power, LINALG.matrix_exp, LINALG.cholesky, torch.cholesky_inverse):
    matrix_rule(_op, "ij")
for _op in (LINALG.inv_ex, LINALG.cholesky_ex):
    matrix_rule(_op, "ij", "")
matrix_rule(LINALG.qr, "ij", "ij", run=qr_of_mode)
if is_handed_on(torch.qr):
    matrix_rule(torch.qr, "ij", "ij", run=qr)
matrix_rule(LINALG.lu, "ij", "ij", "ij")
for _op in (LINALG.lu_factor, LINALG.lu_factor_ex):
    matrix_rule(_op, "ij", "i", "")
matrix_rule(torch.Tensor.lu, "ij", "i", "", run=lu, aliases=[torch.lu])
for _op, _parts in ((LINALG.eigh, ("i", "ij")), (LINALG.eigvalsh, ("i",))):
    matrix_rule(_op, *_parts, squared=partial(spectrum.eigh, _op))
matrix_rule(LINALG.eig, "i", "ij", squared=spectrum.eig)
for _op in (LINALG.eigvals, LINALG.svdvals):
    matrix_rule(_op, "i", squared=partial(spectrum.values, _op))
for _op in (LINALG.svd, torch.svd):
    matrix_rule(_op, "ij", "i", "ij", squared=partial(spectrum.svd, _op))
for _op in (LINALG.cond, LINALG.ldl_factor, LINALG.ldl_factor_ex):
    matrix_rule(_op)
matrix_rule(torch.geqrf, modes=("eager", "vmap", "grad"))  # it has no fake kernel (torch 2.11-2.13)
for _op, _part, _cores in ((LINALG.pinv, "ij", {"rcond": 0}), (LINALG.matrix_rank, "", {"tol": 0})):
    matrix_rule(_op, _part, squared=partial(spectrum.by_rank, _op), cores={**_cores, "atol": 0, "rtol": 0})
matrix_rule(LINALG.householder_product, cores={"tau": 1})
matrix_rule(torch.lu_unpack, cores={"pivots": 1})
define(LINALG.matrix_norm, "linalg", ragged=matrix_norm, dims="A ord dim** keepdim")
for _op in (LINALG.solve, LINALG.solve_ex, LINALG.solve_triangular):
    define(_op, "linalg", ragged=partial(of_system, _op, 0, {"A": 2, "B": 2}))
define(torch.cholesky_solve, "linalg", ragged=partial(of_system, torch.cholesky_solve, 1, {"input": 2, "input2": 2}))
FACTORS: dict[Op, dict[str, int]] = {
    LINALG.lu_solve: {"LU": 2, "pivots": 1, "B": 2},
    LINALG.ldl_solve: {"LD": 2, "pivots": 1, "B": 2}, torch.ormqr: {"input": 2, "input2": 1, "input3": 2},
}  # fmt: skip
define(torch.lu_solve, "linalg", ragged=lu_solve, ref=lu_solve)
for _op, _cores in FACTORS.items():
    define(_op, "linalg", ragged=partial(of_operands, _op, _op, _cores))
define(LINALG.vander, "linalg", ragged=partial(vander, LINALG.vander, False))
define(torch.vander, "linalg", ragged=partial(vander, torch.vander, True), ref=powers)
for _op in (torch.tril, torch.triu):
    define(_op, "linalg", ragged=partial(shape_kept, _op))
define(torch.trace, "linalg", ragged=trace)
unsupported(
    LINALG.lstsq, ["nested", "masked"], "residuals and ranks whose sizes depend on the values", family="linalg",
    hint="torch.linalg.pinv(a) @ b for the solutions",
)  # fmt: skip
note_syncs(
    "whether a matrix has a factorization", torch.cholesky, LINALG.cholesky, LINALG.inv, LINALG.solve, LINALG.lu_factor,
    LINALG.ldl_factor, torch.Tensor.lu,
)  # fmt: skip
