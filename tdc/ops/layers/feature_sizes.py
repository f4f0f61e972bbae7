"""Sizes that layers and losses want of a ragged batch, asked where a call went wrong: see `core/calls.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.calls import checks
from tdc.core.dynamo import known, readable
from tdc.core.errors import DtypeError, IndexingError, ShapeError, describe, message, show_sizes
from tdc.core.typing import Op
from tdc.ops.layers.positionwise import ends_static
from tdc.ops.loss import class_dim
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.storage import BATCHES, data_of, is_ragged
from tdc.ragged.two_level import TwoLevelTensor

CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
OF_ATTENTION = "nn.MultiheadAttention(embed_dim, heads, kdim=..., vdim=...) with the features of query, key and value"


def misfit(op: Op, what: str, wanted: Any, x: Any, dim: int, hint: str) -> ShapeError:
    """The error for another size than wanted at a static dim."""
    return ShapeError(message(op, f"{wanted} {what}", f"{x.shape[dim]} in {describe(x)}", hint=hint))


def lacks(x: Any, wanted: Any) -> bool:
    """True if the features of a batch, its last dim, are not so many. Sizes come first: a graph asks nothing else."""
    return isinstance(x, BATCHES) and known(data_of(x).shape[-1] != wanted) and ends_static(x, 1)


@checks(F.linear)
def linear(op: Op, input: Any, weight: Any, bias: Any = None) -> None:
    if isinstance(weight, Tensor) and weight.ndim == 2 and lacks(input, weight.shape[1]):
        hint = f"nn.Linear({input.shape[-1]}, {weight.shape[0]}), or features of size {weight.shape[1]}"
        raise misfit(op, "features", weight.shape[1], input, -1, hint)


@checks(F.cosine_similarity, F.pairwise_distance, torch.cdist)
def pairs(op: Op, x1: Any, x2: Any, *args: Any, **kwargs: Any) -> None:
    for x, y in ((x1, x2), (x2, x1)):
        sized = isinstance(y, Tensor) and y.ndim > 0
        size = data_of(y).shape[-1] if isinstance(y, BATCHES) else y.shape[-1] if sized else 1
        if known(size != 1) and lacks(x, size) and known(data_of(x).shape[-1] != 1):
            raise misfit(op, "features", size, x, -1, "features of one size in both")


@checks(F.bilinear)
def bilinear(op: Op, input1: Any, input2: Any, weight: Any, bias: Any = None) -> None:
    for x, wanted in zip((input1, input2), weight.shape[1:], strict=False):
        if lacks(x, wanted):
            hint = f"nn.Bilinear({input1.shape[-1]}, {input2.shape[-1]}, {weight.shape[0]})"
            raise misfit(op, "features", wanted, x, -1, hint)


@checks(*CONVOLUTIONS, *TRANSPOSED)
def convolution(op: Op, input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> None:
    groups = kwargs.get("groups", args[3] if len(args) > 3 else 1)
    ready = is_ragged(input) and isinstance(weight, Tensor) and weight.ndim == input.ndim and isinstance(groups, int)
    if not ready or input._batch_dim != 0 or 1 in input.ragged_dims:
        return
    wanted = weight.shape[0] if op in TRANSPOSED else weight.shape[1] * groups
    if known(input.shape[1] != wanted):
        hint = f"in_channels={input.shape[1]} of the layer; channels are dim 1"
        raise misfit(op, "channels", wanted, input, 1, hint)


@checks(F.layer_norm, F.rms_norm, torch.rms_norm)
def normalized(
    op: Op, input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, *args: Any, **kwargs: Any
) -> None:
    if not isinstance(input, BATCHES):
        return
    own, wanted = list(data_of(input).shape[-len(normalized_shape) :]), list(normalized_shape)
    misfits = [n for n, m in zip(own, wanted, strict=False) if known(n != m)]
    if misfits and ends_static(input, len(wanted)):
        got, hint = f"{show_sizes(own)} in {describe(input)}", f"normalized_shape={show_sizes(own)} of the layer"
        raise ShapeError(message(op, f"{show_sizes(wanted)} at the end", got, hint=hint))
    for name, w in (("weight", weight), ("bias", bias)):
        if isinstance(w, Tensor) and list(w.shape) != wanted:
            expected, hint = f"a {name} of {show_sizes(wanted)}", f"{name}.view({show_sizes(wanted)})"
            raise ShapeError(message(op, expected, describe(w), hint=hint))


@checks(F.multi_head_attention_forward)
def attention(op: Op, query: Any, key: Any, value: Any, embed_dim_to_check: int, *args: Any, **kwargs: Any) -> None:
    weights = (None, kwargs.get("k_proj_weight"), kwargs.get("v_proj_weight"))
    for x, w in zip((query, key, value), weights, strict=True):
        wanted = embed_dim_to_check if w is None else w.shape[1]
        if x.ndim == 3 and lacks(x, wanted):
            raise misfit(op, "features", wanted, x, -1, OF_ATTENTION)


@checks(F.scaled_dot_product_attention)
def dot_products(op: Op, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> None:
    if is_ragged(query) and ends_static(query, 1) and lacks(key, query.shape[-1]):
        hint = "query and key of one size per head; values may have another"
        raise misfit(op, "features", query.shape[-1], key, -1, hint)


@checks(F.embedding, F.embedding_bag)
def embedding(op: Op, input: Any, weight: Any, *args: Any, **kwargs: Any) -> None:
    if not isinstance(input, BATCHES) or not isinstance(weight, Tensor) or weight.ndim != 2:
        return
    if input.dtype not in (torch.int64, torch.int32):
        raise DtypeError(message(op, "int64 or int32 indices", describe(input), hint="x.long()"))
    hint = "num_embeddings of the layer is one more than the largest index"
    refuse_outside(op, input, weight.shape[0], "indices", hint)


@checks(F.one_hot)
def one_hot(op: Op, input: Any, num_classes: int = -1) -> None:
    if isinstance(input, BATCHES) and num_classes > 0:
        refuse_outside(op, input, num_classes, "classes", "num_classes is one more than the largest class")


@checks(F.cross_entropy, F.nll_loss)
def classes(op: Op, input: Any, target: Any, weight: Any = None, *args: Any, **kwargs: Any) -> None:
    if all([isinstance(x, TwoLevelTensor) for x in (input, target)]):
        return classes(op, input.values, target.values, weight, *args, **kwargs)
    if not is_ragged(input) or not is_ragged(target) or target.dtype.is_floating_point:
        return
    dim = class_dim(input)
    if dim is None:
        return
    count = input.shape[dim]
    if isinstance(weight, Tensor) and known(weight.shape[0] != count):
        hint = "one weight for each class; classes are dim 1, or the dim behind a ragged dim 1"
        raise ShapeError(message(op, f"{count} weights", describe(weight), hint=hint))
    ignored = kwargs.get("ignore_index", args[1] if len(args) > 1 else -100)
    hint = "a logit for each class; ignore_index= marks what to leave out"
    refuse_outside(op, target, count, "targets", hint, ignored)


def refuse_outside(op: Op, x: Any, count: int, what: str, hint: str, ignored: int | None = None) -> None:
    """Raise an IndexingError for a number that is none of so many. Reads the data, so never in a graph."""
    if not readable():
        return
    numbers = x.data[x.mask.expand(x.data.shape)] if isinstance(x, MaskedBatch) else data_of(x)
    wrong = (numbers < 0) | (numbers >= count)
    wrong = wrong if ignored is None else wrong & (numbers != ignored)
    if wrong.any():
        got = f"{int(wrong.sum())} outside in {describe(x)}"
        raise IndexingError(message(op, f"{what} in [0, {count - 1}]", got, hint=hint))
