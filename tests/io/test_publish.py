"""A store appears whole or not at all: failures on the way, writers that died, two writers, a reader across a swap."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import soak
import torch
from soak import seen, version

import tdc
from tdc import FormatError, TensorDict
from tdc.io import load, manifest, memmap_empty, publish, save

SMALL = TensorDict({"a": torch.ones(5), "b": {"c": torch.zeros(3)}})


@pytest.fixture(params=["fresh", "overwrite"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A path where nothing is, or a store of version 1."""
    if request.param == "overwrite":
        save(version(1, 3, 10), tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    save(version(1, 3, 10), tmp_path / "store")
    return tmp_path / "store"


def failing(numbers: Any, code: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of which some calls fail, counted from 0; with code 0 as if somebody pressed Ctrl-C."""
    calls = count()

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) in numbers:
            raise OSError(code, os.strerror(code)) if code else KeyboardInterrupt
        return original(*args, **kwargs)

    return call


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES, 0])
@pytest.mark.parametrize(
    ("name", "numbers"), [("write", range(4)), ("fsync", range(7)), ("rename", [0]), ("mkdir", range(2))]
)
def test_what_fails_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch, code: int, name: str, numbers: Any):
    before, descriptors = seen(path), len(os.listdir("/proc/self/fd"))
    for number in numbers:
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing([number], code, getattr(os, name)))
            with pytest.raises(OSError if code else KeyboardInterrupt):
                save(version(2, 3, 10), path, overwrite=True)
        assert seen(path) == before or (name == "fsync" and number == 6)  # that of the parent comes last
        assert os.listdir(path.parent) == ["store"] * path.exists()
        assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.cases(0, 1)
def test_a_file_too_large(path: Path):
    """The limit of the process stands in for a full disk: the system itself refuses."""
    code = f"""
import resource, torch, tdc
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
td = tdc.TensorDict({{"a": torch.zeros(10), "b": torch.zeros(10000)}})
for make in (tdc.io.save, tdc.io.memmap_empty):
    try:
        make(td, {str(path)!r}, overwrite=True)
    except OSError as error:
        print(error.errno)
"""
    before = seen(path)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(errno.EFBIG)] * 2
    assert seen(path) == before
    assert os.listdir(path.parent) == ["store"] * path.exists()


def test_short_writes(path: Path, monkeypatch: pytest.MonkeyPatch):
    original = os.write
    monkeypatch.setattr(os, "write", lambda file, data: original(file, data[:7]))
    save(version(2, 3, 10), path, overwrite=True)
    assert seen(path) == "version 2"


def test_nothing_is_replaced_unasked(store: Path):
    with pytest.raises(FormatError, match=r"got a store at 'store'\nhint: overwrite=True, or choose another path"):
        save(SMALL, store)
    with pytest.raises(FormatError, match=r"tdc.io.memmap_empty: .*got a store at 'store'"):
        memmap_empty(SMALL, store)
    with pytest.raises(FormatError, match=r"tdc.memmap: .*got a store at 'store'"):
        SMALL.memmap(store)
    assert seen(store) == "version 1"


def test_only_stores_are_replaced(tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "meta.json").write_text('{"shape": [3]}')
    with pytest.raises(FormatError, match="a folder that is no store at 'data'"):
        save(SMALL, tmp_path / "data", overwrite=True)
    assert os.listdir(tmp_path / "data") == ["meta.json"]


def test_a_damaged_store_is_replaced(store: Path):
    (store / "meta.json").write_bytes((store / "meta.json").read_bytes()[:100])
    save(version(2, 3, 10), store, overwrite=True)
    assert seen(store) == "version 2"


def test_without_an_exchange(store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(publish, "exchange", lambda *args: False)
    save(version(2, 3, 10), store, overwrite=True)
    assert seen(store) == "version 2"
    assert os.listdir(store.parent) == ["store"]
    monkeypatch.setattr(os, "rename", failing([2], errno.EIO, os.rename))  # the attempt, aside, and this one
    with pytest.raises(OSError, match="Input/output"):
        save(version(3, 3, 10), store, overwrite=True)
    assert seen(store) == "version 2"
    assert os.listdir(store.parent) == ["store"]


@pytest.mark.parametrize("code", publish.NO_SWAP)
def test_systems_without_an_exchange(store: Path, monkeypatch: pytest.MonkeyPatch, code: int):
    class System:
        @staticmethod
        def renameat2(*args: Any) -> int:
            publish.ctypes.set_errno(code)
            return -1

    monkeypatch.setattr(publish.ctypes, "CDLL", lambda *args, **kwargs: System)
    save(version(2, 3, 10), store, overwrite=True)
    assert seen(store) == "version 2"
    monkeypatch.setattr(publish.ctypes, "CDLL", lambda *args, **kwargs: object())
    save(version(3, 3, 10), store, overwrite=True)
    assert seen(store) == "version 3"


def test_a_writer_that_died_between_two_renames(store: Path, monkeypatch: pytest.MonkeyPatch):
    """The old store is set aside, and stays there until a later save has succeeded."""
    aside = f"{prefix(store)}.old-0123"
    store.rename(store.with_name(aside))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing([0], errno.ENOSPC, os.write))
        with pytest.raises(OSError, match="No space"):
            save(version(2, 3, 10), store)
    assert seen(store.with_name(aside)) == "version 1"
    save(version(2, 3, 10), store)
    assert os.listdir(store.parent) == ["store"]


def prefix(store: Path) -> str:
    return f".tdc-{publish.hashlib.sha256(store.name.encode()).hexdigest()[:16]}"


def test_leftovers_are_swept(store: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(publish, "remove", lambda *args: None)  # as if killed between the exchange and this
        save(version(2, 3, 10), store, overwrite=True)
    (old,) = [name for name in os.listdir(store.parent) if name != "store"]
    assert seen(store.parent / old) == "version 1"
    lock = os.open(store.parent / old, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # a writer that is at work
    save(version(3, 3, 10), store, overwrite=True)
    assert sorted(os.listdir(store.parent)) == sorted([old, "store"])
    os.close(lock)
    other = store.parent / ".tdc-of-another-store"
    other.mkdir()
    save(version(4, 3, 10), store, overwrite=True)
    assert sorted(os.listdir(store.parent)) == [other.name, "store"]


def test_file_systems_without_locks(store: Path, monkeypatch: pytest.MonkeyPatch):
    """There a save works, and nothing is swept, since nobody knows whether its writer is alive."""
    leftover = store.with_name(f"{prefix(store)}-0123")
    leftover.mkdir()
    monkeypatch.setattr(fcntl, "flock", failing(range(9), errno.ENOLCK, fcntl.flock))
    save(version(2, 3, 10), store, overwrite=True)
    assert sorted(os.listdir(store.parent)) == [leftover.name, "store"]


def test_a_folder_swept_before_it_was_locked(path: Path, monkeypatch: pytest.MonkeyPatch):
    original, calls = publish.lock, []

    def lock(folder: int) -> bool | None:
        if not calls:
            calls.append(folder)
            (name,) = [n for n in os.listdir(path.parent) if n != "store"]
            os.rmdir(path.parent / name)
        return original(folder)

    monkeypatch.setattr(publish, "lock", lock)
    save(version(2, 3, 10), path, overwrite=True)
    assert seen(path) == "version 2"
    assert calls


def overtaken(path: Path, overwrite: bool) -> None:
    """A writer that is at work while another one saves to the same path."""
    with publish.staged("io.save", path, overwrite, False) as folder:
        os.close(os.open("unfinished", os.O_WRONLY | os.O_CREAT, dir_fd=folder))
        save(version(2, 3, 10), path)
        assert seen(path) == "version 2"


def test_two_writers(tmp_path: Path):
    """Whoever comes last wins, whole, or is told that somebody came first."""
    overtaken(tmp_path / "new", True)
    assert os.listdir(tmp_path / "new") == ["unfinished"]
    with pytest.raises(FormatError, match="got a store at 'store'"):
        overtaken(tmp_path / "store", False)
    assert seen(tmp_path / "store") == "version 2"
    assert sorted(os.listdir(tmp_path)) == ["new", "store"]


def test_a_reader_across_a_swap(store: Path, monkeypatch: pytest.MonkeyPatch):
    """What a reader has opened is replaced under its hands: it begins anew, and gets all of one version."""
    original, versions = load_module().mapped, iter([2, 3, 4])

    def mapped(*args: Any) -> Any:
        n = next(versions, None)
        if n is not None:
            save(version(n, 3, 10), store, overwrite=True, sync=False)
        return original(*args)

    monkeypatch.setattr(load_module(), "mapped", mapped)
    assert {float(x[0]) for x in load(store).values(True, True)} == {4.0}


def load_module() -> Any:
    return sys.modules["tdc.io.load"]


def test_maps_outlive_their_store(store: Path):
    old = load(store)
    save(version(2, 3, 10), store, overwrite=True)
    assert {float(x[0]) for x in old.values(True, True)} == {1.0}
    assert seen(store) == "version 2"


def test_a_store_may_be_replaced_by_what_is_mapped_from_it(store: Path):
    save(load(store) + 1, store, overwrite=True)
    save(load(store).set("more", torch.full((2,), 2.0)), store, overwrite=True)
    assert seen(store) == "version 2"


def test_files_are_on_disk_before_they_are_seen(path: Path, monkeypatch: pytest.MonkeyPatch):
    events: list[str] = []
    for name in ("fsync", "rename", "write"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, run=original, **k: events.append(name) or run(*a, **k))
    save(SMALL, path, overwrite=True)
    assert events == ["write", "fsync", "write", "fsync", "fsync", "write", "fsync", "fsync", "rename", "fsync"]
    events.clear()
    save(SMALL, path, overwrite=True, sync=False)
    assert "fsync" not in events


def test_other_systems_are_refused(store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "byteorder", "big")
    for call in (lambda: save(SMALL, store), lambda: load(store)):
        with pytest.raises(tdc.UnsupportedError, match="a little-endian POSIX system, got linux, big-endian"):
            call()


def test_paths_that_are_none(store: Path):
    for path, text in (
        ("", "a path, got ''"),
        ("a\0b", "a path, got"),
        ("\ud800", "a path, got"),
        ("/", "ends in a name"),
        ("..", "ends in a name"),
    ):
        with pytest.raises(FormatError, match=text):
            save(SMALL, path)
    with pytest.raises(FileNotFoundError):
        save(SMALL, store.parent / "no" / "folder")


# -- the soak, in small, and what it would find


def test_fuzz():
    counts = soak.fuzz(300, 1)
    assert not [name for name, count in counts.items() if count and soak.is_bad(name)], counts
    assert sum(counts.values()) == 300


@pytest.mark.slow
def test_fuzz_finds_faults(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manifest, "check_head", lambda op, top: None)
    assert any(soak.is_bad(name) for name in soak.fuzz(300, 1))
    monkeypatch.undo()
    monkeypatch.setattr(manifest, "check_fit", lambda op, table: None)
    assert any("BAD" in name for name in soak.fuzz(300, 1))


@pytest.mark.sweep
def test_soak():
    command = [sys.executable, soak.__file__, "--fuzz", "2000", "--kills", "20", "--seconds", "2"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all well" in run.stdout
