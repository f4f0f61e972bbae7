"""What one process of several does with collectives of structures; `test_dist` runs it."""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_samples import KINDS, WITHOUT_ROWS, Point, Scene, numbers, plain, ragged, texts
from processes import leave

import tdc
from tdc import (
    DistError,
    DtypeError,
    KeyPathError,
    ShapeError,
    StructureError,
    TensorDict,
    UnsupportedError,
)
from tdc.testing import assert_close


def same(found: Any, expected: Any) -> None:
    """One class, one form, equal numbers."""
    assert type(found) is type(expected), (type(found), type(expected))
    assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def rows_of(rank: int) -> int:
    return 3 + rank


def each_kind(run: Any) -> None:
    """Run a check for every kind of structure; all that fail are named."""
    failed: list[str] = []
    for kind, make in KINDS.items():
        try:
            run(kind, make)
        except DistError:
            raise
        except BaseException:
            failed.append(f"{kind}: {traceback.format_exc(limit=-LINES)}")
    assert not failed, "\n".join(failed)


LINES = 6  # of a traceback
CLASSES = (Point, Scene)


def sends_every_kind(rank: int, world: int) -> None:
    def run(kind: str, make: Any) -> None:
        if rank == 0:
            tdc.dist.send(make(0, 3), 1)
            tdc.dist.send(make(0, 5), 1, tag=3)
        elif rank == 1:
            same(tdc.dist.recv(0, classes=CLASSES), make(0, 3))
            same(tdc.dist.recv(0, tag=3, classes=CLASSES), make(0, 5))

    each_kind(run)


def begins_to_send_and_receive(rank: int, world: int) -> None:
    """Both send first, large messages, and the receives of one rank come in their order."""
    if rank < 2:
        large = TensorDict({"x": numbers(rank, 300, 1000), "t": texts(rank, 3)})
        sends = [tdc.dist.isend(large, 1 - rank), tdc.dist.isend(ragged(rank, 2), 1 - rank)]
        receives = [tdc.dist.irecv(1 - rank), tdc.dist.irecv(1 - rank)]
        sends.append(tdc.dist.isend(plain(rank, 2), 1 - rank))
        assert [s.wait() for s in sends[:2]] == [None, None]
        same(tdc.dist.recv(1 - rank), plain(1 - rank, 2))
        same(receives[1].wait(20), ragged(1 - rank, 2))
        same(receives[0].wait()["x"], numbers(1 - rank, 300, 1000))
        same(receives[0].wait()["t"], texts(1 - rank, 3))
    dist.barrier()


def ties_stay_ties(rank: int, world: int) -> None:
    make = KINDS["scalars"]
    given = make(1, 0) if rank == 1 else None
    found = tdc.dist.broadcast(given, 1)
    assert found["w"] is found["net", "tied"] or found["w"].data_ptr() == found["net", "tied"].data_ptr()
    found = tdc.dist.broadcast(ragged(0, 3) if rank == 0 else None)
    assert found["text"].structure.offsets.data_ptr() == found["mask"].structure.offsets.data_ptr()
    assert (found["text"].values * found["mask"].values[:, None]).shape[1] == 2


def broadcasts_every_kind(rank: int, world: int) -> None:
    def run(kind: str, make: Any) -> None:
        last = world - 1
        same(tdc.dist.broadcast(make(last, 4) if rank == last else None, last, classes=CLASSES), make(last, 4))
        same(tdc.dist.broadcast(make(rank, 3 + rank)), make(0, 3))

    each_kind(run)
    same(tdc.dist.broadcast(ragged(0, 0)), ragged(0, 0))


def scatters_every_kind(rank: int, world: int) -> None:
    def run(kind: str, make: Any) -> None:
        parts = [make(r, rows_of(r)) for r in range(world)] if rank == 0 else None
        same(tdc.dist.scatter(parts, classes=CLASSES), make(rank, rows_of(rank)))

    each_kind(run)


