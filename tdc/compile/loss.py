"""Losses of a training step: of a module, or of parameters.

    loss(net, batch)                            -> result          `OfModule`: the net has the parameters of the state
    loss_fn(params, batch)                      -> result          `Functional`
    loss_fn(params, buffers, batch)             -> loss, buffers, and a dict of metrics where there is one

    result      a number
                (sum, count)                    loss = sum / count, of a sum over tokens, say
                (result, {"accuracy": ...})     either, with metrics

A batch in micro-batches has the loss and gradients of the whole, whatever the counts.

Invariant: neither the module nor the given buffers are changed; a module in evaluation mode is trained in training mode
and put back; in a module in training mode, parts that are not in it stay so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tdc.compile.functional import call_with, from_module
from tdc.core.annotations import python_signature
from tdc.core.dtypes import widened
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message, refuse_wrong
from tdc.core.keys import parts, show
from tdc.interop.pytrees import from_state_dict
from tdc.tensordict.tensordict import TensorDict, build_td

OP = "compile.train_step"
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # buffers that stock modules update in training
KINDS = "a number, (sum, count), or either with a dict of metrics"


@dataclass(frozen=True, eq=False, slots=True)
class Functional:
    """A loss that is given parameters, and buffers where it takes them."""

    fn: Callable[..., Any]
    buffers: bool
    net: None = None

    def call(self, fn: Callable[..., Any], params: TensorDict, buffers: Any, batch: Any, training: bool = True) -> Any:
        """Call a function of the loss's arguments; return `(result, buffers)`."""
        if not self.buffers:
            return fn(params, batch), None
        out = fn(params, buffers.apply(torch.clone), batch)
        if not isinstance(out, tuple) or len(out) < 2 or not (training or isinstance(out[1], TensorDict)):
            return out, None
        return (out[0], *out[2:]) if len(out) > 2 else out[0], out[1]

    def parts(self, given: Any, buffers: TensorDict | None) -> tuple[TensorDict, TensorDict | None]:
        """First parameters and buffers, of a module or as given."""
        if isinstance(given, nn.Module):
            refuse_statistics(given, self.buffers)
            own = parameters_of(given), from_state_dict(dict(given.named_buffers()))
        elif isinstance(given, TensorDict):
            own = given, TensorDict({}, given.batch_size)
            wrong = {show(p): describe(x) for p, x in given._leaves.items() if parts(p)[-1] in STATISTICS}
            hint = "step.init(net), or step.init(tdc.from_module(net, buffers=False), buffers=...)"
            refuse_wrong(StructureError, f"{OP}.init", "parameters to train", wrong, "statistics of a module", hint)
        else:
            expected = "a module or a TensorDict of parameters"
            hint = "step.init(net), or step.init(tdc.from_module(net, buffers=False))"
            raise DtypeError(message(f"{OP}.init", expected, describe(given), hint=hint))
        return own[0], (own[1] if buffers is None else buffers) if self.buffers else None


@dataclass(frozen=True, eq=False, slots=True)
class OfModule:
    """A loss of a module, which is called with the parameters and buffers of the state."""

    fn: Callable[..., Any]
    net: nn.Module

    def call(self, fn: Callable[..., Any], params: TensorDict, buffers: Any, batch: Any, training: bool = True) -> Any:
        """Call `fn(net, batch)`; return the result, and the buffers of the net after."""
        given = params if buffers is None else joined(params, buffers)
        with in_mode(self.net, training):
            out, after = call_with(self.net, given, lambda: fn(self.net, batch))
        if buffers is None:
            return out, None
        found = {p: after._leaves[p] for p in buffers._leaves}
        return out, build_td(found, buffers._nodes, buffers._size, buffers._device)

    def parts(self, given: Any, buffers: TensorDict | None) -> tuple[TensorDict, TensorDict | None]:
        """First parameters and buffers: of the net, of another of its architecture, or as given."""
        given = self.net if given is None else given
        if isinstance(given, nn.Module):
            own = parameters_of(given), from_module(given, params=False, remove_duplicate=True)
        elif isinstance(given, TensorDict):
            mine = from_module(self.net, params=False, remove_duplicate=True)
            size = given.batch_size
            own = given, mine.apply(lambda x: x.expand((*size, *x.shape)), batch_size=size)
        else:
            expected, hint = "a module or a TensorDict of parameters", "step.init(), which takes those of the net"
            raise DtypeError(message(f"{OP}.init", expected, describe(given), hint=hint))
        found = own[1] if buffers is None else buffers
        refuse_others(self.net, own[0], "_parameters")
        refuse_others(self.net, found, "_buffers")
        return own[0], found if found._leaves else None


