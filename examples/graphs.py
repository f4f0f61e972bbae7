"""Attention over the neighbours of each point, of graphs of all sizes in one batch and one compiled step.

    python examples/graphs.py

A graph is a cloud of points with charges. Points are neighbours where they are closer than a radius: a pair map says
so, and `nonzero` lists the edges. Each point is to tell the largest charge among its neighbours, which attention finds.
The layer is that of graph attention networks (GAT, arXiv 1710.10903); every graph is as if it were alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tdc
from tdc import NestedTensor, TensorDict
from tdc.compile import train_step
from tdc.optim import adamw

RADIUS, STEPS, GRAPHS = 0.3, 150, 24


def neighbours(points: NestedTensor) -> NestedTensor:
    """Which points of each graph are closer than the radius, themselves among them: (B, -1, 2) -> (B, -1, -1)."""
    apart = points.unsqueeze(1) - points.unsqueeze(2)
    return apart.square().sum(-1) < RADIUS**2


class Attention(nn.Module):
    """Several heads, each a mean of the neighbours of a point, weighted by how they score together."""

    def __init__(self, width: int, out: int, heads: int) -> None:
        super().__init__()
        self.values = nn.ModuleList([nn.Linear(width, out // heads) for _ in range(heads)])
        self.scores = nn.ModuleList([nn.Linear(out // heads, 2) for _ in range(heads)])

    def forward(self, x: Any, near: Any) -> Any:
        found = []
        for value, score in zip(self.values, self.scores, strict=True):
            h = value(x)  # (B, -1, D)
            mine, other = score(h).unbind(-1)
            scores = F.leaky_relu(mine.unsqueeze(2) + other.unsqueeze(1), 0.2)  # (B, -1, -1)
            weights: Any = torch.where(near, scores, float("-inf"))
            found.append(torch.matmul(weights.softmax(2), h))
        return torch.cat(found, -1)


class Network(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width))
        self.attention = Attention(width, width, 2)
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, points: Any, charges: Any) -> Any:
        x = self.embed(charges.unsqueeze(-1))
        both = torch.cat([x, self.attention(x, neighbours(points))], -1)
        return self.head(both).squeeze(-1)  # (B, -1)


def graphs(count: int, generator: torch.Generator) -> TensorDict:
    sizes = torch.randint(2, 30, (count,), generator=generator).tolist()
    points = tdc.pack([torch.rand(n, 2, generator=generator) for n in sizes])
    charges = points.with_values(torch.rand(sum(sizes), generator=generator) * 2 - 1)
    largest: Any = torch.where(neighbours(points), charges.unsqueeze(1), float("-inf"))  # type: ignore[call-overload]  # torch's stub knows tensors
    return TensorDict({"points": points, "charges": charges, "largest": largest.amax(2)}, [count])


def loss(model: Any, batch: TensorDict) -> Tensor:
    functional: Any = F  # whose stub knows tensors
    return functional.mse_loss(model(batch["points"], batch["charges"]), batch["largest"])


def main() -> None:
    torch.manual_seed(0)
    generator, net = torch.Generator().manual_seed(0), Network()
    edges: Any = neighbours(graphs(3, generator)["points"]).nonzero()  # type: ignore[attr-defined]  # of a rule
    print("edges", edges.lengths.tolist(), "from", tuple(edges[0][0].tolist()))
    step = train_step(net, loss, adamw(1e-2))
    state, losses = step.init(), []
    for i in range(STEPS):
        state, metrics = step(state, graphs(GRAPHS, generator))
        losses.append(metrics["loss"])
        if i % 50 == 0 or i == STEPS - 1:
            print(f"step {i:3d}  loss {torch.stack(losses[-20:]).mean():.4f}")
    test, counts = graphs(40, generator), step.counts

    def trained(batch: TensorDict) -> Any:
        return tdc.functional_call(net, state["params"], (batch["points"], batch["charges"]))

    alone = torch.cat([trained(test[i : i + 1]).values for i in range(40)])
    print("as each graph alone:", torch.allclose(trained(test).values, alone, atol=1e-5))
    print(f"graphs {counts.graphs}, breaks {counts.breaks}, compiles {counts.compiles}")
    spread = test["largest"].values.var()
    assert torch.stack(losses[-20:]).mean() < 0.25 * spread, "it has not learned"


if __name__ == "__main__":
    main()
