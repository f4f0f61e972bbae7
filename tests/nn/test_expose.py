"""Modules that FSDP2 or DistributedDataParallel wraps, with batches of tdc in and out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tdc
from tdc import DtypeError, StructureError, TensorDict
from tdc.nn import expose_tensors

SCRIPT = Path(__file__).with_name("sharded_processes.py")


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", ["shards", "groups", "compiles", "casts", "checkpoints", "replicas", "hides_without"])
def test_processes_train_like_one(name: str, tmp_path: Path):
    run_processes(SCRIPT, lambda rank: [name, str(tmp_path / "meeting"), str(rank)], 2)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Keeps(nn.Linear):
    """A layer that writes into an argument."""

    def forward(self, input: Any, seen: Any = None) -> Any:
        if seen is not None:
            seen.append(input)
        return super().forward(input)


@pytest.mark.parametrize("wrap", [fully_shard, nn.parallel.DistributedDataParallel], ids=["FSDP2", "DDP"])
def test_a_module_gets_and_returns_what_it_would_without_hooks(group: None, wrap: Any):
    net = expose_tensors(wrap(Keeps(4, 2)))
    x, seen = tdc.pack([torch.randn(n, 4) for n in (2, 0, 3)]), []
    out = net(x, seen=seen)
    assert type(out) is tdc.NestedTensor
    assert (out.shape, out.offsets is x.offsets, len(seen)) == ((3, -1, 2), True, 1)
    out.values.sum().backward()
    assert all([p.grad is not None for p in net.parameters()])
    assert net(x.values).shape == (5, 2)
    assert (out + net(x)).structure is x.structure


@pytest.mark.parametrize("batch", ["empty", "no rows", "NaN in padding"])
def test_batches_at_the_edge(group: None, batch: str):
    net = nn.Linear(4, 2)
    expose_tensors(fully_shard(net))
    rows = [torch.randn(n, 4) for n in (2, 0, 3)]
    x: Any = {
        "empty": lambda: tdc.pack([rows[1], rows[1]]),
        "no rows": lambda: tdc.pack(rows)[:0],
        "NaN in padding": lambda: tdc.pack(rows).to_padded(fill=torch.nan),
    }[batch]()
    net(x).sum().backward()
    assert all([isinstance(p.grad, DTensor) and p.grad.full_tensor().isfinite().all() for p in net.parameters()])


def test_twice_is_once(group: None):
    net = nn.Linear(4, 2)
    expose_tensors(expose_tensors(fully_shard(net)))
    net(TensorDict({"x": torch.ones(3, 4)}, [3])["x"]).sum().backward()
    assert net(tdc.pack([torch.ones(2, 4)])).shape == (1, -1, 2)


def test_a_module_that_nothing_wraps_is_refused():
    with pytest.raises(StructureError, match="expected a module that FSDP2 or DistributedDataParallel wraps, got Lin"):
        expose_tensors(nn.Linear(2, 2))


@pytest.mark.parametrize("wrong", [[1, 2], {"a": 1}, None, torch.zeros(2), "abc", 3, nn.Linear])
def test_what_is_no_module_is_refused(wrong: Any):
    with pytest.raises(DtypeError, match="expected a module, got"):
        expose_tensors(wrong)