def parameters_of(net: nn.Module) -> TensorDict:
    """The parameters that are trained, a tied one as one."""
    return from_state_dict({name: p.detach() for name, p in net.named_parameters() if p.requires_grad})


def joined(params: TensorDict, buffers: TensorDict) -> TensorDict:
    """Both in one."""
    leaves, nodes = {**params._leaves, **buffers._leaves}, {**params._nodes, **buffers._nodes}
    return build_td(leaves, nodes, params._size, params._device)


@contextmanager
def in_mode(net: nn.Module, training: bool) -> Iterator[None]:
    """A module in training or in evaluation mode, and afterwards as it was."""
    if net.training is training:
        yield
        return
    before = [(m, m.training) for m in net.modules()]
    try:
        net.train(training)
        yield
    finally:
        for m, mode in before:
            m.training = mode


# -- results


def read_result(out: Any, buffers: Any, after: Any) -> tuple[Tensor, Any, Any, TensorDict]:
    """Mean loss, count, new buffers and metrics, empty dicts for none, of what a loss returned.

    Args:
        out: what it returned.
        buffers, after: those before, and after the call.
    """
    rest: tuple[Any, ...] = out if isinstance(out, tuple) else (out,)
    aux: Any = {}
    if len(rest) > 1 and isinstance(rest[-1], (Mapping, TensorDict)):
        rest, aux = rest[:-1], rest[-1]
    if len(rest) == 1 and isinstance(rest[0], tuple):
        rest = rest[0]
    if not 1 <= len(rest) <= 2:
        hint = "return loss, (sum, count), or (loss, {'name': metric})"
        raise DtypeError(message(OP, "a loss that returns a number or (sum, count)", f"{len(rest)} results", hint=hint))
    loss, count = mean_of(*rest)
    if "loss" in aux:
        raise StructureError(message(OP, "metrics beside the loss", "one called 'loss'", hint="rename it"))
    if buffers is not None:
        check_buffers(buffers, after)
    return loss, count, {} if buffers is None else after, TensorDict(aux)


def check_buffers(before: TensorDict, after: Any) -> None:
    """Refuse buffers of other keys, shapes or dtypes than those that went in."""
    if not isinstance(after, TensorDict) or after._leaves.keys() != before._leaves.keys():
        got = "nothing" if after is None else describe(after)
        hint = "return loss, buffers: those that the module left behind"
        raise StructureError(message(OP, "buffers of the keys that went in", got, hint=hint))
    wrong = {
        show(p): f"{describe(after._leaves[p])}, before {describe(x)}"
        for p, x in before._leaves.items()
        if after._leaves[p].shape != x.shape or after._leaves[p].dtype != x.dtype
    }
    hint = "buffers of one shape and dtype, step after step"
    refuse_wrong(StructureError, OP, "buffers of the shapes that went in", wrong, "that differ", hint)


def mean_of(loss: Any, *counts: Any) -> tuple[Tensor, Any]:
    """Mean loss, and its count as a tensor, or an empty dict without one."""
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        hint = f"return {KINDS}"
        raise DtypeError(message(OP, "a floating-point tensor as loss", describe(loss), hint=hint))
    if loss.ndim:
        raise ShapeError(message(OP, "a loss of one number", describe(loss), hint="loss.mean()"))
    if not counts:
        return loss, {}
    count, hint = counts[0], "return (sum, mask.sum()), or (loss, {'name': metric})"
    if not isinstance(count, (Tensor, int, float, torch.SymInt)) or isinstance(count, bool):
        raise DtypeError(message(OP, "a pair of sum and count", describe(count), hint=hint))
    if isinstance(count, Tensor) and (count.is_complex() or count.dtype == torch.bool):
        raise DtypeError(message(OP, "a count that is a real number", describe(count), hint=hint))
    if isinstance(count, Tensor) and count.ndim:
        raise ShapeError(message(OP, "a count of one number", describe(count), hint=hint))
    like = widened(loss.detach())
    number = count.detach().to(like.dtype) if isinstance(count, Tensor) else torch.ones_like(like).mul(count)
    return loss / not_zero(number), number


