"""Operations that see the features of each position alone: layers such as `linear`, `embedding` and `glu`.

    linear(x, w)       (B, -1, I)   -> (B, -1, O)
    embedding(x, w)    (B, -1)      -> (B, -1, D)
    bilinear(x, y, w)  (B, -1, I), (B, -1, J) -> (B, -1, O)
    glu(x, d)          (B, -1, 2 D) -> (B, -1, D)      a static dim of a ragged batch, a batch dim of a TensorDict

The dense function runs on packed values. Padding is filled before the operation and cut off behind it.

Invariant: NaN in padding reaches neither the result nor the gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import normal_dim
from tdc.core.errors import DtypeError, ShapeError, describe, message, op_name
from tdc.core.rules import define
from tdc.core.typing import Op, OpName
from tdc.ops.elementwise.pointwise import mixed, packed_operand
from tdc.ops.rectangle import as_batch, cut_padding
from tdc.ops.reduce.along_dim import along_static
from tdc.ops.tensordict.batch import along
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor, build_result
from tdc.ragged.storage import Ragged, Results, fitted, is_ragged, map_results
from tdc.ragged.two_level import TwoLevelTensor


def positionwise(op: Op, family: str, check: Op, *, fill: Op | None = None, aliases: tuple[Op, ...] = ()) -> None:
    """Rows for a function of one ragged batch and dense weights.

    `check(name, *args)` refuses wrong arguments; `fill(x)` is the data of a padded batch with harmless padding.
    """

    name = op_name(op)

    def nested(input: NestedTensor, *args: Any, **kwargs: Any) -> NestedTensor:
        check(name, input, *args, **kwargs)
        return build_result(input._structure, op(input._values, *args, **kwargs))

    def masked(input: MaskedBatch, *args: Any, **kwargs: Any) -> MaskedBatch:
        check(name, input, *args, **kwargs)
        return cut_padding(input, op(input.filled(0) if fill is None else fill(input), *args, **kwargs))

    define(op, family, nested=nested, masked=masked, aliases=aliases)


def at_positions(
    op: Op, run: Op, args: tuple[Any, ...], kwargs: dict[str, Any], fill: Callable[[MaskedBatch], Tensor] | None = None
) -> Any:
    """`run` at every position of one batch or several of one structure; each of its results as a batch."""
    like = next(a for a in args if is_ragged(a))
    for other in args:
        if is_ragged(other) and type(other) is not type(like):
            raise mixed(op, like, other)

    def ready(a: Any) -> Any:
        if is_ragged(a) and a is not like:
            a = fitted(op, like, a)
        if isinstance(a, MaskedBatch):
            return a.filled(0) if fill is None else fill(a)
        return a._values if isinstance(a, NestedTensor) else a

    return map_results(run(*[ready(a) for a in args], **kwargs), lambda t: as_batch(t, like))


def ends_static(x: NestedTensor | MaskedBatch | TwoLevelTensor, count: int) -> bool:
    """True if the last `count` dims are features, neither ragged nor the batch."""
    if isinstance(x, TwoLevelTensor):
        x = x.values
    if isinstance(x, NestedTensor):
        s, static = x._structure, x._values.ndim - count
        return s.packed_dim < static and s.batch_dim < static + s.ragged_ndim
    return max(x.ragged_dims[-1], x.batch_dim) < x.ndim - count


def last_is_static(x: NestedTensor | MaskedBatch, op: OpName, count: int) -> None:
    """A ShapeError unless the last `count` dims are features, neither ragged nor the batch."""
    if not ends_static(x, count):
        got, hint = f"shape {list(x.shape)} with ragged dims {x.ragged_dims}", "transpose the ragged dim to the front"
        raise ShapeError(message(op, f"{count} static dims at the end", got, hint=hint))


def check_linear(op: OpName, input: Any, weight: Any, bias: Any = None) -> None:
    if not is_ragged(input) or is_ragged(weight) or is_ragged(bias):  # asked here, as a layer is called so often
        dense_weights(op, input, weight, bias)
    last_is_static(input, op, 1)


def dense_weights(op: OpName, input: Any, *weights: Any) -> None:
    """A DtypeError for a ragged weight or a dense input: a batch is what a layer is applied to, not what it learns."""
    if not is_ragged(input) or any([is_ragged(w) for w in weights]):
        at = {"input": describe(input), **{f"weight {i}": describe(w) for i, w in enumerate(weights)}}
        hint = "torch.matmul(x, w.mT), or x.gather, for a weight of each example"
        raise DtypeError(message(op, "a ragged input and dense weights", "others", at, hint))


def embedding(
    input: Any, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Ragged:  # fmt: skip
    """Options that count indices, or change the rows of the table that they name, see real ones only."""
    dense_weights(F.embedding, input, weight)
    args = weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
    if isinstance(input, NestedTensor):
        return build_result(input._structure, F.embedding(input._values, *args))
    if max_norm is None and not scale_grad_by_freq and not sparse:
        return cut_padding(input, F.embedding(input.filled(0), *args))
    packed = input.to_packed()
    found = build_result(packed._structure, F.embedding(packed._values, *args))
    return found.to_padded(length=tuple([input.data.shape[d] for d in input.ragged_dims]))


def bilinear(
    input1: NestedTensor | MaskedBatch, input2: NestedTensor | MaskedBatch, weight: Tensor, bias: Tensor | None = None
) -> NestedTensor | MaskedBatch:
    like: Any = input1 if is_ragged(input1) else input2
    last_is_static(like, "bilinear", 1)
    if type(input1) is not type(input2):
        raise mixed(F.bilinear, input1, input2)
    if isinstance(like, NestedTensor):
        input2 = like.with_values(packed_operand(input2, like, F.bilinear))
    return at_positions(F.bilinear, F.bilinear, (input1, input2, weight, bias), {})


def glu(input: NestedTensor | MaskedBatch, dim: int = -1) -> NestedTensor | MaskedBatch:
    """One half of the features, times the sigmoid of the other. A ragged dim has no halves that all examples share."""
    d = normal_dim(dim, input.ndim, F.glu)
    if d == input._batch_dim or d in input.ragged_dims or input.shape[d] % 2:
        got = f"dim {dim} of {describe(input)}"
        hint = "name the dim of the features, 2 * D of them, e.g. behind nn.Linear(D, 2 * D)"
        raise ShapeError(message("glu", "a static dim of even size", got, hint=hint))
    return along_static(F.glu, input, d, F.glu)


def one_hot(input: NestedTensor | MaskedBatch, num_classes: int = -1) -> Results:
    """Class numbers as features of 0 and one 1. Without a number of classes the largest one is read from the data."""
    return at_positions(F.one_hot, F.one_hot, (input, num_classes), {})


positionwise(F.linear, "positionwise", check_linear)
define(F.embedding, "positionwise", ragged=embedding)
define(F.bilinear, "positionwise", ragged=bilinear)
along(F.glu, "input dim*=-1", "positionwise", ragged=glu)
define(F.one_hot, "positionwise", ragged=one_hot)