def gathers_every_kind(rank: int, world: int) -> None:
    def run(kind: str, make: Any) -> None:
        everything = [make(r, rows_of(r)) for r in range(world)]
        mine = everything[rank]
        if kind in WITHOUT_ROWS:
            same(tdc.dist.all_gather(mine, dim=None), torch.stack(everything))
            with pytest.raises(ShapeError, match="expected one of 0 batch dims, got dim=0"):
                tdc.dist.all_gather(mine)
            return
        expected = torch.cat(everything, 0)
        found, counts = tdc.dist.all_gather(mine, counts=True)
        same(found, expected)
        assert counts.tolist() == [rows_of(r) for r in range(world)]
        found = tdc.dist.gather(mine, world - 1)
        same(found, expected) if rank == world - 1 else same(found, None)
        if kind == "ragged":
            assert found is None or found["text"].structure is found["mask"].structure
        if kind != "objects":
            return
        equal = [make(r, 3) for r in range(world)]
        same(tdc.dist.all_gather(equal[rank], dim=None), torch.stack(equal))

    each_kind(run)


def gathers_along_other_dims_and_stacks(rank: int, world: int) -> None:
    make = KINDS["grid"]
    own = [make(r, 3).movedim(0, 1)[:, : 1 + r] for r in range(world)]
    same(tdc.dist.all_gather(own[rank], dim=1), torch.cat(own, 1))
    same(tdc.dist.all_gather(own[rank], dim=-1), torch.cat(own, 1))
    for kind in ("plain", "typed", "grid", "dtypes", "tensor", "padded"):
        equal = [KINDS[kind](r, 3) for r in range(world)]
        if kind == "padded":
            continue
        same(tdc.dist.all_gather(equal[rank], dim=None), torch.stack(equal))


def ranks_without_rows(rank: int, world: int) -> None:
    for make in (plain, ragged):
        own = [make(r, 0 if r == 0 else 2) for r in range(world)]
        same(tdc.dist.all_gather(own[rank]), torch.cat(own))
        none = [make(r, 0) for r in range(world)]
        assert len(tdc.dist.all_gather(none[rank])) == 0


def exchanges_every_kind(rank: int, world: int) -> None:
    def run(kind: str, make: Any) -> None:
        def part(source: int, target: int) -> Any:
            return make(source + 2 * target, (source + 2 * target) % 3 + 1)

        found = tdc.dist.all_to_all([part(rank, r) for r in range(world)])
        for r in range(world):
            same(found[r], part(r, rank))

    each_kind(run)


def reduces_every_kind(rank: int, world: int) -> None:
    def run(kind: str, make: Any) -> None:
        if kind in ("dtypes", "objects", "number"):
            return
        whole = make(0, 3)

        def own(r: int) -> Any:  # of one structure on all ranks
            return whole.exclude("mask").apply(lambda x: x + r) if isinstance(whole, TensorDict) else whole + r

        total = own(0)
        for r in range(1, world):
            total = total + own(r)
        same(tdc.dist.all_reduce(own(rank)), total)
        found = tdc.dist.reduce(own(rank), world - 1)
        same(found, total) if rank == world - 1 else same(found, None)
        same(tdc.dist.all_reduce(own(rank), "max"), own(world - 1)) if kind not in ("layouts",) else None
        if kind in ("plain", "ragged", "tensor", "nested"):
            found = tdc.dist.reduce_scatter(torch.cat([own(rank)] * world), 0)
            same(found, torch.cat([total] * world)[rank * 3 : rank * 3 + 3])

    each_kind(run)