def not_zero(count: Tensor) -> Tensor:
    """Replace a count of 0 by 1 to divide by: the mean of nothing is 0."""
    return torch.where(count == 0, 1, count)


# -- checks


def loss_of(net: Any, fn: Any, buffers: bool) -> Functional | OfModule:
    """Make a loss of a module, or without one of parameters; refuse other arguments."""
    names = ("net", "batch") if net is not None else ("params", *["buffers"] * buffers, "batch")
    form = f"def loss({', '.join(names)}): ..."
    if net is not None and not isinstance(net, nn.Module):
        hint = "train_step(net, loss, optimizer), or train_step(loss_fn, optimizer)"
        raise DtypeError(message(OP, "a module", describe(net), hint=hint))
    if net is not None and buffers:
        got, hint = "buffers=True", "leave buffers out: those of the net are in the state"
        raise DtypeError(message(OP, "buffers=True for a loss of parameters only", got, hint=hint))
    count = count_of_arguments(fn)
    if isinstance(fn, nn.Module) or not callable(fn):
        hint = f"{form}  or train_step(net, loss, optimizer)"
        raise DtypeError(message(OP, "a function as loss", describe(fn), hint=hint))
    if count is not None and not count[0] <= len(names) <= count[1]:
        got = f"one of {count[0]}"
        hint = form if net is not None or count[0] != 3 else f"{form}  or buffers=True, or batch=(x, weight)"
        raise DtypeError(message(OP, f"a loss of {len(names)} arguments", got, hint=hint))
    return OfModule(fn, net) if net is not None else Functional(fn, buffers)


def count_of_arguments(fn: Any) -> tuple[int, int] | None:
    """Least and largest number of positional arguments of a function; None if unknown."""
    if not callable(fn):
        return None
    try:
        kinds = python_signature(fn).parameters.values()
    except (ValueError, TypeError):  # of a function in C
        return None
    positional = [p for p in kinds if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    most = 255 if any([p.kind is p.VAR_POSITIONAL for p in kinds]) else len(positional)
    return sum([p.default is p.empty for p in positional]), most


def refuse_statistics(module: nn.Module, buffers: bool) -> None:
    """Refuse a module whose training updates buffers, where the loss does not take them."""
    found = {} if buffers else dict(module.named_modules())
    wrong = {
        name or "the module": type(m).__name__
        for name, m in found.items()
        if m.training and any([x in STATISTICS for x, _ in m.named_buffers(recurse=False)])
    }
    expected = "train_step(net, loss, optimizer), or buffers=True, for modules with statistics"
    hint = "train_step(net, loss, optimizer) threads them; net.eval() updates none"
    refuse_wrong(StructureError, f"{OP}.init", expected, wrong, "that this loss would not update", hint)


def refuse_others(net: nn.Module, given: TensorDict, kind: str) -> None:
    """Refuse tensors of other names or shapes than those of the net; a batch dim of an ensemble may be in front."""
    own = from_module(net, params=kind == "_parameters", buffers=kind == "_buffers")._leaves
    front, what = given.batch_size, kind[1:]
    wrong = {
        show(p): f"{describe(x)}, in the net {describe(own[p]) if p in own else 'nothing'}"
        for p, x in given._leaves.items()
        if p not in own or x.shape != (*front, *own[p].shape)
    }
    if kind == "_buffers":
        wanted = from_module(net, params=False, remove_duplicate=True)._leaves
        wrong |= {show(p): f"missing, in the net {describe(x)}" for p, x in wanted.items() if p not in given._leaves}
    hint = f"{what} nested and named as tdc.from_module(net)"
    refuse_wrong(StructureError, f"{OP}.init", f"{what} of {type(net).__name__}", wrong, "that differ", hint)
