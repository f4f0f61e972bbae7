"""One of several processes that gather ragged batches through accelerate; it prints what went otherwise."""

from __future__ import annotations

import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from processes import leave
from torch.utils.data import DataLoader

import tdc

N = 7
TD = tdc.TensorDict({"tokens": tdc.pack([torch.full((n + 1,), n) for n in range(N)]), "id": torch.arange(N)}, [N])


def prepared(accelerator: Accelerator) -> DataLoader:
    return accelerator.prepare(DataLoader(tdc.data.Dataset(TD), batch_size=2, collate_fn=tdc.data.collate))


def gathered(accelerator: Accelerator) -> None:
    """All examples of all processes, in order; what fills up the last round is dropped."""
    tokens, rows = [], []
    for batch in prepared(accelerator):
        tokens += accelerator.gather_for_metrics(batch["tokens"])
        rows += accelerator.gather_for_metrics(batch)
    assert tdc.pack(tokens).tolist() == TD["tokens"].tolist()
    assert torch.equal(tdc.data.ragged_stack(rows)["id"], TD["id"])


def refused(accelerator: Accelerator) -> None:
    """accelerate names the container where it takes only tensors."""
    name = {tdc.TensorDict: "TensorDict", tdc.NestedTensor: "NestedTensor", tdc.MaskedBatch: "MaskedBatch"}
    for batch in (TD, TD["tokens"], TD["tokens"].to_padded()):
        for function in (accelerator.gather, accelerator.reduce, accelerator.pad_across_processes):
            with pytest.raises(TypeError, match=f"Unsupported types .*{name[type(batch)]}"):
                function(batch)
    values = TD["tokens"].values[: 3 + accelerator.process_index]  # of other sizes: padded, then gathered
    assert accelerator.gather(accelerator.pad_across_processes(values)).shape == (4 * accelerator.num_processes,)


def shared_out(accelerator: Accelerator) -> None:
    """`tdc.data.loader` shares out examples itself; `prepare` hands it through."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    loader = tdc.data.loader(TD, batch_size=2, rank=rank, world_size=world_size, device=accelerator.device)
    assert accelerator.prepare(loader) is loader
    mine = torch.cat([batch["id"] for batch in loader])
    assert set(accelerator.gather(mine).tolist()) == set(range(N))


def dispatched(_: Accelerator) -> None:
    """`dispatch_batches` joins tensors in the first process."""
    config = DataLoaderConfiguration(dispatch_batches=True)
    with pytest.raises(TypeError, match="TensorDict"):
        next(iter(prepared(Accelerator(cpu=True, dataloader_config=config))))


if __name__ == "__main__":
    rank, world, meeting = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(world), timeout=timedelta(seconds=120)
    )
    accelerator = Accelerator(cpu=True)
    for check in (gathered, refused, shared_out):
        check(accelerator)
    if rank == "0":
        dispatched(accelerator)
    leave()
