"""Actor-critic with the whole iteration in one graph: a rollout by `tdc.scan`, returns by a scan backwards, the loss.

    python examples/actor_critic.py

The world: a point on a line that shall come to rest at 0; the action is a push. What the rollout carries is a
TensorDict of all worlds, what it yields comes back as a TensorDict with batch size (steps, worlds).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tdc
from tdc import TensorDict
from tdc.compile import counted

WORLDS, STEPS, NOISE, DISCOUNT = 64, 40, 0.5, 0.95


class ActorCritic(nn.Module):
    """Where a point is and how fast: the mean push, and the value of being there."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.push = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))
        self.value = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        return self.push(obs).squeeze(-1), self.value(obs).squeeze(-1)


def rollout(net: ActorCritic, world: TensorDict, noise: Tensor) -> TensorDict:
    """Steps of all worlds, one after another: batch size (steps, worlds)."""

    def one(world: TensorDict, now: TensorDict) -> tuple[TensorDict, TensorDict]:
        obs = torch.stack([world["x"], world["v"]], -1)
        push = net(obs)[0] + NOISE * now["noise"]
        v = 0.9 * world["v"] + 0.2 * push.clamp(-2, 2)
        x = (world["x"] + 0.2 * v).clamp(-3, 3)
        reward = -0.1 * (x.square() + 0.1 * v.square() + 0.01 * push.square())
        seen = TensorDict({"obs": obs, "push": push, "reward": reward}, world.batch_size)
        return world.replace(x=x, v=v), seen

    return tdc.scan(one, world, TensorDict({"noise": noise}, noise.shape))[1]


def returns(rewards: Tensor, last: Tensor) -> Tensor:
    """Discounted sums of rewards, from the last step back to the first."""

    def one(total: Tensor, now: TensorDict) -> tuple[Tensor, TensorDict]:
        total = now["reward"] + DISCOUNT * total
        return total, TensorDict({"total": total}, total.shape)

    return tdc.scan(one, last, TensorDict({"reward": rewards}, rewards.shape), reverse=True)[1]["total"]


def loss_of(net: ActorCritic, world: TensorDict, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and mean reward of one rollout; the world is not differentiated."""
    with torch.no_grad():
        seen = rollout(net, world, noise)
        target = returns(seen["reward"], net(seen["obs"][-1])[1])
    mean, value = net(seen["obs"])
    advantage = target - value
    gain = (advantage - advantage.mean()).detach() / advantage.detach().std()
    log_prob = -(seen["push"] - mean).square() / (2 * NOISE**2)
    return -(gain * log_prob).mean() + 0.5 * advantage.square().mean(), seen["reward"].mean()


def main() -> None:
    torch.manual_seed(0)
    net = ActorCritic()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    step = counted(lambda world, noise: loss_of(net, world, noise))
    rewards: list[float] = []
    for i in range(120):
        world = TensorDict({"x": 4 * torch.rand(WORLDS) - 2, "v": torch.zeros(WORLDS)}, [WORLDS])
        loss, reward = step(world, torch.randn(STEPS, WORLDS))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rewards.append(reward.item())
        if i % 20 == 0 or i == 119:
            print(f"iteration {i:3d}  loss {loss:7.3f}  mean reward {reward:6.3f}")
    print(f"graphs {step.counts.graphs}, breaks {step.counts.breaks}, compiles {step.counts.compiles}")
    assert sum(rewards[-10:]) > 0.7 * sum(rewards[:10]), "it has not learned"


if __name__ == "__main__":
    main()
