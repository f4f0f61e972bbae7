"""Balance a pole on a cart: an environment for one world, with falls, a time limit and resets, run for many.

    python examples/batch/environment.py

`step` and `rollout` are written for one world and one policy. Episodes end when the pole falls, the cart leaves the
track or time is up; then the world begins anew. A batch has a policy for each world, and search keeps the best.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from three_ways import compare
from torch import Tensor

import tdc

POLICIES, STEPS, LIMIT, EPISODES, ROUNDS = 32, 100, 50, 12, 6
GRAVITY, CART, POLE, LENGTH, FORCE, TIME = 9.8, 1.0, 0.1, 0.5, 10.0, 0.04


@tdc.batch
def step(world: Tensor, age: Any, right: Tensor) -> Any:
    """The world after a push, the reward, and whether the episode has ended."""
    x, v, angle, spin = world
    force = FORCE if right else -FORCE
    sin, cos = torch.sin(angle), torch.cos(angle)
    push = (force + POLE * LENGTH * spin**2 * sin) / (CART + POLE)
    turn = (GRAVITY * sin - cos * push) / (LENGTH * (4 / 3 - POLE * cos**2 / (CART + POLE)))
    speed = push - POLE * LENGTH * turn * cos / (CART + POLE)
    after = torch.stack([x + TIME * v, v + TIME * speed, angle + TIME * spin, spin + TIME * turn])
    fell = abs(after[2]) > math.pi / 15 or abs(after[0]) > 2.4
    reward = 0.0 if fell else 1.0
    return after, reward, fell or age + 1 >= LIMIT


@tdc.batch
def rollout(policy: Tensor, starts: Tensor) -> Any:
    """The return of each whole episode of a world, and how many there were."""
    returns = torch.zeros(EPISODES)
    clock, episode, age, total, world = 0, 0, 0, 0.0, starts[0]
    while clock < STEPS and episode < EPISODES:
        world, reward, done = step(world, age, policy @ world > 0)
        total, age, clock = total + reward, age + 1, clock + 1
        if done:
            returns[episode] = total
            episode += 1
            age, total = 0, 0.0
            if episode < EPISODES:
                world = starts[episode]
    return returns, episode


def main() -> None:
    torch.manual_seed(0)
    policies = torch.randn(POLICIES, 4)
    starts = 0.1 * torch.rand(POLICIES, EPISODES, 4) - 0.05
    run = compare(rollout, rollout.map, policies, starts)
    first = 0.0
    for i in range(ROUNDS):
        returns, episodes = run(policies, starts)
        means = returns.sum(1) / episodes
        best = policies[means.argmax()]
        print(f"round {i}  mean return {means.mean():5.1f}  best {means.max():5.1f}  episodes {episodes.tolist()[:8]}")
        first = first or means.mean().item()
        policies = best + 0.5 * torch.randn(POLICIES, 4) / (i + 1)
    assert means.mean() > 1.5 * first, "search found nothing better"


if __name__ == "__main__":
    main()
