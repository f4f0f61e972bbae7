"""Scores of all queries against all documents by their most similar tokens, as ColBERT ranks them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tdc.core.arguments import expect
from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import is_ragged


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
