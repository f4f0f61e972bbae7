"""Collectives of structures in several processes, which `dist_processes` runs; and in a group of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_samples import KINDS, plain, ragged
from processes import run_processes

import tdc
from tdc import DistError, DtypeError, ShapeError, StructureError, TensorDict
from tdc.testing import assert_close


def run(script: str, name: str, folder: Path, world: int, limit: int = 120) -> None:
    """Run a case, or all, in several processes."""
    path = Path(__file__).with_name(script)
    run_processes(path, lambda rank: [name, str(folder / "meeting"), str(rank), str(world)], world, limit)


def test_two_ranks(tmp_path: Path) -> None:
    run("gradient_processes.py", "all", tmp_path, 2)


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    run("gradient_processes.py", "all", tmp_path, 4)


@pytest.mark.sweep  # of seconds: a busy machine may take longer
@pytest.mark.parametrize("name", ["a_killed_peer_is_an_error_at_once", "what_does_not_come_is_an_error"])
def test_lost_ranks(name: str, tmp_path: Path) -> None:
    run("dist_processes.py", name, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["of_dense_structures", "of_ragged_structures", "for_all_rows"])
def test_graphs(name: str, tmp_path: Path) -> None:
    run("gradient_processes.py", f"graphs_{name}", tmp_path, 2, 240)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_changes_nothing(kind: str, group: Any) -> None:
    x = KINDS[kind](1, 3)
    assert tdc.dist.broadcast(x) is x
    assert tdc.dist.scatter([x]) is x
    assert tdc.dist.all_to_all([x])[0] is x
    if kind not in ("scalars", "number"):
        for found in (tdc.dist.all_gather(x), tdc.dist.gather(x)):
            assert_close(found, x, rtol=0, atol=0)
    if kind not in ("dtypes", "objects"):
        y = x.exclude("mask") if isinstance(x, TensorDict) else x
        for found in (tdc.dist.all_reduce(y), tdc.dist.reduce(y), tdc.dist.all_reduce(y, check=False)):
            assert type(found) is type(y)
            assert_close(found, y, rtol=0, atol=0)


def test_results_do_not_share_memory_and_keep_the_order_of_keys(group: Any) -> None:
    td = plain(0, 3).set("a", torch.ones(3))
    for found in (tdc.dist.all_reduce(td), tdc.dist.all_gather(td)):
        assert list(found.keys(True, True)) == list(td.keys(True, True))
        addresses = [{x.data_ptr() for x in some.values(True, True)} for some in (found, td)]
        assert addresses[0].isdisjoint(addresses[1])
        versions = [x._version for x in found.values(True, True)]
        found["x"].add_(1)
        assert [x._version for x in found.values(True, True)] == [versions[0] + 1, *versions[1:]]


def test_wrong_arguments(group: Any) -> None:
    td = plain(0, 3)
    with pytest.raises(StructureError, match=r"expected dst in \[0, 0\], got dst=1"):
        tdc.dist.send(td, 1)
    with pytest.raises(StructureError, match="expected another rank as src, got src=0"):
        tdc.dist.recv(0)
    with pytest.raises(DtypeError, match=r"expected src in \[0, 0\], got str"):
        tdc.dist.broadcast(td, "0")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(DtypeError, match="expected a process group or a DeviceMesh of one dim, got str"):
        tdc.dist.all_reduce(td, group="gloo")
    with pytest.raises(DtypeError, match="expected a TensorDict, tensor or ragged batch, got dict"):
        tdc.dist.all_gather({"x": torch.ones(2)})
    with pytest.raises(ShapeError, match="expected one of 1 batch dims, got dim=1"):
        tdc.dist.all_gather(td, dim=1)
    with pytest.raises(StructureError, match="expected a list of 1 parts, one for each rank, got 2"):
        tdc.dist.all_to_all([td, td])
    with pytest.raises(DtypeError, match="expected a dtype, got str"):
        tdc.dist.all_reduce(td, dtype="float32")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(StructureError, match="weight= of a sum or mean, got 'max'"):
        tdc.dist.all_reduce(td, "max", weight=2)
    with pytest.raises(StructureError, match="expected leaves on cpu, got 1 elsewhere"):
        tdc.dist.all_gather(td.set("m", torch.ones(3, device="meta")))


def test_without_a_group() -> None:
    with pytest.raises(DtypeError, match=r"got none\nhint: torch.distributed.init_process_group"):
        tdc.dist.all_gather(ragged(0, 2))


def test_the_error_names_rank_and_call() -> None:
    assert issubclass(DistError, RuntimeError)
    assert (DistError("x").rank, DistError("x").op) == (-1, "")


WRONG: dict[str, Any] = {
    "list": [1, 2], "dict": {"a": 1}, "None": None, "str": "abc", "int": 3, "object": object(), "float": 0.5,
    "sparse": torch.eye(2).to_sparse(), "td": TensorDict({"o": tdc.ObjectArray([object()])}, [1]),
}  # fmt: skip
X = torch.ones(2)
CALLS: dict[str, Any] = {
    "all_gather": tdc.dist.all_gather, "gather": tdc.dist.gather, "broadcast": tdc.dist.broadcast,
    "all_reduce": tdc.dist.all_reduce, "reduce": tdc.dist.reduce, "reduce_scatter": tdc.dist.reduce_scatter,
    "scatter": tdc.dist.scatter, "all_to_all": tdc.dist.all_to_all, "parts": lambda w: tdc.dist.all_to_all([w]),
    "balance": lambda w: tdc.dist.balance(w, X), "cost": lambda w: tdc.dist.balance(X, w),
    "restore": lambda w: tdc.dist.restore(w, tdc.dist.balance(X, X)[1]), "back": lambda w: tdc.dist.restore(X, w),
    "op": lambda w: tdc.dist.all_reduce(X, w), "dtype": lambda w: w is None or tdc.dist.all_reduce(X, dtype=w),
    "dim": lambda w: w is None or tdc.dist.all_gather(X, dim=w), "src": lambda w: tdc.dist.broadcast(X, w),
    "weight": lambda w: w is None or tdc.dist.all_reduce(X, weight=w),
    "group": lambda w: w is None or tdc.dist.all_gather(X, group=w),
    "scattered": lambda w: tdc.dist.reduce_scatter(X, w),
    "classes": lambda w: w is None or tdc.dist.broadcast(X, classes=w), "send": lambda w: tdc.dist.send(w, w),
    "recv": tdc.dist.recv, "irecv": tdc.dist.irecv, "isend": lambda w: tdc.dist.isend(X, w),
    "shard": lambda w: tdc.dist.shard(w, w, w), "replicate": lambda w: tdc.dist.replicate(w, w),
    "redistribute": lambda w: tdc.dist.redistribute(w, w), "full_tensor": tdc.dist.full_tensor,
    "rule": lambda w: tdc.dist.redistribute(plain(0, 2), w),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_other_kinds_are_taken_or_refused_in_our_words(name: str, group: Any) -> None:
    for kind, wrong in WRONG.items():
        try:
            CALLS[name](wrong)
        except tdc.TdcError:
            continue
        except Exception as error:
            raise AssertionError(f"{kind}: {type(error).__name__}: {error}") from error
