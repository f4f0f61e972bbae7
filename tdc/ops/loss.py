"""Losses of ragged batches and of TensorDicts.

    cross_entropy ...       one number for each class target
    mse_loss ...            one number for each element; operands broadcast as in arithmetic
    triplet_margin_loss ... one number for each vector along the last dim, which is static
    ctc_loss                one number for each example

"mean" divides by the number of real targets, elements, vectors or examples; kl_div's "batchmean" by the number of
examples. The class dim is dim 1, as in `(B, C, -1)`; where that is ragged, `(B, -1, C)`, the first static dim behind.
Padding gets no gradient.

A loss of two TensorDicts is a TensorDict: of the same batch size with reduction="none", else of batch_size [] with one
number for each leaf.
"""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import expect_number
from tdc.core.dtypes import HALF, refuse_integers, rounded_once, widened
from tdc.core.dynamo import eager, is_zero, known
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message
from tdc.core.operators import unserved
from tdc.core.rules import define, note_syncs
from tdc.core.typing import Op, OpName
from tdc.kernels.ctc import ctc_losses
from tdc.ops.elementwise.pairs import widest_of
from tdc.ops.elementwise.pointwise import fits, packed_operand, padded_operand, unbroadcast
from tdc.ops.layers.positionwise import last_is_static
from tdc.ops.rectangle import as_batch, rectangle
from tdc.ops.tensordict.batch import lift
from tdc.ops.tensordict.leafwise import check_broadcast
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import Ragged, axis_of, data_of, fitted, is_ragged, ragged_sizes, with_data, with_static
from tdc.tensordict.nodes import without_extra
from tdc.tensordict.storage import same_size
from tdc.tensordict.tensordict import TensorDict, build_td

Named = dict[str, Any]
ONE_SIZE = (F.binary_cross_entropy, F.binary_cross_entropy_with_logits)  # of input and target, says torch


def named(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Named) -> tuple[Named, Any]:
    """The given arguments of a loss by name, and its reduction, unchecked."""
    called = (*zip(names, args, strict=False), *kwargs.items())
    given = {name: a for name, a in called if a is not None or name == "reduction"}
    size_average, reduce = given.pop("size_average", None), given.pop("reduce", None)
    reduction = given.pop("reduction", "mean")
    if size_average is None and reduce is None:
        return given, reduction
    return given, "none" if reduce is False else "sum" if size_average is False else "mean"


def class_dim(x: Any) -> int | None:
    """The dim of classes of logits: dim 1, or the one behind ragged dims from there on; None where it is not static."""
    dim = x.ragged_dims[-1] + 1 if 1 in x.ragged_dims else 1
    return None if dim >= x.ndim or dim == x._batch_dim else dim


def cross_entropy(op: Op, names: tuple[str, ...], *args: Any, **kwargs: Any) -> Ragged | Tensor:
    """Logits (B, -1, C) or (B, C, -1), targets (B, -1) of classes or probabilities like the logits.

    Padding becomes `ignore_index`.
    """
    given, reduction = named(names, args, kwargs)
    input, target = given.pop("input"), given.pop("target")
    if not is_ragged(input) or type(input) is not type(target):
        kind = "MaskedBatch" if MaskedBatch in (type(input), type(target)) else "NestedTensor"
        wrong, right = ("target", "logits") if is_ragged(input) else ("logits", "target")
        got = f"{describe(input)} and {describe(target)}"
        hint = f"{wrong} = {right}.{'with_values' if kind == 'NestedTensor' else 'with_data'}({wrong})"
        hint += f", or tdc.nested_like({wrong}, {right}) of a padded one" if kind == "NestedTensor" else ""
        raise StructureError(message(op, f"logits and targets that are both {kind}", got, hint=hint))
    dim = class_dim(input)
    if dim is None:
        got, hint = f"ragged dims {input.ragged_dims} of {describe(input)}", "examples choose among the same classes"
        raise ShapeError(message(op, "a static dim of classes", got, hint=hint))
    axis = axis_of(op, input, dim)
    logits = (input.values if isinstance(input, NestedTensor) else input.filled(0)).movedim(axis, -1)
    classes = with_static(input, logits.detach().sum(-1), dim, -1)
    logits = logits.movedim(-1, 1)
    probable = target.dtype.is_floating_point
    target = fitted(op, input if probable else classes, target)
    if target.shape != (input if probable else classes).shape:
        got, hint = f"{describe(input)} and {describe(target)}", "the logits without their dim of classes"
        raise ShapeError(message(op, "one target for each position", got, hint=hint))
    fill = 0 if probable else given.get("ignore_index", -100)
    labels = target.values if isinstance(target, NestedTensor) else target.filled(fill)
    labels = labels.movedim(axis, -1).movedim(-1, 1) if probable else labels
    if probable or reduction == "none":
        loss = op(logits, labels, reduction="none", **given)
        return reduced(op, with_data(classes, loss) if reduction == "none" else as_batch(loss, classes), reduction)
    if not known(labels.numel() != 0):  # of vectors torch does not ask whether there are any
        logits, labels = logits.movedim(1, -1).flatten(0, -2), labels.flatten()
    return op(logits, labels, reduction=reduction, **given)


