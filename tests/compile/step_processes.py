"""What one process of several does with a training step; `test_ranks` runs it."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import leave
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import tdc
from tdc import StructureError, TensorDict
from tdc.compile import train_step
from tdc.optim import (
    adamw,
    chain,
    clip_by_global_norm,
    ema,
    inject,
    lion,
    master_weights,
    partition,
    schedule_free_adamw,
    sgd,
    sharded,
)

LENGTHS = [3, 1, 0, 5, 2, 4, 6]
METRICS = ("loss", "grad_norm", "rows", "tokens")


class Net(nn.Module):
    """Statistics, a complex weight, and numbers of two precisions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        return self.linear(x) * (self.turn.abs() * self.scale).float()


def by_tokens(net: nn.Module, batch: TensorDict) -> Any:
    out = net(batch["x"])
    positive = (out.values > 0).any(-1).sum()
    return out.square().sum((1, 2)).sum(), batch["x"].lengths.sum(), {"mean": out.values.mean(), "positive": positive}


def by_rows(net: nn.Module, batch: TensorDict) -> Tensor:
    return F.cross_entropy(net(batch["x"]).sum(1), batch["label"])


def with_statistics(net: nn.Module, batch: TensorDict) -> Tensor:
    return net.norm(net(batch["x"]).sum(1)).square().sum(1).mean()  # type: ignore[operator]  # a module


def whole() -> TensorDict:
    """The batch of all ranks."""
    torch.manual_seed(0)
    rows = tdc.pack([torch.randn(n, 4) for n in LENGTHS])
    return TensorDict({"x": rows, "label": torch.arange(len(LENGTHS)) % 4}, [len(LENGTHS)])


def part(rank: int) -> TensorDict:
    """The part of a rank: other numbers of rows and tokens for each."""
    return whole()[:2] if rank == 0 else whole()[2:]


def is_like_the_whole_batch(rank: int) -> None:
    """Steps of the parts are steps of the whole batch: parameters, metrics, the norm that is clipped."""
    torch.manual_seed(rank)  # other weights on each rank: those of the first count
    own = Net()
    torch.manual_seed(0)
    first = Net()
    optimizer = chain(clip_by_global_norm(0.1), adamw(0.1))
    for loss, compiles in ((by_tokens, False), (by_rows, False), (by_tokens, True), (by_rows, True)):
        how: dict[str, Any] = {"metrics": METRICS, "compile": compiles, "backend": "aot_eager"}
        alone = train_step(first, loss, optimizer, metrics=METRICS, compile=False)
        ours = train_step(own, loss, optimizer, process_group=dist.group.WORLD, donate=compiles, **how)
        state, expected = ours.init(seed=1), alone.init(seed=1)
        for _ in range(3):
            state, metrics = ours(state, part(rank))
            expected, wanted = alone(expected, whole())
            for name, value in wanted.items():
                assert_close(metrics[name], value, msg=lambda text, name=name: f"{name}: {text}")
        for path, x in expected.items(True, True):
            assert_close(state[path], x, rtol=1e-4, atol=1e-5)
        same_everywhere(state)
        if compiles:
            assert (ours.counts.graphs, ours.counts.breaks) == (1, 0)


def buffers_agree(rank: int) -> None:
    """Statistics are the mean of those of the ranks, in micro-batches, too, and stay whole numbers where they are."""
    torch.manual_seed(0)
    step = train_step(Net(), with_statistics, adamw(0.1), process_group=dist.group.WORLD, compile=False)
    alone = train_step(Net(), with_statistics, adamw(0.1), compile=False)
    start = step.init()
    state, _ = step(start, part(rank))
    found = [alone(start, part(i))[0]["buffers", "norm", "running_mean"] for i in (0, 1)]
    assert_close(state["buffers", "norm", "running_mean"], (found[0] * 2 + found[1] * 5) / 7)
    assert state["buffers", "norm", "num_batches_tracked"] == 1
    same_everywhere(state)


def draws_differ(rank: int) -> None:
    """Ranks draw other numbers from one state."""
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1))
    step = train_step(net, lambda net, x: (net(x).sum(), {"own": net[0](x).sum()}), adamw(0.1), compile=False)
    both = train_step(net, step._step.loss.fn, adamw(0.1), compile=False, process_group=dist.group.WORLD)
    state = both.init(seed=0)
    mine, together = step(state, torch.ones(8, 64))[1]["own"], both(state, torch.ones(8, 64))[1]["own"]
    assert not torch.equal(mine, together)  # the mean of two draws
    same_everywhere(both(state, torch.ones(8, 64))[0])


def same_everywhere(state: TensorDict) -> None:
    """All ranks hold the same state, to the last digit."""
    for path, x in state.items(True, True):
        other = x.clone()
        dist.broadcast(other, 0)
        assert torch.equal(x, other), path


