"""What one process of several does with a checkpoint; `test_dcp` runs it."""

from __future__ import annotations

import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from processes import leave
from stores import same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tdc
from tdc import StructureError, TensorDict
from tdc.io import dcp_load, dcp_save

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


if __name__ == "__main__":
    word, rank, world, meeting, path = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(world), timeout=timedelta(seconds=120)
    )
    if word == "save":
        dcp_save(spread(whole()), path)
    else:
        {"load": load, "differ": differ}[word](path)
    leave()