def loss_tensordict(op: Op, names: tuple[str, ...], *args: Any, **kwargs: Any) -> TensorDict:
    """Target is a TensorDict, or a tensor over batch dims that is extended over features."""
    given, reduction = named(names, args, kwargs)
    input, target = given.pop("input"), given.pop("target")
    if not isinstance(input, TensorDict):
        got = f"{describe(input)} and {describe(target)}"
        raise StructureError(message(op, "a TensorDict as input", got, hint="td.apply(lambda x: ...) for other calls"))
    size = torch.Size(()) if reduction != "none" else input.batch_size
    run = partial(op, reduction=reduction, **given)
    if isinstance(target, TensorDict):
        same_size(op, input, target)
        out = lift(input, run, target, size=size, op=op)
    else:
        check_broadcast(target, input.batch_size, op)

        def one(x: Any) -> Tensor:
            return run(x, target.view(*target.shape, *[1] * (x.ndim - input.ndim)).expand(x.shape))

        out = lift(input, one, size=size, op=op)
    if reduction == "none":
        return out
    return build_td(out._leaves, without_extra(out._nodes), size, out.device)  # nodes of numbers have no batch dims


def elementwise(op: Op, run: Op, names: tuple[str, ...], *args: Any, **kwargs: Any) -> Ragged | Tensor:
    """The loss of each element; operands broadcast."""
    given, reduction = named(names, args, kwargs)
    like = widest_of(op, *given.values())
    ready = {k: operand(op, a, like, 1) for k, a in given.items()}
    grow = [k for k in ("input", "target", "input1", "input2", "var") if isinstance(ready.get(k), Tensor)]
    shape = common_shape(op, [ready[k] for k in grow], like)
    if op in ONE_SIZE and common_shape(op, [ready["input"]], like) != common_shape(op, [ready["target"]], like):
        got = f"{describe(given['input'])} and {describe(given['target'])}"
        raise ShapeError(message(op, "input and target of equal static sizes", got, hint="target.expand_as(input)"))
    ready |= {k: ready[k].expand(shape) for k in grow if ready[k].ndim}
    return reduced(op, as_batch(run(**ready, reduction="none"), like), reduction)


def common_shape(op: Op, operands: list[Tensor], like: Any) -> list[int]:
    """The shape that operands broadcast to: the data of a batch, where static dims of one position may be wider."""
    data = data_of(like)
    shape = [*data.shape]
    packed = isinstance(like, NestedTensor)
    fixed = (like._structure.packed_dim,) if packed else (like.batch_dim, *like.ragged_dims)
    for d in range(data.ndim):
        sizes = [a.shape[d - data.ndim] for a in operands if a.ndim >= data.ndim - d]
        wide = [n for n in sizes if n != 1] if d not in fixed else shape[d : d + 1]
        if any([n != wide[0] for n in wide]):
            got, hint = f"sizes {wide[0]} and {wide[-1]} on a static dim", "sizes must be 1 or equal"
            raise ShapeError(message(op, "operands that broadcast", got, hint=hint))
        shape[d] = wide[0] if wide else 1
    return shape


def operand(op: Op, a: Any, like: Any, fill: float) -> Any:
    """An operand as it broadcasts against the data of a batch; `fill` in padding, also of a dense one."""
    if isinstance(like, NestedTensor):
        return packed_operand(a, like, op)
    if isinstance(a, Tensor):
        fixed = [d - like.ndim for d in (like.batch_dim, *like.ragged_dims) if d >= like.ndim - a.ndim]
        wider = any([a.shape[d] not in (1, like.data.shape[d]) for d in fixed])
        if wider or a.ndim > like.ndim or not fits(a.shape, like.data.shape):
            raise unbroadcast(op, like, a)
    data = padded_operand(a, like, op)
    if not isinstance(data, Tensor):
        return data
    number = data.ndim == 0 and data.dtype.is_floating_point  # which widens no dtype
    own = torch.result_type(like.data, data) if number else data.dtype
    return torch.where(like.mask, data, fill).to(own)


