"""A tree-LSTM (Tai et al. 2015) along parse trees, trained to say whether an expression is true.

    python examples/batch/tree_lstm.py

A tree is its nodes in post-order: the token of each, and where its left and right child stand (-1 at a leaf). `forward`
is written for one tree and reads the children's states from what it wrote before; each tree has its own size and form.
"""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from three_ways import compare
from torch import Tensor, nn

import tdc

TOKENS, WIDTH, OPERATORS, STEPS = ("false", "true", "and", "or"), 24, 6, 40
MOST = 2 * OPERATORS + 1  # nodes
Tree = list[list[int]]  # token, left, right of each node


class TreeLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(TOKENS), WIDTH)
        self.leaf = nn.Linear(WIDTH, 3 * WIDTH)
        self.node = nn.Linear(3 * WIDTH, 5 * WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    @tdc.batch
    def forward(self, nodes: Tensor) -> Tensor:
        """The logit of one tree."""
        memory = torch.zeros(MOST, 2 * WIDTH)  # state and cell of each node
        for i, (token, left, right) in enumerate(nodes):
            x = self.embedding(token)
            if left < 0:
                write, show, new = self.leaf(x).chunk(3)
                cell = write.sigmoid() * new.tanh()
            else:
                states, cells = memory[torch.stack([left, right])].chunk(2, dim=1)
                write, show, new, *keep = self.node(torch.cat([x, states.flatten()])).chunk(5)
                cell = write.sigmoid() * new.tanh() + (torch.stack(keep).sigmoid() * cells).sum(0)
            memory[i] = torch.cat([show.sigmoid() * cell.tanh(), cell])
        return self.out(memory[nodes.size(0) - 1, :WIDTH])[0]


def grow(tree: Tree, operators: int) -> bool:
    """Add an expression with so many operators, whose root comes last; whether it is true."""
    if operators == 0:
        truth = random.random() < 0.5
        tree.append([int(truth), -1, -1])
        return truth
    share = random.randint(0, operators - 1)
    a = grow(tree, share)
    left = len(tree) - 1
    b = grow(tree, operators - 1 - share)
    token = random.randint(2, 3)
    tree.append([token, left, len(tree) - 1])
    return (a and b) if token == 2 else (a or b)


def draw(count: int) -> tuple[tdc.NestedTensor, Tensor]:
    """Trees as a ragged batch, and whether they are true."""
    trees: list[Tree] = [[] for _ in range(count)]
    truths = [grow(tree, random.randint(0, OPERATORS)) for tree in trees]
    return tdc.pack([torch.tensor(tree) for tree in trees]), torch.tensor(truths)


def main() -> None:
    torch.manual_seed(0)
    random.seed(0)
    net = TreeLSTM()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    run = compare(net, net, draw(32)[0], wrt=[*net.parameters()])
    for i in range(STEPS):
        trees, truths = draw(32)
        logits = run(trees)
        loss = F.binary_cross_entropy_with_logits(logits, truths.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = ((logits > 0) == truths).float().mean()
        if i % 10 == 0 or i == STEPS - 1:
            print(f"step {i:3d}  loss {loss:.3f}  right {right:.2f}  nodes {len(trees.values)}")
    assert right > 0.8, "it has not learned"


if __name__ == "__main__":
    main()
