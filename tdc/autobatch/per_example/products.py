"""Rows of products: `matmul` and its kin, `linear`, `einsum`, and attention.

    example    q (T, D) @ k.transpose(0, 1) (D, S)     (T, S)
    batch      q (B, -1, D) @ k (B, D, -1)             (B, -1, -1)

A vector becomes a matrix with one row or column and back. Leading dims broadcast. In attention a dense operand beside
ragged ones is a batch of rows of one length.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.autobatch.per_example.operands import together
from tdc.autobatch.per_example.table import is_own, of_rank, only_shared, put, rank, refuse, with_batch
from tdc.autobatch.values import Lane, lane_of
from tdc.core.errors import ShapeError, describe, message
from tdc.core.rules import name_of
from tdc.core.typing import Op
from tdc.ops.products.matmul import by_operator
from tdc.ops.shape.join import as_rows
from tdc.ragged.nested import NestedTensor


def matmul(input: Any, other: Any) -> Any:
    """`input @ other`."""
    first, second = rank(input) == 1, rank(other) == 1
    if not (rank(input) and rank(other)):
        raise ShapeError(message("matmul", "matrices or vectors", "a number", hint="x * y for a number"))
    a, b = [as_matrix(x, n, at) for x, n, at in ((input, first, 0), (other, second, 1))]
    dims = max(rank(a), rank(b))
    a, b = [x if isinstance(x, Tensor) else of_rank(x, dims) for x in (a, b)]
    out = torch.matmul(a, b)
    if second:
        out = out.squeeze(-1)
    return out.squeeze(out.ndim - 1 - (not second)) if first else out


def meets(a: Any, b: Any) -> bool:
    """True if the dims that `a @ b` sums over are both ragged, or of one size."""
    sizes: list[Any] = []
    for x, d in ((a, rank(a) - 1), (b, max(rank(b) - 2, 0))):
        sizes.append(x.data.shape[d + 1] if type(x) is Lane else x.shape[d + isinstance(x, NestedTensor)])
    return bool(sizes[0] == sizes[1])


def as_matrix(x: Any, vector: bool, at: int) -> Any:
    """A vector as a matrix of one row (`at` 0) or one column; another operand as it is."""
    if not vector:
        return x
    if type(x) is Lane:
        return lane_of(x.data.unsqueeze(1 + at))
    return x.unsqueeze(at + isinstance(x, NestedTensor))


def of_ranks(op: Any, *ranks: int) -> Op:
    """`matmul` for operands of fixed ranks."""

    def run(a: Any, b: Any) -> Any:
        if (rank(a), rank(b)) != ranks:
            expected, got = f"operands of {ranks[0]} and {ranks[1]} dims", f"{rank(a)} and {rank(b)}"
            raise ShapeError(message(op, expected, got, hint="torch.matmul takes others"))
        return matmul(a, b)

    return run


def outer(input: Any, vec2: Any) -> Any:
    """The product of a column and a row."""
    if (rank(input), rank(vec2)) != (1, 1):
        got = f"{rank(input)} and {rank(vec2)} dims"
        raise ShapeError(message("outer", "two vectors", got, hint="x.unsqueeze(1) * y"))
    return torch.mul(*together(torch.outer, [as_matrix(input, True, 1), as_matrix(vec2, True, 0)]))


def vdot(input: Any, other: Any) -> Any:
    return of_ranks("vdot", 1, 1)(lane_of(input.data.conj()) if type(input) is Lane else input.conj(), other)


def example(x: Any) -> Any:
    """A result of a row as an operand of another."""
    return lane_of(x) if isinstance(x, Tensor) else x


def plus(op: Any, product: Op) -> Op:
    """A row for `beta * input + alpha * product(a, b)`."""

    def run(input: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
        found = product(a, b)
        dtype = found.dtype
        exact = not dtype.is_floating_point and not dtype.is_complex
        if exact and not (beta == alpha == 1 or (isinstance(beta, int) and isinstance(alpha, int))):
            refuse(f"torch.{name_of(op)} of integers with other factors", "beta and alpha as ints")
        if dtype == torch.bool and not beta == alpha == 1:
            refuse(f"torch.{name_of(op)} of bools with factors", "beta=1 and alpha=1")
        found = found if alpha == 1 else found * alpha
        if beta == 0:
            return found
        x, y = together(op, [input, example(found)])
        return torch.add(x if beta == 1 else x * beta, y)

    return run


run_linear: Any = F.linear  # the stubs know tensors only


def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    x: Any = input
    if isinstance(x, NestedTensor) and all([w is None or isinstance(w, Tensor) for w in (weight, bias)]):
        return run_linear(x, weight, bias)
    turned: Any = weight
    if rank(weight) > 1:
        turned = lane_of(weight.data.transpose(-2, -1)) if type(weight) is Lane else weight.transpose(-2, -1)
    found = matmul(input, turned)
    if bias is None:
        return found
    x, y = together(F.linear, [example(found), bias])
    return torch.add(x, y)


def multi_dot(tensors: Sequence[Any]) -> Any:
    return reduce(lambda a, b: matmul(example(a), b), tensors)


def einsum(equation: Any, *operands: Any) -> Any:
    """`einsum` with a letter for the batch in front of each operand that has one, and of the result."""
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if not isinstance(equation, str):
        refuse("torch.einsum with lists of dims", 'torch.einsum("td,de->te", x, w)')
    terms, arrow, out = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = terms.replace(",", "").replace(".", "")
        out = "..." * ("..." in terms) + "".join(sorted([c for c in set(letters) if letters.count(c) == 1]))
    batch = next(c for c in string.ascii_letters if c not in equation)
    named = [t if isinstance(x, Tensor) else batch + t for t, x in zip(terms.split(","), given, strict=True)]
    whole = [x.data if type(x) is Lane else x for x in given]
    return torch.einsum(f"{','.join(named)}->{batch}{out}", *whole)


# -- attention


def rows_of(x: Any, like: NestedTensor, at: int, op: Any) -> Any:
    """An operand of attention as rows, (B, ..., -1, E); a dense one has equally many in each example."""
    if isinstance(x, NestedTensor):
        return x
    dense = with_batch(x, like.structure.batch_size)
    if dense.ndim != like.ndim:
        got = f"{describe(dense)} beside {describe(like)}"
        raise ShapeError(message(op, "operands with as many dims as each other", got, hint="x.unsqueeze(0)"))
    if like.ragged_dims != (at,):
        refuse(f"torch.{name_of(op)} of rows that are not ragged at dim {at - 1}", "x.transpose(0, 1)")
    return as_rows(dense, like)


def attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Attention of examples (T, E) or (H, T, E)."""
    op = F.scaled_dot_product_attention
    parts = [query, key, value]
    n = rank(next(x for x in parts if isinstance(x, NestedTensor)))
    if any([rank(x) != n for x in parts]) or n not in (2, 3):
        got = " and ".join([f"{rank(x)}" for x in parts])
        raise ShapeError(message(op, "operands of (T, E) or (H, T, E)", f"{got} dims", hint="x.transpose(0, 1)"))
    whole = [as_matrix(x, True, 0) for x in parts] if n == 2 else parts  # with a dim for one head
    like = next(x for x in whole if isinstance(x, NestedTensor))
    q, k, v = [rows_of(x, like, 2, op) for x in whole]
    mask = attention_mask(attn_mask, op)
    out = op(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if not isinstance(query, NestedTensor):
        out = dense_rows(out, whole[0])
    return out.squeeze(1) if n == 2 else out


def dense_rows(out: Any, like: Any) -> Tensor:
    """Rows of one length, (B, H, -1, E), as a tensor (B, H, T, E)."""
    length = (like.data if type(like) is Lane else like).shape[-2]
    return out.values.unflatten(out.structure.packed_dim, (-1, length)).movedim(out.structure.packed_dim, 0)


def attention_mask(mask: Any, op: Any) -> Any:
    """A mask (T, S) or (H, T, S) of each example, ragged in both dims; UnsupportedError for a dense one."""
    if mask is None:
        return None
    if not isinstance(mask, NestedTensor):
        refuse(f"a dense mask in torch.{name_of(op)}", "is_causal=True, or a mask made of ragged positions")
    return mask.unsqueeze(1) if mask.ndim == 3 else mask


def multi_head(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Multi-head attention of examples (T, E)."""
    op = F.multi_head_attention_forward
    if any([rank(x) != 2 for x in (query, key, value)]):
        refuse(f"torch.{name_of(op)} of a batch", "call it for one example: (T, E)")
    like = next(x for x in (query, key, value) if isinstance(x, NestedTensor))
    if any([is_own(a) for a in (*args, *kwargs.values()) if a is not kwargs.get("attn_mask")]):
        return multi_head_of_own(query, key, value, *args, **kwargs)
    names = ("key_padding_mask", "static_k", "static_v")
    only_shared(op, *args, *[a for name, a in kwargs.items() if name != "attn_mask"])
    if any([kwargs.get(name) is not None for name in names]):
        refuse(f"key_padding_mask in torch.{name_of(op)}", "leave it out: lengths are known")
    mask = kwargs.get("attn_mask")
    if mask is not None and not kwargs.get("is_causal"):
        kwargs["attn_mask"] = attention_mask(mask, op)
    q, k, v = [rows_of(x, like, 1, op) for x in (query, key, value)]
    found: Any = op(q, k, k if key is value else v, *args, **kwargs)
    out, weights = found
    if not isinstance(query, NestedTensor):
        length = (query.data if type(query) is Lane else query).shape[-2]
        out = out.values.unflatten(0, (-1, length))
        weights = None if weights is None else refuse("weights of dense queries", "need_weights=False")
    return out, weights


def multi_head_of_own(
    query: Any, key: Any, value: Any, embed_dim_to_check: int, num_heads: int, in_proj_weight: Any, in_proj_bias: Any,
    bias_k: Any, bias_v: Any, add_zero_attn: bool, dropout_p: float, out_proj_weight: Any, out_proj_bias: Any,
    training: bool = True, key_padding_mask: Any = None, need_weights: bool = True, attn_mask: Any = None,
    is_causal: bool = False, use_separate_proj_weight: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Multi-head attention with weights of each example."""
    if add_zero_attn or use_separate_proj_weight or any([x is not None for x in (bias_k, bias_v, key_padding_mask)]):
        refuse("torch.multi_head_attention_forward of unusual form, whose weights differ", "share the weights")
    if need_weights:
        refuse("torch.multi_head_attention_forward with weights as results", "need_weights=False")
    parts: list[Any] = []
    for i, x in enumerate((query, key, value)):
        w, b = [thirds(p, i, embed_dim_to_check) for p in (in_proj_weight, in_proj_bias)]
        y: Any = linear(x, w, b)
        parts.append(y.unflatten(-1, (num_heads, -1)).transpose(1, 2))  # (B, H, T, E)
    mask = None if is_causal else attn_mask
    q, k, v = [example(y) for y in parts]
    out: Any = attention(q, k, v, mask, dropout_p if training else 0.0, is_causal)
    return linear(out.transpose(1, 2).flatten(-2), out_proj_weight, out_proj_bias), None


def thirds(p: Any, i: int, size: int) -> Any:
    """The part of joined weights for queries, keys or values."""
    if type(p) is Lane:
        return lane_of(p.data.narrow(1, i * size, size))
    return None if p is None else p.narrow(0, i * size, size)


OWN: dict[Any, Op] = {
    torch.matmul: matmul, torch.Tensor.__matmul__: partial(by_operator, matmul, meets),
    torch.mm: of_ranks("mm", 2, 2), torch.mv: of_ranks("mv", 2, 1), torch.dot: of_ranks("dot", 1, 1),
    torch.bmm: of_ranks("bmm", 3, 3), torch.outer: outer, F.linear: linear,
    torch.addmm: plus(torch.addmm, of_ranks("addmm", 2, 2)), torch.addmv: plus(torch.addmv, of_ranks("addmv", 2, 1)),
    torch.addr: plus(torch.addr, outer), torch.baddbmm: plus(torch.baddbmm, of_ranks("baddbmm", 3, 3)),
    torch.addbmm: plus(torch.addbmm, lambda a, b: of_ranks("addbmm", 3, 3)(a, b).sum(1)),
    torch.linalg.multi_dot: multi_dot, torch.chain_matmul: lambda *matrices: multi_dot(matrices),
    torch.vdot: vdot, torch.einsum: einsum, F.scaled_dot_product_attention: attention,
    F.multi_head_attention_forward: multi_head,
}  # fmt: skip

for _op, _row in OWN.items():
    put(_op, _row)
