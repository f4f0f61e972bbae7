"""Optimisers that torch does not have, as their papers write them, in plain torch: what tests compare with."""

from __future__ import annotations

from typing import Any, ClassVar

import torch


class Written(torch.optim.Optimizer):
    """An optimiser whose `one(p, g, state, settings)` changes one parameter in place."""

    defaults_of: ClassVar[dict[str, Any]] = {}

    def __init__(self, params: Any, lr: float, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, **self.defaults_of, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, p.grad, self.state[p], group)

    def one(self, p: torch.Tensor, g: torch.Tensor, state: Any, s: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(Written):
    """Chen et al. 2023, algorithm 2."""

    defaults_of: ClassVar = {"betas": (0.9, 0.99), "weight_decay": 0.0}

    def one(self, p: torch.Tensor, g: torch.Tensor, state: Any, s: dict[str, Any]) -> None:
        (beta1, beta2), m = s["betas"], state.setdefault("m", torch.zeros_like(p))
        c = beta1 * m + (1 - beta1) * g
        p.copy_(p - s["lr"] * (torch.sign(c) + s["weight_decay"] * p))
        m.copy_(beta2 * m + (1 - beta2) * g)


class Lamb(Written):
    """You et al. 2020, algorithm 2."""

    defaults_of: ClassVar = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0}

    def one(self, p: torch.Tensor, g: torch.Tensor, state: Any, s: dict[str, Any]) -> None:
        beta1, beta2 = s["betas"]
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
        v = state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g * g
        r = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + s["eps"])
        u = r + s["weight_decay"] * p
        ratio = p.norm() / u.norm() if p.norm() > 0 and u.norm() > 0 else 1.0
        p.copy_(p - s["lr"] * ratio * u)


class ScheduleFreeSGD(Written):
    """Defazio et al. 2024, equations 2 to 4; weights are squared rates, as in its algorithm 1."""

    defaults_of: ClassVar = {"momentum": 0.9, "weight_decay": 0.0, "warmup": 0}

    def one(self, p: torch.Tensor, g: torch.Tensor, state: Any, s: dict[str, Any]) -> None:
        t = state["t"] = state.get("t", 0) + 1
        z, x = state.setdefault("z", p.clone()), state.setdefault("x", p.clone())
        rate = s["lr"] * (min(1.0, t / s["warmup"]) if s["warmup"] else 1.0)
        z = state["z"] = z - rate * self.direction(p, g, state, s, t)
        total = state["total"] = state.get("total", 0.0) + rate**2
        c = rate**2 / total if total else 0.0
        x = state["x"] = (1 - c) * x + c * z
        beta = self.beta(s)
        p.copy_((1 - beta) * z + beta * x)

    def beta(self, s: dict[str, Any]) -> float:
        return s["momentum"]

    def direction(self, p: torch.Tensor, g: torch.Tensor, state: Any, s: dict[str, Any], t: int) -> torch.Tensor:
        return g + s["weight_decay"] * p


class ScheduleFreeAdamW(ScheduleFreeSGD):
    """Defazio et al. 2024, algorithm 1."""

    defaults_of: ClassVar = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "warmup": 0}

    def beta(self, s: dict[str, Any]) -> float:
        return s["betas"][0]

    def direction(self, p: torch.Tensor, g: torch.Tensor, state: Any, s: dict[str, Any], t: int) -> torch.Tensor:
        beta2 = s["betas"][1]
        v = state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g * g
        return g / ((v / (1 - beta2**t)).sqrt() + s["eps"]) + s["weight_decay"] * p
