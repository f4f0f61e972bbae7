"""Matrix products by name: `x @ w`, `torch.bmm`, `torch.addmm`, `torch.outer` and their kin, as sums over named dims.

    (B, -1, D) @ (D, E)          (B, -1, E)       the same weights for all examples
    (B, -1, D) @ (B, D, E)       (B, -1, E)       weights of each example
    (B, D, -1) @ (B, -1, E)      (B, D, E)        dense, sums over the ragged dim
    (B, -1, D) @ (B, D, -1)      (B, -1, -1)      two ragged dims
    (B, -1, -1) @ (B, -1, D)     (B, -1, D)       attention weights and values

`matmul` and `bmm` broadcast over the logical shape. Operations for matrices and vectors only (`mm`, `mv`, `dot`,
`outer`, ...) run on every example; a dense operand of the rank that torch wants is the same for all examples, one with
one dim more has the batch in front. `einsum` computes them all.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import normal_dim
from tdc.core.container import Container
from tdc.core.dynamo import traced_for
from tdc.core.errors import DtypeError, ShapeError, UnsupportedError, describe, message
from tdc.core.rules import DISPATCH, IMPLS, TENSOR_OPERATORS, define, unsupported
from tdc.core.torch_functions import CALLED_BY
from tdc.core.typing import Op
from tdc.layout.segments import repeated
from tdc.ops.products.einsum import Term, contract, joined
from tdc.ops.rectangle import with_sizes
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import Ragged, is_ragged

BATCH = "b"


# -- broadcast over the logical shape


def matmul(input: Any, other: Any) -> Ragged | Tensor:
    if isinstance(input, NestedTensor) and isinstance(other, Tensor) and 1 <= other.ndim <= 2:
        s, values = input._structure, input._values
        last = values.ndim - 1
        if s.packed_dim < last and s.batch_dim < last + s.ragged_ndim and other.shape[0] == values.shape[last]:
            return build_nested(s, torch.matmul(values, other))
    check_inner(input, other)
    left, right, out = letters_of(input, other)
    return contract(torch.matmul, [Term(left, input), Term(right, other)], out, exact="j")


def by_operator(product: Op, fit: Callable[[Any, Any], bool], a: Any, b: Any) -> Any:
    """`tensor @ x` and `tensor.matmul(x)`.

    Args:
        product: `matmul` of these operands.
        fit: True if the dims that the product of two operands sums over fit.
    """
    return product(a, b)


@traced_for(by_operator)
def by_operator_traced(product: Op, fit: Callable[[Any, Any], bool], a: Any, b: Any) -> Any:
    """`by_operator` in a graph. Dynamo also calls it for `x @ tensor`, operands swapped (torch 2.11-2.13): the order
    that fits is taken."""
    if isinstance(a, Container) or not fit(b, a):
        return product(a, b)
    if fit(a, b):
        got, hint = f"{describe(a)} and {describe(b)}", "torch.matmul(x, y) in place of x @ y"
        raise UnsupportedError(message("matmul", "operands that fit in one order, where @ is traced", got, hint=hint))
    return product(b, a)


def inner_dims(a: Any, b: Any) -> list[tuple[int, Any]]:
    """The dims that `matmul` sums over, the last of one and the first of the other's matrices, with their sizes."""
    last = a.ndim - 1 - (is_ragged(a) and a._batch_dim == a.ndim - 1)
    first = max(b.ndim - 2, 0)
    first = first + (is_ragged(b) and b._batch_dim == first)
    if last < 0 or first >= b.ndim:
        return []
    return [(d, "ragged" if is_ragged(x) and d in x.ragged_dims else x.shape[d]) for x, d in ((a, last), (b, first))]


def meets(a: Any, b: Any) -> bool:
    """True if the dims that are summed over are static and of one size."""
    sizes = [size for _, size in inner_dims(a, b)]
    return len(sizes) == 2 and sizes[0] == sizes[1] != "ragged"


