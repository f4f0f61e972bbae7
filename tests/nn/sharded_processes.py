"""What one process of several does with modules that FSDP2 or DDP wraps; `test_expose` runs it."""

from __future__ import annotations

import sys
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import leave
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import tdc
from tdc import MaskedBatch, NestedTensor, TensorDict
from tdc.nn import expose_tensors

LENGTHS = [[3, 1, 5, 2, 4, 6], [2, 7, 1, 0, 3, 1], [1, 4, 4, 2, 2, 8]]  # of each step; every second row is a rank's


@tdc.tensorclass
class Scored:
    scores: Any
    tokens: Any


@dataclass
class Record:
    x: Any


class Encoder(nn.Module):
    """An encoder that takes and returns a container of one kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.kind = kind

    def forward(self, batch: Any) -> Any:
        x = batch.x if self.kind == "dataclass" else batch["x"] if self.kind == "TensorDict" else batch
        scores = self.head(self.encoder(self.embed(x)))
        if self.kind == "TensorDict":
            return batch.set("scores", scores)
        return {"tensorclass": Scored, "dataclass": lambda scores, _: Record(scores)}.get(
            self.kind, lambda scores, _: scores
        )(scores, x)


def rows(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(20, (n,), generator=generator) for n in LENGTHS[step]]


def batch_of(kind: str, rows: list[Tensor]) -> Any:
    x = tdc.pack(rows)
    if kind == "TensorDict":
        return TensorDict({"x": x}, [len(rows)])
    return x.to_padded() if kind == "MaskedBatch" else Record(x) if kind == "dataclass" else x


def loss_of(net: nn.Module, batch: Any, count: float) -> Tensor:
    """The sum over tokens of this process, over the tokens that a process has on average."""
    out = net(batch)
    scores = out["scores"] if isinstance(out, TensorDict) else out.x if isinstance(out, Record) else out
    tokens = batch["x"] if isinstance(batch, TensorDict) else batch.x if isinstance(batch, Record) else batch
    assert type(scores) is type(tokens)
    packed = [x.to_packed() if isinstance(x, MaskedBatch) else x for x in (scores, tokens)]
    return F.cross_entropy(packed[0].values, packed[1].values, reduction="sum") / count


def whole(x: Any) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def trains_like_one_process(rank: int, net: Any, alone: Any, kind: str = "NestedTensor") -> None:
    """Steps of the parts are those of the whole batch in one process: losses, gradients, parameters."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (net, alone)]
    for step in range(len(LENGTHS)):
        given, count = rows(step), sum(LENGTHS[step])
        loss = loss_of(net, batch_of(kind, given[rank::2]), count / 2)
        expected = loss_of(alone, batch_of(kind, given), count)
        loss.backward()
        expected.backward()
        both = loss.detach() / 2
        dist.all_reduce(both)
        assert_close(both, expected.detach(), rtol=0, atol=1e-5)
        for (name, p), q in zip(net.named_parameters(), alone.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                assert_close(whole(p.grad), q.grad, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        assert_close(whole(p), q.detach(), rtol=0, atol=1e-5)


def pair(kind: str = "NestedTensor") -> tuple[Any, Any]:
    torch.manual_seed(0)
    net = Encoder(kind)
    return net, deepcopy(net)


def sharded(net: Any, layers: bool = True, **options: Any) -> Any:
    for layer in net.encoder.layers if layers else []:
        fully_shard(layer, **options)
    return expose_tensors(fully_shard(net, **options))


def shards(rank: int) -> None:
    """Each container, with layers sharded one by one and the whole at once; parameters are shards between steps."""
    for kind in ("NestedTensor", "MaskedBatch", "TensorDict", "tensorclass", "dataclass"):
        for layers in (False, True):
            net, alone = pair(kind)
            net = sharded(net, layers)
            trains_like_one_process(rank, net, alone, kind)
            assert all([isinstance(p, DTensor) for p in net.encoder.parameters()])
            with torch.no_grad():
                a, b = [type(m(batch_of(kind, rows(0)[rank::2]))) for m in (net, alone)]
                assert a is b


def groups(rank: int) -> None:
    """Layers that are sharded as one group."""
    net, alone = pair()
    fully_shard([*net.encoder.layers, net.head])
    trains_like_one_process(rank, expose_tensors(fully_shard(net)), alone)


def compiles(rank: int) -> None:
    """Layers compiled before they are sharded are one graph for all lengths; so is a whole that is compiled later."""
    graphs: list[Any] = []

    def note(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    net, alone = pair()
    for i, layer in enumerate(net.encoder.layers):
        net.encoder.layers[i] = torch.compile(layer, backend=note, fullgraph=True)
    trains_like_one_process(rank, sharded(net), alone)
    assert len(graphs) <= 2  # layers of one form share one
    net, alone = pair()
    trains_like_one_process(rank, torch.compile(sharded(net), backend="aot_eager"), alone)


def casts(rank: int) -> None:
    """A policy of precision casts values, and no lengths: as it does with the packed values as tensors."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32, cast_forward_inputs=True)
    seen: list[Any] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            if isinstance(x, TensorDict):
                seen.extend([x["x"].dtype, x["x"].lengths.dtype, x["weight"].dtype, x["id"].dtype])
                return x.set("x", self.linear(x["x"]))
            return self.linear(x)

    torch.manual_seed(0)
    nets = [Net() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    x = tdc.pack([torch.randn(n, 4) for n in (2, 0, 3)])
    td = TensorDict({"x": x, "weight": torch.ones(3), "id": torch.arange(3)}, [3])
    with_td, with_values = [fully_shard(net, mp_policy=policy) and net for net in nets]
    expose_tensors(with_td)
    out: Any = with_td(td)
    expected = with_values(x.values)
    assert seen == [torch.bfloat16, torch.int64, torch.bfloat16, torch.int64]
    assert (out["x"].dtype, out["weight"].dtype, out["id"].dtype) == (torch.float32, torch.float32, torch.int64)
    assert isinstance(out["x"], NestedTensor)
    assert out["x"].offsets is x.offsets
    assert torch.equal(out["x"].values, expected)
    out["x"].values.square().sum().backward()
    expected.square().sum().backward()
    for p, q in zip(with_td.parameters(), with_values.parameters(), strict=True):
        assert p.grad is not None
        assert torch.equal(whole(p.grad), whole(q.grad))


def checkpoints(rank: int) -> None:
    """Layers whose activations are computed again in the backward pass."""
    net, alone = pair()
    for layer in net.encoder.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    trains_like_one_process(rank, sharded(net), alone)


def replicas(rank: int) -> None:
    """DistributedDataParallel, with a parameter that takes no part, a graph that stays the same, and compiled."""
    every: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]
    for options in every:
        for kind in ("NestedTensor", "MaskedBatch", "TensorDict", "tensorclass"):
            net, alone = pair(kind)
            if options.get("find_unused_parameters"):
                net.unused = nn.Linear(2, 2)
                alone = deepcopy(net)
            trains_like_one_process(rank, expose_tensors(DDP(net, **options)), alone, kind)
    net, alone = pair()
    compiled: Any = torch.compile(net, backend="aot_eager")
    trains_like_one_process(rank, expose_tensors(DDP(compiled, find_unused_parameters=True)), alone)


def hides_without(rank: int) -> None:
    """What torch does by itself: no gradient comes back. Once it does, `expose_tensors` can go."""
    net, _ = pair()
    net = fully_shard(net)
    loss_of(net, batch_of("NestedTensor", rows(0)[rank::2]), 1.0).backward()
    assert not any([isinstance(p, DTensor) and p.grad is not None for p in net.parameters()])
    unused = DDP(Encoder("NestedTensor"), find_unused_parameters=True)
    with pytest.raises(RuntimeError, match="mark a variable ready only once"):
        loss_of(unused, batch_of("NestedTensor", rows(0)[rank::2]), 1.0).backward()


if __name__ == "__main__":
    name, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=240), 2, rank)
    globals()[name](rank)
    leave()
