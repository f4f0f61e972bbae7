"""Training steps of several processes, each with its part of a batch: single checks, and many cases in one start."""

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

from tdc import DtypeError, StructureError, TensorDict, UnsupportedError
from tdc.compile import train_step
from tdc.optim import chain, clip_by_global_norm, sgd, sharded

SCRIPT = Path(__file__).with_name("step_processes.py")


def run(name: str, folder: Path, world: int = 2) -> list[str]:
    """What each of several processes says of a check."""
    return run_processes(SCRIPT, lambda rank: [name, str(folder / "meeting"), str(rank), str(world)], world)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "name",
    [
        "is_like_the_whole_batch", "buffers_agree", "draws_differ", "nothing_to_count", "other_nets_are_refused",
        "shards_are_like_the_whole", "shards_of_half_precision", "shards_compile_with_donation",
    ],
)  # fmt: skip
def test_each_rank_has_the_step_of_the_whole_batch(name: str, tmp_path: Path) -> None:
    assert run(name, tmp_path) == ["", ""]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def loss(net: nn.Module, x: torch.Tensor) -> Any:
    return net(x).square().sum(), len(x)


@pytest.mark.parametrize("backend", [None, pytest.param("eager", marks=pytest.mark.slow)])
def test_a_group_of_one_changes_nothing(group: Any, backend: str | None) -> None:
    net, x = nn.Linear(3, 2), torch.randn(5, 3)
    how: dict[str, Any] = {"compile": False} if backend is None else {"backend": backend}
    metrics: Any = ("loss", "rows", "tokens", "grad_norm")
    ours = train_step(net, loss, sgd(0.1), process_group=group, accumulate=2, metrics=metrics, **how)
    alone = train_step(net, loss, sgd(0.1), accumulate=2, metrics=metrics, compile=False)
    for a, b in zip(ours(ours.init(), x), alone(alone.init(), x), strict=True):
        for (path, found), (other, expected) in zip(a.items(True, True), b.items(True, True), strict=True):
            assert path == other
            torch.testing.assert_close(found, expected)


def test_what_a_group_cannot_have_is_refused(group: Any) -> None:
    net = nn.Linear(3, 2)
    step = train_step(net, loss, sgd(0.1), process_group=group, compile=False)
    members: Any = torch.stack([step.init(), step.init()])  # type: ignore[list-item]  # a stack of TensorDicts is one
    with pytest.raises(UnsupportedError, match="no vmap around a step with process_group="):
        step.vmap()(members, torch.randn(5, 3))
    with pytest.raises(UnsupportedError, match=r"at the net: DistributedDataParallel\nhint: .*process_group="):
        train_step(nn.parallel.DistributedDataParallel(net), loss, sgd(0.1))
    with pytest.raises(DtypeError, match="expected a process group or a DeviceMesh of one dim, got str"):
        train_step(net, loss, sgd(0.1), process_group="gloo")


def test_what_fully_shard_wraps_is_refused_with_what_to_write(group: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    fully_shard(net[1])
    with pytest.raises(UnsupportedError, match=r"at 1: FSDPModule\nhint: leave fully_shard out: .*sharded\(adamw"):
        train_step(net, loss, sgd(0.1), process_group=group)


def test_a_sharded_optimizer_needs_the_group_of_the_step(group: Any) -> None:
    net, optimizer = nn.Linear(3, 2), chain(clip_by_global_norm(1.0), sharded(sgd(0.1, 0.9), group))
    with pytest.raises(StructureError, match=r"expected the process group of the sharded optimizer, got none"):
        train_step(net, loss, optimizer)
    step = train_step(net, loss, optimizer, process_group=group, backend="eager", metrics=("loss", "lr"))
    alone = train_step(net, loss, chain(clip_by_global_norm(1.0), sgd(0.1, 0.9)), compile=False, metrics=("lr",))
    state, expected, x = step.init(), alone.init(), torch.randn(5, 3)
    for _ in range(3):
        (state, metrics), (expected, known) = step(state, x), alone(expected, x)
        assert metrics["lr"] == known["lr"]
    for path, p in expected["params"].items(True, True):
        torch.testing.assert_close(state["params", path], p, rtol=0, atol=1e-6)


def test_without_processes_a_group_is_none() -> None:
    step = train_step(nn.Linear(3, 2), loss, sgd(0.1), process_group=None, compile=False)
    assert isinstance(step.init(), TensorDict)


# -- many cases in one start of processes


CASES = Path(__file__).with_name("rank_processes.py")
EAGER = [
    "collectives_in_losses", "dtypes_that_travel", "dtypes_of_parts_and_messages", "bytes_of_parts",
    "collectives_in_losses_in_float16", "collectives_in_losses_in_parts", "empty_ranks", "evaluation_of_all",
    "leaves_spread_over_ranks", "parts_of_the_optimizer", "parts_of_the_parameters", "errors_of_one_rank",
]  # fmt: skip
GRAPHS = ["collectives_in_graphs", "parts_in_graphs", "buckets_go_while_the_backward_does"]


def run_cases(names: list[str], folder: Path, world: int) -> list[str]:
    """What each of several processes writes to stderr."""
    return run_processes(CASES, lambda rank: [",".join(names), f"{folder}/meeting", str(rank), str(world)], world)


@pytest.mark.slow
@pytest.mark.parametrize(("names", "world"), [(GRAPHS, 2), (EAGER, 4)], ids=["graphs", "eager"])
def test_ranks_take_the_step_of_the_whole_batch(names: list[str], world: int, tmp_path: Path) -> None:
    assert run_cases(names, tmp_path, world) == [""] * world
