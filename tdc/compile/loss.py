"""What the loss function of a training step takes and returns.

    loss_fn(params, batch)              -> loss
    loss_fn(params, buffers, batch)     -> loss, buffers
    with has_aux                        -> ..., aux, a dict of metrics

A loss is one number, or the pair `(sum, count)`: a sum over tokens, say, and how many there were. Then the loss is the
sum by the count, and a batch in micro-batches has the loss and the gradients that it has as a whole, whatever their
lengths; a micro-batch that counts nothing adds nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tdc.core.dtypes import widened
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message
from tdc.tensordict.tensordict import TensorDict

OP = "compile.train_step"


def takes_buffers(loss_fn: Any) -> bool:
    """Whether a loss has three arguments; refuses what is no function of two or three."""
    got = describe(loss_fn)
    if callable(loss_fn):
        try:
            kinds = inspect.signature(loss_fn).parameters.values()
        except ValueError:  # of a function in C, which tells none
            return False
        if any([p.kind is p.VAR_POSITIONAL for p in kinds]):
            return False
        positional = [p for p in kinds if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        needed = sum([p.default is p.empty for p in positional])
        if needed <= 3 and len(positional) >= 2:
            return needed == 3
        got = f"one of {len(positional)}"
    hint = "def loss_fn(params, batch): ... or def loss_fn(params, buffers, batch): ..."
    raise DtypeError(message(OP, "a loss_fn of two or three arguments", got, hint=hint))


def read_result(out: Any, buffers: Any, has_aux: bool) -> tuple[Tensor, tuple[Any, TensorDict, Any]]:
    """What a loss_fn returned, as `(loss, (buffers, aux, count))`, empty dicts for what there is not; refuses anything
    else."""
    names = ["loss", *["buffers"] * (buffers is not None), *["aux"] * has_aux]
    results: tuple[Any, ...] = out if isinstance(out, tuple) and not (len(names) == 1 and is_pair(out)) else (out,)
    if len(results) != len(names):
        got = f"{len(results)} results" if isinstance(out, tuple) else describe(out)
        hint = "has_aux=True for metrics beside the loss" if len(results) > len(names) else "return all of them"
        raise DtypeError(message(OP, f"a loss_fn that returns {', '.join(names)}", got, hint=hint))
    loss, count = mean_of(results[0])
    aux = results[-1] if has_aux else {}
    if not isinstance(aux, (Mapping, TensorDict)):
        raise DtypeError(message(OP, "a dict of metrics as aux", describe(aux), hint="return loss, {'name': aux}"))
    if "loss" in aux:
        raise StructureError(message(OP, "metrics beside the loss", "one called 'loss'", hint="rename it"))
    after = {} if buffers is None else results[1]
    if buffers is not None and (not isinstance(after, TensorDict) or after._leaves.keys() != buffers._leaves.keys()):
        got, hint = describe(after), "return the buffers that the module left behind"
        raise StructureError(message(OP, "buffers of the keys that went in", got, hint=hint))
    return loss, (after, TensorDict(aux), count)


def is_pair(x: Any) -> bool:
    """Whether a result is a sum and a count."""
    return isinstance(x, tuple) and len(x) == 2 and not isinstance(x[1], (Mapping, TensorDict, bool))


def mean_of(found: Any) -> tuple[Tensor, Any]:
    """A loss, and its count as a tensor, or an empty dict where it has none."""
    loss, count = found if is_pair(found) else (found, {})
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        raise DtypeError(message(OP, "a floating-point tensor as loss", describe(loss), hint="F.mse_loss(x, y)"))
    if loss.ndim:
        raise ShapeError(message(OP, "a loss of one number", describe(loss), hint="loss.mean()"))
    if not is_pair(found):
        return loss, count
    hint = "return (sum, mask.sum())"
    if not isinstance(count, (Tensor, int, float, torch.SymInt)):
        raise DtypeError(message(OP, "a pair of sum and count", describe(count), hint=hint))
    if isinstance(count, Tensor) and (count.is_complex() or count.dtype == torch.bool):
        raise DtypeError(message(OP, "a count that is a real number", describe(count), hint=hint))
    if isinstance(count, Tensor) and count.ndim:
        raise ShapeError(message(OP, "a count of one number", describe(count), hint=hint))
    like = widened(loss.detach())
    number = count.detach().to(like.dtype) if isinstance(count, Tensor) else torch.ones_like(like).mul(count)
    return loss / not_zero(number), number


def not_zero(count: Tensor) -> Tensor:
    """A count to divide by: of nothing the sum is 0, and so is its mean."""
    return torch.where(count == 0, 1, count)
