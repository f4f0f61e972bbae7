"""A compiled training loop: ragged batches, mixed lengths, a checkpoint to resume from, one graph for all of it.

    python examples/train.py

The task: which of four numbers is the most frequent in a row of 1 to 40. A row is embedded, averaged and classified;
the whole step (forward, loss, backward, clipping, AdamW) is one graph that no batch size and no length compiles anew.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tdc
from tdc import TensorDict
from tdc.compile import train_step
from tdc.optim import adamw, chain, clip_by_global_norm, cosine

KINDS, STEPS = 4, 150


class Counter(nn.Module):
    """Rows of small numbers to the most frequent one."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(KINDS, width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, KINDS))

    def forward(self, rows: tdc.NestedTensor) -> Tensor:
        return self.head(self.embed(rows).mean(1))


def draw(generator: torch.Generator) -> TensorDict:
    """A batch of 24 to 48 rows, each with its own length."""
    count = int(torch.randint(24, 49, (), generator=generator))
    lengths = torch.randint(1, 41, (count,), generator=generator).tolist()
    rows = [torch.randint(KINDS, (n,), generator=generator) for n in lengths]
    labels = torch.stack([torch.bincount(row, minlength=KINDS).argmax() for row in rows])
    return TensorDict({"rows": tdc.pack(rows), "label": labels}, [count])


def loss(net: Counter, batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    logits = net(batch["rows"])
    return F.cross_entropy(logits, batch["label"]), {"accuracy": (logits.argmax(1) == batch["label"]).float().mean()}


def main() -> None:
    torch.manual_seed(0)
    optimizer = chain(clip_by_global_norm(1.0), adamw(cosine(3e-3, STEPS, warmup=10)))
    step = train_step(Counter(), loss, optimizer, donate=True)
    accuracy = 0.0
    state, generator = step.init(seed=0), torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(STEPS):
            if i == STEPS // 2:  # stop, save, and go on from the file
                torch.save(tdc.interop.to_state_dict(state), Path(folder) / "state.pt")
                saved = torch.load(Path(folder) / "state.pt", weights_only=True)
                state = step.load_state_dict(step.init(seed=1), saved)
            state, metrics = step(state, draw(generator))
            accuracy = metrics["accuracy"].item()
            if i % 30 == 0 or i == STEPS - 1:
                print(f"step {i:3d}  loss {metrics['loss']:.3f}  accuracy {accuracy:.2f}")
    counts = step.counts
    print(f"graphs {counts.graphs}, breaks {counts.breaks}, compiles {counts.compiles}")
    assert accuracy > 0.8, "it has not learned"


if __name__ == "__main__":
    main()