def means_weights_and_dtypes(rank: int, world: int) -> None:
    x = torch.tensor([1.0, 3.0]) * (rank + 1)
    weights = [float(r + 1) for r in range(world)]
    total = sum([w * (r + 1) for r, w in enumerate(weights)])
    one = torch.tensor([1.0, 3.0])
    torch.testing.assert_close(tdc.dist.all_reduce(x, "mean"), one * (world + 1) / 2)
    for check in (True, False):
        found = tdc.dist.all_reduce(TensorDict({"x": x}), "mean", weight=rank + 1, check=check)
        torch.testing.assert_close(found["x"], one * total / sum(weights))
    torch.testing.assert_close(tdc.dist.all_reduce(x, weight=torch.tensor(rank + 1.0)), one * total)
    found = tdc.dist.all_reduce(TensorDict({"b": torch.tensor([rank == 0, True]), "x": x.double()}), dtype=torch.int64)
    same(found.to_dict(), {"b": torch.tensor([1, world]), "x": one.double() * sum(range(1, world + 1))})
    half = tdc.dist.all_reduce(TensorDict({"x": x, "n": torch.tensor(rank)}), dtype=torch.bfloat16)
    assert (half["x"].dtype, half["n"].item()) == (torch.bfloat16, sum(range(world)))
    same(tdc.dist.all_reduce(x, "prod"), one**world * torch.tensor(range(1, world + 1)).prod())
    same(tdc.dist.all_reduce(torch.tensor([rank == 0, False]), "max"), torch.tensor([True, False]))


def wrong_dtypes_are_refused(rank: int, world: int) -> None:
    td = KINDS["dtypes"](rank, 2)
    with pytest.raises(DtypeError, match=r"(?s)with a sum over ranks, got 6 others.*int8.*dtype=torch.int64"):
        tdc.dist.all_reduce(td)
    with pytest.raises(DtypeError, match=r"(?s)with a max over ranks.*complex64"):
        tdc.dist.all_reduce(td, "max")
    with pytest.raises(DtypeError, match=r"(?s)with a mean over ranks.*int64"):
        tdc.dist.all_reduce(torch.arange(3), "mean")
    with pytest.raises(DtypeError, match=r"(?s)with a sum over ranks.*ObjectArray"):
        tdc.dist.all_reduce(KINDS["objects"](rank, 2))
    with pytest.raises(DtypeError, match="a whole number as the weight"):
        tdc.dist.all_reduce(torch.arange(3), weight=0.5)
    with pytest.raises(StructureError, match="expected a known operation, got 'avg'"):
        tdc.dist.all_reduce(td, "avg")
    same(tdc.dist.all_gather(torch.ones(1)), torch.ones(world))


