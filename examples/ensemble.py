"""An ensemble of eight networks trained in one graph, whose disagreement says where it does not know.

    python examples/ensemble.py

Data lie in two stretches of a line; between and beyond them there are none. All members see the same data, begin
elsewhere, and are trained by one compiled step under `tdc.vmap`. Their spread is small where data are and large where
there are none. A member that has not improved for a while is stopped by a mask: nothing is compiled anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import tdc
from tdc import TensorDict, ensemble, stack_modules
from tdc.compile import counted
from tdc.optim import adamw

MEMBERS, STEPS = 8, 600


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def data(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, 1, generator=generator)
    x = torch.where(torch.rand(count, 1, generator=generator) < 0.5, x - 2, x + 1)  # in [-2, -1] or [1, 2]
    return x, torch.sin(3 * x) + 0.05 * torch.randn(count, 1, generator=generator)


def main() -> None:
    torch.manual_seed(0)
    nets, opt, generator = [make() for _ in range(MEMBERS)], adamw(1e-2), torch.Generator().manual_seed(0)

    def one(alive: Tensor, params: TensorDict, state: TensorDict, x: Tensor, y: Tensor) -> tuple[Any, ...]:
        def loss_of(params: TensorDict) -> Tensor:
            return (tdc.functional_call(nets[0], params, (x,)) - y).square().mean()

        loss, grads = tdc.value_and_grad(loss_of)(params)
        new, after = opt.update(grads, state, params)
        where: Any = torch.where
        return where(alive, new, params), where(alive, after, state), loss

    step = counted(tdc.vmap(one, in_dims=(0, 0, 0, None, None)))
    params = stack_modules(nets)
    state, alive = opt.init(params), torch.ones(MEMBERS, dtype=torch.bool)
    best, waited = torch.full((MEMBERS,), float("inf")), torch.zeros(MEMBERS)
    for i in range(STEPS):
        params, state, losses = step(alive, params, state, *data(256, generator))
        waited = torch.where(losses < 0.99 * best, 0, waited + 1)
        best = torch.minimum(best, losses)
        alive = alive & (waited < 100)
        if i % 80 == 0 or i == STEPS - 1:
            print(f"step {i:3d}  losses {losses.min():.4f} to {losses.max():.4f}  members at work {int(alive.sum())}")
    x = torch.linspace(-3, 3, 13).unsqueeze(1)
    answers = ensemble(nets[0], params)(x).squeeze(-1)
    spread = answers.std(0)
    for place, mean, width in zip(x[:, 0].tolist(), answers.mean(0).tolist(), spread.tolist(), strict=True):
        print(f"x {place:5.1f}  {mean:6.2f} ± {width:.2f}  {'#' * round(20 * width)}")
    known, unknown = spread[(x[:, 0].abs() >= 1) & (x[:, 0].abs() <= 2)].mean(), spread[x[:, 0].abs() == 3].mean()
    print(f"graphs {step.counts.graphs}, breaks {step.counts.breaks}, compiles {step.counts.compiles}")
    assert known < 0.5 * unknown, "it is as sure where it knows nothing"


if __name__ == "__main__":
    main()
