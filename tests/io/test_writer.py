"""tdc.io.writer: batches of a data set that grows: shards, who reads meanwhile, resumption, wrong input."""

from __future__ import annotations

import os
import pickle
import signal
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import tdc
from tdc import DtypeError, FormatError, IndexingError, ShapeError, StructureError, TensorDict, UnsupportedError
from tdc.data import Dataset


def rows(first: int, n: int) -> TensorDict:
    numbers = range(first, first + n)
    text = tdc.pack([torch.full((i % 4,), i) for i in numbers]) if n else tdc.pack([torch.zeros(1).long()])[:0]
    mask = tdc.pack([torch.full((1 + i % 3,), float(i)) for i in numbers] or [torch.zeros(1)]).to_padded(0.0)[:n]
    tags = tdc.ObjectArray([str(i) for i in numbers])
    return TensorDict({"text": text, "id": torch.arange(first, first + n), "in": {"m": mask, "tag": tags}}, [n])


def same(td: TensorDict, want: list[int]) -> bool:
    texts = td["text"].tolist() == [[i] * (i % 4) for i in want]
    padded = [x.tolist() for x in td["in", "m"].unbind()] == [[float(i)] * (1 + i % 3) for i in want]
    return texts and padded and td["id"].tolist() == want and td["in", "tag"].tolist() == [str(i) for i in want]


def test_batches_become_shards(tmp_path: Path):
    with tdc.io.writer(tmp_path / "set", rows=5) as out:
        for first, n in ((0, 3), (3, 0), (3, 4), (7, 6), (13, 1)):
            out.append(rows(first, n))
        assert len(out) == 14
        assert repr(out) == "Writer(13 rows in 2 shards, 1 to be written)"
    assert repr(out) == "Writer(14 rows in 3 shards, closed)"
    assert [len(part) for part in Dataset(tmp_path / "set").parts] == [7, 6, 1]
    assert same(Dataset(tmp_path / "set").td, list(range(14)))


@pytest.mark.parametrize("index", [[], [13], [0, 1], [13, 0, 7, 7, -1, 6], list(range(13, -1, -1))])
def test_examples_of_several_shards(tmp_path: Path, index: list[int]):
    with tdc.io.writer(tmp_path / "set", rows=5) as out:
        for first in range(0, 14, 2):
            out.append(rows(first, 2))
    dataset = Dataset(tmp_path / "set")
    assert same(dataset.__getitems__(index), [i % 14 for i in index])
    for i in index:
        assert dataset[i]["in", "tag"] == str(i % 14)
        assert int(dataset[i]["id"]) == i % 14
    with pytest.raises(IndexingError, match="from -14 to 13, got 14"):
        dataset[14]
    whole: Any = dataset
    mask = torch.tensor([i in index for i in range(14)])
    assert same(whole[index], [i % 14 for i in index])
    assert same(whole[3:12:4], [3, 7, 11])
    assert same(whole[-2:], [12, 13])
    assert same(whole[mask], [i for i in range(14) if i in index])


def test_is_read_while_it_grows(tmp_path: Path):
    out = tdc.io.writer(tmp_path / "set", rows=2)
    with pytest.raises(FormatError):
        Dataset(tmp_path / "set")
    out.append(rows(0, 2))
    early = Dataset(tmp_path / "set")
    sent = pickle.dumps(early)
    out.append(rows(2, 3))
    assert same(early.td, [0, 1])
    assert same(Dataset(tmp_path / "set").td, [0, 1, 2, 3, 4])
    assert same(pickle.loads(sent).td, [0, 1])
    assert len(sent) < 1000


def test_loaders_take_all_shards(tmp_path: Path):
    with tdc.io.writer(tmp_path / "set", rows=4) as out:
        for first in range(0, 18, 3):
            out.append(rows(first, 3))
    path = tmp_path / "set"
    whole = Dataset(path).td
    balanced = {"batch_size": 4, "balance": True, "key": "text"}
    cases: list[dict[str, Any]] = [{"batch_size": 5}, {"max_tokens": 12, "key": "text"}, balanced]
    for settings in cases:
        batches = [tdc.data.loader(source, shuffle=True, **settings) for source in (path, whole)]
        for one, other in zip(*batches, strict=True):
            assert same(one, other["id"].tolist())
    keys = Dataset(path, keys=["id"])
    assert [batch.keys() for batch in tdc.data.loader(keys, 9)] == [("id",)] * 2


