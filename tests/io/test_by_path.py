"""A TensorDict of a store is pickled by path: what comes back, and what happens if the store is another one by then."""

from __future__ import annotations

import copy
import io
import os
import pickle
import shutil
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import Point, every_kind, same

import tdc
from tdc import FormatError, MaskedBatch, NestedTensor, TensorDict
from tdc.io import load, memmap_empty, save
from tdc.io.by_path import Parcel, is_open_store
from tdc.io.files import is_written, origin_of
from tdc.io.manifest import DTYPES

LARGE = 100_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def there_and_back(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


def large(path: Path, **settings: Any) -> TensorDict:
    """A store of 800 KB."""
    return TensorDict({"x": torch.arange(2.0 * LARGE).view(LARGE, 2)}, [LARGE]).memmap(path, sync=False, **settings)


PARTS: dict[str, Callable[[TensorDict], Any]] = {
    "all": lambda td: td, "rows": lambda td: td[1:3], "no rows": lambda td: td[3:], "one": lambda td: td[1],
    "node": lambda td: td["info"], "rows of a node": lambda td: td["info"][:, 1:3], "class": lambda td: td["point"],
    "keys": lambda td: td.select("text", ("info", "q")), "steps": lambda td: td.select("weight", "info")[::2],
    "transposed": lambda td: td["info"].transpose(0, 1), "gathered": lambda td: td[torch.tensor([2, 0])],
    "more keys": lambda td: td.set("h", td["text"] * 2).set("n", torch.ones(3)),
    "bits": lambda td: TensorDict({"x": td["weight"].view(torch.int32)[:, 1]}, [3]),
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_what_comes_back(path: Path, part: str):
    td = PARTS[part](every_kind().memmap(path))
    back = there_and_back(td)
    assert type(back) is type(td)
    assert same(back, td)


def test_ties_classes_and_structures_come_back(path: Path):
    save(every_kind(), path)
    back = there_and_back(load(path, classes=[Point]).set("h", torch.ones(3)))
    assert back["weight"] is back["tied"]
    assert back["text"].structure is back["labels"].structure
    assert type(back["point"]) is Point
    assert origin_of(back["weight"]) == origin_of(load(path, "weight"))
    assert origin_of(back["h"]) is None


def test_paths_take_no_room(path: Path):
    td = large(path)
    assert len(pickle.dumps(td)) < 600
    assert len(pickle.dumps(td[5:-5])) < 600
    assert len(pickle.dumps(td.set("y", torch.zeros(LARGE)))) > 4 * LARGE
    assert there_and_back(td[7:9])["x"].tolist() == [[14, 15], [16, 17]]


def test_a_relative_path_is_that_of_the_load(path: Path, monkeypatch: pytest.MonkeyPatch):
    large(path)
    monkeypatch.chdir(path.parent)
    data = pickle.dumps(load("store"))
    monkeypatch.chdir("/")
    assert pickle.loads(data)["x"][1].tolist() == [2, 3]


def test_the_mode_comes_back(path: Path):
    td = TensorDict({"x": torch.zeros(4)}, [4]).memmap(path)
    tdc.copy_(there_and_back(td), {"x": torch.ones(4)})
    assert load(path)["x"].tolist() == [0, 0, 0, 0]
    tdc.copy_(there_and_back(load(path, mode="r+")[1:3]), {"x": torch.ones(2)})
    assert load(path)["x"].tolist() == [0, 1, 1, 0]


def test_files_and_copies_have_the_data(path: Path):
    td = large(path, mode="r+")
    file = io.BytesIO()
    torch.save(td, file)
    copied, old = copy.deepcopy(td), pickle.dumps(td, protocol=2)
    tdc.copy_(copied, 0)
    assert td["x"][1].tolist() == [2, 3]
    shutil.rmtree(path)
    file.seek(0)
    assert torch.load(file)["x"][1].tolist() == [2, 3]
    assert pickle.loads(old)["x"][1].tolist() == [2, 3]
    assert copy.copy(td) is td


@pytest.mark.parametrize("how", ["torch", "numpy", "part"])
def test_what_was_written_goes_as_data(path: Path, how: str):
    td = large(path)
    assert not is_written(td["x"])
    assert td["x"].sum() > 0
    assert not is_written(td["x"])  # reading is no writing
    if how == "torch":
        tdc.copy_(td, {"x": torch.full((2,), -1.0)}, index=LARGE - 1)
    else:
        td["x"].numpy()[-1] = -1
    back = there_and_back(td[-2:] if how == "part" else td)
    assert back["x"][-1].tolist() == [-1, -1]
    assert len(pickle.dumps(td[: LARGE // 2])) < 600  # another page


def test_where_the_system_cannot_tell(path: Path, monkeypatch: pytest.MonkeyPatch):
    td = large(path)
    monkeypatch.setattr("tdc.io.files.PAGES", "/nowhere")
    assert len(pickle.dumps(td)) > 8 * LARGE
    assert len(pickle.dumps(load(path, mode="r+"))) < 600


def test_memory_that_is_no_longer_the_file(path: Path):
    td = large(path)
    td["x"].set_(torch.zeros(3).untyped_storage(), 0, (3,), (1,))
    assert origin_of(td["x"]) is None
    other = load(path)
    other["x"].untyped_storage().tdc_address += 1  # type: ignore[attr-defined]  # as if its memory had been exchanged
    assert origin_of(other["x"]) is None


@pytest.mark.parametrize("written", [False, True])
def test_through_a_queue_of_torch(path: Path, written: bool):
    td = large(path)
    if written:
        td["x"].numpy()[1] = 5
    back = pickle.loads(ForkingPickler.dumps(td))
    assert back["x"][1].tolist() == td["x"][1].tolist()
    part = pickle.loads(ForkingPickler.dumps(Parcel(td))).open()
    assert torch.equal(part["x"], td["x"])


def test_a_store_that_was_replaced(path: Path):
    td = large(path)
    data, written = pickle.dumps(td), pickle.dumps(load(path, mode="r+"))
    save(TensorDict({"x": torch.zeros(LARGE, 2)}, [LARGE]), path, overwrite=True)
    for sent in (data, written):
        with pytest.raises(
            FormatError, match=r"expected the store that was pickled, got another version at .*store'\nhi"
        ):
            pickle.loads(sent)
    assert there_and_back(td)["x"][1].tolist() == [2, 3]  # as data, which is all that is left of it


def test_a_store_that_is_gone(path: Path):
    td = large(path)
    data, written = pickle.dumps(td), load(path, mode="r+")
    shutil.rmtree(path)
    for sent in (data, pickle.dumps(written)):
        with pytest.raises(FormatError, match=r"tdc.io.load: expected a store, got nothing at .*store'\nhint: "):
            pickle.loads(sent)
    assert there_and_back(td)["x"][1].tolist() == [2, 3]


@pytest.mark.parametrize("size", [0, 8 * LARGE - 1])
def test_a_store_that_was_damaged(path: Path, size: int):
    data = pickle.dumps(large(path))
    os.truncate(path / "x.memmap", size)
    with pytest.raises(FormatError, match=rf"at x: its file has {size} bytes instead of {8 * LARGE}"):
        pickle.loads(data)
    (path / "x.memmap").unlink()
    with pytest.raises(FormatError, match="at x: its file is missing"):
        pickle.loads(data)


def test_leaves_of_two_stores(tmp_path: Path):
    a, b = large(tmp_path / "a"), large(tmp_path / "b", mode="r+")
    back = there_and_back(TensorDict({"a": a, "b": b["x"], "c": torch.ones(LARGE)}, [LARGE]))
    assert [origin_of(back[key]) is None for key in (("a", "x"), "b", "c")] == [False, False, True]
    assert [origin_of(back[key]).source.shared for key in (("a", "x"), "b")] == [False, True]  # type: ignore[union-attr]  # both are


def test_a_leaf_that_requires_a_gradient(path: Path):
    td = large(path).apply(lambda x: x.requires_grad_())
    assert there_and_back(td)["x"].requires_grad


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(path: Path, name: str):
    x = torch.randint(0, 2, (3, 16), dtype=torch.uint8).view(DTYPES[name])
    td = TensorDict({"x": x, "tied": x, "every": x[:, ::2], "row": NestedTensor(x, torch.tensor([0, 1, 1, 3]))}, [3])
    stored = td.set("none", x[:, :0]).memmap(path)
    padded = MaskedBatch(x, torch.tensor([1, 0, x.shape[1]]))
    for given in (td, td.set("padded", padded), stored):  # a leaf without elements has no file's memory
        back = there_and_back(given)
        assert same(back, given)
        assert back["x"] is back["tied"]
    forking: Any = ForkingPickler
    assert same(pickle.loads(forking.dumps(td)), td)
    shared = td.share_memory()
    seen = pickle.loads(forking.dumps(shared))
    shared["x"].view(torch.uint8).fill_(1)
    assert seen["x"].view(torch.uint8).eq(1).all()


def test_a_parcel_holds_what_it_shows():
    td = TensorDict(
        {"x": torch.zeros(LARGE, 2), "text": tdc.pack([torch.ones(n) for n in (3, 9, 1)] * 1000)[:LARGE]}, []
    )
    part = TensorDict({"x": td["x"][:3], "text": td["text"][:3], "padded": td["text"].to_padded()[:3]}, [3])
    data = pickle.dumps(Parcel(part))
    assert len(data) < 3000
    back = pickle.loads(data).open()
    assert same(back, part)
    assert pickle.loads(pickle.dumps(Parcel(td["x"][:2]))).open().tolist() == [[0, 0], [0, 0]]
    assert type(pickle.loads(pickle.dumps(Parcel(part["padded"]))).open()) is MaskedBatch


def test_a_parcel_is_opened_where_it_is_asked_for(path: Path):
    data = pickle.dumps(Parcel(large(path)))
    shutil.rmtree(path)
    sent = pickle.loads(data)
    with pytest.raises(FormatError):
        sent.open()


def test_open_stores(path: Path):
    store = memmap_empty({"x": ((2,), torch.float32), "in": {"y": ((), torch.int64)}}, path, [5])
    assert is_open_store(store)
    assert is_open_store(store[1:3])
    assert not is_open_store(load(path))
    assert not is_open_store(store.set("z", torch.ones(5)))
    assert not is_open_store(TensorDict({}, [5]))


def test_versions_written_at_once_are_told_apart(path: Path):
    found = set()
    for value in range(200):
        td = TensorDict({"x": torch.full((2,), value)}, [2]).memmap(path, overwrite=True, sync=False)
        origin = origin_of(td["x"])
        assert origin is not None
        found.add(origin.source.version)
    assert len({version.time for version in found}) == 200


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_view_of_another_dtype(tmp_path: Path, mode: Any):
    save(TensorDict({"raw": torch.arange(29, dtype=torch.uint8)}), tmp_path / "raw")
    raw = load(tmp_path / "raw", mode=mode)["raw"]
    td = TensorDict({"long": raw[8:24].view(torch.int64), "odd": raw[1:]})
    back = there_and_back(td)
    assert torch.equal(back["long"], td["long"])
    assert torch.equal(back["odd"], td["odd"])
