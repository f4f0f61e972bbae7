"""Every number of every optimiser and transform as part of the state, another one for each member of an ensemble."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tdc import TensorDict, optim
from tdc.optim import inject

NUMBERS: dict[str, tuple[str, dict[str, float], dict[str, Any]]] = {
    "sgd": ("sgd", {"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.2}, {}),
    "nesterov": ("sgd", {"lr": 0.1, "momentum": 0.8}, {"nesterov": True}),
    "adam": ("adam", {"lr": 0.1, "eps": 0.01, "weight_decay": 0.2}, {"amsgrad": True}),
    "adamw": ("adamw", {"lr": 0.1, "eps": 0.01, "weight_decay": 0.2}, {}),
    "adamax": ("adamax", {"lr": 0.1, "eps": 0.01, "weight_decay": 0.2}, {}),
    "nadam": ("nadam", {"lr": 0.1, "eps": 0.01, "weight_decay": 0.2, "momentum_decay": 0.1}, {}),
    "radam": ("radam", {"lr": 0.1, "eps": 0.01, "weight_decay": 0.2}, {"decoupled_weight_decay": True}),
    "adagrad": ("adagrad", {"lr": 0.1, "lr_decay": 0.2, "weight_decay": 0.2, "eps": 0.01}, {}),
    "rmsprop": ("rmsprop", {"lr": 0.1, "alpha": 0.8, "eps": 0.01, "weight_decay": 0.2, "momentum": 0.5}, {}),
    "adadelta": ("adadelta", {"lr": 0.5, "rho": 0.8, "eps": 0.01, "weight_decay": 0.2}, {}),
    "adafactor": ("adafactor", {"lr": 0.1, "d": 3.0, "weight_decay": 0.2, "beta2_decay": -0.8}, {}),
    "muon": ("muon", {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.2, "eps": 1e-3}, {}),
    "lion": ("lion", {"lr": 0.1, "weight_decay": 0.2}, {}),
    "lamb": ("lamb", {"lr": 0.1, "eps": 0.01, "weight_decay": 0.2}, {}),
    "schedule_free_sgd": ("schedule_free_sgd", {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.2}, {"warmup": 2}),
    "schedule_free_adamw": ("schedule_free_adamw", {"lr": 0.1, "eps": 0.01, "weight_decay": 0.2}, {}),
    "clip_by_global_norm": ("clip_by_global_norm", {"max_norm": 0.5}, {}),
    "clip_by_norm": ("clip_by_norm", {"max_norm": 0.5}, {}),
    "clip_by_value": ("clip_by_value", {"limit": 0.5}, {}),
    "decay": ("decay", {"weight": 0.5}, {}),
    "ema": ("ema", {"decay": 0.8}, {}),
    "lookahead": ("lookahead", {"alpha": 0.8}, {"k": 2}),
}
PARTS = [1.0, 0.5]  # of the numbers, for each of two members


def like() -> TensorDict:
    return TensorDict({"w": torch.randn(2, 3, 4), "b": torch.randn(2, 3), "s": torch.randn(2)}, [2])


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_members(name: str):
    function, numbers, settings = NUMBERS[name]
    make = getattr(optim, function)
    opt = inject(make, **{k: torch.tensor([x * part for part in PARTS]) for k, x in numbers.items()}, **settings)
    params, grads = like(), [like() for _ in range(4)]
    if name == "muon":
        params, grads = params.select("w"), [g.select("w") for g in grads]
    digits = {"rtol": 0.0, "atol": 0.02} if name == "muon" else {"rtol": 1e-5, "atol": 1e-6}  # it rounds to bfloat16
    for update in (opt.update, torch.vmap(opt.update)):
        state, new = opt.init(params), params
        for g in grads:
            new, state = update(g, state, new)
        for i, part in enumerate(PARTS):
            one = make(**{k: x * part for k, x in numbers.items()}, **settings)
            want, own = params[i], one.init(params[i])
            for g in grads:
                want, own = one.update(g[i], own, want)
            assert_close(new[i].to_dict(), want.to_dict(), **digits)
            assert_close(state[i]["inner"].to_dict(), own.to_dict(), **digits)
