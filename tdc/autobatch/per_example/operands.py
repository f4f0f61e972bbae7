"""Rows of operations on operands that broadcast: those of one example are aligned from the last dim.

    xs (T, D) + h (D,)      (B, -1, D) + (B, 1, D)      a dense operand gets dims of size 1 behind the batch
    xs (T,) + h (H, 1)      (B, 1, -1) + (B, H, 1)      so does a ragged one
    xs (T, D) + w (D,)      (B, -1, D) + (D,)           a shared operand stays

A dense operand has size 1 where the others are ragged. A number of each example does not widen the dtype of tensors,
as a 0-d tensor does not.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import MethodDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.autobatch.per_example.table import (
    NESTED,
    TABLE,
    all_dims,
    count_of,
    dtype_beside,
    each,
    first_is_ragged,
    is_operand,
    of_rank,
    only_shared,
    put,
    ragged,
    rank,
    refuse,
    with_batch,
)
from tdc.autobatch.values import Lane, lane_of
from tdc.core.errors import ShapeError, message
from tdc.core.rules import RULES, name_of
from tdc.core.typing import Op
from tdc.ops.loss import named
from tdc.ragged.nested import NestedTensor


def together(op: Any, operands: Sequence[Any]) -> list[Any]:
    """Operands of examples as operands of the batch that broadcast in the same way.

    Raises:
        ShapeError: a dense operand has more than one element along a ragged dim.
    """
    dims = max([rank(x) for x in operands])
    ragged_dims = [d - x.ndim for x in operands if isinstance(x, NestedTensor) for d in x.ragged_dims]
    for x in operands:
        if isinstance(x, Tensor) or type(x) is Lane:
            t: Any = x.data if type(x) is Lane else x
            for d in ragged_dims:
                if -d <= rank(x) and t.shape[d] != 1:
                    got = f"{t.shape[d]} elements along a ragged dim"
                    hint = "x.unsqueeze(d) where all elements are to meet it, or rows of another ragged argument"
                    raise ShapeError(message(op, "a dense operand with one element there", got, hint=hint))
    tensors = [x for x in operands if is_operand(x) and rank(x) > 0]
    return [of_rank(as_number(x, tensors), dims) for x in operands]


def as_number(x: Any, tensors: Sequence[Any]) -> Any:
    """A number of each example, in the dtype that a 0-d tensor would have beside tensors."""
    if type(x) is not Lane or rank(x) > 0 or x.data.dtype == torch.bool or not tensors:
        return x
    dtype = tensors[0].data.dtype if type(tensors[0]) is Lane else tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.data.dtype if type(t) is Lane else t.dtype)
    wanted = dtype_beside(str(dtype), str(x.data.dtype))
    return lane_of(x.data.to(wanted)) if wanted != x.data.dtype else x


def nary(op: Op) -> Op:
    """A row for a function of several tensors that broadcast."""

    def run(*args: Any, **kwargs: Any) -> Any:
        ready = together(op, [*args, *kwargs.values()])
        return op(*ready[: len(args)], **dict(zip(kwargs, ready[len(args) :], strict=True)))

    return run


def unary(op: Any) -> Op:
    """A row for a function of one tensor, and of shared arguments."""
    name = op.__name__ if isinstance(op, MethodDescriptorType) else ""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        only_shared(op, *args, *kwargs.values())
        return getattr(ragged(x, op), name)(*args, **kwargs) if name else op(ragged(x, op), *args, **kwargs)

    return run


def embedding(input: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`embedding`, with a table of each example as well."""
    if type(weight) is not Lane:
        return F.embedding(ragged(input, F.embedding), weight, padding_idx, max_norm, *args, **kwargs)
    if padding_idx is not None or max_norm is not None:
        refuse("torch.embedding of a table of each example, with padding_idx or max_norm", "leave it out")
    count, size = weight.data.shape[:2]
    first = lane_of(torch.arange(count, device=weight.data.device) * size)
    ids, own = together(F.embedding, [ragged(input, F.embedding), first])
    return F.embedding(torch.add(ids, own), weight.data.flatten(0, 1))


def masked_fill(x: Any, mask: Any, value: Any) -> Any:
    """`masked_fill`, with a value of each example as well."""
    if type(value) is Lane or isinstance(value, NestedTensor):
        dtype = x.data.dtype if type(x) is Lane else x.dtype
        own: Any = value
        new = lane_of(own.data.to(dtype)) if type(value) is Lane else own.to(dtype)
        a, m, v = together(torch.masked_fill, [x, mask, new])
        return torch.where(m, v, a)
    a, m = together(torch.masked_fill, [x, mask])
    return torch.masked_fill(a, m, value)


