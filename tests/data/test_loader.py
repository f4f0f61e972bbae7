"""loader: the batches of torch's samplers, whatever runs ahead; resumed, shared out, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

import tdc
from tdc import DtypeError, IndexingError, KeyPathError, ShapeError, StructureError, TensorDict, UnsupportedError
from tdc.data import BucketSampler, Dataset, TokenBudgetSampler, loader


def td(n: int = 23) -> TensorDict:
    return TensorDict({"x": torch.arange(n), "info": {"y": torch.arange(n) * 2}}, [n])


def text(n: int = 200, seed: int = 0) -> TensorDict:
    """Ragged rows, each full of its own position."""
    lengths = torch.randint(0, 30, (n,), generator=torch.Generator().manual_seed(seed))
    tokens = tdc.pack([torch.full((int(k),), i) for i, k in enumerate(lengths)])
    return TensorDict({"tokens": tokens, "id": torch.arange(n), "n": lengths}, [n])


def ids(batches: Any, key: str = "x") -> list[list[int]]:
    return [batch[key].tolist() for batch in batches]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("n", "world_size"), [(23, 1), (23, 2), (24, 3), (3, 5), (1, 1)])
def test_batches_are_those_of_torch(n: int, world_size: int, shuffle: bool, drop_last: bool, prefetch: int):
    data = td(n)
    for rank in range(world_size):
        batches = loader(
            data, batch_size=4, shuffle=shuffle, seed=3, drop_last=drop_last, prefetch=prefetch, rank=rank,
            world_size=world_size,
        )  # fmt: skip
        theirs = DistributedSampler(range(n), world_size, rank, shuffle, 3, drop_last)
        for epoch in range(2):
            theirs.set_epoch(epoch)
            positions = list(theirs) if n >= world_size or not drop_last else []
            want = [positions[i : i + 4] for i in range(0, len(positions), 4)]
            want = [batch for batch in want if len(batch) == 4 or not drop_last]
            assert len(batches) == len(want)
            found = list(batches)
            assert ids(found) == want
            assert all((batch["info", "y"] == batch["x"] * 2).all() for batch in found)
            assert [batch.batch_size for batch in found] == [(len(batch),) for batch in want]


def test_a_pass_that_ends_begins_the_next_epoch():
    batches = loader(td(), batch_size=5, shuffle=True)
    first, second = ids(batches), ids(batches)
    assert first != second
    assert batches.epoch == 2
    batches.set_epoch(0)
    assert ids(batches) == first
    for _ in batches:
        break
    assert batches.epoch == 1
    assert ids(batches) == second


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loop_that_counts_batches_ends_the_epoch(prefetch: int):
    """It never asks for one more, as a `for` statement does."""
    want = loader(td(), batch_size=5, shuffle=True)
    first, second, third = [ids(want) for _ in range(3)]
    batches = loader(td(), batch_size=5, shuffle=True, prefetch=prefetch)

    def counted() -> Any:
        return ids([batch for _, batch in zip(range(len(batches)), batches, strict=False)])

    assert [counted(), counted(), ids(batches)] == [first, second, third]
    batches.set_epoch(1)
    assert counted() == second
    batches.set_epoch(1)  # the same one, chosen again
    assert (batches.state_dict()["epoch"], batches.state_dict()["batch"]) == (1, 0)
    assert counted() == second
    assert counted() == third


def test_trainers_find_what_sets_the_epoch():
    batches = loader(td(), batch_size=5, shuffle=True)
    batches.batch_sampler.sampler.set_epoch(3)
    assert batches.epoch == 3


def test_a_new_pass_begins_at_the_first_batch():
    batches = loader(td(), batch_size=5, prefetch=2)
    want = ids(batches)
    batches.set_epoch(0)
    for _ in range(3):
        assert next(iter(batches))["x"].tolist() == want[0]
    assert ids(batches) == want


KINDS: dict[str, Any] = {
    "batch_size": {"batch_size": 7, "shuffle": True, "seed": 1},
    "max_tokens": {"max_tokens": 90, "key": "tokens", "shuffle": True, "seed": 1},
    "in order": {"max_tokens": 90, "key": "tokens"},
}


@pytest.mark.parametrize("prefetch", [0, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [0, 1, 4, None])
def test_it_goes_on_where_it_was(kind: str, stop: int | None, prefetch: int):
    data = text()
    make = lambda: loader(data, prefetch=prefetch, **KINDS[kind])  # noqa: E731
    whole = make()
    want = [ids(whole, "id"), ids(whole, "id")]
    before, seen = make(), []
    stop = len(want[0]) if stop is None else stop
    for batch in before if stop else ():
        seen.append(batch["id"].tolist())
        if len(seen) == stop:
            break
    state = json.loads(json.dumps(before.state_dict()))
    assert (state["epoch"], state["batch"]) == (0, stop)
    after = make()
    after.load_state_dict(state)
    after.set_epoch(state["epoch"])  # as a loop over epochs does
    assert seen + ids(after, "id") == want[0]
    assert ids(after, "id") == want[1]
    assert after.epoch == 2


def test_an_epoch_that_is_chosen_within_a_pass_is_the_next_one():
    batches = loader(td(), 5, shuffle=True)
    it = iter(batches)
    next(it)
    batches.set_epoch(7)
    assert len(list(it)) == 4
    assert (batches.state_dict()["epoch"], batches.state_dict()["batch"]) == (7, 0)


def test_a_state_is_that_of_every_rank():
    made = [loader(text(), max_tokens=60, key="tokens", shuffle=True, rank=r, world_size=3) for r in range(3)]
    passes = [iter(batches) for batches in made]
    for _ in range(5):
        for it in passes:
            next(it)
    assert made[0].state_dict() == made[1].state_dict() == made[2].state_dict()
    again = loader(text(), max_tokens=60, key="tokens", shuffle=True, rank=2, world_size=3)
    again.load_state_dict(made[0].state_dict())
    assert ids(again, "id") == ids(passes[2], "id")


def test_ranks_share_out_batches_of_tokens():
    data = text()
    made = [loader(data, max_tokens=60, key="tokens", shuffle=True, rank=r, world_size=3) for r in range(3)]
    found = [ids(batches, "id") for batches in made]
    assert len({len(f) for f in found}) == 1
    all_batches = ids(loader(data, max_tokens=60, key="tokens", shuffle=True), "id")
    in_turn = [found[k % 3][k // 3] for k in range(3 * len(found[0]))]
    assert in_turn == all_batches + all_batches[: len(in_turn) - len(all_batches)]


def test_ragged_batches_hold_their_rows():
    for batch in loader(text(), max_tokens=100, key="tokens", shuffle=True, prefetch=1):
        assert int(batch["tokens"].structure.offsets[-1]) <= 100
        for i, row in zip(batch["id"].tolist(), batch["tokens"].tolist(), strict=True):
            assert set(row) <= {i}


@pytest.mark.parametrize("key", ["tokens", "n"])
def test_lengths_are_those_of_a_leaf_or_a_leaf(key: str):
    found, want = loader(text(), max_tokens=90, key=key), TokenBudgetSampler(text()["n"], 90, shuffle=False)
    assert ids(found, "id") == list(want)


def test_padded_leaves_have_lengths_too():
    data = text()
    padded = data.set("tokens", data["tokens"].to_padded())
    want = ids(loader(data, max_tokens=90, key="tokens", shuffle=True), "id")
    assert ids(loader(padded, max_tokens=90, key="tokens", shuffle=True), "id") == want


def test_a_sampler_of_buckets():
    data = text()
    batches = loader(data, batch_sampler=BucketSampler(data["tokens"], 8), prefetch=1)
    assert ids(batches, "id") == list(BucketSampler(data["tokens"], 8))
    assert "25 batches, epoch 1" in repr(batches)


def test_sources(tmp_path: Path):
    data = text(40)
    tdc.io.save(data, tmp_path / "store")
    want = ids(loader(data, batch_size=8), "id")
    for source in (tmp_path / "store", str(tmp_path / "store"), Dataset(tmp_path / "store"), Dataset(data)):
        assert ids(loader(source, batch_size=8), "id") == want


def test_every_kind_of_leaf_and_several_batch_dims():
    data = TensorDict(
        {
            "x": torch.arange(24.0).view(6, 2, 2), "name": tdc.ObjectArray([f"{i}" for i in range(12)], [6, 2]),
            "split": tdc.Static("train"),
        },
        [6, 2],
    )  # fmt: skip
    for i, batch in enumerate(loader(data, batch_size=2)):
        assert batch.batch_size == (2, 2)
        assert torch.equal(batch["x"], data["x"][2 * i : 2 * i + 2])
        assert batch["name"].tolist() == data["name"][2 * i : 2 * i + 2].tolist()
        assert batch["split"] == "train"


@tdc.tensorclass
class Step:
    x: torch.Tensor


def test_a_tensorclass_stays_one():
    assert {type(batch) for batch in loader(Step(torch.zeros(5, 2), batch_size=[5]), batch_size=2)} == {Step}


def test_a_batch_has_memory_of_its_own():
    data = td()
    for batch in loader(data, batch_size=5):
        batch["x"].fill_(-1)
    assert torch.equal(data["x"], torch.arange(23))


def test_nothing_gives_no_batches():
    for settings in ({"batch_size": 2}, {"max_tokens": 2, "key": "x"}):
        batches = loader(td(0), **settings, shuffle=True, world_size=2)
        assert (len(batches), list(batches), batches.epoch) == (0, [], 1)


def test_writes_of_a_replay_buffer_are_seen(tmp_path: Path):
    """A ring in a store: writes by `copy_` with an index, samples by a vector of positions, also by another reader."""
    schema = {"obs": ((2,), torch.float32), "done": ((), torch.bool)}
    ring = tdc.io.memmap_empty(schema, tmp_path / "ring", [8])
    reader = tdc.io.load(tmp_path / "ring")
    for step in range(11):
        tdc.copy_(ring, {"obs": torch.full((2,), float(step)), "done": torch.tensor(step == 9)}, index=step % 8)
    kept = {3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0}
    assert set(reader["obs"][:, 0].tolist()) == set(ring["obs"][:, 0].tolist()) == kept
    rows = torch.cat([torch.arange(6, 8), torch.arange(2)])  # four steps at once, across the end
    steps = {"obs": torch.full((4, 2), 20.0), "done": torch.zeros(4, dtype=torch.bool)}
    tdc.copy_(ring, steps, index=rows)
    assert int((reader["obs"] == 20).sum()) == 8
    batch = reader[torch.randint(0, 8, (64,))]
    assert set(batch["obs"][:, 0].tolist()) <= {*kept, 20.0}
    seen = torch.cat([batch["obs"][:, 0] for batch in loader(tmp_path / "ring", batch_size=3, shuffle=True)])
    assert seen.sort()[0].tolist() == ring["obs"][:, 0].sort()[0].tolist()


def test_the_default_device_is_that_of_models():
    data, settings = text(), {"max_tokens": 90, "key": "tokens", "shuffle": True}
    for made in ({"batch_size": 9, "shuffle": True, "world_size": 2}, settings, {"max_tokens": 90, "key": "n"}):
        with torch.device("meta"):
            found = ids(loader(data, **made, prefetch=2), "id")
            assert ids(loader(data, batch_sampler=BucketSampler(data["n"].tolist(), 9)), "id")
            assert Dataset(data).__getitems__([3])["id"].tolist() == [3]
        assert found == ids(loader(data, **made), "id")


def test_device():
    (batch,) = loader(td(4), batch_size=4, device="meta", prefetch=1)
    assert batch["x"].is_meta
    assert batch.device == torch.device("meta")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device to pin for")
def test_pinning_is_refused_where_there_is_no_device():
    with pytest.raises(UnsupportedError, match="expected a device that memory is pinned for, got none\nhint: leave"):
        loader(td(), batch_size=2, pin_memory=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(
        UnsupportedError, match="expected a device that is there, got device='cuda'\nhint: leave device"
    ):
        loader(td(), 2, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_pinned_batches_go_to_a_gpu(prefetch: int):
    data = text()
    settings: Any = {"max_tokens": 100, "key": "tokens", "shuffle": True}
    pinned = loader(data, **settings, prefetch=prefetch, pin_memory=True)
    assert all(batch["id"].is_pinned() and batch["tokens"].values.is_pinned() for batch in pinned)
    moved = loader(data, **settings, prefetch=prefetch, pin_memory=True, device="cuda")
    for a, b in zip(loader(data, **settings), moved, strict=True):
        assert b["tokens"].is_cuda
        assert a["tokens"].tolist() == b["tokens"].tolist()
    on_gpu = loader(data.to("cuda"), **settings)
    assert ids(on_gpu, "id") == ids(loader(data, **settings), "id")
    with pytest.raises(UnsupportedError, match="on a device"):
        loader(data.to("cuda"), batch_size=2, pin_memory=True)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, DtypeError, "expected one of batch_size, max_tokens, batch_sampler, got none"),
    ({"batch_size": 2, "max_tokens": 8}, DtypeError, "got batch_size and max_tokens"),
    ({"batch_size": 0}, ShapeError, "batch_size of 1 or more, got 0"),
    ({"batch_size": 2.5}, DtypeError, "expected an int for batch_size, got float\nhint: batch_size=1"),
    ({"batch_size": True}, DtypeError, "expected an int for batch_size, got bool"),
    ({"max_tokens": 90, "key": "tokens", "balance": True}, DtypeError, "balance beside batch_size, got max_tok"),
    ({"batch_size": 9, "balance": True}, KeyPathError, "expected a key whose tokens balance counts, got none"),
    ({"batch_size": 9, "balance": 1}, DtypeError, "for balance"),
    ({"batch_size": 9, "even": 1}, DtypeError, "for even"),
    ({"max_tokens": 90}, KeyPathError, "expected a key whose tokens max_tokens counts, got none\nhint: key='tokens'"),
    ({"max_tokens": 90, "key": "token"}, KeyPathError, "tokens"),
    ({"max_tokens": 90, "key": "f"}, DtypeError, "expected a ragged batch, or lengths"),
    ({"max_tokens": 90, "key": "dense"}, DtypeError, "hint: ragged leaves are tokens"),
    ({"max_tokens": 5, "key": "tokens"}, ShapeError, "got 160 that are longer\nat example 0: "),
    ({"batch_size": 2, "shuffle": 1}, DtypeError, "expected a bool for shuffle, got int"),
    ({"batch_size": 2, "seed": -1}, ShapeError, "seed of 0 or more"),
    ({"batch_size": 2, "seed": None}, DtypeError, "expected an int for seed, got NoneType"),
    ({"batch_size": 2, "seed": 2**63}, ShapeError, "a seed below"),
    ({"batch_size": 2, "rank": 1}, ShapeError, "expected a rank below world_size=1, got 1\nhint: ranks are 0 to 0"),
    ({"batch_size": 2, "rank": -1, "world_size": 2}, ShapeError, "rank of 0 or more"),
    ({"batch_size": 2, "world_size": 0}, ShapeError, "world_size of 1 or more"),
    ({"batch_size": 2, "prefetch": -1}, ShapeError, "prefetch of 0 or more"),
    ({"batch_size": 2, "prefetch": True}, DtypeError, "expected an int for "),
    ({"batch_size": 2, "pin_memory": "yes"}, DtypeError, "expected a bool for pin_memory"),
    ({"batch_size": 2, "device": "gpu"}, DtypeError, "expected a device"),
    ({"batch_sampler": [[0, 1]]}, DtypeError, "expected a tdc.data.TokenBudgetSampler or BucketSampler, got list"),
    ({"batch_sampler": BucketSampler([1, 2], 2)}, StructureError, "a batch_sampler for 200 examples, got one for 2"),
    ({"batch_sampler": BucketSampler([1] * 200, 2), "shuffle": True}, DtypeError, "got shuffle beside it"),
]


@pytest.mark.parametrize(("settings", "error", "words"), WRONG, ids=lambda x: str(x)[:40])
def test_wrong_settings(settings: dict[str, Any], error: type[Exception], words: str):
    data = text().set("dense", torch.zeros(200, 3)).set("f", torch.zeros(200))
    with pytest.raises(error) as caught:
        loader(data, **settings)
    assert words in str(caught.value)
    assert str(caught.value).startswith("tdc.data.")
    assert "\nhint: " in str(caught.value)


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ([{"x": 1}], DtypeError, "expected a TensorDict, a tdc.data.Dataset or the path of a store, got list"),
        (torch.zeros(3), DtypeError, "got Tensor float32[3]"),
        (TensorDict({"x": torch.zeros(3)}), ShapeError, "expected a TensorDict with a batch dim, got TensorDict []"),
        ("no/such/store", tdc.FormatError, "tdc.io.load"),
    ],
)
def test_wrong_sources(source: Any, error: type[Exception], words: str):
    with pytest.raises(error) as caught:
        loader(source, batch_size=2)
    assert words in str(caught.value)


WAYS: list[dict[str, Any]] = [
    {"batch_size": 4}, {"batch_size": 4, "balance": True, "key": "tokens"}, {"max_tokens": 90, "key": "tokens"},
    {"max_tokens": 90, "key": "tokens", "consecutive": True}, {"bucket": 5},
]  # fmt: skip


def of_ranks(data: TensorDict, world_size: int, bucket: int = 0, **how: Any) -> list[Any]:
    """Loaders of all ranks."""
    settings = {"shuffle": True, "seed": 5, "even": False, "world_size": world_size}
    if bucket:
        tokens = data["tokens"]
        return [
            loader(data, batch_sampler=BucketSampler(tokens, bucket, rank=r, **settings)) for r in range(world_size)
        ]
    return [loader(data, rank=r, **settings, **how) for r in range(world_size)]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_another_number_of_ranks_goes_on_behind_what_was_handed_out(how: dict[str, Any]):
    data, seen = text(60), list[int]()
    state: Any = None
    for world_size, steps in ((2, 1), (2, 1), (3, 1), (1, 1), (4, 99)):
        size = {"batch_size": 12 // world_size} if "batch_size" in how else {}  # as many for all ranks together
        ranks = of_ranks(data, world_size, **{**how, **size})
        for batches in ranks:
            if state is not None:
                batches.load_state_dict(json.loads(json.dumps(state)))
        assert len({len(batches) for batches in ranks}) == 1
        passes = [iter(batches) for batches in ranks]
        for _ in range(min(steps, len(ranks[0]) - (ranks[0].batch_sampler._first))):
            seen += [i for batches in passes for i in next(batches)["id"].tolist()]
        assert len({str(batches.state_dict()) for batches in ranks}) == 1
        state = ranks[0].state_dict()
    assert sorted(seen) == list(range(60))
    once = of_ranks(data, 3, **how)[0]
    once.load_state_dict(state)  # the epoch is over
    assert (once.epoch, once.state_dict()["begin"], once.state_dict()["batch"]) == (1, 0, 0)
    assert len(list(once)) == len(of_ranks(data, 3, **how)[0])


def test_a_new_pass_begins_with_the_first_batch_whoever_had_it_before():
    [two], three = of_ranks(td(), 1, batch_size=4), of_ranks(td(), 3, batch_size=4)[0]
    next(iter(two))
    three.load_state_dict(two.state_dict())
    assert len(three) == 2
    next(iter(three))
    next(iter(three))
    assert (len(three), three.state_dict()["begin"]) == (2, 0)
    assert len(list(of_ranks(td(), 3, batch_size=4)[0])) == 2


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("n", [0, 1, 3, 41])
def test_evaluation_sees_each_example_once(how: dict[str, Any], n: int):
    ranks = [list(batches) for batches in of_ranks(text(60)[:n], 4, **how)]
    assert len({len(batches) for batches in ranks}) == 1
    assert sorted([i for batches in ranks for batch in batches for i in batch["id"].tolist()]) == list(range(n))
    assert all(len(batch["tokens"]) == len(batch) for batches in ranks for batch in batches)


@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_get_as_many_tokens(drop_last: bool):
    data = text(203)
    how: dict[str, Any] = {"batch_size": 16, "shuffle": True, "world_size": 4, "drop_last": drop_last}
    plain, ours = [
        [list(loader(data, rank=r, **how, **more)) for r in range(4)]
        for more in ({}, {"balance": True, "key": "tokens"})
    ]
    assert {len(batches) for batches in ours} == ({3} if drop_last else {4})

    def spread(ranks: list[list[TensorDict]]) -> float:
        sums = torch.tensor([[float(batch["n"].sum()) for batch in batches[:3]] for batches in ranks])
        return (sums.amax(0) / sums.mean(0)).max().item()

    assert spread(ours) < 1.01 < spread(plain)
    seen = [i for batches in ours for batch in batches for i in batch["id"].tolist()]
    assert len(seen) == len(set(seen)) == (192 if drop_last else 203)
    for k in range(3):  # the round has the examples that it has without
        rounds = [sorted([i for batches in ranks for i in batches[k]["id"].tolist()]) for ranks in (plain, ours)]
        assert rounds[0] == rounds[1]


def test_wrong_states():
    batches = loader(td(), batch_size=5, shuffle=True)
    next(iter(batches))
    good = batches.state_dict()
    for change, error, words in [
        ({"seed": 7}, StructureError, "at seed: 7, here 0"),
        ({"examples": 22, "even": False}, StructureError, "got 2 others\nat examples: 22, here 23\nat even: False"),
        ({"batch": 4, "world_size": 2}, ShapeError, "expected at most 3 batches in epoch 0, got 4"),
        ({"batch": 99}, ShapeError, "expected at most 5 batches in epoch 0, got 99"),
        ({"batch": -1}, ShapeError, "batch of 0 or more"),
        ({"epoch": "1"}, DtypeError, "expected an int for "),
    ]:
        with pytest.raises(error) as caught:
            batches.load_state_dict({**good, **change})
        assert words in str(caught.value)
    with pytest.raises(KeyPathError, match="a dict without epoch, batch"):
        batches.load_state_dict({})
    with pytest.raises(DtypeError, match="expected a Mapping"):
        batches.load_state_dict([1])
    with pytest.raises(ShapeError, match="epoch of 0 or more"):
        batches.set_epoch(-1)
    assert batches.state_dict() == good
    other = loader(text(), max_tokens=90, key="tokens")
    with pytest.raises(KeyPathError, match="without max_tokens, tokens"):
        other.load_state_dict(good)


def test_a_position_that_is_not_there_is_refused():
    with pytest.raises(IndexingError):
        Dataset(td())[23]


@pytest.mark.parametrize("get", [lambda batch: batch, lambda batch: batch.to("cpu", torch.float64), lambda b: b[:-1]])
def test_one_graph_for_all_batches(get: Any):
    """Labels beside ragged rows vary as these do: found as a step that compiled twice."""
    run = tdc.compile.counted(lambda batch: batch["tokens"].mean(1) - batch["n"], backend="eager")
    for batch in loader(text().float(), max_tokens=300, key="tokens"):
        got = get(batch)
        torch.testing.assert_close(run(got), got["tokens"].mean(1) - got["n"], equal_nan=True)
    assert run.counts.compiles == 1
