"""Optimisers of `torch.optim` taken over in the middle of training, and given back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch import optim as theirs
from torch.testing import assert_close

import tdc
from tdc import TensorDict, from_module
from tdc.optim import from_torch_optim, to_torch_state_dict

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (theirs.SGD, {"lr": 0.1}),
    "momentum": (theirs.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "nesterov": (theirs.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (theirs.Adam, {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1}),
    "amsgrad": (theirs.Adam, {"lr": torch.tensor(0.01), "betas": (0.8, 0.9), "amsgrad": True}),
    "decoupled": (theirs.Adam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adamw": (theirs.AdamW, {"lr": 0.01, "weight_decay": 0.1, "foreach": True}),
    "adamax": (theirs.Adamax, {"lr": 0.01}),
    "nadam": (theirs.NAdam, {"lr": 0.01}),
    "radam": (theirs.RAdam, {"lr": 0.01}),
    "adagrad": (theirs.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    "rmsprop": (theirs.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "adadelta": (theirs.Adadelta, {"lr": 0.5}),
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))


def walk(model: nn.Module, optimizer: torch.optim.Optimizer, grads: list[TensorDict]) -> None:
    """Steps of torch along these gradients."""
    for g in grads:
        for name, p in model.named_parameters():
            p.grad = g[tuple(name.split("."))].clone()
        optimizer.step()


def gradients(model: nn.Module, n: int) -> list[TensorDict]:
    return [from_module(model, buffers=False).apply(torch.randn_like) for _ in range(n)]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_here_and_there(name: str, groups: int):
    """Three steps of torch, three here, three of another optimiser of torch with the state that came back."""
    cls, settings = CASES[name]
    model = net()
    parts: Any = model.parameters()
    if groups == 2:
        own = dict(model.named_parameters())
        parts = [{"params": [own["0.weight"], own["2.bias"]]}]
        parts += [{"params": [p for k, p in own.items() if k not in ("0.weight", "2.bias")], "lr": 0.03}]
    optimizer = cls(parts, **settings)
    grads = gradients(model, 9)
    walk(model, optimizer, grads[:3])
    twin = copy.deepcopy((model, optimizer))
    opt, state = from_torch_optim(optimizer, model)
    params = from_module(model).apply(torch.clone)
    for g in grads[3:6]:
        params, state = opt.update(g, state, params)
    walk(*twin, grads[3:6])
    assert_close(params.to_dict(), from_module(twin[0]).to_dict(), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        for key, p in params.items(True, True):
            model.get_parameter(".".join(key)).copy_(p)
    optimizer.load_state_dict(to_torch_state_dict(state, optimizer, model))
    walk(model, optimizer, grads[6:])
    walk(*twin, grads[6:])
    assert_close(from_module(model).to_dict(), from_module(twin[0]).to_dict(), rtol=1e-5, atol=1e-6)


def test_before_the_first_step():
    model = net()
    optimizer = theirs.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    opt, state = from_torch_optim(optimizer, model)
    assert state["step"] == 0
    assert to_torch_state_dict(state, optimizer, model)["state"] == {}
    grads, params = gradients(model, 2), from_module(model).apply(torch.clone)
    for g in grads:
        params, state = opt.update(g, state, params)
    walk(model, optimizer, grads)
    assert_close(params.to_dict(), from_module(model).to_dict())


def test_parameters_in_no_group_are_frozen():
    model = net()
    optimizer = theirs.AdamW(model[0].parameters(), lr=0.1)
    opt, state = from_torch_optim(optimizer, model)
    params = from_module(model)
    new, _ = opt.update(gradients(model, 1)[0], state, params)
    assert not new["0", "bias"].equal(params["0", "bias"])
    assert new["2", "bias"] is params["2", "bias"]


def test_what_is_not_taken():
    model = net()
    with pytest.raises(tdc.UnsupportedError, match=r"expected one of SGD, Adam, .*, got LBFGS"):
        from_torch_optim(theirs.LBFGS(model.parameters()), model)
    with pytest.raises(tdc.UnsupportedError, match=r"(?s)settings that tdc.optim has, got 1 others.*at maximize: True"):
        from_torch_optim(theirs.SGD(model.parameters(), lr=0.1, maximize=True), model)
    with pytest.raises(
        tdc.StructureError, match=r"(?s)parameters of the module, got 6 others.*at group 0, parameter 0"
    ):
        from_torch_optim(theirs.SGD(model.parameters(), lr=0.1), net())
    with pytest.raises(tdc.DtypeError, match=r"expected an optimiser of torch\.optim, got list"):
        from_torch_optim([1], model)
    with pytest.raises(tdc.DtypeError, match="expected a module, got TensorDict"):
        from_torch_optim(theirs.SGD(model.parameters(), lr=0.1), from_module(model))
    optimizer = theirs.Adam(model.parameters())
    walk(model, optimizer, gradients(model, 2))
    optimizer.state[model[0].bias]["step"] += 1
    with pytest.raises(tdc.StructureError, match=r"(?s)equally many steps, got 2.*at 0.bias: 3 steps"):
        from_torch_optim(optimizer, model)
    _, state = from_torch_optim(theirs.Adam(model.parameters()), model)
    with pytest.raises(tdc.StructureError, match=r"(?s)a state of from_torch_optim, got 2 entries.*at mean.0.bias"):
        to_torch_state_dict(state.delete(("mean", "0", "bias"), ("square", "0", "bias")), optimizer, model)
