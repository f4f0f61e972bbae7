"""torchrl 0.14: steps of a rollout as ragged episodes, on which one compiled step trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tdc
from tdc.compile import train_step
from tdc.optim import sgd

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]  # torchrl warns of itself
pytest.importorskip("torchrl")
envs: Any = pytest.importorskip("torchrl.envs", exc_type=ImportError)
GAMMA = 0.9


def rollout(seed: int, count: int) -> Any:
    """Steps of random actions, of several episodes; of the package tensordict."""
    env = envs.GymEnv("CartPole-v1", categorical_action_encoding=True)
    env.set_seed(seed)
    torch.manual_seed(seed)
    return env.rollout(count, break_when_any_done=False)


def episodes(steps: Any) -> tdc.TensorDict:
    td = tdc.as_tensordict(steps, batch_dims=1)
    ends = td["next", "done"].squeeze(-1).nonzero().squeeze(-1) + 1
    offsets = torch.cat([ends.new_zeros(1), ends, ends.new_tensor([len(td)])]).unique()
    rows = tdc.NestedTensor(td["observation"], offsets)
    return tdc.TensorDict({"seen": rows, "reward": rows.with_values(td["next", "reward"].squeeze(-1))}, [len(rows)])


def loss(net: nn.Module, batch: Any) -> Any:
    """Squared differences from rewards to go, each discounted from the step on."""
    reward = batch["reward"]
    powers = GAMMA ** (torch.ones_like(reward).cumsum(1) - 1)
    to_go = (reward * powers).flip(1).cumsum(1).flip(1) / powers
    terms = (net(batch["seen"]).squeeze(-1) - to_go).square()
    return terms.values.sum(), len(terms.values)


def by_loops(net: nn.Module, batch: tdc.TensorDict) -> torch.Tensor:
    total, count = torch.zeros(()), 0
    for seen, reward in zip(batch["seen"].unbind(), batch["reward"].unbind(), strict=True):
        for i in range(len(reward)):
            to_go = sum([float(r) * GAMMA**k for k, r in enumerate(reward[i:])])
            total = total + (net(seen[i]).squeeze() - to_go).square()
            count += 1
    return total / count


def test_steps_come_over_without_a_copy():
    steps = rollout(0, 50)
    td = tdc.as_tensordict(steps, batch_dims=1)
    assert td.batch_size == (50,)
    assert td["next", "observation"].data_ptr() == steps["next", "observation"].data_ptr()


def test_episodes_end_where_the_environment_says():
    steps = rollout(1, 100)
    found = episodes(steps)["seen"]
    rows, begin = [], 0
    for i, done in enumerate([*steps["next", "done"].flatten().tolist()[:-1], True]):
        if done:
            rows.append(steps["observation"][begin : i + 1])
            begin = i + 1
    assert len(found) == len(rows) > 2
    for a, b in zip(found.unbind(), rows, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_steps_of_training_are_those_of_loops_over_episodes(backend: str | None):
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    step = train_step(net, loss, sgd(0.01), compile=backend is not None, backend=backend)
    state, optimizer = step.init(), torch.optim.SGD(net.parameters(), 0.01)
    for seed, count in ((0, 60), (1, 45), (2, 80)):
        batch = episodes(rollout(seed, count))
        state, metrics = step(state, batch)
        optimizer.zero_grad()
        expected = by_loops(net, batch)
        expected.backward()
        optimizer.step()
        assert_close(metrics["loss"], expected.detach(), rtol=1e-4, atol=1e-5)
        assert_close(state["params", "weight"], net.weight.detach(), rtol=1e-4, atol=1e-5)
    if backend:
        assert step.counts.compiles == 1
