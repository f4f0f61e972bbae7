"""One safetensors file: what comes back, what other programs read and write, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import soak
import torch
from stores import Point, contents, every_kind, same, same_bits, sealed
from torch import nn

import tdc
from tdc import DtypeError, FormatError, TensorDict
from tdc.io import from_safetensors, to_safetensors
from tdc.io.manifest import DTYPES, Stored
from tdc.io.packed import KNOWN, NAMES

safe = pytest.importorskip("safetensors.torch")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.safetensors"


def test_everything_comes_back(path: Path):
    td = every_kind()
    to_safetensors(td, path)
    back = from_safetensors(path, classes=[Point])
    assert same(td, back)
    assert type(back["point"]) is Point
    assert back["weight"] is back["tied"]
    assert back["text"].structure is back["labels"].structure
    assert os.listdir(path.parent) == [path.name]


def test_other_programs_read_it(path: Path):
    td = every_kind()
    to_safetensors(td, path)
    found = safe.load_file(path)
    assert sorted(found) == sorted([
        "weight", "text.values", "text.offsets", "labels.values", "images.values", "images.offsets", "images.shapes",
        "padded.data", "padded.lengths", "point.xy", "info.q", "info.deep.id",
    ])  # fmt: skip
    assert same_bits(found["text.values"], td["text"].values)
    assert same_bits(found["info.deep.id"], td["info", "deep", "id"])
    with safe.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(path: Path, name: str):
    x = torch.randint(0, 2, (4, 3, DTYPES[name].itemsize), dtype=torch.uint8).view(DTYPES[name]).squeeze(-1)
    td = TensorDict({"odd": torch.ones(3, dtype=torch.uint8), "x": x, "zero": x[:, :0], "one": x[0, 0]})
    if name not in NAMES:
        with pytest.raises(tdc.UnsupportedError, match=f"at x: {name}\nat zero: {name}\nat one: {name}\nhint"):
            to_safetensors(td, path)
        assert not path.exists()
        return
    to_safetensors(td, path)
    assert same(from_safetensors(path), td)
    assert same_bits(safe.load_file(path)["x"], x)


def test_state_dicts_both_ways(path: Path):
    net, other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    to_safetensors(tdc.interop.from_state_dict(net.state_dict()), path)
    assert {k: v.tolist() for k, v in safe.load_file(path).items()} == {
        k: v.tolist() for k, v in net.state_dict().items()
    }
    other.load_state_dict(tdc.interop.to_state_dict(from_safetensors(path)))
    safe.save_file(other.state_dict(), path, {"format": "pt"})
    back = from_safetensors(path)
    assert same_bits(back["0", "weight"], net[0].weight.detach())
    assert back["1", "num_batches_tracked"].shape == ()


def test_modes(path: Path):
    to_safetensors(TensorDict({"a": torch.zeros(3), "b": torch.zeros(2)}), path)
    tdc.copy_(from_safetensors(path), {"a": torch.ones(3)})
    assert not from_safetensors(path)["a"].any()
    tdc.copy_(from_safetensors(path, mode="r+"), {"a": torch.ones(3)})
    assert safe.load_file(path)["a"].tolist() == [1, 1, 1]
    assert not from_safetensors(path)["b"].any()


def packed(head: Any, data: bytes = b"\0" * 24, length: int | None = None) -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def f32(begin: int, end: int, *shape: int, **more: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end], **more}


def test_files_of_other_programs(path: Path):
    """Spaces behind the header, tensors that are not aligned, any order, a link to the file."""
    data = bytes(range(1, 6)) + torch.arange(3.0).numpy().tobytes()
    head = {"b.c": f32(5, 17, 3), "a": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]}}
    text = json.dumps(head).encode()
    path.write_bytes(packed(text + b" " * (4 + -len(text) % 4), data))
    link = path.with_name("link")
    link.symlink_to(path)
    back = from_safetensors(link)
    assert back["b", "c"].tolist() == [0, 1, 2]
    assert back["a"].tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(FormatError, match=r"aligned, for mode='r\+', got 1 that are not\nat b\.c"):
        from_safetensors(path, mode="r+")
    path.write_bytes(packed({"a": f32(0, 4, 1), "a.b": f32(4, 8, 1)}, b"\0" * 8))
    with pytest.raises(tdc.KeyPathError):
        from_safetensors(path)


WHOLE = f32(0, 24, 6)
FILES: dict[str, tuple[str, bytes]] = {
    "empty": ("0 bytes that are not", b""),
    "short": ("7 bytes that are not", b"\0" * 7),
    "header beyond the file": ("bytes that are not", packed({"a": WHOLE}, length=10**6)),
    "header beyond the limit": ("bytes that are not", packed({"a": WHOLE}, length=10**15)),
    "no JSON": ("as the header, got invalid JSON", packed(b"{")),
    "NaN": ("NaN is no JSON", packed(b'{"a": NaN}')),
    "deep": ("nested too deeply", packed(b"[" * 100_000 + b"]" * 100_000)),
    "twice": ("a key is there twice", packed(b'{"a": 1, "a": 2}')),
    "a list": ("a name for each tensor", packed([])),
    "entry a list": ("at a: ", packed({"a": []})),
    "no offsets": ("at a: ", packed({"a": {"dtype": "F32", "shape": [6]}})),
    "another field": ("at a: ", packed({"a": {**WHOLE, "x": 1}})),
    "dtype unknown": ("at a: ", packed({"a": {**WHOLE, "dtype": "F33"}})),
    "dtype a list": ("at a: ", packed({"a": {**WHOLE, "dtype": []}})),
    "shape another": ("at a: ", packed({"a": f32(0, 24, 7)})),
    "shape negative": ("at a: ", packed({"a": f32(0, 24, -6)})),
    "shape of floats": ("at a: ", packed({"a": {**WHOLE, "shape": [6.0]}})),
    "shape overflows": ("at a: ", packed({"a": f32(0, 24, 2**40, 2**40)})),
    "shape overflows, empty": ("at a: ", packed({"a": f32(0, 0, 0, 2**40, 2**40)}, b"")),
    "offsets of bools": ("at a: ", packed({"a": f32(False, 24, 6)})),
    "offsets negative": ("at a: ", packed({"a": f32(-24, 0, 6)})),
    "offsets down": ("at a: ", packed({"a": f32(24, 0, 6)})),
    "gap": ("at b: ", packed({"a": f32(0, 8, 2), "b": f32(12, 24, 3)})),
    "overlap": ("at b: ", packed({"a": f32(0, 16, 4), "b": f32(8, 24, 4)})),
    "gap at the beginning": ("at a: ", packed({"a": f32(4, 24, 5)})),
    "bytes behind": ("expected 24 bytes of tensors, as the header says, got 25", packed({"a": WHOLE}, b"\0" * 25)),
    "bytes missing": ("expected 24 bytes of tensors, as the header says, got 23", packed({"a": WHOLE}, b"\0" * 23)),
    "metadata a list": ("metadata of texts", packed({"__metadata__": [], "a": WHOLE})),
    "metadata of numbers": ("metadata of texts", packed({"__metadata__": {"x": 1}, "a": WHOLE})),
    "manifest none": ("as the manifest, got invalid JSON", packed({"__metadata__": {"tdc": "{"}, "a": WHOLE})),
    "manifest of another shape": ("at a: not as", packed({"__metadata__": {"tdc": ""}, "a": f32(0, 24, 2, 3)})),
    "manifest of other names": ("at a: not as in the header", packed({"__metadata__": {"tdc": ""}, "b": WHOLE})),
    "more than the manifest": (
        "2 names for 1", packed({"__metadata__": {"tdc": ""}, "a": WHOLE, "b": f32(24, 28, 1)}, b"\0" * 28)
    ),
    "manifest with a key twice": ("that do not", packed({"__metadata__": {"tdc": "twice"}, "a": WHOLE})),
}  # fmt: skip
TENSOR = {"kind": "tensor", "dtype": "float32", "shape": [6]}
ROOT = {"kind": "node", "batch_shape": [], "entries": {"a": TENSOR}}
TWICE = {
    "kind": "node", "batch_shape": [],
    "entries": {"a.b": TENSOR, "a": {"kind": "node", "batch_shape": [], "entries": {"b": TENSOR}}},
}  # fmt: skip


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("name", FILES)
def test_bad_files(path: Path, name: str, mode: Any):
    expected, data = FILES[name]
    for marker, root in (('"tdc": ""', ROOT), ('"tdc": "twice"', TWICE)):
        if marker.encode() in data:  # a manifest in the place of a word
            text = data[8:].split(b"\0")[0].decode().replace(marker, f'"tdc": {json.dumps(sealed(root).decode())}')
            data = packed(text.encode(), b"\0" * data.count(b"\0", 8))
    path.write_bytes(data)
    before, descriptors = contents(path.parent), len(os.listdir("/proc/self/fd"))
    with pytest.raises(FormatError) as caught:
        from_safetensors(path, mode=mode)
    assert expected in str(caught.value)
    assert "\nhint: " in str(caught.value)
    assert contents(path.parent) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_file_cut_anywhere(path: Path):
    to_safetensors(every_kind(), path)
    data = path.read_bytes()
    for size in [*range(0, len(data), 61), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(FormatError):
            from_safetensors(path)
        assert path.stat().st_size == size


def test_wrong_arguments_are_those_of_this_function(path: Path):
    to_safetensors(TensorDict({"x": torch.ones(1)}), path)
    wrong: list[tuple[str, Any]] = [("classes", ["Point"]), ("classes", TensorDict), ("mode", "w")]
    for name, value in wrong:
        with pytest.raises(DtypeError, match=r"^tdc\.io\.from_safetensors: expected (tensorclasses|mode)"):
            from_safetensors(path, **{name: value})


def test_what_is_no_file(path: Path):
    os.mkfifo(path)
    for wrong in (path, path.parent):
        with pytest.raises(FormatError, match="a folder or a device"):
            from_safetensors(wrong)
    with pytest.raises(FormatError, match="nothing at"):
        from_safetensors(path.with_name("nothing"))
    for overwrite in (False, True):
        for wrong in (path, path.parent):
            with pytest.raises(
                FormatError, match="to_safetensors: expected a path where nothing is, got a folder, a link"
            ):
                to_safetensors(TensorDict({"x": torch.ones(1)}), wrong, overwrite=overwrite)


@pytest.mark.parametrize(
    ("td", "text"),
    [
        (TensorDict({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}), r"at a\.b: a\.b"),
        (TensorDict({"x.values": torch.ones(1), "x": tdc.pack([torch.ones(1)])}, [1]), r"at x \(values\): x\.values"),
        (TensorDict({"__metadata__": torch.ones(1)}), "at __metadata__: __metadata__"),
        (TensorDict({"\udc80": torch.ones(1)}), r"at '\\udc80'"),
    ],
)
def test_names_that_clash(path: Path, td: TensorDict, text: str):
    with pytest.raises(FormatError, match=text):
        to_safetensors(td, path)
    assert not list(path.parent.iterdir())


def test_nothing_is_replaced_unasked(path: Path, monkeypatch: pytest.MonkeyPatch):
    to_safetensors(TensorDict({"x": torch.ones(1)}), path)
    old = from_safetensors(path)
    with pytest.raises(FormatError, match=r"got a file at 'file.safetensors'\nhint: overwrite=True"):
        to_safetensors(TensorDict({"x": torch.zeros(1)}), path)
    monkeypatch.setattr("tdc.io.publish.check_no_file", lambda *args: None)  # another writer comes first
    with pytest.raises(FileExistsError):
        to_safetensors(TensorDict({"x": torch.zeros(1)}), path)
    to_safetensors(TensorDict({"x": torch.zeros(1)}), path, overwrite=True)
    assert from_safetensors(path)["x"] == 0
    assert old["x"] == 1
    assert os.listdir(path.parent) == [path.name]


def test_file_systems_without_links(path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refuse)
    to_safetensors(TensorDict({"x": torch.ones(1)}), path)
    assert from_safetensors(path)["x"] == 1
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("there", [True, False])
def test_a_file_too_large(path: Path, there: bool):
    if there:
        to_safetensors(TensorDict({"x": torch.ones(1)}), path)
    before = contents(path.parent)
    code = f"""
import resource, torch, tdc
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
try:
    tdc.io.to_safetensors(tdc.TensorDict({{"b": torch.zeros(10000)}}), {str(path)!r}, overwrite=True)
except OSError as error:
    print(error.errno)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(errno.EFBIG)]
    assert contents(path.parent) == before


def test_fuzz():
    counts = soak.fuzz_packed(400, 1)
    assert not [name for name, count in counts.items() if count and soak.is_bad(name)], counts


def test_fuzz_finds_faults(monkeypatch: pytest.MonkeyPatch):
    def trusting(top: dict[str, Any], size: int) -> Any:
        return {n: (Stored(KNOWN[x["dtype"]], tuple(x["shape"])), x["data_offsets"][0]) for n, x in top.items()}

    monkeypatch.setattr("tdc.io.packed.check_entries", trusting)
    assert any(soak.is_bad(outcome) for outcome in soak.fuzz_packed(100, 1))
