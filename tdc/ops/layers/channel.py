"""Operations with channels as dim 1: batch, group, instance and local response norm, prelu, dropout of whole channels.

Statistics are those of real positions: of each example for group_norm and instance_norm, of the whole batch for
batch_norm.

    (B, C, -1, *S)    as `Positions` (*P, C, R): packed P = (N,), padded P = (B, positions)

Invariant: padding holds zeros before and after every step, so that it adds nothing and gets no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import expect_at_least
from tdc.core.dtypes import HALF, rounded_once
from tdc.core.dynamo import eager, known
from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.core.rules import Rule, add_rule, define
from tdc.core.typing import Op, OpName
from tdc.layout.segments import lengths_of, reduce_rows, spread
from tdc.ops.layers.positionwise import dense_weights
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import Ragged


@dataclass(frozen=True, slots=True)
class Positions:
    """A batch as positions of channels.

    Attributes:
        data: `(*P, C, R)`, zeros in padding.
        count: real positions of each example, (B,).
        add: sums over the positions of each example, `(*P, *D) -> (B, *D)`.
        put: one entry of each example to its positions, `(B, *D) -> (*P or 1s, *D)`.
        clean: zeros in padding again.
        done: the container of data.
    """

    data: Tensor
    count: Tensor
    add: Callable[[Tensor], Tensor]
    put: Callable[[Tensor], Tensor]
    clean: Callable[[Tensor], Tensor]
    done: Callable[[Tensor], Any]


def positions(x: Any, op: OpName, *weights: Any) -> Positions:
    """A batch that `has_channels`."""
    has_channels(x, op, *weights)
    return packed_positions(x) if isinstance(x, NestedTensor) else padded_positions(x)


def has_channels(x: Any, op: OpName, *weights: Any) -> None:
    """An error unless the batch is dim 0, dim 1 is static, and dense weights have one number for each channel."""
    dense_weights(op, x, *weights)
    if x._batch_dim != 0 or 1 in x.ragged_dims:
        got, hint = f"shape {list(x.shape)}, ragged dims {x.ragged_dims}", "x.transpose(1, -1) puts features first"
        raise ShapeError(message(op, "the batch as dim 0 and channels as dim 1", got, hint=hint))
    channels = x.shape[1]
    wrong = [w for w in weights if w is not None and (w.ndim != 1 or w.shape[0] != channels)]
    if wrong:
        hint = f"num_features or num_channels={channels} of the layer; channels are dim 1"
        raise ShapeError(message(op, f"one number for each of {channels} channels", describe(wrong[0]), hint=hint))


def packed_positions(x: NestedTensor) -> Positions:
    s, data = x.structure, packed_data(x)
    total = data.shape[0]
    return Positions(
        data,
        lengths_of(s),
        lambda t: reduce_rows(t, s, "sum", 0),
        lambda t: spread(t, s, total),
        lambda t: t,
        lambda t: packed_back(x, t),
    )


def packed_data(x: NestedTensor) -> Tensor:
    """Packed values as `Positions.data`, (N, C, R)."""
    moved = x.values.movedim(x.structure.packed_dim, 0)
    return moved.flatten(2) if moved.ndim > 2 else moved.unsqueeze(2)


def packed_back(x: NestedTensor, data: Tensor) -> NestedTensor:
    """A batch like x of `(N, C, R)`."""
    e, shape = x.structure.packed_dim, x.values.shape
    return x.with_values(data.reshape(shape[e], *shape[:e], *shape[e + 1 :]).movedim(0, e))


def padded_positions(x: MaskedBatch) -> Positions:
    dims = tuple(range(1, len(x.ragged_dims) + 1))
    moved = x.filled(0).movedim(x.ragged_dims, dims)
    flat = moved.flatten(1, len(dims))
    mask = x.mask.movedim(x.ragged_dims, dims).flatten(1, len(dims)).flatten(2).unsqueeze(-1)
    return Positions(
        flat.flatten(3) if flat.ndim > 3 else flat.unsqueeze(3),
        x.lengths.prod(1),
        lambda t: t.sum(1),
        lambda t: t.unsqueeze(1),
        lambda t: t.masked_fill(~mask, 0),
        lambda t: x.with_data(t.reshape(moved.shape).movedim(dims, x.ragged_dims)),
    )


def affine(p: Positions, out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Ragged:
    """The result, with one factor and one term for each channel."""
    out = out if weight is None else out * weight.unsqueeze(-1)
    return p.done(p.clean(out if bias is None else out + bias.unsqueeze(-1)))


def one_dtype(op: OpName, x: Any, *weights: Tensor | None) -> None:
    """A DtypeError unless the input is real floating point and weights have its dtype, or float32 beside half."""
    if not x.dtype.is_floating_point:
        hint = "x.float(), or torch.view_as_real(x) of complex numbers"
        raise DtypeError(message(op, "a real floating point dtype", describe(x), hint=hint))
    own = (x.dtype, torch.float32) if x.dtype in HALF and op != "prelu" else (x.dtype,)
    wrong = [w for w in weights if w is not None and w.dtype not in own]
    if wrong and not torch.is_autocast_enabled(x.device.type):
        raise DtypeError(message(op, f"weights of {x.dtype}", describe(wrong[0]), hint="weight.to(x.dtype)"))


def group_norm(
    input: Any, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Ragged:  # fmt: skip
    """Groups of channels, each normalised over an example's positions."""
    one_dtype("group_norm", input, weight, bias)

    def normalised(x: Any) -> Ragged:
        p = positions(x, "group_norm", weight, bias)
        channels = p.data.shape[-2]
        expect_at_least("group_norm", 1, "num_groups", num_groups)
        if channels % num_groups:
            got = f"{channels} channels for {num_groups} groups"
            raise ShapeError(message("group_norm", "channels that groups divide", got, hint="choose num_groups"))
        return grouped(p, num_groups, weight, bias, eps)[0]

    return rounded_once(normalised, input)


