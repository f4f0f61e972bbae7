"""What one process of several does with a checkpoint; `test_dcp` runs it."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import leave
from stores import same
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tdc
from tdc import DistError, FormatError, StructureError, TensorDict
from tdc.compile import train_step
from tdc.io import dcp_load, dcp_save
from tdc.optim import adamw, sharded

SHARDED = {"weight": 0, ("net", "deep"): 1, "half": 0}


def whole() -> TensorDict:
    """The same in every process: tied leaves, sizes that no number of processes divides, ragged leaves, a node."""
    torch.manual_seed(0)
    weight, text = torch.rand(7, 5), tdc.pack([torch.rand(n) for n in (2, 0, 3)])
    return TensorDict(
        {
            "weight": weight, "tied": weight, "net": {"deep": torch.rand(4, 3), "bias": torch.arange(3)},
            "text": text, "labels": text * 2, "half": torch.rand(5).bfloat16(), "name": tdc.Static("net"),
        }
    )  # fmt: skip


def spread(td: TensorDict) -> TensorDict:
    """Some leaves as DTensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shards = {key: distribute_tensor(td[key], mesh, [Shard(dim)]) for key, dim in SHARDED.items()}
    everywhere = distribute_tensor(td["net", "bias"], mesh, [Replicate()])
    return td.update(shards).update({"tied": shards["weight"], "net": {"bias": everywhere}})


def gathered(td: TensorDict) -> TensorDict:
    """With whole tensors in place of DTensors."""
    return td.apply(lambda x: x.full_tensor() if isinstance(x, DTensor) else x)


def load(path: str) -> None:
    """Whole in each process, spread as `like` says, and some of it."""
    td = whole()
    back = dcp_load(path, trusted=True)
    assert same(back, td)
    assert back["weight"] is back["tied"]
    like = spread(td.apply(torch.zeros_like))
    back = dcp_load(path, like=like, trusted=True)
    for key, dim in SHARDED.items():
        assert back[key].placements == (Shard(dim),)
        assert torch.equal(back[key].full_tensor(), td[key])
    assert back["weight"] is back["tied"]
    assert back["text"].structure is back["labels"].structure
    assert same(gathered(back), td)
    assert not like["weight"].full_tensor().any()
    part = dcp_load(path, [("net", "deep")], like=like, trusted=True)
    assert part.keys(True, True) == (("net", "deep"),)
    assert torch.equal(part["net", "deep"].full_tensor(), td["net", "deep"])


def differ(path: str) -> None:
    """Every process learns that the forms differ."""
    with pytest.raises(StructureError, match="expected TensorDicts of one form in all processes"):
        dcp_save(TensorDict({"x": torch.zeros(3 + dist.get_rank())}), path)


def values_differ(path: str) -> None:
    """Leaves that are no DTensors are compared; those that differ are named in every process."""
    rank = dist.get_rank()
    td = whole().update({"a": torch.arange(3), "b": torch.tensor(float(rank)), "net": {"c": torch.ones(2) * rank}})
    with pytest.raises(StructureError, match=r"expected the same values in all processes, got 2 that differ\n"
                       r"at b: process 1.*\nat net.c: process 1.*\nhint: .*DTensor"):
        dcp_save(spread(td), path)
    same_by_mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dcp_save(spread(whole()), path, group=same_by_mesh)
    assert same(dcp_load(path, trusted=True, group=same_by_mesh), whole())


def killed(path: str) -> None:
    """A process that is killed while it writes is an error of the other at once; the checkpoint before it loads."""
    before = Path(path).with_name("before")
    dcp_save(spread(whole()), before)
    if dist.get_rank() == 1:
        setattr(FileSystemWriter, "write_data", lambda *args: os._exit(0))  # noqa: B010  # as a kill does
    begin = time.monotonic()
    with pytest.raises(DistError, match=r"io.dcp_save: expected all ranks to take part, got an exchange that failed"):
        dcp_save(spread(whole()), path)
    assert time.monotonic() - begin < 30  # of 120
    with pytest.raises(FormatError, match="got a folder without"):
        dcp_load(path, trusted=True)


def taken(steps: int, step: Any, state: TensorDict, rank: int = 0, world: int = 1) -> TensorDict:
    """Training goes on by so many steps; each has a batch of its own."""
    for _ in range(steps):
        torch.manual_seed(int(state["step"]))
        x = torch.randn(12, 4)
        state, _ = step(state, x[rank::world])
    return state


def train_in_buckets(path: str) -> None:
    """The same where the step shards the optimiser itself, in one vector for each of some bytes."""
    train(path, shard="optimizer", bucket=64)


def train_in_parts(path: str) -> None:
    """The same where a step keeps parameters in parts, too."""
    train(path, shard="params", bucket=64)


def train(path: str, **how: Any) -> None:
    """Two steps from the last checkpoint, whatever wrote it; the state is that of one process from the start."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))

    def loss(net: Any, x: torch.Tensor) -> torch.Tensor:
        return (net(x) - x.sum(1, keepdim=True)).square().mean()

    optimizer = adamw(0.05) if how else sharded(adamw(0.05), group)
    step = train_step(net, loss, optimizer, process_group=group, compile=False, **how)
    state = step.init(seed=1)
    found = sorted(Path(path).parent.glob("step-*"))
    if found:
        state = dcp_load(found[-1], like=state, trusted=True)
    state = taken(2, step, state, rank, world)
    n = int(state["step"])
    means: Any = state["optimizer", "mean"] if how else state["optimizer", "inner", "mean"]
    assert all([x.to_local().shape[0] <= -(-x.shape[0] // world) for x in means._leaves.values()])
    assert means.keys() == (("float32", "float32_1") if how else ("float32",))
    dcp_save(state, Path(path).parent / f"step-{n:02}")
    again = step.load_state_dict(step.init(seed=2), tdc.interop.to_state_dict(state))
    for key, x in state.items(True, True):
        assert torch.equal(*[y.to_local() if isinstance(y, DTensor) else y for y in (x, again[key])])
    alone = train_step(net, loss, adamw(0.05), compile=False)
    expected = taken(n, alone, alone.init(seed=1))
    for p, x in zip(step.load_into(net, state).parameters(), expected["params"].values(True, True), strict=True):
        torch.testing.assert_close(p.detach(), x, rtol=1e-5, atol=1e-6)
    ours = torch.cat([x.reshape(-1) for x in expected["optimizer", "mean"]._leaves.values()])
    torch.testing.assert_close(
        torch.cat([x.full_tensor() for x in means._leaves.values()]), ours, rtol=1e-5, atol=1e-6
    )


if __name__ == "__main__":
    word, rank, world, meeting, path = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(world), timeout=timedelta(seconds=120)
    )
    if word == "save":
        dcp_save(spread(whole()), path)
    else:
        {
            "load": load, "differ": differ, "values_differ": values_differ, "train": train,
            "train_in_buckets": train_in_buckets, "train_in_parts": train_in_parts, "killed": killed,
        }[word](path)  # fmt: skip
    leave(dead=word == "killed")