def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """`clamp`, by one bound after the other: one may be a number and the other a tensor."""
    found = x
    for name, bound in (("min", min), ("max", max)):
        if bound is not None:
            own = lane_of(found) if found is not x and isinstance(found, Tensor) else found
            y, b = together(torch.clamp, [own, bound])
            found = torch.clamp(y, **{name: b})
    return found


def fill(x: Any, value: Any) -> Any:
    if type(value) is Lane:
        a, v = together(torch.fill, [x, lane_of(value.data.to(x.dtype))])
        return torch.where(torch.zeros_like(a, dtype=torch.bool), a, v)
    return torch.fill(ragged(x, torch.fill), value)


def to(x: Any, *args: Any, **kwargs: Any) -> Any:
    """`x.to(dtype)`, and `x.to(other)`."""
    given = [a.data if type(a) is Lane else a.values if isinstance(a, NestedTensor) else a for a in args]
    return (x if isinstance(x, NestedTensor) else with_batch(x, count_of(args))).to(*given, **kwargs)


def clone(op: Op) -> Op:
    """A row that ignores the memory format."""
    name = name_of(op)

    def run(x: Any, *, memory_format: Any = None) -> Any:
        return getattr(ragged(x, op), name)()

    return run


# -- losses


def reduced(op: Any, loss: Any, reduction: str) -> Any:
    """The loss of each example, from the losses of its elements."""
    if reduction == "none":
        return loss
    if reduction == "batchmean" and op is F.kl_div and loss.ndim > 1:
        rows = loss.lengths if first_is_ragged(loss) else loss.shape[1]
        return torch.sum(loss, all_dims(loss)) / rows
    if reduction not in ("mean", "sum"):
        refuse(f"reduction={reduction!r} of torch.{name_of(op)}", "reduction='none', then sum or mean of the result")
    dims = tuple(range(1, loss.ndim))
    return torch.sum(loss, dims) if reduction == "sum" else torch.mean(loss, dims)


def elementwise_loss(op: Any, names: tuple[str, ...]) -> Op:
    """A row for a loss of pairs of elements."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given, reduction = named(names, args, kwargs)
        ready = together(op, list(given.values()))
        found = op(**dict(zip(given, ready, strict=True)), reduction="none")
        return reduced(op, found, reduction)

    return run


def class_loss(op: Any, names: tuple[str, ...]) -> Op:
    """A row for a loss of classes: logits (T, C) and targets (T,)."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given, reduction = named(names, args, kwargs)
        logits, target = given.pop("input"), given.pop("target")
        weight, ignored = given.get("weight"), given.get("ignore_index", -100)
        only_shared(op, weight)
        both = all([isinstance(x, NestedTensor) for x in (logits, target)])
        if not both or not first_is_ragged(logits):
            expected, hint = "logits (T, C) and targets (T,) that are both ragged", "logits.transpose(0, 1)"
            refuse(f"others of torch.{name_of(op)}", hint, expected)
        if logits.ndim < 3:
            refuse(f"classes that are ragged, of torch.{name_of(op)}", "pad the classes, or share their number")
        loss = op(logits, target, reduction="none", **given)
        if reduction != "mean" or target.dtype.is_floating_point:
            return reduced(op, loss, reduction)
        counted = target != ignored
        share = counted.to(loss.dtype)
        if weight is not None:
            share = share * target.with_values(weight[torch.where(counted, target, 0).values])
        return torch.sum(loss, all_dims(loss)) / torch.sum(share, all_dims(share))

    return run


ELEMENTWISE = each(F, """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
    poisson_nll_loss gaussian_nll_loss soft_margin_loss hinge_embedding_loss margin_ranking_loss
""")  # fmt: skip
CLONES = (torch.clone, torch.Tensor.contiguous)
OWN: dict[Any, Op] = {
    torch.masked_fill: masked_fill, torch.clamp: clamp, torch.fill: fill, torch.Tensor.to: to,
    torch.Tensor.type_as: lambda x, other: to(x, other), **{op: clone(op) for op in CLONES},
}  # fmt: skip

OWN[F.embedding] = embedding
for _op, _row in OWN.items():
    put(_op, _row)
for _op in ELEMENTWISE:
    put(_op, elementwise_loss(_op, tuple(inspect.signature(_op).parameters)))
for _op in (F.cross_entropy, F.nll_loss):
    put(_op, class_loss(_op, tuple(inspect.signature(_op).parameters)))
for _rule in RULES:
    if _rule.kind == "nested" and _rule.family == "pointwise" and NESTED[_rule.op] not in TABLE:
        put(_rule.op, nary(_rule.op) if _rule.broadcasts else unary(_rule.op))
for _op in (
    F.dropout, F.alpha_dropout, torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli,
    torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like, torch.is_floating_point, torch.is_complex,
    torch.is_signed,
):  # fmt: skip
    put(_op, unary(_op))