def nothing_to_count(rank: int) -> None:
    """A rank whose part counts nothing adds nothing."""
    torch.manual_seed(0)
    net = Net()
    step = train_step(net, by_tokens, adamw(0.1), process_group=dist.group.WORLD, compile=False, metrics=METRICS)
    batch = whole()[:2] if rank == 0 else whole()[2:3]
    state, metrics = step(step.init(), batch)
    alone = train_step(net, by_tokens, adamw(0.1), compile=False)
    expected, wanted = alone(alone.init(), whole()[:2])
    assert_close(metrics["loss"], wanted["loss"])
    assert_close(state["params", "linear", "weight"], expected["params", "linear", "weight"])
    assert (metrics["rows"], metrics["tokens"]) == (3, 4)


def other_nets_are_refused(rank: int) -> None:
    """A net of another form than that of the first rank; all ranks say so."""
    step = train_step(nn.Linear(3, 2 + rank), lambda net, x: net(x).sum(), adamw(0.1), process_group=dist.group.WORLD)
    with pytest.raises(StructureError, match=r"rank 1, params.weight: .*, on rank 0 "):
        step.init()


def run_both(rank: int, ours: Any, whole_state: Any, *, compiles: bool = False, **how: Any) -> tuple[Any, Any]:
    """States after steps of a sharded optimiser on parts, and of one that is not on the whole batch."""
    torch.manual_seed(0)
    own, first = Net(), Net()
    if rank == 0:  # whose tensors the others take over
        own.load_state_dict(first.state_dict())
    how |= {"metrics": METRICS, "compile": compiles, "backend": "aot_eager"}
    step = train_step(own, by_tokens, ours, process_group=dist.group.WORLD, **how)
    alone = train_step(first, by_tokens, whole_state, compile=False, metrics=METRICS)
    state, expected = step.init(), alone.init()
    for _ in range(4):
        (state, metrics), (expected, wanted) = step(state, part(rank)), alone(expected, whole())
        for name, value in wanted.items():
            assert_close(metrics[name].float(), value.float())
    if compiles:
        assert (step.counts.graphs, step.counts.breaks) == (1, 0)
    for path, x in expected["params"].items(True, True):
        assert_close(state["params", path], x, rtol=1e-5, atol=1e-6, msg=lambda text, path=path: f"{path}: {text}")
    same_everywhere(state["params"])
    return state, expected


def shards_are_like_the_whole(rank: int) -> None:
    """Of optimisers that treat numbers one by one each rank keeps half, and takes the step of the whole."""
    group = dist.group.WORLD
    pairs: list[tuple[Any, Any]] = [
        (sharded(adamw(0.05), group), adamw(0.05)),
        (sharded(schedule_free_adamw(0.05), group), schedule_free_adamw(0.05)),  # its state begins as the parameters
        (sharded(inject(adamw, lr=0.05), group), inject(adamw, lr=0.05)),
        (chain(clip_by_global_norm(0.1), sharded(adamw(0.05), group)), chain(clip_by_global_norm(0.1), adamw(0.05))),
        (
            partition({"*.bias": sharded(sgd(0.1, 0.9), group), "*": sharded(lion(0.01), group)}),
            partition({"*.bias": sgd(0.1, 0.9), "*": lion(0.01)}),
        ),
    ]
    for ours, whole_state in pairs:
        state, expected = run_both(rank, ours, whole_state)
        own = state["optimizer"].apply(lambda x: x.to_local() if isinstance(x, DTensor) else x)
        mine, all_of_it = tdc.nbytes(own), tdc.nbytes(expected["optimizer"])
        assert mine < 0.5 * all_of_it + 128  # what is filled up, and numbers such as the step
    run_both(rank, *pairs[-2], compiles=True)


def shards_of_half_precision(rank: int) -> None:
    """Copies in float32 are shards, too."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3).bfloat16()
    states = []
    for group in (None, dist.group.WORLD):
        inner = master_weights(adamw(1e-3))
        optimizer = inner if group is None else sharded(inner, group)
        step = train_step(
            net, lambda net, x: net(x.bfloat16()).float().square().mean(), optimizer, process_group=dist.group.WORLD,
            compile=False,
        )  # fmt: skip
        state = step.init()
        for i in range(5):
            torch.manual_seed(i)
            state, _ = step(state, torch.randn(8, 4)[rank::2])
        states.append(state)
    for path, x in states[0]["params"].items(True, True):
        assert torch.equal(states[1]["params", path], x)
    copies = states[1]["optimizer", "inner", "master", "bfloat16"]
    assert (copies.dtype, copies.shape, copies.to_local().shape) == (torch.float32, (15,), (8 - rank,))


def shards_compile_with_donation(rank: int) -> None:
    """With memory handed on, steps left out, micro-batches and an average."""
    ours = sharded(adamw(0.05), dist.group.WORLD)
    run_both(rank, ours, adamw(0.05), compiles=True, donate=True, skip_nonfinite=True, average=ema(0.9), accumulate=2)


if __name__ == "__main__":
    name, store, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=240), size, rank)
    globals()[name](rank)
    leave()
