"""Pointwise operations: the same function of every element, so a ragged batch only passes its packed values through.

    unary(torch.relu)        one tensor argument
    nary(torch.add)          several; operands broadcast as one example at a time would

Operands of a NestedTensor `(B, *S0, -1, *S1)` may be: another of the same structure; a number; a dense tensor that
broadcasts against the logical shape, with 1 or the longest length on the ragged dim. Operands of a TensorDict: another
with the same keys and batch size; a number; a dense tensor that broadcasts against the batch size and is extended over
features.

Invariants: the structure object is passed on; NaN in padding reaches neither valid results nor gradients of dense
operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc._errors import ShapeError, StructureError, UnsupportedError, describe, message, show_sizes
from tdc._rules import Rule, add_rule
from tdc._structure import longest, pack_rows, require, require_same, spread
from tdc._tree import same_keys, same_size
from tdc._typing import Op
from tdc.masked import MaskedBatch, require_same_lengths
from tdc.nested import NestedTensor
from tdc.tensordict import TensorDict, make


def unary(op: Op, family: str = "pointwise") -> None:
    """Rows for a function of one tensor, for all three containers."""
    for kind, impl in (("nested", unary_nested), ("masked", unary_masked), ("tensordict", unary_tensordict)):
        add_rule(Rule(op, kind, family, partial(impl, op), op))


def nary(op: Op) -> None:
    """Rows for a function of several tensors that broadcast, for all three containers."""
    for kind, impl in (("nested", nary_nested), ("masked", nary_masked), ("tensordict", nary_tensordict)):
        add_rule(Rule(op, kind, "pointwise", partial(impl, op), op))


def unary_nested(op: Op, x: NestedTensor, *args: Any, **kwargs: Any) -> NestedTensor:
    """`inplace=True`, which stock activations pass on, is not followed: nothing is changed in place."""
    kwargs.pop("inplace", None)
    return x.with_values(op(x._values, *args, **kwargs))


def unary_masked(op: Op, x: MaskedBatch, *args: Any, **kwargs: Any) -> MaskedBatch:
    kwargs.pop("inplace", None)
    return x.with_data(op(x.data, *args, **kwargs))


def unary_tensordict(op: Op, x: TensorDict, *args: Any, **kwargs: Any) -> TensorDict:
    kwargs.pop("inplace", None)
    return make({p: op(v, *args, **kwargs) for p, v in x._leaves.items()}, x._nodes, x.batch_size, x.device)


def nary_nested(op: Op, *args: Any, **kwargs: Any) -> NestedTensor:
    like = first_of(NestedTensor, op, args, kwargs)
    return like.with_values(
        op(*[packed(a, like, op) for a in args], **{k: packed(a, like, op) for k, a in kwargs.items()})
    )


def packed(x: Any, like: NestedTensor, op: Op) -> Any:
    """An operand as it broadcasts against the packed values of `like`."""
    if isinstance(x, NestedTensor):
        if x._structure is not like._structure:
            require_same(like._structure, x._structure, op)
        return x._values
    if isinstance(x, Tensor) and x.ndim > 0:
        return pack_dense(x, like, op)
    if isinstance(x, MaskedBatch):
        raise mixed(op, like, x)
    return x


def pack_dense(x: Tensor, like: NestedTensor, op: Op) -> Tensor:
    """A dense operand in packed form: gathered along the packed axis where it varies with the row or the ragged dim.

    Raises:
        ShapeError: it does not broadcast against the logical shape.
    """
    s, values = like.structure, like.values
    if x.ndim > like.ndim or not fits(x.shape, like.shape):
        raise unbroadcast(x, like, op)
    if x.ndim < values.ndim - s.packed_dim and s.batch_dim <= min(s.ragged_dims):
        return x
    x = x.view(*[1] * (like.ndim - x.ndim), *x.shape)
    x = x.movedim(s.batch_dim, 0)
    rows, e, count = x.shape[0], s.packed_dim, s.ragged_ndim
    sizes = tuple(x.shape[e + 1 : e + 1 + count])
    total = values.shape[e]
    if rows != 1 and rows != s.batch_size:
        raise unbroadcast(x, like, op)
    if all([n == 1 for n in sizes]):
        x = x.flatten(e + 1, e + count).select(e + 1, 0)
        return (x if rows == 1 else spread(x, s, total)).movedim(0, e)
    need = longest(s) if s.extent is not None else None
    if need is not None and any([n not in (1, m) for n, m in zip(sizes, need, strict=True)]):
        raise unbroadcast(x, like, op)
    full = need or tuple([int(n) for n in sizes])
    text = message(op, "a dense operand as long as the longest row", "a shorter one", hint="x.to_padded() first")
    enough = [column <= n for column, n in zip(like.sizes.unbind(1), full, strict=True)]
    require(torch.stack(enough).all(), text, ShapeError)
    x = x.movedim(tuple(range(e + 1, e + 1 + count)), tuple(range(1, count + 1)))
    x = x.expand(s.batch_size, *full, *x.shape[1 + count :])
    return pack_rows(x, s, total).movedim(0, e)


def fits(shape: Sequence[int], logical: Sequence[int]) -> bool:
    """Whether sizes broadcast against a logical shape, counted from the last dim; a ragged dim (-1) takes any."""
    pairs = zip(reversed(shape), reversed(logical), strict=False)
    return all([n == 1 or m in (-1, 1) or n == m for n, m in pairs])


def unbroadcast(x: Tensor, like: NestedTensor, op: Op) -> ShapeError:
    """The error for a dense operand that does not broadcast."""
    expected = f"an operand that broadcasts against {describe(like)}"
    return ShapeError(message(op, expected, describe(x), hint="sizes must be 1 or equal, counted from the last dim"))


def mixed(op: Op, a: Any, b: Any) -> UnsupportedError:
    """The error for operands of different containers."""
    got = f"{type(a).__name__} and {type(b).__name__}"
    return UnsupportedError(message(op, "operands of one kind", got, hint="convert with to_packed() or to_padded()"))


def nary_masked(op: Op, *args: Any, **kwargs: Any) -> MaskedBatch:
    """Dense operands may take part in autograd, so padding is neutral before the operation and cut off behind it."""
    like = first_of(MaskedBatch, op, args, kwargs)
    everything = (*args, *kwargs.values())
    if not any([isinstance(a, Tensor) for a in everything]):
        return like.with_data(op(*[raw(a, like, op) for a in args], **{k: raw(a, like, op) for k, a in kwargs.items()}))
    out = op(*[neutral(a, like, op) for a in args], **{k: neutral(a, like, op) for k, a in kwargs.items()})
    if out.shape != like.data.shape:
        dense = next(a for a in everything if isinstance(a, Tensor))
        expected = f"an operand that broadcasts against {describe(like)}"
        raise ShapeError(message(op, expected, describe(dense), hint="the padded shape cannot grow"))
    return like.with_data(out.masked_fill(~like.mask, 0))


def raw(x: Any, like: MaskedBatch, op: Op) -> Any:
    """The data of an operand, which must have the lengths of `like`."""
    if isinstance(x, NestedTensor):
        raise mixed(op, like, x)
    if isinstance(x, MaskedBatch):
        require_same_lengths(like, x, op)
        return x.data
    return x


def neutral(x: Any, like: MaskedBatch, op: Op) -> Any:
    """As `raw`, with 1 in padding: inside the domain of every pointwise function."""
    return (
        raw(x, like, op) if not isinstance(x, MaskedBatch) else torch.where(like.mask, raw(x, like, op), 1).to(x.dtype)
    )


def nary_tensordict(op: Op, *args: Any, **kwargs: Any) -> TensorDict:
    like = first_of(TensorDict, op, args, kwargs)
    tds = [a for a in (*args, *kwargs.values()) if isinstance(a, TensorDict)]
    same_keys(op, *tds)
    same_size(op, *tds)
    size = like.batch_size
    for a in (*args, *kwargs.values()):
        if isinstance(a, Tensor) and a.ndim > 0:
            check_broadcast(a, size, op)
    leaves = {
        p: op(
            *[leaf_operand(a, p, v, len(size)) for a in args],
            **{k: leaf_operand(a, p, v, len(size)) for k, a in kwargs.items()},
        )
        for p, v in like._leaves.items()
    }
    return make(leaves, like._nodes, size, like.device)


def leaf_operand(x: Any, path: Any, leaf: Any, batch_ndim: int) -> Any:
    """What an operand of a TensorDict is for one leaf: its own leaf, or a tensor extended over the leaf's features."""
    if isinstance(x, TensorDict):
        return x._leaves[path]
    if isinstance(x, Tensor) and x.ndim > 0:
        return x.view(*x.shape, *[1] * (leaf.ndim - batch_ndim))
    return x