def letters_of(a: Any, b: Any) -> tuple[str, str, str]:
    """Letters of two operands of `matmul` and of its result: matrices "ij" and "jk" behind dims that broadcast."""
    ranks = [min(x.ndim - 1 if is_ragged(x) else x.ndim, 2) for x in (a, b)]
    if min(ranks) < 1:
        got = f"{describe(a)} and {describe(b)}"
        raise ShapeError(message("matmul", "matrices or vectors", got, hint="x * y for a number of each example"))
    counts = [x.ndim - n for x, n in zip((a, b), ranks, strict=True)]
    lead = string.ascii_uppercase[: max(counts)]
    left, right = [lead[len(lead) - n :] for n in counts]
    left, right = left + "ij"[2 - ranks[0] :], right + "jk"[: ranks[1]]
    if is_ragged(a) and is_ragged(b):  # a vector of each example has the batch of the matrices
        left = right[b._batch_dim] + "j" if ranks[0] == 1 else left
        right = left[a._batch_dim] + "j" if ranks[1] == 1 else right
    both = left + right
    out = [c for c in lead if c in both] + ["i"] * (ranks[0] > 1) + ["k"] * (ranks[1] > 1)
    return left, right, "".join(out)


def check_inner(a: Any, b: Any) -> None:
    """A ShapeError unless summed dims are both ragged, or static and of one size; a DtypeError for a number."""
    if not isinstance(a, (Tensor, Container)) or not isinstance(b, (Tensor, Container)):
        got, hint = f"{describe(a)} and {describe(b)}", "x * y for a number"
        raise DtypeError(message("matmul", "batches or tensors", got, hint=hint))
    dims = inner_dims(a, b)
    if dims and dims[0][1] != dims[1][1]:
        got = " and ".join([f"dim {d} {n if n == 'ragged' else f'of size {n}'}" for d, n in dims])
        at, hint = {"operand 0": describe(a), "operand 1": describe(b)}, "x.mT or y.mT swaps the last two dims"
        raise ShapeError(message("matmul", "a last dim that meets the first of the other's matrices", got, at, hint))


# -- matrices and vectors of every example


def on_examples(op: Op, dims: str, a: Any, b: Any) -> Ragged | Tensor:
    """A product of operands of a fixed rank, for every example; `dims` has its letters, such as "ij,jk->ik"."""
    left, right, out = dims.replace("->", ",").split(",")
    terms = [example(op, a, left), example(op, b, right)]
    return contract(op, terms, BATCH * (BATCH in joined(terms)) + out, exact=left + right + BATCH)


def example(op: Op, x: Any, dims: str) -> Term:
    """An operand with letters: the batch among them for a batch, in front for a dense operand with one more dim."""
    if is_ragged(x) and x.ndim == len(dims) + 1:
        return Term(dims[: x._batch_dim] + BATCH + dims[x._batch_dim :], x)
    if not is_ragged(x) and x.ndim in (len(dims), len(dims) + 1):
        return Term(dims if x.ndim == len(dims) else BATCH + dims, x)
    kind = ("vectors", "matrices", "stacks of matrices")[len(dims) - 1]
    hint = "x @ y broadcasts over further dims"
    raise ShapeError(message(op, f"{kind}, one for each example", describe(x), hint=hint))


def inner(input: Any, other: Any) -> Ragged | Tensor:
    """Over the last dims of both; the other dims of the second stand behind those of the first. Numbers are factors."""
    if not input.ndim or not other.ndim:
        return torch.mul(input, other)
    pool = iter(string.ascii_lowercase.replace(BATCH, ""))
    last, terms = next(pool), []
    for x in (input, other):
        dims = [next(pool) for _ in range(x.ndim - 1 - is_ragged(x))] + [last]
        if is_ragged(x):
            dims.insert(x._batch_dim, BATCH)
        terms.append(Term("".join(dims), x))
    out = BATCH + "".join([c for t in terms for c in t.dims if c not in (last, BATCH)])
    return contract(torch.inner, terms, out, exact=last + BATCH)


def bmm(input: Any, mat2: Any) -> Ragged | Tensor:
    return of_matrices(torch.bmm, "bik", input, mat2, "x @ y broadcasts")