def reduced(op: Op, loss: Any, reduction: str) -> Ragged | Tensor:
    """All losses, or their sum or mean over what is real; torch has no other reductions."""
    if reduction == "none":
        return loss
    data = data_of(loss)
    if reduction == "sum":
        return data.sum()
    if reduction == "batchmean" and op is F.kl_div:
        return rounded_once(lambda t: t.sum() / loss.shape[loss._batch_dim], data)
    if reduction != "mean":
        raise no_reduction(op, reduction)
    refuse_integers(op, loss)
    count: Any = data.numel()  # of real elements
    if isinstance(loss, MaskedBatch):
        static = [n for d, n in enumerate(data.shape) if d not in (loss.batch_dim, *loss.ragged_dims)]
        count = loss.lengths.prod(1).sum() * math.prod(static)
    return rounded_once(lambda t: t.sum() / count, data)


def no_reduction(op: OpName, reduction: Any) -> ShapeError:
    """The error for a reduction that torch does not have."""
    return ShapeError(message(op, "reduction 'mean', 'sum' or 'none'", repr(reduction), hint="torch has no others"))


def by_vector(op: Op, run: Op, names: tuple[str, ...], *args: Any, **kwargs: Any) -> Ragged | Tensor:
    """The loss of each vector along the last dim; of two losses the target is one number for each vector."""
    given, reduction = named(names, args, kwargs)
    single = ("target",) if op in (F.multi_margin_loss, F.cosine_embedding_loss) else ()
    others = (*single, "weight")
    vectors = {k: a for k, a in given.items() if k not in others and (is_ragged(a) or isinstance(a, Tensor))}
    if not any([is_ragged(a) for a in vectors.values()]):
        at = {k: describe(a) for k, a in given.items()}
        raise StructureError(message(op, "ragged vectors", "dense ones", at, "x.to_padded().data of the others"))
    like = widest_of(op, *vectors.values())
    last_is_static(like, op, 1)
    ready = {k: operand(op, a, like, 0) for k, a in vectors.items()}
    shape = common_shape(op, [*ready.values()], like)
    numbers = with_static(like, data_of(like).detach().expand(shape).sum(-1), like.ndim - 1, -1)
    for k, a in ready.items():  # the dims of a vector are for torch to compare
        given[k] = a.expand(*shape[:-1], a.shape[-1]).reshape(-1, a.shape[-1])
    for k in single:
        given[k] = operand(op, given[k], numbers, 0).expand(shape[:-1]).reshape(-1)
    return reduced(op, as_batch(run(**given, reduction="none").view(shape[:-1]), numbers), reduction)


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "none"
) -> Tensor:
    """torch's own reads the variance on the host, to refuse a negative one."""
    clamped = torch.as_tensor(var, dtype=input.dtype, device=input.device).clamp(min=eps)
    clamped = var + (clamped - var).detach() if isinstance(var, Tensor) else clamped
    loss = 0.5 * (clamped.log() + (input - target).square() / clamped)
    return loss + 0.5 * math.log(2 * math.pi) if full else loss


def cosine_embedding_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: str = "none"
) -> Tensor:
    """torch's own takes a target of two numbers for a list of vectors of two."""
    product, *squares = [(a * b).sum(-1) for a, b in ((input1, input2), (input1, input1), (input2, input2))]
    cosine = product / ((squares[0] + 1e-12) * (squares[1] + 1e-12)).sqrt()
    apart = (cosine - margin).clamp(min=0)
    return torch.where(target == 1, 1 - cosine, torch.where(target == -1, apart, torch.zeros_like(cosine)))


def multilabel_margin_loss(input: Tensor, target: Tensor, reduction: str = "none") -> Tensor:
    """Of vectors (N, C). torch's decomposition for graphs takes what follows the first -1 for class 0 (2.11-2.13)."""
    if eager():
        return F.multilabel_margin_loss(input, target, reduction=reduction)
    named = (target < 0).cumsum(-1) == 0
    classes = torch.where(named, target, 0)
    is_named = torch.zeros_like(target).scatter_add(-1, classes, named.to(target.dtype)) > 0
    margins = F.relu(1 - input.gather(-1, classes)[..., None] + input[..., None, :])
    return torch.where(named[..., None] & ~is_named[..., None, :], margins, 0).sum((-2, -1)) / input.shape[-1]


