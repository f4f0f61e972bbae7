"""Newton's method for Kepler's equation, damped, of each example until it has converged.

    python examples/batch/newton.py

Where is a planet at a given time? `x - e * sin(x) = m` has no closed form. Near e = 1 a whole step may lead astray, so
it is halved until the residual falls: a while in a while, and each example makes as many rounds of both as it needs.
The gradient through all rounds is that of the implicit function theorem.
"""

from __future__ import annotations

from typing import Any

import torch
from three_ways import compare
from torch import Tensor

import tdc

NEAR = 1e-10


def residual(x: Tensor, m: Tensor, e: Tensor) -> Tensor:
    return x - e * torch.sin(x) - m


@tdc.batch
def anomaly(m: Tensor, e: Tensor) -> Any:
    """The root of one example, its Newton steps, and how often these were halved."""
    x, steps, halvings = m, 0, 0
    while abs(residual(x, m, e)) > NEAR:
        step = residual(x, m, e) / (1 - e * torch.cos(x))
        while abs(residual(x - step, m, e)) > abs(residual(x, m, e)):
            step = step / 2
            halvings += 1
        x = x - step
        steps += 1
    x = x - residual(x, m, e) / (1 - e * torch.cos(x))  # from the root, where the gradient is that of the theorem
    return x, steps, halvings


def main() -> None:
    torch.manual_seed(0)
    m = (3 * torch.rand(256, dtype=torch.double)).requires_grad_()
    e = (1 - 0.9 * torch.rand(256, dtype=torch.double) ** 3).requires_grad_()
    run = compare(anomaly, anomaly.map, m, e, wrt=(m, e))
    x, steps, halvings = run(m, e)
    for i in range(6):
        print(f"m {m[i]:.3f}  e {e[i]:.4f}  x {x[i]:.6f}  steps {steps[i]}  halvings {halvings[i]}")
    print(f"steps {steps.min()} to {steps.max()}, halvings {halvings.min()} to {halvings.max()}")
    slope = 1 - e * torch.cos(x)  # the residual's derivative to x; to m it is -1, to e it is -sin(x)
    by_theorem = 1 / slope, torch.sin(x) / slope
    torch.testing.assert_close(torch.autograd.grad(x.sum(), (m, e)), by_theorem)
    assert halvings.max() > 0, "no step was halved"


if __name__ == "__main__":
    main()