def test_goes_on_with_what_is_there(tmp_path: Path):
    with tdc.io.writer(tmp_path / "set", rows=2) as out:
        out.append(rows(0, 3))
    out = tdc.io.writer(tmp_path / "set", rows=100)
    out.append(rows(3, 2))
    with pytest.raises(ZeroDivisionError), out:
        out.append(rows(5, 1 // (len(out) - 5)))
    with tdc.io.writer(tmp_path / "set") as out:
        assert len(out) == 3
        out.append(rows(len(out), 2))
        with pytest.raises(StructureError, match="id: missing"):
            out.append(rows(0, 1).exclude("id"))
    assert same(Dataset(tmp_path / "set").td, [0, 1, 2, 3, 4])


def test_a_killed_writer_leaves_whole_shards(tmp_path: Path):
    child = os.fork()
    if not child:  # no operation of torch in parallel runs behind a fork of one thread
        try:
            out = tdc.io.writer(tmp_path / "set", rows=4)
            for first in count(step=2):
                out.append(rows(first, 2))
        finally:
            os._exit(1)
    time.sleep(0.5)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with tdc.io.writer(tmp_path / "set") as out:
        found = len(out)
        assert found % 4 == 0
        out.append(rows(found, 1))
    assert same(Dataset(tmp_path / "set").td, list(range(found + 1)))
    assert not [name for name in os.listdir(tmp_path / "set") if name.startswith(".")]


def test_load_of_shards_says_what_reads_them(tmp_path: Path):
    with tdc.io.writer(tmp_path / "set") as out:
        out.append(rows(0, 3))
    with pytest.raises(FormatError, match=r"hint: tdc.data.Dataset\(path\) of the shards of a Writer$"):
        tdc.io.load(tmp_path / "set")
    assert len(Dataset(tmp_path / "set")) == 3


def test_all_shards_have_one_shared_tensor(tmp_path: Path):
    edges = torch.arange(4)
    td = TensorDict({"x": torch.arange(2), "edges": tdc.Shared(edges)}, [2])
    with tdc.io.writer(tmp_path / "set", rows=2) as out:
        out.append(td)
        out.append(td.set("edges", tdc.Shared(edges.clone())))
        edges += 1
        with pytest.raises(StructureError, match="expected one Shared tensor for all"):
            out.append(td)
    with tdc.io.writer(tmp_path / "set", rows=2) as out, pytest.raises(StructureError, match="expected one Shared"):
        out.append(td)
    found = Dataset(tmp_path / "set").td
    assert found["x"].tolist() == [0, 1, 0, 1]
    assert found["edges"].tolist() == [0, 1, 2, 3]


def test_batches_may_be_written_to_behind_append(tmp_path: Path):
    x = torch.zeros(2)
    with tdc.io.writer(tmp_path / "set") as out:
        for i in range(3):
            out.append(TensorDict({"x": x.fill_(i)}, [2]))
    assert Dataset(tmp_path / "set").td["x"].tolist() == [0, 0, 1, 1, 2, 2]


def test_wrong_input(tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("x")
    writer: Any = tdc.io.writer
    out: Any = writer(tmp_path / "set")
    wrong: list[tuple[type[Exception], Any]] = [
        (FormatError, lambda: writer(tmp_path / "full")),
        (ShapeError, lambda: writer(tmp_path / "a", rows=0)),
        (DtypeError, lambda: writer(tmp_path / "a", rows=1.5)),
        (DtypeError, lambda: writer(3)),
        (DtypeError, lambda: writer(tmp_path / "a", sync="no")),
    ]
    wrong += [
        (FormatError, lambda: tdc.io.writer(tmp_path / "set")),  # while another one has it
        (DtypeError, lambda: out.append(torch.ones(2))),
        (ShapeError, lambda: out.append(TensorDict({"x": torch.ones(2)}))),
        (UnsupportedError, lambda: out.append(TensorDict({"x": torch.ones(2, 2).to_sparse()}, [2]))),
        (UnsupportedError, lambda: pickle.dumps(out)),
    ]
    for kind, run in wrong:
        with pytest.raises(kind) as error:
            run()
        assert len(str(error.value).splitlines()) <= 4, error.value
    out.append(rows(0, 2))
    out.close()
    out.close()
    with pytest.raises(StructureError, match="closed"):
        out.append(rows(2, 2))