def mismatches_are_errors_everywhere(rank: int, world: int) -> None:
    """Each leaves the group as it was."""

    def goes_on() -> None:
        assert tdc.dist.all_reduce(torch.ones(3)).tolist() == [world] * 3

    good = plain(rank, 3)
    bad = good.rename_keys({"y": "z"}) if rank == 1 else good
    for call in (tdc.dist.all_gather, tdc.dist.all_reduce, tdc.dist.reduce_scatter, tdc.dist.gather):
        given = bad.repeat_interleave(world, 0) if call is tdc.dist.reduce_scatter else bad
        words = r"(?s)structures of one form.*\nat y: .* on rank 0.*; not there on rank 1.*\nat z: not there on rank 0"
        with pytest.raises(StructureError, match=words):
            call(given)
        goes_on()
    with pytest.raises(StructureError, match="expected structures of one form on all ranks"):
        tdc.dist.all_to_all([bad] * world)
    with pytest.raises(StructureError, match="expected structures of one form on all ranks"):
        tdc.dist.broadcast(bad)
    goes_on()
    with pytest.raises(StructureError, match=r"(?s)one operation.*at rank 0: dist.all_gather.*rank 1: dist.all_reduce"):
        tdc.dist.all_reduce(good) if rank == 1 else tdc.dist.all_gather(good)
    goes_on()
    with pytest.raises(StructureError, match="one operation on all ranks"):
        tdc.dist.broadcast(good, src=min(rank, 1))
    with pytest.raises(StructureError, match="one operation on all ranks"):
        tdc.dist.all_reduce(good, "max" if rank else "sum")
    goes_on()
    with pytest.raises(StructureError, match=r"(?s)structures of one size.*rank 1: sizes \[4\]"):
        tdc.dist.all_reduce(plain(rank, 3 + (rank == 1)))
    other = tdc.pack([torch.ones(n) for n in ([1, 3] if rank else [2, 2])])
    with pytest.raises(StructureError, match="got other lengths of examples"):
        tdc.dist.all_reduce(other)
    with pytest.raises(StructureError, match=r"(?s)x: .*\[B, 3\] on rank 0.*\[B, 4\] on rank 1"):
        tdc.dist.all_gather(TensorDict({"x": torch.ones(2, 4 if rank == 1 else 3)}, [2]))
    with pytest.raises(StructureError, match="batch sizes that differ in dim 0 alone"):
        tdc.dist.all_gather(TensorDict({"x": torch.ones(2, 3 + (rank == 1))}, [2, 3 + (rank == 1)]))
    with pytest.raises(StructureError, match=r"(?s)Static 'a' on rank 0.*Static 'b' on rank 1"):
        tdc.dist.all_gather(TensorDict({"s": tdc.Static("b" if rank == 1 else "a")}, [2]))
    goes_on()
    error = (UnsupportedError, "others") if rank == 1 else (StructureError, "rank 1: UnsupportedError")
    with pytest.raises(error[0], match=error[1]):
        tdc.dist.all_gather(TensorDict({"s": torch.eye(2).to_sparse() if rank == 1 else torch.eye(2)}, [2]))
    goes_on()
    unseen = TensorDict({"unseen": torch.ones(2)})
    with pytest.raises(StructureError, match="expected structures of one form"):
        tdc.dist.broadcast(unseen if rank == 0 else good)
    same(tdc.dist.broadcast(unseen if rank == 0 else None), unseen)  # whose schema did not go along yet
    same(tdc.dist.broadcast(unseen if rank == 0 else None), unseen)
    with pytest.raises(StructureError, match=r"src=9|rank 1: StructureError in dist.broadcast"):
        tdc.dist.broadcast(good, src=9 if rank == 1 else 0)
    with pytest.raises((ShapeError, StructureError), match=r"a multiple of|rank 1: ShapeError in dist.reduce_scatter"):
        tdc.dist.reduce_scatter(plain(rank, 3 if rank == 1 else 4 * world) if world == 2 else plain(rank, 3))
    with torch.inference_mode():
        goes_on()
        same(tdc.dist.all_gather(good), torch.cat([plain(r, 3) for r in range(world)]))
    with pytest.raises(StructureError, match=r"(?s)one operation on all ranks.*recorded"):
        tdc.dist.all_reduce(torch.ones(2, requires_grad=rank == 1))
    goes_on()
    same(tdc.dist.all_gather(good), torch.cat([plain(r, 3) for r in range(world)]))


def many_sizes_take_one_more_message(rank: int, world: int) -> None:
    """More ragged leaves than a header has room for."""
    def make(r: int) -> TensorDict:
        return TensorDict({f"t{i}": texts(r + i, 3 + r) for i in range(20)}, [3 + r])

    same(tdc.dist.all_gather(make(rank)), torch.cat([make(r) for r in range(world)]))
    same(tdc.dist.broadcast(make(1) if rank == 1 else None, 1), make(1))
    if rank == 0:
        tdc.dist.send(make(0), 1)
    elif rank == 1:
        same(tdc.dist.recv(0), make(0))
    same(tdc.dist.all_to_all([make(rank)] * world)[0], make(0))


def groups_and_meshes(rank: int, world: int) -> None:
    mesh = dist.init_device_mesh("cpu", (world,))
    same(tdc.dist.all_gather(torch.ones(1), group=mesh), torch.ones(world))
    alone = dist.new_group([world - 1])
    if rank == world - 1:
        same(tdc.dist.all_gather(plain(rank, 2), group=alone), plain(rank, 2))
        same(tdc.dist.broadcast(plain(rank, 2), 0, group=alone), plain(rank, 2))
    turned = dist.new_group([1, 0]) if world > 1 else None
    if rank < 2:
        r = dist.get_rank(turned)
        same(tdc.dist.broadcast(plain(r, 2) if r == 1 else None, 1, group=turned), plain(1, 2))
        if r == 1:
            tdc.dist.send(plain(7, 2), 0, group=turned)
        else:
            same(tdc.dist.recv(1, group=turned), plain(7, 2))


