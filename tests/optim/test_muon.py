"""Muon: the numbers of `torch.optim.Muon`, which makes its steps in bfloat16; matrices only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

import tdc
from tdc import TensorDict
from tdc.compile import counted
from tdc.optim import adamw, muon, partition

SHAPES = {"wide": (3, 5), "tall": (6, 2), "square": (4, 4)}
SETTINGS: list[dict[str, Any]] = [
    {"lr": 0.02},
    {"lr": 0.02, "nesterov": False, "momentum": 0.8, "weight_decay": 0.0, "ns_steps": 3},
    {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"},
]


def like(batch: tuple[int, ...] = ()) -> TensorDict:
    return TensorDict({k: torch.randn(*batch, *s) for k, s in SHAPES.items()}, batch)


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_numbers_are_those_of_torch(settings: dict[str, Any], backend: str | None):
    params = like()
    theirs = {k: p.clone() for k, p in params.items()}
    reference, mine = torch.optim.Muon(list(theirs.values()), **settings), muon(**settings)
    state, update = mine.init(params), mine.update
    update = update if backend is None else counted(update, backend=backend)
    for _ in range(50):
        grads = params.apply(torch.randn_like)
        for k, p in theirs.items():
            p.grad = grads[k].clone()
        reference.step()
        params, state = update(grads, state, params)
    assert_close(params.to_dict(), theirs, rtol=0, atol=1e-6 if backend is None else 5e-3)
    assert not isinstance(update, counted) or update.counts.compiles == 1


@pytest.mark.parametrize("how", ["vmap", "stacked", pytest.param("compiled vmap", marks=pytest.mark.slow)])
def test_ensembles_are_their_members(how: str):
    params, grads, opt = like((3,)), like((3,)), muon(torch.tensor([0.1, 0.01, 0.0]) if how == "stacked" else 0.1)
    rates = [0.1, 0.01, 0.0] if how == "stacked" else [0.1] * 3
    update = opt.update if how == "stacked" else torch.vmap(opt.update)
    update = counted(update, backend="aot_eager") if how == "compiled vmap" else update
    new, _ = update(grads, opt.init(params), params)
    for i, rate in enumerate(rates):
        one = muon(rate)
        want, _ = one.update(grads[i], one.init(params[i]), params[i])
        assert_close(new[i].to_dict(), want.to_dict(), rtol=0, atol=1e-2)  # bfloat16 in another order


def test_other_leaves_are_for_another():
    params = TensorDict({"w": torch.randn(3, 4), "b": torch.randn(3), "scale": torch.tensor(1.0)})
    with pytest.raises(tdc.ShapeError, match=r"(?s)expected matrices, got 2 others.*at b: .*at scale: .*partition"):
        muon().init(params)
    alone = params.select("w")
    with pytest.raises(tdc.ShapeError, match="expected matrices, got 1 others"):
        muon().update(params.select("b"), muon().init(alone), params)
    opt = partition({lambda key, p: p.ndim == 2: muon(0.1), "*": adamw(0.1)})
    update = counted(opt.update, backend="aot_eager")
    grads = params.apply(torch.randn_like)
    new, state = update(grads, opt.init(params), params)
    assert state["0"].keys() == ("momentum", "step")
    assert_close(new["w"], muon(0.1).update(grads.select("w"), muon().init(alone), alone)[0]["w"], rtol=0, atol=2e-3)
    rest = params.select("b", "scale")
    want, _ = adamw(0.1).update(grads.select("b", "scale"), adamw().init(rest), rest)
    assert_close(new.select("b", "scale").to_dict(), want.to_dict())
    with pytest.raises(tdc.DtypeError, match="expected real parameters, got 1 complex"):
        muon().init(TensorDict({"w": torch.randn(2, 2, dtype=torch.complex64)}))
