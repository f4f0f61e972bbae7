"""A small model of ragged tokens, its data, and the training loop that the loops of trainers have to equal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import tdc

WORDS, WIDTH, EXAMPLES, SIZE = 20, 8, 22, 4
STEPS = 6  # of an epoch


class Tagger(nn.Module):
    """Scores of each token by a look-up, attention among the tokens of its example, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.layer(self.embedding(tokens)))


def loss_of(model: nn.Module, batch: tdc.TensorDict) -> torch.Tensor:
    """The mean over the tokens of a batch."""
    return nn.functional.cross_entropy(model(batch["tokens"]).values, batch["tags"].values)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def corpus() -> tdc.TensorDict:
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 7, (EXAMPLES,), generator=g).tolist()
    tokens = [torch.randint(WORDS, (n,), generator=g) for n in lengths]
    return tdc.TensorDict({"tokens": tdc.pack(tokens), "tags": tdc.pack([t % 3 for t in tokens])}, [EXAMPLES])


def by_loader() -> Any:
    return tdc.data.loader(corpus(), batch_size=SIZE, shuffle=True, seed=3)


def by_dataloader() -> DataLoader[Any]:
    sampler = tdc.data.BucketSampler(corpus()["tokens"], SIZE, shuffle=True, seed=3)
    return DataLoader(tdc.data.Dataset(corpus()), batch_sampler=sampler, collate_fn=tdc.data.collate)


def by_hand(batches: Iterable[Any], every: int = 1, half: bool = False) -> tuple[list[float], Tagger]:
    """The loss of each step of two epochs; gradients of `every` batches, and of what is left at the end, are summed."""
    model, losses = Tagger(), []
    optimizer = optimizer_of(model)
    for _ in range(2):
        for n, batch in enumerate(batches, 1):
            with torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext():
                loss = loss_of(model, batch)
            (loss / every).backward()
            losses.append(loss.item())
            if n % every == 0 or n == STEPS:
                optimizer.step()
                optimizer.zero_grad()
    return losses, model