def counts_of_messages(rank: int, world: int) -> None:
    """Twenty ragged batches of other lengths: the schema once, then two messages each."""
    sent: list[int] = []
    isend = dist.isend

    def counting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return isend(tensor, *args, **kwargs)

    dist.isend = counting
    batches = [ragged(i, 2 + i % 5) for i in range(20)]
    if rank == 0:
        for batch in batches:
            tdc.dist.send(batch, 1, tag=9)
        assert len(sent) == 41
        assert sent.count(256) == 20
    elif rank == 1:
        for batch in batches:
            same(tdc.dist.recv(0, tag=9), batch)
    dist.isend = isend


def balanced_and_back(rank: int, world: int) -> None:
    for equal in (False, True):
        for kind in ("plain", "ragged", "objects", "typed", "several", "tensor", "nested"):
            td = KINDS[kind](rank, 2 + 3 * rank)
            cost = (torch.arange(len(td)) * 7 + rank * 3) % 5
            mine, back = tdc.dist.balance(td, cost, equal=equal)
            same(tdc.dist.restore(mine, back), td)
            counts = tdc.dist.all_gather(torch.tensor([len(mine)])).tolist()
            assert sum(counts) == sum([2 + 3 * r for r in range(world)])
            assert not equal or max(counts) - min(counts) <= 1
    td = plain(rank, 0 if rank else 7)  # all of them on one rank
    mine, back = tdc.dist.balance(td, torch.ones(len(td)), equal=True)
    assert len(mine) in (7 // world, 7 // world + 1)
    w = mine["x"].clone().requires_grad_()
    out = tdc.dist.restore(w * 2, back)
    same(out.detach(), td["x"] * 2)
    (out * 3).sum().backward()
    same(w.grad, torch.full_like(w, 6.0))
    with pytest.raises((ShapeError, StructureError), match=r"expected \d rows|rank 0: ShapeError in dist.restore"):
        tdc.dist.restore(torch.ones(9), back)
    error = (ShapeError, "costs of at least 0") if rank == 0 else (StructureError, "rank 0: ShapeError in dist.balance")
    with pytest.raises(error[0], match=error[1]):
        tdc.dist.balance(torch.ones(2), torch.tensor([1.0, float("nan") if rank == 0 else 1.0]))
    lengths = torch.randint(1, 512, (64,), generator=torch.Generator().manual_seed(rank)) ** 2
    mine, _ = tdc.dist.balance(lengths, lengths)
    sums = tdc.dist.all_gather(mine.sum()[None]).double()
    assert sums.max() / sums.mean() < 1.01


def shards_by_pattern(rank: int, world: int) -> None:
    mesh = dist.init_device_mesh("cpu", (world,))
    from torch.distributed.tensor import DTensor, Replicate, Shard

    td = TensorDict({"w": numbers(0, 5, 4), "b": numbers(1, 3), "in": {"w": numbers(2, 4, 3)}, "t": texts(0, 3)})
    rule = {"in.w": Shard(1), "*w": Shard(0), "b": Replicate()}
    placed = tdc.dist.shard(td, mesh, rule)
    assert [placed[k].placements[0] for k in ("w", "b", ("in", "w"))] == [Shard(0), Replicate(), Shard(1)]
    same(placed["w"].to_local(), td["w"].tensor_split(world)[rank] if world == 5 else placed["w"].to_local())
    same(tdc.dist.full_tensor(placed), td)
    other = tdc.dist.redistribute(placed, {"*w": Replicate()})
    assert other["w"].placements == (Replicate(),)
    same(other["w"].to_local(), td["w"])
    same(tdc.dist.full_tensor(placed + placed.exclude("t").update({"t": td["t"]})), td + td)
    alike = tdc.dist.replicate(td.exclude("t"), mesh)
    assert all([isinstance(x, DTensor) and x.placements == (Replicate(),) for x in alike.values(True, True)])
    with pytest.raises(UnsupportedError, match=r"expected dense tensors, ragged batches.*got 3 others"):
        tdc.dist.all_gather(placed, dim=None)
    with pytest.raises(UnsupportedError, match=r"expected dense tensors, got 1 others\nat t: NestedTensor"):
        tdc.dist.shard(td, mesh, Shard(0))
    with pytest.raises(KeyPathError, match="expected a key that matches 'x', got none"):
        tdc.dist.shard(td, mesh, {"x": Shard(0)})
    with pytest.raises(DtypeError, match="expected 1 placements, got int"):
        tdc.dist.shard(td, mesh, {"w": 0})
    with pytest.raises(DtypeError, match="expected a DeviceMesh, got None"):
        tdc.dist.shard(td, None, Shard(0))


def nothing_is_pickled(rank: int, world: int) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("pickled")

    dumps, loads = pickle.dumps, pickle.loads
    pickle.dumps = pickle.loads = refuse
    try:
        gathers_every_kind(rank, world)
        sends_every_kind(rank, world)
    finally:
        pickle.dumps, pickle.loads = dumps, loads


def a_killed_peer_is_an_error_at_once(rank: int, world: int) -> None:
    """The group has a timeout of a minute."""
    same(tdc.dist.all_reduce(torch.ones(1)), torch.full((1,), 2.0))
    if rank == 1:
        time.sleep(0.3)
        os._exit(0)
    pending = tdc.dist.irecv(1, tag=5)
    begin = time.monotonic()
    with pytest.raises(DistError, match=r"all_gather: expected an answer of every rank, got none on rank 0") as caught:
        tdc.dist.all_gather(plain(0, 3))
    assert (caught.value.rank, caught.value.op) == (0, "dist.all_gather")
    with pytest.raises(DistError, match="expected an answer of rank 1") as caught:
        pending.wait()
    assert (caught.value.rank, caught.value.op) == (1, "dist.irecv")
    x = plain(0, 3)
    for call in (lambda: tdc.dist.send(x, 1), lambda: tdc.dist.recv(1), lambda: tdc.dist.all_reduce(x)):
        with pytest.raises(DistError, match="hint: a rank is gone or came too late; the group is dead"):
            call()
    assert time.monotonic() - begin < 30
    os._exit(0)


def what_does_not_come_is_an_error(rank: int, world: int) -> None:
    if rank == 0:
        pending = tdc.dist.irecv(1)
        with pytest.raises(DistError, match=r"got none on rank 0 of 2: nothing came in 0.1 seconds"):
            pending.wait(0.1)
        dist.barrier()
        same(pending.wait(30), plain(1, 2))  # the group is alive as yet
    else:
        dist.barrier()
        tdc.dist.send(plain(1, 2), 0)
    late = dist.new_group(timeout=timedelta(seconds=4))  # in which they connect, too
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(DistError, match="Timed out waiting 4000ms"):
            tdc.dist.all_reduce(torch.ones(3), group=late)
        assert time.monotonic() - begin < 30
    dist.barrier()


CASES = [
    sends_every_kind, begins_to_send_and_receive, ties_stay_ties, broadcasts_every_kind, scatters_every_kind,
    gathers_every_kind, gathers_along_other_dims_and_stacks, ranks_without_rows, exchanges_every_kind,
    reduces_every_kind, means_weights_and_dtypes, wrong_dtypes_are_refused, mismatches_are_errors_everywhere,
    many_sizes_take_one_more_message, balanced_and_back, shards_by_pattern, groups_and_meshes, counts_of_messages,
    nothing_is_pickled,
]  # fmt: skip
ALONE = [a_killed_peer_is_an_error_at_once, what_does_not_come_is_an_error]


def run_cases(cases: list[Any], alone: list[Any], argv: list[str]) -> None:
    """Run a case, or all of those that leave the group as it was."""
    names, store, rank, world = argv[1], argv[2], int(argv[3]), int(argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), world, rank)
    for case in [case for case in cases + alone if names in (case.__name__, "all" if case in cases else "")]:
        try:
            case(rank, world)
        except BaseException:
            sys.stderr.write(f"rank {rank}: {case.__name__}\n{traceback.format_exc(limit=-LINES)}\n")
            sys.stderr.flush()
            os._exit(1)  # ranks may be apart now
    leave()


if __name__ == "__main__":
    run_cases(CASES, ALONE, sys.argv)