def check_broadcast(x: Tensor, size: Sequence[int], op: Op) -> None:
    """A dense operand of a TensorDict broadcasts against its batch size, and does not make it larger.

    Raises:
        ShapeError: it does not.
    """
    tail = list(size[len(size) - x.ndim :]) if x.ndim <= len(size) else None
    if tail is None or any([n != 1 and n != m for n, m in zip(x.shape, tail, strict=True)]):
        expected = f"a tensor that broadcasts against batch_size {show_sizes(size)}"
        hint = "for features use td.apply(lambda leaf: ...)"
        raise ShapeError(message(op, expected, describe(x), hint=hint))


def first_of(cls: Any, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first operand of a class: it gives the result its structure."""
    if kwargs.get("out") is not None:
        raise UnsupportedError(message(op, "no out=", "out=", hint="use the returned object"))
    for a in (*args, *kwargs.values()):
        if isinstance(a, cls):
            return a
    raise StructureError(
        message(op, f"a {cls.__name__} among the operands", "one inside a list", hint="pass it directly")
    )


for _op in (
    torch.abs, torch.neg, torch.sign, torch.exp, torch.expm1, torch.log, torch.log1p, torch.sqrt, torch.rsqrt,
    torch.square, torch.reciprocal, torch.sin, torch.cos, torch.tan, torch.tanh, torch.sigmoid, torch.erf, torch.floor,
    torch.ceil, torch.round, torch.isnan, torch.isfinite, torch.logical_not, torch.bitwise_not, torch.nan_to_num,
    torch.clone, torch.detach,
):  # fmt: skip
    unary(_op)
for _op in (
    torch.Tensor.float, torch.Tensor.double, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.int,
    torch.Tensor.long, torch.Tensor.bool, torch.Tensor.contiguous,
):  # fmt: skip
    unary(_op)
unary(torch.relu)
unary(F.relu)
unary(F.gelu)
unary(F.silu)
unary(F.leaky_relu)
unary(F.elu)
unary(F.softplus)
unary(F.hardtanh)
unary(F.logsigmoid)

for _op in (
    torch.add, torch.sub, torch.mul, torch.div, torch.floor_divide, torch.remainder, torch.pow, torch.maximum,
    torch.minimum, torch.atan2, torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge, torch.logical_and,
    torch.logical_or, torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor, torch.where, torch.clamp, torch.lerp,
    torch.masked_fill,
):  # fmt: skip
    nary(_op)
