"""Damaged and hostile stores: one error that names what is wrong, nothing changed on disk, nothing opened outside."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import Change, Point, contents, entry, every_kind, opened_outside, put, rewrite, root_of, sealed

import tdc
from tdc import FormatError, TensorDict
from tdc.io import load, save


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store beside a file that nobody may touch."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"s" * 48)
    save(every_kind(), tmp_path / "store")
    return tmp_path / "store"


def loading(store: Path, **options: Any) -> str:
    """The message of the one error that loading raises; nothing on disk is changed, and nothing else is opened."""
    before, descriptors = contents(store.parent), len(os.listdir("/proc/self/fd"))
    with opened_outside(store) as strangers, pytest.raises(FormatError) as caught:
        load(store, **options)
    assert contents(store.parent) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not strangers
    text = str(caught.value)
    assert text.startswith("tdc.io.load: expected ")
    assert "\nhint: " in text
    return text


def drop(*keys: str, field: str) -> Change:
    """Take a field from an entry."""
    return lambda root: entry(root, *keys).pop(field) and None


def replace(key: str, value: Any) -> Change:
    """Give the root another entry."""
    return lambda root: root["entries"].update({key: value})


def part(key: str, name: str, **fields: Any) -> Change:
    """Give a tensor of a ragged leaf other fields."""
    return lambda root: entry(root, key)[name].update(fields)


def raw(text: str) -> Change:
    """Another manifest."""
    return lambda root: text.encode("utf-8", "surrogatepass")


def head(**fields: Any) -> Change:
    """Other fields at the top of the manifest."""
    return lambda root: sealed(root, **fields)


TIE = {"kind": "tie", "key": ["weight"]}
F32 = {"kind": "tensor", "dtype": "float32", "shape": [3]}
NODE = {"kind": "node", "batch_shape": [3], "entries": {}}
DEEP = "[" * 100_000 + "]" * 100_000
TOP = "strict JSON as the manifest, got invalid JSON"
MANIFESTS: dict[str, tuple[str, Change]] = {  # what the message holds, and how a manifest gets there
    "shape huge": ("weight: its file has 48 bytes", put("weight", shape=[3, 10**12])),
    "shape larger": ("weight: its file has 48 bytes instead of 192", put("weight", shape=[3, 16])),
    "shape smaller": ("weight: its file has 48 bytes instead of 36", put("weight", shape=[3, 3])),
    "shape negative": ("weight: a size", put("weight", shape=[3, -4])),
    "shape overflows": ("weight: a tensor of 2**62", put("weight", shape=[3, 2**40, 2**40])),
    "shape overflows, empty": ("weight: a tensor of 2**62", put("weight", shape=[3, 0, 2**40, 2**40])),
    "shape of floats": ("weight: a size", put("weight", shape=[3.0, 4])),
    "shape of bools": ("weight: a size", put("weight", shape=[3, True])),
    "shape of strings": ("weight: a size", put("weight", shape=["3", 4])),
    "shape a string": ("weight: no shape", put("weight", shape="3")),
    "shape of many dims": ("weight: no shape", put("weight", shape=[3, 4] + [1] * 63)),
    "shape too large for an int": ("weight: a size", put("weight", shape=[3, 2**62])),
    "number of 5000 digits": (TOP, lambda root: json.dumps(root).replace("[3, 4]", "[" + "9" * 5000 + "]", 1).encode()),
    "dtype of another size": ("weight: its file has 48 bytes instead of 96", put("weight", dtype="float64")),
    "dtype unknown": ("weight: the dtype 'float33'", put("weight", dtype="float33")),
    "dtype no string": ("weight: the dtype 3", put("weight", dtype=3)),
    "dtype quantized": ("weight: the dtype 'qint8'", put("weight", dtype="qint8")),
    "dtype missing": ("weight: tensor with no 'dtype'", drop("weight", field="dtype")),
    "batch shape": ("weight: shape [3, 4] in a node of batch shape [4]", put(batch_shape=[4])),
    "batch shape negative": ("the root: a size", put(batch_shape=[-3])),
    "batch shape of a node": ("info.q: shape", put("info", batch_shape=[3, 5])),
    "batch shape of an empty node": ("empty: shape", put("empty", batch_shape=[2])),
    "key outside": ("../x: its file is missing", replace("../x", F32)),
    "key absolute": ("/etc/passwd: its file is missing", replace("/etc/passwd", F32)),
    "node outside": ("...x: its folder is missing", replace("..", {**NODE, "entries": {"x": F32}})),
    "key a lone surrogate": (r"'\udc80': its file is missing", replace("\udc80", F32)),
    "key with a new line": (r"'a\nb': its file is missing", replace("a\nb", F32)),
    "version 999": ("expected version 1 of the format, got version 999", head(version=999)),
    "version 0": ("got version 0", head(version=0)),
    "version 2": ("got version 2", head(version=2)),
    "version true": ("got no version", head(version=True)),
    "version of text": ("got no version", head(version="1")),
    "another format": ("'tdc.store'", head(format="zarr")),
    "field at the top": ("the four fields", head(more=1)),
    "digest": ("one that was changed since", head(sha256="0" * 64)),
    "digest no text": ("one that was changed since", head(sha256=None)),
    "tie to itself": ("weight: a tie to no stored tensor", replace("weight", TIE)),
    "tie in a loop": ("a tie to no stored tensor", lambda r: r["entries"].update(weight={**TIE, "key": ["tied"]})),
    "tie to a tie": ("a tie to no stored tensor", replace("third", {**TIE, "key": ["tied"]})),
    "tie to a node": ("tied: a tie to no stored tensor", put("tied", key=["info"])),
    "tie to nowhere": ("tied: a tie to no stored tensor", put("tied", key=["nowhere"])),
    "tie to the root": ("tied: a tie to no stored tensor", put("tied", key=[])),
    "tie to no part": ("tied: a tie to no stored tensor", put("tied", part="values")),
    "tie to another shape": ("tied: shape [4] in a node", put("tied", key=["text"], part="offsets")),
    "tie with a bad key": ("tied: a name", put("tied", key=[1])),
    "tie with a text": ("tied: a key path", put("tied", key="weight")),
    "kind a list": ("weight: nothing of a known kind", put("weight", kind=["tensor"])),
    "kind unknown": ("weight: nothing of a known kind", put("weight", kind="pickle")),
    "kind missing": ("weight: nothing of a known kind", drop("weight", field="kind")),
    "entry a list": ("weight: nothing of a known kind", replace("weight", [1])),
    "entry null": ("weight: nothing of a known kind", replace("weight", None)),
    "field unknown": ("weight: tensor with 'path', which is unknown", put("weight", path="../outside/secret")),
    "entries a list": ("the root: entries that are no object", put(entries=[])),
    "root a tensor": ("the root: nothing of a known kind", lambda r: sealed(F32)),
    "root a tie": ("the root: nothing of a known kind", lambda r: sealed(TIE)),
    "class no text": ("info: a name", put("info", **{"class": 3})),
    "ragged_idx 9": ("text: jagged with dtypes or shapes", put("text", ragged_idx=9)),
    "ragged_idx 0": ("text: jagged with dtypes or shapes", put("text", ragged_idx=0)),
    "ragged_idx 2": ("text (values)", part("text", "values", shape=[6, 5])),
    "offsets of floats": ("text: jagged with dtypes or shapes", part("text", "offsets", dtype="float64")),
    "offsets of two dims": ("text: jagged with dtypes or shapes", part("text", "offsets", shape=[4, 1])),
    "offsets of another batch": ("text: shape [2, -1, 5]", part("text", "offsets", shape=[3])),
    "bound too short": ("text: jagged tdc.NestedTensor: expected max_length", put("text", max_length=[2])),
    "bound too long": ("images: ", put("images", max_length=[2**61, 2**61])),
    "bound of two dims": ("text: jagged with dtypes or shapes", put("text", max_length=[3, 3])),
    "shapes of one dim": ("images: jagged with dtypes or shapes", part("images", "shapes", shape=[6])),
    "part a node": ("text: nothing of a known kind", put("text", values={"kind": "node"})),
    "lengths of another batch": ("padded: padded with dtypes or shapes", part("padded", "lengths", shape=[1, 3])),
    "ragged dims apart": ("padded: padded with dtypes or shapes", put("padded", ragged_dims=[1, 3])),
    "ragged dims none": ("padded: padded with dtypes or shapes", put("padded", ragged_dims=[])),
    "objects too few": ("caption: objects with dtypes or shapes", put("caption", values=[1])),
    "objects no list": ("caption: objects that are no list", put("caption", values={})),
    "static an object": ("split: a Static with an object", put("split", value=[{}])),
    "not JSON": (TOP, raw("nonsense")),
    "empty": (TOP, raw("")),
    "top a list": ("'tdc.store'", raw("[1]")),
    "deep": ("nested too deeply", raw(f'{{"format":"tdc.store","version":1,"sha256":"","root":{DEEP}}}')),
    "deep nodes": ("64 levels", lambda r: sealed(nodes(70))),
    "NaN": ("NaN is no JSON", lambda r: json.dumps({"x": float("nan")}).encode()),
    "infinite": ("a number is too large", lambda r: b'{"x": 1e999}'),
    "key twice": ("a key is there twice", lambda r: b'{"format":"tdc.store","format":"tdc.store"}'),
    "no UTF-8": (TOP, lambda r: b"\xff\xfe{}"),
    "two documents": (TOP, lambda r: sealed(r) + b"{}"),
    "too large": ("at most 67108864 bytes", lambda r: sealed(r) + b" " * (64 << 20)),
}  # fmt: skip


def nodes(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"kind": "node", "batch_shape": [], "entries": {}}
    for _ in range(depth):
        inner = {"kind": "node", "batch_shape": [], "entries": {"a": inner}}
    return inner


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests(store: Path, name: str):
    expected, change = MANIFESTS[name]
    rewrite(store, change)
    text = loading(store)
    assert expected in text
    assert len(text) < 1000
    assert "\x00" not in text


def numbers(store: Path, file: str, *values: int) -> None:
    (store / file).write_bytes(torch.tensor(values).numpy().tobytes())


CONTENT = {
    "offsets decrease": ("text: jagged with offsets", "text.offsets.memmap", (0, 3, 2, 5)),
    "offsets begin late": ("text: jagged with offsets", "text.offsets.memmap", (1, 2, 2, 5)),
    "offsets end early": ("text: jagged with offsets", "text.offsets.memmap", (0, 2, 2, 4)),
    "offsets past the values": ("text: jagged with offsets", "text.offsets.memmap", (0, 2, 9, 5)),
    "offsets wrap around": ("text: jagged with offsets", "text.offsets.memmap", (0, 2**63 - 1, -2, 5)),
    "sizes of other examples": ("images: jagged with sizes", "images.shapes.memmap", (3, 3, 0, 1, 4, 2)),
    "sizes negative": ("images: jagged with sizes", "images.shapes.memmap", (-2, -3, 0, 1, 4, 2)),
    "sizes wrap around": ("images: jagged with sizes", "images.shapes.memmap", (2, 3, 2**32, 2**32, 4, 2)),
    "lengths negative": ("padded: padded with lengths", "padded.lengths.memmap", (-1, 0, 3)),
    "lengths past the data": ("padded: padded with lengths", "padded.lengths.memmap", (2, 0, 4)),
}


@pytest.mark.parametrize("name", CONTENT)
def test_what_kernels_trust_is_read(store: Path, name: str):
    expected, file, values = CONTENT[name]
    numbers(store, file, *values)
    assert expected in loading(store)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(path.parents[1] / "outside" / "secret" if path.suffix else path.parents[1] / "outside")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def listening(path: Path) -> None:
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(path.name)
    os.chdir(here)


def device(path: Path) -> None:
    path.unlink()
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("only root makes devices")


FILES = {
    "leaf a link": ("weight: its file is a link", "weight.memmap", link),
    "leaf a FIFO": ("weight: its file is a link, a folder, a pipe", "weight.memmap", fifo),
    "leaf a socket": ("weight: its file is a link, a folder, a pipe", "weight.memmap", listening),
    "leaf a device": ("weight: its file is a link, a folder, a pipe", "weight.memmap", device),
    "leaf a folder": ("weight: its file is a link, a folder", "weight.memmap", folder),
    "leaf missing": ("weight: its file is missing", "weight.memmap", Path.unlink),
    "part missing": ("text (offsets): its file is missing", "text.offsets.memmap", Path.unlink),
    "node a link": ("info.q: a file or a link where a folder should be", "info", link),
    "node missing": ("info.q: its folder is missing\nat info.deep.id: its folder is missing", "info", shutil.rmtree),
    "manifest a FIFO": ("one where its file is a link, a folder, a pipe", "meta.json", fifo),
    "manifest a link": ("one where its file is a link", "meta.json", link),
    "manifest a folder": ("one where its file is a link, a folder", "meta.json", folder),
    "manifest missing": ("one where its file is missing", "meta.json", Path.unlink),
}


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("name", FILES)
def test_files(store: Path, name: str, mode: Any):
    expected, file, change = FILES[name]
    change(store / file)
    assert expected in loading(store, mode=mode)


@pytest.mark.cases(1)
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_files_of_other_sizes(store: Path, mode: Any):
    """Every file cut at up to 20 places, and longer by one byte."""
    for path in [p for p in store.rglob("*") if p.is_file()]:
        data, size = path.read_bytes(), path.stat().st_size
        *above, name = path.relative_to(store).parts
        key = ".".join([*above, name.split(".")[0]])
        for cut in sorted({0, size - 1, size + 1, *[i * 7919 % size for i in range(20)]} - {size}):
            path.write_bytes((data + b"\0")[:cut])
            text = loading(store, mode=mode)
            if name != "meta.json":
                assert f"at {key}" in text
                assert f"its file has {cut} bytes instead of {size}" in text
        path.write_bytes(data)
    load(store, mode=mode)


def test_what_is_legal(store: Path):
    """A hard link is the file itself, and a sparse file has zeros; a description of the same size is another tensor."""
    (store / "weight.memmap").unlink()
    os.link(store.parent / "outside" / "secret", store / "weight.memmap")
    assert load(store)["weight"].shape == (3, 4)
    (store / "weight.memmap").unlink()
    with open(store / "weight.memmap", "wb") as file:
        file.truncate(48)
    assert not load(store)["weight"].any()
    rewrite(store, put("weight", dtype="int32"))
    assert load(store)["weight"].dtype == torch.int32


def test_the_path_itself(store: Path):
    store.with_name("link").symlink_to(store)
    text = "a file or a link"
    assert text in loading(store.with_name("link"))
    assert text in loading(store / "meta.json")
    assert "nothing at" in loading(store.with_name("nowhere"))
    assert "meta.json" in loading(store.with_name("outside"))
    for path in (store.with_name("link"), store / "meta.json", store.with_name("outside")):
        before = contents(store.parent)
        for overwrite in (False, True):
            with pytest.raises(
                FormatError, match=r"tdc.io.save: expected a path where nothing is, got a (file|folder)"
            ):
                save(TensorDict({"x": torch.ones(1)}), path, overwrite=overwrite)
        assert contents(store.parent) == before


def test_classes(store: Path):
    rewrite(store, replace_fields)
    assert "point: other fields than Point has: xy, zz; leave it out" in loading(store, classes=[Point])
    assert load(store)["point", "name"] == "here"


def replace_fields(root: dict[str, Any]) -> None:
    root["entries"]["point"]["entries"] = {"name": root["entries"]["point"]["entries"]["name"], "zz": TIE}


def test_keys_and_options(store: Path):
    with pytest.raises(
        tdc.KeyPathError, match=r"tdc.io.load: expected an existing key, got 'wieght'\nhint: .*'weight'"
    ):
        load(store, "wieght")
    assert "one without" in loading(store, verify=True)
    save(every_kind(), store, overwrite=True, checksums=True)
    assert "expected a store without checksums for mode='r+'" in loading(store, mode="r+")


def test_keys_with_one_file_name(tmp_path: Path):
    ragged = tdc.pack([torch.ones(1)])
    for td, text in (
        (TensorDict({"A": torch.ones(1), "a": torch.ones(1)}), r"at a: a\.memmap, as A"),
        (TensorDict({"n": {"Straße": torch.ones(1), "STRAßE": torch.ones(1)}}), r"at n\.STRAßE: .*, as n\.Straße"),
        (TensorDict({"x.values": torch.ones(1), "x": ragged}, [1]), r"at x: x\.values\.memmap, as x\.values"),
        (TensorDict({"x": torch.ones(1), "x.memmap": {"y": torch.ones(1)}}), r"at x: x\.memmap, as x\.memmap"),
        (TensorDict({"meta.json": {"y": torch.ones(1)}}), r"at meta\.json: meta\.json, as the manifest"),
    ):
        with pytest.raises(FormatError, match=text):
            save(td, tmp_path / "store")
    assert not list(tmp_path.iterdir())


def test_root_of_is_what_the_tests_change(store: Path):
    rewrite(store, lambda root: None)
    load(store)
    assert root_of(store)["kind"] == "node"
