"""A store gives back what was saved: every kind of leaf, dtype, key and tie; parts of it; both modes."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import Point, every_kind, root_of, same, same_bits
from torch import nn

import tdc
from tdc import Static, TensorDict
from tdc.io import load, memmap_empty, save
from tdc.io.filenames import encoded, file_name
from tdc.io.manifest import DTYPES

NAMES = [
    "", ".", "..", "...", "/", "a/b", "../x", "/etc/passwd", "\0", "\n", " ", "%", "%2E", "~", "a~b", "größe", "深い",
    "\udc80", "x" * 300, "ß" * 300, "shape", "device", "_type", "meta.json", ".tdc-1", "entries", "kind", "values",
    "con", "x.memmap",
]  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_everything_comes_back(path: Path):
    td = every_kind()
    save(td, path)
    back = load(path, classes=[Point])
    assert same(td, back)
    assert type(back) is TensorDict
    assert type(back["point"]) is Point
    assert back["point"].name == "here"
    assert type(load(path)["point"]) is TensorDict
    assert back["info"].batch_size == (3, 4)
    assert back["split"] == ("train", 1, None, (2.5, True))
    assert back["images"].ragged_dims == (1, 2)
    assert {type(x) for x in back.values(True, True) if isinstance(x, torch.Tensor)} == {torch.Tensor}


def test_layout(path: Path):
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    save(tdc.from_module(net), path)
    files = sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())
    assert files == ["0/bias.memmap", "0/weight.memmap", "1/bias.memmap", "1/weight.memmap", "meta.json"]
    assert (path / "0" / "weight.memmap").stat().st_size == 4 * 3 * 4
    assert os.listdir(path.parent) == ["store"]
    assert same_bits(load(path)["0", "weight"], net[0].weight.detach())


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(path: Path, name: str):
    raw = torch.randint(0, 2 if name == "bool" else 256, (4, 3, DTYPES[name].itemsize), dtype=torch.uint8)
    x = raw.view(DTYPES[name]).squeeze(-1)
    save(TensorDict({"x": x, "zero": x[:, :0], "one": x[0, 0]}), path)
    back = load(path, verify=False)
    assert all(same_bits(back[key], value) for key, value in [("x", x), ("zero", x[:, :0]), ("one", x[0, 0])])


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_keys(path: Path, name: str):
    td = TensorDict({name: torch.ones(2), "in": {name: {name: torch.zeros(2)}}}, [2])
    save(td, path)
    assert same(load(path), td)
    assert torch.equal(load(path, ("in", name, name)), torch.zeros(2))
    assert {p.parent for p in path.rglob("*")} <= {path, path / "in", path / "in" / encoded(name)}
    assert len(file_name(name, "offsets")) <= 255


def test_names_are_injective():
    assert len({encoded(name) for name in [*NAMES, "x" * 301, "%7E", "%252E", "2E"]}) == len(NAMES) + 4


def test_views_and_what_shares_memory(path: Path):
    big = torch.arange(10_000.0)
    z = torch.randn(3, dtype=torch.complex64)
    td = TensorDict(
        {
            "view": big[5:8], "expanded": torch.ones(1, 2).expand(3, 2), "transposed": torch.rand(4, 3).t(),
            "conj": z.conj(), "neg": z.conj().imag, "grad": torch.ones(3, requires_grad=True),
            "parameter": nn.Parameter(torch.ones(3)),
        },
        [3],
    )  # fmt: skip
    save(td, path)
    assert same(load(path), td)
    assert (path / "view.memmap").stat().st_size == 12
    assert not load(path).requires_grad


def test_ties(path: Path):
    x = torch.rand(4, 3)
    td = TensorDict({"a": {"w": x}, "b": {"w": x, "row": x[0]}, "again": x[0], "t": x.t()})
    save(td, path)
    back = load(path)
    assert back["a", "w"] is back["b", "w"]
    assert back["b", "row"] is back["again"]
    assert back["a", "w"] is not back["t"]
    assert sorted(p.name for p in path.rglob("*.memmap")) == ["row.memmap", "t.memmap", "w.memmap"]
    part = load(path, "b")
    assert torch.equal(part["w"], x)
    assert torch.equal(part["row"], x[0])


def test_ragged_leaves_share_their_structure(path: Path):
    save(every_kind(), path)
    back = load(path)
    assert back["text"].structure is back["labels"].structure
    assert torch.equal((back["text"] * back["labels"].unsqueeze(-1)).values, torch.full((5, 5), 5.0))


def test_parts(path: Path, monkeypatch: pytest.MonkeyPatch):
    td = every_kind()
    save(td, path)
    opened: list[str] = []
    original = os.open
    monkeypatch.setattr(os, "open", lambda name, *a, **k: opened.append(str(name)) or original(name, *a, **k))
    assert torch.equal(load(path, ("info", "deep", "id")), td["info", "deep", "id"])
    assert opened == [str(path), "meta.json", "info", "deep", "id.memmap"]
    assert same(load(path, "info"), td["info"])
    assert load(path, "split") == td["split"]
    assert load(path, ("point",), classes=[Point]).name == "here"
    assert same(load(path, ["weight", ("info", "q"), "split"]), td.select("weight", ("info", "q"), "split"))
    assert type(load(path, [("point", "xy")], classes=[Point])["point"]) is TensorDict
    assert load(path, []).is_empty()


def test_modes(path: Path):
    td = TensorDict({"x": torch.zeros(3), "rest": {"y": torch.zeros(3, 2)}}, [3])
    save(td, path)
    copied, shared = load(path), load(path, mode="r+")
    tdc.copy_(copied, {"x": torch.ones(())}, index=0)
    assert load(path)["x"].tolist() == [0, 0, 0]
    tdc.copy_(shared, {"x": torch.tensor([2.0, 3.0]), "rest": {"y": torch.ones(2, 2)}}, index=slice(1, 3))
    assert load(path)["x"].tolist() == [0, 2, 3]
    assert load(path)["rest", "y"].sum() == 4
    assert copied["x"].tolist() == [1, 0, 0]


def test_memmap(path: Path):
    td = Point(torch.rand(3, 2), batch_size=[3])
    back = td.memmap(path)
    assert type(back) is Point
    assert torch.equal(back.xy, td.xy)
    shared = back[:2].memmap(path, overwrite=True, mode="r+")
    tdc.copy_(shared, 1)
    assert load(path)["xy"].tolist() == [[1, 1], [1, 1]]
    assert torch.equal(back.xy, td.xy)  # what was mapped before stays


def test_memmap_empty(path: Path):
    schema = {"obs": ((4,), torch.float32), "info": {"done": ((), torch.bool)}}
    buffer = memmap_empty(schema, path, [100])
    assert not buffer["obs"].any()
    for i in range(0, 100, 10):
        tdc.copy_(
            buffer,
            TensorDict({"obs": torch.full((10, 4), i), "info": {"done": torch.ones(10) > 0}}, [10]),
            slice(i, i + 10),
        )
    back = load(path)
    assert back["obs"][:, 0].tolist() == [i // 10 * 10 for i in range(100)]
    assert back["info", "done"].all()
    assert type(memmap_empty(Point(torch.rand(3, 2), batch_size=[3]), path, [0], overwrite=True)) is Point


def test_checksums(path: Path):
    td = every_kind()
    save(td, path, checksums=True)
    assert same(load(path, verify=True, classes=[Point]), td)
    file = path / "info" / "q.memmap"
    data = bytearray(file.read_bytes())
    data[17] ^= 1
    file.write_bytes(data)
    load(path)
    load(path, "text", verify=True)
    with pytest.raises(tdc.FormatError, match=r"at info.q: its checksum is wrong"):
        load(path, verify=True)


def test_no_descriptors_are_kept(path: Path):
    save(TensorDict({f"{i}": {f"{j}": torch.ones(2) for j in range(10)} for i in range(30)}), path)
    before = len(os.listdir("/proc/self/fd"))
    td = load(path)
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(td.keys(True, True)) == 300


def test_without_descriptors_of_the_system(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tdc.io.files.HAS_DESCRIPTORS", False)
    td = every_kind()
    save(td, path)
    assert same(load(path, classes=[Point]), td)
    tdc.copy_(load(path, mode="r+"), {"weight": torch.zeros(3, 4)})
    assert not load(path)["tied"].any()


def test_moved_while_mapped(path: Path):
    save(every_kind(), path)
    back = load(path)
    path.rename(path.with_name("elsewhere"))
    assert same(back, load(path.with_name("elsewhere")))


def test_loaded_leaves_compile_and_pickle(path: Path):
    td = every_kind().exclude("caption")
    save(td, path)
    back = load(path)
    run = torch.compile(lambda t: (t["weight"] * 2, t["text"].sum(1)), backend="eager", fullgraph=True)
    assert torch.equal(run(back)[0], td["weight"] * 2)
    assert same(pickle.loads(pickle.dumps(back)), back)


def test_on_another_default_device(path: Path):
    save(every_kind().exclude("caption"), path)
    with torch.device("meta"):
        back = load(path, classes=[Point])
    assert same(back, every_kind().exclude("caption").update(back.select("images", "info")))


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, None])
def test_file_systems_that_cannot_reserve(path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None):
    def refuse(*args: Any) -> None:
        raise OSError(code, "no")

    monkeypatch.setattr("tdc.io.files.BLOCK", 1000)
    if code is None:
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    buffer = memmap_empty({"x": ((321,), torch.float64)}, path, [2])
    assert not buffer["x"].any()
    assert (path / "x.memmap").stat().st_blocks * 512 >= 321 * 16


def test_many_leaves_and_depth(path: Path):
    td = TensorDict({tuple("abcd" * 15): torch.ones(1), **{f"k{i}": torch.tensor(i) for i in range(2000)}})
    save(td, path, sync=False)
    assert same(load(path), td)
    save(TensorDict({("x",) * 64: torch.ones(1)}), path, overwrite=True)
    with pytest.raises(tdc.FormatError, match="at most 1000000 entries, 64 deep"):
        save(TensorDict({("x",) * 65: torch.ones(1)}), path, overwrite=True)
    assert same(load(path), TensorDict({("x",) * 64: torch.ones(1)}))


def test_paths(path: Path, monkeypatch: pytest.MonkeyPatch):
    td = TensorDict({"x": torch.ones(2)})
    monkeypatch.chdir(path.parent)
    save(td, "store")
    save(td, b"store/", overwrite=True)  # type: ignore[arg-type]  # any path that `os` takes
    for spelling in ("store", "store/", "./store", str(path), path):
        assert same(load(spelling), td)
    monkeypatch.chdir(path)
    assert same(load("."), td)
    (path.parent / "empty").mkdir()
    save(td, path.parent / "empty")
    assert same(load(path.parent / "empty"), td)


def test_manifest_is_small(path: Path):
    save(TensorDict({f"layer{i}": torch.ones(2) for i in range(100)}), path)
    assert (path / "meta.json").stat().st_size < 100 * 80
    assert list(root_of(path)["entries"])[:2] == ["layer0", "layer1"]


def endless() -> list[Any]:
    x: list[Any] = []
    x.append(x)
    return x


def refused(value: Any) -> TensorDict:
    return TensorDict({"ok": torch.ones(2), "inner": {"bad": value}}, [2])


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, 3).to_sparse(), torch.ones(2, device="meta"),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        tdc.ObjectArray([object(), "a"]), tdc.ObjectArray([(1,), "a"]), tdc.ObjectArray([float("nan"), 1.0]),
        tdc.ObjectArray([{1: 2}, 1]), tdc.ObjectArray([endless(), 1]), Static(10**5000),
        Static(torch.float32), Static(float("inf")), Static(b"x"),
        Static((1, frozenset())), Static(1j),
    ],
    ids=lambda x: type(x).__name__,
)  # fmt: skip
def test_what_has_no_place_in_a_file_is_refused(path: Path, value: Any):
    with pytest.raises(
        tdc.UnsupportedError, match=r"tdc\.io\.save: expected .*got 1 others\nat inner\.bad: .*\nhint: "
    ):
        save(refused(value), path)
    assert os.listdir(path.parent) == []