def grouped(
    p: Positions, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Ragged, Tensor, Tensor]:
    """Normalise groups of channels of each example; also return their means and variances, (B, groups)."""
    *ahead, channels, rest = p.data.shape
    size = channels // groups * rest
    each = p.data.reshape(*ahead, groups, size)
    count = (p.count * size).clamp(min=1).unsqueeze(1).to(p.data.dtype)
    mean = p.add(last_sum(each)) / count
    centered = p.clean((each - p.put(mean).unsqueeze(-1)).reshape(p.data.shape))
    var = p.add(last_sum(centered.reshape(each.shape).square())) / count
    scale = torch.rsqrt(var + eps).repeat_interleave(channels // groups, 1).unsqueeze(-1)
    return affine(p, centered * p.put(scale), weight, bias), mean, var


def last_sum(x: Tensor) -> Tensor:
    """Sums along the last dim; the same memory where that is of one element."""
    return x.squeeze(-1) if known(x.shape[-1] == 1) else x.sum(-1)


def instance_norm(
    input: Any, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Ragged:  # fmt: skip
    """Each channel normalised over an example's positions; running statistics take the mean over examples."""
    one_dtype("instance_norm", input, weight, bias)

    def normalised(x: Any) -> Ragged:
        p = positions(x, "instance_norm", weight, bias, running_mean, running_var)
        if not use_input_stats:
            return affine(p, fixed(p, running_mean, running_var, eps), weight, bias)
        out, mean, var = grouped(p, p.data.shape[-2], weight, bias, eps)
        n = (p.count * p.data.shape[-1]).view(-1, 1).to(var.dtype)
        follow(running_mean, running_var, mean, var, n, momentum)
        return out

    return rounded_once(normalised, input)


def batch_norm(
    input: Any, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Ragged:  # fmt: skip
    """Each channel normalised over the real positions of the whole batch."""
    one_dtype("batch_norm", input, weight, bias, *((running_mean, running_var) if training else ()))
    if isinstance(input, NestedTensor):  # every position is real, so this is torch's own on (N, C, R)
        has_channels(input, "batch_norm", weight, bias, running_mean, running_var)
        data = packed_data(input)
        one = eager() or known(data.shape[2] == 1)  # of more a graph expects another order of memory than comes (2.13)
        if one and (known(data.shape[0] == 0) or known(data.shape[0] != 0)):  # torch asks, and a graph may not know
            found = F.batch_norm(data, running_mean, running_var, weight, bias, training, momentum, eps)
            return packed_back(input, found)

    def total(t: Tensor) -> Tensor:
        """Sums of each channel."""
        return t.flatten(0, -3).sum((0, 2))

    def counted(x: Any) -> Ragged:
        p = positions(x, "batch_norm", weight, bias, running_mean, running_var)
        if not training:
            return affine(p, fixed(p, running_mean, running_var, eps), weight, bias)
        n = (p.count.sum() * p.data.shape[-1]).to(p.data.dtype)
        mean = total(p.data) / n.clamp(min=1)
        centered = p.clean(p.data - mean.unsqueeze(-1))
        var = total(centered.square()) / n.clamp(min=1)
        follow(running_mean, running_var, mean[None], var[None], n, momentum)
        return affine(p, centered * torch.rsqrt(var + eps).unsqueeze(-1), weight, bias)

    return rounded_once(counted, input)


def fixed(p: Positions, mean: Tensor | None, var: Tensor | None, eps: float) -> Tensor:
    """Data normalised by given statistics of each channel; a ShapeError where there are none."""
    if mean is None or var is None:
        hint = "training=True for statistics of the batch"
        raise ShapeError(message("batch_norm", "running_mean and running_var", "None", hint=hint))
    mean, var = mean.to(p.data.dtype), var.to(p.data.dtype)
    return (p.data - mean.unsqueeze(-1)) * torch.rsqrt(var + eps).unsqueeze(-1)


def follow(
    running_mean: Tensor | None, running_var: Tensor | None, mean: Tensor, var: Tensor, n: Tensor, momentum: float
) -> None:
    """Move running statistics, in place and outside autograd, towards means and biased variances (K, C) of `n` each."""
    unbiased = var * n / (n - 1).clamp(min=1)
    for running, new, seen in ((running_mean, mean, n > 0), (running_var, unbiased, n > 1)):
        if running is not None:
            count = seen.expand(new.shape[0], 1).sum()
            found = torch.where(seen, new.detach(), 0).sum(0) / count.clamp(min=1)
            moved = running * (1 - momentum) + found.to(running.dtype) * momentum
            running.copy_(torch.where(count > 0, moved, running))


def local_response_norm(input: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Ragged:
    """Each position normalised over neighbouring channels."""
    p = positions(input, "local_response_norm")
    flat = p.data.flatten(0, -3)
    return p.done(p.clean(F.local_response_norm(flat, size, alpha, beta, k).reshape(p.data.shape)))


def prelu(input: Any, weight: Tensor) -> Ragged | Tensor:
    """One slope for all elements, or one for each channel."""
    dense_weights("prelu", input, weight)
    one_dtype("prelu", input, weight)
    if weight.numel() == 1:
        return torch.where(input > 0, input, input * weight.reshape(()))
    p = positions(input, "prelu")
    if weight.shape != p.data.shape[-2:-1]:
        channels = p.data.shape[-2]
        expected, hint = f"a slope for each of {channels} channels, dim 1", f"nn.PReLU({channels}), or one for all"
        raise ShapeError(message("prelu", expected, describe(weight), hint=hint))
    return p.done(p.clean(torch.where(p.data > 0, p.data, p.data * weight.unsqueeze(-1))))


def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Ragged:
    """Whole channels of an example become 0, the others grow so that the mean stays."""
    if not drops("dropout", p, training):
        return input
    at = positions(input, "dropout1d")
    kept = kept_channels(at, p)
    return at.done(at.clean(at.data * (kept / (1 - p) if p < 1 else kept)))


def drops(op: OpName, p: float, training: Any) -> bool:
    """True if channels are dropped; a DtypeError unless `training` is a bool."""
    if not isinstance(training, bool):
        raise DtypeError(message(op, "training to be True or False", describe(training), hint="training=True"))
    return training and p != 0


def kept_channels(at: Positions, p: float) -> Tensor:
    """1 for channels that are kept, 0 for those dropped with probability `p`, at each position."""
    if not 0 <= p <= 1:
        raise ShapeError(message("dropout", "a probability p in [0, 1]", f"{p}", hint="p=0.5"))
    if not at.data.is_floating_point():
        raise DtypeError(message("dropout", "a floating point dtype", describe(at.data), hint="x.float()"))
    return at.put(torch.bernoulli(at.data.new_full((at.count.shape[0], at.data.shape[-2], 1), 1 - p)))


def feature_alpha_dropout(input: Any, p: float = 0.5, training: bool = False, inplace: bool = False) -> Ragged:
    """Whole channels of an example become SELU's limit; mean and variance of standard normal numbers stay."""
    if not drops("feature_alpha_dropout", p, training):
        return input
    at = positions(input, "feature_alpha_dropout")
    limit = -1.7580993408473766  # -scale * alpha of SELU
    scale = (1 - p + (1 - p) * p * limit**2) ** -0.5 if p < 1 else 0.0
    kept = kept_channels(at, p)
    return at.done(at.clean((at.data * kept + limit * (1 - kept)) * scale - scale * limit * p))


def weights_first(norm: Op) -> Op:
    """A function of torch, which takes weights in front of running statistics."""

    def run(
        input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float,
        eps: float, cudnn_enabled: bool,
    ) -> Ragged:  # fmt: skip
        return norm(input, running_mean, running_var, weight, bias, training, momentum, eps)

    return run


for _op, _impl, _aliases in (
    (F.batch_norm, batch_norm, ()), (F.instance_norm, instance_norm, ()),
    (F.group_norm, group_norm, (torch.group_norm,)), (F.prelu, prelu, (torch.prelu,)),
    (F.dropout1d, dropout, (torch.feature_dropout,)), (F.dropout2d, dropout, ()), (F.dropout3d, dropout, ()),
    (F.feature_alpha_dropout, feature_alpha_dropout, (torch.feature_alpha_dropout,)),
    (F.local_response_norm, local_response_norm, ()),
):  # fmt: skip
    define(_op, "channel", ragged=_impl, aliases=_aliases)
for _kind in ("nested", "masked"):  # no rows of their own: the same rules in torch's other order
    for _op, _norm in ((torch.batch_norm, batch_norm), (torch.instance_norm, instance_norm)):
        add_rule(Rule(_op, _kind, "channel", weights_first(_norm), _op), rows=[])
