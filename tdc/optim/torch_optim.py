"""Optimisers of `torch.optim` as transforms, with their state, and back.

    opt, state = from_torch_optim(optimizer, net)          settings of each param group, moments of each parameter
    optimizer.load_state_dict(to_torch_state_dict(state, optimizer, net))

One param group becomes one optimiser; several become the parts of a partition by key, in order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tdc.core.errors import DtypeError, StructureError, UnsupportedError, describe, message, refuse_wrong
from tdc.core.keys import parts, path_of, show
from tdc.core.typing import KeyPath
from tdc.optim.adam import adam, adamax, adamw, nadam, radam
from tdc.optim.checks import check_td
from tdc.optim.combine import by_paths
from tdc.optim.sgd import adadelta, adagrad, rmsprop, sgd
from tdc.optim.transform import Optimizer
from tdc.tensordict.paths import top_keys
from tdc.tensordict.tensordict import TensorDict

FROM, TO = "optim.from_torch_optim", "optim.to_torch_state_dict"
ADAM = {"mean": "exp_avg", "square": "exp_avg_sq"}


KINDS: dict[type, tuple[Callable[..., Optimizer], dict[str, str]]] = {  # our function, and torch's names of our moments
    torch.optim.SGD: (sgd, {"momentum": "momentum_buffer"}),
    torch.optim.Adam: (adam, {**ADAM, "largest": "max_exp_avg_sq"}),
    torch.optim.AdamW: (adamw, {**ADAM, "largest": "max_exp_avg_sq"}),
    torch.optim.Adamax: (adamax, {"mean": "exp_avg", "largest": "exp_inf"}),
    torch.optim.NAdam: (nadam, ADAM),
    torch.optim.RAdam: (radam, ADAM),
    torch.optim.Adagrad: (adagrad, {"sum": "sum"}),
    torch.optim.RMSprop: (rmsprop, {"square": "square_avg", "momentum": "momentum_buffer", "mean": "grad_avg"}),
    torch.optim.Adadelta: (adadelta, {"square": "square_avg", "delta": "acc_delta"}),
}
IGNORED = {"foreach", "fused", "capturable", "differentiable", "params", "param_names", "initial_lr"}
NUMBERS = {"product": "mu_product"}  # of nadam, one for all parameters


def from_torch_optim(optimizer: torch.optim.Optimizer, module: nn.Module) -> tuple[Optimizer, TensorDict]:
    """Convert an optimiser of torch, with its settings and its current state.

    Args:
        optimizer: SGD, Adam, AdamW, Adamax, NAdam, RAdam, Adagrad, RMSprop or Adadelta. Its current learning rate is
            used; schedulers are not converted.
        module: owner of the parameters; their names are the keys. Parameters in no group stay as they are.

    Returns:
        The optimiser, and its state for `tdc.from_module(module, buffers=False)`, as a copy.

    Raises:
        DtypeError: not an optimiser of torch, or not a module.
        UnsupportedError: another class, or settings that this library does not have.
        StructureError: parameters that the module does not have, or that have taken different numbers of steps.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> opt, state = from_torch_optim(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net)
        >>> state.keys(True, True)
        (('momentum', 'weight'), ('momentum', 'bias'), 'step')
    """
    groups = groups_of(FROM, optimizer, module)
    own = {f"{i}": optimizer_of(optimizer, group) for i, group in enumerate(optimizer.param_groups)}

    def flags(params: TensorDict) -> list[list[bool]]:
        return [[p in group for p in params._leaves] for group in groups]

    opt = by_paths(FROM, {"": own["0"]} if len(own) == 1 else own, flags)
    state = opt.init(parameters(module))
    if len(own) == 1:
        return opt, with_moments(optimizer, state, groups[0])
    for name, group in zip(own, groups, strict=True):
        state = state.set(name, with_moments(optimizer, state[name], group))
    return opt, state


def to_torch_state_dict(state: TensorDict, optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """Convert a state for `optimizer.load_state_dict`, the inverse of `from_torch_optim`.

    Args:
        state: of the optimiser that `from_torch_optim` returned.
        optimizer: its settings and groups are copied into the result; it is not changed.
        module: owner of the parameters.

    Returns:
        `{"state": …, "param_groups": …}`, with copies of all tensors.

    Raises:
        DtypeError, UnsupportedError, StructureError: as `from_torch_optim`; a state of another optimiser.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(net.parameters())
        >>> opt, state = from_torch_optim(optimizer, net)
        >>> optimizer.load_state_dict(to_torch_state_dict(state, optimizer, net))
    """
    check_td(TO, state)
    groups = groups_of(TO, optimizer, module)
    for group in optimizer.param_groups:
        optimizer_of(optimizer, group)
    found = optimizer.state_dict()
    entries: dict[int, Any] = {}
    for i, (group, known) in enumerate(zip(groups, found["param_groups"], strict=True)):
        own = state if len(groups) == 1 else state.get(f"{i}", TensorDict({}))
        check_moments(own, group)
        for path, index in zip(group, known["params"], strict=True):
            if own["step"] > 0:
                entries[index] = torch_entry(optimizer, own, path)
    return {"state": entries, "param_groups": found["param_groups"]}


def parameters(module: nn.Module) -> TensorDict:
    """Parameters of a module by name, tied ones once."""
    return TensorDict({path_of(tuple(name.split("."))): p.detach() for name, p in module.named_parameters()})


def groups_of(op: str, optimizer: Any, module: Any) -> list[dict[KeyPath, Tensor]]:
    """Parameters of each group by their keys in the module."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        hint = "torch.optim.AdamW(net.parameters())"
        raise DtypeError(message(op, "an optimiser of torch.optim", describe(optimizer), hint=hint))
    if not isinstance(module, nn.Module):
        raise DtypeError(message(op, "a module", describe(module), hint="the one whose parameters the optimiser has"))
    names = {id(p): path_of(tuple(name.split("."))) for name, p in module.named_parameters()}
    wrong = [
        f"group {i}, parameter {n}: {describe(p)}"
        for i, group in enumerate(optimizer.param_groups)
        for n, p in enumerate(group["params"])
        if id(p) not in names
    ]
    hint = "give the module whose parameters the optimiser was made with"
    refuse_wrong(StructureError, op, "parameters of the module", wrong, "others", hint)
    return [{names[id(p)]: p for p in group["params"]} for group in optimizer.param_groups]


