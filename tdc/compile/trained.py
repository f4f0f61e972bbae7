"""Trained weights put back where a module has its own: `step.load_into(net, state)`.

    value of a name     of the state, under this name or under another of the same tied tensor
                        else of the net that the step knows: what does not learn

Invariants:
  - afterwards the module computes what `step.eval` computes with this state;
  - nothing is written unless all of it fits: names, shapes and ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tdc.compile.evaluation import with_mean
from tdc.core.errors import DtypeError, ShapeError, StructureError, UnsupportedError, describe, message, refuse_wrong
from tdc.core.keys import show
from tdc.core.typing import KeyPath
from tdc.tensordict.tensordict import TensorDict, build_td

OP = "compile.train_step.load_into"


class Known(NamedTuple):
    """Values by the names they have; those of `state` have a batch dim for members where there are several.

    `complete`: every tensor of a module must have a value. Without a net in the step what does not learn keeps its own.
    """

    values: dict[str, Tensor]
    state: set[str]
    complete: bool

    def member(self, k: int) -> Known:
        """The values of one member; tied names still share one tensor."""
        rows = {id(x): x[k] for name, x in self.values.items() if name in self.state}
        return self._replace(values={name: rows.get(id(x), x) for name, x in self.values.items()})


def load_into(net: nn.Module | None, target: Any, state: Any, averaged: bool) -> Any:
    """`TrainStep.load_into` of a step that knows this net, or none."""
    if not isinstance(state, TensorDict) or "params" not in state:
        hint = "step.load_into(net, state), with what step.init() or step(state, batch) returned"
        raise StructureError(message(OP, "the state of a training step", describe(state), hint=hint))
    known, size = known_values(net, state, averaged), state.batch_size
    if isinstance(target, TensorDict):
        return filled(target, known, size)
    several = isinstance(target, (list, tuple))
    members: Sequence[Any] = target if several else [target]
    wrong = {f"{i}": describe(m) for i, m in enumerate(members) if not isinstance(m, nn.Module)}
    hint = "step.load_into(net, state); of an ensemble a list of modules, or stack_modules(nets)"
    refuse_wrong(DtypeError, OP, "a module, a list of modules or stacked parameters", wrong, "others", hint)
    if size != (torch.Size([len(members)]) if several else torch.Size([])):
        got = f"{len(members)} modules" if several else "one module"
        hint = "a list of as many modules as members; step.load_into(net, state[k]) for one of them"
        raise ShapeError(message(OP, f"modules for a state of batch_size {list(size)}", got, hint=hint))
    pairs = [pair for k, m in enumerate(members) for pair in matched(m, known.member(k) if several else known)]
    with torch.no_grad():
        for own, value in pairs:
            if own is not value:
                own.copy_(value)
    return target


def known_values(net: nn.Module | None, state: TensorDict, averaged: bool) -> Known:
    """Return the values of all tensors of a module: those of the state, and the others from the net of its step."""
    params = with_mean(state, OP) if averaged else state["params"]
    found = {show(p): x for p, x in params._leaves.items()}
    if "buffers" in state:
        found |= {show(p): x for p, x in state["buffers"]._leaves.items()}
    values = dict(found)
    for own in [] if net is None else tensors_of(net):
        trained = [found[name] for name in own.names if name in found]
        values |= dict.fromkeys(own.names, trained[0] if trained else own.tensor.detach())
    learned = {id(x) for x in found.values()}
    return Known(values, {name for name, x in values.items() if id(x) in learned}, net is not None)


class Own(NamedTuple):
    """A parameter or buffer of a module, and all of its names."""

    tensor: Tensor
    names: list[str]


def tensors_of(module: nn.Module) -> list[Own]:
    """Parameters and buffers, a tied one once."""
    found: dict[int, Own] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, x in named(remove_duplicate=False):
            found.setdefault(id(x), Own(x, [])).names.append(name)
    return list(found.values())


def matched(module: nn.Module, known: Known) -> list[tuple[Tensor, Tensor]]:
    """Each tensor of a module, and its value."""
    pairs: list[tuple[Tensor, Tensor]] = []
    wrong: dict[str, str] = {}
    owned = tensors_of(module)
    for own in owned:
        values = [known.values[name] for name in own.names if name in known.values]
        if not values:
            if known.complete or own.tensor.requires_grad:
                wrong[own.names[0]] = "not in the state"
        elif values[0].shape != own.tensor.shape:
            wrong[own.names[0]] = f"{describe(own.tensor)}, in the state {describe(values[0])}"
        elif any([x is not values[0] for x in values]):
            wrong[own.names[0]] = f"tied to {', '.join(own.names[1:])}, which has another value in the state"
        else:
            pairs.append((own.tensor, values[0]))
    names = {name for own in owned for name in own.names}
    wrong |= dict.fromkeys(lost(known.values, names), "not in the module")
    hint = "load into a module made as the one that was trained"
    refuse_wrong(StructureError, OP, "the tensors that were trained", wrong, "that differ", hint)
    elsewhere = {own.names[0]: describe(x) for own in owned if has_no_memory(x := own.tensor)}
    hint = "load into a copy of the net that is whole: net.to_empty(device='cpu'), before fully_shard"
    refuse_wrong(UnsupportedError, OP, "tensors with memory of their own", elsewhere, "others", hint)
    return pairs


def lost(values: dict[str, Tensor], names: set[str]) -> list[str]:
    """Names of values that would go nowhere, under none of their names."""
    arrived = {id(x) for name, x in values.items() if name in names}
    return [name for name, x in values.items() if id(x) not in arrived]


def has_no_memory(x: Tensor) -> bool:
    """True for tensors on the meta device and for DTensors, of which this process has a part."""
    return x.is_meta or hasattr(x, "device_mesh")


def filled(target: TensorDict, known: Known, size: torch.Size) -> TensorDict:
    """Stacked parameters with the values of the state."""
    names: dict[str, KeyPath] = {show(p): p for p in target._leaves}
    wrong = dict.fromkeys([name for name in names if name not in known.values], "not in the state")
    wrong |= dict.fromkeys(lost(known.values, set(names)), "not in the parameters")
    new = {
        path: known.values[name] if name in known.state else known.values[name].expand(*size, *known.values[name].shape)
        for name, path in names.items()
        if name in known.values
    }
    wrong |= {
        show(p): f"{describe(target._leaves[p])}, in the state {describe(x)}"
        for p, x in new.items()
        if target._leaves[p].shape != x.shape
    }
    hint = "stack_modules(nets) of modules made as the one that was trained"
    refuse_wrong(StructureError, OP, "the tensors that were trained", wrong, "that differ", hint)
    leaves = {p: x.to(target._leaves[p].device, target._leaves[p].dtype, copy=True) for p, x in new.items()}
    return build_td(leaves, target._nodes, target._size, target._device)
