"""Dataset under torch's own DataLoader: workers, pickles that carry a path, samplers, wrong sources."""

from __future__ import annotations

import pickle
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

import tdc
from tdc import DtypeError, FormatError, KeyPathError, ShapeError, TensorDict
from tdc.data import BucketSampler, Dataset, TokenBudgetSampler, collate


def data(n: int = 40) -> TensorDict:
    tokens = tdc.pack([torch.full((1 + i % 7,), i) for i in range(n)])
    return TensorDict({"tokens": tokens, "info": {"id": torch.arange(n)}}, [n])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tdc.io.save(data(), tmp_path / "store")
    return tmp_path / "store"


def ids(batches: Any) -> list[list[int]]:
    found = []
    for batch in batches:
        found.append(batch["info", "id"].tolist())
        assert [set(row) for row in batch["tokens"].tolist()] == [{i} for i in found[-1]]
    return found


WORKERS = [0, pytest.param(2, marks=pytest.mark.slow)]


@pytest.mark.cases(2, 1)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("stored", [False, True])
def test_under_a_dataloader(path: Path, stored: bool, workers: int):
    dataset = Dataset(path) if stored else Dataset(data())
    settings: dict[str, Any] = {"collate_fn": collate, "num_workers": workers}
    settings |= {"multiprocessing_context": "spawn"} if workers else {}
    want = [list(range(i, min(i + 16, 40))) for i in range(0, 40, 16)]
    assert ids(DataLoader(dataset, batch_size=16, **settings)) == want
    shuffled = ids(DataLoader(dataset, batch_size=16, shuffle=True, **settings))
    assert sorted(chain(*shuffled)) == list(range(40))
    for kind in (TokenBudgetSampler, BucketSampler):
        sampler = kind(dataset.td["tokens"], 20, seed=2)
        assert ids(DataLoader(dataset, batch_sampler=sampler, **settings)) == list(kind(data()["tokens"], 20, seed=2))
        assert sampler.epoch == 1


@pytest.mark.sweep
@pytest.mark.slow
def test_one_worker_is_spawned(path: Path):
    settings: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn", "collate_fn": collate}
    assert ids(DataLoader(Dataset(path), batch_size=20, **settings)) == [list(range(20)), list(range(20, 40))]


def test_samplers_of_torch(path: Path):
    dataset = Dataset(path)
    for sampler in (SequentialSampler(dataset), RandomSampler(dataset)):
        loader = DataLoader(dataset, batch_sampler=BatchSampler(sampler, 7, True), collate_fn=collate)
        assert [len(batch) for batch in ids(loader)] == [7] * 5
    subset = torch.utils.data.Subset(dataset, [3, 1, 4])
    assert ids(DataLoader(subset, batch_size=2, collate_fn=collate)) == [[3, 1], [4]]


def test_batches_by_a_sampler_of_batches(path: Path):
    batches = BatchSampler(SequentialSampler(range(40)), 16, False)
    loader = DataLoader(Dataset(path), sampler=batches, batch_size=None)
    assert ids(loader) == [list(range(16)), list(range(16, 32)), list(range(32, 40))]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_its_thread_pins(path: Path):
    loader = DataLoader(Dataset(path), batch_size=20, collate_fn=collate, pin_memory=True)
    assert all(batch["tokens"].values.is_pinned() and batch["info", "id"].is_pinned() for batch in loader)


def test_one_example_at_a_time(path: Path):
    dataset = Dataset(path)
    assert dataset[3]["tokens"].tolist() == [3, 3, 3, 3]
    assert dataset[-1]["info", "id"] == 39
    assert len(dataset) == 40
    assert len(list(dataset)) == 40
    first, _ = torch.utils.data.random_split(dataset, [30, 10], torch.Generator().manual_seed(0))
    stacked = collate([first[0], first[1]], ragged_keys=["tokens"])
    assert stacked["tokens"].shape == (2, -1)
    assert dataset.__getitems__([]).batch_size == (0,)


def test_a_pickle_carries_the_path(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(path.parent)
    dataset = Dataset("store", keys=["info"])
    assert repr(dataset) == f"Dataset(40 examples of {str(path)!r})"
    text = pickle.dumps(dataset)
    assert len(text) < 300
    monkeypatch.chdir("/")
    again = pickle.loads(text)
    assert again.td.keys() == ("info",)
    assert torch.equal(again.td["info", "id"], torch.arange(40))
    in_memory = Dataset(data())
    assert repr(in_memory) == "Dataset(40 examples)"
    assert pickle.loads(pickle.dumps(in_memory))[7]["tokens"].tolist() == [7]


def test_a_store_that_changed_is_refused(path: Path):
    text = pickle.dumps(Dataset(path))
    tdc.io.save(data(39), path, overwrite=True)
    with pytest.raises(FormatError, match=r"of batch size \[40\], got another one at .*, of \[39\]\nhint: make"):
        _ = pickle.loads(pickle.dumps(pickle.loads(text)))[0]
    tdc.io.save(data(40), path, overwrite=True)  # whose lengths a sampler does not know
    with pytest.raises(FormatError, match="expected the store that the dataset was made from"):
        len(pickle.loads(text))
    assert len(pickle.loads(pickle.dumps(Dataset(path)))) == 40


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("there", [True, False])
def test_a_worker_hands_on_what_is_wrong_with_a_store(path: Path, there: bool):
    settings: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn", "collate_fn": collate}
    dataset: Any = Dataset(path)
    loader = DataLoader(dataset, batch_size=4, **settings)
    if there:
        tdc.io.save(data(40), path, overwrite=True)
    else:
        path.rename(path.parent / "away")
    text = "the store that the dataset was made from" if there else "a store, got nothing at"
    with pytest.raises(FormatError, match=f"(?s)Caught FormatError in DataLoader worker.*expected {text}"):
        next(iter(loader))


def test_keys(path: Path):
    for source in (path, data()):
        dataset = Dataset(source, keys=[("info", "id")])
        assert dataset[5]["info", "id"] == 5
        assert "tokens" not in dataset.td
        for keys in ("info", ["nothing"]):
            with pytest.raises(KeyPathError):
                Dataset(source, keys=keys)


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ([1, 2], DtypeError, "expected a TensorDict or the path of a store, got list"),
        ({"x": torch.zeros(3)}, DtypeError, "got dict"),
        (None, DtypeError, "got NoneType"),
        (TensorDict({"x": torch.zeros(3)}), ShapeError, "hint: td.with_batch_size([n])"),
        ("nowhere", FormatError, "tdc.io.load: expected"),
    ],
)
def test_wrong_sources(source: Any, error: type[Exception], words: str):
    with pytest.raises(error) as caught:
        Dataset(source)
    assert words in str(caught.value)
