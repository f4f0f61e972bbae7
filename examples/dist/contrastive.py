"""Two towers with a contrastive loss over all ranks: ragged texts, and other numbers of rows on each rank.

torchrun --nproc-per-node 2 examples/dist/contrastive.py

Each query is to find its own text among the texts of all ranks. `all_gather` joins the vectors of all ranks in the
graph of the loss. Its gradient is that of the sum of all ranks' losses, so the gradients of the ranks are summed, and
divided once, by the number of all rows. The numbers are those that one process computes with everything.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import tdc
from tdc import NestedTensor, TensorDict

WORDS, WIDTH, STEPS = 200, 16, 30


class Tower(nn.Module):
    """A ragged batch of words to one vector for each text: (B, -1) -> (B, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, words: NestedTensor) -> Tensor:
        return F.normalize(self.head(self.embed(words).mean(1)), dim=-1)


def pairs(count: int, seed: int) -> TensorDict:
    """Texts, and queries of some of their words."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (count,), generator=generator).tolist()
    texts = [torch.randint(WORDS, (n,), generator=generator) for n in lengths]
    return TensorDict({"text": tdc.pack(texts), "query": tdc.pack([t[: len(t) // 2 + 1] for t in texts])}, [count])


def loss(params: TensorDict, query: Tower, text: Tower, batch: TensorDict, rank: int) -> Tensor:
    """The sum of the losses of this rank's rows."""
    asked = tdc.functional_call(query, params["query"], (batch["query"],))
    own = tdc.functional_call(text, params["text"], (batch["text"],))
    answers, counts = tdc.dist.all_gather(own, counts=True)
    labels = torch.arange(asked.shape[0]) + counts[:rank].sum()
    return F.cross_entropy(asked @ answers.T / 0.1, labels, reduction="sum")


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same parameters on all ranks
    towers = Tower(), Tower()
    params = TensorDict({"query": tdc.from_module(towers[0]), "text": tdc.from_module(towers[1])}).detach()
    optimizer = tdc.optim.adamw(0.05)
    state = optimizer.init(params)
    step = torch.compile(tdc.value_and_grad(loss), fullgraph=True)
    rows = 0
    for i in range(STEPS):
        everything = pairs(12 * world, i)
        batch = everything[rank::world][: 12 - 3 * rank - i % 4]  # ranks have other numbers of rows
        batch, _ = tdc.dist.balance(batch, batch["text"].lengths)  # and now as many words each
        value, grads = step(params, *towers, batch, rank)
        total = tdc.dist.all_reduce(TensorDict({"loss": value.detach(), "rows": torch.tensor(float(len(batch)))}))
        grads = tdc.dist.all_reduce(grads) / total["rows"]
        params, state = optimizer.update(grads, state, params)
        rows += len(batch)
        if rank == 0 and i % 10 in (0, 9):
            print(f"step {i:2d}  loss {total['loss'] / total['rows']:.3f}  rows {int(total['rows'])}", flush=True)
    same = tdc.dist.all_gather(params, dim=None)
    agree = all(torch.equal(x[0], x[r]) for x in same.values(True, True) for r in range(world))
    print(f"rank {rank}: {rows} rows, the same parameters on all ranks: {agree}", flush=True)
    dist.barrier()
    os._exit(0)  # without the destructors of torch 2.13, which now and then find a running thread of gloo


if __name__ == "__main__":
    main()
