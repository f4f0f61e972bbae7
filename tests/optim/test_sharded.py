"""Optimisers whose state is shared out: what is refused, and the arithmetic of parts. `tests/compile/test_ranks` has
the steps of several processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from tdc import DtypeError, ShapeError, StructureError, TensorDict, UnsupportedError, vmap
from tdc.compile import train_step
from tdc.compile.shards import cut, part_of
from tdc.optim import (
    adafactor,
    adam,
    adamw,
    chain,
    clip_by_global_norm,
    clip_by_norm,
    decay,
    lamb,
    masked,
    multi_steps,
    muon,
    schedule_free_adamw,
    sgd,
    sharded,
    skip_nonfinite,
)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def params() -> TensorDict:
    leaves = {"w": torch.randn(3, 2), "b": torch.zeros(0), "c": torch.randn(2, dtype=torch.complex64)}
    return TensorDict({**leaves, "d": torch.randn((), dtype=torch.float64), "ids": torch.arange(3)})


def grads_of(params: TensorDict) -> TensorDict:
    return TensorDict({p: torch.randn_like(params[p]) for p in ("c", "d", "b", "w")})  # in another order


@pytest.mark.parametrize(
    "make", [lambda: adamw(0.1), lambda: chain(decay(0.1), adam(0.1)), lambda: multi_steps(sgd(0.1, 0.9), 2)]
)
def test_a_group_of_one_changes_nothing(group: Any, make: Any):
    ours, alone = sharded(make(), group), make()
    found = expected = params()
    state, own = ours.init(found), alone.init(expected)
    for _ in range(4):
        grads = grads_of(found)
        found, state = ours.update(grads, state, found)
        expected, own = alone.update(grads, own, expected)
    assert found.keys() == expected.keys()
    for path, x in expected.items(True, True):
        assert_close(found[path], x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 20])
def test_parts_put_together_are_the_whole(count: int):
    tensors = [torch.randn(3, 2), torch.randn(0), torch.randn(()), torch.randn(7)]
    parts = [part_of(tensors, rank, count) for rank in range(count)]
    sizes = [len(x) for x in torch.arange(14).chunk(count)]  # as Shard(0) of a DTensor
    assert [len(part) for part in parts] == [*sizes, *[0] * (count - len(sizes))]
    for found, x in zip(cut(torch.cat(parts), tensors), tensors, strict=True):
        assert torch.equal(found, x)


@pytest.mark.parametrize(
    "optimizer",
    [
        chain(clip_by_global_norm(1.0), adamw()), chain(clip_by_norm(1.0), adamw()), lamb(), muon(), adafactor(),
        skip_nonfinite(adamw()), masked(adamw(), "*.w"),
    ],
)  # fmt: skip
def test_what_looks_at_more_than_one_number_is_refused(group: Any, optimizer: Any):
    with pytest.raises(StructureError, match=r"expected an optimizer that treats each number by itself.*\nhint: put"):
        sharded(optimizer, group)


def test_what_cannot_be_sharded_is_refused(group: Any):
    opt = sharded(adamw(), group)
    with pytest.raises(StructureError, match="that treats each number by itself"):
        sharded(opt, group)
    with pytest.raises(ShapeError, match="expected parameters without batch dims, got 1 of them"):
        opt.init(TensorDict({"w": torch.ones(3, 2)}, [3]))
    whole = TensorDict({"w": torch.ones(3, 2), "b": torch.ones(3)})
    state = opt.init(whole)
    with pytest.raises(StructureError, match=r"expected a gradient for each parameter, got 1 without one\nat b\n"):
        opt.update(whole.exclude("b"), state, whole)
    with pytest.raises(StructureError, match="expected a state of these params"):
        opt.update(whole.exclude("b"), state, whole.exclude("b"))
    members = TensorDict({"w": torch.ones(4, 3)}, [4])
    single = opt.init(members[0])
    with pytest.raises(UnsupportedError, match="expected no vmap around processes"):
        vmap(lambda p: opt.update(p, single, p)[0])(members)


def test_evaluation_with_the_average_of_one_part_is_refused(group: Any):
    """Found by trying: its one vector for each dtype was taken for the parameters."""
    net = torch.nn.Linear(3, 2)
    optimizer = sharded(schedule_free_adamw(0.1), group)
    step = train_step(net, lambda net, x: net(x).sum(), optimizer, process_group=group, compile=False)
    state, _ = step(step.init(), torch.ones(4, 3))
    words = r"expected an average of the parameters, got 1 of something else\nat float32\nhint: a sharded optimizer"
    with pytest.raises(StructureError, match=words):
        step.eval(averaged=True)(state, torch.ones(4, 3))


@pytest.mark.parametrize("wrong", [None, "gloo", 3, torch.zeros(2), [1]])
def test_other_kinds_are_refused(group: Any, wrong: Any):
    with pytest.raises(DtypeError, match=r"expected an? Optimizer"):
        sharded(wrong, group)
    with pytest.raises(DtypeError, match="expected a process group"):
        sharded(adamw(), wrong)