def ctc_loss(
    log_probs: Any, targets: Any, input_lengths: Any = None, target_lengths: Any = None, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """Log probabilities (B, -1, C) and targets (B, -1), which know their lengths: pass None for both."""
    if not (is_ragged(log_probs) and is_ragged(targets)):
        got = f"{describe(log_probs)} and {describe(targets)}"
        expected = "log_probs and targets that are both ragged"
        raise StructureError(message("ctc_loss", expected, got, hint="tdc.pack both"))
    for x, expected, ndim in ((log_probs, "(B, -1, C)", 3), (targets, "(B, -1)", 2)):
        if x.ndim != ndim or x.ragged_dims != (1,) or x._batch_dim:
            raise StructureError(message("ctc_loss", expected, describe(x), hint="batch first, then what is ragged"))
    if input_lengths is not None or target_lengths is not None:
        hint = "F.ctc_loss(log_probs, targets, None, None): ragged batches know them"
        raise StructureError(message("ctc_loss", "None for both lengths", "lengths", hint=hint))
    check_ctc(log_probs, targets, blank, reduction)
    frames = rectangle(log_probs, 0).transpose(0, 1)
    if is_zero(frames.numel()):  # torch refuses it, too
        hint = "leave out the loss of a batch without examples or frames"
        raise ShapeError(message("ctc_loss", "a frame or more", describe(log_probs), hint=hint))
    labels, lengths = rectangle(targets, 0), ragged_sizes(targets)[:, 0]
    given = widened(frames), labels, ragged_sizes(log_probs)[:, 0], lengths, blank
    if unserved():
        return F.ctc_loss(*given, reduction, zero_infinity)
    losses: Tensor = ctc_losses(*given, zero_infinity)[0]
    losses = torch.where(losses == math.inf, 0, losses) if zero_infinity else losses
    losses = losses / lengths.clamp(min=1) if reduction == "mean" else losses
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


def check_ctc(log_probs: Any, targets: Any, blank: Any, reduction: Any) -> None:
    """Refuse what torch refuses, which would speak of lengths that the caller does not give."""
    if reduction not in ("mean", "sum", "none"):
        raise no_reduction("ctc_loss", reduction)
    dtype, device = log_probs.dtype, log_probs.device.type
    cast = dtype in HALF and device == "cpu" and torch.is_autocast_enabled(device)  # to float32; not on CUDA (2.13)
    if dtype not in (torch.float32, torch.float64) and not cast:
        raise DtypeError(message("ctc_loss", "float32 or float64", describe(log_probs), hint="log_probs.float()"))
    counts = [x.shape[x._batch_dim] for x in (targets, log_probs)]
    if counts[0] != counts[1]:
        expected, got = "as many examples of targets as of log_probs", f"{counts[0]} and {counts[1]}"
        raise StructureError(message("ctc_loss", expected, got, hint="pair the batches example by example"))
    expect_number("ctc_loss", blank, whole=True)
    classes = log_probs.shape[2]
    if not 0 <= blank < classes:
        expected = f"blank in [0, {classes - 1}], one of the classes"
        raise ShapeError(message("ctc_loss", expected, f"{int(blank)}", hint="blank=0"))


def losses(rule: Op, *ops: Op, **run: Op) -> None:
    """Rows for a family; `run` computes what is named in it."""
    for op in ops:
        names = tuple(inspect.signature(op).parameters)
        first = (op, names) if rule is cross_entropy else (op, run.get(op.__name__, op), names)
        define(op, "loss", ragged=partial(rule, *first))


losses(cross_entropy, F.cross_entropy, F.nll_loss)
losses(
    elementwise, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.kl_div, F.poisson_nll_loss, F.gaussian_nll_loss, F.soft_margin_loss,
    F.hinge_embedding_loss, F.margin_ranking_loss, gaussian_nll_loss=gaussian_nll_loss,
)  # fmt: skip
losses(
    by_vector, F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.cosine_embedding_loss,
    F.triplet_margin_loss, F.triplet_margin_with_distance_loss, cosine_embedding_loss=cosine_embedding_loss,
    multilabel_margin_loss=multilabel_margin_loss,
)  # fmt: skip
define(F.ctc_loss, "loss", ragged=ctc_loss, modes=("eager", "compile", "vmap", "grad"))  # an operator needs Python
for _op in (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.poisson_nll_loss,
):  # fmt: skip
    define(_op, "loss", tensordict=partial(loss_tensordict, _op, tuple(inspect.signature(_op).parameters)))
note_syncs("the lengths", F.ctc_loss)
