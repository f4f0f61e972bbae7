"""The demo's training job: `tdc.compile.train_step` on batches of docstrings.

Forward, loss, backward and AdamW are one graph, compiled once for all lengths and batch sizes. Ragged and padded
training differ in the batch and the model's forward only: same weights, same seed, same optimiser, so the same losses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.demo.data import Corpus, batches, tokens
from examples.demo.model import Build
from examples.demo.records import StepRecord
from tdc.compile.counts import Counts, peak_bytes
from tdc.compile.dynamic import dynamic
from tdc.compile.train_step import train_step
from tdc.optim import adamw
from tdc.tensordict.tensordict import TensorDict

BATCH = 32


def loss(model: nn.Module, batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch, and how many of its texts are classified right."""
    logits = model(batch)
    right = logits.detach().argmax(1) == batch["label"]
    return F.cross_entropy(logits, batch["label"]), {"accuracy": right.float().mean()}


def schedule(corpus: Corpus, train: tuple[int, ...], seed: int) -> Iterator[tuple[int, ...]]:
    """Batches of indices, epoch after epoch, without end."""
    epoch = 0
    while True:
        yield from batches(corpus, train, BATCH, seed=seed, epoch=epoch)
        epoch += 1


def loader(corpus: Corpus, plan: Iterable[tuple[int, ...]], build: Build, device: str) -> Iterator[TensorDict]:
    """The batches of a plan, marked so that their sizes may vary."""
    for indices in plan:
        yield dynamic(build(tokens(corpus, indices), [corpus.labels[i] for i in indices], device))


class Training:
    """A model that learns: one compiled function of state and batch, and a record of each step.

    Ragged and padded training take turns, so that what slows the machine slows both.
    """

    def __init__(self, name: str, model: nn.Module, build: Build, corpus: Corpus, device: str) -> None:
        self.name, self.build, self.corpus, self.device = name, build, corpus, device
        self.step = train_step(model.to(device), loss, adamw(2e-3))
        self.state = self.step.init()
        self.records: list[StepRecord] = []

    def take(self, indices: tuple[int, ...]) -> StepRecord:
        """One step on the texts at `indices`."""
        (batch,) = loader(self.corpus, [indices], self.build, self.device)
        begin, compiles = time.perf_counter(), self.step.counts.compiles
        self.state, metrics = self.step(self.state, batch)
        loss, accuracy = torch.stack([metrics["loss"], metrics["accuracy"]]).tolist()  # one wait for the device
        seconds, compiled = time.perf_counter() - begin, self.step.counts.compiles > compiles
        count = sum(len(self.corpus.texts[i]) for i in indices)
        self.records.append(StepRecord(len(self.records) + 1, loss, accuracy, count, seconds, compiled))
        return self.records[-1]

    @property
    def counts(self) -> Counts:
        """Counts of graphs, breaks and compiles."""
        return replace(self.step.counts, name=f"{self.name} training step")

    def peak(self, indices: tuple[int, ...]) -> int:
        """Bytes at the peak of a step on the texts at `indices`."""
        (batch,) = loader(self.corpus, [indices], self.build, self.device)
        return peak_bytes(self.step, self.state, batch)


def predict(model: Callable[[TensorDict], Tensor], corpus: Corpus, indices: tuple[int, ...], build: Build) -> Tensor:
    """Logits for the texts at `indices`, on CPU, in batches of neighbours in length."""
    order = sorted(indices, key=lambda i: len(corpus.texts[i]))
    plan = [tuple(order[i : i + BATCH]) for i in range(0, len(order), BATCH)]
    with torch.no_grad():
        found = torch.cat([model(batch) for batch in loader(corpus, plan, build, "cpu")])
    positions = {index: position for position, index in enumerate(order)}
    return found[torch.tensor([positions[i] for i in indices])]