def of_matrices(op: Op, out: str, a: Any, b: Any, hint: str) -> Ragged | Tensor:
    """Products of operands with the batch in front, summed over it where `out` lacks it; of four dims the same of each
    example, which is a stack of matrices."""
    if any([is_ragged(x) and x.ndim == 4 for x in (a, b)]):
        return on_examples(op, f"cij,cjk->{out.replace(BATCH, 'c')}", a, b)
    if a.ndim != 3 or b.ndim != 3:
        raise ShapeError(message(op, "two operands of three dims", f"{describe(a)} and {describe(b)}", hint=hint))
    return contract(op, [Term("bij", a), Term("bjk", b)], out, exact="bjk")


def added(
    op: Op, product: Op, input: Any, first: Any, second: Any, *, beta: float = 1, alpha: float = 1
) -> Ragged | Tensor:
    """`beta * input + alpha * product`; an input with beta 0 is not read.

    Of whole numbers fractions as factors are cut off, as torch does it; `addr` refuses them.
    """
    dtype = torch.promote_types(torch.promote_types(first.dtype, second.dtype), input.dtype)
    if not dtype.is_floating_point and not dtype.is_complex:
        if op is torch.addr and isinstance(beta + alpha, float):
            raise DtypeError(message(op, "whole numbers beta and alpha", f"{beta} and {alpha}", hint="x.float()"))
        beta, alpha = [bool(c) if dtype == torch.bool else int(c) for c in (beta, alpha)]
    out = product(first, second)
    out = out if alpha == 1 else out * alpha
    out = out if beta == 0 else torch.add(out, input if beta == 1 else input * beta)
    return out if out.dtype == dtype else out.to(dtype)


def tensordot(a: Any, b: Any, dims: Any = 2, out: Any = None) -> Ragged | Tensor:
    """Over pairs of logical dims; the batch dims of two batches are one such pair."""
    if out is not None:
        raise UnsupportedError(message("tensordot", "no out=", "out=", hint="use the returned object"))
    pairs = (list(range(-dims, 0)), list(range(dims))) if isinstance(dims, int) else dims
    if isinstance(pairs, Tensor):
        hint = "tensordot(a, b, dims=([2], [0]))"
        raise UnsupportedError(message("tensordot", "dims as lists", describe(pairs), hint=hint))
    if not isinstance(pairs, (tuple, list)) or len(pairs) != 2:
        hint = "tensordot(a, b, dims=([2], [0])), or their number"
        raise ShapeError(message("tensordot", "dims of one and of the other", describe(pairs), hint=hint))
    first, second = [[d] if isinstance(d, int) else list(d) for d in pairs]
    if len(first) != len(second):
        got = f"{len(first)} and {len(second)}"
        raise ShapeError(message("tensordot", "as many dims of one as of the other", got, hint="they go in pairs"))
    left = list(string.ascii_lowercase[: a.ndim])
    right = list(string.ascii_uppercase[: b.ndim])
    for d, e in zip(first, second, strict=True):
        right[normal_dim(e, b.ndim, "tensordot")] = left[normal_dim(d, a.ndim, "tensordot")]
    rest = [c for c in left if c not in right] + [c for c in right if c not in left]
    shared = "".join([c for c in left if c in right])
    return contract(torch.tensordot, [Term("".join(left), a), Term("".join(right), b)], "".join(rest), exact=shared)


