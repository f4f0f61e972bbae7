"""A replay buffer on disk: filled, mapped to returns, sampled, learned from.

Written from docs/start and docs/replay.md.

    python examples/paths/replay.py

A walker on a line gets 1 at its right end and 0 elsewhere. Episodes end there or after 40 moves, so they differ in
length. A table of values learns from samples of the buffer what a move is worth.
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
from tdc.optim import adamw

PLACES, ROOM, LONGEST, GAMMA = 6, 256, 40, 0.9
SCHEMA = {
    "place": ((LONGEST,), torch.int64),
    "move": ((LONGEST,), torch.int64),
    "reward": ((LONGEST,), torch.float32),
    "length": ((), torch.int64),
}


def episode(generator: torch.Generator) -> dict[str, Tensor]:
    """A walk of random moves, with room to spare behind its end."""
    places, moves, rewards, place = [], [], [], 0
    while len(places) < LONGEST and place < PLACES - 1:
        move = int(torch.randint(2, (), generator=generator))
        places.append(place)
        moves.append(move)
        place = max(0, place + 2 * move - 1)
        rewards.append(float(place == PLACES - 1))
    rows = {"place": places, "move": moves, "reward": rewards}
    filled = {key: F.pad(torch.tensor(row), (0, LONGEST - len(row))) for key, row in rows.items()}
    return {**filled, "length": torch.tensor(len(places))}


@tdc.batch
def returns(rewards: Tensor) -> Tensor:
    """Return of each move, later rewards counting less; code for one episode."""
    total, found = rewards.new_zeros(()), []
    for reward in rewards.flip(0):
        total = reward + GAMMA * total
        found.append(total)
    return torch.stack(found).flip(0)


def learnable(part: TensorDict) -> TensorDict:
    """Episodes as ragged rows, with the return of each move."""
    rows = {key: tdc.from_padded(part[key], lengths=part["length"]).to_packed() for key in ("place", "move", "reward")}
    return TensorDict({**rows, "return": returns(rows["reward"])}, part.batch_size)


def loss(values: nn.Embedding, batch: TensorDict) -> Tensor:
    found = values(batch["place"])  # (B, -1, 2): of both moves
    taken = found.gather(2, batch["move"].unsqueeze(2)).squeeze(2)
    return F.mse_loss(taken, batch["return"])


def main() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        buffer = tdc.io.memmap_empty(SCHEMA, Path(folder) / "replay", [ROOM])
        for n in range(300):  # the oldest are written over
            tdc.copy_(buffer, episode(generator), index=n % ROOM)
        stored = tdc.io.load(Path(folder) / "replay")
        print("episodes", len(stored), "lengths", int(stored["length"].min()), "to", int(stored["length"].max()))

        tdc.io.save(tdc.map(learnable, stored, chunksize=64), Path(folder) / "learnable")
        batches = tdc.data.loader(Path(folder) / "learnable", batch_size=32, shuffle=True, seed=0)
        values = nn.Embedding(PLACES, 2)
        step = train_step(values, loss, adamw(0.05))
        state = step.init()
        for _ in range(20):
            for batch in batches:
                state, _ = step(state, batch)
        table = step.load_into(values, state).weight.detach()
    better = (table[:-1, 1] > table[:-1, 0]).tolist()
    print("right is better at", better, "compiles", step.counts.compiles)
    assert all(better), "it has not learned"


if __name__ == "__main__":
    main()