def optimizer_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Optimizer:
    """An optimiser with the settings of one group."""
    if type(optimizer) not in KINDS:
        names = ", ".join([cls.__name__ for cls in KINDS])
        raise UnsupportedError(message(FROM, f"one of {names}", type(optimizer).__name__, hint="write a Transform"))
    make, settings = KINDS[type(optimizer)][0], {k: x for k, x in group.items() if k not in IGNORED}
    if make in (adam, adamw):
        make = adamw if settings.pop("decoupled_weight_decay", make is adamw) else adam
    known = set(inspect.signature(make).parameters)
    odd = {k: f"{x!r}" for k, x in settings.items() if k not in known and x is not False}
    refuse_wrong(UnsupportedError, FROM, "settings that tdc.optim has", odd, "others", "leave them at their defaults")
    return make(**{k: x for k, x in settings.items() if k in known})


def with_moments(optimizer: torch.optim.Optimizer, state: TensorDict, group: dict[KeyPath, Tensor]) -> TensorDict:
    """The state of one group with torch's moments and step; unchanged before the first step."""
    entries = {path: optimizer.state.get(p, {}) for path, p in group.items()}
    if not any(entries.values()):
        return state
    steps = {show(path): steps_of(entry) for path, entry in entries.items()}
    counts = {*steps.values()}
    if len(counts) > 1:
        hint = "one count is for a whole group: put these into a group of their own"
        at = {path: f"{n} steps" for path, n in steps.items()}
        raise StructureError(message(FROM, "parameters with equally many steps", f"{len(counts)}", at, hint))
    for name, theirs in KINDS[type(optimizer)][1].items():
        for path, entry in entries.items():
            if name in state and entry.get(theirs) is not None:
                moment = entry[theirs].to(state[name].get(path), copy=True)
                state = state.set((name, *parts(path)), moment)
    first = next(iter(entries.values()))
    for name, theirs in NUMBERS.items():
        if name in state:
            state = state.set(name, torch.as_tensor(first[theirs]).to(state[name], copy=True))
    return state.set("step", torch.full_like(state["step"], counts.pop()))


def steps_of(entry: dict[str, Any]) -> int:
    """Number of steps of a parameter. SGD does not count: 1 if it has momentum, after the first step."""
    return int(entry["step"]) if "step" in entry else int(entry.get("momentum_buffer") is not None)


def check_moments(state: TensorDict, group: dict[KeyPath, Tensor]) -> None:
    """Refuse a state that does not fit this group."""
    lacking = [f"{name}.{show(p)}" for name in top_keys(list(state._nodes)) for p in group if p not in state[name]]
    lacking = lacking if "step" in state else ["step"]
    hint = "opt.init(params)"
    refuse_wrong(StructureError, TO, "a state of from_torch_optim", lacking, "entries that are missing", hint)


def torch_entry(optimizer: torch.optim.Optimizer, state: TensorDict, path: KeyPath) -> dict[str, Any]:
    """torch's state of one parameter."""
    _, moments = KINDS[type(optimizer)]
    entry: dict[str, Any] = {} if type(optimizer) is torch.optim.SGD else {"step": state["step"].float().clone()}
    entry |= {theirs: state[name].get(path).clone() for name, theirs in moments.items() if name in state}
    return entry | {theirs: state[name].float().clone() for name, theirs in NUMBERS.items() if name in state}
