"""Training with several processes: ragged batches, an optimiser in parts, checkpoints, exact evaluation.

    torchrun --nproc-per-node 2 examples/dist/train.py --folder run
    torchrun --nproc-per-node 2 examples/dist/train.py --folder run --shard params
    torchrun --nproc-per-node 3 examples/dist/train.py --folder run --steps 80      goes on from the last checkpoint

The task: which of four numbers is the most frequent in a row of 1 to 60. Each step is that of one process with the
batches of all, so it learns the same with any number of processes. Killed and started again, it goes on with the same
losses.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import tdc
from tdc import TensorDict
from tdc.compile import train_step
from tdc.optim import adamw, chain, clip_by_global_norm

KINDS, ROWS = 4, 1200


class Counter(nn.Module):
    """Rows of small numbers to the most frequent one."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(KINDS, width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, KINDS))

    def forward(self, rows: tdc.NestedTensor) -> Tensor:
        return self.head(self.embed(rows).mean(1))


def corpus(seed: int) -> TensorDict:
    """Rows of different lengths and what they hold most of."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 61, (ROWS,), generator=generator).tolist()
    rows = [torch.randint(KINDS, (n,), generator=generator) for n in lengths]
    labels = torch.stack([torch.bincount(row, minlength=KINDS).argmax() for row in rows])
    return TensorDict({"rows": tdc.pack(rows), "label": labels}, [ROWS])


def loss(net: Counter, batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    logits = net(batch["rows"])
    return F.cross_entropy(logits, batch["label"]), {"accuracy": (logits.argmax(1) == batch["label"]).float().mean()}


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end."""
    return max((path.parent for path in folder.glob("step-*/.metadata")), default=None)


def train(args: argparse.Namespace) -> None:
    """Train to a number of steps, from the last checkpoint where there is one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    how: dict[str, Any] = {"compile": False} if args.eager else {}
    step = train_step(
        Counter(), loss, chain(clip_by_global_norm(1.0), adamw(5e-3)), process_group=dist.group.WORLD,
        shard=args.shard, donate=True, **how,
    )  # fmt: skip
    ranks: dict[str, Any] = {"rank": rank, "world_size": world}
    batches = tdc.data.loader(corpus(0), 96 // world, shuffle=True, key="rows", balance=True, drop_last=True, **ranks)
    state, found = step.init(seed=0), last_checkpoint(args.folder)
    if found is not None:
        saved = tdc.io.dcp_load(found, like=TensorDict({"state": state}), trusted=True)
        state = saved["state"]
        batches.load_state_dict(json.loads(saved["loader"]))
    done = int(state["step"])
    while done < args.steps:
        for batch in batches:
            state, metrics = step(state, batch)
            done += 1
            if rank == 0:
                print(f"step {done} loss {metrics['loss'].item():.5f}", flush=True)
            if done % args.every == 0:
                td = TensorDict({"state": state, "loader": tdc.Static(json.dumps(batches.state_dict()))})
                tdc.io.dcp_save(td, args.folder / f"step-{done:06}", overwrite=True)
            if done == args.steps:
                break
    evaluate, rows, right = step.eval(metrics=("rows",)), 0, 0.0
    for batch in tdc.data.loader(corpus(1), 100, even=False, **ranks):  # each example once
        metrics = evaluate(state, batch)  # of all ranks
        rows += int(metrics["rows"])
        right += float(metrics["accuracy"] * metrics["rows"])
    if rank == 0:
        own = sum([x.to_local().numel() for x in state.values(True, True) if hasattr(x, "to_local")])
        print(f"{rows} rows, accuracy {right / rows:.3f}, numbers of the state in parts: {own}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--shard", choices=["optimizer", "params"], help="what each process keeps a part of")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        train(args)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
