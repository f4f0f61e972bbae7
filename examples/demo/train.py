"""The demo's training job: `tdc.compile.train_step` on batches of docstrings.

Forward, loss, backward and AdamW are one graph, compiled once for all lengths and batch sizes. Ragged and padded
training differ in the batch and the model's forward only: same weights, same seed, same optimiser, so the same losses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.demo.data import Corpus, batches, tokens
from examples.demo.model import Build
from examples.demo.records import StepRecord
from tdc.compile.counts import Counts, peak_bytes
from tdc.compile.dynamic import dynamic
from tdc.compile.train_step import TrainStep
from tdc.tensordict.tensordict import TensorDict

BATCH = 32


@dataclass(frozen=True, slots=True)
class Run:
    """What a training run leaves: its last state, a record for each step, peak bytes of one, and what compiling did."""

    state: TensorDict
    steps: tuple[StepRecord, ...]
    peak: int
    counts: Counts


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


def train(
    step: TrainStep, state: TensorDict, plan: list[tuple[int, ...]], corpus: Corpus, build: Build, device: str,
    show: Callable[[StepRecord], None],
) -> Run:  # fmt: skip
    """Take one step for each batch of the plan; measure the last one's memory."""
    records: list[StepRecord] = []
    for indices, batch in zip(plan, loader(corpus, plan, build, device), strict=True):
        begin = time.perf_counter()
        state, metrics = step(state, batch)
        loss, accuracy = torch.stack([metrics["loss"], metrics["accuracy"]]).tolist()  # one wait for the device
        count = sum(len(corpus.texts[i]) for i in indices)
        records.append(StepRecord(len(records) + 1, loss, accuracy, count, time.perf_counter() - begin))
        show(records[-1])
    counts = step.counts
    (last,) = loader(corpus, plan[-1:], build, device)
    return Run(state, tuple(records), peak_bytes(step, state, last), counts)


def predict(model: Callable[[TensorDict], Tensor], corpus: Corpus, indices: tuple[int, ...], build: Build) -> Tensor:
    """Logits for the texts at `indices`, on CPU, in batches of neighbours in length."""
    order = sorted(indices, key=lambda i: len(corpus.texts[i]))
    plan = [tuple(order[i : i + BATCH]) for i in range(0, len(order), BATCH)]
    with torch.no_grad():
        found = torch.cat([model(batch) for batch in loader(corpus, plan, build, "cpu")])
    positions = {index: position for position, index in enumerate(order)}
    return found[torch.tensor([positions[i] for i in indices])]
