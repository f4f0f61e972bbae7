"""Metrics of a training step beside the loss: tensors of the graph, so that nothing waits for them.

    "loss"         of the batch                         "grad_norm"    of all gradients, before the optimizer
    "lr"           rate of this step                    "rows"         examples of the batch
    "tokens"       count of a `(sum, count)` loss, else positions of the batch's first ragged leaf
    "skipped"      steps left out so far                "scale"        of a float16 loss
    "finite"       True if loss and gradients are
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tdc.compile.micro_batches import Gradients, first_size, leaves_of
from tdc.core.dtypes import widened
from tdc.core.errors import NonfiniteError, StructureError, describe, message
from tdc.core.keys import parts, show
from tdc.ragged.storage import data_of, is_ragged
from tdc.tensordict.tensordict import TensorDict

OP = "compile.train_step"
NAMES = ("loss", "grad_norm", "lr", "tokens", "rows", "skipped", "scale", "finite")


def check_names(names: Any, known: Sequence[str] = NAMES) -> tuple[str, ...]:
    """Names of metrics, as a tuple; refuses others."""
    given = (names,) if isinstance(names, str) else names
    if not isinstance(given, (tuple, list)) or not all([name in known for name in given]):
        got = ", ".join([repr(x) for x in given]) if isinstance(given, (tuple, list)) else describe(given)
        hint = "others come from the loss: return loss, {'name': metric}"
        raise StructureError(message(OP, f"metrics among {', '.join(known)}", got, hint=hint))
    return tuple(given)


def global_norm(grads: TensorDict, group: Any = None) -> Tensor:
    """The Euclidean norm of all gradients together; with a group of those of all its processes."""
    leaves = [x for x in grads._leaves.values() if isinstance(x, Tensor)]
    norms = [torch.linalg.vector_norm(widened(x)) for x in leaves]
    dtype = max([n.dtype for n in norms], key=lambda d: d.itemsize)
    own = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, dtype) for n in norms]))
    return own if group is None else norm_of_all(own, group)


def norm_of_all(own: Tensor, group: Any) -> Tensor:
    """The norm of the parts that the processes of a group have, each of which knows its own."""
    square = own.square()
    dist.all_reduce(square, group=group)
    return square.sqrt()


def rate_of(optimizer: Any, before: TensorDict, after: TensorDict) -> Any:
    """Learning rate of a step, from `optimizer.rates` or the "lr" of its new state; of several groups all by path."""
    tell = getattr(optimizer, "rates", None)
    found: dict[str, Tensor] = {} if tell is None else tell(before)
    if not found:
        held = {show(p): x for p, x in after._leaves.items() if parts(p)[-1] == "lr" and isinstance(x, Tensor)}
        found = {path: x.clone() for path, x in held.items()}
    if not found:
        hint = "one of tdc.optim, or one that keeps 'lr' in its state"
        raise StructureError(message(OP, "an optimizer that tells its rate, for metrics 'lr'", "none", hint=hint))
    return next(iter(found.values())) if len(found) == 1 else found


def tokens_of(batch: Any, count: Any) -> Tensor:
    """Number of tokens of a batch: the count of the loss, or the positions of its first ragged leaf."""
    if isinstance(count, Tensor):
        return count
    ragged = [x for x in leaves_of(batch) if is_ragged(x)]
    if not ragged:
        got, hint = "a dense batch and a loss without a count", "return (sum, count)"
        raise StructureError(message(OP, "tokens to count, for metrics 'tokens'", got, hint=hint))
    return ragged[0].lengths.sum()


def rows_of(batch: Any) -> Tensor:
    """Number of examples of a batch."""
    first = next(x for x in leaves_of(batch) if isinstance(x, Tensor) or is_ragged(x))
    return torch.ones((), dtype=torch.int64, device=data_of(first).device) * first_size(batch)


def metrics_of(names: tuple[str, ...], found: Gradients, batch: Any, after: dict[str, Any], **known: Any) -> TensorDict:
    """Metrics of a step: the loss, those of the loss function, then the named ones, of which some are `known`."""
    given = dict(found.metrics.items())
    made: dict[str, Any] = {}
    for name in names:
        if name in known:
            made[name] = known[name]
        elif name == "tokens":
            made[name] = tokens_of(batch, found.count)
        elif name == "rows":
            made[name] = rows_of(batch)
        elif name == "skipped":
            made[name] = after["skipped"]
        elif name == "scale":
            made[name] = after["scaler"]["scale"]
    taken = [name for name in made if name in given]
    if taken:
        hint = "rename it, or leave it out of metrics="
        raise StructureError(message(OP, "metrics of other names", ", ".join(taken), hint=hint))
    if "loss" not in names:
        del given["loss"]
    return TensorDict({**given, **made})


def refuse_nonfinite(metrics: TensorDict, state: TensorDict) -> None:
    """Raise where a step, of an ensemble one of its models, was not finite; waits for the device."""
    finite = metrics["finite"]
    if finite.all():
        return
    flags, steps, single = finite.reshape(-1).tolist(), state["step"].reshape(-1).tolist(), not finite.ndim
    losses, got = metrics.get("loss", None), "one that is not"
    if losses is not None:
        got = "gradients that are not" if losses.isfinite().all() else "a loss that is not"
    at = [f"step {n}" if single else f"step {n} of member {i}" for i, n in enumerate(steps) if not flags[i]]
    hint = "skip_nonfinite=True leaves it out; compile=False in torch.autograd.detect_anomaly() names the operation"
    raise NonfiniteError(message(OP, "a finite loss with finite gradients", got, at, hint))
