"""Pairs of vectors: distances, similarities, cross products. Diagonals: of matrices, and matrices of them.

    F.cosine_similarity(x, y, -1)     (B, -1, D), (B, -1, D) -> (B, -1)
    F.cosine_similarity(x, y, 1)      over the ragged dim, (B, D)
    torch.cdist(x, y)                 (B, -1, D), (B, -1, D) -> (B, -1, -1), of other lengths as well
    torch.cdist(x, points)            (B, -1, D), (P, D) or (B, P, D) -> (B, -1, P)
    torch.diag_embed(x)               (B, -1) -> (B, -1, -1), and back with torch.diagonal(x, 0, 1, 2)

Invariant: distances go through a matrix product only when asked to, so that they do not depend on the batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import expect, normal_dim
from tdc.core.dynamo import certain
from tdc.core.errors import DtypeError, ShapeError, UnsupportedError, describe, message
from tdc.core.rules import define, note_syncs, unsupported
from tdc.core.typing import Op
from tdc.ops.elementwise.pairs import widest_of
from tdc.ops.layers.positionwise import at_positions, ends_static, last_is_static
from tdc.ops.products.einsum import Term, check_letters, in_rectangles, joined, kinds_of
from tdc.ops.products.linalg import beside, no_matrices
from tdc.ops.products.matmul import BATCH, example
from tdc.ops.rectangle import as_batch, cut_padding, rectangle, with_sizes
from tdc.ops.tensordict.batch import along
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import Ragged, axis_of, is_ragged, ragged_sizes, sizes_along, without_dims

# -- one number for each pair


def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Ragged | Tensor:
    op = F.cosine_similarity

    def along_ragged(d: int) -> Tensor:
        a, b = [unit(x, d, eps) for x in torch.broadcast_tensors(x1, x2)]
        if a.dtype.is_complex:  # torch, too
            raise DtypeError(message(op, "real numbers", describe(a), hint="torch.linalg.vecdot of complex ones"))
        return torch.mul(a, b).sum(d)

    return of_pairs(op, lambda a, b, axis: op(a, b, axis, eps), along_ragged, x1, x2, dim)


def unit(x: Any, d: int, eps: float) -> Any:
    """Vectors divided by their length, or by `eps` where that is more; its gradient takes it for the length."""
    length = torch.linalg.vector_norm(x, 2, d, True)
    return x / (length + (length.clamp_min(eps) - length).detach())


def pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Ragged | Tensor:
    op = F.pairwise_distance

    def along_ragged(d: int) -> Tensor:
        return torch.linalg.vector_norm(torch.sub(x1, x2) + eps, p, d, keepdim)

    return of_pairs(
        op, lambda a, b, axis: op(a.movedim(axis, -1), b.movedim(axis, -1), p, eps), along_ragged, x1, x2, -1, keepdim
    )


def vecdot(x: Any, y: Any, *, dim: int = -1) -> Ragged | Tensor:
    op = torch.linalg.vecdot
    return of_pairs(op, lambda a, b, d: op(a, b, dim=d), lambda d: torch.mul(torch.conj(x), y).sum(d), x, y, dim)


def of_pairs(op: Op, run: Op, along_ragged: Op, x1: Any, x2: Any, dim: int, keepdim: bool = False) -> Ragged | Tensor:
    """A function of two operands along one dim: `run(a, b, axis)` of data, or `along_ragged(dim)` of the operands."""
    like = widest_of(op, x1, x2)
    d = normal_dim(dim, like.ndim, op)
    if d == like._batch_dim:
        hint = "the examples of a batch are no vectors; name another dim"
        raise ShapeError(message(op, "a dim of the examples", f"dim {dim}, the batch", hint=hint))
    if d in like.ragged_dims:
        return along_ragged(d)
    axis = axis_of(op, like, d)
    out = run(*vectors(op, like, x1, x2), axis).unsqueeze(axis)
    out = out.masked_fill(~like.mask, 0) if isinstance(like, MaskedBatch) else out
    return without_dims(like, out, () if keepdim else (d,))


def vectors(op: Op, like: Ragged, x1: Any, x2: Any) -> Sequence[Tensor]:
    """Two operands as they broadcast against the data of `like` and each other, with 0 in padding."""
    both = torch.broadcast_tensors(*[beside(op, like, x, 0) for x in (x1, x2)])
    return [t.masked_fill(~like.mask, 0) for t in both] if isinstance(like, MaskedBatch) else both


# -- cross products


def linalg_cross(input: Any, other: Any, *, dim: int = -1) -> Ragged:
    like = widest_of(torch.linalg.cross, input, other)
    d = normal_dim(dim, like.ndim, torch.linalg.cross)
    wrong = [x for x in (like, input, other) if x.ndim < like.ndim - d or x.shape[d - like.ndim] != 3]
    if wrong or d == like._batch_dim or d in like.ragged_dims:
        got = f"dim {dim} of {describe([*wrong, like][0])}"
        raise ShapeError(message("cross", "a static dim of size 3", got, hint="torch.linalg.cross(x, y, dim=...)"))
    out = torch.linalg.cross(*vectors(torch.cross, like, input, other), dim=axis_of(torch.cross, like, d))
    return as_batch(out, like)


def cross(input: Any, other: Any, dim: int | None = None) -> Ragged:
    """Without a dim along the first static one of size 3; refused behind a ragged dim, which torch might choose."""
    like = widest_of(torch.cross, input, other)
    fixed = [d for d in range(like.ndim) if d != like._batch_dim and d not in like.ragged_dims and like.shape[d] == 3]
    if dim is None and fixed and fixed[0] > like.ragged_dims[0]:
        hint = "torch.linalg.cross(x, y), along the last dim"
        raise UnsupportedError(message("cross", "the dim", "none, behind a ragged one", hint=hint))
    return linalg_cross(input, other, dim=dim if dim is not None else fixed[0] if fixed else -1)


# -- distances of all pairs


def cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: str | None = None) -> Ragged | Tensor:
    """Distances of the vectors of each example to those of the same example, or to the same points for all."""
    by_product = compute_mode == "use_mm_for_euclid_dist"  # "if necessary" would depend on the padded size
    mode = "use_mm_for_euclid_dist" if by_product else "donot_use_mm_for_euclid_dist"
    for x in (x1, x2):
        if is_ragged(x):
            last_is_static(x, "cdist", 1)
    if isinstance(x1, NestedTensor) and isinstance(x2, Tensor) and x2.ndim == 2:
        return build_nested(x1.structure, torch.cdist(x1.values, x2, p, mode))
    terms = [example(torch.cdist, x1, "id"), example(torch.cdist, x2, "jd")]
    batches = [t for t in terms if is_ragged(t.x)]
    ragged, batch = kinds_of(torch.cdist, batches)
    check_letters(torch.cdist, terms, ragged, batch, BATCH + "d")

    def run(ready: list[Term], out: str) -> Tensor:
        pair = [t.x.movedim([t.dims.index(c) for c in t.dims if c != "d"][-1], -2) for t in ready]
        found = BATCH * (BATCH in joined(ready)) + "ij"
        rows = next((x.shape[0] for x in pair if x.ndim == 3), 1)
        if not certain(rows != 0):  # torch asks whether there is an element
            pair = [F.pad(x, (0, 0, 0, 0, 0, 1)) if x.ndim == 3 else x for x in pair]
        distances = torch.cdist(*pair, p, mode)
        distances = distances.narrow(0, 0, rows) if BATCH in found else distances
        return distances.movedim([found.index(c) for c in out], list(range(len(out))))

    return in_rectangles(torch.cdist, terms, BATCH + "ij", BATCH, run)


# -- queries against documents


def max_sim(queries: Any, documents: Any) -> Tensor:
    """Score every query against every document: the sum over its tokens of the largest product with a token of it.

    The products are those of real tokens alone, `(tokens of documents, tokens of queries)`: no pair of rows is padded.

    Args:
        queries, documents: batches of vectors, each packed, padded or dense. Normalise them first for cosines.

    Shapes:
        queries `(B, -1, D)`, documents `(C, -1, D)` -> `(B, C)`. A query without tokens scores 0, a document without
        tokens -inf.

    Raises:
        DtypeError: neither a batch nor a tensor, no floating point, or two dtypes.
        ShapeError: other dims than batch, tokens, features, or other features.

    Compile:
        One graph for all lengths and batch sizes, with gradients, which equal products share as in `torch.amax`.

    Example:
        >>> import torch
        >>> from tdc.ragged.pack import pack
        >>> max_sim(pack([torch.eye(2), torch.eye(2)[:1]]), pack([torch.ones(1, 2), 3 * torch.eye(2)]))
        tensor([[2., 6.],
                [1., 3.]])
    """
    for name, x in (("queries", queries), ("documents", documents)):
        check_vectors(name, x)
    if queries.dtype != documents.dtype:
        got = f"{describe(queries)} and {describe(documents)}"
        hint = "documents.to(queries.dtype)"
        raise DtypeError(message("max_sim", "queries and documents of one dtype", got, hint=hint))
    if queries.shape[2] != documents.shape[2]:
        got = f"{describe(queries)} and {describe(documents)}"
        raise ShapeError(message("max_sim", "vectors of as many features", got, hint="project both to one size"))
    products = vectors_of(documents) @ vectors_of(queries).transpose(0, 1)
    best: Any = in_rows(documents, products).amax(1)
    return in_rows(queries, best.transpose(0, 1)).sum(1)


def check_vectors(name: str, x: Any) -> None:
    """Refuse all but floating point `(B, tokens, D)`, one example after another."""
    expect("max_sim", x, NestedTensor, MaskedBatch, Tensor, of=f" of {name}")
    if not x.is_floating_point():
        raise DtypeError(message("max_sim", f"{name} of floating point", describe(x), hint="x.float()"))
    if x.ndim != 3 or (is_ragged(x) and (x._batch_dim, x.ragged_dims) != (0, (1,))):
        hint = "tdc.pack([vectors, ...]) of (tokens, D) each"
        raise ShapeError(message("max_sim", f"{name} (B, -1, D)", describe(x), hint=hint))


def vectors_of(x: Any) -> Tensor:
    """All vectors as one matrix, (M, D), 0 in padding."""
    if isinstance(x, NestedTensor):
        return x.values
    return (x.filled(0) if isinstance(x, MaskedBatch) else x).flatten(0, 1)


def in_rows(x: Any, rows: Tensor) -> Any:
    """A matrix with a row for each vector of `x` as a batch of its lengths, (M, K) -> (B, -1, K)."""
    if isinstance(x, NestedTensor):
        return x.with_values(rows)
    return x.with_data(rows.view(*x.data.shape[:2], -1)) if isinstance(x, MaskedBatch) else rows.view(*x.shape[:2], -1)


# -- diagonals


def diagonal_of(input: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Ragged:
    """The diagonal of two dims of every example, as the last dim; a ragged one where one of them is."""
    x = input
    d1, d2 = normal_dim(dim1, x.ndim, "diagonal"), normal_dim(dim2, x.ndim, "diagonal")
    b = x._batch_dim
    if b in (d1, d2) or d1 == d2:
        hint = "name two dims of the examples, e.g. torch.diagonal(x, 0, 1, 2)"
        raise ShapeError(message("diagonal", "two dims of the examples", f"dims {dim1} and {dim2}", hint=hint))
    ragged = [d for d in (d1, d2) if d in x.ragged_dims]
    if not ragged:
        return static_diagonal(x, offset, d1, d2)
    if len(ragged) < len(x.ragged_dims) or b > min(x.ragged_dims):
        raise no_matrices(torch.diagonal, x, False)
    data = rectangle(x, 0).diagonal(offset, d1, d2)
    ends = [sizes_along(x, d) if d in ragged else x.shape[d] for d in (d1, d2)]
    first, second = ends[0] + min(offset, 0), ends[1] - max(offset, 0)
    lengths = torch.minimum(torch.as_tensor(first), torch.as_tensor(second)).clamp(min=0)
    return with_sizes(data, x, lengths[:, None], (data.ndim - 1,))


def static_diagonal(x: Any, offset: int, d1: int, d2: int) -> Ragged:
    """Of two static dims."""
    ahead = [d for d in (d1, d2) if d < x._batch_dim]
    if isinstance(x, MaskedBatch):
        kept = tuple([r - (r > d1) - (r > d2) for r in x.ragged_dims])
        data = x.filled(0).diagonal(offset, d1, d2)
        return cut_padding(build_masked(data, x.lengths, kept, x.batch_dim - len(ahead)), data)
    s: Any = x.structure
    axes = [s.axis(d, x.ndim, "diagonal") for d in (d1, d2)]
    moved = s.moved(s.packed_dim - sum([a < s.packed_dim for a in axes]), s.batch_dim - len(ahead))
    return build_nested(moved, x.values.diagonal(offset, *axes))


def diag_embed(input: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Ragged:
    """Matrices, in the last two dims, with the last dim as their diagonal; ragged square ones where it is ragged."""
    x, last = input, input.ndim - 1
    if sorted([d % (x.ndim + 1) for d in (dim1, dim2)]) != [last, last + 1] or x._batch_dim == last:
        hint = "put the batch in front, and permute the result"
        raise UnsupportedError(message("diag_embed", "matrices in the last two dims", f"{dim1}, {dim2}", hint=hint))
    dims = dim1 - (x.ndim + 1) * (dim1 > 0), dim2 - (x.ndim + 1) * (dim2 > 0)
    if ends_static(x, 1):
        given = {"offset": offset, "dim1": dims[0], "dim2": dims[1]}
        return at_positions(torch.diag_embed, torch.diag_embed, (x,), given)
    if len(x.ragged_dims) > 1:
        raise no_matrices(torch.diag_embed, x, False)
    data = torch.diag_embed(rectangle(x, 0), offset, *dims)
    sizes = ragged_sizes(x) + abs(offset)
    return with_sizes(data, x, torch.cat([sizes, sizes], 1), (last, last + 1))


def diag(input: Any, diagonal: int = 0) -> Ragged:
    """Of examples that are vectors a matrix, of matrices their diagonal."""
    if input.ndim == 2:
        return diag_embed(input, diagonal)
    if input.ndim == 3 and input._batch_dim == 0:
        return diagonal_of(input, diagonal, 1, 2)
    got, hint = describe(input), "torch.diagonal(x, 0, dim1, dim2)"
    raise ShapeError(message("diag", "examples that are vectors or matrices", got, hint=hint))


def diagflat(input: Any, offset: int = 0) -> Ragged:
    """Matrices of examples that are vectors; those of more dims would have to be flattened, and are refused."""
    if input.ndim != 2:
        got, hint = describe(input), "loop over x.unbind()"
        raise UnsupportedError(message("diagflat", "examples that are vectors", got, hint=hint))
    return diag_embed(input, offset)


# -- covariances


def cov(input: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """Of the rows of examples that are matrices (n, observations), or of examples that are vectors.

    A ragged number of rows is refused: of one row torch gives a number.
    """
    if fweights is not None or aweights is not None:
        hint = "repeat the observations, or loop over x.unbind()"
        raise UnsupportedError(message("cov", "observations without weights", "weights", hint=hint))
    if input.ndim not in (2, 3) or input._batch_dim:
        raise ShapeError(message("cov", "examples that are vectors or matrices", describe(input), hint="x.unbind()"))
    if input.ndim == 3 and 1 in input.ragged_dims:
        hint = "subtract the mean and multiply, x @ x.mT"
        raise UnsupportedError(message("cov", "matrices with a static number of rows", describe(input), hint=hint))
    x = input if input.dtype.is_floating_point or input.dtype.is_complex else input.to(torch.get_default_dtype())
    x = x.unsqueeze(1) if x.ndim == 2 else x
    x = x - x.mean(2, True)
    count = sizes_along(x, 2)[:, None, None]
    out = torch.matmul(x, torch.conj(x.transpose(1, 2))) / (count - correction).clamp(min=0)
    return out if x.shape[1] != 1 else out[:, 0, 0]


def corrcoef(input: Any) -> Any:
    """Covariances divided by both standard deviations."""
    c = cov(input)
    if c.ndim == 1:
        return c / c
    deviation = c.diagonal(0, 1, 2).real.sqrt()
    out = c / deviation[:, :, None] / deviation[:, None]
    return torch.complex(out.real.clamp(-1, 1), out.imag.clamp(-1, 1)) if out.is_complex() else out.clamp(-1, 1)


def cosine_of_leaves(x1: Tensor, x2: Tensor, dim: int, eps: float = 1e-8) -> Tensor:
    """Of a leaf, from whose first dim on `dim` counts, and a tensor, which may not have more dims."""
    if x2.ndim > x1.ndim:
        raise ShapeError(message("cosine_similarity", f"{x1.ndim} dims at most", describe(x2), hint="expand the batch"))
    return F.cosine_similarity(x1, x2, dim, eps)


PAIRS: dict[Op, tuple[Op, str]] = {
    torch.linalg.vecdot: (vecdot, "x y+ dim*=-1"),
    torch.cross: (cross, "input other+ dim*"), torch.linalg.cross: (linalg_cross, "input other+ dim*=-1"),
    torch.diagonal: (diagonal_of, "input offset dim1*=0 dim2*=1"),
    torch.linalg.diagonal: (
        lambda A, *, offset=0, dim1=-2, dim2=-1: diagonal_of(A, offset, dim1, dim2), "A offset dim1* dim2*"
    ),
    torch.diag_embed: (diag_embed, "input offset dim1* dim2*"),
    F.pairwise_distance: (pairwise_distance, ""), torch.cdist: (cdist, ""), torch.diag: (diag, ""),
    torch.diagflat: (diagflat, ""), torch.cov: (cov, ""), torch.corrcoef: (corrcoef, ""),
}  # fmt: skip
for _op, (_impl, _dims) in PAIRS.items():
    define(_op, "distance", ragged=_impl, dims=_dims)
define(F.cosine_similarity, "distance", ragged=cosine_similarity, dims="x1 x2+ dim*=1 eps")
along(F.cosine_similarity, "x1 x2 dim*=1 eps", "distance", run=cosine_of_leaves)
unsupported(
    F.pdist, ["nested", "masked"], "distances of n positions, n (n - 1) / 2 in each row, which no lengths hold",
    family="distance", hint="torch.cdist(x, x), both halves of the matrix of each row",
)  # fmt: skip
note_syncs(
    "the number of elements", torch.diagonal, torch.linalg.diagonal, torch.diag_embed, torch.diag, torch.diagflat,
    kinds=("nested",),
)  # fmt: skip