def grouped_mm(mat_a: Any, mat_b: Any, *, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Ragged | Tensor:
    """`bmm`: the groups are the examples, whose offsets the batch carries; an UnsupportedError for others."""
    if offs is not None or not is_ragged(mat_a):
        hint = "F.grouped_mm(x, weights) for a batch x (B, -1, D) and weights (B, D, E)"
        raise UnsupportedError(message("grouped_mm", "groups that are the rows of a batch", "offs=", hint=hint))
    out = bmm(mat_a, mat_b)
    out = out if bias is None else out + bias[:, None]
    return out if out_dtype is None else out.to(out_dtype)


def chain(op: Op, *matrices: Any) -> Ragged | Tensor:
    """Matrices multiplied from left to right; a ShapeError for fewer than two."""
    given = matrices[0] if len(matrices) == 1 and isinstance(matrices[0], (list, tuple)) else matrices
    if len(given) < 2:
        raise ShapeError(message(op, "at least two matrices", f"{len(given)}", hint="x itself is the product of one"))
    return reduce(matmul, given)


def kron(input: Any, other: Any) -> Ragged:
    """Every element of a batch times a dense matrix: examples grow by its size along the ragged dim."""
    if not is_ragged(input) or is_ragged(other) or len(input.ragged_dims) > 1:
        given = {"input": describe(input), "other": describe(other)}
        expected = "a batch with one ragged dim and a dense tensor behind it"
        raise UnsupportedError(message("kron", expected, "others", given, "torch.einsum, or loop over x.unbind()"))
    if other.ndim >= input.ndim:
        got = f"{describe(other)} for {describe(input)}"
        raise ShapeError(message("kron", "as many dims as an example at most", got, hint="the batch is no dim of it"))
    (d,) = input.ragged_dims
    at = d - (d > input._batch_dim)  # the ragged dim of an example
    dense = other.reshape([1] * (input.ndim - 1 - other.ndim) + list(other.shape))
    times = dense.shape[at]
    if isinstance(input, NestedTensor):
        s = input._structure
        out = products(input._values, dense)
        return build_nested(s if times == 1 else repeated(s, times), out)
    out = products(input.filled(0), dense.unsqueeze(input._batch_dim))
    return with_sizes(out, input, input.lengths * times, input.ragged_dims)


def products(a: Tensor, b: Tensor) -> Tensor:
    """`torch.kron` of operands with equally many dims; torch's own makes a graph for each size (2.13)."""
    left = a.reshape([n for size in a.shape for n in (size, 1)])
    right = b.reshape([n for size in b.shape for n in (1, size)])
    return (left * right).reshape([n * m for n, m in zip(a.shape, b.shape, strict=True)])


EXAMPLES = {torch.mm: "ij,jk->ik", torch.mv: "ij,j->i", torch.dot: "i,i->", torch.outer: "i,j->ij"}
PRODUCTS: dict[Op, Op] = {op: partial(on_examples, op, dims) for op, dims in EXAMPLES.items()}
ADDED: dict[Op, Op] = {
    torch.addmm: PRODUCTS[torch.mm], torch.addmv: PRODUCTS[torch.mv], torch.addr: PRODUCTS[torch.outer],
    torch.baddbmm: bmm,
    torch.addbmm: lambda a, b: of_matrices(torch.addbmm, "ik", a, b, "input + (x @ y).sum(0)"),
}  # fmt: skip
NAMED: dict[Op, Op] = {
    torch.matmul: matmul, torch.bmm: bmm, torch.inner: inner, torch.tensordot: tensordot,
    torch.kron: kron, torch.vdot: lambda input, other: on_examples(torch.vdot, "i,i->", torch.conj(input), other),
    **{op: partial(added, op, product) for op, product in ADDED.items()},
    **{op: partial(chain, op) for op in (torch.chain_matmul, torch.linalg.multi_dot)},
}  # fmt: skip

for _op, _impl in (PRODUCTS | NAMED).items():
    define(_op, "matmul", ragged=_impl, ref=torch.matmul if _op is torch.bmm else None)
define(
    F.grouped_mm, "matmul", ragged=grouped_mm, ref=torch.matmul, aliases=[CALLED_BY[F.grouped_mm]],
    modes=("eager", "vmap", "grad", "export"),  # Dynamo does not hand it on
)  # fmt: skip
for _op in [op for op in CALLED_BY if op is not F.grouped_mm]:
    unsupported(
        _op, ["nested", "masked"], "values whose scales are in blocks of a layout of the device", family="matmul",
        hint="call it on x.values and wrap the result with x.with_values", aliases=[CALLED_BY[_op]],
    )  # fmt: skip
for _kind in ("nested", "masked"):
    IMPLS[f"{_kind}_matmul_operator"] = partial(by_operator, matmul, meets)
    for _called in (TENSOR_OPERATORS[torch.matmul], torch.Tensor.matmul):
        DISPATCH[_kind][_called] = f"{_kind}_matmul_operator"
