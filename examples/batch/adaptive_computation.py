"""Adaptive computation time (Graves 2016): a network that ponders as many steps for an input as this one needs.

    python examples/batch/adaptive_computation.py

The task is parity: some entries of a vector are 1 or -1, the others 0; is the number of ones odd? `forward` is written
for one vector, and loops until the chances of halting add up to one. The loss charges for steps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from three_ways import compare
from torch import Tensor, nn

import tdc

BITS, WIDTH, MOST, EPSILON, PRICE, STEPS = 4, 32, 8, 0.01, 0.005, 400


class Ponder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(1 + BITS + WIDTH, WIDTH)
        self.halt = nn.Linear(WIDTH, 1)
        self.out = nn.Linear(WIDTH, 1)

    @tdc.batch
    def forward(self, x: Tensor) -> Any:
        """The logit, the ponder cost and the number of steps of one vector."""
        state, mean = torch.zeros(WIDTH), torch.zeros(WIDTH)
        halted, left, steps = 0.0, 1.0, 0
        while halted < 1 - EPSILON and steps < MOST:
            first = torch.ones(1) if steps == 0 else torch.zeros(1)
            state = torch.tanh(self.cell(torch.cat([first, x, state])))
            chance = torch.sigmoid(self.halt(state))[0]
            steps += 1
            left = 1 - halted
            if halted + chance >= 1 - EPSILON or steps == MOST:
                chance = left
            halted = halted + chance
            mean = mean + chance * state
        return self.out(mean)[0], steps + left, steps


def draw(count: int) -> tuple[Tensor, Tensor]:
    """Vectors, and whether their number of ones is odd."""
    x = 2.0 * torch.randint(0, 2, (count, BITS)) - 1
    x = x * (torch.arange(BITS) < torch.randint(1, BITS + 1, (count, 1)))
    return x, (x == 1).sum(1) % 2 == 1


def main() -> None:
    torch.manual_seed(0)
    net = Ponder()
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    run = compare(net, net.forward.map, draw(64)[0], wrt=[*net.parameters()])
    errors: list[float] = []
    for i in range(STEPS):
        x, odd = draw(64)
        logit, cost, steps = run(x)
        error = F.binary_cross_entropy_with_logits(logit, odd.float())
        optimizer.zero_grad()
        (error + PRICE * cost.mean()).backward()
        optimizer.step()
        errors.append(error.item())
        if i % 80 == 0 or i == STEPS - 1:
            print(f"step {i:3d}  error {error:.3f}  ponder steps {steps.float().mean():.2f}")
    x, odd = draw(64)
    logit, _, steps = run(x)
    for row, answer, truth, n in zip(x[:8].tolist(), (logit > 0).tolist(), odd.tolist(), steps.tolist(), strict=False):
        bits = " ".join([f"{int(bit):2d}" for bit in row])
        print(f"[{bits}]  odd {truth!s:5}  answer {answer!s:5}  after {n} steps")
    assert sum(errors[-10:]) < 0.7 * sum(errors[:10]), "it has not learned"


if __name__ == "__main__":
    main()
